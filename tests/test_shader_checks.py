"""The project's own kernels go without shader checks, to the same bits; edited text never does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import pipelines
from fa2lab import trusted as trusted_room
from fa2lab.gpu import Dispatch
from fa2lab.source import link

# llvmpipe and every GPU; SwiftShader would compile it all once more, twice.
NAGA = [seat for seat in engines.seats("adapter") if seat.compiler == "naga" and seat.adapter != "SwiftShader"]
SHAPES = {
    "ragged": dict(T=21, Tk=37, H=4, Hkv=2, D=7),
    "vec4": dict(B=2, T=33, H=2, D=8),
}


@cache
def checked(seat: engines.Seat) -> fa.Device:
    return fa.Device(seat.adapter, compiler=seat.compiler, shader_checks=True)


@pytest.fixture(params=[engines.seat_param(seat) for seat in NAGA])
def pair(request) -> Iterator[tuple[fa.Device, fa.Device]]:
    """The same adapter without and with checks."""
    devices = engines.device_of(request.param), checked(request.param)
    assert [device.shader_checks for device in devices] == [False, True]
    yield devices
    assert devices[1].memory.live_buffers == 0


def bits(*arrays: np.ndarray) -> list[bytes]:
    assert all(np.isfinite(array).all() and array.any() for array in arrays)
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", fa.kernels())
def test_checks_change_no_bit_of_a_forward(pair, kernel, shape):
    args = engines.random(**SHAPES[shape])
    traced = dict(trace=True, return_attn=True) if fa.kernels()[kernel].traces else {}
    off, on = (fa.attention(*args, causal=True, kernel=kernel, device=device, **traced) for device in pair)
    assert bits(off.out, off.lse) == bits(on.out, on.lse)
    if traced:
        assert bits(off.attn, off.trace.m, off.trace.l) == bits(on.attn, on.trace.m, on.trace.l)
    fa.parity.compare(off, fa.reference.attention(*args, causal=True)).check()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", fa.backward_kernels())
def test_checks_change_no_bit_of_a_backward(pair, kernel, shape):
    q, k, v = engines.random(**SHAPES[shape])
    off, on = (fa.attention_grad(q, k, v, q, causal=True, kernel=kernel, device=device)[1] for device in pair)
    assert bits(off.dq, off.dk, off.dv) == bits(on.dq, on.dk, on.dv)


def test_checks_change_no_bit_of_a_backward_trace(pair):
    q, k, v = engines.random(T=21, Tk=37, D=8)
    r = fa.reference.attention(q, k, v, dtype=np.float32)
    off, on = (fa.backward_trace(q, k, v, r.out, r.lse, q, block_q=8, block_k=8, device=device) for device in pair)
    names = ("p", "ds", "dq_parts", "dk_parts", "dv_parts")
    assert bits(*(getattr(off, name) for name in names)) == bits(*(getattr(on, name) for name in names))


# Who is trusted.


@pytest.fixture
def trusted(monkeypatch) -> list[str]:
    """The texts that were compiled without checks."""
    texts = []
    make = pipelines.trusted_module

    def noted(wgpu, device, code, label):
        texts.append(code)
        return make(wgpu, device, code, label)

    monkeypatch.setattr(pipelines, "trusted_module", noted)
    return texts


def test_edited_text_always_has_its_checks(roomy_device, trusted):
    args = engines.random(T=9, D=5)
    roomy_device.revive()  # which has compiled nothing
    trusted.clear()
    kernel = fa.kernels()["fa2_forward"].edited("let bh = workgroup.y;", "let bh = workgroup.y; // mine")
    edited = fa.attention(*args, kernel=kernel, device=roomy_device)
    assert not [text for text in trusted if "fn fa2_forward" in text]
    own = fa.attention(*args, kernel="fa2_forward", device=roomy_device)
    assert len([text for text in trusted if "fn fa2_forward" in text]) == (0 if roomy_device.shader_checks else 1)
    assert own.out.tobytes() == edited.out.tobytes()


def test_text_that_equals_the_projects_is_still_edited_text(roomy_device, trusted):
    """So the pipeline that an own kernel has left is not taken for it."""
    args = engines.random(T=9, D=6)
    fa.attention(*args, kernel="fa2_forward", device=roomy_device)
    kernel = fa.kernels()["fa2_forward"].edited("let bh = workgroup.y;", "let bh = workgroup.y;")
    compiled = []
    create = roomy_device._handle.create_shader_module
    roomy_device._handle.create_shader_module = lambda **kw: compiled.append(kw["code"]) or create(**kw)
    try:
        fa.attention(*args, kernel=kernel, device=roomy_device)
    finally:
        del roomy_device._handle.create_shader_module
    assert len(compiled) == 1, "with checks"


def test_who_asks_for_checks_has_them(pair, trusted):
    again = fa.Device(pair[1].adapter, shader_checks=True)
    fa.attention(*engines.random(T=9, D=5), kernel="fa2_forward", device=again)
    assert again.shader_checks and trusted == []


def test_errors_of_trusted_text_point_at_the_place(pair):
    for device in pair:
        wrong = link("entry", text="@compute @workgroup_size(1)\nfn entry() {\n  nothing();\n}\n")
        with pytest.raises(
            fa.KernelError, match=r"entry.wgsl:3:3: no definition in scope.*\n    nothing\(\);\n    \^$"
        ):
            device.run([Dispatch(replace(wrong, trusted=True), (), (1, 1, 1))])


# Another wgpu-py.

NATIVE = "wgpu.backends.wgpu_native._api"
FUNCTION = "wgpuDeviceCreateShaderModuleTrusted"


def missing(name: str):
    raise ImportError(name)


def without_the_function(name: str):
    native = import_module(name)
    functions = {k: v for k, v in vars(native.libf).items() if k != FUNCTION}
    return SimpleNamespace(**vars(native) | {"libf": SimpleNamespace(**functions)})


def with_another_function(name: str, function):
    native = import_module(name)
    return SimpleNamespace(**vars(native) | {"libf": SimpleNamespace(**{FUNCTION: function})})


OTHERWISE = {
    "the module is gone": missing,
    "it holds nothing": lambda name: SimpleNamespace(),
    "the function is gone": without_the_function,
    "it takes other arguments": lambda name: with_another_function(name, lambda device: None),
    "it gives nothing": lambda name: with_another_function(name, lambda *_: import_module(name).ffi.NULL),
}


@pytest.mark.parametrize("change", OTHERWISE)
def test_where_wgpu_is_otherwise_inside_all_have_checks_and_the_device_says_so(pair, change, monkeypatch):
    args = engines.random(T=9, D=5)
    late = fa.Device(pair[0].adapter)
    want = fa.attention(*args, kernel="fused_sv", device=pair[0]).out.tobytes()
    monkeypatch.setattr(trusted_room, "import_module", OTHERWISE[change])
    assert fa.Device(pair[0].adapter).shader_checks is True, "from the start"
    assert late.shader_checks is False
    assert fa.attention(*args, kernel="fused_sv", device=late).out.tobytes() == want
    assert late.shader_checks is True, "and from then on"


def test_the_control_inside_wgpu_as_it_is_all_is_found():
    assert callable(getattr(import_module(NATIVE).libf, FUNCTION))
