"""StepThrough: what a step shows is what the kernel recorded, the slider runs no kernel, and nothing piles up."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from dataclasses import replace

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from views import click, count_figures, dim, fresh

import fa2lab as fa
from fa2lab import plot, plot_blocks, plot_steps, widgets, widgets_steps
from fa2lab.plot_steps import BackwardPicture, ForwardPicture, QueryWalk
from fa2lab.widgets_steps import PASSES, STEPS_SIZE, Projector, Steps

SMALL = dict(T=20, tile=(8, 4), workgroup=1, step=2, head=1, batch=1, pattern="random")
each_pass = pytest.mark.parametrize("fills", PASSES)


@pytest.fixture(autouse=True)
def nothing_kept():
    """No figure of pyplot's, and no traced run beyond its test."""
    yield
    assert plt.get_fignums() == []
    for cached in (widgets_steps._walk, widgets_steps._forward, widgets_steps._backward):
        cached.cache_clear()


@pytest.fixture
def pixels():
    """For a test that wants its pictures painted; see `unpainted`."""


@pytest.fixture(autouse=True)
def painted_only_for_pixels(request):
    """Without `pixels` each picture is a stub: see `unpainted`. Freezing would paint, too."""
    if "pixels" not in request.fixturenames:
        request.getfixturevalue("unpainted")
        request.getfixturevalue("monkeypatch").setattr(plot_steps, "freeze", lambda *_: None)


def small(**values) -> Steps:
    return widgets.steps(**(SMALL | dict(device="numpy") | values))


def drawn(shown: Steps):
    """The picture, at its step."""
    picture = shown.picture(plot.figure(*STEPS_SIZE))
    picture.show(shown.step)
    return picture


def cells(block) -> np.ndarray:
    """The numbers of a block, NaN where it shows none."""
    return np.ma.filled(block.mesh.get_array().reshape(block.shape).astype(float), np.nan)


# What is walked.


def test_a_forward_walk_is_what_the_kernel_recorded(seat):
    arrays = fa.data.make("random", B=2, T=20, H=2, D=16)
    trace = fa.forward_trace(*arrays, batch=1, head=1, causal=True, block_q=8, block_k=4, device=seat)
    result = fa.attention(*arrays, causal=True, kernel="fa2_forward", block_q=8, block_k=4, device=seat)
    for workgroup, rows in enumerate((slice(0, 8), slice(8, 16), slice(16, 20))):
        walk = widgets.steps(**(SMALL | dict(workgroup=workgroup, step=0, device=seat))).walk
        n = (2, 4, 5)[workgroup]
        assert walk.tiles == [(workgroup, j) for j in range(n)] and walk.rows == rows
        np.testing.assert_array_equal(walk.s, trace.s[rows])
        np.testing.assert_array_equal(walk.m[1:], trace.m[rows, :n].T)
        np.testing.assert_array_equal(walk.l[1:], trace.l[rows, :n].T)
        np.testing.assert_array_equal(walk.alpha, trace.alpha[rows, :n].T)
        np.testing.assert_array_equal(walk.running[1:], trace.out[rows, :n].swapaxes(0, 1))
        assert (walk.m[0] == -np.inf).all() and not walk.l[0].any() and not walk.running[0].any()
        np.testing.assert_array_max_ulp(walk.final, result.out[1, rows, 1], maxulp=3)
        assert walk.distance[-1] == 0 < walk.distance[0] and len(walk.distance) == n + 1
        assert walk.label == trace.label


def test_the_steps_fulfil_the_recurrence():
    """From one step to the next by the numbers that the picture shows: m, l and O from S, alpha and P."""
    walk = small(step=0).walk
    v = fa.data.make("random", B=2, T=20, H=2, D=16).v[1, :, 1]
    for t in range(1, len(walk.tiles) + 1):
        s, p = walk.s[:, walk.keys(t)], walk.p(t)
        np.testing.assert_array_equal(walk.m[t], np.maximum(walk.m[t - 1], s.max(1)))
        np.testing.assert_allclose(walk.l[t], walk.alpha[t - 1] * walk.l[t - 1] + p.sum(1), rtol=1e-6)
        o = walk.alpha[t - 1] * walk.l[t - 1] * walk.running[t - 1].T + (p @ v[walk.keys(t)]).T
        np.testing.assert_allclose(walk.running[t], (o / walk.l[t]).T, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fills", ["dQ", "dK", "dV"])
def test_a_backward_walk_ends_at_the_kernels_gradient(seat, fills, causal):
    trace, gradients = widgets_steps._backward(1, 1, 20, (8, 4), "random", causal, seat)
    rows = []
    for workgroup in range(trace.state.shape[fills != "dQ"]):
        walk = widgets_steps.tile_walk(trace, gradients, fills, workgroup, head=1, batch=1)
        assert len(walk.parts) == len(walk.tiles) == len(walk.running) - 1 == len(walk.distance) - 1
        top = np.abs(walk.final).max()
        assert not walk.running[0].any() and walk.distance[0] == top and walk.distance[-1] < 1e-5 * top
        np.testing.assert_array_equal(walk.final, getattr(gradients, fills.lower())[1, walk.rows, 1])
        rows += range(walk.rows.start, walk.rows.stop)
    assert rows == list(range(20)), "each row of a gradient is owned once"


def test_a_walk_takes_the_tiles_that_the_mask_leaves():
    """Worked by hand: 20 positions, 8 × 4 tiles, so 3 query tiles and 5 K tiles."""

    def taken(fills, workgroup, **values):
        return small(fills=fills, workgroup=workgroup, step=0, **values).walk.tiles

    assert taken("dQ", 0) == [(0, 0), (0, 1)]
    assert taken("dQ", 2) == [(2, j) for j in range(5)]
    assert taken("dV", 0) == [(0, 0), (1, 0), (2, 0)]
    assert taken("dK", 3) == [(1, 3), (2, 3)]
    assert len(taken("dQ", 0, causal=False)) == 5


def test_a_part_that_is_left_out_shows():
    """The distance is a sum's: without one tile it does not come down."""
    walk = small(fills="dQ", workgroup=2, step=0).walk
    short = replace(walk, running=walk.running - walk.parts[0])
    assert walk.distance[-1] < 1e-5 < 1e-3 < short.distance[-1]


def test_batches_and_heads_differ():
    outs = [small(batch=b, head=h).walk.final for b in range(2) for h in range(2)]
    assert all((x != y).any() for i, x in enumerate(outs) for y in outs[:i])
    gradients = [small(fills="dQ", batch=b, head=h).walk.final for b in range(2) for h in range(2)]
    assert all((x != y).any() for i, x in enumerate(gradients) for y in gradients[:i])


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        (dict(fills="dO"), ValueError, "'dO' is nothing that fills in; there are O, dQ, dK, dV"),
        (dict(workgroup=3), IndexError, "workgroup must be from 0 to 2; got 3"),
        (dict(fills="dK", workgroup=5), IndexError, "workgroup must be from 0 to 4; got 5"),
        (dict(workgroup=-1), IndexError, "workgroup"),
        (dict(step=5), IndexError, "step must be from 0 to 4, the tiles of this workgroup; got 5"),
        (dict(step=-1), IndexError, "step"),
        (dict(head=2), IndexError, "head must be from 0 to 1; got 2"),
        (dict(batch=2), IndexError, "batch must be from 0 to 1; got 2"),
    ],
)
def test_what_is_not_there_is_said(values, error, says):
    with pytest.raises(error, match=says):
        small(**values)


# What is drawn.


def test_the_picture_holds_the_numbers_of_its_step():
    shown = small(step=4)  # keys 12 to 15 for queries 8 to 15: the mask's edge runs through
    walk, picture = shown.walk, drawn(shown)
    hidden = walk.masked[8:16, 12:16]
    assert hidden.any() and not hidden.all()
    for block, numbers in ((picture.s, walk.s[:, 12:16]), (picture.p, walk.p(4))):
        np.testing.assert_array_equal(np.isnan(cells(block)), hidden)
        np.testing.assert_array_equal(cells(block)[~hidden], numbers[~hidden])
        assert sorted(zip(*block.hidden.get_data(), strict=True)) == sorted((c, r) for r, c in np.argwhere(hidden))
    for rows, numbers in ((picture.m, walk.m), (picture.l, walk.l)):
        np.testing.assert_array_equal(rows.before.get_xdata(), numbers[3])
        np.testing.assert_array_equal(rows.after.get_xdata(), numbers[4])
        np.testing.assert_array_equal(rows.after.get_ydata(), np.arange(8))
    np.testing.assert_array_equal(picture.alpha.after.get_xdata(), walk.alpha[3])
    np.testing.assert_array_equal(cells(picture.so_far), walk.running[4])
    np.testing.assert_array_equal(cells(picture.final), walk.final)
    assert picture.distance.now.get_xdata() == [4] and "at the end: 0" in picture.distance.ax.get_title()


def test_the_newest_tile_is_lit_on_the_map():
    picture = drawn(small(step=3))
    assert picture.map.box.get_visible()
    assert picture.map.box.get_bbox().bounds == (8, 8, 4, 8)
    shades = picture.map.mesh.get_array().reshape(3, 5)
    assert shades[1].tolist() == [3, 3, 3, 2, 0], "taken, still to come, skipped"
    assert shades[0].tolist() == [1, 1, 0, 0, 0], "another workgroup's"
    (edge,) = [patch for patch in picture.map.ax.patches if patch.get_gid() == "mask"]
    np.testing.assert_array_equal(edge.get_data().values, np.arange(1, 21))


def test_a_ragged_last_tile_ends_with_the_problem():
    picture = drawn(small(tile=(8, 8), workgroup=2, step=3))
    assert picture.map.box.get_bbox().bounds == (16, 16, 4, 4)
    assert np.isnan(cells(picture.s)[:, 4:]).all(), "past the last key there is nothing"
    assert len(picture.s.hidden.get_xdata()) == 6, "and no cross either"


def test_before_the_first_tile_there_is_nothing():
    picture = drawn(small(step=0))
    for block in (picture.s, picture.p, picture.so_far):
        assert np.isnan(cells(block)).all() and not len(block.hidden.get_xdata())
    assert len(picture.m.none.get_xdata()) == 8 and not len(picture.m.after.get_xdata())
    assert not picture.map.box.get_visible()
    assert not len(picture.alpha.after.get_xdata())


def test_minus_infinity_before_the_first_tile_has_its_mark():
    picture = drawn(small(step=1))
    assert len(picture.m.none.get_xdata()) == 8 and not len(picture.m.before.get_xdata())
    assert (picture.m.none.get_xdata() == picture.m.ax.get_xlim()[0]).all()
    picture.show(2)
    assert not len(picture.m.none.get_xdata()) and len(picture.m.before.get_xdata()) == 8


@pytest.mark.parametrize("fills", ["dQ", "dK", "dV"])
def test_the_backward_picture_holds_the_numbers_of_its_step(fills):
    shown = small(fills=fills, workgroup=1, step=2)
    walk, picture = shown.walk, drawn(shown)
    i, j = walk.tiles[1]
    tile = slice(8 * i, min(8 * i + 8, 20)), slice(4 * j, 4 * j + 4)
    seen = ~walk.masked[tile]
    corner = np.s_[: seen.shape[0]]
    for block, numbers in ((picture.p, walk.p[tile]), (picture.ds, walk.ds[tile])):
        np.testing.assert_array_equal(cells(block)[corner][seen], numbers[seen])
        assert np.isnan(cells(block)[corner][~seen]).all()
    np.testing.assert_array_equal(cells(picture.adds), walk.parts[1])
    np.testing.assert_array_equal(cells(picture.so_far), walk.running[2])
    np.testing.assert_array_equal(cells(picture.final), walk.final)
    assert picture.map.box.get_bbox().bounds[:2] == (4 * j, 8 * i)


def test_a_number_that_is_not_finite_is_crossed_out():
    block = plot_blocks.Block(plot.figure().add_subplot(), (2, 3), end=1.0, columns="key", digits=".1f")
    block.show(np.array([[0.5, np.nan, 0], [np.inf, 0, -0.01]]), np.array([[0, 0, 0], [0, 1, 0]], bool))
    assert sorted(zip(*block.broken.get_data(), strict=True)) == [(0, 1), (1, 0)]
    assert list(zip(*block.hidden.get_data(), strict=True)) == [(1, 1)]
    assert np.isnan(cells(block)).sum() == 3


def test_written_numbers_are_where_their_cells_are():
    """Each number's outline lies inside its cell, and as many are written as there are cells that hold one."""
    block = plot_blocks.Block(plot.figure().add_subplot(), (2, 3), end=1.0, columns="key", digits=".1f")
    block.show(np.array([[0.5, -1, 0], [0.9, 0, 0.1]]), np.array([[0, 0, 0], [0, 0, 1]], bool))
    light, dark = (shape.get_path() for shape in block.numbers.shapes)
    assert len(light.vertices) and len(dark.vertices), "white on the dark cells, black on the pale ones"
    boxes = [path.get_extents() for path in (light, dark)]
    assert all(-0.5 < box.x0 and box.x1 < 2.5 and -0.5 < box.y0 and box.y1 < 1.5 for box in boxes)
    columns = {round(x) for x, y in light.vertices if -0.5 < y < 0.5}
    assert columns == {1}, "of the first row -1 alone is dark"
    block.show(None)
    assert not any(len(shape.get_path().vertices) for shape in block.numbers.shapes)


def test_large_blocks_have_no_numbers():
    assert plot_blocks.Block(plot.figure().add_subplot(), (16, 16), end=1.0, columns="", digits=".1f").numbers is None


@each_pass
def test_axes_stay_where_they_are_while_the_step_moves(fills):
    picture = small(fills=fills).picture(plot.figure(*STEPS_SIZE))
    texts, looks = [], set()
    for step in range(len(picture.walk.tiles) + 1):
        texts.append(picture.show(step))
        looks.add(tuple((ax.get_position().bounds, ax.get_xlim(), ax.get_ylim()) for ax in picture.figure.axes))
    assert len(looks) == 1
    assert len(set(texts)) == len(texts) and all(text.endswith(".") for text in texts)


@pytest.mark.parametrize("fills", ["O", "dK"])
def test_a_frozen_picture_looks_the_same(pixels, fills):
    """Pixel by pixel, at every step, and however often the figure changes hands."""
    figure = plot.figure(*STEPS_SIZE)
    canvas, projector = FigureCanvasAgg(figure), Projector()

    def look() -> np.ndarray:
        canvas.draw()
        return np.array(canvas.buffer_rgba())

    for workgroup in (1, 2):
        steps = [small(fills=fills, workgroup=workgroup, step=step) for step in (0, 2)]
        plain = []
        for shown in steps:
            shown.draw(figure)
            plain.append(look())
        frozen = []
        for shown in steps:
            projector(figure, shown)
            frozen.append(look())
        for one, other in zip(plain, frozen, strict=True):
            np.testing.assert_array_equal(one, other)
        assert (plain[0] != plain[1]).any()
        projector = Projector()


def test_the_footer_says_who_computed_it(seat):
    for fills in ("O", "dK"):
        picture = drawn(widgets.steps(**(SMALL | dict(fills=fills, device=seat))))
        (text,) = [text.get_text() for text in picture.figure.texts]
        assert ("llvmpipe" if seat != "numpy" else "NumPy") in text and "_trace on" in text


def test_the_words_say_what_the_tile_did():
    walk = small(step=2).walk
    rose = int((walk.m[2] > walk.m[1]).sum())
    assert small(step=2).words == (
        "<b>fa2_forward</b>, the workgroup that owns queries 8 to 15: 2 of 4 tiles taken; "
        f"the newest raised the maximum of {rose} of 8 rows."
    )
    assert small(step=0).words.endswith("0 of 4 tiles taken.")
    assert "<b>fa2_dkv</b>, the workgroup that owns keys 4 to 7" in small(fills="dV").words


# The view.


def test_the_view_starts_where_the_plain_function_does():
    view = widgets.step_through(device="numpy")
    defaults = {name: p.default for name, p in inspect.signature(widgets.steps).parameters.items() if name != "device"}
    assert view.values == defaults
    assert widgets.steps(device="numpy").draw(plot.figure(*STEPS_SIZE)) == view.image.tooltip


def test_every_control_has_a_name_and_help():
    view = widgets.step_through(device="numpy", **SMALL)
    controls = [*view.controls.values(), player(view)]
    names = [control.description for control in controls]
    assert all(names) and len(set(names)) == len(names)
    assert all(control.tooltip for control in controls)


def player(view) -> ipywidgets.Play:
    """The button that plays."""
    found = []

    def look(widget) -> None:
        found.extend([widget] if isinstance(widget, ipywidgets.Play) else [])
        for child in getattr(widget, "children", ()):
            look(child)

    look(view.widget)
    (play,) = found
    return play


@pytest.mark.parametrize("fills", ["O", "dK"])
def test_scrubbing_runs_no_kernel(monkeypatch, fills):
    view = widgets.step_through(device="numpy", **SMALL | dict(fills=fills))
    for name in ("forward_trace", "attention_grad", "backward_trace"):
        monkeypatch.setattr(widgets_steps, name, None)  # a call would raise
    assert "tile 1 of" in fresh(view, step=1)
    assert "tile 2 of" in fresh(view, step=2)
    assert "of queries 16 to 19" in fresh(view, workgroup=2) or fills == "dK"
    with pytest.raises(TypeError):
        view.set(head=0)


def test_scrubbing_makes_no_new_picture(monkeypatch):
    """The axes are made once a walk: that is what makes it fast."""
    view, made = widgets.step_through(device="numpy", **SMALL), []
    make = ForwardPicture.__init__
    monkeypatch.setattr(ForwardPicture, "__init__", lambda *args: made.append(1) or make(*args))
    for step in (0, 1, 2, 3, 4, 1):
        view.set(step=step)
    assert made == []
    view.set(workgroup=2)
    assert made == [1]


def test_playing_is_stepping():
    view = widgets.step_through(device="numpy", **SMALL)
    play = player(view)
    assert (play.min, play.max, play.value) == (0, 4, 2)
    play.value = 3
    assert view.values["step"] == 3 and "K tile 3 of 4" in view.image.tooltip
    view.set(step=1)
    assert play.value == 1
    view.set(workgroup=0)
    assert play.max == 2


def test_the_arrow_keys_step_by_one():
    """The browser moves a slider that has the focus by its step."""
    step = widgets.step_through(device="numpy", **SMALL).controls["step"]
    assert isinstance(step, ipywidgets.IntSlider) and step.step == 1 and step.continuous_update


def test_step_and_workgroup_stay_within_their_bounds():
    view = widgets.step_through(device="numpy", T=40, workgroup=4, step=5)
    text = fresh(view, workgroup=0)
    assert view.values["step"] == 1 and "K tile 1 of 1" in text
    fresh(view, workgroup=4)
    assert view.controls["step"].max == 5
    fresh(view, T=9, tile=(8, 8))
    assert (view.values["workgroup"], view.controls["workgroup"].max, view.controls["step"].max) == (1, 1, 2)
    fresh(view, causal=False, workgroup=0)
    assert view.controls["step"].max == 2
    fresh(view, T=1)
    assert "K tile" in view.image.tooltip


def test_the_owned_tile_is_of_queries_or_of_keys():
    view = widgets.step_through(device="numpy", **SMALL)
    names = []
    for fills in PASSES:
        view.set(fills=fills)
        names.append(view.controls["workgroup"].description)
        assert view.controls["workgroup"].max == (2 if fills in ("O", "dQ") else 4)
    assert names == ["query tile", "query tile", "key tile", "key tile"]


def test_from_forward_to_backward_and_back(pixels):
    view = widgets.step_through(device="numpy", **SMALL)
    forward = view.image.tooltip, view.image.value
    assert "dQ" in fresh(view, fills="dQ")
    view.set(fills="O")
    assert (view.image.tooltip, view.image.value) == forward, "nothing of the other picture is left"


def test_an_error_dims_the_picture_and_the_next_value_recovers(monkeypatch):
    view = widgets.step_through(device="numpy", **SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(widgets_steps, "forward_trace", refuse)
        with pytest.raises(fa.LimitError):
            view.set(head=0)
        assert "no room for &lt;it&gt;" in view.status.value and dim(view)
    assert "queries 8 to 15" in fresh(view, head=1)


def refuse(*_, **__):
    raise fa.LimitError("no room for <it>")


def test_a_picture_that_fails_half_way_is_made_anew(monkeypatch):
    view = widgets.step_through(device="numpy", **SMALL)
    before = view.image.tooltip
    with monkeypatch.context() as patched:
        patched.setattr(BackwardPicture, "__init__", refuse)
        with pytest.raises(fa.LimitError):
            view.set(fills="dQ")
    view.set(fills="O")
    assert view.image.tooltip == before
    assert len(view._canvas.figure.axes) == 9


def test_an_unknown_control_is_named():
    with pytest.raises(TypeError, match="No control is called rows; there are fills, T, tile"):
        widgets.step_through(device="numpy", rows=3)


def test_the_picture_never_moves():
    view = widgets.step_through(device="numpy", **SMALL)
    heights = view.image.layout.height, view.status.layout.height
    assert all(heights)
    view.set(fills="dK", T=7, workgroup=0)
    assert (view.image.layout.height, view.status.layout.height) == heights


def test_moves_leave_nothing_behind(gpu):
    view = widgets.step_through(device=gpu, **SMALL)
    gc.collect()
    figures, artists = count_figures(), len(view._canvas.figure.findobj())
    for fills in ("dV", "O"):
        view.set(fills=fills, workgroup=0)
        view.set(workgroup=1, step=2)
    gc.collect()
    assert count_figures() == figures and len(view._canvas.figure.findobj()) == artists
    assert gpu.memory.live_buffers == 0


@pytest.mark.parametrize(
    ("fills", "at", "workgroup", "step"),
    [("O", (9, 19), 2, 3), ("dQ", (1, 3), 0, 1), ("dK", (1, 17), 0, 3), ("dV", (13, 9), 3, 1)],
)
def test_a_click_on_the_map_goes_to_that_tile(fills, at, workgroup, step):
    """Tiles of 8 queries by 4 keys; `at` is (key, query)."""
    view = widgets.step_through(device="numpy", **SMALL | dict(fills=fills))
    (ax,) = [ax for ax in view._canvas.figure.axes if any(p.get_gid() == "mask" for p in ax.patches)]
    click(view, ax, *at)
    assert (view.values["workgroup"], view.values["step"]) == (workgroup, step)
    shown = view.image.tooltip
    click(view, ax, 19, 1)  # a tile that the mask hides
    click(view, ax, -3, 1)  # beside the map
    assert view.image.tooltip == shown


def test_the_edges_of_the_map_belong_to_its_last_tiles():
    tiles = drawn(small()).map
    box = tiles.ax.bbox
    assert tiles.under(box.x1, box.y0) == (2, 4)
    assert tiles.under(box.x0 + 0.01, box.y1 - 0.01) == (0, 0)
    assert tiles.under(box.x1 + 1, box.y0) is None


def test_a_click_on_an_older_picture_goes_nowhere():
    view = widgets.step_through(device="numpy", **SMALL)
    (ax,) = [ax for ax in view._canvas.figure.axes if any(p.get_gid() == "mask" for p in ax.patches)]
    view.image.dim(True)
    click(view, ax, 9, 19)
    assert view.values["workgroup"] == SMALL["workgroup"]


def test_the_last_of_two_moves_wins(monkeypatch):
    """In an event loop, as in a notebook."""
    view = widgets.step_through(device="numpy", **SMALL)
    plain, seen, begun, go = widgets_steps.steps, [], threading.Event(), threading.Event()

    def slow(**values):
        seen.append(values["step"])
        begun.set()
        assert go.wait(20)
        return plain(**values)

    monkeypatch.setattr(widgets_steps, "steps", slow)

    async def scenario():
        view.controls["step"].value = 0
        while not begun.is_set():
            await asyncio.sleep(0.005)
        for step in (1, 3, 4):
            view.controls["step"].value = step
        go.set()
        await asyncio.wait_for(view._task, 30)

    asyncio.run(scenario())
    assert seen == [0, 4] and "K tile 4 of 4" in view.image.tooltip and not dim(view)


def test_a_row_walk_of_equal_scores_never_rescales():
    walk = small(pattern="equal", causal=False, workgroup=0, step=0).walk
    assert isinstance(walk, QueryWalk) and len(walk.tiles) == 5
    assert (walk.alpha[1:] == 1).all() and (walk.l[-1] == 20).all()
