"""The model that comes with the project, and `data.make("model", ...)`: what its heads make of a text."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from safetensors import safe_open

import fa2lab as fa
from fa2lab import data, training
from fa2lab.gpt import PRESETS
from fa2lab.trained import MODEL, trained_model

TEXT = b"let n = min(max(seen, key0), 7);"  # one whole context
LAYERS, HEADS, HEAD_DIM, CONTEXT = 2, 3, 16, 32
EVERY = LAYERS * HEADS


def tokens(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)[None].astype(np.int64)


def own_heads(text: bytes) -> list[np.ndarray]:
    """Q, K and V of all heads `(1, T, 6, 16)`, first layer first, from the model itself."""
    by_layer = [trained_model().heads_of(tokens(text), layer) for layer in range(LAYERS)]
    return [np.concatenate(x, axis=2) for x in zip(*by_layer, strict=True)]


def weights(arrays, **options) -> np.ndarray:
    return fa.reference.attention(*arrays, causal=True, return_attn=True, **options).attn


def test_it_is_tiny_small_and_has_learnt():
    model = trained_model()
    assert model.preset == PRESETS["tiny"]
    assert (LAYERS, HEADS, HEAD_DIM, CONTEXT) == (
        model.preset.layers,
        model.preset.heads,
        model.preset.head_dim,
        model.preset.context,
    )
    assert MODEL.stat().st_size <= 1_000_000
    text = data.SAMPLE_TEXT.read_bytes()
    windows = training.batch(text, model.preset, 32, seed=0, step=0)
    assert model.loss(*windows) < 2.0  # ln 256 = 5.5 without training, about 3.5 by byte counts alone


def test_its_file_says_how_it_was_made():
    with safe_open(MODEL, framework="numpy") as file:
        about = file.metadata()
    assert about["command"].startswith("python -m fa2lab train --preset tiny ")
    assert f"--seed {about['seed']} --text fa2lab/model/text.txt" in about["command"]
    assert about["text"] == hashlib.sha256(MODEL.with_name("text.txt").read_bytes()).hexdigest()
    assert "--weights fa2lab/model/tiny.safetensors" in about["command"]


def test_it_reads_the_past_only():
    """Bytes to come change no logits before them; bytes gone by do."""
    model = trained_model()
    other_end = TEXT[:-1] + b"!"
    whole, changed = (model.forward(tokens(text))[0] for text in (TEXT, other_end))
    assert np.array_equal(whole[:, :-1], changed[:, :-1])
    assert not np.allclose(whole[:, 1:], model.forward(tokens(b"L" + TEXT[1:]))[0][:, 1:])


def test_heads_of_its_own_size_are_its_own():
    arrays = data.make("model", T=CONTEXT, H=EVERY, D=HEAD_DIM, text=TEXT)
    for name, got, own in zip("qkv", arrays, own_heads(TEXT), strict=True):
        np.testing.assert_array_equal(got, own, err_msg=name)


def test_the_model_attends_to_what_the_heads_say():
    """What data.make hands out, attended, is what the model's own attention computes on its way to the logits."""
    model = trained_model()
    q, k, v = data.make("model", T=CONTEXT, H=EVERY, D=HEAD_DIM, text=TEXT)
    out = fa.reference.attention(q, k, v, causal=True).out[:, :, :HEADS]
    _, kept = model.forward(tokens(TEXT))
    np.testing.assert_allclose(out.reshape(1, CONTEXT, -1), kept[1][3], atol=1e-5)


@pytest.mark.parametrize("D", [17, 40, 128])
def test_more_columns_give_the_same_attention(D):
    wide = data.make("model", T=CONTEXT, H=EVERY, D=D, text=TEXT)
    assert wide.q.shape == (1, CONTEXT, EVERY, D)
    np.testing.assert_allclose(weights(wide), weights(own_heads(TEXT)), atol=1e-5)
    assert not np.allclose(weights(wide, scale=HEAD_DIM**-0.5), weights(own_heads(TEXT)), atol=1e-2)  # it takes 1/√D


def test_fewer_columns_keep_it_roughly():
    narrow = data.make("model", T=CONTEXT, H=EVERY, D=8, text=TEXT)
    exact = weights(own_heads(TEXT))
    assert np.isfinite(narrow.q).all()
    assert 0.01 < np.abs(weights(narrow) - exact).mean() < np.abs(exact - exact[:, :, :, ::-1]).mean()


def test_values_turn_with_the_keys():
    """The turn that widens V keeps its lengths, so that outputs are the model's own but for the axes."""
    wide, own = data.make("model", T=CONTEXT, H=EVERY, D=40, text=TEXT), own_heads(TEXT)
    np.testing.assert_allclose(np.linalg.norm(wide.v, axis=-1), np.linalg.norm(own[2], axis=-1), rtol=1e-4)


def test_a_long_text_is_read_window_by_window():
    long = TEXT + b"\n// the second window has its own" + b" end."
    T = len(long)
    assert T > 2 * CONTEXT
    q, k, v = data.make("model", T=T, H=EVERY, D=HEAD_DIM, text=long)
    parts = [own_heads(long[i : i + CONTEXT]) for i in range(0, T, CONTEXT)]
    for got, own in zip((q, k, v), zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(got, np.concatenate(own, axis=1), atol=1e-5)
    once = data.make("model", T=CONTEXT, H=EVERY, D=HEAD_DIM, text=TEXT)
    np.testing.assert_allclose(q[:, :CONTEXT], once.q, atol=1e-5)


def test_a_short_text_is_read_over_again():
    repeated = data.make("model", T=10, H=2, D=HEAD_DIM, text=b"abc")
    written_out = data.make("model", T=10, H=2, D=HEAD_DIM, text=b"abcabcabca")
    for got, expected in zip(repeated, written_out, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_batches_read_on():
    q, *_ = data.make("model", B=2, T=CONTEXT, H=1, D=HEAD_DIM, text=TEXT + TEXT[::-1])
    np.testing.assert_allclose(q[0], own_heads(TEXT)[0][0, :, :1], atol=1e-5)
    np.testing.assert_allclose(q[1], own_heads(TEXT[::-1])[0][0, :, :1], atol=1e-5)


def test_queries_are_the_last_of_the_keys():
    """With Tq < Tk the mask is aligned to the bottom right: the queries are those of the last bytes."""
    q, k, _ = data.make("model", T=8, Tk=CONTEXT, H=EVERY, D=HEAD_DIM, text=TEXT)
    own = own_heads(TEXT)
    np.testing.assert_array_equal(q, own[0][:, -8:])
    np.testing.assert_array_equal(k, own[1])
    np.testing.assert_allclose(weights((q, k, k)), weights(own)[:, :, -8:], atol=1e-6)


def test_more_queries_than_keys():
    q, k, v = data.make("model", T=CONTEXT, Tk=8, H=2, D=HEAD_DIM, text=TEXT)
    own = own_heads(TEXT)
    np.testing.assert_array_equal(q, own[0][:, :, :2])
    np.testing.assert_array_equal(k, own[1][:, :8, :2])
    np.testing.assert_array_equal(v, own[2][:, :8, :2])


@pytest.mark.parametrize("H, Hkv", [(4, 2), (6, 1), (6, 3)])
def test_a_group_repeats_its_kv_heads_queries(H, Hkv):
    q, k, v = data.make("model", T=12, H=H, Hkv=Hkv, D=HEAD_DIM, text=TEXT)
    own = own_heads(TEXT[:12])
    assert k.shape == v.shape == (1, 12, Hkv, HEAD_DIM)
    for h in range(H):
        np.testing.assert_array_equal(q[:, :, h], own[0][:, :, h // (H // Hkv)])
    np.testing.assert_array_equal(k, own[1][:, :, :Hkv])
    grouped = weights((q, k, v))
    np.testing.assert_allclose(grouped, weights(own)[:, np.arange(H) // (H // Hkv)], atol=1e-5)


@pytest.mark.parametrize("sizes", [dict(H=7), dict(H=8, Hkv=2), dict(H=3, Hkv=2), dict(H=2, Hkv=4)], ids=str)
def test_more_heads_than_it_has_are_refused(sizes):
    H, Hkv = sizes["H"], sizes.get("Hkv", sizes["H"])
    with pytest.raises(ValueError, match=rf"model has 6 heads, and H must be a multiple .* got H={H} and Hkv={Hkv}\."):
        data.make("model", T=4, D=16, **sizes)


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="text is empty"):
        data.make("model", T=4, H=1, text=b"")


@pytest.mark.gpu
def test_a_kernel_agrees_on_it():
    arrays = data.make("model", T=45, H=EVERY, D=40)
    result = fa.attention(*arrays, causal=True, kernel="fa2_forward", return_attn=True)
    fa.parity.compare(result, fa.reference.attention(*arrays, causal=True, return_attn=True)).check()
