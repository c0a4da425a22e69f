"""The shell's way in: verbs, exit statuses 0, 1 and 2, and one sentence where something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import engines
import gradients
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import __main__ as cli
from fa2lab import doctor, engine

ROOT = Path(__file__).parent.parent
SMALL = ["--T", "17", "--hd", "4"]
ON_NUMPY = [*SMALL, "--adapter", "numpy"]


@pytest.fixture(autouse=True)
def warnings_stay_as_they_are(monkeypatch):
    """`main` sets how the process shows its warnings."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.fixture
def shell(capsys):
    """Run `main` here: exit status, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(list(words))
        except SystemExit as leaving:  # argparse's own
            status = leaving.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def in_a_process(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """`python -m fa2lab …` as a user types it."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "fa2lab", *words]
    env = os.environ | {"PYTHONPATH": paths} | environment
    return subprocess.run(command, cwd=ROOT.parent, env=env, capture_output=True, text=True, timeout=120)


def one_sentence(err: str) -> str:
    """What stderr says, when it is one line of ours."""
    assert err.startswith("fa2lab: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err
    return err.removeprefix("fa2lab: ").strip()


# parity: yes, no, and makes no sense.


def test_parity_says_yes(shell):
    status, out, err = shell("parity", *ON_NUMPY)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "B=1 T=17 H=2 D=4 causal"
    assert "on NumPy float32 on the CPU (no GPU adapter) against reference on NumPy float64: within float32" in out


@pytest.mark.parametrize("seat", [engines.seat_param(seat) for seat in engines.seats("adapter", "webgpu")])
def test_parity_on_each_device(shell, seat):
    where = ["--adapter", seat.adapter, "--compiler", seat.compiler, "--limits", seat.limits]
    status, out, err = shell("parity", *SMALL, *where, "--kernel", "fa2_forward", "--grad", "--backward", "fa2")
    assert (status, err) == (0, "")
    assert out.startswith("fa2_forward for B=1 T=17 H=2 D=4 causal\n  workgroup memory (16 + 2·16)·4·4 B = 768 of ")
    assert out.count(f"on {engines.device_of(seat).adapter} against") == 2 and out.count(": within float32") == 2
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" ok")] == ["out", "lse", "dq", "dk", "dv"]


def test_every_option_of_the_problem_arrives(shell):
    sizes = ["--B", "2", "--T", "5", "--Tk", "9", "--H", "4", "--Hkv", "2", "--hd", "3", "--align", "top-left"]
    status, out, _ = shell(
        "parity", *sizes, "--adapter", "numpy", "--scale", "-0.5", "--pattern", "needle", "--seed", "3"
    )
    assert status == 0 and out.splitlines()[0] == "B=2 Tq=5 Tk=9 H=4 over Hkv=2 D=3 causal (top-left)"
    status, out, _ = shell("parity", *sizes[:-2], "--adapter", "numpy", "--no-causal")
    assert status == 0 and out.splitlines()[0] == "B=2 Tq=5 Tk=9 H=4 over Hkv=2 D=3 full"


def test_attn_and_trace_are_compared_when_asked(shell):
    status, out, _ = shell(
        "parity", *ON_NUMPY, "--kernel", "fa2_forward", "--attn", "--trace", "--block-q", "4", "--block-k", "8"
    )
    fields = [line.split()[0] for line in out.splitlines() if line.endswith(" ok")]
    assert status == 0 and fields == ["out", "lse", "attn", "state", "m", "l", "alpha"]


@pytest.mark.parametrize("kernel", ["auto", *fa.backward_kernels()])
def test_gradients_are_compared_when_asked(shell, kernel):
    status, out, err = shell("parity", *ON_NUMPY, "--grad", "--backward", kernel)
    fields = [line.split()[0] for line in out.splitlines() if line.endswith(" ok")]
    assert (status, err) == (0, "") and fields == ["out", "lse", "dq", "dk", "dv"]
    assert f"\n{'fa2' if kernel == 'auto' else kernel} on NumPy float32" in out


def test_a_wrong_kernel_gets_no(shell, monkeypatch):
    honest = cli.attention

    def wrong(*arrays, **options):
        result = honest(*arrays, **options)
        result.out[0, 3, 1, 2] += 0.25
        return result

    monkeypatch.setattr(cli, "attention", wrong)
    status, out, err = shell("parity", *ON_NUMPY)
    assert (status, err) == (1, "") and "NOT within float32" in out
    assert "2.50e-01" in out and "batch 0 row 3 head 1 column 2" in out and "TOO FAR" in out


def test_wrong_gradients_get_no_though_the_forward_is_right(shell, monkeypatch):
    honest = cli.attention_backward

    def wrong(*arrays, **options):
        found = honest(*arrays, **options)
        found.dk[0, 3, 1, 2] = np.nan
        return found

    monkeypatch.setattr(cli, "attention_backward", wrong)
    status, out, _ = shell("parity", *ON_NUMPY, "--grad")
    assert status == 1 and "1 misplaced" in out and "batch 0 key 3 head 1 column 2" in out
    assert shell("parity", *ON_NUMPY)[0] == 0, "without --grad nobody looks"


def test_a_wrong_trace_gets_no(shell, monkeypatch):
    honest = cli.attention

    def wrong(*arrays, **options):
        result = honest(*arrays, **options)
        result.trace.l[0, 1, 16, 0] *= 2
        return result

    monkeypatch.setattr(cli, "attention", wrong)
    assert shell("parity", *ON_NUMPY, "--kernel", "fa2_forward", "--trace")[0] == 1


# parity --file.


@pytest.fixture
def dump(tmp_path):
    """Write arrays into an .npz and say where."""

    def write(**arrays) -> str:
        np.savez(tmp_path / "dump.npz", **arrays)
        return str(tmp_path / "dump.npz")

    return write


def users_arrays() -> dict[str, np.ndarray]:
    q, k, v = engines.random(B=2, T=9, Tk=11, H=4, Hkv=2, D=5)
    return dict(q=q, k=k, v=v)


def test_a_users_arrays_are_computed(shell, dump):
    status, out, _ = shell("parity", "--file", dump(**users_arrays()), "--adapter", "numpy", "--grad")
    assert status == 0 and out.splitlines()[0] == "B=2 Tq=9 Tk=11 H=4 over Hkv=2 D=5 causal (bottom-right)"
    assert out.count("within float32") == 2


@pytest.mark.parametrize(("wrong", "status"), [(0.0, 0), (0.25, 1), (np.nan, 1)])
def test_a_users_out_is_judged_as_well(shell, dump, wrong, status):
    arrays = users_arrays()
    out = fa.reference.attention(**arrays, causal=True).out.astype(np.float32)
    out[1, 4, 2, 3] += wrong
    path = dump(**arrays, out=out)
    got, said, _ = shell("parity", "--file", path, "--adapter", "numpy")
    assert got == status and f"out on {path} against reference on NumPy float64" in said
    assert said.count("NOT within float32") == status
    if wrong:
        assert "batch 1 row 4 head 2 column 3" in said


def test_an_out_of_another_shape_makes_no_sense(shell, dump):
    arrays = users_arrays()
    status, _, err = shell("parity", "--file", dump(**arrays, out=arrays["q"][:1]), "--adapter", "numpy")
    assert status == 2 and "out has shape (1, 9, 4, 5); the truth has (2, 9, 4, 5)" in one_sentence(err)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"k": 1.0, "v": 1.0}, "lacks q; it holds k, v"),
        ({"x": 1.0}, "lacks q, k, v; it holds x"),
        (
            {"q": np.ones((2, 3, 4)), "k": np.ones((2, 3, 4)), "v": np.ones((2, 3, 4))},
            "q has shape (2, 3, 4)",
        ),
        ({name: np.ones((1, 2, 1, 3), int) for name in "qkv"}, "q must hold floating-point numbers"),
        ({name: np.ones((1, 2, 3 + (name == "q"), 3)) for name in "qkv"}, "got H=4 and Hkv=3"),
    ],
    ids=["no q", "none of them", "three axes", "integers", "heads"],
)
def test_arrays_that_make_no_problem(shell, dump, arrays, sentence):
    status, out, err = shell("parity", "--file", dump(**arrays), "--adapter", "numpy")
    assert (status, out) == (2, "") and sentence in one_sentence(err)


def test_files_that_are_no_dump(shell, tmp_path):
    text, single, stacked = (tmp_path / name for name in ("notes.npz", "single.npz", "two.npy"))
    text.write_text("not a dump")
    with single.open("wb") as file:
        np.save(file, np.ones(3))
    np.save(stacked, np.ones((2, 1, 4, 1, 3)))
    for path, sentence in (
        (tmp_path / "absent.npz", f"There is no file {tmp_path / 'absent.npz'}"),
        (tmp_path, f"There is no file {tmp_path}"),
        (text, f"{text} does not read as an .npz"),
        (single, f"{single} does not read as an .npz of plain arrays (it holds a single array)"),
        (stacked, f"{stacked} holds (2, 1, 4, 1, 3); expected q, k and v along the first axis"),
    ):
        status, out, err = shell("parity", "--file", str(path))
        assert (status, out) == (2, "") and sentence in one_sentence(err)


# Input that makes no sense: 2, one sentence, nothing computed.

NONSENSE = {
    "no queries": (["--T", "0"], "T must be a whole number of at least 1; got 0"),
    "heads": (["--H", "4", "--Hkv", "3"], "got H=4 and Hkv=3. With H=4, Hkv may be 1, 2, 4"),
    "absurd length": (["--T", "10000000000"], "this machine has"),
    "head dimension": (["--hd", "257"], "head dimensions from 1 to 256; got D=257"),
    "kernel": (
        ["--kernel", "flash"],
        "No kernel is called 'flash'; there are 'auto', 'naive', 'fused_sv', 'fa2_forward'",
    ),
    "backward kernel": (["--grad", "--backward", "flash"], "there are 'auto', 'materialised', 'fa2'"),
    "tile": (["--kernel", "fa2_forward", "--block-q", "0"], "block_q must be a whole number of at least 1; got 0"),
    "tile of a kernel without": (["--kernel", "naive", "--block-k", "4"], "naive has none. Able: fa2_forward"),
    "trace of a kernel without": (["--kernel", "naive", "--trace"], "naive has none. Able: fa2_forward"),
    "scale": (["--scale", "nan"], "scale must be finite in float32; got nan"),
    "keys of fused_sv": (["--kernel", "fused_sv", "--Tk", "1025"], "takes up to 1024 keys; got Tk=1,025"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_gets_one_sentence(shell, what):
    words, sentence = NONSENSE[what]
    status, _, err = shell("parity", *ON_NUMPY, *words)
    assert status == 2 and sentence in one_sentence(err)


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_an_adapter_that_is_not_there_lists_those_that_are(shell):
    status, _, err = shell("parity", *SMALL, "--adapter", "Voodoo2")
    assert status == 2 and repr(engines.adapters("naga")[0].name) in one_sentence(err)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: VERB"),
        (["prove"], "invalid choice: 'prove'"),
        (["parity", "--T", "many"], "argument --T: invalid int value: 'many'"),
        (["parity", "--pattern", "plaid"], "invalid choice: 'plaid'"),
        (["parity", "--align", "left"], "invalid choice: 'left'"),
        (["parity", "--speed"], "unrecognized arguments: --speed"),
    ],
)
def test_words_that_are_no_command(shell, words, sentence):
    status, out, err = shell(*words)
    assert (status, out) == (2, "") and sentence in err and "Traceback" not in err


def test_help_lists_what_there_is(shell):
    status, out, err = shell("parity", "--help")
    assert (status, err) == (0, "")
    for word in (*fa.kernels(), *fa.backward_kernels(), *fa.data.PATTERNS, *fa.problem.ALIGNMENTS, "--file", "--grad"):
        assert word in out, word
    status, out, _ = shell("--help")
    assert status == 0 and "doctor" in out and "parity" in out


def test_without_an_adapter_numpy_computes_and_says_so(shell, monkeypatch):
    def none_here():
        raise fa.NoAdapterError("No GPU adapter answers.")

    monkeypatch.setattr(engine, "default_device", none_here)
    monkeypatch.setattr(engine, "_warned", False)
    warnings.resetwarnings()
    status, out, err = shell("parity", *SMALL, "--grad")
    assert status == 0 and "NumPy float32 on the CPU (no GPU adapter)" in out
    assert one_sentence(err) == "NumPy computes on the CPU in place of a GPU. No GPU adapter answers."


# doctor.


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_doctor_examines_every_adapter(shell):
    status, out, err = shell("doctor")
    assert (status, err) == (0, "")
    assert out.startswith("Python ") and "naga: wgpu " in out and "tint: wgpudawn " in out
    for compiler in ("naga", "tint"):
        for adapter in engines.adapters(compiler):
            assert (
                f"  {adapter.name}\n    driver          {adapter.driver} ({adapter.backend}, {adapter.type})\n" in out
            )
            assert f"    workgroup       {adapter.limits.workgroup_bytes:,} B of memory" in out
    examined = len(engines.adapters("naga")) + len(engines.adapters("tint"))
    assert out.count("    attention       correct, error ") == examined == out.count("    not offered  ")
    assert f"    subgroup size   {fa.default_device().subgroup_size or 'no subgroups'} (measured)" in out


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_doctor_says_no_where_attention_is_wrong(shell, monkeypatch):
    monkeypatch.setattr(doctor, "attention", lambda *arrays, **options: fa.attention(*arrays, device="numpy"))
    status, out, _ = shell("doctor")
    assert status == 1 and "    attention       WRONG, error " in out and "correct" not in out
    assert out.rstrip().endswith("No adapter works: fa2lab computes with NumPy, and every figure says so.")

    def fails(*arrays, **options):
        raise RuntimeError("the driver gave up\nwith much more to say")

    monkeypatch.setattr(doctor, "attention", fails)
    status, out, _ = shell("doctor")
    assert status == 1 and "attention       FAILS: the driver gave up\n" in out and "more to say" not in out


def test_doctor_without_any_adapter(shell, monkeypatch):
    def found(compiler):
        if compiler == "tint":
            raise fa.NoAdapterError("compiler='tint' needs the package wgpudawn: pip install \"fa2lab[dawn]\".")
        return []

    monkeypatch.setattr(doctor, "adapters", found)
    status, out, err = shell("doctor")
    assert (status, err) == (1, "")
    assert "no adapter. " in out and 'pip install "fa2lab[dawn]"' in out
    if sys.platform.startswith("linux"):
        assert "apt-get install mesa-vulkan-drivers" in out and "conda" in out


# As a user types it.


def test_the_exit_status_and_the_streams_of_a_process(tmp_path):
    ran = in_a_process("parity", *ON_NUMPY, "--grad")
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout.count("within float32") == 2
    ran = in_a_process("parity", "--file", str(tmp_path / "absent.npz"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert one_sentence(ran.stderr).startswith("There is no file")
    q, k, v, _ = gradients.random(T=4)
    np.savez(tmp_path / "dump.npz", q=q, k=k, v=v, out=q)
    ran = in_a_process("parity", "--adapter", "numpy", "--file", str(tmp_path / "dump.npz"))
    assert (ran.returncode, ran.stderr) == (1, "") and "NOT within float32" in ran.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not engines.adapters("naga"), reason="no adapter")
def test_a_process_on_the_gpu_keeps_stderr_clean():
    """Also with XDG_RUNTIME_DIR unset, which makes a C library write red lines."""
    environment = {name: x for name, x in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "fa2lab", "parity", *SMALL]
    ran = subprocess.run(command, cwd=ROOT.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert "NumPy float32 on the CPU" not in ran.stdout
