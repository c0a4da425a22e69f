"""A row of scores split anywhere and merged in any order, in float32 beside float64.

m = max(m_a, m_b), l = l_a exp(m_a - m) + l_b exp(m_b - m), O alike. A merge is named by the cut that it takes away: the
key at which its right half begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fa2lab.reference import State, merge


@dataclass(frozen=True, eq=False)
class Node:
    """Some neighbouring keys taken together: `first` to `last`, from one split or by merging two others."""

    first: int
    last: int
    narrow: State  # in float32
    wide: State  # the same merges in float64
    halves: tuple[int, int] | None = None  # the numbers of the nodes it was merged from, None for a split
    level: int = 0  # 0 for a split, else one above the higher half

    @property
    def sees_nothing(self) -> bool:
        """Whether all its keys are masked: m = -inf, l = 0, O = 0, the identity of the merge."""
        return bool(self.wide.l == 0)

    def apart(self, name: str) -> float:
        """How far float32's `"m"`, `"l"` or `"O"` is from float64's, relative to float64's; 0 where they are the same.

        Of O, relative to its largest entry.
        """
        narrow, wide = (
            np.asarray(state.out if name == "O" else getattr(state, name), np.float64)
            for state in (self.narrow, self.wide)
        )
        with np.errstate(invalid="ignore"):
            apart = np.where(narrow == wide, 0.0, np.abs(narrow - wide))
        largest = np.abs(wide).max(initial=0.0)
        return float(apart.max(initial=0.0) / (largest or 1.0))


@dataclass(frozen=True, eq=False)
class Tree:
    """The splits of a row, from left to right, and then the nodes that came of the merges, in their order."""

    s: np.ndarray  # (n,), float32
    v: np.ndarray  # (n,), float32
    masked: np.ndarray  # (n,), boolean
    cuts: tuple[int, ...]
    nodes: tuple[Node, ...]

    @property
    def n_splits(self) -> int:
        """How many pieces the row was cut into."""
        return len(self.cuts) + 1

    @property
    def roots(self) -> tuple[int, ...]:
        """The numbers of the nodes that no merge has taken yet, from left to right."""
        used = {half for node in self.nodes for half in node.halves or ()}
        return tuple(sorted(set(range(len(self.nodes))) - used, key=lambda i: self.nodes[i].first))

    @property
    def open_cuts(self) -> tuple[int, ...]:
        """The cuts that are still there, from left to right: the merges to choose from."""
        return tuple(self.nodes[root].first for root in self.roots[1:])


def split_and_merge(s, v, cuts: Sequence[int], order: Sequence[int], *, masked=None) -> Tree:
    """Split a row of scores before the keys `cuts`, and merge across these in the order given, which may stop early.

    s, v: `(n,)`, rounded to float32 first, as every kernel gets them; both precisions compute from the same numbers.
    masked: boolean `(n,)`, the keys that this row does not see; whatever s and v hold there never counts.
    Raises `ValueError` for rows that are not of one length, cuts that are not inside the row or not rising, and a merge
    across what is no cut or no longer one.
    """
    s, v = (np.asarray(x, np.float32) for x in (s, v))
    masked = np.zeros(s.shape, bool) if masked is None else np.asarray(masked, bool)
    if s.ndim != 1 or not s.shape == v.shape == masked.shape or not len(s):
        raise ValueError(
            f"s, v and masked must be rows of one length, at least 1; got {s.shape}, {v.shape} and {masked.shape}."
        )
    cuts = tuple(int(cut) for cut in cuts)
    if list(cuts) != sorted(set(cuts)) or not all(0 < cut < len(s) for cut in cuts):
        raise ValueError(
            f"Cuts must rise and lie between 1 and {len(s) - 1}, the last key; got {', '.join(map(str, cuts))}."
        )
    nodes = [
        Node(first, end - 1, *(State.of(*_seen(s, v, masked, first, end), dtype) for dtype in (np.float32, np.float64)))
        for first, end in zip((0, *cuts), (*cuts, len(s)), strict=True)
    ]
    here = list(range(len(nodes)))  # the nodes that are not merged yet, from left to right
    for cut in order:
        right = next((i for i, at in enumerate(here) if i and nodes[at].first == cut), None)
        if right is None:
            left = ", ".join(str(nodes[at].first) for at in here[1:]) or "none"
            raise ValueError(f"There is no cut before key {cut} to merge across; there are: {left}.")
        halves = here[right - 1], here[right]
        a, b = (nodes[half] for half in halves)
        both = merge(a.narrow, b.narrow), merge(a.wide, b.wide)
        here[right - 1 : right + 1] = [len(nodes)]
        nodes.append(Node(a.first, b.last, *both, halves, 1 + max(a.level, b.level)))
    return Tree(s, v, masked, cuts, tuple(nodes))


def _seen(s, v, masked, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    seen = ~masked[first:end]
    return s[first:end][seen], v[first:end][seen]


def left_to_right(cuts: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """As a kernel walks the K tiles."""
    return tuple(cuts)


def right_to_left(cuts: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """The same from the other end."""
    return tuple(reversed(cuts))


def balanced(cuts: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """Neighbours in pairs, then the pairs in pairs: as workgroups do that share a row."""
    order, left = [], list(cuts)
    while left:
        order += left[::2]
        left = left[1::2]
    return tuple(order)


def shuffled(cuts: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """Any order, the same for the same seed."""
    return tuple(int(cut) for cut in np.random.default_rng(seed).permutation(np.array(cuts, int)))


ORDERS: dict[str, Callable[..., tuple[int, ...]]] = {
    "left to right": left_to_right,
    "right to left": right_to_left,
    "balanced": balanced,
    "random": shuffled,
}
