"""Whole figures put together from `plot`: what the sliders move, and what the notebooks print at fixed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2lab import plot
from fa2lab.results import FULL, PARTIAL, SKIPPED, Result, Trace

if TYPE_CHECKING:
    from fa2lab.parity import Comparison, Row
    from fa2lab.reference import TrueGradients, Truth
    from fa2lab.results import Gradients

MOST_LABELS = 32  # more letters than this do not fit a side of the small heatmap


def walk(
    figure: Figure, result: Result, exact: Trace, *, head: int = 0, row: int = 0, labels: Sequence[str] | None = None
) -> str:
    """One head's weights, its tile map, and one row's m, l and alpha as recorded, over NumPy's: batch 0.

    result: with attn and trace; exact: the float64 walk over the same tiles. Returns the picture in one sentence.
    """
    weights, states, *traces = figure.axes or _walk_axes(figure)
    p, trace = result.problem, result.trace
    tiles = trace.block_q, trace.block_k
    title = f"weights of head {head}; arrows at row {row}"
    plot.heatmap(
        weights,
        result.attn[0, head],
        title=title,
        tiles=tiles,
        masked=~p.mask(),
        labels=labels if p.Tq <= MOST_LABELS else None,
    )
    plot.mark_row(weights, row)
    plot.tile_map(states, trace.state[0, head], p.Tk, tiles=tiles)
    title = f"row {row} of head {head}, tile by tile: marks by {result.kernel}"
    plot.row_trace(traces, trace, exact, at=(0, head, row), title=title)
    plot.footer(figure, f"{result.label}; {p}; tiles {tiles[0]}×{tiles[1]}")
    per_tile = trace.state[0, head, :: trace.block_q]
    full, partial, skipped = (int((per_tile == kind).sum()) for kind in (FULL, PARTIAL, SKIPPED))
    return (
        f"Attention weights of head {head}, a map of {full} full, {partial} partial and {skipped} skipped tiles, and "
        f"m, l and alpha of row {row} over {trace.n_tiles} K tiles as {result.label} recorded them beside NumPy's."
    )


def _walk_axes(figure: Figure) -> list[Axes]:
    """Fixed places: a picture that slides must not shift, and fitting the layout anew would double the time."""
    figure.set_layout_engine("none")
    left = figure.add_gridspec(2, 1, left=0.062, right=0.40, top=0.955, bottom=0.1, hspace=0.3)
    right = figure.add_gridspec(4, 1, left=0.575, right=0.985, top=0.915, bottom=0.1, hspace=0.14)
    return [figure.add_subplot(cell) for cell in (*left, *right)]


def bench(
    figure: Figure,
    result: Result | Gradients,
    truth: Truth | TrueGradients,
    comparison: Comparison,
    *,
    judged: Sequence[Row],
    workgroup_limits: Mapping[str, int],
    buffers: Mapping[str, int],
    avoided: Mapping[str, int],
) -> str:
    """Signed errors of O, or of the worst of dQ, dK and dV, beside those of plain float32; all as bars; and the bytes.

    comparison: of result and truth. judged: the rows to draw as bars, the forward's as well. Bytes by name:
    workgroup_limits for the lines across the workgroup's bar, buffers for what stands in device memory, avoided for
    what need not. Returns the picture in one sentence.
    """
    *maps, bars, workgroup, memory = figure.axes or _bench_axes(figure)
    four_axes = [row for row in comparison.rows if row.place and len(row.place) == 4 and row.field != "attn"]
    worst = max(four_axes, key=lambda row: (row.misplaced, row.error / row.allowed if row.allowed else row.error))
    b, _, h, _ = worst.place
    errors = {}
    with np.errstate(invalid="ignore"):
        for name, got in ((result.kernel, result), ("plain float32", truth.plain)):
            errors[name] = (getattr(got, worst.field) - getattr(truth, worst.field))[b, :, h]
    largest = max(float(np.abs(e[np.isfinite(e)]).max(initial=0.0)) for e in errors.values())
    for ax, (name, error) in zip(maps, errors.items(), strict=True):
        title = f"signed error of {worst.field}, {name}\nbatch {b}, head {h}"
        rows = "key" if worst.field in ("dk", "dv") else "query"
        plot.heatmap(ax, error, title=title, rows=rows, columns="column", symmetric=True, largest=largest)
        ax.set_aspect("auto")
    plot.error_bars(bars, judged)
    if plan := result.plan:
        name = f"tiles {plan.block_q}×{plan.block_k}" if plan.kernel.tiled else plan.kernel.name
        title = "workgroup memory of one workgroup"
        plot.byte_bars(workgroup, {name: plan.workgroup_bytes}, title=title, limits=workgroup_limits)
        launches = len(plan.chunks)
        title = f"device buffers, largest of {launches} launches" if launches > 1 else "device buffers"
        plot.byte_bars(memory, buffers, title=title, absent=avoided)
    else:
        for ax in (workgroup, memory):
            ax.clear()
            ax.set_axis_off()
            ax.text(0.5, 0.5, "no device memory: NumPy computed this", ha="center")
    plot.footer(figure, f"{result.label}; {result.problem}; scale {result.problem.scale:.6g}")
    largest_errors = ", ".join(f"{row.field} {row.error:.1e} of {row.allowed:.1e} allowed" for row in judged)
    verdict = "within float32" if all(row.ok for row in judged) else "not within float32"
    return f"Error maps, error bars and bytes of {result.label}: {verdict}; largest errors {largest_errors}."


def _bench_axes(figure: Figure) -> list[Axes]:
    figure.set_layout_engine("none")
    maps = figure.add_gridspec(1, 2, left=0.055, right=0.59, top=0.92, bottom=0.46, wspace=0.55)
    bars = figure.add_gridspec(1, 1, left=0.715, right=0.985, top=0.92, bottom=0.46)
    below = figure.add_gridspec(1, 2, left=0.1, right=0.985, top=0.335, bottom=0.125, wspace=0.2)
    return [figure.add_subplot(cell) for cell in (*maps, *bars, *below)]
