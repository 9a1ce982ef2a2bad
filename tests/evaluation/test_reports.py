"""Figures are deterministic PNG bytes; Markdown keeps hostile text harmless."""

import sys

import pytest

from stages import reports

FIGURES = {
    "line": lambda: reports.line_chart({"a": ([1, 2, 3], [0.1, None, float("nan")]), "b": ([1], [2.0])}, title="t", bands={"a": ([0, 0, 0], [1, 1, 1])}),
    "curves": lambda: reports.metric_curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "kl": 0.1}], ["loss", "kl", "absent"], title="t"),
    "histogram": lambda: reports.histogram({"before": [0.1, 0.2, None], "after": [0.5] * 5}, title="t", xlabel="x"),
    "whole numbers": lambda: reports.histogram({"tokens": [3, 4, 4, 9]}, title="t", xlabel="tokens"),
    "one value": lambda: reports.histogram({"x": [2.0, 2.0]}, title="t", xlabel="x"),
    "empty": lambda: reports.histogram({"x": []}, title="t", xlabel="x"),
    "calibration": lambda: reports.calibration_figure([-1.0, 0.5, 3.0, 900.0]),
    "bars": lambda: reports.bar_chart([{"model": "base", "value": 0.2, "low": 0.1, "high": 0.3}, {"model": "sft", "value": None}, {"model": "rl", "value": 0.5}], title="t", ylabel="y"),
    "scatter": lambda: reports.scatter([1, 2, 2], [0.1, 0.2, 0.5], title="t", xlabel="x", ylabel="y"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_png_and_repeatable(name):
    first = FIGURES[name]()
    assert first.startswith(b"\x89PNG") and first == FIGURES[name]()


def test_calibration_bins():
    rows = reports.calibration_bins([0.5, 0.55, 1.0], [0, 1, 1], bins=5)
    assert rows[0]["n"] == 2 and rows[0]["accuracy"] == 0.5 and rows[-1]["n"] == 1


def test_markdown_survives_hostile_text():
    page = reports.sample_table([{"output": "a | b\nc\x07 <script> `x`" + "y" * 1000, "n": 3, "share": 0.5, "none": None, "ok": True}])
    lines = page.splitlines()
    assert len(lines) == 3 and lines[2].count(" | ") == 4
    assert "<script>" not in page and "\\x07" in page and "(+" in page
    assert "| 3 | 0.500 |  | yes |" in page
    assert reports.markdown_table([]) == "_no rows_"
    assert reports.document("T", "p", ("H", ""), None, ("K", "body")) == "# T\n\np\n\n## K\n\nbody\n"
    assert reports.with_interval(0.5, 0.4, 0.6) == "0.500 [0.400, 0.600]" and reports.number(0.00001) == "1.00e-05"


def test_importing_reports_loads_no_plot_library():
    import subprocess

    code = "import sys, stages.reports, stages.promote, stages.compare; print([m for m in ('matplotlib', 'torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_of_two_evaluations_the_prompts_whose_verdicts_differ_come_first():
    """`posttrain compare` says so above its answers; the report of stage compare keeps the prompts' order."""
    from stages.compare import side_by_side

    def one(item, output, correct):
        return {"item_id": item, "mode": "greedy", "prompt": item, "output": output, "correct": correct}

    records = {"a": [one("same", "x", True), one("reworded", "x", True), one("lost", "x", True), one("ungraded", "x", None)],
               "b": [one("same", "x", True), one("reworded", "y", True), one("lost", "y", False), one("ungraded", "y", None)]}
    assert [row["prompt"] for row in side_by_side(["a", "b"], records, 3, changes_first=True)] == ["lost", "reworded", "ungraded"]
    assert side_by_side(["a", "b"], records, 3, changes_first=True)[0] == {"prompt": "lost", "expected": None, "a": "✓ x", "b": "✗ y"}
    assert [row["prompt"] for row in side_by_side(["a", "b"], records, 2)] == ["same", "reworded"]


def test_an_interval_of_no_or_all_successes_ends_at_its_bound():
    from stages.statistics import wilson

    for n in range(1, 300):
        assert wilson(0, n)[0] == 0.0 and wilson(n, n)[1] == 1.0
