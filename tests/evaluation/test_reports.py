"""Figures are deterministic PNG bytes; Markdown keeps hostile text harmless."""

import io
import random
import sys
from functools import partial

import pytest

from stages.reporting import reports
from tests.common import laid_out_once

FIGURES = {
    "line": lambda: reports.line_chart(
        {"a": ([1, 2, 3], [0.1, None, float("nan")]), "b": ([1], [2.0])}, title="t", bands={"a": ([0, 0, 0], [1, 1, 1])}
    ),
    "curves": lambda: reports.metric_curves(
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "kl": 0.1}], ["loss", "kl", "absent"], title="t"
    ),
    "histogram": lambda: reports.histogram({"before": [0.1, 0.2, None], "after": [0.5] * 5}, title="t", xlabel="x"),
    "whole numbers": lambda: reports.histogram({"tokens": [3, 4, 4, 9]}, title="t", xlabel="tokens"),
    "one value": lambda: reports.histogram({"x": [2.0, 2.0]}, title="t", xlabel="x"),
    "empty": lambda: reports.histogram({"x": []}, title="t", xlabel="x"),
    "calibration": lambda: reports.calibration_figure([-1.0, 0.5, 3.0, 900.0]),
    "bars": lambda: reports.bar_chart(
        [
            {"model": "base", "value": 0.2, "low": 0.1, "high": 0.3},
            {"model": "sft", "value": None},
            {"model": "rl", "value": 0.5},
        ],
        title="t",
        ylabel="y",
    ),
    "scatter": lambda: reports.scatter([1, 2, 2], [0.1, 0.2, 0.5], title="t", xlabel="x", ylabel="y"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_png_and_repeatable(name):
    first = FIGURES[name]()
    assert first.startswith(b"\x89PNG") and first == FIGURES[name]()


CURVES = [
    {"series": {"x": ([1], [1.0])}, "title": "one point"},
    {"series": {"x": ([10, 2000, 300000], [-12345.6, 7.0, None])}, "title": "wide numbers", "ylabel": "x"},
    {"series": {"x": ([1, 2, 3], [1e-9, 2e-9, 4e-9])}, "title": "an exponent", "ylabel": "x"},
    {
        "series": {"x": ([1, 2, 3], [0.1, 0.2, 0.4]), "y": ([1, 3], [0.3, 0.3])},
        "title": "two of them",
        "bands": {"x": ([0, 0, 0], [1, 1, 1])},
        "dashed": {"y": "x"},
    },
    {"series": {"x": ([1, 2, 4], [0.1, 0.2, 0.4])}, "title": "powers of two", "log_x": True, "markers": True},
    {"series": {"x": ([1, 2], [None, float("nan")])}, "title": "gaps"},
    {"series": {}, "title": "nothing"},
]


def test_a_chart_does_not_depend_on_the_ones_drawn_before(monkeypatch):
    charts = [
        *(partial(reports.line_chart, **curve) for curve in CURVES),
        FIGURES["histogram"],
        FIGURES["whole numbers"],
        FIGURES["empty"],
        FIGURES["scatter"],
    ]
    alone = []
    for chart in charts:
        monkeypatch.setattr(reports, "_sheets", [])
        alone.append(chart())
    order = random.Random(1).choices(range(len(charts)), k=80)
    assert [k for k in order if charts[k]() != alone[k]] == [] and set(order) == set(range(len(charts)))


def test_nothing_is_cut_off_at_the_edge():
    from PIL import Image

    charts = [
        *(reports.line_chart(**curve) for curve in CURVES),
        *(make() for make in FIGURES.values()),
        *(
            reports.bar_chart([{"model": f"{name} {i}", "value": i} for i in range(bars)], title="t", ylabel="y")
            for name, bars in (("a long name of a model", 2), ("a long name of a model", 8))
        ),
        reports.path_chart({"by step": ([1e-4, 2.0], [-1.0, 5000.0], [1, 12345])}, title="t", xlabel="x", ylabel="y"),
    ]
    for png in charts:
        image = Image.open(io.BytesIO(png)).convert("L")
        width, height = image.size
        frame = [(0, 0, width, 2), (0, height - 2, width, height), (0, 0, 2, height), (width - 2, 0, width, height)]
        assert [image.crop(edge).getextrema() for edge in frame] == [(255, 255)] * 4


def test_labels_that_do_not_fit_leave_room_for_the_chart():
    assert reports.bar_chart([{"model": "n" * 300, "value": i} for i in range(8)], title="t", ylabel="y").startswith(
        b"\x89PNG"
    )


def test_calibration_bins():
    rows = reports.calibration_bins([0.5, 0.55, 1.0], [0, 1, 1], bins=5)
    assert rows[0]["n"] == 2 and rows[0]["accuracy"] == 0.5 and rows[-1]["n"] == 1


def test_markdown_survives_hostile_text():
    page = reports.sample_table(
        [{"output": "a | b\nc\x07 <script> `x`" + "y" * 1000, "n": 3, "share": 0.5, "none": None, "ok": True}]
    )
    lines = page.splitlines()
    assert len(lines) == 3 and lines[2].count(" | ") == 4
    assert "<script>" not in page and "\\x07" in page and "(+" in page
    assert "| 3 | 0.500 |  | yes |" in page
    assert reports.markdown_table([]) == "_no rows_"
    assert reports.document("T", "p", ("H", ""), None, ("K", "body")) == "# T\n\np\n\n## K\n\nbody\n"
    assert reports.with_interval(0.5, 0.4, 0.6) == "0.500 [0.400, 0.600]" and reports.number(0.00001) == "1.00e-05"


def test_importing_reports_loads_no_plot_library():
    import subprocess

    code = (
        "import sys, stages.reporting.reports, stages.promote, stages.compare; print([m for m in ('matplotlib',"
        " 'torch', 'transformers') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_of_two_evaluations_the_prompts_whose_verdicts_differ_come_first():
    """`posttrain compare` says so above its answers; the report of stage compare keeps the prompts' order."""
    from stages.compare import side_by_side

    def one(item, output, correct):
        return {"item_id": item, "mode": "greedy", "prompt": item, "output": output, "correct": correct}

    records = {
        "a": [one("same", "x", True), one("reworded", "x", True), one("lost", "x", True), one("ungraded", "x", None)],
        "b": [one("same", "x", True), one("reworded", "y", True), one("lost", "y", False), one("ungraded", "y", None)],
    }
    assert [row["prompt"] for row in side_by_side(["a", "b"], records, 3, changes_first=True)] == [
        "lost",
        "reworded",
        "ungraded",
    ]
    assert side_by_side(["a", "b"], records, 3, changes_first=True)[0] == {
        "prompt": "lost",
        "expected": None,
        "a": "✓ x",
        "b": "✗ y",
    }
    assert [row["prompt"] for row in side_by_side(["a", "b"], records, 2)] == ["same", "reworded"]


def test_an_interval_of_no_or_all_successes_ends_at_its_bound():
    from stages.measures.statistics import wilson

    for n in range(1, 300):
        assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0


def test_the_legend_of_small_charts_names_every_line(monkeypatch):
    """Also one that the first panel does not have: a run that logs fewer metrics."""
    from matplotlib.figure import Figure

    from stages.reporting.reports import small_multiples

    named = []
    draw = Figure.draw
    monkeypatch.setattr(
        Figure,
        "draw",
        lambda self, renderer: (
            named.extend(
                (text.get_text(), line.get_color())
                for legend in self.legends
                for text, line in zip(legend.get_texts(), legend.get_lines())
            ),
            draw(self, renderer),
        )[1],
    )
    both = {"first": ([1, 2], [0.1, 0.2]), "second": ([1, 2], [0.3, 0.4])}
    small_multiples({"kl": {"first": both["first"]}, "reward": both}, title="two runs")
    assert [name for name, _ in named[:2]] == ["first", "second"] and named[0][1] != named[1][1]


def test_other_tests_lay_out_every_kind_of_curves_once():
    """What a layout depends on makes another kind: what is written on it, gaps, single points, sizes and signs."""
    made = []
    once = laid_out_once(lambda series, **how: made.append((series, how)) or reports.line_chart(series, **how))
    kinds = [
        {"series": {"a": ([1, 2], [0.1, None])}, "title": "once"},
        {"series": {"a": ([1, 2], [0.1, 0.2])}, "title": "once"},
        {"series": {"a": ([1, 2], [0.1, 2.0])}, "title": "once"},
        {"series": {"a": ([1, 2], [0.1, -0.2])}, "title": "once"},
        {"series": {"a": ([1, 2], [0.1, float("nan")])}, "title": "once", "markers": True},
        {"series": {"a": ([1], [0.1])}, "title": "once"},
        {"series": {"a": ([1], [0.1])}, "title": "once", "bands": {"a": ([0.1], [0.2])}},
        {"series": {"b": ([1], [0.1])}, "title": "once"},
        {"series": {}, "title": "once"},
    ]
    for kind in kinds:
        once(**kind)
        once(**kind)
    once({"a": ([1, 3], [0.15, 0.25])}, title="once")
    assert len(made) == len(kinds)
    for _ in range(2):
        with pytest.raises(ValueError, match="same first dimension"):
            once({"a": ([1, 2], [0.1])}, title="once")
