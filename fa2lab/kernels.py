"""The table of kernels: files, bindings and grids. What the planner chooses from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fa2lab import source
from fa2lab.errors import KernelError
from fa2lab.problem import Problem

LANES = 64  # invocations of a workgroup where none share anything
MAX_HEAD_DIM = 256
# Tiles (BLOCK_Q, BLOCK_K) from the most sharing to the least; the planner takes the first that fits.
TILES = ((16, 16), (16, 8), (16, 4), (8, 8), (8, 4), (4, 4), (4, 2), (2, 2), (1, 1))

Grid = Callable[[Problem, dict], tuple[int, int, int]]


@dataclass(frozen=True)
class Pass:
    """One dispatch of a kernel: its file, what stands at bindings 0, 1, …, and its grid of workgroups."""

    file: str
    snippets: tuple[str, ...]
    bindings: tuple[tuple[str, str], ...]  # (buffer, access)
    grid: Grid

    @property
    def storage_buffers(self) -> int:
        """How many storage buffers its stage binds."""
        return sum(access != "uniform" for _, access in self.bindings)


@dataclass(frozen=True)
class Kernel:
    """One rung of the ladder. `edits` holds replaced file texts, as `(file, text)`."""

    name: str
    idea: str
    passes: tuple[Pass, ...]
    tiled: bool = False  # walks K tiles: can trace, and takes block_q and block_k
    materialises: bool = False  # keeps B·H·Tq·Tk floats whether asked for attn or not
    max_keys: int | None = None
    edits: tuple[tuple[str, str], ...] = ()

    def text(self, file: str | None = None) -> str:
        """The WGSL of one of its files, by default the first."""
        file = file or self.passes[0].file
        return dict(self.edits).get(file) or source.read(file)

    def edited(self, old: str, new: str, *, file: str | None = None) -> Kernel:
        """This kernel with `old` replaced by `new` in one file's text: to try an idea, or to break it on purpose.

        Raises `KernelError` unless `old` stands there exactly once.
        """
        file = file or self.passes[0].file
        text = self.text(file)
        if text.count(old) != 1:
            raise KernelError(f"{old!r} stands {text.count(old)} times in {file}.wgsl; an edit needs exactly one place.")
        edits = dict(self.edits) | {file: text.replace(old, new)}
        return replace(self, edits=tuple(edits.items()))

    def tile_bytes(self, block_q: int, block_k: int, head_dim: int) -> int:
        """Workgroup memory: the Q tile and the tiles of K and V, float32."""
        return (block_q + 2 * block_k) * head_dim * 4 if self.tiled else 0

    def __str__(self) -> str:
        return f"{self.name}: {self.idea}"


def _rows(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.Tq, constants.get("BLOCK_Q", LANES)), problem.B * problem.H, 1


def _scores(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.Tk, LANES), problem.Tq, problem.B * problem.H


def _columns(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.D, LANES), problem.Tq, problem.B * problem.H


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _bindings(inputs: str, outputs: str) -> tuple[tuple[str, str], ...]:
    read = tuple((name, "read") for name in inputs.split())
    return (("params", "uniform"), *read, *((name, "read_write") for name in outputs.split()))


_FORWARD = (
    Kernel(
        "naive",
        "three dispatches, the attention matrix stands in memory between them",
        (
            Pass("naive_scores", ("problem",), _bindings("q k", "attn"), _scores),
            Pass("naive_softmax", ("problem",), _bindings("", "attn lse"), _rows),
            Pass("naive_output", ("problem",), _bindings("v attn", "out"), _columns),
        ),
        materialises=True,
    ),
    Kernel(
        "fused_sv",
        "one invocation a query row, the row of scores in private memory",
        (Pass("fused_sv", ("problem",), _bindings("q k v", "out lse attn"), _rows),),
        max_keys=1024,
    ),
    Kernel(
        "fa2_forward",
        "FlashAttention-2: one invocation a query row, tiles of Q, K and V in workgroup memory, online m, l and O",
        (Pass("fa2_forward", ("problem", "tiles"), _bindings("q k v", "out lse attn trace"), _rows),),
        tiled=True,
    ),
)


def kernels() -> dict[str, Kernel]:
    """The forward kernels by name, from the plainest to the one with the most ideas."""
    return {kernel.name: kernel for kernel in _FORWARD}


def named(kernel: str | Kernel) -> Kernel:
    """The kernel of that name, or the kernel itself. Raises `KernelError` that lists the names."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in kernels():
        raise KernelError(f"No kernel is called {kernel!r}; there are 'auto', {', '.join(map(repr, kernels()))}.")
    return kernels()[kernel]
