"""The small GPT that comes with the project, and what its heads make of a text."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from fa2lab.gpt import GPT
from fa2lab.gpt_attention import NumpyAttention
from fa2lab.training import load_weights

MODEL = Path(__file__).parent / "model" / "tiny.safetensors"


@cache
def trained_model() -> GPT:
    """The GPT that comes with the project; its file says by which command it was made."""
    return load_weights(MODEL, NumpyAttention())


def heads_on(
    tokens: np.ndarray, rng: np.random.Generator, T: int, Tk: int, H: int, Hkv: int, D: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q `(B, T, H, D)`, K and V `(B, Tk, Hkv, D)` of the model's heads on tokens `(B, max(T, Tk))`.

    Heads of all layers, first layer first; a group of query heads repeats its KV head's. A text past the
    model's context is read window by window.

    A head dimension other than the model's is a random rotation into (or projection onto) D columns, with Q scaled so
    that 1/sqrt(D) gives the model's own scores: exactly from its head dimension on, roughly below. Raises `ValueError`
    for more heads than it has.
    """
    model = trained_model()
    preset = model.preset
    if max(H, Hkv) > preset.layers * preset.heads or H % Hkv:
        raise ValueError(
            f"The trained model has {preset.layers * preset.heads} heads, and H must be a multiple of Hkv; "
            f"got H={H} and Hkv={Hkv}."
        )
    tokens = tokens.astype(np.int64)
    windows = [tokens[:, i : i + preset.context] for i in range(0, tokens.shape[1], preset.context)]
    layers = range(-(-Hkv // preset.heads))
    q, k, v = (
        np.concatenate([np.concatenate([heads[i] for heads in window], axis=2) for window in by_window], axis=1)
        for i, by_window in ((i, [[model.heads_of(w, layer) for layer in layers] for w in windows]) for i in range(3))
    )
    of_group = np.arange(H) // (H // Hkv)
    turn = _rotation(rng, preset.head_dim, D)
    q = q[:, tokens.shape[1] - T :, of_group] @ turn * np.float32((D / preset.head_dim) ** 0.5)
    k, v = (x[:, :Tk, :Hkv] @ turn for x in (k, v))
    return tuple(np.ascontiguousarray(x, np.float32) for x in (q, k, v))


def _rotation(rng, rows: int, columns: int) -> np.ndarray:
    """Orthonormal rows (or columns, where they are fewer): it keeps dot products, or loses as few as it can."""
    if rows == columns:
        return np.eye(rows, dtype=np.float32)
    wide = np.linalg.qr(rng.standard_normal((max(rows, columns), max(rows, columns))))[0]
    return wide[:rows, :columns].astype(np.float32)
