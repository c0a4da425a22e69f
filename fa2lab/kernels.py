"""The table of kernels: files, bindings and grids. What the planner chooses from."""

from __future__ import annotations

from dataclasses import replace

from fa2lab.errors import KernelError
from fa2lab.kernel import LANES, Kernel, Pass
from fa2lab.problem import Problem

MAX_HEAD_DIM = 256


def _query_tiles(problem: Problem, constants: dict) -> tuple[int, int, int]:
    parts = _ceil_div(problem.Tk, constants["SPLIT_KEYS"])
    return _ceil_div(problem.Tq, constants["BLOCK_Q"]), problem.B * problem.H, parts


def _key_tiles(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.Tk, constants["BLOCK_K"]), problem.B * problem.Hkv, 1


def _tile_pairs(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.Tq, constants["BLOCK_Q"]), _ceil_div(problem.Tk, constants["BLOCK_K"]), 1


def _rows(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.Tq, LANES), problem.B * problem.H, 1


def _scores(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.Tk, LANES), problem.Tq, problem.B * problem.H


def _columns(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.D, LANES), problem.Tq, problem.B * problem.H


def _key_columns(problem: Problem, constants: dict) -> tuple[int, int, int]:
    return _ceil_div(problem.D, LANES), problem.Tk, problem.B * problem.Hkv


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _bindings(inputs: str, outputs: str) -> tuple[tuple[str, str], ...]:
    read = tuple((name, "read") for name in inputs.split())
    return (("params", "uniform"), *read, *((name, "read_write") for name in outputs.split()))


_FA2_FORWARD = Pass(
    "fa2_forward",
    ("problem", "tiles"),
    _bindings("q k v", "out lse attn trace"),
    _query_tiles,
    tiles=(1, 2),
    lanes="BLOCK_Q",
)
_FA2_FORWARD_TILED = Pass(
    "fa2_forward_tiled",
    ("problem", "tiles", "register_tiles", "qkv_*", "row_*"),
    _bindings("q k v", "out lse attn trace"),
    _query_tiles,
    rows_are="BLOCK_Q",
)
_FA2_BACKWARD = (
    Pass("fa2_delta", ("problem",), _bindings("out dout", "delta"), _rows),
    Pass(
        "fa2_dq",
        ("problem",),
        _bindings("q k v dout lse delta", "dq"),
        _query_tiles,
        tiles=(2, 2),
        lanes="BLOCK_Q",
    ),
    Pass(
        "fa2_dkv",
        ("problem", "rows"),
        _bindings("q k v dout lse delta", "dk dv"),
        _key_tiles,
        tiles=(2, 2),
        lanes="BLOCK_K",
    ),
)
_FA2_BACKWARD_TILED = (
    _FA2_BACKWARD[0],
    Pass(
        "fa2_dq_tiled",
        ("problem", "register_tiles", "qkv_*", "dout_*"),
        _bindings("q k v dout lse delta", "dq"),
        _query_tiles,
        rows_are="BLOCK_Q",
    ),
    Pass(
        "fa2_dkv_tiled",
        ("problem", "rows", "register_tiles", "qkv_*", "dout_*"),
        _bindings("q k v dout lse delta", "dk dv"),
        _key_tiles,
        rows_are="BLOCK_K",
    ),
)
_MATERIALISED_BACKWARD = (
    Pass("attn_dscores", ("problem",), _bindings("v dout attn", "dscores"), _rows),
    Pass("attn_dq", ("problem",), _bindings("k dscores", "dq"), _columns),
    Pass("attn_dk", ("problem", "rows"), _bindings("q dscores", "dk"), _key_columns),
    Pass("attn_dv", ("problem", "rows"), _bindings("dout attn", "dv"), _key_columns),
)

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
        (_FA2_FORWARD,),
        tiled=True,
        traces=True,
    ),
    Kernel(
        "fa2_forward_tiled",
        "tiles in registers: many invocations a row, several rows an invocation, each load used several times",
        (_FA2_FORWARD_TILED,),
        tiled=True,
        traces=True,
    ),
    Kernel(
        "fa2_decode",
        "few queries, many keys: workgroups walk parts of the keys, and a second dispatch merges their m, l and O",
        (
            replace(_FA2_FORWARD_TILED, bindings=_bindings("q k v", "part_out part_lse attn trace")),
            Pass("fa2_merge", ("problem",), _bindings("part_out part_lse", "out lse"), _columns),
        ),
        tiled=True,
        splits=True,
    ),
)

# Of one batch and head, tile by tile: what the forward kernel computes and does not keep.
FORWARD_TRACE = Kernel(
    "fa2_forward_trace",
    "the forward's walk with S and, after each K tile, m, l and O written out",
    (
        Pass(
            "fa2_forward_trace",
            ("problem", "tiles"),
            _bindings("q k v", "scores o_steps trace"),
            _query_tiles,
            lanes="BLOCK_Q",
        ),
    ),
    outputs=("scores", "o_steps"),
    tiled=True,
    traces=True,
)
# Of one batch and head, tile by tile: what the backward kernels compute and do not keep.
BACKWARD_TRACE = Kernel(
    "fa2_backward_trace",
    "the backward's tiles, one workgroup each, with P, dS and what each adds to dQ, dK and dV written out",
    (
        _FA2_BACKWARD[0],
        Pass(
            "fa2_backward_trace",
            ("problem", "rows"),
            _bindings("q k v dout lse delta", "p_ds parts"),
            _tile_pairs,
            pair_floats=2,
            lanes="TILE_LANES",
        ),
    ),
    inputs=("q", "k", "v", "out", "lse", "dout"),
    outputs=("p_ds", "parts"),
    tiled=True,
    forward=_FA2_FORWARD,
)
_GRADIENTS = ("dq", "dk", "dv")
_BACKWARD = (
    Kernel(
        "materialised",
        "P is written once more by the forward's second pass, and dS beside it",
        (_FA2_FORWARD, *_MATERIALISED_BACKWARD),
        inputs=("q", "k", "v", "dout"),
        outputs=_GRADIENTS,
        tiled=True,
        materialises=True,
        forward=_FA2_FORWARD,
    ),
    Kernel(
        "fa2",
        "FlashAttention-2: P is recomputed tile by tile from L, for dQ and again for dK and dV",
        _FA2_BACKWARD,
        inputs=("q", "k", "v", "out", "lse", "dout"),
        outputs=_GRADIENTS,
        tiled=True,
        forward=_FA2_FORWARD,
    ),
    Kernel(
        "fa2_tiled",
        "the same with tiles in registers: many invocations a row, several rows an invocation",
        _FA2_BACKWARD_TILED,
        inputs=("q", "k", "v", "out", "lse", "dout"),
        outputs=_GRADIENTS,
        tiled=True,
        forward=_FA2_FORWARD_TILED,
    ),
)


def kernels() -> dict[str, Kernel]:
    """The forward kernels by name, from the plainest to the one with the most ideas."""
    return {kernel.name: kernel for kernel in _FORWARD}


def backward_kernels() -> dict[str, Kernel]:
    """The backward kernels by name."""
    return {kernel.name: kernel for kernel in _BACKWARD}


def named(kernel: str | Kernel, table: dict[str, Kernel]) -> Kernel:
    """The kernel of that name in `table`, or the kernel itself. Raises `KernelError` that lists the names."""
    if isinstance(kernel, Kernel):
        return kernel
    if kernel not in table:
        raise KernelError(f"No kernel is called {kernel!r}; there are 'auto', {', '.join(map(repr, table))}.")
    return table[kernel]
