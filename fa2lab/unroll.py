"""Unrolls the loops of a kernel's text that ask for it. Not one bit of a result depends on it.

A loop asks by ending its header in `// unroll`:

    for (var r = 0u; r < ROWS; r++) { // unroll

A bound `rolled(n)` is n here, and to compilers a number that only a run can tell, for where the loop stays.
Indices into private arrays become constants, so compilers keep the arrays in registers and insert no bounds check.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable
from functools import lru_cache

_HEADER = re.compile(r"\s*for \(var (\w+) = ([^;]+); \1 < ([^;]+); \1(?:\+\+| \+= ([^)]+))\) \{ // unroll\s*")
_CONSTANT = re.compile(r"^const (\w+)(?:: u32)? = ([^;]+);", re.MULTILINE)
_LEAVES = re.compile(r"\b(?:break|continue)\b")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
Lines = list[tuple[int, str]]  # line number in the file, text


def known_constants(texts: Iterable[str], linked: dict[str, object]) -> dict[str, int]:
    """The whole numbers that module-scope `const`s of the texts stand for, those that they are linked with included."""
    known = {name: value for name, value in linked.items() if isinstance(value, int)}
    pending = [found for text in texts for found in _CONSTANT.findall(text)]
    while pending:  # module scope has no order
        values = {name: _value(expression, known) for name, expression in pending}
        found = {name: value for name, value in values.items() if value is not None}
        if not found:
            break
        known |= found
        pending = [(name, expression) for name, expression in pending if name not in found]
    return known


def unroll(text: str, known: dict[str, int]) -> tuple[str, tuple[int, ...]]:
    """The text with its marked loops written out, and for each of its lines the 1-based line that it came from.

    `known` are the constants that bounds may name. A loop whose bounds are anything else, or that `break` or
    `continue` leaves, stays as it is.
    """
    return _unrolled(text, tuple(known.items()))


@lru_cache(maxsize=256)  # each call of a kernel links its text anew, and writing it out takes longer than many a kernel
def _unrolled(text: str, known: tuple[tuple[str, int], ...]) -> tuple[str, tuple[int, ...]]:
    lines = _written_out(list(enumerate(text.splitlines(), 1)), dict(known))
    return "".join(f"{line}\n" for _, line in lines), tuple(number for number, _ in lines)


def _written_out(lines: Lines, known: dict[str, int]) -> Lines:
    written: Lines = []
    at = 0
    while at < len(lines):
        header = _HEADER.fullmatch(lines[at][1])
        if header is None:
            written.append(lines[at])
            at += 1
            continue
        name, *bounds = header.groups(default="1u")
        begin, end, step = (_value(bound, known) for bound in bounds)
        stop = _closing(lines, at)
        body = lines[at + 1 : stop]
        if None in (begin, end, step) or not step or any(_LEAVES.search(line) for _, line in body):
            written += [lines[at], *_written_out(body, known), lines[stop]]
        else:
            for value in range(begin, end, step):
                written += _one_turn(lines, at, stop, name, f"{value}u", known)
        at = stop + 1
    return written


def _one_turn(lines: Lines, at: int, stop: int, name: str, value: str, known: dict[str, int]) -> Lines:
    """The body of the loop at line `at` with its variable's value put in; inner bounds may hold it: they come after."""
    word = re.compile(rf"\b{name}\b")
    body = [(number, word.sub(value, line)) for number, line in lines[at + 1 : stop]]
    return [(lines[at][0], "{"), *_written_out(body, known), (lines[stop][0], "}")]


def _closing(lines: Lines, at: int) -> int:
    """Where the brace that line `at` opens is closed."""
    depth = 0
    for index in range(at, len(lines)):
        code = lines[index][1].split("//")[0]
        depth += code.count("{") - code.count("}")
        if depth == 0:
            return index
    return len(lines) - 1


def _value(expression: str, known: dict[str, int]) -> int | None:
    """The value of an expression of whole numbers, names and `+ - * / %`; None where it is anything else."""
    try:
        return _fold(ast.parse(re.sub(r"\b(\d+)u\b", r"\1", expression.strip()), mode="eval").body, known)
    except (SyntaxError, KeyError, ZeroDivisionError):
        return None


def _fold(node: ast.AST, known: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return known[name]
        case ast.Call(func=ast.Name(id="rolled"), args=[argument]):
            return _fold(argument, known)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_fold(left, known), _fold(right, known))
    raise KeyError(type(node).__name__)
