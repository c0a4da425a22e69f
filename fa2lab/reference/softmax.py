"""The online softmax, as a state that takes in scores and merges with its like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fa2lab.reference.arithmetic import shrink, sum_last, weigh


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
        v = _columns(v, dtype)
        if not len(s):
            return State.empty(v.shape[1], dtype)
        m = s.max()
        e = np.exp(s - m)
        return State(m, sum_last(e), weigh(e[None], np.True_, v)[0])


def _columns(v, dtype: type) -> np.ndarray:
    """(n,) → (n, 1), and (n, D) as it is."""
    v = np.asarray(v, dtype)
    return v[:, None] if v.ndim == 1 else v


def merge(a: State, b: State) -> State:
    """softmax over both states' keys: m = max(m_a, m_b), l = l_a exp(m_a - m) + l_b exp(m_b - m), o alike.

    Associates and commutes, with `State.empty` as identity: that is why K tiles may come in any order and on any
    number of workgroups. Source: Milakov and Gimelshein, arXiv:1805.02867, section 3.1.
    """
    m = np.maximum(a.m, b.m)
    shrink_a, shrink_b = shrink(a.m, m), shrink(b.m, m)
    return State(m, a.l * shrink_a + b.l * shrink_b, a.o * shrink_a + b.o * shrink_b)


def online(s, v, dtype: type = np.float64) -> Iterator[State]:
    """The states after 0, 1, 2, … scores, one score at a time: s `(n,)`, v `(n, D)` or `(n,)`.

    Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3, with the values carried along.
    """
    s = np.asarray(s, dtype)
    v = _columns(v, dtype)
    state = State.empty(v.shape[1], dtype)
    yield state
    for s_j, v_j in zip(s, v, strict=True):
        m = np.maximum(state.m, s_j)
        alpha, p = shrink(state.m, m), np.exp(s_j - m)
        state = State(m, state.l * alpha + p, state.o * alpha + p * v_j)
        yield state
