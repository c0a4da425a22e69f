"""Pictures of speed: time against T, the roofline, bytes moved, tile sizes, shader checks and memory.

Curves are told apart by mark and dash, and by lightness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator

from fa2lab.plot_style import BOUND, CALM, INK, KERNEL, LEGEND, PLAIN

_MARKS = (
    dict(color=PLAIN, marker="s", linestyle="-"),
    dict(color=CALM, marker="^", linestyle=(0, (1, 1.2))),
    dict(color="#a33b20", marker="D", linestyle=(0, (5, 2))),
    dict(color=KERNEL, marker="o", linestyle="-"),
    dict(color=INK, marker="v", linestyle=(0, (4, 1.5, 1, 1.5))),
    dict(color="#5b8c5a", marker="P", linestyle=(0, (3, 1))),
)
_GRID = dict(which="major", color="#e3e5e8", linewidth=0.7)
# Hatching of the arrays in a bar of bytes: K and V, which are read again and again, are dark.
_ARRAYS = {
    "K and V": dict(facecolor=KERNEL, edgecolor="white"),
    "T² matrices": dict(facecolor=PLAIN, edgecolor=INK, hatch="////"),
    "the rest": dict(facecolor="#d5dde5", edgecolor=CALM, hatch=".."),
}


def times(
    ax: Axes,
    curves: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    *,
    crossing: tuple[float, str] | None = None,
    title: str = "time of one causal forward",
) -> Axes:
    """Seconds against T, both axes logarithmic: `(lengths, seconds)` by kernel name.

    crossing: a T to mark, and what for.
    """
    ax.clear()
    ax.grid(**_GRID)
    marks = _marks(curves)
    for name, (lengths, seconds) in curves.items():
        ax.plot(lengths, 1e3 * np.asarray(seconds), label=name, gid="time", markersize=6, linewidth=1.8, **marks[name])
    if crossing:
        ax.axvline(crossing[0], color=BOUND, linestyle=":", linewidth=1.4, gid="crossing")
        ax.annotate(crossing[1], (crossing[0], 0.02), (4, 0), xycoords=("data", "axes fraction"),
                    textcoords="offset points", fontsize=8, rotation=90, va="bottom")  # fmt: skip
    _lengths(ax, [T for lengths, _ in curves.values() for T in lengths])
    ax.set_yscale("log")
    ax.set_ylabel("milliseconds")
    return _finish(ax, title)


def roofline(
    ax: Axes,
    product: float,
    copy: float,
    rungs: Mapping[str, tuple[float, float]],
    *,
    title: str = "roofline: the rungs under this device's two ceilings",
) -> Axes:
    """Operations a second against operations a byte: `(intensity, rate)` by kernel, under measured ceilings.

    product: operations a second of a matrix product. copy: bytes a second of a copy. A rung above the slope asks for
    more bytes than memory brings: caches answered.
    """
    ax.clear()
    ax.grid(**_GRID)
    knee = product / copy
    across = [x for x, _ in rungs.values()] + [knee]
    ends = np.array([min(across) / 4, max(across) * 4])
    roof = np.array([ends[0], knee, ends[1]])
    ax.plot(roof, np.minimum(product, roof * copy), color=BOUND, linewidth=2, gid="roof")
    ax.annotate(f"matrix product, {_rate(product)}", (ends[1], product), (-4, 5), textcoords="offset points",
                ha="right", fontsize=8)  # fmt: skip
    ax.annotate(f"copy, {copy / 1e9:,.3g} GB/s", (ends[0], ends[0] * copy), (10, -4), textcoords="offset points",
                va="top", fontsize=8)  # fmt: skip
    for name, (intensity, rate) in rungs.items():
        mark = _marks(rungs)[name]
        ax.plot(intensity, rate, markersize=9, label=f"{name}: {_rate(rate)}", gid="rung", **mark | {"linestyle": ""})
    ax.set(xscale="log", yscale="log", xlim=ends, xlabel="operations for each byte that the kernel asks for")
    lowest = min([rate for _, rate in rungs.values()] + [product / 10])
    ax.set_ylim(lowest / 60, product * 4)  # the legend stands below the rungs
    ax.set_ylabel("operations a second")
    return _finish(ax, title, loc="lower right")


def bytes_moved(
    ax: Axes,
    parts: Mapping[str, Mapping[str, int]],
    *,
    least: int,
    title: str = "bytes that each kernel asks memory for",
) -> Axes:
    """Bytes by kernel, a panel of bars from the most: on a log axis, with what they are in words.

    parts: by kernel, bytes by "K and V", "T² matrices" and "the rest". least: inputs and outputs once, as a line. A
    bar's hatching is that of its largest part.
    """
    ax.clear()
    ax.grid(axis="x", **_GRID)
    totals = {name: sum(of.values()) for name, of in parts.items()}
    for i, (name, of) in enumerate(parts.items()):
        largest = max(of, key=of.get)
        ax.barh(i, totals[name], 0.66, gid="bytes", label=name, **_ARRAYS[largest])
        shares = ", ".join(f"{kind} {n / totals[name]:.0%}" for kind, n in of.items() if n >= 0.005 * totals[name])
        says = f" {_bytes(totals[name])}, {totals[name] / least:,.1f} × the least; {shares}"
        ax.text(least, i - 0.43, says, va="bottom", fontsize=8, gid="says")
    ax.axvline(least, color=BOUND, linestyle="--", linewidth=1.4, gid="least")
    ax.text(least, len(parts) - 0.42, f"inputs and outputs once, {_bytes(least)}", fontsize=8, va="top", ha="left")
    ax.set_yticks(range(len(parts)), list(parts))
    ax.set(xscale="log", xlim=(least / 2, max(totals.values()) * 2), ylim=(len(parts) - 0.2, -0.75))
    _in_bytes(ax.xaxis)
    ax.set_axisbelow(True)
    ax.set_title(title, fontsize=10)
    ax.tick_params(labelsize=8)
    return ax


def tile_times(
    ax: Axes,
    blocks_q: Sequence[int],
    blocks_k: Sequence[int],
    seconds: np.ndarray,
    *,
    chosen: tuple[int, int] | None = None,
    title: str = "milliseconds by tile",
) -> Axes:
    """Seconds `(len(blocks_q), len(blocks_k))` as colours with the number in each; NaN where the device refuses.

    chosen: the tile to frame.
    """
    ax.clear()
    ms = 1e3 * np.asarray(seconds, np.float64)
    finite = ms[np.isfinite(ms)]
    norm = LogNorm(finite.min(), max(finite.max(), finite.min() * 1.01)) if finite.size else None
    ax.imshow(np.ma.masked_invalid(ms), cmap="cividis_r", norm=norm, aspect="auto")
    for i, j in np.ndindex(ms.shape):
        known = np.isfinite(ms[i, j])
        if not known:
            ax.add_patch(_cell(i, j, facecolor="#f0f1f3", edgecolor=CALM, hatch="///", linewidth=0))
        dark = known and norm(ms[i, j]) > 0.55
        says = f"{ms[i, j]:.3g}" if known else "refused"
        ax.text(j, i, says, ha="center", va="center", fontsize=8, color="white" if dark else INK)
    if chosen and chosen[0] in blocks_q and chosen[1] in blocks_k:
        at = list(blocks_q).index(chosen[0]), list(blocks_k).index(chosen[1])
        ax.add_patch(_cell(*at, fill=False, edgecolor=BOUND, linewidth=2.5, gid="chosen"))
    ax.set_xticks(range(len(blocks_k)), [str(n) for n in blocks_k])
    ax.set_yticks(range(len(blocks_q)), [str(n) for n in blocks_q])
    ax.set(xlabel="keys of a tile, Bc", ylabel="queries of a tile, Br")
    ax.set_title(title, fontsize=10)
    ax.tick_params(labelsize=8)
    return ax


def pairs(
    ax: Axes,
    seconds: Mapping[str, tuple[float, float]],
    *,
    names: tuple[str, str] = ("without shader checks", "with"),
    title: str = "what shader checks cost",
) -> Axes:
    """Two times a kernel as bars beside each other, and how many times the first the second is."""
    ax.clear()
    ax.grid(axis="x", **_GRID)
    top = max((max(both) for both in seconds.values()), default=1.0)
    for i, (first, second) in enumerate(seconds.values()):
        ax.barh(i - 0.19, 1e3 * first, 0.34, color=KERNEL, gid="first", label=None if i else names[0])
        hatched = dict(facecolor="#d5dde5", edgecolor=CALM, hatch="////")
        ax.barh(i + 0.19, 1e3 * second, 0.34, gid="second", label=None if i else names[1], **hatched)
        ax.text(1e3 * max(first, second), i, f"  × {second / first:.2f}", va="center", fontsize=9)
    ax.set_yticks(range(len(seconds)), list(seconds))
    ax.set(xlabel="milliseconds", xlim=(0, 1.2e3 * top), ylim=(len(seconds) - 0.4, -0.6))
    return _finish(ax, title)


def memory(
    ax: Axes,
    lengths: Sequence[int],
    sizes: Mapping[str, Sequence[int]],
    *,
    limits: Mapping[str, int] | None = None,
    title: str = "device memory of one call",
) -> Axes:
    """Bytes by name at each T, both axes logarithmic. limits: by name, as lines across."""
    ax.clear()
    ax.grid(**_GRID)
    marks = _marks(sizes)
    for name, amounts in sizes.items():
        ax.plot(lengths, amounts, label=name, gid="bytes", markersize=5, linewidth=1.8, **marks[name])
        ax.annotate(_bytes(amounts[-1]), (lengths[-1], amounts[-1]), (6, 0), textcoords="offset points", va="center",
                    fontsize=8, color=marks[name]["color"])  # fmt: skip
    for (name, limit), dash in zip((limits or {}).items(), ("--", ":", "-."), strict=False):
        ax.axhline(limit, color=BOUND, linestyle=dash, linewidth=1.2, label=f"{name}, {_bytes(limit)}", gid="limit")
    _lengths(ax, lengths)
    ax.set_yscale("log")
    _in_bytes(ax.yaxis)
    ax.set_xlim(min(lengths) / 1.3, max(lengths) * 2.4)
    return _finish(ax, title)


def _marks(names: Mapping[str, object]) -> dict[str, dict]:
    """A mark for each name, the same for the same name of one picture."""
    return {name: _MARKS[i % len(_MARKS)] for i, name in enumerate(names)}


def _lengths(ax: Axes, lengths: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    ticks = ticks[:: max(1, -(-len(ticks) // 9))]
    ax.set_xticks(ticks, [f"{T:,}" for T in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("T, queries and keys")


def _in_bytes(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(base=4, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda n, _: _bytes(n))


def _cell(i: int, j: int, **style) -> Rectangle:
    return Rectangle((j - 0.5, i - 0.5), 1, 1, **style)


def _rate(flops_per_second: float) -> str:
    for unit, name in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if flops_per_second >= unit:
            return f"{flops_per_second / unit:.3g} {name}"
    return f"{flops_per_second:.3g} FLOP/s"


def _bytes(n: float) -> str:
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= unit:
            return f"{n / unit:,.3g} {name}"
    return f"{n:,.0f} B"


def _finish(ax: Axes, title: str, *, loc: str = "best") -> Axes:
    ax.set_axisbelow(True)
    ax.set_title(title, fontsize=10)
    ax.tick_params(labelsize=8)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc=loc, **LEGEND)
    return ax
