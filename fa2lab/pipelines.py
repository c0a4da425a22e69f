"""A wgpu device's compute pipelines: each source text is compiled once, the project's own without shader checks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fa2lab.buffers import Access
from fa2lab.source import Source
from fa2lab.trusted import trusted_module

BINDING_TYPES = {"uniform": "uniform", "read": "read-only-storage", "read_write": "storage"}
PROBE = "@compute @workgroup_size(1) fn probe() {}"


class Pipelines:
    """Compiles and keeps. Across processes the driver's own cache on disk serves: wgpu offers none.

    `shader_checks` says whether the project's own text has bounds checks and loop bounding; edited text always has.
    `seconds` holds, by entry point, how long it took from WGSL to a pipeline when it was made last.
    """

    def __init__(self, wgpu, handle, *, shader_checks: bool):
        self._wgpu, self._handle = wgpu, handle
        self._kept: dict[tuple, tuple] = {}
        self.seconds: dict[str, float] = {}
        self.shader_checks = shader_checks or not trusted_module(wgpu, handle, PROBE, "probe")

    def of(self, source: Source, accesses: Sequence[Access]) -> tuple[object, object]:
        """The pipeline of a source and the layout of its bindings 0, 1, … Raises wgpu's errors."""
        key = self.key(source, accesses)
        if key not in self._kept:
            begin = time.perf_counter()
            layout = self._handle.create_bind_group_layout(
                entries=[
                    {
                        "binding": i,
                        "visibility": self._wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": BINDING_TYPES[access]},
                    }
                    for i, access in enumerate(accesses)
                ]
            )
            pipeline = self._handle.create_compute_pipeline(
                layout=self._handle.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": self._module(source), "entry_point": source.entry},
            )
            self.seconds[source.entry] = time.perf_counter() - begin
            self._kept[key] = pipeline, layout
        return self._kept[key]

    def __contains__(self, key: tuple) -> bool:
        return key in self._kept

    @staticmethod
    def key(source: Source, accesses: Sequence[Access]) -> tuple:
        """What tells one pipeline from another: edited text that equals the project's is still edited text."""
        return source.text, source.trusted, tuple(accesses)

    def _module(self, source: Source):
        if source.trusted and not self.shader_checks:
            module = trusted_module(self._wgpu, self._handle, source.text, source.entry)
            if module is not None:
                return module
            self.shader_checks = True
        return self._handle.create_shader_module(code=source.text, label=source.entry)
