"""Plan: how a problem runs on a device, in tiles, launches and bytes, and the source of each of its dispatches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from fa2lab import source
from fa2lab.kernel import LANES, Kernel, Pass
from fa2lab.limits import Limits
from fa2lab.problem import Problem
from fa2lab.tiles import Tile

# What stands at a binding that this launch does not use: WebGPU wants some buffer there.
UNUSED_BYTES = 16
STORED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")  # the buffers that `storage` is about
Storage = Literal["float32", "float16"]
PARAMS_BYTES = 48  # `Params` of shared/problem.wgsl, padded to 16
ALL_KEYS = 1 << 31  # more than any device holds: a walk that is not split


@dataclass(frozen=True)
class Chunk:
    """The batches and heads of one launch, and the problem that they pose by themselves."""

    batch: slice
    heads: slice
    kv_heads: slice
    problem: Problem


@dataclass(frozen=True)
class Plan:
    """How a problem runs on a device: kernel, tiles, launches and bytes. Printing it shows the byte model."""

    kernel: Kernel
    problem: Problem
    limits: Limits
    tiles: tuple[Tile | None, ...]  # of each pass
    return_attn: bool
    trace: bool
    chunks: tuple[Chunk, ...]
    split_keys: int = ALL_KEYS  # keys of a part, where a kernel walks the keys in parts
    storage: Storage = "float32"  # of Q, K, V, O, dO and the gradients; all arithmetic is float32

    @property
    def tile(self) -> Tile | None:
        """The tile of the first pass that has one: the one that traces and the NumPy engine walk."""
        return next((tile for tile in self.tiles if tile), None)

    @property
    def block_q(self) -> int | None:
        """Query rows of `tile`."""
        return self.tile and self.tile.block_q

    @property
    def block_k(self) -> int | None:
        """Keys of `tile`."""
        return self.tile and self.tile.block_k

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constants that all of its passes are linked with."""
        constants = {"HEAD_DIM": self.problem.D, "LANES": LANES, "SPLIT_KEYS": self.split_keys}
        constants |= {"WRITE_ATTN": self.return_attn or self.kernel.materialises, "WRITE_TRACE": self.trace}
        if self.kernel.max_keys:
            # A private row just long enough, to the next power of two: compilers take seconds over the longest.
            constants["MAX_KEYS"] = min(1 << max(6, (self.problem.Tk - 1).bit_length()), self.kernel.max_keys)
        return constants

    def constants_of(self, stage: Pass) -> dict[str, int | bool | str]:
        """The block of constants that a pass's text ends with."""
        constants, tile = dict(self.constants), self._tile_of(stage)
        number = "f16" if self.storage == "float16" else "f32"
        if tile:
            constants |= {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k}
        if stage.lanes == "TILE_LANES":
            constants["TILE_LANES"] = stage.invocations(tile)
        if stage.rows_are:
            constants |= {"ROWS": tile.rows, "ROW_LANES": tile.lanes, "SLICES": tile.slices, "PREFETCH": tile.prefetch}
            constants["Stored"] = f"vec4<{number}>" if self._by_vec4 else number
        # Parts are kept in full: what is merged must not be rounded twice.
        constants["Element"] = "f32" if ("part_out", "read_write") in stage.bindings else number
        return constants

    def _tile_of(self, stage: Pass) -> Tile | None:
        return self.tiles[self.kernel.passes.index(stage)]

    @property
    def _by_vec4(self) -> bool:
        return self.problem.D % 4 == 0

    def _pass_bytes(self, stage: Pass) -> int:
        tile = self._tile_of(stage)
        return stage.tile_bytes(tile, self.problem.D, subgroup_size=self.limits.subgroup_size) if tile else 0

    @property
    def widest(self) -> Pass:
        """The pass with the most workgroup memory."""
        return max(self.kernel.passes, key=self._pass_bytes)

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory of one workgroup of the widest pass."""
        return self._pass_bytes(self.widest)

    @property
    def invocations(self) -> int:
        """Invocations of the largest workgroup."""
        return max(stage.invocations(self._tile_of(stage)) for stage in self.kernel.passes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What is read back."""
        wanted = (("attn", self.return_attn), ("trace", self.trace))
        return self.kernel.outputs + tuple(name for name, wish in wanted if wish)

    def shape(self, buffer: str, problem: Problem | None = None) -> tuple[int, ...]:
        """The shape of one of its buffers, by default for the whole problem."""
        p = problem or self.problem
        queries, keys, rows = (p.B, p.Tq, p.H, p.D), (p.B, p.Tk, p.Hkv, p.D), (p.B, p.H, p.Tq)
        if buffer == "trace":
            return (*rows, -(-p.Tk // self.block_k), 4)
        if buffer in ("part_out", "part_lse"):
            return (-(-p.Tk // self.split_keys), *(queries if buffer == "part_out" else rows))
        if buffer == "o_steps":
            return (*rows, -(-p.Tk // self.block_k), p.D)
        if buffer == "p_ds":
            return (p.Tq, p.Tk, 2)
        if buffer == "parts":
            return ((-(-p.Tk // self.block_k) * p.Tq + 2 * -(-p.Tq // self.block_q) * p.Tk) * p.D,)
        shapes = dict.fromkeys(("q", "out", "dout", "dq"), queries) | dict.fromkeys(("k", "v", "dk", "dv"), keys)
        shapes |= dict.fromkeys(("lse", "delta"), rows) | dict.fromkeys(("attn", "scores", "dscores"), (*rows, p.Tk))
        return shapes[buffer]

    def buffer_bytes(self, problem: Problem | None = None) -> dict[str, int]:
        """Bytes of each storage buffer of a launch, by default the largest: the model of the allocation count."""
        if problem is None:
            if not self.chunks:
                return {}
            problem = self.chunks[0].problem
        idle = {"attn": not self.constants["WRITE_ATTN"], "trace": not self.trace}
        return {
            name: UNUSED_BYTES if idle.get(name) else max(UNUSED_BYTES, self._nbytes(name, problem))
            for name in self.kernel.buffers
        }

    def dtype(self, buffer: str) -> type:
        """The type of a buffer's numbers."""
        return np.float16 if self.storage == "float16" and buffer in STORED else np.float32

    def _nbytes(self, buffer: str, problem: Problem) -> int:
        """Whole words, as copies come in fours."""
        return -(-prod(self.shape(buffer, problem)) * np.dtype(self.dtype(buffer)).itemsize // 4) * 4

    @property
    def device_bytes(self) -> int:
        """The peak of the largest launch: its buffers, and the staging copy of the largest output that is read back."""
        sizes = self.buffer_bytes()
        return PARAMS_BYTES + sum(sizes.values()) + max(sizes[name] for name in self.outputs) if sizes else 0

    def link(self, stage: Pass, dialect: source.Dialect, *, unrolled: bool = False) -> source.Source:
        """The source of one dispatch; `unrolled` writes out the loops that are marked for it."""
        text = dict(self.kernel.edits).get(stage.file)
        by_subgroup = "row_*" in stage.snippets and 1 < self._tile_of(stage).lanes <= self.limits.subgroup_size
        variants = {
            "qkv_*": "qkv_vec4" if self._by_vec4 else "qkv_scalar",
            "dout_*": "dout_vec4" if self._by_vec4 else "dout_scalar",
            "row_*": "row_subgroup" if by_subgroup else "row_workgroup",
        }
        return source.link(
            stage.file,
            tuple(variants.get(name, name) for name in stage.snippets),
            self.constants_of(stage),
            features=(*(("subgroups",) if by_subgroup else ()), *(("f16",) if self.storage == "float16" else ())),
            dialect=dialect,
            text=text,
            unrolled=unrolled,
        )

    def __str__(self) -> str:
        lines = [f"{self.kernel.name} for {self.problem}"]
        if self.kernel.tiled:
            lines.append(
                f"  workgroup memory {self._memory_model()} = "
                f"{self.workgroup_bytes:,} of {self.limits.workgroup_bytes:,} B"
            )
        lines.append(f"  invocations {self.invocations} of {self.limits.invocations} a workgroup")
        named_bytes = ", ".join(f"{name} {n:,}" for name, n in self.buffer_bytes().items() if n > UNUSED_BYTES)
        lines.append(f"  buffers {named_bytes or 'none'}: {self.device_bytes:,} B in {len(self.chunks)} launch(es)")
        return "\n".join(lines)

    def _memory_model(self) -> str:
        stage = self.widest
        tile = self._tile_of(stage)
        if stage.rows_are:
            return (
                f"of {tile} tiles, {tile.rows} rows and {tile.lanes} lanes a row, "
                f"D={self.problem.D} in {tile.slices} slice(s)"
            )
        counts = zip(stage.tiles, (tile.block_q, tile.block_k), strict=True)
        of_q, of_k = (f"{n}·{block}" if n > 1 else f"{block}" for n, block in counts)
        return f"({of_q} + {of_k})·{self.problem.D}·4 B"
