"""Which adapters there are, through wgpu (compiler naga) or through Dawn (compiler Tint)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Literal

from fa2lab.errors import NoAdapterError
from fa2lab.limits import WEBGPU_NAMES, Limits

Compiler = Literal["naga", "tint"]
MODULES = {"naga": "wgpu", "tint": "wgpudawn"}
# Adapter types from the fastest to the one that always works, as wgpu names them.
TYPES = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")


@cache
def api(compiler: Compiler):
    """The module with wgpu's API whose WGSL compiler this is: `wgpu` (naga) or `wgpudawn` (Tint), loaded at first use.

    Raises `NoAdapterError` where the module or its native library cannot be loaded.
    """
    if compiler not in MODULES:
        raise ValueError(f"compiler must be one of {tuple(MODULES)}; got {compiler!r}.")
    _give_runtime_dir()
    try:
        module = import_module(MODULES[compiler])
    except ImportError as error:
        remedy = 'pip install "fa2lab[dawn]"' if compiler == "tint" else "pip install wgpu"
        raise NoAdapterError(f"compiler={compiler!r} needs the package {MODULES[compiler]}: {remedy}.") from error
    except OSError as error:
        raise NoAdapterError(f"The native library of {MODULES[compiler]} does not load here: {error}.") from error
    if compiler == "naga":
        _leave_opengl_out(module)
    return module


def _give_runtime_dir() -> None:
    """Vulkan's window-system layer writes a red line to stderr for each adapter when this variable is unset."""
    if os.name == "posix" and not os.path.isdir(os.environ.get("XDG_RUNTIME_DIR", "")):
        import tempfile  # here, since it brings compressors and random numbers to every `import fa2lab`

        folder = os.path.join(tempfile.gettempdir(), f"fa2lab-runtime-{os.getuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.environ["XDG_RUNTIME_DIR"] = folder


def _leave_opengl_out(wgpu) -> None:
    """OpenGL lists each adapter again, with less in it, and takes most of a second to do so."""
    extras = import_module(f"{wgpu.__name__}.backends.wgpu_native.extras")
    try:
        extras.set_instance_extras(backends=["Vulkan", "Metal", "DX12"])
    except RuntimeError:  # someone else in this process uses wgpu already, as they set it up
        pass


@dataclass(frozen=True)
class Adapter:
    """One adapter as its driver describes it."""

    name: str
    driver: str
    backend: str
    type: str
    compiler: Compiler
    limits: Limits
    features: frozenset[str]
    handle: object = field(repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.backend}, {self.compiler})"


def adapters(compiler: Compiler = "naga") -> list[Adapter]:
    """Every adapter that `compiler`'s wgpu sees, the fastest type first. An empty list where there is none."""
    found = [_describe(handle, compiler) for handle in api(compiler).gpu.enumerate_adapters_sync()]
    found = [a for a in found if a.backend != "OpenGL"]
    return sorted(found, key=lambda a: (TYPES.index(a.type) if a.type in TYPES else 2, "SwiftShader" in a.name))


def _describe(handle, compiler: Compiler) -> Adapter:
    info = handle.info
    return Adapter(
        name=info["device"],
        driver=info["description"] or info["vendor"],
        backend=info["backend_type"],
        type=info["adapter_type"],
        compiler=compiler,
        limits=Limits(**{ours: handle.limits[theirs] for ours, theirs in WEBGPU_NAMES.items()}),
        features=frozenset(handle.features),
        handle=handle,
    )


def choose_adapter(adapter: Adapter | str | None, compiler: Compiler) -> Adapter:
    """The adapter itself, the fastest for None, or the first whose name contains the text. Raises `NoAdapterError`."""
    if isinstance(adapter, Adapter):
        return adapter
    found = adapters(compiler)
    if not found:
        raise NoAdapterError(
            f"No GPU adapter answers the {MODULES[compiler]} library, not even a software one; on Debian or Ubuntu "
            "`apt-get install mesa-vulkan-drivers` brings one. `python -m fa2lab doctor` says more."
        )
    if adapter is None:
        return found[0]
    for candidate in found:
        if adapter.lower() in candidate.name.lower():
            return candidate
    raise NoAdapterError(
        f"No adapter's name contains {adapter!r}; {MODULES[compiler]} sees {', '.join(repr(a.name) for a in found)}."
    )
