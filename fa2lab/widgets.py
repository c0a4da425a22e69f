"""Sliders over the functions of fa2lab. No mathematics and no drawing: each view has a plain function under it.

Each view lives in a file of its own, `widgets_….py`; here stand their names.
"""

from __future__ import annotations

from fa2lab.widgets_failures import FAILURE_SIZE, failure, known_failures
from fa2lab.widgets_heads import GALLERY_SIZE, Gallery, gallery, head_gallery
from fa2lab.widgets_parity import BENCH_SIZE, Bench, bench, parity
from fa2lab.widgets_tiles import WALK_SIZE, Walk, tiles, walk

__all__ = [
    "BENCH_SIZE",
    "FAILURE_SIZE",
    "GALLERY_SIZE",
    "WALK_SIZE",
    "Bench",
    "Gallery",
    "Walk",
    "bench",
    "failure",
    "gallery",
    "head_gallery",
    "known_failures",
    "parity",
    "tiles",
    "walk",
]
