"""The errors that fa2lab raises: one sentence each, with what was expected, what came, and what would work."""

from __future__ import annotations


class ShapeError(ValueError):
    """Arrays whose shapes do not make one attention problem."""


class LimitError(ValueError):
    """A problem that this kernel or this device cannot hold. Raised before anything is sent to the device."""


class NoAdapterError(RuntimeError):
    """No GPU adapter, hardware or software, matches what was asked for."""


class KernelError(RuntimeError):
    """WGSL that does not compile, or a kernel asked for something that it does not do."""


class ParityError(AssertionError):
    """A result further from the truth than float32 arithmetic explains; the message says where and how far."""
