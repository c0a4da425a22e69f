"""Every guarantee, broken on purpose: the kernel with one edit goes red where the kernel as it is passes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import launch, reference
from fa2lab.kernel import Kernel
from fa2lab.reference import forward

CAUSAL = {"causal": True}
NO_BARRIER = "    workgroupBarrier(); // {}\n"


def column(*numbers) -> np.ndarray:
    return np.array(numbers, np.float32)[None, :, None, None]


@dataclass(frozen=True)
class Breakage:
    """A guarantee, the edits `(old, new)` of a kernel's file that break it, and an input on which it shows."""

    guarantee: str
    edits: list[tuple[str, str]]
    arrays: object = partial(engines.random, B=2, T=35, H=2)
    options: dict = field(default_factory=dict)
    kernel: str = "fa2_forward"
    file: str | None = None

    def broken(self) -> Kernel:
        kernel = fa.kernels()[self.kernel]
        for old, new in self.edits:
            kernel = kernel.edited(old, new, file=self.file)
        return kernel


def unseen_nan():
    """Keys that no row sees (top-left), and what they hold is no number."""
    q, k, v = engines.random(T=9, Tk=14)
    v[:, 9:] = np.nan
    return q, k, v


def first_key_wins():
    """Scores 0 and -1e4 after a negative scale."""
    return column(1, 1), column(0, 1e4), column(1, 2)


def far_below():
    """Four keys whose scores lie below what a finite stand-in for -inf would be."""
    return column(1), column(*[-1e31] * 4), column(1, 2, 3, 4)


HUGE = partial(fa.data.make, "huge", T=35)
UNSEEING = partial(engines.random, T=5, Tk=2)
SEEN = "seen = keys_seen(row);"
WITH_ATTN = {"return_attn": True}
GROUPED = partial(engines.random, T=20, H=4, Hkv=2)
TOP_LEFT = {"causal": True, "align": "top-left"}
FA2 = [
    Breakage("l is rescaled when the maximum grows", [("    l *= alpha;\n", "")]),
    Breakage("O is rescaled when the maximum grows", [("o[d] *= alpha;", "")]),
    Breakage("alpha is taken of the older maximum", [("let alpha = exp", "let alpha = 0.0 * exp")]),
    Breakage("m is kept for the next tile", [("    m = m_new;\n", "")]),
    Breakage(
        "no key above the diagonal is seen", [(SEEN, "seen = min(keys_seen(row) + 1u, params.n_k);")], options=CAUSAL
    ),
    Breakage("the diagonal itself is seen", [(SEEN, "seen = max(keys_seen(row), 2u) - 1u;")], options=CAUSAL),
    Breakage("the mask is on", [(SEEN, "seen = params.n_k;")], options=CAUSAL),
    Breakage("the last tile is walked", [("key0 >= seen_by_tile", "key0 + BLOCK_K >= seen_by_tile")]),
    Breakage(
        "the last causal tile is walked", [("key0 >= seen_by_tile", "key0 + BLOCK_K >= seen_by_tile")], options=CAUSAL
    ),
    Breakage(
        "the walk goes as far as the tile's last row sees",
        [("keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u)", "keys_seen(row0)")],
        partial(engines.random, T=35, Tk=40),
        CAUSAL,
    ),
    Breakage("the first tile is walked", [("  var j = 0u;", "  var j = 1u;")]),
    Breakage("padding is no key", [(SEEN, "seen = ceil_div(keys_seen(row), BLOCK_K) * BLOCK_K;")]),
    Breakage(
        "every head is its own", [("let bh = workgroup.y;", "let bh = workgroup.y / params.n_heads * params.n_heads;")]
    ),
    Breakage("every batch is its own", [("let bh = workgroup.y;", "let bh = workgroup.y % params.n_heads;")]),
    Breakage(
        "a query head reads its group's KV head",
        [
            (
                "let at = kv_start(bh, key) + i % HEAD_DIM;",
                "let kv_head = bh % params.n_heads % params.n_kv_heads;\n"
                "let kv_row = (bh / params.n_heads * params.n_k + key) * params.n_kv_heads + kv_head;\n"
                "let at = kv_row * HEAD_DIM + i % HEAD_DIM;",
            )
        ],
        GROUPED,
    ),
    Breakage("V is loaded beside K", [("v_tile[i] = v[at];", "v_tile[i] = k[at];")]),
    Breakage(
        "the whole row of Q is loaded",
        [("q[q_start(bh, r) + i % HEAD_DIM]", "q[q_start(bh, r) + i % (HEAD_DIM / 2u)]")],
    ),
    Breakage(
        "the dot product takes every column",
        [("for (var d = 0u; d < HEAD_DIM; d++) {\n    s +=", "for (var d = 0u; d < HEAD_DIM / 2u; d++) {\n    s +=")],
    ),
    Breakage("the score is scaled", [("return s * params.scale;", "return s;")]),
    Breakage("the score is scaled once", [("return s * params.scale;", "return s * params.scale * params.scale;")]),
    Breakage(
        "the maximum is of the scaled scores",
        [("m_new = max(m_new, s[c]);", "m_new = select(min(m_new, s[c]), s[c], m_new == M_NONE);")],
        first_key_wins,
        {"scale": -1.0},
    ),
    Breakage("the start of m is below every score", [("var m = M_NONE;", "var m = -1e30;")], far_below, {"scale": 1.0}),
    Breakage(
        "a masked score is left out, not made small",
        [
            ("let n = min(max(seen, key0) - key0, BLOCK_K); // how many", "let n = BLOCK_K; // how many"),
            ("s[c] = score(lane, c);", "s[c] = select(-1e30, score(lane, c), key0 + c < seen);"),
        ],
        far_below,
        {"scale": 1.0},
    ),
    Breakage(
        "what an unseen value holds is left out, not multiplied by 0",
        [
            ("let n = min(max(seen, key0) - key0, BLOCK_K); // how many", "let n = BLOCK_K; // how many"),
            ("s[c] = score(lane, c);", "s[c] = select(params.neg_inf, score(lane, c), key0 + c < seen);"),
        ],
        unseen_nan,
        TOP_LEFT,
    ),
    Breakage("O of a row that sees no key is 0", [("select(o[d] / l, 0.0, seen == 0u)", "o[d] / l")], UNSEEING, CAUSAL),
    Breakage(
        "L of a row that sees no key is -inf", [("params.neg_inf, seen == 0u)", "0.0, seen == 0u)")], UNSEEING, CAUSAL
    ),
    Breakage(
        "non-finite scores are not made 0",
        [("return s * params.scale;", "return select(0.0, s * params.scale, abs(s) < 3e38);")],
        lambda: (column(1), column(np.inf, 0), column(1, 2)),
    ),
    Breakage("O is divided by l", [("o[d] / l", "o[d]")]),
    Breakage("L is the natural log", [("row] = select(m", "row] = 1.44269504 * select(m")]),
    Breakage("L has the maximum in it", [("row] = select(m", "row] = select(0.0 * m")]),
    Breakage("P is divided by l", [("- m) / l;", "- m);")], options=WITH_ATTN),
    Breakage(
        "P is written for every tile",
        [("for (var j = 0u; j < n_tiles; j++)", "for (var j = 0u; j + 1u < n_tiles; j++)")],
        options=WITH_ATTN,
    ),
]

OTHERS = [
    Breakage(
        "naive: no key above the diagonal in L",
        [(SEEN, "seen = params.n_k;")],
        options=CAUSAL,
        kernel="naive",
        file="naive_softmax",
    ),
    Breakage(
        "naive: no key above the diagonal in O",
        [("key < keys_seen(row)", "key < params.n_k")],
        unseen_nan,
        TOP_LEFT,
        "naive",
        "naive_output",
    ),
    Breakage(
        "naive: the diagonal is scored",
        [("key >= keys_seen(row)", "key + 1u >= keys_seen(row)")],
        options=CAUSAL,
        kernel="naive",
        file="naive_scores",
    ),
    Breakage("naive: the score is scaled", [("= s * params.scale;", "= s;")], kernel="naive", file="naive_scores"),
    Breakage(
        "naive: the maximum is subtracted",
        [("m = max(m, attn[start + key]);", "m = 0.0;")],
        HUGE,
        kernel="naive",
        file="naive_softmax",
    ),
    Breakage(
        "naive: masked weights are 0",
        [(", key < seen);", ", true);")],
        options=CAUSAL | WITH_ATTN,
        kernel="naive",
        file="naive_softmax",
    ),
    Breakage("naive: every head is its own", [("let bh = id.z;", "let bh = 0u;")], kernel="naive", file="naive_output"),
    Breakage(
        "fused_sv: no key above the diagonal",
        [(SEEN, "seen = min(keys_seen(row) + 1u, params.n_k);")],
        options=CAUSAL,
        kernel="fused_sv",
    ),
    Breakage("fused_sv: the score is scaled", [("s[key] = dot * params.scale;", "s[key] = dot;")], kernel="fused_sv"),
    Breakage("fused_sv: the maximum is subtracted", [("m = max(m, s[key]);", "m = 0.0;")], HUGE, kernel="fused_sv"),
    Breakage(
        "fused_sv: the start of m is below every score",
        [("var m = M_NONE;", "var m = -1e30;")],
        far_below,
        {"scale": 1.0},
        "fused_sv",
    ),
    Breakage("fused_sv: every head is its own", [("let bh = id.y;", "let bh = 0u;")], kernel="fused_sv"),
    Breakage(
        "fused_sv: rows past a workgroup are computed",
        [("let row = id.x;", "let row = id.x % 32u;")],
        kernel="fused_sv",
    ),
    Breakage(
        "fused_sv: L is the natural log", [("row] = select(m", "row] = 1.44269504 * select(m")], kernel="fused_sv"
    ),
    Breakage("fused_sv: P is divided by l", [("= s[key] / l;", "= s[key];")], options=WITH_ATTN, kernel="fused_sv"),
]


@pytest.mark.parametrize("breakage", [*FA2, *OTHERS], ids=lambda b: b.guarantee)
def test_a_broken_kernel_is_red(roomy_device, breakage):
    arrays = tuple(breakage.arrays())
    wishes = {name: value for name, value in breakage.options.items() if name != "return_attn"}
    truth = reference.attention(*arrays, return_attn="return_attn" in breakage.options, **wishes)
    run = partial(fa.attention, *arrays, device=roomy_device, **breakage.options)
    fa.parity.compare(run(kernel=breakage.kernel), truth).check()
    with pytest.raises(fa.ParityError):
        fa.parity.compare(run(kernel=breakage.broken()), truth).check()


BARRIERS = [
    "every row is done with the previous K and V tile before it is overwritten",
    "publishes the K and V tile (and, the first time, the Q tile)",
    "every row is done with the previous tile before it is overwritten",
    "publishes the K tile",
]


@pytest.mark.parametrize("says", BARRIERS)
def test_a_missing_barrier_is_red(roomy_device, says):
    """A software driver runs a workgroup's invocations a subgroup at a time, so that a race shows every time.

    Unless what it reads too early is right by chance: llvmpipe under naga leaves a workgroup's memory as the last one
    left it, so other data has to run before the broken kernel does.
    """
    if roomy_device.adapter.type != "CPU":
        pytest.skip("a GPU may run all 16 invocations in lockstep, where the race need not show")
    kernel = fa.kernels()["fa2_forward"]
    arrays = engines.random(T=64, H=2)
    truth = reference.attention(*arrays, return_attn=True)
    run = partial(fa.attention, *arrays, device=roomy_device, return_attn=True)
    fa.parity.compare(run(kernel=kernel), truth).check()
    fa.attention(*engines.random(T=64, H=2, seed=1), device=roomy_device, return_attn=True)
    with pytest.raises(fa.ParityError):
        fa.parity.compare(run(kernel=kernel.edited(NO_BARRIER.format(says), "")), truth).check()


def test_every_barrier_has_its_breakage():
    lines = fa.kernels()["fa2_forward"].text().splitlines()
    assert [line.split("// ")[1] for line in lines if "workgroupBarrier();" in line] == BARRIERS


TRACES = [
    ("m is recorded after the tile", "vec4<f32>(m, l, alpha, tile", "vec4<f32>(m - 1.0, l, alpha, tile"),
    ("l is recorded after the tile", "vec4<f32>(m, l, alpha, tile", "vec4<f32>(m, l * 0.5, alpha, tile"),
    ("alpha is recorded", "vec4<f32>(m, l, alpha, tile", "vec4<f32>(m, l, 1.0, tile"),
    ("the state is the tile's", "tile_state(row0, key0));", "tile_state(row, key0));"),
    ("skipped tiles say so", "vec4<f32>(m, l, 1.0, TILE_SKIPPED)", "vec4<f32>(m, l, 1.0, TILE_FULL)"),
    ("skipped tiles repeat the end", "vec4<f32>(m, l, 1.0, TILE_SKIPPED)", "vec4<f32>(0.0, l, 1.0, TILE_SKIPPED)"),
]


@pytest.mark.parametrize(("guarantee", "old", "new"), TRACES, ids=[guarantee for guarantee, *_ in TRACES])
def test_a_broken_trace_is_red(roomy_device, guarantee, old, new):
    arrays = engines.random(T=35, H=2)
    truth = reference.attention(*arrays, causal=True)
    kernel = fa.kernels()["fa2_forward"]
    run = partial(fa.attention, *arrays, causal=True, trace=True, device=roomy_device)
    fa.parity.compare_traces(run(kernel=kernel), truth).check()
    broken = run(kernel=kernel.edited(old, new))
    fa.parity.compare(broken, truth).check()  # its O is right: only the trace can tell
    with pytest.raises(fa.ParityError):
        fa.parity.compare_traces(broken, truth).check()


# Around the kernels.


def test_a_chunk_written_to_the_wrong_head_is_red(roomy_device, monkeypatch):
    arrays = engines.random(T=16, H=4, Hkv=2)
    truth = reference.attention(*arrays)
    one_head = replace(roomy_device.limits, binding_bytes=16 * 8 * 4)
    monkeypatch.setattr(roomy_device, "limits", one_head)
    fa.parity.compare(fa.attention(*arrays, device=roomy_device, kernel="fa2_forward"), truth).check()
    place = launch._place

    def forgetful(name, chunk):
        return place(name, replace(chunk, kv_heads=slice(0, 1)))

    monkeypatch.setattr(launch, "_place", forgetful)
    with pytest.raises(fa.ParityError):
        fa.parity.compare(fa.attention(*arrays, device=roomy_device, kernel="fa2_forward"), truth).check()


@pytest.mark.parametrize(
    ("guarantee", "name", "broken"),
    [
        ("the walk rescales", "shrink", lambda old, new: np.ones_like(new)),
        ("the walk leaves unseen values out", "weigh", lambda e, seen, v, start=0: start + e @ v),
        ("the walk takes the maximum", "row_max", lambda s, seen: np.zeros(s.shape[:-1])),
    ],
)
def test_a_broken_reference_is_red(monkeypatch, guarantee, name, broken):
    arrays = fa.data.make("huge", T=40)
    q, v = 10 * arrays.q, arrays.v.copy()  # scores in the thousands: exp of one overflows in float64 as well
    v[:, 39] = np.nan
    truth = reference.attention(q, arrays.k, v, causal=True)
    walk = partial(reference.tiled, q, arrays.k, v, causal=True)
    fa.parity.compare(walk(), truth).check()
    assert hasattr(forward, name)
    monkeypatch.setattr(forward, name, broken)
    with pytest.raises(fa.ParityError):
        fa.parity.compare(walk(), truth).check()


def test_a_comparison_by_greater_than_lets_nan_through():
    """What `compare` must not be: this one calls a result of NaN close."""
    truth = reference.attention(*engines.random())
    lost = np.full(truth.out.shape, np.nan, np.float32)
    assert not np.any(np.abs(lost - truth.out) > 1e-6)
    with pytest.raises(fa.ParityError):
        fa.parity.compare(lost, truth).check()


@pytest.mark.parametrize("wrong", [0.0, 1e-3, -1e-6])
def test_a_comparison_sees_small_and_plain_errors(wrong):
    truth = reference.attention(*engines.random())
    fa.parity.compare(truth.out.astype(np.float32), truth).check()
    spoilt = truth.out * (0 if wrong == 0 else 1 + wrong * 10)
    with pytest.raises(fa.ParityError):
        fa.parity.compare(spoilt.astype(np.float32), truth).check()


@pytest.mark.gpu
def test_a_buffer_left_on_the_device_is_counted(roomy_device):
    buffer = roomy_device.allocate(64)
    assert (roomy_device.memory.live_buffers, roomy_device.memory.live_bytes) == (1, 64)
    buffer.release()
    assert roomy_device.memory.live_buffers == 0
