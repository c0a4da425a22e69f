"""The parity bench: where a result errs, the report of it, the picture, the view, and what the view hands out."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from views import click, dim, fresh

import fa2lab as fa
from fa2lab import error_maps, parity_report, plot, plot_parity, widgets, widgets_export, widgets_parity
from fa2lab.error_maps import TileSize
from fa2lab.limits import BROWSER
from fa2lab.live import View


@pytest.fixture(autouse=True)
def nothing_kept(unpainted):
    """No run beyond its test."""
    yield
    widgets_parity._judged.cache_clear()


def named(ax, gid: str) -> list:
    """The artists of an Axes with this gid."""
    return [artist for artist in ax.get_children() if artist.get_gid() == gid]


# Where a result errs


def test_a_distance_knows_infinities_and_nan():
    got = [1.5, np.nan, np.inf, -np.inf, np.inf, np.nan, 1.0]
    expected = [1.0, np.nan, np.inf, np.inf, 1.0, 0.0, np.nan]
    np.testing.assert_array_equal(error_maps.distance(got, expected), [0.5, 0, 0, np.inf, np.inf, np.inf, np.inf])
    with pytest.raises(fa.ShapeError, match=r"one shape; got \(2,\) and \(1,\)"):
        error_maps.distance([1, 2], [1])


def test_errors_by_row_count_heads_over_the_batches():
    expected = np.zeros((2, 3, 2, 4))
    got = expected.copy()
    got[1, 2, 0, 3], got[0, 1, 1, 0] = -0.5, 0.25
    errors = error_maps.by_row(got, expected)
    assert errors.shape == (4, 3)
    assert {tuple(map(int, at)): errors[tuple(at)] for at in np.argwhere(errors)} == {(2, 2): 0.5, (1, 1): 0.25}


def test_an_ulp_is_the_spacing_at_the_expected_number():
    one = np.float32(1)
    got = np.array([one + np.float32(2**-23), one, 4 + 2**-20, 0, np.inf], np.float32)
    np.testing.assert_allclose(error_maps.ulps(got, [1, 1, 4, 0, 1]), [1, 0, 2, 0, np.inf])


def test_shares_of_ulps_fall_into_bins_closed_above():
    got = 1 + np.array([0, 0.5, 1, 1.5, 64, 65]) * 2.0**-23
    shares = error_maps.ulp_shares(got, np.ones(6))
    np.testing.assert_allclose(shares * 6, [2, 1, 1, 0, 0, 0, 0, 1, 1])
    assert error_maps.ulp_shares(np.full(3, np.nan), np.ones(3))[-1] == 1, "NaN is no small error"
    assert error_maps.ulp_shares(np.zeros((0, 4)), np.zeros((0, 4))).sum() == 0


def test_tile_sizes_are_the_plans_own():
    problem = fa.attention(*fa.data.make(T=40, H=1, D=64), device="numpy").problem
    planned = fa.plan(problem, BROWSER, "fa2_forward")
    sizes = error_maps.tile_sizes(planned, [(16, 16), (8, 8), (64, 64)])
    assert {s.name: s.workgroup_bytes for s in sizes if s.name in ("8×8", "16×16", "64×64")} == {
        "64×64": 192 * 64 * 4, "16×16": 48 * 64 * 4, "8×8": 24 * 64 * 4,
    }  # fmt: skip
    assert [s.name for s in sizes if s.planned] == [f"{planned.block_q}×{planned.block_k}"]
    assert [s.workgroup_bytes for s in sizes] == sorted((s.workgroup_bytes for s in sizes), reverse=True)
    assert error_maps.tile_sizes(fa.plan(problem, BROWSER, "naive")) == []


# The report


def test_a_report_is_strict_json_with_every_number(gpu):
    got = widgets.bench(T=9, H=3, hd=8, B=2, grad=True, seed=4, device=gpu)
    read = json.loads(parity_report.to_json(got.report()), parse_constant=pytest.fail)
    assert read["ok"] is True and read["inputs"] == {"pattern": "random", "seed": 4}
    assert read["problem"]["B"] == 2 and read["problem"]["causal"] is True
    assert read["versions"]["fa2lab"] == fa.__version__ and read["versions"]["numpy"] == np.__version__
    forward, gradients = read["runs"]["forward"], read["runs"]["gradients"]
    assert [row["field"] for row in forward["fields"]] == ["out", "lse", "attn"]
    assert [row["field"] for row in gradients["fields"]] == ["dq", "dk", "dv"]
    assert forward["fields"][0]["error"] == got.comparison.rows[0].error
    assert forward["adapter"] == str(gpu.adapter) and forward["kernel"] == "fa2_forward"
    assert forward["plan"]["workgroup_bytes"] == got.result.plan.workgroup_bytes
    assert forward["device_bytes"] == got.result.device_bytes == forward["plan"]["device_bytes"]
    assert forward["wall_clock_seconds"] == got.seconds["forward"] > 0


def test_a_report_has_no_number_that_json_lacks():
    got = widgets.bench(T=5, hd=4, device="numpy")
    spoilt = got.result.out.copy()
    spoilt[0, 3, 1, 2] = np.nan
    found = fa.parity.compare(replace(got.result, out=spoilt), got.truth)
    read = json.loads(parity_report.to_json(replace(got, comparison=found).report()), parse_constant=pytest.fail)
    assert read["ok"] is False
    (row,) = (row for row in read["runs"]["forward"]["fields"] if row["field"] == "out")
    assert row["got"] == "nan" and row["misplaced"] == 1 and row["where"] == "batch 0 row 3 head 1 column 2"
    assert read["runs"]["forward"]["plan"] is None, "NumPy has no device plan"


def test_bytes_are_written_or_the_reason_is_told(tmp_path):
    written = parity_report.write(tmp_path / "a.json", b"{}")
    assert written.read_bytes() == b"{}"
    with pytest.raises(OSError, match=r"no such folder/a.json cannot be written: No such file or directory\.$"):
        parity_report.write(tmp_path / "no such folder" / "a.json", b"{}")
    with pytest.raises(IsADirectoryError, match="cannot be written: Is a directory"):
        parity_report.write(tmp_path, b"{}")


# The picture


def test_the_panels_show_the_chosen_cell_and_nothing_else():
    got = widgets.bench(T=7, H=3, B=2, hd=5, head=4, row=6, device="numpy")
    figure = plot.figure(*widgets.BENCH_SIZE)
    text = got.draw(figure)
    strip, attn, above, below, ulp, bars, *_ = figure.axes
    errors = error_maps.by_row(got.result.out, got.truth.out)
    np.testing.assert_allclose(strip.images[0].get_array(), errors / got.comparison.rows[0].allowed)
    (chosen,) = named(strip, "chosen")
    assert chosen.get_xdata()[0] == 6 and chosen.get_ydata()[0] == 4
    np.testing.assert_array_equal(attn.images[0].get_array().data, (got.result.attn - got.truth.attn)[1, 1])
    assert set(named(attn, "marked row")[0].get_ydata()) == {6}
    np.testing.assert_array_equal(named(above, "expected")[0].get_ydata(), got.truth.out[1, 6, 1])
    np.testing.assert_array_equal(named(above, "got")[0].get_ydata(), got.result.out[1, 6, 1])
    (of_kernel,), (of_plain,) = (named(below, f"error {who}") for who in ("kernel", "plain float32"))
    np.testing.assert_array_equal(of_kernel.get_ydata(), (got.result.out - got.truth.out)[1, 6, 1])
    np.testing.assert_array_equal(of_plain.get_ydata(), (got.truth.plain.out - got.truth.out)[1, 6, 1])
    heights = [bar.get_height() for bar in ulp.patches]
    np.testing.assert_allclose(heights[:9], 100 * error_maps.ulp_shares(got.result.out, got.truth.out))
    assert [tick.get_text() for tick in bars.get_yticklabels()] == ["out", "lse", "attn"]
    d = np.abs(got.result.out - got.truth.out)[1, 6, 1].argmax()
    said = f"column {d}: got {got.result.out[1, 6, 1, d]:.9g}, expected {got.truth.out[1, 6, 1, d]:.9g}"
    assert said in above.get_title(loc="left") and "query 6 of batch 1, head 1" in text
    assert "NumPy" in figure.get_supxlabel()
    assert all(plot_parity.NO_MEMORY in ax.texts[0].get_text() for ax in figure.axes[-2:])


def test_a_misplaced_nan_is_crossed_out_in_the_strip():
    ax = plot.figure().add_subplot()
    errors = np.array([[0.5, np.inf, 2.0]])
    plot_parity.row_errors(ax, errors, allowed=2.0, name="out", rows="query")
    (cross,) = named(ax, "not finite")
    assert cross.get_xdata()[0] == 1
    assert ax.images[0].get_clim() == (0, 1), "what is allowed ends the scale"


def test_tile_bars_say_what_fits_and_what_is_planned():
    ax = plot.figure().add_subplot()
    sizes = [TileSize(64, 64, 90_000, 64, False), TileSize(16, 16, 20_000, 16, True), TileSize(8, 8, 5_000, 8, False)]
    plot_parity.tile_bars(ax, sizes, {"this device": 32_768, "a browser": 16_384}, stage="fa2_forward")
    assert [bar.get_gid() for bar in ax.patches] == ["too large", "planned", "tile"]
    assert [bool(bar.get_hatch()) for bar in ax.patches] == [True, False, False]
    assert [bar.get_width() for bar in ax.patches] == [90_000, 20_000, 5_000]
    assert [line.get_xdata()[0] for line in named(ax, "limit")] == [32_768, 16_384]
    texts = [text.get_text().strip() for text in ax.texts]
    assert texts == ["90,000 B, too large", "20,000 B, planned", "5,000 B"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["64×64", "16×16", "8×8"]


def test_without_attn_the_map_shows_the_error_of_o():
    got = widgets.bench(T=7, hd=5, attn=False, device="numpy")
    figure = plot.figure(*widgets.BENCH_SIZE)
    got.draw(figure)
    b, h = divmod(got.at[0], 2)
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), (got.result.out - got.truth.out)[b, :, h])
    assert [row.field for row in got.judged] == ["out", "lse"]


# The view


def test_bench_judges_gradients_where_asked(gpu):
    got = widgets.bench(T=33, H=3, hd=8, grad=True, device=gpu)
    assert [row.field for row in got.comparison.rows] == ["out", "lse", "attn"]
    assert [row.field for row in got.of_gradients.rows] == ["dq", "dk", "dv"] and got.of_gradients.ok
    assert got.words.count("within float32") == 2 and "dv" in got.words
    assert widgets.bench(T=9, hd=4, device=gpu).of_gradients is None
    view = widgets.parity(device=gpu, T=17, hd=8)
    assert "dq" not in fresh(view, H=1)
    with_gradients = fresh(view, grad=True)
    assert all(name in with_gradients for name in ("dq", "dk", "dv", "lse"))
    assert "dq" not in fresh(view, grad=False)
    view.close()


def test_bench_judges_by_the_reference(gpu):
    got = widgets.bench(T=33, H=3, hd=40, B=2, seed=5, scale=-0.5, device=gpu)
    q, k, v = fa.data.make("random", T=33, H=3, D=40, B=2, seed=5)
    np.testing.assert_array_equal(got.truth.out, fa.reference.attention(q, k, v, causal=True, scale=-0.5).out)
    assert got.comparison.ok and got.result.problem.scale == -0.5


@pytest.mark.parametrize("kernel", ["naive", "fused_sv", "fa2_forward"])
def test_parity_view_over_kernels_and_sizes(gpu, kernel, pixels):
    view = widgets.parity(device=gpu, kernel=kernel, T=17, hd=40)
    for values in (dict(T=33, H=3, B=2), dict(causal=False, pattern="huge"), dict(T=1, hd=64)):
        text = fresh(view, **values)
        assert kernel in text and "within float32" in text and "not within" not in text
        assert "✓" in view.status.value


def test_bytes_are_the_plans(gpu):
    view = widgets.parity(device=gpu, T=33, hd=64)
    *_, tiles, memory = view._canvas.figure.axes
    assert [bar.get_width() for bar in tiles.patches if bar.get_gid() == "planned"] == [12_288]
    sizes = {
        tick.get_text(): bar.get_width() for tick, bar in zip(memory.get_yticklabels(), memory.patches, strict=True)
    }
    arrays = dict.fromkeys(("q", "k", "v", "out"), 4 * 33 * 2 * 64)
    assert sizes == arrays | {"lse": 4 * 33 * 2, "attn": 4 * 2 * 33 * 33}
    assert [bar.get_gid() for bar in memory.patches][-1] == "absent", "attn is what fa2_forward can do without"
    assert memory.texts[-1].get_text().endswith("B as asked")
    view.set(attn=False)
    assert memory.texts[-1].get_text().endswith("B avoided")
    view.set(kernel="naive")
    assert "absent" not in [bar.get_gid() for bar in memory.patches]
    assert "naive has no tiles" in tiles.texts[0].get_text()


def test_head_and_row_run_no_kernel(monkeypatch):
    view = widgets.parity(device="numpy", T=20, hd=4, B=2)
    monkeypatch.setattr(widgets_parity, "attention", None)  # a call would raise
    assert "query 7 of batch 1, head 0" in fresh(view, worst=False, head=2, row=7)
    assert "query 0 of batch 0, head 1" in fresh(view, head=1, row=0)
    with pytest.raises(TypeError):
        view.set(hd=5)


def test_the_worst_row_is_shown_unless_one_is_chosen():
    view = widgets.parity(device="numpy", T=20, hd=4)
    b, row, h, _ = widgets.bench(T=20, hd=4, device="numpy").comparison.rows[0].place
    assert f"query {row} of batch {b}, head {h}" in view.image.tooltip
    assert view.controls["row"].disabled and view.controls["head"].disabled
    view.set(worst=False, T=10, H=1)
    assert not view.controls["row"].disabled
    assert (view.controls["row"].max, view.controls["head"].max) == (9, 0)
    chosen = widgets.parity(device="numpy", T=20, hd=4, head=1, row=3)
    assert chosen.values["worst"] is False and "query 3 of batch 0, head 1" in chosen.image.tooltip


@pytest.mark.parametrize("where", [dict(head=2), dict(row=20), dict(head=-1)])
def test_bench_refuses_a_place_that_is_none(where):
    with pytest.raises(IndexError, match="must be from 0 to"):
        widgets.bench(T=20, H=2, device="numpy", **where)


def test_a_click_on_the_error_map_chooses_its_cell():
    view = widgets.parity(device="numpy", T=12, H=3, hd=4)
    strip, attn = view._canvas.figure.axes[:2]
    click(view, strip, 7.3, 1.8)
    assert (view.values["worst"], view.values["head"], view.values["row"]) == (False, 2, 7)
    assert "Shown is query 7 of batch 0, head 2" in view.image.tooltip
    click(view, attn, 3, 3)
    assert view.values["row"] == 7


def test_the_time_is_said_and_labelled():
    view = widgets.parity(device="numpy", T=9, hd=4)
    assert re.search(r"forward [\d,.]+ ms &nbsp; \(wall clock of this one run", view.status.value)
    view.set(grad=True)
    assert re.search(r"forward [\d,.]+ ms, gradients [\d,.]+ ms", view.status.value)


@pytest.mark.parametrize("scale", [0.0, -1.0, 0.3])
def test_scale_by_slider_or_default(scale):
    view = widgets.parity(device="numpy", T=9, hd=16)
    assert view.controls["scale"].disabled
    assert "scale 0.25" in _footer_after(view)
    assert f"scale {scale:g}" in _footer_after(view, default_scale=False, scale=scale)
    assert not view.controls["scale"].disabled
    assert "scale 0.25" in _footer_after(view, default_scale=True)


def _footer_after(view: View, **values) -> str:
    view.set(**values)
    return view._canvas.figure.get_supxlabel()


def test_a_scale_to_start_with():
    assert "scale -0.5" in _footer_after(widgets.parity(device="numpy", T=9, scale=-0.5))
    assert widgets.parity(device="numpy", T=9, scale=None).values["default_scale"] is True


def test_a_broken_kernel_goes_red(gpu):
    broken = fa.kernels()["fa2_forward"].edited("l *= alpha;", "")
    view = widgets.parity(kernel=broken, device=gpu, pattern="huge", T=40)
    assert "✗" in view.status.value and "not within float32" in view.image.tooltip
    assert "✓" in _words_after(view, kernel="fa2_forward")
    assert "✗" in _words_after(view, kernel=broken)


def _words_after(view: View, **values) -> str:
    view.set(**values)
    return view.status.value


def test_a_refusal_is_shown_and_the_next_value_recovers(gpu):
    view = widgets.parity(device=gpu, kernel="fused_sv", T=9)
    good = view.image.value
    with pytest.raises(fa.LimitError, match="up to 1024 keys; got Tk=1,030"):
        view.set(T=1030)
    assert "up to 1024 keys" in view.status.value and 'role="alert"' in view.status.value
    assert view.image.value == good and dim(view)
    assert "older picture" in view.image.tooltip
    view.controls["T"].value = 1031  # by hand, the view swallows the error
    assert "Tk=1,031" in view.status.value
    fresh(view, T=10)
    assert "✓" in view.status.value


def test_wgsl_that_does_not_compile_shows_its_place(gpu):
    typo = fa.kernels()["fa2_forward"].edited("var l = 0.0;", "var l = 0.0")
    view = widgets.parity(device=gpu, T=9)
    view.controls["kernel"].options = [*view.controls["kernel"].options, ("typo", typo)]
    view.controls["kernel"].value = typo
    assert "fa2_forward.wgsl:" in view.status.value


# What the view hands out


class Links(HTMLParser):
    """The links of a piece of HTML: (file name, media type, bytes)."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, str, bytes]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        if tag == "a":
            attrs = dict(attrs)
            kind, data = attrs["href"].removeprefix("data:").split(";base64,")
            self.found.append((attrs["download"], kind, base64.b64decode(data)))


def test_the_report_goes_into_a_file_and_a_link(tmp_path):
    view = widgets.parity(device="numpy", T=9, hd=4, seed=3)
    view.export.path.value = str(tmp_path / "run")
    view.export.buttons["json"].click()
    content = (tmp_path / "run.json").read_bytes()
    assert json.loads(content)["inputs"]["seed"] == 3
    assert Links(view.export.said.value).found == [("run.json", "application/json", content)]
    assert f"Wrote {tmp_path / 'run.json'}, {len(content):,} bytes." in view.export.said.value


def test_pictures_go_out_as_png_and_svg_and_are_the_same_each_time(tmp_path, pixels):
    view = widgets.parity(device="numpy", T=9, hd=4)
    view.export.buttons["png"].click()
    ((name, kind, png),) = Links(view.export.said.value).found
    assert (name, kind, png[:4]) == ("parity.png", "image/png", b"\x89PNG")
    assert png == widgets.bench(T=9, hd=4, device="numpy").picture("png")
    view.export.path.value = str(tmp_path / "figure.svg")
    view.export.press("svg")
    written = (tmp_path / "figure.svg").read_bytes()
    assert b"<svg" in written[:600] and Links(view.export.said.value).found[0][1:] == ("image/svg+xml", written)


def test_a_path_that_cannot_be_written_is_one_sentence_and_the_link_stays(tmp_path):
    view = widgets.parity(device="numpy", T=9, hd=4)
    view.export.path.value = str(tmp_path / "<none>" / "run.json")
    view.export.press("json")
    said = re.sub("<[^>]*>", "", view.export.said.value).replace("&nbsp;", " ").split("  ")[0].strip()
    assert said == f"{tmp_path}/&lt;none&gt;/run.json cannot be written: No such file or directory."
    assert 'role="alert"' in view.export.said.value
    assert json.loads(Links(view.export.said.value).found[0][2])["ok"] is True


def test_values_that_cannot_be_computed_are_not_saved(gpu, tmp_path):
    view = widgets.parity(device=gpu, kernel="fused_sv", T=9)
    view.controls["T"].value = 1030
    view.export.path.value = str(tmp_path / "run.json")
    view.export.press("json")
    assert "Not saved:" in view.export.said.value and "up to 1024 keys" in view.export.said.value
    assert not list(tmp_path.iterdir())


def test_export_runs_no_kernel_for_what_is_shown(monkeypatch):
    view = widgets.parity(device="numpy", T=9, hd=4)
    monkeypatch.setattr(widgets_parity, "attention", None)  # a call would raise
    view.export.press("json")
    assert Links(view.export.said.value).found


def test_a_link_escapes_its_name():
    ((name, kind, content),) = Links(widgets_export.link('a"<b>.json', b"{}")).found
    assert (name, kind, content) == ('a"<b>.json', "application/json", b"{}")


def test_each_button_of_the_export_has_a_name_and_a_hint():
    view = widgets.parity(device="numpy", T=9, hd=4)
    assert view.export.path.description and view.export.path.tooltip
    names = [button.description for button in view.export.buttons.values()]
    assert len(set(names)) == 3 and all(button.tooltip for button in view.export.buttons.values())
    assert view.export.said.layout.height, "the line keeps its place"
