"""`python -m fa2lab bench`: kernels timed at the shapes that are asked for, as a table and as JSON."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from tqdm import tqdm

from fa2lab import bench, bench_record
from fa2lab.ceilings import Ceilings, ceilings
from fa2lab.errors import KernelError, LimitError, NoAdapterError, ParityError
from fa2lab.gpu import Device

PATIENCE, QUICK_PATIENCE = 5.0, 0.2  # seconds that a measurement waits for the clock to settle
# What is measured where nothing else is asked for: (B, H, lengths), on a GPU and on a software driver.
SHAPES = {"gpu": (4, 16, (512, 1024, 2048, 4096)), "cpu": (1, 2, (64, 128, 256))}
_HEAD = ("kernel", "T", "D", "tile", "ms", "spread", "TFLOP/s", "of product", "GB/s", "of copy", "first call")


def add(verbs) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser("bench", help="time kernels, each proved right before; beside a copy and a product")
    parser.set_defaults(run=run)
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="kernels of the direction, or auto (all that fit)")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--backward", action="store_true", help="time the backward pass in place of the forward")
    way.add_argument("--grad", action="store_true", help="time forward and backward together")
    parser.add_argument("--T", type=int, nargs="+", help="lengths (512 to 4096; 64 to 256 on a software driver)")
    parser.add_argument("--Tk", type=int, help="keys (T)")
    parser.add_argument("--D", type=int, nargs="+", default=[64], help="head dimensions (64)")
    parser.add_argument("--B", type=int, help="batches (4; 1 on a software driver)")
    parser.add_argument("--H", type=int, help="query heads (16; 2 on a software driver)")
    parser.add_argument("--Hkv", type=int, help="key and value heads, a divisor of H (H)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="mask the future (on)")
    parser.add_argument("--block-q", type=int, metavar="BR", help="query rows of a tile")
    parser.add_argument("--block-k", type=int, metavar="BC", help="keys of a tile")
    parser.add_argument("--adapter", help="a part of its name")
    parser.add_argument("--compiler", choices=("naga", "tint"), default="naga")
    parser.add_argument("--limits", choices=("adapter", "webgpu"), default="adapter")
    parser.add_argument("--shader-checks", action="store_true", help="compile with the checks that a browser inserts")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well")
    parser.add_argument("--quick", action="store_true", help="do not wait for the clock, nor time first calls")


@dataclass
class Measured:
    """What came of the shapes that were asked for."""

    rows: list[bench.Row] = field(default_factory=list)
    refused: list[dict[str, object]] = field(default_factory=list)
    wrong: bool = False


def run(a: argparse.Namespace) -> int:
    """Measure, print and write; the exit status is 1 where a kernel turned out wrong."""
    direction = "backward" if a.backward else "forward+backward" if a.grad else "forward"
    names = _kernels(a.kernel, direction, splitting=a.Tk is not None)
    if a.json and not Path(a.json).absolute().parent.is_dir():
        raise ValueError(f"There is no folder {Path(a.json).absolute().parent} to write {a.json} into.")
    for name in ("T", "Tk", "D", "B", "H", "Hkv"):
        _check_size(name, getattr(a, name))
    if a.adapter == "numpy":
        raise NoAdapterError("The bench times kernels, so it needs an adapter.")
    device = Device(a.adapter, compiler=a.compiler, limits=a.limits, shader_checks=a.shader_checks)
    B, H, lengths = SHAPES["cpu" if device.adapter.type == "CPU" else "gpu"]
    sizes = {"B": a.B or B, "H": a.H or H} | {name: n for name, n in (("Hkv", a.Hkv), ("Tk", a.Tk)) if n}
    shapes = [dict(sizes, T=T, D=D) for D, T in product(a.D, a.T or lengths)]
    roof, found = _measure(a, device, direction, names, shapes)
    print("\n".join(_lines(device, roof, found, f"{'causal' if a.causal else 'full'} {direction}")))
    if a.json:
        bench_record.save(a.json, device, found.rows, roof, refused=found.refused)
    return int(found.wrong)


def _kernels(asked: list[str] | None, direction: bench.Direction, *, splitting: bool) -> list[str]:
    """Names that there are. Kernels that split the keys are for few queries: without being asked for, with Tk only."""
    table = bench.table(direction)
    for name in asked or ():
        if name != "auto" and name not in table:
            raise KernelError(f"No {direction} kernel is called {name!r}; there are 'auto', {', '.join(table)}.")
    return list(dict.fromkeys(asked or [name for name, k in table.items() if splitting or not k.splits]))


def _check_size(name: str, sizes: int | list[int] | None) -> None:
    for size in sizes if isinstance(sizes, list) else [sizes]:
        if size is not None and size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {size}.")


def _measure(a, device: Device, direction: bench.Direction, names: list[str], shapes: list[dict]):
    """The ceilings, and the rows; what cannot run is told on stderr and kept, and does not end the rest."""
    patience = QUICK_PATIENCE if a.quick else PATIENCE
    options = dict(direction=direction, causal=a.causal, block_q=a.block_q, block_k=a.block_k)
    found = Measured()
    with tqdm(total=1 + len(shapes) * len(names), leave=False, unit="row") as bar:
        bar.set_description("ceilings")
        roof = ceilings(device, patience=min(patience, 2.0))
        bar.update()
        for shape, name in product(shapes, names):
            bar.set_description(f"{name} T={shape['T']} D={shape['D']}")
            try:
                found.rows.append(
                    bench.measure(device, name, first_call=not a.quick, patience=patience, **options, **shape)
                )
            except (LimitError, KernelError, ParityError) as error:
                found.refused.append(dict(shape, kernel=name, reason=str(error)))
                found.wrong = found.wrong or isinstance(error, ParityError)
                bar.write(f"fa2lab: {name} T={shape['T']} D={shape['D']} is not timed. {error}", file=sys.stderr)
            bar.update()
    return roof, found


def _lines(device: Device, roof: Ceilings, found: Measured, what: str) -> list[str]:
    checks = "with shader checks" if device.shader_checks else "without shader checks"
    lines = [f"{device.adapter}, {device.adapter.driver}", f"{what}, f32, {checks}; by {device.clock}", str(roof)]
    if found.rows:
        row = found.rows[0]
        lines += [f"B={row.B} H={row.H}" + (f" over Hkv={row.Hkv}" if row.Hkv != row.H else ""), ""]
        lines += aligned([_HEAD, *(_cells(row, roof) for row in found.rows)])
    if any(not row.timing.settled for row in found.rows):
        lines += ["", "~ the clock did not settle"]
    return lines


def _cells(row: bench.Row, roof: Ceilings) -> tuple[str, ...]:
    spread = (row.timing.high - row.timing.low) / row.timing.seconds
    return (
        row.kernel,
        f"{row.T}" if row.T == row.Tk else f"{row.T}×{row.Tk}",
        f"{row.D}",
        _tiles(row.tiles),
        f"{'' if row.timing.settled else '~'}{row.milliseconds:.3f}",
        f"{spread:.0%}",
        f"{row.tflops:.3g}",
        f"{row.of_product(roof):.0%}",
        f"{row.gbps:,.0f}" if row.gbps >= 10 else f"{row.gbps:.2g}",
        f"{row.of_copy(roof):.0%}",
        "-" if row.first is None else f"{row.first_call_seconds:.2f} s",
    )


def _tiles(tiles: tuple[str, ...]) -> str:
    """The tiles of all passes; one where they are the same."""
    return " ".join(dict.fromkeys(tiles)) or "-"


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines, the first column to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
