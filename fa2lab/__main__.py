"""The shell's way in: `python -m fa2lab doctor`, `parity`, `bench`, `gate` and `train`."""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fa2lab import bench_command, data, parity, reference
from fa2lab.attention import attention
from fa2lab.backward import attention_backward
from fa2lab.engine import default_device
from fa2lab.errors import KernelError, NoAdapterError
from fa2lab.files import LAYOUTS
from fa2lab.gpt import PRESETS
from fa2lab.gpt_attention import KernelAttention, NumpyAttention, original
from fa2lab.gpu import Device
from fa2lab.kernels import backward_kernels, kernels
from fa2lab.problem import ALIGNMENTS

OK, NOT_OK, BAD_INPUT = 0, 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit status is 0 for yes, 1 for no and 2 for input that makes no sense."""
    arguments = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"fa2lab: {message}", file=sys.stderr)
        try:
            return arguments.run(arguments)
        except (ValueError, TypeError, KernelError, NoAdapterError, OSError) as error:
            print(f"fa2lab: {error}", file=sys.stderr)
            return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fa2lab", description="FlashAttention-2 in WGSL, from the shell.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    doctor = verbs.add_parser("doctor", help="tell which GPU adapters work, and what is missing")
    doctor.set_defaults(run=_doctor)

    check = verbs.add_parser("parity", help="hold a kernel against float64; the exit status is the verdict")
    check.set_defaults(run=_parity)
    shape = check.add_argument_group("the problem")
    shape.add_argument("--B", type=int, default=1, help="batches (1)")
    shape.add_argument("--T", type=int, default=64, help="queries, and keys unless --Tk is given (64)")
    shape.add_argument("--Tk", type=int, help="keys")
    shape.add_argument("--H", type=int, default=2, help="query heads (2)")
    shape.add_argument("--Hkv", type=int, help="key and value heads, a divisor of H (H)")
    shape.add_argument("--hd", type=int, default=32, help="head dimension (32)")
    shape.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="mask the future (on)")
    shape.add_argument("--align", choices=ALIGNMENTS, default=ALIGNMENTS[0], help="causal corner where Tq is not Tk")
    shape.add_argument("--scale", type=float, help="of the scores (1/sqrt(hd))")
    inputs = check.add_argument_group("the inputs")
    inputs.add_argument("--pattern", choices=tuple(data.PATTERNS), default="random")
    inputs.add_argument("--seed", type=int, default=0)
    inputs.add_argument("--file", metavar="FILE", help=".npz, .npy or .safetensors with q, k, v (and out)")
    inputs.add_argument("--layout", choices=tuple(LAYOUTS), default="BTHD", help="of the file's arrays (BTHD)")
    inputs.add_argument("--heads", type=int, help="query heads in the columns of layout BTC")
    how = check.add_argument_group("the kernel and the device")
    how.add_argument("--kernel", default="auto", help=f"auto, {', '.join(kernels())}")
    how.add_argument("--block-q", type=int, metavar="BR", help="query rows of a tile")
    how.add_argument("--block-k", type=int, metavar="BC", help="keys of a tile")
    how.add_argument("--attn", action="store_true", help="also write and compare the attention matrix")
    how.add_argument("--trace", action="store_true", help="also record and compare m, l and alpha tile by tile")
    how.add_argument("--grad", action="store_true", help="also run the backward pass and compare dQ, dK and dV")
    how.add_argument("--backward", default="auto", help=f"its kernel: auto, {', '.join(backward_kernels())}")
    how.add_argument("--adapter", help="a part of its name; `numpy` for none")
    how.add_argument("--compiler", choices=("naga", "tint"), default="naga")
    how.add_argument("--limits", choices=("adapter", "webgpu"), default="adapter")
    bench_command.add(verbs)
    _add_gate(verbs)
    _add_train(verbs)
    return parser


def _add_gate(verbs) -> None:
    gate = verbs.add_parser("gate", help="train through the kernels, and hold the losses against NumPy's")
    gate.set_defaults(run=_gate)
    gate.add_argument("which", nargs="*", metavar="GATE", help="overfit, drift (both by default), shot, crossover")
    gate.add_argument("--preset", choices=tuple(PRESETS), help="of drift (tiny) and of shot (mega)")
    gate.add_argument("--attention", choices=("fa2", "original"), default="fa2", help="which kernels train (fa2)")
    gate.add_argument("--adapter", help="a part of its name; `numpy` for none")


def _add_train(verbs) -> None:
    train = verbs.add_parser("train", help="train a byte-level GPT and save its weights")
    train.set_defaults(run=_train)
    train.add_argument("--preset", choices=tuple(PRESETS), default="tiny")
    train.add_argument("--steps", type=int, default=1000)
    train.add_argument("--batch", type=int, default=8)
    train.add_argument("--lr", type=float, default=3e-3, help="the peak of a cosine (0.003)")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--text", metavar="FILE", help="what to train on (the project's own text)")
    train.add_argument("--attention", choices=("numpy", "fa2", "original"), default="numpy")
    train.add_argument("--checkpoint", metavar="FILE", help="save here as it goes, and go on from there if it exists")
    train.add_argument("--weights", metavar="FILE", help="where the weights go at the end, as float16 safetensors")


def _doctor(_arguments: argparse.Namespace) -> int:
    from fa2lab.doctor import doctor

    lines, works = doctor()
    print("\n".join(lines))
    return OK if works else NOT_OK


def _parity(a: argparse.Namespace) -> int:
    if a.file:
        arrays = data.load(a.file, layout=a.layout, heads=a.heads)
    else:
        arrays = data.make(a.pattern, B=a.B, T=a.T, H=a.H, D=a.hd, Tk=a.Tk, Hkv=a.Hkv, seed=a.seed)
    problem = dict(causal=a.causal, scale=a.scale, align=a.align)
    where = dict(block_q=a.block_q, block_k=a.block_k, device=_device(a))
    result = attention(*arrays, **problem, **where, kernel=a.kernel, return_attn=a.attn, trace=a.trace)
    truth = reference.attention(*arrays, **problem, return_attn=a.attn)
    found = [parity.compare(result, truth)]
    if a.trace:
        found.append(parity.compare_traces(result, truth))
    if arrays.out is not None:
        theirs = replace(result, out=arrays.out, lse=None, attn=None, trace=None, kernel="out", adapter=a.file)
        found.append(parity.compare(theirs, truth))
    print(result.plan or result.problem)
    if a.grad:
        dout = np.random.default_rng(a.seed + 1).standard_normal(result.out.shape, np.float32)
        given = (*arrays, result.out, result.lse, dout)
        gradients = attention_backward(*given, **problem, **where, kernel=a.backward)
        print(gradients.plan or gradients.problem)
        found.append(parity.compare(gradients, reference.attention_backward(*arrays, dout, **problem)))
    print("\n".join(map(str, found)))
    return OK if all(f.ok for f in found) else NOT_OK


def _gate(a: argparse.Namespace) -> int:
    from fa2lab import gates

    known = {"overfit", "drift", "shot", "crossover"}
    if strange := set(a.which) - known:
        raise ValueError(f"No gate is called {', '.join(sorted(strange))}; there are {', '.join(sorted(known))}.")
    device = "numpy" if a.adapter == "numpy" else Device(a.adapter) if a.adapter else None
    make = KernelAttention if a.attention == "fa2" else original
    ok = True
    for which in a.which or ("overfit", "drift"):
        if which == "crossover":
            _print_crossover(device)
            continue
        if which == "shot":
            for attention_kind in (original, KernelAttention):
                print(gates.single_shot(PRESETS[a.preset or "mega"], attention_kind(device=device)))
            continue
        steps = {"overfit": 150, "drift": 50}[which]
        with tqdm(total=steps, desc=which, leave=False) as bar:
            watch = dict(steps=steps, progress=lambda _, loss, bar=bar: _advance(bar, loss))
            kernels_at_work = make(device=device)
            if which == "overfit":
                gate = gates.overfit(kernels_at_work, **watch)
            else:
                gate = gates.drift(PRESETS[a.preset or "tiny"], kernels_at_work, **watch)
        print(gate)
        ok = ok and gate.ok
    return OK if ok else NOT_OK


def _print_crossover(device: Device | str | None) -> None:
    from fa2lab import bench

    if device == "numpy":
        raise NoAdapterError("The crossover times kernels, so it needs an adapter.")
    device = device or default_device()
    print(f"causal forward, B=1 H=4 D=32, median, {device.clock}, on {device.adapter}")
    for T, times in bench.crossover(device):
        ratio = times["fused_sv"].seconds / times["fa2_forward"].seconds
        print(f"T={T:5}  " + "  ".join(f"{name} {found}" for name, found in times.items()) + f"  ratio {ratio:.2f}")


def _train(a: argparse.Namespace) -> int:
    from fa2lab import training

    if min(a.steps, a.batch) < 1:
        raise ValueError(f"--steps and --batch must be at least 1; got {a.steps} and {a.batch}.")
    kinds = {"numpy": NumpyAttention, "fa2": KernelAttention, "original": original}
    schedule = training.warm_cosine(a.lr, a.steps)
    run = training.start(
        PRESETS[a.preset],
        kinds[a.attention](),
        text=training.corpus(a.text),
        batch_size=a.batch,
        seed=a.seed,
        lr=schedule,
        decay=0.05,
    )
    if a.checkpoint and Path(a.checkpoint).is_file():
        run.restore(a.checkpoint)
    losses: list[float] = []
    asked_to_stop: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: asked_to_stop.append(number))
    with tqdm(total=a.steps, initial=run.optimiser.step, desc=f"train {a.preset}") as bar:
        try:
            for loss in run.steps(a.steps - run.optimiser.step):
                losses.append(loss)
                _advance(bar, loss)
                if a.checkpoint and run.optimiser.step % 100 == 0:
                    run.save(a.checkpoint)
                if asked_to_stop:  # between steps only: half an update would go on to other losses
                    break
        finally:
            signal.signal(signal.SIGINT, before)
    if a.checkpoint:
        run.save(a.checkpoint)
    if losses:
        mean = sum(losses[-100:]) / len(losses[-100:])
        print(f"{run.model.attention.name}: loss {mean:.3f} after {run.optimiser.step} steps")
    if asked_to_stop:
        print("Stopped before the last step; " + ("the checkpoint goes on." if a.checkpoint else "nothing was saved."))
        return NOT_OK
    if a.weights:
        made = dict(command=" ".join(["python -m fa2lab", *sys.argv[1:]]), seed=str(a.seed), text=run.text_hash)
        training.save_weights(run.model, a.weights, **made)
    return OK


def _advance(bar: tqdm, loss: float) -> None:
    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
    bar.update()


def _device(a: argparse.Namespace) -> Device | str | None:
    if a.adapter == "numpy":
        return "numpy"
    if (a.adapter, a.compiler, a.limits) == (None, "naga", "adapter"):
        return None
    return Device(a.adapter, compiler=a.compiler, limits=a.limits)


if __name__ == "__main__":
    sys.exit(main())
