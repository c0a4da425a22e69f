"""A byte-level GPT in NumPy whose attention, forward and backward, runs through whichever engine is plugged in.

Token and position embedding, pre-norm blocks (LayerNorm, causal attention, GELU MLP), a final LayerNorm and a linear
head over 256 bytes. Every backward stands under its forward. Letters: B batch, T time, C width, H heads, V vocabulary.
Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fa2lab.errors import ShapeError

VOCABULARY = 256
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Preset:
    """The size of a model. `mlp` is the MLP's hidden width, by default 4 × `width`."""

    layers: int
    width: int
    context: int
    heads: int
    mlp: int = 0

    def __post_init__(self):
        if self.width % self.heads:
            raise ShapeError(f"The width must be a multiple of the heads; got width={self.width}, heads={self.heads}.")

    @property
    def hidden(self) -> int:
        """The MLP's hidden width."""
        return self.mlp or 4 * self.width

    @property
    def head_dim(self) -> int:
        """Columns of one head."""
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """How many numbers there are to train."""
        C, M = self.width, self.hidden
        block = 4 * C * C + 4 * C + 2 * C * M + M + C + 4 * C  # attention, MLP, two LayerNorms
        return (2 * VOCABULARY + self.context) * C + self.layers * block + 2 * C


PRESETS = {
    "tiny": Preset(2, 48, 32, 3),
    "small": Preset(3, 96, 64, 3),
    "medium": Preset(4, 128, 96, 4),
    "large": Preset(6, 192, 128, 6),
    "huge": Preset(12, 256, 256, 8),
    "mega": Preset(14, 384, 512, 12),
    "behemoth": Preset(24, 1280, 1024, 20),
}


class Attention(Protocol):
    """Causal attention as the model needs it. Arrays are `(B, T, H, D)`; what `forward` keeps, `backward` is handed."""

    name: str
    adapter: str  # what computes, for the footer of a figure

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, Any]:
        """O, and what the backward pass will need."""
        ...

    def backward(self, kept: Any, dout: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """dQ, dK and dV."""
        ...


class GPT:
    """The model: its parameters by name, and forward and backward over them."""

    def __init__(self, preset: Preset, attention: Attention, *, seed: int = 0, dtype: type = np.float32):
        self.preset, self.attention = preset, attention
        self.params = {name: x.astype(dtype) for name, x in _initial(preset, seed).items()}

    def forward(self, tokens: np.ndarray) -> tuple[np.ndarray, list]:
        """Logits `(B, T, V)` for tokens `(B, T)`, and what `backward` needs. Raises `ShapeError` past the context."""
        B, T = tokens.shape
        if T > self.preset.context:
            raise ShapeError(f"The model's context is {self.preset.context} tokens; got {T}.")
        p, H = self.params, self.preset.heads
        h = p["token"][tokens] + p["position"][:T]
        kept: list = [tokens]
        for i in range(self.preset.layers):
            x, norm1 = layer_norm(h, p[f"{i}.norm1.g"], p[f"{i}.norm1.b"])
            q, k, v = (x @ p[f"{i}.{n}.w"] + p[f"{i}.{n}.b"] for n in "qkv")
            o, attended = self.attention.forward(*(y.reshape(B, T, H, -1) for y in (q, k, v)))
            o = o.reshape(B, T, -1).astype(h.dtype, copy=False)
            h = h + o @ p[f"{i}.o.w"] + p[f"{i}.o.b"]
            y, norm2 = layer_norm(h, p[f"{i}.norm2.g"], p[f"{i}.norm2.b"])
            u = y @ p[f"{i}.up.w"] + p[f"{i}.up.b"]
            a = gelu(u)
            h = h + a @ p[f"{i}.down.w"] + p[f"{i}.down.b"]
            kept.append((x, norm1, attended, o, y, norm2, u, a))
        x, norm = layer_norm(h, p["norm.g"], p["norm.b"])
        kept.append((x, norm))
        return x @ p["head.w"], kept

    def backward(self, kept: list, dlogits: np.ndarray) -> Arrays:
        """The gradient of every parameter, from the loss's gradient by the logits."""
        p, H, grads = self.params, self.preset.heads, {}
        tokens, *blocks, (x, norm) = kept
        B, T = tokens.shape
        grads["head.w"] = _outer(x, dlogits)
        dh, grads["norm.g"], grads["norm.b"] = layer_norm_backward(dlogits @ p["head.w"].T, norm, p["norm.g"])
        for i, (x, norm1, attended, o, y, norm2, u, a) in reversed(list(enumerate(blocks))):
            grads[f"{i}.down.w"], grads[f"{i}.down.b"] = _outer(a, dh), dh.sum((0, 1))
            du = gelu_backward(dh @ p[f"{i}.down.w"].T, u)
            grads[f"{i}.up.w"], grads[f"{i}.up.b"] = _outer(y, du), du.sum((0, 1))
            dy, grads[f"{i}.norm2.g"], grads[f"{i}.norm2.b"] = layer_norm_backward(
                du @ p[f"{i}.up.w"].T, norm2, p[f"{i}.norm2.g"]
            )
            dh = dh + dy
            grads[f"{i}.o.w"], grads[f"{i}.o.b"] = _outer(o, dh), dh.sum((0, 1))
            do = (dh @ p[f"{i}.o.w"].T).reshape(B, T, H, -1)
            dx = 0
            for n, d in zip("qkv", self.attention.backward(attended, do), strict=True):
                d = d.reshape(B, T, -1).astype(dh.dtype, copy=False)
                grads[f"{i}.{n}.w"], grads[f"{i}.{n}.b"] = _outer(x, d), d.sum((0, 1))
                dx = dx + d @ p[f"{i}.{n}.w"].T
            dx, grads[f"{i}.norm1.g"], grads[f"{i}.norm1.b"] = layer_norm_backward(dx, norm1, p[f"{i}.norm1.g"])
            dh = dh + dx
        grads["position"] = np.zeros_like(p["position"])
        grads["position"][:T] = dh.sum(0)
        grads["token"] = np.zeros_like(p["token"])
        np.add.at(grads["token"], tokens, dh)
        return grads

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Mean cross-entropy in nats of the next bytes; ln 256 = 5.545 for a model that knows nothing."""
        return cross_entropy(self.forward(tokens)[0], targets)[0]

    def loss_and_gradients(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
        """One training step's worth of forward and backward."""
        logits, kept = self.forward(tokens)
        loss, dlogits = cross_entropy(logits, targets)
        return loss, self.backward(kept, dlogits)

    def heads_of(self, tokens: np.ndarray, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Q, K and V `(B, T, H, D)` of one layer on these tokens: what its attention is handed."""
        if not 0 <= layer < self.preset.layers:
            raise ShapeError(f"layer must be from 0 to {self.preset.layers - 1}; got {layer}.")
        p, H = self.params, self.preset.heads
        x = self.forward(tokens)[1][1 + layer][0]
        return tuple((x @ p[f"{layer}.{n}.w"] + p[f"{layer}.{n}.b"]).reshape(*tokens.shape, H, -1) for n in "qkv")

    def sample(self, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`prompt` and `length` bytes that the model finds likely after it, one at a time."""
        rng = np.random.default_rng(seed)
        text = list(prompt or b"\n")
        for _ in range(length):
            logits = self.forward(np.array([text[-self.preset.context :]]))[0][0, -1].astype(np.float64)
            weights = np.exp((logits - logits.max()) / max(temperature, 1e-6))
            text.append(int(rng.choice(VOCABULARY, p=weights / weights.sum())))
        return bytes(text)


def layer_norm(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """g · (x - mean) / std + b over the last axis. Source: Ba, Kiros and Hinton, arXiv:1607.06450."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + x.dtype.type(1e-5))
    normed = centred * inverse
    return normed * g + b, (normed, inverse)


def layer_norm_backward(dy: np.ndarray, kept, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx, dg and db."""
    normed, inverse = kept
    d = dy * g
    dx = inverse * (d - d.mean(-1, keepdims=True) - normed * (d * normed).mean(-1, keepdims=True))
    axes = tuple(range(dy.ndim - 1))
    return dx, (dy * normed).sum(axes), dy.sum(axes)


_SQRT_2_PI = float(np.sqrt(2 / np.pi))


def gelu(x: np.ndarray) -> np.ndarray:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))). Source: Hendrycks and Gimpel, arXiv:1606.08415, section 2."""
    return 0.5 * x * (1 + np.tanh(_SQRT_2_PI * (x + 0.044715 * x * x * x)))


def gelu_backward(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """dx."""
    t = np.tanh(_SQRT_2_PI * (x + 0.044715 * x * x * x))
    return dy * 0.5 * (1 + t + x * (1 - t * t) * _SQRT_2_PI * (1 + 3 * 0.044715 * x * x))


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean of -ln softmax(logits)[target] over all positions, and its gradient by the logits."""
    shifted = logits - logits.max(-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, targets[..., None], -1)
    loss = float((np.log(total) - chosen).mean(dtype=np.float64))
    dlogits = weights / total
    np.put_along_axis(dlogits, targets[..., None], np.take_along_axis(dlogits, targets[..., None], -1) - 1, -1)
    return loss, dlogits / targets.size


def _outer(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The gradient of w in y = x w: Σ over batch and time of xᵀ dy."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])


def _initial(preset: Preset, seed: int) -> Arrays:
    """GPT-2's start: normal with std 0.02, smaller where a block writes into the residual stream, biases 0."""
    rng, C, M = np.random.default_rng(seed), preset.width, preset.hidden
    params = {"token": rng.normal(0, 0.02, (VOCABULARY, C)), "position": rng.normal(0, 0.02, (preset.context, C))}
    residual = 0.02 / np.sqrt(2 * preset.layers)
    for i in range(preset.layers):
        shapes = {"q": (C, C), "k": (C, C), "v": (C, C), "o": (C, C), "up": (C, M), "down": (M, C)}
        for name, shape in shapes.items():
            params[f"{i}.{name}.w"] = rng.normal(0, residual if name in ("o", "down") else 0.02, shape)
            params[f"{i}.{name}.b"] = np.zeros(shape[1])
        for norm in ("norm1", "norm2"):
            params |= {f"{i}.{norm}.g": np.ones(C), f"{i}.{norm}.b": np.zeros(C)}
    params |= {"norm.g": np.ones(C), "norm.b": np.zeros(C), "head.w": rng.normal(0, 0.02, (C, VOCABULARY))}
    return params
