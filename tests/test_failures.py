"""Known failures: each wrong variant gives exactly the wrong number that is predicted, the right one the right one."""

from __future__ import annotations

import engines
import numpy as np
import pytest
from views import fresh

import fa2lab as fa
from fa2lab import failures, plot, widgets, widgets_failures
from fa2lab.failures import FAILURES, ROW_LANES

NAMES = [failure.name for failure in FAILURES]
EDITED = [failure.name for failure in FAILURES if failure.edits]


@pytest.fixture(autouse=True)
def nothing_kept():
    """No run beyond its test."""
    yield
    widgets_failures._outcome.cache_clear()


def ln(*numbers) -> np.ndarray:
    return np.log(np.array(numbers, np.float64))


# By failure: O and L as they are right, and as they are wrong.
LOW = [-1e28, -1e29, -1e30, -1e31, -1e32]
HIGH = [-6e4 + np.log(4), -1e8]
PREDICTED = {
    "finite sentinel": (
        ([2.5] * 5, LOW),
        # at the sentinel four keys share with four places of padding; below it the padding has all the weight
        ([2.5, 2.5, 1.25, 0, 0], [-1e28, -1e29, -1e30, -1e30, -1e30]),
    ),
    "-inf guard": (
        ([2.5] * 4, [*HIGH, -2e9, -1e31]),
        ([2.5, 2.5, 0, 0], [*HIGH, -np.inf, -np.inf]),
    ),
    "ragged tile": (([5.0] * 9, ln(9).repeat(9)), ([2.8125] * 9, ln(16).repeat(9))),
    "base of L": (([1, 1.5, 2, 2.5], ln(1, 2, 3, 4)), ([1, 1.5, 2, 2.5], np.log2([1, 2, 3, 4]))),
    "skipped half tile": (([15.5] * 32, ln(32).repeat(32)), ([7.5] * 32, ln(16).repeat(32))),
}


def test_every_failure_with_edits_has_its_prediction():
    assert list(PREDICTED) == EDITED and len(NAMES) == 6
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", EDITED)
def test_each_variant_gives_the_predicted_numbers(roomy_device, name):
    got = failures.run(name, device=roomy_device)
    (right_o, right_l), (wrong_o, wrong_l) = PREDICTED[name]
    of_o, of_l = got.panels
    for panel, right, wrong in ((of_o, right_o, wrong_o), (of_l, right_l, wrong_l)):
        np.testing.assert_allclose(panel.expected, right, rtol=1e-7)
        np.testing.assert_allclose(panel.right, right, rtol=3e-7)
        np.testing.assert_allclose(panel.wrong, wrong, rtol=3e-7)
    np.testing.assert_array_equal(of_o.right, np.float32(right_o))
    np.testing.assert_array_equal(of_o.wrong, np.float32(wrong_o))  # 7.5 and 2.8125 exactly
    assert got.breaks and not got.comparison.ok
    assert not np.isnan(of_o.wrong).any() and not np.isnan(of_l.wrong).any(), "no NaN to warn anyone"
    assert got.label == f"fa2_forward on {roomy_device.adapter}"


@pytest.mark.parametrize("name", EDITED)
def test_the_change_shown_is_the_change_made(name):
    sound, broken = fa.kernels()["fa2_forward"].text(), failures.named(name).wrong.text()
    lines = failures._change(sound, broken)
    assert any(line.startswith("+") for line in lines)
    for line in lines:
        number, text = int(line[1:].split()[0]), line[1:].split(maxsplit=1)[1]
        assert (broken if line[0] == "+" else sound).splitlines()[number - 1].strip() == text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ragged tile", "O first parts at query 0: 2.8125 in place of 5. In the walk it is l of query 0, after K"),
        (
            "-inf guard",
            "O first parts at the row's scores, four equal ones -2e9: 0 in place of 2.5. In the walk it is m",
        ),
        ("base of L", "L first parts at query 1: 1 in place of 0.6931472. Their walks over the tiles are the same"),
    ],
)
def test_where_they_part_is_told(gpu, name, says):
    assert failures.run(name, device=gpu).parts.startswith(says)


def test_the_right_variant_is_checked_before_anything_is_said(gpu, monkeypatch):
    sound = fa.kernels()["fa2_forward"]
    monkeypatch.setattr(
        failures, "kernels", lambda: {"fa2_forward": sound.edited("l *= alpha;", "l *= alpha; l += 1.0;")}
    )
    with pytest.raises(fa.ParityError):
        failures.run("ragged tile", device=gpu)


def test_numpy_runs_no_wgsl_and_says_so():
    for name in NAMES:
        with pytest.raises(fa.KernelError, match="needs a GPU adapter"):
            failures.run(name, device="numpy")
    with pytest.raises(KeyError, match="No failure is called 'typo'; there are finite sentinel"):
        failures.run("typo")


# The subgroup


@pytest.mark.parametrize("seat", [engines.seat_param(seat) for seat in engines.seats("adapter")])
def test_a_subgroup_that_is_too_small_loses_what_it_does_not_reach(seat):
    device = engines.device_of(seat)
    got = failures.run("assumed subgroup", device=device)
    sums, steps = got.panels
    np.testing.assert_array_equal(sums.right, sums.expected)
    np.testing.assert_array_equal(steps.right, steps.expected)
    assert set(sums.expected) == {136} and list(steps.expected) == [3, 10, 36, 136]
    size = device.subgroup_size
    assert f"This device's subgroup holds {size}" in got.parts
    if size >= ROW_LANES:
        assert not got.breaks and "nothing breaks here" in got.parts
    else:
        assert got.breaks and 136 not in sums.wrong
        assert [int(tick) for tick in steps.ticks][steps.parts_at] == size, "the first step past the subgroup"


@pytest.mark.parametrize("seat", [engines.seat_param(engines.Seat(*pair, "adapter")) for pair in engines.SOFTWARE])
def test_the_software_drivers_do_break(seat):
    """So that the failure is seen where the suite runs, and not only handled."""
    assert failures.run("assumed subgroup", device=engines.device_of(seat)).breaks


def test_a_large_enough_subgroup_says_that_nothing_breaks(monkeypatch):
    class Large:
        subgroup_size, adapter = 32, "a card"

    sums = np.zeros((4, 4, ROW_LANES), np.float32)
    monkeypatch.setattr(failures, "choose", lambda device: device)
    monkeypatch.setattr(failures, "subgroup_sums", lambda device: (sums, sums))
    got = failures.run("assumed subgroup", device=Large())
    assert not got.breaks and got.parts.startswith("This device's subgroup holds 32, nothing breaks here")
    assert "the same here" in widgets_failures.Shown(got).words
    Large.subgroup_size = None
    with pytest.raises(fa.LimitError, match="a card has no subgroups"):
        failures.run("assumed subgroup", device=Large())


# Picture and view


def named(ax, gid: str) -> list:
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


def test_the_picture_shows_all_three_and_the_lines(gpu):
    figure = plot.figure(*widgets.FAILURE_SIZE)
    for name in ("-inf guard", "ragged tile"):  # twice on one figure
        got = widgets.failure(name, device=gpu)
        text = got.draw(figure)
        of_o, of_l, code = figure.axes
        for ax, panel in zip((of_o, of_l), got.outcome.panels, strict=True):
            for kind in ("expected", "right", "wrong"):
                values = getattr(panel, kind)
                drawn = [y for line in named(ax, kind) for y in line.get_ydata()]
                assert set(values[np.isfinite(values)]) <= set(drawn)
                assert len(drawn) == len(values), "infinities stand there too"
            marks = {line.get_marker() for kind in ("expected", "right", "wrong") for line in named(ax, kind)}
            assert len(marks) == 3, "apart without colour"
        shown = [t.get_text() for gid in ("right line", "wrong line") for t in named(code, gid)]
        assert sorted(line.replace("−", "-") for line in shown) == sorted(got.outcome.change)
        assert got.outcome.failure.taken in figure.get_suptitle() and got.outcome.parts in text
    assert figure.get_supxlabel() == f"fa2_forward on {gpu.adapter}"


def test_minus_infinity_is_named_in_the_picture(gpu):
    figure = plot.figure(*widgets.FAILURE_SIZE)
    widgets.failure("-inf guard", device=gpu).draw(figure)
    assert [text.get_text() for text in figure.axes[1].texts] == ["-inf", "-inf"]


def test_each_button_runs_its_failure(gpu, unpainted):
    view = widgets.known_failures(device=gpu)
    (buttons,) = view.controls.values()
    assert list(buttons._options_labels) == NAMES and buttons.description and buttons.tooltip
    assert len(buttons.tooltips) == len(NAMES)
    assert widgets.failure(device=gpu).draw(plot.figure(*widgets.FAILURE_SIZE)) == view.image.tooltip
    for failure in FAILURES[1:]:
        text = fresh(view, name=failure.name)
        assert failure.taken in text
        assert failure.why.split(".")[0].replace("'", "&#x27;").replace(">", "&gt;") in view.status.value
        assert ("✗ they part" in view.status.value) == view._compute(name=failure.name).outcome.breaks
    view.close()
