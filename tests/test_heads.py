"""Heads in numbers, in pictures and in the gallery: entropy, distances, thumbnails, and the one that is held."""

from __future__ import annotations

import base64
import io
import re

import ipywidgets
import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread
from views import click, fresh

import fa2lab as fa
from fa2lab import heads, plot, plot_heads, widgets, widgets_heads


@pytest.fixture(autouse=True)
def nothing_kept(unpainted):
    """No run beyond its test."""
    yield
    widgets_heads._run.cache_clear()


def named(ax, gid: str) -> list:
    """The artists of an Axes with this gid."""
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


# Entropy and distances


def test_entropy_runs_from_one_key_to_all_keys():
    rows = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4, [0] * 4])
    np.testing.assert_allclose(heads.entropy(rows), [0, np.log(2), np.log(4), 0])
    assert not np.signbit(heads.entropy(rows)).any(), "no -0.0"
    np.testing.assert_allclose(heads.most_entropy([1, 2, 4, 0]), [0, np.log(2), np.log(4), 0])
    assert np.isnan(heads.entropy([[np.nan, 0.5]])).all()


@pytest.mark.parametrize("shape", [dict(T=9), dict(T=5, Tk=9), dict(T=9, Tk=5)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_profile_is_the_mean_weight_by_distance(shape, causal):
    truth = fa.reference.attention(*fa.data.make(H=2, D=4, **shape), causal=causal, return_attn=True)
    p, attn = truth.problem, truth.attn[0]
    far = heads.distances(p.mask(), p.diagonal)
    profile = heads.distance_profile(attn, p.mask(), p.diagonal)
    assert profile.shape == (2, len(far)) and (far >= 0).all() == causal
    for n, d in enumerate(far):
        pairs = [(i, j) for i in range(p.Tq) for j in range(p.Tk) if p.mask()[i, j] and i + p.diagonal - j == d]
        np.testing.assert_allclose(profile[:, n], np.mean([attn[:, i, j] for i, j in pairs], axis=0))


def test_a_head_that_looks_back_by_two_has_its_profile_there():
    attn = np.eye(6, k=-2)
    profile = heads.distance_profile(attn, np.tri(6, dtype=bool), 0)
    np.testing.assert_array_equal(profile, [0, 0, 1, 0, 0, 0])


def test_an_even_head_has_the_even_profile():
    q, k, v = fa.data.make("equal", T=7, H=1, D=4)
    truth = fa.reference.attention(0 * q, k, v, causal=True, return_attn=True)
    mask = truth.problem.mask()
    np.testing.assert_allclose(heads.distance_profile(truth.attn[0, 0], mask, 0), heads.even_profile(mask, 0))
    np.testing.assert_allclose(heads.even_profile(np.tri(2, dtype=bool), 0), [0.75, 0.5])
    with pytest.raises(fa.ShapeError, match=r"two axes \(7, 7\); got \(2, 2\)"):
        heads.distance_profile(truth.attn, np.tri(2, dtype=bool), 0)


# Pictures


def test_a_thumbnail_shows_weights_masks_and_what_is_no_number():
    weights = np.array([[1.0, 9.0], [0.5, np.nan]])
    pixels = imread(io.BytesIO(plot_heads.thumbnail(weights, masked=np.triu(np.ones((2, 2), bool), 1), largest=1.0)))
    assert pixels.shape == (64, 64, 4)
    viridis = matplotlib.colormaps["viridis"]
    np.testing.assert_allclose(pixels[3, 3], viridis(1.0), atol=0.01)
    np.testing.assert_allclose(pixels[60, 3], viridis(0.5), atol=0.01)
    np.testing.assert_allclose(pixels[3, 60], np.array(plot_heads.MASKED) / 255, atol=0.01)
    assert pixels[60, 60, 0] > 0.7 and pixels[60, 60, 1] < 0.2


def test_the_held_head_stands_beside_the_other_one():
    got = widgets.gallery(T=9, H=3, D=4, head=1, row=7, key=2, pattern="text", device="numpy")
    figure = plot.figure(*widgets.GALLERY_SIZE)
    text = got.draw(figure)
    first, second, apart, row, spread, far = figure.axes
    one, two = got.run.attn[1], got.beside.attn[1]
    np.testing.assert_array_equal(first.images[0].get_array().data, one)
    np.testing.assert_array_equal(second.images[0].get_array().data, two)
    assert first.images[0].get_clim() == second.images[0].get_clim(), "one scale"
    np.testing.assert_allclose(apart.images[0].get_array().data, one.astype(float) - two)
    for ax in (first, second, apart):
        (chosen,) = named(ax, "chosen")
        assert (chosen.get_xdata()[0], chosen.get_ydata()[0]) == (2, 7)
        assert len(named(ax, "crosshair")) == 2
    for lines, expected in (
        (named(row, "row"), (one[7], two[7])),
        (named(spread, "entropy"), map(heads.entropy, (one, two))),
        (named(far, "profile"), (heads.distance_profile(x, np.tri(9, dtype=bool), 0) for x in (one, two))),
    ):
        for line, y in zip(lines, expected, strict=True):
            np.testing.assert_array_equal(line.get_ydata(), y)
        looks = {(line.get_marker(), line.get_fillstyle(), line.get_linestyle()) for line in lines}
        assert len(looks) == 2, "apart without colour"
    np.testing.assert_allclose(named(spread, "most")[0].get_ydata(), np.log(np.arange(1, 10)))
    letters = fa.data.SAMPLE_TEXT.read_text()[:9]
    assert [tick.get_text() for tick in row.get_xticklabels()] == [{" ": "␣"}.get(c, c) for c in letters]
    assert f"key 2 {one[7, 2]:.6g} (text) and {two[7, 2]:.6g} (random)" in text
    assert "NumPy" in figure.get_supxlabel()


def test_alone_it_says_so_and_a_masked_place_has_no_weight():
    got = widgets.gallery(T=9, H=1, D=4, head=0, row=2, key=7, beside=("nothing", ""), device="numpy")
    figure = plot.figure(*widgets.GALLERY_SIZE)
    assert "key 7 nothing, it is masked" in got.draw(figure)
    assert "does not see key 7" in got.words
    assert [len(ax.images) for ax in figure.axes[:3]] == [1, 0, 0]
    assert "nothing beside it" in figure.axes[1].texts[0].get_text()


# The gallery


def test_the_words_tell_weight_rank_score_and_entropy():
    got = widgets.gallery(T=9, H=2, D=4, head=1, row=7, key=2, pattern="text", beside=("nothing", ""), device="numpy")
    q, k, _ = fa.data.make("text", T=9, H=2, D=4)
    weights = got.run.attn[1, 7]
    assert (
        f"weight <b>{weights[2]:.6g}</b>, number {sorted(weights[:8])[::-1].index(weights[2]) + 1} of 8 keys"
        in got.words
    )
    assert f"score {q[0, 7, 1].astype(float) @ k[0, 2, 1] / 2:.4g};" in got.words
    assert f"{heads.entropy(weights):.3f} nats" in got.words
    letters = fa.data.SAMPLE_TEXT.read_text()
    assert f"query 7 “{letters[7]}”" in got.words and "key 2 “␣”" in got.words


def test_two_kernels_differ_by_rounding_only(gpu):
    got = widgets.gallery(T=20, H=2, D=8, head=0, row=3, key=1, beside=("kernel", "naive"), device=gpu)
    assert (got.run.name, got.beside.name) == ("fa2_forward", "naive")
    assert got.beside.result.kernel == "naive"
    apart = np.abs(got.run.attn - got.beside.attn).max()
    assert apart < 1e-5
    text = got.draw(plot.figure(*widgets.GALLERY_SIZE))
    assert text.count(" on llvmpipe") == 2, "each kernel is named with its adapter"


def test_a_broken_kernel_of_ones_own_stands_beside_the_sound_one(gpu):
    broken = fa.kernels()["fa2_forward"].edited("return s * params.scale;", "return s;")
    view = widgets.head_gallery(device=gpu, T=9, H=2, D=4, head=0, row=3, key=1, beside=("kernel", broken))
    assert "(fa2_forward (edited))" in view.image.tooltip
    assert "(naive)" in fresh(view, beside=("kernel", "naive"))
    assert "(fa2_forward (edited))" in fresh(view, beside=("kernel", broken))


@pytest.mark.parametrize("where", [dict(head=6), dict(row=32), dict(key=-1)])
def test_a_place_that_is_none_is_refused(where):
    with pytest.raises(IndexError, match="must be from 0 to"):
        widgets.gallery(device="numpy", **where)
    with pytest.raises(ValueError, match="beside must be"):
        widgets.gallery(device="numpy", beside=("colour", "red"))


def test_head_query_and_key_run_no_kernel(monkeypatch):
    view = widgets.head_gallery(device="numpy", T=12, H=3, D=4, head=0, row=3, key=1)
    monkeypatch.setattr(widgets_heads, "attention", None)  # a call would raise
    assert fresh(view, head=2).startswith("Head 2:")
    assert "the row of query 11" in fresh(view, row=11)
    assert "gives key 9 " in fresh(view, key=9)
    with pytest.raises(TypeError):
        view.set(D=5)


@pytest.mark.parametrize(
    ("panel", "x", "y", "row", "key"),
    [(0, 2, 7, 7, 2), (2, 4.4, 9.6, 10, 4), (3, 6, 0.1, 3, 6), (4, 8, 0.5, 8, 1), (5, 3, 0.1, 3, 1), (0, 30, 7, 3, 1)],
)
def test_a_click_goes_to_the_weight_under_the_pointer(panel, x, y, row, key):
    """On the weights or their difference to both, on a row's weights to the key, on entropies to the query."""
    view = widgets.head_gallery(device="numpy", T=12, H=3, D=4, head=0, row=3, key=1)
    figure = view._canvas.figure
    click(view, figure.axes[panel], x, y)
    assert (view.values["row"], view.values["key"]) == (row, key)
    assert f"Query {row} gives key {key} " in view.image.tooltip


def test_there_is_a_button_a_head_and_each_wears_its_own_picture(pixels):
    view = widgets.head_gallery(device="numpy", T=12, H=3, D=4, head=1, row=3, key=1)
    held = view.controls["head"]
    assert isinstance(held, ipywidgets.ToggleButtons)
    assert held._options_labels == ("head 0", "head 1", "head 2"), "names for a screen reader"
    (mark,) = (name for name in held._dom_classes if name.startswith("fa2lab-heads-"))
    pictures = re.findall(rf"\.{mark} button:nth-of-type\((\d)\) {{ background-image: url\((.*?)\)", view.status.value)
    assert [n for n, _ in pictures] == ["1", "2", "3"]
    got = widgets.gallery(T=12, H=3, D=4, head=1, row=3, key=1, device="numpy").thumbnails()
    assert [base64.b64decode(url.removeprefix("data:image/png;base64,")) for _, url in pictures] == got
    assert len(set(got)) == 3
    other = widgets.head_gallery(device="numpy", T=12, H=3, D=4, head=1, row=3, key=1)
    assert mark not in other.controls["head"]._dom_classes, "two galleries on a page wear their own pictures"


def test_a_head_that_is_gone_gives_way_to_the_last_one():
    view = widgets.head_gallery(device="numpy", T=12, H=4, D=4, head=3, row=11, key=11, pattern="random")
    view.controls["H"].value = 2  # as the browser does it
    assert view.values["head"] == 1 and view.image.tooltip.startswith("Head 1:")
    assert len(view.controls["head"].options) == 2
    view.controls["T"].value = 5
    assert (view.values["row"], view.values["key"]) == (4, 4) and "role" not in view.status.value
    view.controls["H"].value = 3
    assert view.values["head"] == 1, "a head that is still there stays held"


def test_more_heads_than_the_model_has_is_said_and_recovers():
    view = widgets.head_gallery(device="numpy")
    view.controls["H"].value = 9
    assert "Not computed:" in view.status.value
    assert "Head 2" in fresh(view, H=3)
