"""plan(problem, limits): picks a kernel and its tiles, splits what does not fit one binding, or refuses in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from fa2lab import source
from fa2lab.errors import KernelError, LimitError
from fa2lab.kernels import LANES, MAX_HEAD_DIM, TILES, Kernel, Pass, kernels, named
from fa2lab.limits import Limits
from fa2lab.problem import Problem

# What stands at a binding that this launch does not use: WebGPU wants some buffer there.
UNUSED_BYTES = 16
PARAMS_BYTES = 48  # `Params` of shared/problem.wgsl, padded to 16
# What `auto` tries first. The FlashAttention-2 kernels need no memory of size T² and are ahead of `fused_sv` at every
# length that was measured (README). `naive` is faster while B·H·T² fits, and is taken only where neither can be.
AUTO_ORDER = ("fa2_forward", "fused_sv", "naive", "fa2", "materialised")


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
    block_q: int | None
    block_k: int | None
    return_attn: bool
    trace: bool
    chunks: tuple[Chunk, ...]

    @property
    def constants(self) -> dict[str, int | bool]:
        """The block of constants that the kernel's text ends with."""
        constants = {"HEAD_DIM": self.problem.D, "LANES": LANES}
        constants |= {"WRITE_ATTN": self.return_attn or self.kernel.materialises, "WRITE_TRACE": self.trace}
        if self.kernel.tiled:
            constants |= {"BLOCK_Q": self.block_q, "BLOCK_K": self.block_k}
            constants["TILE_LANES"] = max(self.block_q, self.block_k)
        if self.kernel.max_keys:
            # A private row just long enough, to the next power of two: compilers take seconds over the longest.
            constants["MAX_KEYS"] = min(1 << max(6, (self.problem.Tk - 1).bit_length()), self.kernel.max_keys)
        return constants

    @property
    def workgroup_bytes(self) -> int:
        """Workgroup memory of one workgroup of the widest pass."""
        return self.kernel.tile_bytes(self.block_q, self.block_k, self.problem.D) if self.kernel.tiled else 0

    @property
    def invocations(self) -> int:
        """Invocations of the largest workgroup."""
        return max(self.constants[stage.lanes or "LANES"] for stage in self.kernel.passes)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What is read back."""
        wanted = (("attn", self.return_attn), ("trace", self.trace))
        return self.kernel.outputs + tuple(name for name, wish in wanted if wish)

    def shape(self, buffer: str, problem: Problem | None = None) -> tuple[int, ...]:
        """The shape of one of its float32 buffers, by default for the whole problem."""
        p = problem or self.problem
        queries, keys, rows = (p.B, p.Tq, p.H, p.D), (p.B, p.Tk, p.Hkv, p.D), (p.B, p.H, p.Tq)
        if buffer == "trace":
            return (*rows, -(-p.Tk // self.block_k), 4)
        if buffer == "p_ds":
            return (p.Tq, p.Tk, 2)
        if buffer == "parts":
            return ((-(-p.Tk // self.block_k) * p.Tq + 2 * -(-p.Tq // self.block_q) * p.Tk) * p.D,)
        shapes = dict.fromkeys(("q", "out", "dout", "dq"), queries) | dict.fromkeys(("k", "v", "dk", "dv"), keys)
        shapes |= dict.fromkeys(("lse", "delta"), rows) | dict.fromkeys(("attn", "dscores"), (*rows, p.Tk))
        return shapes[buffer]

    def buffer_bytes(self, problem: Problem | None = None) -> dict[str, int]:
        """Bytes of each storage buffer of a launch, by default the largest: the model of the allocation count."""
        if problem is None:
            if not self.chunks:
                return {}
            problem = self.chunks[0].problem
        idle = {"attn": not self.constants["WRITE_ATTN"], "trace": not self.trace}
        return {
            name: UNUSED_BYTES if idle.get(name) else max(UNUSED_BYTES, 4 * prod(self.shape(name, problem)))
            for name in self.kernel.buffers
        }

    @property
    def device_bytes(self) -> int:
        """The peak of the largest launch: its buffers, and the staging copy of the largest output that is read back."""
        sizes = self.buffer_bytes()
        return PARAMS_BYTES + sum(sizes.values()) + max(sizes[name] for name in self.outputs) if sizes else 0

    def link(self, stage: Pass, dialect: source.Dialect) -> source.Source:
        """The source of one dispatch."""
        text = dict(self.kernel.edits).get(stage.file)
        return source.link(stage.file, stage.snippets, self.constants, dialect=dialect, text=text)

    def __str__(self) -> str:
        lines = [f"{self.kernel.name} for {self.problem}"]
        if self.kernel.tiled:
            of_q, of_k = (f"{n}·{block}" if n > 1 else f"{block}" for n, block in zip(*self._tiles, strict=True))
            lines.append(
                f"  workgroup memory ({of_q} + {of_k})·{self.problem.D}·4 B = "
                f"{self.workgroup_bytes:,} of {self.limits.workgroup_bytes:,} B"
            )
        lines.append(f"  invocations {self.invocations} of {self.limits.invocations} a workgroup")
        named_bytes = ", ".join(f"{name} {n:,}" for name, n in self.buffer_bytes().items() if n > UNUSED_BYTES)
        lines.append(f"  buffers {named_bytes or 'none'}: {self.device_bytes:,} B in {len(self.chunks)} launch(es)")
        return "\n".join(lines)

    @property
    def _tiles(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return self.kernel.widest.tiles, (self.block_q, self.block_k)


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
) -> Plan:
    """The plan for `problem` under `limits`, made before anything is sent.

    `table` holds the kernels to choose from, by default the forward's. `block_q` and `block_k` fix the tile of a tiled
    kernel; by default the first of `kernels.TILES` that fits is taken.
    Raises `KernelError` for a kernel that cannot do what is asked and `LimitError` where the device cannot hold it.
    """
    table = kernels() if table is None else table
    if isinstance(kernel, str) and kernel == "auto":
        wishes = dict(block_q=block_q, block_k=block_k, return_attn=return_attn, trace=trace)
        return auto(problem, limits, table, **wishes)
    kernel = named(kernel, table)
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
    block_q, block_k = _tile(kernel, problem, limits, block_q, block_k) if kernel.tiled else (None, None)
    draft = Plan(kernel, problem, limits, block_q, block_k, return_attn, trace, ())
    _check_rows(draft)
    return replace(draft, chunks=() if problem.empty else _split(draft))


def auto(problem: Problem, limits: Limits, table: dict[str, Kernel], **wishes) -> Plan:
    """The plan of the first kernel in `AUTO_ORDER` that can do it; the refusal of the first where none can."""
    refusal = None
    for name in sorted(table, key=_preference):
        try:
            return plan(problem, limits, name, table=table, **wishes)
        except (LimitError, KernelError) as error:
            refusal = refusal or error
    raise refusal


def _preference(name: str) -> int:
    """A kernel that the order does not name comes last."""
    return AUTO_ORDER.index(name) if name in AUTO_ORDER else len(AUTO_ORDER)


def _check_invocations_and_bindings(kernel: Kernel, limits: Limits) -> None:
    need = max(stage.storage_buffers for stage in kernel.passes)
    if need > limits.storage_buffers:
        raise LimitError(
            f"{kernel.name} binds {need} storage buffers in one stage; this device allows {limits.storage_buffers}."
        )
    if limits.invocations < LANES and any(not stage.lanes for stage in kernel.passes):
        raise LimitError(
            f"{kernel.name} runs {LANES} invocations a workgroup; this device allows {limits.invocations}."
        )


def _tile(
    kernel: Kernel, problem: Problem, limits: Limits, block_q: int | None, block_k: int | None
) -> tuple[int, int]:
    """The tile that was asked for if it fits, else the first that does."""
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block is not None and (isinstance(block, bool) or not isinstance(block, int | np.integer) or block < 1):
            raise LimitError(f"{name} must be a whole number of at least 1; got {block!r}.")

    lanes = {stage.lanes for stage in kernel.passes}

    def invocations(bq: int, bk: int) -> int:
        by_constant = {"BLOCK_Q": bq, "BLOCK_K": bk, "TILE_LANES": max(bq, bk)}
        return max(by_constant.get(name, LANES) for name in lanes)

    def fits(bq: int, bk: int) -> bool:
        return (
            invocations(bq, bk) <= limits.invocations and kernel.tile_bytes(bq, bk, problem.D) <= limits.workgroup_bytes
        )

    wanted = [(int(block_q or bq), int(block_k or bk)) for bq, bk in TILES]
    for bq, bk in wanted:
        if fits(bq, bk):
            return bq, bk
    bq, bk = wanted[-1]
    room = [f"{a}x{b}" for a, b in TILES if fits(a, b)]
    raise LimitError(
        f"{kernel.name} with tiles of {bq}x{bk} at D={problem.D} needs {kernel.tile_bytes(bq, bk, problem.D):,} B of "
        f"workgroup memory and {invocations(bq, bk)} invocations; this device has {limits.workgroup_bytes:,} B and "
        f"{limits.invocations}. {'Fitting tiles: ' + ', '.join(room) if room else 'No tile fits'}."
    )


def _check_rows(draft: Plan) -> None:
    """The query rows fill one dimension of the grid, and B·H another that `_split` can shorten; Tq it cannot."""
    one = replace(draft.problem, B=1, H=1, Hkv=1)
    for stage in draft.kernel.passes:
        x, y, _ = stage.grid(one, draft.constants)
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
