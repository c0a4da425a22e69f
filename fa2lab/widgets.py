"""Sliders over the functions of fa2lab. No mathematics and no drawing: each view has a plain function under it.

Each view lives in a file of its own, `widgets_….py`; here stand their names.
"""

from __future__ import annotations

from fa2lab.widgets_failures import FAILURE_SIZE, failure, known_failures
from fa2lab.widgets_heads import GALLERY_SIZE, Gallery, gallery, head_gallery
from fa2lab.widgets_merge import MERGE_SIZE, Merges, merge_tree, merges
from fa2lab.widgets_parity import BENCH_SIZE, Bench, bench, parity
from fa2lab.widgets_steps import STEPS_SIZE, Steps, step_through, steps
from fa2lab.widgets_tiles import WALK_SIZE, Walk, tiles, walk

__all__ = [
    "BENCH_SIZE",
    "FAILURE_SIZE",
    "GALLERY_SIZE",
    "MERGE_SIZE",
    "STEPS_SIZE",
    "WALK_SIZE",
    "Bench",
    "Gallery",
    "Merges",
    "Steps",
    "Walk",
    "bench",
    "failure",
    "gallery",
    "head_gallery",
    "known_failures",
    "merge_tree",
    "merges",
    "parity",
    "step_through",
    "steps",
    "tiles",
    "walk",
]
