"""What this device can do at best, measured: a copy, and a product of matrices, both in WGSL like the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from fa2lab.errors import KernelError
from fa2lab.gpu import Device, Dispatch
from fa2lab.source import link
from fa2lab.timing import Timing, timed

MIB = 1 << 20
COPY_BYTES, COPY_BYTES_CPU = 256 * MIB, 32 * MIB  # of each buffer: far larger than caches
COPY_LANES, COPY_VECS = 256, 4
# Sides of the product, the largest that takes less than LONGEST seconds: a driver resets what holds it up for long.
SIDES, SIDES_CPU, LONGEST = (1024, 2048, 4096, 8192), (256,), 0.1
# BLOCK, STEP and VECS of bench_matmul.wgsl: what a browser's 16 KiB of workgroup memory holds, and for software less,
# since its invocations take turns and what they keep in registers is memory.
PRODUCT, PRODUCT_CPU = (128, 16, 2), (64, 16, 2)


@dataclass(frozen=True)
class Ceilings:
    """The most that was measured on a device: bytes a second of a copy, operations a second of a float32 product."""

    adapter: str
    copy_bytes_per_second: float  # read and written
    product_flops_per_second: float
    copy: Timing
    product: Timing
    copy_bytes: int  # of each of its two buffers
    product_side: int  # N of its N × N matrices

    def attainable(self, flops_per_byte: float) -> float:
        """The roofline: operations a second that memory and arithmetic allow at so many operations a byte."""
        return min(self.product_flops_per_second, flops_per_byte * self.copy_bytes_per_second)

    def __str__(self) -> str:
        return (
            f"copy {self.copy_bytes_per_second / 1e9:,.1f} GB/s ({self.copy_bytes / MIB:,.0f} MiB), "
            f"float32 product {self.product_flops_per_second / 1e12:.3g} TFLOP/s (N={self.product_side:,})"
        )


def ceilings(device: Device, *, patience: float = 2.0) -> Ceilings:
    """Measure both ceilings, each after its result was proved right. Raises `KernelError` where one is wrong."""
    with device.lock:
        copied, nbytes = time_copy(device, patience=patience)
        product, side = time_product(device, patience=patience)
    return Ceilings(
        str(device.adapter), 2 * nbytes / copied.seconds, 2 * side**3 / product.seconds, copied, product, nbytes, side
    )


def time_copy(device: Device, *, nbytes: int | None = None, patience: float = 2.0) -> tuple[Timing, int]:
    """The time of a copy, and the bytes that it copied: `nbytes`, or as much as one binding holds, rounded down."""
    room = min(nbytes or _software(device, COPY_BYTES, COPY_BYTES_CPU), device.limits.binding_bytes)
    groups = min(room // (16 * COPY_LANES * COPY_VECS), device.limits.workgroups)
    source = link(
        "bench_copy", (), {"INVOCATIONS": COPY_LANES, "VECS": COPY_VECS}, dialect=device.dialect, unrolled=True
    )
    original = np.arange(groups * COPY_LANES * COPY_VECS * 4, dtype=np.uint32)  # no two numbers alike
    original &= 0x3FFFFFFF  # and none of them a NaN, whose bits a driver may change
    with device.buffers() as make:
        bound = (make(original), "read"), (make(original.nbytes), "read_write")
        dispatch = Dispatch(source, bound, (groups, 1, 1))
        device.run([dispatch])
        if not np.array_equal(device.read(bound[1][0], np.uint32), original):
            raise KernelError(f"bench_copy.wgsl does not copy on {device.adapter}, so its time is no ceiling.")
        return timed(lambda n: device.time([dispatch], n), device.clock, patience=patience), original.nbytes


def time_product(device: Device, *, sides: tuple[int, ...] | None = None, patience: float = 2.0) -> tuple[Timing, int]:
    """The time of a float32 product of N × N matrices, and N: the largest of `sides` that takes less than 0.1 s."""
    sides = sides or _software(device, SIDES, SIDES_CPU)
    most = min(device.limits.binding_bytes, device.limits.buffer_bytes)
    fitting = [N for N in sides if 4 * N * N <= most] or [min(sides)]
    chosen, seconds = fitting[0], 0.0
    for N in fitting:
        if seconds * (N / chosen) ** 3 > LONGEST:
            break
        chosen, seconds = N, _product(device, N, patience=0.0).seconds
    return _product(device, chosen, patience=patience, proved=True), chosen


def _product(device: Device, N: int, *, patience: float, proved: bool = False) -> Timing:
    block, step, vecs = _software(device, PRODUCT, PRODUCT_CPU)
    constants = {"N": N, "BLOCK": block, "STEP": step, "VECS": vecs}
    source = link("bench_matmul", (), constants, dialect=device.dialect, unrolled=device.unrolls)
    rng = np.random.default_rng(0)
    with device.buffers() as make:
        a, b, c = (make(4 * N * N) for _ in range(3))
        dispatch = Dispatch(source, ((a, "read"), (b, "read"), (c, "read_write")), (N // block, N // block, 1))
        if proved:
            _prove_product(device, dispatch, N)
        for operand in (a, b):  # numbers like those of attention: simpler ones let some cards clock higher
            device.write(operand, rng.standard_normal((N, N), np.float32))
        return timed(lambda n: device.time([dispatch], n), device.clock, patience=patience)


def _prove_product(device: Device, dispatch: Dispatch, N: int) -> None:
    """Small whole numbers: each sum stays below 2^24, so the product is exact in float32 and has to be equal."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (N, N)).astype(np.float32) for _ in range(2))
    (a_buffer, _), (b_buffer, _), (c_buffer, _) = dispatch.bindings
    device.write(a_buffer, a)
    device.write(b_buffer, b)
    device.run([dispatch])
    got = device.read(c_buffer, np.float32, (N, N))
    rows = np.unique(np.linspace(0, N - 1, 64).astype(int))  # from every tile of rows
    wrong = got[rows] != a[:, rows].T @ b
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise KernelError(
            f"bench_matmul.wgsl is wrong on {device.adapter} in {wrong.sum():,} of {prod(wrong.shape):,} places, the "
            f"first at row {rows[row]}, column {column}: its time is no ceiling."
        )


def _software(device: Device, of_a_gpu, of_software):
    return of_software if device.adapter.type == "CPU" else of_a_gpu
