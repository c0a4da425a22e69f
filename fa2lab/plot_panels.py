"""Whole figures put together from `plot`: what the sliders move, and what the notebooks print at fixed values."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2lab import plot
from fa2lab.plot_sheet import Sheet
from fa2lab.plot_trace import row_trace_on
from fa2lab.results import FULL, PARTIAL, SKIPPED, Result, Trace

MOST_LABELS = 32  # more letters than this do not fit a side of the small heatmap


def walk(
    sheet: Sheet, result: Result, exact: Trace, *, head: int = 0, row: int = 0, labels: Sequence[str] | None = None
) -> str:
    """One head's weights, its tile map, and one row's m, l and alpha as recorded, over NumPy's: batch 0.

    result: with attn and trace; exact: the float64 walk over the same tiles. Returns the picture in one sentence.
    """
    weights, states, *traces = sheet.axes(_axes)
    p, trace = result.problem, result.trace
    tiles = trace.block_q, trace.block_k
    sheet.still(
        plot.heatmap,
        weights,
        result.attn[0, head],
        tiles=tiles,
        masked=~p.mask(),
        labels=labels if p.Tq <= MOST_LABELS else None,
    )
    sheet.over(weights.set_title(f"weights of head {head}; arrows at row {row}", fontsize=10, y=1.0))
    plot.mark_row(weights, row)
    sheet.still(plot.tile_map, states, trace.state[0, head], p.Tk, tiles=tiles)
    title = f"row {row} of head {head}, tile by tile: marks by {result.kernel}"
    row_trace_on(sheet, traces, trace, exact, at=(0, head, row), title=title)
    plot.footer(sheet.figure, f"{result.label}; {p}; tiles {tiles[0]}×{tiles[1]}")
    per_tile = trace.state[0, head, :: trace.block_q]
    full, partial, skipped = (int((per_tile == kind).sum()) for kind in (FULL, PARTIAL, SKIPPED))
    return (
        f"Attention weights of head {head}, a map of {full} full, {partial} partial and {skipped} skipped tiles, and "
        f"m, l and alpha of row {row} over {trace.n_tiles} K tiles as {result.label} recorded them beside NumPy's."
    )


def _axes(figure: Figure) -> list[Axes]:
    """Fixed places."""
    left = figure.add_gridspec(2, 1, left=0.062, right=0.40, top=0.955, bottom=0.1, hspace=0.3)
    right = figure.add_gridspec(4, 1, left=0.575, right=0.985, top=0.915, bottom=0.1, hspace=0.14)
    return [figure.add_subplot(cell) for cell in (*left, *right)]
