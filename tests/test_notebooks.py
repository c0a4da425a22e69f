"""The notebooks: executed as `./lab notebooks` does, scanned for errors wherever they hide, and their form checked."""

import ast
import base64
import importlib.util
import io
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from fa2lab import plot

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PAGES = sorted(FOLDER.glob("page/*.ipynb"))  # built as they are, but no course of cells with a question

spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

each = pytest.mark.parametrize("path", NOTEBOOKS + PAGES, ids=lambda path: path.stem)

PICTURE = "from IPython.display import Image\nImage(data=bytes.fromhex('89504e470d0a1a0a') + b'-', format='png')"


def test_there_are_notebooks():
    """An empty list of notebooks would pass everything below."""
    assert NOTEBOOKS[0].stem == "00_start_here"
    assert len(NOTEBOOKS) >= 2
    assert [path.stem for path in PAGES] == ["workbench"]


# Executed.


@pytest.mark.gpu
@pytest.mark.slow
@each
def test_runs_from_top_to_bottom_without_a_fault(path):
    executed, stopped = build.execute(build.read(path), path.parent)
    assert stopped + build.faults(executed) == []
    ran = [cell.execution_count for cell in executed.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))
    assert [number for number, static in static_figures(executed) if not static] == []


def static_figures(executed) -> list[tuple[int, bool]]:
    """The cells that show a widget, and whether a picture stands between each and the widget before.

    A widget's own cell stores nothing, so that picture is all that a reader of the file sees of it.
    """
    found, picture = [], False
    for number, cell in enumerate(executed.cells, 1):
        kinds = {kind for output in cell.get("outputs", ()) for kind in output.get("data", ())}
        picture = picture or "image/png" in kinds
        if build.WIDGET_VIEW in kinds:
            found.append((number, picture))
            picture = False
    return found


# The scan goes red. Each notebook here has exactly one thing wrong with it.

BROKEN = {
    "raises": (["1 / 0"], "cell 2 raises ZeroDivisionError: division by zero"),
    "caught by an Output widget": (
        ["import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    1 / 0\nipywidgets.VBox([out])"],
        "a widget of cell 2 raises ZeroDivisionError: division by zero",
    ),
    "caught by an Output widget that nothing shows": (
        ["import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    1 / 0"],
        "an Output widget that no cell shows raises ZeroDivisionError: division by zero",
    ),
    "swallowed by a View": (
        [
            "import ipywidgets\nfrom matplotlib.figure import Figure\nfrom fa2lab.live import View",
            "slider = ipywidgets.IntSlider(1, 0, 2)\n"
            "view = View({'n': slider}, lambda n: 1 / n, lambda f, x: str(x), Figure())\nview",
            "try:\n    view.set(n=0)\nexcept ZeroDivisionError:\n    pass",
        ],
        "a widget of cell 3 says: Not computed: division by zero",
    ),
    "stderr": (["import sys\nprint('careful', file=sys.stderr)"], "cell 2 writes to stderr: careful"),
    "a warning": (["import warnings\nwarnings.warn('old')"], "cell 2 writes to stderr"),
    "an address": (["object()"], "cell 2 shows a memory address"),
    "dies": (["import os\nos._exit(1)"], "the kernel died in cell 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sources, expected", BROKEN.values(), ids=BROKEN)
def test_the_scan_finds(sources, expected, tmp_path):
    found = _scan([PICTURE, *sources], tmp_path)
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.slow
def test_the_scan_misses_a_picture_and_only_that(tmp_path):
    assert _scan(["print('no picture')"], tmp_path) == ["no cell shows a picture"]
    assert _scan([PICTURE], tmp_path) == []


@pytest.mark.slow
def test_a_widget_without_a_static_figure_is_told(tmp_path):
    widget = "import ipywidgets\nipywidgets.IntSlider()"
    executed, _ = build.execute(_notebook([widget, PICTURE, "0", widget, widget]), tmp_path)
    assert static_figures(executed) == [(1, False), (4, True), (5, False)]


def _scan(sources, folder):
    executed, stopped = build.execute(_notebook(sources), folder)
    return stopped + build.faults(executed)


def _notebook(sources):
    return new_notebook(cells=[new_code_cell(source) for source in sources])


# What build.py writes.


@pytest.mark.slow
def test_a_build_is_the_same_twice_and_keeps_no_widget(tmp_path):
    widget = "import ipywidgets\nipywidgets.IntSlider()"
    picture = "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.subplots(figsize=(1, 1))[0]"
    path = tmp_path / "a.ipynb"
    nbformat.write(_notebook([widget, picture, "plt.close()"]), path)
    ids = [cell.id for cell in build.read(path).cells]
    build.build(path)
    first = path.read_bytes()
    build.build(path)
    assert path.read_bytes() == first
    notebook = build.read(path)
    assert [cell.id for cell in notebook.cells] == ids
    assert "widgets" not in notebook.metadata
    assert notebook.cells[0].outputs == []
    assert any("image/png" in output.get("data", ()) for output in notebook.cells[1].outputs)
    assert {kind for output in build.outputs(notebook) for kind in output.data} == {"image/png", "text/plain"}


def packed(pixels: np.ndarray) -> tuple[Image.Image, float]:
    """A picture as it is after packing, and which share of its bytes is left."""
    loose = io.BytesIO()
    Image.fromarray(pixels).save(loose, "png")
    data = {"image/png": base64.b64encode(loose.getvalue()).decode(), "text/plain": "a figure"}
    cell = new_code_cell("x", outputs=[new_output("display_data", data)])
    (output,) = build.outputs(build.pack(new_notebook(cells=[cell])))
    assert output.data["text/plain"] == "a figure"
    png = base64.b64decode(output.data["image/png"])
    return Image.open(io.BytesIO(png)), len(png) / len(loose.getvalue())


def test_a_packed_figure_looks_the_same_in_half_the_bytes():
    figure = plot.figure(6, 3)
    axes = figure.subplots(1, 3)
    for ax, cmap in zip(axes, ("viridis", "cividis", "RdBu_r"), strict=True):
        ax.imshow(np.random.default_rng(0).standard_normal((40, 40)), cmap=cmap)
        ax.set_title(f"all of {cmap}")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.array(canvas.buffer_rgba())
    picture, left = packed(pixels)
    assert picture.mode == "P" and left < 0.5
    shift = np.abs(np.array(picture.convert("RGBA")).astype(int) - pixels)
    assert shift.max() <= build.MAX_SHIFT
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255), "the page's white stays white"


@pytest.mark.parametrize(("alpha", "mode"), [(255, "RGB"), (200, "RGBA")])
def test_a_picture_of_too_many_colours_keeps_every_pixel(alpha, mode):
    """Also a see-through one."""
    noise = np.random.default_rng(0).integers(0, 255, (90, 90, 4), np.uint8)
    noise[..., 3] = 255
    noise[3, 4, 3] = alpha
    picture, _ = packed(noise)
    assert picture.mode == mode
    np.testing.assert_array_equal(picture.convert("RGBA"), noise)


@pytest.mark.slow
def test_a_faulty_notebook_is_left_alone(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.ipynb"
    nbformat.write(_notebook(["1 / 0"]), path)
    before = path.read_bytes()
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.main(["a"]) == 1
    assert path.read_bytes() == before
    said = capsys.readouterr().err
    assert said.startswith("a.ipynb: cell 1 raises ZeroDivisionError: division by zero (and 1 more)")
    assert said.count("\n") == 1


def test_an_unknown_name_is_refused(capsys):
    assert build.main(["no_such"]) == 1
    assert "there is no notebook no_such; there are 00_start_here" in capsys.readouterr().err


def test_a_notebook_too_large_is_refused(tmp_path):
    big = _notebook(["#" * build.MAX_BYTES])
    with pytest.raises(ValueError, match="more than 400,000"):
        build.write(big, tmp_path / "a.ipynb")
    assert not list(tmp_path.iterdir())


# The committed files.


@each
def test_is_built(path):
    notebook = build.read(path)
    assert build.faults(notebook) == []  # of the stored outputs
    assert path.stat().st_size <= build.MAX_BYTES
    assert path.read_text(encoding="utf-8") == nbformat.writes(build.settle(notebook)).rstrip("\n") + "\n"
    ran = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_has_the_form_of_a_notebook(path):
    cells = build.read(path).cells
    assert 20 <= len(cells) <= 60
    assert cells[0].cell_type == "markdown"
    assert "?" in cells[0].source
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    lines = [sum(bool(line.strip()) for line in source.splitlines()) for source in code]
    assert max(lines) <= 15
    assert sorted(lines)[len(lines) // 2] <= 6
    assert any(has_a_check(source) for source in code)


def has_a_check(source: str) -> bool:
    """Does the cell hold an assert or a call of .check()?"""
    tree = ast.parse(re.sub(r"^%.*$", "", source, flags=re.MULTILINE))
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr == "check")
        for node in ast.walk(tree)
    )


ELSEWHERE = re.compile(r"(?<![\w.])/(home|root|tmp|work|usr|opt|Users|mnt|var)/|\b[A-Za-z]:\\")
INSTALLS = re.compile(r"\b(pip|conda|mamba|uv|apt|apt-get)\s+install\b|^\s*(!|%%?(pip|conda|bash|sh)\b)", re.MULTILINE)


@each
def test_neither_installs_nor_names_places_of_one_machine(path):
    notebook = build.read(path)
    for cell in notebook.cells:
        assert not ELSEWHERE.search(cell.source)
        if cell.cell_type == "code":
            assert not INSTALLS.search(cell.source)
    for output in build.outputs(notebook):
        texts = [output.text] if "text" in output else [str(d) for k, d in output.data.items() if k != "image/png"]
        assert not any(ELSEWHERE.search(text) for text in texts)


@pytest.mark.parametrize("text", ["open('/home/a/b')", "C:\\data", "see /tmp/x"])
def test_a_place_of_one_machine_is_told(text):
    assert ELSEWHERE.search(text)


@pytest.mark.parametrize("text", ["!ls", "%pip install x", "pip install x", "x\n !pip install x"])
def test_an_install_is_told(text):
    assert INSTALLS.search(text)


def test_an_output_of_the_scan_is_read_in_full():
    """Stored outputs are judged by the same scan: stderr and an error count without running anything."""
    cell = new_code_cell("x", outputs=[new_output("stream", name="stderr", text="a\nlast\n")])
    assert build.faults(new_notebook(cells=[cell])) == ["cell 1 writes to stderr: last", "no cell shows a picture"]
