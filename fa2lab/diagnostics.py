"""What a WGSL compiler said, told in the kernel's own files: file, line, the line's text and a caret."""

from __future__ import annotations

import re

from fa2lab.errors import KernelError
from fa2lab.source import Source

# naga: "Shader 'x' parsing error: MESSAGE\n  ┌─ wgsl:4:15"; validation errors nest their causes, the place comes last.
_NAGA_PLACE = re.compile(r"┌─ (?:wgsl|[\w.]*):(\d+):(\d+)")
_NAGA_MESSAGE = re.compile(r"(?:parsing|validation) error: (.+)|Shader validation error: (.+)")
# Tint: ":4:15 error: MESSAGE"
_TINT = re.compile(r":(\d+):(\d+) error: (.+)")


def kernel_error(source: Source, report: str) -> KernelError:
    """The compiler's report on `source` as a `KernelError` that points into the kernel's files."""
    message, line, column = _read(report)
    if line is None:
        return KernelError(f"{source.entry}.wgsl does not compile: {message}")
    column = max(1, column - source.column_shift(line))
    file, line, text = source.locate(line)
    caret = " " * (column - 1) + "^"
    return KernelError(f"{file}:{line}:{column}: {message}\n  {text}\n  {caret}")


def _read(report: str) -> tuple[str, int | None, int]:
    if tint := _TINT.search(report):
        return tint[3], int(tint[1]), int(tint[2])
    message = _NAGA_MESSAGE.search(report)
    said = next(filter(None, message.groups())) if message else " ".join(report.split())
    if place := _NAGA_PLACE.search(report):
        # naga's note beside the caret says more than its headline where it validates
        note = re.search(r"\^+ (.+)", report)
        if note and note[1] not in said:
            said = f"{said} ({note[1]})"
        return said, int(place[1]), int(place[2])
    return said, None, 0
