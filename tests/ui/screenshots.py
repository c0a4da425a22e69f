"""Takes the pictures of the README from the notebooks, run in a real browser: `./lab screenshots`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import lab_server
from playwright.sync_api import Browser

sys.path.insert(0, str(lab_server.CHECKOUT / "notebooks"))
import build  # noqa: E402 - how `./lab notebooks` packs its pictures

DOCS = lab_server.CHECKOUT / "docs"
MAX_BYTES = 450_000
SHARPNESS = 1.25  # screen pixels to a pixel of the page: as many as the figures have
MARGIN = 12  # pixels of the page, left and right
HEIGHT = 1900  # of the window, so that a whole view is on the page at once

# Picture → notebook, and the cell of the view that it shows.
PICTURES = {
    "tiles": ("02_tiles_and_traces", "widgets.tiles()"),
    "steps": ("02_tiles_and_traces", "widgets.step_through()"),
    "steps_backward": ("04_backward", "widgets.step_through("),
    "online_softmax": ("01_online_softmax", 'online_softmax(row="six numbers"'),
    "merges": ("01_online_softmax", "widgets.merge_tree("),
    "heads": ("05_training_gate", "widgets.head_gallery()"),
    "parity": ("03_parity", "widgets.parity()"),
    "failures": ("03_parity", "widgets.known_failures()"),
}


def take(notebook: harness.Notebook, source: str) -> bytes:
    """Picture one of the views of a notebook that has run, as PNG."""
    view = notebook.view(source)
    box = view.box
    clip = {"x": box["x"] - MARGIN, "y": box["y"], "width": box["width"] + 2 * MARGIN, "height": box["height"]}
    return notebook.page.screenshot(clip=clip, animations="disabled")


def take_all(browser: Browser, address: str) -> Iterator[tuple[str, bytes]]:
    """Each picture by its name; a notebook is run once. Raises `RuntimeError` if one has faults."""
    for name in dict.fromkeys(name for name, _ in PICTURES.values()):
        notebook = harness.Notebook(browser, address, name, sharpness=SHARPNESS)
        notebook.page.set_viewport_size(harness.WINDOW | {"height": HEIGHT})
        notebook.run_all()
        if faults := notebook.faults():
            raise RuntimeError(f"{name}: {faults[0]}")
        for picture, (where, source) in PICTURES.items():
            if where == name:
                yield picture, build.packed(take(notebook, source))
        notebook.close()


def main() -> int:
    """Write all pictures; the exit status."""
    if harness.chromium() is None:
        print("screenshots: there is no chromium on the PATH.", file=sys.stderr)
        return 1
    DOCS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        lab_server.copy_notebooks(Path(root))
        with lab_server.server(Path(root)) as address, harness.browser() as browser:
            try:
                for name, picture in take_all(browser, address):
                    if len(picture) > MAX_BYTES:
                        raise RuntimeError(f"{name} has {len(picture):,} bytes, more than {MAX_BYTES:,}")
                    (DOCS / f"{name}.png").write_bytes(picture)
                    print(f"docs/{name}.png: {len(picture):,} bytes")
            except RuntimeError as error:
                print(f"screenshots: {error}.", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
