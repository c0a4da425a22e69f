"""What the engines return: frozen dataclasses of NumPy arrays, the same fields whichever engine computed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fa2lab.planned import Plan
    from fa2lab.problem import Problem

# How a (query row, K tile) pair met the causal mask. The kernels write the same numbers into their trace.
SKIPPED, PARTIAL, FULL = 0, 1, 2
TILE_STATES = ("skipped", "partial", "full")


@dataclass(frozen=True, eq=False)
class Trace:
    """The online softmax as it went: one entry per query row and K tile, taken after that tile was merged.

    `m`, `l`, `alpha`: float, `(B, H, Tq, n_tiles)`. `m` is -inf and `l` 0 until the row has met its first visible
    key; `alpha` is the factor that the tile applied to the older `l` and `O`. `state`: uint8, same shape, that of
    the row's tile: `SKIPPED` (the walk never came there), `PARTIAL` (the mask's edge runs through it: this row may
    see all, some or none of its keys) or `FULL`. A skipped tile repeats the final `m` and `l`, with `alpha` 1.
    """

    m: np.ndarray
    l: np.ndarray  # noqa: E741 - the paper's letter
    alpha: np.ndarray
    state: np.ndarray
    block_q: int
    block_k: int

    @property
    def n_tiles(self) -> int:
        """How many K tiles the keys fill."""
        return self.m.shape[-1]


@dataclass(frozen=True, eq=False)
class Result:
    """One attention forward.

    `out`: `(B, Tq, H, D)`; `lse`: `(B, H, Tq)`, natural log; `attn`: `(B, H, Tq, Tk)` or None; `trace` or None.
    `kernel` and `adapter` say who computed it. `plan` is the device plan, None where NumPy computed.
    `device_bytes` is the peak that the device's own allocation count reached, None where NumPy computed.
    """

    out: np.ndarray
    lse: np.ndarray
    kernel: str
    adapter: str
    problem: Problem
    attn: np.ndarray | None = None
    trace: Trace | None = None
    plan: Plan | None = None
    device_bytes: int | None = None

    @property
    def label(self) -> str:
        """`kernel on adapter`, the footer of every figure."""
        return f"{self.kernel} on {self.adapter}"


@dataclass(frozen=True, eq=False)
class ForwardTrace:
    """The forward pass of one batch and head as it went over the K tiles, each entry taken after a tile was merged.

    `s`: `(Tq, Tk)`, the scores, -inf where masked. `m`, `l`, `alpha`: `(Tq, n_tiles)` as in `Trace`. `o`:
    `(Tq, n_tiles, D)`, the running O as the walk holds it, not yet divided by `l`. A skipped tile repeats the final
    `m`, `l` and `o`, with `alpha` 1. `state`: uint8 `(n_q_tiles, n_k_tiles)`, `SKIPPED`, `PARTIAL` or `FULL`. `seen`:
    `(Tq,)`, how many keys a query sees, the first ones.
    """

    s: np.ndarray
    m: np.ndarray
    l: np.ndarray  # noqa: E741 - the paper's letter
    alpha: np.ndarray
    o: np.ndarray
    state: np.ndarray
    seen: np.ndarray
    block_q: int
    block_k: int
    kernel: str
    adapter: str

    @property
    def masked(self) -> np.ndarray:
        """Boolean `(Tq, Tk)`: which keys a query does not see."""
        return np.arange(self.s.shape[1]) >= self.seen[:, None]

    @property
    def out(self) -> np.ndarray:
        """O = o / l after each tile, `(Tq, n_tiles, D)`; 0 where a row sees no key. The last one is the output."""
        seen = self.l[..., None] != 0
        with np.errstate(all="ignore"):  # a non-finite input may stand there
            return np.divide(self.o, self.l[..., None], out=np.zeros_like(self.o), where=seen)

    @property
    def label(self) -> str:
        """`kernel on adapter`, the footer of every figure."""
        return f"{self.kernel} on {self.adapter}"


@dataclass(frozen=True, eq=False)
class BackwardTrace:
    """The backward pass of one batch and head, tile by tile, as the tiles were recomputed.

    `p`, `ds`: `(Tq, Tk)`, 0 where masked. What each tile adds: `dq_parts` `(n_k_tiles, Tq, D)` by K tile, `dk_parts`
    and `dv_parts` `(n_q_tiles, Tk, D)` by query tile; summed over the tiles they are this head's dQ, dK and dV.
    `state`: uint8 `(n_q_tiles, n_k_tiles)`, `SKIPPED`, `PARTIAL` or `FULL`.
    """

    p: np.ndarray
    ds: np.ndarray
    dq_parts: np.ndarray
    dk_parts: np.ndarray
    dv_parts: np.ndarray
    state: np.ndarray
    block_q: int
    block_k: int
    kernel: str
    adapter: str

    @property
    def label(self) -> str:
        """`kernel on adapter`, the footer of every figure."""
        return f"{self.kernel} on {self.adapter}"


@dataclass(frozen=True, eq=False)
class Gradients:
    """One attention backward: what a loss whose gradient by O is `dout` says to Q, K and V.

    `dq`: `(B, Tq, H, D)`; `dk`, `dv`: `(B, Tk, Hkv, D)`, summed over the query heads of a
    group. The rest as in `Result`.
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    kernel: str
    adapter: str
    problem: Problem
    plan: Plan | None = None
    device_bytes: int | None = None

    @property
    def label(self) -> str:
        """`kernel on adapter`, the footer of every figure."""
        return f"{self.kernel} on {self.adapter}"
