"""The byte-level GPT: its gradients, its presets, and what it refuses."""

import numpy as np
import pytest

import fa2lab as fa
from fa2lab import gpt
from fa2lab.gpt_attention import KernelAttention, NumpyAttention, original

SMALL = gpt.Preset(layers=2, width=8, context=6, heads=2, mlp=12)


def spread_model(dtype=np.float64, attention=None) -> gpt.GPT:
    """A model away from its start, where biases are 0 and attention is nearly flat, so that every gradient matters."""
    model = gpt.GPT(SMALL, attention or NumpyAttention(), seed=1, dtype=dtype)
    rng = np.random.default_rng(0)
    for name, x in model.params.items():
        model.params[name] = (x + 0.3 * rng.standard_normal(x.shape)).astype(dtype)
    return model


def tokens_and_targets(seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (2, 6)), rng.integers(0, 256, (2, 6))


def central_difference(model: gpt.GPT, name: str, at: tuple, tokens, targets) -> float:
    x, h = model.params[name], 1e-5
    kept = x[at]
    x[at] = kept + h
    above = model.loss(tokens, targets)
    x[at] = kept - h
    below = model.loss(tokens, targets)
    x[at] = kept
    return (above - below) / (2 * h)


@pytest.mark.parametrize("name", sorted(gpt.GPT(SMALL, NumpyAttention()).params))
def test_every_parameters_gradient_is_its_central_difference(name):
    model, (tokens, targets) = spread_model(), tokens_and_targets()
    gradient = model.loss_and_gradients(tokens, targets)[1][name]
    assert gradient.shape == model.params[name].shape
    rng = np.random.default_rng(2)
    for _ in range(3):
        at = tuple(int(rng.integers(n)) for n in gradient.shape)
        if name == "token":
            at = (int(tokens[0, 0]), at[1])  # a row that the loss depends on
        expected = central_difference(model, name, at, tokens, targets)
        assert gradient[at] == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_the_central_difference_would_see_a_wrong_gradient(monkeypatch):
    right = NumpyAttention.backward
    monkeypatch.setattr(
        NumpyAttention, "backward", lambda self, kept, dout: [1.01 * d for d in right(self, kept, dout)]
    )
    model, (tokens, targets) = spread_model(), tokens_and_targets()
    gradient = model.loss_and_gradients(tokens, targets)[1]["0.v.w"]
    expected = central_difference(model, "0.v.w", (3, 5), tokens, targets)
    assert gradient[3, 5] != pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [KernelAttention, original], ids=["fa2", "original"])
def test_a_models_gradients_through_the_kernels_are_numpys(make, roomy_device):
    tokens, targets = tokens_and_targets()
    loss, expected = spread_model(np.float32).loss_and_gradients(tokens, targets)
    through = spread_model(np.float32, make(device=roomy_device))
    got_loss, got = through.loss_and_gradients(tokens, targets)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        # float32 activations differ by about 1e-6 between the two; the largest gradient sets the scale
        assert np.abs(got[name] - gradient).max() <= 2e-5 * max(1e-3, np.abs(gradient).max()), name


def test_the_attention_is_causal():
    model, (tokens, _) = spread_model(), tokens_and_targets()
    before = model.forward(tokens)[0]
    tokens = tokens.copy()
    tokens[:, 4] += 1
    after = model.forward(tokens % 256)[0]
    assert np.array_equal(before[:, :4], after[:, :4])
    assert not np.array_equal(before[:, 4:], after[:, 4:])


def test_a_model_that_knows_nothing_loses_ln_256():
    model = gpt.GPT(gpt.PRESETS["tiny"], NumpyAttention())
    rng = np.random.default_rng(0)
    assert model.loss(rng.integers(0, 256, (4, 32)), rng.integers(0, 256, (4, 32))) == pytest.approx(
        np.log(256), abs=0.05
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tiny", (2, 48, 32, 3)),
        ("small", (3, 96, 64, 3)),
        ("medium", (4, 128, 96, 4)),
        ("large", (6, 192, 128, 6)),
        ("huge", (12, 256, 256, 8)),
        ("mega", (14, 384, 512, 12)),
        ("behemoth", (24, 1280, 1024, 20)),
    ],
)
def test_presets_are_the_originals(name, sizes):
    preset = gpt.PRESETS[name]
    assert (preset.layers, preset.width, preset.context, preset.heads) == sizes


def test_a_preset_counts_its_parameters():
    for preset in (SMALL, gpt.PRESETS["tiny"]):
        assert preset.parameters == sum(x.size for x in gpt.GPT(preset, NumpyAttention()).params.values())


def test_heads_of_a_layer_are_what_its_attention_was_handed():
    handed = []

    class Spy(NumpyAttention):
        def forward(self, q, k, v):
            handed.append((q, k, v))
            return super().forward(q, k, v)

    model, (tokens, _) = spread_model(attention=Spy()), tokens_and_targets()
    model.forward(tokens)
    for layer in range(SMALL.layers):
        for got, expected in zip(model.heads_of(tokens, layer), handed[layer], strict=True):
            assert np.array_equal(got, expected)


def test_sampling_repeats_for_the_same_seed_and_keeps_the_prompt():
    model = spread_model(np.float32)
    text = model.sample(b"ab", 9, seed=3)
    assert text == model.sample(b"ab", 9, seed=3) != model.sample(b"ab", 9, seed=4)
    assert text.startswith(b"ab") and len(text) == 11


def test_bad_sizes_say_what_would_work():
    with pytest.raises(fa.ShapeError, match="multiple of the heads; got width=10, heads=3"):
        gpt.Preset(1, 10, 8, 3)
    model = spread_model()
    with pytest.raises(fa.ShapeError, match="context is 6 tokens; got 7"):
        model.forward(np.zeros((1, 7), int))
    with pytest.raises(fa.ShapeError, match="layer must be from 0 to 1; got 2"):
        model.heads_of(np.zeros((1, 3), int), 2)
