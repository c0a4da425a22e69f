"""Kernel text + shared snippets + constants → one WGSL string, and the way back from a line of it to its file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from fa2lab.unroll import known_constants, unroll

Dialect = Literal["naga", "tint"]
WGSL = Path(__file__).parent / "wgsl"


@dataclass(frozen=True)
class Part:
    """One file's share of a source. `written`: its text with marked loops unrolled; `lines` leads back to the file."""

    name: str
    text: str
    written: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """WGSL as the device gets it: enable directives + kernel + snippets + a block of constants.

    The constants come last and the directives share the kernel's first line, so a line number that a compiler names
    is the kernel file's own, unless loops were unrolled: `locate` knows the way back. `trusted` says that every line is
    the project's own.
    """

    entry: str
    parts: tuple[Part, ...]
    enable: str = ""
    trusted: bool = False

    @cached_property
    def text(self) -> str:
        """The one string that is compiled."""
        return self.enable + "".join(part.written for part in self.parts)

    def locate(self, line: int) -> tuple[str, int, str]:
        """File, line in it and the text of that line, for a 1-based line of `text`; past its end, the end."""
        for part in self.parts:
            if line <= len(part.lines):
                number = part.lines[line - 1]
                return part.name, number, part.text.splitlines()[number - 1]
            line -= len(part.lines)
        last = self.parts[-1]
        return last.name, len(last.text.splitlines()), ""

    def column_shift(self, line: int) -> int:
        """By how much the directives moved the columns of a line of `text`."""
        return len(self.enable) if line == 1 else 0


def link(
    kernel: str,
    snippets: tuple[str, ...] = (),
    constants: dict[str, int | float | bool | str] | None = None,
    *,
    features: tuple[str, ...] = (),
    dialect: Dialect = "naga",
    text: str | None = None,
    unrolled: bool = False,
) -> Source:
    """The source of `wgsl/{kernel}.wgsl`, linked with `wgsl/shared/{snippet}.wgsl` and a block of constants.

    A constant that is a string becomes an alias: `{"Stored": "f32"}` is `alias Stored = f32;`.
    `text` replaces the kernel file's text (a user's edit, a breakage in a test). `features` are WGSL extensions:
    Tint, as in browsers, demands `enable` for each; naga refuses `enable subgroups;` and has subgroups on anyway.
    `unrolled` writes out the loops that are marked for it.
    """
    constants = constants or {}
    files = [(f"{kernel}.wgsl", read(kernel) if text is None else _whole_lines(text))]
    files += [(f"shared/{name}.wgsl", read(f"shared/{name}")) for name in snippets]
    files.append(("constants", "".join(_constant(*item) for item in constants.items())))
    parts = []
    known = known_constants((whole for _, whole in files), constants) if unrolled else {}
    for name, whole in files:
        same = whole, tuple(range(1, len(whole.splitlines()) + 1))
        parts.append(Part(name, whole, *(unroll(whole, known) if unrolled else same)))
    wanted = [f for f in features if not (dialect == "naga" and f == "subgroups")]
    return Source(kernel, tuple(parts), "".join(f"enable {feature}; " for feature in wanted), trusted=text is None)


@cache
def read(name: str) -> str:
    """The text of `wgsl/{name}.wgsl`."""
    return _whole_lines((WGSL / f"{name}.wgsl").read_text(encoding="utf-8"))


def _whole_lines(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _constant(name: str, value: int | float | bool | str) -> str:
    if isinstance(value, str):
        return f"alias {name} = {value};\n"
    if isinstance(value, bool):
        return f"const {name}: bool = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"const {name}: u32 = {value}u;\n"
    return f"const {name}: f32 = {value!r};\n"
