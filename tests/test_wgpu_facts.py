"""Facts about wgpu, Dawn and the software drivers that the code leans on: when an upgrade changes one, this says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import adapter as adapter_module
from fa2lab.gpu import Dispatch
from fa2lab.limits import WEBGPU_NAMES
from fa2lab.source import Source, link

HEAD = "@group(0) @binding(0) var<storage, read_write> x: array<f32>;\n"
ENTRY = "@compute @workgroup_size({lanes})\nfn entry(@builtin(local_invocation_index) lane: u32) {{\n{body}\n}}\n"


def shader(body: str = "  x[lane] = 1.0;", lanes: int = 1, before: str = "", after: str = "") -> str:
    return before + HEAD + ENTRY.format(lanes=lanes, body=body) + after


def compile_error(device: fa.Device, text: str) -> str | None:
    """What the compiler itself says of this text, None where it takes it."""
    try:
        device._handle.create_shader_module(code=text)
    except device.errors as error:
        return str(error)
    return None


def run(device: fa.Device, text: str | Source, content: np.ndarray) -> np.ndarray:
    """`content` after `text` ran on it, one workgroup."""
    source = link("entry", text=text) if isinstance(text, str) else text
    with device.buffers() as make:
        x = make(content)
        device.run([Dispatch(source, ((x, "read_write"),), (1, 1, 1))])
        return device.read(x, content.dtype, content.shape)


def fresh_process(code: str, environment) -> subprocess.CompletedProcess:
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=dict(environment, PYTHONPATH=root), capture_output=True, text=True, timeout=120)


def is_naga(device: fa.Device) -> bool:
    return device.adapter.compiler == "naga"


# Why kernels write `var x = T();` in loops.


def test_a_variable_without_a_value_starts_at_zero_once(roomy_device):
    """WGSL starts it at zero in every turn of the loop; naga and Tint, as of 0.32, at the function's begin only."""
    body = "  for (var i = 0u; i < 3u; i++) {\n    var sum: f32;\n    sum += 1.0;\n    x[i] = sum;\n  }"
    bare = run(roomy_device, shader(body), np.zeros(4, np.float32))
    assert bare.tolist() == [1, 2, 3, 0]
    said = run(roomy_device, shader(body.replace("var sum: f32;", "var sum = f32();")), np.zeros(4, np.float32))
    assert said.tolist() == [1, 1, 1, 0]


# Why the planner counts workgroup memory itself.


def test_wgpu_native_does_not_check_workgroup_memory(roomy_device):
    size = roomy_device.limits.workgroup_bytes // 4 + 1
    text = shader("  tile[lane] = 1.0;\n  x[lane] = tile[lane];", before=f"var<workgroup> tile: array<f32, {size}>;\n")
    if is_naga(roomy_device):
        if roomy_device.adapter.type == "CPU":  # a real driver may refuse it, or crash
            assert run(roomy_device, text, np.zeros(4, np.float32))[0] == 1
    else:
        with pytest.raises(fa.KernelError, match="workgroup storage .* is larger than the maximum allowed"):
            run(roomy_device, text, np.zeros(4, np.float32))


# Why every kernel is compiled by both.


def test_only_tint_sees_a_barrier_in_non_uniform_control_flow(roomy_device):
    said = compile_error(roomy_device, shader("  if (lane < 1u) {\n    workgroupBarrier();\n  }", lanes=2))
    if is_naga(roomy_device):
        assert said is None
    else:
        assert "'workgroupBarrier' must only be called from uniform control flow" in said


def test_naga_refuses_to_enable_subgroups_and_has_them_anyway(roomy_device):
    body = "  x[lane] = subgroupAdd(1.0);"
    with_enable, without = (compile_error(roomy_device, shader(body, before=e)) for e in ("enable subgroups;\n", ""))
    if is_naga(roomy_device):
        assert "`subgroups` enable-extension is not yet supported" in with_enable and without is None
    else:
        assert with_enable is None and "extension 'subgroups'" in without


def test_the_feature_has_a_name_of_its_own_in_each(roomy_device):
    name, other = ("subgroup", "subgroups") if is_naga(roomy_device) else ("subgroups", "subgroup")
    assert name in roomy_device.adapter.features and other not in roomy_device.adapter.features


# How `source` builds a text.


def test_module_scope_has_no_order(roomy_device):
    text = shader("  x[lane] = HALF;", after="const HALF = WHOLE / 2.0;\nconst WHOLE: f32 = 3.0;\n")
    assert run(roomy_device, text, np.zeros(4, np.float32))[0] == 1.5


def test_wgsl_has_no_word_for_infinity(roomy_device):
    """So kernels are handed -inf as a number of the uniform. Of bits, naga makes one; browsers refuse that as well."""
    for literal in ("1.0 / 0.0", "1e39f"):
        assert compile_error(roomy_device, shader(f"  x[lane] = {literal};")) is not None, literal
    bits = compile_error(roomy_device, shader("  x[lane] = bitcast<f32>(0x7f800000u);"))
    assert (bits is None) is is_naga(roomy_device)
    assert compile_error(roomy_device, shader("  x[lane] = -0x1.fffffep+127f;")) is None


def test_a_private_array_may_be_sized_by_a_constant(roomy_device):
    text = shader("  var s: array<f32, N>;\n  s[N - 1u] = 2.0;\n  x[lane] = s[N - 1u];", after="const N: u32 = 7u;\n")
    assert run(roomy_device, text, np.zeros(4, np.float32))[0] == 2


def test_override_cannot_size_a_private_array(roomy_device):
    text = shader("  var s: array<f32, N>;\n  x[lane] = s[0];", before="override N: u32 = 7u;\n")
    assert compile_error(roomy_device, text) is not None


# The form of the compilers' reports, which `diagnostics` reads.

NAGA_PARSES = r"Shader '.*' parsing error: .*\n.*┌─ wgsl:5:6"
TINT_SAYS = r":5:\d+ error: "
REPORTS = {
    "syntax": ("  x[;", NAGA_PARSES.replace("5:6", "5:5")),
    "name": ("  x[nothing] = 1.0;", NAGA_PARSES.replace("5:6", "5:5")),
    "type": ("  x[lane] = 1u;", r"validation error: .*(\n.*)*┌─ .*wgsl:5:\d+|" + NAGA_PARSES.replace("5:6", r"5:\d+")),
}


@pytest.mark.parametrize("kind", REPORTS)
def test_the_form_of_an_error_report(roomy_device, kind):
    body, naga = REPORTS[kind]
    said = compile_error(roomy_device, "\n" + shader(body))
    assert re.search(naga if is_naga(roomy_device) else TINT_SAYS, said), said


# Numbers.


def test_drivers_may_take_it_that_there_is_no_nan(roomy_device):
    """WGSL allows it. SwiftShader's exp and log make numbers of NaN and of 0, so a kernel that must keep them asks."""
    x = np.array([np.nan, np.nan, 0, np.inf], np.float32)
    exp, log = (run(roomy_device, shader(f"  x[lane] = {f}(x[lane]);", lanes=4), x) for f in ("exp", "log"))
    assert exp[3] == np.inf and log[3] == np.inf
    if "SwiftShader" in roomy_device.adapter.name:
        assert exp[0] == np.inf and np.isfinite(log[1]) and np.isfinite(log[2])
    if "llvmpipe" in roomy_device.adapter.name:
        assert np.isnan(exp[0]) and np.isnan(log[1]) and log[2] == -np.inf


def test_a_comparison_with_nan_is_false(roomy_device):
    x = np.array([np.nan, -1, 0, 1], np.float32)
    got = run(roomy_device, shader("  x[lane] = select(7.0, 5.0, x[lane] <= 0.0);", lanes=4), x)
    assert got.tolist() == [7, 5, 5, 7]


def test_exp_of_minus_infinity_is_zero_and_of_zero_one(roomy_device):
    x = np.array([-np.inf, 0, -3.4e38, -104], np.float32)
    assert run(roomy_device, shader("  x[lane] = exp(x[lane]);", lanes=4), x).tolist() == [0, 1, 0, 0]


# Why the project's own kernels are compiled as trusted, and others never.

PAST_ITS_END = """@group(0) @binding(0) var<storage, read_write> x: array<f32>;
struct Pair { a: array<f32, 4>, b: array<f32, 4> }
var<workgroup> pair: Pair;

@compute @workgroup_size(1)
fn entry() {
  pair.a[3] = 1.0;
  pair.b[1] = 1.0;
  pair.a[u32(x[0])] = 9.0;
  x[1] = pair.a[3];
}
"""


@pytest.mark.parametrize("trusted", [False, True])
def test_an_index_past_the_end_is_clamped_unless_the_text_is_trusted(roomy_device, trusted):
    """`a[5]` is `a[3]` with naga's bounds checks, and without them the place of `b[1]`, which lies behind `a`."""
    x = np.array([5, 0, 0, 0], np.float32)
    text = replace(link("entry", text=PAST_ITS_END), trusted=trusted)
    if roomy_device.adapter.type == "CPU":  # what a real GPU does past the end is its own affair
        assert run(roomy_device, text, x)[1] == (9 if roomy_device.shader_checks or not trusted else 1)


def test_only_wgpu_native_makes_trusted_modules(roomy_device):
    assert roomy_device.shader_checks is (not is_naga(roomy_device))


# Waiting.


def test_on_submitted_work_done_works_in_dawn_only(roomy_device):
    """wgpu-py 0.32 hands wgpu-native a callback of an older form. So `Device.wait` maps a buffer."""
    queue = roomy_device._handle.queue
    if is_naga(roomy_device):
        with pytest.raises(TypeError, match="WGPUQueueWorkDoneStatus"):
            queue.on_submitted_work_done_sync()
    else:
        queue.on_submitted_work_done_sync()


# The cache of compiled kernels across processes is the driver's.

FIRST_DISPATCH = """
import fa2lab as fa
fa.attention(*fa.data.make("random", T=4, H=1, D=3), kernel="fused_sv", device=fa.Device("llvmpipe"))
"""


@pytest.mark.gpu
@pytest.mark.skipif(bool(engines.lacking("llvmpipe", "naga")), reason="no llvmpipe")
def test_mesa_keeps_compiled_kernels_on_disk(tmp_path):
    """The second process finds all that the first one left, and adds nothing."""
    environment = dict(os.environ, MESA_SHADER_CACHE_DIR=str(tmp_path))
    environment.pop("MESA_SHADER_CACHE_DISABLE", None)
    kept = []
    for _ in range(2):
        ran = fresh_process(FIRST_DISPATCH, environment)
        assert ran.returncode == 0, ran.stderr
        kept.append({path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size})
    assert kept[0] and kept[0] == kept[1]


def test_neither_library_offers_a_pipeline_cache(roomy_device):
    """wgpu-native has a feature of that name and no call that uses one; Dawn's blob cache is out of Python's reach."""
    assert not any("cache" in name.lower() for name in dir(roomy_device._handle))
    with pytest.raises(TypeError, match="cache"):
        roomy_device._handle.create_compute_pipeline(layout="auto", compute={}, cache=None)


# Buffers and limits.


def test_a_new_buffer_is_zeroed_even_where_another_was(roomy_device):
    for _ in range(5):
        with roomy_device.buffers() as make:
            make(np.full(4096, np.nan, np.float32))
        with roomy_device.buffers() as make:
            assert not roomy_device.read(make(16384), np.uint8).any()


BIND_NOTHING = """
import fa2lab as fa
device = fa.Device()
usage = device._wgpu.BufferUsage
empty = device._handle.create_buffer(size=0, usage=usage.STORAGE)
layout = device._handle.create_bind_group_layout(
    entries=[{"binding": 0, "visibility": 4, "buffer": {"type": "storage"}}]
)
resource = {"buffer": empty, "offset": 0, "size": 0}
device._handle.create_bind_group(layout=layout, entries=[{"binding": 0, "resource": resource}])
"""


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_a_binding_of_nothing_is_not_allowed():
    """Not an exception even: wgpu-native ends the process. So no buffer is smaller than 16 bytes."""
    assert fresh_process(BIND_NOTHING, os.environ).returncode != 0


def test_limits_that_are_asked_for_are_granted_and_reported(device):
    reported = {ours: device._handle.limits[theirs] for ours, theirs in WEBGPU_NAMES.items()}
    assert reported == {name: getattr(device.limits, name) for name in WEBGPU_NAMES}


def test_a_destroyed_device_refuses_new_buffers_at_once(roomy_device):
    lost = fa.Device(roomy_device.adapter.name, compiler=roomy_device.adapter.compiler)
    lost._handle.destroy()
    with pytest.raises(roomy_device._wgpu.GPUError, match="lost"):
        lost._handle.create_buffer(size=16, usage=roomy_device._wgpu.BufferUsage.COPY_DST)


# Adapters.

NAMES = "import fa2lab as fa\nprint([a.name for a in fa.adapters()])\n"


@pytest.mark.gpu
@pytest.mark.skipif("VK_ADD_DRIVER_FILES" not in os.environ, reason="no SwiftShader was added")
@pytest.mark.parametrize("added", [True, False])
def test_vk_add_driver_files_adds_drivers_to_the_systems_own(added):
    environment = dict(os.environ)
    if not added:
        del environment["VK_ADD_DRIVER_FILES"]
    ran = fresh_process(NAMES, environment)
    assert ran.returncode == 0, ran.stderr
    assert ("SwiftShader" in ran.stdout) is added
    assert ("llvmpipe" in ran.stdout) is (engines.lacking("llvmpipe", "naga") is None)


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_opengl_is_left_out_before_the_first_use_and_not_after():
    """The backends are chosen once a process, so `adapter_module.api` sets them before anything lists adapters."""
    wgpu = adapter_module.api("naga")
    assert not any(a.info["backend_type"] == "OpenGL" for a in wgpu.gpu.enumerate_adapters_sync())
    from wgpu.backends.wgpu_native import extras

    with pytest.raises(RuntimeError):
        extras.set_instance_extras(backends=["Vulkan"])


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("tint"), reason="no Dawn adapter")
def test_dawn_lists_no_llvmpipe_of_mesa_22():
    """So Tint is tested on SwiftShader alone. A newer Mesa may pass: then `engines.SOFTWARE` can have one more."""
    mesa = [a.driver for a in engines.adapters("naga") if "llvmpipe" in a.name]
    if any("Mesa 22" in driver for driver in mesa):
        assert not any("llvmpipe" in a.name for a in engines.adapters("tint"))


def test_both_libraries_are_of_the_minor_that_was_tested(roomy_device):
    assert roomy_device._wgpu.__version__.startswith("0.32.")
