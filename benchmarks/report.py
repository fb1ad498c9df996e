"""The table and the pictures of docs/performance.md, from what `python -m benchmarks` has written.

Command:   python -m benchmarks.report RESULT.json [--docs FOLDER]
Expect:    the JSON as docs/bench.json, the table between two comments in docs/performance.md, docs/bench_peers.png
           and docs/bench_memory.png.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.figures import BEST
from benchmarks.workloads import NAMES

BEGIN, END = "<!-- what benchmarks.report writes -->", "<!-- its end -->"
PICTURES = """\
![The speed of the training loop ÷ that of each peer, by model](bench_peers.png)

![Peak memory over the effective batch: accumulated, by Keras, and as one large batch](bench_memory.png)"""
COLOURS = ("#1f77b4", "#aec7e8", "#d62728", "#ff7f0e", "#2ca02c")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("result", type=Path)
    parser.add_argument(
        "--docs", type=Path, default=Path(__file__).parent.parent / "docs"
    )
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    page = options.docs / "performance.md"
    page.write_text(
        filled(
            page.read_text(),
            "\n\n".join([conditions(result), table(result["figures"]), PICTURES]),
        )
    )
    if options.result.resolve() != (options.docs / "bench.json").resolve():
        shutil.copyfile(options.result, options.docs / "bench.json")
    draw_peers(result["figures"], options.docs / "bench_peers.png")
    draw_memory(result["figures"], options.docs / "bench_memory.png")


def filled(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the page with `text` between the two comments.

    Raises:
        ValueError: the page has not both.
    """
    if not re.search(f"{begin}.*{end}", page, re.DOTALL):
        raise ValueError(f"the page needs a line {begin} and after it a line {end}")
    return re.sub(
        f"{begin}.*{end}",
        lambda _: f"{begin}\n\n{text}\n\n{end}",
        page,
        flags=re.DOTALL,
    )


def conditions(result: dict[str, Any]) -> str:
    """Return when, on what and how it was measured, and how many targets were missed."""
    day = time.strftime("%-d %B %Y", time.gmtime(result["begun"]))
    versions = ", ".join(
        f"{name} {version}" for name, version in result["versions"].items()
    )
    met = [figure["met"] for figure in result["figures"] if figure["met"] is not None]
    return (
        f"Measured on {day} in {result['seconds'] / 60:.0f} minutes with `make bench`, on {result['device']}: "
        f"{result['processors']} cores of {result['processor']}, {result['platform']}; {versions}. "
        f"Of {len(met)} targets {met.count(False)} were missed. All figures are in `docs/bench.json`."
    )


def table(figures: Sequence[dict[str, Any]]) -> str:
    """Return a row for each figure and a column for each model: the median with its quartiles."""
    shown = [
        figure for figure in figures if figure["over"] is None
    ]  # the others are drawn
    models = [
        name for name in NAMES if any(figure["subject"] == name for figure in shown)
    ]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    targets: dict[tuple[str, str], str] = {}
    for figure in shown:
        of_model = figure["subject"] in models
        row = (
            figure["part"],
            figure["what"] if of_model else f"{figure['subject']}: {figure['what']}",
        )
        rows.setdefault(row, {})[figure["subject"] if of_model else ""] = _cell(figure)
        targets[row] = targets.get(row) or _target(figure)  # some models have none
    columns = [*models, *([""] if any("" in cells for cells in rows.values()) else [])]
    lines = [
        f"| part | figure | target | {' | '.join(columns)} |",
        f"| --- | --- | --- |{' --- |' * len(columns)}",
    ]
    for row, cells in rows.items():
        lines.append(
            f"| {' | '.join([*row, targets[row], *(cells.get(name, '') for name in columns)])} |"
        )
    return "\n".join(lines)


def _target(figure: dict[str, Any]) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    if figure["at_least"] is not None:
        return f"≥ {figure['at_least']:.2f}{unit}"
    return "" if figure["at_most"] is None else f"≤ {figure['at_most']:.2f}{unit}"


def _cell(figure: dict[str, Any]) -> str:
    first, third = figure["quartiles"]
    spread = f" [{first:.2f}…{third:.2f}]" if len(figure["values"]) > 1 else ""
    unit = f" {figure['unit']}" if figure["unit"] else ""
    of = f", {figure['note']}" if figure["what"] == BEST else ""
    return f"{figure['median']:.2f}{unit}{spread}{of}{', **missed**' if figure['met'] is False else ''}"


def draw_peers(figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw ours ÷ each peer by model, with quartiles."""
    found = [
        figure
        for figure in figures
        if figure["part"] == "peers" and figure["subject"] in NAMES
    ]
    found = [figure for figure in found if figure["what"] != BEST]
    if not found:
        return
    pyplot = _pyplot()
    models = [
        name for name in NAMES if any(figure["subject"] == name for figure in found)
    ]
    whats = list(dict.fromkeys(figure["what"] for figure in found))
    picture, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    for number, (what, colour) in enumerate(zip(whats, COLOURS, strict=False)):
        of_one = {
            figure["subject"]: figure for figure in found if figure["what"] == what
        }
        places = [
            models.index(name) + (number - (len(whats) - 1) / 2) / (len(whats) + 1)
            for name in of_one
        ]
        medians = [figure["median"] for figure in of_one.values()]
        spreads = [
            [
                abs(figure["quartiles"][side] - figure["median"])
                for figure in of_one.values()
            ]
            for side in (0, 1)
        ]
        label = what.removeprefix("train ÷ ").replace("fit", "Keras' fit", 1)
        axes.errorbar(
            places,
            medians,
            spreads,
            fmt="o",
            color=colour,
            label=label,
            capsize=3,
            markersize=5,
        )
    axes.axhline(1, color="black", linewidth=1)
    axes.set(
        xticks=range(len(models)),
        xticklabels=models,
        ylabel="speed of ours ÷ theirs",
        yscale="log",
    )
    ticks = (0.5, 0.75, 1, 1.5, 2, 3, 5, 10)
    lowest, highest = axes.get_ylim()
    axes.set_yticks([tick for tick in ticks if lowest <= tick <= highest])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(
        ncols=len(whats),
        fontsize="small",
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
        frameon=False,
    )
    picture.savefig(path, dpi=110)


def draw_memory(figures: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the peak of memory over the effective batch: accumulated, at factor 1, and by Keras."""
    found = [
        figure
        for figure in figures
        if figure["part"] == "memory" and figure["over"] is not None
    ]
    if not found:
        return
    pyplot = _pyplot()
    picture, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    labels = {
        memory.ACCUMULATED: f"accumulated, micro-batch {memory.MICRO}",
        memory.KERAS: f"{memory.KERAS}, micro-batch {memory.MICRO}",
        memory.WHOLE: "one large batch",
    }
    for (what, label), colour in zip(
        labels.items(), ("#1f77b4", "#aec7e8", "#d62728"), strict=True
    ):
        points = sorted(
            (figure["over"], figure["median"])
            for figure in found
            if figure["what"] == what
        )
        axes.plot(
            *zip(*points, strict=True),
            "o-",
            color=colour,
            label=label,
            markersize=4,
            linewidth=1,
        )
    sizes = sorted({figure["over"] for figure in found})
    axes.set_xscale("log", base=2)
    axes.set(
        xticks=sizes,
        xticklabels=sizes,
        xlabel="effective batch",
        ylabel="peak memory (MiB)",
        ylim=(0, None),
    )
    axes.grid(linewidth=0.4)
    axes.legend(title=found[0]["subject"])
    picture.savefig(path, dpi=110)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


if __name__ == "__main__":
    main()
