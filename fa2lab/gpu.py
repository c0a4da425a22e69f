"""Devices: buffers, pipelines, dispatch, readback and timing through wgpu. Knows nothing of attention."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fa2lab.adapter import Adapter, Compiler, adapters, api, choose_adapter
from fa2lab.buffers import Access, Buffer, BufferScope, Memory
from fa2lab.diagnostics import kernel_error
from fa2lab.errors import LimitError
from fa2lab.limits import BROWSER, WEBGPU_NAMES
from fa2lab.pieces import FIRST_GUESS, FIRST_GUESS_GPU, PIECE_SECONDS, Box, Cutter, Progress, Triple, ctrl_c_between
from fa2lab.pipelines import Pipelines
from fa2lab.source import Dialect, Source, link


@dataclass(frozen=True)
class Dispatch:
    """One compute dispatch: a source, what stands at its bindings 0, 1, … and how many workgroups run it.

    `flops` is about how much it computes. `params_from((x, y, z))` is what binding 0 holds for a part of the grid that
    begins at that workgroup; with it, a long dispatch goes out in pieces.
    """

    source: Source
    bindings: tuple[tuple[Buffer, Access], ...]
    workgroups: Triple
    flops: float = 0.0
    params_from: Callable[[Triple], np.ndarray] | None = None


Bound = tuple[object, object, Triple]  # of one dispatch: its pipeline, its bind group, its workgroups


class Device:
    """A device on one adapter: it allocates, compiles once per source text, dispatches and reads back.

    `adapter`: None for the fastest there is, an `Adapter`, or a part of its name (`"llvmpipe"`).
    `compiler`: `"naga"` (wgpu) or `"tint"` (Dawn, which browsers have; extra `fa2lab[dawn]`).
    `limits`: `"adapter"` for all that the adapter has, `"webgpu"` for what every browser grants.
    `shader_checks`: True to compile the project's own kernels with bounds checks and loop bounding, as browsers do and
    as edited kernels always are. The attribute says what they have: Tint keeps the checks whatever is asked for.
    Raises `NoAdapterError` where nothing fits. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        adapter: Adapter | str | None = None,
        *,
        compiler: Compiler = "naga",
        limits: Literal["adapter", "webgpu"] = "adapter",
        shader_checks: bool = False,
    ):
        if limits not in ("adapter", "webgpu"):
            raise ValueError(f'limits must be "adapter" or "webgpu"; got {limits!r}.')
        self.adapter = choose_adapter(adapter, compiler)
        self.limits = self.adapter.limits if limits == "adapter" else self.adapter.limits.capped(BROWSER)
        self.memory = Memory()
        self.lock = threading.RLock()
        self._wgpu = api(self.adapter.compiler)
        self._pace: dict[tuple, float] = {}  # seconds a FLOP, of dispatches that went out in pieces
        self._checks_wanted = shader_checks
        self._subgroup_size: int | None = None
        self._open()
        self.limits = replace(self.limits, software=self.adapter.type == "CPU")
        if limits == "adapter":  # subgroups and float16 are no part of what every browser grants
            halves = "shader-f16" in self.adapter.features
            self.limits = replace(self.limits, subgroup_size=self.subgroup_size or 0, float16=halves)

    def __repr__(self) -> str:
        return f"Device({self.adapter.name!r}, compiler={self.adapter.compiler!r})"

    @property
    def dialect(self) -> Dialect:
        """Which of WGSL's dialects `source.link` should write for this device."""
        return self.adapter.compiler

    @property
    def unrolls(self) -> bool:
        """Whether marked loops are written out: GPUs gain from it, software drivers take seconds to compile it."""
        return self.adapter.type != "CPU"

    def _open(self) -> None:
        wanted = {"subgroup", "subgroups", "shader-f16", "timestamp-query"}
        limits = {theirs: getattr(self.limits, ours) for ours, theirs in WEBGPU_NAMES.items()}
        limits["max-compute-workgroup-size-x"] = min(
            self.limits.invocations, self.adapter.handle.limits["max-compute-workgroup-size-x"]
        )
        self._handle = self.adapter.handle.request_device_sync(
            required_features=sorted(wanted & self.adapter.features), required_limits=limits
        )
        self._pipelines = Pipelines(self._wgpu, self._handle, shader_checks=self._checks_wanted)

    @property
    def shader_checks(self) -> bool:
        """Whether the project's own kernels have bounds checks and loop bounding; edited kernels always have."""
        return self._pipelines.shader_checks

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

    def run(self, dispatches: Iterable[Dispatch], progress: Progress | None = None) -> None:
        """Queue the dispatches in order; each sees what the ones before it wrote. Raises `KernelError`.

        A dispatch of more than about half a second goes out in pieces, each waited for: in between, Ctrl-C is heard and
        `progress` is told. The results are the same to the bit.
        """
        together = []
        for dispatch in dispatches:
            if self._is_long(dispatch):
                self._submit(together)
                together = []
                self._run_in_pieces(dispatch, progress)
            else:
                together.append(self._bind(dispatch))
        self._submit(together)

    def _is_long(self, dispatch: Dispatch) -> bool:
        if dispatch.params_from is None:
            return False
        too_wide = max(dispatch.workgroups) > self.limits.workgroups
        return too_wide or dispatch.flops * self._pace_of(dispatch) > 2 * PIECE_SECONDS

    def _pace_of(self, dispatch: Dispatch) -> float:
        guess = 1 / FIRST_GUESS.get(self.adapter.type, FIRST_GUESS_GPU)
        return self._pace.get(self._key(dispatch), guess)

    def _run_in_pieces(self, dispatch: Dispatch, progress: Progress | None) -> None:
        pipeline, group, grid = self._bind(dispatch)
        params = dispatch.bindings[0][0]
        cutter = Cutter(grid, self.limits.workgroups, dispatch.flops, self._pace_of(dispatch))

        def box_seconds(box: Box) -> float:
            begin = time.perf_counter()
            self.write(params, dispatch.params_from(box.first))
            self._submit([(pipeline, group, box.count)])
            self.wait()
            seconds = time.perf_counter() - begin
            if progress:
                progress.advance(cutter.workgroup_flops * box.size)
            check_ctrl_c()
            return seconds

        with ctrl_c_between() as check_ctrl_c:
            self.wait()  # for what was queued before, so that the first piece's time is its own
            try:
                cutter.run(box_seconds)
            finally:
                self.write(params, dispatch.params_from((0, 0, 0)))
        if dispatch.flops:
            self._pace[self._key(dispatch)] = cutter.pace

    def wait(self) -> None:
        """Return when all that was queued so far is done, uploads included."""
        usage = self._wgpu.BufferUsage
        fence = self._handle.create_buffer(size=16, usage=usage.MAP_READ | usage.COPY_DST)
        try:  # by mapping: the queue's own on_submitted_work_done fails in wgpu-py 0.32
            encoder = self._handle.create_command_encoder()
            encoder.clear_buffer(fence)
            self._handle.queue.submit([encoder.finish()])
            fence.map_sync(self._wgpu.MapMode.READ)
            fence.unmap()
        finally:
            fence.destroy()

    def _bind(self, dispatch: Dispatch) -> Bound:
        pipeline, layout = self._pipeline(dispatch)
        entries = [
            {"binding": i, "resource": {"buffer": buffer.handle, "offset": 0, "size": buffer.nbytes}}
            for i, (buffer, _) in enumerate(dispatch.bindings)
        ]
        return pipeline, self._handle.create_bind_group(layout=layout, entries=entries), dispatch.workgroups

    def _submit(self, bound: Sequence[Bound]) -> None:
        if bound:
            encoder = self._handle.create_command_encoder()
            self._encode(encoder.begin_compute_pass(), bound)
            self._handle.queue.submit([encoder.finish()])

    def _encode(self, step, bound: Sequence[Bound]) -> None:
        for pipeline, group, workgroups in bound:
            step.set_pipeline(pipeline)
            step.set_bind_group(0, group)
            step.dispatch_workgroups(*workgroups)
        step.end()

    @property
    def clock(self) -> str:
        """What `time` reads: software drivers stamp a queue that has not run yet, so theirs do not count."""
        stamped = "timestamp-query" in self.adapter.features and self.adapter.type != "CPU"
        return "timestamp queries" if stamped else "wall clock"

    def time(self, dispatches: Sequence[Dispatch], repeats: int = 1) -> float:
        """Seconds that the dispatches take, each whole, run so many times in one go; by `clock`."""
        if self.clock == "wall clock":
            return self.time_on_the_wall(dispatches, repeats)
        bound = [self._bind(dispatch) for dispatch in dispatches] * repeats
        usage = self._wgpu.BufferUsage
        stamps = self._handle.create_query_set(type="timestamp", count=2)
        resolved = self._handle.create_buffer(size=16, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = self._handle.create_command_encoder()
        writes = {"query_set": stamps, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
        self._encode(encoder.begin_compute_pass(timestamp_writes=writes), bound)
        encoder.resolve_query_set(stamps, 0, 2, resolved, 0)
        self._handle.queue.submit([encoder.finish()])
        begin, end = (int(x) for x in self._read_back(resolved, 16, 16).view(np.uint64))
        resolved.destroy()
        return (end - begin) * 1e-9  # WebGPU's timestamps count nanoseconds

    def time_on_the_wall(self, dispatches: Sequence[Dispatch], repeats: int = 1) -> float:
        """The same by the host's clock, from handing them over to hearing that all is done."""
        bound = [self._bind(dispatch) for dispatch in dispatches] * repeats
        self.wait()
        begin = time.perf_counter()
        self._submit(bound)
        self.wait()
        return time.perf_counter() - begin

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

    @property
    def compile_seconds(self) -> dict[str, float]:
        """By entry point: how long it took from WGSL to a pipeline, when it was made last."""
        return self._pipelines.seconds

    def compile(self, dispatch: Dispatch) -> float:
        """Seconds from its WGSL to a pipeline, 0 if the device has that already. Raises `KernelError`.

        Some drivers, llvmpipe among them, only make machine code when a pipeline is first dispatched.
        """
        known = self._key(dispatch) in self._pipelines
        self._pipeline(dispatch)
        return 0.0 if known else self.compile_seconds[dispatch.source.entry]

    def _key(self, dispatch: Dispatch) -> tuple:
        return self._pipelines.key(dispatch.source, [access for _, access in dispatch.bindings])

    def _pipeline(self, dispatch: Dispatch) -> tuple[object, object]:
        try:
            return self._pipelines.of(dispatch.source, [access for _, access in dispatch.bindings])
        except (self._wgpu.GPUError, self._wgpu.GPUPipelineError) as error:
            if self.lost:
                raise
            raise kernel_error(dispatch.source, str(error)) from error
