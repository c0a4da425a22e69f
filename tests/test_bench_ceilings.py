"""The ceilings: a copy that copies and a product that is one, proved before their time counts."""

from __future__ import annotations

import engines
import pytest

import fa2lab as fa
from fa2lab import ceilings, source
from fa2lab.timing import Timing


@pytest.mark.gpu
def test_the_ceilings_of_a_device(roomy_device, monkeypatch):
    monkeypatch.setattr(ceilings, "COPY_BYTES_CPU", 1 << 20)
    monkeypatch.setattr(ceilings, "SIDES_CPU", (64,))
    found = ceilings.ceilings(roomy_device, patience=0.01)
    assert found.adapter == str(roomy_device.adapter)
    assert found.copy_bytes_per_second == 2 * found.copy_bytes / found.copy.seconds > 0
    assert found.product_flops_per_second == 2 * found.product_side**3 / found.product.seconds > 0
    if roomy_device.adapter.type == "CPU":
        assert (found.copy_bytes, found.product_side) == (1 << 20, 64)
    assert "GB/s" in str(found) and "TFLOP/s" in str(found)


@pytest.mark.gpu
@pytest.mark.skipif(bool(engines.lacking("llvmpipe", "naga")), reason="no llvmpipe")
@pytest.mark.parametrize(
    ("tile", "unrolled"), [(ceilings.PRODUCT, False), ((64, 8, 2), True)], ids=["whole", "unrolled"]
)
def test_the_product_of_a_gpu_is_right_too(monkeypatch, tile, unrolled):
    """The tiles that a GPU gets, and loops written out as there, over several tiles and steps."""
    device = engines.device_of(engines.Seat("llvmpipe", "naga", "adapter"))
    monkeypatch.setattr(ceilings, "PRODUCT_CPU", tile)
    monkeypatch.setattr(type(device), "unrolls", unrolled)
    timing, side = ceilings.time_product(device, sides=(256,), patience=0.01)
    assert side == 256 and timing.seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("file", "old", "new", "measure"),
    [
        ("bench_copy", "copied[at] =", "copied[at / 2u * 2u] =", lambda d: ceilings.time_copy(d, nbytes=1 << 16)),
        ("bench_matmul", "k0 += STEP", "k0 += 2u * STEP", lambda d: ceilings.time_product(d, sides=(64,))),
        ("bench_matmul", "workgroupBarrier(); // publishes", "//", lambda d: ceilings.time_product(d, sides=(64,))),
        ("bench_matmul", "tile.x * ROW_VECS + h", "tile.x * ROW_VECS + (h ^ 1u)", None),
    ],
    ids=["copy", "half of k", "no barrier", "columns"],
)
def test_a_wrong_ceiling_is_refused(roomy_device, monkeypatch, file, old, new, measure):
    text = source.read(file)
    assert text.count(old) == 1
    monkeypatch.setattr(source, "read", lambda name: text.replace(old, new) if name == file else text)
    measure = measure or (lambda d: ceilings.time_product(d, sides=(64,)))
    with pytest.raises(fa.KernelError, match=f"{file}.wgsl .* no ceiling"):
        measure(roomy_device)


@pytest.mark.gpu
def test_the_largest_product_that_is_short_enough_is_taken(roomy_device, monkeypatch):
    """On a made-up clock that gives 0.02 s at 64: eight times that at 128 is too long."""
    asked = []

    def product(device, N, *, patience, proved=False):
        asked.append((N, proved))
        return Timing(0.02 * (N / 64) ** 3, 0.0, 0.0, 5, "made up", True)

    monkeypatch.setattr(ceilings, "_product", product)
    _, side = ceilings.time_product(roomy_device, sides=(32, 64, 128, 256))
    assert side == 64 and asked == [(32, False), (64, False), (64, True)]


def test_the_roofline_is_the_lower_of_both():
    timing = Timing(1.0, 1.0, 1.0, 5, "made up", True)
    roof = ceilings.Ceilings("made up", 100.0, 1000.0, timing, timing, 50, 8)
    assert [roof.attainable(x) for x in (1, 10, 100)] == [100.0, 1000.0, 1000.0]
