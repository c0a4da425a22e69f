"""Unrolled text: what is written out, what is left, the way back to the file's lines, and the same bits."""

from __future__ import annotations

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import source
from fa2lab.launch import launch
from fa2lab.plan import plan
from fa2lab.unroll import known_constants, unroll

LOOP = """fn f() {
  for (var r = 0u; r < ROWS; r++) { // unroll
    for (var c = r; c < rolled(2u); c += 1u) { // unroll
      s[r * 2u + c] = row(r);
    }
  }
}
"""


def test_marked_loops_are_written_out_with_their_values():
    text, lines = unroll(LOOP, {"ROWS": 2})
    statements = [line.strip() for line in text.splitlines() if "=" in line]
    assert statements == ["s[0u * 2u + 0u] = row(0u);", "s[0u * 2u + 1u] = row(0u);", "s[1u * 2u + 1u] = row(1u);"]
    assert text.count("{") == text.count("}") and "for" not in text


def test_every_written_line_leads_back():
    text, lines = unroll(LOOP, {"ROWS": 2})
    original = LOOP.splitlines()
    assert len(lines) == len(text.splitlines()) and lines[0] == 1 and lines[-1] == len(original)
    for line, number in zip(text.splitlines(), lines, strict=True):
        if "row(" in line:
            assert "row(r)" in original[number - 1]


@pytest.mark.parametrize(
    "header",
    [
        "for (var i = 0u; i < n; i++) {",
        "for (var i = 0u; i < n; i++) { // unroll",
        "for (var i = 0u; i <= 3u; i++) { // unroll",
        "for (var i = 0u; i < 3u; i += step()) { // unroll",
        "while (true) { // unroll",
    ],
)
def test_what_is_unmarked_or_not_constant_stays(header):
    text = f"{header}\n  use(i);\n}}\n"
    assert unroll(text, {"ROWS": 2})[0] == text


@pytest.mark.parametrize("leaves", ["break", "continue"])
def test_a_loop_that_is_left_early_stays(leaves):
    text = f"for (var i = 0u; i < 2u; i++) {{ // unroll\n  if (i == 1u) {{ {leaves}; }}\n}}\n"
    assert unroll(text, {})[0] == text


def test_a_name_is_replaced_as_a_whole_word():
    text, _ = unroll("for (var i = 0u; i < 1u; i++) { // unroll\n  bi(i, ai, i2);\n}\n", {})
    assert "bi(0u, ai, i2);" in text


def test_constants_are_found_in_any_order():
    texts = ["const B: u32 = A * 2u;\nconst A = N / 2u;", "const C: u32 = B % 3u;\nconst F: f32 = 0.5;"]
    known = known_constants(texts, {"N": 8, "Stored": "f32"})
    assert known == {"N": 8, "A": 4, "B": 8, "C": 2}


def test_an_unrolled_source_names_the_lines_of_its_files():
    linked = source.link("fa2_forward_tiled", ("register_tiles",), _constants(), unrolled=True)
    for number, line in enumerate(linked.text.splitlines(), 1):
        file, at, text = linked.locate(number)
        if "exp_shift(" in line:
            assert file == "fa2_forward_tiled.wgsl" and "exp_shift(" in text
            assert source.read("fa2_forward_tiled").splitlines()[at - 1] == text
    assert "// unroll" not in linked.text.split("fn rolled")[1].split("multiply_some_columns")[0]


def _constants() -> dict:
    return {"BLOCK_Q": 8, "BLOCK_K": 16, "ROWS": 2, "ROW_LANES": 4, "HEAD_DIM": 8, "SLICES": 1}


def test_an_error_in_an_unrolled_kernel_names_the_line_of_the_file(roomy_device, monkeypatch):
    monkeypatch.setattr(type(roomy_device), "unrolls", True)
    kernel = fa.kernels()["fa2_forward_tiled"].edited("l[r] *= alpha[r];", "l[r] *= beta[r];")
    number = next(i for i, line in enumerate(kernel.text().splitlines(), 1) if "beta" in line)
    with pytest.raises(fa.KernelError) as caught:
        fa.attention(*engines.random(), device=roomy_device, kernel=kernel)
    first, shown, _ = str(caught.value).splitlines()
    assert first.startswith(f"fa2_forward_tiled.wgsl:{number}:") and shown.strip() == "l[r] *= beta[r];"


@pytest.mark.parametrize("name", ["fa2_forward_tiled", "fa2_tiled"])
def test_unrolling_changes_no_bit(gpu, monkeypatch, name):
    q, k, v = engines.random(T=21, H=1, D=8)
    r = fa.reference.attention(q, k, v, causal=True, dtype=np.float32)
    tables = fa.kernels() | fa.backward_kernels()
    planned = plan(r.problem, gpu.limits, name, table=tables)
    inputs = dict(q=q, k=k, v=v, out=r.out, lse=r.lse, dout=q)
    results = []
    for unrolls in (False, True):
        monkeypatch.setattr(type(gpu), "unrolls", unrolls)
        results.append(launch(planned, {name: inputs[name] for name in planned.kernel.inputs}, gpu)[0])
    for name, array in results[0].items():
        assert array.any() and array.tobytes() == results[1][name].tobytes(), name
