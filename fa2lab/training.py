"""Training the GPT: corpus, batches, AdamW, checkpoints, the loop."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fa2lab.gpt import GPT, Arrays, Attention, Preset

PACKAGE = Path(__file__).parent
CHECKPOINT_KIND = "fa2lab GPT"


def corpus(path: str | os.PathLike | None = None) -> bytes:
    """The text to train on: a file of the user's, or the project's own kernels, README and notebooks' prose.

    Raises `FileNotFoundError` for a path that is no file and `ValueError` for one that is empty.
    """
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no text file {path}.")
        text = Path(path).read_bytes()
        if not text:
            raise ValueError(f"The text file {path} is empty.")
        return text
    checkout = PACKAGE.parent
    parts = [file.read_text(encoding="utf-8") for file in sorted((PACKAGE / "wgsl").rglob("*.wgsl"))]
    parts += [file.read_text(encoding="utf-8") for file in (checkout / "README.md",) if file.is_file()]
    for file in sorted((checkout / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        parts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return "\n".join(parts).encode()


def batch(text: bytes, preset: Preset, size: int, *, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets `(size, context)` of one step: windows that depend on seed and step alone, so that a resumed
    run draws what the uninterrupted one would have. Raises `ValueError` for a text shorter than one window."""
    tokens = np.frombuffer(text, np.uint8)
    if len(tokens) <= preset.context:
        raise ValueError(f"The text has {len(tokens)} bytes; a context of {preset.context} needs one more than that.")
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - preset.context, size)
    windows = tokens[starts[:, None] + np.arange(preset.context + 1)].astype(np.int64)
    return windows[:, :-1], windows[:, 1:]


class AdamW:
    """Adam with decoupled weight decay on matrices. Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2."""

    def __init__(self, params: Arrays, *, betas=(0.9, 0.95), eps: float = 1e-8, decay: float = 0.0):
        self.betas, self.eps, self.decay, self.step = betas, eps, decay, 0
        self.first = {name: np.zeros_like(x) for name, x in params.items()}
        self.second = {name: np.zeros_like(x) for name, x in params.items()}

    def update(self, params: Arrays, grads: Arrays, lr: float) -> None:
        """One step, in place."""
        self.step += 1
        b1, b2 = self.betas
        for name, x in params.items():
            m, v, g = self.first[name], self.second[name], grads[name]
            m += (1 - b1) * (g - m)
            v += (1 - b2) * (g * g - v)
            corrected = (m / (1 - b1**self.step)) / (np.sqrt(v / (1 - b2**self.step)) + self.eps)
            shrink = lr * self.decay * x if x.ndim > 1 else 0
            x -= (lr * corrected + shrink).astype(x.dtype)


@dataclass
class Run:
    """A training run that can stop after any step, be saved, and go on to the same losses."""

    model: GPT
    text: bytes
    optimiser: AdamW
    batch_size: int = 8
    seed: int = 0
    lr: float | Callable[[int], float] = 1e-3

    def steps(self, n: int) -> Iterator[float]:
        """`n` more steps, each yielding its loss before the update."""
        for _ in range(n):
            step = self.optimiser.step
            tokens, targets = batch(self.text, self.model.preset, self.batch_size, seed=self.seed, step=step)
            loss, grads = self.model.loss_and_gradients(tokens, targets)
            self.optimiser.update(self.model.params, grads, self.lr(step) if callable(self.lr) else self.lr)
            yield loss

    @property
    def text_hash(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def settings(self) -> dict[str, str]:
        """What the losses depend on besides the preset: a checkpoint goes on under the same ones only."""
        lr = getattr(self.lr, "__name__", repr(self.lr))
        decay = repr(self.optimiser.decay)
        seed, size = str(self.seed), str(self.batch_size)
        return {"seed": seed, "batch_size": size, "lr": lr, "decay": decay, "text": self.text_hash}

    def save(self, path: str | os.PathLike) -> None:
        """Weights and optimiser state, as one safetensors file, complete or not there at all."""
        tensors = dict(self.model.params)
        tensors |= {f"adam.first.{name}": x for name, x in self.optimiser.first.items()}
        tensors |= {f"adam.second.{name}": x for name, x in self.optimiser.second.items()}
        _write(tensors, self.model.preset, path, step=str(self.optimiser.step), **self.settings)

    def restore(self, path: str | os.PathLike) -> None:
        """Go on from a saved run of the same preset and settings. Raises `ValueError` where they are others."""
        tensors, about = _read(path)
        if about["preset"] != asdict(self.model.preset):
            raise ValueError(f"{path} holds a model of {about['preset']}; this run's is {asdict(self.model.preset)}.")
        if "step" not in about:
            raise ValueError(f"{path} holds weights alone, no checkpoint to go on from.")
        for name, ours in self.settings.items():
            if about.get(name) != ours:
                raise ValueError(
                    f"{path} is of a run with {name}={about.get(name)}, not {ours}; its losses would part."
                )
        self.optimiser.step = int(about["step"])
        for name in self.model.params:
            self.model.params[name][...] = tensors[name]
            self.optimiser.first[name][...] = tensors[f"adam.first.{name}"]
            self.optimiser.second[name][...] = tensors[f"adam.second.{name}"]


def start(
    preset: Preset,
    attention: Attention,
    *,
    text: bytes | None = None,
    batch_size: int = 8,
    seed: int = 0,
    lr: float | Callable[[int], float] = 1e-3,
    decay: float = 0.0,
) -> Run:
    """A new run: model and batches follow from `seed`; `text` is by default the project's own."""
    model = GPT(preset, attention, seed=seed)
    return Run(model, corpus() if text is None else text, AdamW(model.params, decay=decay), batch_size, seed, lr)


def warm_cosine(peak: float, steps: int) -> Callable[[int], float]:
    """A learning rate that rises over the first twentieth of the steps and falls along a cosine to a tenth of its peak.

    Source: Loshchilov and Hutter, arXiv:1608.03983, without restarts.
    """
    rise = max(1, steps // 20)

    def lr(step: int) -> float:
        if step < rise:
            return peak * (step + 1) / rise
        return peak * (0.1 + 0.45 * (1 + np.cos(np.pi * min(1.0, (step - rise) / max(1, steps - rise)))))

    lr.__name__ = f"warm_cosine({peak!r}, {steps})"  # a checkpoint remembers the schedule by it
    return lr


def save_weights(model: GPT, path: str | os.PathLike, **about: str) -> None:
    """The weights alone, as float16 safetensors: half the size, and close enough to look at attention with."""
    _write({name: x.astype(np.float16) for name, x in model.params.items()}, model.preset, path, **about)


def load_weights(path: str | os.PathLike, attention: Attention) -> GPT:
    """A model from `save_weights` or a checkpoint. Raises `FileNotFoundError` or `ValueError` that says why not."""
    tensors, about = _read(path)
    model = GPT(Preset(**about["preset"]), attention)
    for name, x in model.params.items():
        if name not in tensors or tensors[name].shape != x.shape:
            raise ValueError(f"{path} lacks {name} of shape {x.shape}, which its preset {about['preset']} has.")
        x[...] = tensors[name]
    return model


def _write(tensors: Arrays, preset: Preset, path: str | os.PathLike, **about: str) -> None:
    from safetensors.numpy import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half_written = path.with_name(path.name + ".part")
    metadata = {"kind": CHECKPOINT_KIND, "preset": json.dumps(asdict(preset)), **about}
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, half_written, metadata=metadata)
    half_written.replace(path)


def _read(path: str | os.PathLike) -> tuple[Arrays, dict]:
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no model file {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path} does not read as safetensors ({error}).") from error
    if about.get("kind") != CHECKPOINT_KIND:
        raise ValueError(f"{path} holds {', '.join(tensors) or 'nothing'}, but no model that fa2lab saved.")
    return tensors, about | {"preset": json.loads(about["preset"])}
