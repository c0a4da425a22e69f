"""The parts of a walk's picture: blocks of numbers, the map of tiles, distances. Made once, then only set anew.

Clearing axes and drawing them afresh takes longer than a hand takes to move a slider. So each part is an object whose
axes are dressed when it is made, and whose `show` changes nothing but what moves from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, MaxNLocator, MultipleLocator, NullLocator

from fa2lab import plot

BOX = "#d1431a"  # the newest tile; its line is the thickest, so it is found without the colour
MOST_NUMBERS = 64  # more numbers than this do not fit into the cells of a block
MOST_TILES = 32  # a finer grid would cover what it divides
# On the map, from light to dark: never walked, other workgroups', this walk's still to come, taken.
SHADES = ("#ffffff", "#dfe3e8", "#9fc5d6", "#2f6f8f")
EMPTY = "#eceff2"  # a cell that holds nothing: masked, or not there yet


def largest(x: np.ndarray) -> float:
    """The largest finite magnitude, which a colour scale can end with; 1 where there is none."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) or 1.0


def freeze(figure: Figure, moving: Iterable[Artist]) -> None:
    """Paint once what all steps share and takes long: axes' numbers, colour bars and words, but not `moving`.

    From then on it is one picture of this figure's size and sharpness behind the rest, which looks as before.
    """
    moving = set(moving)
    shared = [part for ax in figure.axes for part in (ax.xaxis, ax.yaxis, ax.title, *ax.child_axes)]
    shared = [part for part in (*shared, *figure.texts) if part not in moving]
    rest = [child for ax in figure.axes for child in ax.get_children() if child not in shared and child is not ax.patch]
    rest = [child for child in rest if child.get_visible()]
    for child in rest:
        child.set_visible(False)
    canvas = figure.canvas
    painter = FigureCanvasAgg(figure)
    painter.draw()
    figure.set_canvas(canvas)
    for child in rest:
        child.set_visible(True)
    for part in (*shared, *(ax.patch for ax in figure.axes)):
        part.set_visible(False)
    figure.add_artist(Backdrop(np.array(painter.buffer_rgba())))


class Backdrop(Artist):
    """Pixels behind everything else of a figure of just that size."""

    def __init__(self, pixels: np.ndarray):
        super().__init__()
        self.pixels = pixels[::-1]  # renderers count rows from below
        self.set_zorder(-1)

    def draw(self, renderer) -> None:
        """Put the pixels where they were."""
        if self.get_visible():
            renderer.draw_image(renderer.new_gc(), 0, 0, self.pixels)


class Numbers:
    """A number a cell, all of them in two shapes, light and dark: as texts they would take a hundred times as long."""

    def __init__(self, ax: Axes, shape: tuple[int, int], digits: str):
        self.digits = digits
        # Points of the outlines to cells: as high as a font of `size` points in this figure.
        size = 8 if shape[1] <= 4 else 6.5
        box = ax.get_position()
        inches = ax.figure.get_size_inches() * (box.width, box.height)
        self.scale = size / (72 * inches) * (shape[1], shape[0]) / _GLYPH_SIZE
        self.shapes = [
            ax.add_patch(PathPatch(Path(np.zeros((0, 2))), facecolor=colour, linewidth=0, gid="numbers", zorder=3))
            for colour in ("white", plot.INK)
        ]

    def show(self, values: np.ndarray, absent: np.ndarray, light: np.ndarray) -> None:
        """Write the values but the absent ones, in white where `light`."""
        for shape, here in zip(self.shapes, (light, ~light), strict=True):
            outlines = [self._outline(values[r, c], c, r) for r, c in np.argwhere(here & ~absent)]
            shape.set_path(Path.make_compound_path(*outlines) if outlines else Path(np.zeros((0, 2))))

    def _outline(self, value: float, x: float, y: float) -> Path:
        text = format(value, self.digits)
        path = _outline(text if float(text) else text.lstrip("-"))
        return Path(path.vertices * self.scale * (1, -1) + (x, y), path.codes)


_GLYPH_SIZE = 100.0


@lru_cache(maxsize=4096)
def _outline(text: str) -> Path:
    """The text's outline, its middle at the origin."""
    path = TextPath((0, 0), text, size=_GLYPH_SIZE)
    # By its control points, which is as good: following the curves would take fifty times as long.
    low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
    return Path(path.vertices - (low + high) / 2, path.codes)


class Block:
    """A matrix as colours whose numbers change from step to step, while its scale and its size stay.

    `end`: of the colour scale, from 0 or, `symmetric`, from -end. Small blocks have their numbers written in.
    """

    def __init__(
        self,
        ax: Axes,
        shape: tuple[int, int],
        *,
        end: float,
        symmetric: bool = True,
        bar: bool = True,
        columns: str,
        digits: str = "",
    ):
        self.ax, self.shape = ax, shape
        cmap = "RdBu_r" if symmetric else "viridis"
        low = -end if symmetric else 0.0
        ax.set_facecolor(EMPTY)
        # A mesh, since of so few cells it is drawn in a tenth of an image's time.
        sides = (np.arange(n + 1) - 0.5 for n in reversed(shape))
        self.mesh = ax.pcolormesh(*sides, np.ma.masked_all(shape), cmap=cmap, vmin=low, vmax=end)
        (self.hidden,) = ax.plot([], [], "x", color=plot.CALM, markersize=3.5, markeredgewidth=0.8, gid="masked")
        (self.broken,) = ax.plot([], [], "X", color=BOX, markersize=6, gid="not finite")
        self.numbers = Numbers(ax, shape, digits) if digits and shape[0] * shape[1] <= MOST_NUMBERS else None
        ax.set(xlim=(-0.5, shape[1] - 0.5), ylim=(shape[0] - 0.5, -0.5))
        ax.set_xlabel(columns, fontsize=9, labelpad=1)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(NullLocator())
        if bar:
            scale = ax.figure.colorbar(self.mesh, cax=ax.inset_axes((1.02, 0.0, 0.035, 1.0)))
            scale.set_ticks([low, 0.0, end] if symmetric else [0.0, end])
            scale.set_ticklabels([_end(tick) for tick in scale.get_ticks()])
            scale.ax.tick_params(labelsize=7, length=2, pad=1)

    def show(self, matrix: np.ndarray | None, hidden: np.ndarray | None = None) -> None:
        """Set the numbers, `(rows, columns)` of at most the block's shape; None for none. `hidden` are masked."""
        whole, masked = np.zeros(self.shape), np.ones(self.shape, bool)
        crossed, broken = np.zeros(self.shape, bool), np.zeros(self.shape, bool)
        if matrix is not None:
            corner = tuple(slice(n) for n in matrix.shape)
            crossed[corner] = False if hidden is None else hidden
            broken[corner] = ~np.isfinite(matrix) & ~crossed[corner]
            masked[corner] = crossed[corner] | broken[corner]
            whole[corner] = np.where(masked[corner], 0.0, matrix)
        self.mesh.set_array(np.ma.masked_array(whole, masked))
        for marks, where in ((self.hidden, crossed), (self.broken, broken)):
            marks.set_data(*np.argwhere(where)[:, ::-1].T)
        if self.numbers:
            low, high = self.mesh.get_clim()
            place = (whole - low) / (high - low)
            self.numbers.show(whole, masked, np.abs(place - 0.5) > 0.33 if low else place < 0.6)


def _end(x: float) -> str:
    """A colour scale's end in little room."""
    return format(x, ".2g" if abs(x) < 100 else ".0f" if abs(x) < 1e4 else ".0e")


class Rows:
    """One number a row as it was and as it is, beside the rows of a block: hollow and filled marks, a line between.

    `values`: every number there will be, which fixes the axis. A row that had -inf before has a mark at the left edge.
    """

    def __init__(self, ax: Axes, n: int, values: np.ndarray, *, least: float | None = None):
        self.ax, self.n = ax, n
        values = values[np.isfinite(values)]
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        self.least = low if least is None else least
        pad = 0.12 * (high - self.least) or 0.5
        self.edge = self.least - 1.6 * pad
        ax.set(xlim=(self.edge, high + pad), ylim=(n - 0.5, -0.5))
        ax.yaxis.set_major_locator(NullLocator())
        ax.xaxis.set_major_locator(MaxNLocator(nbins=3, min_n_ticks=2))
        ax.tick_params(labelsize=7, length=2, pad=1)
        ax.hlines(np.arange(n), self.edge, high + pad, color="#e3e5e8", linewidth=0.6)
        self.way = ax.add_collection(LineCollection([], color=plot.KERNEL, linewidth=1.4, gid="way"))
        (self.none,) = ax.plot([], [], "<", color=plot.INK, fillstyle="none", markersize=5, clip_on=False, gid="none")
        (self.before,) = ax.plot([], [], "o", color=plot.INK, fillstyle="none", markersize=6.5, gid="before")
        (self.after,) = ax.plot([], [], "o", color=plot.KERNEL, markersize=4, gid="after")

    def show(self, after: np.ndarray | None, before: np.ndarray | None = None) -> None:
        """Set the numbers of the rows, `(rows,)`; without `before` they are shown from the axis's least number on."""
        after = np.zeros(0) if after is None else after
        row, now = np.arange(len(after)), np.isfinite(after)
        start = np.full(len(after), self.least)
        if before is None:
            self.before.set_data([], [])
            self.none.set_data([], [])
        else:
            none, known = before == -np.inf, np.isfinite(before)
            start = np.where(known, before, self.edge)
            self.before.set_data(before[known], row[known])
            self.none.set_data(np.full(none.sum(), self.edge), row[none])
        self.after.set_data(after[now], row[now])
        self.way.set_segments([[(start[i], i), (after[i], i)] for i in row[now]])


class TileMap:
    """Which tiles there are, which of them this walk takes, and how far it has come.

    masked: `(Tq, Tk)`, each row masked from some key on; tiles: the walk's `(query tile, K tile)`, in its order.
    """

    def __init__(self, ax: Axes, masked: np.ndarray, tiles: Sequence[tuple[int, int]], blocks: tuple[int, int]):
        self.ax, self.tiles, self.blocks, self.size = ax, list(tiles), blocks, masked.shape
        (block_q, block_k), (n_q, n_k) = blocks, masked.shape
        rows, keys = np.arange(0, n_q, block_q), np.arange(0, n_k, block_k)
        hidden = np.logical_and.reduceat(np.logical_and.reduceat(masked, rows, axis=0), keys, axis=1)
        self.shade = np.where(hidden, 0, 1)
        corners = np.append(keys, n_k), np.append(rows, n_q)
        self.mesh = ax.pcolormesh(*corners, self.shade, cmap=ListedColormap(SHADES), vmin=0, vmax=3)
        ax.set(xlim=(0, n_k), ylim=(n_q, 0))
        edges = [[(x, 0), (x, n_q)] for x in keys[1:]] if len(keys) <= MOST_TILES else []
        edges += [[(0, y), (n_k, y)] for y in rows[1:]] if len(rows) <= MOST_TILES else []
        ax.add_collection(LineCollection(edges, color=plot.CALM, linewidth=0.5))
        if masked.any():
            seen = (~masked).sum(1)
            ax.stairs(seen, np.arange(n_q + 1), orientation="horizontal", baseline=None, color=plot.INK,
                      linewidth=1.1, gid="mask")  # fmt: skip
        self.box = ax.add_patch(
            Rectangle((0, 0), 0, 0, fill=False, edgecolor=BOX, linewidth=3, clip_on=False, zorder=5, gid="newest")
        )
        ax.set_xlabel("key", fontsize=9, labelpad=1)
        ax.set_ylabel("query", fontsize=9, labelpad=3)
        for axis, block, n in ((ax.xaxis, block_k, n_k), (ax.yaxis, block_q, n_q)):
            axis.set_major_locator(MultipleLocator(block * max(1, round(n / block / 5))))
        ax.tick_params(labelsize=7, length=2, pad=1)

    def show(self, step: int) -> None:
        """Shade the walk's tiles by whether they are taken, and put the box on the newest."""
        shade = self.shade.copy()
        for n, tile in enumerate(self.tiles):
            shade[tile] = 3 if n < step else 2
        self.mesh.set_array(shade)
        self.box.set_visible(step > 0)
        if step:
            i, j = self.tiles[step - 1]
            x, y = j * self.blocks[1], i * self.blocks[0]
            self.box.set_bounds(x, y, min(self.blocks[1], self.size[1] - x), min(self.blocks[0], self.size[0] - y))

    def under(self, x: float, y: float) -> tuple[int, int] | None:
        """The query tile and K tile under display coordinates."""
        found = plot.under([self.ax], x, y)
        if not found:
            return None
        # The map's far edges belong to its last tiles.
        return tuple(
            min(int(at // block), (n - 1) // block)
            for at, block, n in zip(found[:0:-1], self.blocks, self.size, strict=True)
        )


class Distance:
    """How far the walk is from where it ends, after each of its steps; zero stands on the lowest line."""

    LOWEST = 1e-9

    def __init__(self, ax: Axes, distance: np.ndarray, *, unit: str):
        self.ax, self.shown = ax, np.maximum(np.where(np.isnan(distance), np.inf, distance), self.LOWEST)
        steps = np.arange(len(distance))
        finite = self.shown[np.isfinite(self.shown)]
        top = max(10.0, float(finite.max(initial=1.0)) * 10)
        ax.set_yscale("log")
        ax.set(xlim=(-0.4, max(len(distance) - 0.6, 0.6)), ylim=(self.LOWEST / 3, top))
        ax.plot(steps, self.shown, "-", color="#c3c7cc", linewidth=1.2)
        (self.walked,) = ax.plot([], [], "o-", color=plot.KERNEL, markersize=4, linewidth=1.4, gid="walked")
        (self.now,) = ax.plot([], [], "D", color=plot.PLAIN, markeredgecolor=plot.INK, markersize=8, gid="now")
        powers = range(-8, 1, 2) if top <= 1e3 else range(-8, int(np.log10(top)) + 1, 4)
        ax.yaxis.set_major_locator(FixedLocator([self.LOWEST, *(10.0**p for p in powers)]))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_yticklabels(["0", *(f"1e{p}" for p in powers)])
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        ax.set_xlabel(unit, fontsize=9, labelpad=1)
        ax.tick_params(labelsize=7, length=2, pad=1)
        ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
        ax.set_axisbelow(True)

    def show(self, step: int) -> None:
        """Mark the step, and the way to it."""
        self.walked.set_data(np.arange(step + 1), self.shown[: step + 1])
        self.now.set_data([step], [self.shown[step]])


def label(axis: Axis, places: slice, name: str) -> None:
    """Beside a block: which queries, keys or columns it shows."""
    n = places.stop - places.start
    every = max(1, -(-n // 8))
    axis.set_ticks(range(0, n, every), range(places.start, places.stop, every))
    axis.set_label_text(name, fontsize=9)
    axis.set_tick_params(labelsize=7, length=2, pad=1)
    axis.labelpad = 3
