"""Inputs: patterns by name, and files of a user's own."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

import fa2lab as fa
from fa2lab import data

SIZES = dict(B=2, T=12, H=4, D=8)


@pytest.mark.parametrize("pattern", data.PATTERNS)
def test_every_pattern_has_the_shapes_and_types_asked_for(pattern):
    q, k, v = data.make(pattern, **SIZES, Tk=20, Hkv=2)
    assert (q.shape, k.shape, v.shape) == ((2, 12, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8))
    for x in (q, k, v):
        assert x.dtype == np.float32 and x.flags.c_contiguous and np.isfinite(x).all()
    assert fa.reference.attention(q, k, v, causal=True).out.std() > 0


@pytest.mark.parametrize("pattern", data.PATTERNS)
def test_the_same_seed_gives_the_same_bits(pattern):
    first, again, other = (data.make(pattern, **SIZES, seed=seed) for seed in (3, 3, 4))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
    assert any(a.tobytes() != b.tobytes() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("pattern", data.PATTERNS)
@pytest.mark.parametrize("sizes", [dict(B=1, T=1, H=1, D=1), dict(T=3, H=3, D=5, Hkv=1)], ids=["smallest", "odd"])
def test_every_pattern_takes_small_and_odd_sizes(pattern, sizes):
    q, k, v = data.make(pattern, **sizes)
    assert q.shape[1] == k.shape[1] == v.shape[1] == sizes["T"] and np.isfinite(q).all()


def weights(pattern: str, **sizes) -> np.ndarray:
    return fa.reference.attention(
        *data.make(pattern, **(dict(T=60, H=2, D=32) | sizes)), causal=True, return_attn=True
    ).attn


def test_needle_is_found_by_every_row_that_may_see_it():
    assert np.all(weights("needle")[:, :, 20:, 20] > 0.5)


def test_equal_keys_give_plain_averages():
    attn = weights("equal")
    np.testing.assert_allclose(attn[0, 0], np.tril(np.ones((60, 60))) / np.arange(1, 61)[:, None], atol=1e-7)


def test_band_looks_at_its_near_past():
    attn = weights("band")[0, 1]
    distance = np.arange(60)[:, None] - np.arange(60)
    assert (attn * (distance < 6)).sum(-1).min() > 0.5


def test_huge_scores_choose_one_key():
    assert np.median(weights("huge", T=30).max(-1)) > 0.99


def test_equal_bytes_attend_to_each_other():
    q, k, v = data.make("text", T=8, H=2, D=32, text=b"abababab")
    assert np.array_equal(v[0, 0], v[0, 2]) and not np.array_equal(v[0, 0], v[0, 1])
    attn = fa.reference.attention(q, k, v, return_attn=True).attn[0, 0]
    assert np.all(attn[:, 0::2].sum(-1)[0::2] > 0.9) and np.all(attn[:, 1::2].sum(-1)[1::2] > 0.9)


def test_text_may_be_a_string_and_is_repeated_to_length():
    from_string, from_bytes = (data.make("text", T=9, text=text) for text in ("né", "né".encode()))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(from_string, from_bytes, strict=True))
    assert np.array_equal(from_string.v[0, 0], from_string.v[0, 3])
    with pytest.raises(ValueError, match="text is empty"):
        data.make("text", text="")


@pytest.mark.parametrize(
    ("wishes", "error", "sentence"),
    [
        ({"pattern": "noise"}, ValueError, "'noise'; there are 'random', 'text', 'model', 'needle'"),
        ({"T": 0}, ValueError, "T must be a whole number of at least 1; got 0"),
        ({"H": -1}, ValueError, "H must be a whole number"),
        ({"D": 1.5}, ValueError, "D must be .* got 1.5"),
        ({"B": True}, ValueError, "B must be .* got True"),
        ({"T": 10**12}, fa.LimitError, r"T=1,000,000,000,000.* makes arrays of [\d,]+ B; this machine has [\d,]+ B"),
    ],
    ids=str,
)
def test_wishes_that_cannot_be_met_are_refused(wishes, error, sentence):
    with pytest.raises(error, match=sentence):
        data.make(**wishes)


# Files.


def test_an_npz_comes_back_as_it_was(tmp_path):
    q, k, v = data.make("random", T=5)
    out = fa.reference.attention(q, k, v).out
    np.savez(tmp_path / "full.npz", q=q, k=k, v=v, out=out, note=np.array(3))
    loaded = data.load(tmp_path / "full.npz")
    for got, expected in zip((*loaded, loaded.out), (q, k, v, out), strict=True):
        np.testing.assert_array_equal(got, expected)
    np.savez_compressed(tmp_path / "small.npz", q=q, k=k, v=v)
    assert data.load(str(tmp_path / "small.npz")).out is None


def not_a_zip(path):
    path.write_text("q k v")


def empty_file(path):
    path.touch()


def cut_off(path):
    np.savez(path, q=np.ones(100), k=np.ones(100), v=np.ones(100))
    path.write_bytes(path.read_bytes()[:-200])


def renamed_npy(path):
    with path.open("wb") as file:
        np.save(file, np.ones((1, 2, 1, 2)))


def pickled_objects(path):
    objects = np.array([{"a": 1}, None], dtype=object)
    np.savez(path, q=objects, k=objects, v=objects, allow_pickle=True)


def zip_of_text(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("q", "not an array")
        file.writestr("k.npy", "not an array")


@pytest.mark.parametrize("write", [not_a_zip, empty_file, cut_off, renamed_npy, pickled_objects])
def test_a_file_that_is_no_npz_is_refused_in_one_sentence(tmp_path, write):
    path = tmp_path / "dump.npz"
    write(path)
    with pytest.raises(ValueError, match="dump.npz does not read as an .npz of plain arrays .*np.savez"):
        data.load(path)


def test_a_zip_of_other_things_is_refused(tmp_path):
    zip_of_text(tmp_path / "dump.npz")
    with pytest.raises(ValueError, match="dump.npz"):
        data.load(tmp_path / "dump.npz")


def test_an_npz_without_q_is_refused(tmp_path):
    np.savez(tmp_path / "dump.npz", k=np.ones(1), query=np.ones(1))
    with pytest.raises(fa.ShapeError, match=r"dump.npz lacks q, v; it holds k, query. Expected q \(B, Tq, H, D\)"):
        data.load(tmp_path / "dump.npz")
    np.savez(tmp_path / "none.npz")
    with pytest.raises(fa.ShapeError, match="lacks q, k, v; it holds nothing"):
        data.load(tmp_path / "none.npz")


@pytest.mark.parametrize("name", ["absent.npz", "."])
def test_a_path_without_a_file_is_refused(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="There is no file .* expected an .npz"):
        data.load(tmp_path / name)
