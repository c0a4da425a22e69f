"""What the tests of the backward pass share: who computes gradients, on what, and how they are held against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab.reference import TrueGradients

CAUSAL, TOP_LEFT = {"causal": True}, {"causal": True, "align": "top-left"}
MASKS = pytest.mark.parametrize("mask", [{}, CAUSAL, TOP_LEFT], ids=["full", "bottom-right", "top-left"])
FIELDS = ("dq", "dk", "dv")


def random(**sizes) -> tuple[np.ndarray, ...]:
    """Normal q, k, v and dout."""
    q, k, v = engines.random(**sizes)
    return q, k, v, np.random.default_rng(99).standard_normal(q.shape, np.float32)


@dataclass(frozen=True)
class Solver:
    """One way to compute gradients: forward and backward in one go, by a backward kernel on a seat or on NumPy."""

    kernel: str
    seat: engines.Seat | None

    def __str__(self) -> str:
        return f"{self.kernel}-{self.seat or 'numpy'}"

    @property
    def device(self) -> fa.Device | str:
        return engines.device_of(self.seat) if self.seat else "numpy"

    @property
    def is_tint(self) -> bool:
        return self.seat is not None and self.seat.compiler == "tint"

    def __call__(self, q, k, v, dout, **options) -> fa.Gradients:
        return fa.attention_grad(q, k, v, dout, kernel=self.kernel, device=self.device, **options)[1]


def solvers() -> list:
    """Both backward kernels on NumPy and on every seat with either set of limits, as pytest parameters."""
    params = []
    for kernel in fa.backward_kernels():
        on_numpy = Solver(kernel, None)
        params.append(pytest.param(on_numpy, id=str(on_numpy)))
        for seat in engines.seats("adapter", "webgpu"):
            solver = Solver(kernel, seat)
            params.append(engines.seat_param(seat, solver, str(solver)))
    return params


every_solver = pytest.mark.parametrize("solver", solvers())


def forward(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """O and L in float64, which a backward pass rounds to float32: the best that a forward can hand over."""
    result = fa.reference.attention(q, k, v, **options)
    return result.out, result.lse


def check(got: fa.Gradients, q, k, v, dout, **options) -> None:
    """KV head by KV head, with the query heads of its group, within three times what plain float32 arithmetic errs."""
    for found, truth in by_head(got, (q, k, v, dout), options):
        fa.parity.compare(found, truth).check()


def by_head(got: fa.Gradients, arrays, options) -> Iterator[tuple[fa.Gradients, TrueGradients]]:
    """The gradients cut by KV head, each with its own truth: a large head must not hide a small one."""
    p = got.problem
    for kv in range(p.Hkv):
        heads, own = slice(kv * p.group, (kv + 1) * p.group), slice(kv, kv + 1)
        cut = {"q": heads, "k": own, "v": own, "dout": heads, "dq": heads, "dk": own, "dv": own}
        named = zip(("q", "k", "v", "dout"), arrays, strict=True)
        parts = [np.ascontiguousarray(x[:, :, cut[name]]) for name, x in named]
        truth = _truth(tuple((x.tobytes(), x.dtype.str, x.shape) for x in parts), tuple(sorted(options.items())))
        fields = [getattr(got, name)[:, :, cut[name]] for name in FIELDS]
        yield fa.Gradients(*fields, got.kernel, f"{got.adapter}, KV head {kv}", truth.problem), truth


@cache
def _truth(parts, options) -> TrueGradients:
    """Remembered, since every solver is asked the same."""
    arrays = (np.frombuffer(content, dtype).reshape(shape) for content, dtype, shape in parts)
    return fa.reference.attention_backward(*arrays, **dict(options))


def assert_same_bits(a, b, fields: tuple[str, ...] = FIELDS) -> None:
    """Not one bit differs, in a NaN or the sign of a zero neither."""
    for name in fields:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), f"{name} differs"
