"""Register tiles: any lanes, rows, slices and D, both reductions, what is not finite, each guarantee broken once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import engines
import gradients
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import source
from fa2lab.kernel import Kernel
from fa2lab.launch import launch
from fa2lab.limits import BROWSER
from fa2lab.plan import plan
from fa2lab.tiles import Tile

NAME = "fa2_forward_tiled"
CAUSAL = {"causal": True}


def run(tile: Tile, device: fa.Device, q, k, v, *, kernel: str | Kernel = NAME, **options) -> fa.Result:
    """A forward with that register tile."""
    problem = fa.reference.attention(q, k, v, **options).problem
    planned = plan(problem, device.limits, kernel, tile={NAME: tile})
    assert planned.tile == tile
    got, _ = launch(planned, dict(q=q, k=k, v=v), device)
    return fa.Result(got["out"], got["lse"], NAME, str(device.adapter), problem)


def check(result: fa.Result, q, k, v, **options) -> None:
    fa.parity.compare(result, fa.reference.attention(q, k, v, **options)).check()


# Lanes from 4 to 64: those that a subgroup holds reduce through it, the others through workgroup memory.
@pytest.mark.parametrize("lanes", [1, 4, 8, 16, 32, 64])
def test_any_number_of_lanes_a_row(roomy_device, lanes):
    arrays = engines.random(T=19, H=2, D=8)
    tile = Tile(2, 4 * lanes, 1, lanes)
    check(run(tile, roomy_device, *arrays, **CAUSAL), *arrays, **CAUSAL)


@pytest.mark.parametrize("lanes", [4, 8])
def test_both_reductions_give_the_same_bits(gpu, monkeypatch, lanes):
    arrays = engines.random(T=35, H=2, D=8)
    assert gpu.limits.subgroup_size >= lanes
    through = []
    for size in (gpu.limits.subgroup_size, 0):
        monkeypatch.setattr(gpu, "limits", replace(gpu.limits, subgroup_size=size))
        planned = plan(fa.reference.attention(*arrays).problem, gpu.limits, NAME, tile={NAME: Tile(4, 32, 1, lanes)})
        source = planned.link(planned.kernel.passes[0], gpu.dialect)
        assert ("subgroupShuffleXor" in source.text) == bool(size)
        through.append(run(Tile(4, 32, 1, lanes), gpu, *arrays, **CAUSAL))
    assert through[0].out.tobytes() == through[1].out.tobytes()
    assert through[0].lse.tobytes() == through[1].lse.tobytes()


def test_no_more_lanes_reduce_through_a_subgroup_than_it_holds(roomy_device):
    size = roomy_device.limits.subgroup_size
    for lanes in (size // 2, size, 2 * size):
        problem = fa.reference.attention(*engines.random()).problem
        planned = plan(problem, roomy_device.limits, NAME, tile={NAME: Tile(1, 4 * lanes, 1, lanes)})
        through = "subgroupShuffleXor" in planned.link(planned.kernel.passes[0], roomy_device.dialect).text
        assert through == (1 < lanes <= size)


def test_a_browser_s_limits_promise_no_subgroups(gpu):
    browser = fa.Device("llvmpipe", limits="webgpu").limits
    assert (gpu.limits.subgroup_size, gpu.limits.float16, gpu.limits.software) == (8, True, True)
    assert (browser.subgroup_size, browser.float16, browser.software) == (0, False, True)


@pytest.mark.parametrize(
    "tile",
    [Tile(4, 4), Tile(6, 8, 3, 2), Tile(16, 16, 4, 4, 2), Tile(8, 32, 2, 4, 1, True), Tile(16, 8, 1, 2, 3, True)],
    ids=str,
)
@pytest.mark.parametrize("D", [1, 6, 20])
def test_any_tile_and_slices_at_any_head_dimension(gpu, tile, D):
    tile = replace(tile, slices=min(tile.slices, -(-D // 4)))
    for T, Tk in ((1, 1), (17, 9), (9, 17), (33, 33)):
        arrays = engines.random(T=T, Tk=Tk, D=D, H=2, Hkv=1)
        check(run(tile, gpu, *arrays, **CAUSAL), *arrays, **CAUSAL)


@pytest.mark.parametrize("D", [32, 64, 80, 96, 128, 256])
def test_the_head_dimensions_of_models(gpu, D):
    q, k, v = engines.random(T=20, H=1, D=D)
    q[..., : D // 2] = 0  # all the signal in the second half
    check(fa.attention(q, k, v, causal=True, kernel=NAME, device=gpu), q, k, v, **CAUSAL)


@pytest.mark.parametrize("D", [8, 80])
def test_gradients_at_the_head_dimensions_of_models(gpu, D):
    arrays = gradients.random(T=18, H=2, Hkv=1, D=D)
    found = fa.attention_grad(*arrays, causal=True, kernel="fa2_tiled", device=gpu)[1]
    gradients.check(found, *arrays, causal=True)


def test_what_a_row_does_not_see_reaches_it_neither_as_nan_nor_as_infinity(roomy_device):
    q, k, v = engines.random(T=40, H=2, D=8)
    v[0, 20, 0, 3], v[0, 30, 1, 2], k[0, 35, 1, 2] = np.nan, np.inf, np.nan
    result = fa.attention(q, k, v, causal=True, kernel=NAME, device=roomy_device)
    assert np.isfinite(result.out[:, :20]).all() and np.isnan(result.out[0, 20:, 0, 3]).all()
    check(result, q, k, v, **CAUSAL)


def test_gradients_of_what_is_seen_stay_finite(gpu):
    q, k, v, dout = gradients.random(T=24, H=1, D=8)
    dout[0, 2] = np.inf  # of a row that sees the keys 0 to 2
    found = fa.attention_grad(q, k, v, dout, causal=True, kernel="fa2_tiled", device=gpu)[1]
    assert np.isfinite(found.dv[0, 3:]).all() and not np.isfinite(found.dv[0, :3]).any()
    dout[0, 2], k[0, 20] = 0, np.nan  # a key that the rows before 20 do not see
    found = fa.attention_grad(q, k, v, dout, causal=True, kernel="fa2_tiled", device=gpu)[1]
    assert np.isfinite(found.dq[0, :20]).all() and not np.isfinite(found.dq[0, 20:]).any()


def test_the_backward_after_its_forward_names_it(gpu):
    arrays = gradients.random(T=9, H=1)
    result, found = fa.attention_grad(*arrays, kernel="fa2_tiled", device=gpu)
    assert (result.kernel, found.kernel) == (NAME, "fa2_tiled")


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (dict(block_q=16, block_k=6), "multiple of 4"),
        (dict(block_q=11, block_k=8), r"n·2\^i rows"),
        (dict(block_q=512, block_k=512), "Fitting tiles: 64x64|Fitting tiles: 32x32"),
    ],
)
def test_a_tile_that_cannot_be_is_refused_in_one_sentence(gpu, blocks, says):
    with pytest.raises(fa.LimitError, match=says):
        fa.attention(*engines.random(), kernel=NAME, device=gpu, **blocks)


def test_every_head_dimension_finds_a_tile_within_a_browser_s_limits():
    for kernel, table in ((NAME, fa.kernels()), ("fa2_tiled", fa.backward_kernels())):
        for D in range(1, 257):
            for T in (16, 9000):
                problem = fa.problem.Problem(1, T, T, 2, 2, D, True, "bottom-right", 1.0)
                planned = plan(problem, BROWSER, kernel, table=table)
                assert planned.workgroup_bytes <= 16_384 and planned.invocations <= 256


def test_the_workgroup_bytes_are_those_of_the_declared_tiles(gpu):
    """A compiler that is told the planner's constants reckons the same sizes."""
    problem = fa.reference.attention(*engines.random(D=24)).problem
    tile = Tile(16, 32, 2, 8, 2)
    planned = plan(problem, replace(gpu.limits, subgroup_size=0), NAME, tile={NAME: tile})
    slice_, rows, groups, cols, lanes = 3, 2, 8, 4, 8
    row, col, weight, scratch = slice_ * rows * groups, slice_ * cols * lanes, rows * groups * 8, 16 * lanes
    assert 16 * (row + col + weight) + 4 * scratch == planned.workgroup_bytes


STEP = "key0 += BLOCK_K) {\n    score_tile(&s, start_q, start_kv, row0, key0, end, lane);\n\n"
WALK = "    // Masks leave a prefix"  # the walk that sums, not the one that writes attn
SEES = "s[r * COLS + c], column_of(c, x) < seen[r])"
BROKEN = [
    ("O is rescaled", "o[(slice * ROWS + r) * VECS + h] *= alpha[r];", ""),
    ("l is rescaled", "l[r] *= alpha[r];", ""),
    ("the lanes agree on the maximum", "row_max(&m_new, group, x);", ""),
    ("l is added up over the lanes", "row_sum(&l, group, x);\n  for", "for"),
    ("the mask's corner", "seen[r] = max(min(keys_seen(row0 + r * GROUPS + group), end), key0) - key0;",
     "seen[r] = max(min(keys_seen(row0 + r * GROUPS + group) + 1u, end), key0) - key0;"),
    ("the last tile is walked", f"key0 < end; {STEP}{WALK}", f"key0 + BLOCK_K < end; {STEP}{WALK}"),
    ("every head is its own", "let bh = workgroup.y;", "let bh = workgroup.y % 2u;"),
    ("P is stored before it is used", "store_weights(&s, group, x);", ""),
    ("the scale is applied", " * params.scale;", ";"),
    ("L is natural", "m[r] + log_sum(l[r])", "m[r] + log2(l[r])"),
    ("every slice is multiplied", "slice * SLICE + at.y);\n    }\n  }\n}\n\n// s =", "at.y);\n    }\n  }\n}\n\n// s ="),
]  # fmt: skip


@pytest.mark.parametrize(("guarantee", "old", "new"), BROKEN, ids=[guarantee for guarantee, *_ in BROKEN])
def test_a_broken_guarantee_is_red(gpu, guarantee, old, new):
    arrays = tuple(3 * x for x in engines.random(B=2, T=35, H=2, D=12))
    tile = Tile(8, 16, 2, 4, 2)
    go = partial(run, tile, gpu, *arrays, **CAUSAL)
    check(go(), *arrays, **CAUSAL)
    with pytest.raises(fa.ParityError):
        check(go(kernel=fa.kernels()[NAME].edited(old, new)), *arrays, **CAUSAL)


def test_the_trace_of_a_row_that_sees_nothing_is_empty(gpu):
    """Its m is nothing yet, and what is masked would weigh exp(0)."""
    arrays = engines.random(T=5, Tk=2, H=1)
    truth = fa.reference.attention(*arrays, causal=True)
    old = "select(0.0, s[r * COLS + c], column_of(c, x) < seen[r])"
    sound, broken = fa.kernels()[NAME], fa.kernels()[NAME].edited(old, "s[r * COLS + c]")
    go = partial(fa.attention, *arrays, causal=True, trace=True, device=gpu, block_q=8, block_k=16)
    fa.parity.compare_traces(go(kernel=sound), truth).check()
    with pytest.raises(fa.ParityError):
        fa.parity.compare_traces(go(kernel=broken), truth).check()


def test_a_part_that_does_not_see_is_kept_out_of_the_product(gpu):
    """Without the second look at what is not finite, 0 · NaN reaches the rows before it."""
    q, k, v = engines.random(T=35, H=1, D=8)
    v[0, 20] = np.nan
    broken = fa.kernels()[NAME].edited("partial && !is_finite(part)", "false")
    with pytest.raises(fa.ParityError):
        check(fa.attention(q, k, v, causal=True, kernel=broken, device=gpu), q, k, v, **CAUSAL)


GRADIENTS = [
    ("fa2_dq_tiled", "delta is taken off", " - row_delta[r])", ")"),
    ("fa2_dq_tiled", "dQ is scaled", "[i] * params.scale)", "[i])"),
    ("fa2_dq_tiled", "masked keys give nothing", SEES, "s[r * COLS + c], true)"),
    ("fa2_dkv_tiled", "the first tile", "first_row(key0) / BLOCK_Q", "first_row(key0 + BLOCK_K) / BLOCK_Q"),
    ("fa2_dkv_tiled", "all heads of the group", "bh < first_bh + heads", "bh < first_bh + 1u"),
    ("fa2_dkv_tiled", "dS is stored before it is used", "store_weights(&ds, group, x);", ""),
    ("fa2_dkv_tiled", "the scale is in Q", " * params.scale;", ";"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "guarantee", "old", "new"), GRADIENTS, ids=[f"{f}-{g}" for f, g, *_ in GRADIENTS])
def test_a_broken_gradient_is_red(gpu, file, guarantee, old, new):
    arrays = gradients.random(T=37, H=2, Hkv=1, D=8)
    go = partial(fa.attention_grad, *arrays, causal=True, device=gpu, block_q=16, block_k=16)
    gradients.check(go(kernel="fa2_tiled")[1], *arrays, causal=True)
    broken = fa.backward_kernels()["fa2_tiled"].edited(old, new, file=file)
    with pytest.raises(fa.ParityError):
        gradients.check(go(kernel=broken)[1], *arrays, causal=True)


BARRIERS = [
    (name, file, i)
    for name, file in ((NAME, NAME), ("fa2_tiled", "fa2_dq_tiled"), ("fa2_tiled", "fa2_dkv_tiled"))
    for i in range(source.read(file).count("workgroupBarrier();"))
]


def without_barrier(text: str, i: int) -> str:
    lines = text.splitlines(keepends=True)
    del lines[[n for n, line in enumerate(lines) if "workgroupBarrier();" in line][i]]
    return "".join(lines)


def on_two_slices(kernel: Kernel, device: fa.Device, seed: int) -> dict[str, np.ndarray]:
    """What a kernel gives for eight subgroups a workgroup on llvmpipe, D in two slices, several tiles."""
    q, k, v, dout = gradients.random(T=70, H=2, D=16, seed=seed)
    result = fa.attention(q, k, v, kernel="fa2_forward", device=device)
    tables = fa.kernels() | fa.backward_kernels()
    tiles = {
        stage.file: Tile(*((32, 8) if stage.rows_are == "BLOCK_K" else (8, 32)), 1, 8, 2) for stage in kernel.passes
    }
    planned = plan(result.problem, device.limits, kernel, table=tables, tile=tiles)
    inputs = dict(q=q, k=k, v=v, out=result.out, lse=result.lse, dout=dout)
    return launch(planned, {name: inputs[name] for name in kernel.inputs}, device)[0]


@pytest.mark.parametrize(("name", "file", "i"), BARRIERS, ids=[f"{file}-{i}" for _, file, i in BARRIERS])
def test_a_missing_barrier_is_red(gpu, name, file, i):
    """A software driver runs a workgroup a subgroup at a time, so a race shows. Other data runs before: see above."""
    kernel = (fa.kernels() | fa.backward_kernels())[name]
    broken = replace(kernel, edits=((file, without_barrier(kernel.text(file), i)),))
    sound = on_two_slices(kernel, gpu, seed=0)
    on_two_slices(kernel, gpu, seed=1)
    found = on_two_slices(broken, gpu, seed=0)
    worst = max(np.abs(found[name] - sound[name]).max() for name in sound)
    assert not worst <= 1e-3, f"{worst} is what rounding may do"


@pytest.mark.parametrize("i", [1, 2])
def test_a_missing_barrier_of_the_reduction_is_red(gpu, monkeypatch, i):
    """Not the first: a maximum that is read late is one of more lanes of the row, which does no harm. D is such
    that lanes of a second subgroup write O, whose sums are those that go wrong."""
    monkeypatch.setattr(gpu, "limits", replace(gpu.limits, subgroup_size=0))
    arrays = engines.random(T=70, H=1, D=48)
    tile = Tile(4, 128, 1, 32)
    check(run(tile, gpu, *arrays), *arrays)
    run(tile, gpu, *engines.random(T=70, H=1, D=48, seed=1))
    read = source.read
    file = "shared/row_workgroup"
    monkeypatch.setattr(source, "read", lambda n: without_barrier(read(n), i) if n == file else read(n))
    with pytest.raises(fa.ParityError):
        check(run(tile, gpu, *arrays), *arrays)


@pytest.mark.parametrize("name", [NAME, "fa2_tiled"])
def test_the_same_call_gives_the_same_bits(gpu, name):
    q, k, v, dout = gradients.random(T=33, H=2)
    table = fa.kernels() if name == NAME else fa.backward_kernels()
    result = fa.attention(q, k, v, kernel=NAME, device=gpu)
    inputs = dict(q=q, k=k, v=v, out=result.out, lse=result.lse, dout=dout)
    planned = plan(result.problem, gpu.limits, name, table=table)
    inputs = {name: inputs[name] for name in planned.kernel.inputs}
    first, *others = (launch(planned, inputs, gpu)[0] for _ in range(10))
    for other in others:
        assert all(first[name].tobytes() == other[name].tobytes() for name in first)
