"""A parity run as a report to keep: plain numbers and words in JSON, and the one way to put bytes into a file."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fa2lab.parity import Comparison
from fa2lab.results import Gradients, Result

SCHEMA = 1


def report(
    runs: Mapping[str, tuple[Result | Gradients, Comparison]],
    *,
    inputs: Mapping[str, Any],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """What was computed, on what, how far it is from float64, and what it took; nothing but JSON's own types.

    runs: by name, say "forward", a result and its comparison. inputs: how the input arrays were made. seconds: wall
    clock by name of a run. NaN and the infinities, which JSON has no numbers for, are the strings "nan", "inf", "-inf".
    """
    first = next(iter(runs.values()))[0]
    found = {name: _run(result, comparison, seconds.get(name)) for name, (result, comparison) in runs.items()}
    return _plain(
        {
            "report": "fa2lab parity",
            "schema": SCHEMA,
            "ok": all(comparison.ok for _, comparison in runs.values()),
            "versions": _versions(),
            "inputs": dict(inputs),
            "problem": asdict(first.problem),
            "runs": found,
        }
    )


def to_json(found: Mapping[str, Any]) -> bytes:
    """The report as UTF-8 text of strict JSON."""
    return (json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write(path: str | Path, content: bytes) -> Path:
    """Put the bytes into a file and return its absolute path. Raises `OSError` that says in one sentence why not."""
    path = Path(path).expanduser()
    try:
        path.write_bytes(content)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}.") from error
    return path.resolve()


def _run(result: Result | Gradients, comparison: Comparison, seconds: float | None) -> dict[str, Any]:
    plan = result.plan
    return {
        "kernel": result.kernel,
        "adapter": result.adapter,
        "against": comparison.truth,
        "ok": comparison.ok,
        "fields": [asdict(row) | {"ok": row.ok, "ratio": row.ratio, "where": row.where} for row in comparison.rows],
        "wall_clock_seconds": seconds,
        "device_bytes": result.device_bytes,
        "plan": plan
        and {
            "tile": [plan.block_q, plan.block_k] if plan.kernel.tiled else None,
            "workgroup_bytes": plan.workgroup_bytes,
            "invocations": plan.invocations,
            "launches": len(plan.chunks),
            "device_bytes": plan.device_bytes,
            "buffers": plan.buffer_bytes(),
            "limits": asdict(plan.limits),
        },
    }


def _plain(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(name): _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


def _versions() -> dict[str, str | None]:
    from fa2lab import __version__  # of the code that runs, installed or not

    found: dict[str, str | None] = {"fa2lab": __version__, "python": platform.python_version()}
    for package in ("numpy", "wgpu", "wgpudawn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
