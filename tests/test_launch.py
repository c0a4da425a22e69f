"""Launching: what a kernel is told about its problem, and how long the parts of a launch take."""

from __future__ import annotations

import re
from dataclasses import astuple

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import source
from fa2lab.launch import _flops, _params, parts, resident
from fa2lab.planned import PARAMS_BYTES
from fa2lab.problem import pose


def test_params_are_what_the_snippet_declares():
    """Member by member, in the order of the struct of shared/problem.wgsl, and not a byte more."""
    problem, *_ = pose(*engines.random(B=2, T=5, Tk=7, H=4, Hkv=2, D=3), causal=True, scale=0.25)
    struct = re.search(r"struct Params \{(.*?)\}", source.read("shared/problem"), re.DOTALL)[1]
    members = re.findall(r"(\w+): (\w+),", struct)
    kinds = {"u32": np.uint32, "i32": np.int32, "f32": np.float32}
    read = _params(problem, (11, 12, 13)).view(np.dtype([(name, kinds[kind]) for name, kind in members]))[0]
    want = dict(n_batch=2, n_heads=4, n_kv_heads=2, n_q=5, n_k=7, causal=1, diagonal=2, scale=0.25, neg_inf=-np.inf)
    assert dict(zip(read.dtype.names, read.tolist(), strict=True)) == want | dict(first_x=11, first_y=12, first_z=13)
    assert _params(problem).nbytes == PARAMS_BYTES and not _params(problem)[-12:].any()


def test_work_is_counted_by_the_pairs_that_are_seen():
    """4 FLOP a number of D for each query and key: one product for the score, one for the output."""
    full, *_ = pose(*engines.random(B=2, T=5, Tk=7, H=4, Hkv=2, D=3))
    causal, *_ = pose(*engines.random(B=2, T=5, Tk=7, H=4, Hkv=2, D=3), causal=True)
    assert _flops(full) == 2 * 4 * (5 * 7) * 4 * 3
    assert _flops(causal) == 2 * 4 * (3 + 4 + 5 + 6 + 7) * 4 * 3


def posed(device, kernel, **sizes):
    arrays = engines.random(**sizes)
    problem, *_ = pose(*arrays)
    return fa.plan(problem, device.limits, kernel), dict(zip("qkv", arrays, strict=True))


def test_the_parts_of_a_launch(roomy_device):
    roomy_device.revive()  # which has compiled nothing
    planned, inputs = posed(roomy_device, "naive", T=6, D=5)
    fresh = parts(planned, inputs, roomy_device)
    again = parts(planned, inputs, roomy_device)
    assert all(seconds > 0 for seconds in astuple(fresh))
    assert again.compile == 0 and all(x > 0 for x in (again.upload, again.first, again.dispatch, again.readback))
    passes = {stage.file for stage in planned.kernel.passes}
    assert passes <= set(roomy_device.compile_seconds)
    assert fresh.compile == pytest.approx(sum(roomy_device.compile_seconds[name] for name in passes))
    assert roomy_device.memory.live_buffers == 0


def test_compiling_is_timed_once(roomy_device):
    roomy_device.revive()
    planned, inputs = posed(roomy_device, "fused_sv", T=6, D=5)
    with resident(planned, inputs, roomy_device) as [dispatch]:
        seconds = roomy_device.compile(dispatch)
        assert seconds == roomy_device.compile_seconds["fused_sv"] > 0
        assert roomy_device.compile(dispatch) == 0 < roomy_device.compile_seconds["fused_sv"]


@pytest.mark.parametrize("clock", ["as it is", "wall clock"])
def test_a_bind_group_is_made_once_however_often_it_is_timed(roomy_device, monkeypatch, clock):
    made = []
    create = roomy_device._handle.create_bind_group
    monkeypatch.setattr(roomy_device._handle, "create_bind_group", lambda **kw: made.append(1) or create(**kw))
    planned, inputs = posed(roomy_device, "naive", T=6, D=5)
    with resident(planned, inputs, roomy_device) as dispatches:
        time = roomy_device.time if clock == "as it is" else roomy_device.time_on_the_wall
        assert time(dispatches, 7) > 0
    assert len(made) == len(dispatches) == 3


def test_timing_runs_each_dispatch_as_often_as_asked(roomy_device):
    double = source.link(
        "double",
        text="""@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@compute @workgroup_size(1)
fn double() {
  x[0] *= 2.0;
}
""",
    )
    with roomy_device.buffers() as make:
        x = make(np.ones(4, np.float32))
        dispatch = fa.gpu.Dispatch(double, ((x, "read_write"),), (1, 1, 1))
        roomy_device.time([dispatch, dispatch], 5)
        assert roomy_device.read(x, np.float32)[0] == 2**10
        roomy_device.time_on_the_wall([dispatch], 3)
        assert roomy_device.read(x, np.float32)[0] == 2**13
