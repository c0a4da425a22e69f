"""The rule that a skipped GPU test is no pass, tried on small sessions in processes of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest

HERE = Path(__file__).parent
LLVMPIPE_MANIFEST = next(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"), None)

PASSES = "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pass\n"
SKIPS = (
    "import pytest\n\n@pytest.mark.gpu\ndef test_it():\n    pytest.skip('no adapter')\n\ndef test_other():\n    pass\n"
)
NO_DAWN = "import sys\n\nsys.modules['wgpudawn'] = None\n"

everything_here = pytest.mark.skipif(
    any(engines.lacking(*pair) for pair in engines.SOFTWARE), reason="needs both software drivers and Tint"
)


def session(folder: Path, test: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """pytest on one test file below a copy of this suite's conftest."""
    for name in ("conftest.py", "engines.py"):
        shutil.copy(HERE / name, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs an adapter\n")
    (folder / "test_small.py").write_text(test)
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "FA2LAB_REQUIRE_GPU", "VK_ADD_DRIVER_FILES")}
    clean["PYTHONPATH"] = os.pathsep.join([str(folder), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    clean["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # halves the start
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=120)


WORKERS = {"here": (), "by a worker": ("-p", "xdist.plugin", "-n", "1")}
each_way = pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)


@everything_here
@each_way
def test_a_passed_gpu_test_is_enough(tmp_path, options):
    ran = session(tmp_path, PASSES, *options, FA2LAB_REQUIRE_GPU="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "GPU REQUIRED" not in ran.stdout


@each_way
@pytest.mark.parametrize("variable", [{"FA2LAB_REQUIRE_GPU": "1"}, {"CI": "true"}], ids=str)
def test_only_skipped_gpu_tests_fail_the_session(tmp_path, variable, options):
    ran = session(tmp_path, SKIPS, *options, **variable)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "GPU REQUIRED, but no test marked gpu passed" in ran.stdout
    assert "1 passed, 1 skipped" in ran.stdout


def test_skipped_gpu_tests_are_fine_where_no_gpu_is_required(tmp_path):
    assert session(tmp_path, SKIPS).returncode == 0


@pytest.mark.skipif(LLVMPIPE_MANIFEST is None, reason="needs llvmpipe's manifest")
def test_an_absent_driver_fails_the_session(tmp_path):
    ran = session(tmp_path, PASSES, FA2LAB_REQUIRE_GPU="1", VK_DRIVER_FILES=str(LLVMPIPE_MANIFEST))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "GPU REQUIRED, but no SwiftShader for naga" in ran.stdout
    assert "GPU REQUIRED, but no SwiftShader for tint" in ran.stdout


def test_an_absent_compiler_fails_the_session(tmp_path):
    (tmp_path / "no_dawn.py").write_text(NO_DAWN)
    ran = session(tmp_path, PASSES, "-p", "no_dawn", FA2LAB_REQUIRE_GPU="1")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "GPU REQUIRED, but compiler='tint' needs the package wgpudawn" in ran.stdout


def test_listing_tests_asks_for_no_gpu(tmp_path):
    assert session(tmp_path, SKIPS, "--collect-only", FA2LAB_REQUIRE_GPU="1").returncode == 0
    assert session(tmp_path, "def broken(:\n", FA2LAB_REQUIRE_GPU="1").returncode == 2, "an error stays an error"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ({}, "FOUND"),
        ({"VK_ADD_DRIVER_FILES": "/a/my_icd.json"}, f"/a/my_icd.json{os.pathsep}FOUND"),
        ({"VK_ADD_DRIVER_FILES": "/b/vk_swiftshader_icd.json"}, "/b/vk_swiftshader_icd.json"),
        ({"VK_DRIVER_FILES": "/a/my_icd.json"}, None),
        ({"VK_ICD_FILENAMES": "/a/my_icd.json"}, None),
    ],
    ids=str,
)
def test_what_the_user_set_about_drivers_stays(monkeypatch, tmp_path, before, expected):
    found = tmp_path / "vk_swiftshader_icd.json"
    found.touch()
    monkeypatch.setattr(engines, "SWIFTSHADER_MANIFESTS", ("/nowhere.json", str(found)))
    monkeypatch.setattr(os, "environ", dict(before))
    engines.add_swiftshader()
    added = {} if expected is None else {"VK_ADD_DRIVER_FILES": expected.replace("FOUND", str(found))}
    assert os.environ == before | added
