"""The notebooks in a real browser: what a hand at the sliders, a keyboard and a reader's eyes find there."""

from __future__ import annotations

import re

import harness
import pytest
from view import View

pytestmark = [pytest.mark.ui, pytest.mark.slow]

SOFTMAX, TILES, PROBE = "01_online_softmax", "02_tiles_and_traces", "probe"

# A view of each notebook: its cell, a slider, what the picture's text says at a value of it, and the number of views.
VIEWS = {
    SOFTMAX: ('online_softmax(row="six numbers"', "blocks taken in", "after {} blocks", 3),
    TILES: ("widgets.tiles()", "row", "alpha of row {} over", 1),
}
COUNTING, BROWSER_LIMITS = "View({", 'limits="webgpu"'  # cells of the probe

each_notebook = pytest.mark.parametrize("name", VIEWS)
READABLE = 4.5  # the contrast that WCAG 2 asks of text


@pytest.fixture
def counting(run) -> View:
    """The probe's slow view, fresh: it has computed once, for 1."""
    notebook = run(PROBE)
    notebook.run_cell(notebook.cell_with(COUNTING))
    view = notebook.view(COUNTING)
    assert view.wait_for_text("n is 1;") == "n is 1; computed 1 times, at most 1 at once"
    return view


# Run all.


@each_notebook
def test_run_all_leaves_no_error_anywhere(run, name):
    notebook = run(name)
    assert notebook.faults() == []
    assert notebook.count_pictures() > 0
    notebook.wait_for_pictures(notebook.count_pictures())


def test_the_scan_for_errors_goes_red(run):
    """An error on the console, a broken widget and an error output are each told."""
    notebook = run(PROBE)
    assert notebook.faults() == []
    notebook.page.evaluate("() => { console.error('red') }")
    assert [fault.split(" ")[0] for fault in notebook.faults()] == ["red"]
    notebook.complaints.clear()
    notebook.page.evaluate("() => { document.body.append(document.createElement('p')) }")
    notebook.page.evaluate("() => { document.body.lastChild.innerText = '[Click to show javascript error.]' }")
    assert notebook.faults() == ["[Click to show javascript error.]"]
    notebook.page.evaluate("() => { document.body.lastChild.remove() }")
    outputs = "window.jupyterapp.shell.currentWidget.content.widgets[0].model.outputs"
    error = "{output_type: 'error', ename: 'ValueError', evalue: 'no', traceback: []}"
    notebook.page.evaluate(f"() => {{ {outputs}.add({error}) }}")
    assert notebook.faults() == ["cell 0: ValueError no"]
    notebook.page.evaluate(f"() => {{ {outputs}.clear() }}")
    assert notebook.faults() == []


@each_notebook
def test_every_view_shows_its_picture(run, name):
    notebook, (source, *_, n_views) = run(name), VIEWS[name]
    assert notebook.page.locator("img.widget-image").count() == n_views
    view = notebook.view(source)
    assert view.image.count() == 1
    assert view.picture().startswith("data:image/png")
    assert len(view.text) > 40


@each_notebook
def test_every_control_has_a_label_and_a_hint(run, name):
    view = run(name).view(VIEWS[name][0])
    sliders = view.whole.get_by_role("slider").all()
    assert sliders
    for slider in sliders:  # ipywidgets gives the handle no name of its own; the words before it are all there is
        label = slider.locator("xpath=ancestor::*[contains(@class, 'widget-slider')]").locator("label")
        assert label.is_visible()
        assert label.inner_text().strip()
        assert label.get_attribute("title") not in (None, "", "null")
    for role in ("combobox", "checkbox"):
        for control in view.whole.get_by_role(role).all():
            name = control.evaluate("control => [...control.labels].map(label => label.innerText).join('').trim()")
            assert re.search(r"\w{3}", name)


# By hand.


@each_notebook
def test_dragging_a_slider_moves_the_picture_and_nothing_else(run, name):
    notebook, (source, slider, says, _) = run(name), VIEWS[name]
    view = notebook.view(source)
    before, picture, height = view.number_at(slider), view.picture(), view.height()
    assert says.format(before) in view.text
    view.drag(slider, -40)
    after = view.number_at(slider)
    assert after < before
    assert view.height() == height
    view.wait_for_text(says.format(after))
    assert view.picture() != picture
    assert view.height() == height
    assert notebook.faults() == []


@each_notebook
def test_the_keyboard_alone_is_enough(run, name):
    notebook, (source, slider, says, _) = run(name), VIEWS[name]
    view = notebook.view(source)
    before = view.number_at(slider)
    reached = view.tab_to(slider)
    assert reached == view.focusable_before(slider)
    notebook.page.keyboard.press("ArrowLeft")
    view.wait_for_text(says.format(before - 1))
    assert view.number_at(slider) == before - 1
    notebook.page.keyboard.press("ArrowRight")
    view.wait_for_text(says.format(before))


def test_of_two_moves_in_a_row_the_last_wins(counting):
    counting.slider("number").focus()
    for _ in range(2):
        counting.page.keyboard.press("ArrowRight")
    counting.wait_for_text("n is 3;")
    assert counting.number_at("number") == 3
    counting.page.wait_for_timeout(500)  # longer than a computation: nothing older comes after it
    assert counting.text.startswith("n is 3;")


def test_a_flood_of_moves_computes_one_at_a_time_and_skips(counting):
    height = counting.height()
    counting.drag("number", 80, steps=40)
    n = counting.number_at("number")
    assert counting.is_stale
    text = counting.wait_for_text(f"n is {n};")
    computed, at_once = re.search(r"computed (\d+) times, at most (\d+) at once", text).groups()
    assert int(at_once) == 1
    assert 2 <= int(computed) < n / 2
    assert not counting.is_stale
    assert counting.height() == height


def test_running_the_cell_again_does_not_double_anything(run, counting):
    run(PROBE).run_cell(counting.number)
    view = run(PROBE).view(COUNTING)
    view.wait_for_text("n is 1; computed 1 times")
    assert view.image.count() == 1
    view.slider("number").focus()
    view.page.keyboard.press("ArrowRight")
    assert view.wait_for_text("n is 2;") == "n is 2; computed 2 times, at most 1 at once"
    view.page.wait_for_timeout(500)
    assert view.text == "n is 2; computed 2 times, at most 1 at once"


@pytest.mark.gpu
def test_a_refused_value_says_why_and_the_next_good_one_recovers(run):
    view = run(PROBE).view(BROWSER_LIMITS)
    picture, height = view.picture(), view.height()
    view.choose("tile", "16×16")
    view.wait_for_words("needs 24,576 B of workgroup memory")
    assert view.is_stale
    assert view.picture() == picture
    assert view.height() == height
    assert min(view.contrasts().values()) >= READABLE
    view.choose("tile", "8×8")
    view.wait_for_text("Attention weights")
    assert not view.is_stale
    assert view.whole.get_by_role("alert").count() == 0
    assert view.picture() != picture
    assert view.height() == height
    assert run(PROBE).faults() == []


# By eye.


@pytest.fixture
def dark(run):
    """Opens a notebook as `run` does, in the dark theme."""
    darkened = []

    def opened(name: str) -> harness.Notebook:
        darkened.append(run(name))
        darkened[-1].set_theme("JupyterLab Dark", light=False)
        return darkened[-1]

    yield opened
    for notebook in darkened:
        notebook.set_theme("JupyterLab Light", light=True)


@each_notebook
def test_the_dark_theme_is_readable(run, dark, name):
    source = VIEWS[name][0]
    view = run(name).view(source)
    light, picture = view.page.screenshot(), view.picture()
    assert min(view.contrasts().values()) >= READABLE
    view = dark(name).view(source)
    assert view.page.screenshot() != light
    assert view.picture() == picture
    assert {text: ratio for text, ratio in view.contrasts().items() if ratio < READABLE} == {}


@pytest.mark.gpu
def test_a_refusal_is_readable_in_the_dark(dark):
    view = dark(PROBE).view(BROWSER_LIMITS)
    view.choose("tile", "16×16")
    view.wait_for_words("Not computed")
    assert {text: ratio for text, ratio in view.contrasts().items() if ratio < READABLE} == {}


def test_words_of_the_background_s_colour_are_told(counting):
    assert min(counting.contrasts().values()) >= READABLE
    counting.whole.evaluate("view => { view.style.backgroundColor = 'rgb(40, 40, 40)' }")
    assert counting.contrasts()["number"] < READABLE


# Later.


def test_reload_and_restart_leave_the_pictures(run):
    notebook = run(SOFTMAX)
    shown = notebook.count_pictures()
    assert shown > 0
    notebook.save()
    notebook.load()
    notebook.wait_for_pictures(shown)
    view = notebook.view(VIEWS[SOFTMAX][0])  # the kernel lives, so its views come back
    view.slider("blocks taken in").focus()
    notebook.page.keyboard.press("End")
    view.wait_for_text("6 of 6 scores seen")
    notebook.restart()
    notebook.load()
    notebook.wait_for_pictures(shown)
