"""What a kernel is: its passes, each a file with bindings, a grid and tiles, and the texts that a user edits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fa2lab import source
from fa2lab.errors import KernelError
from fa2lab.problem import Problem
from fa2lab.tiles import Footprint, Tile

LANES = 64  # invocations of a workgroup where none share anything

Grid = Callable[[Problem, dict], tuple[int, int, int]]


@dataclass(frozen=True)
class Pass:
    """One dispatch of a kernel: its file, what stands at bindings 0, 1, …, and its grid of workgroups.

    A snippet whose name ends in `*` has variants, and the planner links the one that fits. A pass with tiles either
    gives a row to each invocation (`tiles`, `lanes`) or shares rows (`rows_are`).
    """

    file: str
    snippets: tuple[str, ...]
    bindings: tuple[tuple[str, str], ...]  # (buffer, access)
    grid: Grid
    tiles: tuple[int, int] = (0, 0)  # workgroup tiles of BLOCK_Q and of BLOCK_K rows by HEAD_DIM columns
    pair_floats: int = 0  # further floats of workgroup memory for each (query, key) of a tile
    lanes: str = ""  # the constant that is its workgroup size: BLOCK_Q, BLOCK_K or, by default, LANES
    rows_are: str = ""  # of register tiles: BLOCK_Q or BLOCK_K

    @property
    def tiled(self) -> bool:
        """Whether it takes a tile."""
        return bool(self.rows_are or self.lanes)

    @property
    def storage_buffers(self) -> int:
        """How many storage buffers its stage binds."""
        return sum(access != "uniform" for _, access in self.bindings)

    def footprint(self, tile: Tile) -> Footprint:
        """What a register tile takes."""
        blocks = (tile.block_q, tile.block_k) if self.rows_are == "BLOCK_Q" else (tile.block_k, tile.block_q)
        return Footprint(*blocks, tile)

    def tile_bytes(self, tile: Tile, head_dim: int, *, subgroup_size: int = 0) -> int:
        """Workgroup memory of its tiles, float32. Rows that no subgroup holds are reduced through some more of it."""
        if self.rows_are:
            scratch = "row_*" in self.snippets and tile.lanes > subgroup_size
            return self.footprint(tile).workgroup_bytes(head_dim, scratch=scratch)
        of_rows = (self.tiles[0] * tile.block_q + self.tiles[1] * tile.block_k) * head_dim
        return 4 * (of_rows + self.pair_floats * tile.block_q * tile.block_k)

    def invocations(self, tile: Tile | None) -> int:
        """Invocations of a workgroup."""
        if self.rows_are:
            return self.footprint(tile).invocations
        sizes = {"BLOCK_Q": lambda: tile.block_q, "BLOCK_K": lambda: tile.block_k}
        sizes["TILE_LANES"] = lambda: max(tile.block_q, tile.block_k)
        return sizes[self.lanes]() if self.lanes else LANES


@dataclass(frozen=True)
class Kernel:
    """One rung of the ladder. `edits` holds replaced file texts, as `(file, text)`."""

    name: str
    idea: str
    passes: tuple[Pass, ...]
    inputs: tuple[str, ...] = ("q", "k", "v")
    outputs: tuple[str, ...] = ("out", "lse")
    tiled: bool = False  # walks tiles, so it takes block_q and block_k
    traces: bool = False  # can record its online softmax
    materialises: bool = False  # keeps B·H·Tq·Tk floats whether asked for attn or not
    max_keys: int | None = None
    splits: bool = False  # walks the keys in parts, and merges them
    forward: Pass | None = None  # of a backward: the forward whose rounding it repeats
    edits: tuple[tuple[str, str], ...] = ()

    def text(self, file: str | None = None) -> str:
        """The WGSL of one of its files, by default the first."""
        file = file or self.passes[0].file
        return dict(self.edits).get(file) or source.read(file)

    def edited(self, old: str, new: str, *, file: str | None = None) -> Kernel:
        """This kernel with `old` replaced by `new` in one file's text: to try an idea, or to break it on purpose.

        Raises `KernelError` unless the file is one of the passes' own and `old` stands there exactly once.
        """
        file = file or self.passes[0].file
        files = [stage.file for stage in self.passes]
        if file not in files:
            raise KernelError(f"{self.name} is written in {', '.join(files)}; {file}.wgsl cannot be edited by it.")
        text = self.text(file)
        if text.count(old) != 1:
            raise KernelError(
                f"{old!r} stands {text.count(old)} times in {file}.wgsl; an edit needs exactly one place."
            )
        edits = dict(self.edits) | {file: text.replace(old, new)}
        return replace(self, edits=tuple(edits.items()))

    @property
    def label(self) -> str:
        """Its name, and whether its text is the project's own."""
        return f"{self.name} (edited)" if self.edits else self.name

    @property
    def halves(self) -> bool:
        """Whether Q, K, V and what is computed from them may be stored as float16."""
        return all(stage.rows_are or stage.file in ("fa2_delta", "fa2_merge") for stage in self.passes)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Every storage buffer that its passes bind, inputs first, in the order of first use."""
        bound = [name for stage in self.passes for name, access in stage.bindings if access != "uniform"]
        return tuple(dict.fromkeys((*self.inputs, *bound)))

    def after_forward(self) -> Kernel:
        """This backward with FlashAttention-2's forward before it, so that O and L never leave the device."""
        passes = self.passes if self.forward in self.passes else (self.forward, *self.passes)
        inputs = tuple(name for name in self.inputs if name not in ("out", "lse"))
        return replace(self, passes=passes, inputs=inputs, outputs=("out", "lse", *self.outputs))

    def __str__(self) -> str:
        return f"{self.name}: {self.idea}"
