"""The end-to-end gates pass on the kernels, and go red when a kernel is broken on purpose."""

import numpy as np
import pytest

import fa2lab as fa
from fa2lab import gates, gpt
from fa2lab.gpt_attention import KernelAttention, NumpyAttention, original
from fa2lab.kernel import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
# Fewer steps than the command's 50, at a size that a software adapter runs in seconds.
DRIFT_STEPS = 25

ONE_HEAD_WITHOUT_DV = fa.backward_kernels()["fa2"].edited(
    "      dv[start + d] = dv_row[d];",
    "      dv[start + d] = select(dv_row[d], 0.0, first_bh % params.n_heads == 1u);",
    file="fa2_dkv",
)


def mask_one_off() -> Kernel:
    """Row i also sees key i + 1: the byte that it has to guess."""
    kernel = fa.kernels()["fa2_forward"]
    kernel = kernel.edited("let seen = keys_seen(row);", "let seen = min(keys_seen(row) + 1u, params.n_k);")
    return kernel.edited(
        "keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u);",
        "min(keys_seen(min(row0 + BLOCK_Q, params.n_q) - 1u) + 1u, params.n_k);",
    )


@pytest.mark.parametrize("make", [KernelAttention, original], ids=["fa2", "original"])
def test_overfit_passes(make):
    gate = gates.overfit(make())
    assert gate.ok, gate
    assert gate.losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert gate.losses[-1] < gates.LEARNED_BELOW
    assert gate.losses.shape == gate.expected.shape == (150,)


def test_drift_passes_far_below_the_originals_bound():
    gate = gates.drift(gpt.PRESETS["tiny"], KernelAttention(), steps=DRIFT_STEPS)
    assert gate.ok, gate
    assert gate.drift.max() <= gates.DRIFT_ALLOWED < gates.DRIFT_BOUND
    assert gate.losses[-1] < gate.losses[0] - 0.5  # it did learn, so that there was something to drift


@pytest.mark.parametrize(
    "broken",
    [lambda: KernelAttention("fa2_forward", ONE_HEAD_WITHOUT_DV), lambda: KernelAttention(mask_one_off(), "fa2")],
    ids=["dV of one head", "mask one off"],
)
@pytest.mark.parametrize(
    "gate",
    [
        lambda attention: gates.overfit(attention, steps=60),
        lambda attention: gates.drift(gpt.PRESETS["tiny"], attention, steps=DRIFT_STEPS),
    ],
    ids=["overfit", "drift"],
)
def test_a_broken_kernel_turns_the_gate_red(gate, broken):
    found = gate(broken())
    assert not found.ok, found
    assert "nats from NumPy" in found.reason or "largest drift" in found.reason
    assert "FAILS" in str(found)


def test_sixty_steps_would_be_enough_to_pass():
    """The control of the breakages above: what turns them red is the distance from NumPy, not the shorter run."""
    found = gates.overfit(KernelAttention(), steps=60)
    assert found.ok, found


def test_a_model_that_does_not_learn_turns_overfit_red():
    class Deaf(NumpyAttention):
        def backward(self, kept, dout):
            return [0 * d for d in super().backward(kept, dout)]

    assert not gates.overfit(Deaf(), steps=3).ok


def test_a_single_shot_times_attention_within_the_step():
    shot = gates.single_shot(gpt.Preset(1, 16, 16, 2), KernelAttention(), repeats=2)
    assert 0 < shot.attention_seconds <= shot.step_seconds
    assert shot.device_bytes > 0 and shot.repeats == 2
    assert "fa2_forward + fa2" in str(shot)
