"""Memory of the backward pass, by the device's own allocation count: linear in T for `fa2`, refused for the rest."""

from __future__ import annotations

import engines
import gradients
import numpy as np
import pytest

import fa2lab as fa
from fa2lab.kernel import Kernel
from fa2lab.limits import BROWSER
from fa2lab.planned import PARAMS_BYTES, UNUSED_BYTES
from fa2lab.problem import Problem

both_kernels = pytest.mark.parametrize("kernel", fa.backward_kernels())
T, H, D = 16_384, 8, 64
BROWSER_SEATS = [seat for seat in engines.seats("webgpu") if seat.compiler == "naga"]


@pytest.mark.parametrize("mask", [{}, gradients.CAUSAL], ids=["full", "causal"])
@both_kernels
def test_the_plan_foretells_the_allocation_count(device, kernel, mask):
    q, k, v, dout = gradients.random(B=2, T=35, Tk=20, H=4, Hkv=2)
    forward, backward = fa.attention_grad(q, k, v, dout, kernel=kernel, device=device, **mask)
    assert backward.device_bytes == backward.plan.device_bytes == forward.device_bytes > 0
    alone = fa.attention_backward(q, k, v, forward.out, forward.lse, dout, kernel=kernel, device=device, **mask)
    assert alone.device_bytes == alone.plan.device_bytes > 0
    assert device.memory.live_bytes == 0 and device.memory.peak_bytes == alone.device_bytes


def test_what_the_numbers_are_made_of(roomy_device):
    """Counted by hand, so that plan and count do not merely agree with each other."""
    Tq, Tk = 35, 20
    q, k, v, dout = gradients.random(B=2, T=Tq, Tk=Tk, H=4, Hkv=2)
    queries, keys, rows, square = (4 * n for n in (q.size, k.size, 2 * 4 * Tq, 2 * 4 * Tq * Tk))
    idle = UNUSED_BYTES
    expected = {
        "fa2": 4 * queries + 4 * keys + 2 * rows + 2 * idle,  # q out dout dq, k v dk dv, lse delta, attn trace
        "materialised": 4 * queries + 4 * keys + rows + 2 * square + idle,  # attn and dscores instead of delta
    }
    for kernel, nbytes in expected.items():
        _, found = fa.attention_grad(q, k, v, dout, kernel=kernel, device=roomy_device)
        assert found.device_bytes == PARAMS_BYTES + nbytes + queries, "and the staging copy of the largest output"


def returning_at_once(kernel: Kernel) -> Kernel:
    """Its dispatches, allocations and copies, without a result: each invocation ends where it begins."""
    starts = {
        "fa2_forward": "  let bh = workgroup.y;",
        "fa2_delta": "  let row = id.x;",
        "fa2_dq": "  let bh = workgroup.y;",
        "fa2_dkv": "  let group = params.n_heads / params.n_kv_heads;",
    }
    for stage in kernel.passes:
        start = starts[stage.file]
        kernel = kernel.edited(start, f"  if (params.n_q > 0u) {{ return; }}\n{start}", file=stage.file)
    return kernel


def test_the_edit_leaves_everything_but_the_result(roomy_device):
    q, k, v, dout = gradients.random(T=35)
    kernel = fa.backward_kernels()["fa2"]
    _, found = fa.attention_grad(q, k, v, dout, kernel=kernel, device=roomy_device)
    _, empty = fa.attention_grad(q, k, v, dout, kernel=returning_at_once(kernel.after_forward()), device=roomy_device)
    assert found.device_bytes == empty.device_bytes
    assert found.dq.any() and not empty.dq.any() and not empty.dk.any() and not empty.dv.any()


@pytest.fixture(scope="module")
def long_arrays():
    """q, k, v, out or dout of 33,554,432 B, all the same one, and L."""
    x = np.ones((1, T, H, D), np.float32)
    return x, np.zeros((1, H, T), np.float32)


@pytest.mark.parametrize("seat", [engines.seat_param(seat) for seat in BROWSER_SEATS])
def test_long_sequences_take_inputs_outputs_and_a_number_a_row(seat, long_arrays):
    x, lse = long_arrays
    kernel = returning_at_once(fa.backward_kernels()["fa2"])
    found = fa.attention_backward(x, x, x, x, lse, x, causal=True, kernel=kernel, device=engines.device_of(seat))
    inputs, outputs = 5 * x.nbytes + lse.nbytes, 3 * x.nbytes
    delta, staging = 4 * H * T, x.nbytes  # outputs are read back one at a time
    assert found.device_bytes == inputs + outputs + delta + PARAMS_BYTES + staging
    assert len(found.plan.chunks) == 1
    assert found.device_bytes < 4 * H * T * T / 25, "what P alone would take"


@pytest.mark.parametrize("seat", [engines.seat_param(seat) for seat in BROWSER_SEATS[:1]])
def test_long_sequences_forward_and_backward_in_one_go(seat, long_arrays):
    x, lse = long_arrays
    kernel = returning_at_once(fa.backward_kernels()["fa2"].after_forward())
    _, found = fa.attention_grad(x, x, x, x, causal=True, kernel=kernel, device=engines.device_of(seat))
    inputs, outputs = 4 * x.nbytes, 4 * x.nbytes + lse.nbytes
    unwritten = 2 * UNUSED_BYTES  # attn and trace, which nobody asked for
    assert found.device_bytes == inputs + outputs + 4 * H * T + PARAMS_BYTES + x.nbytes + unwritten


@pytest.mark.parametrize("n", [1024, 4096, 16_384])
def test_twice_the_length_takes_twice_the_memory(n):
    def device_bytes(kernel: str, length: int) -> int:
        problem = Problem(1, length, length, H, H, D, True, "bottom-right", 1.0)
        roomy = fa.limits.Limits(*(1 << 60 for _ in vars(BROWSER)))
        return fa.plan(problem, roomy, kernel, table=fa.backward_kernels()).device_bytes - PARAMS_BYTES

    assert device_bytes("fa2", 2 * n) == 2 * device_bytes("fa2", n)
    assert device_bytes("materialised", 2 * n) > 2.5 * device_bytes("materialised", n)


def refusing_seats() -> list:
    """Where a binding holds at most 128 MiB: a browser's limits, and llvmpipe's own."""
    seats = engines.seats("adapter", "webgpu")
    return [engines.seat_param(seat) for seat in seats if seat.limits == "webgpu" or seat.adapter == "llvmpipe"]


@pytest.mark.parametrize("seat", refusing_seats())
def test_the_materialised_path_is_refused_with_its_number(seat, long_arrays):
    x, lse = long_arrays
    device = engines.device_of(seat)
    device.memory.reset_peak()
    number = rf"One head's (attn|dscores) takes {4 * T * T:,} B; one binding of this device holds 134,217,728 B"
    for call, given in ((fa.attention_backward, (x, x, x, x, lse, x)), (fa.attention_grad, (x, x, x, x))):
        with pytest.raises(fa.LimitError, match=f"{number}.*an fa2 kernel"):
            call(*given, causal=True, kernel="materialised", device=device)
    assert device.memory.peak_bytes == 0, "nothing was uploaded"


@pytest.mark.parametrize("seat", refusing_seats())
def test_auto_never_materialises(seat):
    problem = Problem(1, T, T, H, H, D, True, "bottom-right", 1.0)
    planned = fa.plan(problem, engines.device_of(seat).limits, table=fa.backward_kernels())
    assert planned.kernel.name == "fa2" and not planned.kernel.materialises
