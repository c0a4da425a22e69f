"""The truth of the backward pass, in NumPy: gradients from their formula, and FlashAttention-2's two walks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fa2lab.problem import Align, Problem, as_float32, pose, pose_backward
from fa2lab.reference.arithmetic import heads_first, heads_last, largest, scores, sum_last, weigh
from fa2lab.reference.forward import attend, states
from fa2lab.results import BackwardTrace, Gradients


@dataclass(frozen=True, eq=False)
class TrueGradients(Gradients):
    """`Gradients` in float64, which remember what a bound on float32's error needs to know.

    `inputs`: q, k, v, dout. `column`: the largest column sum of P. `largest_delta`: the largest Σ_d |dO_id O_id| of a
    row. `largest_lse`: the largest finite |L|.
    """

    inputs: tuple[np.ndarray, ...] = ()
    column: float = 0.0
    largest_delta: float = 0.0
    largest_lse: float = 0.0

    @cached_property
    def plain(self) -> Gradients:
        """The same problem in plain float32 arithmetic: what float32 costs, whoever computes."""
        return gradients(self.problem, *self.inputs, np.float32)


def attention_backward(
    q,
    k,
    v,
    dout,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    dtype: type = np.float64,
) -> TrueGradients:
    """The gradients of attention straight from their formulas, P kept whole.

    dV = Pᵀ dO, dP = dO Vᵀ, dS = P ∘ (dP - rowsum(P ∘ dP)), dQ = scale · dS K, dK = scale · dSᵀ Q.

    Arguments and fields as in `fa2lab.attention_backward`, which also wants O and L where this works P out by itself.
    Inputs are rounded to float32 first. Memory: B·H·Tq·Tk numbers, about seven times. Source: Dao et al.,
    FlashAttention, arXiv:2205.14135, appendix B.4.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    arrays += pose_backward(problem, dout=dout).values()
    arrays = [as_float32(x) for x in arrays]
    forward = attend(problem, *arrays[:3], np.float64, return_attn=True)
    column, largest_lse = largest(forward.attn.sum(-2)), largest(forward.lse)
    with np.errstate(all="ignore"):  # a row that sees no key has O = 0, and dO may be infinite there
        delta = np.abs(arrays[3] * forward.out).sum(-1)
    del forward  # P is worked out once more below, and twice would not fit where once does
    return TrueGradients(
        **vars(gradients(problem, *arrays, dtype)),
        inputs=tuple(arrays),
        column=column,
        largest_delta=largest(delta),
        largest_lse=largest_lse,
    )


def gradients(problem: Problem, q, k, v, dout, dtype: type = np.float64) -> Gradients:
    """`attention_backward` of a problem that is posed already; the arrays are computed on as they are."""
    p, seen = problem, problem.mask()
    attn = attend(problem, q, k, v, dtype, return_attn=True).attn
    q, k, v = heads_first(problem, q, k, v, dtype)
    dout = np.asarray(dout, dtype).transpose(0, 2, 1, 3)
    with np.errstate(all="ignore"):
        dp = np.where(seen, scores(dout, v, 1.0), dtype(0))
        ds = np.where(seen, attn * (dp - sum_last(attn * dp)[..., None]), dtype(0))
        dq = weigh(ds, seen, k) * dtype(p.scale)
        dk = weigh(ds.swapaxes(-1, -2), seen.T, q) * dtype(p.scale)
        dv = weigh(attn.swapaxes(-1, -2), seen.T, dout)
    return _gathered(problem, dq, dk, dv, "reference", dtype)


def walk_backward(
    problem: Problem, q, k, v, out, lse, dout, block_q: int, block_k: int, dtype: type = np.float64
) -> Gradients:
    """FlashAttention-2's backward: P = exp(S - L) tile by tile, once along the keys for dQ, once along the queries.

    The NumPy twin of `fa2_delta`, `fa2_dq` and `fa2_dkv`; in float32 its sums have their order.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    p, seen = problem, problem.mask()
    q, k, v = heads_first(problem, q, k, v, dtype)
    out, dout = (np.asarray(x, dtype).transpose(0, 2, 1, 3) for x in (out, dout))
    lse = np.asarray(lse, dtype)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    with np.errstate(all="ignore"):
        delta = np.where(p.keys_seen() > 0, sum_last(dout * out), dtype(0))
        for start in range(0, p.Tk, block_k):
            keys = slice(start, min(start + block_k, p.Tk))
            _, ds = tile(p, q, k[:, :, keys], v[:, :, keys], lse, delta, dout, seen[:, keys])
            dq = weigh(ds, seen[:, keys], k[:, :, keys], start=dq)
        for start in range(0, p.Tq, block_q):
            rows = slice(start, min(start + block_q, p.Tq))
            at = q[:, :, rows], k, v, lse[:, :, rows], delta[:, :, rows], dout[:, :, rows], seen[rows]
            weights, ds = tile(p, *at)
            dk = weigh(ds.swapaxes(-1, -2), seen[rows].T, q[:, :, rows], start=dk)
            dv = weigh(weights.swapaxes(-1, -2), seen[rows].T, dout[:, :, rows], start=dv)
    return _gathered(problem, dq * dtype(p.scale), dk * dtype(p.scale), dv, "reference.walk_backward", dtype)


def tile(problem: Problem, q, k, v, lse, delta, dout, seen) -> tuple[np.ndarray, np.ndarray]:
    """P and dS of one tile, recomputed: `(B, H, rows, keys)` from heads-first slices; 0 where masked."""
    zero = q.dtype.type(0)
    weights = np.where(seen, np.exp(scores(q, k, problem.scale) - lse[..., None]), zero)
    ds = np.where(seen, weights * (scores(dout, v, 1.0) - delta[..., None]), zero)
    return weights, ds


def trace_backward(
    problem: Problem, q, k, v, out, lse, dout, block_q: int, block_k: int, dtype: type = np.float64
) -> BackwardTrace:
    """What each tile of `walk_backward` computes, for a problem of one batch and one head, which is posed already."""
    p, seen = problem, problem.mask()
    q, k, v = (np.asarray(x, dtype)[0, :, 0] for x in (q, k, v))
    out, dout, lse = np.asarray(out, dtype)[0, :, 0], np.asarray(dout, dtype)[0, :, 0], np.asarray(lse, dtype)[0, 0]
    scale = dtype(p.scale)
    weights, ds = np.zeros((p.Tq, p.Tk), dtype), np.zeros((p.Tq, p.Tk), dtype)
    dq_parts = np.zeros((-(-p.Tk // block_k), p.Tq, p.D), dtype)
    dk_parts = np.zeros((-(-p.Tq // block_q), p.Tk, p.D), dtype)
    dv_parts = np.zeros_like(dk_parts)
    with np.errstate(all="ignore"):
        delta = np.where(p.keys_seen() > 0, sum_last(dout * out), dtype(0))
        for i, j in np.ndindex(len(dk_parts), len(dq_parts)):
            r, c = slice(i * block_q, (i + 1) * block_q), slice(j * block_k, (j + 1) * block_k)
            here = seen[r, c]
            weights[r, c], ds[r, c] = tile(p, q[r], k[c], v[c], lse[r], delta[r], dout[r], here)
            dq_parts[j, r] = weigh(ds[r, c], here, k[c]) * scale
            dk_parts[i, c] = weigh(ds[r, c].T, here.T, q[r]) * scale
            dv_parts[i, c] = weigh(weights[r, c].T, here.T, dout[r])
    state = states(p, block_q, block_k)[0, 0, ::block_q]
    label = "reference.trace_backward", f"NumPy {np.dtype(dtype).name}"
    return BackwardTrace(weights, ds, dq_parts, dk_parts, dv_parts, state, block_q, block_k, *label)


def _gathered(p: Problem, dq, dk, dv, kernel: str, dtype: type) -> Gradients:
    """Heads last again, and the query heads of a group summed into their KV head."""
    if p.group > 1:
        dk, dv = (x.reshape(p.B, p.Hkv, p.group, p.Tk, p.D).sum(2) for x in (dk, dv))
    return Gradients(heads_last(dq), heads_last(dk), heads_last(dv), kernel, f"NumPy {np.dtype(dtype).name}", p)
