"""Whose attention is timed: this project's kernels, and what is installed of PyTorch, ONNX Runtime and aule-attention.

A subject opens a case and yields a `Runner` while its data stands on the device. What is absent raises `Absent`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

import fa2lab as fa
from fa2lab import bench, spotcheck
from fa2lab.bench_record import version
from fa2lab.cost import Direction, flops
from fa2lab.launch import resident
from fa2lab.plan import plan
from fa2lab.problem import Problem, pose

ROWS = 8  # the last query rows, which see the most, are held against float64
CHAIN = 21  # nodes of ONNX Runtime's chain; a chain of one is taken off, and with it what surrounds the kernels


class Absent(Exception):
    """A subject that cannot run here, and why."""


@dataclass(frozen=True)
class Case:
    """One problem that everyone is given: B, H, T, D, the mask, and what is timed."""

    B: int
    H: int
    T: int
    D: int
    causal: bool
    direction: Direction

    def __str__(self) -> str:
        return f"{'causal' if self.causal else 'full'} {self.direction}, B={self.B} H={self.H} T={self.T} D={self.D}"

    @property
    def problem(self) -> Problem:
        """Its shapes."""
        return pose(*self.arrays[:3], causal=self.causal)[0]

    @property
    def flops(self) -> float:
        """By the convention of the field."""
        return flops(self.problem, self.direction)

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """q, k, v and dO, `(B, T, H, D)` float32."""
        return _arrays(self.B, self.T, self.H, self.D)

    def heads_first(self, dtype: type = np.float32) -> tuple[np.ndarray, ...]:
        """The same as `(B, H, T, D)`."""
        return tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3), dtype) for x in self.arrays)

    @cached_property
    def truth(self) -> np.ndarray:
        """O of the last batch's last rows in float64, `(ROWS, H, D)`: their keys are all keys."""
        q, k, v, _ = self.arrays
        return fa.reference.attention(q[-1:, -ROWS:], k[-1:], v[-1:], causal=self.causal).out[0]

    def error(self, rows: np.ndarray) -> float:
        """How far `(ROWS, H, D)` is from the truth."""
        return float(np.abs(np.asarray(rows, np.float64) - self.truth).max())


@cache
def _arrays(B: int, T: int, H: int, D: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, T, H, D), np.float32) for _ in range(4))


@dataclass(frozen=True)
class Runner:
    """`run(n)` does n runs and returns their seconds, by `clock`; `error` is that of its output.

    long: one run is a batch by itself and warms the card.
    """

    run: Callable[[int], float]
    clock: str
    error: float
    note: str = ""
    long: bool = False


@dataclass(frozen=True)
class Subject:
    """Something that computes attention. `part` is its word for `--only`."""

    name: str
    part: str
    open: Callable[[Case], Iterator[Runner]]
    directions: tuple[Direction, ...] = ("forward", "forward+backward")


def subjects(adapter: str | None) -> list[Subject]:
    """Everyone, this project first. `adapter`: a part of the name of the one that our kernels run on."""
    ours = [
        Subject("fa2lab, auto", "ours", lambda c: _ours(c, adapter, "auto", False)),
        Subject("fa2lab, auto, with shader checks", "ours", lambda c: _ours(c, adapter, "auto", True)),
        Subject("fa2lab, original fa2_forward", "ours", lambda c: _ours(c, adapter, ORIGINAL, False), ("forward",)),
        Subject(
            "fa2lab, original fa2_forward, with shader checks",
            "ours",
            lambda c: _ours(c, adapter, ORIGINAL, True),
            ("forward",),
        ),
    ]
    torch = [
        Subject(f"PyTorch SDPA {name}", "torch", lambda c, backend=backend, dtype=dtype: _torch(c, backend, dtype))
        for name, backend, dtype in (
            ("f32, plain matmuls", "MATH", "float32"),
            ("f32, memory-efficient", "EFFICIENT_ATTENTION", "float32"),
            ("f16, flash", "FLASH_ATTENTION", "float16"),
            ("f16, cuDNN", "CUDNN_ATTENTION", "float16"),
        )
    ]
    onnx = [
        Subject(f"ONNX Runtime WebGPU {name}", "onnx", lambda c, dtype=dtype: _onnx(c, dtype), ("forward",))
        for name, dtype in (("f32", np.float32), ("f16", np.float16))
    ]
    return [*ours, *torch, *onnx, Subject("aule-attention f32", "aule", _aule, ("forward",))]


# Ours.

ORIGINAL = "fa2_forward"


@cache
def device(adapter: str | None, checks: bool) -> fa.Device:
    """Our device, with or without shader checks."""
    return fa.Device(adapter, shader_checks=checks)


@contextmanager
def _ours(case: Case, adapter: str | None, kernel: str, checks: bool) -> Iterator[Runner]:
    where = device(adapter, checks)
    if where.shader_checks != checks:
        raise Absent("shader checks cannot be left out here")
    q, k, v, dout = case.arrays
    planned = plan(case.problem, where.limits, kernel, table=bench.table(case.direction))
    bench.one_launch(planned)
    table = bench.table("forward" if case.direction == "forward" else "backward")
    run = spotcheck.Run(where, table[planned.kernel.name], case.direction, q, k, v, dout, case.causal)
    result, _ = run.results()
    if not checks:  # with them the bits are the same, which is asked below
        spotcheck.prove(run)
        _proved[case, kernel] = result.out
    elif (case, kernel) in _proved and not np.array_equal(_proved[case, kernel], result.out):
        raise fa.ParityError(f"{planned.kernel.name} gives other bits with shader checks than without.")
    inputs = {name: dict(q=q, k=k, v=v, dout=dout)[name] for name in planned.kernel.inputs}
    note = f"{planned.kernel.name} {' '.join(dict.fromkeys(str(tile) for tile in planned.tiles if tile))}".strip()
    with where.lock, resident(planned, inputs, where) as dispatches:
        error = case.error(result.out[-1, -ROWS:])
        yield Runner(lambda n: where.time(dispatches, n), where.clock, error, note)


_proved: dict[tuple[Case, str], np.ndarray] = {}


# PyTorch.


def _module(name: str, package: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Absent(f"{package} is not installed") from error


@contextmanager
def _torch(case: Case, backend: str, dtype: str) -> Iterator[Runner]:
    torch = _module("torch", "torch")
    if not torch.cuda.is_available():
        raise Absent("PyTorch sees no CUDA device")
    attention = _module("torch.nn.attention", "torch")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with_gradients = case.direction == "forward+backward"
    tensors = [torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in case.heads_first()]
    for x in tensors[:3]:
        x.requires_grad_(with_gradients)

    def once():
        q, k, v, dout = tensors
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
        if with_gradients:
            torch.autograd.grad(out, (q, k, v), dout)
        return out

    def run(n: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
            begin.record()
            for _ in range(n):
                once()
            end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        last = once()[-1, :, -ROWS:].detach().float().cpu().numpy()  # (H, ROWS, D)
    try:
        yield Runner(run, "CUDA events", case.error(last.transpose(1, 0, 2)))
    finally:
        tensors.clear()
        torch.cuda.empty_cache()


def torch_product(N: int = 8192) -> Callable[[int], float]:
    """`run(n)` of PyTorch's float32 matrix product, without TF32. Raises `Absent`."""
    torch = _module("torch", "torch")
    if not torch.cuda.is_available():
        raise Absent("PyTorch sees no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    a, b, c = (torch.randn(N, N, device="cuda") for _ in range(3))

    def run(n: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(n):
            torch.mm(a, b, out=c)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e-3

    return run


# ONNX Runtime through WebGPU: MultiHeadAttention, whose arrays are (B, T, H·D).


@contextmanager
def _onnx(case: Case, dtype: type) -> Iterator[Runner]:
    runtime, onnx = _module("onnxruntime", "onnxruntime-webgpu"), _module("onnx", "onnx")
    arrays = {name: x.reshape(case.B, case.T, -1).astype(dtype) for name, x in zip("qkv", case.arrays, strict=False)}
    single, chain = (_session(runtime, onnx, case, dtype, nodes) for nodes in (1, CHAIN))

    def seconds(session) -> float:
        begin = time.perf_counter()
        session.run(None, arrays)
        return time.perf_counter() - begin

    def run(n: int) -> float:
        return sum(max(seconds(chain) - seconds(single), 1e-9) for _ in range(n)) / (CHAIN - 1)

    out = single.run(None, arrays)[0].reshape(case.B, case.T, case.H, case.D)
    for _ in range(2):  # the first compiles
        chain.run(None, arrays)
    yield Runner(run, f"wall clock, {CHAIN} chained nodes less one", case.error(out[-1, -ROWS:]), long=True)


def _session(runtime, onnx, case: Case, dtype: type, nodes: int):
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT if dtype is np.float32 else onnx.TensorProto.FLOAT16
    shape = (case.B, case.T, case.H * case.D)
    names = ["q", *(f"x{i}" for i in range(1, nodes)), "out"]
    options = dict(domain="com.microsoft", num_heads=case.H, unidirectional=int(case.causal))
    made = [
        helper.make_node("MultiHeadAttention", [before, "k", "v"], [after], **options)
        for before, after in zip(names, names[1:], strict=False)
    ]
    values = [helper.make_tensor_value_info(name, kind, shape) for name in (*"qkv", "out")]
    graph = helper.make_graph(made, "attention", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    settings = runtime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")  # a CPU's time is no answer here
    if "WebGpuExecutionProvider" in runtime.get_available_providers():
        return runtime.InferenceSession(model, settings, providers=["WebGpuExecutionProvider"])
    plugin = _module("onnxruntime_ep_webgpu", "onnxruntime-webgpu (or onnxruntime-ep-webgpu)")
    _register(runtime, plugin)
    devices = [found for found in runtime.get_ep_devices() if found.ep_name == plugin.get_ep_name()]
    settings.add_provider_for_devices(devices[:1], {})
    return runtime.InferenceSession(model, settings)


@cache
def _register(runtime, plugin) -> None:
    runtime.register_execution_provider_library("webgpu", plugin.get_library_path())


# aule-attention.


@contextmanager
def _aule(case: Case) -> Iterator[Runner]:
    vulkan = _module("aule.vulkan", "aule-attention")
    engine = _aule_engine(vulkan)
    shape = (case.B, case.H, case.T, case.D)
    tensors = [engine.tensor(shape) for _ in range(4)]
    try:
        for tensor, array in zip(tensors, case.heads_first(), strict=False):
            tensor.upload(array)

        def run(n: int) -> float:
            begin = time.perf_counter()
            for _ in range(n):
                engine.attention_gpu(*tensors, causal=case.causal)
            return time.perf_counter() - begin

        run(1)
        out = np.asarray(tensors[3].download()).reshape(shape)[-1, :, -ROWS:]
        yield Runner(run, "wall clock", case.error(out.transpose(1, 0, 2)))
    finally:
        for tensor in tensors:
            tensor.destroy()


@cache
def _aule_engine(vulkan):
    vulkan._LIBRARY_PATH = vulkan._LIBRARY_PATH or vulkan._find_library()  # its own entry points do this beforehand
    return vulkan.Aule()


def versions() -> dict[str, str]:
    """Of all packages that compute, those that are installed."""
    packages = ("numpy", "wgpu", "torch", "onnxruntime-webgpu", "onnxruntime", "onnxruntime-ep-webgpu", "onnx")
    return {"fa2lab": fa.__version__} | {p: v for p in (*packages, "aule-attention") if (v := version(p))}
