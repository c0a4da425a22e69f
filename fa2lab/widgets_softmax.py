"""A slider through the online softmax of one row, over `reference` and `plot_softmax`."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets
import numpy as np

from fa2lab import data, plot, plot_softmax, reference
from fa2lab.live import View
from fa2lab.plot_softmax import Steps
from fa2lab.reference import State, merge

BLOCKS = (1, 2, 3, 4, 6, 8)
SIX_SCORES = np.log(2) * np.array([0.0, 2, 1, 0, 3, 1])  # exp of these is 1, 4, 2, 1, 8, 2: sums that fit on paper
SIX_VALUES = np.array([6.0, 1, 2, 4, 6, 3])


def _text() -> tuple[np.ndarray, np.ndarray]:
    """The last of 24 positions of a text, as it looks back at all of them."""
    q, k, v = data.make("text", T=24, H=1, D=16)
    s = reference.scores(q[0, -1:, 0].astype(np.float64), k[0, :, 0].astype(np.float64), 16**-0.5)
    return s[0], v[0, :, 0, 0]


# Name → scores and values, `(n,)` each.
ROWS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "six numbers": lambda: (SIX_SCORES, SIX_VALUES),
    "rising: the maximum moves at each key": lambda: (np.arange(12) / 2, np.arange(12.0)),
    "falling: the maximum comes first": lambda: (np.arange(12)[::-1] / 2, np.arange(12.0)),
    "equal: a plain average": lambda: (np.ones(12), np.arange(12.0)),
    "huge: exp alone would overflow": lambda: (100.0 * np.array([1, 9, 3, -4, 8, 9.001]), np.arange(6.0)),
    "text: a byte looks back": _text,
}


def walk(row: str = "six numbers", block: int = 1) -> Steps:
    """The online softmax of a named row (`ROWS`), `block` keys a step. Raises `ValueError` for an unknown name."""
    if row not in ROWS:
        raise ValueError(f"No row of scores is called {row!r}; there are {', '.join(map(repr, ROWS))}.")
    return walk_through(*ROWS[row](), block)


def walk_through(s, v, block: int = 1) -> Steps:
    """The same for scores `(n,)` and values `(n,)` of one's own. Raises `ValueError` for an empty row or block.

    Beside v each key carries a unit vector of its own. The weighted average of those is the row of weights itself, so
    that O and p come out of the one recurrence.
    """
    s, v = np.asarray(s, np.float64), np.asarray(v, np.float64)
    if s.ndim != 1 or s.shape != v.shape or not len(s):
        raise ValueError(f"s and v must be rows of the same length, at least 1; got shapes {s.shape} and {v.shape}.")
    if block < 1:
        raise ValueError(f"block must be at least 1 key; got {block}.")
    carried = np.column_stack([v, np.eye(len(s))])  # (n, 1 + n)
    states = [State.empty(carried.shape[1])]
    for first in range(0, len(s), block):
        states.append(merge(states[-1], State.of(s[first : first + block], carried[first : first + block])))
    m = np.array([state.m for state in states])
    return Steps(
        s=s,
        block=block,
        m=m,
        l=np.array([state.l for state in states]),
        alpha=np.concatenate([[np.nan], np.exp(m[:-1] - m[1:])]),
        out=np.array([np.nan, *(state.out[0] for state in states[1:])]),
        weights=[state.out[1:][: t * block] for t, state in enumerate(states)],
        label="reference.merge, NumPy float64",
    )


def at_step(walk: Steps, step: int) -> tuple[Steps, int]:
    """What `plot_softmax.steps` draws. Raises `ValueError` for a step that the walk does not have."""
    if not 0 <= step <= walk.n_steps:
        raise ValueError(f"step must be between 0 and {walk.n_steps}; got {step}.")
    return walk, step


def online_softmax(row: str = "six numbers", block: int = 1, step: int = 3) -> View:
    """A slider over the steps, with the row of scores and the block size to choose; starts where the arguments say."""
    whole = {"description_width": "initial"}  # no description is cut off
    wide, narrow = ipywidgets.Layout(width="420px"), ipywidgets.Layout(width="300px")
    first = walk(row, block).n_steps
    steps = ipywidgets.IntSlider(
        step,
        0,
        first,
        description="blocks taken in",
        tooltip="How many blocks the online softmax has seen",
        style=whole,
        layout=wide,
    )
    blocks = ipywidgets.SelectionSlider(
        options=BLOCKS,
        value=block,
        description="keys a block",
        tooltip="How many keys are taken in at once",
        style=whole,
        layout=narrow,
    )
    rows = ipywidgets.Dropdown(options=list(ROWS), value=row, description="row of scores", style=whole, layout=wide)

    def fit(_change) -> None:
        """Another row or block size, another number of steps; a slider beyond it goes to the end."""
        steps.max = walk(rows.value, blocks.value).n_steps

    for control in (rows, blocks):  # before the View listens, so that it never sees a step that is not there
        control.observe(fit, names="value")
    return View(
        {"step": steps, "block": blocks, "row": rows},
        compute=lambda step, block, row: at_step(walk(row, block), step),
        draw=lambda figure, shown: plot_softmax.steps(figure, *shown),
        figure=plot.figure(8.6, 6.2),
    )
