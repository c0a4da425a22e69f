"""The table of kernels and the planner: tiles that fit, launches that fit, and refusals in numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa2lab as fa
from fa2lab.kernels import BACKWARD_TRACE, MAX_HEAD_DIM
from fa2lab.limits import BROWSER, WEBGPU_NAMES, Limits
from fa2lab.problem import Problem, pose
from fa2lab.tiles import TILES, Tile

KERNELS = fa.kernels()
ROOMY = Limits(
    workgroup_bytes=32_768,
    invocations=1024,
    storage_buffers=16,
    binding_bytes=1 << 30,
    buffer_bytes=1 << 30,
    workgroups=65_535,
)
BOTH = pytest.mark.parametrize("limits", [BROWSER, ROOMY], ids=["webgpu", "roomy"])


def problem(**sizes) -> Problem:
    given = dict(B=1, Tq=16, Tk=16, H=1, Hkv=1, D=8, causal=False, align="bottom-right", scale=1.0)
    return Problem(**(given | sizes))


def test_the_table_climbs_from_the_plainest():
    assert list(KERNELS) == ["naive", "fused_sv", "fa2_forward", "fa2_forward_tiled", "fa2_decode"]
    assert [len(kernel.passes) for kernel in KERNELS.values()] == [3, 1, 1, 1, 2]
    assert str(KERNELS["naive"]).startswith("naive: three dispatches")


@pytest.mark.parametrize("name", KERNELS)
def test_a_stage_binds_no_more_than_a_browser_grants(name):
    for stage in KERNELS[name].passes:
        assert stage.storage_buffers <= BROWSER.storage_buffers
        assert stage.bindings[0] == ("params", "uniform")


def test_the_browser_limits_are_those_of_the_specification():
    assert (BROWSER.workgroup_bytes, BROWSER.invocations, BROWSER.storage_buffers) == (16_384, 256, 8)
    assert (BROWSER.binding_bytes, BROWSER.buffer_bytes, BROWSER.workgroups) == (134_217_728, 268_435_456, 65_535)
    assert set(WEBGPU_NAMES) == set(vars(BROWSER)) - {"subgroup_size", "float16", "software"}
    assert ROOMY.capped(BROWSER) == replace(BROWSER) and BROWSER.capped(ROOMY) == BROWSER


@pytest.mark.parametrize(
    ("D", "limits", "tile", "nbytes"),
    [
        (16, BROWSER, (16, 16), 3_072),
        (32, BROWSER, (16, 16), 6_144),
        (64, BROWSER, (16, 16), 12_288),  # the original's 12 KB
        (80, BROWSER, (16, 16), 15_360),
        (128, BROWSER, (16, 8), 16_384),
        (256, BROWSER, (8, 4), 16_384),
        (128, ROOMY, (16, 16), 24_576),  # the original's 24 KB
        (256, ROOMY, (16, 8), 32_768),
    ],
)
def test_tiles_and_their_bytes(D, limits, tile, nbytes):
    planned = fa.plan(problem(D=D), limits, "fa2_forward")
    assert (planned.block_q, planned.block_k) == tile
    assert planned.workgroup_bytes == nbytes == (tile[0] + 2 * tile[1]) * D * 4
    assert planned.invocations == tile[0]
    assert f"({tile[0]} + 2·{tile[1]})·{D}·4 B = {nbytes:,} of {limits.workgroup_bytes:,} B" in str(planned)


@BOTH
@pytest.mark.parametrize("name", KERNELS)
def test_every_head_dimension_finds_a_plan(name, limits):
    for D in range(1, MAX_HEAD_DIM + 1):
        planned = fa.plan(problem(D=D), limits, name)
        assert planned.workgroup_bytes <= limits.workgroup_bytes and planned.invocations <= limits.invocations
        assert len(planned.chunks) == 1


def test_the_planner_takes_the_first_tile_that_fits():
    for room in range(64 * 4 * 3, 64 * 4 * 48 + 1, 64 * 4):
        planned = fa.plan(problem(D=64), replace(ROOMY, workgroup_bytes=room), "fa2_forward")
        first = next(tile for tile in TILES if (tile[0] + 2 * tile[1]) * 64 * 4 <= room)
        assert (planned.block_q, planned.block_k) == first


def test_a_wanted_tile_is_taken_whole_or_in_part():
    assert tile(block_q=32, block_k=5) == (32, 5)
    assert tile(block_q=3) == (3, 16)
    assert tile(block_k=64) == (16, 64)


def tile(**wanted) -> tuple[int, int]:
    planned = fa.plan(problem(), ROOMY, "fa2_forward", **wanted)
    return planned.block_q, planned.block_k


REFUSED = {
    "workgroup memory": (
        problem(D=256),
        dict(kernel="fa2_forward", block_q=16, block_k=16),
        r"tiles of 16x16 at D=256 needs 49,152 B of workgroup memory .* has 16,384 B .*Fitting tiles: 8x4, 4x4",
    ),
    "invocations": (
        problem(D=1),
        dict(kernel="fa2_forward", block_q=300),
        r"300 invocations; this device has 16,384 B and 256",
    ),
    "head dimension": (problem(D=257), dict(kernel="fa2_forward"), "from 1 to 256; got D=257"),
    "head dimension of any kernel": (problem(D=4096), {}, "from 1 to 256; got D=4096"),
    "fused_sv keys": (
        problem(Tk=1025),
        dict(kernel="fused_sv"),
        "private memory and takes up to 1024 keys; got Tk=1,025. fa2_forward takes any number",
    ),
    "naive's matrix": (
        problem(Tq=8192, Tk=8192),
        dict(kernel="naive"),
        "One head's attn takes 268,435,456 B; one binding of this device holds 134,217,728 B. Smaller T would fit, or",
    ),
    "attn asked for": (problem(Tq=8192, Tk=8192), dict(return_attn=True), "One head's attn takes 268,435,456 B"),
    "absurd keys": (problem(Tk=10**12), {}, "One head's k takes 32,000,000,000,000 B"),
    "rows of one dispatch": (
        problem(Tq=2 * 10**6, D=1),
        dict(kernel="fa2_forward"),
        "dispatch 125,000 workgroups in one dimension for Tq=2,000,000 .* allows 65,535",
    ),
    "naive's rows": (problem(Tq=70_000, Tk=1), dict(kernel="naive"), "dispatch 70,000 workgroups"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refusals_in_numbers(which):
    posed, wishes, sentence = REFUSED[which]
    with pytest.raises(fa.LimitError, match=sentence):
        fa.plan(posed, BROWSER, **({"kernel": "auto"} | wishes))


@pytest.mark.parametrize("block", [0, -1, 1.5, True, "16"])
@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_a_block_that_is_no_count_is_refused(name, block):
    with pytest.raises(fa.LimitError, match=f"{name} must be a whole number of at least 1"):
        fa.plan(problem(), BROWSER, "fa2_forward", **{name: block})


@pytest.mark.parametrize(
    ("limit", "few", "words"), [("storage_buffers", 6, "binds 7 storage buffers"), ("invocations", 32, "64 inv")]
)
def test_a_device_with_too_little_is_refused(limit, few, words):
    name = "fa2_forward" if limit == "storage_buffers" else "fused_sv"
    with pytest.raises(fa.LimitError, match=f"{words}.* allows {few}"):
        fa.plan(problem(), replace(BROWSER, **{limit: few}), name)


@pytest.mark.parametrize("wish", [{"trace": True}, {"block_q": 8}, {"block_k": 8}], ids=str)
@pytest.mark.parametrize("name", ["naive", "fused_sv"])
def test_a_kernel_without_tiles_takes_no_tiles(name, wish):
    with pytest.raises(fa.KernelError, match=f"{name} has none. Able: fa2_forward"):
        fa.plan(problem(), BROWSER, name, **wish)


def test_an_unknown_kernel_is_answered_with_the_list():
    with pytest.raises(fa.KernelError, match="'fa3'.*'auto', 'naive', 'fused_sv', 'fa2_forward'"):
        fa.plan(problem(), BROWSER, "fa3")


def test_auto_is_the_fastest_that_can():
    assert fa.plan(problem(), BROWSER).kernel.name == "fa2_forward_tiled"
    assert fa.plan(problem(), BROWSER, trace=True).kernel.name == "fa2_forward", "the one a reader can follow"
    assert fa.plan(problem(), replace(BROWSER, software=True)).kernel.name == "fa2_forward"
    assert fa.plan(problem(Tq=16, Tk=1024), BROWSER).kernel.name == "fa2_decode"
    assert fa.plan(problem(Tq=17, Tk=1024), BROWSER).kernel.name == "fa2_forward_tiled"
    assert fa.plan(problem(Tq=1, Tk=1023), BROWSER).kernel.name == "fa2_forward_tiled"
    assert fa.plan(problem(Tk=5000, D=256), BROWSER, trace=True).kernel.name == "fa2_forward"
    cramped = replace(BROWSER, workgroup_bytes=8, software=True)  # no tile at all
    assert fa.plan(problem(), replace(cramped, software=False)).kernel.name == "naive"
    assert fa.plan(problem(), cramped).kernel.name == "fused_sv"
    assert fa.plan(problem(Tk=1025), cramped).kernel.name == "naive"
    with pytest.raises(fa.LimitError, match="fa2_forward with tiles of 1x1 at D=8 needs 96 B.*No tile fits"):
        fa.plan(problem(), cramped, trace=True)


def test_edits_touch_one_place():
    kernel = KERNELS["fa2_forward"]
    edited = kernel.edited("l *= alpha;", "l *= 1.0;")
    assert "l *= 1.0;" in edited.text() and "l *= alpha;" not in edited.text()
    assert "l *= alpha;" in kernel.text(), "the kernel itself stays"
    twice = edited.edited("l *= 1.0;", "l *= 2.0;")
    assert "l *= 2.0;" in twice.text() and twice.name == "fa2_forward"
    for text, count in (("no such text", 0), ("m_new", kernel.text().count("m_new"))):
        with pytest.raises(fa.KernelError, match=f"stands {count} times in fa2_forward.wgsl"):
            kernel.edited(text, "")
    second = (
        KERNELS["naive"]
        .edited("= s * params.scale;", "= s;")
        .edited("var o = 0.0;", "var o = 1.0;", file="naive_output")
    )
    assert dict(second.edits).keys() == {"naive_scores", "naive_output"}


def test_an_edit_of_a_file_that_is_not_the_kernels_own_is_refused():
    """It would be lost without a word: only the passes' own files are linked with their edits."""
    with pytest.raises(fa.KernelError, match="naive_scores"):
        KERNELS["naive"].edited("var m = M_NONE;", "var m = 0.0;", file="fused_sv")
    with pytest.raises(fa.KernelError, match="fa2_forward"):
        KERNELS["fa2_forward"].edited("return params.n_k;", "return 0u;", file="shared/problem")


# Splitting.


def test_batches_are_split_first_then_groups_then_heads_of_a_group():
    posed = problem(B=3, Tq=4, Tk=4, H=4, Hkv=2, D=4)
    head = 4 * 4 * 4  # bytes of one head's q

    def launches(room: int) -> list[tuple]:
        planned = fa.plan(posed, replace(ROOMY, binding_bytes=room), "fa2_forward")
        return [
            ((c.batch.start, c.batch.stop), (c.heads.start, c.heads.stop), (c.kv_heads.start, c.kv_heads.stop))
            for c in planned.chunks
        ]

    assert launches(12 * head) == [((0, 3), (0, 4), (0, 2))]
    assert launches(11 * head) == [((0, 2), (0, 4), (0, 2)), ((2, 3), (0, 4), (0, 2))]
    assert launches(3 * head) == [((b, b + 1), (2 * kv, 2 * kv + 2), (kv, kv + 1)) for b in range(3) for kv in range(2)]
    assert launches(head) == [((b, b + 1), (h, h + 1), (h // 2, h // 2 + 1)) for b in range(3) for h in range(4)]


def test_batch_times_heads_beyond_one_dispatch_dimension():
    planned = fa.plan(problem(B=70_000, Tq=1, Tk=1, H=2, D=1), BROWSER)
    assert [c.problem.B * c.problem.H for c in planned.chunks] == [65_534, 65_534, 8_932]


@given(
    B=st.integers(1, 5),
    Hkv=st.integers(1, 4),
    group=st.integers(1, 3),
    room=st.integers(64, 4000),
    workgroups=st.integers(1, 20),
    return_attn=st.booleans(),
)
def test_launches_cover_every_head_once_and_each_fits(B, Hkv, group, room, workgroups, return_attn):
    posed = problem(B=B, Tq=3, Tk=5, H=Hkv * group, Hkv=Hkv, D=2)
    limits = replace(ROOMY, binding_bytes=room, workgroups=workgroups)
    planned = fa.plan(posed, limits, "fa2_forward", return_attn=return_attn)
    covered = []
    for chunk in planned.chunks:
        assert max(planned.buffer_bytes(chunk.problem).values()) <= room
        assert chunk.problem.B * chunk.problem.H <= workgroups
        assert chunk.problem.group * chunk.problem.Hkv == chunk.problem.H
        assert planned.buffer_bytes(chunk.problem)["q"] <= planned.buffer_bytes()["q"], "the first is the largest"
        for b in range(chunk.batch.start, chunk.batch.stop):
            for i, h in enumerate(range(chunk.heads.start, chunk.heads.stop)):
                covered.append((b, h))
                assert chunk.kv_heads.start + i // chunk.problem.group == h // group, "reads its own KV head"
    assert sorted(covered) == [(b, h) for b in range(B) for h in range(Hkv * group)]
    assert len(set(covered)) == len(covered)


# Bytes.


def test_bytes_of_every_buffer():
    posed = problem(B=2, Tq=10, Tk=20, H=4, Hkv=2, D=8)
    planned = fa.plan(posed, ROOMY, "fa2_forward", return_attn=True, trace=True, block_k=16)
    assert planned.buffer_bytes() == {
        "q": 4 * 2 * 10 * 4 * 8,
        "k": 4 * 2 * 20 * 2 * 8,
        "v": 4 * 2 * 20 * 2 * 8,
        "out": 4 * 2 * 10 * 4 * 8,
        "lse": 4 * 2 * 4 * 10,
        "attn": 4 * 2 * 4 * 10 * 20,
        "trace": 16 * 2 * 4 * 10 * 2,
    }


def test_without_attn_nothing_grows_with_t_squared():
    def grows(name: str, **wishes) -> int:
        """By how much more another 256 rows and keys cost than the 256 before them: 0 if bytes are linear in T."""
        bytes_at = [fa.plan(problem(Tq=t, Tk=t), ROOMY, name, **wishes).device_bytes for t in (256, 512, 768)]
        return bytes_at[0] - 2 * bytes_at[1] + bytes_at[2]

    assert grows("fused_sv") == grows("fa2_forward") == 0
    assert grows("fa2_forward", return_attn=True) > 0 and grows("naive") > 0, "the control: these keep the matrix"


def test_an_empty_problem_needs_nothing():
    for empty in (problem(B=0), problem(Tq=0), problem(Tk=0)):
        planned = fa.plan(empty, BROWSER)
        assert (planned.chunks, planned.device_bytes, planned.buffer_bytes()) == ((), 0, {})
        assert "buffers none: 0 B in 0 launch(es)" in str(planned)


def test_a_kernel_that_the_order_does_not_name_is_tried_last():
    late = replace(fa.kernels()["fa2_forward"], name="yours")
    table = {"yours": late, **fa.kernels()}
    problem, *_ = pose(*(np.zeros((1, 4, 1, 4), np.float32),) * 3)
    assert fa.plan(problem, BROWSER, table=table).kernel.name == "fa2_forward_tiled"
    assert fa.plan(problem, BROWSER, table={"yours": late}).kernel.name == "yours"


def test_block_sizes_may_be_numpys_whole_numbers():
    problem, *_ = pose(*(np.zeros((1, 4, 1, 4), np.float32),) * 3)
    planned = fa.plan(problem, BROWSER, "fa2_forward", block_q=np.int64(8), block_k=np.int32(4))
    assert (type(planned.block_q), planned.block_q, planned.block_k) == (int, 8, 4)


def test_the_backward_traces_tiles_obey_the_limits():
    """It has no tiles of Q or K, but 2 floats a (query, key) pair and max(BLOCK_Q, BLOCK_K) invocations."""
    problem, *_ = pose(*(np.zeros((1, 200, 1, 1), np.float32),) * 3)
    assert BACKWARD_TRACE.passes[-1].tile_bytes(Tile(32, 16), 64) == 2 * 32 * 16 * 4
    with pytest.raises(fa.LimitError, match="131,072 B of workgroup memory and 128 invocations"):
        fa.plan(problem, BROWSER, BACKWARD_TRACE, block_q=128, block_k=128)
    with pytest.raises(fa.LimitError, match="512 invocations"):
        fa.plan(problem, BROWSER, BACKWARD_TRACE, block_q=1, block_k=512)
