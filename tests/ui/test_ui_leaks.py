"""A thousand moves by keyboard in a real browser: each is seen, none leaves a figure, an artist or a device buffer."""

from __future__ import annotations

import json

import harness
import pytest
from nbformat.v4 import new_code_cell

pytestmark = [pytest.mark.ui, pytest.mark.slow, pytest.mark.gpu]

# A view, the slider that is moved, how often, and whether the kernel runs at each move.
MOVES = [
    ('views["steps"]', "tiles taken", 800, False),
    ('views["heads"]', "query", 60, False),
    ('views["merges"]', "merges", 80, False),
    ('views["bench"]', "T length", 20, True),
    ('views["heads"]', "T length", 20, True),
    ('views["tiles"]', "T length", 20, True),
]
CELLS = [
    new_code_cell("""import gc, json
import fa2lab as fa
from fa2lab import widgets
from matplotlib.figure import Figure

device, pictures = fa.default_device(), []
views = {
    "steps": widgets.step_through(T=24, tile=(4, 4), workgroup=5, step=2),
    "bench": widgets.parity(T=8, H=1, hd=4),
    "heads": widgets.head_gallery(T=8, H=1, D=4, head=0, row=7, key=7),
    "tiles": widgets.tiles(T=8, H=1, D=4, row=7),
    "merges": widgets.merge_tree(done=1),
}
for view in views.values():
    view.image.observe(lambda _: (pictures.append(device.memory.peak_bytes), device.memory.reset_peak()), "value")"""),
    new_code_cell("""gc.collect()
figures = sum(issubclass(type(thing), Figure) for thing in gc.get_objects())
artists = [len(view._canvas.figure.findobj()) for view in views.values()]
memory = device.memory
runs = sum(peak > 0 for peak in pictures)  # pictures since whose predecessor the device held something
print(json.dumps([len(pictures), runs, figures, artists, memory.live_buffers, memory.live_bytes]))"""),
    *map(new_code_cell, dict.fromkeys(source for source, *_ in MOVES)),
]


def standing(notebook: harness.Notebook) -> list:
    """Pictures so far, and those that a kernel ran for; figures, artists a view, buffers on the device, their bytes."""
    number = notebook.cell_with("gc.collect()")
    notebook.run_cell(number)
    return json.loads(notebook.cell(number).locator(".jp-OutputArea-output pre").inner_text())


def test_a_thousand_moves_leave_nothing_behind(run):
    notebook = run("leaks", CELLS)
    for source, slider, *_ in MOVES:  # what is made once is made
        view = notebook.view(source)
        view.slider(slider).focus()
        for key in ("ArrowLeft", "ArrowRight"):
            view.move(key)
    before = standing(notebook)
    for source, slider, times, _ in MOVES:
        view = notebook.view(source)
        view.slider(slider).focus()
        for _ in range(times // 2):
            view.move("ArrowLeft")
            view.move("ArrowRight")
    after = standing(notebook)
    assert after[0] - before[0] == sum(times for *_, times, _ in MOVES) == 1000
    assert after[1] - before[1] == sum(times for *_, times, runs in MOVES if runs)
    assert after[2:] == before[2:]
    assert after[4:] == [0, 0]
    assert notebook.faults() == []
