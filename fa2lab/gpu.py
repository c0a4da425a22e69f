"""Devices: buffers, pipelines, dispatch, readback and timing through wgpu. Knows nothing of attention."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fa2lab.adapter import Adapter, Compiler, adapters, api, choose_adapter
from fa2lab.diagnostics import kernel_error
from fa2lab.errors import LimitError
from fa2lab.limits import BROWSER, WEBGPU_NAMES
from fa2lab.source import Dialect, Source, link

Access = Literal["uniform", "read", "read_write"]


@dataclass(frozen=True)
class Dispatch:
    """One compute dispatch: a source, what stands at its bindings 0, 1, … and how many workgroups run it."""

    source: Source
    bindings: tuple[tuple[Buffer, Access], ...]
    workgroups: tuple[int, int, int]


@dataclass(eq=False)
class Buffer:
    """Device memory of `nbytes`, counted until `release`."""

    handle: object
    nbytes: int
    memory: Memory

    def release(self) -> None:
        """Give the memory back now. A second call does nothing."""
        if self.handle is not None:
            self.memory.count(-self.nbytes)
            self.handle.destroy()
            self.handle = None


@dataclass
class Memory:
    """The device's own allocation count: bytes and buffers alive now, and the most bytes since `reset_peak`."""

    live_bytes: int = 0
    live_buffers: int = 0
    peak_bytes: int = 0

    def count(self, nbytes: int) -> None:
        """Enter an allocation, or with a negative number a release."""
        self.live_bytes += nbytes
        self.live_buffers += 1 if nbytes > 0 else -1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self.peak_bytes = self.live_bytes


class Device:
    """A device on one adapter: it allocates, compiles once per source text, dispatches and reads back.

    `adapter`: None for the fastest there is, an `Adapter`, or a part of its name (`"llvmpipe"`).
    `compiler`: `"naga"` (wgpu) or `"tint"` (Dawn, which browsers have; extra `fa2lab[dawn]`).
    `limits`: `"adapter"` for all that the adapter has, `"webgpu"` for what every browser grants.
    Raises `NoAdapterError` where nothing fits. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        adapter: Adapter | str | None = None,
        *,
        compiler: Compiler = "naga",
        limits: Literal["adapter", "webgpu"] = "adapter",
    ):
        if limits not in ("adapter", "webgpu"):
            raise ValueError(f'limits must be "adapter" or "webgpu"; got {limits!r}.')
        self.adapter = choose_adapter(adapter, compiler)
        self.limits = self.adapter.limits if limits == "adapter" else self.adapter.limits.capped(BROWSER)
        self.memory = Memory()
        self.lock = threading.RLock()
        self._wgpu = api(self.adapter.compiler)
        self._pipelines: dict[tuple, tuple] = {}
        self._subgroup_size: int | None = None
        self._open()

    def __repr__(self) -> str:
        return f"Device({self.adapter.name!r}, compiler={self.adapter.compiler!r})"

    @property
    def dialect(self) -> Dialect:
        """Which of WGSL's dialects `source.link` should write for this device."""
        return self.adapter.compiler

    def _open(self) -> None:
        wanted = {"subgroup", "subgroups", "shader-f16", "timestamp-query"}
        limits = {theirs: getattr(self.limits, ours) for ours, theirs in WEBGPU_NAMES.items()}
        limits["max-compute-workgroup-size-x"] = min(
            self.limits.invocations, self.adapter.handle.limits["max-compute-workgroup-size-x"]
        )
        self._handle = self.adapter.handle.request_device_sync(
            required_features=sorted(wanted & self.adapter.features), required_limits=limits
        )
        self._pipelines.clear()

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What wgpu raises when the device refuses or is gone."""
        return self._wgpu.GPUError, self._wgpu.GPUPipelineError, RuntimeError

    @property
    def lost(self) -> bool:
        """True once the driver has given the device up; `revive` makes a new one."""
        try:
            self._handle.create_buffer(size=4, usage=self._wgpu.BufferUsage.COPY_DST).destroy()
        except self.errors:
            return True
        return False

    def revive(self) -> None:
        """Replace a lost device by a fresh one on the same adapter. All buffers of the old one are gone."""
        same = [found for found in adapters(self.adapter.compiler) if found == self.adapter]
        self.adapter = same[0] if same else choose_adapter(self.adapter.name, self.adapter.compiler)
        self.memory = Memory()
        self._open()

    @property
    def subgroup_size(self) -> int | None:
        """How many invocations share a subgroup, measured by a probe kernel at first use; None without subgroups."""
        if self._subgroup_size is None and {"subgroup", "subgroups"} & self.adapter.features:
            probe = link("probe_subgroup", features=("subgroups",), dialect=self.dialect)
            with self.lock, self.buffers() as make:
                size = make(4)
                self.run([Dispatch(probe, ((size, "read_write"),), (1, 1, 1))])
                self._subgroup_size = int(self.read(size, np.uint32)[0])
        return self._subgroup_size

    def buffers(self) -> BufferScope:
        """A scope that allocates by `make(nbytes)` or `make(array)` and releases all of it at its end."""
        return BufferScope(self)

    def allocate(self, content: int | np.ndarray, *, uniform: bool = False) -> Buffer:
        """A zeroed buffer of so many bytes, or one that holds the array's bytes. Raises `LimitError`."""
        nbytes = content if isinstance(content, int) else content.nbytes
        size = max(16, -(-nbytes // 4) * 4)  # a binding of nothing is not allowed, and copies come in fours
        if size > self.limits.buffer_bytes:
            raise LimitError(f"A buffer of {size:,} B was asked for; this device holds {self.limits.buffer_bytes:,} B.")
        usage = self._wgpu.BufferUsage
        kind = usage.UNIFORM if uniform else usage.STORAGE
        try:
            handle = self._handle.create_buffer(size=size, usage=kind | usage.COPY_DST | usage.COPY_SRC)
        except self._wgpu.GPUOutOfMemoryError as error:
            raise LimitError(
                f"The device has no {size:,} B left beside the {self.memory.live_bytes:,} B in use; "
                "smaller B, H or T would fit."
            ) from error
        self.memory.count(size)
        buffer = Buffer(handle, size, self.memory)
        if not isinstance(content, int) and content.nbytes:
            self._handle.queue.write_buffer(handle, 0, np.ascontiguousarray(content))
        return buffer

    def write(self, buffer: Buffer, content: np.ndarray) -> None:
        """Overwrite the start of a buffer."""
        self._handle.queue.write_buffer(buffer.handle, 0, np.ascontiguousarray(content))

    def run(self, dispatches: Iterable[Dispatch]) -> None:
        """Queue the dispatches in order; each sees what the ones before it wrote. Raises `KernelError`."""
        encoder = self._handle.create_command_encoder()
        step = encoder.begin_compute_pass()
        self._encode(step, dispatches)
        step.end()
        self._handle.queue.submit([encoder.finish()])

    def _encode(self, step, dispatches: Iterable[Dispatch]) -> None:
        for dispatch in dispatches:
            pipeline, layout = self._pipeline(dispatch.source, tuple(access for _, access in dispatch.bindings))
            entries = [
                {"binding": i, "resource": {"buffer": buffer.handle, "offset": 0, "size": buffer.nbytes}}
                for i, (buffer, _) in enumerate(dispatch.bindings)
            ]
            step.set_pipeline(pipeline)
            step.set_bind_group(0, self._handle.create_bind_group(layout=layout, entries=entries))
            step.dispatch_workgroups(*dispatch.workgroups)

    @property
    def clock(self) -> str:
        """What `time` reads: software drivers stamp a queue that has not run yet, so theirs do not count."""
        stamped = "timestamp-query" in self.adapter.features and self.adapter.type != "CPU"
        return "timestamp queries" if stamped else "wall clock"

    def time(self, dispatches: Sequence[Dispatch], repeats: int = 1) -> float:
        """Seconds that the dispatches take, run so many times in one go; by `clock`."""
        if self.clock == "wall clock":
            return self._time_on_the_wall(dispatches, repeats)
        usage = self._wgpu.BufferUsage
        stamps = self._handle.create_query_set(type="timestamp", count=2)
        resolved = self._handle.create_buffer(size=16, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = self._handle.create_command_encoder()
        writes = {"query_set": stamps, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
        step = encoder.begin_compute_pass(timestamp_writes=writes)
        for _ in range(repeats):
            self._encode(step, dispatches)
        step.end()
        encoder.resolve_query_set(stamps, 0, 2, resolved, 0)
        self._handle.queue.submit([encoder.finish()])
        begin, end = (int(x) for x in self._read_back(resolved, 16, 16).view(np.uint64))
        resolved.destroy()
        return (end - begin) * 1e-9  # WebGPU's timestamps count nanoseconds

    def _time_on_the_wall(self, dispatches: Sequence[Dispatch], repeats: int) -> float:
        self._pipelines_of(dispatches)  # compiled before the clock starts
        last = dispatches[-1].bindings[-1][0]
        begin = time.perf_counter()
        encoder = self._handle.create_command_encoder()
        step = encoder.begin_compute_pass()
        for _ in range(repeats):
            self._encode(step, dispatches)
        step.end()
        self._handle.queue.submit([encoder.finish()])
        self._read_back(last.handle, 16, 16)  # waits for the queue
        return time.perf_counter() - begin

    def _pipelines_of(self, dispatches: Sequence[Dispatch]) -> None:
        for dispatch in dispatches:
            self._pipeline(dispatch.source, tuple(access for _, access in dispatch.bindings))

    def read(self, buffer: Buffer, dtype, shape: Sequence[int] = (-1,)) -> np.ndarray:
        """The buffer's content as a new array, through a mapped staging buffer. Waits for the queue."""
        count = int(np.prod(shape)) if -1 not in shape else buffer.nbytes // np.dtype(dtype).itemsize
        nbytes = count * np.dtype(dtype).itemsize
        return self._read_back(buffer.handle, buffer.nbytes, nbytes)[:nbytes].view(dtype).reshape(shape)

    def _read_back(self, handle, size: int, nbytes: int) -> np.ndarray:
        """The first bytes of a buffer of `size`, as a writable array of uint8."""
        usage = self._wgpu.BufferUsage
        staging = self._handle.create_buffer(size=size, usage=usage.MAP_READ | usage.COPY_DST)
        self.memory.count(size)
        try:
            encoder = self._handle.create_command_encoder()
            encoder.copy_buffer_to_buffer(handle, 0, staging, 0, size)
            self._handle.queue.submit([encoder.finish()])
            staging.map_sync(self._wgpu.MapMode.READ)
            copied = bytearray(staging.read_mapped(0, max(4, -(-nbytes // 4) * 4)))  # writable, and ours
            staging.unmap()
        finally:
            staging.destroy()
            self.memory.count(-size)
        return np.frombuffer(copied, np.uint8)

    def _pipeline(self, source: Source, accesses: tuple[Access, ...]):
        """Compiled once per source text; modules are checked by the compiler before any pipeline is made."""
        key = (source.text, accesses)
        if key not in self._pipelines:
            kinds = {"uniform": "uniform", "read": "read-only-storage", "read_write": "storage"}
            layout = self._handle.create_bind_group_layout(
                entries=[
                    {"binding": i, "visibility": self._wgpu.ShaderStage.COMPUTE, "buffer": {"type": kinds[access]}}
                    for i, access in enumerate(accesses)
                ]
            )
            try:
                module = self._handle.create_shader_module(code=source.text, label=source.entry)
                pipeline = self._handle.create_compute_pipeline(
                    layout=self._handle.create_pipeline_layout(bind_group_layouts=[layout]),
                    compute={"module": module, "entry_point": source.entry},
                )
            except (self._wgpu.GPUError, self._wgpu.GPUPipelineError) as error:
                if self.lost:
                    raise
                raise kernel_error(source, str(error)) from error
            self._pipelines[key] = pipeline, layout
        return self._pipelines[key]


class BufferScope:
    """Buffers that live as long as a `with` block, whatever happens in it."""

    def __init__(self, device: Device):
        self._device, self._made = device, []

    def __enter__(self):
        return self.make

    def make(self, content: int | np.ndarray, *, uniform: bool = False) -> Buffer:
        """Allocate in this scope."""
        self._made.append(self._device.allocate(content, uniform=uniform))
        return self._made[-1]

    def __exit__(self, *exception) -> None:
        for buffer in reversed(self._made):
            buffer.release()
