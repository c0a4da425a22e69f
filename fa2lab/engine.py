"""Which engine computes: the device that is asked for, the fastest adapter, or NumPy where there is none."""

from __future__ import annotations

import warnings
from dataclasses import replace

from fa2lab.errors import KernelError, LimitError, NoAdapterError
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.limits import BROWSER, Limits, physical_memory
from fa2lab.problem import Problem

NUMPY = "NumPy float32 on the CPU (no GPU adapter)"
_default: Device | None = None


def default_device() -> Device:
    """The device that `attention` uses when none is named, made at first use. Raises `NoAdapterError`."""
    global _default
    if _default is None:
        _default = Device()
    return _default


def choose(device: Device | str | None) -> Device | None:
    """None stands for NumPy."""
    if isinstance(device, Device):
        return device
    if device == "numpy":
        return None
    if device is not None:
        raise TypeError(f'device must be a fa2lab.Device, "numpy" or None; got {device!r}.')
    try:
        return default_device()
    except NoAdapterError as error:
        _warn_once(str(error))
        return None


_warned = False


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"NumPy computes on the CPU in place of a GPU. {reason}", RuntimeWarning, stacklevel=4)


def check_host_memory(p: Problem, *, queries: int, keys: int, scores: int = 0) -> None:
    """Refuse what no memory holds once it is written out: broadcast views can pose such problems.

    `queries`, `keys` and `scores` say how many arrays of Q's and of K's shape, and of `(B, H, Tq, Tk)`, there will be.
    Raises `LimitError`.
    """
    room = physical_memory()
    need = 4 * p.B * (queries * p.Tq * p.H * p.D + keys * p.Tk * p.Hkv * p.D + scores * p.H * p.Tq * p.Tk)
    if room is not None and need > room:
        raise LimitError(f"{p} needs {need:,} B for its arrays; this machine has {room:,} B. Smaller sizes fit.")


def numpy_runs(kernel: Kernel) -> None:
    """NumPy computes by code of its own, so it cannot stand in for an edited kernel. Raises `KernelError`."""
    if kernel.edits:
        raise KernelError(f"{kernel.label} needs a GPU adapter, hardware or software; NumPy does not run WGSL.")


def limits_of(device: Device | None) -> Limits:
    """NumPy walks the tiles that a browser's limits allow, so that both tell the same story."""
    return device.limits if device else replace(BROWSER, software=True)
