"""What the tests of the views share: a move and its new picture, and whether a picture looks stale."""

from __future__ import annotations

import gc

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


def dim(view: View) -> bool:
    """Whether the browser dims the picture: by a class, since ipywidgets' layout knows no opacity."""
    return STALE in view.image.get_state()["_dom_classes"]


def count_figures() -> int:
    """By type(), since isinstance would follow the weak proxies among them, which may be dead."""
    return sum(issubclass(type(thing), Figure) for thing in gc.get_objects())
