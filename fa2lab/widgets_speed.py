"""The tile view: what a tile's size does to time, bytes and memory. `tile_speed` is the plain function under it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from matplotlib.figure import Figure

from fa2lab import bench, plot, plot_speed
from fa2lab.engine import choose
from fa2lab.errors import LimitError, NoAdapterError
from fa2lab.gpu import Device
from fa2lab.kernels import kernels
from fa2lab.live import View
from fa2lab.plan import plan
from fa2lab.problem import Problem
from fa2lab.widgets_controls import choice, size_slider, slider, tick, view

TILE_SIZE = (10.4, 4.4)  # inches
BLOCKS = {"fa2_forward": (4, 8, 16), "fa2_forward_tiled": (16, 32, 64)}
PATIENCE = 0.05  # a grid of nine has to come while one waits


@dataclass(frozen=True, eq=False)
class TileSpeed:
    """Rows of a kernel by tile, None where the device refuses, and the tile that is looked at."""

    kernel: str
    blocks: tuple[int, ...]
    rows: dict[tuple[int, int], bench.Row | None]
    tile: tuple[int, int]
    naive: bench.Row
    workgroup: dict[tuple[int, int], int]
    limit: int

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `TILE_SIZE`; returns the picture in one sentence."""
        left, right = figure.axes or figure.subplots(1, 2, width_ratios=(1, 1.5))
        seconds = [[self._seconds(q, k) for k in self.blocks] for q in self.blocks]
        plot_speed.tile_times(left, self.blocks, self.blocks, np.array(seconds), chosen=self.tile)
        rows = {"naive": self.naive} | ({"this tile": row} if (row := self.rows[self.tile]) else {})
        plot_speed.bytes_moved(right, {n: r.kinds for n, r in rows.items()}, least=self.naive.least_bytes)
        plot.footer(figure, f"{self.kernel} on {self.naive.adapter}; {self.naive.timing.clock}")
        return f"Time of {self.kernel} for {len(self.rows)} tile sizes, and the bytes that it asks for. {self.sentence}"

    def _seconds(self, block_q: int, block_k: int) -> float:
        row = self.rows[block_q, block_k]
        return row.timing.seconds if row else np.nan

    @property
    def sentence(self) -> str:
        """What the tile that is looked at takes."""
        row, name = self.rows[self.tile], f"{self.tile[0]}×{self.tile[1]}"
        if row is None:
            return f"A tile of {name} does not fit this device."
        return (
            f"A tile of {name} takes {row.milliseconds:.3g} ms and asks for {row.bytes:,} B, "
            f"{self.naive.bytes / row.bytes:.1f} times less than naive; it needs {self.workgroup[self.tile]:,} of "
            f"{self.limit:,} B of workgroup memory."
        )

    @property
    def words(self) -> str:
        """The sentence, as HTML."""
        return self.sentence


def tile_speed(
    *,
    T: int = 96,
    H: int = 2,
    D: int = 32,
    kernel: str = "fa2_forward",
    block_q: int | None = None,
    block_k: int | None = None,
    causal: bool = True,
    device: Device | str | None = None,
) -> TileSpeed:
    """Time a kernel at nine tile sizes, each proved right before, and look at one: by default the largest.

    kernel: a name of `BLOCKS`, which has the sizes that block_q and block_k can be.
    Raises `ValueError` for another size, and `NoAdapterError` where NumPy would compute, as there is nothing to time.
    """
    found = choose(device)
    if found is None:
        raise NoAdapterError("Tile sizes are timed on an adapter, hardware or software; NumPy walks none.")
    blocks = BLOCKS[kernel]
    tile = tuple(blocks[-1] if size is None else size for size in (block_q, block_k))
    if not set(tile) <= set(blocks):
        sizes = ", ".join(map(str, blocks))
        raise ValueError(f"{kernel} is timed with blocks of {sizes}; got a tile of {tile[0]}×{tile[1]}.")
    # Which tile is looked at runs nothing again: all nine are measured at once.
    rows, workgroup, naive = _grid(T, H, D, kernel, causal, found)
    return TileSpeed(kernel, blocks, rows, tile, naive, workgroup, found.limits.workgroup_bytes)


@lru_cache(maxsize=8)
def _grid(
    T: int, H: int, D: int, kernel: str, causal: bool, device: Device
) -> tuple[dict[tuple[int, int], bench.Row | None], dict[tuple[int, int], int], bench.Row]:
    blocks, rows, workgroup = BLOCKS[kernel], {}, {}
    problem = Problem(1, T, T, H, H, D, causal, "bottom-right", D**-0.5)
    options = dict(causal=causal, patience=PATIENCE, T=T, H=H, D=D)
    for tile in ((q, k) for q in blocks for k in blocks):
        sizes = dict(block_q=tile[0], block_k=tile[1])
        try:
            workgroup[tile] = plan(problem, device.limits, kernel, **sizes).workgroup_bytes
            rows[tile] = bench.measure(device, kernel, **options, **sizes)
        except LimitError:
            rows[tile] = None
    return rows, workgroup, bench.measure(device, "naive", **options)


def tiles(*, device: Device | str | None = None, **values) -> View:
    """A view over `tile_speed`. values: where the controls start, by the names of its arguments."""
    names = [name for name in BLOCKS if name in kernels()]
    controls = {
        "T": slider("T length", "Number of queries and keys", 96, 16, 512),
        "H": slider("H heads", "Number of heads", 2, 1, 8),
        "D": slider("D head size", "Numbers in one head's vectors", 32, 4, 128),
        "kernel": choice("kernel", "WGSL kernel whose tiles are tried", names, names[0]),
        "block_q": size_slider("Br queries", "Query rows of the tile that is looked at", BLOCKS[names[0]]),
        "block_k": size_slider("Bc keys", "Keys of the tile that is looked at", BLOCKS[names[0]]),
        "causal": tick("causal mask", "Each query sees itself and the keys before it", True),
    }

    def fit(change) -> None:
        """Another kernel, other sizes to choose from; it starts at the largest."""
        for name in ("block_q", "block_k"):
            controls[name].options = BLOCKS[change["new"]]
            controls[name].value = BLOCKS[change["new"]][-1]

    controls["kernel"].observe(fit, names="value")  # before the View listens: it never sees a size that is none
    return view(controls, lambda **moved: tile_speed(**moved, device=device), TILE_SIZE, values, words_height="48px")
