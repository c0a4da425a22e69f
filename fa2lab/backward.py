"""attention_backward(), attention_grad() and backward_trace(): where problem, plan and device meet, for gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from fa2lab import reference
from fa2lab.attention import forward_on_numpy
from fa2lab.engine import NUMPY, check_host_memory, choose, limits_of, numpy_runs
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.kernels import BACKWARD_TRACE, backward_kernels, kernels
from fa2lab.launch import launch
from fa2lab.plan import check_storable, plan
from fa2lab.planned import Plan, Storage
from fa2lab.problem import Align, Problem, as_float32, pose, pose_backward
from fa2lab.results import BackwardTrace, Gradients, Result
from fa2lab.tuning import tuned


def attention_backward(
    q,
    k,
    v,
    out,
    lse,
    dout,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    kernel: str | Kernel = "auto",
    block_q: int | None = None,
    block_k: int | None = None,
    storage: Storage = "float32",
    device: Device | str | None = None,
) -> Gradients:
    """The gradients of attention, from its own O and L: P = exp(S - L) is computed again, tile by tile.

    dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - delta), delta = rowsum(dO ∘ O), dQ = scale · dS K, dK = scale · dSᵀ Q.

    q, k, v and the options as in `attention`; out `(B, Tq, H, D)` and lse `(B, H, Tq)` are what it returned, dout
    `(B, Tq, H, D)` is the loss's gradient by out. kernel: `"fa2"` (nothing of size Tq × Tk exists), `"materialised"`
    (P and dS are kept, B·H·Tq·Tk floats each; it works P out by itself and does not read out and lse) or `"auto"`.
    A row that sees no key has and gives a gradient of exactly 0. The same call gives the same bits.

    Raises as `attention` does. Error against float64: at most 3 × that of plain float32 arithmetic, plus a floor.
    L is one float32: where scores reach 1e5, its rounding alone costs P a percent. The error is smallest with the O and
    L of this project's own forward, whose rounded scores the backward repeats; where scores are in the hundreds, an O
    and L from elsewhere, exact ones too, put the gradients tens of times further off.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    rest = pose_backward(problem, out=out, lse=lse, dout=dout)
    device = choose(device)
    _check_memory(problem, device, kernel)
    wishes = dict(block_q=block_q, block_k=block_k, storage=storage, tuned=tuned(device))
    planned = plan(problem, limits_of(device), kernel, table=backward_kernels(), **wishes)
    inputs = {name: as_float32(x) for name, x in (dict(zip("qkv", arrays, strict=True)) | rest).items()}
    check_storable(planned, inputs)
    if device is None:
        return _backward_on_numpy(planned, inputs)
    got, device_bytes = launch(planned, {name: inputs[name] for name in planned.kernel.inputs}, device)
    return Gradients(
        got["dq"], got["dk"], got["dv"], planned.kernel.label, str(device.adapter), problem, planned, device_bytes
    )


def attention_grad(
    q,
    k,
    v,
    dout,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    kernel: str | Kernel = "auto",
    block_q: int | None = None,
    block_k: int | None = None,
    storage: Storage = "float32",
    device: Device | str | None = None,
) -> tuple[Result, Gradients]:
    """Forward and backward in one go: O, L and what lies between never leave the device.

    Arguments, errors and bounds as in `attention_backward`, whose kernels these are, each after the forward kernel
    whose rounding it repeats: `fa2_forward`, and `fa2_forward_tiled` before `fa2_tiled`.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    rest = pose_backward(problem, dout=dout)
    device = choose(device)
    _check_memory(problem, device, kernel)
    table = {name: backward.after_forward() for name, backward in backward_kernels().items()}
    kernel = kernel.after_forward() if isinstance(kernel, Kernel) else kernel
    wishes = dict(block_q=block_q, block_k=block_k, storage=storage, tuned=tuned(device))
    planned = plan(problem, limits_of(device), kernel, table=table, **wishes)
    inputs = {name: as_float32(x) for name, x in (dict(zip("qkv", arrays, strict=True)) | rest).items()}
    check_storable(planned, inputs)
    if device is None:
        forward = replace(planned, kernel=kernels()[planned.kernel.passes[0].file])
        result = forward_on_numpy(forward, inputs["q"], inputs["k"], inputs["v"])
        return result, _backward_on_numpy(planned, inputs | {"out": result.out, "lse": result.lse})
    got, device_bytes = launch(planned, inputs, device)
    where = str(device.adapter), problem
    gradients = Gradients(got["dq"], got["dk"], got["dv"], planned.kernel.label, *where, planned, device_bytes)
    forward = replace(kernels()[planned.kernel.passes[0].file], edits=planned.kernel.edits)
    return Result(got["out"], got["lse"], forward.label, *where, plan=planned, device_bytes=device_bytes), gradients


def _check_memory(problem: Problem, device: Device | None, kernel: str | Kernel) -> None:
    """NumPy keeps P, dS and what lies between whole where it stands in for the materialised kernels."""
    whole = device is None and getattr(kernel, "name", kernel) == "materialised"
    check_host_memory(problem, queries=4, keys=4, scores=7 if whole else 0)


def backward_trace(
    q,
    k,
    v,
    out,
    lse,
    dout,
    *,
    batch: int = 0,
    head: int = 0,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    block_q: int | None = None,
    block_k: int | None = None,
    device: Device | str | None = None,
) -> BackwardTrace:
    """The backward pass of one batch and query head, tile by tile: P, dS and what each tile adds to dQ, dK and dV.

    Arguments as in `attention_backward`; the tiles are by default those that its kernel `"fa2"` takes on this device.
    It writes Tq × Tk × 2 numbers and one partial dQ, dK and dV a tile: for looking at, at lengths one can look at.
    Raises as `attention` does, and `IndexError` for a batch or head that is not there.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    whole, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    rest = pose_backward(whole, out=out, lse=lse, dout=dout)
    for name, i, n in (("batch", batch, whole.B), ("head", head, whole.H)):
        if not 0 <= i < n:
            raise IndexError(f"{name} must be from 0 to {n - 1}; got {i}.")
    device = choose(device)
    tiles = plan(whole, limits_of(device), "fa2", table=backward_kernels(), block_q=block_q, block_k=block_k)
    problem = replace(whole, B=1, H=1, Hkv=1)
    check_host_memory(
        problem, queries=3 + -(-whole.Tk // tiles.block_k), keys=2 + 2 * -(-whole.Tq // tiles.block_q), scores=2
    )
    blocks = dict(block_q=tiles.block_q, block_k=tiles.block_k)
    planned = plan(problem, limits_of(device), BACKWARD_TRACE, **blocks)
    heads = dict(zip("qkv", (head, head // whole.group, head // whole.group), strict=True)) | {
        "out": head,
        "dout": head,
    }
    inputs = {
        name: as_float32(
            x[batch : batch + 1, head : head + 1] if name == "lse" else x[batch : batch + 1, :, [heads[name]]]
        )
        for name, x in (dict(zip("qkv", arrays, strict=True)) | rest).items()
    }
    if device is None:
        found = reference.trace_backward(problem, *inputs.values(), **blocks, dtype=np.float32)
        return replace(found, kernel=BACKWARD_TRACE.name, adapter=NUMPY)
    got, _ = launch(planned, inputs, device)
    dq_parts, dk_parts, dv_parts = _cut(got["parts"], planned)
    state = reference.states(problem, **blocks)[0, 0, :: planned.block_q]
    p, ds = (np.ascontiguousarray(got["p_ds"][..., i]) for i in range(2))
    label = BACKWARD_TRACE.name, str(device.adapter)
    return BackwardTrace(p, ds, dq_parts, dk_parts, dv_parts, state, planned.block_q, planned.block_k, *label)


def _cut(parts: np.ndarray, planned: Plan) -> Iterator[np.ndarray]:
    """The three partial gradients that `fa2_backward_trace` writes one after another."""
    p = planned.problem
    of_q, of_k = (-(-p.Tk // planned.block_k), p.Tq, p.D), (-(-p.Tq // planned.block_q), p.Tk, p.D)
    start = 0
    for shape in (of_q, of_k, of_k):
        yield parts[start : start + prod(shape)].reshape(shape)
        start += prod(shape)


def _backward_on_numpy(planned: Plan, inputs: dict[str, np.ndarray]) -> Gradients:
    numpy_runs(planned.kernel)
    if planned.kernel.materialises:
        arrays = (inputs[name] for name in ("q", "k", "v", "dout"))
        found = reference.gradients(planned.problem, *arrays, np.float32)
    else:
        arrays = (inputs[name] for name in ("q", "k", "v", "out", "lse", "dout"))
        found = reference.walk_backward(planned.problem, *arrays, planned.block_q, planned.block_k, np.float32)
    return replace(found, kernel=planned.kernel.name, adapter=NUMPY)
