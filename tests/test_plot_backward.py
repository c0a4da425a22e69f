"""The pictures of the backward pass show the numbers they were handed, and the slider shows the walk it says."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import threading
from dataclasses import replace

import engines
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

import fa2lab as fa
from fa2lab import plot, plot_backward, widgets_backward
from fa2lab.plot_backward import Growth

PNG = b"\x89PNG"
SMALL = dict(T=20, tile=(8, 8), workgroup=1, step=1)


@pytest.fixture(params=["numpy", engines.seat_param(engines.Seat("llvmpipe", "naga", "adapter"))])
def seat(request):
    """NumPy, and a device: what kernels compute elsewhere is not the pictures' affair."""
    return request.param if request.param == "numpy" else engines.device_of(request.param)


@pytest.fixture
def figure():
    return plot.figure(*widgets_backward.SIZE)


@pytest.fixture(autouse=True)
def nothing_kept():
    """No figure of pyplot's, and no traced run beyond its test."""
    yield
    assert plt.get_fignums() == []
    widgets_backward._traced.cache_clear()


def named(ax, gid: str) -> list:
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


def walk(**values):
    return widgets_backward.scrub(**(SMALL | dict(device="numpy") | values)).walk


def matrix(ax) -> np.ndarray:
    return np.asarray(ax.images[0].get_array())


def boxes(collection) -> list[tuple[float, ...]]:
    extents = [path.get_extents() for path in collection.get_paths()]
    return sorted((box.x0, box.y0, box.x1, box.y1) for box in extents)


# The walk


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("gradient", ["dQ", "dK", "dV"])
def test_a_walk_ends_at_the_kernels_gradient(seat, gradient, causal):
    trace, gradients = widgets_backward._traced(1, 20, (8, 4), "random", causal, seat)
    groups = trace.state.shape[gradient != "dQ"]
    rows = []
    for workgroup in range(groups):
        got = widgets_backward.walk_of(trace, gradients, gradient, workgroup, head=1)
        assert len(got.parts) == len(got.tiles) == len(got.running) - 1 == len(got.distance) - 1
        assert not got.running[0].any() and got.distance[-1] < 1e-5
        np.testing.assert_array_equal(got.final, getattr(gradients, gradient.lower())[0, got.rows, 1])
        rows += range(got.rows.start, got.rows.stop)
    assert rows == list(range(20)), "each row of a gradient is owned once"


def test_a_walk_takes_the_tiles_that_the_mask_leaves():
    """Worked by hand: 20 positions, 8 × 4 tiles, so 3 query tiles and 5 K tiles."""
    at = dict(T=20, tile=(8, 4), step=0)
    assert walk(gradient="dQ", workgroup=0, **at).tiles == [(0, 0), (0, 1)]
    assert walk(gradient="dQ", workgroup=2, **at).tiles == [(2, j) for j in range(5)]
    assert walk(gradient="dV", workgroup=0, **at).tiles == [(0, 0), (1, 0), (2, 0)]
    assert walk(gradient="dK", workgroup=3, **at).tiles == [(1, 3), (2, 3)]
    assert walk(gradient="dK", workgroup=4, **at).rows == slice(16, 20)
    assert len(walk(gradient="dQ", workgroup=0, causal=False, **at).tiles) == 5


def test_a_part_that_is_left_out_shows():
    """The distance is a sum's: without one tile it does not come down."""
    got = walk(gradient="dQ", workgroup=2, step=0)
    short = replace(got, running=got.running - got.parts[0])
    assert got.distance[-1] < 1e-5 < 1e-3 < short.distance[-1]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (dict(gradient="dX"), "No gradient is called 'dX'; there are dQ, dK, dV"),
        (dict(head=2), "head must be from 0 to 1; got 2"),
        (dict(workgroup=3), "workgroup must be from 0 to 2; got 3"),
        (dict(step=3), "step must be from 0 to 2, the tiles of this workgroup; got 3"),
    ],
)
def test_what_is_not_there_is_refused(values, says):
    with pytest.raises((ValueError, IndexError), match=says):
        walk(**values)


# The pictures


@pytest.mark.parametrize(("gradient", "thick"), [("dQ", 1), ("dK", 1), ("dV", 0)])
def test_scrub_shows_p_ds_and_the_sums(figure, gradient, thick):
    got = walk(gradient=gradient, step=2)
    text = plot_backward.scrub(figure, got, 2)
    p, ds, distance, adds, running, final = figure.axes[:6]
    np.testing.assert_allclose(matrix(p)[~got.masked], got.p[~got.masked])
    np.testing.assert_allclose(matrix(ds)[~got.masked], got.ds[~got.masked])
    np.testing.assert_allclose(matrix(adds), got.parts[1])
    np.testing.assert_allclose(matrix(running), got.parts[:2].sum(0), atol=1e-6)
    np.testing.assert_allclose(matrix(final), got.final)
    assert adds.images[0].get_clim() == running.images[0].get_clim() == final.images[0].get_clim()
    widths = [named(ax, "newest")[0].get_linewidth() for ax in (p, ds)]
    assert np.argmax(widths) == thick, "the matrix that this gradient is made of has the thicker box"
    np.testing.assert_allclose(named(distance, "walked")[0].get_ydata(), np.maximum(got.distance[:3], 1e-9))
    assert got.label in figure.get_supxlabel()
    assert f"2 of {len(got.tiles)} tiles" in text and "8 to 15" in text


def test_scrub_lights_what_was_walked(figure):
    got = walk(gradient="dQ", workgroup=2, step=0)  # T = 20: the last row of tiles is 4 high, the last column 4 wide
    plot_backward.scrub(figure, got, 0)
    assert len(boxes(named(figure.axes[0], "pale")[0])) == 9
    assert named(figure.axes[0], "newest") == [] == named(figure.axes[0], "walked")
    assert not matrix(figure.axes[3]).any() and not matrix(figure.axes[4]).any()
    plot_backward.scrub(figure, got, 3)
    for ax in figure.axes[:2]:
        assert all(box[3] <= 15.5 for box in boxes(named(ax, "pale")[0]))
        newest, walked = (named(ax, gid)[0].get_bbox().bounds for gid in ("newest", "walked"))
        assert newest == (15.5, 15.5, 4, 4)
        assert walked == (-0.5, 15.5, 20, 4)


def test_row_numbers_are_the_heads(figure):
    plot_backward.scrub(figure, walk(gradient="dQ", workgroup=2, step=0), 0)
    figure.draw_without_rendering()
    assert [label.get_text() for label in figure.axes[3].get_yticklabels()] == ["16", "17", "18", "19"]


def test_gradients_above_their_errors(figure, seat):
    q, k, v = fa.data.make(T=9, H=2, D=4)
    truth = fa.reference.attention_backward(q, k, v, v, causal=True)
    _, got = fa.attention_grad(q, k, v, v, causal=True, device=seat)
    text = plot_backward.gradients(figure, got, truth, head=1)
    axes = figure.axes[:6]
    for above, below, name in zip(axes[:3], axes[3:], ("dq", "dk", "dv"), strict=True):
        field = getattr(got, name)[0, :, 1]
        np.testing.assert_allclose(matrix(above), field)
        np.testing.assert_allclose(matrix(below), field - getattr(truth, name)[0, :, 1])
        assert name in above.get_title().lower()
    assert got.label in figure.get_supxlabel() and got.label in text
    spoiled = replace(got, dk=got.dk + 1)
    assert "dK 1.0e+00" in plot_backward.gradients(figure, spoiled, truth, head=1)
    assert len([ax for ax in figure.axes if ax.images]) == 6, "drawn in place"


def test_walks_have_an_arrow_a_workgroup(figure):
    state = fa.reference.states(fa.plan(*_problem(20)).problem, 8, 4)[0, 0, ::8]
    text = plot_backward.walks(figure, state, 20, 20, tiles=(8, 4), label="who")
    left, right = figure.axes
    starts = [[tuple(dot.get_xydata()[0]) for dot in named(ax, "walk starts")] for ax in (left, right)]
    assert starts[0] == [(1, 4), (1, 12), (1, 18)], "each begins in the first K tile, in the middle of its queries"
    assert starts[1] == [(2, 2), (6, 2), (10, 10), (14, 10), (18, 18)], "each begins in the first tile that sees it"
    assert "11 tiles of 15" in text and figure.get_supxlabel().startswith("who")


def test_a_workgroup_without_a_tile_has_no_arrow(figure):
    state = np.array([[0], [1]], np.uint8)  # the first queries see no key
    plot_backward.walks(figure, state, 4, 2, tiles=(2, 2), label="who")
    assert [len(named(ax, "walk starts")) for ax in figure.axes] == [1, 1]


def test_row_errors_are_drawn_and_named(figure):
    ax = figure.add_subplot()
    errors = {"a": np.array([1e-6, 0, 2e-6]), "b": np.array([1e-7, 5e-7, 1e-12])}
    plot_backward.row_errors(ax, errors, title="T")
    (a,), (b,) = (named(ax, name) for name in errors)
    np.testing.assert_allclose(a.get_ydata(), [1e-6, 2e-10, 2e-6])
    np.testing.assert_allclose(b.get_ydata(), [1e-7, 5e-7, 2e-10])
    assert a.get_marker() != b.get_marker()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a: at most 2.0e-06", "b: at most 5.0e-07"]
    plot_backward.row_errors(ax, {"none": np.zeros(3)})


def test_growth_draws_model_measure_limit_and_refusal(figure):
    ax = figure.add_subplot()
    kept = Growth("kept", [16, 64, 256], [2048, 2**15, 2**19], [1024, 2**14, 2**18], {16: 2048}, [256])
    free = Growth("free", [16, 64, 256], [2048, 2**13, 2**15], [1024, 2**11, 2**13], {16: 2048, 64: 2**13})
    plot_backward.growth(ax, [kept, free], limit=2**17, limit_name="room")
    line, marks = named(ax, "free model")[0], named(ax, "free measured")[0]
    np.testing.assert_array_equal(line.get_xydata(), [[16, 2048], [64, 2**13], [256, 2**15]])
    np.testing.assert_array_equal(marks.get_xydata(), [[16, 2048], [64, 2**13]])
    np.testing.assert_array_equal(named(ax, "kept model")[0].get_xdata(), [16, 64])
    np.testing.assert_array_equal(named(ax, "refused")[0].get_xydata(), [[256, 2**19]])
    np.testing.assert_array_equal(named(ax, "largest buffer")[0].get_ydata(), [1024, 2**14, 2**18])
    assert list(named(ax, "limit")[0].get_ydata()) == [2**17, 2**17]
    said = [text.get_text() for text in ax.texts]
    assert said == ["kept\n512 KiB", "free\n32 KiB", "room: 128 KiB"]
    plot_backward.growth(ax, [free], limit=2**17, limit_name="room")
    assert named(ax, "refused") == [] and len(ax.texts) == 2, "drawn afresh"


def _problem(T):
    return fa.attention(*fa.data.make(T=T, H=1, D=4), causal=True, device="numpy").problem, fa.limits.BROWSER


# The slider


def dim(view) -> bool:
    """Whether the browser shows the picture as an older one."""
    return "fa2lab-stale" in view.image.get_state()["_dom_classes"]


def fresh(view, **values) -> str:
    """Move the view and return the alternative text of the new picture."""
    before = view.image.value
    view.set(**values)
    assert view.image.value[:4] == PNG and view.image.value != before
    assert not dim(view)
    return view.image.tooltip


def unpainted(view):
    """The view with everything drawn but no pixels: those are the canvas's affair, and take most of the time."""
    pictures = itertools.count()
    view._canvas.print_png = lambda file: file.write(PNG + str(next(pictures)).encode())
    return view


def test_sliders_start_where_the_plain_function_does(figure):
    """The static figure before the widget shows the same values."""
    view = widgets_backward.backward(device="numpy")
    plain = inspect.signature(widgets_backward.scrub).parameters.items()
    assert view.values == {name: p.default for name, p in plain if name != "device"}
    assert widgets_backward.scrub(device="numpy").draw(figure) == view.image.tooltip


def test_every_control_has_a_name_and_help():
    controls = widgets_backward.backward(device="numpy").controls.values()
    names = [control.description for control in controls]
    assert all(names) and len(set(names)) == len(names) and all(control.tooltip for control in controls)


def test_the_view_follows(seat):
    view = widgets_backward.backward(device=seat)
    assert "fa2_dq that owns queries 24 to 31" in view.image.tooltip
    assert "3 of 4 tiles" in fresh(view, step=3)
    assert "fa2_dkv that owns keys 24 to 31" in fresh(view, gradient="dV", step=2)
    assert "fa2_dkv</b>, the workgroup that owns keys 24 to 31: 2 of 2 tiles, each adding Pᵀ dO" in view.status.value
    assert "1 of 3 tiles" in fresh(view, T=33, tile=(16, 16), workgroup=0, step=1)
    assert ("NumPy" if seat == "numpy" else "llvmpipe") in view._canvas.figure.get_supxlabel()


def test_what_is_shown_runs_no_kernel(monkeypatch):
    view = unpainted(widgets_backward.backward(device="numpy", **SMALL))
    monkeypatch.setattr(widgets_backward, "attention_grad", None)  # a call would raise
    fresh(view, step=2)
    fresh(view, gradient="dK", workgroup=2, step=0)
    with pytest.raises(TypeError):
        view.set(head=1)


def test_workgroups_and_tiles_stay_within_their_bounds():
    """As a browser moves them: one control at a time, errors swallowed into the view."""
    view = unpainted(widgets_backward.backward(device="numpy", T=40, workgroup=4, step=5))
    view.controls["workgroup"].value = 1
    assert (view.controls["step"].max, view.values["step"]) == (2, 2)
    view.controls["gradient"].value = "dK"
    assert view.controls["step"].max == 4
    view.controls["T"].value = 7
    assert (view.values["workgroup"], view.values["step"]) == (0, 1)
    view.controls["causal"].value = False
    view.controls["tile"].value = (8, 4)
    assert view.controls["workgroup"].max == 1
    assert "role" not in view.status.value
    assert "keys 0 to 3" in view.image.tooltip


def test_an_error_is_shown_and_the_next_value_recovers(monkeypatch):
    view = widgets_backward.backward(device="numpy", **SMALL)
    good = view.image.value

    def refuse(*_, **__):
        raise fa.LimitError("no room for T=21")

    with monkeypatch.context() as patched:
        patched.setattr(widgets_backward, "attention_grad", refuse)
        with pytest.raises(fa.LimitError):
            view.set(T=21)
    assert "no room for T=21" in view.status.value and 'role="alert"' in view.status.value
    assert view.image.value == good and dim(view)
    assert "owns queries 8 to 15" in fresh(view, T=22)
    assert "role" not in view.status.value


def test_an_unknown_control_is_named():
    with pytest.raises(TypeError, match="No control is called rows; there are gradient, workgroup, step"):
        widgets_backward.backward(device="numpy", rows=3)


def test_last_value_wins(monkeypatch):
    """Moves while a computation runs: it is finished, the ones between are left out, the last is shown."""
    view = unpainted(widgets_backward.backward(device="numpy", T=40, workgroup=4, step=0))
    scrub, seen, go, begun = widgets_backward.scrub, [], threading.Event(), threading.Event()

    def slow(**values):
        seen.append(values["step"])
        begun.set()
        assert go.wait(10)
        return scrub(**values)

    monkeypatch.setattr(widgets_backward, "scrub", slow)

    async def moves():
        view.controls["step"].value = 1
        assert await asyncio.to_thread(begun.wait, 10)
        for step in (2, 3, 4):
            view.controls["step"].value = step
        go.set()
        await asyncio.wait_for(view._task, 20)

    asyncio.run(moves())
    assert seen == [1, 4]
    assert "4 of 5 tiles" in view.image.tooltip and not dim(view)


def test_updates_leave_nothing_behind():
    """The counts are exact, so what one update in a hundred would leave is the only leak that 25 could miss."""
    view = unpainted(widgets_backward.backward(device="numpy", **SMALL))

    def standing() -> tuple[int, int, int]:
        gc.collect()
        axes = view._canvas.figure.axes
        figures = sum(issubclass(type(x), Figure) for x in gc.get_objects())  # type(): weak proxies may be dead
        return len(axes), sum(len(ax.get_children()) for ax in axes), figures

    view.set(step=0)
    before = standing()
    for n in range(1, 26):
        view.set(step=n % 2)
    view.set(step=0)
    assert standing() == before
    view.set(step=1)
    assert "1 of 2 tiles" in view.image.tooltip
