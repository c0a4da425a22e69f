"""doctor(): which adapters work here, what they can hold, and what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import numpy as np

from fa2lab import parity, reference
from fa2lab.adapter import MODULES, Adapter, adapters
from fa2lab.attention import attention
from fa2lab.data import make
from fa2lab.errors import NoAdapterError
from fa2lab.gpu import Device
from fa2lab.limits import BROWSER, Limits


def doctor() -> tuple[list[str], bool]:
    """The report's lines, and whether at least one adapter computes attention correctly."""
    lines = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, NumPy {np.__version__}"]
    works = False
    for compiler, package in MODULES.items():
        lines.append(f"\n{compiler}: {_version(package)}")
        try:
            found = adapters(compiler)
        except NoAdapterError as error:
            lines.append(f"  {error}")
            continue
        if not found:
            lines.append(f"  no adapter. {_remedy(compiler)}")
        for adapter in found:
            report, ok = _examine(adapter)
            lines += report
            works = works or ok
    if not works:
        lines.append("\nNo adapter works: fa2lab computes with NumPy, and every figure says so.")
    return lines, works


def _examine(adapter: Adapter) -> tuple[list[str], bool]:
    lines = [f"  {adapter.name}", f"    driver          {adapter.driver} ({adapter.backend}, {adapter.type})"]
    lines += [f"    {line}" for line in _limits(adapter.limits)]
    try:
        device = Device(adapter)
        lines.append(f"    subgroup size   {device.subgroup_size or 'no subgroups'} (measured)")
        arrays = make("random", T=33, H=2, D=16)
        found = parity.compare(
            attention(*arrays, causal=True, device=device), reference.attention(*arrays, causal=True)
        )
    except Exception as error:  # a doctor reports what ails the adapter, whatever it is
        return [*lines, f"    attention       FAILS: {str(error).splitlines()[0]}"], False
    missing = [name for name, aliases in _WANTED.items() if not aliases & adapter.features]
    lines.append(f"    not offered     {', '.join(missing) or 'nothing'}")
    checks = "on (this compiler keeps them)" if device.shader_checks else "off for the project's own kernels"
    lines.append(f"    shader checks   {checks}")
    lines.append(f"    attention       {'correct' if found.ok else 'WRONG'}, error {found.rows[0].error:.1e}")
    return lines, found.ok


# Optional features, by the names of wgpu and Dawn: faster reductions, float16 storage, the bench's clock.
_WANTED = {"subgroups": {"subgroup", "subgroups"}, "shader-f16": {"shader-f16"}, "timestamp-query": {"timestamp-query"}}


def _limits(limits: Limits) -> Iterator[str]:
    browser = "as every browser grants"
    yield f"workgroup       {limits.workgroup_bytes:,} B of memory, {limits.invocations} invocations"
    yield f"                ({browser}: {BROWSER.workgroup_bytes:,} B, {BROWSER.invocations})"
    yield f"storage         {limits.storage_buffers} buffers a stage, {limits.binding_bytes:,} B a binding"
    yield f"                ({browser}: {BROWSER.storage_buffers}, {BROWSER.binding_bytes:,} B)"


def _remedy(compiler: str) -> str:
    if not sys.platform.startswith("linux"):
        return "The system's own graphics driver should bring one."
    if compiler == "tint":
        return "Dawn asks more of a driver than Mesa 22's llvmpipe has; the SwiftShader in Debian's chromium serves it."
    return "On Debian or Ubuntu: apt-get install mesa-vulkan-drivers. With conda: mesa-lavapipe libvulkan-loader."


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
