"""python -m docs.rate_transfer [STORE SWEEP] — writes docs/rate_transfer.png: the loss by rate for each scaling rule.

It draws the plots of a report again, side by side. Without arguments it first runs `pipeline sweep rate_transfer`:
this takes about eleven minutes on two CPU cores.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

from pipeline.report import comparison, html_page, plots


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

    drawn = [
        plot
        for plot in plots.draw(comparison.read(store, sweep))
        if plot.key.startswith("loss_by_rate")
    ]
    size = (3.6 * len(drawn), 3.8)
    figure, [row] = pyplot.subplots(
        1, len(drawn), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, plot in zip(row, drawn, strict=True):
        for trace in plot.data:
            name, bars = trace["name"], trace.get("error_y", {}).get("array")
            style = {
                "color": html_page.LIGHT[trace["meta"]["colour"]],
                "marker": "o",
                "markersize": 4,
                "label": name.split()[-1],
            }
            if name == "best rate":
                style |= {
                    "linestyle": ":",
                    "marker": "*",
                    "markersize": 11,
                    "label": name,
                }
            axes.errorbar(
                trace["x"], trace["y"], bars, capsize=2, linewidth=1.2, **style
            )
        axes.set_xscale("log", base=2)
        ticks = plot.layout["xaxis"]["tickvals"]
        axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks], fontsize=8)
        axes.set(title=plot.title, xlabel="learning rate in the config")
        axes.grid(alpha=0.25)
    row[0].set_ylabel(drawn[0].layout["yaxis"]["title"]["text"])
    row[0].legend(fontsize=8)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
