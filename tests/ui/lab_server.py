"""JupyterLab on a copy of the notebooks, for the tests and the screenshots."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
STARTING = 90.0  # seconds, generous: on a busy machine

# No question about news and no look for updates, in a settings folder that is nobody's.
SETTINGS = {
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": (
        '{"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true}'
    ),
}


def copy_notebooks(root: Path) -> None:
    """Copy the notebooks of the checkout, so that running and saving them changes nothing there."""
    notebooks = CHECKOUT / "notebooks"
    for path in notebooks.rglob("*.ipynb"):
        if not any(part.startswith(".") for part in path.relative_to(notebooks).parts):  # checkpoints
            copy = root / path.relative_to(notebooks)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(path, copy)


@contextmanager
def server(root: Path) -> Iterator[str]:
    """JupyterLab of this interpreter on the files under `root`; yields its address and stops it at the end.

    Nothing of the user's is read or written: configuration, data, settings and run-time files have a folder that goes
    with it. Raises `RuntimeError` with the last lines of its log if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fa2lab-jupyter-", ignore_cleanup_errors=True) as home:
        for name, text in SETTINGS.items():
            path = Path(home, "settings", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        port = free_port()
        log = Path(home, "log")
        with log.open("wb") as out:
            streams = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            process = subprocess.Popen(_command(root, port), env=_environment(home), **streams)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(f"{address}/api", process, log)
            yield address
        finally:
            process.terminate()  # the server shuts its kernels down
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _command(root: Path, port: int) -> list[str]:
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": root,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "IdentityProvider.token": "",
        "LabApp.expose_app_in_browser": True,  # its commands, under the names of the menu's entries
    }
    return [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]


def _environment(home: str) -> dict[str, str]:
    # MPLBACKEND is the kernel's own business: inline. The user's JUPYTER... would lead to the user's files.
    environment = {
        name: value for name, value in os.environ.items() if name != "MPLBACKEND" and not name.startswith("JUPYTER")
    }
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment |= {name: os.path.join(home, folder) for name, folder in folders.items()}
    # The notebooks lie elsewhere, the code here.
    paths = [str(CHECKOUT), *filter(None, [environment.get("PYTHONPATH")])]
    # A bar that a busy machine shows would count as words on stderr.
    return environment | {"PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"}


def _wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + STARTING
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is here, whatever proxy is set
    while True:
        try:
            direct.open(address, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > end:
                last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
                raise RuntimeError("JupyterLab did not start:\n" + "\n".join(last)) from None
            time.sleep(0.2)
