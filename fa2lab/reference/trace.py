"""FlashAttention-2's forward walk with everything that it computes on the way: the twin of fa2_forward_trace."""

from __future__ import annotations

import numpy as np

from fa2lab.problem import Problem
from fa2lab.reference.arithmetic import heads_first, scores, weigh
from fa2lab.reference.forward import states, walk
from fa2lab.results import ForwardTrace


def trace_forward(problem: Problem, q, k, v, block_q: int, block_k: int, dtype: type = np.float64) -> ForwardTrace:
    """What each tile of `walk` computes, for a problem of one batch and one head, which is posed already."""
    p, seen = problem, problem.mask()
    trace = walk(p, q, k, v, block_q, block_k, dtype).trace
    m, l, alpha = (x[0, 0] for x in (trace.m, trace.l, trace.alpha))
    q, k, v = (x[0, 0] for x in heads_first(p, q, k, v, dtype))
    o, steps = np.zeros((p.Tq, p.D), dtype), np.empty((p.Tq, trace.n_tiles, p.D), dtype)
    with np.errstate(all="ignore"):
        s = np.where(seen, scores(q, k, p.scale), dtype(-np.inf))
        for j in range(trace.n_tiles):
            keys = slice(j * block_k, (j + 1) * block_k)
            e = np.where(seen[:, keys], np.exp(s[:, keys] - m[:, j, None]), dtype(0))
            o = weigh(e, seen[:, keys], v[keys], start=o * alpha[:, j, None])
            steps[:, j] = o
    state = states(p, block_q, block_k)[0, 0, ::block_q]
    label = "reference.trace_forward", f"NumPy {np.dtype(dtype).name}"
    return ForwardTrace(s, m, l, alpha, steps, state, p.keys_seen(), block_q, block_k, *label)
