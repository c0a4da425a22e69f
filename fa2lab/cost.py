"""What attention costs on paper: floating-point operations, and the bytes that each kernel asks global memory for.

Nothing here is measured. The operations are the problem's, whichever kernel computes it; the bytes are the kernel's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from fa2lab.errors import KernelError
from fa2lab.planned import Plan
from fa2lab.problem import Problem
from fa2lab.tiles import Tile

Direction = Literal["forward", "backward", "forward+backward"]
# Two matrix products forward; five backward (S and dP again, then dQ, dK and dV).
WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}


def flops(problem: Problem, direction: Direction = "forward") -> float:
    """Floating-point operations of a problem: 4·B·H·Tq·Tk·D forward, half of it where causal, 2.5 times it backward.

    The convention of the field, with the softmax left out and the diagonal counted half. A kernel that does more (the
    FlashAttention-2 backward here works S and dP out twice) gets no credit for it.
    """
    p = problem
    return 4.0 * p.B * p.H * p.Tq * p.Tk * p.D * WORK[direction] / (2 if p.causal else 1)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel's invocations load and store in global memory, by buffer; what caches answer included."""

    read: dict[str, int]
    written: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def kinds(self) -> dict[str, int]:
        """What it is: K and V, matrices of T² numbers, or the rest."""
        of = {"K and V": ("k", "v"), "T² matrices": ("attn", "dscores")}
        kinds = {kind: sum(x.get(n, 0) for x in (self.read, self.written) for n in names) for kind, names in of.items()}
        return kinds | {"the rest": self.total - sum(kinds.values())}


def least(planned: Plan) -> int:
    """Bytes that no kernel can do without: each input read once, each output written once."""
    ends = (*planned.kernel.inputs, *planned.kernel.outputs)
    return sum(_itemsize(planned, name) * prod(planned.shape(name)) for name in ends)


def _itemsize(planned: Plan, buffer: str) -> int:
    return np.dtype(planned.dtype(buffer)).itemsize


def traffic(planned: Plan) -> Traffic:
    """What a plan's dispatches ask global memory for, all launches together.

    Traces are left out: a run that is timed records none. Raises `KernelError` for a kernel file without a model.
    """
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    for stage, tile in zip(planned.kernel.passes, planned.tiles, strict=True):
        if stage.file not in _MODELS:
            raise KernelError(f"There is no model of the bytes that {stage.file}.wgsl moves.")
        asked = ({}, {}) if planned.problem.empty else _MODELS[stage.file](planned.problem, tile, planned)
        for sums, numbers in zip((read, written), asked, strict=True):
            for name, n in numbers.items():
                sums[name] = sums.get(name, 0) + _itemsize(planned, name) * int(n)
    return Traffic(read, written)


Numbers = dict[str, int]  # read or written, by buffer
Model = Callable[[Problem, Tile | None, Plan], tuple[Numbers, Numbers]]


# What the mask leaves. B·H rows of Q's length, or pairs of a row and a key that it sees.


def _rows(p: Problem) -> int:
    return p.B * p.H * p.Tq


def _pairs(p: Problem) -> int:
    return p.B * p.H * int(p.keys_seen().sum())


def _seen_by_tiles(p: Problem, block_q: int) -> np.ndarray:
    """How many keys each tile of queries sees: as many as its last row."""
    last = np.minimum(np.arange(block_q, p.Tq + block_q, block_q), p.Tq) - 1
    return p.keys_seen()[last]


def _keeps(planned: Plan) -> bool:
    """Whether a forward also writes the attention matrix, in a second walk."""
    return bool(planned.constants["WRITE_ATTN"])


def _parts(p: Problem, planned: Plan) -> int:
    """In how many parts the keys are walked."""
    return -(-p.Tk // planned.split_keys)


def _first_rows(p: Problem, keys: np.ndarray) -> np.ndarray:
    """The first row that sees each key; Tq where none does."""
    return np.clip(keys - p.diagonal, 0, p.Tq) if p.causal else np.zeros_like(keys)


# One invocation a score or a row: every row reads all of the keys it sees, D numbers each, for itself.


def _naive_scores(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    return {"q": _pairs(p) * p.D, "k": _pairs(p) * p.D}, {"attn": _pairs(p)}


def _naive_softmax(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    # A row's scores are read for the maximum, for the sum and for the weights; only the last walk goes to its end.
    whole = _rows(p) * p.Tk
    return {"attn": 2 * _pairs(p) + whole}, {"attn": whole, "lse": _rows(p)}


def _naive_output(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    # One invocation a number of O, so P's row is read D times.
    return {"attn": _pairs(p) * p.D, "v": _pairs(p) * p.D}, {"out": _rows(p) * p.D}


def _fused_sv(p: Problem, _tile: None, planned: Plan) -> tuple[Numbers, Numbers]:
    read = dict.fromkeys("qkv", _pairs(p) * p.D)
    return read, {"out": _rows(p) * p.D, "lse": _rows(p), "attn": _pairs(p) if _keeps(planned) else 0}


# A tile of Br queries reads K and V once for all of its rows: Br times fewer reads than one row by itself.


def _fa2_forward(p: Problem, tile: Tile, planned: Plan) -> tuple[Numbers, Numbers]:
    # The walk takes whole tiles of keys, as far as the last row sees; with attn it goes the way once more.
    seen = _seen_by_tiles(p, tile.block_q)
    keys = p.B * p.H * int(np.minimum(-(-seen // tile.block_k) * tile.block_k, p.Tk).sum())
    keys *= 2 if _keeps(planned) else 1
    read = {"q": _rows(p) * p.D, "k": keys * p.D, "v": keys * p.D}
    return read, {"out": _rows(p) * p.D, "lse": _rows(p), "attn": _pairs(p) if _keeps(planned) else 0}


def _fa2_forward_tiled(p: Problem, tile: Tile, planned: Plan) -> tuple[Numbers, Numbers]:
    # Loads stop at the last key that the tile sees. Each part of the keys has its workgroup, which reads Q and writes
    # an O and L of its own. Where D is walked in slices, Q is read again at every tile of keys. Not counted: where a
    # tile's vec4s do not go round its invocations evenly, the last of them read a row of the next tile and drop it.
    seen, parts, attn = _seen_by_tiles(p, tile.block_q), _parts(p, planned), _keeps(planned)
    keys = p.B * p.H * int(seen.sum())
    queries = _rows(p) * parts
    walks = 2 if attn else 1
    if tile.slices > 1:
        of_tile = np.minimum(p.Tq - np.arange(0, p.Tq, tile.block_q), tile.block_q)
        queries = p.B * p.H * int((of_tile * -(-seen // tile.block_k)).sum()) * walks
    # The second walk, for attn, needs no V; with prefetch it fetches V all the same.
    values = keys * (walks if tile.prefetch else 1)
    read = {"q": queries * p.D, "k": walks * keys * p.D, "v": values * p.D}
    out, lse = ("part_out", "part_lse") if planned.kernel.splits else ("out", "lse")
    return read, {out: parts * _rows(p) * p.D, lse: parts * _rows(p), "attn": _pairs(p) if attn else 0}


def _fa2_merge(p: Problem, _tile: None, planned: Plan) -> tuple[Numbers, Numbers]:
    # One invocation a number of O: each asks for the L of all parts twice, for the maximum and for the weights.
    parts = p.B * p.H * int((-(-p.keys_seen() // planned.split_keys)).sum())
    return {"part_lse": 2 * parts * p.D, "part_out": parts * p.D}, {"out": _rows(p) * p.D, "lse": _rows(p)}


def _fa2_delta(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    return {"out": _rows(p) * p.D, "dout": _rows(p) * p.D}, {"delta": _rows(p)}


def _fa2_dq(p: Problem, tile: Tile, planned: Plan) -> tuple[Numbers, Numbers]:
    walked, _ = _fa2_forward(p, tile, planned)
    some = p.B * p.H * int((p.keys_seen() > 0).sum())
    read = walked | {"dout": _rows(p) * p.D, "lse": some, "delta": some}
    return read, {"dq": _rows(p) * p.D}


def _fa2_dkv(p: Problem, tile: Tile, _plan: Plan) -> tuple[Numbers, Numbers]:
    # A tile of keys walks the queries from the first tile that sees any of them; a key asks each row for L and delta.
    first = _first_rows(p, np.arange(0, p.Tk, tile.block_k)) // tile.block_q * tile.block_q
    queries = p.B * p.H * int(np.maximum(p.Tq - first, 0).sum())
    keys = p.B * p.Hkv * p.Tk * p.D
    read = {"q": queries * p.D, "dout": queries * p.D, "k": keys, "v": keys}
    return read | {"lse": _pairs(p), "delta": _pairs(p)}, {"dk": keys, "dv": keys}


def _fa2_dq_tiled(p: Problem, tile: Tile, _plan: Plan) -> tuple[Numbers, Numbers]:
    # Q and dO take turns in one tile and come again at every tile of keys; K comes twice where D is walked in slices.
    seen = _seen_by_tiles(p, tile.block_q)
    of_tile = np.minimum(p.Tq - np.arange(0, p.Tq, tile.block_q), tile.block_q)
    queries = p.B * p.H * int((of_tile * -(-seen // tile.block_k)).sum()) * p.D
    keys = p.B * p.H * int(seen.sum()) * p.D
    of_rows = p.B * p.H * int((p.keys_seen() > 0).sum()) * tile.lanes  # each lane of a row asks for its L and delta
    read = {"q": queries, "dout": queries, "v": keys, "k": keys * (2 if tile.slices > 1 else 1)}
    return read | {"lse": of_rows, "delta": of_rows}, {"dq": _rows(p) * p.D}


def _fa2_dkv_tiled(p: Problem, tile: Tile, _plan: Plan) -> tuple[Numbers, Numbers]:
    # K and V take turns in one tile, Q and dO in the other; Q comes twice, and dO where D is walked in slices.
    starts = np.arange(0, p.Tk, tile.block_k)
    first = _first_rows(p, starts) // tile.block_q * tile.block_q
    walked = np.maximum(p.Tq - first, 0)
    of_tile = np.minimum(p.Tk - starts, tile.block_k)
    keys = p.B * p.H * int((of_tile * -(-walked // tile.block_q)).sum()) * p.D
    queries = p.B * p.H * int(walked.sum()) * p.D
    some = np.flatnonzero(p.keys_seen() > 0)
    groups = tile.block_k // tile.rows  # each group of lanes asks for the L and delta of each row that sees a key
    of_rows = p.B * p.H * groups * sum(int((some >= row).sum()) for row in first)
    read = {"k": keys, "v": keys, "q": 2 * queries, "dout": queries * (2 if tile.slices > 1 else 1)}
    written = p.B * p.Hkv * p.Tk * p.D
    return read | {"lse": of_rows, "delta": of_rows}, {"dk": written, "dv": written}


# The materialised backward: P and dS stand in memory, and each number of a gradient reads a row or a column of them.


def _attn_dscores(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    pairs = _pairs(p)
    read = {"dout": pairs * p.D, "v": pairs * p.D, "attn": 2 * pairs, "dscores": pairs}
    return read, {"dscores": 2 * pairs}


def _attn_dq(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    return {"dscores": _pairs(p) * p.D, "k": _pairs(p) * p.D}, {"dq": _rows(p) * p.D}


def _attn_dk(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    return {"dscores": _pairs(p) * p.D, "q": _pairs(p) * p.D}, {"dk": p.B * p.Hkv * p.Tk * p.D}


def _attn_dv(p: Problem, _tile: None, _plan: Plan) -> tuple[Numbers, Numbers]:
    return {"attn": _pairs(p) * p.D, "dout": _pairs(p) * p.D}, {"dv": p.B * p.Hkv * p.Tk * p.D}


# By kernel file.
_MODELS: dict[str, Model] = {
    "naive_scores": _naive_scores,
    "naive_softmax": _naive_softmax,
    "naive_output": _naive_output,
    "fused_sv": _fused_sv,
    "fa2_forward": _fa2_forward,
    "fa2_forward_tiled": _fa2_forward_tiled,
    "fa2_merge": _fa2_merge,
    "fa2_delta": _fa2_delta,
    "fa2_dq": _fa2_dq,
    "fa2_dkv": _fa2_dkv,
    "fa2_dq_tiled": _fa2_dq_tiled,
    "fa2_dkv_tiled": _fa2_dkv_tiled,
    "attn_dscores": _attn_dscores,
    "attn_dq": _attn_dq,
    "attn_dk": _attn_dk,
    "attn_dv": _attn_dv,
}
