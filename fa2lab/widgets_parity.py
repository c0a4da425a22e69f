"""The parity bench: one run held against float64, everything about it in one view. `bench` is the function under it."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import ipywidgets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fa2lab import data, plot, plot_parity, reference
from fa2lab.attention import attention
from fa2lab.backward import attention_backward
from fa2lab.error_maps import ULP_EDGES, by_row, tile_sizes, ulp_shares
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.kernels import kernels
from fa2lab.limits import BROWSER
from fa2lab.live import View
from fa2lab.parity import Comparison, Row, compare
from fa2lab.parity_report import report, to_json
from fa2lab.plot_sheet import Sheet
from fa2lab.results import Gradients, Result
from fa2lab.widgets_controls import SLIDER_STYLE, STYLE, choice, sheet_view, slider, start_at, tick
from fa2lab.widgets_export import Export

BENCH_SIZE = (10.8, 11.0)  # inches


@dataclass(frozen=True, eq=False)
class Bench:
    """One run held against the truth, and the row of it to look at."""

    result: Result
    truth: reference.Truth
    comparison: Comparison
    gradients: Gradients | None = None
    true_gradients: reference.TrueGradients | None = None
    of_gradients: Comparison | None = None
    head: int | None = None  # batch · H + head; None, as for row, for the worst place
    row: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)  # wall clock by run
    inputs: Mapping[str, Any] = field(default_factory=dict)  # how the input arrays were made

    @property
    def shown(self) -> tuple[Result | Gradients, reference.Truth | reference.TrueGradients, Comparison]:
        """What the maps show: the gradients where there are some, else the forward."""
        if self.gradients:
            return self.gradients, self.true_gradients, self.of_gradients
        return self.result, self.truth, self.comparison

    @property
    def judged(self) -> tuple[Row, ...]:
        """Every field that was compared, the forward's first."""
        return self.comparison.rows + (self.of_gradients.rows if self.of_gradients else ())

    @property
    def worst(self) -> Row:
        """Of the fields with a row of columns each, the one that is farthest from its bound."""
        rows = [row for row in self.shown[2].rows if row.place and row.field not in ("lse", "attn")]
        return max(rows, key=lambda row: (row.misplaced, row.error / row.allowed if row.allowed else row.error))

    @property
    def at(self) -> tuple[int, int]:
        """The chosen cell of the error map, `(batch · H + head, row)`."""
        b, row, h, _ = self.worst.place
        heads = self.result.problem.H
        return (b * heads + h if self.head is None else self.head, row if self.row is None else self.row)

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `BENCH_SIZE`; returns the picture in one sentence."""
        return self.show(Sheet(figure))

    def show(self, sheet: Sheet) -> str:
        """Draw on a sheet of benches, anew only where it shows something else. Returns one sentence."""
        result, truth, _ = self.shown
        name = self.worst.field
        got, true, plain = (getattr(x, name) for x in (result, truth, truth.plain))
        limits, buffers, absent = {}, {}, {}
        if plan := result.plan:
            limits = {"this device": plan.limits.workgroup_bytes, "a browser": BROWSER.workgroup_bytes}
            idle = {"attn": not plan.constants["WRITE_ATTN"], "trace": not plan.trace}
            buffers = {name: n for name, n in plan.buffer_bytes().items() if not idle.get(name)}
            if not self.gradients and not plan.kernel.materialises:
                buffers.pop("attn", None)
                absent = {"attn": replace(plan, return_attn=True).buffer_bytes()["attn"]}
        return plot_parity.bench(
            sheet,
            result,
            truth,
            truth.plain,
            field=name,
            errors=by_row(got, true),
            at=self.at,
            shares={result.kernel: ulp_shares(got, true), "plain float32": ulp_shares(plain, true)},
            edges=ULP_EDGES,
            judged=self.judged,
            sizes=tile_sizes(plan) if plan else [],
            workgroup_limits=limits,
            buffers=buffers,
            absent=absent,
            absent_says="avoided" if self.result.attn is None else "as asked",
        )

    @property
    def words(self) -> str:
        """The verdict, or both, and the time that the run took, as HTML."""
        found = filter(None, (self.comparison, self.of_gradients))
        took = ", ".join(f"{name} {1e3 * seconds:,.1f} ms" for name, seconds in self.seconds.items())
        clock = "wall clock of this one run: upload, dispatch and readback, and compiling where the kernel is new"
        tables = "".join(comparison._repr_html_() for comparison in found)
        return tables + (f"<div><b>time</b> &nbsp; {took} &nbsp; ({clock})</div>" if took else "")

    def report(self) -> dict[str, Any]:
        """The run in JSON's own types: see `parity_report.report`."""
        runs = {"forward": (self.result, self.comparison)}
        if self.gradients:
            runs["gradients"] = self.gradients, self.of_gradients
        return report(runs, inputs=self.inputs, seconds=self.seconds)

    def picture(self, kind: str) -> bytes:
        """The figure as a file's bytes. kind: `"png"` or `"svg"`; the same run gives the same bytes."""
        figure, content = plot.figure(*BENCH_SIZE), io.BytesIO()
        FigureCanvasAgg(figure)
        self.draw(figure)
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
        return content.getvalue()


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
    attn: bool = True,
    grad: bool = False,
    head: int | None = None,
    row: int | None = None,
    device: Device | str | None = None,
) -> Bench:
    """Run a kernel on a named input and compare it with the float64 truth. scale: None for 1/sqrt(hd).

    attn: also ask for P and judge it. grad: also run the backward kernel `"fa2"` for a random dO, and hold dQ, dK and
    dV against theirs. head, row: where to look, head counted over the batches (batch · H + head); None for where it is
    worst. Raises `IndexError` for a head or row that is none.
    """
    for name, n, end in (("head", head, B * H), ("row", row, T)):
        if n is not None and not 0 <= n < end:
            raise IndexError(f"{name} must be from 0 to {end - 1}; got {n}.")
    # Head and row choose what is shown, not what is computed: sliding them runs no kernel.
    return replace(_judged(T, H, hd, B, scale, seed, kernel, pattern, causal, attn, grad, device), head=head, row=row)


@lru_cache(maxsize=1)
def _judged(T, H, hd, B, scale, seed, kernel, pattern, causal, attn, grad, device) -> Bench:
    arrays = data.make(pattern, B=B, T=T, H=H, D=hd, seed=seed)
    wishes = dict(causal=causal, scale=scale)
    begin = time.perf_counter()
    result = attention(*arrays, **wishes, kernel=kernel, return_attn=attn, device=device)
    seconds = {"forward": time.perf_counter() - begin}
    truth = reference.attention(*arrays, **wishes, return_attn=attn)
    inputs = {"pattern": pattern, "seed": seed}
    found = Bench(result, truth, compare(result, truth), seconds=seconds, inputs=inputs)
    if not grad:
        return found
    dout = data.make("random", B=B, T=T, H=H, D=hd, seed=seed + 1).q
    begin = time.perf_counter()
    gradients = attention_backward(*arrays, result.out, result.lse, dout, **wishes, kernel="fa2", device=device)
    seconds["gradients"] = time.perf_counter() - begin
    expected = reference.attention_backward(*arrays, dout, **wishes)
    return replace(found, gradients=gradients, true_gradients=expected, of_gradients=compare(gradients, expected))


def parity(*, kernel: str | Kernel = "fa2_forward", device: Device | str | None = None, **values) -> View:
    """A view over `bench`: verdict, error maps, a row's values, a histogram of ULPs, bytes and time; and its export.

    kernel: where the kernel control starts; a `Kernel` of your own, edited say, joins the list.
    values: where the other controls start, by the names of `bench`'s arguments.
    """
    choices = [(name, name) for name in kernels()]
    if isinstance(kernel, Kernel):
        choices.append((f"{kernel.name}, yours", kernel))
    controls = {
        "T": slider("T length", "Number of queries and keys", 65, 1, 1100),
        "H": slider("H heads", "Number of heads", 2, 1, 8),
        "hd": slider("hd head size", "Numbers in one head's vectors", 40, 1, 256),
        "B": slider("B batch", "Number of sequences", 1, 1, 4),
        "default_scale": tick("scale 1/√hd", "Scale the scores by 1/sqrt(hd), whatever the scale slider says", True),
        "scale": ipywidgets.FloatSlider(
            0.25, min=-2, max=2, step=0.05, description="scale", tooltip="Factor of the scores", **SLIDER_STYLE
        ),
        "seed": ipywidgets.BoundedIntText(
            0, min=0, max=9999, description="seed", tooltip="Seed of the random numbers", **STYLE
        ),
        "kernel": choice("kernel", "WGSL kernel that computes", choices, kernel),
        "pattern": choice("input", "Pattern of the input arrays", list(data.PATTERNS), "random"),
        "causal": tick("causal mask", "Each query sees itself and the keys before it", True),
        "attn": tick("attn", "Also ask for the weights P, and judge them", True),
        "grad": tick("gradients", "Also run the backward pass and judge dQ, dK and dV", False),
        "worst": tick("show the worst row", "Show the worst place, whatever the sliders head and row say", True),
        "head": slider("head", "Head whose errors are shown, over the batches; or click a cell", 0, 0, 1, live=True),
        "row": slider("row", "Row whose values are shown; or click a cell", 0, 0, 64, live=True),
    }
    link = ipywidgets.dlink
    link((controls["default_scale"], "value"), (controls["scale"], "disabled"))
    for name in ("head", "row"):
        link((controls["worst"], "value"), (controls[name], "disabled"))
    link((controls["T"], "value"), (controls["row"], "max"), lambda T: T - 1)
    for name in ("B", "H"):
        link((controls[name], "value"), (controls["head"], "max"), lambda _: _heads(controls) - 1)
    values = {"kernel": kernel} | values
    if "scale" in values:
        values["default_scale"] = values["scale"] is None
        values["scale"] = controls["scale"].value if values["scale"] is None else values["scale"]
    if {"head", "row"} & {name for name, value in values.items() if value is not None}:
        values = {"worst": False} | {name: value for name, value in values.items() if value is not None}

    def compute(default_scale: bool, scale: float, worst: bool, head: int, row: int, **moved) -> Bench:
        at = {} if worst else {"head": head, "row": row}
        return bench(scale=None if default_scale else scale, **moved, **at, device=device)

    start_at(controls, values)
    made = sheet_view(
        controls,
        compute,
        BENCH_SIZE,
        words_height="252px",
        at=place,
    )
    contents = {
        "json": lambda: to_json(compute(**made.values).report()),
        "png": lambda: compute(**made.values).picture("png"),
        "svg": lambda: compute(**made.values).picture("svg"),
    }
    made.export = Export(contents, {"json": "report", "png": "figure", "svg": "figure"}, name="parity")
    made.widget.children = (*made.widget.children, made.export.widget)
    return made


def place(figure: Figure, x: float, y: float) -> dict[str, int | bool]:
    """The head and row of the error map's cell under display coordinates, which is then what is shown."""
    found = plot.under(figure.axes[:1], x, y)
    return {"worst": False, "head": round(found[2]), "row": round(found[1])} if found else {}


def _heads(controls: Mapping[str, ipywidgets.Widget]) -> int:
    return controls["B"].value * controls["H"].value
