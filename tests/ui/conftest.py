"""One JupyterLab and one Chromium for all tests; without Chromium they are skipped, or fail where it is required."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import lab_server
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

REQUIRED = os.environ.get("FA2LAB_REQUIRE_GPU") == "1" or os.environ.get("CI") == "true"

# A notebook for the tests alone: a slow view that counts, and the tiles on a device that has only what browsers grant.
PROBE = [
    new_code_cell("""import time
import ipywidgets
import fa2lab as fa
from fa2lab import plot, widgets
from fa2lab.live import View

runs = dict(all=0, now=0, most=0)

def compute(n):
    runs["all"] += 1
    runs["now"] += 1
    runs["most"] = max(runs["most"], runs["now"])
    time.sleep(0.2)
    runs["now"] -= 1
    return n

def draw(figure, n):
    figure.clear()
    figure.add_subplot().bar(["n"], [n])
    return f"n is {n}; computed {runs['all']} times, at most {runs['most']} at once"
"""),
    new_code_cell("""runs.update(all=0, now=0, most=0)
slider = ipywidgets.IntSlider(1, 0, 100, description="number", tooltip="Height of the bar")
View({"n": slider}, compute, draw, plot.figure(4, 2))"""),
    new_markdown_cell("Below the first view."),
    new_code_cell('widgets.tiles(device=fa.Device(limits="webgpu"), T=24, H=1, D=128, row=23)'),
    new_markdown_cell("Below the second view."),
]


KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}  # else the page asks


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a copy of the notebooks, with the probe beside them."""
    if harness.chromium() is None:
        (pytest.fail if REQUIRED else pytest.skip)("no chromium on the PATH")
    root = tmp_path_factory.mktemp("notebooks")
    lab_server.copy_notebooks(root)
    nbformat.write(new_notebook(cells=PROBE, metadata=KERNEL), Path(root, "probe.ipynb"))
    with lab_server.server(root) as address:
        yield address


# Not of session scope: Playwright's loop runs in this thread, and other tests start loops of their own.
@pytest.fixture(scope="module")
def run(address: str) -> Iterator[Callable[[str], harness.Notebook]]:
    """Opens a notebook by its name and runs all of it; the same page for each test that asks."""
    opened: dict[str, harness.Notebook] = {}

    def run(name: str) -> harness.Notebook:
        if name not in opened:
            opened[name] = harness.Notebook(browser, address, name)
            opened[name].run_all()
        return opened[name]

    with harness.browser() as browser:
        yield run
        for notebook in opened.values():
            notebook.close()
