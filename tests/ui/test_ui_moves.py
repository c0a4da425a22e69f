"""How every view behaves under a hand, in a real browser: the last move wins, one run at a time, errors recover."""

from __future__ import annotations

import re

import harness
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell
from view import View

pytestmark = [pytest.mark.ui, pytest.mark.slow]

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
COUNTING, BROWSER_LIMITS = "View({", 'limits="webgpu"'  # cells of the probe


@pytest.fixture
def probe(run) -> harness.Notebook:
    """The notebook for these tests, run once."""
    return run("probe", PROBE)


@pytest.fixture
def counting(probe) -> View:
    """The probe's slow view, fresh: it has computed once, for 1."""
    probe.run_cell(probe.cell_with(COUNTING))
    view = probe.view(COUNTING)
    assert view.wait_for_text("n is 1;") == "n is 1; computed 1 times, at most 1 at once"
    return view


def test_the_scan_for_errors_goes_red(probe):
    """An error on the console, a broken widget and an error output are each told."""
    assert probe.faults() == []
    probe.page.evaluate("() => { console.error('red') }")
    assert [fault.split(" ")[0] for fault in probe.faults()] == ["red"]
    probe.complaints.clear()
    probe.page.evaluate("() => { document.body.append(document.createElement('p')) }")
    probe.page.evaluate("() => { document.body.lastChild.innerText = '[Click to show javascript error.]' }")
    assert probe.faults() == ["[Click to show javascript error.]"]
    probe.page.evaluate("() => { document.body.lastChild.remove() }")
    outputs = "window.jupyterapp.shell.currentWidget.content.widgets[0].model.outputs"
    error = "{output_type: 'error', ename: 'ValueError', evalue: 'no', traceback: []}"
    probe.page.evaluate(f"() => {{ {outputs}.add({error}) }}")
    assert probe.faults() == ["cell 0: ValueError no"]
    probe.page.evaluate(f"() => {{ {outputs}.clear() }}")
    assert probe.faults() == []


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


def test_running_the_cell_again_does_not_double_anything(probe, counting):
    probe.run_cell(counting.number)
    view = probe.view(COUNTING)
    view.wait_for_text("n is 1; computed 1 times")
    assert view.image.count() == 1
    view.slider("number").focus()
    view.page.keyboard.press("ArrowRight")
    assert view.wait_for_text("n is 2;") == "n is 2; computed 2 times, at most 1 at once"
    view.page.wait_for_timeout(500)
    assert view.text == "n is 2; computed 2 times, at most 1 at once"


@pytest.mark.gpu
def test_a_refused_value_says_why_and_the_next_good_one_recovers(probe):
    view = probe.view(BROWSER_LIMITS)
    picture, height = view.picture(), view.height()
    view.choose("tile", "16×16")
    view.wait_for_words("needs 24,576 B of workgroup memory")
    assert view.is_stale
    assert view.picture() == picture
    assert view.height() == height
    assert view.unreadable() == {}
    view.choose("tile", "8×8")
    view.wait_for_text("Attention weights")
    assert not view.is_stale
    assert view.whole.get_by_role("alert").count() == 0
    assert view.picture() != picture
    assert view.height() == height
    assert probe.faults() == []


@pytest.mark.gpu
def test_a_refusal_is_readable_in_the_dark(probe):
    view = probe.view(BROWSER_LIMITS)
    probe.set_theme("JupyterLab Dark", light=False)
    try:
        view.choose("tile", "16×16")
        view.wait_for_words("Not computed")
        assert view.unreadable() == {}
    finally:
        probe.set_theme("JupyterLab Light", light=True)


# What the tests of all views look for is found where it is.


def test_words_of_the_background_s_colour_are_told(counting):
    assert counting.unreadable() == {}
    counting.whole.evaluate("view => { view.style.backgroundColor = 'rgb(40, 40, 40)' }")
    assert "number" in counting.unreadable()


def test_a_control_without_a_label_is_told(counting):
    assert counting.unlabelled() == []
    counting.slider("number").evaluate("handle => { handle.removeAttribute('aria-label') }")
    counting.image.evaluate("image => { image.removeAttribute('alt') }")
    assert [control.split(" ")[0] for control in counting.unlabelled()] == ["<div", "<img"]
    counting.whole.evaluate("view => { view.append(document.createElement('select')) }")  # so all are named anew
    assert counting.unlabelled() == ["<select></select>"]
