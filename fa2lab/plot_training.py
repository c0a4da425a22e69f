"""Pictures of training: losses beside NumPy's, their distance, bytes against T, and what each head looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from fa2lab.plot import BOUND, CALM, KERNEL, PLAIN, footer, heatmap

KNOWS_NOTHING = float(np.log(256))  # nats: the loss of a model that finds all 256 bytes equally likely
LOWEST = 1e-9  # where a distance of exactly zero stands on a log axis
_LEGEND = dict(fontsize=8, frameon=False, borderpad=0.1)
# Curves over NumPy's broad light one. Apart by dash and lightness, not by colour alone.
_CURVES = (
    dict(color=KERNEL, linestyle=(0, (5, 2)), linewidth=1.8),
    dict(color="#1f2328", linestyle="-", linewidth=1.2),
    dict(color="#a33b20", linestyle=(0, (1, 1.5)), linewidth=2.2),
)
_BOUND_DASHES = ("--", ":", "-.")


def losses(
    ax: Axes,
    curves: Mapping[str, np.ndarray],
    *,
    expected: np.ndarray | None = None,
    below: float | None = None,
    steps: int | None = None,
    title: str = "loss",
) -> Axes:
    """Losses `(steps,)` by name, in nats, from that of a model that knows nothing downwards.

    expected: NumPy's losses, drawn broad and light under the others. below: a bound, as a line. steps: where the axis
    ends, by default with the longest curve.
    """
    ax.clear()
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    ax.axhline(KNOWS_NOTHING, color=CALM, linestyle=":", linewidth=1.2, label="ln 256", gid="knows nothing")
    if below is not None:
        ax.axhline(below, color=BOUND, linestyle="--", linewidth=1.2, label=f"below {below:g} wanted", gid="bound")
    if expected is not None:
        style = dict(color=PLAIN, linewidth=4.5, solid_capstyle="round")
        ax.plot(np.arange(len(expected)), expected, label="NumPy float64", gid="expected", **style)
    for (name, curve), style in zip(curves.items(), _CURVES, strict=False):
        ax.plot(np.arange(len(curve)), curve, label=name, gid="loss", **style)
    ax.set(xlim=(-0.5, max(_longest(curves, expected), steps or 0, 2) - 0.5), ylim=(0, 6.2), xlabel="step")
    ax.set_ylabel("cross-entropy, nats")
    return _finish(ax, title)


def distances(
    ax: Axes,
    curves: Mapping[str, np.ndarray],
    *,
    bounds: Mapping[str, float],
    bound_steps: int | None = None,
    title: str = "distance from NumPy's losses",
    says: str = "nats",
) -> Axes:
    """How far losses are from NumPy's at each step, `(steps,)` by name, on a log axis; bounds by name as lines.

    bound_steps: how many steps the bounds hold for, by default all. Exactly zero stands on the lowest line, marked 0.
    """
    ax.clear()
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    for (name, bound), dash in zip(bounds.items(), _BOUND_DASHES, strict=False):
        ends = (-0.5, (bound_steps or max(_longest(curves), 2)) - 0.5)
        ax.plot(ends, (bound, bound), color=BOUND, linestyle=dash, linewidth=1.6, label=name, gid="bound")
    for (name, curve), style in zip(curves.items(), _CURVES, strict=False):
        ax.plot(np.arange(len(curve)), np.maximum(curve, LOWEST), label=name, gid="distance", **style)
    ax.set_yscale("log")
    finite = [x[np.isfinite(x)].max(initial=0.0) for x in map(np.asarray, curves.values())]
    top = 10 ** np.ceil(np.log10(max(1e-6, *finite, *bounds.values())) + 0.3)
    powers = range(-8, int(np.log10(top)) + 1, 2)
    ax.set_yticks([LOWEST, *(10.0**p for p in powers)], ["0", *(f"1e{p}" for p in powers)])
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set(xlim=(-0.5, max(_longest(curves), 2) - 0.5), ylim=(LOWEST / 2, top), xlabel="step")
    ax.set_ylabel(says)
    return _finish(ax, title)


def gate(
    figure: Figure,
    curves: Mapping[str, np.ndarray],
    expected: np.ndarray,
    *,
    bounds: Mapping[str, float],
    label: str,
    bound_steps: int | None = None,
    relative: bool = False,
    below: float | None = None,
) -> str:
    """Losses side by side, and their distance from NumPy's on a log axis. Returns the picture in one sentence.

    curves: losses `(steps,)` by name; expected: NumPy's `(steps,)`; relative: distances as a share of NumPy's loss,
    else in nats. bounds: of the distance, by name, over the first `bound_steps` or all. label: who computed.
    """
    left, right = figure.axes or figure.subplots(1, 2)
    apart = {
        name: np.abs(curve / expected - 1) if relative else np.abs(curve - expected) for name, curve in curves.items()
    }
    losses(left, curves, expected=expected, below=below)
    says = "share of NumPy's loss" if relative else "nats"
    distances(right, apart, bounds=bounds, bound_steps=bound_steps, says=says)
    footer(figure, label)
    said = "; ".join(
        f"{name} from {curve[0]:.2f} to {curve[-1]:.2f} nats, at most {apart[name].max():.1e} away"
        for name, curve in curves.items()
    )
    return f"Losses of {len(expected)} steps on a light line of NumPy's, and their distance from it: {said}."


def memory(
    ax: Axes, lengths: Sequence[int], sizes: Mapping[str, Sequence[int]], *, measured: Mapping[str, tuple[int, int]]
) -> Axes:
    """Bytes by name at each T, both axes logarithmic. measured: `(T, bytes)` by name, as rings."""
    ax.clear()
    ax.grid(which="major", color="#e3e5e8", linewidth=0.7)
    for (name, bytes_), style in zip(sizes.items(), _CURVES, strict=False):
        ax.plot(lengths, bytes_, marker="o", markersize=4, label=f"{name}, planned", gid="planned", **style)
        ax.annotate(
            f"{bytes_[-1] / 2**20:,.1f} MiB", (lengths[-1], bytes_[-1]), (6, 0), textcoords="offset points",
            va="center", fontsize=8, color=style["color"],
        )  # fmt: skip
        if name in measured:
            ring = dict(markersize=11, fillstyle="none", color=BOUND, linestyle="none", gid="measured")
            first = not any(line.get_gid() == "measured" for line in ax.lines)
            ax.plot(*measured[name], marker="o", label="counted on the device" if first else None, **ring)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(lengths, [f"{T:,}" for T in lengths])
    ax.yaxis.set_major_locator(LogLocator(base=4, numticks=8))
    ax.yaxis.set_major_formatter(lambda n, _: f"{n / 2**20:,g} MiB")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.set(xlabel="T", xlim=(lengths[0] / 1.2, lengths[-1] * 1.7))
    return _finish(ax, "device memory of one attention, the larger of forward and backward")


def head_scores(ax: Axes, scores: Mapping[str, float], *, even: float, title: str) -> Axes:
    """A number from 0 to 1 a head, as bars with the number on each; a line at what evenly spread attention gets.

    The largest is dark and the others are hatched.
    """
    ax.clear()
    best = max(scores, key=scores.__getitem__)
    for i, (name, score) in enumerate(scores.items()):
        style = dict(color=KERNEL) if name == best else dict(facecolor="#d5dde5", edgecolor=CALM, hatch="////")
        ax.barh(i, score, 0.66, gid="best" if name == best else "head", **style)
        ax.text(score, i, f" {score:.3f}", va="center", fontsize=8)
    ax.axvline(even, color=BOUND, linestyle="--", linewidth=1.2, label=f"spread evenly: {even:.3f}", gid="even")
    ax.set_yticks(range(len(scores)), list(scores), fontsize=8)
    ax.set(xlim=(0, 1.2 * max(even, *scores.values())), ylim=(len(scores) - 0.5, -0.5))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    return _finish(ax, title)


def head_gallery(figure: Figure, attn: np.ndarray, labels: Sequence[str], *, label: str) -> str:
    """Causal weights `(layers, heads, T, T)` as heatmaps, a row a layer, all on one scale. One sentence comes back.

    labels: a string a position. label: who computed.
    """
    layers, n_heads, T, _ = attn.shape
    axes = figure.axes
    if len(axes) != layers * n_heads:
        figure.clear()
        axes = list(figure.subplots(layers, n_heads, squeeze=False).ravel())
    top = float(np.max(attn, initial=0.0, where=np.isfinite(attn)))
    hidden = ~np.tri(T, dtype=bool)
    for i, ax in enumerate(axes):
        layer, head = divmod(i, n_heads)
        heatmap(ax, attn[layer, head], title=head_name(layer, head), masked=hidden, labels=labels, largest=top)
        ax.set(xlabel="key byte" if layer == layers - 1 else "", ylabel="" if head else "query byte")
        ax.tick_params(axis="y", labelsize=6, labelleft=not head)  # lines are higher than letters are wide
    footer(figure, f"{label}; hatched grey: masked; one scale for all heads")
    return f"Attention weights of {layers * n_heads} heads over the {T} bytes {''.join(labels)!r}, by {label}."


def head_name(layer: int, head: int) -> str:
    """What a head is called in every picture."""
    return f"layer {layer}, head {head}"


def _longest(curves: Mapping[str, np.ndarray], expected: np.ndarray | None = None) -> int:
    return max([0 if expected is None else len(expected), *map(len, curves.values())])


def _finish(ax: Axes, title: str) -> Axes:
    ax.set_axisbelow(True)
    ax.set_title(title, fontsize=10)
    ax.tick_params(labelsize=8)
    ax.legend(**_LEGEND)
    return ax
