"""Parity at any length: a short corner of the problem held whole against float64, and of the long one picked parts.

float64 cannot follow T = 4096 with 64 heads in a time worth waiting for, let alone gradients. But a row of O and dQ
needs no other row, and with O and L given a key's dK and dV need no other key. So parts of a long result can be exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt

import numpy as np

from fa2lab import parity, reference
from fa2lab.attention import attention
from fa2lab.backward import attention_backward, attention_grad
from fa2lab.cost import Direction
from fa2lab.errors import ParityError
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.parity import Comparison
from fa2lab.problem import Problem, pose
from fa2lab.reference.arithmetic import largest
from fa2lab.results import Gradients, Result

# Scores that a comparison may hold at once, in NumPy float64 with everything around them: about a second's work.
SCORES = 1 << 20
MOST_LENGTH, MOST_ROWS = 127, 16  # of the corner, no multiple of a tile; of a picked block


@dataclass(frozen=True, eq=False)
class Run:
    """One run that is to be proved: a kernel, what it does, its inputs and its options."""

    device: Device
    kernel: str | Kernel
    direction: Direction
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    causal: bool
    block_q: int | None = None
    block_k: int | None = None

    @property
    def problem(self) -> Problem:
        """What its arrays pose."""
        return pose(self.q, self.k, self.v, causal=self.causal)[0]

    def results(self) -> tuple[Result, Gradients | None]:
        """O and L, and the gradients unless it is a forward. The forward of a backward is the project's own."""
        arrays = self.q, self.k, self.v
        options = dict(causal=self.causal, device=self.device)
        own = dict(kernel=self.kernel, block_q=self.block_q, block_k=self.block_k)
        if self.direction == "forward":
            return attention(*arrays, **options, **own), None
        if self.direction == "forward+backward":
            return attention_grad(*arrays, self.dout, **options, **own)
        forward = attention(*arrays, **options)
        return forward, attention_backward(*arrays, forward.out, forward.lse, self.dout, **options, **own)

    def corner(self) -> Run:
        """The first batches and positions of it, all heads: no more than float64 follows whole."""
        p = self.problem
        B = min(p.B, 2)
        T = min(MOST_LENGTH, max(MOST_ROWS, isqrt(SCORES // (B * p.H))))
        q, dout = (x[:B, :T] for x in (self.q, self.dout))
        k, v = (x[:B, :T] for x in (self.k, self.v))
        return replace(self, q=q, k=k, v=v, dout=dout)


def prove(run: Run) -> list[Comparison]:
    """Hold a run against float64, at any length, and hand back what was compared.

    Raises `ParityError` that says where and how far at the first part that float32 does not explain.
    """
    corner = run.corner()
    whole = corner.problem == run.problem
    found = _whole(corner, "" if whole else f" (the first {corner.problem} of {run.problem})")
    if not whole:
        result, gradients = run.results()
        _finite(result, gradients)
        found += _rows(run, result, gradients)
        if gradients:
            found += _keys(run, result, gradients)
    return found


def _whole(run: Run, of: str) -> list[Comparison]:
    result, gradients = run.results()
    arrays = run.q, run.k, run.v
    truth = reference.attention(*arrays, causal=run.causal)
    found = [parity.compare(_named(result, of), truth).check()]
    if gradients:
        truth = reference.attention_backward(*arrays, run.dout, causal=run.causal)
        found.append(parity.compare(_named(gradients, of), truth).check())
    return found


def _named(result, of: str):
    return replace(result, adapter=f"{result.adapter}{of}")


def _finite(result: Result, gradients: Gradients | None) -> None:
    fields = {"out": result.out} | ({n: getattr(gradients, n) for n in parity.GRADIENT_AXES} if gradients else {})
    for name, array in fields.items():
        if not np.isfinite(array).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            label = (gradients if name in parity.GRADIENT_AXES else result).label
            raise ParityError(f"{label}: {name} is {array[place]} at {place}, from finite inputs.")


def _rows(run: Run, result: Result, gradients: Gradients | None) -> list[Comparison]:
    """A block of rows in the middle and the last one, of the last batch: O and L of all heads, dQ of the last group.

    Rows i … i + n - 1 of a causal problem are a causal problem by themselves, over the keys that the last of them sees.
    """
    p, found = run.problem, []
    n = min(MOST_ROWS, p.Tq, max(1, SCORES // (p.H * p.Tk)))
    for first in sorted({(p.Tq - n) // 2, p.Tq - n}):
        rows, seen = slice(first, first + n), slice(0, int(p.keys_seen()[first + n - 1]))
        of = f" (batch {p.B - 1}, rows {first} to {first + n - 1})"
        part = replace(_named(result, of), out=result.out[-1:, rows], lse=result.lse[-1:, :, rows])
        truth = reference.attention(
            run.q[-1:, rows], run.k[-1:, seen], run.v[-1:, seen], causal=run.causal, scale=p.scale
        )
        found.append(parity.compare(part, truth).check())
        if not gradients:
            continue
        heads = slice(p.H - p.group, p.H)
        arrays = run.q[-1:, rows, heads], run.k[-1:, seen, -1:], run.v[-1:, seen, -1:]
        truth = reference.attention_backward(*arrays, run.dout[-1:, rows, heads], causal=run.causal, scale=p.scale)
        floor, cost = parity.floors(truth)["dq"], _distance(truth.plain.dq, truth.dq)
        allowed = parity.GRADIENT_RATIO * cost + floor
        row = parity.measure("dq", gradients.dq[-1:, rows, heads], truth.dq, allowed, cost)
        found.append(Comparison(f"{gradients.label}{of}, the last KV group", truth.label, (row,), None).check())
    return found


def _keys(run: Run, result: Result, gradients: Gradients | None) -> list[Comparison]:
    """The first block of keys and one in the middle, of the last batch and KV head: dK and dV, given O and L.

    The rows that see any of keys j … j + n - 1 are, to these keys, a causal problem aligned at its top left corner, or
    no causal one where all of them see all of these keys. O and L are those that the device computed, as the kernel
    itself takes them.
    """
    p, found = run.problem, []
    heads = slice(p.H - p.group, p.H)
    for first in sorted({0, max(0, p.Tk - MOST_ROWS) // 2}):
        last = min(first + MOST_ROWS, p.Tk) - 1
        if run.causal and first < p.diagonal < last:  # begin where the corner is
            first, last = p.diagonal, min(p.diagonal + MOST_ROWS, p.Tk) - 1
        cornered = run.causal and first >= p.diagonal
        keys, n = slice(first, last + 1), last + 1 - first
        rows = slice(min(first - p.diagonal, p.Tq) if cornered else 0, p.Tq)
        q, out, dout = (x[-1:, rows, heads] for x in (run.q, result.out, run.dout))
        k, v = (x[-1:, keys, -1:] for x in (run.k, run.v))
        lse = result.lse[-1:, heads, rows]
        part = replace(p, B=1, H=p.group, Hkv=1, Tq=rows.stop - rows.start, Tk=n, causal=cornered, align="top-left")

        def walk(dtype, given_dout=dout, part=part, q=q, k=k, v=v, out=out, lse=lse):
            return reference.walk_backward(part, q, k, v, out, lse, given_dout, 1 << 30, 1 << 30, dtype)

        exact, plain = walk(np.float64), walk(np.float32)
        with np.errstate(invalid="ignore"):
            delta = np.abs(dout.astype(np.float64) * out).sum(-1)
        truth = reference.TrueGradients(
            **vars(exact),
            inputs=(q, k, v, dout),
            column=largest(walk(np.float64, np.ones_like(dout)).dv),  # P's column sums: each is dV where dO is 1
            largest_delta=largest(delta),
            largest_lse=largest(lse),
        )
        floors = parity.floors(truth)
        measured = []
        for name in ("dk", "dv"):
            cost = _distance(getattr(plain, name), getattr(exact, name))
            allowed = parity.GRADIENT_RATIO * cost + floors[name]
            got = getattr(gradients, name)[-1:, keys, -1:]
            measured.append(parity.measure(name, got, getattr(exact, name), allowed, cost))
        of = f" (batch {p.B - 1}, keys {first} to {last}, the last KV head)"
        found.append(Comparison(f"{gradients.label}{of}", exact.label, tuple(measured), None).check())
    return found


def _distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - expected).max(initial=0.0))


def worst(found: list[Comparison]) -> float:
    """The largest error among comparisons as a share of what was allowed there."""
    return max((row.error / row.allowed for c in found for row in c.rows if row.allowed), default=0.0)
