"""Gradients from every backward kernel on every device, held against float64, head by head."""

from __future__ import annotations

from dataclasses import replace

import engines
import gradients
import numpy as np
import pytest
from gradients import CAUSAL, FIELDS, MASKS, TOP_LEFT, assert_same_bits, check, every_solver
from hypothesis import given
from hypothesis import strategies as st

import fa2lab as fa
from fa2lab.kernels import BACKWARD_TRACE
from fa2lab.limits import BROWSER
from fa2lab.problem import Problem

both_kernels = pytest.mark.parametrize("kernel", ["fa2", "materialised"])


def column(*numbers) -> np.ndarray:
    """(1, T, 1, 1): one batch, one head, D = 1."""
    return np.array(numbers, np.float32)[None, :, None, None]


# Sizes, masks, scales.


@every_solver
@pytest.mark.parametrize("T", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_lengths_around_a_tile_edge(solver, T, mask):
    arrays = gradients.random(B=2, T=T, H=2)
    check(solver(*arrays, **mask), *arrays, **mask)


@every_solver
@MASKS
@pytest.mark.parametrize(("Tq", "Tk"), [(1, 33), (33, 1), (17, 40), (40, 17), (5, 16), (16, 5)])
def test_more_or_fewer_keys_than_queries(solver, mask, Tq, Tk):
    arrays = gradients.random(T=Tq, Tk=Tk)
    check(solver(*arrays, **mask), *arrays, **mask)


# Tint's compile time grows with the tile, to seconds: from D = 40 on it compiles the kernel that is kept, for a
# browser's limits, and from 80 on with small tiles.
SMALL_TILES = {80: (2, 2), 128: (2, 2), 256: (1, 1)}


def head_dimensions() -> list:
    """Each solver with each D."""
    params = []
    for D in (1, 2, 3, 5, 8, 40, 64, 80, 128, 256):
        for param in gradients.solvers():
            (solver,) = param.values
            if not (solver.is_tint and D >= 40) or (solver.kernel, solver.seat.limits) == ("fa2", "webgpu"):
                params.append(pytest.param(solver, D, marks=param.marks, id=f"{D}-{solver}"))
    return params


@pytest.mark.parametrize(("solver", "D"), head_dimensions())
def test_head_dimensions(solver, D):
    block_q, block_k = SMALL_TILES.get(D, (None, None)) if solver.is_tint else (None, None)
    tile = dict(block_q=block_q, block_k=block_k)
    q, k, v, dout = gradients.random(T=18, H=1, D=D)
    if D == 128:
        q[..., :64] = 0  # all the signal in the second half: a kernel that stops at 64 gives plain averages
    check(solver(q, k, v, dout, causal=True, **tile), q, k, v, dout, causal=True)


@every_solver
@pytest.mark.parametrize("scale", [0.0, -0.5, 1.7])
def test_any_scale(solver, scale):
    arrays = gradients.random(T=18, H=1)
    found = solver(*arrays, causal=True, scale=scale)
    check(found, *arrays, causal=True, scale=scale)
    if scale == 0:
        assert not found.dq.any() and not found.dk.any() and found.dv.any()


@every_solver
@pytest.mark.parametrize("Hkv", [1, 2, 3])
def test_grouped_heads_add_up(solver, Hkv):
    q, k, v, dout = gradients.random(B=2, T=18, H=6, Hkv=Hkv)
    grouped = solver(q, k, v, dout, causal=True)
    assert grouped.dk.shape == grouped.dv.shape == k.shape
    check(grouped, q, k, v, dout, causal=True)
    spread = solver(q, *(np.repeat(x, 6 // Hkv, axis=2) for x in (k, v)), dout, causal=True)
    assert_same_bits(grouped, spread, ("dq",))
    dk, dv = (x.reshape(2, 18, Hkv, -1, 8).sum(3) for x in (spread.dk, spread.dv))
    check(replace(grouped, dk=dk, dv=dv), q, k, v, dout, causal=True)


@every_solver
@pytest.mark.parametrize("pattern", fa.data.PATTERNS)
def test_every_pattern(solver, pattern):
    q, k, v = fa.data.make(pattern, T=48, H=3, D=8)
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    check(solver(q, k, v, dout, causal=True), q, k, v, dout, causal=True)


@pytest.mark.parametrize("far", [12, 40])
@every_solver
def test_scores_far_from_zero(solver, far):
    """Scores near -far² · 2: each is rounded, but forward and backward round it alike, so that dS still sums to 0."""
    q, k, v, dout = gradients.random(B=2, T=20, D=4)
    q, k = far + 0.1 * q, 0.1 * k - far
    check(solver(q, k, v, dout, causal=True), q, k, v, dout, causal=True)


def test_the_forward_that_counts_is_the_own_one():
    """O and L without any rounding before the last are no help: delta then belongs to another P than exp(S - L)."""
    q, k, v, dout = gradients.random(T=20, D=4)
    q, k = 40 + 0.1 * q, 0.1 * k - 40
    own = fa.attention(q, k, v, device="numpy")
    check(fa.attention_backward(q, k, v, own.out, own.lse, dout, kernel="fa2", device="numpy"), q, k, v, dout)
    exact = fa.attention_backward(q, k, v, *gradients.forward(q, k, v), dout, kernel="fa2", device="numpy")
    with pytest.raises(fa.ParityError, match="dq is off"):
        check(exact, q, k, v, dout)


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (32, 8), (8, 32)])
@both_kernels
def test_every_tile(roomy_device, kernel, tile):
    """More rows than keys a tile and the other way round: each kernel's lanes load both."""
    arrays = gradients.random(T=35, Tk=38, H=1, D=3)
    wishes = dict(kernel=kernel, device=roomy_device, block_q=tile[0], block_k=tile[1])
    _, found = fa.attention_grad(*arrays, causal=True, **wishes)
    assert (found.plan.block_q, found.plan.block_k) == tile
    check(found, *arrays, causal=True)


lengths = st.integers(0, 40)


@pytest.mark.parametrize("seat", [engines.seat_param(seat) for seat in engines.seats("adapter")])
@given(
    B=st.integers(1, 2),
    Tq=lengths,
    Tk=lengths,
    D=st.sampled_from([1, 8]),
    Hkv=st.integers(1, 2),
    group=st.integers(1, 2),
    causal=st.booleans(),
    align=st.sampled_from(fa.problem.ALIGNMENTS),
    scale=st.sampled_from([None, 0.0, -1.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_any_shape(seat, B, Tq, Tk, D, Hkv, group, causal, align, scale, seed):
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((B, Tq, Hkv * group, D), np.float32) for _ in range(2))
    k, v = (rng.standard_normal((B, Tk, Hkv, D), np.float32) for _ in range(2))
    options = dict(causal=causal, align=align, scale=scale)
    _, found = fa.attention_grad(q, k, v, dout, kernel="fa2", device=engines.device_of(seat), **options)
    assert found.dq.shape == q.shape and found.dk.shape == k.shape and found.dv.shape == v.shape
    if Tq and Tk:
        check(found, q, k, v, dout, **options)
    else:
        assert not found.dq.any() and not found.dk.any() and not found.dv.any()


@every_solver
@pytest.mark.parametrize(
    ("B", "Tq", "Tk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=["no batch", "no query", "no key", "nothing"]
)
def test_zero_lengths(solver, B, Tq, Tk):
    q, k = np.ones((B, Tq, 4, 3), np.float32), np.ones((B, Tk, 2, 3), np.float32)
    found = solver(q, k, k, q, causal=True)
    for name, shape in zip(FIELDS, (q.shape, k.shape, k.shape), strict=True):
        assert getattr(found, name).shape == shape and not getattr(found, name).any()


# Closed forms.


@every_solver
def test_closed_form_of_dv(solver):
    zero, v = column(0, 0, 0, 0), column(1, 2, 3, 4)
    found = solver(zero, zero, v, np.ones_like(v), causal=True)
    expected = np.cumsum(1 / np.arange(4, 0, -1))[::-1]
    np.testing.assert_allclose(found.dv.ravel(), expected, rtol=4 * 2.0**-23)
    assert not found.dq.any() and not found.dk.any()


@every_solver
def test_values_all_alike_give_scores_no_gradient(solver):
    q, k, v, dout = gradients.random(T=20)
    v = np.broadcast_to(v[:, :1], v.shape)
    check(solver(q, k, v, dout, causal=True), q, k, v, dout, causal=True)


# Rows that see no key, and values that no row sees.

JUNK = [np.nan, np.inf, -np.inf, 3e38]


@every_solver
@pytest.mark.parametrize("junk", JUNK)
def test_rows_that_see_no_key_give_and_get_exactly_zero(solver, junk):
    """The tile holds rows that see nothing beside rows that see all; L is -inf where a careless P would be inf."""
    q, k, v, dout = gradients.random(T=20, Tk=9)
    clean = solver(q, k, v, dout, causal=True)
    assert not clean.dq[:, :11].any() and all(np.isfinite(getattr(clean, name)).all() for name in FIELDS)
    check(clean, q, k, v, dout, causal=True)
    q[:, :11], dout[:, :11] = junk, junk
    assert_same_bits(solver(q, k, v, dout, causal=True), clean)


@pytest.mark.parametrize("junk", JUNK)
def test_nor_does_what_the_forward_left_in_such_rows(device, junk):
    q, k, v, dout = gradients.random(T=20, Tk=9)
    out, lse = gradients.forward(q, k, v, causal=True)
    assert np.all(lse[:, :, :11] == -np.inf)
    wishes = dict(causal=True, kernel="fa2", device=device)
    clean = fa.attention_backward(q, k, v, out, lse, dout, **wishes)
    out[:, :11], lse[:, :, :11] = junk, junk
    assert_same_bits(fa.attention_backward(q, k, v, out, lse, dout, **wishes), clean)


@every_solver
@pytest.mark.parametrize("junk", JUNK)
def test_keys_that_no_row_sees_give_and_get_exactly_zero(solver, junk):
    q, k, v, dout = gradients.random(T=18, Tk=40)
    clean = solver(q, k, v, dout, **TOP_LEFT)
    assert not clean.dk[:, 18:].any() and not clean.dv[:, 18:].any()
    k[:, 18:], v[:, 18:] = junk, junk
    assert_same_bits(solver(q, k, v, dout, **TOP_LEFT), clean)


@every_solver
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("at", [0, 5, 16, 19])
def test_nan_spreads_along_what_sees_it(solver, name, at):
    arrays = dict(zip(("q", "k", "v", "dout"), gradients.random(T=20), strict=True))
    clean = solver(**arrays, causal=True)
    arrays[name][:, at] = np.nan
    found = solver(**arrays, causal=True)
    check(found, *arrays.values(), causal=True)
    free = slice(None, at) if name in "kv" else [i for i in range(20) if i != at]
    np.testing.assert_array_equal(found.dq[:, free], clean.dq[:, free])
    assert np.isnan(found.dq).any()


NON_FINITE = [(name, value) for name in ("q", "k", "v", "dout") for value in (np.nan, np.inf, -np.inf)]


@every_solver
@pytest.mark.parametrize(("name", "value"), [pair for pair in NON_FINITE if pair[0] != "dout" or np.isnan(pair[1])])
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_one_non_finite_number_spreads_as_in_float64(solver, name, value, mask):
    arrays = dict(zip(("q", "k", "v", "dout"), gradients.random(T=20), strict=True))
    arrays[name][0, 13, 1, 2] = value
    check(solver(**arrays, **mask), *arrays.values(), **mask)


@every_solver
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinite_dout_spreads_as_in_float64(solver, value):
    """Its row of dP holds both infinities. Their weighted sum is NaN, where rowsum(dO ∘ O) is infinite: so the walk
    that takes delta from O leaves infinities in dQ and dK where the formula has NaN, and nothing finite in either.
    """
    q, k, v, dout = gradients.random(T=20, H=1)
    dout[0, 13, 0, 2] = value
    found = solver(q, k, v, dout, causal=True)
    if solver.kernel == "materialised":
        return check(found, q, k, v, dout, causal=True)
    truth = fa.reference.attention_backward(q, k, v, dout, causal=True)
    walk = fa.reference.walk_backward(truth.problem, q, k, v, *gradients.forward(q, k, v, causal=True), dout, 16, 16)
    fa.parity.compare(found, replace(truth, **{name: getattr(walk, name) for name in FIELDS})).check()
    for name in FIELDS:
        np.testing.assert_array_equal(np.isfinite(getattr(found, name)), np.isfinite(getattr(truth, name)))


# Bits.


@pytest.mark.parametrize(("kernel", "times"), [("fa2", 50), ("materialised", 5)])
def test_repeats_give_the_same_bits(device, kernel, times):
    arrays = gradients.random(T=35, H=4, Hkv=2)
    first = fa.attention_grad(*arrays, causal=True, kernel=kernel, device=device)
    for _ in range(times):
        forward, backward = fa.attention_grad(*arrays, causal=True, kernel=kernel, device=device)
        assert_same_bits(backward, first[1])
        assert_same_bits(forward, first[0], ("out", "lse"))


@every_solver
@MASKS
def test_in_one_go_and_in_two_calls_the_bits_are_the_same(solver, mask):
    q, k, v, dout = gradients.random(B=2, T=35, Tk=20, H=4, Hkv=2)
    wishes = mask | dict(device=solver.device, block_q=16, block_k=16)
    forward, backward = fa.attention_grad(q, k, v, dout, kernel=solver.kernel, **wishes)
    assert (forward.kernel == "fa2_forward_tiled") == (solver.kernel == "fa2_tiled")
    alone = fa.attention(q, k, v, kernel=forward.kernel, **wishes)
    assert_same_bits(forward, alone, ("out", "lse"))
    after = fa.attention_backward(q, k, v, alone.out, alone.lse, dout, kernel=solver.kernel, **wishes)
    assert_same_bits(backward, after)
    fa.parity.compare(forward, fa.reference.attention(q, k, v, **mask)).check()


@pytest.fixture
def poisoned(monkeypatch):
    """Every buffer that is not uploaded starts as NaN, where WebGPU would give zeros."""
    allocate, made = fa.Device.allocate, []

    def fill(self, content, *, uniform=False):
        if isinstance(content, int):
            made.append(content)
            content = np.full(max(4, content // 4), np.nan, np.float32)
        return allocate(self, content, uniform=uniform)

    def poison() -> list[int]:
        monkeypatch.setattr(fa.Device, "allocate", fill)
        return made

    return poison


@both_kernels
@MASKS
def test_poisoned_buffers_leave_no_trace(device, poisoned, kernel, mask):
    arrays = gradients.random(B=2, T=35, Tk=20, H=4, Hkv=2)
    run = lambda: fa.attention_grad(*arrays, **mask, kernel=kernel, device=device)  # noqa: E731
    clean = run()
    made = poisoned()
    forward, backward = run()
    assert_same_bits(backward, clean[1])
    assert_same_bits(forward, clean[0], ("out", "lse"))
    sizes = backward.plan.buffer_bytes()
    assert sorted(made) == sorted(sizes[name] for name in sizes if name not in backward.plan.kernel.inputs)


@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_poisoned_buffers_leave_no_trace_in_the_trace(device, poisoned, mask):
    q, k, v, dout = gradients.random(T=35, Tk=20, H=1)
    arrays = q, k, v, *gradients.forward(q, k, v, **mask), dout
    clean = fa.backward_trace(*arrays, **mask, device=device)
    assert poisoned() == []
    fields = ("p", "ds", "dq_parts", "dk_parts", "dv_parts", "state")
    assert_same_bits(fa.backward_trace(*arrays, **mask, device=device), clean, fields)


def test_poison_shows_what_a_fresh_buffer_hides(roomy_device, poisoned):
    """Rows that see no key, left unwritten: right by luck where the buffer was zero."""
    arrays = gradients.random(T=20, Tk=9)
    written = "if (row < params.n_q) {\n    let start"
    kernel = fa.backward_kernels()["fa2"].edited(
        written, written.replace("row < params.n_q", "seen > 0u"), file="fa2_dq"
    )
    run = lambda: fa.attention_grad(*arrays, causal=True, kernel=kernel, device=roomy_device)[1]  # noqa: E731
    check(run(), *arrays, causal=True)
    poisoned()
    with pytest.raises(fa.ParityError, match="dq has .* places where NaN"):
        check(run(), *arrays, causal=True)


# Launches in parts.


def in_parts(monkeypatch, device, nbytes: int, arrays, kernel: str, **options) -> tuple[fa.Gradients, fa.Gradients]:
    """The gradients in one launch, and with so small a binding that there are several."""
    run = lambda: fa.attention_grad(*arrays, kernel=kernel, device=device, **options)  # noqa: E731
    _, whole = run()
    monkeypatch.setattr(device, "limits", replace(device.limits, binding_bytes=nbytes))
    result, parts = run()
    assert len(whole.plan.chunks) == 1 < len(parts.plan.chunks)
    fa.parity.compare(result, fa.reference.attention(*arrays[:3], **options)).check()
    return whole, parts


@both_kernels
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_launches_over_batches_and_kv_heads_give_the_same_bits(roomy_device, monkeypatch, kernel, mask):
    arrays = gradients.random(B=3, T=8, H=4, Hkv=2)
    two_batches, one_kv_head = 2 * 8 * 4 * 8 * 4, 8 * 2 * 8 * 4
    for nbytes, launches in ((two_batches, 2), (one_kv_head, 6)):
        with monkeypatch.context() as patch:
            whole, parts = in_parts(patch, roomy_device, nbytes, arrays, kernel, **mask)
            assert len(parts.plan.chunks) == launches
            assert_same_bits(parts, whole)


@both_kernels
@pytest.mark.parametrize("mask", [{}, CAUSAL], ids=["full", "causal"])
def test_launches_within_a_group_add_up(roomy_device, monkeypatch, kernel, mask):
    arrays = gradients.random(B=2, T=8, H=6, Hkv=2)
    whole, parts = in_parts(monkeypatch, roomy_device, 8 * 2 * 8 * 4, arrays, kernel, **mask)
    assert [chunk.problem.group for chunk in parts.plan.chunks] == [2, 1] * 4
    assert_same_bits(parts, whole, ("dq",))
    check(parts, *arrays, **mask)


# What the plans promise.


@pytest.mark.parametrize("name", [*fa.backward_kernels(), "trace"])
@pytest.mark.parametrize("after_forward", [False, True], ids=["backward", "both"])
def test_a_stage_binds_no_more_than_a_browser_grants(name, after_forward):
    kernel = BACKWARD_TRACE if name == "trace" else fa.backward_kernels()[name]
    for stage in (kernel.after_forward() if after_forward else kernel).passes:
        assert stage.storage_buffers <= BROWSER.storage_buffers == 8
        assert stage.bindings[0] == ("params", "uniform")


@pytest.mark.parametrize("kernel", fa.backward_kernels())
def test_every_head_dimension_fits_a_browser(kernel):
    for D in range(1, 257):
        problem = Problem(1, 16, 16, 1, 1, D, True, "bottom-right", 1.0)
        planned = fa.plan(problem, BROWSER, kernel, table=fa.backward_kernels())
        assert 0 < planned.workgroup_bytes <= 16_384 and planned.invocations <= 256


def test_the_tile_bytes_are_those_of_the_kernels():
    problem = Problem(1, 16, 16, 1, 1, 64, True, "bottom-right", 1.0)
    planned = fa.plan(problem, BROWSER, "fa2", table=fa.backward_kernels())
    assert planned.workgroup_bytes == (2 * 16 + 2 * 16) * 64 * 4 == 16_384
    for stage in planned.kernel.passes:
        declared = [line for line in planned.kernel.text(stage.file).splitlines() if line.startswith("var<workgroup>")]
        for block, tiles in zip(("BLOCK_Q", "BLOCK_K"), stage.tiles, strict=True):
            assert sum(f"array<f32, {block} * HEAD_DIM>" in line for line in declared) == tiles


def test_no_backward_kernel_uses_atomics():
    for kernel in fa.backward_kernels().values():
        for stage in kernel.passes:
            assert "atomic" not in kernel.text(stage.file).split("@group", 1)[1]


@both_kernels
def test_results_say_who_computed(device, kernel):
    arrays = gradients.random(T=4)
    forward, backward = fa.attention_grad(*arrays, kernel=kernel, device=device)
    assert forward.label == f"fa2_forward on {device.adapter}"
    assert backward.label == f"{kernel} on {device.adapter}"
    assert backward.plan.kernel.name == kernel and backward.device_bytes > 0
    assert {getattr(backward, name).dtype for name in FIELDS} == {np.dtype(np.float32)}


@both_kernels
def test_numpy_never_passes_for_a_gpu(kernel):
    forward, backward = fa.attention_grad(*gradients.random(T=4), kernel=kernel, device="numpy")
    assert "NumPy" in forward.adapter and "NumPy" in backward.adapter
    assert backward.kernel == kernel and backward.plan is None and backward.device_bytes is None


@pytest.mark.gpu
def test_auto_takes_the_kernel_that_is_kept(roomy_device):
    q, k, v, dout = gradients.random(T=4)
    forward, backward = fa.attention_grad(q, k, v, dout, device=roomy_device)
    assert backward.kernel == "fa2"
    assert fa.attention_backward(q, k, v, forward.out, forward.lse, dout, device=roomy_device).kernel == "fa2"


# Arguments.


def given_arrays() -> dict[str, np.ndarray]:
    q, k, v, dout = gradients.random(B=2, T=5, Tk=7, H=4, Hkv=2)
    out, lse = gradients.forward(q, k, v)
    return dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout)


WRONG_SHAPES = {
    "out": (lambda x: x[:, 1:], r"out must be \(B, Tq, H, D\) = \(2, 5, 4, 8\) to fit q; got shape \(2, 4, 4, 8\)"),
    "dout": (lambda x: x[..., 0], r"dout must be \(B, Tq, H, D\) = \(2, 5, 4, 8\) to fit q; got shape \(2, 5, 4\)"),
    "lse": (lambda x: x.transpose(0, 2, 1), r"lse must be \(B, H, Tq\) = \(2, 4, 5\) to fit q; got shape \(2, 5, 4\)"),
}
CALLS = {"backward": fa.attention_backward, "trace": fa.backward_trace}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shapes_are_named(call, name):
    arrays = given_arrays()
    spoil, sentence = WRONG_SHAPES[name]
    arrays[name] = spoil(arrays[name])
    with pytest.raises(fa.ShapeError, match=f"^{sentence}"):
        CALLS[call](**arrays, device="numpy")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "dout"])
@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.complex64, object])
def test_other_types_are_refused_by_name(call, name, dtype):
    arrays = given_arrays()
    arrays[name] = np.ones(arrays[name].shape).astype(dtype)
    with pytest.raises(TypeError, match=f"^{name} must hold floating-point numbers"):
        CALLS[call](**arrays, device="numpy")


def test_a_dout_that_would_broadcast_is_refused():
    q, k, v, dout = gradients.random(B=2, T=5)
    with pytest.raises(fa.ShapeError, match=r"^dout must be .* got shape \(1, 5, 2, 8\)"):
        fa.attention_grad(q, k, v, dout[:1], device="numpy")


@pytest.mark.parametrize("kernel", ["fa2_forward", "flash", ""])
def test_an_unknown_kernel_lists_those_there_are(kernel):
    arrays = given_arrays()
    sentence = f"No kernel is called '{kernel}'; there are 'auto', 'materialised', 'fa2'"
    with pytest.raises(fa.KernelError, match=sentence):
        fa.attention_backward(**arrays, kernel=kernel, device="numpy")
    with pytest.raises(fa.KernelError, match="'materialised', 'fa2'"):
        fa.attention_grad(*(arrays[name] for name in ("q", "k", "v", "dout")), kernel=kernel, device="numpy")


@pytest.mark.parametrize(("place", "n"), [({"head": 4}, 3), ({"head": -1}, 3), ({"batch": 2}, 1), ({"batch": -1}, 1)])
def test_a_head_or_batch_that_is_not_there(place, n):
    (name,) = place
    with pytest.raises(IndexError, match=f"^{name} must be from 0 to {n}; got {place[name]}"):
        fa.backward_trace(**given_arrays(), **place, device="numpy")


def test_nothing_is_uploaded_for_a_bad_call(roomy_device):
    roomy_device.memory.reset_peak()
    arrays = given_arrays()
    for wrong in ({"dout": arrays["dout"][:1]}, {"kernel": "flash"}, {"block_q": 0}, {"block_k": 10**6}):
        with pytest.raises((ValueError, fa.KernelError)):
            fa.attention_backward(**(arrays | wrong), device=roomy_device)
    assert roomy_device.memory.peak_bytes == 0


ARRAYS = {
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "Fortran": np.asfortranarray,
    "big-endian": lambda x: x.astype(">f4"),
    "float64": lambda x: x.astype(np.float64) * (1 + 2.0**-30),
    "float16": lambda x: x.astype(np.float16),
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_any_array_as_its_float32_copy(roomy_device, kind):
    arrays = {name: ARRAYS[kind](x) for name, x in given_arrays().items()}
    before = [x.tobytes() for x in arrays.values()]
    wishes = dict(kernel="fa2", device=roomy_device)
    found = fa.attention_backward(**arrays, **wishes)
    copies = {name: np.array(x, np.float32, order="C") for name, x in arrays.items()}
    assert_same_bits(found, fa.attention_backward(**copies, **wishes))
    assert [x.tobytes() for x in arrays.values()] == before, "an input was written to"


# The trace.

PARTS = ("p", "ds", "dq_parts", "dk_parts", "dv_parts")


@MASKS
@pytest.mark.parametrize(("Tq", "Tk"), [(35, 35), (20, 40), (40, 17)])
def test_the_trace_is_that_of_the_float64_walk(device, mask, Tq, Tk):
    q, k, v, dout = gradients.random(B=2, T=Tq, Tk=Tk, H=4, Hkv=2)
    out, lse = (x.astype(np.float32) for x in gradients.forward(q, k, v, **mask))
    got = fa.backward_trace(q, k, v, out, lse, dout, batch=1, head=2, device=device, **mask)
    head = q[1:, :, [2]], k[1:, :, [1]], v[1:, :, [1]], out[1:, :, [2]], lse[1:, [2]], dout[1:, :, [2]]
    problem = fa.problem.pose(*head[:3], **mask)[0]
    tile = got.block_q, got.block_k
    exact, plain = (fa.reference.trace_backward(problem, *head, *tile, dtype) for dtype in (np.float64, np.float32))
    np.testing.assert_array_equal(got.state, exact.state)
    np.testing.assert_array_equal(got.state, fa.reference.states(problem, *tile)[0, 0, :: tile[0]])
    truth = fa.reference.attention_backward(*head[:3], head[5], **mask)
    floor = fa.parity.gradient_floors(truth)
    # P ends in an exp of one rounded number, and dS in two products with it: 2 ULP of the largest, as in the floors.
    ulps = {name: 2 * fa.parity.ULP * np.abs(getattr(exact, name)).max(initial=0) for name in ("p", "ds")}
    for name in PARTS:
        x, t, f = (getattr(trace, name) for trace in (got, exact, plain))
        assert x.shape == t.shape and np.isfinite(x).all()
        allowed = 3 * np.abs(f - t).max() + (ulps | {f"{g}_parts": floor[g] for g in FIELDS})[name]
        assert np.abs(x - t).max() <= allowed, name


@MASKS
def test_the_parts_add_up_to_the_gradients(device, mask):
    q, k, v, dout = gradients.random(B=2, T=35, Tk=20, H=2)
    out, lse = gradients.forward(q, k, v, **mask)
    whole = fa.attention_backward(q, k, v, out, lse, dout, kernel="fa2", device=device, **mask)
    own = q[1:, :, [1]], k[1:, :, [1]], v[1:, :, [1]], dout[1:, :, [1]]
    trace = fa.backward_trace(q, k, v, out, lse, dout, batch=1, head=1, device=device, **mask)
    summed = (getattr(trace, f"{name}_parts").sum(0)[None, :, None] for name in FIELDS)
    problem = replace(whole.problem, B=1, H=1, Hkv=1)
    check(fa.Gradients(*summed, trace.kernel, trace.adapter, problem), *own, **mask)
    assert trace.label == f"fa2_backward_trace on {device.adapter}"
    assert (trace.block_q, trace.block_k) == (whole.plan.block_q, whole.plan.block_k)


def test_the_trace_of_numpy_says_so():
    arrays = given_arrays()
    trace = fa.backward_trace(**arrays, head=3, device="numpy")
    assert "NumPy" in trace.adapter and trace.p.shape == (5, 7) and trace.p.dtype == np.float32
    np.testing.assert_allclose(trace.p.sum(-1), 1, rtol=8 * 2.0**-23)


@pytest.mark.parametrize("tile", [(4, 16), (16, 4), (1, 1)])
def test_the_trace_takes_any_tile(roomy_device, tile):
    q, k, v, dout = gradients.random(T=18, H=1)
    arrays = q, k, v, *gradients.forward(q, k, v, causal=True), dout
    trace = fa.backward_trace(*arrays, causal=True, block_q=tile[0], block_k=tile[1], device=roomy_device)
    assert (trace.block_q, trace.block_k) == tile
    assert trace.state.shape == (len(trace.dk_parts), len(trace.dq_parts)) == (-(-18 // tile[0]), -(-18 // tile[1]))
    summed = (getattr(trace, f"{name}_parts").sum(0)[None, :, None] for name in FIELDS)
    problem = fa.problem.pose(q, k, v, causal=True)[0]
    check(fa.Gradients(*summed, trace.kernel, trace.adapter, problem), q, k, v, dout, causal=True)


@pytest.mark.parametrize(("Tq", "Tk"), [(0, 4), (3, 0)])
def test_the_trace_of_nothing(roomy_device, Tq, Tk):
    q, k = np.ones((1, Tq, 1, 2), np.float32), np.ones((1, Tk, 1, 2), np.float32)
    trace = fa.backward_trace(q, k, k, q, np.zeros((1, 1, Tq), np.float32), q, device=roomy_device)
    assert trace.p.shape == trace.ds.shape == (Tq, Tk)
    assert trace.dq_parts.sum(0).shape == (Tq, 2) and trace.dk_parts.sum(0).shape == (Tk, 2)
