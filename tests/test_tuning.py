"""tune(): it keeps the fastest tile that it measured, where later plans find it."""

from __future__ import annotations

import engines
import pytest

import fa2lab as fa
from fa2lab import tuning
from fa2lab.tiles import Tile

NAME = "fa2_forward_tiled"
SMALL = dict(head_dims=(8,), B=1, H=1, T=16, patience=0.01)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setattr(tuning, "folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def stopwatch(monkeypatch):
    """Times by the tile alone: the fewest rows first."""
    monkeypatch.setattr(tuning, "_time", lambda kernel, stage, problem, device, tile, patience: float(tile.block_q))


def test_the_fastest_is_kept_and_planned_with(gpu, kept, stopwatch):
    arrays = engines.random(T=16)
    before = fa.attention(*arrays, kernel=NAME, device=gpu)
    found = fa.tune(gpu, **SMALL)
    assert set(file for file, _ in found) == {NAME, "fa2_dq_tiled", "fa2_dkv_tiled"}
    after = fa.attention(*arrays, kernel=NAME, device=gpu)
    assert after.plan.tile.block_q == found[NAME, 8].block_q < before.plan.tile.block_q
    fa.parity.compare(after, fa.reference.attention(*arrays)).check()


def test_a_candidate_is_really_timed(gpu, kept, monkeypatch):
    few = (Tile(8, 16, 1, 4), Tile(4096, 4096, 1, 4))
    monkeypatch.setattr(tuning, "candidates", lambda *_, **__: few)
    assert set(fa.tune(gpu, **SMALL, keep=False).values()) == {few[0]}, "what does not fit is no candidate"
    assert not list(kept.iterdir())


def test_another_device_does_not_find_it(gpu, kept, stopwatch):
    fa.tune(gpu, **SMALL)
    assert tuning.tuned(gpu) and not tuning.tuned(None)
    browser = fa.Device("llvmpipe", limits="webgpu")
    assert tuning.tuned(browser) == {}


@pytest.mark.parametrize("damage", ["", "no json", '{"fa2": 3}', '{"a b c": {}}', '{"fa2 8": {"rows": 1}}'])
def test_a_damaged_file_holds_nothing(kept, damage):
    path = kept / "tiles.json"
    path.write_text(damage)
    assert tuning.tuned_for(path) == {}


def test_a_tuned_tile_that_does_not_fit_is_passed_over():
    tuned = {(NAME, 64): Tile(512, 512, 4, 16)}
    problem = fa.reference.attention(*engines.random()).problem
    assert fa.plan(problem, fa.limits.BROWSER, NAME, tuned=tuned).tile.block_q < 512
