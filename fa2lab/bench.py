"""How long kernels take on data that stands on the device already, beside what they cost on paper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa2lab.attention import attention
from fa2lab.cost import Direction, flops, least, traffic
from fa2lab.data import make
from fa2lab.errors import LimitError
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.kernels import backward_kernels, kernels
from fa2lab.launch import Parts, parts, resident
from fa2lab.plan import plan
from fa2lab.planned import Plan
from fa2lab.problem import pose
from fa2lab.spotcheck import Run, prove, worst
from fa2lab.timing import PATIENCE_SECONDS, Timing, settle, timed

if TYPE_CHECKING:
    from fa2lab.ceilings import Ceilings

__all__ = ["DIRECTIONS", "Row", "Timing", "crossing", "crossover", "measure", "settle", "table", "time_forward"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "forward+backward")


@dataclass(frozen=True)
class Row:
    """One kernel at one shape on one device, proved right before it was timed."""

    kernel: str
    direction: Direction
    adapter: str
    shader_checks: bool
    B: int
    T: int
    Tk: int
    H: int
    Hkv: int
    D: int
    causal: bool
    storage: str
    tiles: tuple[str, ...]  # of each pass that has one
    timing: Timing
    flops: float  # by the convention of `cost.flops`
    bytes: int  # that the kernel asks memory for, by the model of `cost.traffic`
    kinds: dict[str, int]  # of those: K and V, T² matrices, the rest
    least_bytes: int  # inputs and outputs once
    device_bytes: int  # that the plan allocates
    error: float  # the largest against float64, as a share of what parity allows
    first: Parts | None  # what a fresh device takes for the first call, part by part

    @property
    def milliseconds(self) -> float:
        """The median of one run."""
        return 1e3 * self.timing.seconds

    @property
    def tflops(self) -> float:
        """10¹² operations a second."""
        return self.flops / self.timing.seconds / 1e12

    @property
    def gbps(self) -> float:
        """10⁹ bytes a second that the kernel asks for. Caches may answer more of them than memory could."""
        return self.bytes / self.timing.seconds / 1e9

    @property
    def intensity(self) -> float:
        """Operations a byte that the kernel asks for."""
        return self.flops / self.bytes

    @property
    def first_call_seconds(self) -> float | None:
        """Upload, compile, first dispatch and readback together; None where that was not measured."""
        return self.first and self.first.upload + self.first.compile + self.first.first + self.first.readback

    def of_product(self, roof: Ceilings) -> float:
        """Its operations a second as a share of a matrix product's on the same device."""
        return self.flops / self.timing.seconds / roof.product_flops_per_second

    def of_copy(self, roof: Ceilings) -> float:
        """Its bytes a second as a share of a copy's on the same device; above 1 where caches answer."""
        return self.bytes / self.timing.seconds / roof.copy_bytes_per_second

    def record(self, roof: Ceilings | None = None) -> dict[str, object]:
        """All of it as plain numbers and words, for JSON."""
        record = asdict(self)
        timing = record.pop("timing")
        record |= {"milliseconds": 1e3 * timing["seconds"], "low": 1e3 * timing["low"], "high": 1e3 * timing["high"]}
        record |= {name: timing[name] for name in ("batches", "clock", "settled")}
        record |= {"tflops": self.tflops, "gbps": self.gbps, "intensity": self.intensity}
        record |= {"first_call_seconds": self.first_call_seconds}
        if roof:
            record |= {"of_product": self.of_product(roof), "of_copy": self.of_copy(roof)}
        return record


def table(direction: Direction) -> dict[str, Kernel]:
    """The kernels that there are for a direction, by name."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}; got {direction!r}.")
    if direction == "forward":
        return kernels()
    backwards = backward_kernels()
    return backwards if direction == "backward" else {name: k.after_forward() for name, k in backwards.items()}


def measure(
    device: Device,
    kernel: str | Kernel = "auto",
    *,
    direction: Direction = "forward",
    causal: bool = True,
    block_q: int | None = None,
    block_k: int | None = None,
    first_call: bool = False,
    patience: float = PATIENCE_SECONDS,
    seed: int = 0,
    **sizes: int,
) -> Row:
    """The row of one kernel at one shape: proved right, then timed once the clock has settled.

    kernel: a name of `table(direction)`, "auto", or a `Kernel` of `kernels()` or `backward_kernels()`, edited or not.
    sizes: B, T, H, D, Tk, Hkv as in `fa.data.make`. first_call: also open a fresh device and time its first call.
    patience: seconds to wait for the clock to settle.
    Raises `ParityError` for a kernel that is wrong, saying where; `LimitError` for a problem of several launches, else
    as `attention` does.
    """
    arrays = make("random", seed=seed, **sizes)
    problem, *_ = pose(*arrays, causal=causal)
    dout = np.random.default_rng(seed + 1).standard_normal(arrays.q.shape, np.float32)
    choices, asked = table(direction), kernel
    if isinstance(kernel, Kernel) and direction == "forward+backward":
        asked = kernel.after_forward()
    planned = plan(problem, device.limits, asked, table=choices, block_q=block_q, block_k=block_k)
    one_launch(planned)
    if isinstance(kernel, str):  # what "auto" chose for this shape, wherever the proof runs it
        kernel = table("forward" if direction == "forward" else "backward")[planned.kernel.name]
    proof = prove(Run(device, kernel, direction, *arrays, dout, causal, block_q, block_k))
    inputs = dict(zip("qkv", arrays, strict=True)) | {"dout": dout}
    if "out" in planned.kernel.inputs:
        forward = attention(*arrays, causal=causal, device=device)
        inputs |= {"out": forward.out, "lse": forward.lse}
    inputs = {name: inputs[name] for name in planned.kernel.inputs}
    timing = _time(planned, inputs, device, patience)
    p, moved = problem, traffic(planned)
    return Row(
        planned.kernel.label,
        direction,
        str(device.adapter),
        device.shader_checks,
        *(p.B, p.Tq, p.Tk, p.H, p.Hkv, p.D, p.causal),
        storage="f32",
        tiles=tuple(str(tile) for tile in planned.tiles if tile),
        timing=timing,
        flops=flops(p, direction),
        bytes=moved.total,
        kinds=moved.kinds,
        least_bytes=least(planned),
        device_bytes=planned.device_bytes,
        error=worst(proof),
        first=parts(planned, inputs, _fresh(device)) if first_call else None,
    )


def one_launch(planned: Plan) -> None:
    """Raises `LimitError` where a plan takes several launches: between them the host works, and that is no kernel."""
    if len(planned.chunks) != 1:
        raise LimitError(
            f"{planned.problem} takes {len(planned.chunks)} launches on this device; only single ones are timed."
        )


def _time(planned: Plan, inputs: dict[str, np.ndarray], device: Device, patience: float) -> Timing:
    with device.lock, resident(planned, inputs, device) as dispatches:
        return timed(lambda n: device.time(dispatches, n), device.clock, patience=patience)


def _fresh(device: Device) -> Device:
    """Another device on the same adapter, which has compiled nothing."""
    return Device(device.adapter.name, compiler=device.adapter.compiler, shader_checks=device.shader_checks)


def crossing(lengths: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """The first T from which on `other` takes less time than `one`; between two lengths on the straight log-log line.

    None where it is ahead nowhere, the first length where it is ahead everywhere.
    """
    ahead = np.log(np.asarray(one, float) / np.asarray(other, float))
    behind = np.flatnonzero(ahead <= 0)
    if not behind.size:
        return float(lengths[0])
    i = behind[-1]
    if i == len(ahead) - 1:
        return None
    share = ahead[i] / (ahead[i] - ahead[i + 1])
    return float(lengths[i] * (lengths[i + 1] / lengths[i]) ** share)


def time_forward(device: Device, kernel: str, *, patience: float = PATIENCE_SECONDS, **sizes) -> Timing:
    """The time of one causal forward of `kernel` on `device`, unproved; `sizes` as in `fa.data.make`."""
    arrays = make("random", **sizes)
    problem, *_ = pose(*arrays, causal=True)
    planned = plan(problem, device.limits, kernel)
    one_launch(planned)
    return _time(planned, dict(zip("qkv", arrays, strict=True)), device, patience)


def crossover(
    device: Device, *, lengths=(32, 64, 128, 256, 512, 1024), B: int = 1, H: int = 4, D: int = 32, patience: float = 1.0
) -> Iterator[tuple[int, dict[str, Timing]]]:
    """Causal forward time of `fused_sv` and `fa2_forward` at each length, as they are measured."""
    for T in lengths:
        names = ("fused_sv", "fa2_forward")
        yield T, {k: time_forward(device, k, patience=patience, B=B, T=T, H=H, D=D) for k in names}
