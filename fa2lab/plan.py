"""plan(problem, limits): picks a kernel and its tiles, splits what does not fit one binding, or refuses in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np

from fa2lab.errors import KernelError, LimitError
from fa2lab.kernel import LANES, Kernel, Pass
from fa2lab.kernels import MAX_HEAD_DIM, kernels, named
from fa2lab.limits import Limits
from fa2lab.planned import Chunk, Plan, Storage
from fa2lab.problem import Problem
from fa2lab.tiles import TILES, Tile, preferred, register_tiles

BUSY = 1024  # workgroups that keep a GPU busy
# What `auto` tries, the fastest first, as measured (README). On GPUs register tiles are ahead at every length, T = 32
# included, and `naive` is ahead of the kernels with one invocation a row wherever B·H·T² fits. Software drivers take
# longest over register tiles.
ON_GPUS = ("fa2_forward_tiled", "naive", "fa2_forward", "fused_sv", "fa2_tiled", "fa2", "materialised")
# From so many keys on, and for so few queries, walking parts of them at once is ahead on the H200: at Tq = 1 it takes
# 0.012 ms for 256 keys, where one walk takes 0.009, and for 1024, where one walk takes 0.030.
DECODE_QUERIES, DECODE_KEYS = 16, 1024
ON_SOFTWARE = ("fa2_forward", "fused_sv", "naive", "fa2_forward_tiled", "fa2", "fa2_tiled", "materialised")


def plan(
    problem: Problem,
    limits: Limits,
    kernel: str | Kernel = "auto",
    *,
    table: dict[str, Kernel] | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    return_attn: bool = False,
    trace: bool = False,
    splits: int | None = None,
    storage: Storage = "float32",
    tile: Mapping[str, Tile] | None = None,
    tuned: Mapping[tuple[str, int], Tile] | None = None,
) -> Plan:
    """The plan for `problem` under `limits`, made before anything is sent.

    `table` holds the kernels to choose from, by default the forward's. `block_q` and `block_k` fix the tile of a tiled
    kernel; by default the first of the tables in tiles.py that fits is taken. `splits`: in how many parts a kernel that
    splits walks the keys, by default enough for a GPU. `storage`: of Q, K, V, O and gradients on the device. `tile`:
    the register tile of a pass, by its file. `tuned`: what to try before the tables, by file and head dimension.
    Raises `KernelError` for a kernel that cannot do what is asked and `LimitError` where the device cannot hold it.
    """
    table = kernels() if table is None else table
    if isinstance(kernel, str) and kernel == "auto":
        wishes = dict(block_q=block_q, block_k=block_k, return_attn=return_attn, trace=trace)
        wishes |= dict(splits=splits, storage=storage, tile=tile, tuned=tuned)
        return auto(problem, limits, table, **wishes)
    kernel = named(kernel, table)
    _check_storage(kernel, storage, limits, table)
    if (splits is not None or return_attn) and kernel.splits == bool(return_attn):
        wish, able = ("The attention matrix", not kernel.splits) if return_attn else ("Splitting the keys", True)
        names = ", ".join(k.name for k in table.values() if k.splits != bool(return_attn))
        raise KernelError(f"{wish} is not for {kernel.name}. Able: {names or 'none'}.")
    if (trace and not kernel.traces) or ((block_q or block_k) and not kernel.tiled):
        wish = "A trace" if trace else "A block size"
        able = ", ".join(k.name for k in table.values() if (k.traces if trace else k.tiled))
        raise KernelError(f"{wish} needs a kernel that walks tiles; {kernel.name} has none. Able: {able or 'none'}.")
    if problem.D > MAX_HEAD_DIM:
        raise LimitError(f"The kernels take head dimensions from 1 to {MAX_HEAD_DIM}; got D={problem.D}.")
    if kernel.max_keys and problem.Tk > kernel.max_keys:
        raise LimitError(
            f"{kernel.name} keeps a row of scores in private memory and takes up to {kernel.max_keys} keys; "
            f"got Tk={problem.Tk:,}. fa2_forward takes any number."
        )
    _check_invocations_and_bindings(kernel, limits)
    _check_blocks(block_q, block_k)
    known = {stage: _known_tiles(stage, problem, limits, tile or {}, tuned or {}) for stage in kernel.passes}
    tiles = tuple(_tile(kernel, stage, problem, limits, known[stage], block_q, block_k) for stage in kernel.passes)
    draft = Plan(kernel, problem, limits, tiles, return_attn, trace, (), storage=storage)
    if kernel.splits:
        draft = replace(draft, split_keys=_split_keys(problem, draft.tile, splits))
    _check_rows(draft)
    return replace(draft, chunks=() if problem.empty else _split(draft))


def auto(problem: Problem, limits: Limits, table: dict[str, Kernel], **wishes) -> Plan:
    """The plan of the fastest kernel that can do it; the refusal of the first where none can.

    What is to be looked at step by step goes to the kernel that a reader can follow.
    """
    order = ON_SOFTWARE if limits.software or wishes["trace"] else ON_GPUS
    if not limits.software and problem.Tq <= DECODE_QUERIES and problem.Tk >= DECODE_KEYS:
        order = ("fa2_decode", *order)
    refusal = None
    for name in sorted(table, key=lambda name: order.index(name) if name in order else len(order)):
        try:
            return plan(problem, limits, name, table=table, **wishes)
        except (LimitError, KernelError) as error:
            refusal = refusal or error
    raise refusal


def _check_invocations_and_bindings(kernel: Kernel, limits: Limits) -> None:
    need = max(stage.storage_buffers for stage in kernel.passes)
    if need > limits.storage_buffers:
        raise LimitError(
            f"{kernel.name} binds {need} storage buffers in one stage; this device allows {limits.storage_buffers}."
        )
    if limits.invocations < LANES and any(not stage.tiled for stage in kernel.passes):
        raise LimitError(
            f"{kernel.name} runs {LANES} invocations a workgroup; this device allows {limits.invocations}."
        )


def _check_storage(kernel: Kernel, storage: str, limits: Limits, table: dict[str, Kernel]) -> None:
    if storage not in ("float32", "float16"):
        raise ValueError(f'storage must be "float32" or "float16"; got {storage!r}.')
    if storage == "float32":
        return
    if not kernel.halves:
        able = ", ".join(k.name for k in table.values() if k.halves)
        raise KernelError(f"{kernel.name} stores float32 only; float16 is for {able or 'none of these kernels'}.")
    if not limits.float16:
        raise LimitError('This device has no float16 in shaders (feature "shader-f16"); storage="float32" works.')


def check_storable(planned: Plan, inputs: dict[str, np.ndarray]) -> None:
    """Refuse finite inputs that become infinite in the plan's storage. Raises `LimitError`."""
    most = float(np.finfo(np.float16).max)
    for name in inputs if planned.storage == "float16" else ():
        largest = np.abs(inputs[name], where=np.isfinite(inputs[name]), out=np.zeros_like(inputs[name])).max(
            initial=0.0
        )
        if planned.dtype(name) is np.float16 and largest > most:
            raise LimitError(
                f'{name} holds {largest:g}; float16 ends at {most:g}. Smaller numbers work, and storage="float32".'
            )


def _split_keys(problem: Problem, tile: Tile, splits: int | None) -> int:
    """Keys of a part, whole tiles of them. By default parts enough to keep a GPU busy, each a power of two of tiles, so
    that a cache that grows key by key meets few kernels."""
    if splits is not None and (isinstance(splits, bool) or not isinstance(splits, int | np.integer) or splits < 1):
        raise LimitError(f"splits must be a whole number of at least 1; got {splits!r}.")
    n_tiles = -(-problem.Tk // tile.block_k)
    if splits is not None:
        return max(1, -(-n_tiles // int(splits))) * tile.block_k
    workgroups = max(1, problem.B * problem.H * -(-problem.Tq // tile.block_q))
    each = -(-n_tiles * workgroups // BUSY)
    return (1 << max(2, (each - 1).bit_length() if each > 1 else 0)) * tile.block_k


def _check_blocks(block_q: int | None, block_k: int | None) -> None:
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block is not None and (isinstance(block, bool) or not isinstance(block, int | np.integer) or block < 1):
            raise LimitError(f"{name} must be a whole number of at least 1; got {block!r}.")


def _tile(
    kernel: Kernel,
    stage: Pass,
    problem: Problem,
    limits: Limits,
    known: tuple[Tile, ...],
    block_q: int | None,
    block_k: int | None,
) -> Tile | None:
    """The tile of a pass: one of the size that was asked for if any fits, else the first of its table that does."""
    if not stage.tiled:
        return None

    def fits(tile: Tile) -> bool:
        nbytes = stage.tile_bytes(tile, problem.D, subgroup_size=limits.subgroup_size)
        even = not stage.rows_are or stage.footprint(tile).legal
        return even and stage.invocations(tile) <= limits.invocations and nbytes <= limits.workgroup_bytes

    tried = [tile for tile in known if block_q in (None, tile.block_q) and block_k in (None, tile.block_k)]
    sizes = dict.fromkeys((int(block_q or tile.block_q), int(block_k or tile.block_k)) for tile in known)
    for size in sizes if block_q or block_k else ():
        tried += register_tiles(*size, problem.D, rows_are=stage.rows_are) if stage.rows_are else [Tile(*size)]
    for tile in tried:
        if fits(tile):
            return tile
    room = ", ".join(dict.fromkeys(str(tile) for tile in known if fits(tile)))
    fitting = f"Fitting tiles: {room}" if room else "No tile fits"
    if not tried:
        raise LimitError(
            f"{kernel.name} takes tiles of n·2^i rows, n up to 8, by a multiple of 4; "
            f"got block_q={block_q}, block_k={block_k}. {fitting}."
        )
    least = min(tried, key=lambda tile: stage.tile_bytes(tile, problem.D, subgroup_size=limits.subgroup_size))
    raise LimitError(
        f"{kernel.name} with tiles of {least} at D={problem.D} needs "
        f"{stage.tile_bytes(least, problem.D, subgroup_size=limits.subgroup_size):,} B of workgroup memory and "
        f"{stage.invocations(least)} invocations; this device has {limits.workgroup_bytes:,} B and "
        f"{limits.invocations}. {fitting}."
    )


def _known_tiles(
    stage: Pass,
    problem: Problem,
    limits: Limits,
    wanted: Mapping[str, Tile],
    tuned: Mapping[tuple[str, int], Tile],
) -> tuple[Tile, ...]:
    """The tiles that a pass may take, the best first: the one that is wanted, or the tuned one and then the table's."""
    if not stage.rows_are:
        return tuple(Tile(*blocks) for blocks in TILES)
    if stage.file in wanted:
        return (wanted[stage.file],)
    n_rows = problem.B * (problem.H * problem.Tq if stage.rows_are == "BLOCK_Q" else problem.Hkv * problem.Tk)
    kind = dict(reduces="row_*" in stage.snippets, software=limits.software)
    if stage.rows_are == "BLOCK_Q" and problem.Tq <= 4 and not limits.software:
        kind["few_rows"] = True
    dims = sorted(dim for file, dim in tuned if file == stage.file and dim >= problem.D)
    best = [replace(tuned[stage.file, dims[0]], slices=-(-problem.D // 64))] if dims else []
    return (*best, *preferred(stage.rows_are, n_rows, problem.D, **kind))


def _check_rows(draft: Plan) -> None:
    """The query rows fill one dimension of the grid, and B·H another that `_split` can shorten; Tq it cannot."""
    one = replace(draft.problem, B=1, H=1, Hkv=1)
    for stage in draft.kernel.passes:
        x, y, _ = stage.grid(one, draft.constants_of(stage))
        if max(x, y) > draft.limits.workgroups:
            raise LimitError(
                f"{draft.kernel.name} would dispatch {max(x, y):,} workgroups in one dimension for Tq={one.Tq:,} and "
                f"Tk={one.Tk:,}; this device allows {draft.limits.workgroups:,}. Shorter ones fit."
            )


def _split(draft: Plan) -> tuple[Chunk, ...]:
    """Whole batches where they fit one binding, else heads by KV group, else heads of one group."""
    p = draft.problem
    room = min(draft.limits.binding_bytes, draft.limits.buffer_bytes)

    def fits(B: int, Hkv: int, group: int) -> bool:
        part = replace(p, B=B, H=Hkv * group, Hkv=Hkv)
        return max(draft.buffer_bytes(part).values()) <= room and B * part.H <= draft.limits.workgroups

    batches = _most(p.B, lambda n: fits(n, p.Hkv, p.group))
    kv_heads = p.Hkv if batches else _most(p.Hkv, lambda n: fits(1, n, p.group))
    heads = p.group if kv_heads else _most(p.group, lambda n: fits(1, 1, n))
    if not heads:
        one = draft.buffer_bytes(replace(p, B=1, H=1, Hkv=1))
        name = max(one, key=one.get)
        hint = "Smaller T would fit"
        if name in ("attn", "trace", "dscores"):
            hint += ", or an fa2 kernel without attn and trace, which needs no buffer of that size"
        raise LimitError(
            f"One head's {name} takes {one[name]:,} B; one binding of this device holds {room:,} B. {hint}."
        )
    chunks = []
    for batch, kv, within in product(_parts(p.B, batches or 1), _parts(p.Hkv, kv_heads or 1), _parts(p.group, heads)):
        first = kv.start * p.group + within.start
        H = (kv.stop - kv.start) * (within.stop - within.start)
        part = replace(p, B=batch.stop - batch.start, H=H, Hkv=kv.stop - kv.start)
        chunks.append(Chunk(batch, slice(first, first + H), kv, part))
    return tuple(chunks)


def _most(n: int, fits) -> int:
    """The largest count up to n that fits (fitting is monotone), 0 where not even one does."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _parts(n: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]
