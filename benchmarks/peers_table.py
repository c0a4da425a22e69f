"""What a run of peers.py comes to: the table, the aims, and the place between two markers where the README has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BEGIN, END = "<!-- peers:begin -->", "<!-- peers:end -->"
OURS, CHECKED = "fa2lab, auto", "fa2lab, auto, with shader checks"
ORIGINAL_CHECKED = "fa2lab, original fa2_forward, with shader checks"
EFFICIENT, ONNX = "PyTorch SDPA f32, memory-efficient", "ONNX Runtime WebGPU f32"


@dataclass(frozen=True)
class Aim:
    """A ratio that is aimed at, and what was measured; None where a side of it was not. most: it may be no larger."""

    what: str
    wanted: float
    got: float | None
    most: bool = False

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.got is None:
            return "not measured"
        return "reached" if (self.got <= self.wanted if self.most else self.got >= self.wanted) else "missed"

    @property
    def bound(self) -> str:
        """The aim as a bound."""
        return f"{'≤' if self.most else '≥'} {self.wanted:g}"


def _rate(found: Sequence, subject: str, T: int, D: int, direction: str = "forward") -> float | None:
    for r in found:
        c = r.case
        if (r.subject, c.T, c.D, c.direction, c.causal) == (subject, T, D, direction, True):
            return r.tflops
    return None


def aims(found: Sequence, product: float | None, held: dict[str, int] | None) -> list[Aim]:
    """The ratios within one run. product: the ceiling of float32 arithmetic. held: what peers.py's `memory` counted."""

    def over(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    at = (4096, 64)
    ours, checked = (_rate(found, name, *at) for name in (OURS, CHECKED))
    both = [_rate(found, name, *at, "forward+backward") for name in (OURS, EFFICIENT)]
    wide = [_rate(found, name, 2048, 128) for name in (OURS, EFFICIENT)]
    # Floats that a row of a head holds beside inputs, outputs and the copy read back: L and delta, and no matrix.
    beside = held and (held["peak"] - held["inputs and outputs"] - held["readback copy"]) / held["B·H·T"]
    return [
        Aim("f32 forward ÷ PyTorch f32 memory-efficient, T=4096 D=64", 1.1, over(ours, _rate(found, EFFICIENT, *at))),
        Aim("the same, T=2048 D=128", 0.8, over(*wide)),
        Aim("f32 forward + backward ÷ PyTorch's, T=4096 D=64", 0.8, over(*both)),
        Aim("f32 forward ÷ ONNX Runtime WebGPU f32, T=4096 D=64", 3.5, over(ours, _rate(found, ONNX, *at))),
        Aim("f32 forward ÷ float32 matrix product", 0.7, over(ours, product and product / 1e12)),
        Aim("with shader checks ÷ without, T=4096 D=64", 0.9, over(checked, ours)),
        Aim(
            "best kernel ÷ original as wgpu-py runs it, T=4096 D=64",
            130.0,
            over(ours, _rate(found, ORIGINAL_CHECKED, *at)),
        ),
        Aim("memory beside inputs, outputs and one readback ÷ B·H·T floats, T=65536", 4.0, beside, most=True),
    ]


def plain(found: Sequence[Aim]) -> str:
    """The aims as lines."""
    width = max(len(aim.what) for aim in found)
    got = ["-" if aim.got is None else f"{aim.got:.2f}" for aim in found]
    return "\n".join(
        f"{aim.what:<{width}}  aim {aim.bound:>6}  got {number:>8}  {aim.verdict}"
        for aim, number in zip(found, got, strict=True)
    )


def markdown(found: Sequence, reached: Sequence[Aim], made: dict, roof, theirs: float | None) -> str:
    """The README's part: who, when and with what; TFLOP/s of everyone, then the aims."""
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    first = found[0].case if found else None
    lines = [
        f"{made['device']}, {made['date']}; {versions}. Causal, B={first.B} H={first.H}, TFLOP/s" if first else "",
        "(4·B·H·T²·D, halved for the mask, 3.5 times that with the backward pass; medians, everyone in turn after",
        "warming up; written by `benchmarks/peers.py`).",
        "",
    ]
    columns = list(dict.fromkeys((r.case.T, r.case.D, r.case.causal) for r in found))
    lines.append("| what | " + " | ".join(_column(*column) for column in columns) + " |")
    lines.append("|---|" + "---|" * len(columns))
    for subject, way in dict.fromkeys((r.subject, r.case.direction) for r in found):
        at = {(r.case.T, r.case.D, r.case.causal): r for r in found if (r.subject, r.case.direction) == (subject, way)}
        name = subject if way == "forward" else f"{subject}: {way.replace('+', ' + ')}"
        lines.append(f"| {name} | " + " | ".join(_cell(at.get(column)) for column in columns) + " |")
    if roof:
        lines.append(
            _whole(f"f32 matrix product in WGSL, N={roof.product_side}", roof.product_flops_per_second, columns)
        )
    if theirs:
        lines.append(_whole("f32 matrix product of PyTorch, N=8192", theirs, columns))
    lines += ["", "| aim | wanted | measured | |", "|---|---|---|---|"]
    for aim in reached:
        got = "–" if aim.got is None else f"{aim.got:.2f}"
        lines.append(f"| {aim.what} | {aim.bound} | {got} | {aim.verdict} |")
    return "\n".join(lines)


def _column(T: int, D: int, causal: bool) -> str:
    return f"T={T} D={D}" + ("" if causal else ", no mask")


def _cell(result) -> str:
    if result is None:
        return "–"
    if result.seconds is None:
        return "not installed" if "not installed" in result.reason else "–"
    return f"{result.tflops:.1f}" if result.tflops >= 1 else f"{result.tflops:.2g}"


def _whole(name: str, flops_per_second: float, columns: Sequence) -> str:
    return f"| {name} | " + " | ".join([f"{flops_per_second / 1e12:.1f}", *[""] * (len(columns) - 1)]) + " |"


def record(found: Sequence, reached: Sequence[Aim], made: dict, roof, theirs: float | None, held: dict | None) -> dict:
    """Everything, for JSON."""
    return made | {
        "results": [asdict(r) | {"tflops": r.tflops} for r in found],
        "aims": [asdict(aim) | {"verdict": aim.verdict} for aim in reached],
        "ceilings": roof and asdict(roof),
        "torch_product_flops_per_second": theirs,
        "memory": held,
    }


def check(path: str | Path) -> None:
    """Raises `ValueError` where the file has not both markers, once each and in order."""
    text = Path(path).read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} needs the lines {BEGIN} and {END}, once each, to be written between.")


def write(path: str | Path, table: str) -> None:
    """Put the table between the markers, in place of what stood there."""
    check(path)
    text = Path(path).read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    Path(path).write_text(f"{before}\n{table}\n{after}", encoding="utf-8")
