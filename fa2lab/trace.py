"""forward_trace(): where problem, plan and device meet, for the forward pass written out step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa2lab import reference
from fa2lab.engine import NUMPY, check_host_memory, choose, limits_of
from fa2lab.gpu import Device
from fa2lab.kernels import FORWARD_TRACE
from fa2lab.launch import launch
from fa2lab.plan import plan
from fa2lab.problem import Align, as_float32, pose
from fa2lab.results import ForwardTrace


def forward_trace(
    q,
    k,
    v,
    *,
    batch: int = 0,
    head: int = 0,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    block_q: int | None = None,
    block_k: int | None = None,
    device: Device | str | None = None,
) -> ForwardTrace:
    """The forward pass of one batch and query head, K tile by K tile: S, and m, l, alpha and the running O.

    m_new = max(m, max s), alpha = exp(m - m_new), l = alpha l + Σ exp(s - m_new), O = alpha O + Σ exp(s - m_new) v.

    Arguments as in `attention`; the tiles are by default those that `"fa2_forward"` takes on this device, whose steps
    these are. It writes Tq × Tk scores and an O a K tile: for looking at, at lengths one can look at.
    Raises as `attention` does, and `IndexError` for a batch or head that is not there. Error bounds as in `attention`.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    whole, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    for name, i, n in (("batch", batch, whole.B), ("head", head, whole.H)):
        if not 0 <= i < n:
            raise IndexError(f"{name} must be from 0 to {n - 1}; got {i}.")
    device = choose(device)
    tiles = plan(whole, limits_of(device), "fa2_forward", block_q=block_q, block_k=block_k)
    blocks = dict(block_q=tiles.block_q, block_k=tiles.block_k)
    problem = replace(whole, B=1, H=1, Hkv=1)
    check_host_memory(problem, queries=2 + -(-whole.Tk // tiles.block_k), keys=2, scores=2)
    planned = plan(problem, limits_of(device), FORWARD_TRACE, trace=True, **blocks)
    heads = dict(q=head, k=head // whole.group, v=head // whole.group)
    inputs = {name: as_float32(x[batch : batch + 1, :, [heads[name]]]) for name, x in zip("qkv", arrays, strict=True)}
    if device is None:
        found = reference.trace_forward(problem, *inputs.values(), **blocks, dtype=np.float32)
        return replace(found, kernel=FORWARD_TRACE.name, adapter=NUMPY)
    got, _ = launch(planned, inputs, device)
    s = np.where(problem.mask(), got["scores"][0, 0], np.float32(-np.inf))
    m, l, alpha = (np.ascontiguousarray(got["trace"][0, 0, ..., i]) for i in range(3))
    m[problem.keys_seen() == 0] = -np.inf  # the kernel's M_NONE is a finite number; told by its position it is -inf
    state = reference.states(problem, **blocks)[0, 0, :: planned.block_q]
    label = FORWARD_TRACE.name, str(device.adapter)
    return ForwardTrace(s, m, l, alpha, got["o_steps"][0, 0], state, problem.keys_seen(), *blocks.values(), *label)
