"""FlashAttention-2 in WGSL, run from Python, with the mathematics beside it."""

from __future__ import annotations

from importlib import import_module

from fa2lab import parity, reference
from fa2lab.adapter import adapters
from fa2lab.attention import attention
from fa2lab.backward import attention_backward, attention_grad, backward_trace
from fa2lab.engine import default_device
from fa2lab.errors import KernelError, LimitError, NoAdapterError, ParityError, ShapeError
from fa2lab.gpu import Device
from fa2lab.kernels import backward_kernels, kernels
from fa2lab.plan import plan
from fa2lab.results import Gradients, Result, Trace
from fa2lab.trace import forward_trace
from fa2lab.tuning import tune

__version__ = "0.1.0"
__all__ = [
    "Device",
    "Gradients",
    "KernelError",
    "LimitError",
    "NoAdapterError",
    "ParityError",
    "Result",
    "ShapeError",
    "Trace",
    "adapters",
    "attention",
    "attention_backward",
    "attention_grad",
    "backward_kernels",
    "backward_trace",
    "data",
    "default_device",
    "forward_trace",
    "kernels",
    "parity",
    "plan",
    "plot",
    "reference",
    "tune",
    "widgets",
]


def __getattr__(name: str):
    """`data`, `plot` and `widgets` load at first use: matplotlib and ipywidgets take longer than all the rest."""
    if name in ("data", "plot", "widgets"):
        return import_module(f"fa2lab.{name}")
    raise AttributeError(f"module 'fa2lab' has no attribute {name!r}")
