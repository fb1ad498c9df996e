"""One HTML page that needs no other file: Plotly is inside and draws the plots in the reader's browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.report.plotly_figure import DARK, DASHES, LIGHT, Plot


def document(title: str, about: str, plots: Sequence[Plot], footer: str, **sweep: Any) -> str:
    """Return the page that `report.html` makes.

    Args:
        title, about, footer: plain text, as all other text is: the template escapes it.
        sweep: what else the page of a sweep shows: see the template.
    """
    from jinja2 import Environment, FileSystemLoader
    from plotly.offline import get_plotlyjs

    template = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template("report.html")
    drawn = finite([asdict(plot) for plot in plots])
    colours = {"light": LIGHT, "dark": DARK, "dashes": DASHES}
    return template.render(
        title=title, about=about, plots=drawn, footer=footer, plotly=get_plotlyjs(), **colours, **sweep
    )


def finite(value: Any) -> Any:
    """Return `value` with text in the place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
