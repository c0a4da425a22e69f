"""View: a figure that follows its controls. One computation in flight, the newest request kept, errors shown."""

from __future__ import annotations

import asyncio
import html
import io
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

STALE, CLICKABLE, WORDS = "fa2lab-stale", "fa2lab-clickable", "fa2lab-words"
# What ipywidgets' Layout cannot say.
_STYLE_SHEET = (
    f"<style>.{STALE} {{ opacity: 0.35 }} .{CLICKABLE} {{ cursor: crosshair }}"
    f" .{WORDS} .widget-html-content {{ line-height: 1.4 }}"
    f" .{WORDS} :is(th, td) {{ padding: 3px 8px; line-height: 1.3 }}"
    "</style>"
)


class Picture(ipywidgets.Image):
    """An Image that may have a tooltip: JupyterLab's view of one reads a description, which Image lacks."""

    description = traitlets.Unicode("").tag(sync=True)

    def dim(self, stale: bool) -> None:
        """Pale while it shows older values than the controls do."""
        (self.add_class if stale else self.remove_class)(STALE)


class Browser(anywidget.AnyWidget):
    """Unseen in a view: what runs in the browser, `live.js`.

    It gives controls and picture the names that a screen reader says. A click on a picture of class `CLICKABLE` calls
    the method `clicked` with where that was, in fractions of the picture from the left and from above.
    """

    _esm = Path(__file__).with_name("live.js")

    def __init__(self, clicked: Callable[[float, float], None] | None = None):
        super().__init__(layout=ipywidgets.Layout(display="none"))
        if clicked:
            method = weakref.WeakMethod(clicked)  # ipywidgets keeps a widget for good, which must not keep its view
            # A message, not a value that is synced: the same place may be clicked twice.
            self.on_msg(lambda _widget, place, _buffers: (act := method()) and act(*place))

    def __repr__(self) -> str:
        """Without the address in memory, which an output stored as text would show."""
        return "Browser()"


def stack(browser: Browser, *widgets: ipywidgets.Widget) -> ipywidgets.VBox:
    """The widgets one below another, with the unseen one that runs `live.js`."""
    return ipywidgets.VBox([browser, *widgets]).add_class("fa2lab-view")  # by which live.js finds them


def paint(canvas: FigureCanvasAgg) -> bytes:
    """The canvas's figure as PNG, hardly compressed, which would otherwise take half of a redraw's time."""
    png = io.BytesIO()
    canvas.print_png(png, pil_kwargs={"compress_level": 1})
    return png.getvalue()


# One worker for all views: one kernel run in flight, and no two threads in matplotlib.
WORKER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fa2lab-view")
_ONE_AT_A_TIME = threading.Lock()  # the worker's move of one view, and another that is made or set in the main thread


class View:
    """Controls above, a line of words, and a picture that is always that of the shown controls.

    `controls`: ipywidgets by name; every name is an argument of `compute`.
    `compute(**values)`: the slow part, returns whatever `draw` takes.
    `draw(figure, result)`: updates the figure in place and returns its alternative text, one sentence.
    `figure`: made once, by the caller, and never by pyplot, which would keep it alive.
    `words(result)`: HTML shown above the picture, say a verdict; optional. It gets `words_height`, whatever it says, so
    that the picture stays where it is.

    `at(figure, x, y)`: new values for controls, by name, for a click at (x, y) in matplotlib's display coordinates; {}
    for none. Optional, and a shortcut: the controls do the same by keyboard.

    A move while a computation is in flight replaces the one that waits. An error in `compute` or `draw` shows its
    sentence and dims the picture, which is then that of older values; the next good value recovers. `refresh` does the
    same synchronously and raises: that is what tests call.
    """

    def __init__(
        self,
        controls: Mapping[str, ipywidgets.Widget],
        compute: Callable[..., Any],
        draw: Callable[[Figure, Any], str],
        figure: Figure,
        *,
        words: Callable[[Any], str] | None = None,
        words_height: str = "32px",
        layout: Callable[[list[ipywidgets.Widget]], ipywidgets.Widget] | None = None,
        at: Callable[[Figure, float, float], Mapping[str, Any]] | None = None,
    ):
        self.controls = dict(controls)
        self._at = at
        self._compute, self._draw, self._words = compute, draw, words
        self._canvas = FigureCanvasAgg(figure)
        self._task: asyncio.Task | None = None
        self._wanted = False  # a control moved since the last computation started
        self._refreshes = 0  # so that a computation in flight does not overtake a later refresh
        width, height = (int(inches * 96) for inches in figure.get_size_inches())
        # The height is fixed, so that nothing below the picture ever moves.
        self.image = Picture(
            format="png",
            layout=ipywidgets.Layout(width=f"{width}px", height=f"{height}px", max_width="100%", object_fit="contain"),
        )
        # As wide as the picture, whatever the page.
        words_layout = ipywidgets.Layout(height=words_height, width=f"{width}px", max_width="100%", overflow="auto")
        self.status = ipywidgets.HTML(layout=words_layout).add_class(WORDS)
        rows = layout or (lambda widgets: ipywidgets.HBox(widgets, layout=ipywidgets.Layout(flex_flow="row wrap")))
        self._browser = Browser(self.click if at else None)
        if at:
            self.image.add_class(CLICKABLE)
        style = ipywidgets.HTML(_STYLE_SHEET, layout=ipywidgets.Layout(display="none"))
        self.widget = stack(self._browser, style, rows(list(self.controls.values())), self.status, self.image)
        for control in self.controls.values():
            control.observe(self._moved, names="value")
        self.refresh()

    @property
    def values(self) -> dict[str, Any]:
        """What the controls say now."""
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **values) -> None:
        """Move controls, compute and draw before returning. Raises what `compute` and `draw` raise."""
        for control in self.controls.values():
            control.unobserve(self._moved, names="value")
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            for control in self.controls.values():
                control.observe(self._moved, names="value")
        self.refresh()

    def refresh(self) -> None:
        """Compute and draw for the controls as they stand, now. Raises what `compute` and `draw` raise."""
        self._refreshes += 1
        try:
            self._show(*self._render(self.values, self._refreshes))
        except Exception as error:
            self._show_error(error)
            raise

    def click(self, x: float, y: float) -> None:
        """A click on the picture, in fractions from the left and from above; ignored while the picture is dimmed."""
        if STALE in self.image._dom_classes:
            return
        figure = self._canvas.figure
        for name, value in self._at(figure, x * figure.bbox.width, (1 - y) * figure.bbox.height).items():
            self.controls[name].value = value

    def close(self) -> None:
        """Let go of the controls and the figure."""
        for control in self.controls.values():
            control.unobserve(self._moved, names="value")
        self._browser.close()
        self.widget.close()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)

    def _moved(self, _change) -> None:
        self._wanted = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel around us: a script or a test moves the controls
            self._wanted = False
            try:
                self.refresh()
            except Exception:
                pass  # it stands in the view already
            return
        self.image.dim(True)  # until it is the picture of the shown controls again
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._follow())

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while self._wanted:
            self._wanted, refreshes = False, self._refreshes
            shown = error = None
            try:
                shown = await loop.run_in_executor(WORKER, self._render, self.values, refreshes)
            except Exception as raised:
                error = raised
            if self._wanted or refreshes != self._refreshes:
                continue  # a newer request waits, or came first: this is no longer what the controls say
            if error:
                self._show_error(error)
            else:
                self._show(*shown)

    def _render(self, values: dict[str, Any], refreshes: int) -> tuple[bytes, str, str] | None:
        with _ONE_AT_A_TIME:
            if refreshes != self._refreshes:  # overtaken while it waited: the figure stays that of the picture
                return None
            result = self._compute(**values)
            text = self._draw(self._canvas.figure, result)
            return paint(self._canvas), text, self._words(result) if self._words else ""

    def _show(self, png: bytes, text: str, words: str) -> None:
        self.image.value = png
        self.image.tooltip = text  # the <img>'s title, its name for a screen reader
        self.status.value = words
        self.image.dim(False)

    def _show_error(self, error: Exception) -> None:
        sentence = html.escape(f"{error}" or type(error).__name__)
        colour = "var(--jp-error-color1, #cf222e)"  # readable in both themes
        self.status.value = f'<span role="alert" style="color:{colour}"><b>Not computed:</b> {sentence}</span>'
        self.image.dim(True)
        self.image.tooltip = "An older picture: the shown values could not be computed."
