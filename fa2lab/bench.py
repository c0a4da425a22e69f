"""How long kernels take: the dispatches alone, on data that stands on the device already."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from fa2lab.data import make
from fa2lab.errors import LimitError
from fa2lab.gpu import Device
from fa2lab.launch import resident
from fa2lab.plan import plan
from fa2lab.problem import pose

# Warm enough: so many batches in a row agree so closely, and so much time has passed. GPUs idle at a low clock.
BATCH_SECONDS, WARM_SECONDS, AGREEING, AGREEMENT = 0.03, 0.5, 4, 0.01
PATIENCE_SECONDS = 5.0  # a machine that is busy with other things never settles


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: the median over `batches` and their spread, and by which clock."""

    seconds: float
    low: float
    high: float
    batches: int
    clock: str  # "timestamp queries" or "wall clock"
    settled: bool  # whether the last batches agreed before patience ran out

    def __str__(self) -> str:
        note = "" if self.settled else ", not settled"
        return f"{1e3 * self.seconds:.3f} ms ({1e3 * self.low:.3f} to {1e3 * self.high:.3f}, {self.clock}{note})"


def settle(run, *, batches: int = 5, patience: float = PATIENCE_SECONDS) -> tuple[list[float], bool]:
    """Seconds per run of `batches` batches, after `run(n)`, which does n runs and returns their seconds, has settled.

    Settled means: the last four batches of about 30 ms agree within 1 %, and half a second has passed.
    """
    single = max(run(1), 1e-7)
    n = max(1, round(BATCH_SECONDS / single))
    seen, spent, settled = [], single, False
    while spent < patience and not settled:
        seconds = run(n)
        spent += seconds
        seen.append(seconds / n)
        last = seen[-AGREEING:]
        agree = len(last) == AGREEING and max(last) - min(last) <= AGREEMENT * max(last)
        settled = agree and spent >= WARM_SECONDS
    return [run(n) / n for _ in range(batches)], settled


def time_forward(device: Device, kernel: str, *, patience: float = PATIENCE_SECONDS, **sizes) -> Timing:
    """The time of one causal forward of `kernel` on `device`; `sizes` as in `fa.data.make`. Raises as `plan` does."""
    arrays = make("random", **sizes)
    problem, *_ = pose(*arrays, causal=True)
    planned = plan(problem, device.limits, kernel)
    if len(planned.chunks) != 1:
        raise LimitError(f"{problem} takes {len(planned.chunks)} launches on this device; only single ones are timed.")
    with device.lock, resident(planned, dict(zip("qkv", arrays, strict=True)), device) as dispatches:
        found, settled = settle(lambda n: device.time(dispatches, n), patience=patience)
    return Timing(statistics.median(found), min(found), max(found), len(found), device.clock, settled)


def crossover(
    device: Device, *, lengths=(32, 64, 128, 256, 512, 1024), B: int = 1, H: int = 4, D: int = 32, patience: float = 1.0
) -> Iterator[tuple[int, dict[str, Timing]]]:
    """Causal forward time of `fused_sv` and `fa2_forward` at each length, as they are measured."""
    for T in lengths:
        kernels = ("fused_sv", "fa2_forward")
        yield T, {k: time_forward(device, k, patience=patience, B=B, T=T, H=H, D=D) for k in kernels}
