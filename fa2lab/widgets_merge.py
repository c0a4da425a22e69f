"""MergeTree: split a row of scores anywhere, merge in any order, and see (m, l, O) and float32's rounding at each node.

`merges` is the plain function under the view.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ipywidgets
import numpy as np
from matplotlib.figure import Figure

from fa2lab import plot_merge
from fa2lab.live import View
from fa2lab.merge import ORDERS, Tree, split_and_merge
from fa2lab.plot_merge import Joint
from fa2lab.plot_sheet import Sheet
from fa2lab.widgets_controls import STYLE, choice, sheet_view, slider, start_at
from fa2lab.widgets_softmax import ROWS

MERGE_SIZE = (10.8, 6.2)  # inches
MOST_SPLITS = 8
BY_HAND = "by hand"
_NONE = np.zeros(12, bool)


def _some() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return 2 * rng.standard_normal(12), rng.standard_normal(12)


def _masked(*keys: slice) -> np.ndarray:
    masked = _NONE.copy()
    for some in keys:
        masked[some] = True
    return masked


# Name → scores, values and which keys are masked, `(n,)` each. What stands at a masked key never counts.
SPLIT_ROWS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray, np.ndarray]]] = {
    **{name: lambda row=row: (*row(), np.zeros(len(row()[0]), bool)) for name, row in ROWS.items()},
    "tenths: numbers that no float holds": lambda: (*_some(), _NONE),
    "swallowed: small terms vanish beside a large one": lambda: (
        np.array([0.0] + [-18.4] * 11),
        np.array([1.0] + [2.0] * 11),
        _NONE,
    ),
    "masked: a piece that sees nothing": lambda: (*_some(), _masked(slice(4, 8))),
    "all masked: the identity with itself": lambda: (*_some(), _masked(slice(None))),
    "very low: exp alone would be 0": lambda: (np.full(12, -6e4), np.arange(12.0), _NONE),
}


@dataclass(frozen=True, eq=False)
class Merges:
    """A split row after some merges, and what all merges give in each named order."""

    tree: Tree
    name: str
    wholes: dict[str, Tree]

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `MERGE_SIZE`; returns the picture in one sentence."""
        return self.show(Sheet(figure))

    def show(self, sheet: Sheet) -> str:
        """Draw on a sheet of merges, anew only where it shows something else. Returns one sentence."""
        tree = self.tree
        label = f"{self.name}; reference.merge, NumPy float32 beside float64"
        return plot_merge.tree(sheet, tree.s, tree.v, tree.masked, joints(tree), n_splits=tree.n_splits, label=label)

    @property
    def words(self) -> str:
        """The newest node's numbers in both precisions, and what other orders give in float32, as HTML."""
        node = self.tree.nodes[-1]
        lines = []
        for name in ("m", "l", "O"):
            narrow, wide = (
                (state.out[0] if name == "O" else getattr(state, name)) for state in (node.narrow, node.wide)
            )
            lines.append(
                f"<tr><th>{name}</th><td>{_digits(narrow, 9)}</td><td>{_digits(wide, 13)}</td>"
                f"<td>{_digits(node.apart(name), 2)}</td></tr>"
            )
        keys = f"key {node.first}" if node.first == node.last else f"keys {node.first} to {node.last}"
        head = f"<tr><th>{keys}</th><th>float32</th><th>float64</th><th>apart, relative</th></tr>"
        style = "border-spacing:14px 0;text-align:left;line-height:1.35;font-variant-numeric:tabular-nums"
        ends = []
        for order, whole in self.wholes.items():
            end = whole.nodes[-1].narrow
            ends.append(f"{html.escape(order)} l {_digits(end.l, 9)} O {_digits(end.out[0], 9)}")
        return f'<table style="{style}">{head}{"".join(lines)}</table><b>All merged, float32:</b> {"; ".join(ends)}'


def _digits(x, n: int) -> str:
    return f"{x:.{n}g}".replace("-inf", "−∞")


def joints(tree: Tree) -> list[Joint]:
    """The nodes of a tree as they are drawn."""
    drawn = []
    for node in tree.nodes:
        shrinks = None
        if node.halves is not None:
            # A half that sees nothing has nothing to shrink: its l and O are 0, whatever they are multiplied by.
            halves = (tree.nodes[half].wide.m for half in node.halves)
            shrinks = tuple(1.0 if m == node.wide.m else float(np.exp(m - node.wide.m)) for m in halves)
        m, l, out = float(node.wide.m), float(node.wide.l), float(node.wide.out[0])  # noqa: E741
        narrow = float(node.narrow.l), float(node.narrow.out[0])
        errors = node.apart("l"), node.apart("O")
        drawn.append(Joint(node.first, node.last, node.level, node.halves, m, l, out, shrinks, narrow, *errors))
    return drawn


def even_cuts(n: int, parts: int) -> tuple[int, ...]:
    """Where to cut `n` keys into `parts` splits that are as even as can be."""
    return tuple(sorted({round(n * i / parts) for i in range(1, parts)} - {0, n}))


def merges(
    *,
    row: str = "six numbers",
    cuts: Sequence[int] = (2, 4),
    order: str = "left to right",
    seed: int = 0,
    by_hand: Sequence[int] = (),
    done: int = 2,
) -> Merges:
    """Split a named row (`SPLIT_ROWS`) before the keys `cuts` and merge, `done` times.

    order: a name of `ORDERS`, or `"by hand"` for `by_hand`, the cuts in the order in which they are merged across.
    seed: of the random order. Raises `ValueError` for an unknown row or order, more than `MOST_SPLITS` splits, a cut or
    merge that cannot be, and more merges than there are.
    """
    if row not in SPLIT_ROWS:
        raise ValueError(f"No row of scores is called {row!r}; there are {', '.join(map(repr, SPLIT_ROWS))}.")
    if order != BY_HAND and order not in ORDERS:
        raise ValueError(f"No order is called {order!r}; there are {', '.join(map(repr, (*ORDERS, BY_HAND)))}.")
    if len(cuts) >= MOST_SPLITS:
        raise ValueError(f"At most {MOST_SPLITS} splits can be shown, so {MOST_SPLITS - 1} cuts; got {len(cuts)}.")
    s, v, masked = SPLIT_ROWS[row]()
    path = tuple(by_hand) if order == BY_HAND else ORDERS[order](cuts, seed)
    if not 0 <= done <= len(path):
        raise ValueError(f"done must be between 0 and {len(path)}, the merges of this order; got {done}.")
    tree = split_and_merge(s, v, cuts, path[:done], masked=masked)
    return Merges(
        tree, row, {name: split_and_merge(s, v, cuts, way(cuts, seed), masked=masked) for name, way in ORDERS.items()}
    )


def keys_of(text: str) -> tuple[int, ...]:
    """The keys that a field names, separated by commas or blanks. Raises `ValueError` for what is no whole number."""
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        raise ValueError(f"Keys are whole numbers, separated by commas, as in 2, 4; got {text!r}.") from None


def _text(keys: Sequence[int]) -> str:
    return ", ".join(map(str, keys))


class _ByHand:
    """A button a cut, to merge across it, and one to take the last merge back. They move the view's controls."""

    def __init__(self, controls: dict[str, ipywidgets.Widget]):
        self._controls = controls
        slim = {"width": "76px"}
        self.buttons = [ipywidgets.Button(layout=dict(slim)) for _ in range(MOST_SPLITS - 1)]
        self.undo = ipywidgets.Button(description="take back", tooltip="Undo the last merge", layout={"width": "96px"})
        for number, button in enumerate(self.buttons):
            button.on_click(lambda _, number=number: self.press(number))
        self.undo.on_click(lambda _: self._go(self._path()[:-1]))
        says = ipywidgets.Label("merge the neighbours at key")
        self.widget = ipywidgets.HBox(
            [says, *self.buttons, self.undo], layout=ipywidgets.Layout(flex_flow="row wrap", min_height="36px")
        )
        self.offer()

    def _path(self) -> tuple[int, ...]:
        """The merges that are shown."""
        c = {name: control.value for name, control in self._controls.items()}
        cuts = keys_of(c["cuts"])
        path = keys_of(c["by_hand"]) if c["order"] == BY_HAND else ORDERS[c["order"]](cuts, c["seed"])
        return path[: c["done"]]

    def press(self, number: int) -> None:
        """Merge across the cut of that button, after the merges that are shown."""
        self._go((*self._path(), keys_of(self._controls["cuts"].value)[number]))

    def _go(self, path: tuple[int, ...]) -> None:
        """Each of these moves leaves a state that can be shown."""
        c = self._controls
        if c["order"].value == BY_HAND:
            c["done"].value = min(c["done"].value, len(path))
        c["by_hand"].value = _text(path)
        c["order"].value = BY_HAND
        c["done"].value = len(path)

    def offer(self, _change=None) -> None:
        """A button for each cut, pale where its neighbours are merged already; none where a field cannot be read."""
        try:
            cuts, path = keys_of(self._controls["cuts"].value), self._path()
        except ValueError:
            cuts, path = (), ()
        for number, button in enumerate(self.buttons):
            here = number < len(cuts)
            button.layout.display = None if here else "none"
            button.description = f"{cuts[number]}" if here else ""
            button.tooltip = f"Merge the two nodes that meet at key {cuts[number]}" if here else ""
            button.disabled = not here or cuts[number] in path
        self.undo.disabled = not path


def merge_tree(**values) -> View:
    """A view over `merges`: fields and a slider for the cuts, a list of orders, and a button a merge to choose by hand.

    values: where the controls start, by the names of `merges`' arguments.
    """
    start = dict(merges.__kwdefaults__) | values
    start |= {name: _text(start[name]) for name in ("cuts", "by_hand")}
    field = dict(continuous_update=False, **STYLE)
    controls = {
        "row": choice("row", "Scores and values that are split", list(SPLIT_ROWS), "six numbers"),
        "cuts": ipywidgets.Text(description="cut before", tooltip="Keys before which the row is cut: 2, 4", **field),
        "order": choice("order", "In which order neighbours are merged", [*ORDERS, BY_HAND], "left to right"),
        "seed": slider("seed", "Which of the random orders", 0, 0, 99, live=True),
        "by_hand": ipywidgets.Text(
            description="by hand", tooltip="The merges made by hand, each by the key at which two nodes met", **field
        ),
        "done": slider("merges", "How many merges have been made", 0, 0, MOST_SPLITS, live=True),
    }
    parts = slider("even splits", "Cut the row into so many even splits", 1, 1, MOST_SPLITS, live=True)
    start_at(controls, start)
    c = controls

    def length() -> int:
        return len(SPLIT_ROWS[c["row"].value]()[0])

    def fit(change=None) -> None:
        """Another row or other cuts, other merges. Cuts past the end of a shorter row are made anew."""
        try:
            cuts, hand = keys_of(c["cuts"].value), keys_of(c["by_hand"].value)
        except ValueError:
            return  # the view says it
        if change is not None and change["owner"] is c["row"] and any(cut >= length() for cut in cuts):
            c["cuts"].value = _text(even_cuts(length(), len(cuts) + 1))  # which calls `fit` again
            return
        if change is not None and change["owner"] is c["cuts"] and not set(hand) <= set(cuts):
            c["by_hand"].value = ""
            return
        all_done = c["done"].value == c["done"].max
        c["done"].max = len(hand) if c["order"].value == BY_HAND else len(cuts)
        if all_done and c["order"].value != BY_HAND:
            c["done"].value = c["done"].max

    def cut_evenly(change) -> None:
        c["cuts"].value = _text(even_cuts(length(), change["new"]))

    fit()
    c["done"].value = start["done"]
    parts.value = min(MOST_SPLITS, len(keys_of(c["cuts"].value)) + 1)
    parts.observe(cut_evenly, names="value")
    for name in ("row", "cuts", "order", "by_hand"):  # before the View listens: it never sees a merge that is not there
        c[name].observe(fit, names="value")
    by_hand = _ByHand(controls)
    for control in controls.values():
        control.observe(by_hand.offer, names="value")
    rows = ipywidgets.Layout(flex_flow="row wrap")

    def layout(widgets: list[ipywidgets.Widget]) -> ipywidgets.Widget:
        row, cuts, *others = widgets
        return ipywidgets.VBox([ipywidgets.HBox([row, parts, cuts, *others], layout=rows), by_hand.widget])

    def compute(cuts: str, by_hand: str, **moved) -> Merges:
        return merges(cuts=keys_of(cuts), by_hand=keys_of(by_hand), **moved)

    return sheet_view(
        controls,
        compute,
        MERGE_SIZE,
        words_height="136px",
        layout=layout,
    )
