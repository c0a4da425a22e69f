"""The head gallery: a thumbnail of every head, one of them held, alone or beside another kernel's or input's."""

from __future__ import annotations

import base64
import html
import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import ipywidgets
import numpy as np
from matplotlib.figure import Figure

from fa2lab import data, heads, plot, plot_heads
from fa2lab.attention import attention
from fa2lab.gpu import Device
from fa2lab.kernel import Kernel
from fa2lab.kernels import kernels
from fa2lab.live import View
from fa2lab.plot_heads import HeldHead
from fa2lab.plot_sheet import Sheet
from fa2lab.results import Result
from fa2lab.widgets_controls import choice, sheet_view, slider, start_at, tick

GALLERY_SIZE = (10.8, 6.6)  # inches
MOST_HEADS = 12
NOTHING = ("nothing", "")
Beside = tuple[str, str | Kernel]  # ("kernel", its name), ("input", its pattern) or NOTHING
READ = ("text", "model")  # patterns whose positions are the bytes of a text


@dataclass(frozen=True, eq=False)
class Run:
    """One run with its weights: batch 0, `attn` `(H, T, T)`, and the inputs it came from."""

    name: str
    result: Result
    arrays: data.Arrays

    @property
    def attn(self) -> np.ndarray:
        """The weights of every head."""
        return self.result.attn[0]

    def score(self, head: int, row: int, key: int) -> float:
        """scale · q·k of one pair, in float64."""
        q, k, _ = self.arrays
        return float(self.result.problem.scale * (q[0, row, head].astype(np.float64) @ k[0, key, head]))


@dataclass(frozen=True, eq=False)
class Gallery:
    """Every head of one run, and the head, query and key to look at; `beside`: of another run, or None."""

    run: Run
    beside: Run | None
    head: int
    row: int
    key: int
    labels: list[str] | None  # a character a position, where the input is a text

    @property
    def masked(self) -> np.ndarray:
        """Boolean `(T, T)`, True where a key is not visible."""
        return ~self.run.result.problem.mask()

    def draw(self, figure: Figure) -> str:
        """Draw the held head on a figure of about `GALLERY_SIZE`; returns the picture in one sentence."""
        return self.show(Sheet(figure))

    def show(self, sheet: Sheet) -> str:
        """Draw on a sheet of galleries, anew only where it shows something else. Returns one sentence."""
        problem = self.run.result.problem
        mask = problem.mask()
        runs = [run for run in (self.run, self.beside) if run]
        labels = list(dict.fromkeys(run.result.label for run in runs))
        sides = [
            HeldHead(
                run.name,
                run.attn[self.head],
                heads.entropy(run.attn[self.head]),
                heads.distance_profile(run.attn[self.head], mask, problem.diagonal),
            )
            for run in runs
        ]
        return plot_heads.held(
            sheet,
            sides,
            head=self.head,
            at=(self.row, self.key),
            masked=~mask,
            most_entropy=heads.most_entropy(problem.keys_seen()),
            distances=heads.distances(mask, problem.diagonal),
            even=heads.even_profile(mask, problem.diagonal),
            labels=self.labels,
            label=f"{' and '.join(labels)}; {problem}",
        )

    def thumbnails(self) -> list[bytes]:
        """A small PNG of every head's weights, all on one scale."""
        attn, masked = self.run.attn, self.masked
        top = float(np.max(attn, initial=0.0, where=~masked & np.isfinite(attn)))
        return [plot_heads.thumbnail(weights, masked=masked, largest=top) for weights in attn]

    @property
    def words(self) -> str:
        """What the held head does at the chosen place, as HTML."""
        query, key = (self._named(i) for i in (self.row, self.key))
        if self.masked[self.row, self.key]:
            return f"<b>head {self.head}</b>: query {query} does not see key {key}; it is masked"
        lines = []
        for run in filter(None, (self.run, self.beside)):
            weights = run.attn[self.head, self.row]
            rank = 1 + int((weights > weights[self.key]).sum())
            seen, score = run.result.problem.keys_seen()[self.row], run.score(self.head, self.row, self.key)
            lines.append(
                f"<b>{html.escape(run.name)}</b>: weight <b>{weights[self.key]:.6g}</b>, number {rank} of "
                f"{seen} keys; score {score:.4g}; "
                f"entropy of the row {heads.entropy(weights):.3f} nats"
            )
        return f"<b>head {self.head}</b>, query {query}, key {key} &nbsp; " + "<br>".join(["", *lines])

    def _named(self, i: int) -> str:
        if self.labels is None:
            return f"{i}"
        return f"{i} “{html.escape({' ': '␣', chr(10): '⏎'}.get(self.labels[i], self.labels[i]))}”"


def gallery(
    *,
    T: int = 32,
    H: int = 6,
    D: int = 16,
    head: int = 2,
    row: int = 25,
    key: int = 24,
    pattern: str = "model",
    kernel: str | Kernel = "fa2_forward",
    beside: Beside = ("input", "random"),
    causal: bool = True,
    device: Device | str | None = None,
) -> Gallery:
    """Run a kernel on a named input and keep every head's weights; `beside`: also another kernel, or another input.

    head, row, key: the head that is held, and the query and key whose weight is told. Raises `IndexError` for a head,
    row or key that is none, and `ValueError` for something beside it that is neither kernel nor input.
    """
    for name, n, end in (("head", head, H), ("row", row, T), ("key", key, T)):
        if not 0 <= n < end:
            raise IndexError(f"{name} must be from 0 to {end - 1}; got {n}.")
    what, other = beside
    if what not in ("kernel", "input", NOTHING[0]):
        raise ValueError(f'beside must be ("kernel", …), ("input", …) or {NOTHING}; got {beside!r}.')
    # Head, row and key choose what is shown, not what is computed: sliding them runs no kernel.
    run = replace(_run(T, H, D, pattern, kernel, causal, device), name=_name(kernel if what == "kernel" else pattern))
    second = None
    if what == "kernel":
        second = replace(_run(T, H, D, pattern, other, causal, device), name=_name(other))
    elif what == "input":
        second = replace(_run(T, H, D, other, kernel, causal, device), name=other)
    labels = list(data.SAMPLE_TEXT.read_bytes()[:T].decode("latin-1")) if pattern in READ else None
    return Gallery(run, second, head, row, key, labels)


def _name(thing: str | Kernel) -> str:
    return thing.label if isinstance(thing, Kernel) else thing


@lru_cache(maxsize=2)
def _run(T, H, D, pattern, kernel, causal, device) -> Run:
    arrays = data.make(pattern, T=T, H=H, D=D)
    return Run("", attention(*arrays, causal=causal, kernel=kernel, return_attn=True, device=device), arrays)


def head_gallery(*, device: Device | str | None = None, **values) -> View:
    """A view over `gallery`: a thumbnail a head to press, the held head's weights, and what stands at a chosen place.

    values: where the controls start, by the names of `gallery`'s arguments; a `Kernel` of your own joins the lists.
    """
    start = {name: value for name, value in gallery.__kwdefaults__.items() if name != "device"} | values
    own = [k for k in (start["kernel"], start["beside"][1]) if isinstance(k, Kernel)]
    of_kernels = [*((name, name) for name in kernels()), *((f"{k.label}, yours", k) for k in dict.fromkeys(own))]
    others = [("nothing", NOTHING), *((f"kernel {name}", ("kernel", k)) for name, k in of_kernels)]
    others += [(f"input {name}", ("input", name)) for name in data.PATTERNS]
    held = ipywidgets.ToggleButtons(
        options=_options(MOST_HEADS), description="head", tooltip="Head that is held",
        tooltips=[f"Hold head {h}" for h in range(MOST_HEADS)],
        style={"description_width": "84px"}, layout={"height": "136px", "overflow": "auto"},
    )  # fmt: skip
    controls = {
        "T": slider("T length", "Number of queries and keys", 32, 1, 256),
        "H": slider("H heads", "Number of heads", 6, 1, MOST_HEADS),
        "D": slider("D head size", "Numbers in one head's vectors", 16, 1, 128),
        "head": held,
        "row": slider("query", "Query whose weights are shown, by a click as well", 0, 0, 31, live=True),
        "key": slider("key", "Key whose weight is told, by a click as well", 0, 0, 31, live=True),
        "pattern": choice("input", "Pattern of the input arrays", list(data.PATTERNS), "model"),
        "kernel": choice("kernel", "WGSL kernel that computes", of_kernels, start["kernel"]),
        "beside": choice("beside it", "Another kernel, or another input, to compare with", others, start["beside"]),
        "causal": tick("causal mask", "Each query sees itself and the keys before it", True),
    }

    def fit(change) -> None:
        """Other numbers of heads, other buttons; a held head that is gone gives way to the last one."""
        kept = min(held.value, change["new"] - 1)
        held.options = _options(change["new"])
        held.value = kept

    controls["H"].observe(fit, names="value")  # before the View listens: it never sees a missing head
    for name in ("row", "key"):
        ipywidgets.dlink((controls["T"], "value"), (controls[name], "max"), lambda T: T - 1)
    fit({"new": controls["H"].value})
    mark = f"fa2lab-heads-{next(_SERIAL)}"
    held.add_class(mark)
    start_at(controls, start)
    return sheet_view(
        controls,
        lambda **moved: gallery(**moved, device=device),
        GALLERY_SIZE,
        words=lambda shown: style_sheet(mark, shown.thumbnails()) + shown.words,
        words_height="72px",
        layout=_layout,
        at=place,
    )


def place(figure: Figure, x: float, y: float) -> dict[str, int]:
    """The query and key of a gallery's picture under display coordinates, or what of them a panel shows."""
    panel, at_x, at_y = plot.under(figure.axes, x, y) or (None, 0.0, 0.0)
    query, key = {"row": round(at_y)}, {"key": round(at_x)}
    # Two heads and their difference, the weights of a row, the entropy of each query's row, and distances.
    return {0: query | key, 1: query | key, 2: query | key, 3: key, 4: {"row": round(at_x)}}.get(panel, {})


_SERIAL = itertools.count()  # of the style sheets' class, which is of the whole page


def _options(n: int) -> list[tuple[str, int]]:
    return [(f"head {h}", h) for h in range(n)]


def _layout(widgets: list[ipywidgets.Widget]) -> ipywidgets.Widget:
    rows = ipywidgets.Layout(flex_flow="row wrap")
    held = next(widget for widget in widgets if isinstance(widget, ipywidgets.ToggleButtons))
    others = [widget for widget in widgets if widget is not held]
    return ipywidgets.VBox([ipywidgets.HBox(others, layout=rows), held])


def style_sheet(mark: str, thumbnails: list[bytes]) -> str:
    """A style element that puts a picture on each button of the element of class `mark`: ipywidgets' own cannot."""
    side = plot_heads.THUMBNAIL
    rules = [
        f".{mark} button {{ height: {side + 24}px; width: {side + 12}px; padding: {side + 4}px 0 0 0;"
        f" line-height: 18px; background-repeat: no-repeat;"
        f" background-position: center 4px; background-size: {side}px {side}px }}",
        f".{mark} button.mod-active {{ outline: 3px solid #d1431a; outline-offset: -3px; font-weight: bold }}",
        f".{mark} button:focus-visible {{ box-shadow: 0 0 0 3px var(--jp-brand-color1, #2196f3) }}",
    ]
    for i, png in enumerate(thumbnails, 1):
        address = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        rules.append(f".{mark} button:nth-of-type({i}) {{ background-image: url({address}) }}")
    return f"<style>{' '.join(rules)}</style>"
