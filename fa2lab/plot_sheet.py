"""A sheet of panels, drawn again and again: what has not changed in a panel is neither drawn nor painted anew.

Clearing axes, dressing them and painting their numbers takes longer than a hand takes to move a slider. So a picture
tells its sheet which part of a panel comes of which inputs, and draws over it what moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.spines import Spine


class Sheet:
    """A figure, emptied and taken over, and what each of its panels shows.

    keep: also paint the still parts once, as pixels behind the rest. The picture is the same, and several times faster
    to draw again at one size and sharpness.
    """

    def __init__(self, figure: Figure, *, keep: bool = False):
        figure.clear()
        figure.set_layout_engine("none")  # what slides must not shift, and fitting the layout anew takes long
        self.figure = figure
        self._keep = keep
        self._panels: dict[Axes, _Panel] = {}

    def axes(self, lay_out: Callable[[Figure], Sequence[Axes]]) -> list[Axes]:
        """The panels, which `lay_out` puts on the figure at the first call."""
        if not self._panels:
            self._panels = {ax: _Panel(ax) for ax in lay_out(self.figure)}
            if self._keep:
                self.figure.add_artist(_Painter(list(self._panels.values())))
        return list(self._panels)

    def still(self, draw: Callable[..., Any], ax: Axes, *inputs: Any, **options: Any) -> Any:
        """What `draw(ax, *inputs, **options)` returns, which is called only if this panel's last call was another.

        draw: clears the Axes, and draws what nothing but the inputs decides. Whatever was drawn over it goes.
        Inputs are kept to compare with: an array must not be changed in place afterwards.
        """
        return self._panels[ax].still(draw, inputs, options)

    def over(self, *artists: Artist) -> None:
        """Say which parts of still panels have been set anew since `still`: an axis, a title, a line of the panel.

        Artists added to the panel since then need not be named.
        """
        for artist in artists:
            self._panels[artist.axes].moved.add(artist)


def same(a: Any, b: Any) -> bool:
    """Whether two inputs are equal in kind, order and value, arrays bit by bit."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class _Panel:
    """One Axes: the call that it shows, what that call made, and its pixels."""

    def __init__(self, ax: Axes):
        self.ax = ax
        self.moved: set[Artist] = set()
        self._call: tuple | None = None
        self._made: Any = None
        self._ground: set[Artist] = set()
        self._painted: tuple | None = None  # what the pixels are of
        self.corner, self.pixels = (0, 0), np.zeros((0, 0), np.uint32)

    def still(self, draw: Callable[..., Any], inputs: tuple, options: dict) -> Any:
        call = draw, inputs, options
        self.moved = set()
        if self._call is not None and same(call, self._call):
            for artist in set(self.ax.get_children()) - self._ground:
                artist.remove()
            return self._made
        self._call = None  # should `draw` raise, nothing is known of the panel
        self._made = draw(self.ax, *inputs, **options)
        self._call, self._ground = call, set(self.ax.get_children())
        return self._made

    def above(self) -> list[Artist]:
        """What stands above the pixels, from below: the first part that moves, and all content drawn after that.

        An axis, a title, a legend or a colour bar stands beside the content and covers none of it.
        """
        ax = self.ax
        parts = sorted((part for part in ax.get_children() if part is not ax.patch), key=Artist.get_zorder)
        if not ax.axison:
            parts = [part for part in parts if not isinstance(part, Axis | Spine)]
        moves = self.moved | (set(parts) - self._ground)
        first = next((n for n, part in enumerate(parts) if part in moves), len(parts))
        content = moves.union(ax.lines, ax.patches, ax.collections, ax.images, ax.texts, ax.spines.values())
        return [part for part in parts[first:] if part in content]

    def paint(self, empty: np.ndarray, above: Sequence[Artist], dpi: float) -> bool:
        """Paint what stands below `above` in front of `empty`, unless the pixels are of that. Returns whether it did.

        empty: the figure without its panels, `(height, width)`, four bytes a pixel.
        """
        below = empty.shape, dpi, self._ground.difference(above)  # of a panel drawn anew, these are other parts
        if below == self._painted:
            return False
        renderer = RendererAgg(*reversed(empty.shape), dpi)
        self.ax.figure.patch.draw(renderer)
        for part in above:
            part.set_animated(True)  # which leaves it out
        try:
            self.ax.draw(renderer)
        finally:
            for part in above:
                part.set_animated(False)
        pixels = _pixels(renderer)
        rows, columns = (np.flatnonzero((pixels != empty).any(axis)) for axis in (1, 0))
        self.corner = rows.min(initial=len(empty)), columns.min(initial=empty.shape[1])
        self.pixels = pixels[self.corner[0] : rows.max(initial=0) + 1, self.corner[1] : columns.max(initial=0) + 1]
        self.pixels = self.pixels.copy()  # without the rest of the figure
        self._painted = below
        return True


class _Painter(Artist):
    """Draws all panels in place of their figure: the pixels of what is still, and above them what moves."""

    def __init__(self, panels: Sequence[_Panel]):
        super().__init__()
        self.panels = panels
        self.set_zorder(-1)  # below the figure's own words
        for panel in panels:
            panel.ax.set_animated(True)  # the figure leaves it to us
        self._empty = self._ground = np.zeros((0, 0), np.uint32)

    def draw(self, renderer) -> None:
        """Paint what has changed, and put everything where it belongs."""
        if self.get_figure(root=True).canvas.is_saving():  # perhaps no pixels are wanted
            for panel in self.panels:
                panel.ax.draw(renderer)
            return
        shape = int(renderer.height), int(renderer.width)
        if self._empty.shape != shape:
            blank = RendererAgg(*reversed(shape), renderer.dpi)
            self.figure.patch.draw(blank)
            self._empty = _pixels(blank)
        above = [panel.above() for panel in self.panels]
        painted = [
            panel.paint(self._empty, parts, renderer.dpi) for panel, parts in zip(self.panels, above, strict=True)
        ]
        if any(painted):
            self._ground = self._empty.copy()
            for panel in self.panels:
                (y, x), (height, width) = panel.corner, panel.pixels.shape
                place = slice(y, y + height), slice(x, x + width)
                np.copyto(self._ground[place], panel.pixels, where=panel.pixels != self._empty[place])
        rows = self._ground.view(np.uint8).reshape(*shape, 4)
        renderer.draw_image(renderer.new_gc(), 0, 0, rows[::-1])  # renderers count rows from below
        for part in (part for parts in above for part in parts):
            part.draw(renderer)


def _pixels(renderer: RendererAgg) -> np.ndarray:
    """`(height, width)`, four bytes a pixel."""
    return np.asarray(renderer.buffer_rgba()).view(np.uint32)[..., 0]
