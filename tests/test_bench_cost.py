"""The models of operations and bytes: held against the kernels' own loads and stores, counted as they run."""

from __future__ import annotations

import re
from dataclasses import replace

import engines
import numpy as np
import pytest

import fa2lab as fa
from fa2lab import cost
from fa2lab.errors import KernelError
from fa2lab.gpu import Dispatch
from fa2lab.kernel import Kernel
from fa2lab.launch import resident
from fa2lab.limits import BROWSER
from fa2lab.plan import plan
from fa2lab.problem import Problem, pose
from fa2lab.source import Part

TABLES = {"forward": fa.kernels(), "backward": fa.backward_kernels()}
CAUSAL = dict(B=2, T=21, Tk=18, H=2, Hkv=1, D=12, causal=True)  # grouped heads, ragged tiles, rows that see no key
FULL = dict(B=1, T=9, Tk=34, H=2, Hkv=2, D=7, causal=False)  # no whole vec4s
SLICED = dict(B=1, T=18, H=1, D=32, causal=True)  # D walked in two slices
DECODE = dict(B=2, T=3, Tk=90, H=2, Hkv=1, D=8, causal=True)  # in three parts, the last of them short
CASES = [(way, name, CAUSAL) for way, table in TABLES.items() for name in table if name != "fa2_decode"]
CASES += [("forward", name, FULL) for name in ("naive", "fused_sv", "fa2_forward")]
CASES += [("forward", "fa2_forward_tiled", FULL | {"D": 30})]
CASES += [("forward", "fa2_decode", DECODE), ("backward", "fa2", FULL)]
CASES += [("forward", "fa2_forward_tiled", SLICED), ("backward", "fa2_tiled", SLICED)]


def counting(text: str, buffers: list[str], binding: int) -> str:
    """The text with every index into a global buffer sent through a tally: `q[at]` becomes `q[tally(3u, at)]`.

    Loads of the n-th buffer are counted at 2·n and stores at 2·n + 1, in a further buffer at `binding`.
    """
    at, place = 0, re.compile(rf"\b({'|'.join(buffers)})\[")
    while found := place.search(text, at):
        at = end = found.end()  # an index may hold a load of its own
        depth = 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        slot = 2 * buffers.index(found[1]) + text.startswith(" = ", end)
        text = f"{text[:at]}tally({slot}u, {text[at : end - 1]}){text[end - 1 :]}"
    slots = f"array<atomic<u32>, {2 * len(buffers)}>"
    return (
        f"{text}@group(0) @binding({binding}) var<storage, read_write> tallies: {slots};\n"
        "fn tally(slot: u32, at: u32) -> u32 { atomicAdd(&tallies[slot], 1u); return at; }\n"
    )


def bytes_of_element(text: str, buffer: str) -> int:
    element = re.search(rf"> {buffer}: array<(.+)>;", text)[1]
    alias = re.search(rf"^alias {element} = (.+);$", text, re.MULTILINE)
    return {"f32": 4, "vec4<f32>": 16}[alias[1] if alias else element]


def counted(planned, arrays, device) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that the plan's dispatches really load and store, by buffer."""
    read, written = {}, {}
    with device.lock, resident(planned, arrays, device) as dispatches, device.buffers() as make:
        for stage, dispatch in zip(planned.kernel.passes, dispatches, strict=True):
            source = dispatch.source
            own = re.findall(r"@binding\(\d+\) var<storage, \w+> (\w+):", source.text)  # the kernel's names for them
            bound = [name for name, access in stage.bindings if access != "uniform"]
            tallies = make(np.zeros(2 * len(own), np.uint32))
            text = counting(source.text, own, len(dispatch.bindings))
            part = Part("counting", text, text, tuple(range(1, text.count("\n") + 1)))
            bindings = (*dispatch.bindings, (tallies, "read_write"))
            device.run([Dispatch(replace(source, parts=(part,), enable=""), bindings, dispatch.workgroups)])
            found = device.read(tallies, np.uint32, (len(own), 2))
            for name, its_name, (loads, stores) in zip(bound, own, found, strict=True):
                size = bytes_of_element(text, its_name)
                read[name] = read.get(name, 0) + int(loads) * size
                written[name] = written.get(name, 0) + int(stores) * size
    return read, written


def inputs_of(kernel: Kernel, arrays, problem: Problem) -> dict[str, np.ndarray]:
    """What a kernel takes: Q, K and V, and for a backward O, L and dO as well; a load is a load, whatever it brings."""
    rng = np.random.default_rng(1)
    found = dict(zip("qkv", arrays, strict=True))
    found |= {name: rng.standard_normal(arrays[0].shape, np.float32) for name in ("out", "dout")}
    found["lse"] = np.ones((problem.B, problem.H, problem.Tq), np.float32)
    return {name: found[name] for name in kernel.inputs}


def without_zeros(sums: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in sums.items() if n}


@pytest.mark.gpu
@pytest.mark.skipif(bool(engines.lacking("llvmpipe", "naga")), reason="no llvmpipe")
@pytest.mark.parametrize(("way", "name", "shape"), CASES, ids=[f"{name}-D{shape['D']}" for _, name, shape in CASES])
def test_the_model_is_what_the_kernel_loads_and_stores(way, name, shape):
    device = engines.device_of(engines.Seat("llvmpipe", "naga", "adapter"))
    sizes = {axis: n for axis, n in shape.items() if axis != "causal"}
    problem, *arrays = pose(*fa.data.make("random", **sizes), causal=shape["causal"])
    splits = 3 if TABLES[way][name].splits else None
    planned = plan(problem, device.limits, name, table=TABLES[way], splits=splits)
    if shape is SLICED:
        planned = replace(planned, tiles=tuple(tile and replace(tile, slices=2) for tile in planned.tiles))
    model = cost.traffic(planned)
    read, written = counted(planned, inputs_of(planned.kernel, arrays, problem), device)
    assert without_zeros(model.read) == without_zeros(read)
    assert without_zeros(model.written) == without_zeros(written)


def test_every_kernel_has_a_model():
    problem = Problem(1, 40, 40, 2, 2, 16, True, "bottom-right", 0.25)
    for table in TABLES.values():
        for kernel in table.values():
            for both in (kernel, kernel.after_forward()) if kernel.forward else (kernel,):
                assert cost.traffic(plan(problem, BROWSER, both)).total > cost.least(plan(problem, BROWSER, both))
    stranger = replace(fa.kernels()["fa2_forward"].passes[0], file="fa9")
    with pytest.raises(KernelError, match="no model of the bytes that fa9.wgsl moves"):
        cost.traffic(plan(problem, BROWSER, replace(fa.kernels()["fa2_forward"], passes=(stranger,))))


def test_sixteen_rows_a_tile_read_keys_and_values_sixteen_times_less():
    problem = Problem(1, 256, 256, 1, 1, 32, False, "bottom-right", 0.25)
    by_row = cost.traffic(plan(problem, BROWSER, "fused_sv")).read
    by_tile = cost.traffic(plan(problem, BROWSER, "fa2_forward", block_q=16, block_k=16)).read
    for name in "kv":
        assert by_row[name] == 256 * 256 * 32 * 4 and by_row[name] == 16 * by_tile[name]


def test_operations_by_the_convention_of_the_field():
    full = Problem(4, 4096, 4096, 16, 16, 64, False, "bottom-right", 0.125)
    assert cost.flops(full) == 4 * 4 * 16 * 4096**2 * 64 == 274_877_906_944
    causal = replace(full, causal=True)
    assert cost.flops(causal) == cost.flops(full) / 2
    assert cost.flops(causal, "backward") == 2.5 * cost.flops(causal)
    assert cost.flops(causal, "forward+backward") == 3.5 * cost.flops(causal)


def test_nothing_to_launch_moves_nothing():
    problem = Problem(0, 8, 8, 1, 1, 4, True, "bottom-right", 0.5)
    assert cost.traffic(plan(problem, BROWSER, "fa2_forward")).total == 0
