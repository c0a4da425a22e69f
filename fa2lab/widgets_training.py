"""A loss curve that grows while a model trains, and the heads of a trained model on a sentence that is typed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ipywidgets
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm.notebook import tqdm

from fa2lab import plot, plot_training
from fa2lab.attention import attention
from fa2lab.gpt import GPT
from fa2lab.gpu import Device
from fa2lab.live import Browser, Picture, View, paint, stack
from fa2lab.trained import trained_model

SIZE = (10.8, 7.2)  # inches, of the gallery
SENTENCE = "to be, or not to be, or to be"
SECONDS_A_PICTURE = 0.4  # painting more often would take time from the training


class LiveLoss:
    """A progress bar over a loss curve: call it with each step and its loss, as the gates do with `progress`.

    One figure, painted into one Image of fixed height at most every `SECONDS_A_PICTURE`, and after the last step.
    """

    def __init__(self, steps: int, name: str = "loss"):
        self.losses: list[float] = []
        self._steps, self._name, self._painted = steps, name, -np.inf
        figure = Figure(figsize=(7.2, 2.6), dpi=96, facecolor="white", layout="none")
        self._canvas = FigureCanvasAgg(figure)
        self._ax = figure.add_axes((0.08, 0.19, 0.9, 0.7))  # a fixed place: nothing shifts as the curve grows
        self._bar = tqdm(total=steps, desc=name, display=False)
        size = dict(width="691px", height="250px", max_width="100%", object_fit="contain")
        self.image = Picture(format="png", layout=ipywidgets.Layout(**size))
        self._browser = Browser()
        self.widget = stack(self._browser, self._bar.container, self.image)
        self._paint()

    def __call__(self, step: int, loss: float) -> None:
        """Take in one more loss. `step` counts from 0; a step that came before starts the curve anew."""
        if step < len(self.losses):
            self.losses.clear()
            self._bar.reset()
        self.losses.append(loss)
        last = len(self.losses) >= self._steps
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=last)
        self._bar.update()
        if last or time.monotonic() - self._painted >= SECONDS_A_PICTURE:
            self._paint()
        if last:
            self._bar.close()

    def close(self) -> None:
        """Let go of the bar and the picture."""
        self._bar.close()
        self._browser.close()
        self.widget.close()

    def _paint(self) -> None:
        curve = {self._name: np.array(self.losses)} if self.losses else {}
        plot_training.losses(self._ax, curve, steps=self._steps, title=f"{self._name}, step {len(self.losses)}")
        self.image.value = paint(self._canvas)
        said = f"{self.losses[-1]:.3f} nats after" if self.losses else "none yet of"
        self.image.tooltip = f"{self._name}: a curve of losses, {said} {len(self.losses) or self._steps} steps."
        self._painted = time.monotonic()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)


@dataclass(frozen=True, eq=False)
class Heads:
    """What every head of a model does with a text: `attn` `(layers, heads, T, T)` over the bytes `read`."""

    attn: np.ndarray
    read: bytes
    length: int  # bytes of the whole text, of which the last T were read
    context: int  # bytes that the model reads at most
    label: str

    @property
    def labels(self) -> list[str]:
        """A character a byte; a byte that is no ASCII character is a dot."""
        return [chr(b) if b < 128 and (chr(b).isprintable() or chr(b) in "\n\t") else "·" for b in self.read]

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `SIZE`; returns the picture in one sentence."""
        return plot_training.head_gallery(figure, self.attn, self.labels, label=self.label)

    @property
    def words(self) -> str:
        """How much of the text is shown."""
        if self.length > len(self.read):
            return f"The model reads {len(self.read)} bytes: the last ones of {self.length}."
        return f"{self.length} of at most {self.context} bytes."


def heads(text: str = SENTENCE, *, model: GPT | None = None, device: Device | str | None = None) -> Heads:
    """Run every head of `model` (the one that comes with the project) on the text, by `fa2_forward`.

    Of a text longer than the model's context its last bytes are read. Raises `ValueError` for an empty one.
    """
    raw = text.encode(errors="replace")
    if not raw:
        raise ValueError("There is no text; one character is the least to attend to.")
    model = model or trained_model()
    preset, read = model.preset, raw[-model.preset.context :]
    tokens = np.frombuffer(read, np.uint8)[None].astype(np.int64)
    by_layer = [model.heads_of(tokens, layer) for layer in range(preset.layers)]
    q, k, v = (np.concatenate(of_layers, axis=2) for of_layers in zip(*by_layer, strict=True))  # (1, T, all heads, D)
    result = attention(q, k, v, causal=True, kernel="fa2_forward", return_attn=True, device=device)
    attn = result.attn.reshape(preset.layers, preset.heads, len(read), len(read))
    return Heads(attn, read, len(raw), preset.context, result.label)


def sentence(text: str = SENTENCE, *, model: GPT | None = None, device: Device | str | None = None) -> View:
    """A view over `heads`: type, and the heads follow."""
    box = ipywidgets.Text(
        text, description="text", tooltip="A sentence for the model's heads to read",
        style={"description_width": "60px"}, layout={"width": "560px"},
    )  # fmt: skip
    return View(
        {"text": box},
        lambda text: heads(text, model=model, device=device),
        lambda figure, shown: shown.draw(figure),
        plot.figure(*SIZE),
        words=lambda shown: shown.words,
    )
