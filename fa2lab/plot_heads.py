"""Pictures of heads: a thumbnail each, and one of them held: its weights, a row of them, entropy and distances."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import MaxNLocator

from fa2lab.plot import footer, heatmap
from fa2lab.plot_style import BOUND, CALM, KERNEL, LEGEND

MARK = "#d1431a"
MASKED = (0xC3, 0xC7, 0xCC, 0xFF)  # the grey that heatmaps hatch, plain: a hatch is lost in a thumbnail
THUMBNAIL = 64  # pixels a side
MOST_LETTERS = 40  # more characters than this do not fit under the row of weights
# The run itself, and the one beside it: apart in lightness, dash, mark and filling.
_STYLES = (
    dict(color=KERNEL, linestyle="-", linewidth=1.8, marker="o", markersize=4),
    dict(color="#9a6700", linestyle=(0, (3, 1.5)), linewidth=1.5, marker="D", markersize=4, fillstyle="none"),
)


@dataclass(frozen=True, eq=False)
class HeldHead:
    """One head of one run, as numbers: weights `(Tq, Tk)`, entropy `(Tq,)`, mean weight by distance."""

    name: str
    attn: np.ndarray
    entropy: np.ndarray
    profile: np.ndarray


def thumbnail(weights: np.ndarray, *, masked: np.ndarray, largest: float) -> bytes:
    """Weights `(Tq, Tk)` as a small PNG, viridis from 0 to `largest`, masked places grey. NaN and infinity are red."""
    n_q, n_k = weights.shape
    finite = np.isfinite(weights)
    share = np.where(finite, weights, 0.0) / (largest or 1.0)
    pixels = matplotlib.colormaps["viridis"](np.clip(share, 0, 1), bytes=True)
    pixels[~finite] = (0xCF, 0x22, 0x2E, 0xFF)
    pixels[masked] = MASKED
    rows, keys = (np.arange(THUMBNAIL) * n // THUMBNAIL for n in (n_q, n_k))
    content = io.BytesIO()
    imsave(content, np.ascontiguousarray(pixels[np.ix_(rows, keys)]), format="png")
    return content.getvalue()


def held(
    figure: Figure,
    sides: Sequence[HeldHead],
    *,
    head: int,
    at: tuple[int, int],
    masked: np.ndarray,
    most_entropy: np.ndarray,
    distances: np.ndarray,
    even: np.ndarray,
    labels: Sequence[str] | None,
    label: str,
) -> str:
    """One head held: of one run, or of two side by side. Returns the picture in one sentence.

    sides: one or two. at: `(query, key)`, where the crosshair stands. masked: boolean `(Tq, Tk)`. most_entropy `(Tq,)`,
    distances and even `(n,)`: see `fa2lab.heads`. labels: a character a key. label: who computed.
    """
    first, second, apart, weights, spread, far = figure.axes or _axes(figure)
    top = max(_largest(side.attn, ~masked) for side in sides)
    shown = (first, second)[: len(sides)]
    for ax, side in zip(shown, sides, strict=True):
        title = f"head {head}, {side.name}"
        heatmap(ax, side.attn, title=title, masked=masked, largest=top)
        _crosshair(ax, at, title)
    if len(sides) == 2:
        with np.errstate(invalid="ignore"):
            difference = sides[0].attn.astype(np.float64) - sides[1].attn
        heatmap(apart, difference, masked=masked, symmetric=True)
        _crosshair(apart, at, "the first less the second")
    else:
        for ax in (second, apart):
            ax.clear()
            ax.set_axis_off()
        second.text(1.1, 0.5, "nothing beside it", ha="center", color=CALM, transform=second.transAxes)
    for ax in (first, second, apart):
        ax.set_aspect("auto")
        ax.set_xlabel(ax.get_xlabel().replace("hatched grey", "hatched"), fontsize=9)
    _row(weights, sides, at, labels)
    _entropies(spread, sides, at[0], most_entropy)
    _profiles(far, sides, distances, even, at)
    footer(figure, label)
    query, key = at
    values = " and ".join(f"{side.attn[query, key]:.6g} ({side.name})" for side in sides)
    return (
        f"Head {head}: weights, the row of query {query}, entropy and mean weight by distance. "
        f"Query {query} gives key {key} {'nothing, it is masked' if masked[query, key] else values}; by {label}."
    )


def _axes(figure: Figure) -> list[Axes]:
    """Fixed places: a picture that slides must not shift, and fitting the layout anew would double the time."""
    figure.set_layout_engine("none")
    above = figure.add_gridspec(1, 3, left=0.05, right=0.945, top=0.945, bottom=0.535, wspace=0.42)
    below = figure.add_gridspec(1, 3, left=0.05, right=0.985, top=0.4, bottom=0.125, wspace=0.22)
    return [figure.add_subplot(cell) for cell in (*above, *below)]


def _largest(x: np.ndarray, where: np.ndarray) -> float:
    return float(np.max(x, initial=0.0, where=where & np.isfinite(x)))


def _crosshair(ax: Axes, at: tuple[int, int], title: str) -> None:
    """Lines through one cell, pointers at the sides, and the title above the upper one."""
    query, key = at
    ax.set_title(title, fontsize=10, pad=12, parse_math=False)
    for line in (ax.axhline, ax.axvline):
        place = query if line == ax.axhline else key
        line(place, color="#ff7b54", linewidth=0.9, linestyle=(0, (1, 2)), gid="crosshair")
    ax.plot(key, query, "s", color=MARK, fillstyle="none", markersize=8, markeredgewidth=1.6, gid="chosen")
    for x, y, marker, transform in (
        (0.0, query, 5, ax.get_yaxis_transform()),  # caret right
        (key, 1.0, 7, ax.get_xaxis_transform()),  # caret down
    ):
        ax.plot(x, y, marker=marker, color=MARK, markersize=7, transform=transform, clip_on=False)


def _start(ax: Axes, title: str, x: str, y: str) -> None:
    ax.clear()
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_title(title, fontsize=10, pad=18)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)


def _finish(ax: Axes) -> None:
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.97), handlelength=1.8, **LEGEND)


def _row(ax: Axes, sides: Sequence[HeldHead], at: tuple[int, int], labels: Sequence[str] | None) -> None:
    query, key = at
    _start(ax, f"weights of query {query}", "key", "weight")
    n = sides[0].attn.shape[1]
    for side, style in zip(sides, _STYLES, strict=False):
        every = max(1, n // 32)  # marks enough to tell the two apart
        ax.plot(np.arange(n), side.attn[query], label=side.name, gid="row", markevery=every, **style)
    ax.axvline(key, color=MARK, linewidth=1.0, linestyle=(0, (1, 2)), gid="key")
    ax.plot(key, 1.0, marker=7, color=MARK, markersize=7, transform=ax.get_xaxis_transform(), clip_on=False)
    top = max(_largest(side.attn[query], np.ones(n, bool)) for side in sides)
    ax.set(xlim=(-0.5, max(n - 0.5, 0.5)), ylim=(-0.04 * (top or 1), 1.12 * (top or 1)))
    if labels is not None and n <= MOST_LETTERS:
        text = [{" ": "␣", "\n": "⏎", "\t": "⇥"}.get(label, label) for label in labels]
        ax.set_xticks(range(n), text, fontsize=7, family=["DejaVu Sans Mono"], parse_math=False)
    _finish(ax)


def _entropies(ax: Axes, sides: Sequence[HeldHead], query: int, most: np.ndarray) -> None:
    _start(ax, "entropy of each query's row", "query", "nats")
    ax.plot(most, ":", color=BOUND, linewidth=1.4, label="even: ln n", gid="most")
    every = max(1, len(most) // 24)  # marks enough to tell the curves apart
    for side, style in zip(sides, _STYLES, strict=False):
        ax.plot(side.entropy, label=side.name, gid="entropy", markevery=every, **style)
    ax.axvline(query, color=MARK, linewidth=1.0, linestyle=(0, (1, 2)), gid="query")
    ax.set(xlim=(-0.5, max(len(most) - 0.5, 0.5)), ylim=(-0.05 * max(1.0, most.max()), 1.1 * max(1.0, most.max())))
    _finish(ax)


def _profiles(
    ax: Axes, sides: Sequence[HeldHead], distances: np.ndarray, even: np.ndarray, at: tuple[int, int]
) -> None:
    _start(ax, "mean weight by distance", "positions behind the query (0: itself)", "weight")
    ax.plot(distances, even, ":", color=BOUND, linewidth=1.4, label="even", gid="even")
    every = max(1, len(distances) // 24)
    for side, style in zip(sides, _STYLES, strict=False):
        ax.plot(distances, side.profile, label=side.name, gid="profile", markevery=every, **style)
    top = max([_largest(x, np.ones(x.shape, bool)) for x in (even, *(side.profile for side in sides))])
    ends = (distances.min(initial=0) - 0.5, distances.max(initial=1) + 0.5)
    ax.set(xlim=ends, ylim=(-0.04 * (top or 1), 1.12 * (top or 1)))
    _finish(ax)
