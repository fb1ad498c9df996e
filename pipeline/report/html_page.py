"""A self-contained HTML page with plots of Plotly, which it includes; its template adds the colors of a theme."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Wong 2011, Nature Methods 8:441, with the lightness adjusted to a contrast of 3:1 with the background (WCAG 2.2,
# 1.4.11). Both themes have the same hues, so a description of a plot fits both.
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
# Color is not the only distinction: dashes and marks repeat with other periods.
DASHES = (
    "solid",
    "9px,5px",
    "3px,4px",
    "9px,4px,3px,4px",
    "14px,4px",
    "14px,4px,3px,4px",
)
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")


@dataclass(frozen=True)
class Plot:
    """One plot: `data` has traces of `trace`, `layout` is Plotly's, `key` is the ID on the page."""

    key: str
    section: str
    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def trace(
    name: str,
    x: Iterable[Any],
    y: Iterable[float],
    colour: int = 0,
    mode: str = "lines",
    error: Sequence[float] = (),
) -> dict[str, Any]:
    """Return a Plotly trace of y over x, numbers or labels; `error` is half the length of each error bar."""
    name = html.escape(name, quote=False)  # Plotly interprets some tags
    where = "%{xaxis.title.text} %{x}<br>%{yaxis.title.text} %{y:.6g}"
    made: dict[str, Any] = {
        "type": "scatter",
        "mode": mode,
        # A screen shows fewer than seven digits; all digits would make the page a third longer.
        "x": [
            html.escape(value, quote=False)
            if isinstance(value, str)
            else float(f"{value:.7g}")
            for value in x
        ],
        "y": [float(f"{value:.7g}") for value in y],
        "name": name,
        "showlegend": True,  # also of a plot's only trace
        "line": {"dash": DASHES[colour % len(DASHES)], "width": 2.2},
        "marker": {"symbol": MARKS[colour % len(MARKS)], "size": 8},
        "hovertemplate": f"{name}<br>{where}<extra></extra>",
        "meta": {"colour": colour},
    }
    if any(error):
        made["error_y"] = {
            "type": "data",
            "array": list(error),
            "thickness": 1.6,
            "width": 5,
        }
    return made


def axis(title: str, log: bool = False, ticks: Sequence[float] = ()) -> dict[str, Any]:
    """Return a Plotly axis; `ticks` replace the default ones."""
    more = (
        {"tickvals": list(ticks)}
        if ticks
        else {"exponentformat": "power", "minor": {"showgrid": False}}
    )
    made = {"title": {"text": html.escape(title)}, "type": "log" if log else "linear"}
    return made | (more if ticks or log else {})


def render(
    title: str, about: str, plots: Sequence[Plot], footer: str, **sweep: Any
) -> str:
    """Render the template `report.html`, which escapes all text; its first lines list the variables in `sweep`."""
    from jinja2 import Environment, FileSystemLoader
    from plotly.offline import get_plotlyjs

    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True
    ).get_template("report.html")
    drawn = finite([asdict(plot) for plot in plots])
    look = {"light": LIGHT, "dark": DARK, "dashes": DASHES, "plotly": get_plotlyjs()}
    return template.render(
        title=title, about=about, plots=drawn, footer=footer, **look, **sweep
    )


def finite(value: Any) -> Any:
    """Return `value` with non-finite numbers as text, since JSON has none."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return (
        str(value) if isinstance(value, float) and not math.isfinite(value) else value
    )
