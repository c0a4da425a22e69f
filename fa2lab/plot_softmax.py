"""Pictures of one row's softmax as its keys come in: arrays in, matplotlib Axes out. Computes nothing.

Every function draws afresh on the Axes or Figure it is handed, so calling it again updates a picture in place. What is
lit, new or still to come differs in fill, hatching and outline, so that no picture needs colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fa2lab import plot

LIT, NEW, TO_COME = plot.KERNEL, plot.PLAIN, plot.CALM
MOST_NUMBERS = 12  # more numbers than this do not fit above the bars
MOST_TICKS = 24


@dataclass(frozen=True, eq=False)
class Steps:
    """A row of n scores taken in block by block. Entry t of each list is the state after t blocks, t = 0 … n_steps."""

    s: np.ndarray  # (n,)
    block: int  # keys a step
    m: np.ndarray  # (n_steps + 1,), -inf first
    l: np.ndarray  # noqa: E741 - (n_steps + 1,), the paper's letter
    alpha: np.ndarray  # (n_steps + 1,), what step t multiplied the older l and o by; NaN first, where no step was
    out: np.ndarray  # (n_steps + 1,), O = o / l of one column
    weights: Sequence[np.ndarray]  # exp(s - m) / l of the keys seen after t blocks
    label: str  # who computed it

    @property
    def n_steps(self) -> int:
        """How many blocks the row fills."""
        return len(self.m) - 1

    def seen(self, step: int) -> int:
        """Keys taken in after `step` blocks."""
        return min(step * self.block, len(self.s))


def scores(ax: Axes, s: np.ndarray, *, seen: int, new: int = 0, m: float | None = None, first: int = 0) -> Axes:
    """Scores `(n,)` as bars: the first `seen` are filled, the last `new` of those hatched; m is a line.

    `first` is the number of the first key, where s is a block out of a longer row.
    """
    ax.clear()
    bars = ax.bar(range(len(s)), s, width=0.78)
    for j, bar in enumerate(bars):
        _dress(bar, lit=j < seen, new=seen - new <= j < seen)
    low, high = min(0.0, float(np.min(s))), max(0.0, float(np.max(s)))
    room = (high - low or 1.0) * 0.22
    ax.set(ylim=(low - (room if low < 0 else 0), high + room), ylabel="score s")
    ax.axhline(0, color=plot.CALM, linewidth=0.8)
    _number(ax, s)
    if m is not None and np.isfinite(m):
        ax.hlines(m, -0.5, seen - 0.5, color=plot.INK, linestyle="--", linewidth=1.8, gid="m")
        ax.hlines(m, seen - 0.5, len(s) - 0.4, color=plot.CALM, linestyle=":", linewidth=1.0)
        # In the margin past the last key, where no bar and no bar's number stands.
        ax.annotate(
            f"m = {m:.4g}",
            (len(s) - 0.4, m),
            (3, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            weight="bold",
        )
    _keys(ax, len(s), first)
    return ax


def weights(ax: Axes, so_far: np.ndarray, final: np.ndarray, *, new: int = 0) -> Axes:
    """exp(s - m) / l of the keys seen, `(seen,)`, as bars; the final softmax `(n,)` as a black line at each key."""
    ax.clear()
    for j, bar in enumerate(ax.bar(range(len(so_far)), so_far, width=0.78)):
        _dress(bar, lit=True, new=j >= len(so_far) - new)
    j = np.arange(len(final))
    lines = ax.hlines(final, j - 0.39, j + 0.39, color=plot.INK, linewidth=2.4)
    ax.set(ylim=(0, 1.25), ylabel="weight p")
    entries = {"so far: exp(s - m) / l": Patch(facecolor=LIT, edgecolor=plot.INK), "final softmax": lines}
    ax.legend(entries.values(), entries.keys(), loc="upper right", fontsize=8, frameon=False, ncols=2)
    _keys(ax, len(final))
    return ax


def history(ax: Axes, values: np.ndarray, *, step: int, name: str, joined: bool = True, final: bool = False) -> Axes:
    """One number per step, `(n_steps + 1,)`, drawn up to `step`, as a line or, not `joined`, each on a stem.

    `final` adds the last number as a dashed line. The axes always span all steps, so that nothing jumps while the step
    moves. NaN and infinity are left out.
    """
    ax.clear()
    x, finite = np.arange(len(values)), np.isfinite(values)
    low, high = min(0.0, values[finite].min(initial=0.0)), max(0.0, values[finite].max(initial=0.0))
    room = (high - low or 1.0) * 0.14
    ax.set(xlim=(-0.4, len(values) - 0.6), ylim=(low - room, high + room), xlabel="blocks taken in")
    if final:
        ax.axhline(values[-1], color=plot.INK, linestyle="--", linewidth=1.4, gid="final")
    past = finite & (x <= step)
    ax.plot(x[past], values[past], "o-" if joined else "o", color=LIT, linewidth=1.6, markersize=5)
    if not joined:
        ax.vlines(x[past], 0, values[past], color=LIT, linewidth=1.6)
    now = "none yet"
    if finite[step]:
        ax.plot(step, values[step], "D", color=NEW, markeredgecolor=plot.INK, markersize=8, gid="now")
        now = f"{values[step]:.4g}"
    ax.set_title(f"{name}: {now}", fontsize=10, parse_math=False)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    ax.tick_params(labelsize=8)
    return ax


def steps(figure: Figure, walk: Steps, step: int) -> str:
    """Scores, weights, alpha, l and O after `step` blocks, all in one figure. Returns the figure's alternative text."""
    axes = {ax.get_label(): ax for ax in figure.axes} or _rows_of_axes(figure)
    n, seen = len(walk.s), walk.seen(step)
    new = seen - walk.seen(max(0, step - 1))
    scores(axes["s"], walk.s, seen=seen, new=new, m=walk.m[step])
    last = (
        ""
        if new == 0
        else f", key {seen - 1} the newest"
        if new == 1
        else f", keys {seen - new} to {seen - 1} the newest"
    )
    axes["s"].set_title(f"Scores: {seen} of {n} keys seen{last}", fontsize=10)
    weights(axes["p"], walk.weights[step], walk.weights[-1], new=new)
    axes["p"].set_title("Weights: the softmax of the keys seen, and the final one", fontsize=10)
    axes["p"].set_xlabel("key j")
    history(axes["a"], walk.alpha, step=step, name="alpha = exp(m_prev - m)", joined=False)
    history(axes["l"], walk.l, step=step, name="l = Σ exp(s - m)")
    history(axes["o"], walk.out, step=step, name="running O", final=True)
    plot.footer(figure, f"{walk.label}.   Hatched: newest block. Outlined: still to come. Dashed in O: the final O.")
    if step == 0:
        return f"A row of {n} scores, none of them seen yet."
    return (
        f"{seen} of {n} scores seen after {step} blocks: maximum m {walk.m[step]:.4g}, sum l {walk.l[step]:.4g}, "
        f"last alpha {walk.alpha[step]:.4g}, running O {walk.out[step]:.4g} of a final {walk.out[-1]:.4g}."
    )


def _rows_of_axes(figure: Figure) -> dict[str, Axes]:
    """Scores above weights above alpha, l and O. At fixed places: working them out anew would double a move's time."""
    figure.set_layout_engine("none")
    places = dict(left=0.075, right=0.985, top=0.955, bottom=0.115, wspace=0.2, hspace=0.56)
    return figure.subplot_mosaic("sss;ppp;alo", height_ratios=(3, 2.4, 2.2), gridspec_kw=places)


def _dress(bar, *, lit: bool, new: bool) -> None:
    """Filled where seen, hatched besides where new, an outline where still to come."""
    bar.set(facecolor=(NEW if new else LIT) if lit else "none", edgecolor=plot.INK if lit else TO_COME)
    bar.set(linewidth=1.0, linestyle="-" if lit else ":", hatch="///" if lit and new else None)


def _number(ax: Axes, s: np.ndarray) -> None:
    """Each bar's number, where there is room for it."""
    if len(s) <= MOST_NUMBERS:
        for j, value in enumerate(s):
            up = value >= 0
            ax.annotate(
                f"{value:.4g}", (j, value), (0, 2 if up else -2), textcoords="offset points", ha="center",
                va="bottom" if up else "top", fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip


def _keys(ax: Axes, n: int, first: int = 0) -> None:
    """The axis of keys, with a margin to the right that holds the name of m."""
    ax.set_xlim(-0.6, n - 0.4 + max(1.2, 0.14 * n))
    if n <= MOST_TICKS:
        ax.set_xticks(range(n), range(first, first + n))
    ax.tick_params(labelsize=8)
