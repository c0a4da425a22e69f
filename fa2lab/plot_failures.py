"""A failure as a picture: what is expected, what the right and the wrong variant gave, and the lines that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2lab.plot import footer
from fa2lab.plot_style import CALM, INK, KERNEL, LEGEND, PLAIN

if TYPE_CHECKING:
    from fa2lab.failures import Panel

WRONG = "#b3261e"
MOST_TICKS = 12
HUGE = 1e5  # past this a linear axis would show the largest number alone
FOOT, HEAD = 0.05, 0.95  # where infinities stand, as shares of the axis


def failure(
    figure: Figure, panels: Sequence[Panel], *, taken: str, change: Sequence[str], verdict: str, label: str
) -> str:
    """Two panels, and the lines of the kernel below. Returns the picture in one sentence.

    taken: what the wrong variant takes for granted. change: lines that begin with "-" (right) or "+" (wrong).
    verdict: where they part, in words. label: who computed.
    """
    left, right, code = figure.axes or _axes(figure)
    for ax, panel in zip((left, right), panels, strict=True):
        _panel(ax, panel)
    _change(code, change)
    figure.suptitle(f"taken for granted: {taken}", x=0.01, ha="left", fontsize=11, color=INK, parse_math=False)
    footer(figure, label)
    return f"Right and wrong variant by {label}. Taken for granted: {taken} {verdict}"


def _axes(figure: Figure) -> list[Axes]:
    """Fixed places, so that nothing shifts from one failure to the next."""
    figure.set_layout_engine("none")
    above = figure.add_gridspec(1, 2, left=0.07, right=0.985, top=0.83, bottom=0.43, wspace=0.17)
    panels = [figure.add_subplot(cell) for cell in above]
    return [*panels, figure.add_axes((0.02, 0.07, 0.965, 0.24))]


def _panel(ax: Axes, panel: Panel) -> None:
    ax.clear()
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)
    at = np.arange(len(panel.expected))
    sides = np.concatenate([panel.expected, panel.right, panel.wrong])
    finite = sides[np.isfinite(sides)]
    largest = np.abs(finite).max(initial=0.0)
    if largest > HUGE:
        ax.set_yscale("symlog", linthresh=1.0)
        low, high = min(0.0, finite.min(initial=0.0) * 1e3), max(0.0, finite.max(initial=0.0) * 1e3)
        powers = [10.0**p for p in range(10, int(np.log10(largest)) + 6, 10)]
        ticks = ([0.0] + [-p for p in powers] if low < 0 else [0.0]) + (powers if high > 0 else [])
        ax.set_yticks(sorted(ticks), [f"{t:g}" for t in sorted(ticks)])
    else:
        low, high = finite.min(initial=0.0), finite.max(initial=0.0)
    room = 0.22 * ((high - low) or 1.0) if largest <= HUGE else 0.0
    ax.set_ylim(low - room, (high + room) or 10.0)
    wide = dict(color=PLAIN, linewidth=0, marker="_", markersize=max(8.0, min(26.0, 260 / len(at))), markeredgewidth=6)
    _marks(ax, at, panel.expected, label="expected, float64", gid="expected", **wide)
    disc = dict(color=KERNEL, linestyle="none", marker="o", markersize=6)
    _marks(ax, at, panel.right, label="right variant", gid="right", **disc)
    cross = dict(color=WRONG, linestyle="none", marker="x", markersize=9, markeredgewidth=2.2)
    _marks(ax, at, panel.wrong, label="wrong variant", gid="wrong", **cross)
    every = -(-len(at) // MOST_TICKS)
    ax.set_xticks(at[::every], panel.ticks[::every], fontsize=8)
    ax.set_xlim(-0.6, max(len(at) - 0.4, 0.6))
    ax.tick_params(labelsize=8)
    ax.set_xlabel(panel.axis, fontsize=9)
    says = "the same, to the bit" if panel.parts_at is None else _values(panel, panel.parts_at)
    ax.set_title(f"{panel.title}\n{says}", fontsize=10, pad=17, loc="left", parse_math=False)
    ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(-0.02, 0.975), handletextpad=0.5, markerscale=0.6, **LEGEND)


def _values(panel: Panel, i: int) -> str:
    return (
        f"at {panel.ticks[i]}: wrong {panel.wrong[i]:.7g}, right {panel.right[i]:.7g}, expected {panel.expected[i]:.7g}"
    )


def _marks(ax: Axes, at: np.ndarray, values: np.ndarray, **style) -> None:
    """Marks at the finite values; infinities stand at the axis' ends, named."""
    finite = np.isfinite(values)
    ax.plot(at[finite], values[finite], **style)
    for i in at[~finite]:
        y = HEAD if values[i] > 0 else FOOT
        ax.plot(i, y, transform=ax.get_xaxis_transform(), **style | {"label": None})
        ax.text(i + 0.12, y, f"{values[i]:g}", transform=ax.get_xaxis_transform(), va="center", fontsize=9, color=INK)


def _change(ax: Axes, change: Sequence[str]) -> None:
    """Lines of text, the right ones and the wrong ones apart by their sign, face and shade."""
    ax.clear()
    ax.set_axis_off()
    ax.text(
        0.0, 1.0, "the lines that differ: − right, + wrong", fontsize=9, color=CALM, va="top", transform=ax.transAxes
    )
    for i, line in enumerate(change):
        wrong = line.startswith("+")
        said = line if wrong else line.replace("-", "−", 1)
        ax.text(
            0.0, 0.80 - 0.175 * i, said, family="DejaVu Sans Mono", fontsize=9,
            va="top", color=WRONG if wrong else INK, weight="bold" if wrong else "normal", parse_math=False,
            transform=ax.transAxes, gid="wrong line" if wrong else "right line",
        )  # fmt: skip
