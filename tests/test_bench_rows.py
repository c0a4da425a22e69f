"""Rows of the bench: what they say, and that a kernel which is wrong anywhere is refused before it is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import bench, cost, spotcheck
from fa2lab.ceilings import Ceilings
from fa2lab.problem import Problem

LONG = dict(B=1, T=200, H=2, Hkv=1, D=8)  # longer than the corner that is held whole


@pytest.fixture
def llvmpipe():
    if why := engines.lacking("llvmpipe", "naga"):
        pytest.skip(why)
    return engines.device_of(engines.Seat("llvmpipe", "naga", "adapter"))


@pytest.fixture
def stopped_watch(monkeypatch):
    """A device whose clock must not be asked."""

    def read(*_):
        raise AssertionError("a wrong kernel was timed")

    monkeypatch.setattr(fa.Device, "time", read)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", bench.DIRECTIONS)
def test_a_row_of_each_kernel(llvmpipe, direction):
    sizes = dict(B=2, T=19, H=2, Hkv=1, D=8)
    for name in bench.table(direction):
        row = bench.measure(llvmpipe, name, direction=direction, patience=0.0, **sizes)
        assert (row.kernel, row.direction, row.adapter) == (name, direction, str(llvmpipe.adapter))
        assert (row.B, row.T, row.Tk, row.H, row.Hkv, row.D, row.causal, row.storage) == (
            2,
            19,
            19,
            2,
            1,
            8,
            True,
            "f32",
        )
        assert row.flops == cost.flops(Problem(2, 19, 19, 2, 1, 8, True, "bottom-right", 1.0), direction)
        assert (
            row.bytes == sum(row.kinds.values()) > row.least_bytes > 0 and row.device_bytes > 0 and 0 < row.error <= 1
        )
        assert row.timing.clock == llvmpipe.clock and row.timing.seconds > 0 and row.first is None


@pytest.mark.gpu
def test_a_row_reckons_with_its_own_time(llvmpipe):
    row = bench.measure(llvmpipe, "fa2_forward", patience=0.0, first_call=True, T=24, H=1, D=8, block_q=8, block_k=4)
    assert row.tiles == ("8x4",)
    row = replace(row, timing=bench.Timing(2e-6, 1e-6, 3e-6, 5, "made up", True), flops=4e6, bytes=10**6)
    assert (row.milliseconds, row.tflops, row.gbps, row.intensity) == pytest.approx((2e-3, 2.0, 500.0, 4.0))
    roof = Ceilings("made up", 1e12, 1e13, row.timing, row.timing, 1, 1)
    assert (row.of_product(roof), row.of_copy(roof)) == pytest.approx((0.2, 0.5))
    parts = row.first
    assert row.first_call_seconds == parts.upload + parts.compile + parts.first + parts.readback > 0 < parts.compile
    record = json.loads(json.dumps(row.record(roof)))
    assert record["of_product"] == pytest.approx(0.2) and record["clock"] == "made up" and record["tiles"] == ["8x4"]
    assert record["first"]["upload"] == parts.upload and "of_copy" not in row.record()


# Each breakage shows in one of the parts that are proved, and nowhere else: it begins past the corner.
BREAKAGES = {
    "the rescale": ("forward", "fa2_forward", "l *= alpha;", "", None, "out is off"),
    "keys past 144": (
        "forward",
        "fa2_forward",
        "if (key0 >= seen_by_tile) {",
        "if (key0 >= min(seen_by_tile, 144u)) {",
        None,
        r"\(batch 0, rows 184 to 199\).*: out is off",
    ),
    "one NaN": (
        "forward",
        "fa2_forward",
        "out[at + d] = select(o[d] / l, 0.0, seen == 0u);",
        "out[at + d] = select(o[d] / l, params.neg_inf, row == 150u && bh == 1u);",
        None,
        r"out is -inf at \(0, 150, 1, 0\), from finite inputs",
    ),
    "dQ past 144 keys": (
        "backward",
        "fa2",
        "key0 < seen_by_tile; key0 += BLOCK_K",
        "key0 < min(seen_by_tile, 144u); key0 += BLOCK_K",
        "fa2_dq",
        r"rows 184 to 199\), the last KV group: dq is off",
    ),
    "dK and dV past 144 rows": (
        "backward",
        "fa2",
        "row0 < params.n_q; row0 += BLOCK_Q",
        "row0 < min(params.n_q, 144u); row0 += BLOCK_Q",
        "fa2_dkv",
        r"keys 0 to 15, the last KV head\): dk is off",
    ),
    "dV after its own forward": (
        "forward+backward",
        "fa2",
        "dv[start + d] = dv_row[d]",
        "dv[start + d] = 2.0 * dv_row[d]",
        "fa2_dkv",
        "dv is off",
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", BREAKAGES)
def test_a_wrong_kernel_is_refused_before_it_is_timed(llvmpipe, stopped_watch, what):
    direction, name, old, new, file, says = BREAKAGES[what]
    kernels = fa.kernels() if direction == "forward" else fa.backward_kernels()
    broken = kernels[name].edited(old, new, file=file)
    with pytest.raises(fa.ParityError, match=says):
        bench.measure(llvmpipe, broken, direction=direction, **LONG)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("Tk", [200, 320, 140])
def test_the_parts_are_exact_wherever_the_corner_stands(llvmpipe, causal, Tk):
    """More keys than queries, fewer, as many: the sub-problems have other masks, and all are within the bound."""
    q, k, v = fa.data.make("random", B=2, T=200, Tk=Tk, H=2, Hkv=1, D=8)
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    run = spotcheck.Run(llvmpipe, "fa2", "forward+backward", q, k, v, dout, causal)
    found = spotcheck.prove(run)
    labels = " ".join(c.label for c in found)
    assert "(the first B=2 " in labels and "(batch 1, rows 184 to 199)" in labels
    assert labels.count("the last KV head") == 2 and labels.count("the last KV group") == 2
    assert 0 < spotcheck.worst(found) <= 1


def test_where_two_kernels_cross():
    lengths = [64, 128, 256]
    assert bench.crossing(lengths, [1, 4, 16], [2, 2, 2]) == pytest.approx(64 * 2**0.5)  # both at 2
    assert bench.crossing(lengths, [1, 4, 1], [2, 2, 2]) is None  # ahead only for a while
    assert bench.crossing(lengths, [3, 3, 3], [2, 2, 2]) == 64
    assert bench.crossing(lengths, [1, 1, 1], [2, 2, 2]) is None


def test_a_direction_that_is_none():
    with pytest.raises(ValueError, match="direction must be one of .*; got 'sideways'"):
        bench.table("sideways")
