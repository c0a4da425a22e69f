"""Who computes: the devices that the tests run on, and every engine that the contract binds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

import fa2lab as fa
from fa2lab.adapter import Adapter

# Where a Chromium of Debian, Ubuntu, Fedora, Arch or Google keeps the manifest of its software driver.
SWIFTSHADER_MANIFESTS = (
    "/usr/lib/chromium/vk_swiftshader_icd.json",
    "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
    "/usr/lib64/chromium-browser/vk_swiftshader_icd.json",
    "/snap/chromium/current/usr/lib/chromium-browser/vk_swiftshader_icd.json",
    "/opt/google/chrome/vk_swiftshader_icd.json",
)


def add_swiftshader() -> None:
    """Let the Vulkan loader see SwiftShader beside the system's drivers. What the user has set stays as it is."""
    if "VK_DRIVER_FILES" in os.environ or "VK_ICD_FILENAMES" in os.environ:
        return  # the user has named all the drivers that there should be
    added = [path for path in os.environ.get("VK_ADD_DRIVER_FILES", "").split(os.pathsep) if path]
    found = next(filter(os.path.exists, SWIFTSHADER_MANIFESTS), None)
    if found and not any("swiftshader" in Path(path).name for path in added):
        os.environ["VK_ADD_DRIVER_FILES"] = os.pathsep.join([*added, found])


@dataclass(frozen=True)
class Seat:
    """A device to test on: an adapter by a part of its name, a compiler, and which limits."""

    adapter: str
    compiler: str
    limits: str

    def __str__(self) -> str:
        name = f"{self.adapter.lower()}-{self.compiler}"
        return name if self.limits == "adapter" else f"{name}-{self.limits}"


# Dawn refuses the llvmpipe of Debian 12, so Tint is tested on SwiftShader.
SOFTWARE = (("llvmpipe", "naga"), ("SwiftShader", "naga"), ("SwiftShader", "tint"))


@cache
def adapters(compiler: str) -> tuple[Adapter, ...]:
    """The adapters that a compiler's library sees; none where the library is absent."""
    try:
        return tuple(fa.adapters(compiler))
    except fa.NoAdapterError:
        return ()


def lacking(adapter: str, compiler: str) -> str | None:
    """Why there is no such device here, None where there is one."""
    if any(adapter.lower() in found.name.lower() for found in adapters(compiler)):
        return None
    try:
        seen = ", ".join(found.name for found in fa.adapters(compiler)) or "no adapter"
    except fa.NoAdapterError as error:
        return str(error)
    return f"no {adapter} for {compiler}, which sees {seen}"


def hardware() -> list[tuple[str, str]]:
    """Adapters of real GPUs, with each compiler that sees them."""
    return [(found.name, c) for c in ("naga", "tint") for found in adapters(c) if found.type != "CPU"]


def seats(*limits: str) -> list[Seat]:
    """Every device of this machine and every software one that there should be, once for each of the `limits`."""
    return [Seat(*pair, which) for which in limits for pair in (*SOFTWARE, *hardware())]


_devices: dict[Seat, fa.Device] = {}


def device_of(seat: Seat) -> fa.Device:
    """The session's device for that seat, made at first use."""
    if seat not in _devices:
        _devices[seat] = fa.Device(seat.adapter, compiler=seat.compiler, limits=seat.limits)
    return _devices[seat]


def session_devices() -> list[fa.Device]:
    """The devices made so far."""
    return list(_devices.values())


def seat_param(seat: Seat, value: object = None, name: str = "") -> object:
    """A pytest parameter that needs this seat's device: marked `gpu`, skipped with the reason where there is none."""
    why = lacking(seat.adapter, seat.compiler)
    marks = [pytest.mark.gpu, *([pytest.mark.skip(reason=why)] if why else [])]
    return pytest.param(seat if value is None else value, marks=marks, id=name or str(seat))


@dataclass(frozen=True)
class Engine:
    """One way to compute attention. Called with q, k, v and the options of `fa.attention`."""

    name: str
    compute: Callable[..., fa.Result]
    kernel: str | None = None
    dtype: type = np.float32
    tiles: bool = False  # takes any block_q and block_k
    is_reference: bool = False

    def __call__(self, q, k, v, **options) -> fa.Result:
        return self.compute(q, k, v, **options)


def _on_seat(seat: Seat, kernel: str, q, k, v, **options) -> fa.Result:
    return fa.attention(q, k, v, kernel=kernel, device=device_of(seat), **options)


# The kernels that give O, L and attn for any problem. What is for few queries has tests of its own.
KERNELS = [kernel.name for kernel in fa.kernels().values() if not kernel.splits]


def gpu_engines() -> list:
    """Every kernel on every seat, with either set of limits."""
    params = []
    for seat in seats("adapter", "webgpu"):
        for kernel in (fa.kernels()[name] for name in KERNELS):
            compute = partial(_on_seat, seat, kernel.name)
            engine = Engine(f"{kernel.name}-{seat}", compute, kernel.name, tiles=kernel.name == "fa2_forward")
            params.append(seat_param(seat, engine, engine.name))
    return params


def engines() -> list:
    """The NumPy references, the NumPy engine and every kernel on every seat."""
    ref = fa.reference
    cpu = [
        Engine("attention-float64", ref.attention, dtype=np.float64, is_reference=True),
        Engine("attention-float32", partial(ref.attention, dtype=np.float32), is_reference=True),
        Engine("tiled-float64", ref.tiled, dtype=np.float64, tiles=True, is_reference=True),
        Engine("tiled-float32", partial(ref.tiled, dtype=np.float32), tiles=True, is_reference=True),
    ]
    for kernel in (fa.kernels()[name] for name in KERNELS):
        compute = partial(fa.attention, kernel=kernel.name, device="numpy")
        cpu.append(Engine(f"{kernel.name}-numpy", compute, kernel.name, tiles=kernel.name == "fa2_forward"))
    return [*(pytest.param(engine, id=engine.name) for engine in cpu), *gpu_engines()]


def random(*, B=1, T=16, H=2, D=8, Tk=None, Hkv=None, seed=0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal q, k, v."""
    return tuple(fa.data.make("random", B=B, T=T, H=H, D=D, Tk=Tk, Hkv=Hkv, seed=seed))
