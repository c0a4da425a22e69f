"""Measurements as they are kept: JSON with the rows, the ceilings, and where and when they were made."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path

from fa2lab.bench import Row
from fa2lab.ceilings import Ceilings
from fa2lab.gpu import Device

H200 = Path(__file__).parent / "records" / "h200.json"


def environment(device: Device) -> dict[str, object]:
    """Where and when a measurement is made: device, driver, date and versions."""
    from fa2lab import __version__  # of the whole house, which need not be loaded before

    adapter = device.adapter
    return {
        "device": adapter.name,
        "driver": adapter.driver,
        "backend": adapter.backend,
        "compiler": adapter.compiler,
        "subgroup_size": device.subgroup_size,
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "fa2lab": __version__,
            **{name: v for name in ("wgpu", "wgpudawn", "numpy") if (v := version(name))},
        },
        "system": f"{platform.system()} {platform.machine()}",
    }


def version(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def save(
    path: str | Path,
    device: Device,
    rows: Sequence[Row],
    roof: Ceilings,
    *,
    refused: Sequence[dict[str, object]] = (),
) -> None:
    """Write rows and ceilings. refused: what was asked for and not measured, each with its `reason`."""
    record = environment(device) | {
        "ceilings": asdict(roof),
        "rows": [row.record(roof) for row in rows],
        "refused": list(refused),
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load(path: str | Path = H200) -> dict[str, object] | None:
    """A record that `save` wrote, by default the one of an NVIDIA H200 that comes along; None where there is none."""
    path = Path(path)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
