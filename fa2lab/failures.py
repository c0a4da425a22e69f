"""Public bugs of this trade, each as a wrong variant beside the right one, on the smallest input that shows it.

A wrong variant is the project's own `fa2_forward` with an edit or two, but for the last, which is a kernel of its own.
Each gives a plain number, no NaN and no error: that is what makes these bugs public ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa2lab import reference, source
from fa2lab.attention import attention
from fa2lab.engine import choose
from fa2lab.errors import KernelError, LimitError
from fa2lab.gpu import Device, Dispatch
from fa2lab.kernel import Kernel
from fa2lab.kernels import kernels
from fa2lab.parity import Comparison, compare
from fa2lab.results import Trace

ROW_LANES, ROWS = 16, 4
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Panel:
    """One quantity at a few places, `(n,)` each: what is expected, and what the right and the wrong variant gave."""

    title: str
    axis: str
    ticks: tuple[str, ...]
    expected: np.ndarray
    right: np.ndarray
    wrong: np.ndarray

    @property
    def parts_at(self) -> int | None:
        """The first place where the wrong variant is not the right one; None where they agree to the bit."""
        same = (self.right == self.wrong) | (np.isnan(self.right) & np.isnan(self.wrong))
        return None if same.all() else int(np.argmin(same))


@dataclass(frozen=True)
class Failure:
    """One bug. `edits` are those of `fa2_forward`; none for the subgroup, which has a kernel of its own."""

    name: str
    taken: str  # what was taken for granted
    why: str
    edits: tuple[tuple[str, str], ...] = ()
    arrays: Callable[[], Arrays] | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    axis: str = "query"
    ticks: tuple[str, ...] | None = None

    @property
    def wrong(self) -> Kernel:
        """The wrong variant of `fa2_forward`. Raises `KernelError` if an edit no longer finds its place."""
        kernel = kernels()["fa2_forward"]
        for old, new in self.edits:
            kernel = kernel.edited(old, new)
        return kernel


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the two variants of a failure gave on one device."""

    failure: Failure
    panels: tuple[Panel, ...]
    change: tuple[str, ...]  # lines of the kernel: "-" as they are right, "+" as they are wrong
    parts: str  # where the two part, in words
    label: str
    comparison: Comparison | None = None  # of the wrong variant with float64

    @property
    def breaks(self) -> bool:
        """Whether the two differ here."""
        return any(panel.parts_at is not None for panel in self.panels)


def _column(*numbers: float) -> np.ndarray:
    """One number a row, one batch, one head, one column: `(1, T, 1, 1)`."""
    return np.array(numbers, np.float32)[None, :, None, None]


def _still(n_q: int, values: np.ndarray) -> Arrays:
    """All scores 0, so that every row is the plain average of the values that it sees."""
    zeros = np.zeros_like(values)
    return zeros[:, :n_q], zeros, values


def _low_scores(key: float, *factors: float) -> Arrays:
    """Four equal keys with V = 1, 2, 3, 4, met by a query of each factor: O is 2.5, whatever the scores."""
    return _column(*factors), _column(*[key] * 4), _column(1, 2, 3, 4)


_HOW_MANY = "let n = min(max(seen, key0) - key0, BLOCK_K); // how many"
_SEEN = "let seen = keys_seen(row);"

FAILURES = (
    Failure(
        "finite sentinel",
        "No score is below -1e30, so a masked score may be -1e30.",
        "A masked key gets the score -1e30 in place of being left out, and the tile's padding is masked so. Scores "
        "above that are safe. At -1e30 the padding counts as much as the keys, and below it the padding takes all "
        "the weight: the row becomes 0, a plain number. Every finite float32 is a legal score, so whether a key is "
        "masked has to be asked of its position.",
        (
            (_HOW_MANY, "let n = BLOCK_K; // how many"),
            ("s[c] = score(lane, c);", "s[c] = select(-1e30, score(lane, c), key0 + c < seen);"),
        ),
        lambda: _low_scores(-1e30, 0.01, 0.1, 1.0, 10.0, 100.0),
        {"scale": 1.0, "block_q": 8, "block_k": 8},
        "the row's scores, four equal ones",
        ("-1e28", "-1e29", "-1e30", "-1e31", "-1e32"),
    ),
    Failure(
        "-inf guard",
        "A maximum below -1e9 means that the row saw no key.",
        "A row without keys has the maximum -inf, and exp(-inf - -inf) is NaN; so a guard puts 0 in its place. But "
        "this one knows the case by the size of the maximum. A row whose scores are all low looks the same to it: "
        "its weights are then exp(s - 0), which is 0, and a row that saw four keys is reported as one that saw "
        "none.",
        (
            (
                "let alpha = exp_shift(m - m_new);",
                "m_new = select(m_new, 0.0, m_new < -1e9);\n    let alpha = exp_shift(m - m_new);",
            ),
            ("select(o[d] / l, 0.0, seen == 0u)", "select(o[d] / l, 0.0, l == 0.0)"),
        ),
        lambda: _low_scores(-1.0, 6e4, 1e8, 2e9, 1e31),
        {"scale": 1.0, "block_q": 8, "block_k": 8},
        "the row's scores, four equal ones",
        ("-6e4", "-1e8", "-2e9", "-1e31"),
    ),
    Failure(
        "ragged tile",
        "The length is a multiple of the tile.",
        "Nine keys fill one tile of eight and one place of the next. The other seven hold zeros, and zeros are no "
        "harmless filling: a padded key has the score 0 and so a weight of exp(0 - m). Here every score is 0, so "
        "the average is taken over 16 places and not over 9: 45/16 = 2.8125 in place of 5.",
        ((_SEEN, "let seen = ceil_div(keys_seen(row), BLOCK_K) * BLOCK_K;"),),
        lambda: _still(9, _column(*range(1, 10))),
        {"block_q": 8, "block_k": 8},
    ),
    Failure(
        "base of L",
        "A logarithm is a logarithm.",
        "A GPU's exp2 and log2 are its fast ones, so kernels work in powers of two inside. This one also hands L "
        "out so: log2 Σ exp(S). O has no L in it and stays right to the bit, which is why a test of O alone passes. "
        "Then the backward pass computes P = exp(S - L) and gets weights that are too small, and merging two blocks "
        "by their L weighs them wrongly.",
        (("m + log_sum(l)", "m + log2(l)"),),
        lambda: _still(4, _column(1, 2, 3, 4)),
        {"causal": True, "block_q": 8, "block_k": 8},
    ),
    Failure(
        "skipped half tile",
        "Sixteen invocations, sixteen keys.",
        "The tile holds 32 keys and the workgroup 16 invocations. Code that was written for equal numbers takes one "
        "key an invocation and leaves the second half of each tile out. The averages look like averages: with V = "
        "0, 1, … 31 the result is 7.5, the mean of the first 16, in place of 15.5. Random values, whose means are "
        "all near 0, hide it.",
        ((_HOW_MANY, "let n = min(max(seen, key0) - key0, BLOCK_K / 2u); // how many"),),
        lambda: _still(32, _column(*range(32))),
        {"block_q": 16, "block_k": 32},
    ),
    Failure(
        "assumed subgroup",
        "A subgroup has at least 16 lanes.",
        "Sixteen lanes share a row and add up their parts by shuffles, as kernels written on one card do. A shuffle "
        "reaches only lanes of its own subgroup; how many those are is the device's affair: 4, 8, 16, 32 or 64. "
        "Past its edge WGSL promises no number and raises no error. So the size has to be measured, and what it "
        "does not reach has to go through workgroup memory.",
        axis="lane",
    ),
)


def named(name: str) -> Failure:
    """The failure of that name. Raises `KeyError` that lists the names."""
    for failure in FAILURES:
        if failure.name == name:
            return failure
    raise KeyError(f"No failure is called {name!r}; there are {', '.join(failure.name for failure in FAILURES)}.")


def run(name: str, *, device: Device | str | None = None) -> Outcome:
    """Run both variants of a failure. Raises `KernelError` where NumPy would have to run WGSL."""
    failure = named(name)
    return _run_edited(failure, device) if failure.edits else _run_subgroup(failure, device)


def _run_edited(failure: Failure, device: Device | str | None) -> Outcome:
    arrays, options = failure.arrays(), dict(failure.options)
    blocks = {name: options.pop(name) for name in ("block_q", "block_k")}
    truth = reference.attention(*arrays, **options)
    sound, broken = kernels()["fa2_forward"], failure.wrong
    right, wrong = (
        attention(*arrays, **options, **blocks, kernel=kernel, trace=True, device=device) for kernel in (sound, broken)
    )
    compare(right, truth).check()
    ticks = failure.ticks or tuple(map(str, range(truth.problem.Tq)))
    panels = tuple(
        Panel(title, failure.axis, ticks, *(getattr(x, name).ravel() for x in (truth, right, wrong)))
        for name, title in (("out", "O of each row"), ("lse", "L = ln Σ exp(S) of each row"))
    )
    found = compare(wrong, truth)
    change = _change(sound.text(), broken.text())
    parts = f"{_first(panels)} {_in_the_walk(right.trace, wrong.trace)}"
    return Outcome(failure, panels, change, parts, right.label, found)


def _first(panels: tuple[Panel, ...]) -> str:
    """Where the outputs part, in words."""
    panel = next((panel for panel in panels if panel.parts_at is not None), None)
    if panel is None:
        return "They give the same numbers here."
    i = panel.parts_at
    return (
        f"{panel.title.split(' ')[0]} first parts at {panel.axis} {panel.ticks[i]}: "
        f"{panel.wrong[i]:.7g} in place of {panel.right[i]:.7g}."
    )


def _in_the_walk(right: Trace, wrong: Trace) -> str:
    """Where the kernels' own records part, in words."""
    places = []
    for order, name in enumerate(("m", "alpha", "l")):
        got, expected = (getattr(trace, name)[0, 0] for trace in (wrong, right))  # (Tq, n_tiles)
        places += [(int(tile), order, int(row), name) for row, tile in np.argwhere(got != expected)]
    if not places:
        return "Their walks over the tiles are the same to the bit: the mistake comes after."
    tile, _, row, name = min(places)
    got, expected = (getattr(trace, name)[0, 0, row, tile] for trace in (wrong, right))
    return f"In the walk it is {name} of query {row}, after K tile {tile}: {got:.7g} in place of {expected:.7g}."


def _change(right: str, wrong: str) -> tuple[str, ...]:
    """The lines that differ: `- 72 …` as it stands, `+ 72 …` as it is in the wrong variant; 1-based numbers."""
    old, new = right.splitlines(), wrong.splitlines()
    lines: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [f"- {i + 1:3} {old[i].strip()}" for i in range(a, b)]
            lines += [f"+ {i + 1:3} {new[i].strip()}" for i in range(c, d)]
    return tuple(lines)


def _run_subgroup(failure: Failure, device: Device | str | None) -> Outcome:
    device = choose(device)
    if device is None:
        raise KernelError("This failure is one of WGSL's subgroups and needs a GPU adapter, hardware or software.")
    size = device.subgroup_size
    if size is None:
        raise LimitError(f"{device.adapter} has no subgroups, so none can be assumed.")
    hoped, sound = subgroup_sums(device)
    lanes = np.arange(1, ROW_LANES + 1, dtype=np.float64)
    steps = [1 << i for i in range(ROW_LANES.bit_length() - 1)]
    so_far = np.array([lanes[: 2 * step].sum() for step in steps])
    panels = (
        Panel("the row's sum, in each of its lanes", "lane", tuple(map(str, range(ROW_LANES))),
              np.full(ROW_LANES, lanes.sum()), sound[-1, 0], hoped[-1, 0]),
        Panel("what lane 0 holds after each step", "step: how far the shuffle reaches", tuple(map(str, steps)),
              so_far, sound[:, 0, 0], hoped[:, 0, 0]),
    )  # fmt: skip
    if size >= ROW_LANES:
        parts = f"This device's subgroup holds {size}, nothing breaks here. One with 4 or 8 would part."
    else:
        parts = f"This device's subgroup holds {size}, so they part at the step that reaches {size} lanes far."
    text = source.read("subgroup_row_sum").splitlines()
    change = tuple(
        f"{mark} {i + 1:3} {text[i].strip()}"
        for mark, part in (("-", "sound += "), ("+", "hoped += "))
        for i in (next(i for i, line in enumerate(text) if part in line),)
    )
    return Outcome(failure, panels, change, parts, f"subgroup_row_sum on {device.adapter}")


def subgroup_sums(device: Device) -> tuple[np.ndarray, np.ndarray]:
    """Sums of rows of 1 … `ROW_LANES`, after each step: `(steps, ROWS, ROW_LANES)`; assumed, and measured."""
    values = np.tile(np.arange(1, ROW_LANES + 1, dtype=np.float32), ROWS)
    shape = (ROW_LANES.bit_length() - 1, ROWS, ROW_LANES)
    constants = {"ROW_LANES": ROW_LANES, "ROWS": ROWS}
    linked = source.link("subgroup_row_sum", (), constants, features=("subgroups",), dialect=device.dialect)
    with device.lock, device.buffers() as make:
        given, hoped, sound = make(values), make(4 * int(np.prod(shape))), make(4 * int(np.prod(shape)))
        bindings = ((given, "read"), (hoped, "read_write"), (sound, "read_write"))
        device.run([Dispatch(linked, bindings, (1, 1, 1))])
        return device.read(hoped, np.float32, shape), device.read(sound, np.float32, shape)
