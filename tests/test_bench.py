"""Timing: the rule that a measurement waits for the clock to settle, proved on made-up clocks."""

import itertools
from dataclasses import replace

import pytest

import fa2lab as fa
from fa2lab import bench


def clock(seconds_of_run):
    """A `run(n)` whose k-th call takes n times `seconds_of_run(k)`."""
    calls = itertools.count()
    return lambda n: n * seconds_of_run(next(calls))


def test_a_card_that_wakes_up_slowly_is_not_measured_until_it_is_awake():
    # 4 times too slow at first, then 2 % faster with each batch until it holds 1 ms
    found, settled = bench.settle(clock(lambda k: max(1e-3, 4e-3 * 0.98**k)))
    assert settled and found == pytest.approx([1e-3] * 5)


def test_half_a_second_must_pass_even_if_the_first_batches_agree():
    # steady at 3 ms for 0.3 s, then the clock rises
    spent = 0.0

    def run(n):
        nonlocal spent
        seconds = 3e-3 if spent < 0.3 else 1e-3
        spent += n * seconds
        return n * seconds

    found, settled = bench.settle(run)
    assert settled and found == pytest.approx([1e-3] * 5)


def test_a_machine_that_never_settles_says_so():
    noise = itertools.cycle([1e-3, 2e-3])
    found, settled = bench.settle(lambda n: n * next(noise), patience=1.0)
    assert not settled and len(found) == 5
    timing = bench.Timing(1.5e-3, 1e-3, 2e-3, 5, "wall clock", settled)
    assert str(timing) == "1.500 ms (1.000 to 2.000, wall clock, not settled)"


@pytest.mark.gpu
def test_a_forward_is_timed_on_resident_data_and_leaves_nothing(roomy_device):
    timing = bench.time_forward(roomy_device, "fa2_forward", T=40, H=1, D=8, patience=0.05)
    assert 0 < timing.low <= timing.seconds <= timing.high
    assert timing.clock == roomy_device.clock
    if roomy_device.adapter.type == "CPU":
        assert timing.clock == "wall clock"


@pytest.mark.gpu
def test_the_crossover_times_both_kernels_at_each_length(roomy_device):
    rows = dict(bench.crossover(roomy_device, lengths=(8, 24), H=1, D=8, patience=0.02))
    assert list(rows) == [8, 24]
    assert all(set(row) == {"fused_sv", "fa2_forward"} for row in rows.values())


@pytest.mark.gpu
def test_more_work_takes_more_time(roomy_device):
    """Not how long, but that the time is that of the work: 64 times the pairs, on any machine."""
    short, long = (bench.time_forward(roomy_device, "fa2_forward", T=T, H=1, D=8, patience=0.2).low for T in (64, 512))
    assert long > short


@pytest.mark.gpu
def test_what_takes_several_launches_is_not_timed(roomy_device, monkeypatch):
    monkeypatch.setattr(roomy_device, "limits", replace(roomy_device.limits, binding_bytes=4 * 64 * 64))
    with pytest.raises(fa.LimitError, match="2 launches on this device; only single ones are timed"):
        bench.time_forward(roomy_device, "naive", B=2, T=64, H=1, D=1)
