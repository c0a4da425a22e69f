"""The pictures of one row's softmax, and the slider over them: what is drawn is what the states say."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from fa2lab import plot, plot_softmax, reference, widgets_softmax
from fa2lab.widgets_softmax import ROWS, walk, walk_through


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


# The numbers that are drawn.


def test_six_numbers_by_hand():
    """Scores 0 2 1 0 3 1 times ln 2: every sum is a sum of powers of two."""
    steps = walk("six numbers", block=1)
    np.testing.assert_allclose(steps.m[1:] / np.log(2), [0, 2, 2, 2, 3, 3], rtol=1e-15)
    np.testing.assert_allclose(steps.l, [0, 1, 5 / 4, 7 / 4, 2, 2, 9 / 4], rtol=1e-15)
    np.testing.assert_allclose(steps.alpha[1:], [0, 1 / 4, 1, 1, 1 / 2, 1], rtol=1e-15)
    np.testing.assert_allclose(steps.out[1:], [6, 2, 2, 2.25, 4.125, 4], rtol=1e-15)
    assert steps.m[0] == -np.inf
    assert np.isnan([steps.alpha[0], steps.out[0]]).all()


@pytest.mark.parametrize("block", widgets_softmax.BLOCKS)
@pytest.mark.parametrize("row", ROWS)
def test_every_step_is_the_softmax_of_the_keys_seen(row, block):
    steps = walk(row, block)
    s, v = ROWS[row]()
    assert steps.n_steps == -(-len(s) // block)
    assert steps.seen(steps.n_steps) == len(s)
    for t in range(1, steps.n_steps + 1):
        n = steps.seen(t)
        np.testing.assert_allclose(steps.weights[t], softmax(s[:n]), rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(steps.out[t], softmax(s[:n]) @ v[:n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: walk("no such row"), "No row of scores is called 'no such row'; there are 'six numbers'"),
        (lambda: walk("six numbers", block=0), "block must be at least 1 key; got 0"),
        (lambda: walk_through([], []), "at least 1"),
        (lambda: walk_through([1.0, 2.0], [1.0]), "same length"),
        (lambda: widgets_softmax.at_step(walk(), 7), "step must be between 0 and 6; got 7"),
    ],
)
def test_what_cannot_be_walked_is_said(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# The pictures.


def test_seen_new_and_to_come_differ_without_colour():
    ax = plot.figure().add_subplot()
    plot_softmax.scores(ax, np.array([1.0, 3, 2, 5]), seen=3, new=1, m=3.0)
    bars = ax.patches
    assert [bar.get_height() for bar in bars] == [1, 3, 2, 5]
    assert [bar.get_facecolor()[3] for bar in bars] == [1, 1, 1, 0]  # filled, or an outline
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, True, False]
    line = next(c for c in ax.collections if c.get_gid() == "m")
    assert line.get_segments()[0].tolist() == [[-0.5, 3], [2.5, 3]]
    assert "m = 3" in [text.get_text() for text in ax.texts]


def test_no_maximum_is_drawn_before_the_first_key():
    ax = plot.figure().add_subplot()
    plot_softmax.scores(ax, np.array([1.0, 3]), seen=0, m=-np.inf)
    assert [c for c in ax.collections if c.get_gid() == "m"] == []
    assert not any("m =" in text.get_text() for text in ax.texts)


def test_a_block_keeps_the_numbers_of_its_keys():
    ax = plot.figure().add_subplot()
    plot_softmax.scores(ax, np.array([1.0, 3, 2]), seen=3, first=3)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "4", "5"]


def test_weights_stand_beside_the_final_softmax():
    ax = plot.figure().add_subplot()
    plot_softmax.weights(ax, np.array([0.2, 0.8]), np.array([0.1, 0.4, 0.5]), new=1)
    assert [bar.get_height() for bar in ax.patches] == [0.2, 0.8]
    assert [segment[0][1] for segment in ax.collections[0].get_segments()] == [0.1, 0.4, 0.5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["so far: exp(s - m) / l", "final softmax"]


def test_history_stops_at_the_step_and_spans_all_steps():
    ax = plot.figure().add_subplot()
    values = np.array([np.nan, 6, 2, 4])
    plot_softmax.history(ax, values, step=2, name="O", final=True)
    final, path, now = ax.lines
    assert list(final.get_ydata()) == [4, 4]
    assert list(path.get_xdata()) == [1, 2] and list(path.get_ydata()) == [6, 2]
    assert list(now.get_xdata()) == [2] and list(now.get_ydata()) == [2]
    assert ax.get_title() == "O: 2"
    limits = ax.get_xlim(), ax.get_ylim()
    plot_softmax.history(ax, values, step=0, name="O", final=True)
    assert (ax.get_xlim(), ax.get_ylim()) == limits
    assert ax.get_title() == "O: none yet"


def test_all_steps_are_drawn_in_the_same_axes():
    figure = plot.figure()
    walked = walk("six numbers", block=2)
    texts = [plot_softmax.steps(figure, walked, step) for step in range(walked.n_steps + 1)]
    first = list(figure.axes)
    plot_softmax.steps(figure, walked, 1)
    assert figure.axes == first and len(first) == 5
    assert texts[0] == "A row of 6 scores, none of them seen yet."
    assert texts[-1].endswith("running O 4 of a final 4.")
    assert len(set(texts)) == len(texts)
    assert all(ax.get_title() for ax in figure.axes)
    assert "NumPy float64" in figure._supxlabel.get_text()


# The slider.


def test_the_view_follows_its_slider():
    view = widgets_softmax.online_softmax(step=3)
    before = bytes(view.image.value)
    assert "3 of 6 scores seen" in view.image.tooltip
    view.controls["step"].value = 5
    assert "5 of 6 scores seen" in view.image.tooltip
    assert bytes(view.image.value) != before
    assert bytes(view.image.value).startswith(b"\x89PNG")
    assert plt.get_fignums() == []  # no figure that pyplot would keep
    view.close()


def test_a_shorter_walk_takes_the_slider_to_its_end():
    view = widgets_softmax.online_softmax(step=6)
    view.controls["block"].value = 3
    assert view.values == {"step": 2, "block": 3, "row": "six numbers"}
    assert "6 of 6 scores seen after 2 blocks" in view.image.tooltip
    view.controls["row"].value = "text: a byte looks back"
    assert view.controls["step"].max == 8
    assert "6 of 24 scores seen after 2 blocks" in view.image.tooltip
    assert view.status.value == ""
    view.close()


def test_each_control_has_a_name_to_be_said():
    view = widgets_softmax.online_softmax()
    assert [control.description for control in view.controls.values()] == [
        "blocks taken in",
        "keys a block",
        "row of scores",
    ]
    view.close()


def test_a_walk_without_the_rescale_is_another_picture(monkeypatch):
    """What the picture says depends on alpha: without it the running O is wrong from the first new maximum on."""

    def no_rescale(a, b):
        return reference.State(np.maximum(a.m, b.m), a.l + b.l, a.o + b.o)

    monkeypatch.setattr(widgets_softmax, "merge", no_rescale)
    broken = walk("six numbers", block=3)
    assert broken.out[1] == pytest.approx(2)
    assert broken.out[2] == pytest.approx((3.5 + 7.25) / (1.75 + 1.375))
