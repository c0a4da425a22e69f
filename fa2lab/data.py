"""Inputs by the name of their pattern: synthetic, the bytes of a text, or a trained model's own Q, K and V on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fa2lab.errors import LimitError
from fa2lab.files import Arrays, load
from fa2lab.limits import physical_memory

PATTERNS = {
    "random": "independent normal numbers: attention without structure",
    "text": "the bytes of a text through a fixed random projection: equal bytes attend to each other",
    "model": "what the heads of a small trained GPT make of a text: Q, K and V as attention gets them",
    "needle": "one key answers every query that may see it, the others whisper",
    "equal": "all keys alike: every row is the plain average of the values it sees",
    "band": "each query's best keys are its near past",
    "huge": "scores in the hundreds: softmax as a choice, and a test of the running maximum",
}
SAMPLE_TEXT = Path(__file__).parent / "wgsl" / "fa2_forward.wgsl"


def make(
    pattern: str = "random",
    *,
    B: int = 1,
    T: int = 64,
    H: int = 2,
    D: int = 32,
    Tk: int | None = None,
    Hkv: int | None = None,
    seed: int = 0,
    text: str | bytes | None = None,
) -> Arrays:
    """Float32 inputs of a named pattern (`PATTERNS`), the same for the same seed.

    `text` is what the patterns "text" and "model" read, by default the project's own `fa2_forward.wgsl`, over again
    where it is short. Raises `ValueError` for an unknown pattern, a size below 1 or more heads than the model has, and
    `LimitError` for sizes that memory cannot hold.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"No input pattern is called {pattern!r}; there are {', '.join(map(repr, PATTERNS))}.")
    Tk, Hkv = T if Tk is None else Tk, H if Hkv is None else Hkv
    sizes = {"B": B, "T": T, "Tk": Tk, "H": H, "Hkv": Hkv, "D": D}
    for name, n in sizes.items():
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {n!r}.")
    _check_memory(4 * B * D * (2 * T * H + 2 * Tk * Hkv), sizes)
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, T, H, D), np.float32)
    k = rng.standard_normal((B, Tk, Hkv, D), np.float32)
    v = rng.standard_normal((B, Tk, Hkv, D), np.float32)
    if pattern == "model":
        from fa2lab.trained import heads_on  # the model brings the engines along, which other inputs need not

        q, k, v = heads_on(_tokens(text, B, max(T, Tk)), rng, T, Tk, H, Hkv, D)
    elif pattern == "text":
        q, k, v = _text(rng, text, B, T, Tk, H, Hkv, D)
    elif pattern == "needle":
        needle = rng.standard_normal(D).astype(np.float32)
        needle *= np.float32(3 * D**0.25 / max(np.linalg.norm(needle), 1e-6))
        q, k = 0.3 * q + needle, 0.3 * k
        k[:, Tk // 3] = needle
    elif pattern == "equal":
        k = np.broadcast_to(k[:, :1], k.shape).copy()
    elif pattern == "band":
        q, k = _places(T, H, D, Tk - T), _places(Tk, Hkv, D, 0)
        q, k = (np.broadcast_to(x, (B, *x.shape)).copy() for x in (q, k))
    elif pattern == "huge":
        q, k = 12 * q, 12 * k
    return Arrays(q, k, v)


def _text(rng, text, B, T, Tk, H, Hkv, D):
    """Each byte value gets a vector per head; position adds a little, so that repeats nearby win over far ones."""
    tokens = _tokens(text, B, max(T, Tk))
    keys = rng.standard_normal((256, Hkv, D)).astype(np.float32)
    values = rng.standard_normal((256, Hkv, D)).astype(np.float32)
    queries = np.repeat(keys, H // Hkv, axis=1) if H % Hkv == 0 else rng.standard_normal((256, H, D)).astype(np.float32)
    near = np.linspace(0, 1, H, dtype=np.float32)[:, None]  # from none to much: heads differ in it
    q = 1.5 * queries[tokens[:, :T]] + near * _places(T, H, D, Tk - T)
    k = keys[tokens[:, :Tk]] + 0.5 * _places(Tk, Hkv, D, 0)
    return q, k, values[tokens[:, :Tk]]


def _tokens(text: str | bytes | None, B: int, length: int) -> np.ndarray:
    """The text's first bytes, `(B, length)`, over again where it is shorter."""
    raw = text.encode() if isinstance(text, str) else text
    raw = SAMPLE_TEXT.read_bytes() if raw is None else raw
    if not raw:
        raise ValueError("The text is empty; one byte is the least to attend to.")
    return np.frombuffer((raw * (B * length // len(raw) + 1))[: B * length], np.uint8).reshape(B, length)


def _places(T: int, H: int, D: int, offset: int) -> np.ndarray:
    """Sinusoids of the position, `(T, H, D)`: their dot product falls off with distance, faster in later heads."""
    pairs = np.arange((D + 1) // 2)
    angle = (np.arange(T) + offset)[:, None, None] * 0.6**pairs * (1 + np.arange(H))[:, None] / H
    waves = np.concatenate([np.sin(angle), np.cos(angle)], axis=-1)[..., :D]
    return (2.5 * waves).astype(np.float32)


def _check_memory(need: int, sizes: dict[str, int]) -> None:
    room = physical_memory()
    if room is not None and need > room // 2:
        said = " ".join(f"{name}={n:,}" for name, n in sizes.items())
        raise LimitError(
            f"{said} makes arrays of {need:,} B; this machine has {room:,} B. Smaller T, B or H would fit."
        )


__all__ = ["PATTERNS", "Arrays", "load", "make"]
