"""Every notebook in a real browser: run from top to bottom, its views moved by hand, read in the dark, opened again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from view import View

pytestmark = [pytest.mark.ui, pytest.mark.slow]

# How many views each notebook shows.
NOTEBOOKS = {
    "00_start_here": 0,
    "01_online_softmax": 3,
    "02_tiles_and_traces": 2,
    "03_parity": 2,
    "04_backward": 1,
    "05_training_gate": 3,
    "06_speed": 1,
}
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)
each_with_views = pytest.mark.parametrize("name", [name for name, views in NOTEBOOKS.items() if views])


@dataclass(frozen=True)
class Hand:
    """A view, a slider of it, and what the picture's alternative text holds at a value of it."""

    notebook: str
    cell: str  # part of its source
    slider: str
    says: str
    pixels: int = -40  # how far it is dragged

    def view(self, run) -> View:
        return run(self.notebook).view(self.cell)


HANDS = {
    "online softmax": Hand("01_online_softmax", 'online_softmax(row="six', "blocks taken in", "after {} blocks"),
    "merge tree": Hand("01_online_softmax", "widgets.merge_tree(", "merges", "after {} of"),
    "forward steps": Hand("02_tiles_and_traces", "widgets.step_through(", "tiles taken", "after K tile {} of 4"),
    "tiles": Hand("02_tiles_and_traces", "widgets.tiles()", "row", "alpha of row {} over"),
    "parity": Hand("03_parity", "widgets.parity()", "H heads", " H={} "),
    "backward steps": Hand("04_backward", "widgets.step_through(", "tiles taken", "after K tile {} of 4"),
    "head gallery": Hand("05_training_gate", "widgets.head_gallery()", "query", "Query {} gives key"),
    "tile speed": Hand("06_speed", "widgets_speed.tiles(", "Br queries", "A tile of {}×"),
}
each_hand = pytest.mark.parametrize("hand", HANDS.values(), ids=HANDS)


def views(run, name: str) -> list[View]:
    """Every view of the notebook, top to bottom."""
    notebook = run(name)
    found = [View(notebook, number) for number in notebook.cells_with_views()]
    assert len(found) == NOTEBOOKS[name]
    return found


# Run all.


@each_notebook
def test_run_all_leaves_no_error_and_every_picture(run, name):
    notebook = run(name)
    assert notebook.faults() == []
    assert notebook.count_pictures() > 0
    notebook.wait_for_pictures(notebook.count_pictures())


@each_with_views
def test_every_view_shows_a_picture_with_a_text_for_those_who_cannot_see_it(run, name):
    for view in views(run, name):
        assert view.image.count() == 1
        assert view.picture().startswith("data:image/png")
        assert len(view.text) > 40
        assert not view.is_stale


@each_with_views
def test_every_control_has_a_name(run, name):
    for view in views(run, name):
        assert view.unlabelled() == []


# By hand.


@each_hand
def test_dragging_a_slider_moves_the_picture_and_nothing_else(run, hand):
    view = hand.view(run)
    before, picture, height = view.number_at(hand.slider), view.picture(), view.height()
    assert hand.says.format(before) in view.text
    view.drag(hand.slider, hand.pixels)
    after = view.number_at(hand.slider)
    assert after < before
    assert view.height() == height
    view.wait_for_text(hand.says.format(after))
    assert view.picture() != picture
    assert view.height() == height
    assert view.notebook.faults() == []


@each_hand
def test_the_keyboard_alone_is_enough(run, hand):
    view = hand.view(run)
    assert view.tab_to(hand.slider) == view.focusable_before(hand.slider)
    numbers = []
    for key in ("End", "ArrowLeft", "ArrowRight"):
        view.page.keyboard.press(key)
        numbers.append(view.number_at(hand.slider))
        view.wait_for_text(hand.says.format(numbers[-1]))
    assert numbers[0] == numbers[2] > numbers[1]


def test_a_typed_sentence_is_read_by_the_heads(run):
    view = run("05_training_gate").view("widgets_training.sentence()")
    field, picture, height = view.whole.get_by_role("textbox"), view.picture(), view.height()
    field.fill("tile by tile")
    field.press("Enter")
    view.wait_for_words("12 of at most 32 bytes")
    assert view.picture() != picture and view.height() == height
    field.fill("")
    field.press("Enter")
    view.wait_for_words("There is no text")
    assert view.is_stale and view.height() == height
    field.fill("to be")
    field.press("Enter")
    view.wait_for_words("5 of at most 32 bytes")
    assert not view.is_stale


# By eye.


@each_with_views
def test_both_themes_are_readable(run, name):
    notebook, found = run(name), views(run, name)
    light, pictures = found[0].background(), [view.picture() for view in found]
    assert [view.unreadable() for view in found] == [{}] * len(found)
    notebook.set_theme("JupyterLab Dark", light=False)
    try:
        assert sum(found[0].background()) < sum(light) / 2
        assert [view.unreadable() for view in found] == [{}] * len(found)
        assert [view.picture() for view in found] == pictures, "white, and not shining through"
    finally:
        notebook.set_theme("JupyterLab Light", light=True)


# Later. These come last: the kernel is another one afterwards.


@each_notebook
def test_reload_and_restart_leave_the_pictures(run, name):
    notebook = run(name)
    shown = notebook.count_pictures()
    assert shown > 0
    notebook.save()
    notebook.load()
    notebook.wait_for_pictures(shown)
    for hand in HANDS.values():  # the kernel lives, so its views come back
        if hand.notebook == name:
            view = hand.view(run)
            view.slider(hand.slider).focus()
            view.page.keyboard.press("End")
            view.wait_for_text(hand.says.format(view.number_at(hand.slider)))
    notebook.restart()
    notebook.load()
    notebook.wait_for_pictures(shown)
