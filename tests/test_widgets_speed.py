"""The tile view: nine tiles timed at once, one looked at, and a refusal shown as one."""

from __future__ import annotations

from dataclasses import replace

import engines
import pytest

import fa2lab as fa
from fa2lab import bench, plot, widgets_speed

SMALL = dict(T=16, H=1, D=4)


@pytest.fixture
def llvmpipe(monkeypatch):
    if why := engines.lacking("llvmpipe", "naga"):
        pytest.skip(why)
    monkeypatch.setattr(widgets_speed, "BLOCKS", {"fa2_forward": (4, 8)})
    monkeypatch.setattr(widgets_speed, "PATIENCE", 0.0)
    widgets_speed._grid.cache_clear()
    yield engines.device_of(engines.Seat("llvmpipe", "naga", "adapter"))
    widgets_speed._grid.cache_clear()


@pytest.mark.gpu
def test_tiles_are_timed_at_once_and_looking_runs_nothing(llvmpipe, monkeypatch):
    first = widgets_speed.tile_speed(**SMALL, block_q=4, block_k=8, device=llvmpipe)
    assert set(first.rows) == {(4, 4), (4, 8), (8, 4), (8, 8)} and first.tile == (4, 8)
    assert all(row.tiles == (f"{q}x{k}",) for (q, k), row in first.rows.items())
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("a kernel ran"))
    other = widgets_speed.tile_speed(**SMALL, block_q=8, device=llvmpipe)
    assert other.tile == (8, 8) and other.rows is first.rows
    figure = plot.figure(*widgets_speed.TILE_SIZE)
    for shown in (first, other):  # the second draws over the first
        said = shown.draw(figure)
    assert "A tile of 8×8 takes" in said and f"asks for {other.rows[8, 8].bytes:,} B" in said and len(figure.axes) == 2
    assert figure.get_supxlabel().startswith(f"fa2_forward on {llvmpipe.adapter}")


@pytest.mark.gpu
def test_a_tile_that_does_not_fit_is_shown_as_refused(llvmpipe, monkeypatch):
    monkeypatch.setattr(llvmpipe, "limits", replace(llvmpipe.limits, workgroup_bytes=(8 + 2 * 4) * 4 * 4))
    shown = widgets_speed.tile_speed(**SMALL, device=llvmpipe)
    assert shown.rows[8, 8] is None and shown.rows[8, 4] and shown.sentence == "A tile of 8×8 does not fit this device."
    figure = plot.figure(*widgets_speed.TILE_SIZE)
    shown.draw(figure)
    assert [text.get_text() for text in figure.axes[0].texts].count("refused") == 2  # 4×8 as well


@pytest.mark.gpu
def test_the_view_follows_its_controls(llvmpipe):
    view = widgets_speed.tiles(device=llvmpipe, **SMALL)
    assert "A tile of 8×8 takes" in view.status.value
    view.set(block_q=4)
    assert "A tile of 4×8 takes" in view.status.value and view.image.tooltip.startswith("Time of fa2_forward")
    view.close()


@pytest.mark.gpu
def test_another_kernel_has_other_tiles(llvmpipe, monkeypatch):
    monkeypatch.setattr(widgets_speed, "BLOCKS", {"fa2_forward": (4, 8), "fa2_forward_tiled": (16,)})
    view = widgets_speed.tiles(device=llvmpipe, **SMALL, block_q=4)
    view.set(kernel="fa2_forward_tiled")
    assert "A tile of 16×16 takes" in view.status.value and view.controls["block_q"].options == (16,)
    view.controls["kernel"].value = "fa2_forward"  # as a browser moves it: an error would stand in the view
    assert "A tile of 8×8 takes" in view.status.value and view.values["block_q"] == 8


@pytest.mark.gpu
def test_a_size_that_is_not_timed_is_refused(llvmpipe):
    with pytest.raises(ValueError, match="fa2_forward is timed with blocks of 4, 8; got a tile of 7×8"):
        widgets_speed.tile_speed(**SMALL, block_q=7, device=llvmpipe)


def test_numpy_has_no_tiles_to_time():
    with pytest.raises(fa.NoAdapterError, match="timed on an adapter"):
        widgets_speed.tile_speed(device="numpy")
