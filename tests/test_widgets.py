"""The views: what they compute, what they show, and that nothing piles up, whatever is moved in whatever order."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import weakref
from pathlib import Path

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure
from views import click, count_figures, dim, fresh

import fa2lab as fa
from fa2lab import plot, widgets, widgets_failures, widgets_heads, widgets_parity, widgets_tiles
from fa2lab.live import CLICKABLE, View
from fa2lab.results import TILE_STATES


@pytest.fixture(autouse=True)
def nothing_kept(unpainted):
    """No figure of pyplot's, and no traced run beyond its test."""
    yield
    assert plt.get_fignums() == []
    widgets_tiles._traced.cache_clear()
    widgets_parity._judged.cache_clear()
    widgets_heads._run.cache_clear()
    widgets_failures._outcome.cache_clear()


# Tiles and traces


def test_walk_holds_the_kernel_beside_numpy(gpu):
    got = widgets.walk(T=33, H=3, D=40, head=2, row=32, device=gpu)
    assert got.result.adapter == str(gpu.adapter)
    assert got.result.attn.shape == (1, 3, 33, 33)
    np.testing.assert_array_equal(got.result.trace.state, got.exact.state)
    np.testing.assert_allclose(got.result.trace.m, got.exact.m, rtol=1e-5, atol=1e-5)
    assert got.comparison.ok and {row.field for row in got.comparison.rows} == {"state", "m", "l", "alpha"}
    assert "✓" in got.words


def test_walk_takes_tiles_and_has_the_letters(seat):
    got = widgets.walk(T=20, row=3, tile=(8, 4), device=seat)
    assert (got.result.trace.block_q, got.result.trace.block_k) == (8, 4)
    assert "".join(got.labels) == fa.data.SAMPLE_TEXT.read_text()[:20]
    assert widgets.walk(T=20, row=3, pattern="random", device=seat).labels is None


@pytest.mark.parametrize("where", [dict(head=2), dict(row=20), dict(head=-1)])
def test_walk_refuses_what_is_not_there(where):
    with pytest.raises(IndexError, match="head must be below H=2 and row below T=20"):
        widgets.walk(T=20, H=2, device="numpy", **({"row": 0} | where))


def test_head_and_row_run_no_kernel(monkeypatch):
    view = widgets.tiles(device="numpy", T=20, row=5)
    monkeypatch.setattr(widgets_tiles, "attention", None)  # a call would raise
    assert "row 7 " in fresh(view, row=7)
    assert "head 1," in fresh(view, head=1)
    with pytest.raises(TypeError):
        view.set(D=17)


def test_tiles_view_follows(seat, pixels):
    view = widgets.tiles(device=seat)
    assert "row 91 over 6 K tiles" in view.image.tooltip
    assert "row 32 over 3 K tiles" in fresh(view, T=33, row=32, D=40)
    assert "6 partial and 0 skipped" not in fresh(view, causal=True, tile=(8, 8))
    assert "0 partial and 0 skipped" in fresh(view, causal=False)
    assert "row 0 over 1 K tiles" in fresh(view, T=1, H=1)
    assert ("llvmpipe" if seat != "numpy" else "NumPy") in view.image.tooltip


def test_head_and_row_stay_within_their_bounds():
    view = widgets.tiles(device="numpy", T=40, H=4, head=3, row=39)
    text = fresh(view, H=2, T=10)
    assert view.values["head"] == 1 and view.values["row"] == 9
    assert "head 1," in text and "row 9 " in text
    fresh(view, H=1, T=1)
    assert (view.controls["head"].max, view.controls["row"].max) == (0, 0)
    fresh(view, H=4, T=40, head=3, row=39)
    assert view.values["head"] == 3 and view.values["row"] == 39


def test_shrinking_by_hand_is_no_exception():
    """As the browser does it: one control at a time, errors swallowed into the view."""
    view = widgets.tiles(device="numpy", T=40, H=4, head=3, row=39)
    view.controls["H"].value = 1
    view.controls["T"].value = 5
    assert "role" not in view.status.value
    assert "head 0," in view.image.tooltip and "row 4 " in view.image.tooltip


def test_the_picture_shows_the_row_that_the_sliders_say(gpu):
    view = widgets.tiles(device=gpu, T=20, row=3)
    view.set(row=17, head=1)
    figure = view._canvas.figure
    recorded = [line for line in figure.axes[2].lines if line.get_gid() == "recorded"]
    got = {x: y for marks in recorded for x, y in zip(*marks.get_data(), strict=True)}
    truth = widgets.walk(T=20, row=17, head=1, device=gpu).exact.m[0, 1, 17]
    np.testing.assert_allclose([got[0], got[1]], truth, rtol=1e-5)


# All


PAIRS = {
    widgets.tiles: (widgets.walk, widgets.WALK_SIZE),
    widgets.parity: (widgets.bench, widgets.BENCH_SIZE),
    widgets.head_gallery: (widgets.gallery, widgets.GALLERY_SIZE),
}
each_view = pytest.mark.parametrize("view_of", PAIRS)


@each_view
def test_sliders_start_where_the_plain_function_does(view_of):
    """The static figure before a widget shows the same values."""
    view, (plain, size) = view_of(device="numpy"), PAIRS[view_of]
    defaults = {name: p.default for name, p in inspect.signature(plain).parameters.items() if name != "device"}
    moved = view.values
    if "default_scale" in moved:
        moved["scale"] = None if moved.pop("default_scale") else moved["scale"]
    if moved.pop("worst", False):
        moved |= {"head": None, "row": None}
    assert moved == defaults
    figure = plot.figure(*size)
    assert plain(device="numpy").draw(figure) == view.image.tooltip


@each_view
def test_every_control_has_a_name_and_help(view_of):
    view = view_of(device="numpy")
    names = [control.description for control in view.controls.values()]
    assert all(names) and len(set(names)) == len(names)
    assert all(control.tooltip for control in view.controls.values())
    choices = [control for control in view.controls.values() if isinstance(control, ipywidgets.Dropdown)]
    assert choices and all(choice.label for choice in choices), "a choice that starts blank says nothing"


def test_jupyterlab_can_show_the_picture():
    """Its view of a widget with a tooltip reads the description in the widget's state, also of an Image."""
    view = widgets.tiles(device="numpy", T=9, row=3)
    assert view.image.get_state()["tooltip"] and view.image.get_state()["description"] == ""


@each_view
def test_the_picture_never_moves(view_of):
    view = view_of(device="numpy")
    heights = view.image.layout.height, view.status.layout.height
    assert all(heights)
    view.set(T=7)
    assert (view.image.layout.height, view.status.layout.height) == heights


def test_an_unknown_control_is_named():
    with pytest.raises(TypeError, match="No control is called hd; there are T, H, D, head"):
        widgets.tiles(device="numpy", hd=3)


def test_running_a_cell_again_doubles_no_callback(monkeypatch):
    calls = []
    monkeypatch.setattr(widgets_parity, "bench", lambda **values: calls.append(values) or _bench(**values))
    views = [widgets.parity(device="numpy", T=9, hd=4) for _ in range(2)]
    calls.clear()
    views[1].controls["T"].value = 10
    assert [call["T"] for call in calls] == [10]


_bench = widgets.bench


def test_moves_leave_nothing_behind(gpu):
    """Exact counts, so that one thing kept a move would show at once."""
    tiles, parity = widgets.tiles(device=gpu, T=20, row=3, D=8), widgets.parity(device=gpu, T=20, hd=8)
    gallery = widgets.head_gallery(device=gpu, T=20, H=2, D=8, head=0, row=3, key=2)
    failures = widgets.known_failures(device=gpu, name="ragged tile")
    views = (tiles, parity, gallery, failures)
    gc.collect()
    figures = count_figures()
    axes = [len(view._canvas.figure.axes) for view in views]
    artists = [len(view._canvas.figure.findobj()) for view in views]
    for i in range(2):
        tiles.set(T=20 + i % 3, row=i % 20, head=i % 2)
        parity.set(T=20 + i % 3, seed=i)
        gallery.set(T=20 + i % 3, H=2 + i, head=i % 2, beside=(("kernel", "naive"), ("nothing", ""))[i % 2])
        failures.set(name=("base of L", "-inf guard")[i])
    tiles.set(T=20, row=3, head=0)
    parity.set(T=20, seed=0)
    gallery.set(T=20, H=2, head=0, beside=("input", "random"))
    failures.set(name="ragged tile")
    gc.collect()
    assert count_figures() == figures
    assert [len(view._canvas.figure.axes) for view in views] == axes
    assert [len(view._canvas.figure.findobj()) for view in views] == artists
    assert plt.get_fignums() == []
    assert gpu.memory.live_buffers == 0


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_thousand_updates_leak_nothing(gpu, pixels):
    """Each one runs a kernel and paints, on the smallest problem and figure. 4 kB kept a move would show."""

    def compute(n: int) -> fa.Result:
        return fa.attention(*fa.data.make("random", T=4, H=1, D=1, seed=n), kernel="fa2_forward", device=gpu)

    def draw(figure: Figure, result: fa.Result) -> str:
        line.set_ydata(result.out.ravel())
        return "a line"

    figure = plot.figure(0.5, 0.5)
    figure.set_layout_engine("none")
    (line,) = figure.add_axes((0, 0, 1, 1)).plot(range(4))
    line.axes.set_axis_off()
    view = View({"n": ipywidgets.IntSlider(0, 0, 2000)}, compute, draw, figure)
    for n in range(100):  # what is cached is cached by now
        view.set(n=n)
    gc.collect()
    figures, before = count_figures(), resident_bytes()
    for n in range(100, 1100):
        view.set(n=n)
    gc.collect()
    assert count_figures() == figures and plt.get_fignums() == []
    assert len(view._canvas.figure.axes) == 1
    assert (gpu.memory.live_buffers, gpu.memory.live_bytes) == (0, 0)
    assert resident_bytes() - before < 4 << 20
    view.close()


# A view in an event loop, as in a notebook


class Slow:
    """A view whose computations wait for permission."""

    def __init__(self):
        self.started: list[int] = []
        self.running = self.most_running = 0
        self.gate = threading.Semaphore(1)  # one for the first picture
        self.slider = ipywidgets.IntSlider(0, min=0, max=100, description="n")
        self.shown: list[str] = []
        self.view = View({"n": self.slider}, self.compute, self.draw, plot.figure(1, 1), words=lambda n: f"words {n}")
        self.view.image.observe(lambda change: self.shown.append(change["new"]), names="tooltip")

    def compute(self, n: int) -> int:
        self.started.append(n)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        allowed = self.gate.acquire(timeout=20)
        self.running -= 1
        assert allowed, "nobody opened the gate: does this block the loop?"
        if n == 13:
            raise ValueError("thirteen is <refused>")
        return n

    def draw(self, figure: Figure, n: int) -> str:
        figure.clear()
        figure.text(0, 0, str(n))
        return f"picture {n}"

    async def until(self, condition) -> None:
        """Let the loop run until the condition holds; half a minute is a failure."""
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.005)

    async def settled(self) -> None:
        """Let everything that waits compute."""
        self.gate.release(100)
        await self.until(lambda: self.view._task.done())


def in_a_loop(scenario) -> None:
    asyncio.run(scenario(Slow()))


def test_one_runs_and_the_newest_waits():
    async def scenario(slow: Slow):
        for n in (1, 2, 3, 4):
            slow.slider.value = n
            await slow.until(lambda: slow.started[-1] == 1)
        await slow.settled()
        assert slow.started == [0, 1, 4] and slow.most_running == 1
        assert slow.shown == ["picture 4"], "what was overtaken is never shown"
        assert slow.view.status.value.endswith("words 4")

    in_a_loop(scenario)


def test_two_moves_in_a_row_the_last_wins():
    async def scenario(slow: Slow):
        slow.slider.value = 1
        slow.slider.value = 2
        await slow.settled()
        assert slow.shown[-1] == "picture 2" and slow.started == [0, 2]

    in_a_loop(scenario)


def test_a_stale_picture_is_dim():
    async def scenario(slow: Slow):
        assert not dim(slow.view)
        slow.slider.value = 1
        assert dim(slow.view)
        await slow.settled()
        assert not dim(slow.view)

    in_a_loop(scenario)


def test_the_loop_is_free_while_a_kernel_runs():
    async def scenario(slow: Slow):
        slow.slider.value = 1
        await slow.until(lambda: slow.running == 1)  # only possible if nothing blocks
        await slow.settled()

    in_a_loop(scenario)


def test_an_error_in_the_loop_is_shown_and_recovers():
    async def scenario(slow: Slow):
        slow.slider.value = 13
        await slow.settled()
        assert "thirteen is &lt;refused&gt;" in slow.view.status.value
        assert dim(slow.view)
        slow.slider.value = 14
        await slow.settled()
        assert slow.view.status.value.endswith("words 14") and not dim(slow.view)

    in_a_loop(scenario)


def test_an_overtaken_error_is_not_shown():
    async def scenario(slow: Slow):
        slow.slider.value = 13
        await slow.until(lambda: slow.started[-1] == 13)
        slow.slider.value = 14
        await slow.settled()
        assert slow.shown == ["picture 14"]

    in_a_loop(scenario)


def test_set_raises_where_a_move_would_not():
    slow = Slow()
    slow.gate.release(2)
    with pytest.raises(ValueError, match="thirteen"):
        slow.view.set(n=13)
    slow.gate.release(2)
    slow.slider.value = 14
    assert slow.shown[-1] == "picture 14"


def test_a_click_on_the_weights_goes_to_that_row():
    view = widgets.tiles(device="numpy", T=24, H=1, D=4, row=3)
    weights, states = view._canvas.figure.axes[:2]
    click(view, weights, 2, 17)
    assert view.values["row"] == 17 and "alpha of row 17 " in view.image.tooltip
    click(view, states, 2, 5)
    assert view.values["row"] == 17


def test_a_view_without_places_has_no_pointer_for_them():
    view, slow = widgets.tiles(device="numpy", T=8, H=1, D=4, row=3).image, Slow().view.image
    assert CLICKABLE in view._dom_classes and CLICKABLE not in slow._dom_classes


def test_two_views_never_compute_or_draw_at_once():
    """One follows its slider in the worker, the other is set meanwhile, as by a cell that runs."""

    async def scenario(slow: Slow):
        other = Slow()
        slow.slider.value = 1
        await slow.until(lambda: slow.started[-1] == 1)
        other.gate.release(100)
        setting = asyncio.create_task(asyncio.to_thread(other.view.set, n=5))
        await asyncio.sleep(0.2)
        assert other.started == [0], "it waits"
        await slow.settled()
        await setting
        assert other.started == [0, 5] and other.shown == ["picture 5"]

    in_a_loop(scenario)


def test_an_overtaken_move_never_reaches_the_figure():
    """It waits behind another view while this one is set. The figure, which tells where a click is, stays as shown."""

    async def scenario(slow: Slow):
        other = Slow()
        slow.slider.value = 1
        await slow.until(lambda: slow.started[-1] == 1)
        other.slider.value = 3
        await asyncio.sleep(0.05)  # its move waits for the worker
        other.gate.release(100)
        setting = asyncio.create_task(asyncio.to_thread(other.view.set, n=5))
        await asyncio.sleep(0.05)
        await slow.settled()
        await setting
        await slow.until(lambda: other.view._task.done())
        assert other.started == [0, 5]
        assert [text.get_text() for text in other.view._canvas.figure.texts] == ["5"]

    in_a_loop(scenario)


def test_a_closed_view_lets_go_of_its_figure():
    view = widgets.tiles(device="numpy", T=8, H=1, D=4, row=3)
    figure = weakref.ref(view._canvas.figure)
    view.close()
    for control in view.controls.values():
        control.close()  # ipywidgets keeps what is not closed
    del view, control
    gc.collect()
    assert figure() is None


def test_a_closed_view_follows_no_more():
    slow = Slow()
    slow.view.close()
    slow.slider.value = 5
    assert slow.started == [0]


def test_tile_states_are_named_in_the_walks_alternative_text():
    text = widgets.walk(T=20, row=0, device="numpy").draw(plot.figure(*widgets.WALK_SIZE))
    assert all(state in text for state in TILE_STATES)


def test_a_views_start_values_do_not_depend_on_their_order():
    view = widgets.tiles(device="numpy", row=120, head=3, T=128, H=4, D=4)
    assert {name: view.values[name] for name in ("T", "H", "row", "head")} == {"T": 128, "H": 4, "row": 120, "head": 3}
    view.close()
