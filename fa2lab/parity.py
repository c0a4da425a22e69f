"""How far a result is from the truth, and whether float32 arithmetic explains it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa2lab import reference
from fa2lab.errors import ParityError, ShapeError
from fa2lab.reference.arithmetic import largest
from fa2lab.results import TILE_STATES, Gradients, Result, Trace

AXES = {"out": "batch row head column", "lse": "batch head row", "attn": "batch head row key"}
GRADIENT_AXES = {"dq": "batch row head column", "dk": "batch key head column", "dv": "batch key head column"}
TRACE_AXES = dict.fromkeys(("state", "m", "l", "alpha"), "batch head row tile")
# How many times the error of plain float32 arithmetic is allowed.
FORWARD_RATIO, GRADIENT_RATIO = 2.0, 3.0
ULP = 2.0**-23  # spacing of float32 relative to a number's power of two


@dataclass(frozen=True)
class Row:
    """One field held against the truth. Errors are absolute."""

    field: str
    error: float  # the largest, over finite places
    plain: float | None  # what plain float32 arithmetic errs, None where that was not asked
    allowed: float
    ulps: float  # the worst place's error in float32 spacings there
    place: tuple[int, ...] | None  # index of the worst place
    misplaced: int  # places where one side is NaN, +inf or -inf and the other is not the same
    got: float
    expected: float

    @property
    def ok(self) -> bool:
        """Non-finite numbers stand where they should, and the rest is close enough."""
        return self.misplaced == 0 and self.error <= self.allowed

    @property
    def ratio(self) -> float | None:
        """Error in units of what plain float32 arithmetic errs; None where that errs nothing."""
        return self.error / self.plain if self.plain else None

    @property
    def where(self) -> str:
        """The worst place in words."""
        if self.place is None:
            return "-"
        names = (AXES | GRADIENT_AXES | TRACE_AXES)[self.field]
        return " ".join(f"{name} {i}" for name, i in zip(names.split(), self.place, strict=True))


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. Printing it shows a table; `check` raises where float32 does not explain the distance."""

    label: str
    truth: str
    rows: tuple[Row, ...]
    departure: str | None  # the first K tile of the worst row where the traces part, in words

    @property
    def ok(self) -> bool:
        """Whether every field is within its bound."""
        return all(row.ok for row in self.rows)

    def check(self) -> Comparison:
        """The comparison itself, or `ParityError` that says where and how far."""
        for row in self.rows:
            if row.misplaced:
                raise ParityError(
                    f"{self.label}: {row.field} has {row.misplaced:,} places where NaN or infinity stands on one side, "
                    f"the first at {row.where}: got {row.got:.9g}, expected {row.expected:.9g}.{self._where_from()}"
                )
            if not row.ok:
                raise ParityError(
                    f"{self.label}: {row.field} is off by {row.error:.3g} at {row.where} "
                    f"(got {row.got:.9g}, expected {row.expected:.9g}); allowed: {row.allowed:.3g}.{self._where_from()}"
                )
        return self

    def _where_from(self) -> str:
        return f" {self.departure}" if self.departure else ""

    def __str__(self) -> str:
        lines = [_HEADER, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
        table = "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
        verdict = "within float32" if self.ok else "NOT within float32"
        return f"{self.label} against {self.truth}: {verdict}\n{table}" + (
            f"\n{self.departure}" if self.departure else ""
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour, mark = (
            ("var(--jp-success-color0, #1a7f37)", "✓ within float32")
            if self.ok
            else ("var(--jp-error-color1, #cf222e)", "✗ not within float32")
        )
        cell = "padding:2px 10px;text-align:left"
        head = "".join(f"<th style='{cell}'>{h}</th>" for h in _HEADER)
        body = "".join(
            "<tr>" + "".join(f"<td style='{cell}'>{c}</td>" for c in _cells(row)) + "</tr>" for row in self.rows
        )
        note = f"<div>{self.departure}</div>" if self.departure else ""
        return (
            f"<div><b style='color:{colour}'>{mark}</b> &nbsp; {self.label} against {self.truth}</div>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
        )


_HEADER = ("field", "max error", "plain f32", "ratio", "allowed", "ULPs", "worst place", "")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.field,
        f"{row.error:.2e}",
        "-" if row.plain is None else f"{row.plain:.2e}",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.allowed:.2e}",
        f"{row.ulps:.1f}",
        row.where,
        "ok" if row.ok else f"{row.misplaced} misplaced" if row.misplaced else "TOO FAR",
    )


def compare(
    result: Result | Gradients | np.ndarray, truth: Result | Gradients, *, atol: float | None = None
) -> Comparison:
    """Hold a result (or a bare `out` array), or gradients, against the truth, field by field where both have it.

    NaN, +inf and -inf must stand in the same places; then the largest error of the finite rest is measured. Allowed is
    `atol` if given, else the error of plain float32 arithmetic, twice for a forward and three times for gradients,
    plus `floors`; that needs a truth from `fa.reference`. Where the result carries a trace, the K tile is named at
    which it first departs from the float64 walk. Raises `ShapeError` for fields of different shapes and `ParityError`
    where there is nothing to compare.
    """
    of_gradients = isinstance(truth, Gradients)
    if not isinstance(result, Gradients if of_gradients else Result):
        if of_gradients or isinstance(result, Gradients):
            raise TypeError("A forward and gradients cannot be compared; hold each against its own truth.")
        result = Result(np.asarray(result), None, "array", "memory", truth.problem)
    plain = None
    if atol is None:
        if not isinstance(truth, reference.Truth | reference.TrueGradients):
            raise TypeError("The truth must come from fa.reference, which knows its inputs; or give atol.")
        plain, floor = truth.plain, floors(truth)
    ratio = GRADIENT_RATIO if of_gradients else FORWARD_RATIO
    rows = []
    for field in GRADIENT_AXES if of_gradients else AXES:
        got, expected = getattr(result, field), getattr(truth, field)
        if got is None or expected is None:
            continue
        if plain is None:
            rows.append(measure(field, got, expected, atol))
        else:
            cost = _distance(getattr(plain, field), expected)
            rows.append(measure(field, got, expected, ratio * cost + floor[field], cost))
    if not rows or all(getattr(truth, row.field).size == 0 for row in rows):
        raise ParityError("There is nothing to compare: no field that both sides have holds a number.")
    departure = None if all(row.ok for row in rows) else _departure(result, truth)
    return Comparison(result.label, truth.label, tuple(rows), departure)


def floors(truth: reference.Truth | reference.TrueGradients) -> dict[str, float]:
    """The rounding that stays even where plain float32 happens to err nothing, for each field of a forward.

    O and P end in four float32 roundings of their own: exp, the product with the rescale, the sum and the division.
    Each is half a spacing, so together 2 ULP of the largest |O|, or of the largest weight, 1. Before that, a score is
    a float32 itself: half an ULP of |s| is a relative error of that size in its weight w, and the scores that matter
    lie near L. That moves w by at most twice that times w (1 - w), and O by that times v's mean distance from O, which
    is no more than max |v|.
    L = m + ln l: WGSL allows log an absolute error of 2^-21 between 0.5 and 2 and 3 ULP elsewhere (WGSL specification,
    accuracy of built-in functions), with l at most n; m and the sum round once each, half an ULP of |m| and of |L|.
    """
    if isinstance(truth, reference.TrueGradients):
        return gradient_floors(truth)
    score = 0.5 * ULP * largest(truth.lse)
    log = max(2.0**-21, 3 * ULP * np.log(max(1, truth.problem.Tk)))
    return {
        "out": 2 * ULP * largest(truth.out) + score * largest(truth.inputs[2]),
        "attn": 2 * ULP + 0.5 * score,
        "lse": log + ULP * largest(truth.lse),
    }


def gradient_floors(truth: reference.TrueGradients) -> dict[str, float]:
    """The same for gradients. Each ends in four roundings as above, 2 ULP of its largest value; to that comes

    - that L is stored: half an ULP of |L| multiplies row i of P, and so dQ's row i; it enters dK and dV through P's
      columns, whose largest sum is `column`.
    - that dP_ij - delta_i cancels: each is rounded at least once at its own size, half an ULP of Σ_d |dO_id O_id|,
      and what is left of that is multiplied by scale · k in dQ, by scale · q and a column of P in dK.
    """
    q, k, _, dout = (largest(x) for x in truth.inputs)
    stored = 0.5 * ULP * truth.largest_lse
    cancelled = abs(truth.problem.scale) * ULP * truth.largest_delta
    return {
        "dq": (2 * ULP + stored) * largest(truth.dq) + cancelled * k,
        "dk": (2 * ULP + stored) * largest(truth.dk) + cancelled * q * truth.column,
        "dv": 2 * ULP * largest(truth.dv) + stored * dout * truth.column,
    }


def measure(field: str, got: np.ndarray, expected: np.ndarray, allowed: float, plain: float | None = None) -> Row:
    """One field's `Row`. Raises `ShapeError` where the shapes differ."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise ShapeError(f"{field} has shape {got.shape}; the truth has {expected.shape}.")
    finite = np.isfinite(got) & np.isfinite(expected)
    same = (np.isnan(got) & np.isnan(expected)) | (got == expected)
    misplaced = ~finite & ~same
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(got.astype(np.float64) - expected), 0.0)
    if not error.size:
        return Row(field, 0.0, plain, allowed, 0.0, None, 0, 0.0, 0.0)
    place = np.unravel_index(np.argmax(misplaced if misplaced.any() else error), error.shape)
    # Where the truth is 0, spacings there say nothing.
    spacing = np.spacing(np.abs(expected[place]).astype(np.float32)) if finite[place] and expected[place] else np.inf
    return Row(
        field,
        error=float(error.max()),
        plain=plain,
        allowed=float(allowed),
        ulps=float(error[place] / spacing),
        place=tuple(int(i) for i in place),
        misplaced=int(misplaced.sum()),
        got=float(got[place]),
        expected=float(expected[place]),
    )


def compare_traces(result: Result, truth: reference.Truth) -> Comparison:
    """Hold a recorded trace against the float64 walk over the same tiles: m, l and alpha of each row and K tile.

    Allowed is the ratio rule of `compare` with the float32 walk in place of plain arithmetic; the states (skipped,
    partial, full) must be equal. Raises `ParityError` where the result has no trace.
    """
    if result.trace is None or not result.trace.m.size:
        raise ParityError("There is no trace to compare; run with trace=True on a problem that has keys.")
    exact, single = _walks(result, truth)
    states = measure("state", result.trace.state, exact.state, 0.0)
    rows = [
        measure(name, *pair, allowed, cost)
        for name, (pair, allowed, cost) in _trace_bounds(result.trace, exact, single).items()
    ]
    return Comparison(f"trace of {result.label}", "the float64 walk", (states, *rows), None)


def _walks(result: Result, truth: reference.Truth) -> tuple[Trace, Trace]:
    block_q, block_k = result.trace.block_q, result.trace.block_k
    walks = (reference.walk(truth.problem, *truth.inputs, block_q, block_k, t) for t in (np.float64, np.float32))
    return tuple(walk.trace for walk in walks)


def _trace_bounds(got: Trace, exact: Trace, single: Trace) -> dict:
    """For m, l and alpha: the pair to compare, what is allowed, and what the float32 walk errs.

    Floors as in `floors`: m rounds once, in the product with the scale; l and alpha go through exp, a product and a
    sum, 2 ULP of the largest l and of 1, and carry half an ULP of |m| as a relative error.
    """
    score = 0.5 * ULP * largest(exact.m)
    floor = {"m": 2 * score, "l": (2 * ULP + score) * largest(exact.l), "alpha": 2 * ULP + score}
    bounds = {}
    for name in floor:
        pair = getattr(got, name), getattr(exact, name)
        cost = _distance(getattr(single, name), pair[1])
        bounds[name] = pair, FORWARD_RATIO * cost + floor[name], cost
    return bounds


def _departure(result: Result, truth: Result) -> str | None:
    """Where the trace first leaves the float64 walk, in words."""
    if not isinstance(truth, reference.Truth) or result.trace is None:
        return None
    exact, single = _walks(result, truth)
    tiles: list[tuple[int, str, tuple]] = []
    for name, ((got, expected), allowed, _) in _trace_bounds(result.trace, exact, single).items():
        with np.errstate(invalid="ignore"):
            off = ~((np.abs(got - expected) <= allowed) | (got == expected) | (np.isnan(got) & np.isnan(expected)))
        if off.any():
            place = min(map(tuple, np.argwhere(off)), key=lambda at: at[3])
            tiles.append((int(place[3]), name, place))
    if not tiles:
        return "The trace agrees with the float64 walk, so the error comes after m and l."
    tile, name, (b, h, row, _) = min(tiles)
    state = TILE_STATES[exact.state[b, h, row, tile]]
    return (
        f"The trace first departs at K tile {tile} ({state}), in {name} of batch {b} head {h} row {row}: "
        f"{getattr(result.trace, name)[b, h, row, tile]:.6g} for {getattr(exact, name)[b, h, row, tile]:.6g}."
    )


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error over the places where both are finite."""
    finite = np.isfinite(got) & np.isfinite(expected)
    return float(np.abs(got[finite].astype(np.float64) - expected[finite]).max(initial=0.0))
