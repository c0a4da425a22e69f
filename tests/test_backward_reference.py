"""The truth of the backward pass: gradients against central differences, and the walks against the gradients."""

from __future__ import annotations

from dataclasses import replace

import engines
import gradients
import numpy as np
import pytest
from gradients import CAUSAL, FIELDS, MASKS, TOP_LEFT

import fa2lab as fa
from fa2lab import reference
from fa2lab.problem import pose
from fa2lab.reference import backward

# A difference quotient of fourth order with step 1e-3: h^4 / 30 times the fifth derivative is some 1e-12 here, and the
# rounding of a sum of a hundred products, 1e-14, is divided by h. So 1e-10 of the largest gradient is far above both.
STEP, CLOSE = 1e-3, 1e-10

CASES = {
    "full": (dict(T=3, H=1, D=2), {}),
    "causal": (dict(T=4, H=2, D=2), CAUSAL),
    "one key": (dict(T=1, H=1, D=3), CAUSAL),
    "batches": (dict(B=2, T=3, H=2, D=2), CAUSAL),
    "more keys, bottom-right": (dict(T=3, Tk=5, H=1, D=2), CAUSAL),
    "more keys, top-left": (dict(T=3, Tk=5, H=1, D=2), TOP_LEFT),
    "more queries, which see no key": (dict(T=5, Tk=2, H=1, D=2), CAUSAL),
    "more queries, top-left": (dict(T=5, Tk=3, H=1, D=2), TOP_LEFT),
    "grouped heads": (dict(T=3, H=4, Hkv=2, D=2), CAUSAL),
    "one KV head for all": (dict(B=2, T=2, Tk=3, H=3, Hkv=1, D=2), {}),
    "negative scale": (dict(T=4, H=1, D=3), CAUSAL | {"scale": -0.7}),
    "scale 0": (dict(T=4, H=1, D=2), CAUSAL | {"scale": 0.0}),
    "large scale": (dict(T=3, H=1, D=2), {"scale": 2.5}),
}


def posed(sizes, options):
    """A problem and its arrays in float64, with digits that float32 does not have."""
    rng = np.random.default_rng(3)
    problem, *arrays = pose(*engines.random(**sizes), **options)
    arrays = [x + 1e-9 * rng.standard_normal(x.shape) for x in map(np.float64, arrays)]
    return problem, *arrays, rng.standard_normal(arrays[0].shape)


def by_differences(problem, q, k, v, dout) -> list[np.ndarray]:
    """The gradients of Σ dO ∘ O by moving one number of Q, K and V at a time."""

    def loss() -> float:
        return float((dout * reference.attend(problem, q, k, v).out).sum())

    def moved(x, place, by) -> float:
        before = x[place]
        x[place] = before + by
        value = loss()
        x[place] = before
        return value

    found = [np.zeros_like(x) for x in (q, k, v)]
    for x, slope in zip((q, k, v), found, strict=True):
        for place in np.ndindex(x.shape):
            near, far = (moved(x, place, n * STEP) - moved(x, place, -n * STEP) for n in (1, 2))
            slope[place] = (8 * near - far) / (12 * STEP)
    return found


def departs(case: str) -> float:
    """How far the gradients are from the difference quotients, relative to the largest."""
    problem, *arrays = posed(*CASES[case])
    found = reference.gradients(problem, *arrays)
    pairs = list(zip(FIELDS, by_differences(problem, *arrays), strict=True))
    largest = max(np.abs(slope).max() for _, slope in pairs)
    assert largest > 0.1
    return max(np.abs(getattr(found, name) - slope).max() for name, slope in pairs) / largest


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_difference_quotients(case):
    assert departs(case) < CLOSE


BROKEN = {
    "the sum that a softmax row gives back": ("sum_last", lambda e, start=0: np.zeros(e.shape[:-1]), "causal"),
    "what is not seen": ("weigh", lambda e, seen, v, start=0: start + np.ones_like(e) @ v, "causal"),
    "dP": ("scores", lambda dout, v, scale: 0 * dout @ v.swapaxes(-1, -2), "full"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_difference_quotients_see_broken_gradients(monkeypatch, what):
    name, broken, case = BROKEN[what]
    assert hasattr(backward, name)
    monkeypatch.setattr(backward, name, broken)
    assert departs(case) > 1e-3


def test_difference_quotients_see_a_forgotten_head_of_a_group(monkeypatch):
    gathered = backward._gathered

    def forgetful(p, dq, dk, dv, *label):
        dk = dk.copy()
        dk[:, 1] = 0
        return gathered(p, dq, dk, dv, *label)

    monkeypatch.setattr(backward, "_gathered", forgetful)
    assert departs("grouped heads") > 1e-3


def close(got, expected) -> None:
    """Float64 sums of fewer than 50 terms of size 1, in another order."""
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


SHAPES = pytest.mark.parametrize(("Tq", "Tk"), [(20, 20), (9, 30), (30, 9)])


@MASKS
@SHAPES
@pytest.mark.parametrize("tile", [(16, 16), (1, 1), (4, 7), (7, 4), (64, 64)])
def test_the_walk_gives_what_the_formulas_give(mask, Tq, Tk, tile):
    problem, q, k, v, dout = posed(dict(B=2, T=Tq, Tk=Tk, H=4, Hkv=2, D=4), mask)
    forward = reference.attend(problem, q, k, v)
    walked = reference.walk_backward(problem, q, k, v, forward.out, forward.lse, dout, *tile)
    whole = reference.gradients(problem, q, k, v, dout)
    for name in FIELDS:
        close(getattr(walked, name), getattr(whole, name))


@MASKS
@SHAPES
@pytest.mark.parametrize("tile", [(16, 16), (4, 7), (7, 4)])
def test_the_trace_adds_up_to_the_gradients(mask, Tq, Tk, tile):
    problem, q, k, v, dout = posed(dict(T=Tq, Tk=Tk, H=1, D=4), mask)
    forward = reference.attend(problem, q, k, v, return_attn=True)
    trace = reference.trace_backward(problem, q, k, v, forward.out, forward.lse, dout, *tile)
    whole = reference.gradients(problem, q, k, v, dout)
    for name in FIELDS:
        close(getattr(trace, f"{name}_parts").sum(0), getattr(whole, name)[0, :, 0])
    close(trace.p, forward.attn[0, 0])
    close(problem.scale * trace.ds @ k[0, :, 0], whole.dq[0, :, 0])
    np.testing.assert_array_equal(trace.state, reference.states(problem, *tile)[0, 0, :: tile[0]])
    assert not trace.p[~problem.mask()].any() and not trace.ds[~problem.mask()].any()
    for i, j in np.argwhere(trace.state == fa.results.SKIPPED):
        rows, keys = slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1])
        assert not trace.dq_parts[j, rows].any(), "a skipped tile adds nothing"
        assert not trace.dk_parts[i, keys].any() and not trace.dv_parts[i, keys].any()


def test_the_walk_in_another_mind_is_seen(monkeypatch):
    """The comparison above, with P that forgets L."""
    problem, q, k, v, dout = posed(dict(T=9), CAUSAL)
    forward = reference.attend(problem, q, k, v)
    tile = backward.tile
    monkeypatch.setattr(backward, "tile", lambda p, q, k, v, lse, *rest: tile(p, q, k, v, 0 * lse, *rest))
    walked = reference.walk_backward(problem, q, k, v, forward.out, forward.lse, dout, 4, 4)
    with pytest.raises(AssertionError):
        close(walked.dv, reference.gradients(problem, q, k, v, dout).dv)


@MASKS
@pytest.mark.parametrize("tile", [(16, 16), (4, 7)])
def test_the_float32_walk_is_within_the_ratio_rule(mask, tile):
    q, k, v, dout = gradients.random(T=20, Tk=33, H=2)
    truth = reference.attention_backward(q, k, v, dout, **mask)
    out, lse = gradients.forward(q, k, v, **mask)
    rounded = (x.astype(np.float32) for x in (out, lse))
    walked = reference.walk_backward(truth.problem, q, k, v, *rounded, dout, *tile, np.float32)
    assert {getattr(walked, name).dtype for name in FIELDS} == {np.dtype(np.float32)}
    fa.parity.compare(walked, truth).check()


def test_delta_is_the_same_sum_two_ways():
    """rowsum(dO ∘ O) = rowsum(P ∘ dP), the identity that spares the backward pass the matrix P."""
    problem, q, k, v, dout = posed(dict(T=6, H=2, D=3), CAUSAL)
    forward = reference.attend(problem, q, k, v, return_attn=True)
    dp = np.einsum("bihd,bjhd->bhij", dout, v)
    close((forward.attn * dp).sum(-1), np.einsum("bihd,bihd->bhi", dout, forward.out))


# Closed forms of the contract.


def column(*numbers) -> np.ndarray:
    return np.array(numbers, np.float64)[None, :, None, None]


def test_closed_form_of_dv():
    """q = 0, dO = 1, causal: key j gets Σ 1 / (i + 1) over the rows i >= j."""
    zero, v = column(0, 0, 0, 0), column(1, 2, 3, 4)
    found = reference.attention_backward(zero, zero, v, np.ones_like(v), causal=True)
    close(found.dv.ravel(), np.cumsum(1 / np.arange(4, 0, -1))[::-1])
    np.testing.assert_allclose(found.dv.ravel(), [2.083333, 1.083333, 0.583333, 0.25], atol=5e-7)
    assert not found.dq.any() and not found.dk.any(), "q = k = 0"


def test_values_all_alike_give_scores_no_gradient():
    """A weighted average of equal rows does not depend on its weights."""
    q, k, v, dout = gradients.random(T=12, H=2)
    found = reference.attention_backward(q, k, np.broadcast_to(v[:, :1], v.shape), dout, causal=True)
    close(found.dq, 0)
    close(found.dk, 0)
    assert np.abs(found.dv).max() > 0.1


def test_two_keys_by_hand():
    """s = 0 and ln 3, so P = (1/4, 3/4); V = (1, 3), O = 5/2; dO = 2: dP = (2, 6), delta = 5, dS = (-3/4, 3/4)."""
    q, k, v = column(1), column(0, np.log(3)), column(1, 3)
    found = reference.gradients(pose(q, k, v, scale=1.0)[0], q, k, v, column(2))
    close(found.dq.ravel(), [0.75 * np.log(3)])
    close(found.dk.ravel(), [-0.75, 0.75])
    close(found.dv.ravel(), [0.5, 1.5])


# Positions, not values.


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_what_no_row_sees_never_arrives(junk):
    q, k, v, dout = gradients.random(T=6, Tk=9)
    clean = reference.attention_backward(q, k, v, dout, **TOP_LEFT)
    k[:, 6:], v[:, 6:] = junk, junk
    gradients.assert_same_bits(reference.attention_backward(q, k, v, dout, **TOP_LEFT), clean)
    assert not clean.dk[:, 6:].any() and not clean.dv[:, 6:].any()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_rows_that_see_no_key_give_and_get_exactly_zero(junk):
    q, k, v, dout = gradients.random(T=9, Tk=4)
    clean = reference.attention_backward(q, k, v, dout, causal=True)
    q[:, :5], dout[:, :5] = junk, junk
    found = reference.attention_backward(q, k, v, dout, causal=True)
    gradients.assert_same_bits(found, clean)
    assert not found.dq[:, :5].any()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        # where the NaN of row or key 3 of 6 ends, causal: rows of dQ, keys of dK, keys of dV
        ("q", ([3], range(4), range(4))),
        ("k", (range(3, 6), range(6), range(6))),
        ("v", (range(3, 6), range(6), ())),
        ("dout", ([3], range(4), range(4))),
    ],
)
def test_nan_spreads_along_what_sees_it(name, lost):
    arrays = dict(zip(("q", "k", "v", "dout"), gradients.random(T=6, H=1, D=3), strict=True))
    arrays[name][:, 3] = np.nan
    found = reference.attention_backward(**arrays, causal=True)
    for field, expected in zip(FIELDS, lost, strict=True):
        rows = np.isnan(getattr(found, field)).any((0, 2, 3))
        assert np.flatnonzero(rows).tolist() == list(expected), field


def test_truth_remembers_what_bounds_need():
    q, k, v, dout = gradients.random(T=7, H=2)
    truth = reference.attention_backward(q, k, v, dout, causal=True)
    forward = reference.attention(q, k, v, causal=True, return_attn=True)
    assert truth.column == pytest.approx(forward.attn.sum(-2).max(), rel=1e-12)
    assert truth.largest_lse == pytest.approx(np.abs(forward.lse).max(), rel=1e-12)
    assert truth.largest_delta == pytest.approx(np.abs(dout * forward.out).sum(-1).max(), rel=1e-12)
    assert truth.plain.dq.dtype == np.float32 and truth.dq.dtype == np.float64
    assert truth.label == "reference on NumPy float64"


def test_gradients_are_compared_with_three_times_plain_and_a_floor():
    truth = reference.attention_backward(*gradients.random(T=7), causal=True)
    floor = fa.parity.gradient_floors(truth)
    for row in fa.parity.compare(truth.plain, truth).check().rows:
        assert row.plain == row.error and row.allowed == 3 * row.plain + floor[row.field]
        assert 0 < floor[row.field] < 1e-4, "a rounding, not a tolerance"


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 9.0])
def test_one_wrong_number_in_a_gradient_is_red(field, value):
    truth = reference.attention_backward(*gradients.random(T=7), causal=True)
    array = getattr(truth.plain, field).copy()
    array[0, 5, 1, 2] = value
    with pytest.raises(fa.ParityError, match=f"{field} (is off|has 1 places).*batch 0 (row|key) 5 head 1 column 2"):
        fa.parity.compare(replace(truth.plain, **{field: array}), truth).check()


def test_a_forward_and_gradients_are_not_compared():
    q, k, v, dout = gradients.random(T=4)
    truth = reference.attention_backward(q, k, v, dout)
    with pytest.raises(TypeError, match="cannot be compared"):
        fa.parity.compare(reference.attention(q, k, v), truth)
    with pytest.raises(TypeError, match="cannot be compared"):
        fa.parity.compare(truth, reference.attention(q, k, v))
