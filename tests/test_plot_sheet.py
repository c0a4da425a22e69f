"""A sheet: what is still is drawn and painted once, and nobody can see that it was."""

from __future__ import annotations

import io

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from fa2lab import plot, widgets, widgets_heads, widgets_parity, widgets_tiles
from fa2lab.plot_sheet import Sheet, same
from fa2lab.widgets_merge import SPLIT_ROWS

MASKED = next(name for name in SPLIT_ROWS if name.startswith("masked"))


def look(canvas: FigureCanvasAgg) -> np.ndarray:
    canvas.draw()
    return np.array(canvas.buffer_rgba())


@pytest.fixture
def count(monkeypatch):
    """How often axes have been cleared and drawn."""
    counted = dict.fromkeys(("clear", "draw"), 0)
    for name in counted:
        was = getattr(Axes, name)

        def counting(self, *rest, name=name, was=was):
            counted[name] += 1
            return was(self, *rest)

        monkeypatch.setattr(Axes, name, counting)
    return counted


# The views: moves that only look elsewhere, and others, of which the last goes back to the start

WALKS = dict(T=40, H=2, D=4, tile=(8, 8), head=0)
GALLERIES = dict(T=12, H=3, D=4, head=0, key=3, pattern="random", beside=("input", "text"))
BENCHES = dict(T=12, H=2, hd=4, head=0)
VIEWS = {
    "tiles": (
        (widgets.tiles, widgets.walk, widgets.WALK_SIZE, widgets_tiles._traced, WALKS),
        (dict(row=9), dict(row=25)),
        (dict(head=1), dict(T=16, row=3, causal=False), WALKS | dict(causal=True, row=9)),
    ),
    "head_gallery": (
        (widgets.head_gallery, widgets.gallery, widgets.GALLERY_SIZE, widgets_heads._run, GALLERIES),
        (dict(row=11), dict(row=2), dict(key=11)),
        (dict(head=2, T=50, row=49, beside=("nothing", "")), GALLERIES | dict(row=11)),
    ),
    "parity": (
        (widgets.parity, widgets.bench, widgets.BENCH_SIZE, widgets_parity._judged, BENCHES),
        (dict(row=11), dict(row=2)),
        (dict(head=1, attn=False, pattern="huge"), dict(attn=True, pattern="random", row=11, head=0)),
    ),
    "merge_tree": (
        (widgets.merge_tree, widgets.merges, widgets.MERGE_SIZE, None, {}),
        (dict(done=0), dict(done=2), dict(done=1)),
        (dict(order="right to left"), dict(row=MASKED), dict(row="six numbers", order="left to right", done=0)),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_picture_reached_by_moves_is_the_one_drawn_at_once(name, count):
    """Pixel by pixel; and a move that only looks elsewhere clears no axes and draws none but what moves on them."""
    (view_of, plain, size, kept, start), looks, others = VIEWS[name]
    device = {} if kept is None else {"device": "numpy"}
    view = view_of(**start, **looks[0], **device)
    values, pictures = start | looks[0], []
    for move in (*looks, *others, looks[0]):
        values |= move
        count.update(clear=0, draw=0)
        view.set(**move)
        counted, moved = dict(count), np.array(view._canvas.buffer_rgba())
        assert move in others or counted == dict(clear=0, draw=0), move
        figure = plot.figure(*size)
        canvas = FigureCanvasAgg(figure)
        assert plain(**values, **device).draw(figure) == view.image.tooltip
        np.testing.assert_array_equal(moved, look(canvas), f"{move}")
        pictures.append(moved)
    np.testing.assert_array_equal(pictures[-1], pictures[0])
    assert (pictures[0] != pictures[1]).any()
    view.close()
    if kept is not None:
        kept.cache_clear()


@pytest.mark.parametrize("name", VIEWS)
def test_another_picture_on_the_same_figure_is_as_on_a_fresh_one(name):
    (_, plain, size, kept, start), looks, others = VIEWS[name]
    device = {} if kept is None else {"device": "numpy"}
    used, fresh = FigureCanvasAgg(plot.figure(*size)), FigureCanvasAgg(plot.figure(*size))
    plain(**start, **looks[0], **device).draw(used.figure)
    shown = plain(**(start | looks[0] | others[0]), **device)
    assert shown.draw(used.figure) == shown.draw(fresh.figure)
    np.testing.assert_array_equal(look(used), look(fresh))
    if kept is not None:
        kept.cache_clear()


# The sheet itself


class Dots:
    """Two panels: a frame and a title that stay, dots over them; how often each frame was drawn."""

    def __init__(self, *, keep: bool):
        self.canvas = FigureCanvasAgg(plot.figure(3, 2))
        self.sheet = Sheet(self.canvas.figure, keep=keep)
        self.frames: list[tuple[str, int]] = []

    def show(self, top: int, dots: dict[str, list[float]]) -> np.ndarray:
        for ax, (name, y) in zip(self.sheet.axes(lambda figure: figure.subplots(1, 2)), dots.items(), strict=True):
            (line,) = self.sheet.still(self.frame, ax, name, top=top)
            line.set_ydata([0, y[0]])
            self.sheet.over(line, ax.set_title(f"{name} {y[0]:g}", y=1.0))
            ax.plot(np.arange(len(y)), y, "o")
        return look(self.canvas)

    def frame(self, ax: Axes, name: str, *, top: int) -> list:
        ax.clear()
        self.frames.append((name, top))
        ax.set(xlim=(-1, 3), ylim=(0, top), xlabel=name)
        ax.axhspan(0, top / 2, hatch="//", zorder=1)
        return ax.plot([0, 2], [0, 0], "-", linewidth=6)


SHOWN = [(4, {"a": [1.0, 2, 3], "b": [3.0, 2, 1]}), (4, {"a": [2.0], "b": [3.0]}), (9, {"a": [2.0], "b": [3.0]})]


def test_a_kept_sheet_looks_like_any_other():
    kept, other = Dots(keep=True), Dots(keep=False)
    for top, dots in (*SHOWN, SHOWN[0]):
        np.testing.assert_array_equal(kept.show(top, dots), other.show(top, dots))
    assert kept.frames == other.frames == [(name, top) for top in (4, 9, 4) for name in "ab"]


def test_only_the_panel_that_has_changed_is_drawn(count):
    dots = Dots(keep=True)
    dots.show(*SHOWN[0])
    count.update(clear=0, draw=0)
    dots.show(*SHOWN[1])
    assert count == dict(clear=0, draw=0)
    dots.show(4, {"a": [2.0], "c": [3.0]})
    assert count == dict(clear=1, draw=1) and dots.frames == [("a", 4), ("b", 4), ("c", 4)]


def test_what_was_drawn_over_a_panel_goes():
    dots = Dots(keep=False)
    for top, shown in SHOWN[:2]:
        dots.show(top, shown)
    assert [len(ax.lines) for ax in dots.canvas.figure.axes] == [2, 2]
    assert dots.canvas.figure.axes[0].get_title() == "a 2"


def test_another_sharpness_is_painted_anew():
    kept, other = Dots(keep=True), Dots(keep=False)
    for dots in (kept, other):
        dots.show(*SHOWN[0])
        dots.canvas.figure.set_dpi(70)
    np.testing.assert_array_equal(kept.show(*SHOWN[0]), other.show(*SHOWN[0]))


def test_a_kept_sheet_can_be_saved():
    """As a whole, whatever the sharpness, and without pixels where there need be none."""

    def saved(figure: Figure, **options) -> bytes:
        content = io.BytesIO()
        figure.savefig(content, **options)
        return content.getvalue()

    kept, other = Dots(keep=True), Dots(keep=False)
    for dots in (kept, other):
        dots.show(*SHOWN[0])
    for dpi in (50, 90):
        one, two = (imread(io.BytesIO(saved(dots.canvas.figure, format="png", dpi=dpi))) for dots in (kept, other))
        np.testing.assert_array_equal(one, two)
    assert b"<image" not in saved(kept.canvas.figure, format="svg")
    np.testing.assert_array_equal(kept.show(*SHOWN[1]), other.show(*SHOWN[1]))


def test_after_an_error_the_panel_is_drawn_anew():
    sheet = Sheet(plot.figure(1, 1))
    (ax,) = sheet.axes(lambda figure: [figure.subplots()])

    def draw(ax: Axes, n: int) -> int:
        ax.clear()
        ax.set_title(str(n))
        return 6 // n

    assert sheet.still(draw, ax, 1) == 6
    with pytest.raises(ZeroDivisionError):
        sheet.still(draw, ax, 0)
    assert sheet.still(draw, ax, 1) == 6
    assert ax.get_title() == "1"


def test_the_figure_is_taken_over():
    figure = plot.figure(1, 1)
    figure.subplots()
    plot.footer(figure, "of another picture")
    sheet = Sheet(figure)
    assert figure.axes == [] and figure.texts == []
    assert sheet.axes(lambda figure: [figure.subplots()]) == figure.axes == sheet.axes(lambda _: pytest.fail("twice"))


@pytest.mark.parametrize(
    "other",
    [
        (np.zeros(2), [1, "a"], {"x": 1.0, "y": None}),
        (np.zeros((1, 3)), [1, "a"], {"x": 1.0, "y": None}),
        (np.zeros(3, np.float32), [1, "a"], {"x": 1.0, "y": None}),
        (np.array([0, 0, np.nan]), [1, "a"], {"x": 1.0, "y": None}),
        (np.zeros(3), (1, "a"), {"x": 1.0, "y": None}),
        (np.zeros(3), [1, "b"], {"x": 1.0, "y": None}),
        (np.zeros(3), [1], {"x": 1.0, "y": None}),
        (np.zeros(3), [1, "a"], {"x": 2.0, "y": None}),
        (np.zeros(3), [1, "a"], {"y": None, "x": 1.0}),
        (np.zeros(3), [1, "a"], {"x": 1.0, "y": np.zeros(1)}),
    ],
)
def test_inputs_are_compared_whole(other):
    inputs = (np.zeros(3), [1, "a"], {"x": 1.0, "y": None})
    assert same(inputs, (np.zeros(3), [1, "a"], {"x": 1.0, "y": None}))
    assert same(np.array([np.nan]), np.array([np.nan]))
    assert not same(inputs, other)
