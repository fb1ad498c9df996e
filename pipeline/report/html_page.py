"""A self-contained HTML page with Plotly plots.

The page includes the Plotly library. The template `report.html` applies the colors of
the light or the dark theme.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.report.wording import finite

# The colors of Wong 2011, Nature Methods 8:441, with the lightness adjusted to a
# contrast of at least 3:1 with the background (WCAG 2.2, 1.4.11). Both themes have the
# same hues, so a description of a plot is valid in both.
LIGHT = (
    "#0072b2",
    "#c44e00",
    "#00805d",
    "#a8327d",
    "#806600",
    "#4b4bc8",
    "#1f7f9f",
    "#444444",
)
DARK = (
    "#56b4e9",
    "#ff9752",
    "#34c79a",
    "#ee8fc4",
    "#e6d34a",
    "#a9a4ff",
    "#7fd3e0",
    "#d0d0d0",
)
# Dashes and marks distinguish traces, too. They repeat with other periods than the
# colors, so traces of the same color differ in dash or mark.
DASHES = (
    "solid",
    "9px,5px",
    "3px,4px",
    "9px,4px,3px,4px",
    "14px,4px",
    "14px,4px,3px,4px",
)
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")


Trace = dict[str, Any]  # a trace in Plotly's format

RESULT = "Trajectory and result"  # heading of a section of plots


@dataclass(frozen=True)
class Plot:
    """One plot of a page.

    Attributes:
        key: the ID of the plot on the page.
        section: the heading of the section that contains the plot.
        title: the title of the plot.
        caption: the text that explains the plot.
        data: the traces, as returned by `trace`.
        layout: the layout in Plotly's format.
    """

    key: str
    section: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]

    def has_points(self) -> bool:
        return any(drawn["x"] for drawn in self.data)


def plot_key(name: str) -> str:
    """Return the name with `_` for each character that is not allowed in an ID."""
    return re.sub(r"[^\w.-]", "_", name)


def trace(
    name: str,
    x: Iterable[Any],
    y: Iterable[float],
    color: int = 0,
    mode: str = "lines",
    error: Sequence[float] = (),
) -> Trace:
    """Return a Plotly trace of y against x.

    Args:
        name: the name in the legend.
        x: numbers, or labels of categories.
        y: numbers.
        color: the index into the colors of the theme, and into the dashes and marks.
        mode: Plotly's mode, such as `lines+markers`.
        error: half the length of each error bar. If all are 0, no bars are drawn.
    """
    # Escape the name, since Plotly interprets some HTML tags.
    name = html.escape(name, quote=False)
    point = "%{xaxis.title.text} %{x}<br>%{yaxis.title.text} %{y:.6g}"
    drawn: Trace = {
        "type": "scatter",
        "mode": mode,
        "x": [_coordinate(value) for value in x],
        "y": [_seven_digits(value) for value in y],
        "name": name,
        # By default, Plotly shows no legend for a single trace.
        "showlegend": True,
        "line": {"dash": DASHES[color % len(DASHES)], "width": 2.2},
        "marker": {"symbol": MARKS[color % len(MARKS)], "size": 8},
        "hovertemplate": f"{name}<br>{point}<extra></extra>",
        "meta": {"color": color},
    }
    if any(error):
        drawn["error_y"] = {
            "type": "data",
            "array": list(error),
            "thickness": 1.6,
            "width": 5,
        }
    return drawn


def _coordinate(value: Any) -> str | float:
    if isinstance(value, str):
        return html.escape(value, quote=False)
    return _seven_digits(value)


def _seven_digits(value: float) -> float:
    """Round a number to seven significant digits, to keep the page small.

    Seven digits are more than a screen can show.
    """
    return float(f"{value:.7g}")


def axis(title: str, log: bool = False, ticks: Sequence[float] = ()) -> dict[str, Any]:
    """Return a Plotly axis, with ticks only at `ticks` unless `ticks` is empty."""
    kind = "log" if log else "linear"
    drawn: dict[str, Any] = {"title": {"text": html.escape(title)}, "type": kind}
    if ticks:
        drawn["tickvals"] = list(ticks)
    elif log:
        drawn["exponentformat"] = "power"
        drawn["minor"] = {"showgrid": False}
    return drawn


@dataclass(frozen=True)
class PageParts:
    """The parts of a page other than its plots.

    Attributes:
        findings: the findings, each with its `topic`, `text`, `figures` and `plot`.
        topics: the headings of the findings, by topic.
        question: the question that a sweep asks.
        tables: the tables, each with its `heading`, `head` and `rows`.
        groups: the names of the groups that can be hidden.
        averaged: the state of the jobs that were averaged, if there are seeds to
            average; otherwise empty.
        absent: the metrics that no run has.
    """

    findings: Sequence[Any] = ()
    topics: Mapping[str, str] = field(default_factory=dict)
    question: str = ""
    tables: Sequence[Any] = ()
    groups: Sequence[str] = ()
    averaged: str = ""
    absent: Sequence[str] = ()


def render(
    title: str,
    about: str,
    plots: Sequence[Plot],
    footer: str,
    parts: PageParts = PageParts(),
) -> str:
    """Render the template `report.html` as a page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined
    )
    template = environment.get_template("report.html")
    return template.render(
        title=title,
        about=about,
        plots=finite([asdict(plot) for plot in plots]),
        footer=footer,
        light=LIGHT,
        dark=DARK,
        dashes=DASHES,
        plotly=get_plotlyjs(),
        parts=parts,
    )
