"""Two renderers of one description: Plotly for the page, Matplotlib for images."""

from __future__ import annotations

import html
import math
import warnings
from pathlib import Path
from typing import Any

from pipeline.report.plots import Axis, Plot, Series

# Wong 2011, Nature Methods 8:441, made darker or lighter until each has a contrast of 3:1 (WCAG 2.2, 1.4.11) on
# the page's ground; the same hues, so that a description of a plot holds in both.
LIGHT = ("#0072b2", "#c44e00", "#00805d", "#a8327d", "#806600", "#4b4bc8", "#1f7f9f", "#444444")
DARK = ("#56b4e9", "#ff9752", "#34c79a", "#ee8fc4", "#e6d34a", "#a9a4ff", "#7fd3e0", "#d0d0d0")
# Colour is not the only sign: each also has its own dashes and marks, and both turn at different rates.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
_LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 3)), (0, (8, 3, 2, 3)))
_POINTS = ("o", "s", "D", "^", "X", "*", "P")
_INCHES, _DPI = (7.2, 4.4), 130
_LONGEST = 60  # characters of a name in an image's legend


def plotly(plot: Plot) -> dict[str, Any]:
    """`plot` as Plotly's JSON, checked by Plotly; colours are left to the page, which knows its theme.

    A trace's `meta` holds its colour's index, its group, and whether it is faint.
    """
    from plotly import graph_objects

    layout: dict[str, Any] = {"xaxis": _plotly_axis(plot.x), "yaxis": _plotly_axis(plot.y)}
    own = not plot.by_group and len([one for one in plot.series if one.name]) > 1
    layout["showlegend"] = own
    if plot.series and plot.series[0].x and isinstance(plot.series[0].x[0], str):
        layout["xaxis"] = {"type": "category"}
    if plot.level is not None:
        value, text = plot.level
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}]
        where = math.log10(value) if plot.y.log and value > 0 else value  # Plotly places text by the logarithm
        label = {
            "xref": "paper",
            "x": 1,
            "xanchor": "right",
            "y": where,
            "yanchor": "bottom",
            "text": html.escape(text),
        }
        layout["annotations"] = [{**label, "showarrow": False}]
    traces = [_plotly_trace(plot, series) for series in plot.series]
    return {"key": plot.key, **graph_objects.Figure(traces, layout).to_plotly_json()}


def _plotly_trace(plot: Plot, series: Series) -> dict[str, Any]:
    name = html.escape(series.name, quote=False)  # Plotly reads a few tags in texts
    x, y = html.escape(plot.x.title), html.escape(plot.y.title)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "+".join([*(["lines"] if series.line else []), *(["markers"] if series.marks else [])]),
        # Seven digits are more than a screen shows, and a third of the page.
        "x": [html.escape(v, quote=False) if isinstance(v, str) else float(f"{v:.7g}") for v in series.x],
        "y": [float(f"{v:.7g}") for v in series.y],
        "name": name,
        "line": {"dash": DASHES[series.colour % len(DASHES)], "width": 1 if series.faint else 2.2},
        "marker": {"symbol": MARKS[series.colour % len(MARKS)], "size": 8},
        "opacity": 0.4 if series.faint else 1,
        "showlegend": not series.faint,
        "hovertemplate": f"{name}<br>{x} %{{x}}<br>{y} %{{y:.6g}}<extra></extra>",
        "meta": {"colour": series.colour, "group": name if plot.by_group else None, "faint": series.faint},
    }
    if series.faint:
        trace["hoverinfo"], trace["hovertemplate"] = "skip", None
    if series.error is not None and any(series.error):
        trace["error_y"] = {"type": "data", "array": list(series.error), "thickness": 1.6, "width": 5}
    return trace


def _plotly_axis(axis: Axis) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": html.escape(axis.title)}, "type": "log" if axis.log else "linear"}
    if axis.zero and not axis.log:
        made["rangemode"] = "tozero"
    if axis.ticks:
        made |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": [f"{tick:g}" for tick in axis.ticks]}
    elif axis.log:
        made |= {"exponentformat": "power", "dtick": None, "minor": {"showgrid": False}}
    return made


def image(plot: Plot, path: Path) -> None:
    """Writes `plot` as a PNG, in the light colours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        matplotlib(plot).savefig(path, metadata={"Title": plot.title})


def matplotlib(plot: Plot) -> Any:
    """`plot` as a figure of Matplotlib's; each series is one container of its axes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A name with a dollar in it is a name, no formula.
    with rc_context({"text.parse_math": False, "font.size": 10}):
        figure = Figure(_INCHES, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for series in plot.series:
            _matplotlib_series(axes, series)
        if plot.level is not None:
            axes.axhline(plot.level[0], color="#777777", linewidth=1, linestyle="--")
            axes.annotate(
                plot.level[1], (1, plot.level[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom"
            )
        axes.set_title(plot.title, loc="left", fontweight="bold")
        _matplotlib_axis(axes, "x", plot.x)
        _matplotlib_axis(axes, "y", plot.y)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = 1 if max(map(len, labels)) > 40 else 2 if max(map(len, labels)) > 20 else 3
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _matplotlib_series(axes: Any, series: Series) -> None:
    turn = series.colour
    # An underscore hides a name from the legend, so one that begins with it is given a space.
    name = f" {series.name}" if series.name.startswith("_") else series.name
    name = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    axes.errorbar(
        list(series.x),
        list(series.y),
        yerr=list(series.error) if series.error is not None and any(series.error) else None,
        label=None if series.faint or not name else name,
        color=LIGHT[turn % len(LIGHT)],
        linestyle=_LINES[turn % len(_LINES)] if series.line else "none",
        marker=_POINTS[turn % len(_POINTS)] if series.marks else "none",
        linewidth=0.8 if series.faint else 1.8,
        alpha=0.4 if series.faint else 1.0,
        capsize=4,
    )


def _matplotlib_axis(axes: Any, which: str, axis: Axis) -> None:
    label = getattr(axes, f"set_{which}label")
    label(axis.title)
    if axis.log:
        getattr(axes, f"set_{which}scale")("log")
        # Matplotlib writes powers as formulas, which are off.
        getattr(axes, f"{which}axis").set_major_formatter(lambda value, position: f"{value:g}")
    elif axis.zero:
        getattr(axes, f"set_{which}lim")(0)
    if axis.ticks:
        getattr(axes, f"set_{which}ticks")(list(axis.ticks), [f"{tick:g}" for tick in axis.ticks], minor=False)
        getattr(axes, f"set_{which}ticks")([], minor=True)
