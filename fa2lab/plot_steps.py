"""The picture of FlashAttention-2's forward, one tile of queries stepping over its K tiles: arrays in, Axes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from fa2lab import plot
from fa2lab.plot_blocks import Block, Distance, Rows, TileMap, freeze, label_rows, largest

TITLE = dict(fontsize=10, y=1.0)  # at a fixed height: working it out takes longer than drawing the title


@dataclass(frozen=True, eq=False)
class QueryWalk:
    """A tile of queries and the n K tiles that it takes, in their order. Entry t of a list is the state after t tiles.

    `s`: `(rows, Tk)`; `masked`: `(Tq, Tk)` of the head; `state`: `(n_q_tiles, n_k_tiles)`.
    """

    rows: slice
    tiles: Sequence[tuple[int, int]]  # (query tile, K tile), n of them
    s: np.ndarray
    m: np.ndarray  # (n + 1, rows), -inf first
    l: np.ndarray  # noqa: E741 - (n + 1, rows), 0 first
    alpha: np.ndarray  # (n, rows)
    running: np.ndarray  # (n + 1, rows, D): O = o / l, zeros first
    masked: np.ndarray
    state: np.ndarray
    diagonal: int | None  # of the causal mask
    block_q: int
    block_k: int
    label: str  # who computed it

    @property
    def n_steps(self) -> int:
        """How many K tiles the walk takes."""
        return len(self.tiles)

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
        s, m = self.s[:, self.keys(step)], self.m[step][:, None]
        with np.errstate(invalid="ignore"):
            return np.where(s == -np.inf, 0.0, np.exp(s - m))


class ForwardPicture:
    """S, m, alpha, P, l and O of a walk on a figure, step by step. Making it takes the figure over."""

    def __init__(self, figure: Figure, walk: QueryWalk):
        self.figure, self.walk = figure, walk
        figure.clear()
        figure.set_layout_engine("none")
        above = figure.add_gridspec(
            1, 5, left=0.05, right=0.985, top=0.935, bottom=0.575, width_ratios=(3, 1.5, 1.1, 3, 1.5), wspace=0.24
        )
        below = figure.add_gridspec(
            1, 4, left=0.05, right=0.985, top=0.43, bottom=0.13, width_ratios=(2.1, 2.8, 2.8, 2.8), wspace=0.26
        )
        s, m, alpha, p, l, *rest = (figure.add_subplot(cell) for cell in (*above, *below))  # noqa: E741
        n, width, D = len(walk.s), walk.block_k, walk.running.shape[2]
        taken = [walk.s[:, walk.keys(step)] for step in range(1, walk.n_steps + 1)]
        visible = np.concatenate([x[np.isfinite(x)].ravel() for x in taken] or [np.zeros(0)])
        digits = ".1f" if largest(visible) < 100 else ".0f"
        self.s = Block(s, (n, width), end=largest(visible), columns="key", digits=digits)
        self.p = Block(p, (n, width), end=1.0, symmetric=False, columns="key", digits=".2f")
        self.m = Rows(m, n, walk.m)
        self.alpha = Rows(alpha, n, np.array([0.0, 1.0]))
        self.l = Rows(l, n, walk.l, least=0.0)
        where, so_far, final, distance = rest
        self.map = TileMap(
            where, walk.state, walk.tiles, blocks=(walk.block_q, walk.block_k), size=walk.masked.shape,
            diagonal=walk.diagonal,
        )  # fmt: skip
        end = largest(walk.running)
        self.so_far = Block(so_far, (n, D), end=end, bar=False, columns="column of O")
        self.final = Block(final, (n, D), end=end, columns="column of O")
        self.final.show(walk.final)
        self.distance = Distance(distance, walk.distance, unit="K tiles taken")
        for ax in (s, so_far):
            label_rows(ax, walk.rows, "query")
        for ax, title in (
            (m, "2  m, the maximum"), (alpha, "3  alpha"), (p, "4  P = exp(S - m)"), (l, "5  l, the sum"),
            (final, "O at the end"),
        ):  # fmt: skip
            ax.set_title(title, **TITLE)
        m.set_xlabel("hollow: before\nfilled: after", fontsize=7, labelpad=1)
        l.set_xlabel("alpha · l + Σ P", fontsize=8, labelpad=1)
        alpha.set_xlabel("exp(before - after)\nshrinks l and O", fontsize=7, labelpad=1)
        plot.footer(
            figure,
            "Map: dark taken, middle still to come, pale other workgroups', white never walked, line: the mask's edge. "
            f"Crosses: masked. Triangle: -inf, no key yet.\n{walk.label}",
        )

    def freeze(self) -> None:
        """Make every `show` from here on several times faster, on this figure alone: see `plot_blocks.freeze`."""
        freeze(self.figure, [ax.title for ax in (self.map.ax, self.s.ax, self.so_far.ax, self.distance.ax)])

    def show(self, step: int) -> str:
        """Set everything to the state after `step` tiles; returns the picture in one sentence."""
        walk = self.walk
        n = walk.n_steps
        self.map.show(step)
        self.map.ax.set_title(f"K tile {step} of {n}", **TITLE)
        if step:
            keys = walk.keys(step)
            hidden = walk.masked[walk.rows, keys]
            self.s.show(walk.s[:, keys], hidden)
            self.p.show(walk.p(step), hidden)
            self.s.ax.set_title(f"1  S = scale · Q Kᵀ, keys {keys.start} to {keys.stop - 1}", **TITLE)
            alpha = walk.alpha[step - 1]
            self.alpha.show(np.zeros_like(alpha), alpha)
        else:
            self.s.show(None)
            self.p.show(None)
            self.s.ax.set_title("1  S: no tile yet", **TITLE)
            self.alpha.show(*np.full((2, len(walk.s)), np.nan))
        before = max(0, step - 1)
        self.m.show(walk.m[before], walk.m[step])
        self.l.show(walk.l[before], walk.l[step])
        self.so_far.show(walk.running[step] if step else None)
        self.so_far.ax.set_title("6  O so far = O / l" if step else "6  O: nothing yet", **TITLE)
        distance = walk.distance[step]
        self.distance.show(step)
        self.distance.ax.set_title(f"distance from O at the end: {distance:.2g}", **TITLE)
        owned = f"queries {walk.rows.start} to {walk.rows.stop - 1}"
        if not step:
            return f"The forward walk of {owned} before its first of {n} K tiles: m is -inf, l and O are 0."
        return (
            f"Forward, {owned}, after K tile {step} of {n}: its scores S, m and l before and after, alpha from "
            f"{walk.alpha[step - 1].min():.3g} to {walk.alpha[step - 1].max():.3g}, and the running O, {distance:.2g} "
            f"from the final O."
        )


def forward(figure: Figure, walk: QueryWalk, step: int) -> str:
    """The state after `step` tiles on a figure of its own. Returns the picture in one sentence."""
    return ForwardPicture(figure, walk).show(step)
