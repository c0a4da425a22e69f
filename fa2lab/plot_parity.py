"""The parity bench as one picture: where a result errs, by how much, in which row, and what it took of the device.

Arrays in, matplotlib out. What is chosen is marked in every panel that shows it, so that the panels read as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fa2lab.plot import footer, heatmap, mark_row
from fa2lab.plot_bars import byte_bars, error_bars
from fa2lab.plot_sheet import Sheet
from fa2lab.plot_style import BOUND, CALM, INK, KERNEL, LEGEND, PLAIN, columns

if TYPE_CHECKING:
    from fa2lab.error_maps import TileSize
    from fa2lab.parity import Row
    from fa2lab.results import Gradients, Result

NO_MEMORY = "no device memory: NumPy computed this"
LOWEST_LIMIT_SHARE = 3.0  # the byte axis ends at most this many times past the largest limit


def row_errors(ax: Axes, errors: np.ndarray, *, allowed: float, name: str, rows: str) -> Axes:
    """The largest error of each row in units of `allowed`, heads below each other: `errors` `(B · H, T)`.

    A misplaced NaN or infinity is an infinite error, and crossed out.
    """
    share = np.asarray(errors, np.float64) / (allowed or 1.0)
    finite = share[np.isfinite(share)]
    largest = max(1.0, float(finite.max(initial=0.0)))
    unit = "in units of what is allowed" if allowed else "and nothing is allowed"
    title = f"largest error of {name} in each row, {unit}: choose a cell"
    heatmap(ax, share, rows="head", columns=rows, largest=largest)
    ax.set_title(title, fontsize=10, pad=13, y=1.0)  # the pointer stands below it
    ax.set_aspect("auto")
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True, min_n_ticks=1))
    return ax


def choose(ax: Axes, at: tuple[int, int], n_rows: int) -> None:
    """Box one cell of `row_errors`, `(head, row)`, and point at it from two sides."""
    head, row = at
    size = max(4.0, min(9.0, 260.0 / n_rows))
    ax.plot(row, head, "s", color="#ff7b54", fillstyle="none", markeredgewidth=1.8, markersize=size, gid="chosen")
    for x, y, marker, transform in (
        (row, 1.06, 7, ax.get_xaxis_transform()),  # caret down
        (-0.006, head, 5, ax.get_yaxis_transform()),  # caret right
    ):
        ax.plot(x, y, marker=marker, color="#d1431a", markersize=7, transform=transform, clip_on=False, gid="points")


def _signed(ax: Axes, error: np.ndarray, *, title: str, **options) -> None:
    """A map of errors as wide as its place."""
    heatmap(ax, error, symmetric=True, **options)
    ax.set_title(title, fontsize=10, y=1.0)
    ax.set_aspect("auto")


def _row_values(
    sheet: Sheet, above: Axes, below: Axes, got: np.ndarray, expected: np.ndarray, plain: np.ndarray, title: str
) -> None:
    """One row by column, each `(D,)`: what was expected and what came above, their signed distances below."""
    values, errors = sheet.still(_values, above, len(expected)), sheet.still(_errors, below, len(expected))
    with np.errstate(invalid="ignore"):
        shown = {"expected": expected, "got": got, "kernel": got - expected, "plain float32": plain - expected}
    for name, line in (values | errors).items():
        line.set_ydata(shown[name])
    above.relim()
    above.autoscale_view()
    top = max(float(np.abs(e[np.isfinite(e)]).max(initial=0.0)) for e in map(shown.get, errors)) or 1.0
    below.set_ylim(-1.25 * top, 1.25 * top)
    said = above.set_title(title, fontsize=10, loc="left", pad=20, y=1.0, parse_math=False)
    sheet.over(above.yaxis, said, *values.values(), below.yaxis, *errors.values())


def _values(ax: Axes, n: int) -> dict[str, Line2D]:
    columns(ax, n, numbered=False)
    lines, zeros = {}, np.zeros((2, n))
    style = dict(color=PLAIN, linewidth=4, solid_capstyle="round")
    (lines["expected"],) = ax.plot(np.arange(n), zeros[0], "-", label="expected", gid="expected", **style)
    (lines["got"],) = ax.plot(np.arange(n), zeros[1], "o", color=KERNEL, markersize=4, label="got", gid="got")
    ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(-0.02, 0.98), **LEGEND)
    ax.set_ylabel("value", fontsize=9)
    return lines


def _errors(ax: Axes, n: int) -> dict[str, Line2D]:
    columns(ax, n, numbered=True)
    ax.axhline(0, color=BOUND, linewidth=0.9)
    lines = {}
    for name, marker, colour, fill in (("kernel", "o", KERNEL, "full"), ("plain float32", "D", "#9a6700", "none")):
        style = dict(color=colour, fillstyle=fill, markersize=4)
        (lines[name],) = ax.plot(np.arange(n), np.zeros(n), marker, label=name, gid=f"error {name}", **style)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True))
    ax.ticklabel_format(axis="y", scilimits=(0, 0))
    ax.yaxis.get_offset_text().set(fontsize=8)
    ax.legend(ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.97), handletextpad=0.1, **LEGEND)
    ax.set(xlabel="column", ylabel="error")
    return lines


def ulp_bars(ax: Axes, shares: Mapping[str, np.ndarray], edges: Sequence[float], *, name: str) -> Axes:
    """A histogram of errors in spacings of float32 (ULP): the share of places a bin, one array of shares a result."""
    ax.clear()
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)
    styles = (dict(color=KERNEL), dict(color=PLAIN, hatch="////"))
    at = np.arange(len(edges) + 1)
    for (who, share), style, shift in zip(shares.items(), styles, (-0.2, 0.2), strict=False):
        ax.bar(at + shift, 100 * share, 0.4, label=who, gid=who, edgecolor="white", **style)
    ax.set_xticks(at, [*(f"≤{edge:g}" for edge in edges), f">{edges[-1]:g}"], fontsize=8)
    top = 100 * max(float(share.max(initial=0.0)) for share in shares.values())
    ax.set(xlim=(-0.6, len(edges) + 0.6), ylim=(0, max(20.0, 1.25 * top)))
    ax.set_ylabel("% of places", fontsize=9)
    ax.set_xlabel("distance from float64, in ULP: spacings of float32 there")
    ax.tick_params(labelsize=8)
    ax.set_title(f"how far {name} is off, place by place", fontsize=10)
    ax.legend(loc="upper right", handlelength=1.3, **LEGEND)
    return ax


def tile_bars(ax: Axes, sizes: Sequence[TileSize], limits: Mapping[str, int], *, stage: str) -> Axes:
    """Workgroup memory by tile size; the planned tile dark, what passes every limit hatched; limits as lines."""
    ax.clear()
    loosest = max(limits.values(), default=0)
    end = min(max([1.0, *(size.workgroup_bytes for size in sizes)]), LOWEST_LIMIT_SHARE * (loosest or np.inf))
    end = 1.28 * max(end, loosest)
    for i, size in enumerate(sizes):
        fits = size.workgroup_bytes <= loosest
        style = dict(color=KERNEL) if size.planned else dict(facecolor="#d5dde5", edgecolor=CALM)
        style |= {} if fits else dict(facecolor="white", edgecolor=CALM, hatch="////")
        kind = "planned" if size.planned else "tile" if fits else "too large"
        ax.barh(i, min(size.workgroup_bytes, end), 0.7, gid=kind, **style)
        said = f" {size.workgroup_bytes:,} B" + ("" if fits else ", too large") + (", planned" if size.planned else "")
        inside = size.workgroup_bytes > 0.72 * end
        ax.text(
            0.99 * end if inside else size.workgroup_bytes, i, said, fontsize=8, va="center",
            ha="right" if inside else "left", color=INK,
            bbox=dict(facecolor="white", edgecolor="none", pad=0.3, alpha=0.85),
        )  # fmt: skip
    for (who, n), dash in zip(limits.items(), ("-", "--", ":"), strict=False):
        ax.axvline(n, color=BOUND, linestyle=dash, linewidth=1.4, label=f"{who}: {n:,} B", gid="limit")
    ax.set_yticks(range(len(sizes)), [size.name for size in sizes], fontsize=8)
    ax.set(xlim=(0, end), ylim=(len(sizes) - 0.45, -0.55))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    ax.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title(f"workgroup memory by tile, Br×Bc, of {stage}", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(-0.01, -0.12), ncols=2, **LEGEND)
    return ax


def bench(
    sheet: Sheet,
    result: Result | Gradients,
    truth: Result | Gradients,
    plain: Result | Gradients,
    *,
    field: str,
    errors: np.ndarray,
    at: tuple[int, int],
    shares: Mapping[str, np.ndarray],
    edges: Sequence[float],
    judged: Sequence[Row],
    sizes: Sequence[TileSize],
    workgroup_limits: Mapping[str, int],
    buffers: Mapping[str, int],
    absent: Mapping[str, int],
    absent_says: str = "avoided",
) -> str:
    """Everything of one run on a sheet of about 10.8 × 11 inches. Returns the picture in one sentence.

    field: which of the result's fields the maps show; errors `(B · H, T)`: its largest error a row. at: the chosen cell
    of that. shares: of `ulp_bars`. judged: the rows of the error bars. sizes, workgroup_limits: of `tile_bars`.
    buffers, absent: of the device buffers, and what is not there or there only because it was asked for.
    """
    strip, attn, above, below, ulp, bars, tiles, memory = sheet.axes(_axes)
    (head, row), heads = at, getattr(truth, field).shape[2]
    b, h = divmod(head, heads)
    got, true, rounded = (getattr(x, field)[b, :, h] for x in (result, truth, plain))  # (T, D)
    own = next(r for r in judged if r.field == field)
    rows = "key" if field in ("dk", "dv") else "query"
    sheet.still(row_errors, strip, errors, allowed=own.allowed, name=field, rows=rows)
    choose(strip, at, errors.shape[1])
    with np.errstate(invalid="ignore"):
        if getattr(result, "attn", None) is not None and field == "out":
            error, title, columns = result.attn[b, h] - truth.attn[b, h], "attn", "key"
        else:
            error, title, columns = got - true, field, "column"
    place = f"batch {b}, head {h}"
    hidden = ~result.problem.mask() if title == "attn" else None
    title = f"signed error of {title}, {place}"
    sheet.still(_signed, attn, error, title=title, rows=rows, columns=columns, masked=hidden)
    mark_row(attn, row)
    with np.errstate(invalid="ignore"):
        off = np.abs(got[row] - true[row])
    d = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
    title = f"{field} at {place}, {rows} {row}\ncolumn {d}: got {got[row, d]:.9g}, expected {true[row, d]:.9g}"
    _row_values(sheet, above, below, got[row], true[row], rounded[row], title)
    sheet.still(ulp_bars, ulp, shares, edges, name=field)
    sheet.still(_largest_errors, bars, judged)
    if sizes:
        sheet.still(tile_bars, tiles, sizes, workgroup_limits, stage=result.plan.widest.file)
    else:
        nothing = NO_MEMORY if result.plan is None else f"{result.plan.kernel.name} has no tiles"
        sheet.still(_say, tiles, nothing)
    if result.plan is None:
        sheet.still(_say, memory, NO_MEMORY)
    else:
        launches = len(result.plan.chunks)
        title = f"device buffers, largest of {launches} launches" if launches > 1 else "device buffers"
        sheet.still(byte_bars, memory, buffers, title=title, absent=absent, absent_says=absent_says)
    footer(sheet.figure, f"{result.label}; {result.problem}; scale {result.problem.scale:.6g}")
    largest = ", ".join(f"{r.field} {r.error:.1e} of {r.allowed:.1e} allowed" for r in judged)
    verdict = "within float32" if all(r.ok for r in judged) else "not within float32"
    return (
        f"Parity bench of {result.label}, {result.problem}: {verdict}; largest errors {largest}. Shown is {rows} {row} "
        f"of {place}: column {d} of {field} is {got[row, d]:.9g}, expected {true[row, d]:.9g}."
    )


def _largest_errors(ax: Axes, judged: Sequence[Row]) -> None:
    error_bars(ax, judged)
    ax.set_title("largest error of each field", fontsize=10, pad=18)


def _say(ax: Axes, text: str) -> None:
    ax.clear()
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", fontsize=10)


def _axes(figure: Figure) -> list[Axes]:
    """Fixed places."""
    strip = figure.add_axes((0.062, 0.89, 0.85, 0.062))
    attn = figure.add_axes((0.062, 0.595, 0.34, 0.225))
    above = figure.add_axes((0.56, 0.69, 0.425, 0.115))
    below = figure.add_axes((0.56, 0.595, 0.425, 0.068))
    left = figure.add_gridspec(2, 1, left=0.062, right=0.47, top=0.5, bottom=0.085, hspace=0.46)
    right = figure.add_gridspec(2, 1, left=0.56, right=0.985, top=0.5, bottom=0.085, hspace=0.46)
    lower = [figure.add_subplot(cell) for cell in (left[0], right[0], left[1], right[1])]
    return [strip, attn, above, below, *lower]
