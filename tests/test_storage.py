"""float16 on the device, float32 in the arithmetic: what is rounded, how far off it is, and what is refused."""

from __future__ import annotations

import engines
import gradients
import numpy as np
import pytest

import fa2lab as fa

HALF = {"storage": "float16"}


# SwiftShader has no float16.
HALVES = [seat for seat in engines.seats("adapter") if seat.compiler == "naga" and seat.adapter != "SwiftShader"]


@pytest.fixture(params=[engines.seat_param(seat) for seat in HALVES])
def half_device(request):
    """A device that has float16 in shaders."""
    return engines.device_of(request.param)


@pytest.mark.parametrize("D", [5, 8])
@pytest.mark.parametrize("kernel", ["fa2_forward_tiled", "fa2_decode"])
def test_only_the_stored_numbers_are_rounded(half_device, kernel, D):
    """Inputs that float16 holds come through exactly; O is off by its own rounding and float32's error, no more."""
    arrays = [x.astype(np.float16).astype(np.float32) for x in engines.random(T=9, Tk=40, D=D)]
    full = fa.attention(*arrays, kernel=kernel, device=half_device)
    half = fa.attention(*arrays, kernel=kernel, device=half_device, **HALF)
    assert half.out.dtype == np.float32 and half.lse.tobytes() == full.lse.tobytes(), "L is kept in float32"
    np.testing.assert_array_equal(half.out, full.out.astype(np.float16))
    assert half.plan.buffer_bytes()["q"] == -(-arrays[0].size // 2) * 4 and half.plan.storage == "float16"


def test_gradients_are_stored_rounded(half_device):
    arrays = [x.astype(np.float16).astype(np.float32) for x in gradients.random(T=9, H=2, Hkv=1)]
    result, found = fa.attention_grad(*arrays, kernel="fa2_tiled", device=half_device, **HALF)
    q, k, v, dout = arrays
    same = fa.attention_backward(q, k, v, result.out, result.lse, dout, kernel="fa2_tiled", device=half_device)
    for name in gradients.FIELDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(same, name).astype(np.float16), err_msg=name)


def test_what_float16_cannot_hold_is_refused(half_device):
    q, k, v = engines.random()
    k[0, 3, 0, 0] = 7e4
    with pytest.raises(fa.LimitError, match="k holds 70000; float16 ends at 65504"):
        fa.attention(q, k, v, kernel="fa2_forward_tiled", device=half_device, **HALF)
    k[0, 3, 0, 0] = np.inf  # infinite before and after
    fa.attention(q, k, v, kernel="fa2_forward_tiled", device=half_device, **HALF)


def test_kernels_and_devices_that_cannot_say_so():
    arrays = engines.random()
    with pytest.raises(fa.KernelError, match="naive stores float32 only; float16 is for fa2_forward_tiled, fa2_decode"):
        fa.attention(*arrays, kernel="naive", device="numpy", **HALF)
    with pytest.raises(fa.LimitError, match="no float16"):
        fa.attention(*arrays, kernel="fa2_forward_tiled", device="numpy", **HALF)
    with pytest.raises(ValueError, match='"float32" or "float16"; got \'bfloat16\''):
        fa.attention(*arrays, device="numpy", storage="bfloat16")
