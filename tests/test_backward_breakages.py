"""Every guarantee of the backward pass, broken on purpose: red where the kernels as they are pass on the same input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import gradients
import numpy as np
import pytest
from gradients import CAUSAL, TOP_LEFT, check

import fa2lab as fa
from fa2lab import launch
from fa2lab.kernel import Kernel
from fa2lab.kernels import BACKWARD_TRACE

NO_BARRIER = "workgroupBarrier(); // {}"


@dataclass(frozen=True)
class Breakage:
    """A guarantee, the edits `(old, new)` of one file that break it, and an input on which it shows."""

    guarantee: str
    file: str
    edits: tuple[tuple[str, str], ...]
    arrays: Callable = partial(gradients.random, B=2, T=35, H=2, D=4)
    options: dict = field(default_factory=dict)

    @property
    def kernel(self) -> Kernel:
        """The kernel that runs this file."""
        return fa.backward_kernels()["fa2" if self.file.startswith("fa2_") else "materialised"]

    def broken(self) -> Kernel:
        kernel = self.kernel
        for old, new in self.edits:
            kernel = kernel.edited(old, new, file=self.file)
        return kernel


def low_scores():
    """All scores near -280, so that a key or query of zeros, as in a tile's padding, gets the weight exp(280)."""
    q, k, v, dout = gradients.random(B=2, T=35, H=2, D=4)
    return 12 + 0.1 * q, 0.1 * k - 12, v, dout


def unseen_keys():
    """Keys that no row sees (top-left), and what they hold is no number."""
    q, k, v, dout = gradients.random(T=9, Tk=14)
    k[:, 9:], v[:, 9:] = np.nan, np.nan
    return q, k, v, dout


def unseeing_rows():
    """Rows that see no key (bottom-right), and what they hold is no number."""
    q, k, v, dout = gradients.random(T=14, Tk=9)
    q[:, :5], dout[:, :5] = np.nan, np.nan
    return q, k, v, dout


GROUPED = partial(gradients.random, B=2, T=20, H=4, Hkv=2, D=4)
LONG_KEYS = partial(gradients.random, T=35, Tk=40, H=2, D=4)
UNSCALED = {"scale": 0.3}
# Words of the kernels that several breakages replace.
SEEN, N = "let seen = keys_seen(row);", "let n = min(max(seen, key0) - key0, BLOCK_K);"
START, ROW = "let start = max(first_row(key), row0) - row0;", "var row = first_row(key);"
FIRST_HEAD = "let bh = id.y / params.n_heads * params.n_heads;"
LATER_HEAD = "bh % params.n_heads > 0u"
DQ_X, DKV_X = "(s * params.scale - row_lse)", "(s * params.scale - lse[bh * params.n_q + row0 + r])"


def breaks(guarantee: str, file: str, old: str, new: str, arrays=None, options=None) -> Breakage:
    """A breakage by one edit."""
    given = {name: x for name, x in (("arrays", arrays), ("options", options)) if x is not None}
    return Breakage(guarantee, file, ((old, new),), **given)


FA2 = [
    breaks("delta is the row's sum", "fa2_delta", "select(sum, 0.0, ", "select(0.0, 0.0, "),
    breaks("delta is of every column", "fa2_delta", "d < HEAD_DIM", "d < HEAD_DIM / 2u"),
    breaks("delta is of O and dO", "fa2_delta", "f32(dout[start + d]) * f32(out[start + d])", "f32(dout[start + d])"),
    breaks("delta: every head is its own", "fa2_delta", "let bh = id.y;", FIRST_HEAD),
    breaks("dQ: delta is subtracted", "fa2_dq", "(dp - row_delta)", "dp"),
    breaks(
        "dQ: no key above the diagonal",
        "fa2_dq",
        SEEN,
        "let seen = select(0u, params.n_k, row < params.n_q);",
        options=CAUSAL,
    ),
    breaks("dQ: the diagonal itself", "fa2_dq", SEEN, "let seen = max(keys_seen(row), 1u) - 1u;", options=CAUSAL),
    breaks("dQ: one key too many", "fa2_dq", SEEN, "let seen = min(keys_seen(row) + 1u, params.n_k);", options=CAUSAL),
    breaks("dQ: L is a natural logarithm", "fa2_dq", "row_lse = lse[", "row_lse = 1.44269504 * lse["),
    breaks("dQ: P is a power of e", "fa2_dq", DQ_X, f"(0.6931472 * {DQ_X})"),
    breaks("dQ: L is subtracted", "fa2_dq", " - row_lse);", ");"),
    breaks("dQ: the score is scaled", "fa2_dq", DQ_X, DQ_X.replace("s * params.scale", "s"), options=UNSCALED),
    breaks("dQ: the score is scaled once", "fa2_dq", DQ_X, DQ_X.replace("s *", "s * params.scale *"), options=UNSCALED),
    breaks("dQ is scaled", "fa2_dq", "dq_row[d] * params.scale", "dq_row[d]"),
    breaks("dQ is scaled once", "fa2_dq", "dq_row[d] * params.scale", "dq_row[d] * params.scale * params.scale"),
    breaks("dQ: padding is no key", "fa2_dq", N, "let n = BLOCK_K;", low_scores),
    breaks("dQ: the last tile is walked", "fa2_dq", "key0 < seen_by_tile", "key0 + BLOCK_K < seen_by_tile"),
    breaks(
        "dQ: the walk goes as far as the tile's last row sees",
        "fa2_dq",
        "keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u)",
        "keys_seen(row0)",
        LONG_KEYS,
        CAUSAL,
    ),
    breaks(
        "dQ: every head is its own",
        "fa2_dq",
        "let bh = workgroup.y;",
        "let bh = workgroup.y / params.n_heads * params.n_heads;",
    ),
    breaks("dQ: every batch is its own", "fa2_dq", "let bh = workgroup.y;", "let bh = workgroup.y % params.n_heads;"),
    breaks("dQ: dP is of V", "fa2_dq", "v_tile[i] = v[", "v_tile[i] = k["),
    breaks("dQ: dP is of dO", "fa2_dq", "dout_tile[i] = dout[", "dout_tile[i] = q["),
    breaks("dQ: K is weighed", "fa2_dq", "ds * k_tile[c", "ds * v_tile[c"),
    breaks(
        "dQ: what an unseen key holds is left out",
        "fa2_dq",
        N,
        "let n = select(0u, BLOCK_K, seen > 0u);",
        unseen_keys,
        TOP_LEFT,
    ),
    breaks("dKV: delta is subtracted", "fa2_dkv", "(dp - delta[bh * params.n_q + row0 + r])", "dp"),
    breaks("dKV: no row above the diagonal", "fa2_dkv", START, "let start = 0u;", options=CAUSAL),
    breaks(
        "dKV: the diagonal itself",
        "fa2_dkv",
        "max(first_row(key), row0)",
        "max(first_row(key) + 1u, row0)",
        options=CAUSAL,
    ),
    breaks(
        "dKV: one row too many",
        "fa2_dkv",
        "max(first_row(key), row0)",
        "max(max(first_row(key), 1u) - 1u, row0)",
        options=CAUSAL,
    ),
    breaks(
        "dKV: unseeing rows are left out",
        "fa2_dkv",
        START,
        "let start = 0u;",
        partial(gradients.random, T=20, Tk=9),
        CAUSAL,
    ),
    breaks(
        "dKV: the walk begins with the first tile that sees any key",
        "fa2_dkv",
        "first_row(key0) / BLOCK_Q",
        "first_row(key0 + BLOCK_K - 1u) / BLOCK_Q",
        LONG_KEYS,
        CAUSAL,
    ),
    breaks(
        "dKV: the first tile is walked",
        "fa2_dkv",
        "var row0 = first_tile * BLOCK_Q;",
        "var row0 = (first_tile + 1u) * BLOCK_Q;",
    ),
    breaks("dKV: the last tile is walked", "fa2_dkv", "row0 < params.n_q; row0", "row0 + BLOCK_Q < params.n_q; row0"),
    breaks(
        "dKV: later heads have their first rows",
        "fa2_dkv",
        START,
        f"let start = max(max(first_row(key), row0) - row0, select(0u, 3u, {LATER_HEAD} && row0 == 0u));",
        options=CAUSAL,
    ),
    breaks(
        "dKV: later heads have their first tile",
        "fa2_dkv",
        "var row0 = first_tile * BLOCK_Q;",
        f"var row0 = (first_tile + select(0u, 1u, {LATER_HEAD})) * BLOCK_Q;",
    ),
    breaks("dKV: L is a natural logarithm", "fa2_dkv", "- lse[bh", "- 1.44269504 * lse[bh"),
    breaks("dKV: P is a power of e", "fa2_dkv", DKV_X, f"(0.6931472 * {DKV_X})"),
    breaks("dKV: L is the row's", "fa2_dkv", "- lse[bh * params.n_q + row0 + r]", "- lse[bh * params.n_q + row0]"),
    breaks("dKV: the score is scaled", "fa2_dkv", DKV_X, DKV_X.replace("s * params.scale", "s"), options=UNSCALED),
    breaks(
        "dKV: the score is scaled once", "fa2_dkv", DKV_X, DKV_X.replace("s *", "s * params.scale *"), options=UNSCALED
    ),
    breaks("dK is scaled", "fa2_dkv", "dk_row[d] * params.scale", "dk_row[d]"),
    breaks("dK is scaled once", "fa2_dkv", "dk_row[d] * params.scale", "dk_row[d] * params.scale * params.scale"),
    breaks("dV is not scaled", "fa2_dkv", "= dv_row[d];", "= dv_row[d] * params.scale;"),
    breaks("dKV: padding is no row", "fa2_dkv", "min(BLOCK_Q, params.n_q - row0)", "BLOCK_Q", low_scores),
    breaks("dKV: all heads of a group", "fa2_dkv", "bh < first_bh + group", "bh + 1u < first_bh + group", GROUPED),
    breaks(
        "dKV: the heads of its own group",
        "fa2_dkv",
        "(workgroup.y % params.n_kv_heads) * group",
        "workgroup.y % params.n_kv_heads",
        GROUPED,
    ),
    breaks("dKV: every batch is its own", "fa2_dkv", "workgroup.y / params.n_kv_heads", "0u * workgroup.y"),
    breaks("dKV: P is weighed by dO", "fa2_dkv", "p * dout_tile[r", "p * q_tile[r"),
    breaks("dKV: dS is weighed by Q", "fa2_dkv", "ds * q_tile[r", "ds * dout_tile[r"),
    breaks("dKV: dP is of V", "fa2_dkv", "v_tile[i] = v[", "v_tile[i] = k["),
]

OTHERS = [
    breaks(
        "dscores: the row's sum is subtracted", "attn_dscores", "(dscores[start + key] - sum)", "dscores[start + key]"
    ),
    breaks("dscores: the sum is weighted", "attn_dscores", "sum += attn[start + key] * dp;", "sum += dp;"),
    breaks("dscores: every head is its own", "attn_dscores", "let bh = id.y;", FIRST_HEAD),
    breaks(
        "dscores: an unseen value is left out", "attn_dscores", SEEN, "let seen = params.n_k;", unseen_keys, TOP_LEFT
    ),
    breaks(
        "attn_dq: an unseen key is left out",
        "attn_dq",
        "key < keys_seen(row)",
        "key < params.n_k",
        unseen_keys,
        TOP_LEFT,
    ),
    breaks(
        "attn_dq: the diagonal itself", "attn_dq", "key < keys_seen(row)", "key + 1u < keys_seen(row)", options=CAUSAL
    ),
    breaks("attn_dq is scaled", "attn_dq", "sum * params.scale", "sum"),
    breaks("attn_dk: an unseeing row is left out", "attn_dk", ROW, "var row = 0u;", unseeing_rows, CAUSAL),
    breaks("attn_dk: the diagonal itself", "attn_dk", ROW, "var row = first_row(key) + 1u;", options=CAUSAL),
    breaks("attn_dk: all heads of a group", "attn_dk", "bh < first_bh + group", "bh + 1u < first_bh + group", GROUPED),
    breaks("attn_dk is scaled once", "attn_dk", "sum * params.scale", "sum * params.scale * params.scale"),
    breaks(
        "attn_dk: later heads have their first rows",
        "attn_dk",
        ROW,
        f"var row = first_row(key) + select(0u, 3u, {LATER_HEAD});",
    ),
    breaks("attn_dv: an unseeing row is left out", "attn_dv", ROW, "var row = 0u;", unseeing_rows, CAUSAL),
    breaks("attn_dv: the diagonal itself", "attn_dv", ROW, "var row = first_row(key) + 1u;", options=CAUSAL),
    breaks("attn_dv: all heads of a group", "attn_dv", "bh < first_bh + group", "bh + 1u < first_bh + group", GROUPED),
]


@pytest.mark.parametrize("breakage", [*FA2, *OTHERS], ids=lambda b: b.guarantee)
def test_a_broken_kernel_is_red(roomy_device, breakage):
    q, k, v, dout = breakage.arrays()
    wishes = breakage.options | {"device": roomy_device}
    own = fa.attention(q, k, v, kernel="fa2_forward", **wishes)
    run = partial(fa.attention_backward, q, k, v, own.out, own.lse, dout, **wishes)
    check(run(kernel=breakage.kernel), q, k, v, dout, **breakage.options)
    with pytest.raises(fa.ParityError):
        check(run(kernel=breakage.broken()), q, k, v, dout, **breakage.options)


BARRIERS = {
    "fa2_dq": [
        "every row is done with the previous K and V tile before it is overwritten",
        "publishes the K and V tile (and, the first time, the tiles of Q and dO)",
    ],
    "fa2_dkv": [
        "every key is done with the previous query tile before it is overwritten",
        "publishes the query tile (and, the first time, the tiles of K and V)",
    ],
    "fa2_backward_trace": ["publishes P and dS of the tile to the invocations that now own its keys"],
}
AND_FILE = [(file, says) for file, all_of_them in BARRIERS.items() for says in all_of_them]


def leave_other_data_behind(device: fa.Device) -> None:
    """In the workgroup memory of every worker, by the sound kernels."""
    fa.attention_grad(*gradients.random(T=64, H=2, seed=1), kernel="fa2", device=device)


@pytest.mark.parametrize(("file", "says"), AND_FILE, ids=[f"{file}: {says}" for file, says in AND_FILE])
def test_a_missing_barrier_is_red(roomy_device, monkeypatch, file, says):
    """A software driver runs a workgroup's invocations a subgroup at a time, so that a race shows every time.

    Other data runs before, since llvmpipe under naga leaves a workgroup's memory as the last one left it.
    """
    if roomy_device.adapter.type != "CPU":
        pytest.skip("a GPU may run all 16 invocations in lockstep, where the race need not show")
    edit = NO_BARRIER.format(says), ""
    if file == "fa2_backward_trace":
        check_trace(roomy_device)
        leave_other_data_behind(roomy_device)
        monkeypatch.setattr("fa2lab.backward.BACKWARD_TRACE", BACKWARD_TRACE.edited(*edit, file=file))
        with pytest.raises(fa.ParityError):
            check_trace(roomy_device)
        return
    arrays = gradients.random(T=64, H=2)
    kernel = fa.backward_kernels()["fa2"]
    run = partial(fa.attention_grad, *arrays, device=roomy_device)
    check(run(kernel=kernel)[1], *arrays)
    leave_other_data_behind(roomy_device)
    with pytest.raises(fa.ParityError):
        check(run(kernel=kernel.edited(*edit, file=file))[1], *arrays)


def test_every_barrier_has_its_breakage():
    passes = {stage for kernel in (*fa.backward_kernels().values(), BACKWARD_TRACE) for stage in kernel.passes}
    files = {stage.file for stage in passes if not stage.rows_are} - {"fa2_forward"}  # test_tiled.py has the others
    found = {}
    for file in files:
        lines = fa.backward_kernels()["fa2"].text(file).splitlines()
        found[file] = [line.split("// ")[1] for line in lines if "workgroupBarrier();" in line]
    assert {file: says for file, says in found.items() if says} == BARRIERS


def check_trace(device, mask=CAUSAL) -> None:
    """The parts of a trace add up to the gradients, and its P to 1 over the keys of a row."""
    q, k, v, dout = gradients.random(T=35, H=1, D=4)
    trace = fa.backward_trace(q, k, v, *gradients.forward(q, k, v, **mask), dout, device=device, **mask)
    summed = (getattr(trace, f"{name}_parts").sum(0)[None, :, None] for name in gradients.FIELDS)
    problem = fa.problem.pose(q, k, v, **mask)[0]
    check(fa.Gradients(*summed, trace.kernel, trace.adapter, problem), q, k, v, dout, **mask)
    truth = fa.reference.attention(q, k, v, return_attn=True, **mask)
    dp = np.einsum("bihd,bjhd->ij", dout, v, dtype=np.float64)
    ds = truth.attn[0, 0] * (dp - np.einsum("bihd,bihd->i", dout, truth.out)[:, None])
    for got, expected in ((trace.p, truth.attn[0, 0]), (trace.ds, ds)):
        # A hundred roundings of numbers below 10; the breakages err by more than 1e-2.
        if not np.abs(got - expected).max() <= 1e-5:
            raise fa.ParityError("P or dS of the trace is off.")


TRACES = [
    ("masked pairs are 0", "if (key0 + c < seen) {", "if (true) {"),
    ("P is recorded", "vec2<f32>(p, ds)", "vec2<f32>(p * p, ds)"),
    ("dS is recorded", "vec2<f32>(p, ds)", "vec2<f32>(p, p)"),
    ("each K tile has its part of dQ", "(tile.y * params.n_q + row)", "(0u * tile.y * params.n_q + row)"),
    ("each query tile has its part of dK and dV", "(tile.x * params.n_k + key)", "(0u * tile.x * params.n_k + key)"),
    ("dQ's part is scaled", "= sum * params.scale;", "= sum;"),
    ("dK's part is scaled", "= dk * params.scale;", "= dk;"),
    ("dV has its own place", "parts[dv_start + at]", "parts[dk_start + at]"),
    ("delta is subtracted", "(dp - delta[row])", "dp"),
    ("L is subtracted", " - lse[row]);", ");"),
    ("the rows that see a key", "max(first_row(key), row0)", "max(first_row(key) + 1u, row0)"),
]


@pytest.mark.parametrize(("guarantee", "old", "new"), TRACES, ids=[guarantee for guarantee, *_ in TRACES])
def test_a_broken_trace_is_red(roomy_device, monkeypatch, guarantee, old, new):
    check_trace(roomy_device)
    broken = BACKWARD_TRACE.edited(old, new, file="fa2_backward_trace")
    monkeypatch.setattr("fa2lab.backward.BACKWARD_TRACE", broken)
    with pytest.raises(fa.ParityError):
        check_trace(roomy_device)


# Around the kernels.


@pytest.mark.parametrize("name", ["dq", "dk", "dv", "dout", "lse"])
def test_a_chunk_at_the_wrong_head_is_red(roomy_device, monkeypatch, name):
    q, k, v, dout = gradients.random(T=8, H=4, Hkv=2)
    run = partial(fa.attention_backward, q, k, v, *gradients.forward(q, k, v), dout, device=roomy_device, kernel="fa2")
    monkeypatch.setattr(roomy_device, "limits", replace(roomy_device.limits, binding_bytes=8 * 8 * 4))
    check(run(), q, k, v, dout)
    place = launch._place

    def forgetful(which, chunk):
        if which == name:
            chunk = replace(chunk, heads=slice(0, 1), kv_heads=slice(0, 1))
        return place(which, chunk)

    monkeypatch.setattr(launch, "_place", forgetful)
    with pytest.raises(fa.ParityError):
        check(run(), q, k, v, dout)


def test_launches_within_a_group_that_replace_each_other_are_red(roomy_device, monkeypatch):
    """Half a group's dK and dV: the last launch has the last word."""
    q, k, v, dout = gradients.random(T=8, H=2, Hkv=1)
    run = partial(fa.attention_backward, q, k, v, *gradients.forward(q, k, v), dout, device=roomy_device, kernel="fa2")
    monkeypatch.setattr(roomy_device, "limits", replace(roomy_device.limits, binding_bytes=8 * 8 * 4))
    check(run(), q, k, v, dout)
    one_chunk, launches = launch._one_chunk, []

    def last_word(*given):
        got = one_chunk(*given)
        launches.append(got)
        return got if len(launches) == 2 else got | {"dk": 0 * got["dk"], "dv": 0 * got["dv"]}

    monkeypatch.setattr(launch, "_one_chunk", last_word)
    with pytest.raises(fa.ParityError, match="dk is off"):
        check(run(), q, k, v, dout)
    assert len(launches) == 2


@pytest.mark.parametrize("name", ["out", "lse", "dout"])
def test_what_the_forward_hands_over_is_read(roomy_device, name):
    """A wrong O, L or dO goes in: wrong gradients must come out."""
    q, k, v, dout = gradients.random(T=20)
    given = dict(zip(("out", "lse"), gradients.forward(q, k, v), strict=True), dout=dout)
    run = partial(fa.attention_backward, q, k, v, device=roomy_device, kernel="fa2")
    check(run(**given), q, k, v, dout)
    with pytest.raises(fa.ParityError):
        check(run(**given | {name: given[name] * 1.01 + 0.01}), q, k, v, dout)


def test_a_small_head_does_not_hide_behind_a_large_one(roomy_device):
    """By head: the whole would allow an error of the largest head's rounding."""
    q, k, v, dout = gradients.random(T=20, H=2)
    dout[:, :, 0] *= 2.0**24
    _, found = fa.attention_grad(q, k, v, dout, kernel="fa2", device=roomy_device)
    check(found, q, k, v, dout)
    spoilt = found.dv.copy()
    spoilt[:, 3, 1] = 0
    fa.parity.compare(replace(found, dv=spoilt), fa.reference.attention_backward(q, k, v, dout)).check()
    with pytest.raises(fa.ParityError, match="KV head 1: dv is off"):
        check(replace(found, dv=spoilt), q, k, v, dout)
