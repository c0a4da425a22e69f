"""Pictures of one workgroup stepping over its tiles, forward and backward: arrays in, matplotlib Axes out.

A picture takes a figure over and keeps what moves; `show` sets it to another step. The walks that they show are arrays
as the kernels recorded them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2lab import plot
from fa2lab.plot_blocks import Block, Distance, Rows, TileMap, freeze, label, largest

# What a gradient's tiles add, the matrix they take it from, and the kernel that walks them.
FORMULAS = {"dQ": "scale · dS K", "dK": "scale · dSᵀ Q", "dV": "Pᵀ dO"}
SOURCES = {"dQ": "dS", "dK": "dS", "dV": "P"}
KERNELS = {"dQ": "fa2_dq", "dK": "fa2_dkv", "dV": "fa2_dkv"}
TITLE = dict(fontsize=10, y=1.0)  # at a fixed height: working it out takes longer than drawing the title
LEGEND = "Map: dark taken, middle still to come, pale other workgroups', white never walked, line: the mask's edge."


@dataclass(frozen=True, eq=False)
class QueryWalk:
    """A tile of queries and the n K tiles that it takes, in their order. Entry t of a list is the state after t tiles.

    `s`: `(rows, Tk)`; `masked`: `(Tq, Tk)` of the head.
    """

    rows: slice
    tiles: Sequence[tuple[int, int]]  # (query tile, K tile), n of them
    s: np.ndarray
    m: np.ndarray  # (n + 1, rows), -inf first
    l: np.ndarray  # noqa: E741 - (n + 1, rows), 0 first
    alpha: np.ndarray  # (n, rows)
    running: np.ndarray  # (n + 1, rows, D): O = o / l, zeros first
    masked: np.ndarray
    block_q: int
    block_k: int
    label: str  # who computed it

    @property
    def final(self) -> np.ndarray:
        """O, `(rows, D)`."""
        return self.running[-1]

    @property
    def distance(self) -> np.ndarray:
        """The largest distance of the running O from the final one, after 0 … n tiles: `(n + 1,)`."""
        with np.errstate(invalid="ignore"):
            apart = np.where(self.running == self.final, 0.0, np.abs(self.running - self.final))
        return apart.max(axis=(1, 2))

    def keys(self, step: int) -> slice:
        """The keys of the tile that step `step`, from 1 on, takes."""
        start = self.tiles[step - 1][1] * self.block_k
        return slice(start, min(start + self.block_k, self.s.shape[1]))

    def p(self, step: int) -> np.ndarray:
        """exp(s - m) of that tile, with the maximum after it: `(rows, keys)`, 0 where masked."""
        with np.errstate(invalid="ignore"):
            weights = np.exp(self.s[:, self.keys(step)] - self.m[step][:, None])
        return np.where(self.masked[self.rows, self.keys(step)], 0.0, weights)


@dataclass(frozen=True, eq=False)
class TileWalk:
    """One workgroup of a backward kernel and the n tiles that it takes, in their order.

    `p`, `ds`, `masked`: `(Tq, Tk)` of one head. `rows`: what the workgroup owns, queries for dQ and keys for dK and dV.
    """

    gradient: str  # "dQ", "dK" or "dV"
    rows: slice
    tiles: Sequence[tuple[int, int]]  # (query tile, K tile), n of them
    parts: np.ndarray  # (n, rows, D): what each tile adds
    running: np.ndarray  # (n + 1, rows, D): the sum after each, zeros first
    final: np.ndarray  # (rows, D): the gradient that the kernel wrote
    p: np.ndarray
    ds: np.ndarray
    masked: np.ndarray
    block_q: int
    block_k: int
    label: str  # who computed it

    @property
    def distance(self) -> np.ndarray:
        """The largest distance of the running sum from the final gradient, after 0 … n tiles: `(n + 1,)`."""
        return np.abs(self.running - self.final).max(axis=(1, 2))


def _grids(figure: Figure, above: Sequence[float]) -> list[Axes]:
    """Emptied of what was there: a row of blocks with so many widths, a row with map, two blocks and distance."""
    figure.clear()
    figure.set_layout_engine("none")
    top = figure.add_gridspec(
        1, len(above), left=0.056, right=0.955, top=0.935, bottom=0.575, width_ratios=above, wspace=0.26
    )
    widths = (2.1, 2.8, 2.8, 2.8)
    low = figure.add_gridspec(1, 4, left=0.056, right=0.985, top=0.43, bottom=0.13, width_ratios=widths, wspace=0.26)
    return [figure.add_subplot(cell) for cell in (*top, *low)]


class ForwardPicture:
    """S, m, alpha, P, l and O of a tile of queries, step by step."""

    def __init__(self, figure: Figure, walk: QueryWalk):
        self.figure, self.walk = figure, walk
        s, m, alpha, p, l, where, so_far, final, distance = _grids(figure, (3, 1.5, 1.1, 3, 1.5))  # noqa: E741
        n, width, D = len(walk.s), walk.block_k, walk.running.shape[2]
        end = largest(np.where(walk.masked[walk.rows], 0.0, walk.s))
        self.s = Block(s, (n, width), end=end, columns="key", digits=".1f" if end < 100 else ".0f")
        self.p = Block(p, (n, width), end=1.0, symmetric=False, columns="key", digits=".2f")
        self.m, self.alpha = Rows(m, n, walk.m), Rows(alpha, n, np.array([0.0, 1.0]))
        self.l = Rows(l, n, walk.l, least=0.0)
        self.map = TileMap(where, walk.masked, walk.tiles, (walk.block_q, walk.block_k))
        end = largest(walk.running)
        self.so_far = Block(so_far, (n, D), end=end, bar=False, columns="O becomes alpha · O + P V")
        self.final = Block(final, (n, D), end=end, columns="column of O")
        self.final.show(walk.final)
        self.distance = Distance(distance, walk.distance, unit="K tiles taken")
        for ax in (s, so_far):
            label(ax.yaxis, walk.rows, "query")
        titles = {
            s: "1  S = scale · Q Kᵀ", m: "2  m, the maximum", alpha: "3  alpha", p: "4  P = exp(S - m)",
            l: "5  l, the sum", so_far: "6  O / l so far", final: "O at the end",
        }  # fmt: skip
        for ax, title in titles.items():
            ax.set_title(title, **TITLE)
        for ax, says in (
            (m, "hollow: before\nfilled: after"),
            (alpha, "exp(m before\n- m after)"),
            (l, "alpha · l + Σ P"),
        ):
            ax.set_xlabel(says, fontsize=7, labelpad=1)
        plot.footer(figure, f"{LEGEND} Crosses: masked. Triangle: -inf, no key yet.\n{walk.label}")

    def freeze(self) -> None:
        """Make every `show` from here on several times faster, on this figure alone: see `plot_blocks.freeze`."""
        freeze(self.figure, (self.map.ax.title, self.distance.ax.title))

    def show(self, step: int) -> str:
        """Set everything to the state after `step` tiles; returns the picture in one sentence."""
        walk, n = self.walk, len(self.walk.tiles)
        before = max(0, step - 1)
        keys = walk.keys(step) if step else None
        hidden = walk.masked[walk.rows, keys] if step else None
        self.map.show(step)
        now = f"K tile {step} of {n}: keys {keys.start} to {keys.stop - 1}" if step else f"none of {n} K tiles yet"
        self.map.ax.set_title(now, **TITLE)
        self.s.show(walk.s[:, keys] if step else None, hidden)
        self.p.show(walk.p(step) if step else None, hidden)
        self.alpha.show(walk.alpha[step - 1] if step else None)
        self.m.show(walk.m[step], walk.m[before])
        self.l.show(walk.l[step], walk.l[before])
        self.so_far.show(walk.running[step] if step else None)
        distance = walk.distance[step]
        self.distance.show(step)
        self.distance.ax.set_title(f"distance from O at the end: {distance:.2g}", **TITLE)
        owned = f"queries {walk.rows.start} to {walk.rows.stop - 1}"
        if not step:
            return f"The forward walk of {owned} before the first of its {n} K tiles: m is -inf, l and O are 0."
        shrunk = walk.alpha[step - 1]
        return (
            f"The forward walk of {owned} after K tile {step} of {n}: the scores S of keys {keys.start} to "
            f"{keys.stop - 1}, m and l before and after, alpha from {shrunk.min():.3g} to {shrunk.max():.3g}, and the "
            f"running O, {distance:.2g} from the final O."
        )


class BackwardPicture:
    """P, dS and what they add to dQ, dK or dV of the tile that a workgroup owns, step by step."""

    def __init__(self, figure: Figure, walk: TileWalk):
        self.figure, self.walk = figure, walk
        p, ds, adds, where, so_far, final, distance = _grids(figure, (3, 3, 3))
        name, block, shape = walk.gradient, (walk.block_q, walk.block_k), walk.final.shape
        taken = [walk.ds[self._tile(t)] for t in range(1, len(walk.tiles) + 1)]
        self.p = Block(p, block, end=1.0, symmetric=False, columns="key", digits=".2f")
        self.ds = Block(ds, block, end=max(map(largest, taken), default=1.0), columns="key", digits=".2f")
        self.map = TileMap(where, walk.masked, walk.tiles, block)
        end = max(map(largest, (walk.parts, walk.running, walk.final)))
        self.adds = Block(adds, shape, end=end, columns=f"column of {name}")
        self.so_far = Block(so_far, shape, end=end, bar=False, columns=f"column of {name}")
        self.final = Block(final, shape, end=end, columns=f"column of {name}")
        self.final.show(walk.final)
        self.distance = Distance(distance, walk.distance, unit="tiles taken")
        for ax in (p, ds):
            ax.set_ylabel("query", fontsize=9, labelpad=3)
            label(ax.yaxis if name == "dQ" else ax.xaxis, walk.rows, "query" if name == "dQ" else "key")
        for ax in (adds, so_far):
            label(ax.yaxis, walk.rows, "query" if name == "dQ" else "key")
        titles = {
            p: "1  P = exp(S - L), recomputed",
            ds: f"{'2  ' if SOURCES[name] == 'dS' else '(for dQ and dK:)  '}dS = P ∘ (dP - delta)",
            adds: f"{'3' if SOURCES[name] == 'dS' else '2'}  the tile adds {FORMULAS[name]}",
            so_far: f"{'4' if SOURCES[name] == 'dS' else '3'}  {name} so far",
            final: f"{name} at the end",
        }  # fmt: skip
        for ax, title in titles.items():
            ax.set_title(title, **TITLE)
        plot.footer(figure, f"{LEGEND} Crosses: masked.\n{walk.label}; {name} at the end by {KERNELS[name]}")

    def _tile(self, step: int) -> tuple[slice, slice]:
        """The queries and keys of the tile that step `step`, from 1 on, takes."""
        sizes = zip(self.walk.tiles[step - 1], (self.walk.block_q, self.walk.block_k), self.walk.p.shape, strict=True)
        return tuple(slice(i * block, min((i + 1) * block, n)) for i, block, n in sizes)

    def freeze(self) -> None:
        """Make every `show` from here on several times faster, on this figure alone: see `plot_blocks.freeze`."""
        freeze(self.figure, (self.map.ax.title, self.distance.ax.title))

    def show(self, step: int) -> str:
        """Set everything to the state after `step` tiles; returns the picture in one sentence."""
        walk, name, n = self.walk, self.walk.gradient, len(self.walk.tiles)
        tile = self._tile(step) if step else None
        self.map.show(step)
        moves, met = ("K", "keys") if name == "dQ" else ("Q", "queries")
        at = tile[1 if name == "dQ" else 0] if step else None
        now = f"{moves} tile {step} of {n}: {met} {at.start} to {at.stop - 1}" if step else f"none of {n} tiles yet"
        self.map.ax.set_title(now, **TITLE)
        self.p.show(walk.p[tile] if step else None, walk.masked[tile] if step else None)
        self.ds.show(walk.ds[tile] if step else None, walk.masked[tile] if step else None)
        self.adds.show(walk.parts[step - 1] if step else None)
        self.so_far.show(walk.running[step] if step else None)
        distance = walk.distance[step]
        self.distance.show(step)
        self.distance.ax.set_title(f"distance from {name} at the end: {distance:.2g}", **TITLE)
        owned = f"{'queries' if name == 'dQ' else 'keys'} {walk.rows.start} to {walk.rows.stop - 1}"
        if not step:
            return f"The walk for {name} of {owned} before the first of its {n} tiles: {name} is 0."
        return (
            f"The walk for {name} of {owned} after {moves} tile {step} of {n}: P and dS of {met} {at.start} to "
            f"{at.stop - 1}, what they add, {FORMULAS[name]}, and the sum so far, {distance:.2g} from {name}."
        )
