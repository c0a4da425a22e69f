"""StepThrough and MergeTree in a real browser: stepped, scrubbed, played and merged by pointer and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import harness
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell
from view import View

pytestmark = [pytest.mark.ui, pytest.mark.slow]

STEPS, MERGE = "widgets.step_through(", "widgets.merge_tree("
CELLS = [
    new_code_cell('import fa2lab as fa\nfa.widgets.step_through(device="numpy", T=40, workgroup=4, step=2)'),
    new_markdown_cell("Below the first view."),
    new_code_cell("fa.widgets.merge_tree(cuts=(1, 2, 4), done=0)"),
    new_markdown_cell("Below the second view."),
]


@pytest.fixture
def notebook(run) -> Iterator[harness.Notebook]:
    """A notebook with the two views, run once for all tests; nothing that they do may leave a fault on it."""
    yield run("steps", CELLS)
    assert run("steps").faults() == []


@pytest.fixture
def steps(notebook) -> View:
    """The first view, after two of its five tiles."""
    view = notebook.view(STEPS)
    view.slider("tiles taken").focus()
    view.page.keyboard.press("Home")
    view.wait_for_text("before the first of its 5 K tiles")
    for _ in range(2):
        view.page.keyboard.press("ArrowRight")
    view.wait_for_text("after K tile 2 of 5")
    return view


def test_the_arrow_keys_step(steps):
    height, picture = steps.height(), steps.picture()
    steps.page.keyboard.press("ArrowRight")
    steps.wait_for_text("after K tile 3 of 5: the scores S of keys 16 to 23")
    assert steps.number_at("tiles taken") == 3 and steps.picture() != picture
    steps.page.keyboard.press("ArrowLeft")
    steps.wait_for_text("after K tile 2 of 5")
    assert steps.picture() == picture and steps.height() == height


def test_the_slider_is_reached_by_tab(steps):
    assert steps.tab_to("tiles taken") == steps.focusable_before("tiles taken")
    steps.page.keyboard.press("End")
    steps.wait_for_text("running O, 0 from the final O")


def test_of_many_moves_the_last_wins(steps):
    for key in ("End", "Home", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        steps.page.keyboard.press(key)
    steps.wait_for_text("after K tile 3 of 5")
    steps.page.wait_for_timeout(500)  # nothing older comes after it
    assert "after K tile 3 of 5" in steps.text and not steps.is_stale


def test_dragging_scrubs_and_moves_nothing_else(steps):
    height = steps.height()
    steps.drag("tiles taken", 300, steps=20)
    steps.wait_for_text("after K tile 5 of 5")
    assert steps.number_at("tiles taken") == 5 and steps.height() == height


def test_playing_goes_on_to_the_end_and_pauses(steps):
    steps.press("play")
    steps.wait_for_text("after K tile 3 of 5")
    steps.press("pause")
    steps.page.wait_for_timeout(300)
    at = steps.number_at("tiles taken")
    assert at in (3, 4)
    steps.page.wait_for_timeout(1200)
    assert steps.number_at("tiles taken") == at
    steps.press("play", by_keyboard=True)
    steps.wait_for_text("after K tile 5 of 5")
    steps.page.wait_for_timeout(1200)
    assert steps.number_at("tiles taken") == 5


def test_from_forward_to_backward_and_back(steps):
    picture, height = steps.picture(), steps.height()
    steps.choose("pass", "backward: dK")
    steps.wait_for_text("The walk for dK of keys 32 to 39")
    steps.control("key tile").wait_for()
    assert steps.height() == height
    steps.choose("pass", "forward: O")
    steps.wait_for_text("The forward walk of queries 32 to 39")
    steps.slider("tiles taken").focus()
    steps.page.keyboard.press("Home")
    for _ in range(2):
        steps.page.keyboard.press("ArrowRight")
    steps.wait_for_text("after K tile 2 of 5")
    assert steps.picture() == picture and steps.height() == height


def test_merging_by_hand(notebook):
    view = notebook.view(MERGE)
    height = view.height()
    view.press("2")
    view.wait_for_text("after 1 of 3 merges; the newest holds keys 1 to 3")
    assert view.whole.get_by_role("button", name="2", exact=True).is_disabled()
    view.press("4", by_keyboard=True)
    view.wait_for_text("the newest holds keys 1 to 5")
    view.press("1")
    view.wait_for_text("after 3 of 3 merges; the newest holds keys 0 to 5")
    view.wait_for_words("All merged, float32")
    view.press("take back")
    view.wait_for_text("after 2 of 3 merges")
    assert view.height() == height


def test_a_field_says_where_to_cut_and_what_is_wrong(notebook):
    view = notebook.view(MERGE)
    field, height = view.control("cut before").locator("input"), view.height()
    field.fill("2, x")
    field.press("Enter")
    view.wait_for_words("Keys are whole numbers")
    assert view.is_stale
    field.fill("2, 3, 5")
    field.press("Enter")
    view.wait_for_text("in 4 splits")
    view.whole.get_by_role("button", name="5", exact=True).wait_for()
    assert not view.is_stale and view.height() == height
