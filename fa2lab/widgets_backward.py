"""A slider through the tiles of the backward pass, over the kernel's own record and `plot_backward`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ipywidgets
import numpy as np
from matplotlib.figure import Figure

from fa2lab import data, plot, plot_backward, reference
from fa2lab.backward import attention_grad, backward_trace
from fa2lab.gpu import Device
from fa2lab.live import View
from fa2lab.plot_backward import FORMULAS, KERNELS, TileWalk
from fa2lab.problem import Problem
from fa2lab.results import SKIPPED, BackwardTrace, Gradients

SIZE = (9.8, 6.3)  # inches
HEADS, HEAD_DIM = 2, 16
TILES = ((16, 16), (8, 8), (16, 8), (8, 16), (8, 4))


@dataclass(frozen=True, eq=False)
class Scrub:
    """A workgroup's walk, and after how many of its tiles to look."""

    walk: TileWalk
    step: int

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `SIZE`; returns the picture in one sentence."""
        return plot_backward.scrub(figure, self.walk, self.step)

    @property
    def words(self) -> str:
        """What the workgroup owns and has done, as HTML."""
        rows, name = self.walk.rows, self.walk.gradient
        owned = f"{'queries' if name == 'dQ' else 'keys'} {rows.start} to {rows.stop - 1}"
        return (
            f"<b>{KERNELS[name]}</b>, the workgroup that owns {owned}: "
            f"{self.step} of {len(self.walk.tiles)} tiles, each adding {FORMULAS[name]}"
        )


def scrub(
    *,
    gradient: str = "dQ",
    workgroup: int = 3,
    step: int = 2,
    head: int = 0,
    T: int = 40,
    tile: tuple[int, int] = (8, 8),
    pattern: str = "random",
    causal: bool = True,
    device: Device | str | None = None,
) -> Scrub:
    """Run the backward pass on a named input, and look at one workgroup after `step` of its tiles.

    gradient: `"dQ"`, whose workgroups own queries, or `"dK"` or `"dV"`, whose workgroups own keys. tile: Br and Bc.
    The input has `HEADS` heads of `HEAD_DIM` columns, dO is random. Raises `ValueError` for an unknown gradient and
    `IndexError` for a head, workgroup or step that is not there.
    """
    if gradient not in FORMULAS:
        raise ValueError(f"No gradient is called {gradient!r}; there are {', '.join(FORMULAS)}.")
    if not 0 <= head < HEADS:
        raise IndexError(f"head must be from 0 to {HEADS - 1}; got {head}.")
    # Gradient, workgroup and step choose what is shown, not what is computed: sliding them runs no kernel.
    trace, gradients = _traced(head, T, tile, pattern, causal, device)
    groups = trace.state.shape[gradient != "dQ"]
    if not 0 <= workgroup < groups:
        raise IndexError(f"workgroup must be from 0 to {groups - 1}; got {workgroup}.")
    walk = walk_of(trace, gradients, gradient, workgroup, head)
    if not 0 <= step <= len(walk.tiles):
        raise IndexError(f"step must be from 0 to {len(walk.tiles)}, the tiles of this workgroup; got {step}.")
    return Scrub(walk, step)


@lru_cache(maxsize=1)
def _traced(head, T, tile, pattern, causal, device) -> tuple[BackwardTrace, Gradients]:
    q, k, v = data.make(pattern, T=T, H=HEADS, D=HEAD_DIM)
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    options = dict(causal=causal, block_q=tile[0], block_k=tile[1], device=device)
    result, gradients = attention_grad(q, k, v, dout, kernel="fa2", **options)
    return backward_trace(q, k, v, result.out, result.lse, dout, head=head, **options), gradients


def walk_of(
    trace: BackwardTrace, gradients: Gradients, gradient: str, workgroup: int, head: int = 0, batch: int = 0
) -> TileWalk:
    """What one workgroup of a traced run walks, and its running sums, beside the gradient that the kernel wrote.

    trace: of `batch` and `head`; gradients: of the same run, as many KV heads as heads.
    """
    along_keys = gradient == "dQ"
    states = trace.state[workgroup] if along_keys else trace.state[:, workgroup]
    taken = np.flatnonzero(states != SKIPPED)
    block, n = (trace.block_q, len(trace.p)) if along_keys else (trace.block_k, trace.p.shape[1])
    rows = slice(workgroup * block, min((workgroup + 1) * block, n))
    parts = getattr(trace, f"{gradient.lower()}_parts")[taken, rows]
    return TileWalk(
        gradient=gradient,
        rows=rows,
        tiles=[(workgroup, int(t)) if along_keys else (int(t), workgroup) for t in taken],
        parts=parts,
        running=np.concatenate([np.zeros_like(parts[:1], shape=(1, *parts.shape[1:])), np.cumsum(parts, axis=0)]),
        final=getattr(gradients, gradient.lower())[batch, rows, head],
        p=trace.p,
        ds=trace.ds,
        masked=~gradients.problem.mask(),
        block_q=trace.block_q,
        block_k=trace.block_k,
        label=trace.label,
    )


def backward(*, device: Device | str | None = None, **values) -> View:
    """A view over `scrub`: P, dS, what the newest tile adds, and the running sum beside the final gradient.

    values: where the controls start, by the names of `scrub`'s arguments.
    """
    start = {name: value for name, value in scrub.__kwdefaults__.items() if name != "device"}
    unknown = sorted(set(values) - set(start))
    if unknown:
        raise TypeError(f"No control is called {', '.join(unknown)}; there are {', '.join(start)}.")
    start |= values
    controls = {
        "gradient": _choice("gradient", "Gradient whose tiles are walked", list(FORMULAS)),
        "workgroup": _slider("workgroup", "Which rows of the gradient: one workgroup owns them", 0, 0, 10_000),
        "step": _slider("tiles taken", "How many tiles of its walk the workgroup has taken", 0, 0, 10_000),
        "head": _slider("head", "Head that is shown", 0, 0, HEADS - 1, live=False),
        "T": _slider("T length", "Number of queries and keys", 1, 1, 128, live=False),
        "tile": _choice("tile Br×Bc", "Queries by keys of a tile", [(f"{q}×{k}", (q, k)) for q, k in TILES]),
        "pattern": _choice("input", "Pattern of the input arrays", list(data.PATTERNS)),
        "causal": ipywidgets.Checkbox(
            description="causal mask", tooltip="Each query sees itself and the keys before it", indent=False,
            layout={"width": "180px"},
        ),
    }  # fmt: skip
    for name, value in start.items():
        controls[name].value = value

    def fit(_change=None) -> None:
        """Other walks, other numbers of workgroups and tiles; a slider beyond them goes to the end."""
        shape = {name: controls[name].value for name in ("gradient", "T", "tile", "causal")}
        controls["workgroup"].max = len(_taken(**shape)) - 1
        controls["step"].max = int(_taken(**shape)[controls["workgroup"].value].sum())

    fit()
    for name in (
        "gradient",
        "workgroup",
        "T",
        "tile",
        "causal",
    ):  # before the View listens: it never sees a missing step
        controls[name].observe(fit, names="value")
    return View(
        controls,
        lambda **moved: scrub(**moved, device=device),
        lambda figure, shown: shown.draw(figure),
        plot.figure(*SIZE),
        words=lambda shown: shown.words,
    )


def _taken(gradient: str, T: int, tile: tuple[int, int], causal: bool) -> np.ndarray:
    """Which tiles each workgroup walks: boolean `(workgroups, tiles)`."""
    problem = Problem(1, T, T, HEADS, HEADS, HEAD_DIM, causal, "bottom-right", 1.0)
    taken = reference.states(problem, *tile)[0, 0, :: tile[0]] != SKIPPED
    return taken if gradient == "dQ" else taken.T


_STYLE = dict(style={"description_width": "84px"}, layout={"width": "300px"})


def _slider(label: str, says: str, value: int, low: int, high: int, *, live: bool = True) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(
        value, min=low, max=high, description=label, tooltip=says, continuous_update=live, **_STYLE
    )


def _choice(label: str, says: str, options: list) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(options=options, description=label, tooltip=says, **_STYLE)
