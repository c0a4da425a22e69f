"""Tiles: how many queries and keys a workgroup holds, how its invocations share them, and which are tried first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

# Tiles (BLOCK_Q, BLOCK_K) of the kernels with one invocation a row, from the most sharing to the least; the planner
# takes the first that fits.
TILES = ((16, 16), (16, 8), (16, 4), (8, 8), (8, 4), (4, 4), (4, 2), (2, 2), (1, 1))


@dataclass(frozen=True)
class Tile:
    """A tile of `block_q` queries by `block_k` keys.

    Where tiles stand in registers, an invocation owns `rows` rows, `lanes` invocations share a row, D is walked in
    `slices` slices, and with `prefetch` the next slice travels while the last is worked on.
    """

    block_q: int
    block_k: int
    rows: int = 1
    lanes: int = 1
    slices: int = 1
    prefetch: bool = False

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k}"


@dataclass(frozen=True)
class Footprint:
    """What a register tile takes of a device, its rows being queries or, for dK and dV, keys."""

    block_rows: int
    block_cols: int
    tile: Tile

    @property
    def invocations(self) -> int:
        """Of a workgroup."""
        return self.block_rows // self.tile.rows * self.tile.lanes

    @property
    def legal(self) -> bool:
        """Whether rows and columns go round evenly, as shared/register_tiles.wgsl asserts."""
        groups, left = divmod(self.block_rows, self.tile.rows)
        return not left and not groups & (groups - 1) and self.block_cols % (4 * self.tile.lanes) == 0

    def workgroup_bytes(self, head_dim: int, *, scratch: bool) -> int:
        """Bytes of its tiles of rows, of columns and of weights, and of the scratch that reductions may need."""
        slice_ = _ceil_div(_ceil_div(head_dim, 4), self.tile.slices)
        operands = 16 * (self.block_rows + self.block_cols) * slice_
        return operands + 4 * self.block_rows * (self.block_cols + (self.tile.lanes if scratch else 0))


def register_tiles(block_q: int, block_k: int, head_dim: int, *, rows_are: str) -> Iterator[Tile]:
    """Every register tile of that size, those that share the most first: for sizes that no table names."""
    block_rows, block_cols = (block_q, block_k) if rows_are == "BLOCK_Q" else (block_k, block_q)
    chunks = _ceil_div(head_dim, 4)
    for rows in (4, 2, 1, 8, 3, 5, 7, 6):
        for lanes in (8, 4, 2, 1, 16, 32, 64):
            for slices in (1, 2, 4, 8, 16):
                tile = Tile(block_q, block_k, rows, lanes, slices)
                if slices <= chunks and Footprint(block_rows, block_cols, tile).legal:
                    yield tile


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# The planner's table of register tiles, as (rows, columns, rows an invocation, lanes a row, prefetch), the fastest
# first; it takes the first that fits the device. Measured on an NVIDIA H200, driver 580.159.04, wgpu 0.32.0, 2026-11-30
# (benchmarks/NOTES.md). D is walked 64 columns at a time, which lets all of them fit at any D.
_FORWARD = {
    32: ((128, 32, 4, 8, True),),
    64: ((64, 64, 4, 16, True),),
    128: ((64, 64, 4, 16, True),),
    256: ((64, 64, 2, 16, True),),
}
_BACKWARD = {
    64: ((64, 64, 4, 16, False),),
    256: ((64, 64, 2, 16, False),),
}
# After them, by what they share: what smaller devices, browsers and short sequences get.
_SMALLER = (
    (64, 64, 4, 16),
    (32, 64, 2, 16),
    (32, 32, 2, 8),
    (16, 32, 2, 8),
    (16, 16, 2, 4),
    (8, 16, 2, 4),
    (4, 4, 1, 1),
)
# Few workgroups leave most of a GPU idle, so up to so many tiles of 64 rows, smaller ones go first.
_FEW_TILES = 64
_FOR_FEW = ((16, 64, 2, 16), (16, 32, 2, 8))
_FOR_FEW_ROWS = ((4, 64, 1, 16),)  # of a head, as in decoding
# Software drivers: one row an invocation keeps the code that they compile short. Measured on llvmpipe (LLVM 15).
_SOFTWARE = ((32, 32, 1, 8), (16, 32, 1, 8), (16, 16, 1, 4), (8, 16, 1, 4), (4, 4, 1, 1))


def preferred(
    rows_are: str, n_rows: int, head_dim: int, *, reduces: bool, software: bool, few_rows: bool = False
) -> tuple[Tile, ...]:
    """The register tiles that the planner tries, in order.

    `rows_are`: BLOCK_Q or BLOCK_K. `n_rows`: of all batches and heads. `reduces`: whether rows are reduced over their
    lanes, as forward kernels do; those also prefetch. `software`: whether a CPU stands in for the GPU. `few_rows`:
    whether a head has no more than four rows.
    """
    slices = _ceil_div(head_dim, 64)
    table = _FORWARD if reduces else _BACKWARD
    fastest = next(tiles for most, tiles in table.items() if head_dim <= most)
    order = [(*tile, reduces) for tile in _SMALLER]
    if software:
        order = [(*tile, False) for tile in _SOFTWARE]
    elif n_rows > 64 * _FEW_TILES:
        order = [*fastest, *order]
    else:
        order = [*((*tile, reduces) for tile in _FOR_FEW), *order]
    if few_rows:
        order = [*((*tile, reduces) for tile in _FOR_FEW_ROWS), *order]
    tiles = []
    for rows, cols, each, lanes, prefetch in order:
        block_q, block_k = (rows, cols) if rows_are == "BLOCK_Q" else (cols, rows)
        tiles.append(Tile(block_q, block_k, each, lanes, slices, prefetch))
    return tuple(tiles)


def candidates(rows_are: str, head_dim: int, *, reduces: bool) -> tuple[Tile, ...]:
    """The register tiles that are worth measuring for a kernel at a head dimension: all that the tables hold."""
    found = {}
    for n_rows in (1, 1 << 30):
        for software in (False, True):
            for tile in preferred(rows_are, n_rows, head_dim, reduces=reduces, software=software):
                found |= {tile: None, replace(tile, prefetch=reduces and not tile.prefetch): None}
    return tuple(found)
