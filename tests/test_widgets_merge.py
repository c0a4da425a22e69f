"""MergeTree: the picture holds the tree's numbers, fields and buttons choose where to split and what to merge next."""

from __future__ import annotations

import gc
import inspect

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pytest
from views import count_figures, dim, fresh

from fa2lab import plot, widgets, widgets_merge
from fa2lab.merge import ORDERS
from fa2lab.widgets_merge import BY_HAND, MERGE_SIZE, MOST_SPLITS, SPLIT_ROWS, even_cuts, joints, keys_of

NAMED = list(SPLIT_ROWS)
SWALLOWED = next(name for name in NAMED if name.startswith("swallowed"))
MASKED = next(name for name in NAMED if name.startswith("masked"))


@pytest.fixture(autouse=True)
def unpainted_and_nothing_kept(unpainted):
    """Each picture is a stub, and pyplot has no figure."""
    yield
    assert plt.get_fignums() == []


def drawn(**values):
    """The Axes of the tree, of the row and of the errors."""
    figure = plot.figure(*MERGE_SIZE)
    widgets.merges(**values).draw(figure)
    return figure.axes


def written(ax, gid: str) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_gid() == gid]


# The plain function and its picture.


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("order", ORDERS)
def test_every_row_and_order_ends_with_the_softmax_of_what_is_seen(name, order):
    s, v, masked = SPLIT_ROWS[name]()
    cuts = even_cuts(len(s), 4)
    end = widgets.merges(row=name, cuts=cuts, order=order, seed=5, done=3).tree.nodes[-1].wide
    s, v = (np.asarray(x, np.float32).astype(np.float64)[~masked] for x in (s, v))
    e = np.exp(s - s.max(initial=-1e300))
    expected = e @ v / e.sum() if len(s) else 0.0
    np.testing.assert_allclose(end.out[0], expected, rtol=1e-12, atol=1e-14)


def test_a_box_holds_m_l_and_o():
    tree, row, _ = drawn(cuts=(2, 4), done=1)
    assert written(tree, "joint") == [
        "keys 0–1\nm 1.386\nl 1.25\nO 2",
        "keys 2–3\nm 0.6931\nl 1.5\nO 2.667",
        "keys 4–5\nm 2.079\nl 1.25\nO 5.4",
        "keys 0–3\nm 1.386\nl 2\nO 2.25",
    ]
    assert written(tree, "shrink") == ["× 1", "× 0.5"]
    assert tree.get_title().startswith("1 of 2 merges\nthe newest in float32: l 2, O 2.25;  in float64: l 1.99999999")
    assert [line.get_xdata()[0] for line in row.lines if line.get_gid() == "cut"] == [1.5, 3.5]
    assert [label.get_text() for label in row.get_xticklabels()][:2] == ["0\nv=6", "1\nv=1"]


def test_a_parent_stands_above_its_halves():
    shown = widgets.merges(row=SWALLOWED, cuts=(1, 2, 4, 6, 8, 10, 11), done=7)
    tree = drawn(row=SWALLOWED, cuts=(1, 2, 4, 6, 8, 10, 11), done=7)[0]
    places = [text.get_position() for text in tree.texts if text.get_gid() == "joint"]
    for place, joint in zip(places, joints(shown.tree), strict=True):
        assert place == ((joint.first + joint.last) / 2, joint.level)
        assert all(places[half][1] < place[1] for half in joint.halves or ())
    assert len(set(places)) == len(places) == 15


def test_the_newest_is_thick_and_what_sees_nothing_is_dotted():
    tree = drawn(row=MASKED, cuts=(4, 8), done=2)[0]
    boxes = [text.get_bbox_patch() for text in tree.texts if text.get_gid() == "joint"]
    widths = [box.get_linewidth() for box in boxes]
    assert widths[-1] > 2 * max(widths[:-1])
    assert [box.get_linestyle() for box in boxes] == ["-", ":", "-", "-", "-"]
    assert "m -∞\nl 0\nO 0" in written(tree, "joint")[1]
    assert written(tree, "shrink")[:2] == ["× 1", "× 0"]


def test_masked_keys_are_hatched():
    row = drawn(row=MASKED, cuts=(4, 8), done=0)[1]
    spans = [patch for patch in row.patches if patch.get_gid() == "masked"]
    assert [patch.get_x() for patch in spans] == [3.5, 4.5, 5.5, 6.5] and all(patch.get_hatch() for patch in spans)


def test_the_errors_are_those_of_the_nodes():
    cuts = (1, 2, 4, 6, 8, 10, 11)
    shown, ax = widgets.merges(row=SWALLOWED, cuts=cuts, done=7), drawn(row=SWALLOWED, cuts=cuts, done=7)[2]
    marks = {line.get_gid(): line for line in ax.lines}
    for name in ("l", "O"):
        expected = [max(node.apart(name), 1e-9) for node in shown.tree.nodes]
        np.testing.assert_array_equal(marks[name].get_xdata(), expected)
        assert max(expected) > marks["one rounding"].get_xdata()[0] == 2**-24
    assert marks["l"].get_marker() != marks["O"].get_marker()
    assert [label.get_text() for label in ax.get_yticklabels()][-1] == "0–11"


def test_the_picture_says_itself_in_words():
    figure = plot.figure(*MERGE_SIZE)
    assert widgets.merges(done=0).draw(figure) == "A row of 6 scores in 3 splits after 0 of 2 merges."
    text = widgets.merges(row=SWALLOWED, cuts=tuple(range(1, 12, 2)), done=6).draw(figure)
    assert "after 6 of 6 merges; the newest holds keys 0 to 11" in text and "float32 is off by" in text
    assert len(figure.axes) == 3
    assert "NumPy float32 beside float64" in figure.texts[-1].get_text()


def test_the_words_hold_both_precisions_and_the_other_orders():
    words = widgets.merges(row=SWALLOWED, cuts=tuple(range(1, 12, 2)), done=6).words
    assert "<td>1</td><td>1.000000112" in words
    assert "left to right l 1 O 1; right to left l 1.00000012 O 1.00000012" in words
    assert all(order in words for order in ORDERS)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (dict(row="seven"), "No row of scores is called 'seven'; there are 'six numbers'"),
        (dict(order="sideways"), "No order is called 'sideways'; there are 'left to right', .*'by hand'"),
        (dict(row=SWALLOWED, cuts=tuple(range(1, 9)), done=0), "At most 8 splits can be shown, so 7 cuts; got 8"),
        (dict(done=3), "done must be between 0 and 2, the merges of this order; got 3"),
        (dict(order=BY_HAND, by_hand=(4,), done=2), "done must be between 0 and 1"),
        (dict(cuts=(6,), done=0), "lie between 1 and 5"),
    ],
)
def test_what_cannot_be_shown_is_said(values, says):
    with pytest.raises(ValueError, match=says):
        widgets.merges(**values)


def test_keys_in_a_field():
    assert keys_of(" 2, 4 5,") == (2, 4, 5) and keys_of("") == ()
    with pytest.raises(ValueError, match="Keys are whole numbers.*got '2; 4'"):
        keys_of("2; 4")


def test_even_cuts():
    assert even_cuts(12, 3) == (4, 8) and even_cuts(6, 4) == (2, 3, 4) and even_cuts(6, 1) == ()
    assert even_cuts(6, 8) == (1, 2, 3, 4, 5), "no more splits than keys"


# The view.


def find(view, kind) -> list:
    found = []

    def look(widget) -> None:
        found.extend([widget] if isinstance(widget, kind) else [])
        for child in getattr(widget, "children", ()):
            look(child)

    look(view.widget)
    return found


def buttons(view) -> dict[str, ipywidgets.Button]:
    """Those that are there, by what they say."""
    return {button.description: button for button in find(view, ipywidgets.Button) if button.layout.display != "none"}


def test_the_view_starts_where_the_plain_function_does():
    view = widgets.merge_tree()
    defaults = {name: p.default for name, p in inspect.signature(widgets.merges).parameters.items()}
    assert view.values == defaults | dict(cuts="2, 4", by_hand="")
    assert widgets.merges().draw(plot.figure(*MERGE_SIZE)) == view.image.tooltip
    view = widgets.merge_tree(row=SWALLOWED, cuts=(3, 6, 9), order="balanced", done=1)
    assert view.values["done"] == 1 and "4 splits after 1 of 3" in view.image.tooltip


def test_every_control_has_a_name_and_help():
    view = widgets.merge_tree()
    controls = find(view, (ipywidgets.IntSlider, ipywidgets.Dropdown, ipywidgets.Text))
    names = [control.description for control in controls]
    assert len(controls) == 7 and all(names) and len(set(names)) == len(names)
    assert all(control.tooltip for control in controls)
    assert list(buttons(view)) == ["2", "4", "take back"]
    assert all(button.tooltip for button in buttons(view).values())


def test_merging_step_by_step():
    view = widgets.merge_tree()
    assert "after 1 of 2 merges; the newest holds keys 0 to 3" in fresh(view, done=1)
    assert "after 0 of 2" in fresh(view, done=0)
    view.set(order="right to left")
    assert "the newest holds keys 2 to 5" in fresh(view, done=1)


def test_a_field_says_where_to_cut():
    view = widgets.merge_tree()
    view.controls["cuts"].value = "1, 2, 5"
    assert "in 4 splits after 3 of 3" in view.image.tooltip and view.controls["done"].max == 3
    assert list(buttons(view)) == ["1", "2", "5", "take back"]
    view.controls["cuts"].value = "1, two"
    assert "Keys are whole numbers" in view.status.value and dim(view)
    assert list(buttons(view)) == ["take back"]
    view.controls["cuts"].value = "9"
    assert "lie between 1 and 5" in view.status.value
    view.controls["cuts"].value = "3"
    assert "in 2 splits after 1 of 1" in view.image.tooltip and not dim(view)


def test_a_slider_cuts_evenly():
    view = widgets.merge_tree(row=SWALLOWED, cuts=(6,), done=1)
    (parts,) = [slider for slider in find(view, ipywidgets.IntSlider) if slider.description == "even splits"]
    assert parts.value == 2
    parts.value = 4
    assert view.values["cuts"] == "3, 6, 9" and "in 4 splits after 3 of 3" in view.image.tooltip
    parts.value = 1
    assert view.values["cuts"] == "" and "in 1 splits after 0 of 0" in view.image.tooltip
    assert parts.max == MOST_SPLITS


def test_a_shorter_row_is_cut_anew():
    view = widgets.merge_tree(row=SWALLOWED, cuts=(4, 8), done=2)
    view.controls["row"].value = "six numbers"
    assert view.values["cuts"] == "2, 4" and "A row of 6 scores in 3 splits after 2 of 2" in view.image.tooltip
    assert "role" not in view.status.value


def test_merging_by_hand_click_by_click():
    view = widgets.merge_tree(row=SWALLOWED, cuts=(3, 6, 9), done=0)
    buttons(view)["6"].click()
    assert view.values | dict(order=BY_HAND, by_hand="6", done=1) == view.values
    assert "after 1 of 3 merges; the newest holds keys 3 to 8" in view.image.tooltip
    assert [says for says, button in buttons(view).items() if button.disabled] == ["6"]
    buttons(view)["9"].click()
    assert "the newest holds keys 3 to 11" in view.image.tooltip
    buttons(view)["take back"].click()
    assert view.values["by_hand"] == "6" and "the newest holds keys 3 to 8" in view.image.tooltip
    buttons(view)["3"].click()
    buttons(view)["9"].click()
    assert view.values["by_hand"] == "6, 3, 9" and "after 3 of 3 merges" in view.image.tooltip
    assert all(button.disabled for says, button in buttons(view).items() if says != "take back")
    for _ in range(3):
        buttons(view)["take back"].click()
    assert "after 0 of 3" in view.image.tooltip and buttons(view)["take back"].disabled


def test_by_hand_goes_on_from_what_is_shown():
    """After one step of another order, and after a step back."""
    view = widgets.merge_tree(row=SWALLOWED, cuts=(3, 6, 9), order="right to left", done=1)
    buttons(view)["3"].click()
    assert view.values["by_hand"] == "9, 3"
    view.set(done=1)
    buttons(view)["6"].click()
    assert view.values["by_hand"] == "9, 6"


def test_no_click_shows_an_error_on_the_way():
    """Several controls move at a click; each state between can be shown."""
    view, said = widgets.merge_tree(row=SWALLOWED, cuts=(3, 6, 9), done=3), []
    view.status.observe(lambda change: said.append(change["new"]), names="value")
    buttons(view)["take back"].click()
    for name in ("take back", "6", "take back"):
        if not buttons(view)[name].disabled:
            buttons(view)[name].click()
    view.controls["cuts"].value = "2, 6"
    view.controls["order"].value = "balanced"
    assert said and not any("Not computed" in words for words in said)


def test_the_hand_s_order_can_be_typed():
    view = widgets.merge_tree(row=SWALLOWED, cuts=(3, 6, 9), order=BY_HAND, by_hand=(9,), done=1)
    view.controls["by_hand"].value = "6, 3"
    view.set(done=2)
    assert "the newest holds keys 0 to 8" in view.image.tooltip
    view.controls["by_hand"].value = "5"
    assert "no cut before key 5" in view.status.value


def test_an_unknown_control_is_named():
    with pytest.raises(TypeError, match="No control is called parts; there are row, cuts, order"):
        widgets.merge_tree(parts=3)


def test_the_picture_never_moves():
    view = widgets.merge_tree()
    heights = view.image.layout.height, view.status.layout.height
    assert all(heights)
    view.set(row=MASKED, cuts="4, 8")
    assert (view.image.layout.height, view.status.layout.height) == heights


def test_moves_leave_nothing_behind():
    view = widgets.merge_tree()
    gc.collect()
    figures, artists = count_figures(), len(view._canvas.figure.findobj())
    for order in (*ORDERS, "left to right"):
        view.set(order=order, row=SWALLOWED, cuts="3, 6, 9", done=1)
        view.set(row="six numbers", cuts="2, 4", done=2)
    gc.collect()
    assert count_figures() == figures and len(view._canvas.figure.findobj()) == artists


def test_the_defaults_of_the_rows_are_not_shared():
    """Two calls hand out the same numbers, whatever is done to the first."""
    for make in SPLIT_ROWS.values():
        first = [x.copy() for x in make()]
        for x, y in zip(first, make(), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_change_of_the_mathematics_shows(monkeypatch):
    """The picture is drawn from the merge, not from the row: break it, and the box is wrong."""
    sound = written(drawn(done=2)[0], "joint")
    monkeypatch.setattr(widgets_merge, "split_and_merge", halved)
    assert written(drawn(done=2)[0], "joint") != sound


_split_and_merge = widgets_merge.split_and_merge


def halved(s, v, *rest, **options):
    return _split_and_merge(s, np.asarray(v) / 2, *rest, **options)
