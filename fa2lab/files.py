"""A user's own Q, K and V from a file: `.npz`, `.npy` or `.safetensors`, in the layout that the user names."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fa2lab.errors import ShapeError

# What the letters of a layout mean; every one of them becomes (B, T, H, D).
LAYOUTS = {"BTHD": 4, "BHTD": 4, "BTC": 3}
NAMES = ("q", "k", "v", "out")


@dataclass(frozen=True, eq=False)
class Arrays:
    """q `(B, Tq, H, D)`, k and v `(B, Tk, Hkv, D)`, and a file's `out` if it had one."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray | None = None

    def __iter__(self):
        """q, k, v: so that `fa.attention(*arrays)` reads well."""
        return iter((self.q, self.k, self.v))


def load(path: str | os.PathLike, *, layout: str = "BTHD", heads: int | None = None) -> Arrays:
    """q, k, v and, where it is there, out, brought to `(B, T, H, D)`.

    An `.npz` or `.safetensors` holds them by name, an `.npy` as one array with q, k and v along its first axis.
    `layout`: `"BTHD"`, `"BHTD"` (PyTorch's) or `"BTC"`, whose C columns are `heads` heads side by side; K and V may
    have fewer columns, and so fewer heads. Raises `FileNotFoundError`, `ValueError` for a file of another kind or an
    unknown layout, and `ShapeError` for a file that lacks an array or arrays that do not fit the layout.
    """
    path = Path(path)
    if layout not in LAYOUTS:
        raise ValueError(f"No layout is called {layout!r}; there are {', '.join(map(repr, LAYOUTS))}.")
    if layout == "BTC" and (isinstance(heads, bool) or not isinstance(heads, int | np.integer) or heads < 1):
        raise ValueError(f'layout="BTC" needs heads, the number of query heads in the C columns; got {heads!r}.')
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; expected an .npz, .npy or .safetensors with q, k and v.")
    readers = {".npz": _read_npz, ".npy": _read_npy, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path} is none of {', '.join(readers)}; write one by np.savez(path, q=q, k=k, v=v).")
    found = readers[path.suffix](path)
    missing = [name for name in "qkv" if name not in found]
    if missing:
        raise ShapeError(
            f"{path} lacks {', '.join(missing)}; it holds {', '.join(found) or 'nothing'}. "
            "Expected q (B, Tq, H, D), k and v (B, Tk, Hkv, D), and optionally out."
        )
    found = {name: _four_axes(name, found[name], layout) for name in NAMES if name in found}
    if layout == "BHTD":
        found = {name: x.transpose(0, 2, 1, 3) for name, x in found.items()}
    elif layout == "BTC":
        found = _split_columns(found, heads)
    return Arrays(found["q"], found["k"], found["v"], found.get("out"))


def _four_axes(name: str, x: np.ndarray, layout: str) -> np.ndarray:
    if x.ndim != LAYOUTS[layout]:
        fits = " or ".join(repr(other) for other, axes in LAYOUTS.items() if axes == x.ndim) or "no layout"
        raise ShapeError(
            f"{name} has shape {x.shape}; layout={layout!r} wants {LAYOUTS[layout]} axes. {x.ndim} axes fit {fits}."
        )
    return x


def _split_columns(found: dict[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    """(B, T, C) → (B, T, heads, D), with D from q's columns; K and V have as many heads as their columns hold."""
    columns = found["q"].shape[-1]
    if columns % heads:
        raise ShapeError(f"q has {columns} columns, which {heads} heads do not divide.")
    D = columns // heads
    for name, x in found.items():
        if D == 0 or x.shape[-1] % D:
            raise ShapeError(f"{name} has {x.shape[-1]} columns, no multiple of q's {columns}/{heads} = {D}.")
    return {name: x.reshape(*x.shape[:2], x.shape[-1] // D, D) for name, x in found.items()}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        with file:
            return {name: file[name] if name in NAMES else np.empty(0) for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(
            f"{path} does not read as an .npz of plain arrays ({error}); write one by np.savez(path, q=q, k=k, v=v)."
        ) from error


def _read_npy(path: Path) -> dict[str, np.ndarray]:
    try:
        stacked = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} does not read as an .npy of plain numbers ({error}).") from error
    if not isinstance(stacked, np.ndarray) or stacked.ndim < 1 or len(stacked) != 3:
        shape = getattr(stacked, "shape", "an .npz's content")
        raise ShapeError(f"{path} holds {shape}; expected q, k and v along the first axis, np.save(path, [q, k, v]).")
    return dict(zip("qkv", stacked, strict=True))


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) if name in NAMES else np.empty(0) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError) as error:
        raise ValueError(f"{path} does not read as safetensors of float16, float32 or float64 ({error}).") from error
