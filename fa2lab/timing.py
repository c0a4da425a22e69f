"""When a measurement counts: the rule that the clock must have settled, and what a measured time says of itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

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


def settle(
    run: Callable[[int], float], *, batches: int = 5, patience: float = PATIENCE_SECONDS
) -> tuple[list[float], bool]:
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


def timed(run: Callable[[int], float], clock: str, *, patience: float = PATIENCE_SECONDS) -> Timing:
    """The `Timing` of `run`, as in `settle`, whose seconds are those of `clock`."""
    found, settled = settle(run, patience=patience)
    return Timing(statistics.median(found), min(found), max(found), len(found), clock, settled)
