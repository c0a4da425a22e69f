"""Training: batches, AdamW, checkpoints that go on to the same losses, weights on disk."""

import signal

import numpy as np
import pytest

from fa2lab import gpt, training
from fa2lab.gpt_attention import NumpyAttention

PRESET = gpt.Preset(layers=1, width=8, context=8, heads=2)
TEXT = b"the quick brown fox jumps over the lazy dog and over the fence. " * 4


def new_run(seed: int = 0) -> training.Run:
    return training.start(PRESET, NumpyAttention(), text=TEXT, batch_size=4, seed=seed, lr=1e-2)


def test_a_stopped_run_goes_on_to_identical_losses(tmp_path):
    whole = list(new_run().steps(12))
    first = new_run()
    begun = list(first.steps(5))
    first.save(tmp_path / "run.safetensors")
    second = new_run()
    second.restore(tmp_path / "run.safetensors")
    assert begun + list(second.steps(7)) == whole
    third = new_run()
    list(third.steps(5))
    assert list(third.steps(7)) == whole[5:]
    assert list(new_run().steps(7)) != whole[5:]  # the comparison can fail


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    new_run().save(tmp_path / "run.safetensors")
    other = training.start(gpt.Preset(1, 8, 16, 2), NumpyAttention(), text=TEXT)
    with pytest.raises(ValueError, match="holds a model of"):
        other.restore(tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match="of a run with seed=0, not 1; its losses would part"):
        new_run(seed=1).restore(tmp_path / "run.safetensors")


@pytest.mark.parametrize(
    ("wishes", "name"),
    [
        ({"batch_size": 5}, "batch_size"),
        ({"lr": 2e-2}, "lr"),
        ({"decay": 0.1}, "decay"),
        ({"text": TEXT + b"!"}, "text"),
    ],
    ids=str,
)
def test_a_checkpoint_goes_on_under_its_own_settings_only(tmp_path, wishes, name):
    new_run().save(tmp_path / "run.safetensors")
    settings = {"text": TEXT, "batch_size": 4, "seed": 0, "lr": 1e-2} | wishes
    other = training.start(PRESET, NumpyAttention(), **settings)
    with pytest.raises(ValueError, match=f"is of a run with {name}="):
        other.restore(tmp_path / "run.safetensors")


def test_weights_alone_are_no_checkpoint(tmp_path):
    training.save_weights(new_run().model, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="weights alone"):
        new_run().restore(tmp_path / "w.safetensors")


def test_schedules_are_told_apart_by_their_numbers():
    assert training.warm_cosine(1e-3, 100).__name__ != training.warm_cosine(1e-3, 200).__name__


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    run = new_run()
    run.save(path)
    before = path.read_bytes()
    list(run.steps(1))

    def fails(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        run.save(path)
    assert path.read_bytes() == before


def test_weights_come_back_as_float16_holds_them(tmp_path):
    model = new_run().model
    training.save_weights(model, tmp_path / "w.safetensors", command="none")
    again = training.load_weights(tmp_path / "w.safetensors", NumpyAttention())
    assert again.preset == PRESET
    for name, x in model.params.items():
        assert np.array_equal(again.params[name], x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_file_that_is_no_model_is_refused_in_a_sentence(tmp_path, content):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not read as safetensors"):
        training.load_weights(path, NumpyAttention())
    with pytest.raises(FileNotFoundError, match="no model file"):
        training.load_weights(tmp_path / "absent", NumpyAttention())


def test_foreign_tensors_are_told_from_a_model(tmp_path):
    from safetensors.numpy import save_file

    save_file({"q": np.zeros(3, np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="holds q, but no model"):
        training.load_weights(tmp_path / "w.safetensors", NumpyAttention())


def test_a_batch_is_windows_of_the_text_and_their_next_bytes():
    tokens, targets = training.batch(TEXT, PRESET, 3, seed=1, step=5)
    assert tokens.shape == targets.shape == (3, 8)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    for row in tokens:
        assert bytes(row.astype(np.uint8)) in TEXT
    assert np.array_equal(tokens, training.batch(TEXT, PRESET, 3, seed=1, step=5)[0])
    assert not np.array_equal(tokens, training.batch(TEXT, PRESET, 3, seed=1, step=6)[0])
    with pytest.raises(ValueError, match="has 8 bytes; a context of 8 needs one more"):
        training.batch(TEXT[:8], PRESET, 1, seed=0, step=0)


def test_adamw_takes_its_first_step_by_hand():
    params = {"w": np.array([[1.0, -2.0]]), "b": np.array([0.5])}
    adam = training.AdamW(params, decay=0.1)
    adam.update(params, {"w": np.array([[0.3, -0.7]]), "b": np.array([0.0])}, lr=0.01)
    # corrected m / sqrt(v) is the gradient's sign at the first step; decay pulls matrices, not biases, towards 0
    assert params["w"] == pytest.approx(np.array([[1 - 0.01 - 0.001, -2 + 0.01 + 0.002]]), abs=1e-9)
    assert params["b"] == pytest.approx(np.array([0.5]))


def test_adamw_by_the_formula_over_steps():
    rng = np.random.default_rng(0)
    params, x = {"b": np.zeros(3)}, np.zeros(3)
    adam, m, v = training.AdamW(params), np.zeros(3), np.zeros(3)
    for t in range(1, 6):
        g = rng.standard_normal(3)
        adam.update(params, {"b": g}, lr=0.1)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        x = x - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    assert params["b"] == pytest.approx(x, rel=1e-12)


def test_the_schedule_rises_then_falls_to_a_tenth():
    lr = training.warm_cosine(1.0, 100)
    assert [round(lr(i), 3) for i in (0, 4, 5, 100)] == [0.2, 1.0, 1.0, 0.1]
    assert lr(50) < lr(20)


def test_the_corpus_is_the_projects_own_text_or_a_file(tmp_path):
    assert b"fn fa2_forward(" in training.corpus()
    (tmp_path / "mine.txt").write_bytes(b"my text")
    assert training.corpus(tmp_path / "mine.txt") == b"my text"
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        training.corpus(tmp_path / "empty.txt")
    with pytest.raises(FileNotFoundError, match="no text file"):
        training.corpus(tmp_path / "absent.txt")


def test_ctrl_c_stops_between_steps_and_the_checkpoint_goes_on(tmp_path, monkeypatch, capsys):
    from fa2lab import __main__ as shell

    (tmp_path / "text").write_bytes(TEXT)
    flags = f"train --preset tiny --steps 6 --batch 2 --text {tmp_path / 'text'} --attention numpy".split()
    losses: list[float] = []
    watch = shell._advance

    def advance(bar, loss):
        losses.append(loss)
        if len(losses) == 3:
            signal.raise_signal(signal.SIGINT)
        watch(bar, loss)

    monkeypatch.setattr(shell, "_advance", advance)
    assert shell.main([*flags, "--checkpoint", str(tmp_path / "run.safetensors")]) == 1
    assert "the checkpoint goes on" in capsys.readouterr().out
    assert shell.main([*flags, "--checkpoint", str(tmp_path / "run.safetensors")]) == 0
    stopped, losses[:] = list(losses), []
    monkeypatch.setattr(shell, "_advance", lambda bar, loss: losses.append(loss))
    assert shell.main(flags) == 0
    assert stopped == losses and len(losses) == 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("flags", ["--steps 0", "--batch -1"])
def test_a_run_of_nothing_is_refused(flags, capsys):
    from fa2lab import __main__ as shell

    assert shell.main(["train", *flags.split()]) == 2
    assert "--steps and --batch must be at least 1" in capsys.readouterr().err
