"""Problem: what three arrays pose, and the sentence for those that pose nothing."""

from __future__ import annotations

import engines
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fa2lab as fa
from fa2lab.problem import Problem, as_float32, pose


def zeros(*shape) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_shapes_heads_and_default_scale():
    problem, *arrays = pose(zeros(2, 5, 6, 16), zeros(2, 7, 3, 16), zeros(2, 7, 3, 16), causal=True)
    assert problem == Problem(2, 5, 7, 6, 3, 16, True, "bottom-right", 0.25)
    assert (problem.group, problem.diagonal, problem.empty) == (2, 2, False)
    assert [x.shape for x in arrays] == [(2, 5, 6, 16), (2, 7, 3, 16), (2, 7, 3, 16)]


@pytest.mark.parametrize(
    ("Tq", "Tk", "align", "seen"),
    [
        (4, 4, "bottom-right", [1, 2, 3, 4]),
        (4, 4, "top-left", [1, 2, 3, 4]),
        (2, 5, "bottom-right", [4, 5]),
        (2, 5, "top-left", [1, 2]),
        (5, 2, "bottom-right", [0, 0, 0, 1, 2]),
        (5, 2, "top-left", [1, 2, 2, 2, 2]),
        (3, 0, "bottom-right", [0, 0, 0]),
    ],
)
def test_causal_rows_see_a_prefix_of_the_keys(Tq, Tk, align, seen):
    problem = Problem(1, Tq, Tk, 1, 1, 1, True, align, 1.0)
    assert problem.keys_seen().tolist() == seen
    assert problem.mask().tolist() == [[j < n for j in range(Tk)] for n in seen]


def test_without_a_mask_every_row_sees_every_key():
    assert Problem(1, 3, 4, 1, 1, 1, False, "bottom-right", 1.0).mask().all()


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem(1, 4, 4, 2, 2, 8, True, "bottom-right", 1.0), "B=1 T=4 H=2 D=8 causal"),
        (Problem(1, 4, 5, 2, 1, 8, True, "top-left", 1.0), "B=1 Tq=4 Tk=5 H=2 over Hkv=1 D=8 causal (top-left)"),
        (Problem(1, 4, 5, 2, 2, 8, False, "top-left", 1.0), "B=1 Tq=4 Tk=5 H=2 D=8 full"),
    ],
)
def test_a_problem_in_words(problem, words):
    assert str(problem) == words


Q = zeros(2, 5, 4, 8)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ((Q, Q, zeros(2, 6, 4, 8)), r"k and v must have the same shape .*k \(2, 5, 4, 8\) and v \(2, 6, 4, 8\)"),
        ((Q, zeros(3, 5, 4, 8), zeros(3, 5, 4, 8)), "same batch; .* B=2 and k .* B=3"),
        ((Q, zeros(2, 5, 4, 9), zeros(2, 5, 4, 9)), "same head dimension; .* D=8 and k .* D=9"),
        ((Q, zeros(2, 5, 3, 8), zeros(2, 5, 3, 8)), "H=4 and Hkv=3. With H=4, Hkv may be 1, 2, 4"),
        ((zeros(2, 5, 4, 0),) * 3, "head dimension must be at least 1"),
        ((zeros(2, 5, 0, 8),) * 3, "must be at least 1"),
        ((zeros(2, 5, 32), Q, Q), r"q must have 4 axes .* got 3 .* q.reshape\(B, T, H, C // H\)"),
        ((Q, zeros(5, 8), Q), r"k must have 4 axes .* got 2 .* k\[None, :, None, :\]"),
        ((Q, Q, zeros(8)), "v must have 4 axes .* got 1"),
        ((Q, Q, np.float32(1)), "v must have 4 axes .* got 0"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(arrays, sentence):
    with pytest.raises(fa.ShapeError, match=sentence):
        pose(*arrays)


class Unreadable:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("on another device")


@pytest.mark.parametrize(
    ("k", "sentence"),
    [
        (Q.astype(int), "k must hold floating-point numbers .* got dtype int64. Convert it with np.asarray"),
        (Q.astype(complex), "k must hold floating-point numbers .* complex128"),
        ("text", "k must hold floating-point numbers"),
        (None, "k must hold floating-point numbers .* object"),
        (np.ma.masked_array(Q, Q == 0), r"k is a masked array.*k.filled\(...\)"),
        ([[1.0], [1.0, 2.0]], "k cannot be read as a NumPy array"),
        (Unreadable(), "k cannot be read as a NumPy array .*on another device"),
    ],
)
def test_what_is_no_array_of_floats_is_refused_by_name(k, sentence):
    with pytest.raises(TypeError, match=sentence):
        pose(Q, k, Q)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"scale": np.nan}, ValueError, "finite in float32; got nan.*0.353553"),
        ({"scale": np.inf}, ValueError, "finite in float32; got inf"),
        ({"scale": 1e39}, ValueError, "finite in float32"),
        ({"scale": "big"}, TypeError, "real number or None .*'big'"),
        ({"scale": True}, TypeError, "real number"),
        ({"scale": 1j}, TypeError, "real number"),
        ({"align": "left"}, ValueError, "bottom-right.*top-left.*'left'"),
        ({"causal": 1}, TypeError, "True or False; got 1"),
        ({"causal": None}, TypeError, "True or False"),
    ],
)
def test_options_that_are_none_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        pose(Q, Q, Q, **options)


@pytest.mark.parametrize("scale", [0, -2, 0.5, np.float32(0.5), np.float16(3), np.int64(2), 3.4e38])
def test_any_finite_scale_is_legal(scale):
    assert pose(Q, Q, Q, scale=scale)[0].scale == float(scale)


def test_lists_of_floats_and_numpy_bools_are_welcome():
    problem, q, _, _ = pose([[[[1.0, 2.0]]]], [[[[1.0, 2.0]]]], [[[[1.0, 2.0]]]], causal=np.True_)
    assert problem.causal is True and q.shape == (1, 1, 1, 2)


def test_posing_copies_nothing():
    view = np.broadcast_to(np.float32(1), (1000, 10**6, 10, 64))
    _, q, _, _ = pose(view, view, view)
    assert np.shares_memory(q, view)
    assert as_float32(Q) is Q


@given(
    q=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    k=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    same_v=st.booleans(),
    v=st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
def test_any_shapes_pose_a_problem_or_a_shape_error(q, k, same_v, v):
    v = k if same_v else v
    fits = k == v and q[0] == k[0] and q[3] == k[3] and min(q[2:] + k[2:]) > 0 and q[2] % max(k[2], 1) == 0
    if not fits:
        with pytest.raises(fa.ShapeError):
            pose(zeros(*q), zeros(*k), zeros(*v))
        return
    problem, *_ = pose(zeros(*q), zeros(*k), zeros(*v))
    assert (problem.B, problem.Tq, problem.H, problem.D) == tuple(q)
    assert (problem.B, problem.Tk, problem.Hkv, problem.D) == tuple(k)


@pytest.mark.parametrize(
    "call", [fa.attention, fa.reference.attention, fa.reference.tiled], ids=lambda f: f.__qualname__
)
def test_every_way_in_refuses_alike(call):
    q, k, v = engines.random(T=3, H=6, Hkv=4)
    with pytest.raises(fa.ShapeError, match="H=6 and Hkv=4"):
        call(q, k, v)
    with pytest.raises(ValueError, match="scale must be finite"):
        call(q, q, q, scale=np.inf)
