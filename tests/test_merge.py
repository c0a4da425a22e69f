"""A row split anywhere and merged in any order: the same state, in either precision but for its own rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa2lab import merge
from fa2lab.merge import ORDERS, split_and_merge

LN2 = np.log(2)


def whole(s, v, masked=None) -> tuple[float, float, float]:
    """m, l and O straight from their formula, in float64, of the row as float32 holds it."""
    seen = np.ones(len(s), bool) if masked is None else ~np.asarray(masked)
    s, v = (np.asarray(x, np.float32).astype(np.float64)[seen] for x in (s, v))
    if not len(s):
        return -np.inf, 0.0, 0.0
    e = np.exp(s - s.max())
    return s.max(), e.sum(), e @ v / e.sum()


def numbers(state) -> tuple[float, float, float]:
    return float(state.m), float(state.l), float(state.out[0])


def test_six_numbers_by_hand():
    """Scores 0 2 | 1 0 | 3 1 times ln 2, whose exponentials are powers of two; values 6 1 2 4 6 3."""
    tree = split_and_merge(LN2 * np.array([0, 2, 1, 0, 3, 1]), [6, 1, 2, 4, 6, 3], (2, 4), (4, 2))
    expected = [
        (0, 1, 2 * LN2, 5 / 4, 2.0),  # (1·6 + 4·1) / 5
        (2, 3, 1 * LN2, 3 / 2, 8 / 3),  # (2·2 + 1·4) / 3
        (4, 5, 3 * LN2, 5 / 4, 5.4),  # (8·6 + 2·3) / 10
        (2, 5, 3 * LN2, 3 / 2 / 4 + 5 / 4, (1.5 / 4 * 8 / 3 + 1.25 * 5.4) / 1.625),
        (0, 5, 3 * LN2, 9 / 4, 4.0),
    ]
    got = [(node.first, node.last, *numbers(node.wide)) for node in tree.nodes]
    np.testing.assert_allclose(got, expected, rtol=1e-7)  # ln 2 itself is a float32 here
    assert [node.halves for node in tree.nodes] == [None, None, None, (1, 2), (0, 3)]
    assert [node.level for node in tree.nodes] == [0, 0, 0, 1, 2]
    assert tree.n_splits == 3 and tree.roots == (4,) and tree.open_cuts == ()


rows = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(-200, 200, width=32), min_size=n, max_size=n),
        st.lists(st.floats(-8, 8, width=32), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.sets(st.integers(1, n - 1)).flatmap(lambda cuts: st.permutations(sorted(cuts))) if n > 1 else st.just([]),
    )
)


@given(rows)
def test_any_cuts_and_any_order_give_the_row(row):
    """The merge's algebra. float64 differs by a rounding a step, float32 by one of its own."""
    s, v, masked, order = row
    tree = split_and_merge(s, v, sorted(order), order, masked=masked)
    m, l, out = whole(s, v, masked)  # noqa: E741
    end = tree.nodes[-1]
    assert len(tree.nodes) == 2 * len(order) + 1 and (end.first, end.last) == (0, len(s) - 1)
    for state, eps in ((end.wide, 2**-53), (end.narrow, 2**-24)):
        assert state.m == m, "a maximum is never rounded"
        # Each of 12 terms passes at most 12 levels. One costs exp(-x) three roundings and, since x is rounded too,
        # x exp(-x) <= 0.37 of one; l is at least 1, the largest term.
        bound = 12 * 12 * 4 * eps
        np.testing.assert_allclose(float(state.l), l, rtol=bound)
        np.testing.assert_allclose(float(state.out[0]), out, rtol=0, atol=2 * bound * 8)
        assert state.m.dtype == state.l.dtype == state.o.dtype


def test_the_precisions_are_what_they_say():
    tree = split_and_merge([0.1, 0.2], [1, 2], (1,), (1,))
    for node in tree.nodes:
        for state, dtype in ((node.narrow, np.float32), (node.wide, np.float64)):
            assert {np.asarray(x).dtype for x in (state.m, state.l, state.o)} == {np.dtype(dtype)}


def test_both_precisions_start_from_the_same_numbers():
    """Else the distance would show how a score was rounded, not what arithmetic costs."""
    (only,) = split_and_merge([0.1], [0.3], (), ()).nodes
    assert only.wide.m == np.float32(0.1) and only.wide.out[0] == np.float32(0.3)
    assert (only.apart("m"), only.apart("l"), only.apart("O")) == (0, 0, 0)


def test_small_terms_survive_only_among_themselves():
    """exp(-18.4) is 1.0e-8, a sixth of what float32 can add to 1. Eleven of them make it, one by one they do not."""
    s, cuts = [0.0] + [-18.4] * 11, tuple(range(1, 12))
    forth, back = (split_and_merge(s, np.ones(12), cuts, ORDERS[name](cuts)).nodes[-1] for name in list(ORDERS)[:2])
    assert forth.narrow.l == 1 < back.narrow.l
    assert forth.apart("l") == pytest.approx(11 * np.exp(-18.4), rel=1e-3)
    assert back.apart("l") < 2**-24


def test_a_masked_split_is_the_identity():
    """Whatever stands there, NaN included."""
    s, v, masked = (
        np.array([1.0, np.nan, np.inf, 2.0]),
        np.array([1.0, np.nan, np.inf, 3.0]),
        [False, True, True, False],
    )
    for order in ((1, 3), (3, 1)):
        tree = split_and_merge(s, v, (1, 3), order, masked=masked)
        nothing = tree.nodes[1]
        assert nothing.sees_nothing and numbers(nothing.wide) == (-np.inf, 0, 0) == numbers(nothing.narrow)
        assert nothing.apart("m") == nothing.apart("l") == nothing.apart("O") == 0
        np.testing.assert_allclose(numbers(tree.nodes[-1].wide), whole([1, 2], [1, 3]), rtol=1e-15)
    everything = split_and_merge(s, v, (2,), (2,), masked=np.ones(4, bool)).nodes[-1]
    assert numbers(everything.wide) == (-np.inf, 0, 0)


@pytest.mark.parametrize("s", [[-6e4] * 4, [-1e31] * 4, [100, 900, -400, 900.1]], ids=["low", "far below", "huge"])
def test_nasty_scores_are_ordinary(s):
    cuts = (1, 2, 3)
    for order in ORDERS.values():
        end = split_and_merge(s, [1, 2, 3, 4], cuts, order(cuts)).nodes[-1]
        np.testing.assert_allclose(numbers(end.wide), whole(s, [1, 2, 3, 4]), rtol=1e-14)
        np.testing.assert_allclose(numbers(end.narrow), whole(s, [1, 2, 3, 4]), rtol=1e-4)


def test_the_orders():
    cuts = (1, 2, 3, 4, 5, 6, 7)
    assert merge.left_to_right(cuts) == cuts
    assert merge.right_to_left(cuts) == cuts[::-1]
    assert merge.balanced(cuts) == (1, 3, 5, 7, 2, 6, 4)
    assert merge.balanced(()) == () and merge.shuffled(()) == ()
    assert max(node.level for node in split_and_merge(np.zeros(8), np.zeros(8), cuts, merge.balanced(cuts)).nodes) == 3
    random = [merge.shuffled(cuts, seed) for seed in range(5)]
    assert all(sorted(order) == list(cuts) for order in random) and len(set(random)) == 5
    assert merge.shuffled(cuts, 3) == random[3]


def test_one_may_stop_early():
    tree = split_and_merge(np.zeros(6), np.zeros(6), (1, 3, 5), (3,))
    assert [(tree.nodes[i].first, tree.nodes[i].last) for i in tree.roots] == [(0, 0), (1, 4), (5, 5)]
    assert tree.open_cuts == (1, 5)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (dict(s=[], v=[]), "at least 1"),
        (dict(s=[1.0, 2], v=[1.0]), "rows of one length"),
        (dict(s=[1.0], v=[1.0], masked=[True, False]), "rows of one length"),
        (dict(cuts=(0,)), "lie between 1 and 3"),
        (dict(cuts=(4,)), "lie between 1 and 3"),
        (dict(cuts=(2, 2)), "Cuts must rise"),
        (dict(cuts=(3, 1)), "Cuts must rise.*got 3, 1"),
        (dict(cuts=(1, 2), order=(3,)), "no cut before key 3 to merge across; there are: 1, 2"),
        (dict(cuts=(1, 2), order=(1, 1)), "no cut before key 1 to merge across; there are: 2"),
        (dict(cuts=(1,), order=(1, 1)), "there are: none"),
        (dict(cuts=(1,), order=(0,)), "no cut before key 0"),
    ],
)
def test_what_cannot_be_is_said(values, says):
    with pytest.raises(ValueError, match=says):
        split_and_merge(**(dict(s=np.zeros(4), v=np.zeros(4), cuts=(), order=()) | values))


@pytest.mark.parametrize("broken", ["no rescale", "minimum", "left only"])
def test_a_broken_merge_is_red(monkeypatch, broken):
    def wrong(a, b):
        if broken == "left only":
            return a
        m = np.minimum(a.m, b.m) if broken == "minimum" else np.maximum(a.m, b.m)
        factors = (1, 1) if broken == "no rescale" else (np.exp(a.m - m), np.exp(b.m - m))
        return merge.State(m, a.l * factors[0] + b.l * factors[1], a.o * factors[0] + b.o * factors[1])

    test_six_numbers_by_hand()
    monkeypatch.setattr(merge, "merge", wrong)
    with pytest.raises(AssertionError):
        test_six_numbers_by_hand()
