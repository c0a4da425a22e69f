"""Pictures of speed: what is drawn is what was measured, and nothing is told by colour alone."""

from __future__ import annotations

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex

from fa2lab import plot, plot_speed


@pytest.fixture
def ax():
    yield plot.figure().add_subplot()
    assert plt.get_fignums() == []


def marked(ax, gid: str) -> list:
    return [line for line in ax.lines if line.get_gid() == gid]


def words(ax) -> str:
    legend = [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []
    return " | ".join([*legend, *(text.get_text() for text in ax.texts)])


def test_times_in_milliseconds_and_where_they_cross(ax):
    curves = {"naive": ([64, 256], [1e-3, 9e-3]), "fa2": ([64, 256], [2e-3, 4e-3])}
    for _ in range(2):  # drawing again updates in place
        plot_speed.times(ax, curves, crossing=(96.0, "fa2 ahead"))
    assert [line.get_ydata().tolist() for line in marked(ax, "time")] == [[1.0, 9.0], [2.0, 4.0]]
    assert words(ax) == "naive | fa2 | fa2 ahead" and marked(ax, "crossing")[0].get_xdata()[0] == 96.0


def test_no_two_curves_are_told_apart_by_colour_alone(ax):
    curves = {f"k{i}": ([1, 2], [1.0 + i, 2.0]) for i in range(6)}
    plot_speed.times(ax, curves)
    looks = [(line.get_marker(), line._dash_pattern, to_hex(line.get_color())) for line in marked(ax, "time")]
    for one, other in itertools.combinations(looks, 2):
        assert one[0] != other[0] and one[2] != other[2]


def test_the_roof_has_its_knee_where_both_ceilings_meet(ax):
    plot_speed.roofline(ax, 1e12, 1e11, {"naive": (0.5, 2e10), "tiled": (40.0, 6e11)})
    (roof,) = marked(ax, "roof")
    assert roof.get_xdata()[1] == 10.0 and roof.get_ydata().tolist()[1:] == [1e12, 1e12]
    assert roof.get_ydata()[0] == roof.get_xdata()[0] * 1e11
    assert [(r.get_xdata()[0], r.get_ydata()[0]) for r in marked(ax, "rung")] == [(0.5, 2e10), (40.0, 6e11)]
    assert "tiled: 600 GFLOP/s" in words(ax) and "copy, 100 GB/s" in words(ax) and "product, 1 TFLOP/s" in words(ax)
    low, high = ax.get_ylim()
    assert low < 2e10 and high > 1e12


def test_bytes_say_how_many_times_the_least_they_are(ax):
    parts = {
        "naive": {"K and V": 3000, "T² matrices": 6000, "the rest": 1000},
        "tiled": {"K and V": 900, "T² matrices": 0, "the rest": 100},
    }
    plot_speed.bytes_moved(ax, parts, least=500)
    assert [bar.get_width() for bar in ax.patches] == [10_000, 1000]
    assert ax.patches[0].get_hatch() == "////" and ax.patches[1].get_hatch() is None  # by the largest part
    assert "9.77 KiB, 20.0 × the least; K and V 30%, T² matrices 60%, the rest 10%" in words(ax)
    assert "1,000 B, 2.0 × the least; K and V 90%, the rest 10%" in words(ax)
    assert marked(ax, "least")[0].get_xdata()[0] == 500


def test_tiles_show_their_time_and_refusals(ax):
    seconds = np.array([[4e-3, 2e-3], [1e-3, np.nan]])
    plot_speed.tile_times(ax, [8, 16], [4, 32], seconds, chosen=(16, 4))
    assert words(ax) == "4 | 2 | 1 | refused"
    frame = [p for p in ax.patches if p.get_gid() == "chosen"]
    assert [p.get_xy() for p in frame] == [(-0.5, 0.5)] and sum(bool(p.get_hatch()) for p in ax.patches) == 1
    light = [t.get_color() for t in ax.texts[:3]]
    assert light[0] == "white" and light[2] != "white"  # slow is dark
    plot_speed.tile_times(ax, [8], [4], np.array([[np.nan]]))
    assert words(ax) == "refused"


def test_pairs_say_their_ratio(ax):
    plot_speed.pairs(ax, {"fa2": (1e-3, 2.5e-3)})
    assert [bar.get_width() for bar in ax.patches] == [1.0, 2.5] and ax.patches[1].get_hatch() == "////"
    assert "× 2.50" in words(ax) and "without shader checks | with" in words(ax)


def test_memory_by_name_and_limit(ax):
    plot_speed.memory(ax, [64, 256], {"naive": [2**20, 2**24], "fa2": [2**16, 2**18]}, limits={"a browser": 2**27})
    assert [line.get_ydata().tolist() for line in marked(ax, "bytes")] == [[2**20, 2**24], [2**16, 2**18]]
    assert "a browser, 128 MiB" in words(ax) and "16 MiB" in words(ax) and "256 KiB" in words(ax)
    assert marked(ax, "limit")[0].get_ydata()[0] == 2**27
