"""tune(): which register tiles are fastest on this device, measured anew and kept in the user's cache folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np

from fa2lab.engine import default_device
from fa2lab.errors import LimitError
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel, Pass
from fa2lab.kernels import backward_kernels, kernels
from fa2lab.launch import resident
from fa2lab.plan import plan
from fa2lab.problem import Problem
from fa2lab.tiles import Tile, candidates
from fa2lab.timing import settle

Tuned = Mapping[tuple[str, int], Tile]  # by kernel file and head dimension


def folder() -> Path:
    """Where results are kept: `fa2lab` in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("fa2lab")


def tune(
    device: Device | None = None,
    *,
    head_dims: tuple[int, ...] = (32, 64, 128, 256),
    B: int = 2,
    H: int = 8,
    T: int = 1024,
    patience: float = 0.3,
    keep: bool = True,
) -> dict[tuple[str, int], Tile]:
    """The fastest register tile of each tiled kernel file at each head dimension, by causal runs on this device.

    B, H, T: the problem that is timed; smaller ones suit software drivers. patience: seconds for each candidate, half
    of which warm the device up. keep: write the result to `folder()`, where later plans on the same adapter, driver and
    limits find it; delete the file to go back to the table that comes with the library.
    """
    device = device or default_device()
    found = {}
    for head_dim in head_dims:
        problem = Problem(B, T, T, H, H, head_dim, True, "bottom-right", head_dim**-0.5)
        for kernel, stage in _tiled_passes():
            times = {}
            for tile in candidates(stage.rows_are, head_dim, reduces="row_*" in stage.snippets):
                seconds = _time(kernel, stage, problem, device, tile, patience)
                if seconds is not None:
                    times[tile] = seconds
            if times:
                found[stage.file, head_dim] = min(times, key=times.get)
    if keep:
        path = _path(device)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({f"{file} {dim}": asdict(tile) for (file, dim), tile in found.items()}, indent=1))
        tuned_for.cache_clear()
    return found


def tuned(device: Device | None) -> Tuned:
    """What `tune` kept for this device; nothing where it never ran."""
    return tuned_for(_path(device)) if device else {}


@cache
def tuned_for(path: Path) -> Tuned:
    """The content of one kept file. A file that is missing or damaged holds nothing."""
    try:
        kept = json.loads(path.read_text())
        return {(file, int(dim)): Tile(**kept[key]) for key in kept for file, dim in [key.split()]}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _path(device: Device) -> Path:
    limits = device.limits
    who = f"{device.adapter.name} {device.adapter.driver} {device.adapter.compiler}"
    plain = "".join(letter if letter.isalnum() else "-" for letter in who)
    return folder() / f"tiles-{plain}-{limits.workgroup_bytes}-{limits.invocations}-{limits.subgroup_size}.json"


def _tiled_passes() -> list[tuple[Kernel, Pass]]:
    chosen = (kernels()["fa2_forward_tiled"], backward_kernels()["fa2_tiled"])
    return [(kernel, stage) for kernel in chosen for stage in kernel.passes if stage.rows_are]


def _time(kernel: Kernel, stage: Pass, problem: Problem, device: Device, tile: Tile, patience: float) -> float | None:
    """Seconds of one pass; None where the tile does not fit the device."""
    tables = kernels() | backward_kernels()
    try:
        planned = plan(problem, device.limits, kernel, table=tables, tile={stage.file: tile})
    except LimitError:
        return None
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(planned.shape(name)).astype(np.float32) for name in kernel.inputs}
    at = kernel.passes.index(stage)
    with device.lock, resident(planned, inputs, device) as dispatches:
        seconds, _ = settle(lambda n: device.time([dispatches[at]], n), batches=3, patience=patience)
    return float(np.median(seconds))
