"""Source: one WGSL string out of a kernel, snippets and constants, and the way back from a line to its file."""

from __future__ import annotations

import re

import pytest

import fa2lab as fa
from fa2lab import source
from fa2lab.kernels import backward_kernels

# A file that two kernels share is written for the first of them; the second binds other buffers of the same types.
PASSES = {}
for kernel in (*fa.kernels().values(), *backward_kernels().values()):
    for stage in kernel.passes:
        PASSES.setdefault(stage.file, stage)


def test_kernel_first_then_snippets_then_constants():
    linked = source.link("fa2_forward", ("problem", "tiles"), {"BLOCK_Q": 16, "WRITE_ATTN": False, "SLOPE": 0.5})
    names = [part.name for part in linked.parts]
    assert names == ["fa2_forward.wgsl", "shared/problem.wgsl", "shared/tiles.wgsl", "constants"]
    assert linked.text.startswith(source.read("fa2_forward"))
    assert linked.text.endswith("const BLOCK_Q: u32 = 16u;\nconst WRITE_ATTN: bool = false;\nconst SLOPE: f32 = 0.5;\n")
    assert linked.entry == "fa2_forward"


def test_every_line_leads_back_to_its_file():
    linked = source.link("fused_sv", ("problem",), {"LANES": 64, "HEAD_DIM": 8})
    lines = linked.text.splitlines()
    for number, line in enumerate(lines, start=1):
        file, at, text = linked.locate(number)
        assert text == line
        (part,) = (part.text for part in linked.parts if part.name == file)
        assert part.splitlines()[at - 1] == line
    kernel_length = len(source.read("fused_sv").splitlines())
    assert linked.locate(kernel_length) == ("fused_sv.wgsl", kernel_length, "}")
    assert linked.locate(kernel_length + 1)[:2] == ("shared/problem.wgsl", 1)
    assert linked.locate(len(lines)) == ("constants", 2, "const HEAD_DIM: u32 = 8u;")
    assert linked.locate(len(lines) + 5) == ("constants", 2, ""), "past the end stands for the end"


@pytest.mark.parametrize(("dialect", "enable"), [("tint", "enable subgroups; "), ("naga", "")])
def test_subgroups_are_enabled_only_where_the_compiler_wants_it(dialect, enable):
    linked = source.link("probe_subgroup", features=("subgroups",), dialect=dialect)
    assert linked.text == enable + source.read("probe_subgroup")
    assert linked.column_shift(1) == len(enable) and linked.column_shift(2) == 0


def test_other_features_are_enabled_on_both():
    for dialect in ("naga", "tint"):
        assert source.link("probe_subgroup", features=("f16",), dialect=dialect).text.startswith("enable f16; ")


def test_a_replaced_text_takes_the_place_of_the_file():
    linked = source.link("fused_sv", ("problem",), {"LANES": 1}, text="fn fused_sv() {}")
    assert (linked.parts[0].name, linked.parts[0].text) == ("fused_sv.wgsl", "fn fused_sv() {}\n"), "a whole line"
    assert not linked.trusted and source.link("fused_sv", ("problem",), {"LANES": 1}).trusted


@pytest.mark.parametrize("file", PASSES)
def test_a_kernel_file_says_what_it_is(file):
    """The entry point is named after the file; the head has formula, ownership, dispatch, constants and source."""
    text = source.read(file)
    head = text[: text.index("\n@group(0)")]
    assert re.search(rf"@compute @workgroup_size\(\w+\)\nfn {file}\(", text)
    for word in ("Dispatch:", "Constants:", "Source:", " = "):
        assert word in head, f"the head of {file}.wgsl lacks {word!r}"
    assert re.search(r"(An invocation|A workgroup|Every invocation|invocation) ?(\w+ )*(owns|keeps)", head)


@pytest.mark.parametrize("file", PASSES)
def test_a_kernel_file_has_the_bindings_of_the_table(file):
    """Binding numbers follow the table's order, and names and access modes are the same."""
    found = re.findall(r"@group\(0\) @binding\((\d+)\) var<(\w+)(?:, (\w+))?> (\w+)", source.read(file))
    declared = [(int(number), name, access or space) for number, space, access, name in found]
    assert declared == [(i, name, access) for i, (name, access) in enumerate(PASSES[file].bindings)]


@pytest.mark.parametrize("file", [f for f in PASSES if PASSES[f].tiles != (0, 0)])
def test_every_barrier_says_what_it_is_for(file):
    barriers = [line for line in source.read(file).splitlines() if "workgroupBarrier();" in line]
    assert barriers and all(re.search(r"// \w+", line) for line in barriers)


@pytest.mark.parametrize("file", [path.stem for path in source.WGSL.glob("*.wgsl")])
def test_a_kernel_file_is_free_of_what_the_house_keeps_out(file):
    code = re.sub(r"//.*", "", source.read(file))
    for word in ("override", "enable ", "#if", "atomic"):
        assert word not in code
