"""Pictures of the backward pass: arrays in, matplotlib Axes out. Computes nothing beyond what presentation needs.

Every function draws afresh on the Axes or Figure it is handed, so calling it again updates a picture in place. Curves
differ in marker and dash: no picture needs colour vision. A workgroup's walk, step by step, is in `plot_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from fa2lab import plot
from fa2lab.results import SKIPPED, Gradients

REFUSED = "#d1431a"


def gradients(figure: Figure, got: Gradients, truth: Gradients, *, batch: int = 0, head: int = 0) -> str:
    """dQ, dK and dV of one head above, their signed errors against `truth` below. Returns the picture in one sentence.

    `head` counts KV heads for dK and dV. Each column of pictures has one colour scale above and one below.
    """
    axes = np.array(figure.axes or figure.subplots(2, 3).ravel()).reshape(2, 3)
    worst = []
    for (above, below), (name, rows) in zip(axes.T, (("dQ", "query"), ("dK", "key"), ("dV", "key")), strict=True):
        field = getattr(got, name.lower())[batch, :, head]
        with np.errstate(invalid="ignore"):
            error = field - getattr(truth, name.lower())[batch, :, head]
        worst.append(_largest(error))
        plot.heatmap(above, field, title=f"{name}, head {head}", rows=rows, columns="column", symmetric=True)
        title = f"its signed error, at most {worst[-1]:.1e}"
        plot.heatmap(below, error, title=title, rows=rows, columns="column", symmetric=True)
    for ax in axes.ravel():
        ax.set_aspect("auto")
    plot.footer(figure, f"{got.label}, against {truth.label}; {got.problem}")
    said = ", ".join(f"{name} {error:.1e}" for name, error in zip(("dQ", "dK", "dV"), worst, strict=True))
    return f"Heatmaps of dQ, dK and dV of head {head} by {got.label}; largest errors {said}."


def walks(figure: Figure, state: np.ndarray, n_q: int, n_k: int, *, tiles: tuple[int, int], label: str) -> str:
    """Which tiles fa2_dq and fa2_dkv walk, and in which direction: an arrow a workgroup. Returns the alternative text.

    state: `(n_q_tiles, n_k_tiles)` as `BackwardTrace.state`; tiles: `(block_q, block_k)`.
    """
    left, right = figure.axes or figure.subplots(1, 2)
    by_row = np.repeat(state, tiles[0], axis=0)[:n_q]
    plot.tile_map(left, by_row, n_k, tiles=tiles, title="fa2_dq: a workgroup owns queries, walks the keys")
    plot.tile_map(right, by_row, n_k, tiles=tiles, title="fa2_dkv: a workgroup owns keys, walks the queries")
    left.get_legend().remove()  # the right one says the same
    taken = state != SKIPPED
    for i, row in enumerate(taken):
        _arrow(left, taken=np.flatnonzero(row), at=_middle(i, tiles[0], n_q), block=tiles[1], end=n_k, down=False)
    for j, column in enumerate(taken.T):
        _arrow(right, taken=np.flatnonzero(column), at=_middle(j, tiles[1], n_k), block=tiles[0], end=n_q, down=True)
    plot.footer(
        figure, f"{label}; tiles {tiles[0]}×{tiles[1]}. A dot: where a workgroup begins; an arrow: where it ends."
    )
    return (
        f"Two maps of the same {taken.sum()} tiles of {taken.size}: fa2_dq walks them along the keys and stops at the "
        f"mask, fa2_dkv walks them along the queries and begins at the mask."
    )


def _middle(tile: int, block: int, n: int) -> float:
    return (tile * block + min((tile + 1) * block, n)) / 2


def _arrow(ax: Axes, *, taken: np.ndarray, at: float, block: int, end: int, down: bool) -> None:
    """From the middle of the first tile taken to near the edge of the last; nothing where none is."""
    if not len(taken):
        return
    start, stop = taken[0] * block + 0.25 * block, min((taken[-1] + 1) * block, end) - 0.12 * block
    x, y = ((at, at), (start, stop)) if down else ((start, stop), (at, at))
    ax.plot(x, y, "-", color="white", linewidth=4.5, solid_capstyle="butt", zorder=4)
    style = dict(arrowstyle="-|>,head_width=0.3,head_length=0.55", color=plot.INK, linewidth=1.5, shrinkA=0, shrinkB=0)
    ax.annotate("", (x[1], y[1]), (x[0], y[0]), arrowprops=style, zorder=5)
    ax.plot(x[0], y[0], "o", color=plot.INK, markeredgecolor="white", markersize=6, zorder=6, gid="walk starts")


def _largest(x: np.ndarray) -> float:
    """The largest finite magnitude, which a colour scale can end with."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def row_errors(ax: Axes, errors: Mapping[str, np.ndarray], *, title: str = "") -> Axes:
    """The error of each row, one array `(T,)` a name, as marks over the row; zero stands on the lowest line.

    The line is at a ten-thousandth of the largest error, and what lies below it stands there too.
    """
    ax.clear()
    lowest = max(1e-12, *(float(e.max(initial=0.0)) for e in errors.values())) / 1e4
    styles = (("o", plot.KERNEL, "full"), ("D", "#9a6700", "none"))
    for (name, error), (marker, colour, fill) in zip(errors.items(), styles, strict=False):
        label = f"{name}: at most {error.max(initial=0.0):.1e}"
        shown = np.maximum(error, lowest)
        ax.plot(shown, marker, color=colour, fillstyle=fill, markersize=4, linestyle="none", label=label, gid=name)
    ax.set_yscale("log")
    ax.set(xlabel="row", ylabel="distance from float64")
    ax.set_title(title, fontsize=10, loc="left")
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, ncols=2, handletextpad=0.2)
    ax.tick_params(labelsize=8)
    return ax


@dataclass(frozen=True, eq=False)
class Growth:
    """Device bytes of one path by length: the plan's at `lengths`, the device's own count at those of `measured`."""

    name: str
    lengths: Sequence[int]
    total: Sequence[int]
    largest_buffer: Sequence[int]
    measured: Mapping[int, int]
    refused: Sequence[int] = ()  # the lengths that do not fit one binding


def growth(ax: Axes, paths: Sequence[Growth], *, limit: int, limit_name: str) -> Axes:
    """Bytes against length on logarithmic axes: lines by the plan, marks as measured, a cross where it is refused."""
    ax.clear()
    styles = (("D", plot.PLAIN, "#9a6700"), ("o", plot.KERNEL, plot.KERNEL))
    for path, (marker, face, colour) in zip(paths, styles, strict=False):
        t, total = np.array(path.lengths), np.array(path.total)
        fits = ~np.isin(t, path.refused)
        ax.plot(t[fits], total[fits], "-", color=colour, linewidth=1.8, gid=f"{path.name} model")
        if not fits.all():
            beyond = t >= t[fits].max(initial=t.min())
            ax.plot(t[beyond], total[beyond], ":", color=colour, linewidth=1.8)
            ax.plot(t[~fits], total[~fits], "x", color=REFUSED, markersize=9, markeredgewidth=2.2, gid="refused")
            ax.plot(t, path.largest_buffer, "--", color=plot.CALM, linewidth=1.0, gid="largest buffer")
        at = list(path.measured)
        ax.plot(at, list(path.measured.values()), marker, color=face, markeredgecolor=plot.INK, markersize=7,
                linestyle="none", gid=f"{path.name} measured")  # fmt: skip
        ax.annotate(f"{path.name}\n{_size(total[-1])}", (t[-1], total[-1]), (9, 0), textcoords="offset points",
                    va="center", fontsize=9, color=colour, weight="bold", annotation_clip=False)  # fmt: skip
    ax.axhline(limit, color=plot.INK, linewidth=1.2, gid="limit")
    ax.annotate(f"{limit_name}: {_size(limit)}", (0.012, limit), (0, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=9)  # fmt: skip
    _powers_of_two(ax, paths)
    handles = [
        ax.plot([], [], "D", color="white", markeredgecolor=plot.INK, label="measured: the device's allocation count")[
            0
        ],
        ax.plot([], [], "-", color=plot.CALM, linewidth=1.8, label="the plan's byte model")[0],
    ]
    if any(path.refused for path in paths):
        handles += [
            ax.plot([], [], "--", color=plot.CALM, linewidth=1.0, label="materialised: its largest buffer")[0],
            ax.plot([], [], "x:", color=REFUSED, markeredgewidth=2.2, label="refused: P does not fit a binding")[0],
        ]
    ax.legend(handles=handles, loc="lower right", fontsize=8, frameon=False)
    return ax


def _powers_of_two(ax: Axes, paths: Sequence[Growth]) -> None:
    lengths = [t for path in paths for t in path.lengths]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.xaxis.set_major_locator(
        FixedLocator([t for t in (2.0**p for p in range(40)) if min(lengths) <= t <= max(lengths)])
    )
    ax.xaxis.set_major_formatter(lambda t, _: f"{t:,.0f}")
    ax.yaxis.set_major_locator(FixedLocator([2.0**p for p in range(10, 60, 5)]))
    ax.yaxis.set_major_formatter(lambda n, _: _size(n))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.set(xlabel="length T", ylabel="device memory, peak", xlim=(min(lengths) / 1.5, max(lengths) * 5))
    ax.set_ylim(top=4 * max(max(path.total) for path in paths))
    ax.tick_params(labelsize=8)
    ax.grid(color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)


def _size(n: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n >= 1 << power:
            return f"{n / (1 << power):.3g} {unit}"
    return f"{n:.0f} B"
