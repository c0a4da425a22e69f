"""Runs the notebooks and stores what they show: `./lab notebooks [NAME ...]`, all of them by default.

Each notebook runs in a fresh kernel of this interpreter, in its own folder. What is stored is the same for every run on
one machine: PNG pictures, no widget state (a widget's static twin stands before it) and no times. Nothing is written
where a notebook has a fault; the tests look for the same ones.
"""

from __future__ import annotations

import base64
import copy
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import matplotlib.font_manager  # noqa: F401 - makes the font cache now; a kernel that had to would say so on stderr
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image, ImageChops

HERE = Path(__file__).parent
MAX_BYTES = 400_000
MAX_SHIFT = 8  # of 255, of a channel of a stored picture's pixel: a colour map's faintest tints stay
SECONDS_PER_CELL = 300
PNG = "image/png"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
NOT_COMPUTED = "Not computed:"  # how a fa2lab View says that its callback failed
# A bare repr. It changes from run to run, and tells a reader nothing.
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")


class ThisInterpreter(AsyncKernelManager):
    """Starts the kernel in the interpreter that runs this file, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """The command line of the kernel."""
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=command, language="python")


def read(path: Path) -> NotebookNode:
    """The notebook in `path`, its cells with ids."""
    return nbformat.read(path, as_version=4)


def execute(notebook: NotebookNode, folder: Path) -> tuple[NotebookNode, list[str]]:
    """An executed copy of `notebook`, widget state included, and what stopped it: at most one sentence.

    `folder` is the working directory. A cell that raises is no exception here, but a fault: see `faults`.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata.pop("widgets", None)
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisInterpreter,
        resources={"metadata": {"path": str(folder)}},
        timeout=SECONDS_PER_CELL,
        record_timing=False,
        coalesce_streams=True,
    )
    # Left to itself, the kernel shows figures in the notebook.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    environment["TQDM_DISABLE"] = "1"  # a progress bar on a slow machine is no part of the page
    with tempfile.TemporaryDirectory() as profile:  # a user's own start-up files and settings stay out
        try:
            client.execute(env=environment | {"IPYTHONDIR": profile})
        except CellExecutionError:
            pass  # its error output says all
        except CellTimeoutError:
            return notebook, [f"{_place(notebook, client.code_cells_executed)} took longer than {SECONDS_PER_CELL} s"]
        except DeadKernelError:
            return notebook, [f"the kernel died in {_place(notebook, client.code_cells_executed)}"]
    return notebook, []


def faults(notebook: NotebookNode) -> list[str]:
    """What is wrong with an executed notebook, in words that name the cell: an empty list where nothing is.

    Errors count wherever they stand: in a cell's outputs, in what an Output widget caught, in a View's line of words.
    So do anything on stderr, outputs that differ at every run, and a notebook without a picture.
    """
    found = []
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", ()):
            found += (f"cell {number} {what}" for what in _faults_of(output))
    found += _hidden_faults(notebook)
    if not any(PNG in output.get("data", ()) for output in outputs(notebook)):
        found.append("no cell shows a picture")
    return found


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    """Every output of every cell."""
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def _faults_of(output: dict) -> Iterator[str]:
    kind = output["output_type"]
    if kind == "error":
        yield f"raises {output['ename']}: {output['evalue'].splitlines()[0] if output['evalue'] else ''}"
    elif kind == "stream":
        if output["name"] == "stderr":
            yield f"writes to stderr: {output['text'].strip().splitlines()[-1]}"
        yield from _faults_of_text(output["text"])
    else:
        for kind, data in output["data"].items():
            if kind.startswith("text/"):
                yield from _faults_of_text(data)


def _faults_of_text(text: str) -> Iterator[str]:
    if NOT_COMPUTED in text:
        yield f"says: {re.sub('<[^>]*>', '', text)}"
    if ADDRESS.search(text):
        yield f"shows a memory address: {ADDRESS.search(text).string.strip().splitlines()[0]}"


def _hidden_faults(notebook: NotebookNode) -> list[str]:
    """The faults in the state of the notebook's widgets."""
    models = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    found = []
    for model_id, model in models.items():
        state = model["state"]
        inner = [what for output in state.get("outputs", ()) for what in _faults_of(output)]
        if isinstance(state.get("value"), str):
            inner += _faults_of_text(state["value"])
        found += (f"{_owner(notebook, models, model_id)} {what}" for what in inner)
    return found


def _owner(notebook: NotebookNode, models: dict, model_id: str) -> str:
    """The cell that shows the widget, or what the widget is where none does."""
    for number, cell in enumerate(notebook.cells, 1):
        shown = [
            o["data"][WIDGET_VIEW]["model_id"] for o in cell.get("outputs", ()) if WIDGET_VIEW in o.get("data", ())
        ]
        if any(model_id in _within(models, root) for root in shown):
            return f"a widget of cell {number}"
    kind = models[model_id]["model_name"].removesuffix("Model")
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind} widget that no cell shows"


def _within(models: dict, root: str) -> set[str]:
    """The widget and all that it holds."""
    reached, waiting = set(), [root]
    while waiting:
        model_id = waiting.pop()
        if model_id in models and model_id not in reached:
            reached.add(model_id)
            waiting += re.findall(r"IPY_MODEL_(\w+)", str(models[model_id]["state"]))
    return reached


def _place(notebook: NotebookNode, code_cells: int) -> str:
    """The code cell that ran last, by its number among all cells."""
    code = [number for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    return f"cell {code[max(code_cells, 1) - 1]}"


def settle(notebook: NotebookNode) -> NotebookNode:
    """A copy with what is worth keeping: no widget state or views, no picture but PNG, nothing that varies by run."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k == "tags"})
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _settled(output))]
    return notebook


def _settled(output: NotebookNode) -> NotebookNode | None:
    if "data" not in output:
        return output
    if WIDGET_VIEW in output.data:
        return None
    output.metadata = NotebookNode()
    output.data = NotebookNode(
        {kind: data for kind, data in output.data.items() if kind == PNG or kind.startswith("text/")}
    )
    return output


def pack(notebook: NotebookNode) -> NotebookNode:
    """A copy whose pictures are `packed`."""
    notebook = copy.deepcopy(notebook)
    for output in outputs(notebook):
        if PNG in output.get("data", ()):
            output.data[PNG] = base64.b64encode(packed(base64.b64decode(output.data[PNG]))).decode()
    return notebook


def packed(png: bytes) -> bytes:
    """A PNG in fewer bytes: with a palette, if that moves no pixel's colour by more than `MAX_SHIFT`.

    Else it keeps all its colours. An alpha channel goes where it is 1 everywhere.
    """
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema() == (255, 255):
        picture = picture.convert("RGB")
    if picture.mode == "RGB":
        few = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        shifts = ImageChops.difference(picture, few.convert("RGB")).getextrema()
        if max(most for _, most in shifts) <= MAX_SHIFT:
            picture = few
    fewer = io.BytesIO()
    picture.save(fewer, "png", optimize=True)
    return fewer.getvalue()


def write(notebook: NotebookNode, path: Path) -> None:
    """Store the notebook as `path`, in one go."""
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"its file would have {len(text.encode()):,} bytes, more than {MAX_BYTES:,}")
    nbformat.validate(notebook)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def build(path: Path) -> None:
    """Run one notebook and store it with its outputs. Raises `ValueError` that says what is wrong with it."""
    notebook, stopped = execute(read(path), path.parent)
    wrong = stopped + faults(notebook)
    if wrong:
        rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(f"{wrong[0]}{rest}")
    write(pack(settle(notebook)), path)


def find(names: list[str]) -> list[Path]:
    """The notebooks of these names, with or without folder and suffix, or all of them. Raises `ValueError`."""
    every = {path.stem: path for path in (*sorted(HERE.glob("*.ipynb")), *sorted(HERE.glob("page/*.ipynb")))}
    wanted = [Path(name).name.removesuffix(".ipynb") for name in names]
    for name in wanted:
        if name not in every:
            raise ValueError(f"there is no notebook {name}; there are {', '.join(every)}")
    return [every[name] for name in wanted or every]


def main(names: list[str]) -> int:
    """Build in name order, stop at the first fault. The exit status."""
    try:
        paths = find(names)
    except ValueError as error:
        print(f"notebooks: {error}.", file=sys.stderr)
        return 1
    for path in paths:
        try:
            build(path)
        except ValueError as error:
            print(f"{path.name}: {error}.", file=sys.stderr)
            return 1
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
