"""Notebooks in Debian's Chromium, driven by Playwright: what the tests and the screenshots share."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright
from view import View

# The system's Chromium, headless and quiet: it asks nothing of the network but the page itself.
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
)
WINDOW = {"width": 1280, "height": 1000}

OPENING, RUNNING, MOVING = 90.0, 300.0, 30.0  # seconds, generous: a software GPU on a busy machine


def chromium() -> str | None:
    """Where the system's Chromium is, or None."""
    return shutil.which("chromium")


@contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium. Raises `RuntimeError` where there is none."""
    path = chromium()
    if path is None:
        raise RuntimeError("there is no chromium on the PATH")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_OPTIONS))
        try:
            yield running
        finally:
            running.close()


class Notebook:
    """One notebook in a tab of its own, and what the browser's console complained of."""

    def __init__(self, browser: Browser, address: str, name: str, *, sharpness: float = 1.0):
        self.name = name
        self.complaints: list[str] = []
        self.page: Page = browser.new_page(viewport=WINDOW, device_scale_factor=sharpness)
        self.page.set_default_timeout(MOVING * 1000)
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(f"{error}"))
        # /doc shows one document alone: no launcher, no file browser, no other tabs.
        self._url = f"{address}/doc/tree/{name}.ipynb?reset"
        self.load()

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.complaints.append(f"{message.text} ({message.location.get('url', '')})")

    def load(self) -> None:
        """Open the page, or open it again, and wait until its kernel has started."""
        self.page.goto(self._url)
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.context?.isReady"
            " && window.jupyterapp.shell.currentWidget.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=OPENING * 1000,
        )
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")

    def close(self) -> None:
        """Shut the kernel down and close the tab."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    def command(self, name: str, **arguments) -> None:
        """One of JupyterLab's commands, to its end."""
        self.page.evaluate("([name, options]) => window.jupyterapp.commands.execute(name, options)", [name, arguments])

    def run_all(self) -> None:
        """Run all cells and wait until the kernel has nothing left to do."""
        self.command("notebook:run-all-cells")
        self.wait_until_idle()

    def run_cell(self, number: int) -> None:
        """Run one cell by its number, from 0, again."""
        self.page.evaluate("n => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = n }", number)
        self.command("notebook:run-cell")
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'",
            timeout=RUNNING * 1000,
        )

    def save(self) -> None:
        """Store the notebook with the outputs that it shows."""
        self.command("docmanager:save")

    def restart(self) -> None:
        """A fresh kernel, which knows nothing of the old one's views."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        self.wait_until_idle()

    def cell_with(self, source: str) -> int:
        """The number, from 0, of the one code cell whose source holds this text."""
        found = self.page.evaluate(
            """source => [...window.jupyterapp.shell.currentWidget.content.widgets.entries()]
                .filter(([, c]) => c.model.type === 'code' && c.model.sharedModel.source.includes(source))
                .map(([i]) => i)""",
            source,
        )
        if len(found) != 1:
            raise LookupError(f"{source!r} stands in the code cells {found} of {self.name}, not in one")
        return found[0]

    def cells_with_views(self) -> list[int]:
        """The numbers, from 0, of the cells whose output is a widget that holds a picture, once each is on the page."""
        return self.page.evaluate(
            """() => [...window.jupyterapp.shell.currentWidget.content.widgets.entries()]
                .filter(([, cell]) => cell.node.querySelector('img.widget-image')).map(([i]) => i)"""
        )

    def cell(self, number: int) -> Locator:
        """A cell by its number, from 0, scrolled to."""
        self.page.evaluate("n => window.jupyterapp.shell.currentWidget.content.scrollToItem(n)", number)
        cell = self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{number}"]')
        cell.scroll_into_view_if_needed()
        return cell

    def view(self, source: str) -> View:
        """The view that the cell with this text in its source shows."""
        return View(self, self.cell_with(source))

    def set_theme(self, name: str, *, light: bool) -> None:
        """Switch the page's colours, say to "JupyterLab Dark"."""
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_selector(
            f'body[data-jp-theme-name="{name}"][data-jp-theme-light="{str(light).lower()}"]', state="attached"
        )
        # The page draws its own controls anew after that; another switch in the middle of it makes React stumble.
        self.page.wait_for_load_state("networkidle")
        self.page.evaluate("() => new Promise(drawn => requestIdleCallback(() => requestAnimationFrame(drawn)))")

    def count_pictures(self) -> int:
        """How many figures there are among the outputs, as stored in the notebook."""
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .flatMap(cell => cell.model.sharedModel.outputs ?? [])
                .filter(output => 'image/png' in (output.data ?? {})).length"""
        )

    def wait_for_pictures(self, count: int) -> None:
        """Wait until the page shows so many figures among its outputs, each of them drawn."""
        self.page.wait_for_function(
            """count => {
                const images = [...document.querySelectorAll('.jp-RenderedImage img')]
                return images.length === count && images.every(image => image.complete && image.naturalWidth > 0)
            }""",
            arg=count,
        )

    def faults(self) -> list[str]:
        """What is wrong on the page: error outputs, broken widgets, and the console's complaints."""
        outputs = self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets.flatMap((cell, i) =>
                (cell.model.sharedModel.outputs ?? []).filter(o => o.output_type === 'error' || o.name === 'stderr')
                    .map(o => `cell ${i}: ${o.ename ?? ''} ${o.evalue ?? o.text}`))"""
        )
        broken = self.page.get_by_text(re.compile("javascript error|Error displaying widget|Loading widget")).all()
        return outputs + [widget.inner_text() for widget in broken] + self.complaints
