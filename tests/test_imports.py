"""What a module loads, and what it must not: each imported in a fresh interpreter state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "fa2lab").rglob("*.py")
    if path.name != "__main__.py"
)
GPU, PLOT, WIDGETS = {"wgpu", "wgpudawn"}, {"matplotlib"}, {"ipywidgets", "IPython"}
# What some calls need, and `import fa2lab` would take longer for: a progress bar, files, tests, a folder for Vulkan.
AT_FIRST_USE = {"tqdm", "safetensors", "hypothesis", "pytest", "cffi", "tempfile", "fa2lab.data", "fa2lab.bench"}

# One process a module would take half a minute. This one forks a child a module, each with nothing of fa2lab loaded;
# the package's own __init__ is stood in for by an empty one, since it loads most of the house by design.
CHILD = """
import importlib, json, os, sys, types
root, names = sys.argv[1], sys.argv[2:]
found = {}
for name in names:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        sys.path.insert(0, root)
        if name != "fa2lab":
            package = types.ModuleType("fa2lab")
            package.__path__ = [os.path.join(root, "fa2lab")]
            sys.modules["fa2lab"] = package
        before = set(sys.modules)
        try:
            importlib.import_module(name)
            loaded = sorted(set(sys.modules) - before)
        except Exception as error:
            loaded = {"error": repr(error)}
        with os.fdopen(write, "w") as pipe:
            json.dump(loaded, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found[name] = json.load(pipe)
    os.waitpid(pid, 0)
print(json.dumps(found))
"""


def loaded_by(names: list[str], root: Path = ROOT) -> dict[str, set[str]]:
    """By module: the names of all modules that importing it brought in, top-level packages by themselves as well."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(root), *names],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for name, modules in found.items():
        assert isinstance(modules, list), f"{name} does not import: {modules}"
    return {name: set(modules) | {module.split(".")[0] for module in modules} for name, modules in found.items()}


@cache
def loaded() -> dict[str, set[str]]:
    return loaded_by(MODULES)


def rooms(name: str) -> set[str]:
    """The fa2lab modules that a module loads, itself and its own package's parts left out."""
    own = (name, f"{name}.")
    return {m for m in loaded()[name] if m.startswith("fa2lab.") and m != own[0] and not m.startswith(own[1])}


REFERENCE = [name for name in MODULES if name.startswith("fa2lab.reference")]
TYPES = {"fa2lab.errors", "fa2lab.results"}


@pytest.mark.parametrize("name", ["fa2lab.problem", *REFERENCE])
def test_the_mathematics_needs_numpy_only(name):
    assert not loaded()[name] & (GPU | PLOT | WIDGETS)
    outside = {m for m in loaded()[name] if m not in sys.stdlib_module_names and "." not in m} - {"numpy", "fa2lab"}
    assert {m for m in outside if not m.startswith("_")} == set()
    assert {m for m in rooms(name) if not m.startswith("fa2lab.reference")} <= TYPES | {"fa2lab.problem"}


@pytest.mark.parametrize(
    "name", ["source", "kernels", "plan", "limits", "results", "errors", "diagnostics", "data", "parity"]
)
def test_what_only_reckons_loads_no_gpu(name):
    assert not loaded()[f"fa2lab.{name}"] & (GPU | PLOT | WIDGETS)
    assert not rooms(f"fa2lab.{name}") & {"fa2lab.gpu", "fa2lab.attention"}


def test_the_gpu_knows_nothing_of_attention():
    under = {"adapter", "limits", "errors", "diagnostics", "source", "unroll"}
    parts = {"buffers", "pieces", "pipelines", "trusted"}
    assert rooms("fa2lab.gpu") <= {f"fa2lab.{name}" for name in under | parts}


def test_the_gpu_loads_its_driver_at_first_use_only():
    assert not loaded()["fa2lab.gpu"] & GPU


PLOTS = [name for name in MODULES if name.startswith("fa2lab.plot")]


@pytest.mark.parametrize("name", PLOTS)
def test_plot_takes_arrays_and_types(name):
    assert {m for m in rooms(name) if not m.startswith("fa2lab.plot")} <= TYPES
    assert not loaded()[name] & (GPU | WIDGETS)


# Widgets stand at the end of the house: what lies under them, and `doctor`, never loads them.
@pytest.mark.parametrize("name", [m for m in MODULES if not m.startswith(("fa2lab.widgets", "fa2lab.live"))])
def test_nothing_imports_widgets(name):
    assert not any(m.startswith(("fa2lab.widgets", "fa2lab.live")) for m in loaded()[name])
    assert not loaded()[name] & WIDGETS


def test_importing_the_library_is_light():
    assert not loaded()["fa2lab"] & (GPU | PLOT | WIDGETS | AT_FIRST_USE)
    assert {"fa2lab.attention", "fa2lab.reference", "numpy"} <= loaded()["fa2lab"]


def test_each_public_name_is_there():
    import fa2lab as fa

    for name in fa.__all__:
        assert getattr(fa, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'transformer'"):
        _ = fa.transformer


def test_the_control_a_house_that_breaks_these_rules_is_seen(tmp_path):
    """The same measurement on a package whose reference loads a GPU library and whose plot loads the widgets."""
    house = tmp_path / "fa2lab"
    house.mkdir()
    (tmp_path / "wgpu.py").touch()
    (tmp_path / "ipywidgets.py").touch()
    (house / "__init__.py").write_text("import fa2lab.reference\n")
    (house / "reference.py").write_text("import wgpu\n")
    (house / "widgets.py").write_text("import ipywidgets\n")
    (house / "plot.py").write_text("from fa2lab import widgets\n")
    (house / "limits.py").write_text("import math\n")
    (house / "pieces.py").write_text("import tqdm, tempfile\n")
    names = ["fa2lab", "fa2lab.reference", "fa2lab.plot", "fa2lab.limits", "fa2lab.pieces"]
    (tmp_path / "tqdm.py").touch()
    seen = loaded_by(names, tmp_path)
    assert {"tqdm", "tempfile"} <= seen["fa2lab.pieces"] & AT_FIRST_USE
    assert "wgpu" in seen["fa2lab.reference"] and "wgpu" in seen["fa2lab"]
    assert {"fa2lab.widgets", "ipywidgets"} <= seen["fa2lab.plot"]
    assert not seen["fa2lab.limits"] & (GPU | WIDGETS | {"fa2lab.widgets"})
