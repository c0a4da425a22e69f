"""The forward pass written out step by step: each number against its formula, and the bits of `fa2_forward` itself."""

from __future__ import annotations

import re

import numpy as np
import pytest
from engines import random

import fa2lab as fa
from fa2lab import reference, source, trace
from fa2lab.kernels import FORWARD_TRACE
from fa2lab.launch import launch
from fa2lab.limits import BROWSER
from fa2lab.plan import plan
from fa2lab.problem import pose
from fa2lab.results import FULL, PARTIAL, SKIPPED, ForwardTrace

MASKS = {"full": {}, "bottom-right": {"causal": True}, "top-left": {"causal": True, "align": "top-left"}}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
FIELDS = ("s", "m", "l", "alpha", "o", "state", "seen")


def inputs(**sizes):
    return random(**(dict(B=2, T=19, Tk=37, H=4, Hkv=2, D=6) | sizes))


def of_head(arrays, batch: int, head: int, group: int) -> list[np.ndarray]:
    """One batch and query head, with the KV head that it reads: `(T, D)` each, float64."""
    return [
        x[batch, :, h].astype(np.float64) for x, h in zip(arrays, (head, head // group, head // group), strict=True)
    ]


def check(got: ForwardTrace, q, k, v, seen: np.ndarray) -> None:
    """Each step's numbers from their formula over the keys met so far, in float64. Inputs here are normal numbers.

    A score is a sum of D = 6 products below 10 and exp doubles at most that error: 1e-5 is some ten times that.
    """
    s = q @ k.T / np.sqrt(q.shape[1])
    mask = np.arange(len(k)) < seen[:, None]
    assert got.s.shape == s.shape and (got.s[~mask] == -np.inf).all()
    np.testing.assert_allclose(got.s[mask], s[mask], rtol=0, atol=1e-5)
    m = np.full(len(q), -np.inf)
    for j in range(got.m.shape[1]):
        met = mask[:, : (j + 1) * got.block_k]
        some = met.any(1)
        scores = np.where(met, s[:, : met.shape[1]], -np.inf)
        m_new = scores.max(1)
        shift = np.where(some, m_new, 0)[:, None]
        p = np.exp(scores - shift)
        alpha = np.where(some & (m == m_new), 1.0, np.exp(m - shift[:, 0])) if some.any() else np.ones(len(q))
        np.testing.assert_array_equal(np.isneginf(got.m[:, j]), ~some)
        np.testing.assert_allclose(got.m[some, j], m_new[some], rtol=0, atol=1e-5)
        np.testing.assert_allclose(got.l[:, j], p.sum(1), rtol=1e-5)
        np.testing.assert_allclose(got.alpha[some, j], alpha[some], rtol=0, atol=2e-5)
        np.testing.assert_allclose(got.o[:, j], p @ v[: met.shape[1]], rtol=0, atol=2e-5 * max(1, p.sum(1).max()))
        out = p @ v[: met.shape[1]] / np.where(some, p.sum(1), 1)[:, None]
        np.testing.assert_allclose(got.out[:, j], out, rtol=0, atol=2e-5)
        m = m_new


@each_mask
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_reference_is_the_formula_at_each_step(mask, dtype):
    arrays = inputs(B=1, H=1, Hkv=1)
    problem, *posed = pose(*arrays, **mask)
    got = reference.trace_forward(problem, *posed, 8, 5, dtype)
    assert all(getattr(got, name).dtype == dtype for name in ("s", "m", "l", "alpha", "o"))
    check(got, *of_head(arrays, 0, 0, 1), problem.keys_seen())


@each_mask
def test_the_kernel_is_the_formula_at_each_step(roomy_device, mask):
    """Of a batch and head that are not the first, with a KV head that others share; the last tiles are ragged."""
    arrays = inputs()
    got = fa.forward_trace(*arrays, batch=1, head=3, block_q=8, block_k=8, device=roomy_device, **mask)
    assert (got.block_q, got.block_k) == (8, 8) and got.m.shape == (19, 5) and got.o.shape == (19, 5, 6)
    check(got, *of_head(arrays, 1, 3, 2), pose(*arrays, **mask)[0].keys_seen())
    assert got.label == f"fa2_forward_trace on {roomy_device.adapter}"


@each_mask
def test_it_has_the_bits_of_the_kernel_that_it_stands_for(roomy_device, mask):
    """A recording that differed in the last bit would be of another kernel. Division aside, O is the same too."""
    arrays = inputs()
    got = fa.forward_trace(*arrays, batch=1, head=2, block_q=8, block_k=8, device=roomy_device, **mask)
    result = fa.attention(*arrays, kernel="fa2_forward", trace=True, block_q=8, block_k=8, device=roomy_device, **mask)
    for name in ("m", "l", "alpha"):
        np.testing.assert_array_equal(getattr(got, name), getattr(result.trace, name)[1, 2])
    np.testing.assert_array_equal(got.state, result.trace.state[1, 2, ::8])
    # WGSL allows a division 2.5 ULP.
    np.testing.assert_array_max_ulp(got.out[:, -1], result.out[1, :, 2], maxulp=3)


def test_without_a_device_numpy_walks_and_says_so():
    arrays = inputs()
    got = fa.forward_trace(*arrays, batch=1, head=3, block_q=8, block_k=8, causal=True, device="numpy")
    check(got, *of_head(arrays, 1, 3, 2), pose(*arrays, causal=True)[0].keys_seen())
    assert "NumPy float32" in got.adapter and got.kernel == "fa2_forward_trace"


def test_tiles_are_those_of_fa2_forward(gpu):
    arrays = inputs(D=100)
    planned = fa.plan(pose(*arrays)[0], gpu.limits, "fa2_forward")
    got = fa.forward_trace(*arrays, device=gpu)
    assert (got.block_q, got.block_k) == (planned.block_q, planned.block_k)


def test_a_skipped_tile_repeats_the_end(roomy_device):
    got = fa.forward_trace(*inputs(T=16, Tk=16), causal=True, block_q=4, block_k=4, device=roomy_device)
    assert (np.diag(got.state) == PARTIAL).all()
    assert (got.state[np.triu_indices(4, 1)] == SKIPPED).all() and (got.state[np.tril_indices(4, -1)] == FULL).all()
    for i in range(4):
        rows = slice(4 * i, 4 * i + 4)
        for name in ("m", "l", "o"):
            after = getattr(got, name)[rows, i:]
            np.testing.assert_array_equal(after, np.broadcast_to(after[:, :1], after.shape))
        assert (got.alpha[rows, i + 1 :] == 1).all()


def test_what_no_row_sees_never_shows(seat):
    """NaN and infinity in K and V at masked keys; and rows that see no key at all."""
    q, k, v = inputs(T=12, Tk=9, H=2)
    options = dict(causal=True, block_q=4, block_k=4, device=seat)
    clean = fa.forward_trace(q, k, v, align="bottom-right", **options)
    assert (clean.m[:3] == -np.inf).all() and not clean.l[:3].any() and not clean.out[:3].any()
    k, v = k.copy(), v.copy()
    q = q[:, :6]  # top-left: the last three keys are seen by nobody
    clean = fa.forward_trace(q, k, v, align="top-left", **options)
    k[:, 6:], v[:, 6:] = np.nan, np.inf
    poisoned = fa.forward_trace(q, k, v, align="top-left", **options)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(poisoned, name), getattr(clean, name))
    assert np.isfinite(clean.o).all()


def test_a_value_that_is_not_finite_spreads_as_in_float64(seat):
    q, k, v = inputs(B=1, H=1, Hkv=1, T=8, Tk=8)
    v[0, 2, 0, 1] = np.nan
    got = fa.forward_trace(q, k, v, causal=True, block_q=4, block_k=4, device=seat)
    bad = np.isnan(got.out)
    assert not bad[:2].any() and bad[2:, :, 1].all() and not np.delete(bad, 1, axis=2).any()


def test_the_same_call_gives_the_same_bits(roomy_device):
    one, two = (fa.forward_trace(*inputs(), head=1, causal=True, device=roomy_device) for _ in range(2))
    for name in FIELDS:
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()


def test_inputs_of_any_kind_are_left_alone(gpu):
    """Float64, Fortran order, read-only."""
    arrays = inputs()
    odd = [np.asfortranarray(x.astype(np.float64)) for x in arrays]
    for x in odd:
        x.flags.writeable = False
    one, two = (fa.forward_trace(*given, batch=1, head=2, device=gpu) for given in (arrays, odd))
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


@pytest.mark.parametrize("sizes", [dict(T=1, Tk=1), dict(T=1, Tk=9), dict(T=9, Tk=1)], ids=str)
def test_smallest_sizes(seat, sizes):
    arrays = inputs(**sizes)
    got = fa.forward_trace(*arrays, batch=1, head=3, block_q=4, block_k=4, device=seat)
    check(got, *of_head(arrays, 1, 3, 2), pose(*arrays)[0].keys_seen())


@pytest.mark.parametrize("place", [dict(batch=2), dict(head=4), dict(head=-1)])
def test_a_batch_or_head_that_is_not_there(place):
    name, number = next(iter(place.items()))
    with pytest.raises(IndexError, match=f"{name} must be from 0 to .; got {number}"):
        fa.forward_trace(*inputs(), **place, device="numpy")


def test_what_does_not_fit_is_refused_before_anything_is_sent(gpu):
    with pytest.raises(fa.LimitError, match="block_q"):
        fa.forward_trace(*inputs(), block_q=-1, device=gpu)
    with pytest.raises(fa.LimitError, match="workgroup memory"):
        fa.forward_trace(*inputs(D=128), block_q=256, block_k=256, device=gpu)
    with pytest.raises(fa.ShapeError):
        fa.forward_trace(*inputs()[:2], inputs(H=3, Hkv=3)[2], device=gpu)


def test_the_plan_counts_its_bytes(gpu):
    problem, *arrays = pose(*inputs(B=1, H=1, Hkv=1))
    planned = plan(problem, gpu.limits, FORWARD_TRACE, trace=True, block_q=8, block_k=8)
    _, used = launch(planned, dict(zip("qkv", arrays, strict=True)), gpu)
    assert used == planned.device_bytes
    assert planned.kernel.passes[0].storage_buffers <= BROWSER.storage_buffers


BREAKAGES = [
    ("S is recorded", "+ key0 + c] = s[c];", "+ key0 + c] = s[c] * s[c];"),
    ("S stands at its key", "params.n_k + key0 + c]", "params.n_k + key0]"),
    ("S is scaled", "return s * params.scale;", "return s;"),
    ("l is rescaled", "l *= alpha;", ""),
    ("O is rescaled", "o[d] *= alpha;", ""),
    ("alpha is recorded", "vec4<f32>(m, l, alpha, state)", "vec4<f32>(m, l, 1.0, state)"),
    ("O is recorded at its step", "o_steps[step * HEAD_DIM + d]", "o_steps[(step - j) * HEAD_DIM + d]"),
    ("the mask's edge", "min(max(seen, key0) - key0, BLOCK_K)", "min(max(seen + 1u, key0) - key0, BLOCK_K)"),
    ("no tile is left out", "if (key0 < seen_by_tile) {", "if (key0 + BLOCK_K < seen_by_tile) {"),
    ("the row of a later tile of queries", "let row = row0 + lane;", "let row = row0 * 0u + lane;"),
    ("a skipped tile has alpha 1", "var alpha = 1.0;", "var alpha = 0.0;"),
]


@pytest.mark.parametrize(("guarantee", "old", "new"), BREAKAGES, ids=[guarantee for guarantee, *_ in BREAKAGES])
def test_a_broken_kernel_is_red(gpu, monkeypatch, guarantee, old, new):
    """As many queries as keys, causal: the mask's edge runs through tiles, and some are skipped."""
    arrays = inputs(B=1, T=22, Tk=22, H=1, Hkv=1)

    def checked() -> None:
        got = fa.forward_trace(*arrays, block_q=4, block_k=4, causal=True, device=gpu)
        check(got, *of_head(arrays, 0, 0, 1), pose(*arrays, causal=True)[0].keys_seen())

    checked()
    monkeypatch.setattr(trace, "FORWARD_TRACE", FORWARD_TRACE.edited(old, new))
    with pytest.raises(AssertionError):
        checked()


def test_the_kernel_s_file_is_what_the_table_says():
    (stage,) = FORWARD_TRACE.passes
    text = source.read(stage.file)
    found = re.findall(r"@group\(0\) @binding\((\d+)\) var<(\w+)(?:, (\w+))?> (\w+)", text)
    declared = [(int(number), name, access or space) for number, space, access, name in found]
    assert declared == [(i, name, access) for i, (name, access) in enumerate(stage.bindings)]
    assert "workgroupBarrier" not in text and "var<workgroup>" not in text, "so no barrier can be missing"


@pytest.mark.parametrize("checks", [True, False])
def test_shader_checks_change_no_bit(gpu, checks):
    device = fa.Device(gpu.adapter.name, shader_checks=checks)
    one, two = (fa.forward_trace(*inputs(D=7), causal=True, device=d) for d in (gpu, device))
    for name in FIELDS:
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
