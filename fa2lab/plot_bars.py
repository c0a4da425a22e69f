"""Bars: errors beside what is allowed, and bytes beside their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from fa2lab.plot_style import BOUND, CALM, KERNEL, LEGEND, PLAIN

if TYPE_CHECKING:
    from fa2lab.parity import Row


def error_bars(ax: Axes, rows: Sequence[Row]) -> Axes:
    """The largest error of each field beside that of plain float32 arithmetic; a black line marks what is allowed."""
    ax.clear()
    known = [x for row in rows for x in (row.error, row.plain, row.allowed) if x]
    lowest, top = min(known, default=1e-9) / 30, max(known, default=1e-9)
    for i, row in enumerate(rows):
        for shift, error, face, hatch, name in (
            (-0.19, row.error, KERNEL, None, "kernel"),
            (0.19, row.plain, PLAIN, "////", "plain float32"),
        ):
            if error is None:
                continue
            label = name if i == 0 else None
            ax.barh(i + shift, max(error, lowest), 0.34, color=face, hatch=hatch, edgecolor="white", label=label)
            said = f"{error:.1e}" if error else "exactly 0"
            ax.text(0.985, i + shift, said, transform=ax.get_yaxis_transform(), va="center", ha="right", fontsize=8)
        said = f"allowed {row.allowed:.1e}"
        ax.text(0.985, i, said, transform=ax.get_yaxis_transform(), va="center", ha="right", fontsize=8, color=CALM)
        label = "allowed" if i == 0 else None
        ax.plot(
            [row.allowed or lowest] * 2, [i - 0.42, i + 0.42], color=BOUND, linewidth=2.2, label=label, gid="allowed"
        )
    names = [row.field if row.ok else f"{row.field}\n{_wrong(row)}" for row in rows]
    ax.set_xscale("log")
    ax.set_yticks(range(len(rows)), names, fontsize=9)
    ax.set(xlim=(lowest, top * (top / lowest) ** 0.6), ylim=(len(rows) - 0.45, -0.55))
    ax.set_xlabel("largest distance from float64, log scale")
    ax.xaxis.set_major_locator(LogLocator(numticks=7))
    ax.tick_params(axis="x", labelsize=8)
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.45, 0.985), handlelength=1.3, **LEGEND)
    return ax


_HALO = dict(facecolor="white", edgecolor="none", pad=0.4, alpha=0.8)


def _wrong(row: Row) -> str:
    return f"✗ {row.misplaced:,} misplaced" if row.misplaced else "✗ too far"


def byte_bars(
    ax: Axes,
    sizes: Mapping[str, int],
    *,
    title: str,
    limits: Mapping[str, int] | None = None,
    absent: Mapping[str, int] | None = None,
    absent_says: str = "avoided",
) -> Axes:
    """Bytes by name as bars; `limits` as labelled lines across them; `absent`: what need not be there, in outline."""
    ax.clear()
    limits, absent = limits or {}, absent or {}
    everything = {**sizes, **absent}
    for i, (name, n) in enumerate(everything.items()):
        style = dict(facecolor="white", hatch="////", edgecolor=CALM) if name in absent else dict(color=KERNEL)
        ax.barh(i, n, 0.62, gid="absent" if name in absent else "bytes", **style)
        ax.text(n, i, f" {n:,} B" + (f" {absent_says}" if name in absent else ""), va="center", fontsize=8, bbox=_HALO)
    top = max([1, *everything.values(), *limits.values()])
    for (name, n), style in zip(limits.items(), ("-", "--", ":"), strict=False):
        ax.axvline(n, color=BOUND, linestyle=style, linewidth=1.4, label=f"{name}: {n:,} B", gid="limit")
    if limits:
        ax.legend(loc="upper left", bbox_to_anchor=(-0.01, -0.2), ncols=2, **LEGEND)
    ax.set_yticks(range(len(everything)), list(everything), fontsize=8)
    ax.set(xlim=(0, max(1.08 * top, 1.4 * max([1, *everything.values()]))), ylim=(len(everything) - 0.5, -0.5))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title(title, fontsize=10)
    return ax
