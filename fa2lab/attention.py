"""attention(): the only place where problem, plan, source and gpu meet."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from fa2lab import reference
from fa2lab.data import physical_memory
from fa2lab.errors import LimitError, NoAdapterError
from fa2lab.gpu import Device, Dispatch
from fa2lab.kernels import Kernel, Pass
from fa2lab.limits import BROWSER
from fa2lab.plan import OUTPUTS, PARAMS_BYTES, UNUSED_BYTES, Chunk, Plan, plan
from fa2lab.problem import Align, Problem, as_float32, pose
from fa2lab.results import SKIPPED, Result, Trace

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
    wishes = dict(block_q=block_q, block_k=block_k, return_attn=return_attn, trace=trace)
    device = _device(device)
    # NumPy walks the tiles that a browser's limits allow, so that both tell the same story.
    planned = plan(problem, device.limits if device else BROWSER, kernel, **wishes)
    _check_host_memory(planned)
    arrays = [as_float32(x) for x in arrays]
    return _on_numpy(planned, *arrays) if device is None else _on_gpu(planned, *arrays, device)


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
    p, room = planned.problem, physical_memory()
    need = 8 * p.B * p.D * (p.Tq * p.H + p.Tk * p.Hkv)
    if planned.return_attn:
        need += 4 * p.B * p.H * p.Tq * p.Tk
    if room is not None and need > room:
        raise LimitError(f"{p} needs {need:,} B for its arrays; this machine has {room:,} B. Smaller B, T or H would fit.")


def _on_numpy(planned: Plan, q, k, v) -> Result:
    name, problem = planned.kernel.name, planned.problem
    if planned.kernel.tiled:
        result = reference.walk(
            problem, q, k, v, planned.block_q, planned.block_k, np.float32, return_attn=planned.return_attn
        )
        result = result if planned.trace else replace(result, trace=None)
    else:
        result = reference.attend(problem, q, k, v, np.float32, return_attn=planned.return_attn)
    return replace(result, kernel=name, adapter=NUMPY)


def _on_gpu(planned: Plan, q, k, v, device: Device) -> Result:
    result = _blank(planned, device)
    with device.lock:
        try:
            device_bytes = _run_chunks(planned, q, k, v, device, result)
        except device.errors:
            if not device.lost:
                raise
            device.revive()  # the driver gave the old one up; its work is gone, ours is all still here
            device_bytes = _run_chunks(planned, q, k, v, device, result)
    return replace(result, device_bytes=device_bytes)


def _blank(planned: Plan, device: Device) -> Result:
    """The result of a problem that has no keys: O = 0, L = -inf. The launches fill it where there are some."""
    p = planned.problem
    return Result(
        out=np.zeros((p.B, p.Tq, p.H, p.D), np.float32),
        lse=np.full((p.B, p.H, p.Tq), -np.inf, np.float32),
        attn=np.zeros((p.B, p.H, p.Tq, p.Tk), np.float32) if planned.return_attn else None,
        trace=_blank_trace(planned) if planned.trace else None,
        kernel=planned.kernel.name,
        adapter=str(device.adapter),
        problem=p,
        plan=planned,
    )


def _blank_trace(planned: Plan) -> Trace:
    p = planned.problem
    shape = (p.B, p.H, p.Tq, -(-p.Tk // planned.block_k))
    m, l, alpha = (np.zeros(shape, np.float32) for _ in range(3))  # noqa: E741
    return Trace(m, l, alpha, np.full(shape, SKIPPED, np.uint8), planned.block_q, planned.block_k)


def _run_chunks(planned: Plan, q, k, v, device: Device, result: Result) -> int:
    """Run every launch and write what it computed into `result`'s arrays; the peak of allocated bytes."""
    device.memory.reset_peak()
    before = device.memory.live_bytes
    for chunk in planned.chunks:
        part = q[chunk.batch, :, chunk.heads], k[chunk.batch, :, chunk.kv_heads], v[chunk.batch, :, chunk.kv_heads]
        got = _launch(planned, chunk.problem, part, device)
        result.out[chunk.batch, :, chunk.heads] = got["out"]
        result.lse[chunk.batch, chunk.heads] = got["lse"]
        if planned.return_attn:
            result.attn[chunk.batch, chunk.heads] = got["attn"]
        if planned.trace:
            _unpack_trace(got["trace"], chunk, result.trace)
    return device.memory.peak_bytes - before


def _launch(planned: Plan, p: Problem, arrays, device: Device) -> dict[str, np.ndarray]:
    """One upload, the kernel's dispatches, one readback of each wanted output."""
    sizes = planned.buffer_bytes(p)
    sources = [planned.link(stage, device.dialect) for stage in planned.kernel.passes]
    with device.buffers() as make:
        buffers = {"params": make(_params(p), uniform=True)}
        for name, array in zip("qkv", arrays, strict=True):
            buffers[name] = make(np.ascontiguousarray(array))
        for name in OUTPUTS:
            buffers[name] = make(sizes.get(name, UNUSED_BYTES))
        device.run(
            Dispatch(text, _bind(stage, buffers), stage.grid(p, planned.constants))
            for stage, text in zip(planned.kernel.passes, sources, strict=True)
        )
        shapes = {"out": (p.B, p.Tq, p.H, p.D), "lse": (p.B, p.H, p.Tq)}
        if planned.return_attn:
            shapes["attn"] = (p.B, p.H, p.Tq, p.Tk)
        if planned.trace:
            shapes["trace"] = (p.B, p.H, p.Tq, -(-p.Tk // planned.block_k), 4)
        return {name: device.read(buffers[name], np.float32, shape) for name, shape in shapes.items()}


def _bind(stage: Pass, buffers: dict) -> tuple:
    return tuple((buffers[name], access) for name, access in stage.bindings)


def _params(p: Problem) -> np.ndarray:
    """The uniform `Params` of shared/problem.wgsl, member by member."""
    members = [
        ("n_batch", "u4", p.B),
        ("n_heads", "u4", p.H),
        ("n_kv_heads", "u4", p.Hkv),
        ("n_q", "u4", p.Tq),
        ("n_k", "u4", p.Tk),
        ("causal", "u4", p.causal),
        ("diagonal", "i4", p.diagonal),
        ("scale", "f4", p.scale),
        ("neg_inf", "f4", -np.inf),
    ]
    packed = np.zeros(1, np.dtype([(name, kind) for name, kind, _ in members]))
    for name, _, value in members:
        packed[name] = value
    return np.frombuffer(packed.tobytes().ljust(PARAMS_BYTES, b"\0"), np.uint8)


def _unpack_trace(recorded: np.ndarray, chunk: Chunk, trace: Trace) -> None:
    at = chunk.batch, chunk.heads
    trace.m[at], trace.l[at], trace.alpha[at] = (recorded[..., i] for i in range(3))
    trace.state[at] = recorded[..., 3]
    # A row that sees no key keeps the kernel's M_NONE, a finite number; told by its position it is -inf.
    trace.m[at][:, :, chunk.problem.keys_seen() == 0] = -np.inf


