"""attention(): where problem, plan and device meet, for the forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa2lab import reference
from fa2lab.engine import NUMPY, check_host_memory, choose, limits_of, numpy_runs
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.launch import launch
from fa2lab.plan import check_storable, plan
from fa2lab.planned import Plan, Storage
from fa2lab.problem import Align, as_float32, pose
from fa2lab.results import Result, Trace
from fa2lab.tuning import tuned


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
    splits: int | None = None,
    storage: Storage = "float32",
    device: Device | str | None = None,
) -> Result:
    """Attention by a WGSL kernel: O = softmax(scale · Q Kᵀ) V over the keys that each row sees.

    q: `(B, Tq, H, D)`; k, v: `(B, Tk, Hkv, D)` with `H % Hkv == 0`; any floating dtype, computed in float32.
    causal: row i sees the keys j <= i + Tk - Tq (`align="bottom-right"`) or j <= i (`align="top-left"`).
    scale: any finite number, by default `1/sqrt(D)`.
    kernel: `"auto"` (the fastest that fits, as measured; with `trace` the one that a reader can follow), a name of
    `fa.kernels()`, or a `Kernel` (one that was `.edited(...)`, say).
    return_attn: also return P `(B, H, Tq, Tk)`. trace: also return m, l and alpha of each row and K tile.
    block_q, block_k: the tile of a tiled kernel; by default what fits the device. splits: in how many parts
    `"fa2_decode"` walks the keys; any number gives the same result, up to rounding.
    storage: `"float16"` keeps Q, K, V and O as 16-bit numbers on the device, which rounds them, and computes in
    float32; for the kernels with tiles in registers, where the device has it.
    device: a `Device`, `"numpy"`, or None for the fastest adapter; without any, NumPy computes and says so.

    Raises `TypeError`, `ShapeError`, `LimitError` or `KernelError` before anything is sent to the device.
    Error against float64: at most 2 × that of plain float32 arithmetic, plus `parity.floors`.
    Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithm 1.
    """
    problem, *arrays = pose(q, k, v, causal=causal, scale=scale, align=align)
    device = choose(device)
    wishes = dict(block_q=block_q, block_k=block_k, return_attn=return_attn, trace=trace)
    wishes |= dict(splits=splits, storage=storage, tuned=tuned(device))
    check_host_memory(problem, queries=2, keys=2, scores=int(return_attn))
    planned = plan(problem, limits_of(device), kernel, **wishes)
    arrays = [as_float32(x) for x in arrays]
    check_storable(planned, dict(zip("qkv", arrays, strict=True)))
    if device is None:
        return forward_on_numpy(planned, *arrays)
    got, device_bytes = launch(planned, dict(zip("qkv", arrays, strict=True)), device)
    return _result(planned, got, device, device_bytes)


def forward_on_numpy(planned: Plan, q, k, v) -> Result:
    """The planned forward by NumPy in float32, over the same tiles. Raises `KernelError` for an edited kernel."""
    problem = planned.problem
    numpy_runs(planned.kernel)
    if planned.kernel.tiled:
        blocks = planned.block_q, planned.block_k
        result = reference.walk(problem, q, k, v, *blocks, np.float32, return_attn=planned.return_attn)
        result = result if planned.trace else replace(result, trace=None)
    else:
        result = reference.attend(problem, q, k, v, np.float32, return_attn=planned.return_attn)
    return replace(result, kernel=planned.kernel.name, adapter=NUMPY)


def _result(planned: Plan, got: dict[str, np.ndarray], device: Device, device_bytes: int) -> Result:
    return Result(
        got["out"],
        got["lse"],
        planned.kernel.label,
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
