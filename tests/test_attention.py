"""attention(): the original's live check, tiles, splitting, traces, bytes, and the NumPy engine."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace

import engines
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fa2lab as fa
from fa2lab.results import FULL, PARTIAL, SKIPPED

KERNELS = tuple(engines.KERNELS)
OPTIONS = {"full": {}, "bottom-right": {"causal": True}, "top-left": {"causal": True, "align": "top-left"}}
each_mask = pytest.mark.parametrize("mask", OPTIONS)


def check(result: fa.Result, q, k, v, **options) -> None:
    truth = fa.reference.attention(q, k, v, return_attn=result.attn is not None, **options)
    fa.parity.compare(result, truth).check()
    if result.trace is not None and result.trace.m.size:
        fa.parity.compare_traces(result, truth).check()


def same_bits(a: fa.Result, b: fa.Result) -> bool:
    pairs = [(a.out, b.out), (a.lse, b.lse), (a.attn, b.attn)]
    pairs += [(getattr(a.trace, n), getattr(b.trace, n)) for n in ("m", "l", "alpha", "state") if a.trace and b.trace]
    return all(x is y is None or x.tobytes() == y.tobytes() for x, y in pairs)


# The original project's live check: B·T·C·H = 2·48·24·3.


def test_the_kernels_agree_within_1e_4_on_the_original_live_shape(device):
    args = engines.random(B=2, T=48, H=3, D=8)
    truth = fa.reference.attention(*args, causal=True, return_attn=True)
    results = [fa.attention(*args, causal=True, return_attn=True, kernel=name, device=device) for name in KERNELS]
    for result in results:
        for other in (truth, *results):
            assert np.abs(result.out - other.out).max() <= 1e-4
            assert np.abs(result.attn - other.attn).max() <= 1e-4
        fa.parity.compare(result, truth, atol=1e-4).check()


# Tiles.

TILES = [(16, 16), (1, 1), (4, 7), (16, 4), (5, 16), (64, 48)]


@pytest.mark.parametrize(("block_q", "block_k"), TILES)
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 1), (17, 17), (20, 33), (33, 20), (48, 48)])
@each_mask
def test_every_tile_gives_the_truth_with_its_trace(roomy_device, block_q, block_k, Tq, Tk, mask):
    args = engines.random(T=Tq, Tk=Tk, D=8, seed=Tq)
    options = OPTIONS[mask]
    result = fa.attention(*args, device=roomy_device, block_q=block_q, block_k=block_k, trace=True, **options)
    assert (result.plan.block_q, result.plan.block_k) == (block_q, block_k)
    check(result, *args, **options)


def test_attn_and_trace_together_at_a_wider_head(device):
    args = engines.random(T=33, D=40)
    check(fa.attention(*args, device=device, causal=True, return_attn=True, trace=True), *args, causal=True)


def test_asking_for_attn_or_a_trace_changes_no_bit_of_o_and_l(device):
    args = engines.random(T=33)
    plain = fa.attention(*args, device=device, causal=True, kernel="fa2_forward")
    for wishes in ({"return_attn": True}, {"trace": True}):
        other = fa.attention(*args, device=device, causal=True, kernel="fa2_forward", **wishes)
        assert other.out.tobytes() == plain.out.tobytes() and other.lse.tobytes() == plain.lse.tobytes()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thousand_keys(device, kernel):
    """Mesa takes half a minute to compile fused_sv's longest private row, so there it gets 256 keys."""
    Tk = 256 if kernel == "fused_sv" and "llvmpipe" in device.adapter.name else 1024
    args = engines.random(T=8, Tk=Tk, H=1)
    check(fa.attention(*args, device=device, kernel=kernel, causal=True), *args, causal=True)


def test_auto_takes_fa2_forward(device):
    for computes in (device, "numpy"):
        assert fa.attention(*engines.random(), device=computes).kernel == "fa2_forward"


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_small_shape_on_any_kernel(roomy_device, data):
    group, Hkv = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    sizes = dict(
        B=data.draw(st.integers(1, 3)),
        T=data.draw(st.integers(1, 40)),
        Tk=data.draw(st.integers(1, 40)),
        H=group * Hkv,
        Hkv=Hkv,
        D=data.draw(st.sampled_from([1, 3, 8])),
        seed=data.draw(st.integers(0, 5)),
    )
    options = OPTIONS[data.draw(st.sampled_from(sorted(OPTIONS)))] | {
        "scale": data.draw(st.sampled_from([None, 0.0, -0.7, 3.0]))
    }
    args = engines.random(**sizes)
    check(
        fa.attention(*args, kernel=data.draw(st.sampled_from(KERNELS)), device=roomy_device, **options),
        *args,
        **options,
    )


# Splitting what one binding does not hold.

SPLITS = {"batches": 12, "a batch at a time": 4, "groups": 2, "heads of a group": 1}  # heads that one binding holds


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("split", SPLITS)
def test_splitting_changes_no_bit(roomy_device, monkeypatch, split, kernel):
    args = engines.random(B=5, T=18, H=4, Hkv=2)
    wishes = dict(device=roomy_device, kernel=kernel, causal=True, return_attn=True, trace=kernel == "fa2_forward")
    whole = fa.attention(*args, **wishes)
    assert len(whole.plan.chunks) == 1
    head = max(whole.plan.buffer_bytes().values()) // 20
    monkeypatch.setattr(roomy_device, "limits", replace(roomy_device.limits, binding_bytes=SPLITS[split] * head))
    parts = fa.attention(*args, **wishes)
    assert len(parts.plan.chunks) == {"batches": 2, "a batch at a time": 5, "groups": 10, "heads of a group": 20}[split]
    assert same_bits(parts, whole)
    assert parts.device_bytes == parts.plan.device_bytes < whole.device_bytes


def test_batch_times_heads_beyond_a_dispatch_dimension(roomy_device):
    q, k, v = engines.random(B=35_000, T=1, Tk=2, H=2, D=1)
    result = fa.attention(q, k, v, device=roomy_device)
    assert len(result.plan.chunks) == 2 and result.plan.limits.workgroups == 65_535
    check(result, q, k, v)


@pytest.mark.parametrize("kernel", KERNELS)
def test_few_workgroups_in_a_dimension_change_no_bit(roomy_device, monkeypatch, kernel):
    args = engines.random(B=5, T=7, H=3)
    whole = fa.attention(*args, kernel=kernel, device=roomy_device)
    monkeypatch.setattr(roomy_device, "limits", replace(roomy_device.limits, workgroups=7))
    parts = fa.attention(*args, kernel=kernel, device=roomy_device)
    assert [c.problem.B * c.problem.H for c in parts.plan.chunks] == [6, 6, 3] and same_bits(parts, whole)


# Refusals, and bytes.


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_refusal_comes_before_anything_is_uploaded(device, monkeypatch, kernel):
    device.memory.reset_peak()
    monkeypatch.setattr(device, "limits", replace(device.limits, binding_bytes=1000))
    with pytest.raises(fa.LimitError, match="One head's .* takes .* B; one binding of this device holds 1,000 B"):
        fa.attention(*engines.random(T=100), device=device, kernel=kernel)
    assert device.memory.peak_bytes == 0


def test_refusals_by_kernel_and_size(roomy_device):
    args = engines.random(T=1, Tk=1025, H=1, D=1)
    roomy_device.memory.reset_peak()
    with pytest.raises(fa.LimitError, match="fused_sv .* up to 1024 keys; got Tk=1,025"):
        fa.attention(*args, device=roomy_device, kernel="fused_sv")
    with pytest.raises(fa.KernelError, match="'fa3'.*'naive', 'fused_sv', 'fa2_forward'"):
        fa.attention(*args, device=roomy_device, kernel="fa3")
    with pytest.raises(fa.LimitError, match="from 1 to 256; got D=257"):
        fa.attention(*engines.random(T=2, D=257), device=roomy_device)
    long = np.broadcast_to(np.float32(0), (1, 2**21, 1, 1))
    with pytest.raises(fa.LimitError, match="131,072 workgroups .* for Tq=2,097,152 .* allows 65,535"):
        fa.attention(long, long, long, device=roomy_device)
    for endless in ((1, 10**9, 10**4, 64), (10**9, 1, 100, 1), (10**6, 16, 16, 256)):
        with pytest.raises(fa.LimitError, match="B for its arrays; this machine has"):
            fa.attention(*[np.broadcast_to(np.float32(0), endless)] * 3, device=roomy_device)
    assert roomy_device.memory.peak_bytes == 0


@pytest.mark.parametrize("wishes", [{}, {"return_attn": True}, {"trace": True}], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_byte_model_is_what_the_device_counts(device, kernel, wishes):
    if "trace" in wishes and not fa.kernels()[kernel].traces:
        with pytest.raises(fa.KernelError, match="Able: fa2_forward"):
            fa.attention(*engines.random(), device=device, kernel=kernel, **wishes)
        return
    for sizes in (dict(T=1, H=1, D=1), dict(B=2, T=33, H=4, Hkv=2), dict(T=20, Tk=50)):
        result = fa.attention(*engines.random(**sizes), device=device, kernel=kernel, **wishes)
        assert result.device_bytes == result.plan.device_bytes > 0
    assert result.plan.workgroup_bytes <= device.limits.workgroup_bytes


def test_without_attn_no_square_buffer_exists(roomy_device):
    """At T = 600 the device holds 5 arrays of T·H·D, one of T·H, and a staging copy: far less than T² floats."""
    T, H, D = 600, 2, 8
    args = engines.random(T=T, H=H, D=D)
    lean = fa.attention(*args, device=roomy_device, kernel="fa2_forward")
    assert lean.device_bytes == 4 * (5 * T * H * D + T * H) + 48 + 2 * 16  # q k v out, out read back, lse, two unused
    assert lean.device_bytes < 4 * T * T < fa.attention(*args, device=roomy_device, kernel="naive").device_bytes


# Traces.


def test_a_trace_of_skipped_partial_and_full_tiles(device):
    result = fa.attention(*engines.random(T=24), device=device, causal=True, trace=True, block_q=8, block_k=8)
    trace = result.trace
    assert trace.m.shape == (1, 2, 24, 3) and trace.n_tiles == 3 and (trace.block_q, trace.block_k) == (8, 8)
    expected = [[PARTIAL, SKIPPED, SKIPPED], [FULL, PARTIAL, SKIPPED], [FULL, FULL, PARTIAL]]
    assert trace.state[0, 0, ::8].tolist() == expected and trace.state.dtype == np.uint8
    for row in range(24):
        last = row // 8
        for seen in (trace.m[:, :, row], trace.l[:, :, row]):
            assert np.all(seen[..., last:] == seen[..., [last]]), "a skipped tile repeats the end"
        assert np.all(trace.alpha[:, :, row, last + 1 :] == 1)
    ends = trace.m[..., -1] + np.log(trace.l[..., -1].astype(np.float64))
    np.testing.assert_allclose(ends, result.lse, atol=1e-5)


def test_a_trace_of_rows_that_see_no_key(device):
    args = engines.random(T=40, Tk=6)
    result = fa.attention(*args, device=device, causal=True, trace=True)
    assert np.all(result.trace.m[:, :, :34] == -np.inf) and not result.trace.l[:, :, :34].any()
    assert np.all(result.trace.state[:, :, :16] == SKIPPED)
    check(result, *args, causal=True)


@pytest.mark.parametrize(("Tq", "Tk", "tiles"), [(0, 20, 2), (20, 0, 0)])
def test_a_trace_of_nothing(roomy_device, Tq, Tk, tiles):
    q, k = np.ones((1, Tq, 2, 4), np.float32), np.ones((1, Tk, 2, 4), np.float32)
    for device in (roomy_device, "numpy"):
        trace = fa.attention(q, k, k, device=device, trace=True).trace
        assert trace.m.shape == trace.state.shape == (1, 2, Tq, tiles)


# The result, and who computes.


def test_the_result_says_what_was_run(device):
    result = fa.attention(*engines.random(), device=device, kernel="naive")
    assert result.label == f"naive on {device.adapter}" and result.adapter == str(device.adapter)
    assert (result.attn, result.trace) == (None, None) and result.out.dtype == result.lse.dtype == np.float32
    assert result.plan.limits == device.limits and str(result.problem) == "B=1 T=16 H=2 D=8 full"
    result.out[:] = 0  # the caller's own memory
    with pytest.raises(FrozenInstanceError):
        result.out = None


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_numpy_engine_never_passes_for_a_gpu(kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for by name, it has nothing to warn of
        result = fa.attention(*engines.random(), kernel=kernel, device="numpy", return_attn=True)
    assert result.label == f"{kernel} on NumPy float32 on the CPU (no GPU adapter)"
    assert result.device_bytes is None
    check(result, *engines.random())


def test_the_numpy_engine_walks_the_tiles_of_a_browser():
    args = engines.random(T=33, D=256)
    result = fa.attention(*args, device="numpy", causal=True, trace=True)
    assert (result.trace.block_q, result.trace.block_k) == (8, 4)
    assert fa.attention(*args, device="numpy").trace is None
    check(result, *args, causal=True)
    with pytest.raises(fa.LimitError, match="16,384 B"):
        fa.attention(*args, device="numpy", kernel="fa2_forward", block_q=16, block_k=16)


@pytest.mark.parametrize("computes", ["cuda", 0, False, fa.Device], ids=str)
def test_a_device_that_is_none_is_refused(computes):
    with pytest.raises(TypeError, match='device must be a fa2lab.Device, "numpy" or None'):
        fa.attention(*engines.random(), device=computes)


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_the_default_device_is_made_once_and_holds_nothing():
    result = fa.attention(*engines.random())
    assert result.adapter == str(fa.adapters()[0]) and fa.default_device() is fa.default_device()
    assert fa.default_device().memory.live_buffers == 0


def test_calls_from_several_threads_wait_for_each_other(roomy_device):
    inputs = [engines.random(T=20, seed=seed) for seed in range(8)]
    alone = [fa.attention(*args, device=roomy_device) for args in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda args: fa.attention(*args, device=roomy_device), inputs))
    assert all(map(same_bits, together, alone))
    assert {r.device_bytes for r in together} == {alone[0].device_bytes}


def test_numpy_does_not_pass_for_an_edited_kernel():
    edited = fa.kernels()["fa2_forward"].edited("l *= alpha;", "")
    with pytest.raises(fa.KernelError, match=r"fa2_forward \(edited\) needs a GPU adapter"):
        fa.attention(*engines.random(T=20), kernel=edited, device="numpy")


def test_an_edited_kernels_result_says_so(roomy_device):
    edited = fa.kernels()["fa2_forward"].edited("l *= alpha;", "")
    assert fa.attention(*engines.random(T=20), kernel=edited, device=roomy_device).kernel == "fa2_forward (edited)"
