"""Takes what a view shows out of the notebook: into a file by its path, and as a link that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Mapping
from pathlib import Path

import ipywidgets

from fa2lab.live import WORKER
from fa2lab.parity_report import write

MEDIA = {"json": "application/json", "png": "image/png", "svg": "image/svg+xml"}
BAD = "color:var(--jp-error-color1, #cf222e)"


def link(name: str, content: bytes) -> str:
    """An HTML link that hands out the bytes as a file of this name, whose suffix is one of `MEDIA`.

    It holds all of the bytes itself, so it works in a saved page and without a network.
    """
    data = base64.b64encode(content).decode()
    kind, name = MEDIA[Path(name).suffix[1:]], html.escape(name, quote=True)
    style = "color:var(--jp-content-link-color, #0969da);text-decoration:underline"
    return f'<a download="{name}" href="data:{kind};base64,{data}" style="{style}">download {name}</a>'


def export(path: str, kind: str, content: bytes, *, name: str) -> str:
    """Write the bytes to `path`, if it is not blank, and say so in HTML, with a link to the same bytes behind it.

    A path without a suffix gets `.{kind}`. A path that cannot be written is told in one sentence.
    """
    if not path.strip():
        return link(f"{name}.{kind}", content)
    target = Path(path.strip())
    target = target if target.suffix else target.with_suffix(f".{kind}")
    handed = link(f"{target.stem or name}.{kind}", content)
    try:
        written = write(target, content)
    except OSError as error:
        return f'<span role="alert" style="{BAD}">{html.escape(str(error))}</span> &nbsp; {handed}'
    return f"<span>Wrote {html.escape(str(written))}, {len(content):,} bytes.</span> &nbsp; {handed}"


class Export:
    """A field for a path, a button a kind of file, and a line that says what came of it.

    `make`: by kind ("json", "png", "svg"), what returns the file's bytes; an error there is shown as its sentence.
    `says`: by kind, what the file holds, for the button. `name`: of the file that the link hands out.
    """

    def __init__(self, make: Mapping[str, Callable[[], bytes]], says: Mapping[str, str], *, name: str):
        self._make, self._name = dict(make), name
        self.path = ipywidgets.Text(
            description="save to", placeholder="a path, or nothing for a link alone",
            tooltip="File to write, beside this notebook or anywhere; blank for a download link alone",
            style={"description_width": "84px"}, layout={"width": "420px"},
        )  # fmt: skip
        self.buttons = {
            kind: ipywidgets.Button(
                description=f"{says[kind]} as {kind.upper()}",
                tooltip=f"Write the {says[kind]} as {kind.upper()} and offer it for download",
                layout={"width": "170px"},
            )
            for kind in make
        }
        self.said = ipywidgets.HTML(layout=ipywidgets.Layout(height="36px", overflow="auto"))
        for kind, button in self.buttons.items():
            button.on_click(lambda _, kind=kind: self.press(kind))
        row = ipywidgets.HBox([self.path, *self.buttons.values()], layout=ipywidgets.Layout(flex_flow="row wrap"))
        self.widget = ipywidgets.VBox([row, self.said])

    def press(self, kind: str) -> None:
        """What a button does."""
        try:
            # By the views' one worker: no two threads in matplotlib, and no other kernel run in flight.
            content = WORKER.submit(self._make[kind]).result()
        except Exception as error:
            sentence = html.escape(f"{error}" or type(error).__name__)
            self.said.value = f'<span role="alert" style="{BAD}"><b>Not saved:</b> {sentence}</span>'
        else:
            self.said.value = export(self.path.value, kind, content, name=self._name)
