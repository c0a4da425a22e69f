"""The attentions that the GPT can train through: NumPy's, the original pair of kernels, and FlashAttention-2."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from fa2lab import reference
from fa2lab.attention import attention
from fa2lab.backward import attention_backward
from fa2lab.engine import NUMPY
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.problem import pose


class NumpyAttention:
    """Causal attention and its gradients from their formulas, in float64 inside."""

    name = "NumPy float64"
    adapter = "NumPy"

    def __init__(self):
        self.seconds = 0.0  # spent in here since the start

    def forward(self, q, k, v) -> tuple[np.ndarray, Any]:
        """O; Q, K and V are kept."""
        start = time.perf_counter()
        problem, *_ = pose(q, k, v, causal=True)
        out = reference.attend(problem, q, k, v).out
        self.seconds += time.perf_counter() - start
        return out, (problem, q, k, v)

    def backward(self, kept, dout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dQ, dK and dV, with P worked out again and kept whole."""
        start = time.perf_counter()
        found = reference.gradients(*kept, dout)
        self.seconds += time.perf_counter() - start
        return found.dq, found.dk, found.dv


class KernelAttention:
    """Causal attention by WGSL kernels: `forward` and `backward` name them (or are `Kernel`s, edited ones, say)."""

    def __init__(
        self,
        forward: str | Kernel = "fa2_forward",
        backward: str | Kernel = "fa2",
        *,
        device: Device | str | None = None,
    ):
        self._forward, self._backward, self._device = forward, backward, device
        self.name = " + ".join(getattr(kernel, "label", kernel) for kernel in (forward, backward))
        self.adapter = NUMPY if device == "numpy" else ""
        self.seconds = 0.0  # spent in here since the start: upload, kernels and readback
        self.device_bytes = 0  # the most that any call allocated

    def forward(self, q, k, v) -> tuple[np.ndarray, Any]:
        """O; Q, K, V and the whole `Result` are kept."""
        start = time.perf_counter()
        result = attention(q, k, v, causal=True, kernel=self._forward, device=self._device)
        self.seconds += time.perf_counter() - start
        self.adapter = result.adapter
        self.device_bytes = max(self.device_bytes, result.device_bytes or 0)
        return result.out, (q, k, v, result)

    def backward(self, kept, dout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dQ, dK and dV."""
        start = time.perf_counter()
        q, k, v, r = kept
        wishes = dict(causal=True, kernel=self._backward, device=self._device)
        found = attention_backward(q, k, v, r.out, r.lse, dout, **wishes)
        self.seconds += time.perf_counter() - start
        self.device_bytes = max(self.device_bytes, found.device_bytes or 0)
        return found.dq, found.dk, found.dv


def original(device: Device | str | None = None) -> KernelAttention:
    """The original project's attention: `fused_sv` forward, materialised backward."""
    return KernelAttention("fused_sv", "materialised", device=device)
