"""The trace of one row: m, l and alpha, tile by tile, as a kernel recorded them, beside NumPy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fa2lab.plot_sheet import Sheet
from fa2lab.plot_style import CALM, KERNEL, LEGEND, PLAIN, columns
from fa2lab.results import FULL, PARTIAL, SKIPPED, TILE_STATES, Trace

SAYS = {"m": "m, maximum so far", "l": "l, sum so far", "alpha": "alpha, rescale"}
LOWEST = 1e-9  # of the distances' axis: no distance at all
_MARKS = {FULL: "o", PARTIAL: "D", SKIPPED: "x"}


def row_trace(
    axes: Sequence[Axes], trace: Trace, exact: Trace, *, at: tuple[int, int, int], title: str = "recorded by the kernel"
) -> None:
    """m, l and alpha of one row as the kernel recorded them (marks), over NumPy's float64 walk; their distance below.

    axes: four, from top to bottom. at: `(batch, head, row)`. Marks say what the tile was to the row: a disc for full, a
    diamond for partial, a cross for skipped. Zero distance stands on the lowest line.
    """
    _row_trace(lambda draw, ax, *inputs: draw(ax, *inputs), axes, trace, exact, at, title)


def row_trace_on(
    sheet: Sheet, axes: Sequence[Axes], trace: Trace, exact: Trace, *, at: tuple[int, int, int], title: str
) -> None:
    """`row_trace` on four panels of a sheet, where another row changes no more than it must."""
    sheet.over(*_row_trace(sheet.still, axes, trace, exact, at, title))


def _row_trace(
    still: Callable[..., Any],
    axes: Sequence[Axes],
    trace: Trace,
    exact: Trace,
    at: tuple[int, int, int],
    title: str,
) -> list[Artist]:
    """Returns what another row would change."""
    state = trace.state[at]
    tile, kinds = np.arange(len(state)), tuple(kind for kind in _MARKS if (state == kind).any())
    moved: list[Artist] = [ax.yaxis for ax in axes]
    apart = {}
    for ax, (name, label) in zip(axes, SAYS.items(), strict=False):
        true_line, marks = still(_recorded, ax, label, len(state), kinds if ax is axes[0] else ())
        got, true = getattr(trace, name)[at], getattr(exact, name)[at]
        true_line.set_data(tile, true)
        for kind, line in marks.items():
            line.set_data(tile[state == kind], got[state == kind])
        _room(ax, np.concatenate([got, true]))
        with np.errstate(invalid="ignore"):
            apart[name] = np.where(got == true, 0.0, np.abs(got - true))
        moved += [true_line, *marks.values()]
    below = axes[3]
    distances = still(_distances, below, len(state))
    for name, line in distances.items():
        line.set_data(tile, np.maximum(apart[name], LOWEST))
    top = max([1e-5, *(float(d[np.isfinite(d)].max(initial=0.0)) for d in apart.values())])
    powers = range(-8, int(np.ceil(np.log10(top))) + 1, 2 if top < 1e-1 else 3)
    below.set_yticks([LOWEST, *(10.0**p for p in powers)], ["0", *(f"1e{p}" for p in powers)])
    below.set_ylim(LOWEST / 3, top * 100)
    if not np.isfinite(exact.m[at]).any():
        axes[0].text(0.5, 0.5, "this row sees no key: m = -inf, l = 0", transform=axes[0].transAxes, ha="center")
    return [*moved, *distances.values(), axes[0].set_title(title, fontsize=10, pad=22, y=1.0)]


def _recorded(ax: Axes, label: str, n: int, kinds: tuple[int, ...]) -> tuple[Line2D, dict[int, Line2D]]:
    """Axes of one number over n tiles; `kinds`: the marks that its legend tells, for which there is one."""
    columns(ax, n, numbered=False, most=12)
    (true,) = ax.plot(
        [], [], "-", color=PLAIN, linewidth=3.5, solid_capstyle="round", label="NumPy float64", gid="exact"
    )
    marks = {}
    for kind, marker in _MARKS.items():
        style = dict(color=KERNEL, markersize=5, fillstyle="full", gid="recorded", label=f"{TILE_STATES[kind]} tile")
        (marks[kind],) = ax.plot([], [], marker, **style)
    ax.set_ylabel(label.replace(", ", "\n"), fontsize=9)
    ax.ticklabel_format(axis="y", useOffset=False)
    if kinds:
        told = [true, *(marks[kind] for kind in kinds)]
        ax.legend(handles=told, ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 0.99), handletextpad=0.4, **LEGEND)
    return true, marks


def _distances(ax: Axes, n: int) -> dict[str, Line2D]:
    columns(ax, n, numbered=True, most=12)
    lines = {}
    for name, marker in zip(SAYS, "v^s", strict=True):
        style = dict(color=CALM, fillstyle="none", markersize=5, label=name, gid=f"distance {name}")
        (lines[name],) = ax.plot([], [], marker, **style)
    ax.set_yscale("log")
    ax.set_yticks([], minor=True)
    ax.set_xlabel("K tile, in the order of the walk")
    ax.set_ylabel("distance\n(absolute)", fontsize=9)
    ax.legend(ncols=3, loc="upper right", handletextpad=0.1, **LEGEND)
    return lines


def _room(ax: Axes, values: np.ndarray) -> None:
    """Fit the y axis to the finite values, but never so close that float32 rounding looks like a slope."""
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 0.0)
    pad = max(0.15 * (high - low), 0.05 * max(1.0, abs(low), abs(high)))
    ax.set_ylim(low - pad, high + pad)
