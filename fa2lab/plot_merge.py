"""The picture of a row that is split and merged again: arrays in, matplotlib Axes out.

The splits stand above their keys, each merge above its halves, with m, l and O in a box and, on the way to it, what a
half is multiplied by. What float32 loses stands beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fa2lab import plot
from fa2lab.plot_blocks import BOX
from fa2lab.plot_sheet import Sheet
from fa2lab.plot_style import LEGEND

EPSILON = 2.0**-24  # half the distance of float32's neighbours of 1: what one rounding may cost
LOWEST = 1e-9
MOST_LABELS = 16  # more keys than this have no room for their v


@dataclass(frozen=True, eq=False)
class Joint:
    """A node as it is drawn: keys `first` to `last`, `level` merges high, its float64 numbers, float32's errors."""

    first: int
    last: int
    level: int
    halves: tuple[int, int] | None
    m: float
    l: float  # noqa: E741 - the paper's letter
    out: float
    shrinks: tuple[float, float] | None  # exp(m_half - m), what the halves' l and O are multiplied by
    narrow: tuple[float, float]  # l and O in float32
    apart_l: float  # relative
    apart_out: float

    @property
    def x(self) -> float:
        """The middle of its keys."""
        return (self.first + self.last) / 2


def tree(
    sheet: Sheet,
    s: np.ndarray,
    v: np.ndarray,
    masked: np.ndarray,
    joints: Sequence[Joint],
    *,
    n_splits: int,
    label: str,
) -> str:
    """A row `s`, `v`, `masked`, each `(n,)`, and its nodes, the splits first, then the merges. Returns one sentence."""
    grown, row, apart = sheet.axes(_axes)
    sheet.still(_row, row, s, v, masked, [(split.first, split.last) for split in joints[:n_splits]])
    sheet.still(_room, grown, len(s), n_splits)
    sheet.over(_tree(grown, joints, n_splits))
    marks = sheet.still(_errors, apart, n_splits)
    _fill(apart, marks, joints, n_splits)
    sheet.over(apart.xaxis, apart.yaxis, *marks.values())
    plot.footer(
        sheet.figure,
        "In a box: m, l and O of its keys. On the lines: exp(m of the half - m), which multiplies the half's l and O. "
        f"Thick: the newest merge.\n{label}",
    )
    n_merges, newest = len(joints) - n_splits, joints[-1]
    said = f"A row of {len(s)} scores in {n_splits} splits after {n_merges} of {n_splits - 1} merges"
    if not n_merges:
        return f"{said}."
    return (
        f"{said}; the newest holds keys {newest.first} to {newest.last}: m {newest.m:.4g}, l {newest.l:.6g}, "
        f"O {newest.out:.6g}, where float32 is off by {newest.apart_l:.1e} in l and {newest.apart_out:.1e} in O."
    )


def _axes(figure: Figure) -> tuple[Axes, Axes, Axes]:
    """Fixed places."""
    grid = figure.add_gridspec(
        2, 2, left=0.055, right=0.985, top=0.935, bottom=0.15, width_ratios=(3.3, 1), height_ratios=(4.4, 1),
        hspace=0.06, wspace=0.17,
    )  # fmt: skip
    return figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[:, 1])


def _row(ax: Axes, s: np.ndarray, v: np.ndarray, masked: np.ndarray, splits: Sequence[tuple[int, int]]) -> None:
    """The scores as bars, the splits in two shades by turns; a masked key is hatched and has no bar."""
    ax.clear()
    n = len(s)
    shown = np.where(masked, 0.0, s.astype(np.float64))
    low, high = min(0.0, shown.min()), max(0.0, shown.max())
    room = (high - low or 1.0) * 0.12
    ax.set(xlim=(-0.6, n - 0.4), ylim=(low - room, high + room))
    for i, (first, last) in enumerate(splits):
        keys = np.arange(first, last + 1)
        ax.bar(keys, shown[keys], width=0.8, color=(plot.KERNEL, "#8fb8d8")[i % 2], edgecolor=plot.INK, linewidth=0.6)
        if i:
            ax.axvline(first - 0.5, color=plot.INK, linestyle="--", linewidth=1.1, gid="cut")
    for key in np.flatnonzero(masked):
        ax.axvspan(
            key - 0.5, key + 0.5, facecolor="#e3e5e8", edgecolor="#9aa0a6", hatch="////", linewidth=0, gid="masked"
        )
    ax.axhline(0, color=plot.CALM, linewidth=0.8)
    ax.set_ylabel("score s", fontsize=9)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=3))
    every = 1 if n <= MOST_LABELS else 2
    names = [f"{j}\nv={v[j]:.2g}" if n <= MOST_LABELS else f"{j}" for j in range(0, n, every)]
    ax.set_xticks(range(0, n, every), names)
    ax.set_xlabel("key j" + ("  (hatched: masked)" if masked.any() else ""), fontsize=9, labelpad=1)
    ax.tick_params(labelsize=7.5, length=2)


def _room(ax: Axes, n: int, n_splits: int) -> None:
    """Room for every tree over n keys: no node stands higher than all merges."""
    ax.clear()
    ax.set(xlim=(-0.6, n - 0.4), ylim=(-0.55, max(1, n_splits - 1) + 0.55))
    ax.set_axis_off()


def _tree(ax: Axes, joints: Sequence[Joint], n_splits: int) -> Text:
    """Returns the title."""
    newest = len(joints) - 1 if len(joints) > n_splits else None
    title = f"{len(joints) - n_splits} of {n_splits - 1} merges"
    if newest is not None:
        last = joints[newest]
        title += f"\nthe newest in float32: l {last.narrow[0]:.9g}, O {last.narrow[1]:.9g};  in float64: "
        title += f"l {last.l:.12g}, O {last.out:.12g}"
    said = ax.set_title(title, fontsize=9, linespacing=1.3, y=1.0)
    tall = ax.get_ylim()[1] > 5
    size = 7 if tall or n_splits > 6 else 8.5
    for joint in joints:
        for half, shrink in zip(joint.halves or (), joint.shrinks or (), strict=True):
            below = joints[half]
            ax.plot([below.x, below.x, joint.x], [below.level, joint.level, joint.level], "-", color=plot.CALM,
                    linewidth=1.3, zorder=1, gid="way")  # fmt: skip
            ax.text(below.x, joint.level - 0.5, f"× {_short(shrink, 3)}", ha="center", va="center", fontsize=size,
                    color="#0b5394", zorder=2, gid="shrink",
                    bbox=dict(facecolor="white", edgecolor="none", pad=0.8))  # fmt: skip
    for i, joint in enumerate(joints):
        thick = i == newest
        face = "#f3f4f6" if joint.halves is None else "#fff4de"
        keys = f"{joint.first}" if joint.first == joint.last else f"{joint.first}–{joint.last}"
        says = f"keys {keys}\nm {_short(joint.m)}\nl {_short(joint.l)}\nO {_short(joint.out)}"
        if tall and joint.first == joint.last:  # no wider than its key, whose number stands below it
            says = f"m {_short(joint.m)}\nl {_short(joint.l)}\nO {_short(joint.out)}"
        elif tall:
            says = f"{keys}: m {_short(joint.m)}\nl {_short(joint.l)}  O {_short(joint.out)}"
        box = dict(
            boxstyle="round,pad=0.3", facecolor=face, edgecolor=BOX if thick else plot.INK,
            linewidth=2.8 if thick else 0.9, linestyle=":" if joint.l == 0 else "-",
        )  # fmt: skip
        ax.text(joint.x, joint.level, says, ha="center", va="center", fontsize=size, zorder=3, bbox=box, gid="joint",
                linespacing=1.15)  # fmt: skip
    return said


def _errors(ax: Axes, n_splits: int) -> dict[str, Line2D]:
    """Axes of float32's distance from float64 at each node, and the marks that `_fill` places."""
    ax.clear()
    marks = {}
    for name, marker, colour, fill in (("l", "o", plot.KERNEL, "full"), ("O", "D", "#9a6700", "none")):
        style = dict(color=colour, fillstyle=fill, markersize=6, linestyle="none", label=name, gid=name)
        (marks[name],) = ax.plot([], [], marker, **style)
    ax.axvline(EPSILON, color=plot.INK, linestyle="--", linewidth=1.1, label="one rounding, 6e-8", gid="one rounding")
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.axhline(n_splits - 0.5, color=plot.CALM, linewidth=0.8)
    ax.text(1.0, n_splits - 0.45, "merges ", transform=ax.get_yaxis_transform(), ha="right", va="bottom", fontsize=8)
    ax.text(1.0, n_splits - 0.55, "splits ", transform=ax.get_yaxis_transform(), ha="right", va="top", fontsize=8)
    ax.set_title("float32 from float64, relative", fontsize=10, y=1.0)
    ax.set_ylabel("keys", fontsize=9, labelpad=1)
    ax.grid(axis="x", color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=7.5, length=2)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.035), ncols=3, handletextpad=0.2, **LEGEND)
    return marks


def _fill(ax: Axes, marks: dict[str, Line2D], joints: Sequence[Joint], n_splits: int) -> None:
    """The nodes in the order that they came; no distance at all stands on the lowest line."""
    at = np.arange(len(joints))
    marks["l"].set_data(np.maximum([joint.apart_l for joint in joints], LOWEST), at)
    marks["O"].set_data(np.maximum([joint.apart_out for joint in joints], LOWEST), at)
    top = max([1e-6, *(max(joint.apart_l, joint.apart_out) for joint in joints)])
    powers = range(-8, int(np.ceil(np.log10(top))) + 1, 1 if top < 1e-5 else 2)
    ax.xaxis.set_major_locator(FixedLocator([LOWEST, *(10.0**p for p in powers)]))
    ax.set_xticklabels(["0", *(f"1e{p}" for p in powers)])
    ax.set_yticks(at, [f"{j.first}" if j.first == j.last else f"{j.first}–{j.last}" for j in joints])
    ax.set(xlim=(LOWEST / 2, top * 5), ylim=(-0.7, 2 * n_splits - 1.3))


def _short(x: float, digits: int = 4) -> str:
    return f"{x:.{digits}g}".replace("-inf", "-∞").replace("e+0", "e").replace("e-0", "e-")
