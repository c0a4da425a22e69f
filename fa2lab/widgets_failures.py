"""Known failures as buttons: each runs a public bug of this trade beside the right variant, and says why they part."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import lru_cache

import ipywidgets
from matplotlib.figure import Figure

from fa2lab import failures, plot_failures
from fa2lab.failures import FAILURES, Outcome
from fa2lab.gpu import Device
from fa2lab.live import View
from fa2lab.widgets_controls import view

FAILURE_SIZE = (10.8, 6.2)  # inches


@dataclass(frozen=True, eq=False)
class Shown:
    """An outcome as a view shows it."""

    outcome: Outcome

    def draw(self, figure: Figure) -> str:
        """Draw on a figure of about `FAILURE_SIZE`; returns the picture in one sentence."""
        got = self.outcome
        return plot_failures.failure(
            figure, got.panels, taken=got.failure.taken, change=got.change, verdict=got.parts, label=got.label
        )

    @property
    def words(self) -> str:
        """Whether they part, where, and why, as HTML."""
        got = self.outcome
        mark, colour = ("✗ they part", "--jp-error-color1, #cf222e") if got.breaks else (
            "✓ the same here", "--jp-success-color0, #1a7f37")  # fmt: skip
        return (
            f'<div><b style="color:var({colour})">{mark}</b> &nbsp; {html.escape(got.parts)}</div>'
            f"<div>{html.escape(got.failure.why)}</div>"
        )


def failure(name: str = FAILURES[0].name, *, device: Device | str | None = None) -> Shown:
    """Run a known failure by its name: see `failures.run`. Raises `KeyError` for a name that is none."""
    return Shown(_outcome(name, device))


@lru_cache(maxsize=len(FAILURES))
def _outcome(name: str, device: Device | str | None) -> Outcome:
    return failures.run(name, device=device)


def known_failures(*, device: Device | str | None = None, **values) -> View:
    """A view over `failure`: a button a bug. values: `name`, where it starts."""
    buttons = ipywidgets.ToggleButtons(
        options=[found.name for found in FAILURES], description="failure", tooltip="The bug to run",
        tooltips=[found.taken for found in FAILURES], style={"description_width": "84px", "button_width": "146px"},
    )  # fmt: skip
    return view(
        {"name": buttons},
        lambda name: failure(name, device=device),
        FAILURE_SIZE,
        values,
        words_height="112px",
    )
