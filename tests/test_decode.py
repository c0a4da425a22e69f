"""Few queries, many keys: any number of parts gives the same result, and the merge is the online softmax's."""

from __future__ import annotations

from functools import partial

import engines
import numpy as np
import pytest

import fa2lab as fa

DECODE = partial(fa.attention, kernel="fa2_decode")
SPLITS = (1, 2, 3, 5, 100)


@pytest.mark.parametrize("Tq", [1, 4, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_parts_gives_the_truth(roomy_device, Tq, causal):
    arrays = engines.random(B=2, T=Tq, Tk=150, H=4, Hkv=2, seed=Tq)
    truth = fa.reference.attention(*arrays, causal=causal)
    parts = set()
    for splits in SPLITS:
        result = DECODE(*arrays, causal=causal, splits=splits, device=roomy_device)
        fa.parity.compare(result, truth).check()
        parts.add(-(-150 // result.plan.split_keys))
    assert len(parts) > 3, "tiles were small enough for several numbers of parts"


@pytest.mark.parametrize("pattern", ["huge", "needle", "equal"])
def test_every_pattern_survives_the_merge(gpu, pattern):
    q, k, v = fa.data.make(pattern, T=200, H=2, D=8)
    truth = fa.reference.attention(q[:, -3:], k, v, causal=True)
    fa.parity.compare(DECODE(q[:, -3:], k, v, causal=True, splits=4, device=gpu), truth).check()


def test_parts_that_a_row_does_not_see_do_not_count(gpu):
    q, k, v = engines.random(T=3, Tk=200, H=1)
    k[:, 2:], v[:, 2:] = np.nan, np.inf  # top-left: rows 0 and 1 see the keys 0 and 1
    result = DECODE(q[:, :2], k, v, causal=True, align="top-left", splits=5, device=gpu)
    fa.parity.compare(
        result, fa.reference.attention(q[:, :2], k[:, :2], v[:, :2], causal=True, align="top-left")
    ).check()


def test_rows_that_see_nothing(gpu):
    q, k, v = engines.random(T=5, Tk=2)
    result = DECODE(q, k, v, causal=True, splits=2, device=gpu)
    assert not result.out[:, :3].any() and np.all(result.lse[:, :, :3] == -np.inf)
    fa.parity.compare(result, fa.reference.attention(q, k, v, causal=True)).check()


def test_equal_keys_give_ln_n_over_any_parts(gpu):
    zeros, v = np.zeros((1, 64, 1, 4), np.float32), np.ones((1, 64, 1, 4), np.float32)
    for splits in SPLITS:
        lse = DECODE(zeros[:, :1], zeros, v, splits=splits, device=gpu).lse.item()
        assert abs(lse - np.log(64)) <= 4 * 2.0**-22


@pytest.mark.parametrize(
    ("guarantee", "old", "new"),
    [
        ("parts are weighed", "let weight = exp_shift(part_lse[p * n_rows + at_lse] - m);", "let weight = 1.0;"),
        ("every part counts", "p < n_parts; p++) {\n    let", "p < max(n_parts, 2u) - 1u; p++) {\n    let"),
        ("L is merged", "select(m + log_sum(l), params", "select(m, params"),
    ],
)
def test_a_broken_merge_is_red(gpu, guarantee, old, new):
    arrays = engines.random(T=2, Tk=150)
    truth = fa.reference.attention(*arrays)
    broken = fa.kernels()["fa2_decode"].edited(old, new, file="fa2_merge")
    fa.parity.compare(DECODE(*arrays, splits=5, device=gpu), truth).check()
    with pytest.raises(fa.ParityError):
        fa.parity.compare(fa.attention(*arrays, kernel=broken, splits=5, device=gpu), truth).check()


def test_what_does_not_go_together_is_refused():
    arrays = engines.random()
    with pytest.raises(fa.KernelError, match="attention matrix is not for fa2_decode"):
        DECODE(*arrays, return_attn=True, device="numpy")
    with pytest.raises(fa.KernelError, match="Splitting the keys is not for naive. Able: fa2_decode"):
        fa.attention(*arrays, kernel="naive", splits=2, device="numpy")
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(fa.LimitError, match="splits must be a whole number"):
            DECODE(*arrays, splits=wrong, device="numpy")


def test_a_growing_cache_meets_few_kernels():
    keys = {fa.plan(_cache(Tk), fa.limits.BROWSER, "fa2_decode").split_keys for Tk in range(1000, 130_000, 1000)}
    assert len(keys) < 12


def _cache(Tk: int) -> fa.problem.Problem:
    return fa.problem.Problem(1, 1, Tk, 8, 8, 64, True, "bottom-right", 0.125)
