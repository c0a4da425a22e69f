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
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from fa2lab.plot import footer, heatmap
from fa2lab.plot_sheet import Sheet
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
    sheet: Sheet,
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
    first, second, apart, weights, spread, far = sheet.axes(_axes)
    names = [side.name for side in sides]
    top = max(_largest(side.attn, ~masked) for side in sides)
    for ax, side in zip((first, second), sides, strict=False):
        sheet.still(_map, ax, side.attn, title=f"head {head}, {side.name}", masked=masked, largest=top)
        _crosshair(ax, at)
    if len(sides) == 2:
        with np.errstate(invalid="ignore"):
            difference = sides[0].attn.astype(np.float64) - sides[1].attn
        sheet.still(_map, apart, difference, title="the first less the second", masked=masked, symmetric=True)
        _crosshair(apart, at)
    else:
        sheet.still(_nothing, second, "nothing beside it")
        sheet.still(_nothing, apart, "")
    query, key = at
    lines = sheet.still(_row, weights, names, masked.shape[1], labels)
    sheet.over(weights.yaxis, *lines, _fill(weights, lines, sides, query), weights.get_legend())
    _point_down(weights, key)
    sheet.still(_entropies, spread, names, [side.entropy for side in sides], most_entropy)
    spread.axvline(query, color=MARK, linewidth=1.0, linestyle=(0, (1, 2)), gid="query")
    sheet.still(_profiles, far, names, [side.profile for side in sides], distances, even)
    footer(sheet.figure, label)
    values = " and ".join(f"{side.attn[query, key]:.6g} ({side.name})" for side in sides)
    return (
        f"Head {head}: weights, the row of query {query}, entropy and mean weight by distance. "
        f"Query {query} gives key {key} {'nothing, it is masked' if masked[query, key] else values}; by {label}."
    )


def _axes(figure: Figure) -> list[Axes]:
    """Fixed places."""
    above = figure.add_gridspec(1, 3, left=0.05, right=0.945, top=0.945, bottom=0.535, wspace=0.42)
    below = figure.add_gridspec(1, 3, left=0.05, right=0.985, top=0.4, bottom=0.125, wspace=0.22)
    return [figure.add_subplot(cell) for cell in (*above, *below)]


def _largest(x: np.ndarray, where: np.ndarray | bool = True) -> float:
    return float(np.max(x, initial=0.0, where=where & np.isfinite(x)))


def _map(ax: Axes, weights: np.ndarray, *, title: str, **options) -> None:
    """A heatmap as wide as its place, the title above the pointers at its sides."""
    heatmap(ax, weights, **options)
    ax.set_title(title, fontsize=10, pad=12, y=1.0, parse_math=False)
    ax.set_aspect("auto")
    ax.set_xlabel(ax.get_xlabel().replace("hatched grey", "hatched"), fontsize=9)


def _nothing(ax: Axes, says: str) -> None:
    ax.clear()
    ax.set_axis_off()
    ax.text(1.1, 0.5, says, ha="center", color=CALM, transform=ax.transAxes)


def _crosshair(ax: Axes, at: tuple[int, int]) -> None:
    """Lines through one cell, and pointers at the sides."""
    query, key = at
    for line, place in ((ax.axhline, query), (ax.axvline, key)):
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
    ax.set_title(title, fontsize=10, pad=18, y=1.0)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)


def _finish(ax: Axes) -> None:
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.97), handlelength=1.8, **LEGEND)


def _row(ax: Axes, names: Sequence[str], n: int, labels: Sequence[str] | None) -> list[Line2D]:
    """Axes of the weights of n keys, and a line for each name, which `_fill` fills."""
    _start(ax, "", "key", "weight")
    every = max(1, n // 32)  # marks enough to tell the two apart
    lines = [
        ax.plot(np.arange(n), np.zeros(n), label=name, gid="row", markevery=every, **style)[0]
        for name, style in zip(names, _STYLES, strict=False)
    ]
    ax.set_xlim(-0.5, max(n - 0.5, 0.5))
    if labels is not None and n <= MOST_LETTERS:
        text = [{" ": "␣", "\n": "⏎", "\t": "⇥"}.get(label, label) for label in labels]
        ax.set_xticks(range(n), text, fontsize=7, family=["DejaVu Sans Mono"], parse_math=False)
    _finish(ax)
    return lines


def _fill(ax: Axes, lines: Sequence[Line2D], sides: Sequence[HeldHead], query: int) -> Text:
    """Set the lines to the weights of a query; returns the title that says so."""
    for line, side in zip(lines, sides, strict=True):
        line.set_ydata(side.attn[query])
    top = max(_largest(side.attn[query]) for side in sides) or 1
    ax.set_ylim(-0.04 * top, 1.12 * top)
    return ax.set_title(f"weights of query {query}", fontsize=10, pad=18, y=1.0)


def _point_down(ax: Axes, key: int) -> None:
    ax.axvline(key, color=MARK, linewidth=1.0, linestyle=(0, (1, 2)), gid="key")
    ax.plot(key, 1.0, marker=7, color=MARK, markersize=7, transform=ax.get_xaxis_transform(), clip_on=False)


def _entropies(ax: Axes, names: Sequence[str], entropies: Sequence[np.ndarray], most: np.ndarray) -> None:
    _start(ax, "entropy of each query's row", "query", "nats")
    ax.plot(most, ":", color=BOUND, linewidth=1.4, label="even: ln n", gid="most")
    every = max(1, len(most) // 24)  # marks enough to tell the curves apart
    for name, entropy, style in zip(names, entropies, _STYLES, strict=False):
        ax.plot(entropy, label=name, gid="entropy", markevery=every, **style)
    ax.set(xlim=(-0.5, max(len(most) - 0.5, 0.5)), ylim=(-0.05 * max(1.0, most.max()), 1.1 * max(1.0, most.max())))
    _finish(ax)


def _profiles(
    ax: Axes, names: Sequence[str], profiles: Sequence[np.ndarray], distances: np.ndarray, even: np.ndarray
) -> None:
    _start(ax, "mean weight by distance", "positions behind the query (0: itself)", "weight")
    ax.plot(distances, even, ":", color=BOUND, linewidth=1.4, label="even", gid="even")
    every = max(1, len(distances) // 24)
    for name, profile, style in zip(names, profiles, _STYLES, strict=False):
        ax.plot(distances, profile, label=name, gid="profile", markevery=every, **style)
    top = max(map(_largest, (even, *profiles))) or 1
    ends = (distances.min(initial=0) - 0.5, distances.max(initial=1) + 0.5)
    ax.set(xlim=ends, ylim=(-0.04 * top, 1.12 * top))
    _finish(ax)
