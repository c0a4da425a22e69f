"""Long dispatches in pieces: every cut covers the grid once and gives the same bits, stays short and can be stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from itertools import product
from math import prod
from pathlib import Path

import engines
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa2lab as fa
from fa2lab import gpu, pieces, source
from fa2lab.gpu import Dispatch
from fa2lab.launch import resident
from fa2lab.pieces import Box, Cutter, Progress, ctrl_c_between
from fa2lab.problem import pose

ROOT = Path(__file__).resolve().parents[1]


# The cut, without a device.

GRIDS = st.tuples(*[st.integers(1, 12)] * 3)


def boxes_of(cutter: Cutter, seconds=lambda box: 0.1) -> list[Box]:
    """What the cutter runs, on a clock that `seconds` tells."""
    ran = []
    cutter.run(lambda box: ran.append(box) or seconds(box))
    return ran


def covered(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(first, first + n) for first, n in zip(box.first, box.count, strict=True))))


@given(GRIDS, st.integers(1, 15), st.floats(1e-4, 1e4), st.floats(1e-6, 10))
def test_boxes_cover_the_grid_once(grid, limit, flops, seconds):
    ran = boxes_of(Cutter(grid, limit, flops, pace=1e-3), lambda box: seconds * box.size)
    places = [place for box in ran for place in covered(box)]
    assert sorted(places) == covered(Box((0, 0, 0), grid))
    assert all(max(box.count) <= limit for box in ran)


def test_the_outermost_axis_is_cut_first():
    box = Box((0, 0, 0), (4, 6, 8))
    assert box.cut(1000, 99, at_end=False) is None
    assert box.cut(48, 99, at_end=False) == (Box((0, 0, 0), (4, 6, 2)), Box((0, 0, 2), (4, 6, 6)))
    assert box.cut(48, 99, at_end=True) == (Box((0, 0, 6), (4, 6, 2)), Box((0, 0, 0), (4, 6, 6)))
    assert Box((0, 0, 5), (4, 6, 1)).cut(9, 99, at_end=False) == (
        Box((0, 0, 5), (4, 2, 1)),
        Box((0, 2, 5), (4, 4, 1)),
    )
    assert Box((0, 0, 0), (9, 1, 1)).cut(8, 99, at_end=False)[0].count == (5, 1, 1), "no crumb at the end"


def times(grid, flops, speed, weights=None, compiling=0.0, guess=1e8) -> list[float]:
    """Seconds of the pieces on a device of so many FLOP/s that first compiles; `weights` along x."""
    weights = np.ones(grid[0]) if weights is None else weights
    weights = weights / weights.mean() * flops / prod(grid)
    took = []

    def seconds(box: Box) -> float:
        work = weights[box.first[0] : box.first[0] + box.count[0]].sum() * box.count[1] * box.count[2]
        took.append(work / speed)
        return work / speed + (compiling if len(took) == 1 else 0)

    boxes_of(Cutter(grid, 65_535, flops, 1 / guess), seconds)
    return took


@pytest.mark.parametrize("shape", ["even", "rising", "falling"])
@pytest.mark.parametrize("speed", [3e7, 1e8, 2e9, 3e11])
@pytest.mark.parametrize("compiling", [0.0, 5.0])
def test_pieces_stay_well_under_a_second(shape, speed, compiling):
    """Whichever way the mask makes the work of a workgroup go, and whether or not the first piece also compiles."""
    weights = {"even": np.ones(256), "rising": np.arange(1.0, 257), "falling": np.arange(256.0, 0, -1)}[shape]
    took = times((256, 8, 1), flops=speed * 30, speed=speed, weights=weights, compiling=compiling)
    assert max(took) < 0.75
    assert sum(took) == pytest.approx(30)
    assert len(took) < 30 / pieces.PIECE_SECONDS * 3


def test_a_fast_device_pays_a_handful_of_submissions():
    assert len(times((1024, 64, 1), flops=1e12, speed=3e13, guess=1e10)) <= 8


# The same bits, on each driver.


class Crumbs(Cutter):
    """Never more than two workgroups at once."""

    most = property(lambda self: 2, lambda self, most: None)


@pytest.fixture
def always_cut(monkeypatch) -> list[str]:
    """Everything that can go out in pieces does; the entry points of what did."""
    cut = []
    in_pieces = gpu.Device._run_in_pieces

    def noted(self, dispatch, progress):
        cut.append(dispatch.source.entry)
        in_pieces(self, dispatch, progress)

    monkeypatch.setattr(gpu.Device, "_is_long", lambda self, dispatch: dispatch.params_from is not None)
    monkeypatch.setattr(gpu.Device, "_run_in_pieces", noted)
    monkeypatch.setattr(gpu, "Cutter", Crumbs)
    for device in engines.session_devices():  # crumbs say nothing about a device's pace
        monkeypatch.setattr(device, "_pace", {})
    return cut


def inputs(**sizes):
    """q, k, v and dout: 3 workgroups of LANES rows, heads that share keys, more keys than queries."""
    shape = dict(B=1, T=130, Tk=150, H=2, Hkv=1, D=4) | sizes
    q, k, v = engines.random(**shape)
    return q, k, v, engines.random(**shape, seed=1)[0]


SHAPES = {"long": {}, "many heads": dict(B=2, T=5, Tk=5, H=4, Hkv=2)}


def forward(kernel, shape, device):
    q, k, v, _ = inputs(**SHAPES[shape])
    asked = dict(trace=True, return_attn=True) if fa.kernels()[kernel].traces else {}
    r = fa.attention(q, k, v, causal=True, kernel=kernel, device=device, **asked)
    found = [r.out, r.lse] + ([r.attn, r.trace.m, r.trace.l, r.trace.alpha] if asked else [])
    return [x.tobytes() for x in found], r.device_bytes


def backward(kernel, shape, device):
    q, k, v, dout = inputs(**SHAPES[shape])
    r, g = fa.attention_grad(q, k, v, dout, causal=True, kernel=kernel, device=device)
    return [x.tobytes() for x in (r.out, r.lse, g.dq, g.dk, g.dv)], g.device_bytes


def traced(kernel, shape, device):
    q, k, v, dout = inputs(**SHAPES[shape])
    r = fa.reference.attention(q, k, v, causal=True, dtype=np.float32)
    t = fa.backward_trace(q, k, v, r.out, r.lse, dout, causal=True, block_q=16, block_k=16, device=device)
    return [x.tobytes() for x in (t.p, t.ds, t.dq_parts, t.dk_parts, t.dv_parts)], 0


CALLS = {
    **{name: forward for name in fa.kernels()},
    **{name: backward for name in fa.backward_kernels()},
    "fa2_backward_trace": traced,
}


# One driver cuts every kernel, the others one that counts invocations and one that counts workgroups.
LLVMPIPE, *OTHERS = engines.seats("adapter")
CUT = [(LLVMPIPE, kernel, shape) for kernel in CALLS for shape in SHAPES]
CUT += [(seat, kernel, "long") for seat in OTHERS for kernel in ("naive", "fa2_forward")]


@pytest.mark.parametrize("case", [engines.seat_param(case[0], case, "-".join(map(str, case))) for case in CUT])
def test_any_cut_gives_the_same_bits(case, request):
    seat, kernel, shape = case
    device = engines.device_of(seat)
    whole, whole_bytes = CALLS[kernel](kernel, shape, device)
    cut = request.getfixturevalue("always_cut")
    in_pieces, bytes_in_pieces = CALLS[kernel](kernel, shape, device)
    assert cut and in_pieces == whole
    assert bytes_in_pieces == whole_bytes, "pieces take no memory of their own"


@pytest.mark.parametrize("file", sorted(path.stem for path in source.WGSL.glob("*.wgsl")))
def test_every_kernel_that_is_told_where_it_begins_asks(file):
    """Uses of the built-in ids go through the offset, which `params` holds."""
    text = source.read(file)
    if "params: Params" in text:
        ids = re.findall(r"@builtin\((?:workgroup_id|global_invocation_id)\) (\w+)", text)
        assert len(ids) == 1
        uses = re.findall(rf"(\w+\()?\b{ids[0]}\b(?!: vec3)", text[text.index(f"fn {file}(") :].split(";")[0])
        assert uses == ["offset_id("] or uses == ["offset_invocation("]


@pytest.mark.gpu
@pytest.mark.skipif(bool(engines.lacking(LLVMPIPE.adapter, LLVMPIPE.compiler)), reason="no llvmpipe")
@pytest.mark.parametrize(
    ("kernel", "file", "old", "new"),
    [
        ("fa2_forward", "fa2_forward", "offset_id(id)", "id"),
        ("fa2_forward", "fa2_forward", "offset_id(id)", "vec3<u32>(id.x + params.first_x, id.yz)"),
        ("fused_sv", "fused_sv", "offset_invocation(global, LANES)", "global"),
        ("fused_sv", "fused_sv", "offset_invocation(global, LANES)", "offset_invocation(global, 1u)"),
        (
            "naive",
            "naive_output",
            "offset_invocation(global, LANES)",
            "vec3<u32>(global.x, offset_id(global).y, global.z)",
        ),
    ],
)
def test_a_kernel_that_forgets_where_it_begins_is_red(kernel, file, old, new, request):
    device = engines.device_of(LLVMPIPE)
    q, k, v, _ = inputs()
    broken = fa.kernels()[kernel].edited(old, new, file=file)
    right = fa.attention(q, k, v, kernel=kernel, device=device).out.tobytes()
    assert fa.attention(q, k, v, kernel=broken, device=device).out.tobytes() == right, "whole, it is right"
    request.getfixturevalue("always_cut")
    assert fa.attention(q, k, v, kernel=kernel, device=device).out.tobytes() == right
    assert fa.attention(q, k, v, kernel=broken, device=device).out.tobytes() != right


COUNT = source.link(
    "count",
    text="""struct Params { first_x: u32, first_y: u32, first_z: u32, unused: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> x: array<u32>;

@compute @workgroup_size(1)
fn count(@builtin(workgroup_id) id: vec3<u32>) {
  x[id.x + params.first_x] += 1u;
}
""",
)


def starting_at(first: tuple[int, int, int]) -> np.ndarray:
    return np.array([*first, 0], np.uint32)


def test_a_grid_wider_than_the_device_allows_goes_out_in_pieces(device):
    wide = device.limits.workgroups + 9
    with device.buffers() as make:
        params, x = make(starting_at((0, 0, 0)), uniform=True), make(4 * wide)
        bindings = (params, "uniform"), (x, "read_write")
        device.run([Dispatch(COUNT, bindings, (wide, 1, 1), params_from=starting_at)] * 2)
        assert (device.read(x, np.uint32) == 2).all(), (
            "each workgroup once, and the second run from the beginning again"
        )


# When it is cut.


def test_short_work_goes_out_together_and_long_work_in_pieces(roomy_device, monkeypatch):
    sent = []
    submit = gpu.Device._submit
    monkeypatch.setattr(gpu.Device, "_submit", lambda self, bound: sent.append(len(bound)) or submit(self, bound))
    q, k, v, _ = inputs()
    fa.attention(q, k, v, kernel="naive", device=roomy_device)
    assert [n for n in sent if n] == [3]
    sent.clear()
    monkeypatch.setattr(gpu.Device, "_pace_of", lambda self, dispatch: 1.0)  # a FLOP a second
    fa.attention(q, k, v, kernel="fa2_forward", device=roomy_device)
    assert len(sent) > 3 and max(sent) == 1


def test_a_device_remembers_its_pace(roomy_device):
    problem, *_ = pose(*inputs()[:3])
    planned = fa.plan(problem, roomy_device.limits, "fa2_forward", block_q=8, block_k=8)
    with resident(planned, dict(zip("qkv", inputs(), strict=False)), roomy_device) as [dispatch]:
        guess = roomy_device._pace_of(dispatch)
        roomy_device._run_in_pieces(dispatch, None)
        assert roomy_device._pace_of(dispatch) != guess


# Stopping.


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, ZeroDivisionError])
def test_what_ends_it_between_pieces_leaves_nothing_behind(roomy_device, always_cut, monkeypatch, stopped_by):
    q, k, v, _ = inputs()
    before = roomy_device.memory.live_bytes
    told = []

    def stop(self, flops):
        told.append(flops)
        if len(told) == 3:
            raise stopped_by

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "advance", stop)
        with pytest.raises(stopped_by):
            fa.attention(q, k, v, kernel="fa2_forward", device=roomy_device)
    assert len(told) == 3 and roomy_device.memory.live_bytes == before
    problem, *_ = pose(q, k, v)
    planned = fa.plan(problem, roomy_device.limits, "fa2_forward")
    with resident(planned, dict(q=q, k=k, v=v), roomy_device) as [dispatch]:
        with monkeypatch.context() as patched:
            patched.setattr(roomy_device, "wait", lambda: told.append(0) or (len(told) > 6 and 1 / 0))
            with pytest.raises(ZeroDivisionError):
                roomy_device.run([dispatch])
        params = roomy_device.read(dispatch.bindings[0][0], np.uint32)
        assert not params[-3:].any(), "the next dispatch begins at the beginning again"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_waits_for_the_end_of_a_call_and_is_never_lost():
    def interrupt():
        signal.raise_signal(signal.SIGINT)

    reached = []
    with pytest.raises(KeyboardInterrupt), ctrl_c_between() as check:
        interrupt()
        reached.append("after the signal")
        check()
        reached.append("after the check")
    assert reached == ["after the signal"]
    with pytest.raises(KeyboardInterrupt), ctrl_c_between():
        interrupt()
        reached.append("the end")
    with pytest.raises(KeyboardInterrupt), ctrl_c_between():
        interrupt()
        interrupt()
        reached.append("after the second")
    assert reached == ["after the signal", "the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_program_that_handles_ctrl_c_itself_still_does(monkeypatch):
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        with ctrl_c_between() as check:
            signal.raise_signal(signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [1]
    quiet = []

    def elsewhere():
        with ctrl_c_between() as check:
            quiet.append(signal.getsignal(signal.SIGINT))
            check()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert quiet == [before]


INTERRUPTED = """
import os, signal, sys, threading, time
import fa2lab as fa

device = fa.Device(sys.argv[1], compiler=sys.argv[2])
small, long = fa.data.make("random", T=8, H=1, D=4), fa.data.make("random", T=4096, H=64, D=4)
fa.attention(*small, kernel="fa2_forward", device=device)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.perf_counter()
try:
    fa.attention(*long, kernel="fa2_forward", device=device)
except KeyboardInterrupt:
    assert device.memory.live_buffers == 0 and not device.lost
    again = fa.attention(*small, kernel="fa2_forward", device=device)
    fa.parity.compare(again, fa.reference.attention(*small)).check()
    print("heard")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("seat", [engines.seat_param(engines.Seat(*pair, "adapter")) for pair in engines.SOFTWARE[::2]])
def test_ctrl_c_is_heard(seat):
    """The work would take a software driver minutes. Each of the two wgpus waits in its own way."""
    command = [sys.executable, "-c", INTERRUPTED, seat.adapter, seat.compiler]
    ran = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "heard\n"


# The bar.


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when told to."""
    now = [0.0]
    monkeypatch.setattr(pieces.time, "perf_counter", lambda: now[0])
    return now


def test_the_bar_comes_once_the_whole_takes_more_than_seconds(clock, capsys):
    with Progress(100.0, "fa2_forward") as progress:
        clock[0] = 0.9
        progress.advance(1.0)  # 90 seconds in all, were it not the first moment
        assert capsys.readouterr().err == ""
        clock[0] = 1.5
        progress.advance(9.0)  # 15 seconds
        assert "fa2_forward  10%" in capsys.readouterr().err
        progress.reach(100.0)
        assert progress.done == 100.0
    assert re.fullmatch(r"(.*\r)? *\r", capsys.readouterr().err.split("\n")[-1], re.DOTALL), "and goes away"


def test_no_bar_for_short_work(clock, capsys):
    with Progress(100.0, "fa2_forward") as progress:
        for clock[0] in (0.1, 1.1, 2.0, 2.8):
            progress.reach(100 / 2.9 * clock[0])
    assert capsys.readouterr().err == ""


def test_the_bar_goes_away_whatever_happens(clock, capsys):
    with pytest.raises(KeyboardInterrupt), Progress(100.0, "x") as progress:
        clock[0] = 5
        progress.advance(10)
        raise KeyboardInterrupt
    assert progress._bar.disable, "closed"
    assert capsys.readouterr().err.endswith("\r")
