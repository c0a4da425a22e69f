"""The controls that all views share, each with a label and a hint, and the View that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from fa2lab import plot
from fa2lab.live import View
from fa2lab.plot_sheet import Sheet

STYLE: dict[str, Any] = dict(style={"description_width": "84px"}, layout={"width": "300px"})
# A kernel run and a figure take longer than a drag's steps; the number follows the hand, the picture the release.
SLIDER_STYLE: dict[str, Any] = dict(continuous_update=False, **STYLE)


def slider(label: str, says: str, value: int, low: int, high: int, *, live: bool = False) -> ipywidgets.IntSlider:
    """A slider over whole numbers; `live`: the picture follows while it is dragged."""
    style = SLIDER_STYLE | {"continuous_update": live}
    return ipywidgets.IntSlider(value, min=low, max=high, description=label, tooltip=says, **style)


def size_slider(label: str, says: str, sizes: Sequence[int]) -> ipywidgets.SelectionSlider:
    """A slider over a few sizes, at the last of them."""
    return ipywidgets.SelectionSlider(options=sizes, value=sizes[-1], description=label, tooltip=says, **STYLE)


def choice(label: str, says: str, options: list, value: Any) -> ipywidgets.Dropdown:
    """A drop-down list of names, or of `(name, value)` pairs."""
    return ipywidgets.Dropdown(options=options, value=value, description=label, tooltip=says, **STYLE)


def tick(label: str, says: str, value: bool, *, width: str = "180px") -> ipywidgets.Checkbox:
    """A box to tick."""
    return ipywidgets.Checkbox(value, description=label, tooltip=says, indent=False, layout={"width": width})


def tile_option(tile: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """A tile as an option of a list."""
    return f"{tile[0]}×{tile[1]}", tile


def start_at(controls: Mapping[str, ipywidgets.Widget], values: Mapping[str, Any]) -> None:
    """Move controls to where a view starts. Raises `TypeError` for a name that no control has.

    In the controls' own order: T and H come before row and head, whose range they set.
    """
    unknown = sorted(set(values) - set(controls))
    if unknown:
        raise TypeError(f"No control is called {', '.join(unknown)}; there are {', '.join(controls)}.")
    for name in controls:
        if name in values:
            controls[name].value = values[name]


def view(
    controls: dict[str, ipywidgets.Widget],
    compute: Callable[..., Any],
    size: tuple[float, float],
    values: Mapping[str, Any],
    *,
    words_height: str,
) -> View:
    """A View whose result draws itself (`result.draw(figure)`) and says `result.words`.

    size: of the figure, in inches. values: where controls start, by name.
    """
    start_at(controls, values)
    return View(
        controls,
        compute,
        lambda figure, shown: shown.draw(figure),
        plot.figure(*size),
        words=lambda shown: shown.words,
        words_height=words_height,
    )


def sheet_view(
    controls: dict[str, ipywidgets.Widget],
    compute: Callable[..., Any],
    size: tuple[float, float],
    *,
    words_height: str,
    words: Callable[[Any], str] = lambda shown: shown.words,
    **options: Any,
) -> View:
    """A View whose result draws on a sheet (`result.show(sheet)`): what has not changed there is not drawn anew.

    size: of the figure, in inches. options: `View`'s layout and at.
    """
    sheet = Sheet(plot.figure(*size), keep=True)
    return View(
        controls,
        compute,
        lambda _figure, shown: shown.show(sheet),
        sheet.figure,
        words=words,
        words_height=words_height,
        **options,
    )
