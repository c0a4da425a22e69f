"""Parity: what counts as the same, what does not, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import parity
from fa2lab.parity import ULP, compare, compare_traces, floors, measure

ARGS = engines.random(B=2, T=20, H=2, D=4)
TRUTH = fa.reference.attention(*ARGS, causal=True, return_attn=True)
TWIN = fa.reference.tiled(*ARGS, causal=True, return_attn=True, dtype=np.float32, block_k=8)


def with_change(field: str, place: tuple, value: float) -> fa.Result:
    """The float32 twin with one number replaced."""
    array = getattr(TWIN, field).copy()
    array[place] = value
    return replace(TWIN, **{field: array})


def test_a_good_result_passes_and_check_returns_the_comparison():
    comparison = compare(TWIN, TRUTH)
    assert comparison.ok and comparison.check() is comparison and comparison.departure is None
    assert [row.field for row in comparison.rows] == ["out", "lse", "attn"]
    for row in comparison.rows:
        assert row.ok and 0 < row.error <= row.allowed and row.plain > 0


@pytest.mark.parametrize(("field", "place"), [("out", (1, 7, 1, 2)), ("lse", (1, 1, 7)), ("attn", (1, 1, 7, 3))])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_single_non_finite_number_is_red(field, place, value):
    """`error > allowed` is False for NaN, so a test of that kind would let all of this pass."""
    comparison = compare(with_change(field, place, value), TRUTH)
    row = next(row for row in comparison.rows if row.field == field)
    assert not comparison.ok and row.misplaced == 1 and row.place == place
    with pytest.raises(
        fa.ParityError, match=f"{field} has 1 places where NaN or infinity stands on one side.*at batch 1"
    ):
        comparison.check()


PLACES = [0.5, np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("got", PLACES)
@pytest.mark.parametrize("expected", PLACES)
def test_non_finite_numbers_agree_only_with_their_like(got, expected):
    row = measure("lse", np.array([[[got]]], np.float32), np.array([[[expected]]]), allowed=1.0)
    alike = got == expected or (np.isnan(got) and np.isnan(expected))
    assert row.ok == alike and row.misplaced == (not alike)


def test_two_wrongs_all_nan_is_red_too():
    assert not compare(replace(TWIN, out=np.full_like(TWIN.out, np.nan)), TRUTH).ok
    nan = np.full((1, 1, 1), np.nan)
    assert measure("lse", nan, nan, allowed=0.0).ok, "NaN where NaN belongs is right"


@pytest.mark.parametrize(("field", "place"), [("out", (1, 7, 1, 2)), ("lse", (1, 1, 7)), ("attn", (1, 1, 7, 3))])
def test_the_worst_place_is_found_and_told(field, place):
    wrong = float(getattr(TRUTH, field)[place]) + 0.25
    comparison = compare(with_change(field, place, wrong), TRUTH)
    row = next(row for row in comparison.rows if row.field == field)
    assert row.place == place and row.misplaced == 0
    assert row.error == pytest.approx(0.25, rel=1e-6) and row.got == pytest.approx(wrong)
    last = {"out": "row 7 head 1 column 2", "lse": "head 1 row 7", "attn": "head 1 row 7 key 3"}[field]
    assert row.where == f"batch 1 {last}"
    with pytest.raises(fa.ParityError, match=rf"{field} is off by 0.25 at batch 1 {last} .*expected .*allowed: "):
        comparison.check()


@pytest.mark.parametrize("expected", [1.0, 1.5, 1000.0, 1e-3])
@pytest.mark.parametrize("steps", [1, 3])
def test_errors_are_also_counted_in_float32_spacings(expected, steps):
    x = np.float32(expected)
    got = x + steps * np.spacing(x)
    row = measure("lse", np.array([[[got]]], np.float32), np.array([[[float(x)]]]), allowed=1.0)
    assert row.ulps == pytest.approx(steps)


def test_allowed_is_twice_the_cost_of_plain_float32_and_a_floor():
    plain = TRUTH.plain
    assert plain.out.dtype == np.float32
    for row in compare(TWIN, TRUTH).rows:
        cost = np.abs(getattr(plain, row.field).astype(np.float64) - getattr(TRUTH, row.field))
        assert row.plain == cost[np.isfinite(cost)].max()
        assert row.allowed == 2 * row.plain + floors(TRUTH)[row.field]
        assert row.ratio == row.error / row.plain


def test_the_floor_is_a_rounding_not_a_tolerance():
    """Counted in ULP of O, of a weight and of L, as its derivation says; nothing in it was measured."""
    floor, score = floors(TRUTH), 0.5 * ULP * np.abs(TRUTH.lse).max()
    assert floor["attn"] == 2 * ULP + 0.5 * score
    assert floor["out"] == 2 * ULP * np.abs(TRUTH.out).max() + score * np.abs(ARGS[2]).max()
    assert floor["lse"] == max(2.0**-21, 3 * ULP * np.log(20)) + ULP * np.abs(TRUTH.lse).max()


def test_where_plain_arithmetic_errs_nothing_only_the_floor_is_left():
    q, k = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 2, 1, 1), np.float32)
    v = np.array([1, 2], np.float32)[None, :, None, None]
    truth = fa.reference.attention(q, k, v)
    row, floor = compare(truth, truth).rows[0], floors(truth)["out"]
    assert (row.plain, row.ratio, row.error, row.allowed) == (0.0, None, 0.0, floor)
    assert 0 < floor < 8 * ULP
    assert "  -  " in str(compare(truth, truth)), "a ratio to nothing is no number"
    for off, ok in ((floor / 2, True), (-floor / 2, True), (8 * ULP, False)):
        assert compare(np.array([[[[1.5 + off]]]], np.float32), truth).ok is ok


def test_an_absolute_tolerance_needs_no_truth_that_knows_its_inputs():
    bare = fa.Result(TRUTH.out, TRUTH.lse, "file", "memory", TRUTH.problem)
    assert compare(TWIN, bare, atol=1e-5).check().rows[0].plain is None
    assert not compare(TWIN, bare, atol=1e-12).ok
    with pytest.raises(TypeError, match="must come from fa.reference.*or give atol"):
        compare(TWIN, bare)


def test_a_bare_array_is_held_against_out():
    comparison = compare(TWIN.out, TRUTH).check()
    assert [row.field for row in comparison.rows] == ["out"]
    assert comparison.label == "array on memory"


def test_shapes_must_be_the_same():
    with pytest.raises(fa.ShapeError, match=r"out has shape \(2, 19, 2, 4\); the truth has \(2, 20, 2, 4\)"):
        compare(TWIN.out[:, 1:], TRUTH)
    with pytest.raises(fa.ShapeError, match=r"\(1, 20, 2, 4\)"):
        compare(TWIN.out[:1], TRUTH)  # would broadcast


@pytest.mark.parametrize("Tk", [0, 4])
def test_an_empty_comparison_fails(Tk):
    q, k = np.zeros((1, 0, 1, 2), np.float32), np.zeros((1, Tk, 1, 2), np.float32)
    truth = fa.reference.attention(q, k, k, return_attn=True)
    with pytest.raises(fa.ParityError, match="nothing to compare"):
        compare(truth, truth)
    with pytest.raises(fa.ParityError, match="nothing to compare"):
        compare(replace(TWIN, out=None, lse=None, attn=None), TRUTH)


def test_printing_shows_a_table_with_the_verdict():
    good = str(compare(TWIN, TRUTH))
    assert good.splitlines()[0].endswith("within float32") and "NOT" not in good
    assert [line.split()[0] for line in good.splitlines()[1:]] == ["field", "out", "lse", "attn"]
    assert good.count(" ok") == 3
    bad = str(compare(with_change("lse", (0, 0, 0), 9), TRUTH))
    assert "NOT within float32" in bad and "TOO FAR" in bad
    lost = str(compare(with_change("lse", (0, 0, 0), np.nan), TRUTH))
    assert "1 misplaced" in lost


def test_a_notebook_shows_a_verdict_in_colour_and_in_words():
    good, bad = compare(TWIN, TRUTH)._repr_html_(), compare(with_change("out", (0,) * 4, np.nan), TRUTH)._repr_html_()
    assert "✓ within float32" in good and "✗ not within float32" in bad
    assert "<table>" in good and good.count("<tr>") == 4 and "misplaced" in bad


# Traces.


def broken_trace(name: str, place: tuple, value: float) -> fa.Result:
    """The twin with one number of its trace replaced, and an O that is far off as well."""
    array = getattr(TWIN.trace, name).copy()
    array[place] = value
    return replace(with_change("out", (1, 17, 0, 0), 99), trace=replace(TWIN.trace, **{name: array}))


def test_a_good_trace_passes():
    assert [row.field for row in compare_traces(TWIN, TRUTH).check().rows] == ["state", "m", "l", "alpha"]


@pytest.mark.parametrize(("name", "value"), [("m", 9), ("l", 0), ("alpha", 0.5), ("m", np.nan), ("l", np.inf)])
def test_one_wrong_number_in_a_trace_is_red(name, value):
    with pytest.raises(fa.ParityError, match=f"{name} (is off|has 1 places).*batch 1 head 0 row 13 tile 1"):
        compare_traces(broken_trace(name, (1, 0, 13, 1), value), TRUTH).check()


def test_one_wrong_state_in_a_trace_is_red():
    with pytest.raises(fa.ParityError, match="state is off by"):
        compare_traces(broken_trace("state", (1, 0, 13, 1), 0), TRUTH).check()


@pytest.mark.parametrize(("tile", "state"), [(0, "full"), (2, "partial")])
def test_the_departure_names_the_first_tile_that_differs(tile, state):
    comparison = compare(broken_trace("l", (1, 0, 17, slice(tile, None)), 7), TRUTH)
    words = f"The trace first departs at K tile {tile} ({state}), in l of batch 1 head 0 row 17: 7 for "
    assert comparison.departure.startswith(words) and comparison.departure in str(comparison)
    with pytest.raises(fa.ParityError, match="first departs at K tile"):
        comparison.check()


def test_a_trace_that_agrees_puts_the_error_after_it():
    assert "the error comes after m and l" in compare(with_change("out", (0, 0, 0, 0), 9), TRUTH).departure


def test_no_trace_is_nothing_to_compare():
    with pytest.raises(fa.ParityError, match="no trace to compare"):
        compare_traces(replace(TWIN, trace=None), TRUTH)
    q, k = np.ones((1, 3, 1, 2), np.float32), np.ones((1, 0, 1, 2), np.float32)
    with pytest.raises(fa.ParityError, match="no trace to compare"):
        compare_traces(fa.reference.tiled(q, k, k), fa.reference.attention(q, k, k))


def test_the_ratios_are_the_contracts():
    assert (parity.FORWARD_RATIO, parity.GRADIENT_RATIO) == (2, 3)
