"""Figures (PNG bytes), tables and Markdown for every stage: what a person opens in MLflow or Prefect.

Pure functions of their arguments. PNG bytes are deterministic (Agg, no time stamp), so a resumed stage reports the
same file. matplotlib is imported inside the figure functions only.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence

INK, GRID = "#22223b", "#d9dce3"
PALETTE = ("#3366aa", "#dd8833", "#338855", "#aa3355", "#7755aa", "#228899", "#887722", "#666677")
REPORT_LIMIT = 240
DPI = 110


# -- figures ----------------------------------------------------------------------------------------------------------


def _axes(title: str, xlabel: str, ylabel: str, size: tuple[float, float] = (6.4, 3.8), layout: str | None = None):
    """(figure, axes). layout: "constrained" for a chart that :func:`_place` does not know how to place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.set_xlabel(xlabel, fontsize=9, color=INK)
    axes.set_ylabel(ylabel, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.ticklabel_format(useOffset=False)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


_sheets: list = []


@contextlib.contextmanager
def _sheet(fresh: bool = False) -> Iterator[tuple]:
    """(figure, axes) of an upright chart, empty. It is used again for the next one, since the ticks take longer to make
    than the rest of a chart; fresh: not.
    """
    figure, axes = _sheets.pop() if _sheets and not fresh else _axes("", "", "")
    yield figure, axes
    if not fresh:
        for artist in (*axes.lines, *axes.collections, *axes.patches, *axes.texts, *filter(None, [axes.get_legend()])):
            artist.remove()
        axes.relim()
        axes.set(xlim=(0, 1), ylim=(0, 1), autoscale_on=True)
        _sheets.append((figure, axes))


def _place(figure, axes, title: str, turned: float = 0.0) -> None:
    """Margins, title and names of the axes of a chart, by the length of its tick labels. The constrained layout draws
    everything several times to measure it, and a stage ends with a dozen charts. turned: degrees by which the labels of
    the x axis are."""
    width, height = figure.get_size_inches()
    letter, longest, exponent = 5.4 / 72, [], ""  # inches: the widest digit or sign at 8 points
    for axis in (axes.xaxis, axes.yaxis):
        form = axis.get_major_formatter()
        longest.append(letter * max(map(len, form.format_ticks(axis.get_majorticklocs())), default=0))
        exponent = form.get_offset()  # "1e-6", above the y axis
    lowest, highest = axes.get_xlim()
    # 0 to 1, left to right
    at = [
        (axes.transScale + axes.transLimits).transform((tick, 1.0))[0]
        for tick in axes.xaxis.get_majorticklocs()
        if lowest <= tick <= highest
    ]
    name, above, over = (0.2 if axes.get_ylabel() else 0.06), 0.15 if exponent else 0.0, longest[0] / 2
    left = min(name + longest[1] + 0.12, width / 2)
    room = width - left - 0.12
    left = min(max(left, over - min(at, default=0.5) * room), width / 2)
    right = max(width - max(0.12, over - (1 - max(at, default=0.5)) * room), left + width / 4)
    high = height - 0.32 - above
    low = min((0.48 if axes.get_xlabel() else 0.3) + longest[0] * math.sin(math.radians(turned)), high / 2)
    figure.subplots_adjust(left / width, low / height, right / width, high / height)
    axes.set_title(title, fontsize=11, color=INK, loc="left", y=1.0, pad=6 + 72 * above)
    axes.xaxis.set_label_coords((left + right) / 2 / width, 0.24 / height, figure.transFigure)
    axes.yaxis.set_label_coords(0.19 / width, (low + high) / 2 / height, figure.transFigure)


def _png(figure) -> bytes:
    from PIL import Image

    figure.canvas.draw()
    drawn = Image.frombuffer(
        "RGBA", figure.canvas.get_width_height(), figure.canvas.buffer_rgba(), "raw", "RGBA", 0, 1
    ).convert("RGB")
    buffer = io.BytesIO()
    drawn.save(buffer, "png", dpi=(DPI, DPI))
    return buffer.getvalue()


def _finite(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def line_chart(
    series: Mapping[str, tuple[Sequence[float], Sequence[float | None]]],
    *,
    title: str,
    xlabel: str = "step",
    ylabel: str = "",
    markers: bool = False,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    log_x: bool = False,
    dashed: Mapping[str, str] | None = None,
) -> bytes:
    """Curves ``{name: (x, y)}``; ``bands`` adds ``{name: (low, high)}`` shading. None and NaN points are gaps.

    dashed: {name: another name}, drawn dashed in the other's colour.
    """
    dashed = dashed or {}
    solid = [name for name in series if name not in dashed]
    with _sheet(log_x) as (figure, axes):
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        for name, (x, y) in series.items():
            colour = PALETTE[solid.index(dashed.get(name, name)) % len(PALETTE)]
            values = [math.nan if value is None else float(value) for value in y]
            axes.plot(
                list(x),
                values,
                color=colour,
                linewidth=1.5,
                marker="o" if markers or len(values) == 1 else None,
                markersize=3.5,
                label=name,
                linestyle="--" if name in dashed else "-",
            )
            if bands and name in bands:
                low, high = bands[name]
                axes.fill_between(list(x), list(low), list(high), color=colour, alpha=0.16, linewidth=0)
        if log_x:
            ticks = sorted({float(point) for x, _ in series.values() for point in x})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        if len(series) > 1:
            axes.legend(fontsize=8, frameon=False)
        _place(figure, axes, title)
        return _png(figure)


def metric_curves(rows: Sequence[Mapping], names: Sequence[str], *, title: str) -> bytes:
    """Line chart of the named columns of metric rows ``[{"step": 1, "reward": ...}, ...]``; absent columns are skipped.
    A single line is named at its axis, several in a legend."""
    series = {}
    for name in names:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            series[name] = tuple(zip(*points))
    return line_chart(series, title=title, xlabel="step", ylabel=next(iter(series)) if len(series) == 1 else "")


def histogram(groups: Mapping[str, Sequence[float | None]], *, title: str, xlabel: str, bins: int = 30) -> bytes:
    """Overlaid histograms on common bins, each normalised to 1 (before/after comparisons); dashed line at the mean."""
    import numpy as np

    cleaned = {name: _finite(values) for name, values in groups.items()}
    pooled = [value for values in cleaned.values() for value in values]
    with _sheet() as (figure, axes):
        axes.set_xlabel(xlabel)
        axes.set_ylabel("share")
        if pooled:
            low, high = min(pooled), max(pooled)
            if low == high:
                low, high = low - 0.5, high + 0.5
            elif all(value == int(value) for value in pooled) and high - low < bins:
                low, high, bins = low - 0.5, high + 0.5, int(high - low) + 1  # whole numbers: one bar each
            edges = [low + (high - low) * i / bins for i in range(bins + 1)]
            for index, (name, values) in enumerate(cleaned.items()):
                if not values:
                    continue
                colour = PALETTE[index % len(PALETTE)]
                axes.stairs(
                    np.histogram(values, edges)[0] / len(values),
                    edges,
                    fill=True,
                    color=colour,
                    alpha=0.5,
                    label=f"{name} (n={len(values)}, mean {sum(values) / len(values):.3g})",
                )
                axes.axvline(sum(values) / len(values), color=colour, linewidth=1.2, linestyle="--")
            axes.legend(fontsize=8, frameon=False)
        else:
            axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes, color=INK)
        _place(figure, axes, title)
        return _png(figure)


def calibration_diagram(
    confidence: Sequence[float], correct: Sequence[float], *, title: str, bins: int = 10, low: float = 0.5
) -> bytes:
    """Reliability diagram: accuracy against mean confidence in equal-width bins on [low, 1], circles sized by count."""
    figure, axes = _axes(title, "confidence", "accuracy", (4.8, 4.2))
    axes.plot([low, 1], [low, 1], color="#999999", linewidth=1, linestyle="--", label="perfect")
    points = calibration_bins(confidence, correct, bins=bins, low=low)
    total = max(1, len(confidence))
    kept = [row for row in points if row["n"]]
    axes.plot([row["confidence"] for row in kept], [row["accuracy"] for row in kept], color=PALETTE[0], linewidth=1)
    axes.scatter(
        [row["confidence"] for row in kept],
        [row["accuracy"] for row in kept],
        s=[20 + 500 * row["n"] / total for row in kept],
        color=PALETTE[0],
        alpha=0.6,
        label="observed (area = share)",
    )
    axes.set_xlim(low - 0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _place(figure, axes, title)
    return _png(figure)


def calibration_figure(margins: Sequence[float]) -> bytes:
    """Reliability diagram of pair margins d = r_chosen - r_rejected: confidence max(s, 1-s) with s = sigmoid(d), right
    if d > 0.
    """
    confidence = [1.0 / (1.0 + math.exp(-min(abs(float(d)), 700.0))) for d in margins]
    return calibration_diagram(
        confidence, [float(d > 0) for d in margins], title="Reward model calibration on held-out pairs"
    )


def calibration_bins(
    confidence: Sequence[float], correct: Sequence[float], *, bins: int = 10, low: float = 0.5
) -> list[dict]:
    """Per bin {"low", "high", "n", "confidence", "accuracy"}; equal width, the last bin closed on the right."""
    width = (1.0 - low) / bins
    members: list[list[int]] = [[] for _ in range(bins)]
    for index, value in enumerate(confidence):
        members[min(bins - 1, max(0, int((value - low) / width)))].append(index)
    return [
        {
            "low": low + width * b,
            "high": low + width * (b + 1),
            "n": len(rows),
            "confidence": sum(confidence[i] for i in rows) / len(rows) if rows else None,
            "accuracy": sum(correct[i] for i in rows) / len(rows) if rows else None,
        }
        for b, rows in enumerate(members)
    ]


def bar_chart(rows: Sequence[Mapping], *, title: str, ylabel: str) -> bytes:
    """Bars with error bars from rows ``{model, value, low, high}``; bounds may be absent. None values are skipped."""
    figure, axes = _axes(title, "", ylabel, (max(4.8, 0.9 * len(rows) + 1.6), 3.8))
    kept = [row for row in rows if row.get("value") is not None]
    turned = 20 if len(kept) > 5 else 0
    for index, row in enumerate(kept):
        axes.bar(index, row["value"], color=PALETTE[index % len(PALETTE)], width=0.66, alpha=0.85)
        if row.get("low") is not None and row.get("high") is not None:
            axes.errorbar(
                index,
                row["value"],
                yerr=[[max(0.0, row["value"] - row["low"])], [max(0.0, row["high"] - row["value"])]],
                color=INK,
                capsize=3,
                linewidth=1.1,
            )
        axes.annotate(
            f"{row['value']:.3g}",
            (index, row["value"]),
            textcoords="offset points",
            xytext=(9, 3),
            fontsize=8,
            color=INK,
        )
    axes.set_xticks(range(len(kept)), [str(row["model"]) for row in kept], rotation=turned)
    axes.grid(False, axis="x")
    _place(figure, axes, title, turned)
    return _png(figure)


def small_multiples(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float | None]]]], *, title: str
) -> bytes:
    """Small line charts ``{panel: {line: (x, y)}}`` in a grid of three columns with one legend; a line has the same
    colour in all of them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.4 * rows + 0.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    lines, handles = list(dict.fromkeys(name for series in panels.values() for name in series)), {}
    for axes, (panel, series) in zip(grid, panels.items()):
        axes.set_title(panel, fontsize=9, color=INK, loc="left")
        axes.tick_params(labelsize=7, colors=INK)
        axes.grid(True, color=GRID, linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for name, (x, y) in series.items():
            (handles[name],) = axes.plot(
                list(x),
                [math.nan if value is None else float(value) for value in y],
                color=PALETTE[lines.index(name) % len(PALETTE)],
                linewidth=1.3,
                marker="o" if len(x) == 1 else None,
                markersize=3,
                label=name,
            )
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    figure.legend(  # a line may be missing from the first panel
        [handles[name] for name in lines], lines, loc="outside lower left", ncols=len(lines), fontsize=8, frameon=False
    )
    return _png(figure)


def path_chart(
    paths: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[int]]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    diagonal: bool = False,
) -> bytes:
    """Paths ``{name: (x, y, step)}`` of a run through a plane, their first and last step named; ``diagonal`` adds the
    line y = x.
    """
    figure, axes = _axes(title, xlabel, ylabel, layout="constrained")
    for index, (name, (x, y, steps)) in enumerate(paths.items()):
        colour = PALETTE[index % len(PALETTE)]
        axes.plot(list(x), list(y), color=colour, linewidth=1.0, alpha=0.55, marker="o", markersize=3, label=name)
        for at, shape in ((0, "s"), (-1, "D")):
            axes.plot([x[at]], [y[at]], color=colour, marker=shape, markersize=6)
            axes.annotate(
                f"step {steps[at]}", (x[at], y[at]), textcoords="offset points", xytext=(6, 6), fontsize=8, color=colour
            )
    if diagonal:
        points = [v for x, y, _ in paths.values() for v in (*x, *y)]
        axes.plot(
            [min(points), max(points)],
            [min(points), max(points)],
            color="#999999",
            linewidth=0.8,
            linestyle="--",
            label="equal",
        )
    if len(paths) > 1 or diagonal:
        axes.legend(fontsize=8, frameon=False)
    axes.margins(0.08)
    return _png(figure)


def scatter(x: Sequence[float], y: Sequence[float], *, title: str, xlabel: str, ylabel: str) -> bytes:
    """One dot per row, with the least-squares line where x varies."""
    with _sheet() as (figure, axes):
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.scatter(list(x), list(y), s=8, alpha=0.4, color=PALETTE[0], linewidths=0)
        n = len(x)
        if n > 1 and max(x) > min(x):
            mean_x, mean_y = sum(x) / n, sum(y) / n
            slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
            ends = [min(x), max(x)]
            axes.plot(ends, [mean_y + slope * (end - mean_x) for end in ends], color=PALETTE[1], linewidth=1.4)
        _place(figure, axes, title)
        return _png(figure)


# -- text and Markdown -------------------------------------------------------------------------------------------------


def number(value, digits: int = 3) -> str:
    """A value for a table cell: '' for None, 'yes'/'no', whole numbers as they are, floats to ``digits`` places."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.{digits}f}" if abs(value) >= 10**-digits or value == 0 else f"{value:.2e}"
    return str(value)


def with_interval(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """'0.812 [0.780, 0.841]'."""
    if value is None:
        return ""
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{interval}"


def cut(text: str, limit: int = REPORT_LIMIT) -> str:
    """The text with at most ``limit`` characters, saying how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit} characters)"


def cell(value) -> str:
    """A value as the inside of a Markdown table cell: one line, pipes and control characters made visible."""
    text = number(value) if not isinstance(value, str) else value
    text = (
        text.replace("\\", "\\\\").replace("|", "\\|").replace("\r\n", "\n").replace("\n", " ⏎ ").replace("\t", " ⇥ ")
    )
    text = text.replace("<", "&lt;").replace("`", "\\`")
    return "".join(ch if ch.isprintable() else f"\\x{ord(ch):02x}" for ch in text)


def markdown_table(rows: Sequence[Mapping], columns: Sequence[str] | Mapping[str, str] | None = None) -> str:
    """Markdown table of dict rows; ``columns`` selects and orders (a mapping renames: {key: heading})."""
    if not rows:
        return "_no rows_"
    if columns is None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
    headings = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    lines = ["| " + " | ".join(cell(head) for head in headings.values()) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in headings) + " |" for row in rows]
    return "\n".join(lines)


def sample_table(rows: Sequence[Mapping], columns: Sequence[str] | None = None, limit: int = REPORT_LIMIT) -> str:
    """Markdown table of text samples, long texts cut."""
    return markdown_table(
        [{key: cut(value, limit) if isinstance(value, str) else value for key, value in row.items()} for row in rows],
        columns,
    )


def facts(pairs: Mapping) -> str:
    """'- **name**: value' lines; None values are left out."""
    return "\n".join(f"- **{name}**: {cell(value)}" for name, value in pairs.items() if value is not None)


def document(title: str, *blocks: str | tuple[str, str] | None) -> str:
    """A Markdown page: a title and blocks, each a paragraph or (heading, body); empty ones are dropped."""
    parts = [f"# {title}"]
    for block in blocks:
        if isinstance(block, tuple):
            heading, body = block
            if body:
                parts.append(f"## {heading}\n\n{body}")
        elif block:
            parts.append(block)
    return "\n\n".join(parts) + "\n"
