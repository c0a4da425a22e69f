"""The views: what they compute, what they show, and that nothing piles up, whatever is moved in whatever order."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import threading

import engines
import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import fa2lab as fa
from fa2lab import plot, widgets
from fa2lab.live import View
from fa2lab.results import TILE_STATES

PNG = b"\x89PNG"


@pytest.fixture(params=[engines.seat_param(engines.Seat("llvmpipe", "naga", "adapter"))])
def gpu(request):
    """One device is enough here: what kernels compute elsewhere is not the widgets' affair."""
    return engines.device_of(request.param)


@pytest.fixture(params=["numpy", engines.seat_param(engines.Seat("llvmpipe", "naga", "adapter"))])
def seat(request):
    """NumPy, and a device."""
    return request.param if request.param == "numpy" else engines.device_of(request.param)


@pytest.fixture(autouse=True)
def nothing_kept():
    """No figure of pyplot's, and no traced run beyond its test."""
    yield
    assert plt.get_fignums() == []
    widgets._traced.cache_clear()


@pytest.fixture
def pixels():
    """For a test that wants its pictures painted; see `unpainted`."""


@pytest.fixture(autouse=True)
def unpainted(request, monkeypatch):
    """Painting takes most of a move's time. Without `pixels` each picture is another stub of a PNG."""
    if "pixels" not in request.fixturenames:
        count = itertools.count()
        monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda _, file: file.write(PNG + b"%d" % next(count)))


def fresh(view: View, **values) -> str:
    """Move the view and return the alternative text of the new picture."""
    before = view.image.value
    view.set(**values)
    assert view.image.value[:4] == PNG and view.image.value != before
    assert not dim(view)
    return view.image.tooltip


def dim(view: View) -> bool:
    """Whether the browser dims the picture: by a class, since ipywidgets' layout knows no opacity."""
    return "fa2lab-stale" in view.image.get_state()["_dom_classes"]


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
    monkeypatch.setattr(widgets, "attention", None)  # a call would raise
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


# Parity


def test_bench_judges_gradients_where_asked(gpu):
    got = widgets.bench(T=33, H=3, hd=8, grad=True, device=gpu)
    assert [row.field for row in got.comparison.rows] == ["out", "lse"]
    assert [row.field for row in got.of_gradients.rows] == ["dq", "dk", "dv"] and got.of_gradients.ok
    assert got.words.count("within float32") == 2 and "dv" in got.words
    assert widgets.bench(T=9, hd=4, device=gpu).of_gradients is None
    view = widgets.parity(device=gpu, T=17, hd=8)
    assert "dq" not in fresh(view, H=1)
    with_gradients = fresh(view, grad=True)
    assert all(name in with_gradients for name in ("dq", "dk", "dv", "lse"))
    assert "dq" not in fresh(view, grad=False)
    view.close()


def test_bench_judges_by_the_reference(gpu):
    got = widgets.bench(T=33, H=3, hd=40, B=2, seed=5, scale=-0.5, device=gpu)
    q, k, v = fa.data.make("random", T=33, H=3, D=40, B=2, seed=5)
    np.testing.assert_array_equal(got.truth.out, fa.reference.attention(q, k, v, causal=True, scale=-0.5).out)
    assert got.comparison.ok and got.result.problem.scale == -0.5


@pytest.mark.parametrize("kernel", ["naive", "fused_sv", "fa2_forward"])
def test_parity_view_over_kernels_and_sizes(gpu, kernel, pixels):
    view = widgets.parity(device=gpu, kernel=kernel, T=17, hd=40)
    for values in (dict(T=33, H=3, B=2), dict(causal=False, pattern="huge"), dict(T=1, hd=64)):
        text = fresh(view, **values)
        assert kernel in text and "within float32" in text and "not within" not in text
        assert "✓" in view.status.value


def test_bytes_are_the_plans(gpu):
    view = widgets.parity(device=gpu, T=33, hd=64)
    *_, workgroup, memory = view._canvas.figure.axes
    assert [bar.get_width() for bar in workgroup.patches] == [12_288]
    sizes = {
        tick.get_text(): bar.get_width() for tick, bar in zip(memory.get_yticklabels(), memory.patches, strict=True)
    }
    arrays = dict.fromkeys(("q", "k", "v", "out"), 4 * 33 * 2 * 64)
    assert sizes == arrays | {"lse": 4 * 33 * 2, "attn": 4 * 2 * 33 * 33}
    assert [bar.get_gid() for bar in memory.patches][-1] == "absent", "attn is what fa2_forward avoids"
    view.set(kernel="naive")
    assert "absent" not in [bar.get_gid() for bar in memory.patches]


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.3])
def test_scale_by_slider_or_default(scale):
    view = widgets.parity(device="numpy", T=9, hd=16)
    assert view.controls["scale"].disabled
    assert "scale 0.25" in _footer_after(view)
    assert f"scale {scale:g}" in _footer_after(view, default_scale=False, scale=scale)
    assert not view.controls["scale"].disabled
    assert "scale 0.25" in _footer_after(view, default_scale=True)


def _footer_after(view: View, **values) -> str:
    view.set(**values)
    return view._canvas.figure.get_supxlabel()


def test_a_scale_to_start_with():
    assert "scale -0.5" in _footer_after(widgets.parity(device="numpy", T=9, scale=-0.5))
    assert widgets.parity(device="numpy", T=9, scale=None).values["default_scale"] is True


def test_a_broken_kernel_goes_red(gpu):
    broken = fa.kernels()["fa2_forward"].edited("l *= alpha;", "")
    view = widgets.parity(kernel=broken, device=gpu, pattern="huge", T=40)
    assert "✗" in view.status.value and "not within float32" in view.image.tooltip
    assert "✓" in _words_after(view, kernel="fa2_forward")
    assert "✗" in _words_after(view, kernel=broken)


def _words_after(view: View, **values) -> str:
    view.set(**values)
    return view.status.value


def test_a_refusal_is_shown_and_the_next_value_recovers(gpu):
    view = widgets.parity(device=gpu, kernel="fused_sv", T=9)
    good = view.image.value
    with pytest.raises(fa.LimitError, match="up to 1024 keys; got Tk=1,030"):
        view.set(T=1030)
    assert "up to 1024 keys" in view.status.value and 'role="alert"' in view.status.value
    assert view.image.value == good and dim(view)
    assert "older picture" in view.image.tooltip
    view.controls["T"].value = 1031  # by hand, the view swallows the error
    assert "Tk=1,031" in view.status.value
    fresh(view, T=10)
    assert "✓" in view.status.value


def test_wgsl_that_does_not_compile_shows_its_place(gpu):
    typo = fa.kernels()["fa2_forward"].edited("var l = 0.0;", "var l = 0.0")
    view = widgets.parity(device=gpu, T=9)
    view.controls["kernel"].options = [*view.controls["kernel"].options, ("typo", typo)]
    view.controls["kernel"].value = typo
    assert "fa2_forward.wgsl:" in view.status.value


# Both


@pytest.mark.parametrize(("view_of", "plain"), [(widgets.tiles, widgets.walk), (widgets.parity, widgets.bench)])
def test_sliders_start_where_the_plain_function_does(view_of, plain):
    """The static figure before a widget shows the same values."""
    view = view_of(device="numpy")
    defaults = {name: p.default for name, p in inspect.signature(plain).parameters.items() if name != "device"}
    moved = view.values
    if "default_scale" in moved:
        moved["scale"] = None if moved.pop("default_scale") else moved["scale"]
    assert moved == defaults
    figure = plot.figure(*widgets.WALK_SIZE)
    assert plain(device="numpy").draw(figure) == view.image.tooltip


@pytest.mark.parametrize("view_of", [widgets.tiles, widgets.parity])
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


@pytest.mark.parametrize("view_of", [widgets.tiles, widgets.parity])
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
    monkeypatch.setattr(widgets, "bench", lambda **values: calls.append(values) or _bench(**values))
    views = [widgets.parity(device="numpy", T=9, hd=4) for _ in range(2)]
    calls.clear()
    views[1].controls["T"].value = 10
    assert [call["T"] for call in calls] == [10]


_bench = widgets.bench


def count_figures() -> int:
    """By type(), since isinstance would follow the weak proxies among them, which may be dead."""
    return sum(issubclass(type(thing), Figure) for thing in gc.get_objects())


def test_moves_leave_nothing_behind(gpu, pixels):
    """Exact counts, so that one thing kept a move would show at once."""
    tiles, parity = widgets.tiles(device=gpu, T=20, row=3, D=8), widgets.parity(device=gpu, T=20, hd=8)
    gc.collect()
    figures = count_figures()
    axes = [len(view._canvas.figure.axes) for view in (tiles, parity)]
    artists = [len(view._canvas.figure.findobj()) for view in (tiles, parity)]
    for i in range(4):
        tiles.set(T=20 + i % 3, row=i % 20, head=i % 2)
        parity.set(T=20 + i % 3, seed=i)
    tiles.set(T=20, row=3, head=0)
    parity.set(T=20, seed=0)
    gc.collect()
    assert count_figures() == figures
    assert [len(view._canvas.figure.axes) for view in (tiles, parity)] == axes
    assert [len(view._canvas.figure.findobj()) for view in (tiles, parity)] == artists
    assert plt.get_fignums() == []
    assert gpu.memory.live_buffers == 0


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
