"""Each picture shows the numbers it was handed: artists are asked, not pixels."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection

import fa2lab as fa
from fa2lab import plot, plot_panels
from fa2lab.parity import Row
from fa2lab.plot_sheet import Sheet
from fa2lab.results import FULL, PARTIAL, SKIPPED, TILE_STATES


@pytest.fixture
def figure():
    return plot.figure(6, 4)


@pytest.fixture
def ax(figure):
    return figure.subplots()


@pytest.fixture(autouse=True)
def no_pyplot_figure():
    """Nothing here may register a figure with pyplot, which would keep it alive."""
    yield
    assert plt.get_fignums() == []


def named(ax, gid: str) -> list:
    """The artists of an Axes with this gid."""
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


def area(polygons: PolyCollection) -> float:
    """The area of axis-parallel rectangles, in data units."""
    corners = [path.get_extents() for path in polygons.get_paths()]
    return sum(box.width * box.height for box in corners)


def shown(ax) -> np.ma.MaskedArray:
    """The matrix of the heatmap on an Axes."""
    (image,) = ax.images
    return image.get_array()


# Heatmaps


def test_heatmap_shows_the_matrix(ax):
    weights = np.random.default_rng(0).random((3, 5))
    assert plot.heatmap(ax, weights, title="T", rows="r", columns="c") is ax
    np.testing.assert_array_equal(shown(ax), weights)
    assert (ax.get_title(), ax.get_ylabel(), ax.get_xlabel()) == ("T", "r", "c")
    assert ax.images[0].get_clim() == (0, weights.max())
    assert ax.get_ylim() == (2.5, -0.5), "row 0 stands at the top"


def test_a_masked_place_is_not_a_zero(ax):
    weights = np.zeros((4, 6))
    masked = ~np.tri(4, 6, dtype=bool)
    plot.heatmap(ax, weights, masked=masked)
    np.testing.assert_array_equal(np.ma.getmaskarray(shown(ax)), masked)
    (grey,) = named(ax, "masked")
    assert area(grey) == masked.sum()
    inside = [grey.get_paths()[0].contains_point((5, 0)), any(p.contains_point((0, 0)) for p in grey.get_paths())]
    assert inside == [True, False]
    assert grey.get_hatch(), "grey alone is a colour"
    assert "masked" in ax.get_xlabel()


def test_masked_runs_with_holes(ax):
    masked = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0]], bool)
    plot.heatmap(ax, np.ones((3, 4)), masked=masked)
    boxes = [path.get_extents() for path in named(ax, "masked")[0].get_paths()]
    spans = [(box.x0, box.y0, box.x1, box.y1) for box in boxes]
    assert spans == [(-0.5, -0.5, 0.5, 0.5), (1.5, -0.5, 3.5, 0.5), (0.5, 1.5, 2.5, 2.5)]


def test_nothing_masked_draws_no_grey(ax):
    plot.heatmap(ax, np.ones((2, 2)), masked=np.zeros((2, 2), bool))
    assert named(ax, "masked") == []
    assert ax.get_xlabel() == "key"


def test_non_finite_places_are_crossed_out(ax):
    weights = np.ones((3, 3))
    weights[0, 2], weights[2, 1], weights[1, 1] = np.nan, -np.inf, 5
    plot.heatmap(ax, weights, symmetric=True)
    (crosses,) = named(ax, "not finite")
    assert set(zip(*crosses.get_data(), strict=True)) == {(2, 0), (1, 2)}
    assert "2 of 9" in ax.get_xlabel()
    assert ax.images[0].get_clim() == (-5, 5), "infinity does not set the scale"


def test_non_finite_at_a_masked_place_is_only_masked(ax):
    plot.heatmap(ax, np.array([[1.0, np.nan]]), masked=np.array([[False, True]]))
    assert named(ax, "not finite") == []


def test_symmetric_centres_the_scale(ax):
    plot.heatmap(ax, np.array([[-3.0, 1.0]]), symmetric=True)
    assert ax.images[0].get_clim() == (-3, 3)


def test_all_zero_says_so(ax):
    plot.heatmap(ax, np.zeros((2, 3)), symmetric=True)
    assert "zero everywhere" in ax.get_xlabel()


def test_tile_grid_stands_between_cells(ax):
    plot.heatmap(ax, np.zeros((5, 7)), tiles=(2, 3))
    lines = [line.get_data() for line in named(ax, "tile edge")]
    assert [y[0] for x, y in lines if list(x) == [0, 1]] == [1.5, 3.5]
    assert [x[0] for x, y in lines if list(y) == [0, 1]] == [2.5, 5.5]


def test_a_grid_too_fine_to_see_is_left_out(ax):
    plot.heatmap(ax, np.zeros((200, 200)), tiles=(1, 1))
    assert named(ax, "tile edge") == []


def test_labels_go_to_the_axes_that_have_so_many(ax):
    plot.heatmap(ax, np.zeros((2, 3)), labels=["a", " ", "$"])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["a", "␣", "$"]
    assert "␣" not in [tick.get_text() for tick in ax.get_yticklabels()]


def test_drawing_again_replaces(ax):
    for weights in (np.ones((2, 2)), np.full((3, 4), 2.0)):
        plot.heatmap(ax, weights, tiles=(2, 2), masked=weights < 0)
    np.testing.assert_array_equal(shown(ax), np.full((3, 4), 2.0))
    assert len(ax.child_axes) == 1, "one colour bar"


def test_footer_is_replaced(figure, ax):
    plot.footer(figure, "first")
    plot.heatmap(ax, np.ones((1, 1)), footer="kernel on adapter")
    assert figure.get_supxlabel() == "kernel on adapter"


def test_marked_row(ax):
    plot.heatmap(ax, np.ones((9, 9)))
    plot.mark_row(ax, 7)
    (line,) = named(ax, "marked row")
    assert set(line.get_ydata()) == {7}


def test_heads_share_one_scale(figure):
    attn = np.arange(5 * 2 * 3, dtype=float).reshape(5, 2, 3)
    axes = plot.heads(figure, attn, footer="who")
    assert len(axes) == 5
    for h, ax in enumerate(axes):
        np.testing.assert_array_equal(shown(ax), attn[h])
        assert ax.images[0].get_clim() == (0, attn.max())
        assert ax.get_title() == f"head {h}"
    assert figure.get_supxlabel() == "who"


# Tile maps


def test_tile_map_draws_every_tile_as_what_it_is(ax):
    state = np.repeat([[PARTIAL, SKIPPED, SKIPPED], [FULL, PARTIAL, SKIPPED], [FULL, FULL, PARTIAL]], [4, 4, 2], axis=0)
    plot.tile_map(ax, state, n_k=11, tiles=(4, 4))
    sizes = {name: area(named(ax, name)[0]) for name in TILE_STATES}
    # rows 4 4 2, keys 4 4 3
    assert sizes == {"full": 4 * 4 + 2 * 4 * 2, "partial": 16 + 16 + 2 * 3, "skipped": 16 + 12 + 12}
    assert sum(sizes.values()) == 10 * 11
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["full: 3", "partial: 3", "skipped: 3"]


def test_tile_states_differ_without_colour(ax):
    plot.tile_map(ax, np.array([[PARTIAL, FULL, SKIPPED]]), n_k=3, tiles=(1, 1))
    hatches = {named(ax, name)[0].get_hatch() for name in TILE_STATES}
    greys = sorted(named(ax, name)[0].get_facecolor()[0] @ (0.299, 0.587, 0.114, 0) for name in TILE_STATES)
    assert len(hatches) == 3
    assert np.diff(greys).min() > 0.15


# Traces


@pytest.fixture
def walks():
    arrays = fa.data.make("random", T=20, H=2, D=4)
    options = dict(causal=True, block_q=4, block_k=4)
    exact = fa.reference.tiled(*arrays, **options)
    single = fa.reference.tiled(*arrays, **options, dtype=np.float32)
    return single, exact


def test_row_trace_draws_recorded_over_exact(figure, walks):
    single, exact = walks
    axes = figure.subplots(4, 1)
    at = 0, 1, 9
    plot.row_trace(axes, single.trace, exact.trace, at=at)
    for ax, name in zip(axes, ("m", "l", "alpha"), strict=False):
        (line,) = named(ax, "exact")
        np.testing.assert_array_equal(line.get_ydata(), getattr(exact.trace, name)[at])
        got = {x: y for marks in named(ax, "recorded") for x, y in zip(*marks.get_data(), strict=True)}
        assert [got[x] for x in sorted(got)] == list(getattr(single.trace, name)[at])
        assert {marks.get_marker() for marks in named(ax, "recorded")} == {"o", "D", "x"}
        (distance,) = named(axes[3], f"distance {name}")
        apart = np.abs(getattr(single.trace, name)[at] - getattr(exact.trace, name)[at])
        np.testing.assert_array_equal(distance.get_ydata(), np.maximum(apart, 1e-9))


def test_a_departure_stands_inside_the_distance_axis(figure, walks):
    single, exact = walks
    l = single.trace.l.copy()
    l[0, 0, 5, 1] += 1e4
    axes = figure.subplots(4, 1)
    plot.row_trace(axes, replace(single.trace, l=l), exact.trace, at=(0, 0, 5))
    assert axes[3].get_ylim()[1] > 1e4
    assert axes[1].get_ylim()[1] > 1e4


def test_rounding_does_not_look_like_a_slope(figure):
    arrays = fa.data.make("equal", T=8, H=1, D=4)
    exact = fa.reference.tiled(*arrays, block_k=2).trace
    axes = figure.subplots(4, 1)
    plot.row_trace(axes, replace(exact, m=exact.m + 1e-7), exact, at=(0, 0, 3))
    low, high = axes[0].get_ylim()
    assert high - low >= 0.1


def test_a_row_without_keys_says_so(figure):
    arrays = fa.data.make(T=5, Tk=2, H=1, D=4)
    trace = fa.reference.tiled(*arrays, causal=True, block_q=1, block_k=1).trace
    axes = figure.subplots(4, 1)
    plot.row_trace(axes, trace, trace, at=(0, 0, 0))
    assert any("sees no key" in text.get_text() for text in axes[0].texts)
    figure.canvas.draw()


# Bars


def row(field="out", error=2e-7, plain=3e-7, allowed=8e-7, misplaced=0) -> Row:
    return Row(field, error, plain, allowed, 1.0, (0, 0, 0, 0), misplaced, 1.0, 1.0)


def test_error_bars_have_the_length_of_the_errors(ax):
    rows = [row(), row("lse", 5e-6, 1e-6, 4e-6)]
    plot.error_bars(ax, rows)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == [2e-7, 3e-7, 5e-6, 1e-6]
    assert [line.get_xdata()[0] for line in named(ax, "allowed")] == [8e-7, 4e-6]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["out", "lse\n✗ too far"]
    assert ax.get_xlim()[0] < 2e-7 and ax.get_xlim()[1] > 5e-6


def test_error_bars_say_exactly_zero_and_misplaced(ax):
    plot.error_bars(ax, [row(error=0.0, plain=0.0), row("lse", misplaced=1234)])
    texts = [text.get_text() for text in ax.texts]
    assert texts.count("exactly 0") == 2
    assert ax.get_yticklabels()[1].get_text() == "lse\n✗ 1,234 misplaced"
    assert all(bar.get_width() < ax.get_xlim()[0] * 1.01 for bar in ax.patches[:2]), "a zero has no length to see"


def test_error_bars_without_plain(ax):
    plot.error_bars(ax, [row(plain=None)])
    assert len(ax.patches) == 1


def test_byte_bars_and_their_limits(ax):
    plot.byte_bars(ax, {"q": 100, "k": 300}, title="bytes", limits={"browser": 200}, absent={"attn": 900})
    assert [bar.get_width() for bar in ax.patches] == [100, 300, 900]
    assert [bar.get_gid() for bar in ax.patches] == ["bytes", "bytes", "absent"]
    assert ax.patches[2].get_hatch()
    assert [line.get_xdata()[0] for line in named(ax, "limit")] == [200]
    assert ax.get_legend().get_texts()[0].get_text() == "browser: 200 B"
    assert [text.get_text().strip() for text in ax.texts] == ["100 B", "300 B", "900 B avoided"]


# Whole figures


def test_walk_panel_twice_on_one_figure(figure):
    for T, head, at_row in ((20, 1, 13), (9, 0, 0)):
        arrays = fa.data.make("random", T=T, H=2, D=4)
        options = dict(causal=True, block_q=4, block_k=4, return_attn=True)
        exact = fa.reference.tiled(*arrays, **options)
        text = plot_panels.walk(Sheet(figure), exact, exact.trace, head=head, row=at_row)
        assert len(figure.axes) == 6
        np.testing.assert_array_equal(shown(figure.axes[0]).data, exact.attn[0, head])
        (line,) = named(figure.axes[2], "exact")
        np.testing.assert_array_equal(line.get_ydata(), exact.trace.m[0, head, at_row])
        per_tile = exact.trace.state[0, head, ::4]
        counts = (f"{(per_tile == kind).sum()} {TILE_STATES[kind]}" for kind in (FULL, PARTIAL, SKIPPED))
        assert all(count in text for count in counts)
        assert f"head {head}" in text and f"row {at_row}" in text
        assert exact.label in figure.get_supxlabel()
