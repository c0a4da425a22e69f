"""One JupyterLab and one Chromium for all tests; without Chromium they are skipped, or fail where it is required."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import lab_server
import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_notebook
from playwright.sync_api import Browser

REQUIRED = os.environ.get("FA2LAB_REQUIRE_GPU") == "1" or os.environ.get("CI") == "true"

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}  # else the page asks


@dataclass(frozen=True)
class Lab:
    """A JupyterLab that runs: its address, and the folder whose notebooks it opens."""

    address: str
    root: Path


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebooks."""
    if harness.chromium() is None:
        (pytest.fail if REQUIRED else pytest.skip)("no chromium on the PATH")
    root = tmp_path_factory.mktemp("notebooks")
    lab_server.copy_notebooks(root)
    with lab_server.server(root) as address:
        yield Lab(address, root)


# Not of session scope: Playwright's loop runs in this thread, and other tests start loops of their own.
@pytest.fixture(scope="module")
def browser(lab: Lab) -> Iterator[Browser]:
    """Chromium."""
    with harness.browser() as running:
        yield running


@pytest.fixture(scope="module")
def run(lab: Lab, browser: Browser) -> Iterator[Callable[..., harness.Notebook]]:
    """Opens a notebook by its name and runs all of it; the same page for each test that asks.

    `cells`: of a notebook that is written first.
    """
    opened: dict[str, harness.Notebook] = {}

    def run(name: str, cells: Sequence[NotebookNode] = ()) -> harness.Notebook:
        if name not in opened:
            if cells:
                notebook = new_notebook(cells=list(cells), metadata=KERNEL)
                nbformat.write(notebook, Path(lab.root, f"{name}.ipynb"))
            opened[name] = harness.Notebook(browser, lab.address, name)
            opened[name].run_all()
        return opened[name]

    yield run
    for notebook in opened.values():
        notebook.close()
