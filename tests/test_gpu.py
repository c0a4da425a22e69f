"""The device: adapters and limits, buffers and their count, pipelines, loss, and what a compiler's error becomes."""

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
from fa2lab.limits import BROWSER, WEBGPU_NAMES
from fa2lab.source import Source, link

ROOT = Path(__file__).resolve().parents[1]
ONLY_NAGA = pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")


def source(text: str, entry: str = "double") -> Source:
    return link(entry, text=text)


DOUBLE = source("""@group(0) @binding(0) var<storage, read_write> x: array<f32>;

@compute @workgroup_size(1)
fn double(@builtin(global_invocation_id) id: vec3<u32>) {
  x[id.x] = 2.0 * x[id.x];
}
""")


# Adapters.


@pytest.mark.gpu
@ONLY_NAGA
def test_adapters_come_fastest_first_and_none_twice():
    found = fa.adapters()
    order = [adapter_module.TYPES.index(adapter.type) for adapter in found]
    assert order == sorted(order)
    assert all(adapter.backend in ("Vulkan", "Metal", "D3D12") for adapter in found)
    assert len({(a.name, a.driver, a.backend) for a in found}) == len(found) or engines.hardware()
    if not engines.hardware() and not engines.lacking("llvmpipe", "naga"):
        assert "llvmpipe" in found[0].name, "of two software drivers the system's own"


@pytest.mark.gpu
@ONLY_NAGA
def test_an_adapter_says_who_it_is():
    adapter = fa.adapters()[0]
    assert str(adapter) == f"{adapter.name} ({adapter.backend}, naga)" and adapter.driver
    assert adapter.limits.workgroup_bytes >= 16_384 and adapter.limits.invocations >= 128
    assert fa.Device(adapter).adapter is adapter


def test_a_device_by_a_part_of_its_name_in_any_case(roomy_device):
    name = roomy_device.adapter.name
    again = fa.Device(name[1:7].upper(), compiler=roomy_device.adapter.compiler)
    assert name[1:7].upper() in again.adapter.name.upper()
    assert repr(roomy_device) == f"Device({name!r}, compiler={roomy_device.adapter.compiler!r})"


@pytest.mark.gpu
@ONLY_NAGA
def test_without_a_name_the_fastest_is_taken():
    assert fa.Device().adapter.name == fa.adapters()[0].name


def test_an_unknown_name_is_answered_with_the_list(roomy_device):
    compiler = roomy_device.adapter.compiler
    seen = ", ".join(repr(adapter.name) for adapter in fa.adapters(compiler))
    package = adapter_module.MODULES[compiler]
    with pytest.raises(fa.NoAdapterError, match=re.escape(f"'Voodoo2'; {package} sees {seen}.")):
        fa.Device("Voodoo2", compiler=compiler)


def test_wishes_that_are_none_are_refused():
    with pytest.raises(ValueError, match='limits must be "adapter" or "webgpu"; got \'browser\''):
        fa.Device(limits="browser")
    with pytest.raises(ValueError, match="compiler must be one of .*naga.*tint.*; got 'dxc'"):
        fa.Device(compiler="dxc")
    with pytest.raises(ValueError, match="compiler must be one of"):
        fa.adapters("dxc")


def test_a_missing_dawn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wgpudawn", None)  # as `import` leaves it where there is no such package
    with pytest.raises(
        fa.NoAdapterError, match=r"compiler='tint' needs the package wgpudawn: pip install \"fa2lab\[dawn\]\""
    ):
        adapter_module.api.__wrapped__("tint")


def test_a_native_library_that_does_not_load_is_told(monkeypatch):
    def broken(name):
        raise OSError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(adapter_module, "import_module", broken)
    with pytest.raises(fa.NoAdapterError, match="native library of wgpu does not load here: libfoo.so"):
        adapter_module.api.__wrapped__("naga")


# Limits.


def test_limits_are_the_adapters_or_a_browsers(device):
    names = list(WEBGPU_NAMES)
    ours, adapters, browsers = ([getattr(x, n) for n in names] for x in (device.limits, device.adapter.limits, BROWSER))
    extras = device.limits.subgroup_size, device.limits.float16
    if ours == adapters:
        assert extras == (device.subgroup_size or 0, "shader-f16" in device.adapter.features)
    else:
        assert ours == [min(pair) for pair in zip(adapters, browsers, strict=True)]
        assert extras == (0, False), "no browser promises them"
    assert device.limits.software is (device.adapter.type == "CPU")


def test_subgroup_size_is_measured(device):
    known = {"llvmpipe": 8, "SwiftShader": 4}
    size = device.subgroup_size
    assert size == device.subgroup_size and size in (4, 8, 16, 32, 64, 128)
    for name, expected in known.items():
        if name in device.adapter.name:
            assert size == expected


# Buffers.


def test_a_buffer_starts_at_zero_and_holds_what_is_written(roomy_device):
    numbers = np.arange(7, dtype=np.float32)
    with roomy_device.buffers() as make:
        empty, full = make(28), make(numbers)
        assert not roomy_device.read(empty, np.float32).any()
        np.testing.assert_array_equal(roomy_device.read(full, np.float32, (7,)), numbers)
        roomy_device.write(full, -numbers[:3])
        np.testing.assert_array_equal(roomy_device.read(full, np.float32, (7,)), [0, -1, -2, 3, 4, 5, 6])
        read = roomy_device.read(full, np.uint32, (7,))
        read += 1  # what comes back is the caller's own
        assert read.dtype == np.uint32 and roomy_device.read(full, np.float32, (7,))[3] == 3


def test_odd_sizes_and_strides_are_welcome(roomy_device):
    grid = np.arange(30, dtype=np.float16).reshape(5, 6)[:, ::2].T  # 15 halves: 30 bytes
    with roomy_device.buffers() as make:
        buffer = make(np.pad(grid.ravel(), (0, 1)))
        np.testing.assert_array_equal(roomy_device.read(buffer, np.float16, (3, 5)), grid)
        assert make(1).nbytes == 16 and make(np.zeros(0, np.float32)).nbytes == 16 and make(18).nbytes == 20


def test_bytes_are_counted_until_they_are_given_back(roomy_device):
    memory = roomy_device.memory
    memory.reset_peak()
    with roomy_device.buffers() as make:
        a, b = make(1000), make(np.zeros(50, np.float32), uniform=True)
        assert (memory.live_buffers, memory.live_bytes, memory.peak_bytes) == (2, 1200, 1200)
        b.release()
        b.release()
        assert (memory.live_buffers, memory.live_bytes) == (1, 1000)
        roomy_device.read(a, np.uint8)
        assert (memory.live_bytes, memory.peak_bytes) == (1000, 2000), "with the staging copy of the readback"
    assert (memory.live_buffers, memory.live_bytes) == (0, 0)
    memory.reset_peak()
    assert memory.peak_bytes == 0


def test_a_scope_gives_back_whatever_happens_in_it(roomy_device):
    with pytest.raises(ZeroDivisionError), roomy_device.buffers() as make:
        make(64)
        1 / 0  # noqa: B018
    assert roomy_device.memory.live_buffers == 0


def test_a_buffer_beyond_the_limit_is_refused_in_numbers(device):
    too_much = device.limits.buffer_bytes + 4
    with pytest.raises(
        fa.LimitError, match=f"A buffer of .* was asked for; this device holds {device.limits.buffer_bytes:,} B"
    ):
        device.allocate(too_much)
    assert device.memory.live_buffers == 0


# Dispatches and pipelines.


def test_dispatches_run_in_order(roomy_device):
    with roomy_device.buffers() as make:
        x = make(np.arange(4, dtype=np.float32))
        roomy_device.run([Dispatch(DOUBLE, ((x, "read_write"),), (4, 1, 1))] * 3)
        np.testing.assert_array_equal(roomy_device.read(x, np.float32), [0, 8, 16, 24])


def test_pipelines_are_compiled_once_for_each_text(roomy_device, monkeypatch):
    compiled = []
    create = roomy_device._handle.create_shader_module
    monkeypatch.setattr(
        roomy_device._handle, "create_shader_module", lambda **kw: compiled.append(kw["code"]) or create(**kw)
    )
    texts = [DOUBLE.text.replace("2.0", f"{factor}.5") for factor in (1, 2, 1, 1, 2)]
    with roomy_device.buffers() as make:
        x = make(np.ones(4, np.float32))
        for text in texts:
            roomy_device.run([Dispatch(source(text), ((x, "read_write"),), (4, 1, 1))])
        np.testing.assert_allclose(roomy_device.read(x, np.float32), 1.5**3 * 2.5**2)
    assert compiled == texts[:2]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_thousand_calls_leak_nothing(roomy_device):
    """K alone, forgotten each time, would be 1000 × 64 KiB; a quarter of that is not reached."""
    args = engines.random(T=1, Tk=256, H=8)
    assert args[1].nbytes == 1 << 16

    def call() -> None:
        fa.attention(*args, device=roomy_device, kernel="fa2_forward")

    for _ in range(50):
        call()
    before = resident_bytes()
    for _ in range(1000):
        call()
    assert resident_bytes() - before < 1000 * (1 << 16) / 4
    assert roomy_device.memory.live_buffers == 0


# Loss.


def test_a_lost_device_is_rebuilt_at_the_next_call(device):
    args = engines.random(T=20)
    before = fa.attention(*args, device=device, causal=True)
    device._handle.destroy()
    assert device.lost
    after = fa.attention(*args, device=device, causal=True)
    assert not device.lost and after.out.tobytes() == before.out.tobytes()
    assert after.device_bytes == before.device_bytes


def test_an_error_that_is_no_loss_is_raised(roomy_device):
    kernel = fa.kernels()["fa2_forward"].edited("l *= alpha;", "l *= alhpa;")
    with pytest.raises(fa.KernelError):
        fa.attention(*engines.random(), device=roomy_device, kernel=kernel)
    assert not roomy_device.lost


# What a compiler's error becomes.

MISTAKES = {
    # an edit of fa2_forward.wgsl: the line that is wrong, the text on it under which each compiler puts its caret
    "a missing operand": ("    l *= alpha;", "    l *= ;", "l *= ;", ";", ";"),
    "an unknown name": ("    l *= alpha;", "    l *= alhpa;", "alhpa", "alhpa", "alhpa"),
    "a wrong type": ("    l *= alpha;", "    l *= 1u;", "l *= 1u;", "l *=", "*= 1u"),
    "an unknown function": ("    l *= alpha;", "    l *= expo(alpha);", "expo", "expo", "expo"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_kernel_error_points_at_the_place(roomy_device, mistake):
    old, new, on_line, naga_at, tint_at = MISTAKES[mistake]
    kernel = fa.kernels()["fa2_forward"].edited(old, new)
    number, line = next((i, text) for i, text in enumerate(kernel.text().splitlines(), 1) if on_line in text)
    with pytest.raises(fa.KernelError) as caught:
        fa.attention(*engines.random(), device=roomy_device, kernel=kernel)
    first, shown, caret = str(caught.value).splitlines()
    column = line.index(naga_at if roomy_device.adapter.compiler == "naga" else tint_at) + 1
    assert first.startswith(f"fa2_forward.wgsl:{number}:{column}: ") and len(first.split(": ", 1)[1]) > 5
    assert shown == f"  {line}"
    assert caret == "  " + " " * (column - 1) + "^"


def test_a_kernel_error_leads_into_the_snippet_where_it_is(roomy_device):
    good = fa.plan(fa.reference.attention(*engines.random()).problem, roomy_device.limits).link(
        fa.kernels()["fa2_forward"].passes[0], roomy_device.dialect
    )
    wrong = ("return (a + b - 1u) / b;", "return (a + b - 1u) / c;")
    parts = [replace(part, text=part.text.replace(*wrong), written=part.written.replace(*wrong)) for part in good.parts]
    with roomy_device.buffers() as make:
        buffers = [make(64) for _ in range(7)]
        accesses = ["read"] * 3 + ["read_write"] * 4
        bound = ((make(np.zeros(48, np.uint8), uniform=True), "uniform"), *zip(buffers, accesses, strict=True))
        with pytest.raises(
            fa.KernelError, match=r"^shared/problem.wgsl:\d+:\d+: .*\n    return \(a \+ b - 1u\) / c;\n +\^$"
        ) as caught:
            roomy_device.run([Dispatch(Source(good.entry, tuple(parts), trusted=True), bound, (1, 1, 1))])
    first, shown, caret = str(caught.value).splitlines()
    assert shown[caret.index("^")] == "c"
    number = int(first.split(":")[1])
    text = next(part.text for part in parts if part.name == "shared/problem.wgsl")
    assert text.splitlines()[number - 1] == shown[2:]


# Fresh processes.


def python(code: str, **environment: str | None) -> subprocess.CompletedProcess:
    merged = os.environ | {"PYTHONPATH": str(ROOT)} | {k: v for k, v in environment.items() if v is not None}
    for name in [name for name, value in environment.items() if value is None]:
        merged.pop(name, None)
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=120)


ONE_CALL = (
    "import numpy as np, fa2lab as fa\nx = np.ones((1, 4, 1, 2), np.float32)\nprint(fa.attention(x, x, x).adapter)\n"
)


@pytest.mark.gpu
@ONLY_NAGA
def test_a_fresh_process_writes_nothing_to_stderr():
    """With XDG_RUNTIME_DIR unset a C library under Vulkan complains in red, once an adapter."""
    ran = python(ONE_CALL, XDG_RUNTIME_DIR=None)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip() == str(fa.adapters()[0])


WITHOUT_ADAPTER = """
import warnings
import numpy as np
import fa2lab as fa

assert fa.adapters() == []
try:
    fa.Device()
except fa.NoAdapterError as error:
    print(error)
x = np.ones((1, 4, 1, 2), np.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    results = [fa.attention(x, x, x, kernel=kernel) for kernel in ("auto", "naive", "auto")]
for warning in caught:
    print(warning.category.__name__, warning.filename, warning.message)
for result in results:
    print(result.label)
    fa.parity.compare(result, fa.reference.attention(x, x, x)).check()
"""


def test_without_any_adapter_numpy_computes_warns_once_and_says_so():
    nowhere = {"VK_DRIVER_FILES": "/nonexistent.json", "VK_ICD_FILENAMES": "/nonexistent.json"}
    ran = python(WITHOUT_ADAPTER, **nowhere, VK_ADD_DRIVER_FILES=None)
    assert (ran.returncode, ran.stderr) == (0, "")
    refusal, *warned, first, second, third = ran.stdout.splitlines()
    assert re.match(
        "No GPU adapter answers the wgpu library.*apt-get install mesa-vulkan-drivers.*fa2lab doctor", refusal
    )
    assert len(warned) == 1 and warned[0].startswith(
        "RuntimeWarning <string> NumPy computes on the CPU in place of a GPU. No GPU"
    )
    assert first == third == "fa2_forward on NumPy float32 on the CPU (no GPU adapter)"
    assert second == "naive on NumPy float32 on the CPU (no GPU adapter)"
