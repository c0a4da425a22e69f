"""The reference: the merge algebra, the walk over tiles, and the original project's twelve checks."""

from __future__ import annotations

import itertools
import tracemalloc
from functools import reduce

import engines
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fa2lab as fa
from fa2lab import reference
from fa2lab.reference import State, forward, merge, online
from fa2lab.results import FULL, PARTIAL, SKIPPED


def by_formula(q, k, v, scale, visible):
    """Attention of one head in plain Python over float64: O and L, a row at a time."""
    outs, lses = [], []
    for row, seen in zip(q.astype(np.float64), visible, strict=True):
        s = [scale * sum(row * key) for key in k[seen].astype(np.float64)]
        weights = [np.exp(x - max(s)) for x in s]
        outs.append(sum(w * value for w, value in zip(weights, v[seen].astype(np.float64), strict=True)) / sum(weights))
        lses.append(max(s) + np.log(sum(weights)))
    return np.array(outs), np.array(lses)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_its_formula(causal):
    q, k, v = engines.random(B=2, T=5, Tk=7, H=4, Hkv=2, D=3)
    r = reference.attention(q, k, v, causal=causal, scale=0.7, return_attn=True)
    for b, h in itertools.product(range(2), range(4)):
        out, lse = by_formula(q[b, :, h], k[b, :, h // 2], v[b, :, h // 2], 0.7, r.problem.mask())
        np.testing.assert_allclose(r.out[b, :, h], out, rtol=1e-12)
        np.testing.assert_allclose(r.lse[b, h], lse, rtol=1e-12)
        np.testing.assert_allclose(r.attn[b, h] @ v[b, :, h // 2], out, rtol=1e-12)


def test_attention_takes_rows_in_blocks_and_keeps_memory_bounded(monkeypatch):
    args = engines.random(T=40, H=2)
    whole = reference.attention(*args, causal=True, return_attn=True)
    monkeypatch.setattr(forward, "SCORES_AT_ONCE", 7 * 2 * 40)
    blocks = reference.attention(*args, causal=True, return_attn=True)
    rounding = 40 * 2.0**-53 * max(np.abs(args[2]).max(), np.abs(whole.lse).max())  # 40 terms, in another order
    for name in ("out", "lse", "attn"):
        np.testing.assert_allclose(getattr(blocks, name), getattr(whole, name), rtol=0, atol=rounding)

    monkeypatch.setattr(forward, "SCORES_AT_ONCE", 1 << 14)
    long = engines.random(T=2048, H=1, D=4)
    tracemalloc.start()
    reference.attention(*long)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2048 * 2048 * 8 / 4, "a quarter of what all scores at once would take"


def test_results_say_who_computed_and_in_what():
    args = engines.random(T=3)
    assert reference.attention(*args).label == "reference on NumPy float64"
    assert reference.tiled(*args, dtype=np.float32).label == "reference.tiled on NumPy float32"
    assert reference.attention(*args).out.dtype == np.float64
    assert {x.dtype for x in vars(reference.tiled(*args, dtype=np.float32)).values() if isinstance(x, np.ndarray)} == {
        np.dtype(np.float32)
    }


# The merge.

finite = st.floats(-50, 50, width=32)
blocks_of = st.integers(0, 6).flatmap(
    lambda n: st.tuples(arrays(np.float64, n, elements=finite), arrays(np.float64, (n, 2), elements=finite))
)


def block(pair) -> State:
    return State.of(*pair) if len(pair[0]) else State.empty(2)


def assert_same_state(a: State, b: State) -> None:
    """Equal but for the order of at most a dozen float64 sums of terms below 50."""
    assert a.m == b.m
    np.testing.assert_allclose(a.l, b.l, rtol=1e-14)
    np.testing.assert_allclose(a.o, b.o, rtol=1e-14, atol=1e-12)


@given(blocks_of)
def test_the_empty_state_is_the_identity_of_merge(pair):
    state = block(pair)
    for merged in (merge(state, State.empty(2)), merge(State.empty(2), state)):
        assert (merged.m, merged.l) == (state.m, state.l) and np.array_equal(merged.o, state.o)


@given(blocks_of, blocks_of)
def test_merge_commutes_to_the_bit(a, b):
    ab, ba = merge(block(a), block(b)), merge(block(b), block(a))
    assert (ab.m, ab.l) == (ba.m, ba.l) and np.array_equal(ab.o, ba.o)


@given(blocks_of, blocks_of, blocks_of)
def test_merge_associates(a, b, c):
    a, b, c = map(block, (a, b, c))
    assert_same_state(merge(merge(a, b), c), merge(a, merge(b, c)))


@given(st.lists(blocks_of, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_tiles_in_any_order_give_the_softmax_over_all_keys(pairs, random):
    whole = block((np.concatenate([s for s, _ in pairs]), np.concatenate([v for _, v in pairs])))
    shuffled = random.sample(pairs, len(pairs))
    assert_same_state(reduce(merge, map(block, shuffled)), whole)


@given(blocks_of)
def test_online_ends_where_the_whole_block_does(pair):
    s, v = pair
    states = list(online(s, v)) if len(s) else [State.empty(2)]
    assert len(states) == len(s) + 1
    assert (states[0].m, states[0].l) == (-np.inf, 0)
    for n, state in enumerate(states):
        assert_same_state(state, block((s[:n], v[:n])))


def test_online_on_numbers_for_paper():
    """s = ln 1, ln 2, ln 4 with v = 1, 2, 3: O = (1 + 4 + 12) / 7, L = ln 7."""
    *_, last = online(np.log([1, 2, 4]), [1, 2, 3])
    np.testing.assert_allclose([last.m, last.l, last.o[0]], [np.log(4), 7 / 4, 17 / 4], rtol=1e-15)
    np.testing.assert_allclose([last.out[0], last.lse], [17 / 7, np.log(7)], rtol=1e-15)


def test_a_state_without_keys_gives_zero_and_minus_infinity():
    state = State.of([], [])
    assert state.out.tolist() == [0] and state.lse == -np.inf
    assert merge(State.empty(), State.empty()).lse == -np.inf


# The walk over tiles.


@pytest.mark.parametrize(("block_q", "block_k"), [(16, 16), (1, 1), (4, 7), (7, 4), (64, 64)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "align": "top-left"}], ids=["full", "bottom-right", "top-left"]
)
@pytest.mark.parametrize(("Tq", "Tk"), [(20, 20), (9, 30), (30, 9)])
def test_the_walk_gives_what_the_formula_gives(block_q, block_k, options, Tq, Tk):
    args = engines.random(T=Tq, Tk=Tk, H=2, D=4)
    walk = reference.tiled(*args, block_q=block_q, block_k=block_k, return_attn=True, **options)
    whole = reference.attention(*args, return_attn=True, **options)
    for name in ("out", "lse", "attn"):
        np.testing.assert_allclose(getattr(walk, name), getattr(whole, name), rtol=1e-12, atol=1e-13, err_msg=name)


def test_the_trace_is_the_prefix_softmax():
    """After each tile, m and l are those of the row's visible keys so far; alpha is how far m moved."""
    args = engines.random(T=20, H=2, D=4)
    walk = reference.tiled(*args, block_q=8, block_k=6, causal=True)
    q, k, _ = (np.moveaxis(x.astype(np.float64), 2, 1) for x in args)
    s = np.where(walk.problem.mask(), q @ k.swapaxes(-1, -2) / 2, -np.inf)
    before = np.full(s.shape[:3], -np.inf)
    for j in range(walk.trace.n_tiles):
        seen = s[..., : 6 * (j + 1)]
        m = seen.max(-1)
        np.testing.assert_allclose(walk.trace.m[..., j], m, rtol=1e-14)
        np.testing.assert_allclose(walk.trace.l[..., j], np.exp(seen - m[..., None]).sum(-1), rtol=1e-13)
        np.testing.assert_allclose(walk.trace.alpha[..., j], np.exp(before - m), rtol=1e-12)
        before = m


def test_tile_states_of_a_causal_map():
    """Br = 4, Bc = 4, T = 12: on the diagonal partial, below full, above skipped."""
    state = reference.tiled(*engines.random(T=12), block_q=4, block_k=4, causal=True).trace.state
    assert state.dtype == np.uint8 and state.shape == (1, 2, 12, 3)
    expected = [[PARTIAL, SKIPPED, SKIPPED], [FULL, PARTIAL, SKIPPED], [FULL, FULL, PARTIAL]]
    assert state[0, 1, ::4].tolist() == expected
    assert np.array_equal(state[:, :, 0::4], state[:, :, 3::4]), "the rows of a tile share its state"


def test_tile_states_without_a_mask_and_without_a_view():
    assert np.all(reference.tiled(*engines.random(T=12)).trace.state == FULL)
    walk = reference.tiled(*engines.random(T=40, Tk=2), causal=True, block_q=4)
    assert np.all(walk.trace.state[:, :, :36] == SKIPPED)
    assert np.all(walk.trace.m[:, :, :38] == -np.inf) and not walk.trace.l[:, :, :38].any()


# The original project's proof: six shapes B·T·C·H, for each the context and the attention matrix: twelve checks.
# It ran in JavaScript, whose arithmetic is double and whose arrays are float32. So the twin is held against the naive
# evaluation twice: both in float64 and rounded to float32 at the end, and both in float32 throughout. Inputs have the
# size that its model starts with: a layer-normalised row through a projection of standard deviation 0.02, so
# 0.02 · √C. Larger inputs give larger outputs, whose float32 spacing alone passes 6e-8 (it is 1.2e-7 from 1 on).
ORIGINAL_SHAPES = [(1, 16, 32, 4), (1, 8, 32, 2), (1, 20, 32, 4), (1, 48, 64, 4), (1, 256, 64, 2), (1, 32, 128, 2)]
original = pytest.mark.parametrize(
    ("B", "T", "C", "H"), ORIGINAL_SHAPES, ids=["·".join(map(str, shape)) for shape in ORIGINAL_SHAPES]
)
seeds = pytest.mark.parametrize("seed", range(3))


def original_inputs(B, T, C, H, seed):
    return tuple(np.float32(0.02 * C**0.5) * x for x in engines.random(B=B, T=T, H=H, D=C // H, seed=seed))


@original
@seeds
def test_twin_context_within_6e_8_in_float32(B, T, C, H, seed):
    args = original_inputs(B, T, C, H, seed)
    twin = reference.tiled(*args, block_q=16, block_k=16, causal=True, dtype=np.float32)
    naive = reference.attention(*args, causal=True, dtype=np.float32)
    assert np.abs(twin.out - naive.out).max() <= 6e-8


@original
@seeds
def test_twin_attention_written_back_is_the_same_to_the_bit_in_float32(B, T, C, H, seed):
    """exp(s - m) / l by tiles, with the m and l that the walk ended with, against one pass over the whole row."""
    q, k, v = original_inputs(B, T, C, H, seed)
    twin = reference.tiled(q, k, v, block_q=16, block_k=16, causal=True, dtype=np.float32, return_attn=True)
    s = np.zeros((B, H, T, T), np.float32)
    for d in range(C // H):  # one accumulator, in the order of the index
        s += q[..., d].transpose(0, 2, 1)[..., :, None] * k[..., d].transpose(0, 2, 1)[..., None, :]
    s *= np.float32(1 / np.sqrt(C // H))
    visible = np.tril(np.ones((T, T), bool))
    m, l = np.where(visible, s, -np.inf).max(-1), twin.trace.l[..., -1]  # noqa: E741
    np.testing.assert_array_equal(twin.trace.m[..., -1], m)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(twin.attn, np.where(visible, np.exp(s - m[..., None]) / l[..., None], 0))


@original
@seeds
def test_twin_in_double_with_float32_storage(B, T, C, H, seed):
    args = original_inputs(B, T, C, H, seed)
    twin = reference.tiled(*args, block_q=16, block_k=16, causal=True, return_attn=True)
    naive = reference.attention(*args, causal=True, return_attn=True)
    assert np.abs(np.float32(twin.out) - np.float32(naive.out)).max() <= 6e-8
    np.testing.assert_array_equal(np.float32(twin.attn), np.float32(naive.attn))


@original
def test_twin_at_unit_scale_stays_within_the_ratio_rule(B, T, C, H):
    args = engines.random(B=B, T=T, H=H, D=C // H)
    twin = reference.tiled(*args, causal=True, dtype=np.float32, return_attn=True)
    fa.parity.compare(twin, reference.attention(*args, causal=True, return_attn=True)).check()


def test_plain_arithmetic_sums_in_the_order_of_the_index():
    """1e8 + 1 - 1e8 is 0 in float32 in this order, 1 in others."""
    q, v = np.zeros((1, 1, 1, 1), np.float32), np.array([1e8, 1, -1e8], np.float32)[None, :, None, None]
    r = reference.attention(q, np.zeros_like(v), v, dtype=np.float32)
    assert r.out.item() == 0
    assert reference.attention(q, np.zeros_like(v), v).out.item() == pytest.approx(1 / 3)
