"""The tiles view: a traced run of `fa2_forward`, walked by sliders. `walk` is the plain function under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import ipywidgets
from matplotlib.figure import Figure

from fa2lab import data, plot, plot_panels, reference
from fa2lab.attention import attention
from fa2lab.gpu import Device
from fa2lab.live import View
from fa2lab.parity import Comparison, compare_traces
from fa2lab.plot_sheet import Sheet
from fa2lab.results import Result, Trace
from fa2lab.tiles import TILES
from fa2lab.widgets_controls import choice, sheet_view, slider, start_at, tick, tile_option

WALK_SIZE = (10.4, 7.0)  # inches


@dataclass(frozen=True, eq=False)
class Walk:
    """One traced run, the float64 walk over the same tiles, and the head and row to look at."""

    result: Result
    exact: Trace
    comparison: Comparison
    head: int
    row: int
    labels: Sequence[str] | None

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `WALK_SIZE`; returns the picture in one sentence."""
        return self.show(Sheet(figure))

    def show(self, sheet: Sheet) -> str:
        """Draw on a sheet of walks, anew only where it shows something else. Returns one sentence."""
        return plot_panels.walk(sheet, self.result, self.exact, head=self.head, row=self.row, labels=self.labels)

    @property
    def words(self) -> str:
        """The verdict on the trace, as HTML."""
        return self.comparison._repr_html_()


def walk(
    *,
    T: int = 96,
    H: int = 2,
    D: int = 16,
    head: int = 0,
    row: int = 91,
    causal: bool = True,
    pattern: str = "text",
    tile: tuple[int, int] | tuple[()] = (),
    device: Device | str | None = None,
) -> Walk:
    """Run `fa2_forward` on a named input with its trace, and NumPy beside it.

    tile: `(block_q, block_k)`, or () for what the planner takes. Raises `IndexError` for a head or row that is none.
    """
    if not (0 <= head < H and 0 <= row < T):
        raise IndexError(f"head must be below H={H} and row below T={T}; got head {head} and row {row}.")
    # Head and row choose what is shown, not what is computed: sliding them runs no kernel.
    result, exact, comparison = _traced(T, H, D, causal, pattern, tile, device)
    labels = list(data.SAMPLE_TEXT.read_bytes()[:T].decode("latin-1")) if pattern == "text" else None
    return Walk(result, exact, comparison, head, row, labels)


@lru_cache(maxsize=1)
def _traced(T, H, D, causal, pattern, tile, device) -> tuple[Result, Trace, Comparison]:
    arrays = data.make(pattern, T=T, H=H, D=D)
    block_q, block_k = tile or (None, None)
    options = dict(block_q=block_q, block_k=block_k, return_attn=True, trace=True)
    result = attention(*arrays, causal=causal, kernel="fa2_forward", device=device, **options)
    trace = result.trace
    exact = reference.tiled(*arrays, block_q=trace.block_q, block_k=trace.block_k, causal=causal).trace
    comparison = compare_traces(result, reference.attention(*arrays, causal=causal))
    return result, exact, comparison


def tiles(*, device: Device | str | None = None, **values) -> View:
    """A view over `walk`: weights of a head, its tile map, and m, l and alpha of a row as the kernel recorded them.

    values: where the sliders start, by the names of `walk`'s arguments.
    """
    controls = {
        "T": slider("T length", "Number of queries and keys", 96, 1, 256),
        "H": slider("H heads", "Number of heads", 2, 1, 8),
        "D": slider("D head size", "Numbers in one head's vectors", 16, 1, 128),
        "head": slider("head", "Head that is shown", 0, 0, 1, live=True),
        "row": slider("row", "Query row whose trace is shown, by a click as well", 91, 0, 95, live=True),
        "tile": choice("tile Br×Bc", "Queries by keys of a tile", [("planned", ()), *map(tile_option, TILES)], ()),
        "pattern": choice("input", "Pattern of the input arrays", list(data.PATTERNS), "text"),
        "causal": tick("causal mask", "Each query sees itself and the keys before it", True),
    }
    ipywidgets.dlink((controls["H"], "value"), (controls["head"], "max"), lambda H: H - 1)
    ipywidgets.dlink((controls["T"], "value"), (controls["row"], "max"), lambda T: T - 1)
    start_at(controls, values)
    return sheet_view(
        controls,
        lambda **moved: walk(**moved, device=device),
        WALK_SIZE,
        words_height="162px",
        at=place,
    )


def place(figure: Figure, x: float, y: float) -> dict[str, int]:
    """The row of the weights under display coordinates."""
    found = plot.under(figure.axes[:1], x, y)
    return {"row": round(found[2])} if found else {}
