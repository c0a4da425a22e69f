"""Long dispatches in pieces: boxes of workgroups of about a quarter of a second each, and a bar while they run.

Drivers reset a device that computes for seconds on end, a desktop freezes meanwhile, and nobody can interrupt it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

Triple = tuple[int, int, int]

PIECE_SECONDS = 0.25
# FLOP/s by adapter type that a dispatch is taken to reach until it has shown its pace: a software driver on two busy
# cores, and a slow kernel on a small GPU.
FIRST_GUESS = {"CPU": 1e8}
FIRST_GUESS_GPU = 1e10
START = 0.25  # the first piece's share of PIECE_SECONDS: the guess may be far off, and the driver may compile only now
GROWTH, SHRINKING = 16, 1 / 4  # how far a piece's size may be from that of the one before it
BAR_SECONDS, BAR_AFTER = 3.0, 1.0


@dataclass(frozen=True)
class Box:
    """A part of a grid: its first workgroup, and how many there are along x, y and z."""

    first: Triple
    count: Triple

    @property
    def size(self) -> int:
        """Workgroups in it."""
        return prod(self.count)

    def cut(self, most: float, limit: int, at_end: bool) -> tuple[Box, Box] | None:
        """A box of up to `most` workgroups from its beginning or end, and the rest; None where it need not be cut.

        The cut is along z, else y, else x, so the first box may need a further cut. No box has more than `limit`
        workgroups along an axis.
        """
        for axis in (2, 1, 0):
            extent = self.count[axis]
            fitting = max(1, min(limit, int(most / (self.size // extent))))
            if fitting < extent:
                keep = -(-extent // -(-extent // fitting))  # equal parts rather than a crumb at the end
                start = extent - keep if at_end else 0
                piece = self._part(axis, start, keep)
                rest = self._part(axis, 0 if at_end else keep, extent - keep)
                return piece, rest
        return None

    def _part(self, axis: int, start: int, extent: int) -> Box:
        first, count = list(self.first), list(self.count)
        first[axis] += start
        count[axis] = extent
        return Box(tuple(first), tuple(count))


class Cutter:
    """Cuts a grid into boxes while they run, each about as large as `PIECE_SECONDS` allow.

    Every mask makes the work of a workgroup grow or shrink along the grid. Pieces come from both ends in turn, so the
    slower of the last two tells what the workgroups between them may take.
    """

    def __init__(self, grid: Triple, limit: int, flops: float, pace: float):
        self.grid, self.limit = grid, limit
        self.workgroup_flops = flops / prod(grid)
        self.most = START * PIECE_SECONDS / max(pace * self.workgroup_flops, 1e-12)  # workgroups of the next box
        self._costs: list[float] = []  # seconds a workgroup, box by box

    @property
    def pace(self) -> float:
        """Seconds a FLOP, as the last boxes took it."""
        return max(self._costs[-2:]) / self.workgroup_flops

    def run(self, box_seconds: Callable[[Box], float]) -> None:
        """Call `box_seconds` with box after box until the whole grid is done; it runs one and says how long it took."""
        waiting, at_end = [Box((0, 0, 0), self.grid)], False
        while waiting:
            box = waiting.pop()
            if parts := box.cut(self.most, self.limit, at_end):
                piece, rest = parts
                waiting += [rest, piece]
                at_end = not at_end
            else:
                self._costs.append(box_seconds(box) / box.size)
                if len(self._costs) > 1:
                    fitting = PIECE_SECONDS / max(*self._costs[-2:], 1e-12)
                    self.most = min(max(fitting, SHRINKING * self.most), GROWTH * self.most)


@contextmanager
def ctrl_c_between() -> Iterator[Callable[[], None]]:
    """A block in which Ctrl-C is heard where the yielded function is called, and at the end: KeyboardInterrupt.

    Inside a driver's call it may land in a callback, where Python drops it. A second Ctrl-C does not wait. Threads
    other than the main one, and programs that handle the signal themselves, keep their ways.
    """
    heard = []

    def hear(*_) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(True)

    def check() -> None:
        if heard:
            raise KeyboardInterrupt

    usual = signal.default_int_handler
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is usual
    if ours:
        signal.signal(signal.SIGINT, hear)
    try:
        yield check
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)
    check()


class Progress:
    """How far `flops` of work are, and a bar on stderr once the whole is seen to take more than `BAR_SECONDS`.

    A context manager: at its end, whatever happened, the bar goes away. `TQDM_DISABLE=1` keeps it from coming.
    """

    def __init__(self, flops: float, label: str):
        self.flops, self.label = flops, label
        self.done = 0.0
        self._bar = None
        self._begin = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def advance(self, flops: float) -> None:
        """So much more is done."""
        self.done += flops
        if self._bar is not None:
            self._bar.update(flops)
            return
        seconds = time.perf_counter() - self._begin
        if seconds > BAR_AFTER and seconds * self.flops > BAR_SECONDS * self.done and self.done < self.flops:
            self._bar = self._open()

    def reach(self, flops: float) -> None:
        """So much is done in all."""
        self.advance(flops - self.done)

    def _open(self):
        from tqdm import tqdm  # at first use: most calls are over before its import would be

        form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        return tqdm(total=self.flops, initial=self.done, desc=self.label, bar_format=form, mininterval=0.5, leave=False)

    def __exit__(self, *exception) -> None:
        if self._bar is not None:
            self._bar.close()
