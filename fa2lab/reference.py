"""The truth, in NumPy float64: attention, the online softmax, and the tiled walk with its trace.

Every function also runs in float32. Then each sum is taken with one accumulator in the order of its index, as three
nested loops would, because that is what "plain float32 arithmetic" means here and what the WGSL kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fa2lab.problem import Align, Problem, as_float32, pose
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
    q, k, v = _heads_first(problem, q, k, v, dtype)
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
            m = _row_max(s, seen)
            e = np.where(seen, np.exp(s - m[..., None]), dtype(0))
            l = _sum(e)  # noqa: E741
            weights = e / l[..., None]
            o = _weigh(e, seen, v) / l[..., None]
            lse_rows = m + np.log(l)
        some = sees[rows]
        out[:, :, rows][:, :, some] = o[:, :, some]
        lse[:, :, rows][:, :, some] = lse_rows[:, :, some]
        if return_attn:
            attn[:, :, rows][:, :, some] = np.where(seen, weights, dtype(0))[:, :, some]
    return Result(_heads_last(out), lse, "reference", f"NumPy {np.dtype(dtype).name}", problem, attn=attn)


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
    q, k, v = _heads_first(problem, q, k, v, dtype)
    shape, n_tiles = (p.B, p.H, p.Tq), -(-p.Tk // block_k)
    m, l = np.full(shape, -np.inf, dtype), np.zeros(shape, dtype)  # noqa: E741
    o = np.zeros((*shape, p.D), dtype)
    trace = Trace(*(np.empty((*shape, n_tiles), dtype) for _ in range(3)), _states(p, block_q, block_k), block_q, block_k)
    visible, sees = p.mask(), p.keys_seen() > 0
    with np.errstate(all="ignore"):
        for j in range(n_tiles):
            keys = slice(j * block_k, min((j + 1) * block_k, p.Tk))
            seen = visible[:, keys]
            s = scores(q, k[:, :, keys], p.scale)
            m_new = np.maximum(m, _row_max(s, seen))
            alpha = _shrink(m, m_new)
            e = np.where(seen, np.exp(s - m_new[..., None]), dtype(0))
            l = _sum(e, start=l * alpha)  # noqa: E741
            o = _weigh(e, seen, v[:, :, keys], start=o * alpha[..., None])
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
    return Result(_heads_last(out), lse, "reference.tiled", label, problem, attn=attn, trace=trace)


def _states(p: Problem, block_q: int, block_k: int) -> np.ndarray:
    """What each (query row, K tile) is, by positions alone: `(B, H, Tq, n_tiles)`; a tile's rows share its state."""
    rows = np.arange(p.Tq)
    seen = p.keys_seen()
    least = seen[rows // block_q * block_q]  # a tile's first row
    most = seen[np.minimum(rows // block_q * block_q + block_q, p.Tq) - 1]  # and its last
    start = np.arange(0, p.Tk, block_k)
    end = np.minimum(start + block_k, p.Tk)
    state = np.where(start >= most[:, None], SKIPPED, np.where(end <= least[:, None], FULL, PARTIAL))
    return np.broadcast_to(state.astype(np.uint8), (p.B, p.H, *state.shape)).copy()


# The online softmax, as a state that takes in scores and merges with its like.


@dataclass(frozen=True, eq=False)
class State:
    """What the softmax needs to know of the keys so far: m = max s, l = Σ exp(s - m), o = Σ exp(s - m) v."""

    m: float
    l: float  # noqa: E741 - the paper's letter
    o: np.ndarray  # (D,)

    @property
    def out(self) -> np.ndarray:
        """O = o / l, 0 where no key was taken in."""
        return self.o / self.l if self.l else np.zeros_like(self.o)

    @property
    def lse(self) -> float:
        """L = m + ln l, -inf where no key was taken in."""
        with np.errstate(divide="ignore"):
            return self.m + np.log(self.l)

    @staticmethod
    def empty(D: int = 1, dtype: type = np.float64) -> State:
        """The identity of `merge`: no key, m = -inf, l = 0, o = 0."""
        return State(dtype(-np.inf), dtype(0), np.zeros(D, dtype))

    @staticmethod
    def of(s, v, dtype: type = np.float64) -> State:
        """The state of a block of scores `(n,)` with their values `(n, D)`, or `(n,)` for D = 1."""
        s = np.asarray(s, dtype)
        v = np.asarray(v, dtype).reshape(len(s), -1)
        if not len(s):
            return State.empty(v.shape[1] or 1, dtype)
        m = s.max()
        e = np.exp(s - m)
        return State(m, _sum(e), _weigh(e[None], np.True_, v)[0])


def merge(a: State, b: State) -> State:
    """softmax over both states' keys: m = max(m_a, m_b), l = l_a exp(m_a - m) + l_b exp(m_b - m), o alike.

    Associates and commutes, with `State.empty` as identity: that is why K tiles may come in any order and on any
    number of workgroups. Source: Milakov and Gimelshein, arXiv:1805.02867, section 3.1.
    """
    m = np.maximum(a.m, b.m)
    shrink_a, shrink_b = _shrink(a.m, m), _shrink(b.m, m)
    return State(m, a.l * shrink_a + b.l * shrink_b, a.o * shrink_a + b.o * shrink_b)


def online(s, v, dtype: type = np.float64) -> Iterator[State]:
    """The states after 0, 1, 2, … scores, one score at a time: s `(n,)`, v `(n, D)` or `(n,)`.

    Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3, with the values carried along.
    """
    s = np.asarray(s, dtype)
    v = np.asarray(v, dtype).reshape(len(s), -1)
    state = State.empty(v.shape[1], dtype)
    yield state
    for s_j, v_j in zip(s, v, strict=True):
        m = np.maximum(state.m, s_j)
        alpha, p = _shrink(state.m, m), np.exp(s_j - m)
        state = State(m, state.l * alpha + p, state.o * alpha + p * v_j)
        yield state


# Arithmetic. float64 goes the fast way; anything narrower adds up in the order of the index.


def scores(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """scale · Q Kᵀ: `(B, H, Tq, D)`, `(B, H, Tk, D)` → `(B, H, Tq, Tk)`."""
    if q.dtype == np.float64:
        return np.matmul(q, k.swapaxes(-1, -2)) * scale
    s = np.zeros((*q.shape[:-1], k.shape[-2]), q.dtype)
    for d in range(q.shape[-1]):
        s += q[..., :, None, d] * k[..., None, :, d]
    return s * q.dtype.type(scale)


def _sum(e: np.ndarray, start=0) -> np.ndarray:
    """start + Σ over the last axis."""
    if e.dtype == np.float64:
        return start + e.sum(-1)
    total = np.zeros(e.shape[:-1], e.dtype) + start
    for c in range(e.shape[-1]):
        total = total + e[..., c]
    return total


def _weigh(e: np.ndarray, seen: np.ndarray, v: np.ndarray, start=0) -> np.ndarray:
    """start + Σ_c e[c] v[c] over the keys that are seen: what v holds elsewhere, NaN included, does not count."""
    if e.dtype == np.float64:
        finite = np.isfinite(v)
        total = start + np.matmul(e, np.where(finite, v, 0))
        for c in np.unique(np.nonzero(~finite)[-2]):
            rest = e[..., c, None] * np.where(finite[..., c, :], 0, v[..., c, :])[..., None, :]
            total = total + np.where(np.broadcast_to(seen, e.shape)[..., c, None], rest, 0)
        return total
    total = np.zeros((*e.shape[:-1], v.shape[-1]), e.dtype) + start
    for c in range(e.shape[-1]):
        term = e[..., c, None] * v[..., None, c, :]
        total = total + np.where(np.broadcast_to(seen, e.shape)[..., c, None], term, e.dtype.type(0))
    return total


def _row_max(s: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The largest visible score of each row. Never below the lowest finite number, so s - m is no -inf - -inf."""
    return np.where(seen, s, -np.inf).max(-1, initial=np.finfo(s.dtype).min)


def _shrink(m_old, m_new):
    """exp(m_old - m_new), and 1 where both are the same -inf."""
    with np.errstate(invalid="ignore"):
        return np.where(m_old == m_new, m_new.dtype.type(1), np.exp(m_old - m_new))[()]


def _heads_first(p: Problem, q, k, v, dtype: type) -> Iterator[np.ndarray]:
    """(B, T, H, D) → (B, H, T, D), each KV head repeated for the query heads of its group."""
    for x in (q, k, v):
        x = np.asarray(x, dtype).transpose(0, 2, 1, 3)
        yield x if x.shape[1] == p.H else np.repeat(x, p.group, axis=1)


def _heads_last(x: np.ndarray) -> np.ndarray:
    """(B, H, T, D) → (B, T, H, D)."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))
