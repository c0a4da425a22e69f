"""`python -m fa2lab bench`: the table, the JSON, and one sentence where something is wrong."""

from __future__ import annotations

import json
import warnings

import engines
import pytest

import fa2lab as fa
from fa2lab import __main__ as cli
from fa2lab import bench, bench_command, bench_record, ceilings

HERE = ["--adapter", "llvmpipe", "--quick", "--T", "24", "--D", "8", "--B", "1", "--H", "2"]
needs_llvmpipe = pytest.mark.skipif(bool(engines.lacking("llvmpipe", "naga")), reason="no llvmpipe")


@pytest.fixture
def shell(capsys, monkeypatch):
    """Run `main` here: exit status, stdout and stderr."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(ceilings, "COPY_BYTES_CPU", 1 << 20)
    monkeypatch.setattr(ceilings, "SIDES_CPU", (64,))
    monkeypatch.setattr(bench_command, "QUICK_PATIENCE", 0.0)

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["bench", *words])
        except SystemExit as leaving:  # argparse's own
            status = leaving.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.gpu
@needs_llvmpipe
def test_the_table_and_the_json_say_the_same(shell, tmp_path):
    file = tmp_path / "rows.json"
    status, out, _ = shell(*HERE, "--Hkv", "1", "--json", str(file))
    assert status == 0
    record = json.loads(file.read_text())
    whole = [name for name, kernel in fa.kernels().items() if not kernel.splits]
    assert [row["kernel"] for row in record["rows"]] == whole and record["refused"] == []
    assert record == bench_record.load(file)
    assert {"device", "driver", "date", "versions", "ceilings"} <= set(record) and record["versions"]["wgpu"]
    lines = out.splitlines()
    assert lines[0].startswith(record["device"]) and lines[1].startswith("causal forward, f32, without shader checks")
    assert lines[3] == "B=1 H=2 over Hkv=1" and max(map(len, lines)) <= 100
    table = lines[5 : 6 + len(record["rows"])]
    assert table[0].split()[:5] == ["kernel", "T", "D", "tile", "ms"] and len({len(line) for line in table}) == 1
    for line, row in zip(table[1:], record["rows"], strict=True):
        assert line.split()[0] == row["kernel"] and f"{row['milliseconds']:.3f}" in line


@pytest.mark.gpu
@needs_llvmpipe
def test_gradients_checks_and_tiles_are_asked_for_by_name(shell):
    tile = ["--block-q", "8", "--block-k", "4"]
    status, out, _ = shell(*HERE, *tile, "--grad", "--kernel", "fa2", "--shader-checks", "--no-causal")
    assert status == 0 and "full forward+backward, f32, with shader checks" in out
    assert [line.split()[:4] for line in out.splitlines() if line.startswith("fa2 ")] == [["fa2", "24", "8", "8x4"]]
    status, out, _ = shell(*HERE, "--backward", "--kernel", "auto")
    assert status == 0 and "causal backward" in out


@pytest.mark.gpu
@needs_llvmpipe
def test_few_queries_and_many_keys(shell):
    status, out, _ = shell(*HERE, "--T", "2", "--Tk", "70")
    table = {line.split()[0]: line.split()[1] for line in out.splitlines() if "2×70" in line}
    assert status == 0 and list(table) == list(fa.kernels())


@pytest.mark.gpu
@needs_llvmpipe
def test_what_cannot_be_timed_is_told_and_does_not_end_the_rest(shell, tmp_path):
    file = tmp_path / "rows.json"
    words = ["--T", "1030", "24", "--H", "1", "--kernel", "fused_sv", "fa2_forward", "--json", str(file)]
    status, out, err = shell(*HERE, *words)  # the last word on T and H counts
    assert status == 0 and "fa2lab: fused_sv T=1030 D=8 is not timed. fused_sv keeps a row of scores" in err
    record = json.loads(file.read_text())
    assert [(r["kernel"], r["T"]) for r in record["rows"]] == [
        ("fa2_forward", 1030),
        ("fused_sv", 24),
        ("fa2_forward", 24),
    ]
    assert [(r["kernel"], r["T"]) for r in record["refused"]] == [("fused_sv", 1030)]


@pytest.mark.gpu
@needs_llvmpipe
def test_a_wrong_kernel_is_no_row_and_the_status_says_so(shell, monkeypatch):
    broken = fa.kernels()["naive"].edited("m = max(m, attn[start + key]);", "m = 90.0;", file="naive_softmax")
    broken = broken.edited("o += attn[", "o += 1.01 * attn[", file="naive_output")
    monkeypatch.setattr(bench, "kernels", lambda: {"naive": broken})
    status, out, err = shell(*HERE)
    assert status == 1 and "fa2lab: naive T=24 D=8 is not timed. naive (edited) on " in err
    assert "naive " not in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kernel", "flash"], "No forward kernel is called 'flash'; there are 'auto', naive, fused_sv"),
        (
            ["--grad", "--kernel", "naive"],
            "No forward+backward kernel is called 'naive'; there are 'auto', materialised",
        ),
        (["--T", "64", "0"], "T must be a whole number of at least 1; got 0"),
        (["--H", "-1"], "H must be a whole number of at least 1; got -1"),
        (["--json", "absent/rows.json"], "There is no folder"),
        (["--adapter", "numpy"], "The bench times kernels, so it needs an adapter"),
        (["--adapter", "Voodoo2"], "Voodoo2"),
    ],
)
def test_nonsense_gets_one_sentence(shell, words, sentence):
    status, out, err = shell(*words)
    assert (status, out) == (2, "") and err.startswith("fa2lab: ") and err.count("\n") == 1 and sentence in err


def test_backward_or_both_but_not_each(shell):
    status, out, err = shell("--backward", "--grad")
    assert (status, out) == (2, "") and "not allowed with" in err


def test_the_record_of_an_h200_is_whole_where_there_is_one():
    record = bench_record.load()
    if record is None:
        assert not bench_record.H200.exists()
    else:
        assert "H200" in record["device"] and record["rows"] and record["ceilings"]["product_flops_per_second"] > 1e13
