"""Bench, head gallery and known failures in a real browser: in JupyterLab, and as the page without code."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import harness
import lab_server
import pytest
from playwright.sync_api import Error as PlaywrightError

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.gpu]

PAGE = "page/workbench"
SOURCE = lab_server.CHECKOUT / "notebooks" / f"{PAGE}.ipynb"
BENCH, GALLERY, FAILURES = "widgets.parity()", "widgets.head_gallery()", "widgets.known_failures()"


@pytest.fixture
def notebook(run) -> Iterator[harness.Notebook]:
    """The page's notebook in JupyterLab, run once for all tests; nothing that they do may leave a fault on it."""
    yield run(PAGE)
    assert run(PAGE).faults() == []


# In JupyterLab


def test_every_view_is_readable_in_both_themes_and_labelled(notebook):
    views = [notebook.view(source) for source in (BENCH, GALLERY, FAILURES)]
    pictures = [view.picture() for view in views]
    for view in views:
        assert len(view.text) > 40
        assert view.unreadable() == {} and view.unlabelled() == []
    notebook.set_theme("JupyterLab Dark", light=False)
    try:
        assert [view.unreadable() for view in views] == [{}] * 3
        assert [view.picture() for view in views] == pictures, "white, and not shining through"
    finally:
        notebook.set_theme("JupyterLab Light", light=True)


def test_pressing_a_thumbnail_holds_its_head(notebook):
    view = notebook.view(GALLERY)
    height, picture = view.height(), view.picture()
    buttons = [view.whole.get_by_role("button", name=f"head {h}", exact=True) for h in range(6)]
    worn = {button.evaluate("button => getComputedStyle(button).backgroundImage") for button in buttons}
    assert len(worn) == 6 and all(address.startswith('url("data:image/png') for address in worn)
    view.press("head 4")
    view.wait_for_text("Head 4:")
    assert view.picture() != picture and view.height() == height
    view.press("head 1", by_keyboard=True)
    view.wait_for_text("Head 1:")
    active = view.whole.locator("button.mod-active").all_inner_texts()
    assert [text.strip() for text in active] == ["head 1"]


def test_the_value_at_a_place_is_told_by_keyboard_alone(notebook):
    view = notebook.view(GALLERY)
    height, before = view.height(), view.number_at("query")
    assert view.tab_to("query") == view.focusable_before("query")
    view.page.keyboard.press("ArrowLeft")
    view.wait_for_text(f"Query {before - 1} gives key")
    view.slider("key").focus()
    view.page.keyboard.press("Home")
    view.wait_for_text(f"Query {before - 1} gives key 0 ")
    view.wait_for_words("number")
    assert view.height() == height


def test_the_value_under_the_pointer_is_told(notebook):
    """The first picture spans 0.05 to 0.23 of the width and 0.06 to 0.47 of the height: 32 queries and keys."""
    view = notebook.view(GALLERY)
    view.click(0.1, 0.4)
    view.wait_for_text("Query 26 gives key 6 ")
    assert (view.number_at("query"), view.number_at("key")) == (26, 6)
    view.slider("query").focus()
    view.page.keyboard.press("ArrowLeft")
    view.wait_for_text("Query 25 gives key 6 ")
    view.click(0.1, 0.4)  # the same place again
    view.wait_for_text("Query 26 gives key 6 ")
    view.click(0.5, 0.98)  # the footer
    view.page.wait_for_timeout(300)
    assert (view.number_at("query"), view.number_at("key")) == (26, 6)


def test_other_numbers_of_heads_give_other_buttons(notebook):
    view = notebook.view(GALLERY)
    view.slider("H heads").focus()
    for _ in range(4):
        view.page.keyboard.press("ArrowLeft")
    view.whole.get_by_role("button", name="head 2", exact=True).wait_for(state="detached")
    view.wait_for_text("Head 1:")
    for _ in range(4):
        view.page.keyboard.press("ArrowRight")
    view.whole.get_by_role("button", name="head 5", exact=True).wait_for()


def test_each_failure_is_a_button(notebook):
    view = notebook.view(FAILURES)
    height = view.height()
    view.press("ragged tile")
    view.wait_for_text("2.8125 in place of 5")
    view.press("skipped half tile", by_keyboard=True)
    view.wait_for_text("7.5 in place of 15.5")
    view.press("assumed subgroup")
    view.wait_for_text("This device's subgroup holds")
    view.wait_for_words("Sixteen lanes share a row")
    assert view.height() == height


def test_a_chosen_row_is_shown_with_its_numbers(notebook):
    view = notebook.view(BENCH)
    height, worst = view.height(), view.text
    view.whole.get_by_label("show the worst row").uncheck()
    view.wait_for_text("Shown is query 0 of batch 0, head 0")
    view.slider("row").focus()
    view.page.keyboard.press("ArrowRight")
    view.wait_for_text("Shown is query 1 of batch 0, head 0")
    view.whole.get_by_label("show the worst row").check()
    view.wait_for_text(worst)
    assert view.height() == height


def test_the_report_is_written_and_downloads_without_a_network(notebook, lab, tmp_path):
    view = notebook.view(BENCH)
    path, height = view.whole.get_by_placeholder("a path, or nothing"), view.height()
    path.fill("kept.json")
    path.press("Tab")
    view.press("report as JSON")
    view.wait_for_words("Wrote")
    written = (lab.root / "page" / "kept.json").read_bytes()
    assert json.loads(written)["report"] == "fa2lab parity"
    with view.page.expect_download() as download:
        view.whole.get_by_role("link", name="download kept.json").click()
    download.value.save_as(tmp_path / "handed.json")
    assert (tmp_path / "handed.json").read_bytes() == written
    path.fill("no such folder/kept.json")
    path.press("Tab")
    view.press("figure as SVG")
    view.wait_for_words("cannot be written: No such file or directory.")
    assert view.height() == height
    path.fill("")
    path.press("Tab")
    view.press("figure as PNG")
    view.whole.get_by_role("link", name="download parity.png").wait_for()


# As a page


@pytest.fixture
def page_address() -> Iterator[str]:
    """What `./lab page` runs, on a free port."""
    if importlib.util.find_spec("voila") is None:
        pytest.fail("Voilà is not installed: the extra page brings it, and test needs it")
    port = lab_server.free_port()
    (line,) = (line for line in (lab_server.CHECKOUT / "lab").read_text().splitlines() if " -m voila " in line)
    (hidden,) = (word for word in line.split() if word.startswith("--TagRemove"))
    command = [sys.executable, "-m", "voila", str(SOURCE), hidden, "--no-browser", "--Voila.ip=127.0.0.1"]
    command.append(f"--port={port}")
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(lab_server.CHECKOUT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_page_shows_the_views_and_no_code(browser, page_address):
    page = browser.new_page(viewport=harness.WINDOW)
    page.set_default_timeout(harness.OPENING * 1000)
    for _ in range(60):  # until the server answers
        try:
            page.goto(page_address)
            break
        except PlaywrightError:
            page.wait_for_timeout(500)
    page.wait_for_function("() => document.querySelectorAll('img.widget-image').length === 3")
    assert page.get_by_text("widgets.").count() == 0
    assert page.get_by_text("There was an error").count() == 0
    assert page.locator("img:not(.widget-image)").count() == 0, "no still picture stands before its view"
    page.get_by_role("button", name="ragged tile", exact=True).click()
    page.wait_for_function("() => [...document.images].some(i => i.title.includes('2.8125 in place of 5'))")
    page.close()
