"""One plot: what it shows, and its JSON for Plotly. The page adds the colours, which depend on its theme."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Wong 2011, Nature Methods 8:441, made darker or lighter until each has a contrast of 3:1 (WCAG 2.2, 1.4.11) on
# the page's ground; the hues are the same, so a description of a plot holds in both themes.
LIGHT = ("#0072b2", "#c44e00", "#00805d", "#a8327d", "#806600", "#4b4bc8", "#1f7f9f", "#444444")
DARK = ("#56b4e9", "#ff9752", "#34c79a", "#ee8fc4", "#e6d34a", "#a9a4ff", "#7fd3e0", "#d0d0d0")
# Colour is not the only sign: dashes and marks repeat after another number of series each.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")


@dataclass(frozen=True)
class Series:
    """Points, joined by a line or not.

    Attributes:
        name: in the legend.
        x, y: coordinates of the points; x may be labels.
        colour: index of the colour; equal groups have equal colours in all plots.
        error: half the length of the bar at each point, in units of y; 0 draws none.
        line: whether a line joins the points.
        marks: whether the points are drawn.
        faint: one repetition behind its group's mean; not in the legend.
    """

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    colour: int = 0
    error: Sequence[float] | None = None
    line: bool = True
    marks: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: whether it is logarithmic, whether it begins at zero, and its only ticks where they are given."""

    title: str
    log: bool = False
    zero: bool = False
    ticks: Sequence[float] | None = None


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        key: its ID on the page.
        section: heading under which it stands.
        caption: what to read in it.
        by_group: its series are the groups of the sweep, whose legend the page draws once.
        level: a horizontal line: its height and its label.
    """

    key: str
    section: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: list[Series] = field(default_factory=list)
    by_group: bool = False
    level: tuple[float, str] | None = None


def plotly_json(plot: Plot) -> dict[str, Any]:
    """Return the plot's key, data and layout; a trace's `meta` holds its colour's index and its group."""
    layout: dict[str, Any] = {"xaxis": _axis(plot.x), "yaxis": _axis(plot.y)}
    layout["showlegend"] = not plot.by_group and sum(bool(series.name) for series in plot.series) > 1
    if plot.series and plot.series[0].x and isinstance(plot.series[0].x[0], str):
        layout["xaxis"] = {"type": "category"}
    if plot.level is not None:
        value, text = plot.level
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}]
        where = math.log10(value) if plot.y.log and value > 0 else value  # Plotly places text by the logarithm
        label = {"text": html.escape(text), "xref": "paper", "x": 1, "xanchor": "right", "y": where}
        layout["annotations"] = [{**label, "yanchor": "bottom", "showarrow": False}]
    return {"key": plot.key, "data": [_trace(plot, series) for series in plot.series], "layout": layout}


def _trace(plot: Plot, series: Series) -> dict[str, Any]:
    name = html.escape(series.name, quote=False)  # Plotly reads a few tags in texts
    x, y = html.escape(plot.x.title), html.escape(plot.y.title)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "+".join(["lines"] * series.line + ["markers"] * series.marks),
        # Seven digits are more than a screen shows; all of them would make the page a third longer.
        "x": [html.escape(v, quote=False) if isinstance(v, str) else float(f"{v:.7g}") for v in series.x],
        "y": [float(f"{v:.7g}") for v in series.y],
        "name": name,
        "line": {"dash": DASHES[series.colour % len(DASHES)], "width": 1 if series.faint else 2.2},
        "marker": {"symbol": MARKS[series.colour % len(MARKS)], "size": 8},
        "opacity": 0.4 if series.faint else 1,
        "showlegend": not series.faint,
        "meta": {"colour": series.colour, "group": name if plot.by_group else None},
    }
    if series.faint:
        trace["hoverinfo"] = "skip"
    else:
        trace["hovertemplate"] = f"{name}<br>{x} %{{x}}<br>{y} %{{y:.6g}}<extra></extra>"
    if series.error is not None and any(series.error):
        trace["error_y"] = {"type": "data", "array": list(series.error), "thickness": 1.6, "width": 5}
    return trace


def _axis(axis: Axis) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": html.escape(axis.title)}, "type": "log" if axis.log else "linear"}
    if axis.zero and not axis.log:
        made["rangemode"] = "tozero"
    if axis.ticks:
        made |= {"tickmode": "array", "tickvals": list(axis.ticks), "ticktext": [f"{tick:g}" for tick in axis.ticks]}
    elif axis.log:
        made |= {"exponentformat": "power", "minor": {"showgrid": False}}
    return made
