"""Sliders over the functions of fa2lab. No mathematics and no drawing: each view has a plain function under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from fa2lab import data, plot, plot_panels, reference
from fa2lab.attention import attention
from fa2lab.backward import attention_backward
from fa2lab.gpu import Device
from fa2lab.kernels import TILES, Kernel, kernels
from fa2lab.limits import BROWSER
from fa2lab.live import View
from fa2lab.parity import Comparison, compare, compare_traces
from fa2lab.results import Gradients, Result, Trace

WALK_SIZE, BENCH_SIZE = (10.4, 7.0), (10.4, 6.4)  # inches


@dataclass(frozen=True, eq=False)
class Walk:
    """One traced run, the float64 walk over the same tiles, and the head and row to look at."""

    result: Result
    exact: Trace
    comparison: Comparison
    head: int
    row: int
    labels: Sequence[str] | None

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `WALK_SIZE`; returns the picture in one sentence."""
        return plot_panels.walk(figure, self.result, self.exact, head=self.head, row=self.row, labels=self.labels)

    @property
    def words(self) -> str:
        """The verdict on the trace, as HTML."""
        return self.comparison._repr_html_()


def walk(
    *,
    T: int = 96,
    H: int = 2,
    D: int = 16,
    head: int = 0,
    row: int = 91,
    causal: bool = True,
    pattern: str = "text",
    tile: tuple[int, int] | tuple[()] = (),
    device: Device | str | None = None,
) -> Walk:
    """Run `fa2_forward` on a named input with its trace, and NumPy beside it.

    tile: `(block_q, block_k)`, or () for what the planner takes. Raises `IndexError` for a head or row that is none.
    """
    if not (0 <= head < H and 0 <= row < T):
        raise IndexError(f"head must be below H={H} and row below T={T}; got head {head} and row {row}.")
    # Head and row choose what is shown, not what is computed: sliding them runs no kernel.
    result, exact, comparison = _traced(T, H, D, causal, pattern, tile, device)
    labels = list(data.SAMPLE_TEXT.read_bytes()[:T].decode("latin-1")) if pattern == "text" else None
    return Walk(result, exact, comparison, head, row, labels)


@lru_cache(maxsize=1)
def _traced(T, H, D, causal, pattern, tile, device) -> tuple[Result, Trace, Comparison]:
    arrays = data.make(pattern, T=T, H=H, D=D)
    block_q, block_k = tile or (None, None)
    options = dict(block_q=block_q, block_k=block_k, return_attn=True, trace=True)
    result = attention(*arrays, causal=causal, kernel="fa2_forward", device=device, **options)
    trace = result.trace
    exact = reference.tiled(*arrays, block_q=trace.block_q, block_k=trace.block_k, causal=causal).trace
    comparison = compare_traces(result, reference.attention(*arrays, causal=causal))
    return result, exact, comparison


def tiles(*, device: Device | str | None = None, **values) -> View:
    """A view over `walk`: weights of a head, its tile map, and m, l and alpha of a row as the kernel recorded them.

    values: where the sliders start, by the names of `walk`'s arguments.
    """
    controls = {
        "T": _slider("T length", "Number of queries and keys", 96, 1, 256),
        "H": _slider("H heads", "Number of heads", 2, 1, 8),
        "D": _slider("D head size", "Numbers in one head's vectors", 16, 1, 128),
        "head": _slider("head", "Head that is shown", 0, 0, 1, live=True),
        "row": _slider("row", "Query row whose trace is shown", 91, 0, 95, live=True),
        "tile": _choice("tile Br×Bc", "Queries by keys of a tile", [("planned", ()), *map(_tile_option, TILES)], ()),
        "pattern": _choice("input", "Pattern of the input arrays", list(data.PATTERNS), "text"),
        "causal": _tick("causal mask", "Each query sees itself and the keys before it", True),
    }
    ipywidgets.dlink((controls["H"], "value"), (controls["head"], "max"), lambda H: H - 1)
    ipywidgets.dlink((controls["T"], "value"), (controls["row"], "max"), lambda T: T - 1)
    return _view(controls, lambda **moved: walk(**moved, device=device), WALK_SIZE, values, words_height="205px")


@dataclass(frozen=True, eq=False)
class Bench:
    """One run held against the truth."""

    result: Result
    truth: reference.Truth
    comparison: Comparison
    gradients: Gradients | None = None
    true_gradients: reference.TrueGradients | None = None
    of_gradients: Comparison | None = None

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `BENCH_SIZE`; returns the picture in one sentence."""
        shown = self.result, self.truth, self.comparison
        judged = self.comparison.rows
        if self.gradients:
            shown = self.gradients, self.true_gradients, self.of_gradients
            judged += self.of_gradients.rows
        limits, used, avoided = {}, {}, {}
        if plan := shown[0].plan:
            limits = {"this device": plan.limits.workgroup_bytes, "a browser": BROWSER.workgroup_bytes}
            used = plan.buffer_bytes()
            idle = {"attn": not plan.constants["WRITE_ATTN"], "trace": not plan.trace}
            used = {name: n for name, n in used.items() if not idle.get(name)}
            if not self.gradients and "attn" not in used:
                avoided = {"attn": replace(plan, return_attn=True).buffer_bytes()["attn"]}
        return plot_panels.bench(
            figure,
            *shown,
            judged=judged,
            workgroup_limits=limits,
            buffers=used,
            avoided=avoided,
        )

    @property
    def words(self) -> str:
        """The verdict, or both, as HTML."""
        found = filter(None, (self.comparison, self.of_gradients))
        return "".join(comparison._repr_html_() for comparison in found)


def bench(
    *,
    T: int = 65,
    H: int = 2,
    hd: int = 40,
    B: int = 1,
    scale: float | None = None,
    seed: int = 0,
    kernel: str | Kernel = "fa2_forward",
    pattern: str = "random",
    causal: bool = True,
    grad: bool = False,
    device: Device | str | None = None,
) -> Bench:
    """Run a kernel on a named input and compare it with the float64 truth. scale: None for 1/sqrt(hd).

    grad: also run the backward kernel `"fa2"` for a random dO, and hold dQ, dK and dV against theirs.
    """
    arrays = data.make(pattern, B=B, T=T, H=H, D=hd, seed=seed)
    result = attention(*arrays, causal=causal, scale=scale, kernel=kernel, device=device)
    truth = reference.attention(*arrays, causal=causal, scale=scale)
    found = Bench(result, truth, compare(result, truth))
    if not grad:
        return found
    dout = data.make("random", B=B, T=T, H=H, D=hd, seed=seed + 1).q
    wishes = dict(causal=causal, scale=scale)
    gradients = attention_backward(*arrays, result.out, result.lse, dout, **wishes, kernel="fa2", device=device)
    expected = reference.attention_backward(*arrays, dout, **wishes)
    return replace(found, gradients=gradients, true_gradients=expected, of_gradients=compare(gradients, expected))


def parity(*, kernel: str | Kernel = "fa2_forward", device: Device | str | None = None, **values) -> View:
    """A view over `bench`: the verdict, error maps, errors beside those of plain float32, and the bytes.

    kernel: where the kernel control starts; a `Kernel` of your own, edited say, joins the list.
    values: where the other controls start, by the names of `bench`'s arguments.
    """
    choices = [(name, name) for name in kernels()]
    if isinstance(kernel, Kernel):
        choices.append((f"{kernel.name}, yours", kernel))
    controls = {
        "T": _slider("T length", "Number of queries and keys", 65, 1, 1100),
        "H": _slider("H heads", "Number of heads", 2, 1, 8),
        "hd": _slider("hd head size", "Numbers in one head's vectors", 40, 1, 256),
        "B": _slider("B batch", "Number of sequences", 1, 1, 4),
        "default_scale": _tick("scale 1/√hd", "Scale the scores by 1/sqrt(hd), whatever the scale slider says", True),
        "scale": ipywidgets.FloatSlider(
            0.25, min=-2, max=2, step=0.05, description="scale", tooltip="Factor of the scores", **_SLIDER_STYLE
        ),
        "seed": ipywidgets.BoundedIntText(
            0, min=0, max=9999, description="seed", tooltip="Seed of the random numbers", **_STYLE
        ),
        "kernel": _choice("kernel", "WGSL kernel that computes", choices, kernel),
        "pattern": _choice("input", "Pattern of the input arrays", list(data.PATTERNS), "random"),
        "causal": _tick("causal mask", "Each query sees itself and the keys before it", True),
        "grad": _tick("gradients", "Also run the backward pass and judge dQ, dK and dV", False),
    }
    ipywidgets.dlink((controls["default_scale"], "value"), (controls["scale"], "disabled"))
    if "scale" in values:
        values["default_scale"] = values["scale"] is None
        values["scale"] = controls["scale"].value if values["scale"] is None else values["scale"]

    def compute(default_scale: bool, scale: float, **moved) -> Bench:
        return bench(scale=None if default_scale else scale, **moved, device=device)

    return _view(controls, compute, BENCH_SIZE, values, words_height="245px")


def _view(
    controls: dict[str, ipywidgets.Widget],
    compute: Callable[..., Any],
    size: tuple[float, float],
    values: dict[str, Any],
    *,
    words_height: str,
) -> View:
    unknown = sorted(set(values) - set(controls))
    if unknown:
        raise TypeError(f"No control is called {', '.join(unknown)}; there are {', '.join(controls)}.")
    for name in controls:  # in this order: T and H come before row and head, whose range they set
        if name in values:
            controls[name].value = values[name]
    return View(
        controls,
        compute,
        lambda figure, shown: shown.draw(figure),
        plot.figure(*size),
        words=lambda shown: shown.words,
        words_height=words_height,
    )


_STYLE: dict[str, Any] = dict(style={"description_width": "84px"}, layout={"width": "300px"})
# A kernel run and a figure take longer than a drag's steps; the number follows the hand, the picture the release.
_SLIDER_STYLE: dict[str, Any] = dict(continuous_update=False, **_STYLE)


def _slider(label: str, says: str, value: int, low: int, high: int, *, live: bool = False) -> ipywidgets.IntSlider:
    style = _SLIDER_STYLE | {"continuous_update": live}
    return ipywidgets.IntSlider(value, min=low, max=high, description=label, tooltip=says, **style)


def _choice(label: str, says: str, options: list, value: Any) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=options, value=value, description=label, tooltip=says, **_STYLE)


def _tick(label: str, says: str, value: bool) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(value, description=label, tooltip=says, indent=False, layout={"width": "180px"})


def _tile_option(tile: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    return f"{tile[0]}×{tile[1]}", tile
