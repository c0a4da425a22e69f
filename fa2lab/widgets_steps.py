"""StepThrough: one workgroup's walk over its tiles as the kernel recorded it, forward or backward, step by step.

`steps` is the plain function under the view. All steps of a run are computed once; moving along them only redraws.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ipywidgets
import numpy as np
from matplotlib.figure import Figure

from fa2lab import data, plot, reference
from fa2lab.backward import attention_grad, backward_trace
from fa2lab.gpu import Device
from fa2lab.live import View
from fa2lab.plot_steps import FORMULAS, KERNELS, BackwardPicture, ForwardPicture, QueryWalk, TileWalk
from fa2lab.problem import Problem
from fa2lab.results import SKIPPED, BackwardTrace, ForwardTrace, Gradients
from fa2lab.trace import forward_trace
from fa2lab.widgets_controls import choice, slider, start_at, tick, tile_option

STEPS_SIZE = (10.8, 6.2)  # inches
BATCHES, HEADS, HEAD_DIM = 2, 2, 16
TILES = ((8, 8), (4, 8), (8, 4), (4, 4), (16, 16), (16, 8), (8, 16))
PASSES = {"O": "forward: O", **{name: f"backward: {name}" for name in FORMULAS}}
MILLISECONDS = 800  # of a step while it plays


@dataclass(frozen=True, eq=False)
class Steps:
    """A workgroup's walk, and after how many of its tiles to look."""

    walk: QueryWalk | TileWalk
    step: int

    def picture(self, figure: Figure) -> ForwardPicture | BackwardPicture:
        """The walk's picture on a figure of about `STEPS_SIZE`, which it takes over; its `show` goes to a step."""
        return (ForwardPicture if isinstance(self.walk, QueryWalk) else BackwardPicture)(figure, self.walk)

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `STEPS_SIZE`; returns the picture in one sentence."""
        return self.picture(figure).show(self.step)

    @property
    def words(self) -> str:
        """What the workgroup owns, and what its newest tile did, as HTML."""
        walk, t = self.walk, self.step
        forward = isinstance(walk, QueryWalk)
        queries = forward or walk.gradient == "dQ"
        name = "fa2_forward" if forward else KERNELS[walk.gradient]
        owned = f"{'queries' if queries else 'keys'} {walk.rows.start} to {walk.rows.stop - 1}"
        head = f"<b>{name}</b>, the workgroup that owns {owned}: {t} of {len(walk.tiles)} tiles taken"
        if not t:
            return f"{head}."
        if not forward:
            return f"{head}, the newest added {FORMULAS[walk.gradient]}."
        rose = int((walk.m[t] > walk.m[t - 1]).sum())
        return f"{head}; the newest raised the maximum of {rose} of {len(walk.s)} rows."


class Projector:
    """Draws steps on one figure. A walk's picture is made once, and from then on only what moves is set anew."""

    def __init__(self):
        self._picture: ForwardPicture | BackwardPicture | None = None

    def __call__(self, figure: Figure, shown: Steps) -> str:
        """Draw, and return the picture in one sentence."""
        if self._picture is None or self._picture.walk is not shown.walk:
            self._picture = None  # should the next line raise, the figure is nobody's
            picture = shown.picture(figure)
            picture.freeze()
            self._picture = picture
        return self._picture.show(shown.step)

    def tile(self, x: float, y: float) -> tuple[int, int] | None:
        """The query tile and K tile of the shown map under display coordinates."""
        return self._picture and self._picture.map.under(x, y)


def steps(
    *,
    fills: str = "O",
    workgroup: int = 3,
    step: int = 3,
    batch: int = 0,
    head: int = 0,
    T: int = 40,
    tile: tuple[int, int] = (8, 8),
    pattern: str = "text",
    causal: bool = True,
    device: Device | str | None = None,
) -> Steps:
    """Run a pass on a named input with its recordings, and look at one workgroup after `step` of its tiles.

    fills: what fills in, `"O"` or `"dQ"`, whose workgroups own tiles of queries and walk the K tiles, or `"dK"` or
    `"dV"`, whose workgroups own tiles of keys and walk the queries'. tile: Br and Bc. The input has `BATCHES` batches
    and `HEADS` heads of `HEAD_DIM` columns; dO is random.
    Raises `ValueError` for something else that should fill in, and `IndexError` for a batch, head, workgroup or step
    that is not there.
    """
    if fills not in PASSES:
        raise ValueError(f"{fills!r} is nothing that fills in; there are {', '.join(PASSES)}.")
    groups = len(_taken(fills, T, tile, causal))
    if not 0 <= workgroup < groups:
        raise IndexError(f"workgroup must be from 0 to {groups - 1}; got {workgroup}.")
    walk = _walk(fills, workgroup, batch, head, T, tile, pattern, causal, device)
    if not 0 <= step <= len(walk.tiles):
        raise IndexError(f"step must be from 0 to {len(walk.tiles)}, the tiles of this workgroup; got {step}.")
    return Steps(walk, step)


# Step and workgroup choose what is shown, not what is computed: sliding them runs no kernel.
@lru_cache(maxsize=4)
def _walk(fills, workgroup, batch, head, T, tile, pattern, causal, device) -> QueryWalk | TileWalk:
    run = batch, head, T, tile, pattern, causal, device
    if fills == "O":
        return query_walk(_forward(*run), workgroup)
    return tile_walk(*_backward(*run), fills, workgroup, head, batch)


@lru_cache(maxsize=1)
def _forward(batch, head, T, tile, pattern, causal, device) -> ForwardTrace:
    arrays = data.make(pattern, B=BATCHES, T=T, H=HEADS, D=HEAD_DIM)
    blocks = dict(block_q=tile[0], block_k=tile[1])
    return forward_trace(*arrays, batch=batch, head=head, causal=causal, device=device, **blocks)


@lru_cache(maxsize=1)
def _backward(batch, head, T, tile, pattern, causal, device) -> tuple[BackwardTrace, Gradients]:
    q, k, v = data.make(pattern, B=BATCHES, T=T, H=HEADS, D=HEAD_DIM)
    dout = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    options = dict(causal=causal, block_q=tile[0], block_k=tile[1], device=device)
    result, gradients = attention_grad(q, k, v, dout, kernel="fa2", **options)
    trace = backward_trace(q, k, v, result.out, result.lse, dout, batch=batch, head=head, **options)
    return trace, gradients


def query_walk(trace: ForwardTrace, workgroup: int) -> QueryWalk:
    """What the workgroup that owns one tile of queries walks, cut out of a traced run."""
    taken = np.flatnonzero(trace.state[workgroup] != SKIPPED)
    rows = slice(workgroup * trace.block_q, min((workgroup + 1) * trace.block_q, len(trace.s)))

    def over_steps(x: np.ndarray, before: float) -> np.ndarray:
        """(rows, tiles, …) → (n + 1, rows, …), `before` the first step."""
        walked = x[rows][:, taken].swapaxes(0, 1)
        return np.concatenate([np.full_like(walked, before, shape=(1, *walked.shape[1:])), walked])

    return QueryWalk(
        rows=rows,
        tiles=[(workgroup, int(j)) for j in taken],
        s=trace.s[rows],
        m=over_steps(trace.m, -np.inf),
        l=over_steps(trace.l, 0.0),
        alpha=trace.alpha[rows][:, taken].T,
        running=over_steps(trace.out, 0.0),
        masked=trace.masked,
        block_q=trace.block_q,
        block_k=trace.block_k,
        label=trace.label,
    )


def tile_walk(
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


def step_through(*, device: Device | str | None = None, **values) -> View:
    """A view over `steps`, with a slider to step along by hand or arrow key, and a button that plays.

    values: where the controls start, by the names of `steps`' arguments.
    """
    start = {name: value for name, value in steps.__kwdefaults__.items() if name != "device"} | values
    tiles = list(dict.fromkeys([*TILES, start["tile"]]))
    controls = {
        "fills": choice(
            "pass", "Which pass is walked, and what fills in", [(says, o) for o, says in PASSES.items()], "O"
        ),
        "T": slider("T length", "Number of queries and keys", 1, 1, 256),
        "tile": choice("tile Br×Bc", "Queries by keys of a tile", [*map(tile_option, tiles)], tiles[0]),
        "pattern": choice("input", "Pattern of the input arrays", list(data.PATTERNS), "text"),
        "batch": slider("batch", "Batch that is shown", 0, 0, BATCHES - 1),
        "head": slider("head", "Head that is shown", 0, 0, HEADS - 1),
        "causal": tick("causal mask", "Each query sees itself and the keys before it", True),
        "workgroup": slider("query tile", "Tile of the shown workgroup; click on the map", 0, 0, 10_000, live=True),
        "step": slider("tiles taken", "Tiles that the workgroup has taken; click on the map", 0, 0, 10_000, live=True),
    }
    start_at(controls, start)
    whole, step = controls["workgroup"], controls["step"]
    play = ipywidgets.Play(
        interval=MILLISECONDS, show_repeat=False, description="play", tooltip="Take one tile after another"
    )

    def shape() -> dict:
        """What decides which tiles are taken."""
        return {name: controls[name].value for name in ("fills", "T", "tile", "causal")}

    def fit(_change=None) -> None:
        """Other walks, other numbers of workgroups and tiles; a slider beyond them goes to the end."""
        run = shape()
        taken = _taken(**run)
        whole.description = "query tile" if run["fills"] in ("O", "dQ") else "key tile"
        whole.max = len(taken) - 1
        play.max = step.max = int(taken[whole.value].sum())

    fit()
    for name in ("fills", "T", "tile", "causal", "workgroup"):  # before the View listens: it never sees a missing step
        controls[name].observe(fit, names="value")
    ipywidgets.link((step, "value"), (play, "value"))
    rows = ipywidgets.Layout(flex_flow="row wrap")
    figure = plot.figure(*STEPS_SIZE)
    figure.set_dpi(100)  # enough for the page's pixels, and a third fewer to compress at each step

    def layout(widgets: list[ipywidgets.Widget]) -> ipywidgets.Widget:
        """What is walked above, how far below, beside the buttons that play."""
        far = (whole, play, step)
        above = [widget for widget in widgets if widget not in far]
        return ipywidgets.VBox([ipywidgets.HBox(above, layout=rows), ipywidgets.HBox(far, layout=rows)])

    projector = Projector()

    def place(_figure: Figure, x: float, y: float) -> dict[str, int]:
        """On the map: the workgroup that takes this tile, after it has taken it."""
        found = projector.tile(x, y)
        if not found:
            return {}
        run = shape()
        owner, other = found if run["fills"] in ("O", "dQ") else reversed(found)
        taken = _taken(**run)[owner]
        return {"workgroup": owner, "step": int(taken[: other + 1].sum())} if taken[other] else {}

    return View(
        controls,
        lambda **moved: steps(**moved, device=device),
        projector,
        figure,
        words=lambda shown: shown.words,
        layout=layout,
        at=place,
    )


def _taken(fills: str, T: int, tile: tuple[int, int], causal: bool) -> np.ndarray:
    """Which tiles each workgroup walks: boolean `(workgroups, tiles)`."""
    problem = Problem(1, T, T, 1, 1, HEAD_DIM, causal, "bottom-right", 1.0)
    taken = reference.states(problem, *tile)[0, 0, :: tile[0]] != SKIPPED
    return taken if fills in ("O", "dQ") else taken.T
