"""Takes the pictures of the README from the notebooks, run in a real browser: `./lab screenshots`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import harness
import lab_server
from playwright.sync_api import Browser

DOCS = lab_server.CHECKOUT / "docs"
MAX_BYTES = 300_000
SHARPNESS = 1.25  # screen pixels to a pixel of the page: as many as the figures have
MARGIN = 12  # pixels of the page, left and right
HEIGHT = 1600  # of the window, so that a whole view is on the page at once

# Picture → notebook, and the cell of the view that it shows.
PICTURES = {
    "tiles": ("02_tiles_and_traces", "widgets.tiles()"),
    "parity": ("03_parity", "widgets.parity()"),
    "online_softmax": ("01_online_softmax", 'online_softmax(row="six numbers"'),
}


def take(browser: Browser, address: str, notebook_name: str, source: str) -> bytes:
    """Run a notebook and picture one of its views, as PNG. Raises `RuntimeError` if the notebook has faults."""
    notebook = harness.Notebook(browser, address, notebook_name, sharpness=SHARPNESS)
    notebook.page.set_viewport_size(harness.WINDOW | {"height": HEIGHT})
    notebook.run_all()
    if faults := notebook.faults():
        raise RuntimeError(f"{notebook_name}: {faults[0]}")
    view = notebook.view(source)
    box = view.box
    clip = {"x": box["x"] - MARGIN, "y": box["y"], "width": box["width"] + 2 * MARGIN, "height": box["height"]}
    picture = notebook.page.screenshot(clip=clip, animations="disabled")
    notebook.close()
    return picture


def main() -> int:
    """Write all pictures; the exit status."""
    if harness.chromium() is None:
        print("screenshots: there is no chromium on the PATH.", file=sys.stderr)
        return 1
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        lab_server.copy_notebooks(Path(root))
        with lab_server.server(Path(root)) as address, harness.browser() as browser:
            for name, (notebook, source) in PICTURES.items():
                try:
                    picture = take(browser, address, notebook, source)
                except RuntimeError as error:
                    print(f"screenshots: {error}.", file=sys.stderr)
                    return 1
                if len(picture) > MAX_BYTES:
                    print(f"screenshots: {name} has {len(picture):,} bytes, more than {MAX_BYTES:,}.", file=sys.stderr)
                    return 1
                (DOCS / f"{name}.png").write_bytes(picture)
                print(f"docs/{name}.png: {len(picture):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
