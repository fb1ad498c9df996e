"""One HTML page that needs no other file: Plotly is inside and draws the plots in the reader's browser."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.report.plotly_figure import DARK, LIGHT, Plot

_TEMPLATE = Path(__file__).with_name("report.html")


def document(title: str, about: str, body: str, plots: Sequence[Plot], footer: str) -> str:
    """Return the page.

    Args:
        title, about, footer: plain text.
        body: HTML, with an element for each of `plots`, as `figures` makes it.
    """
    from plotly.offline import get_plotlyjs

    title = html.escape(title)
    parts = {
        "title": title,
        "heading": title.replace("_", "_<wbr>"),
        "about": html.escape(about),
        "light": _palette(LIGHT),
        "dark": _palette(DARK),
        "body": body,
        "footer": html.escape(footer),
        "plotly": get_plotlyjs(),
        # JSON in a script element: no text in it may close the element.
        "data": json_text([asdict(plot) for plot in plots]).replace("<", "\\u003c"),
        "count": str(len(LIGHT)),
    }
    # Filled in one pass, so that a name in the store that looks like a gap of the template stays a name.
    return re.sub(r"{{(\w+)}}", lambda gap: parts[gap[1]], _TEMPLATE.read_text(encoding="utf-8"))


def figures(plots: Sequence[Plot]) -> str:
    """Return HTML with an empty element for each plot, under its section and title and above its caption."""
    text = ""
    for section, of in groupby(plots, key=lambda plot: plot.section):
        text += f'<h2>{html.escape(section)}</h2><div class="plots">'
        for plot in of:
            title = f'<h3 id="{plot.key}-title">{html.escape(plot.title)}</h3>'
            text += f'<figure aria-labelledby="{plot.key}-title">{title}'
            text += f'<div id="{plot.key}" class="plotly-graph-div"></div>'
            text += f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        text += "</div>"
    return text


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; numbers that are not finite, which JSON does not have, become text."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _palette(colours: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))
