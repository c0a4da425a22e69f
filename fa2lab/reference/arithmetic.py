"""Sums, maxima and products. float64 goes the fast way; anything narrower adds up in the order of the index."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fa2lab.problem import Problem


def scores(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """scale · Q Kᵀ: `(B, H, Tq, D)`, `(B, H, Tk, D)` → `(B, H, Tq, Tk)`."""
    if q.dtype == np.float64:
        return np.matmul(q, k.swapaxes(-1, -2)) * scale
    s = np.zeros((*q.shape[:-1], k.shape[-2]), q.dtype)
    for d in range(q.shape[-1]):
        s += q[..., :, None, d] * k[..., None, :, d]
    return s * q.dtype.type(scale)


def sum_last(e: np.ndarray, start=0) -> np.ndarray:
    """start + Σ over the last axis."""
    if e.dtype == np.float64:
        return start + e.sum(-1)
    total = np.zeros(e.shape[:-1], e.dtype) + start
    for c in range(e.shape[-1]):
        total = total + e[..., c]
    return total


def weigh(e: np.ndarray, seen: np.ndarray, v: np.ndarray, start=0) -> np.ndarray:
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


def row_max(s: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """The largest visible score of each row. Never below the lowest finite number, so s - m is no -inf - -inf."""
    return np.where(seen, s, -np.inf).max(-1, initial=np.finfo(s.dtype).min)


def shrink(m_old, m_new):
    """exp(m_old - m_new), and 1 where both are the same -inf."""
    with np.errstate(invalid="ignore"):
        return np.where(m_old == m_new, m_new.dtype.type(1), np.exp(m_old - m_new))[()]


def heads_first(p: Problem, q, k, v, dtype: type) -> Iterator[np.ndarray]:
    """(B, T, H, D) → (B, H, T, D), each KV head repeated for the query heads of its group."""
    for x in (q, k, v):
        x = np.asarray(x, dtype).transpose(0, 2, 1, 3)
        yield x if x.shape[1] == p.H else np.repeat(x, p.group, axis=1)


def heads_last(x: np.ndarray) -> np.ndarray:
    """(B, H, T, D) → (B, T, H, D)."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def largest(x: np.ndarray) -> float:
    """The largest finite magnitude, 0 where there is none."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
