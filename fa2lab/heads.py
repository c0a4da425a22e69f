"""What a head's weights say in numbers: how spread they are, and how far back they look."""

from __future__ import annotations

import numpy as np

from fa2lab.errors import ShapeError


def entropy(attn: np.ndarray) -> np.ndarray:
    """The entropy of each row of weights, H = -Σ p ln p, in nats: `(…, Tq, Tk)` → `(…, Tq)`, float64.

    From 0, where one key takes all, to ln n, where n keys share evenly; 0 for a row that sees no key. NaN stays NaN.
    """
    p = np.asarray(attn, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p == 0, 0.0, -p * np.log(p))
    return np.maximum(terms.sum(axis=-1), 0.0)


def most_entropy(seen: np.ndarray) -> np.ndarray:
    """The entropy of a row whose keys share evenly: ln n of the number of keys that it sees, 0 where that is 0."""
    return np.log(np.maximum(np.asarray(seen, np.float64), 1.0))


def distances(mask: np.ndarray, diagonal: int) -> np.ndarray:
    """How far behind a query a key stands, for every visible pair, least first: i + diagonal - j.

    0 is the query's own position; keys ahead of it, which no causal mask leaves, have negative distances.
    """
    rows, keys = np.nonzero(mask)
    return np.unique(rows + diagonal - keys)


def distance_profile(attn: np.ndarray, mask: np.ndarray, diagonal: int) -> np.ndarray:
    """The mean weight by `distances`: `(…, Tq, Tk)` → `(…, n)`, each over the rows that see a key so far away.

    mask: boolean `(Tq, Tk)`, True where a key is visible; diagonal: as of `Problem`. Raises `ShapeError` where the mask
    does not fit the weights.
    """
    attn = np.asarray(attn, np.float64)
    if attn.shape[-2:] != mask.shape:
        raise ShapeError(f"The mask must have the weights' last two axes {attn.shape[-2:]}; got {mask.shape}.")
    rows, keys = np.nonzero(mask)
    far, which = np.unique(rows + diagonal - keys, return_inverse=True)
    sums = np.zeros((*attn.shape[:-2], len(far)))
    np.add.at(np.moveaxis(sums, -1, 0), which, np.moveaxis(attn[..., rows, keys], -1, 0))
    return sums / np.bincount(which, minlength=len(far))


def even_profile(mask: np.ndarray, diagonal: int) -> np.ndarray:
    """The distance profile of a head that spreads its weight evenly over the keys that each row sees: `(n,)`."""
    seen = np.maximum(mask.sum(axis=-1, keepdims=True), 1)
    return distance_profile(mask / seen, mask, diagonal)
