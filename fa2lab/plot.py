"""Pictures: arrays in, matplotlib Axes out. Computes nothing beyond what presentation needs.

Every function draws afresh on the Axes or Figure it is handed, so calling it again updates a picture in place. Colour
is never alone: what it says also stands in hatching, marks, lightness or words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from fa2lab.plot_bars import byte_bars, error_bars
from fa2lab.plot_style import BOUND, CALM, INK, KERNEL, PLAIN
from fa2lab.plot_trace import row_trace
from fa2lab.results import FULL, PARTIAL, SKIPPED, TILE_STATES

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

__all__ = [
    "BOUND",
    "CALM",
    "INK",
    "KERNEL",
    "PLAIN",
    "byte_bars",
    "error_bars",
    "figure",
    "footer",
    "heatmap",
    "heads",
    "mark_row",
    "row_trace",
    "tile_map",
    "under",
]

MOST_LABELS = 48  # more tick strings than this do not fit a side
MOST_TILE_LINES = 64  # a finer tile grid would cover what it divides


def figure(width: float = 9.6, height: float = 6.4) -> Figure:
    """A white figure of so many inches that lays itself out and belongs to no pyplot."""
    return Figure(figsize=(width, height), dpi=120, facecolor="white", layout="constrained")


def footer(figure: Figure | SubFigure, text: str) -> None:
    """The line at the foot of a figure that says who computed it: kernel and adapter. A second call replaces it."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=CALM, parse_math=False)


def under(axes: Iterable[Axes], x: float, y: float) -> tuple[int, float, float] | None:
    """Which of the axes lies under these display coordinates, counted from 0, and its data coordinates there."""
    for n, ax in enumerate(axes):
        if ax.axison and ax.bbox.contains(x, y):
            return n, *ax.transData.inverted().transform((x, y))
    return None


def heatmap(
    ax: Axes,
    weights: np.ndarray,
    *,
    title: str = "",
    rows: str = "query",
    columns: str = "key",
    tiles: tuple[int, int] | None = None,
    masked: np.ndarray | None = None,
    footer: str | None = None,
    symmetric: bool = False,
    labels: Sequence[str] | None = None,
    largest: float | None = None,
) -> Axes:
    """A matrix as colours, one cell an entry.

    weights: `(Tq, Tk)`. From 0 to the largest on viridis; `symmetric` centres a diverging map on 0, for scores and
    errors. `largest` fixes the end of the scale. masked: boolean `(Tq, Tk)`, drawn as hatched grey, unlike a zero.
    tiles: `(block_q, block_k)`, drawn as a grid. labels: a string a position, for each axis that has so many.
    NaN and infinity are crossed out in red.
    """
    weights = np.asarray(weights, dtype=np.float64)
    hidden = np.zeros(weights.shape, bool) if masked is None else np.asarray(masked, bool)
    finite = np.isfinite(weights)
    shown = np.abs(weights[finite & ~hidden])
    top = largest if largest is not None else float(shown.max(initial=0.0))
    end = top or 1.0  # an all-zero matrix still needs a scale
    ax.clear()
    n_q, n_k = weights.shape
    image = ax.imshow(
        np.ma.masked_where(~finite | hidden, weights),
        cmap="RdBu_r" if symmetric else "viridis",
        vmin=-end if symmetric else 0.0,
        vmax=end,
        interpolation="nearest",
        aspect="equal" if max(n_q, n_k) <= 3 * min(n_q, n_k) else "auto",
    )
    notes = []
    if hidden.any():
        ax.add_collection(_hatched_grey(hidden))
        notes.append("hatched grey: masked")
    bad = np.argwhere(~finite & ~hidden)
    if len(bad):
        ax.plot(bad[:, 1], bad[:, 0], "x", color="#cf222e", markersize=5, gid="not finite")
        notes.append(f"red cross: NaN or infinity, {len(bad):,} of {weights.size:,}")
    if not top:
        notes.append("zero everywhere")
    if tiles:
        _tile_grid(ax, n_q, n_k, tiles, "#57606a" if symmetric else "#c3c7cc")
    ax.set(xlim=(-0.5, n_k - 0.5), ylim=(n_q - 0.5, -0.5), ylabel=rows)
    ax.set_title(title, fontsize=10, parse_math=False)
    ax.set_xlabel(f"{columns}   ({'; '.join(notes)})" if notes else columns)
    _ticks(ax, n_q, n_k, labels)
    # An inset belongs to its Axes and goes when they are drawn afresh, which a colour bar of the figure would not.
    bar = ax.figure.colorbar(image, cax=ax.inset_axes((1.03, 0.0, 0.035, 1.0)))
    bar.ax.tick_params(labelsize=8)
    bar.formatter.set_powerlimits((-3, 4))
    bar.ax.yaxis.get_offset_text().set(fontsize=8, ha="left")
    if footer is not None:
        _footer(ax.figure, footer)
    return ax


_footer = footer  # `heatmap` has an argument of that name


def _hatched_grey(mask: np.ndarray) -> PolyCollection:
    """The True cells of `(rows, columns)` as one rectangle for each run along a row, each hatched into the next."""
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    boxes = [_box(x0 - 0.5, y - 0.5, x1 - x0, 1) for (y, x0), (_, x1) in zip(starts, ends, strict=True)]
    return PolyCollection(
        boxes, facecolor="#e3e5e8", edgecolor="#c3c7cc", linewidth=0, hatch="////", antialiased=False, gid="masked"
    )


def _box(x: float, y: float, width: float, height: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _tile_grid(ax: Axes, n_q: int, n_k: int, tiles: tuple[int, int], colour: str) -> None:
    block_q, block_k = tiles
    style = dict(color=colour, linewidth=0.8, gid="tile edge")
    if n_q <= MOST_TILE_LINES * block_q:
        for y in range(block_q, n_q, block_q):
            ax.axhline(y - 0.5, **style)
    if n_k <= MOST_TILE_LINES * block_k:
        for x in range(block_k, n_k, block_k):
            ax.axvline(x - 0.5, **style)


def _ticks(ax: Axes, n_q: int, n_k: int, labels: Sequence[str] | None) -> None:
    for axis, n in ((ax.xaxis, n_k), (ax.yaxis, n_q)):
        if labels is not None and len(labels) == n <= MOST_LABELS:
            text = [{" ": "␣", "\n": "⏎", "\t": "⇥"}.get(label, label) for label in labels]
            axis.set_ticks(range(n), text, fontsize=7, family=["DejaVu Sans Mono"], parse_math=False)
        else:
            axis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
            axis.set_tick_params(labelsize=8)


def mark_row(ax: Axes, row: int) -> None:
    """Point at one row of a heatmap from both sides."""
    ax.axhline(row, color="#ff7b54", linewidth=0.9, linestyle=(0, (1, 2)), gid="marked row")
    for x, marker in ((0.0, 5), (1.0, 4)):  # caret right, caret left
        place = dict(transform=ax.get_yaxis_transform(), clip_on=False, zorder=6)  # also above a colour bar's edge
        ax.plot(x, row, marker=marker, color="#d1431a", markersize=7, **place)


def heads(
    figure: Figure,
    attn: np.ndarray,
    *,
    masked: np.ndarray | None = None,
    tiles: tuple[int, int] | None = None,
    footer: str | None = None,
    labels: Sequence[str] | None = None,
) -> list[Axes]:
    """The weights `(H, Tq, Tk)` of one batch as a gallery, a heatmap a head, all on one scale."""
    n = len(attn)
    columns = min(n, 4)
    axes = figure.subplots(-(-n // columns), columns, squeeze=False).ravel()
    top = float(np.max(attn, initial=0.0, where=np.isfinite(attn)))
    for h, ax in enumerate(axes):
        if h < n:
            heatmap(ax, attn[h], title=f"head {h}", masked=masked, tiles=tiles, labels=labels, largest=top)
        else:
            ax.remove()
    if footer is not None:
        _footer(figure, footer)
    return list(axes[:n])


# How each tile state looks: face, hatch. Dark, middle, light: apart without colour too.
_TILE_STYLE = {FULL: ("#2f6f8f", None), PARTIAL: ("#9fc5d6", "////"), SKIPPED: ("#f6f8fa", "..")}


def tile_map(
    ax: Axes, state: np.ndarray, n_k: int, *, tiles: tuple[int, int], title: str = "tiles of the walk"
) -> Axes:
    """Which tiles the walk skips, masks in part, or takes in full.

    state: `(Tq, n_tiles)` as `Trace.state[b, h]`; tiles: `(block_q, block_k)`; the last tiles end with the problem.
    """
    ax.clear()
    (block_q, block_k), n_q = tiles, len(state)
    for kind, (face, hatch) in _TILE_STYLE.items():
        places = np.argwhere(state[::block_q] == kind)
        boxes = [
            _box(j * block_k, i * block_q, min(block_k, n_k - j * block_k), min(block_q, n_q - i * block_q))
            for i, j in places
        ]
        ax.add_collection(
            PolyCollection(
                boxes,
                facecolor=face,
                hatch=hatch,
                edgecolor="#57606a",
                linewidth=0.5,
                label=f"{TILE_STATES[kind]}: {len(places)}",
                gid=TILE_STATES[kind],
            )
        )
    ax.set(xlim=(0, n_k), ylim=(n_q, 0), xlabel=f"key, in tiles of {block_k}", ylabel=f"query, in tiles of {block_q}")
    ax.set_aspect("equal" if max(n_q, n_k) <= 3 * min(n_q, n_k) else "auto")
    ax.set_title(title, fontsize=10)
    for axis, block, n in ((ax.xaxis, block_k, n_k), (ax.yaxis, block_q, n_q)):
        axis.set_major_locator(MultipleLocator(block * max(1, round(n / block / 7))))
        axis.set_tick_params(labelsize=8)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, handlelength=1.4)
    return ax
