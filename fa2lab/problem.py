"""Problem: what is computed. Turns the arrays that a user hands in into what a kernel takes, or says why not."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fa2lab.errors import ShapeError

Align = Literal["bottom-right", "top-left"]
ALIGNMENTS = ("bottom-right", "top-left")


@dataclass(frozen=True)
class Problem:
    """Shapes, heads, mask and scale of one attention call.

    Q is `(B, Tq, H, D)`, K and V are `(B, Tk, Hkv, D)`. Query head h reads KV head `h // (H // Hkv)`.
    """

    B: int
    Tq: int
    Tk: int
    H: int
    Hkv: int
    D: int
    causal: bool
    align: Align
    scale: float

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.H // self.Hkv

    @property
    def diagonal(self) -> int:
        """Causal row i sees the keys j <= i + diagonal (FlashAttention >= 2.1 aligns bottom-right)."""
        return self.Tk - self.Tq if self.align == "bottom-right" else 0

    @property
    def empty(self) -> bool:
        """True where there is nothing to launch: no batch, no query or no key."""
        return self.B == 0 or self.Tq == 0 or self.Tk == 0

    def keys_seen(self) -> np.ndarray:
        """How many keys each query row sees, `(Tq,)`. Every mask here leaves a prefix: row i sees keys 0 … n_i - 1."""
        if not self.causal:
            return np.full(self.Tq, self.Tk)
        return np.clip(np.arange(self.Tq) + self.diagonal + 1, 0, self.Tk)

    def mask(self) -> np.ndarray:
        """Boolean `(Tq, Tk)`, True where a key is visible: a fact about positions, never about values."""
        return np.arange(self.Tk) < self.keys_seen()[:, None]

    def __str__(self) -> str:
        heads = f"H={self.H}" if self.H == self.Hkv else f"H={self.H} over Hkv={self.Hkv}"
        length = f"T={self.Tq}" if self.Tq == self.Tk else f"Tq={self.Tq} Tk={self.Tk}"
        mask = f"causal ({self.align})" if self.causal and self.Tq != self.Tk else "causal" if self.causal else "full"
        return f"B={self.B} {length} {heads} D={self.D} {mask}"


def pose(
    q, k, v, *, causal: bool = False, scale: float | None = None, align: Align = "bottom-right"
) -> tuple[Problem, np.ndarray, np.ndarray, np.ndarray]:
    """The problem that three arrays pose, and the arrays as NumPy sees them, not copied yet: see `as_float32`.

    Any floating-point array is welcome (strided, broadcast, read-only, big-endian, float64, float16, lists of floats);
    it is read, never written. Raises `TypeError` for arrays that do not hold real floating-point numbers, `ShapeError`
    for shapes that do not fit each other and `ValueError` for a scale or alignment that is none.
    """
    checked = {name: _as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    problem = _fit(*checked.values(), causal=causal, scale=scale, align=align)
    return problem, *checked.values()


def pose_backward(problem: Problem, **arrays) -> dict[str, np.ndarray]:
    """out, lse and dout of a problem that is posed already, by name, as NumPy sees them. Raises as `pose` does."""
    p = problem
    axes = {"lse": ("(B, H, Tq)", (p.B, p.H, p.Tq))}
    checked = {}
    for name, x in arrays.items():
        letters, shape = axes.get(name, ("(B, Tq, H, D)", (p.B, p.Tq, p.H, p.D)))
        checked[name] = _as_floats(name, x)
        if checked[name].shape != shape:
            raise ShapeError(f"{name} must be {letters} = {shape} to fit q; got shape {checked[name].shape}.")
    return checked


def _as_array(name: str, x) -> np.ndarray:
    x = _as_floats(name, x)
    if x.ndim != 4:
        hint = {
            3: f"Reshape (B, T, C) by {name}.reshape(B, T, H, C // H)",
            2: f"For one batch and one head use {name}[None, :, None, :]",
        }.get(x.ndim, "Bring it to those four axes")
        raise ShapeError(f"{name} must have 4 axes (B, T, H, D); got {x.ndim} with shape {x.shape}. {hint}.")
    return x


def _as_floats(name: str, x) -> np.ndarray:
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost: hand in {name}.filled(...) instead.")
    try:
        x = np.asarray(x)
    except Exception as error:  # whatever a foreign array type raises, the user needs the argument's name
        raise TypeError(f"{name} cannot be read as a NumPy array ({error}); hand in an array of floats.") from error
    if x.dtype.kind != "f":
        raise TypeError(
            f"{name} must hold floating-point numbers (float32, float64 or float16); got dtype {x.dtype}. "
            f"Convert it with np.asarray({name}, np.float32) if that is meant."
        )
    return x


def _fit(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal, scale, align) -> Problem:
    (B, Tq, H, D), (Bk, Tk, Hkv, Dk) = q.shape, k.shape
    if k.shape != v.shape:
        raise ShapeError(f"k and v must have the same shape (B, Tk, Hkv, D); got k {k.shape} and v {v.shape}.")
    if B != Bk:
        raise ShapeError(f"q and k must have the same batch; got q {q.shape} with B={B} and k {k.shape} with B={Bk}.")
    if D != Dk:
        raise ShapeError(
            f"q and k must have the same head dimension; got q {q.shape} with D={D} and k {k.shape} with D={Dk}."
        )
    if D == 0 or H == 0 or Hkv == 0:
        raise ShapeError(f"Heads and head dimension must be at least 1; got q {q.shape} and k {k.shape}.")
    if H % Hkv:
        raise ShapeError(
            f"The query heads must be a multiple of the key/value heads; got H={H} and Hkv={Hkv}. "
            f"With H={H}, Hkv may be {', '.join(str(n) for n in range(1, H + 1) if H % n == 0)}."
        )
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS}; got {align!r}.")
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal must be True or False; got {causal!r}.")
    return Problem(B, Tq, Tk, H, Hkv, D, bool(causal), align, _as_scale(scale, D))


def _as_scale(scale, D: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(D)
    if isinstance(scale, bool | np.bool_) or not isinstance(scale, numbers.Real | np.floating):
        raise TypeError(f"scale must be a real number or None for 1/sqrt(D); got {scale!r}.")
    if not abs(float(scale)) <= float(np.finfo(np.float32).max):  # also catches NaN
        raise ValueError(f"scale must be finite in float32; got {scale!r}. The default is 1/sqrt(D) = {D**-0.5:.6g}.")
    return float(scale)


def as_float32(x: np.ndarray) -> np.ndarray:
    """What every engine computes from: the array as native, C-contiguous float32; the array itself where it is that."""
    return np.ascontiguousarray(x, dtype=np.float32)
