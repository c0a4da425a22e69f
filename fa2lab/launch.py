"""Runs a plan on a device: chunk by chunk, one upload, the kernel's dispatches, one readback of each output."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from fa2lab.gpu import Device, Dispatch
from fa2lab.pieces import Progress, Triple
from fa2lab.planned import Chunk, Plan
from fa2lab.problem import Problem


def launch(planned: Plan, inputs: dict[str, np.ndarray], device: Device) -> tuple[dict[str, np.ndarray], int]:
    """The plan's outputs by name, and the peak of device bytes by the device's own allocation count.

    `inputs`: native float32 arrays by the names of `planned.kernel.inputs`. A problem that has no keys, queries or
    batches needs no launch: its O and gradients are 0, its L is -inf. A lost device is rebuilt and asked once more.
    Long work shows a bar, and Ctrl-C ends it within half a second or so.
    """
    with device.lock:
        try:
            return _all_chunks(planned, inputs, device)
        except device.errors:
            if not device.lost:
                raise
            device.revive()  # the driver gave the old one up; its work is gone, ours is all still here
            return _all_chunks(planned, inputs, device)


def _all_chunks(planned: Plan, inputs: dict[str, np.ndarray], device: Device) -> tuple[dict[str, np.ndarray], int]:
    results = {name: np.zeros(planned.shape(name), np.float32) for name in planned.outputs}
    if "lse" in results:
        results["lse"][...] = -np.inf
    device.memory.reset_peak()
    before = device.memory.live_bytes
    flops = [_flops(chunk.problem) * len(planned.kernel.passes) for chunk in planned.chunks]
    with Progress(sum(flops), planned.kernel.name) as progress:
        for i, chunk in enumerate(planned.chunks):
            part = {name: array[_place(name, chunk)] for name, array in inputs.items()}
            for name, got in _one_chunk(planned, chunk.problem, part, device, progress).items():
                if name in ("dk", "dv"):  # chunks that share a KV head add up, in the order of the chunks
                    results[name][_place(name, chunk)] += got
                else:
                    results[name][_place(name, chunk)] = got
            progress.reach(sum(flops[: i + 1]))
    return results, device.memory.peak_bytes - before


def _place(name: str, chunk: Chunk) -> tuple[slice, ...]:
    """Where a chunk's part of an array stands: heads are axis 2 of `(B, T, H, D)` and axis 1 of `(B, H, …)`."""
    if name in ("k", "v", "dk", "dv"):
        return chunk.batch, slice(None), chunk.kv_heads
    if name in ("q", "out", "dout", "dq"):
        return chunk.batch, slice(None), chunk.heads
    if name in ("p_ds", "parts"):  # of one batch and head
        return (...,)
    return chunk.batch, chunk.heads


def _one_chunk(
    planned: Plan, p: Problem, inputs: dict[str, np.ndarray], device: Device, progress: Progress
) -> dict[str, np.ndarray]:
    with device.buffers() as make:
        buffers, dispatches = _prepare(planned, p, inputs, device, make)
        device.run(dispatches, progress)
        kinds = {name: (planned.dtype(name), planned.shape(name, p)) for name in planned.outputs}
        return {name: device.read(buffers[name], *kind) for name, kind in kinds.items()}


@contextmanager
def resident(planned: Plan, inputs: dict[str, np.ndarray], device: Device) -> Iterator[list[Dispatch]]:
    """The dispatches of a plan of one launch, with its data on the device while the block lasts: for measuring."""
    with device.buffers() as make:
        yield _prepare(planned, planned.chunks[0].problem, inputs, device, make)[1]


@dataclass(frozen=True)
class Parts:
    """Seconds of a launch by the host's clock, each part done before the next begins.

    upload: buffers made and filled. compile: from WGSL to pipelines, 0 where the device has them. first: the dispatches
    after that, and with them the machine code that some drivers only make now. dispatch: the same once more. readback:
    the outputs.
    """

    upload: float
    compile: float
    first: float
    dispatch: float
    readback: float


def parts(planned: Plan, inputs: dict[str, np.ndarray], device: Device) -> Parts:
    """How long the parts of a plan of one launch take. A fresh device has nothing compiled yet."""
    with device.lock, device.buffers() as make:
        device.wait()
        begin = time.perf_counter()
        buffers, dispatches = _prepare(planned, planned.chunks[0].problem, inputs, device, make)
        device.wait()
        upload = time.perf_counter() - begin
        compiled = sum(device.compile(dispatch) for dispatch in dispatches)
        first, again = (device.time_on_the_wall(dispatches) for _ in range(2))
        begin = time.perf_counter()
        for name in planned.outputs:
            device.read(buffers[name], np.float32)
        return Parts(upload, compiled, first, again, time.perf_counter() - begin)


def _prepare(planned: Plan, p: Problem, inputs: dict[str, np.ndarray], device: Device, make):
    """The buffers of one launch, by name, and its dispatches over them."""
    buffers = {"params": make(_params(p), uniform=True)}
    for name, nbytes in planned.buffer_bytes(p).items():
        buffers[name] = make(np.ascontiguousarray(inputs[name], planned.dtype(name)) if name in inputs else nbytes)
    dispatches = [
        Dispatch(
            planned.link(stage, device.dialect, unrolled=device.unrolls),
            tuple((buffers[name], access) for name, access in stage.bindings),
            stage.grid(p, planned.constants_of(stage)),
            flops=_flops(p),
            params_from=partial(_params, p),
        )
        for stage in planned.kernel.passes
    ]
    return buffers, dispatches


def _flops(p: Problem) -> float:
    """About what one pass computes: two products of D numbers for each query and key that it sees."""
    return 4.0 * p.D * p.B * p.H * int(p.keys_seen().sum())


def _params(p: Problem, first: Triple = (0, 0, 0)) -> np.ndarray:
    """The uniform `Params` of shared/problem.wgsl, member by member, for a grid or a piece of one from `first` on."""
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
        ("first_x", "u4", first[0]),
        ("first_y", "u4", first[1]),
        ("first_z", "u4", first[2]),
    ]
    packed = np.zeros(1, np.dtype([(name, kind) for name, kind, _ in members]))
    for name, _, value in members:
        packed[name] = value
    return np.frombuffer(packed.tobytes(), np.uint8)
