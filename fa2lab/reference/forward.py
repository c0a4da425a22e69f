"""Attention from its formula, and FlashAttention-2's walk over K tiles with its trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fa2lab.problem import Align, Problem, as_float32, pose
from fa2lab.reference.arithmetic import heads_first, heads_last, row_max, scores, shrink, sum_last, weigh
from fa2lab.results import FULL, PARTIAL, SKIPPED, Result, Trace

# Scores of at most this many (batch, head, row, key) stand in memory at once: 64 MiB in float64.
SCORES_AT_ONCE = 1 << 23


@dataclass(frozen=True, eq=False)
class Truth(Result):
    """A `Result` in float64, which remembers its inputs so that plain float32 arithmetic can be held against it."""

    inputs: tuple[np.ndarray, np.ndarray, np.ndarray] = ()

    @cached_property
    def plain(self) -> Result:
        """The same problem in plain float32 arithmetic: what float32 costs, whoever computes."""
        return attend(self.problem, *self.inputs, np.float32, return_attn=self.attn is not None)


def attention(
    q,
    k,
    v,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    dtype: type = np.float64,
    return_attn: bool = False,
) -> Truth:
    """Attention straight from its formula: O = P V, P = softmax(scale · Q Kᵀ), L = ln Σ exp(scale · Q Kᵀ).

    Arguments and fields as in `fa2lab.attention`. The inputs are rounded to float32 first, as every engine does, and
    everything after that is `dtype`. A row that sees no key has O = 0 and L = -inf. Memory stays bounded: rows are
    taken in blocks unless `return_attn` asks for P.
    Source: Vaswani et al., arXiv:1706.03762, equation 1.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    arrays = [as_float32(x) for x in arrays]
    result = attend(problem, *arrays, dtype, return_attn=return_attn)
    return Truth(**vars(result), inputs=tuple(arrays))


def attend(problem: Problem, q, k, v, dtype: type = np.float64, *, return_attn: bool = False) -> Result:
    """`attention` of a problem that is posed already; q, k and v are computed on as they are, without rounding."""
    p = problem
    q, k, v = heads_first(problem, q, k, v, dtype)
    out = np.zeros((p.B, p.H, p.Tq, p.D), dtype)
    lse = np.full((p.B, p.H, p.Tq), -np.inf, dtype)
    attn = np.zeros((p.B, p.H, p.Tq, p.Tk), dtype) if return_attn else None
    visible, sees = p.mask(), p.keys_seen() > 0
    step = max(1, SCORES_AT_ONCE // max(1, p.B * p.H * p.Tk))
    for row in range(0, p.Tq if p.Tk else 0, step):
        rows = slice(row, min(row + step, p.Tq))
        seen = visible[rows]
        with np.errstate(all="ignore"):  # what a non-finite input does is part of the answer
            s = scores(q[:, :, rows], k, p.scale)
            m = row_max(s, seen)
            e = np.where(seen, np.exp(s - m[..., None]), dtype(0))
            l = sum_last(e)  # noqa: E741
            weights = e / l[..., None]
            o = weigh(e, seen, v) / l[..., None]
            lse_rows = m + np.log(l)
        some = sees[rows]
        out[:, :, rows][:, :, some] = o[:, :, some]
        lse[:, :, rows][:, :, some] = lse_rows[:, :, some]
        if return_attn:
            attn[:, :, rows][:, :, some] = np.where(seen, weights, dtype(0))[:, :, some]
    return Result(heads_last(out), lse, "reference", f"NumPy {np.dtype(dtype).name}", problem, attn=attn)


def tiled(
    q,
    k,
    v,
    *,
    block_q: int = 16,
    block_k: int = 16,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    dtype: type = np.float64,
    return_attn: bool = False,
) -> Result:
    """FlashAttention-2's walk over K tiles, with the trace of m, l and alpha that the WGSL kernel records as well.

    Arguments and fields as in `fa2lab.attention`; tiles are `block_q` × `block_k`. In float32 this is the twin of
    `fa2_forward`: the same order of every sum, without the device's rounding of exp and its fused multiply-adds.
    `return_attn` writes exp(s - m) / l from the final m and l, as the kernel's compatibility pass does.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    arrays = [as_float32(x) for x in arrays]
    return walk(problem, *arrays, block_q, block_k, dtype, return_attn=return_attn)


def walk(problem: Problem, q, k, v, block_q: int, block_k: int, dtype: type, *, return_attn: bool = False) -> Result:
    """`tiled` of a problem that is posed already."""
    p = problem
    q, k, v = heads_first(problem, q, k, v, dtype)
    shape, n_tiles = (p.B, p.H, p.Tq), -(-p.Tk // block_k)
    # Like the kernel, the walk starts below every finite score; the trace shows -inf for a row that sees no key.
    m, l = np.full(shape, np.finfo(dtype).min, dtype), np.zeros(shape, dtype)
    o = np.zeros((*shape, p.D), dtype)
    trace = Trace(
        *(np.empty((*shape, n_tiles), dtype) for _ in range(3)), states(p, block_q, block_k), block_q, block_k
    )
    visible, sees = p.mask(), p.keys_seen() > 0
    with np.errstate(all="ignore"):
        for j in range(n_tiles):
            keys = slice(j * block_k, min((j + 1) * block_k, p.Tk))
            seen = visible[:, keys]
            s = scores(q, k[:, :, keys], p.scale)
            m_new = np.maximum(m, row_max(s, seen))
            alpha = shrink(m, m_new)
            e = np.where(seen, np.exp(s - m_new[..., None]), dtype(0))
            l = sum_last(e, start=l * alpha)  # noqa: E741
            o = weigh(e, seen, v[:, :, keys], start=o * alpha[..., None])
            m = m_new
            trace.m[..., j], trace.l[..., j], trace.alpha[..., j] = m, l, alpha
        out = np.where(sees[:, None], o / l[..., None], dtype(0))
        lse = np.where(sees, m + np.log(l), dtype(-np.inf))
        trace.m[:, :, ~sees] = -np.inf
        attn = None
        if return_attn:
            weights = np.exp(scores(q, k, p.scale) - m[..., None]) / l[..., None]
            attn = np.where(visible, weights, dtype(0))
    label = f"NumPy {np.dtype(dtype).name}"
    return Result(heads_last(out), lse, "reference.tiled", label, problem, attn=attn, trace=trace)


def states(p: Problem, block_q: int, block_k: int) -> np.ndarray:
    """What each (query row, K tile) is, by positions alone: `(B, H, Tq, n_tiles)`; a tile's rows share its state."""
    rows = np.arange(p.Tq)
    seen = p.keys_seen()
    least = seen[rows // block_q * block_q]  # a tile's first row
    most = seen[np.minimum(rows // block_q * block_q + block_q, p.Tq) - 1]  # and its last
    start = np.arange(0, p.Tk, block_k)
    end = np.minimum(start + block_k, p.Tk)
    state = np.where(start >= most[:, None], SKIPPED, np.where(end <= least[:, None], FULL, PARTIAL))
    return np.broadcast_to(state.astype(np.uint8), (p.B, p.H, *state.shape)).copy()
