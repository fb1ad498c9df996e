"""python -m docs.rate_transfer [STORE SWEEP]: draw the loss by rate for each rule.

It draws the plots of a report again, side by side, and writes docs/rate_transfer.png.
Without arguments it first runs `pipeline sweep rate_transfer`: this takes about eleven
minutes on two CPU cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

from pipeline.report import html_page, plots, reading
from pipeline.report.html_page import Plot, Trace


def main(store: str = "", sweep: str = "rate_transfer") -> None:
    if store:
        draw(store, sweep)
        return
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["tracking.log_model=false", "tracking.system_metrics=false"]
        command = [sys.executable, "-m", "pipeline", "sweep", sweep, *overrides]
        subprocess.run(command, cwd=folder, check=True)
        draw(f"sqlite:///{folder}/mlruns/mlflow.db", sweep)


def draw(store: str, sweep: str) -> None:
    """Draw the report's plots of the loss by rate in one picture."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    loss_plots = []
    for plot in plots.draw(reading.read(store, sweep)):
        if plot.key.startswith("loss_by_rate"):
            loss_plots.append(plot)

    figure, [row] = pyplot.subplots(
        1,
        len(loss_plots),
        figsize=(3.6 * len(loss_plots), 3.8),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, plot in zip(row, loss_plots, strict=True):
        draw_plot(axes, plot)
    row[0].set_ylabel(loss_plots[0].layout["yaxis"]["title"]["text"])
    row[0].legend(fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


def draw_plot(axes: Any, plot: Plot) -> None:
    """Draw one plot of the report on the axes of Matplotlib."""
    for trace in plot.data:
        bars = trace.get("error_y", {}).get("array")
        axes.errorbar(
            trace["x"], trace["y"], bars, capsize=2, linewidth=1.2, **style_of(trace)
        )
    axes.set_xscale("log", base=2)
    rates = plot.layout["xaxis"]["tickvals"]
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=8)
    axes.set(title=plot.title, xlabel="learning rate in the config")
    axes.grid(alpha=0.25)


def style_of(trace: Trace) -> dict[str, Any]:
    """Return the style of a curve of one batch size, or of the line of best rates."""
    name = trace["name"]
    color = html_page.LIGHT[trace["meta"]["color"]]
    if name == "best rate":
        return {
            "color": color,
            "linestyle": ":",
            "marker": "*",
            "markersize": 11,
            "label": name,
        }
    return {"color": color, "marker": "o", "markersize": 4, "label": name.split()[-1]}


if __name__ == "__main__":
    main(*sys.argv[1:])
