"""What the tests of the views share: a move and its new picture, and whether a picture looks stale."""

from __future__ import annotations

import gc

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2lab.live import STALE, View

PNG = b"\x89PNG"


def fresh(view: View, **values) -> str:
    """Move the view and return the alternative text of the new picture."""
    before = view.image.value
    view.set(**values)
    assert view.image.value[:4] == PNG and view.image.value != before
    assert not dim(view)
    return view.image.tooltip


def click(view: View, ax: Axes, x: float, y: float) -> None:
    """Click on data coordinates, as the browser tells it: in fractions of the picture, from its upper left corner."""
    width, height = ax.figure.bbox.size
    across, up = ax.transData.transform((x, y))
    view.click(across / width, 1 - up / height)


def dim(view: View) -> bool:
    """Whether the browser dims the picture: by a class, since ipywidgets' layout knows no opacity."""
    return STALE in view.image.get_state()["_dom_classes"]


def count_figures() -> int:
    """By type(), since isinstance would follow the weak proxies among them, which may be dead."""
    return sum(issubclass(type(thing), Figure) for thing in gc.get_objects())
