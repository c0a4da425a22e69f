"""What all tests share: software drivers, devices made once a session, the rule that a skipped GPU test is no pass."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import engines
import hypothesis
import pytest

engines.add_swiftshader()  # before wgpu loads: the Vulkan loader reads its variables once
os.environ["MPLBACKEND"] = "Agg"  # no window, in this process and in those that it starts

# Software drivers share their cores with everything else, so no deadline; the same examples each time where it counts.
hypothesis.settings.register_profile("lab", deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("lab"), derandomize=True, database=None)
GPU_REQUIRED = os.environ.get("FA2LAB_REQUIRE_GPU") == "1" or os.environ.get("CI") == "true"
hypothesis.settings.load_profile("ci" if GPU_REQUIRED else "lab")

_gpu_tests = pytest.StashKey["GpuTests"]()
_complaints = pytest.StashKey[list]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread a test over devices or engines by the name of its argument; see the fixtures below."""
    values = {
        "device": lambda: [engines.seat_param(seat) for seat in engines.seats("adapter", "webgpu")],
        "roomy_device": lambda: [engines.seat_param(seat) for seat in engines.seats("adapter")],
        "engine": engines.engines,
        "gpu_engine": engines.gpu_engines,
    }
    for name, make in values.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, make(), indirect=name.endswith("device"))


@pytest.fixture
def device(request):
    """Each driver and compiler, with all that the adapter has and with a browser's limits."""
    return engines.device_of(request.param)


@pytest.fixture
def roomy_device(request):
    """Each driver and compiler once, with all that the adapter has."""
    return engines.device_of(request.param)


LLVMPIPE = engines.seat_param(engines.Seat("llvmpipe", "naga", "adapter"))


@pytest.fixture(params=[LLVMPIPE])
def gpu(request):
    """One device: for views, to which it is all one what kernels compute elsewhere."""
    return engines.device_of(request.param)


@pytest.fixture(params=["numpy", LLVMPIPE])
def seat(request):
    """NumPy, and one device."""
    return request.param if request.param == "numpy" else engines.device_of(request.param)


@pytest.fixture
def pixels():
    """For a test that wants its pictures painted, in a file whose others are `unpainted`."""


@pytest.fixture
def unpainted(request, monkeypatch):
    """Painting takes most of a view's move: each picture is another stub of a PNG, unless the test wants `pixels`."""
    if "pixels" in request.fixturenames:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    count = itertools.count()
    stub = b"\x89PNG%d"
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda _, file, **__: file.write(stub % next(count)))


@pytest.fixture(autouse=True)
def nothing_stays_on_a_device() -> Iterator[None]:
    """No test leaves a buffer alive, on whichever device of the session."""
    yield
    for device in engines.session_devices():
        assert device.memory.live_buffers == 0, f"{device!r} still holds {device.memory}"
        assert device.memory.live_bytes == 0


# Two workers share the files of the suite: a long file started last would keep one of them busy alone.
LONGEST_FIRST = (
    "/ui/test_ui_notebooks.py",
    "/test_notebooks.py",
    "/ui/",
    "/test_tiled.py",
    "/test_backward.py",
    "/test_semantics.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, part in enumerate(LONGEST_FIRST) if part in path), len(LONGEST_FIRST))

    items.sort(key=place)


# A GPU test that is skipped is not a pass: where a GPU is required, a session without one fails.


class GpuTests:
    """How many of them passed, in this process or in the workers that it started."""

    def __init__(self):
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Hears of every test, wherever it ran."""
        self.passed += report.when == "call" and report.passed and "gpu" in report.keywords


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_gpu_tests] = GpuTests()
    config.pluginmanager.register(config.stash[_gpu_tests])
    config.stash[_complaints] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not GPU_REQUIRED or session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return
    complaints = session.config.stash[_complaints]
    if session.config.stash[_gpu_tests].passed == 0:
        complaints.append("no test marked gpu passed")
    complaints += filter(None, (engines.lacking(*pair) for pair in engines.SOFTWARE))
    if complaints and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for complaint in config.stash[_complaints]:
        terminalreporter.write_line(f"GPU REQUIRED, but {complaint}", red=True, bold=True)
