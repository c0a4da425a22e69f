"""The pictures of the backward pass show the numbers they were handed."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import plot, plot_backward
from fa2lab.plot_backward import Growth


@pytest.fixture
def figure():
    return plot.figure(9.8, 6.3)


@pytest.fixture(autouse=True)
def nothing_kept():
    """No figure of pyplot's."""
    yield
    assert plt.get_fignums() == []


def named(ax, gid: str) -> list:
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


def matrix(ax) -> np.ndarray:
    return np.asarray(ax.images[0].get_array())


def test_gradients_above_their_errors(figure, seat):
    q, k, v = fa.data.make(T=9, H=2, D=4)
    truth = fa.reference.attention_backward(q, k, v, v, causal=True)
    _, got = fa.attention_grad(q, k, v, v, causal=True, device=seat)
    text = plot_backward.gradients(figure, got, truth, head=1)
    axes = figure.axes[:6]
    for above, below, name in zip(axes[:3], axes[3:], ("dq", "dk", "dv"), strict=True):
        field = getattr(got, name)[0, :, 1]
        np.testing.assert_allclose(matrix(above), field)
        np.testing.assert_allclose(matrix(below), field - getattr(truth, name)[0, :, 1])
        assert name in above.get_title().lower()
    assert got.label in figure.get_supxlabel() and got.label in text
    spoiled = replace(got, dk=got.dk + 1)
    assert "dK 1.0e+00" in plot_backward.gradients(figure, spoiled, truth, head=1)
    assert len([ax for ax in figure.axes if ax.images]) == 6, "drawn in place"


def test_walks_have_an_arrow_a_workgroup(figure):
    state = fa.reference.states(fa.plan(*_problem(20)).problem, 8, 4)[0, 0, ::8]
    text = plot_backward.walks(figure, state, 20, 20, tiles=(8, 4), label="who")
    left, right = figure.axes
    starts = [[tuple(dot.get_xydata()[0]) for dot in named(ax, "walk starts")] for ax in (left, right)]
    assert starts[0] == [(1, 4), (1, 12), (1, 18)], "each begins in the first K tile, in the middle of its queries"
    assert starts[1] == [(2, 2), (6, 2), (10, 10), (14, 10), (18, 18)], "each begins in the first tile that sees it"
    assert "11 tiles of 15" in text and figure.get_supxlabel().startswith("who")


def test_a_workgroup_without_a_tile_has_no_arrow(figure):
    state = np.array([[0], [1]], np.uint8)  # the first queries see no key
    plot_backward.walks(figure, state, 4, 2, tiles=(2, 2), label="who")
    assert [len(named(ax, "walk starts")) for ax in figure.axes] == [1, 1]


def test_row_errors_are_drawn_and_named(figure):
    ax = figure.add_subplot()
    errors = {"a": np.array([1e-6, 0, 2e-6]), "b": np.array([1e-7, 5e-7, 1e-12])}
    plot_backward.row_errors(ax, errors, title="T")
    (a,), (b,) = (named(ax, name) for name in errors)
    np.testing.assert_allclose(a.get_ydata(), [1e-6, 2e-10, 2e-6])
    np.testing.assert_allclose(b.get_ydata(), [1e-7, 5e-7, 2e-10])
    assert a.get_marker() != b.get_marker()
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a: at most 2.0e-06", "b: at most 5.0e-07"]
    plot_backward.row_errors(ax, {"none": np.zeros(3)})


def test_growth_draws_model_measure_limit_and_refusal(figure):
    ax = figure.add_subplot()
    kept = Growth("kept", [16, 64, 256], [2048, 2**15, 2**19], [1024, 2**14, 2**18], {16: 2048}, [256])
    free = Growth("free", [16, 64, 256], [2048, 2**13, 2**15], [1024, 2**11, 2**13], {16: 2048, 64: 2**13})
    plot_backward.growth(ax, [kept, free], limit=2**17, limit_name="room")
    line, marks = named(ax, "free model")[0], named(ax, "free measured")[0]
    np.testing.assert_array_equal(line.get_xydata(), [[16, 2048], [64, 2**13], [256, 2**15]])
    np.testing.assert_array_equal(marks.get_xydata(), [[16, 2048], [64, 2**13]])
    np.testing.assert_array_equal(named(ax, "kept model")[0].get_xdata(), [16, 64])
    np.testing.assert_array_equal(named(ax, "refused")[0].get_xydata(), [[256, 2**19]])
    np.testing.assert_array_equal(named(ax, "largest buffer")[0].get_ydata(), [1024, 2**14, 2**18])
    assert list(named(ax, "limit")[0].get_ydata()) == [2**17, 2**17]
    said = [text.get_text() for text in ax.texts]
    assert said == ["kept\n512 KiB", "free\n32 KiB", "room: 128 KiB"]
    plot_backward.growth(ax, [free], limit=2**17, limit_name="room")
    assert named(ax, "refused") == [] and len(ax.texts) == 2, "drawn afresh"


def _problem(T):
    return fa.attention(*fa.data.make(T=T, H=1, D=4), causal=True, device="numpy").problem, fa.limits.BROWSER
