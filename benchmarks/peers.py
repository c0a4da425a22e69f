"""This project's attention beside others', measured in one run on one machine: `python benchmarks/peers.py`.

Everyone gets the same problems and the same numbers, B=4 H=16. Each is warmed up by the bench's own rule, and then all
take turns, so that no one meets a cooler card. Nothing is installed: what is absent is said to be.

  --only ours torch onnx aule     those parts only            --readme FILE   put the table between its markers
  --json FILE                     everything, as JSON         --adapter NAME  what our kernels run on
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # runs from a clone, installed or not

import peers_table  # noqa: E402
import subjects  # noqa: E402
from subjects import Case, Runner, Subject  # noqa: E402

import fa2lab as fa  # noqa: E402
from fa2lab.ceilings import Ceilings, ceilings  # noqa: E402
from fa2lab.timing import BATCH_SECONDS, settle  # noqa: E402

PARTS = ("ours", "torch", "onnx", "aule")
B, H = 4, 16
SHAPES = ((2048, 64), (4096, 64), (2048, 128))  # (T, D)
FULL_SHAPES = ((4096, 64),)  # of the cases without a mask
PATIENCE, ROUNDS, SLOW_ROUNDS, SLOW = 1.5, 5, 3, 0.2  # seconds of warm-up; turns of each, fewer where one takes SLOW
BUDGET = 230.0  # seconds: what has not begun by then is left out, and said so
LONG = dict(B=1, T=65_536, H=4, D=64)  # of the memory that gradients take


@dataclass(frozen=True)
class Result:
    """One subject at one case: the median time and its spread, or the reason why there is none."""

    subject: str
    case: Case
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    clock: str = ""
    settled: bool = True
    error: float | None = None
    note: str = ""
    reason: str = ""

    @property
    def tflops(self) -> float | None:
        """10¹² operations a second."""
        return self.seconds and self.case.flops / self.seconds / 1e12

    def __str__(self) -> str:
        if self.seconds is None:
            return f"  {self.subject:<50} {self.reason}"
        spread = (self.high - self.low) / self.seconds
        note = f"  {self.note}" if self.note else ""
        warm = "" if self.settled else "  not settled"
        return (
            f"  {self.subject:<50} {self.tflops:8.3g} TFLOP/s  {1e3 * self.seconds:9.3f} ms  ±{spread / 2:.1%}  "
            f"error {self.error:.1e}{note}{warm}"
        )


def cases() -> list[Case]:
    """What is measured, the most wanted first."""
    masked = [Case(B, H, T, D, True, way) for way in ("forward", "forward+backward") for T, D in SHAPES]
    return masked + [Case(B, H, T, D, False, way) for way in ("forward", "forward+backward") for T, D in FULL_SHAPES]


def measure(case: Case, everyone: list[Subject]) -> list[Result]:
    """Everyone at one case: each warmed up, then all in turn. One that fails does not stop the others."""
    found: dict[str, Result] = {}
    with ExitStack() as stack:
        running: dict[str, tuple[Runner, int, bool]] = {}
        for subject in everyone:
            try:
                runner = stack.enter_context(subject.open(case))
                running[subject.name] = (runner, *_warm(runner))
            except Exception as error:  # whatever a foreign library raises: it is that subject's answer
                found[subject.name] = Result(subject.name, case, reason=_reason(error))
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for turn in range(ROUNDS):
            for name, (runner, n, _) in list(running.items()):
                if turn >= SLOW_ROUNDS and seconds[name][0] > SLOW:
                    continue
                try:
                    seconds[name].append(runner.run(n) / n)
                except Exception as error:
                    found[name] = Result(name, case, reason=_reason(error))
                    del running[name]
        for name, (runner, _, settled) in running.items():
            times = seconds[name]
            middle = statistics.median(times)
            said = runner.clock, settled, runner.error, runner.note
            found[name] = Result(name, case, middle, min(times), max(times), *said)
    return [found[subject.name] for subject in everyone]


def _warm(runner: Runner) -> tuple[int, bool]:
    """How many runs make a batch, and whether the clock has settled."""
    if runner.long:
        return 1, True
    _, settled = settle(runner.run, batches=0, patience=PATIENCE)
    return max(1, round(BATCH_SECONDS / max(runner.run(1), 1e-7))), settled


def _reason(error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if isinstance(error, subjects.Absent) else f"{type(error).__name__}: {first}"[:160]


def products(adapter: str | None, only: tuple[str, ...]) -> tuple[Ceilings | None, float | None]:
    """Our ceilings, and the operations a second of PyTorch's float32 matrix product; None where there is none."""
    roof = theirs = None
    try:
        if "ours" in only:
            roof = ceilings(subjects.device(adapter, False))
            print(f"ceilings in WGSL: {roof}", flush=True)
    except Exception as error:
        print(f"ceilings in WGSL: {_reason(error)}", flush=True)
    try:
        if "torch" in only:
            times, _ = settle(subjects.torch_product(8192), patience=PATIENCE)
            theirs = 2 * 8192**3 / statistics.median(times)
            print(f"PyTorch's float32 product of 8192³: {theirs / 1e12:.1f} TFLOP/s", flush=True)
    except Exception as error:
        print(f"PyTorch's float32 product: {_reason(error)}", flush=True)
    return roof, theirs


def memory(adapter: str | None) -> dict[str, int] | None:
    """Bytes that forward and backward hold at most at T = 65536, by the device's own count; None where they fail."""
    try:
        arrays = fa.data.make("random", **LONG)
        dout = fa.data.make("random", seed=1, **LONG).q
        result, gradients = fa.attention_grad(*arrays, dout, causal=True, device=subjects.device(adapter, False))
        rows = 4 * LONG["B"] * LONG["H"] * LONG["T"]
        ends = sum(x.nbytes for x in (*arrays, dout, result.out, gradients.dq, gradients.dk, gradients.dv))
        copy = result.out.nbytes  # outputs are read back one after another
        return {"peak": gradients.device_bytes, "inputs and outputs": ends, "readback copy": copy, "B·H·T": rows}
    except Exception as error:
        print(f"memory at T={LONG['T']}: {_reason(error)}", flush=True)
        return None


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (all)")
    parser.add_argument("--adapter", help="a part of the name of the adapter of our kernels")
    parser.add_argument("--readme", metavar="FILE", help="write the table between its markers there")
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds in all ({BUDGET:.0f})")
    a = parser.parse_args(argv)
    if a.readme:
        peers_table.check(a.readme)  # before minutes of measuring
    begin = time.monotonic()
    made = {"date": date.today().isoformat(), "versions": subjects.versions(), "device": _device(a.adapter)}
    print(f"{made['device']}, {made['date']}, {', '.join(map(' '.join, made['versions'].items()))}", flush=True)
    roof, theirs = products(a.adapter, a.only)
    found: list[Result] = []
    for case in cases():
        everyone = [s for s in subjects.subjects(a.adapter) if s.part in a.only and case.direction in s.directions]
        if time.monotonic() - begin > a.budget:
            found += [Result(s.name, case, reason="left out: the time was up") for s in everyone]
            continue
        print(f"\n{case}", flush=True)
        found += measure(case, everyone)
        print("\n".join(str(result) for result in found[-len(everyone) :]), flush=True)
    held = memory(a.adapter) if "ours" in a.only else None
    aims = peers_table.aims(found, best_product(roof, theirs), held)
    print("\n" + peers_table.plain(aims), flush=True)
    if a.readme:
        peers_table.write(a.readme, peers_table.markdown(found, aims, made, roof, theirs))
    if a.json:
        Path(a.json).write_text(json.dumps(peers_table.record(found, aims, made, roof, theirs, held), indent=1) + "\n")
    print(f"\n{time.monotonic() - begin:.0f} s")
    return 0


def best_product(roof: Ceilings | None, theirs: float | None) -> float | None:
    """The ceiling of float32 arithmetic: the faster of both products, operations a second."""
    return max((x for x in (roof and roof.product_flops_per_second, theirs) if x), default=None)


def _device(adapter: str | None) -> str:
    try:
        found = subjects.device(adapter, False).adapter
        return f"{found.name}, {found.driver}"
    except fa.NoAdapterError as error:
        return f"no adapter for our kernels ({error})"


if __name__ == "__main__":
    sys.exit(main())
