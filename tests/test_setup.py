"""The set-up: `lab` run among stubs of the programs it calls, and the dependency files compared with each other.

Nothing here uses the network or touches this machine's packages: `lab` runs in a copy, and sees only the stubs and a
few harmless tools.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "lab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHELLS = [shell for shell in ("sh", "dash") if shutil.which(shell)]

# Stands for python3, and for .venv/bin/python once "venv" has copied it there. It works like the real one as far as
# `lab` can see: there is an adapter once the file "driver" exists, and pip fails while the file "offline" exists.
PYTHON_STUB = r"""#!/bin/sh
echo "python $*" >>"$BOX/calls"
case "$*" in
    *'version_info < (3, 11)'*) [ ! -e "$BOX/old-python" ] ;;
    *-venv*version_info*) echo python3.11-venv ;;
    *'import ensurepip'*) [ ! -e "$BOX/no-ensurepip" ] ;;
    *sys.prefix*) echo "3 11 $PWD/.venv" ;;
    '-m venv .venv')
        mkdir -p .venv/bin
        cp "$0" .venv/bin/python
        printf '#!/bin/sh\necho "pip 1.0 from %s/.venv/lib/pip"\n' "$PWD" >.venv/bin/pip
        chmod +x .venv/bin/pip
        ;;
    *'pip install'*) [ ! -e "$BOX/offline" ] ;;
    '-m fa2lab doctor') [ -e "$BOX/driver" ] ;;
esac
"""
APT_GET_STUB = r"""#!/bin/sh
echo "apt-get $*" >>"$BOX/calls"
case "$*" in
    *update) exit 100 ;; # as with one unreachable source
    *install*mesa-vulkan-drivers*) : >"$BOX/driver" ;;
    *install*-venv*) rm "$BOX/no-ensurepip" ;;
esac
"""
FAILING_APT_GET_STUB = r"""#!/bin/sh
echo "apt-get $*" >>"$BOX/calls"
echo "E: no room left on this disk" >&2
exit 100
"""
SUDO_STUB = r"""#!/bin/sh
echo "sudo $*" >>"$BOX/calls"
[ "$1" = -n ] && shift
exec "$@"
"""
REAL_TOOLS = ["sh", "cat", "chmod", "cksum", "cp", "dirname", "env", "grep", "mkdir", "rm", "sed", "tail", "true"]


class Box:
    """A copy of `lab` in a folder of its own, where only stubs and REAL_TOOLS are on the PATH."""

    def __init__(self, folder: Path, user: int = 0, **stubs: str):
        self.folder = folder / "project"
        self.bin = folder / "bin"
        self.home = folder
        self.folder.mkdir()
        self.bin.mkdir()
        for name in ("lab", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        # The drivers of the machine under test stay out of sight; VK_DRIVER_FILES can show others.
        lab = self.folder / "lab"
        lab.write_text(re.sub(r" /(etc|usr/share)/vulkan/", r" /nonexistent/\1/vulkan/", LAB.read_text()))
        for tool in REAL_TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.stub("python3", PYTHON_STUB)
        self.stub("uname", "#!/bin/sh\necho Linux\n")
        self.stub("id", f"#!/bin/sh\necho {user}\n")
        for name, text in stubs.items():
            self.stub(name.replace("_", "-"), text)

    def stub(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def has(self, *facts: str) -> "Box":
        for fact in facts:
            (self.home / fact).touch()
        return self

    def lab(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs ./lab; `self.calls` are the stubs' calls of this run alone."""
        calls = self.home / "calls"
        calls.write_text("")
        environment = {"PATH": str(self.bin), "HOME": str(self.home), "BOX": str(self.home), **variables}
        result = run(str(self.folder / "lab"), *arguments, env=environment, cwd=self.home)
        self.calls = calls.read_text().splitlines()
        return result

    def called(self, text: str) -> bool:
        return any(text in call for call in self.calls)


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20, **options)


# --- the script as text


def test_lab_is_executable():
    assert os.access(LAB, os.X_OK)
    assert LAB.read_text().startswith("#!/bin/sh\n")


@pytest.mark.parametrize("shell", SHELLS)
def test_lab_parses(shell):
    assert run(shell, "-n", str(LAB)).returncode == 0


BASHISMS = {
    r"\[\[": "[[ … ]]",
    r"\[ [^]]*==": "== in [ … ]",
    r"^\s*function\s": "function",
    r"^\s*(local|declare|typeset|source|select|let)\s": "a bash builtin",
    r"\becho -[en]": "echo with options",
    r"<<<|&>|<\(|>\(": "a bash redirection",
    r"\$'": "$'…'",
    r"\$\{\w+(\[|//|\^|,|:\d)": "an array or a bash expansion",
    r"^\s*\w+(\+=|=\()": "an array or +=",
    r"\bset -\w*o pipefail": "pipefail",
}


def bashisms(text: str) -> list[str]:
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [name for pattern, name in BASHISMS.items() if re.search(pattern, code, re.MULTILINE)]


def test_lab_is_free_of_bashisms():
    assert bashisms(LAB.read_text()) == []


@pytest.mark.parametrize(
    "line", ["[[ -e x ]]", '[ "$a" == b ]', "local a=1", "cat <<<x", "a=(1 2)", 'echo -e "x"', "${a//b/c}", "a+=b"]
)
def test_bashism_check_can_fail(line):
    assert bashisms(f"set -eu\n  {line}\n")


# --- verbs


def handled_verbs() -> set[str]:
    """The labels of the script's last `case`, however they are commented."""
    dispatch = LAB.read_text().rpartition("case $verb in")[2]
    return set(re.findall(r"^    ([\w-]+)\)", dispatch, re.MULTILINE))


def listed_verbs(text: str) -> set[str]:
    return set(re.findall(r"^  (\S+)  +\S", text, re.MULTILINE))


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("spelling", ["help", "-h", "--help"])
def test_help_lists_every_verb(shell, spelling):
    result = run(shell, str(LAB), spelling)
    assert (result.returncode, result.stderr) == (0, "")
    assert listed_verbs(result.stdout) == handled_verbs()
    assert {"open", "page", "test", "notebooks", "lint", "screenshots", "doctor", "setup", "help"} <= handled_verbs()


def test_verb_without_help_text_would_be_seen(tmp_path):
    box = Box(tmp_path)
    lab = box.folder / "lab"
    lab.write_text(re.sub(r"^(    lint\)).*$", r"\1", LAB.read_text(), flags=re.MULTILINE))
    assert listed_verbs(run(str(lab), "help").stdout) == handled_verbs() - {"lint"}


@pytest.mark.parametrize("shell", SHELLS)
def test_unknown_verb(shell):
    result = run(shell, str(LAB), "tset")
    assert result.returncode == 2
    assert result.stdout == ""
    assert '"tset"' in result.stderr.splitlines()[0]
    assert listed_verbs(result.stderr) == handled_verbs()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["-m jupyterlab", "--ip=127.0.0.1", "root_dir=notebooks", "--allow-root", "--no-browser"]),
        (["open", "--port", "8899"], ["-m jupyterlab", "--port 8899"]),
        (["--port", "8899"], ["-m jupyterlab", "--port 8899"]),
        (["page", "--port=8899"], ["-m voila notebooks/page/workbench.ipynb", "--Voila.ip=127.0.0.1", "--port=8899"]),
        (["page", "--Voila.ip=0.0.0.0"], ["--no-browser --Voila.ip=0.0.0.0"]),
        (["test", "-k", "a b"], ["-m pytest -n 2 --dist loadfile", " -k a b"]),
        (["notebooks", "--check"], ["notebooks/build.py --check"]),
        (["screenshots"], ["tests/ui/screenshots.py"]),
        (["doctor", "--verbose"], ["-m fa2lab doctor --verbose"]),
    ],
)
def test_verbs_pass_their_arguments_on(tmp_path, arguments, expected):
    box = Box(tmp_path, chromium="#!/bin/sh\n").has("driver")
    box.lab(*arguments)
    for text in expected:
        assert text in box.calls[-1]


def test_lint_checks_and_formats(tmp_path):
    box = Box(tmp_path, chromium="#!/bin/sh\n").has("driver")
    box.lab("lint")
    assert box.calls[-2:] == ["python -m ruff check", "python -m ruff format --check"]


@pytest.mark.parametrize("arguments", [["--ip=0.0.0.0"], ["page", "--Voila.ip=0.0.0.0"]])
def test_own_address_replaces_the_default(tmp_path, arguments):
    box = Box(tmp_path).has("driver")
    box.lab(*arguments)
    assert "127.0.0.1" not in box.calls[-1]


def test_the_page_that_is_served_is_there():
    """Its views, each after a still picture for readers of the file, which Voilà leaves out."""
    line = r"voila (\S+\.ipynb) --TagRemovePreprocessor.remove_cell_tags=(\w+)"
    path, tag = re.search(line, LAB.read_text()).groups()
    cells = json.loads((ROOT / path).read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    still = [cell["metadata"].get("tags") == [tag] for cell in code]
    assert still == [False] + 3 * [True, False]
    views = ["".join(cell["source"]) for cell, stands in zip(code[1:], still[1:], strict=True) if not stands]
    assert views == ["widgets.parity()", "widgets.head_gallery()", "widgets.known_failures()"]
    assert [bool(cell["outputs"]) for cell in code] == still


def test_allow_root_is_for_root_alone(tmp_path):
    box = Box(tmp_path, user=1000).has("driver")
    box.lab()
    assert box.called("jupyterlab") and not box.called("--allow-root")


def test_verbs_pass_the_exit_status_on(tmp_path):
    box = Box(tmp_path)
    assert box.lab("doctor").returncode == 1
    assert box.has("driver").lab("doctor").returncode == 0


# --- set-up


def test_set_up_with_an_adapter_leaves_the_machine_alone(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB).has("driver", "icd.json")
    assert box.lab("setup", VK_DRIVER_FILES=f"{tmp_path}/absent.json:{tmp_path}/icd.json").returncode == 0
    assert box.called("--editable .[notebook]") and box.called("fa2lab doctor")
    assert not box.called("apt-get")


def test_adapter_without_a_vulkan_driver_is_not_enough(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB).has("driver")
    box.lab("setup")
    assert box.called("mesa-vulkan-drivers")


def test_vulkan_driver_without_an_adapter_is_not_enough(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB).has("icd.json")
    box.lab("setup", VK_ICD_FILENAMES=f"{tmp_path}/icd.json")
    assert box.called("mesa-vulkan-drivers")


def test_missing_driver_is_installed(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB)
    result = box.lab("setup")
    assert result.returncode == 0
    assert box.called("install --no-install-recommends mesa-vulkan-drivers libvulkan1")
    assert "NumPy" not in result.stderr


def test_missing_driver_is_installed_through_sudo(tmp_path):
    box = Box(tmp_path, user=1000, apt_get=APT_GET_STUB, sudo=SUDO_STUB)
    assert box.lab("setup").returncode == 0
    assert box.called("sudo -n env DEBIAN_FRONTEND=noninteractive apt-get")
    assert box.called("mesa-vulkan-drivers")


@pytest.mark.parametrize(
    ("manager", "user", "line"),
    [
        ("apt-get", 1000, "sudo apt-get install mesa-vulkan-drivers libvulkan1"),
        ("dnf", 0, "dnf install mesa-vulkan-drivers vulkan-loader"),
        ("dnf", 1000, "sudo dnf install mesa-vulkan-drivers vulkan-loader"),
        ("pacman", 1000, "sudo pacman -S vulkan-swrast vulkan-icd-loader"),
        ("none", 0, "conda install -c conda-forge mesa-lavapipe libvulkan-loader"),
    ],
)
def test_without_apt_get_or_rights_the_line_to_type_is_printed(tmp_path, manager, user, line):
    box = Box(tmp_path, user=user, **{manager: "#!/bin/sh\nexit 1\n", "sudo": "#!/bin/sh\nexit 1\n"})
    result = box.lab("setup")
    assert result.returncode == 0
    assert f"type: {line}\n" in result.stderr
    assert "NumPy engine" in result.stderr
    assert result.stderr.endswith("lab: ready\n")


def test_failing_apt_get_is_told_and_survived(tmp_path):
    box = Box(tmp_path, apt_get=FAILING_APT_GET_STUB)
    result = box.lab("setup")
    assert result.returncode == 0
    assert "E: no room left on this disk" in result.stderr
    assert "type: apt-get install mesa-vulkan-drivers libvulkan1\n" in result.stderr
    assert result.stderr.endswith("lab: ready\n")


def test_test_set_up_brings_chromium(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB).has("driver")
    box.lab("test")
    assert box.called("--editable .[test]") and box.called("install --no-install-recommends chromium")


def test_test_set_up_survives_without_chromium(tmp_path):
    box = Box(tmp_path).has("driver")
    result = box.lab("test")
    assert "no chromium" in result.stderr
    assert box.called("-m pytest")


def test_macos_needs_no_driver(tmp_path):
    box = Box(tmp_path, uname="#!/bin/sh\necho Darwin\n").has("driver")
    result = box.lab("test")
    assert "chromium" not in result.stderr and "adapter" not in result.stderr
    assert box.called("-m pytest")


def test_macos_without_an_adapter_is_told_no_line(tmp_path):
    box = Box(tmp_path, uname="#!/bin/sh\necho Darwin\n", apt_get=APT_GET_STUB)
    result = box.lab("setup")
    assert result.returncode == 0
    assert "NumPy engine" in result.stderr and "type:" not in result.stderr
    assert not box.called("apt-get")


def test_missing_venv_module_is_installed(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB).has("driver", "no-ensurepip")
    assert box.lab("setup").returncode == 0
    assert box.called("install --no-install-recommends python3.11-venv")


def test_missing_venv_module_without_rights(tmp_path):
    box = Box(tmp_path, user=1000, apt_get=APT_GET_STUB).has("driver", "no-ensurepip")
    result = box.lab("setup")
    assert result.returncode == 1
    assert result.stderr.endswith("type: sudo apt-get install python3.11-venv\n")
    assert not (box.folder / ".venv").exists()


def test_old_python_is_refused_in_one_sentence(tmp_path):
    box = Box(tmp_path).has("old-python")
    result = box.lab("setup")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "3.11" in result.stderr


def test_second_set_up_does_nothing(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB)
    box.lab("setup")
    result = box.lab("setup")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert len(box.calls) == 1 and "sys.prefix" in box.calls[0]


def test_test_set_up_serves_the_notebooks_too(tmp_path):
    box = Box(tmp_path, apt_get=APT_GET_STUB)
    box.lab("setup")
    box.lab("test")
    assert box.called(".[test]")
    box.lab("setup")
    assert not box.called("pip install")


@pytest.mark.parametrize(
    ("first", "then", "installs"),
    [
        ("setup", "page", [".[page]"]),
        ("page", "setup", []),  # else two verbs in turn would install each time
        ("page", "test", [".[test]"]),
        ("test", "page", []),
        ("page", "page", []),
    ],
)
def test_the_page_stands_between_notebooks_and_tests(tmp_path, first, then, installs):
    box = Box(tmp_path, chromium="#!/bin/sh\n").has("driver")
    box.lab(first)
    box.lab(then)
    assert [call.rpartition(" ")[2] for call in box.calls if "pip install" in call] == installs


def test_changed_dependencies_are_installed(tmp_path):
    box = Box(tmp_path).has("driver")
    box.lab("setup")
    with open(box.folder / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    box.lab("setup")
    assert box.called("pip install") and not box.called("-m venv")


def test_failed_set_up_is_tried_again(tmp_path):
    box = Box(tmp_path).has("driver", "offline")
    result = box.lab("setup")
    assert result.returncode == 1 and "pip could not" in result.stderr
    (box.home / "offline").unlink()
    assert box.lab("setup").returncode == 0
    assert box.called("pip install")


def test_failed_update_leaves_no_stamp(tmp_path):
    """What was complete before the dependencies changed is not complete after an install that failed halfway."""
    box = Box(tmp_path).has("driver")
    box.lab("setup")
    before = (box.folder / "pyproject.toml").read_text()
    (box.folder / "pyproject.toml").write_text(before + "# changed\n")
    assert box.has("offline").lab("setup").returncode == 1
    (box.folder / "pyproject.toml").write_text(before)
    (box.home / "offline").unlink()
    box.lab("setup")
    assert box.called("pip install")


def test_moved_project_gets_a_new_venv(tmp_path):
    box = Box(tmp_path).has("driver")
    box.lab("setup")
    box.folder = box.folder.rename(tmp_path / "moved")
    box.lab("setup")
    assert box.called("-m venv .venv") and box.called("pip install")


def test_broken_venv_is_made_anew(tmp_path):
    box = Box(tmp_path).has("driver")
    box.lab("setup")
    (box.folder / ".venv/bin/python").unlink()
    assert box.lab("setup").returncode == 0
    assert box.called("-m venv .venv")


def test_folder_with_a_space(tmp_path):
    (tmp_path / "a folder").mkdir()
    box = Box(tmp_path / "a folder").has("driver")
    assert box.lab("setup").returncode == 0
    box.lab("setup")
    assert not box.called("pip install")


# --- the dependency files


CONDA_NAMES = {"wgpu-py": "wgpu"}


def requirements(lines: list[str]) -> set[tuple[str, str]]:
    """(name, pin) of each line, an exact pin spelled as pip does: conda writes name=1.2.* for name==1.2.*"""
    pairs = (re.fullmatch(r"([\w-]+)\s*(.*)", line).groups() for line in lines)
    return {(CONDA_NAMES.get(name, name), re.sub(r"^=+", "==", pin)) for name, pin in pairs}


def pip_requirements() -> set[tuple[str, str]]:
    project = PROJECT["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["notebook"]
    return requirements([*lines, f"python{project['requires-python']}"])


def conda_requirements(text: str) -> set[tuple[str, str]]:
    lines = [line for line in yaml.safe_load(text)["dependencies"] if isinstance(line, str)]
    return requirements([line for line in lines if line != "pip"])


def test_environment_yml_names_the_same_packages():
    assert conda_requirements((ROOT / "environment.yml").read_text()) == pip_requirements()


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("  - tqdm", "  # - tqdm"),
        ("numpy>=2.0", "numpy>=1.26"),
        ("wgpu-py=0.32", "wgpu-py=0.31"),
        ("  - pip\n", "  - scipy\n"),
    ],
)
def test_environment_yml_comparison_can_fail(line, instead):
    text = (ROOT / "environment.yml").read_text()
    assert line in text
    assert conda_requirements(text.replace(line, instead)) != pip_requirements()


def test_environment_yml_uses_conda_forge_and_no_driver():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert set(environment["channels"]) == {"conda-forge", "nodefaults"}
    assert not [line for line in environment["dependencies"] if re.search("vulkan|mesa|lavapipe", str(line))]


def test_binder_installs_the_notebook_extra():
    lines = (ROOT / ".binder/requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["-e .[notebook]"]
    assert "untested" in (ROOT / ".binder/apt.txt").read_text().lower()


def test_every_dependency_has_its_reason():
    text = (ROOT / "pyproject.toml").read_text()
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in extra)]:
        assert re.search(rf'"{re.escape(requirement)}",? +# \w', text), f"{requirement} stands without a reason"


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="needs a git checkout")
@pytest.mark.parametrize("path", ["fa2lab/wgsl/new.wgsl", "fa2lab/wgsl/shared/new.wgsl", "fa2lab/data/new.npz"])
def test_git_does_not_ignore_what_the_wheel_needs(path):
    """The build packs every file of the package folder but those that git ignores."""
    assert run("git", "check-ignore", "--quiet", path, cwd=ROOT).returncode == 1
    assert run("git", "check-ignore", "--quiet", ".venv/x", cwd=ROOT).returncode == 0


def test_ci_runs_the_test_verb():
    script = (ROOT / ".ci/run").read_text()
    assert run("bash", "-n", str(ROOT / ".ci/run")).returncode == 0
    assert "export FA2LAB_REQUIRE_GPU=1" in script
    assert script.rstrip().endswith("exec ./lab test")
