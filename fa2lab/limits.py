"""What a device and this machine can hold, as numbers that the planner can reckon with."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """The device limits that attention kernels meet, and what they may use. Bytes unless said."""

    workgroup_bytes: int  # workgroup memory of one workgroup
    invocations: int  # invocations of one workgroup
    storage_buffers: int  # storage buffers of one shader stage
    binding_bytes: int  # one storage binding
    buffer_bytes: int  # one buffer
    workgroups: int  # workgroups in one dimension of a dispatch
    subgroup_size: int = 0  # neighbouring invocations that exchange values directly, as measured; 0 where none do
    float16: bool = False  # numbers of 16 bits in shaders
    software: bool = False  # a CPU stands in for the GPU

    def capped(self, other: Limits) -> Limits:
        """The smaller of the two, limit by limit."""
        return Limits(*(min(getattr(self, limit.name), getattr(other, limit.name)) for limit in fields(self)))


# The names that WebGPU gives them, as wgpu-py spells them.
WEBGPU_NAMES = {
    "workgroup_bytes": "max-compute-workgroup-storage-size",
    "invocations": "max-compute-invocations-per-workgroup",
    "storage_buffers": "max-storage-buffers-per-shader-stage",
    "binding_bytes": "max-storage-buffer-binding-size",
    "buffer_bytes": "max-buffer-size",
    "workgroups": "max-compute-workgroups-per-dimension",
}

# The defaults that every WebGPU browser grants without asking (WebGPU specification, table of limits).
BROWSER = Limits(
    workgroup_bytes=16_384,
    invocations=256,
    storage_buffers=8,
    binding_bytes=128 << 20,
    buffer_bytes=256 << 20,
    workgroups=65_535,
)


def physical_memory() -> int | None:
    """Bytes of memory of this machine, None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
