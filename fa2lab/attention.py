"""attention(), attention_backward() and attention_grad(): the only place where problem, plan and device meet."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import prod

import numpy as np

from fa2lab import reference
from fa2lab.data import physical_memory
from fa2lab.errors import LimitError, NoAdapterError
from fa2lab.gpu import Device
from fa2lab.kernels import Kernel, backward_kernels, kernels
from fa2lab.launch import launch
from fa2lab.limits import BROWSER, Limits
from fa2lab.plan import Plan, plan
from fa2lab.problem import Align, as_float32, pose, pose_backward
from fa2lab.results import Gradients, Result, Trace

NUMPY = "NumPy float32 on the CPU (no GPU adapter)"
_default: Device | None = None


def attention(
    q,
    k,
    v,
    *,
    causal: bool = False,
    scale: float | None = None,
    align: Align = "bottom-right",
    kernel: str | Kernel = "auto",
    return_attn: bool = False,
    trace: bool = False,
    block_q: int | None = None,
    block_k: int | None = None,
    device: Device | str | None = None,
) -> Result:
    """Attention by a WGSL kernel: O = softmax(scale · Q Kᵀ) V over the keys that each row sees.

    q: `(B, Tq, H, D)`; k, v: `(B, Tk, Hkv, D)` with `H % Hkv == 0`; any floating dtype, computed in float32.
    causal: row i sees the keys j <= i + Tk - Tq (`align="bottom-right"`) or j <= i (`align="top-left"`).
    scale: any finite number, by default `1/sqrt(D)`.
    kernel: `"auto"`, a name of `fa.kernels()`, or a `Kernel` (one that was `.edited(...)`, say).
    return_attn: also return P `(B, H, Tq, Tk)`. trace: also return m, l and alpha of each row and K tile.
    block_q, block_k: the tile of a tiled kernel; by default what fits the device.
    device: a `Device`, `"numpy"`, or None for the fastest adapter; without any, NumPy computes and says so.

    Raises `TypeError`, `ShapeError`, `LimitError` or `KernelError` before anything is sent to the device.
    Error against float64: at most 2 × that of plain float32 arithmetic, plus `parity.floors`.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    device = _device(device)
    wishes = dict(block_q=block_q, block_k=block_k, return_attn=return_attn, trace=trace)
    planned = plan(problem, _limits(device), kernel, **wishes)
    _check_host_memory(planned)
    arrays = [as_float32(x) for x in arrays]
    if device is None:
        return _forward_on_numpy(planned, *arrays)
    got, device_bytes = launch(planned, dict(zip("qkv", arrays, strict=True)), device)
    return _result(planned, got, device, device_bytes)


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
    device: Device | str | None = None,
) -> Gradients:
    """The gradients of attention, from its own O and L: P = exp(S - L) is computed again, tile by tile.

    dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - delta), delta = rowsum(dO ∘ O), dQ = scale · dS K, dK = scale · dSᵀ Q.

    q, k, v and the options as in `attention`; out `(B, Tq, H, D)` and lse `(B, H, Tq)` are what it returned, dout
    `(B, Tq, H, D)` is the loss's gradient by out. kernel: `"fa2"` (nothing of size Tq × Tk exists), `"materialised"`
    (P and dS are kept, B·H·Tq·Tk floats each; it works P out by itself and does not read out and lse) or `"auto"`.
    A row that sees no key has and gives a gradient of exactly 0. The same call gives the same bits.

    Raises as `attention` does. Error against float64: at most 3 × that of plain float32 arithmetic, plus a floor.
    L is one float32: where scores reach 1e5, its rounding alone costs P a percent.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 2.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    rest = pose_backward(problem, out=out, lse=lse, dout=dout)
    device = _device(device)
    planned = plan(problem, _limits(device), kernel, table=backward_kernels(), block_q=block_q, block_k=block_k)
    _check_host_memory(planned)
    inputs = {name: as_float32(x) for name, x in (dict(zip("qkv", arrays, strict=True)) | rest).items()}
    if device is None:
        return _backward_on_numpy(planned, inputs)
    got, device_bytes = launch(planned, {name: inputs[name] for name in planned.kernel.inputs}, device)
    return Gradients(
        got["dq"], got["dk"], got["dv"], planned.kernel.name, str(device.adapter), problem, planned, device_bytes
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
    device: Device | str | None = None,
) -> tuple[Result, Gradients]:
    """Forward and backward in one go: O, L and what lies between never leave the device.

    Arguments, errors and bounds as in `attention_backward`, whose kernels these are, each after `fa2_forward`.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    rest = pose_backward(problem, dout=dout)
    device = _device(device)
    table = {name: backward.after_forward() for name, backward in backward_kernels().items()}
    kernel = kernel.after_forward() if isinstance(kernel, Kernel) else kernel
    planned = plan(problem, _limits(device), kernel, table=table, block_q=block_q, block_k=block_k)
    _check_host_memory(planned)
    inputs = {name: as_float32(x) for name, x in (dict(zip("qkv", arrays, strict=True)) | rest).items()}
    if device is None:
        forward = replace(planned, kernel=kernels()["fa2_forward"])
        result = _forward_on_numpy(forward, inputs["q"], inputs["k"], inputs["v"])
        return result, _backward_on_numpy(planned, inputs | {"out": result.out, "lse": result.lse})
    got, device_bytes = launch(planned, inputs, device)
    label = planned.kernel.name, str(device.adapter), problem
    gradients = Gradients(got["dq"], got["dk"], got["dv"], *label, planned, device_bytes)
    return Result(got["out"], got["lse"], *label, plan=planned, device_bytes=device_bytes), gradients


def default_device() -> Device:
    """The device that `attention` uses when none is named, made at first use. Raises `NoAdapterError`."""
    global _default
    if _default is None:
        _default = Device()
    return _default


def _device(device: Device | str | None) -> Device | None:
    """None stands for NumPy."""
    if isinstance(device, Device):
        return device
    if device == "numpy":
        return None
    if device is not None:
        raise TypeError(f'device must be a fa2lab.Device, "numpy" or None; got {device!r}.')
    try:
        return default_device()
    except NoAdapterError as error:
        _warn_once(str(error))
        return None


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"NumPy computes on the CPU in place of a GPU. {reason}", RuntimeWarning, stacklevel=4)


def _check_host_memory(planned: Plan) -> None:
    """Broadcast views can pose problems that no memory holds once they are written out."""
    room = physical_memory()
    need = 4 * sum(prod(planned.shape(name)) for name in {*planned.kernel.inputs, *planned.outputs})
    if room is not None and need > room:
        raise LimitError(
            f"{planned.problem} needs {need:,} B for its arrays; this machine has {room:,} B. Smaller sizes fit."
        )


def _limits(device: Device | None) -> Limits:
    """NumPy walks the tiles that a browser's limits allow, so that both tell the same story."""
    return device.limits if device else BROWSER


def _forward_on_numpy(planned: Plan, q, k, v) -> Result:
    name, problem = planned.kernel.name, planned.problem
    if planned.kernel.tiled:
        blocks = planned.block_q, planned.block_k
        result = reference.walk(problem, q, k, v, *blocks, np.float32, return_attn=planned.return_attn)
        result = result if planned.trace else replace(result, trace=None)
    else:
        result = reference.attend(problem, q, k, v, np.float32, return_attn=planned.return_attn)
    return replace(result, kernel=name, adapter=NUMPY)


def _backward_on_numpy(planned: Plan, inputs: dict[str, np.ndarray]) -> Gradients:
    if planned.kernel.materialises:
        arrays = (inputs[name] for name in ("q", "k", "v", "dout"))
        found = reference.gradients(planned.problem, *arrays, np.float32)
    else:
        arrays = (inputs[name] for name in ("q", "k", "v", "out", "lse", "dout"))
        found = reference.walk_backward(planned.problem, *arrays, planned.block_q, planned.block_k, np.float32)
    return replace(found, kernel=planned.kernel.name, adapter=NUMPY)


def _result(planned: Plan, got: dict[str, np.ndarray], device: Device, device_bytes: int) -> Result:
    return Result(
        got["out"],
        got["lse"],
        planned.kernel.name,
        str(device.adapter),
        planned.problem,
        attn=got.get("attn"),
        trace=_trace(planned, got["trace"]) if planned.trace else None,
        plan=planned,
        device_bytes=device_bytes,
    )


def _trace(planned: Plan, recorded: np.ndarray) -> Trace:
    m, l, alpha, state = (np.ascontiguousarray(recorded[..., i]) for i in range(4))
    # A row that sees no key keeps the kernel's M_NONE, a finite number; told by its position it is -inf.
    m[:, :, planned.problem.keys_seen() == 0] = -np.inf
    return Trace(m, l, alpha, state.astype(np.uint8), planned.block_q, planned.block_k)
