"""Files of a user's own Q, K and V: every kind in every layout comes back the same, and what does not fit is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import fa2lab as fa
from fa2lab import files

B, T, H, D = 2, 5, 3, 4
KINDS = ("npz", "npy", "safetensors")


def arrays(Hkv: int = H, out: bool = False) -> dict[str, np.ndarray]:
    """q, k, v and perhaps out, `(B, T, H, D)`, all numbers different."""
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal((B, T, H if name == "q" else Hkv, D), np.float32) for name in "qkv"}
    return made | ({"out": rng.standard_normal((B, T, H, D), np.float32)} if out else {})


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """The array as a file in this layout has it."""
    if layout == "BHTD":
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    return x.reshape(*x.shape[:2], -1) if layout == "BTC" else x


def write(folder: Path, kind: str, content: dict[str, np.ndarray]) -> Path:
    path = folder / f"dump.{kind}"
    if kind == "npz":
        np.savez(path, **content)
    elif kind == "npy":
        np.save(path, [content[name] for name in "qkv"])
    else:
        save_file(content, path)
    return path


def load(path: Path, layout: str, **options) -> files.Arrays:
    return files.load(path, layout=layout, **({"heads": H} if layout == "BTC" else {}), **options)


def same(loaded: files.Arrays, made: dict[str, np.ndarray]) -> None:
    for name, x in made.items():
        np.testing.assert_array_equal(getattr(loaded, name), x, err_msg=name)
        assert getattr(loaded, name).dtype == x.dtype


# Round trips.


@pytest.mark.parametrize("layout", files.LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_layout_comes_back(tmp_path, kind, layout):
    made = arrays()
    path = write(tmp_path, kind, {name: laid_out(x, layout) for name, x in made.items()})
    loaded = load(path, layout)
    same(loaded, made)
    assert loaded.out is None
    np.testing.assert_array_equal(list(loaded)[1], made["k"])  # it unpacks to q, k, v


@pytest.mark.parametrize("layout", files.LAYOUTS)
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_out_and_fewer_kv_heads_come_back(tmp_path, kind, layout):
    made = arrays(Hkv=1, out=True)
    path = write(tmp_path, kind, {name: laid_out(x, layout) for name, x in made.items()})
    same(load(path, layout), made)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_type_stays_as_it_is(tmp_path, kind, dtype):
    made = {name: x.astype(dtype) for name, x in arrays().items()}
    same(load(write(tmp_path, kind, made), "BTHD"), made)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_other_arrays_in_the_file_do_not_matter(tmp_path, kind):
    made = arrays()
    same(load(write(tmp_path, kind, made | {"note": np.zeros(3, np.int64)}), "BTHD"), made)


def test_the_wrong_layout_is_another_array(tmp_path):
    """The control of the round trips: they can fail."""
    made = arrays()
    loaded = load(write(tmp_path, "npz", made), "BHTD")
    assert loaded.q.shape == (B, H, T, D)
    with pytest.raises(AssertionError):
        same(loaded, made)


def test_a_path_may_be_a_string(tmp_path):
    made = arrays()
    same(files.load(str(write(tmp_path, "npy", made))), made)


# What does not fit, in one sentence.


def refused(error: type, sentence: str, path: Path, **options) -> None:
    with pytest.raises(error, match=sentence) as caught:
        files.load(path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["THD", "bthd", ""])
def test_an_unknown_layout(tmp_path, layout):
    path = write(tmp_path, "npz", arrays())
    refused(ValueError, f"No layout is called '{layout}'; there are 'BTHD', 'BHTD', 'BTC'", path, layout=layout)


@pytest.mark.parametrize("heads", [None, 0, -2, 1.5, True])
def test_btc_without_its_heads(tmp_path, heads):
    path = write(tmp_path, "npz", {name: laid_out(x, "BTC") for name, x in arrays().items()})
    refused(ValueError, 'layout="BTC" needs heads, .* got ' + str(heads), path, layout="BTC", heads=heads)


def test_heads_that_do_not_divide_the_columns(tmp_path):
    path = write(tmp_path, "npz", {name: laid_out(x, "BTC") for name, x in arrays().items()})
    refused(fa.ShapeError, "q has 12 columns, which 5 heads do not divide", path, layout="BTC", heads=5)


def test_kv_columns_that_are_no_heads(tmp_path):
    content = {name: laid_out(x, "BTC") for name, x in arrays().items()}
    content["k"] = content["k"][..., :6]
    path = write(tmp_path, "npz", content)
    refused(fa.ShapeError, r"k has 6 columns, no multiple of q's 12/3 = 4", path, layout="BTC", heads=3)


def test_no_columns_at_all(tmp_path):
    path = write(tmp_path, "npz", dict.fromkeys("qkv", np.zeros((1, 2, 0))))
    refused(fa.ShapeError, "q has 0 columns, no multiple of q's 0/3 = 0", path, layout="BTC", heads=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout, axes, sentence",
    [
        ("BTHD", 3, r"q has shape \(2, 5, 12\); layout='BTHD' wants 4 axes. 3 axes fit 'BTC'"),
        ("BHTD", 3, r"layout='BHTD' wants 4 axes. 3 axes fit 'BTC'"),
        ("BTC", 4, r"q has shape \(2, 5, 3, 4\); layout='BTC' wants 3 axes. 4 axes fit 'BTHD' or 'BHTD'"),
        ("BTHD", 2, r"layout='BTHD' wants 4 axes. 2 axes fit no layout"),
    ],
)
def test_too_many_or_too_few_axes(tmp_path, kind, layout, axes, sentence):
    shapes = {4: (B, T, H, D), 3: (B, T, H * D), 2: (B * T, H * D)}
    path = write(tmp_path, kind, {name: x.reshape(shapes[axes]) for name, x in arrays().items()})
    refused(fa.ShapeError, sentence, path, layout=layout, **({"heads": H} if layout == "BTC" else {}))


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_an_array_that_is_missing(tmp_path, kind):
    content = arrays()
    content["key"] = content.pop("k")
    path = write(tmp_path, kind, content)
    refused(fa.ShapeError, r"dump\.\w+ lacks k; it holds .*key.* Expected q \(B, Tq, H, D\)", path)


def test_a_missing_file_and_a_folder(tmp_path):
    for kind in KINDS:
        refused(FileNotFoundError, "There is no file .*absent", tmp_path / f"absent.{kind}")
    refused(FileNotFoundError, "There is no file", tmp_path)


@pytest.mark.parametrize("name", ["dump.pt", "dump", "dump.npz.gz", "dump.NPZ"])
def test_a_file_of_another_kind(tmp_path, name):
    (tmp_path / name).write_bytes(b"1")
    refused(ValueError, r"is none of \.npz, \.npy, \.safetensors; write one by np\.savez", tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"no such format", bytes(200)], ids=["empty", "text", "zeros"])
@pytest.mark.parametrize(
    "kind, sentence",
    [
        ("npz", "does not read as an .npz of plain arrays .*; write one by np.savez"),
        ("npy", "does not read as an .npy of plain numbers"),
        ("safetensors", "does not read as safetensors of float16, float32 or float64"),
    ],
)
def test_a_file_whose_content_is_not_what_its_name_says(tmp_path, kind, sentence, content):
    path = tmp_path / f"dump.{kind}"
    path.write_bytes(content)
    refused(ValueError, sentence, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_off(tmp_path, kind):
    path = write(tmp_path, kind, arrays())
    path.write_bytes(path.read_bytes()[:-40])
    refused(ValueError, f"dump.{kind} does not read as", path)


@pytest.mark.parametrize("stacked", [np.zeros(()), np.zeros((2, B, T, H, D)), np.zeros((4, T))], ids=["0", "2", "4"])
def test_an_npy_that_is_not_three_arrays(tmp_path, stacked):
    np.save(tmp_path / "dump.npy", stacked)
    sentence = r"expected q, k and v along the first axis, np\.save\(path, \[q, k, v\]\)"
    refused(fa.ShapeError, sentence, tmp_path / "dump.npy")


def test_an_npz_under_the_name_of_an_npy(tmp_path):
    write(tmp_path, "npz", arrays()).rename(tmp_path / "dump.npy")
    refused(fa.ShapeError, "an .npz's content; expected q, k and v along the first axis", tmp_path / "dump.npy")


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_pickled_objects_are_not_opened(tmp_path, kind):
    objects = np.array([{"a": 1}, None, 2], dtype=object)
    path = tmp_path / f"dump.{kind}"
    if kind == "npz":
        np.savez(path, q=objects, k=objects, v=objects)
    else:
        np.save(path, objects, allow_pickle=True)
    refused(ValueError, f"does not read as an .{kind} of plain", path)


def test_a_type_that_numpy_lacks_is_named(tmp_path):
    """bfloat16, as PyTorch's users have it: two bytes a number, which NumPy has no type for."""
    shape = [1, 2, 1, 2]
    spans = {name: [8 * i, 8 * i + 8] for i, name in enumerate("qkv")}
    entries = {name: {"dtype": "BF16", "shape": shape, "data_offsets": span} for name, span in spans.items()}
    head = json.dumps(entries).encode()
    path = tmp_path / "dump.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(24))
    refused(ValueError, "does not read as safetensors of float16, float32 or float64", path)


def test_columns_of_no_rows_still_have_heads(tmp_path):
    np.savez(tmp_path / "empty.npz", q=np.zeros((1, 0, 12)), k=np.zeros((1, 0, 6)), v=np.zeros((1, 0, 6)))
    arrays = files.load(tmp_path / "empty.npz", layout="BTC", heads=4)
    assert (arrays.q.shape, arrays.k.shape, arrays.v.shape) == ((1, 0, 4, 3), (1, 0, 2, 3), (1, 0, 2, 3))
