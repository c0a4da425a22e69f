"""Pictures of training, the curve that grows, and the heads on a typed sentence: what is drawn is what was computed."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

import fa2lab as fa
from fa2lab import gates, gpt, plot, plot_training, widgets_training
from fa2lab.gpt_attention import NumpyAttention
from fa2lab.trained import trained_model

PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def nothing_kept():
    """No figure of pyplot's stays open."""
    yield
    assert plt.get_fignums() == []


def new_axes():
    return plot.figure().add_subplot()


def marked(ax, gid: str) -> list:
    return [line for line in ax.lines if line.get_gid() == gid]


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


# Losses and distances.


def test_losses_lie_over_numpys_and_their_bounds():
    ax = new_axes()
    curves = {"whole": np.array([5.5, 4.0, 3.0]), "broken": np.array([5.5, 4.5, 4.0])}
    plot_training.losses(ax, curves, expected=np.array([5.5, 4.1, 3.1]), below=0.5)
    for line, curve in zip(marked(ax, "loss"), curves.values(), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), curve)
        np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
    (expected,), (bound,), (nothing,) = (marked(ax, gid) for gid in ("expected", "bound", "knows nothing"))
    assert list(expected.get_ydata()) == [5.5, 4.1, 3.1]
    assert set(bound.get_ydata()) == {0.5}
    assert nothing.get_ydata()[0] == pytest.approx(5.545, abs=1e-3)
    assert legend(ax) == ["ln 256", "below 0.5 wanted", "NumPy float64", "whole", "broken"]


def test_curves_differ_without_colour():
    ax = new_axes()
    curves = {name: np.arange(4.0) for name in "abc"}
    plot_training.losses(ax, curves, expected=np.arange(4.0))
    looks = [(line.get_linestyle(), line._dash_pattern, line.get_linewidth()) for line in ax.lines]
    assert len(set(map(str, looks))) == len(looks) == 5
    (expected,) = marked(ax, "expected")
    assert all(expected.get_linewidth() > 1.5 * line.get_linewidth() for line in marked(ax, "loss"))


def test_the_axis_has_room_for_the_steps_to_come():
    ax = new_axes()
    plot_training.losses(ax, {"so far": np.array([5.0])}, steps=40)
    assert ax.get_xlim() == (-0.5, 39.5)
    plot_training.losses(ax, {}, steps=40)
    assert ax.get_xlim() == (-0.5, 39.5) and marked(ax, "loss") == []


def test_distances_stand_on_a_log_axis_with_zero_at_the_foot():
    ax = new_axes()
    plot_training.distances(ax, {"fa2": np.array([0.0, 1e-7, 3e-4])}, bounds={"5 %": 0.05, "0.1 %": 1e-3})
    assert ax.get_yscale() == "log"
    (line,) = marked(ax, "distance")
    np.testing.assert_array_equal(line.get_ydata(), [plot_training.LOWEST, 1e-7, 3e-4])
    low, high = ax.get_ylim()
    assert low < plot_training.LOWEST and high > 0.05
    assert ax.get_yticklabels()[0].get_text() == "0"
    bounds = marked(ax, "bound")
    assert [line.get_ydata()[0] for line in bounds] == [0.05, 1e-3]
    assert bounds[0].get_linestyle() != bounds[1].get_linestyle()
    assert list(bounds[0].get_xdata()) == [-0.5, 2.5]
    plot_training.distances(ax, {"fa2": np.ones(9)}, bounds={"5 %": 0.05}, bound_steps=4)
    assert list(marked(ax, "bound")[0].get_xdata()) == [-0.5, 3.5]
    plot_training.distances(ax, {"fa2": np.array([0.0, 1e-7, 3e-4])}, bounds={"5 %": 0.05, "0.1 %": 1e-3})
    assert legend(ax) == ["5 %", "0.1 %", "fa2"]


def test_a_loss_that_is_no_number_still_has_a_picture():
    figure = plot.figure()
    curves = {"burst": np.array([5.5, np.nan, np.inf])}
    plot_training.gate(figure, curves, np.array([5.5, 5.0, 4.0]), bounds={"allowed": 1e-3}, label="x on y")
    assert np.isfinite(figure.axes[1].get_ylim()).all()
    FigureCanvasAgg(figure).draw()


@pytest.mark.parametrize("relative", [False, True])
def test_a_gate_has_losses_and_distance_side_by_side(relative):
    figure = plot.figure()
    losses, expected = np.array([5.0, 2.2]), np.array([5.0, 2.0])
    wishes = dict(bounds={"allowed": 1e-3}, label="fa2 on paper", relative=relative)
    said = plot_training.gate(figure, {"fa2": losses}, expected, **wishes)
    left, right = figure.axes
    np.testing.assert_array_equal(marked(left, "loss")[0].get_ydata(), losses)
    assert marked(right, "distance")[0].get_ydata()[1] == pytest.approx(0.1 if relative else 0.2)
    assert ("share" in right.get_ylabel()) == relative
    assert "fa2 from 5.00 to 2.20 nats, at most" in said and ("1.0e-01" if relative else "2.0e-01") in said
    assert figure._supxlabel.get_text() == "fa2 on paper"
    plot_training.gate(figure, {"fa2": losses}, expected, **wishes)
    assert figure.axes == [left, right]  # drawn again in place


# Memory and scores.


def test_memory_is_drawn_as_planned_and_ringed_where_counted():
    ax = new_axes()
    sizes = {"kept": [2**20, 2**22], "tiled": [2**20, 2**21]}
    plot_training.memory(ax, [128, 256], sizes, measured={"kept": (256, 2**22)})
    assert [list(line.get_ydata()) for line in marked(ax, "planned")] == list(sizes.values())
    (ring,) = marked(ax, "measured")
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (256, 2**22)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["128", "256"]
    assert {"4.0 MiB", "2.0 MiB"} <= {text.get_text() for text in ax.texts}
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_the_best_head_is_told_from_the_others_without_colour():
    ax = new_axes()
    plot_training.head_scores(ax, {"a": 0.1, "b": 0.4, "c": 0.2}, even=0.15, title="looks back")
    assert [bar.get_width() for bar in ax.patches] == [0.1, 0.4, 0.2]
    assert [bar.get_gid() for bar in ax.patches] == ["head", "best", "head"]
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [True, False, True]
    assert marked(ax, "even")[0].get_xdata()[0] == 0.15
    assert [text.get_text().strip() for text in ax.texts] == ["0.100", "0.400", "0.200"]


def test_the_gallery_has_a_row_a_layer_on_one_scale():
    figure = plot.figure()
    attn = np.random.default_rng(0).random((2, 3, 4, 4))
    said = plot_training.head_gallery(figure, attn, list("a b\n"), label="fa2 on paper")
    first = list(figure.axes)
    assert [ax.get_title() for ax in first] == [f"layer {i}, head {h}" for i in range(2) for h in range(3)]
    for ax, weights in zip(first, attn.reshape(6, 4, 4), strict=True):
        (image,) = ax.images
        assert image.get_clim() == (0, attn.max())
        np.testing.assert_array_equal(image.get_array()[3], weights[3])
        assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "␣", "b", "⏎"]
        assert len([c for c in ax.collections if c.get_gid() == "masked"]) == 1
    assert "6 heads over the 4 bytes 'a b\\n', by fa2 on paper" in said
    plot_training.head_gallery(figure, attn[:, :, :2, :2], list("ab"), label="x")
    assert figure.axes == first
    plot_training.head_gallery(figure, attn[:1], list("abcd"), label="x")
    assert len(figure.axes) == 3  # another model, another gallery


# The curve that grows.


def test_the_live_curve_holds_every_loss_and_paints_the_last(unpainted, monkeypatch, capsys):
    monkeypatch.setattr(widgets_training, "SECONDS_A_PICTURE", 1e9)
    live = widgets_training.LiveLoss(6)
    pictures = [live.image.value]
    for step in range(6):
        live(step, 5.5 - step)
        pictures.append(live.image.value)
    assert live.losses == [5.5, 4.5, 3.5, 2.5, 1.5, 0.5]
    assert len(set(pictures)) == 2 and pictures[-1] != pictures[0]  # at the start and at the end
    assert live.image.tooltip == "loss: a curve of losses, 0.500 nats after 6 steps."
    live.close()
    assert capsys.readouterr() == ("", "")


def test_the_live_curve_paints_on_the_way(unpainted, monkeypatch):
    monkeypatch.setattr(widgets_training, "SECONDS_A_PICTURE", 0.0)
    live = widgets_training.LiveLoss(5)
    seen = set()
    for step in range(5):
        live(step, 1.0)
        seen.add(live.image.value)
    assert len(seen) == 5
    assert (live._bar.n, live._bar.total) == (5, 5)
    assert "loss=1.000" in live._bar.container.children[2].value
    live.close()


def test_the_live_curve_starts_anew(unpainted):
    live = widgets_training.LiveLoss(3)
    for step in (0, 1, 0):
        live(step, 2.0 + step)
    assert live.losses == [2.0] and live._bar.n == 1
    live.close()


def test_a_gate_feeds_the_live_curve():
    live = widgets_training.LiveLoss(3, "overfit")
    gate = gates.overfit(NumpyAttention(), steps=3, progress=live)
    assert live.losses == list(gate.losses)
    assert live.image.value[:4] == PNG
    live.close()


# The heads on a sentence.


def test_heads_are_the_models_own_attention(seat):
    got = widgets_training.heads("let key0 = 7;", device=seat)
    model = trained_model()
    tokens = np.frombuffer(b"let key0 = 7;", np.uint8)[None].astype(np.int64)
    assert got.attn.shape == (2, 3, 13, 13)
    for layer in range(2):
        truth = fa.reference.attention(*model.heads_of(tokens, layer), causal=True, return_attn=True)
        np.testing.assert_allclose(got.attn[layer], truth.attn[0], atol=1e-5)
    assert "".join(got.labels) == "let key0 = 7;"
    assert got.label == ("fa2_forward on " + (str(seat.adapter) if seat != "numpy" else fa.engine.NUMPY))
    assert got.words == "13 of at most 32 bytes."


def test_the_end_of_a_long_text_is_read():
    text = "0123456789" * 4
    got = widgets_training.heads(text, device="numpy")
    assert got.read == text[-32:].encode() and got.attn.shape[-1] == 32
    assert got.words == "The model reads 32 bytes: the last ones of 40."


def test_bytes_that_are_no_characters_are_dots():
    got = widgets_training.heads("né\n\x00\ud800", device="numpy")
    assert got.labels == ["n", "·", "·", "\n", "·", "?"]


def test_another_models_heads():
    model = gpt.GPT(gpt.Preset(layers=1, width=8, context=4, heads=2), NumpyAttention())
    got = widgets_training.heads("abcdef", model=model, device="numpy")
    assert got.attn.shape == (1, 2, 4, 4) and got.read == b"cdef"
    assert got.words == "The model reads 4 bytes: the last ones of 6."
    assert widgets_training.heads("ab", model=model, device="numpy").words == "2 of at most 4 bytes."


def test_the_view_follows_what_is_typed(seat):
    view = widgets_training.sentence(device=seat)
    assert repr(widgets_training.SENTENCE) in view.image.tooltip
    before = view.image.value
    view.controls["text"].value = "typed"
    assert "the 5 bytes 'typed'" in view.image.tooltip and view.image.value != before
    assert "5 of at most 32" in view.status.value
    assert view.controls["text"].description == "text"
    view.close()


def test_no_text_is_said_and_the_next_one_recovers(unpainted):
    view = widgets_training.sentence("a", device="numpy")
    view.controls["text"].value = ""
    assert "Not computed:" in view.status.value and "one character is the least" in view.status.value
    assert "fa2lab-stale" in view.image.get_state()["_dom_classes"]
    with pytest.raises(ValueError, match="There is no text"):
        view.set(text="")
    view.set(text="b")
    assert "fa2lab-stale" not in view.image.get_state()["_dom_classes"] and "'b'" in view.image.tooltip
    view.close()
