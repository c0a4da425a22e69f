"""What the numbers must be, row by row of the contract, on every engine: references, NumPy engine, kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import engines
import numpy as np
import pytest
from numpy import exp, log

import fa2lab as fa


def column(*numbers) -> np.ndarray:
    """(1, T, 1, 1): one batch, one head, D = 1."""
    return np.array(numbers, np.float32)[None, :, None, None]


@dataclass(frozen=True)
class Case:
    """Inputs whose answer is known without the library: `out` and `lse` of one head, in float64."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: object
    lse: object
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    @cached_property
    def truth(self) -> fa.reference.Truth:
        return fa.reference.attention(self.q, self.k, self.v, return_attn=True, **self.options)


ZERO, ONE, UP, INF = column(0), column(1), column(1, 2, 3, 4), np.inf
CAUSAL, TOP_LEFT, UNIT = {"causal": True}, {"causal": True, "align": "top-left"}, {"scale": 1.0}
SIXTEEN = np.zeros((1, 1, 1, 16), np.float32), np.zeros((1, 2, 1, 16), np.float32)
SIXTEEN[0][..., 3], SIXTEEN[1][0, 1, 0, 3] = 4, 1  # q·k is 0 and 4, scores 0 and 1 with the scale of D = 16


def equal_keys(score: float) -> Case:
    return Case(f"row 5 four keys at {score:g}", ONE, column(*[score] * 4), UP, [2.5], [score + log(4)], UNIT)


CASES = [
    Case("row 1 one key", ZERO, ZERO, column(7), [7], [0]),
    Case("row 1 two equal keys", ZERO, column(0, 0), column(1, 2), [1.5], [log(2)]),
    Case("row 1 four equal keys", ZERO, column(0, 0, 0, 0), UP, [2.5], [log(4)]),
    Case("row 1 33 equal keys", ZERO, column(*[0] * 33), column(*range(33)), [16], [log(33)]),
    Case("row 1 L keeps the maximum", ONE, column(100, 100), column(1, 2), [1.5], [100 + log(2)], UNIT),
    Case("row 1 L is natural", ONE, column(0, 1), column(1, 2), [(1 + 2 * exp(1)) / (1 + exp(1))], [log(1 + exp(1))]),
    Case(
        "row 2 default scale at D 16",
        *SIXTEEN,
        np.stack([np.full((1, 1, 16), n, np.float32) for n in (1, 2)], axis=1),
        [(1 + 2 * exp(1)) / (1 + exp(1))] * 16,
        [log(1 + exp(1))],
    ),
    Case("row 2 scale 0", column(9, 9, 9, 9), UP, UP, [1, 1.5, 2, 2.5], log([1, 2, 3, 4]), CAUSAL | {"scale": 0.0}),
    Case(
        "row 2 negative scale",
        ONE,
        column(0, 1),
        column(1, 2),
        [(1 + 2 * exp(-0.5)) / (1 + exp(-0.5))],
        [log(1 + exp(-0.5))],
        {"scale": -0.5},
    ),
    # A maximum taken before the scale would be of the wrong end, and exp would overflow.
    Case("row 2 negative scale far out", ONE, column(1e4, -1e4, 0), UP[:, :3], [2], [1e4], {"scale": -1.0}),
    Case("row 3 bottom-right", column(0, 0), column(*[0] * 5), column(1, 2, 3, 4, 5), [2.5, 3], log([4, 5]), CAUSAL),
    Case("row 3 top-left", column(0, 0), column(*[0] * 5), column(1, 2, 3, 4, 5), [1, 1.5], log([1, 2]), TOP_LEFT),
    Case(
        "row 3 top-left with fewer keys",
        column(*[0] * 5),
        column(0, 0),
        column(1, 3),
        [1, 2, 2, 2, 2],
        [0, *[log(2)] * 4],
        TOP_LEFT,
    ),
    Case(
        "row 4 rows that see no key",
        column(*[0] * 5),
        column(0, 0),
        column(1, 3),
        [0, 0, 0, 1, 2],
        [-INF, -INF, -INF, 0, log(2)],
        CAUSAL,
    ),
    Case(
        "row 4 a whole tile sees no key",
        column(*[0] * 35),
        column(0, 0),
        column(1, 3),
        [*[0] * 33, 1, 2],
        [*[-INF] * 33, 0, log(2)],
        CAUSAL,
    ),
    Case(
        "row 5 scores below -1e5",
        ONE,
        column(-100_000, -100_001),
        column(1, 2),
        [(1 + 2 * exp(-1)) / (1 + exp(-1))],
        [-100_000 + log(1 + exp(-1))],
        UNIT,
    ),
    *(equal_keys(score) for score in (-6e4, -2e9, -1e31, 1e31, -3.4e38, 3.4e38)),
    Case(
        "row 5 masked zeros above visible -1e31",
        column(-1, -1, -1, -1),
        column(1e31, 1e31, 1e31, 0),
        UP,
        [1, 1.5, 2, 4],
        [-1e31, -1e31 + log(2), -1e31 + log(3), 0],
        CAUSAL | UNIT,
    ),
    Case("row 5 both ends of float32", ONE, column(-3e38, 3e38), column(1, 2), [2], [3e38], UNIT),
    Case("row 5 a later tile far above", ONE, column(*[-2e9] * 16, -1e9), column(*[1] * 16, 5), [5], [-1e9], UNIT),
    Case(
        "row 5 a later tile far below",
        ONE,
        column(*[-1e9] * 16, -2e9),
        column(*[1] * 16, 5),
        [1],
        [-1e9 + log(16)],
        UNIT,
    ),
    Case("row 7 no key was skipped", ZERO, column(*[0] * 32), column(*range(32)), [15.5], [log(32)]),
    Case("row 7 no padding was counted", ZERO, column(*[0] * 9), column(*range(1, 10)), [5], [log(9)]),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@each_case
def test_reference_gives_the_closed_form(case):
    D = case.v.shape[-1]
    np.testing.assert_allclose(case.truth.out, np.reshape(case.out, (1, -1, 1, D)), rtol=1e-7, atol=0)
    np.testing.assert_allclose(case.truth.lse, np.reshape(case.lse, (1, 1, -1)), rtol=1e-7, atol=0)


@each_case
def test_closed_forms(engine, case):
    result = engine(case.q, case.k, case.v, return_attn=True, **case.options)
    fa.parity.compare(result, case.truth).check()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 17])
def test_row_1_equal_keys_give_ln_n(engine, n):
    """m is exactly 0 and l exactly n, so what is left is the device's own log, which WGSL allows this much."""
    lse = engine(column(0), column(*[0] * n), column(*[1] * n)).lse.item()
    allowed = max(2.0**-21, 3 * 2.0**-23 * log(n)) if engine.dtype == np.float32 else 1e-15
    assert abs(lse - log(n)) <= allowed


TILES = [(16, 16), (8, 8), (16, 5), (3, 16), (1, 1), (32, 64)]


@pytest.mark.parametrize(("n", "first"), [(32, 0), (9, 1)])
def test_row_7_averages_for_every_tile_size(engine, n, first):
    zeros, v = column(*[0] * n), column(*range(first, first + n))
    for block_q, block_k in TILES:
        tiles = {"block_q": block_q, "block_k": block_k} if engine.tiles else {}
        out = engine(zeros, zeros, v, **tiles).out
        np.testing.assert_allclose(out, np.mean(v, dtype=np.float64), rtol=2 * 2.0**-23, err_msg=str(tiles))
        if not engine.tiles:
            break


def test_row_4_an_unseeing_row_disturbs_no_other(engine):
    q, k, v = engines.random(T=20, Tk=9, seed=4)
    q[:, :11] = np.nan
    result = engine(q, k, v, causal=True, return_attn=True)
    assert not result.out[:, :11].any() and np.all(result.lse[:, :, :11] == -INF) and not result.attn[:, :, :11].any()
    alone = fa.reference.attention(q[:, 11:], k, v, causal=True, return_attn=True)
    rest = fa.Result(
        result.out[:, 11:], result.lse[:, :, 11:], "rest", engine.name, alone.problem, result.attn[:, :, 11:]
    )
    fa.parity.compare(rest, alone).check()


JUNK = [np.nan, INF, -INF, 3e38]


@pytest.mark.parametrize("junk", JUNK)
def test_row_5_what_no_row_sees_never_arrives(engine, junk):
    q, k, v = engines.random(T=18, Tk=40, seed=5)
    options = dict(causal=True, align="top-left", return_attn=True)
    clean = engine(q, k, v, **options)
    k[:, 18:], v[:, 18:] = junk, junk
    assert_same_bits(engine(q, k, v, **options), clean)


@pytest.mark.parametrize("key", [0, 5, 16, 18])
@pytest.mark.parametrize("where", ["k", "v"])
def test_row_5_nan_reaches_only_rows_that_see_it(engine, where, key):
    """The tile is shared by rows that see the key and rows that do not."""
    q, k, v = engines.random(T=20, seed=6)
    clean = engine(q, k, v, causal=True)
    {"k": k, "v": v}[where][:, key] = np.nan
    result = engine(q, k, v, causal=True)
    np.testing.assert_array_equal(result.out[:, :key], clean.out[:, :key])
    np.testing.assert_array_equal(result.lse[:, :, :key], clean.lse[:, :, :key])
    assert np.isnan(result.out[:, key:]).all()
    fa.parity.compare(result, fa.reference.attention(q, k, v, causal=True)).check()


# Where, and what: a single number of one array, or all keys at once.
NON_FINITE = [(name, value) for name in "qkv" for value in (np.nan, INF, -INF)]


@pytest.mark.parametrize(("name", "value"), NON_FINITE)
@pytest.mark.parametrize("causal", [False, True])
def test_row_6_non_finite_input_spreads_as_in_float64(engine, name, value, causal):
    q, k, v = engines.random(T=20, seed=7)
    {"q": q, "k": k, "v": v}[name][0, 13, 1, 2] = value
    truth = fa.reference.attention(q, k, v, causal=causal, return_attn=True)
    if (name, value) != ("k", -INF):  # there, some scores are -inf: a weight of 0, and nothing to see in others
        assert not np.isfinite(truth.out).all()
    fa.parity.compare(engine(q, k, v, causal=causal, return_attn=True), truth).check()


def test_row_6_a_row_of_scores_that_are_all_minus_infinity(engine):
    """Seen keys with weight 0 of a sum 0: NaN, not the zeros of a row that sees nothing."""
    args = column(1, 1), column(-INF, -INF), column(1, 2)
    truth = fa.reference.attention(*args)
    assert np.isnan(truth.out).all() and np.all(truth.lse == -INF)
    fa.parity.compare(engine(*args), truth).check()


@pytest.mark.parametrize("T", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_row_7_lengths_around_a_tile_edge(engine, T, causal):
    check(engine, *engines.random(B=2, T=T, seed=T), causal=causal)


SHAPES = [(1, 33), (33, 1), (17, 40), (40, 17), (5, 16), (16, 5)]


@pytest.mark.parametrize(("Tq", "Tk"), SHAPES)
@pytest.mark.parametrize("options", [{}, CAUSAL, TOP_LEFT], ids=["full", "bottom-right", "top-left"])
def test_row_3_and_7_more_or_fewer_keys_than_queries(engine, Tq, Tk, options):
    check(engine, *engines.random(T=Tq, Tk=Tk, seed=Tq), **options)


@pytest.mark.parametrize("D", [1, 2, 3, 5, 8, 40, 64, 80, 128, 256])
def test_row_7_head_dimensions(engine, D):
    q, k, v = engines.random(T=17, H=1, D=D, seed=D)
    if D == 128:
        q[..., :64] = 0  # all the signal in the second half: a kernel that stops at 64 gives plain averages
    check(engine, q, k, v, causal=True)


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("D", [1, 8])
def test_row_7_one_key_returns_v_to_the_bit(engine, options, D):
    q, k, v = engines.random(B=2, T=1, H=3, D=D, seed=1)
    result = engine(q, k, v, return_attn=True, **options)
    np.testing.assert_array_equal(result.out, v)
    np.testing.assert_array_equal(result.attn, np.ones((2, 3, 1, 1)))


@pytest.mark.parametrize(
    ("B", "Tq", "Tk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=["no batch", "no query", "no key", "nothing"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_row_7_zero_lengths(engine, B, Tq, Tk, causal):
    q, k = np.ones((B, Tq, 2, 3), np.float32), np.ones((B, Tk, 2, 3), np.float32)
    result = engine(q, k, k, causal=causal, return_attn=True)
    assert result.out.shape == (B, Tq, 2, 3) and not result.out.any()
    assert result.lse.shape == (B, 2, Tq) and np.all(result.lse == -INF)
    assert result.attn.shape == (B, 2, Tq, Tk)


@pytest.mark.parametrize("Hkv", [1, 2, 3])
def test_row_8_grouped_heads_read_the_head_of_their_group(engine, Hkv):
    q, k, v = engines.random(B=2, T=18, H=6, Hkv=Hkv, seed=8)
    grouped = engine(q, k, v, causal=True, return_attn=True)
    spread = (np.stack([x[:, :, h // (6 // Hkv)] for h in range(6)], axis=2) for x in (k, v))
    assert_same_bits(grouped, engine(q, *spread, causal=True, return_attn=True))
    fa.parity.compare(grouped, fa.reference.attention(q, k, v, causal=True, return_attn=True)).check()


def test_row_8_heads_that_do_not_divide_are_refused(engine):
    with pytest.raises(fa.ShapeError, match="H=6 and Hkv=4"):
        engine(*engines.random(H=6, Hkv=4))


def frozen(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


ARRAYS = {
    "transposed": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[:, ::-1, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "read-only": frozen,
    "Fortran": np.asfortranarray,
    "big-endian": lambda x: x.astype(">f4"),
    "float64": lambda x: x.astype(np.float64) * (1 + 2.0**-30),
    "float16": lambda x: x.astype(np.float16),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_row_9_any_array_as_its_float32_copy(engine, kind):
    arrays = [ARRAYS[kind](x) for x in engines.random(T=17, seed=9)]
    before = [x.tobytes() for x in arrays]
    result = engine(*arrays, causal=True)
    copies = [np.array(x, dtype=np.float32, order="C") for x in arrays]
    assert_same_bits(result, engine(*copies, causal=True))
    assert [x.tobytes() for x in arrays] == before, "an input was written to"


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, object])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_row_9_other_types_are_refused_by_name(engine, name, dtype):
    arrays = dict(zip("qkv", engines.random(T=2), strict=True))
    arrays[name] = arrays[name].astype(dtype)
    with pytest.raises(TypeError, match=f"^{name} must hold floating-point numbers"):
        engine(**arrays)


def test_row_10_the_same_call_gives_the_same_bits(engine):
    args = engines.random(B=2, T=33, seed=10)
    first = engine(*args, causal=True, return_attn=True)
    for _ in range(3):
        assert_same_bits(engine(*args, causal=True, return_attn=True), first)


@pytest.mark.parametrize("pattern", fa.data.PATTERNS)
def test_row_11_close_on_every_pattern(engine, pattern):
    check(engine, *fa.data.make(pattern, T=48, H=2, D=64, seed=11), causal=True)


def check(engine, q, k, v, **options) -> None:
    """Within twice what plain float32 arithmetic errs."""
    fa.parity.compare(engine(q, k, v, **options), fa.reference.attention(q, k, v, **options)).check()


def assert_same_bits(a: fa.Result, b: fa.Result) -> None:
    for name in ("out", "lse", "attn"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), f"{name} differs"
