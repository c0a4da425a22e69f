"""benchmarks/peers.py: everyone in turn, a failing one named and left, and the README's table between its markers."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import ceilings

FOLDER = Path(__file__).parent.parent / "benchmarks"
needs_llvmpipe = pytest.mark.skipif(bool(engines.lacking("llvmpipe", "naga")), reason="no llvmpipe")


@pytest.fixture
def house(monkeypatch):
    """The three files as modules, with problems small enough for a software driver."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers
    import peers_table
    import subjects

    monkeypatch.setattr(peers, "B", 1)
    monkeypatch.setattr(peers, "H", 2)
    monkeypatch.setattr(peers, "SHAPES", ((24, 8),))
    monkeypatch.setattr(peers, "FULL_SHAPES", ())
    monkeypatch.setattr(peers, "PATIENCE", 0.0)
    monkeypatch.setattr(peers, "BATCH_SECONDS", 0.001)
    monkeypatch.setattr(peers, "LONG", dict(B=1, T=64, H=1, D=8))
    monkeypatch.setattr(ceilings, "COPY_BYTES_CPU", 1 << 20)
    monkeypatch.setattr(ceilings, "SIDES_CPU", (64,))
    yield peers, peers_table, subjects
    subjects.device.cache_clear()


def case(subjects, **changes):
    return replace(subjects.Case(1, 2, 24, 8, True, "forward"), **changes)


@pytest.mark.gpu
@needs_llvmpipe
def test_a_run_of_what_is_here(house, tmp_path, capsys, monkeypatch):
    peers, *_ = house
    monkeypatch.setitem(sys.modules, "aule.vulkan", None)  # as if it were not installed
    readme, file = tmp_path / "README.md", tmp_path / "peers.json"
    readme.write_text("before\n<!-- peers:begin -->\nold\n<!-- peers:end -->\nafter\n")
    words = ["--only", "ours", "aule", "--adapter", "llvmpipe", "--readme", str(readme), "--json", str(file)]
    assert peers.main(words) == 0
    out, record = capsys.readouterr().out, json.loads(file.read_text())
    assert "aule-attention is not installed" in out and "causal forward+backward, B=1 H=2 T=24 D=8" in out
    rates = {(r["subject"], r["case"]["direction"]): r["tflops"] for r in record["results"]}
    assert rates["fa2lab, auto", "forward"] > 0 and rates["fa2lab, auto", "forward+backward"] > 0
    assert rates["aule-attention f32", "forward"] is None
    assert record["memory"]["B·H·T"] == 4 * 64 and record["ceilings"]["product_side"] == 64
    text = readme.read_text()
    assert text.startswith("before\n<!-- peers:begin -->\nllvmpipe") and text.endswith("<!-- peers:end -->\nafter\n")
    assert "old" not in text and "| aule-attention f32 | not installed |" in text and record["date"] in text


def test_one_that_fails_is_named_and_stops_nobody(house):
    peers, _, subjects = house

    @contextmanager
    def works(_):
        yield subjects.Runner(lambda n: n * 1e-3, "made up", 1e-7)

    @contextmanager
    def dies_at_work(_):
        yield subjects.Runner(lambda n: 1 / 0, "made up", 1e-7)

    @contextmanager
    def never_opens(_):
        raise RuntimeError("out of memory\nand much more")
        yield

    everyone = [
        subjects.Subject(name, "ours", opens)
        for name, opens in (("a", works), ("b", dies_at_work), ("c", never_opens), ("d", works))
    ]
    found = peers.measure(case(subjects), everyone)
    assert [r.subject for r in found] == ["a", "b", "c", "d"] and [r.seconds for r in found] == [1e-3, None, None, 1e-3]
    assert found[1].reason == "ZeroDivisionError: division by zero"
    assert found[2].reason == "RuntimeError: out of memory"


def test_what_dies_between_two_turns_is_left_out_from_there(house):
    peers, _, subjects = house
    turns = iter([1e-3] * 4)

    @contextmanager
    def tires(_):
        yield subjects.Runner(lambda n: n * next(turns), "made up", 1e-7, long=True)

    (found,) = peers.measure(case(subjects), [subjects.Subject("a", "ours", tires)])
    assert found.seconds is None and found.reason.startswith("StopIteration")


def test_when_the_time_is_up_the_rest_is_said_to_be_left_out(house, tmp_path):
    peers, *_ = house
    file = tmp_path / "peers.json"
    assert peers.main(["--only", "torch", "--budget", "0", "--json", str(file)]) == 0
    reasons = {r["reason"] for r in json.loads(file.read_text())["results"]}
    assert reasons == {"left out: the time was up"}


def test_another_library_gets_our_numbers_and_is_held_against_float64(house, monkeypatch):
    """aule-attention's interface, made up: heads first, tensors on the device."""
    _, _, subjects = house
    made = []

    class Tensor:
        def __init__(self, shape):
            self.array = np.zeros(shape, np.float32)
            made.append(self)

        def upload(self, array):
            self.array = array

        def download(self):
            return self.array

        def destroy(self):
            made.remove(self)

    class Aule:
        tensor = staticmethod(Tensor)

        def attention_gpu(self, q, k, v, out, causal):
            given = (x.array.transpose(0, 2, 1, 3) for x in (q, k, v))
            out.array = fa.reference.attention(*given, causal=causal).out.transpose(0, 2, 1, 3) + 0.25

    vulkan = ModuleType("aule.vulkan")
    vulkan.Aule, vulkan._LIBRARY_PATH = Aule, "somewhere"
    monkeypatch.setitem(sys.modules, "aule", ModuleType("aule"))
    monkeypatch.setitem(sys.modules, "aule.vulkan", vulkan)
    with subjects._aule(case(subjects, B=2)) as runner:
        assert runner.error == pytest.approx(0.25, abs=1e-6) and runner.run(2) > 0 and len(made) == 4
    assert not made


def test_the_aims_are_ratios_of_this_run(house):
    peers, peers_table, subjects = house
    at, wide = case(subjects, T=4096, D=64), case(subjects, T=2048, D=128)

    def result(subject, where, tflops):
        return peers.Result(subject, where, where.flops / tflops / 1e12, 0.0, 0.0)

    monkey = {"fa2lab, auto": 33.0, "fa2lab, auto, with shader checks": 29.7}
    monkey |= {"PyTorch SDPA f32, memory-efficient": 30.0, "ONNX Runtime WebGPU f32": 10.0}
    monkey |= {"fa2lab, original fa2_forward, with shader checks": 0.25}
    found = [result(name, at, rate) for name, rate in monkey.items()]
    found += [result("fa2lab, auto", wide, 20.0), result("PyTorch SDPA f32, memory-efficient", wide, 40.0)]
    held = {"peak": 1000 + 200 + 2 * 64, "inputs and outputs": 1000, "readback copy": 200, "B·H·T": 64}
    aims = peers_table.aims(found, 60e12, held)
    assert [aim.got for aim in aims] == pytest.approx([1.1, 0.5, None, 3.3, 0.55, 0.9, 132.0, 2.0])
    verdicts = ["reached", "missed", "not measured", "missed", "missed", "reached", "reached", "reached"]
    assert [replace(aim, got=aim.got and aim.got + 1e-9).verdict for aim in aims] == verdicts
    assert "≤ 4" in peers_table.plain(aims) and "not measured" in peers_table.plain(aims)


@pytest.mark.parametrize("text", ["", "<!-- peers:begin -->", "<!-- peers:end --> <!-- peers:begin -->"])
def test_a_readme_without_its_markers_is_refused_before_measuring(house, tmp_path, text):
    peers, *_ = house
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="needs the lines <!-- peers:begin --> and <!-- peers:end -->"):
        peers.main(["--readme", str(readme)])
    assert readme.read_text() == text
