"""Kernel text + shared snippets + constants → one WGSL string, and the way back from a line of it to its file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

Dialect = Literal["naga", "tint"]
WGSL = Path(__file__).parent / "wgsl"


@dataclass(frozen=True)
class Source:
    """WGSL as the device gets it: enable directives + kernel + snippets + a block of constants.

    The constants come last and the directives share the kernel's first line, so a line number that a compiler names
    below the kernel's length is the kernel file's own.
    """

    entry: str
    parts: tuple[tuple[str, str], ...]  # (file name, text), in order
    enable: str = ""

    @cached_property
    def text(self) -> str:
        """The one string that is compiled."""
        return self.enable + "".join(text for _, text in self.parts)

    def locate(self, line: int) -> tuple[str, int, str]:
        """File, line in it and the text of that line, for a 1-based line of `text`; past its end, the end."""
        for name, text in self.parts:
            lines = text.splitlines()
            if line <= len(lines):
                return name, line, lines[line - 1]
            line -= len(lines)
        name, text = self.parts[-1]
        return name, len(text.splitlines()), ""

    def column_shift(self, line: int) -> int:
        """By how much the directives moved the columns of a line of `text`."""
        return len(self.enable) if line == 1 else 0


def link(
    kernel: str,
    snippets: tuple[str, ...] = (),
    constants: dict[str, int | float | bool] | None = None,
    *,
    features: tuple[str, ...] = (),
    dialect: Dialect = "naga",
    text: str | None = None,
) -> Source:
    """The source of `wgsl/{kernel}.wgsl`, linked with `wgsl/shared/{snippet}.wgsl` and a block of constants.

    `text` replaces the kernel file's text (a user's edit, a breakage in a test). `features` are WGSL extensions:
    Tint, as in browsers, demands `enable` for each; naga refuses `enable subgroups;` and has subgroups on anyway.
    """
    parts = [(f"{kernel}.wgsl", read(kernel) if text is None else _whole_lines(text))]
    parts += [(f"shared/{name}.wgsl", read(f"shared/{name}")) for name in snippets]
    parts.append(("constants", "".join(_constant(*item) for item in (constants or {}).items())))
    wanted = [f for f in features if not (dialect == "naga" and f == "subgroups")]
    return Source(kernel, tuple(parts), "".join(f"enable {feature}; " for feature in wanted))


@cache
def read(name: str) -> str:
    """The text of `wgsl/{name}.wgsl`."""
    return _whole_lines((WGSL / f"{name}.wgsl").read_text(encoding="utf-8"))


def _whole_lines(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _constant(name: str, value: int | float | bool) -> str:
    if isinstance(value, bool):
        return f"const {name}: bool = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"const {name}: u32 = {value}u;\n"
    return f"const {name}: f32 = {value!r};\n"
