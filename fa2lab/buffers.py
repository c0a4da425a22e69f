"""Device memory: buffers, the count of what is alive, and scopes that give it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

    from fa2lab.gpu import Device

Access = Literal["uniform", "read", "read_write"]


@dataclass(eq=False)
class Buffer:
    """Device memory of `nbytes`, counted until `release`."""

    handle: object
    nbytes: int
    memory: Memory

    def release(self) -> None:
        """Give the memory back now. A second call does nothing."""
        if self.handle is not None:
            self.memory.count(-self.nbytes)
            self.handle.destroy()
            self.handle = None


@dataclass
class Memory:
    """The device's own allocation count: bytes and buffers alive now, and the most bytes since `reset_peak`."""

    live_bytes: int = 0
    live_buffers: int = 0
    peak_bytes: int = 0

    def count(self, nbytes: int) -> None:
        """Enter an allocation, or with a negative number a release."""
        self.live_bytes += nbytes
        self.live_buffers += 1 if nbytes > 0 else -1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self.peak_bytes = self.live_bytes


class BufferScope:
    """Buffers that live as long as a `with` block, whatever happens in it."""

    def __init__(self, device: Device):
        self._device, self._made = device, []

    def __enter__(self):
        return self.make

    def make(self, content: int | np.ndarray, *, uniform: bool = False) -> Buffer:
        """Allocate in this scope."""
        self._made.append(self._device.allocate(content, uniform=uniform))
        return self._made[-1]

    def __exit__(self, *exception) -> None:
        for buffer in reversed(self._made):
            buffer.release()
