"""Where a result errs: by row, in spacings of float32, and what each tile size would take of a workgroup's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fa2lab.errors import KernelError, LimitError, ShapeError
from fa2lab.plan import plan
from fa2lab.planned import Plan
from fa2lab.tiles import TILES

# Bins of the histogram, in spacings: rounded as well as can be, then by powers of two; the last one is open.
ULP_EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
NO_LIMIT = 1 << 40


def distance(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|got - expected| in float64, the same shape; 0 where both are the same infinity or NaN, inf where one alone is.

    Raises `ShapeError` where the shapes differ.
    """
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    if got.shape != expected.shape:
        raise ShapeError(f"The two must have one shape; got {got.shape} and {expected.shape}.")
    with np.errstate(invalid="ignore"):
        apart = np.abs(got - expected)
    same = (np.isnan(got) & np.isnan(expected)) | (got == expected)
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def by_row(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The largest `distance` of each row: `(B, T, H, D)` → `(B · H, T)`, batch by batch."""
    largest = distance(got, expected).max(axis=-1, initial=0.0)  # (B, T, H)
    return np.moveaxis(largest, 2, 1).reshape(-1, largest.shape[1])


def ulps(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """`distance` in spacings of float32 at the expected number; the same shape."""
    apart = distance(got, expected)
    with np.errstate(over="ignore", invalid="ignore"):
        spacing = np.spacing(np.abs(np.asarray(expected)).astype(np.float32)).astype(np.float64)
    finite = np.isfinite(spacing)  # at an infinity or NaN there is no spacing, and the distance is 0 or inf
    return np.divide(apart, spacing, out=apart.copy(), where=finite)


def ulp_shares(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The share of places in each bin of `ULP_EDGES`, `(len(ULP_EDGES) + 1,)`: up to the first edge, …, past the last.

    An empty array has no shares: all are 0.
    """
    bins = np.searchsorted(ULP_EDGES, ulps(got, expected).ravel(), side="left")
    return np.bincount(bins, minlength=len(ULP_EDGES) + 1) / max(1, len(bins))


@dataclass(frozen=True)
class TileSize:
    """A tile, and what one workgroup of it takes."""

    block_q: int
    block_k: int
    workgroup_bytes: int
    invocations: int
    planned: bool  # the one that runs

    @property
    def name(self) -> str:
        """Br×Bc."""
        return f"{self.block_q}×{self.block_k}"


def tile_sizes(planned: Plan, tiles: Sequence[tuple[int, int]] = TILES) -> list[TileSize]:
    """What each tile size would take for the plan's problem and kernel, fitting or not, the largest first.

    The planned tile is always among them; a size that the kernel cannot have is left out. Empty for a kernel without
    tiles.
    """
    if not planned.kernel.tiled or planned.block_q is None:
        return []
    own = planned.block_q, planned.block_k
    roomy = replace(planned.limits, workgroup_bytes=NO_LIMIT, invocations=NO_LIMIT)
    found = [TileSize(*own, planned.workgroup_bytes, planned.invocations, True)]
    for block_q, block_k in tiles:
        if (block_q, block_k) == own:
            continue
        try:
            other = plan(planned.problem, roomy, planned.kernel, block_q=block_q, block_k=block_k)
        except (LimitError, KernelError):
            continue
        found.append(TileSize(block_q, block_k, other.workgroup_bytes, other.invocations, False))
    return sorted(found, key=lambda size: (-size.workgroup_bytes, -size.block_q))
