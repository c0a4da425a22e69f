"""How long a view takes from a move to its new picture: `python benchmarks/redraw.py`, medians in milliseconds.

Moves that only look elsewhere, without the kernel runs that other controls start: what a hand feels at a slider, but
for the browser's own time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

from fa2lab import widgets
from fa2lab.live import View

MOVES = 40


def redraws(view: View, name: str, values: Iterable[int]) -> list[float]:
    """Seconds of `MOVES` moves of one control back and forth over some values, none of them twice in a row."""
    values = list(values)
    there_and_back = values + values[-2:0:-1]
    view.set(**{name: there_and_back[-1]})
    seconds = []
    for n in range(MOVES):
        begin = time.perf_counter()
        view.set(**{name: there_and_back[n % len(there_and_back)]})
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Print a line a view."""
    steps, tiles = widgets.step_through, range(1, 33)  # T=256 in tiles of 8×8: 32 steps
    cases = {
        "StepThrough, O, T=256": (steps(T=256, workgroup=31), "step", tiles),
        "StepThrough, dQ, T=256": (steps(T=256, fills="dQ", workgroup=31), "step", tiles),
        "StepThrough, dK, T=256": (steps(T=256, fills="dK", workgroup=0), "step", tiles),
        "MergeTree": (widgets.merge_tree(), "done", range(3)),
        "HeadGallery, query": (widgets.head_gallery(), "row", range(16, 32)),
        "ParityBench, row": (widgets.parity(row=0), "row", range(16)),
        "tiles, row": (widgets.tiles(), "row", range(16)),
    }
    for name, (view, control, values) in cases.items():
        seconds = redraws(view, control, values)
        print(f"{name:30} {1e3 * statistics.median(seconds):6.0f} ms, slowest {1e3 * max(seconds):6.0f}")
        view.close()


if __name__ == "__main__":
    main()
