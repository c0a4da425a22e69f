"""The end-to-end gates: kernels that pass unit parity can still be wrong together, so a model has to train on them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from fa2lab.gpt import Attention, Preset
from fa2lab.gpt_attention import KernelAttention, NumpyAttention
from fa2lab.training import Run, batch, start

OVERFIT = Preset(layers=2, width=32, context=16, heads=2, mlp=64)
# The original project's bounds: memorise one batch, and stay within 5 % of the CPU's losses.
LEARNED_BELOW, DRIFT_BOUND = 0.5, 0.05
# Tighter ones beside them, between what rounding does (up to 1e-6 over seven texts, in nats or relatively) and what a
# gradient does that is wrong for one head (1e-3 and more). While one batch is learnt by heart Adam divides ever
# smaller gradients by their own size, and float32's rounding with them: by step 150 that alone can part two correct
# runs by 0.1 nats. So the losses are held together over the first steps, where only a fault parts them.
FOLLOWED_STEPS, OVERFIT_NATS, DRIFT_ALLOWED = 10, 1e-4, 1e-4
# What both gates read, the same for ever: the project's own text changes with every word of a notebook.
TEXT = " ".join(map(str, range(3000))).encode()

Progress = Callable[[int, float], None]  # step, loss


@dataclass(frozen=True, eq=False)
class Gate:
    """One gate: the losses of both attentions step by step, and the verdict with its reason."""

    name: str
    losses: np.ndarray  # (steps,), on the attention under test
    expected: np.ndarray  # (steps,), on NumPy's
    attention: str
    adapter: str
    ok: bool
    reason: str

    @property
    def drift(self) -> np.ndarray:
        """Relative distance of the losses at each step."""
        return np.abs(self.losses / self.expected - 1)

    @property
    def label(self) -> str:
        """`attention on adapter`, the footer of every figure."""
        return f"{self.attention} on {self.adapter}"

    def __str__(self) -> str:
        return f"{self.name} with {self.label}: {'passes' if self.ok else 'FAILS'}. {self.reason}"


def overfit(attention: Attention, *, steps: int = 150, progress: Progress | None = None) -> Gate:
    """A tiny model memorises one batch of 8: from about ln 256 = 5.545 to below 0.5 within 150 steps.

    The same run on NumPy's attention goes beside it, and over the first `FOLLOWED_STEPS` the losses may part by
    `OVERFIT_NATS`: a model can memorise with a wrong gradient as well.
    """
    losses = _memorise(attention, steps, progress)
    expected = _memorised_by_numpy(steps)
    followed = min(FOLLOWED_STEPS, steps)
    apart = float(np.abs(losses - expected)[:followed].max())
    begins = abs(losses[0] - np.log(256)) < 0.1
    reason = (
        f"Loss {losses[0]:.3f} to {losses[-1]:.4f} in {steps} steps (below {LEARNED_BELOW} wanted), "
        f"at most {apart:.1e} nats from NumPy's losses in the first {followed} ({OVERFIT_NATS:g} allowed)."
    )
    ok = bool(begins and losses[-1] < LEARNED_BELOW and apart <= OVERFIT_NATS)
    return Gate("overfit", losses, expected, attention.name, attention.adapter, ok, reason)


@cache
def _memorised_by_numpy(steps: int) -> np.ndarray:
    return _memorise(NumpyAttention(), steps, None)


def _memorise(attention: Attention, steps: int, progress: Progress | None) -> np.ndarray:
    run = start(OVERFIT, attention, text=TEXT, lr=5e-3)
    tokens, targets = batch(run.text, OVERFIT, 8, seed=0, step=0)
    losses = np.empty(steps)
    for step in range(steps):
        losses[step], grads = run.model.loss_and_gradients(tokens, targets)
        run.optimiser.update(run.model.params, grads, 5e-3)
        if progress:
            progress(step, losses[step])
    return losses


def drift(
    preset: Preset, attention: Attention, *, steps: int = 50, batch_size: int = 4, progress: Progress | None = None
) -> Gate:
    """The same seed trained on this attention and on NumPy's: the losses stay together at every step."""
    losses = _follow(start(preset, attention, text=TEXT, lr=3e-3, batch_size=batch_size), steps, progress)
    expected = _followed_by_numpy(preset, steps, batch_size)
    worst = float(np.abs(losses / expected - 1).max())
    reason = (
        f"Loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps; largest drift {worst:.1e} "
        f"({DRIFT_ALLOWED:g} allowed here, {DRIFT_BOUND:.0%} in the original)."
    )
    return Gate("drift", losses, expected, attention.name, attention.adapter, worst <= DRIFT_ALLOWED, reason)


@cache
def _followed_by_numpy(preset: Preset, steps: int, batch_size: int) -> np.ndarray:
    return _follow(start(preset, NumpyAttention(), text=TEXT, lr=3e-3, batch_size=batch_size), steps, None)


def _follow(run: Run, steps: int, progress: Progress | None) -> np.ndarray:
    losses = np.empty(steps)
    for step, loss in enumerate(run.steps(steps)):
        losses[step] = loss
        if progress:
            progress(step, loss)
    return losses


@dataclass(frozen=True)
class Shot:
    """One training step's wall-clock time, medians in seconds, and the most device memory of any attention call."""

    attention: str
    adapter: str
    attention_seconds: float
    step_seconds: float
    device_bytes: int
    repeats: int

    def __str__(self) -> str:
        return (
            f"{self.attention:28} attention {self.attention_seconds:8.3f} s of a step of {self.step_seconds:8.3f} s, "
            f"device memory {self.device_bytes:,} B ({self.adapter}, median of {self.repeats})"
        )


def single_shot(preset: Preset, attention: KernelAttention, *, batch_size: int = 1, repeats: int = 3) -> Shot:
    """Time one training step of `preset`: attention apart (upload, kernels, readback) and the whole step.

    Wall clock, medians of `repeats` after one step that compiles and warms up.
    """
    run = start(preset, attention, batch_size=batch_size)
    attended, whole = [], []
    for repeat in range(1 + repeats):
        before, begin = attention.seconds, time.perf_counter()
        list(run.steps(1))
        if repeat:
            whole.append(time.perf_counter() - begin)
            attended.append(attention.seconds - before)
    medians = statistics.median(attended), statistics.median(whole)
    return Shot(attention.name, attention.adapter, *medians, attention.device_bytes, repeats)
