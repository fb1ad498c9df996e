"""The table and the pictures of docs/performance.md, from the JSON of `benchmarks`.

Command:   python -m benchmarks.report RESULT.json [--docs FOLDER]
Expect:    the JSON as docs/bench.json, the table between two comments in
           docs/performance.md, docs/bench_peers.png and docs/bench_memory.png.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.figures import BEST_PEER, Summary
from benchmarks.workloads import NAMES

BEGIN = "<!-- what benchmarks.report writes -->"
END = "<!-- its end -->"
PEERS_PICTURE = "The speed of the training loop ÷ that of each peer, by model"
MEMORY_PICTURE = (
    "Peak memory over the effective batch: "
    "accumulated, by Keras, and as one large batch"
)
PICTURES = f"""\
![{PEERS_PICTURE}](bench_peers.png)

![{MEMORY_PICTURE}](bench_memory.png)"""
COLORS = ("#1f77b4", "#aec7e8", "#d62728", "#ff7f0e", "#2ca02c")
RATIO_TICKS = (0.5, 0.75, 1, 1.5, 2, 3, 5, 10)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("result", type=Path)
    default_docs = Path(__file__).parent.parent / "docs"
    parser.add_argument("--docs", type=Path, default=default_docs)
    options = parser.parse_args()

    result = json.loads(options.result.read_text())
    figures = [Summary(**figure) for figure in result["figures"]]
    text = "\n\n".join([conditions(result, figures), table(figures), PICTURES])
    page = options.docs / "performance.md"
    page.write_text(filled(page.read_text(), text))

    copy = options.docs / "bench.json"
    if options.result.resolve() != copy.resolve():
        shutil.copyfile(options.result, copy)
    draw_peers(figures, options.docs / "bench_peers.png")
    draw_memory(figures, options.docs / "bench_memory.png")


def filled(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Return the page with `text` between the two comments.

    Raises:
        ValueError: the page does not have both comments.
    """
    if not re.search(f"{begin}.*{end}", page, re.DOTALL):
        raise ValueError(f"the page needs a line {begin} and after it a line {end}")
    return re.sub(
        f"{begin}.*{end}",
        lambda _: f"{begin}\n\n{text}\n\n{end}",
        page,
        flags=re.DOTALL,
    )


def conditions(result: Mapping[str, Any], figures: Sequence[Summary]) -> str:
    """Return when and on what it was measured, and how many targets were missed."""
    day = time.strftime("%-d %B %Y", time.gmtime(result["begun"]))
    minutes = result["seconds"] / 60
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    met = [figure.met for figure in figures if figure.met is not None]
    return (
        f"Measured on {day} in {minutes:.0f} minutes with `make bench`, "
        f"on {result['device']}: {result['processors']} cores of "
        f"{result['processor']}, {result['platform']}; {', '.join(versions)}. "
        f"Targets missed: {met.count(False)} of {len(met)}. "
        "All figures are in `docs/bench.json`."
    )


def table(figures: Sequence[Summary]) -> str:
    """Return a row for each figure and a column for each model.

    A cell is the median with its quartiles. Figures over the effective batch are left
    out, as they are drawn.
    """
    shown = [figure for figure in figures if figure.over is None]
    models = _models_of(shown)

    cells: dict[tuple[str, str], dict[str, str]] = {}
    targets: dict[tuple[str, str], str] = {}
    has_other_subjects = False
    for figure in shown:
        if figure.subject in models:
            column = figure.subject
            row = (figure.part, figure.what)
        else:
            column = ""
            row = (figure.part, f"{figure.subject}: {figure.what}")
            has_other_subjects = True
        cells.setdefault(row, {})[column] = _cell(figure)
        # Some models have no target where others have one.
        if not targets.get(row):
            targets[row] = _target(figure)

    columns = list(models)
    if has_other_subjects:
        columns.append("")
    lines = [
        _table_line(["part", "figure", "target", *columns]),
        f"| --- | --- | --- |{' --- |' * len(columns)}",
    ]
    for row, cells_by_column in cells.items():
        values = [cells_by_column.get(column, "") for column in columns]
        lines.append(_table_line([*row, targets[row], *values]))
    return "\n".join(lines)


def draw_peers(figures: Sequence[Summary], path: Path) -> None:
    """Draw ours ÷ each peer by model, with quartiles."""
    drawn = []
    for figure in figures:
        of_a_peer = figure.part == "peers" and figure.what != BEST_PEER
        if of_a_peer and figure.subject in NAMES:
            drawn.append(figure)
    if not drawn:
        return

    models = _models_of(drawn)
    comparisons = list(dict.fromkeys(figure.what for figure in drawn))
    picture, axes = _pyplot().subplots(figsize=(10, 3.6), layout="constrained")
    for number, what in enumerate(comparisons[: len(COLORS)]):
        # The points of a model stand side by side, around its tick.
        shift = (number - (len(comparisons) - 1) / 2) / (len(comparisons) + 1)
        points = [figure for figure in drawn if figure.what == what]
        medians = [figure.median for figure in points]
        below = [abs(figure.quartiles[0] - figure.median) for figure in points]
        above = [abs(figure.quartiles[1] - figure.median) for figure in points]
        axes.errorbar(
            [models.index(figure.subject) + shift for figure in points],
            medians,
            [below, above],
            fmt="o",
            color=COLORS[number],
            label=what.removeprefix("train ÷ ").replace("fit", "Keras' fit", 1),
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
    lowest, highest = axes.get_ylim()
    axes.set_yticks([tick for tick in RATIO_TICKS if lowest <= tick <= highest])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(
        ncols=len(comparisons),
        fontsize="small",
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
        frameon=False,
    )
    picture.savefig(path, dpi=110)


def draw_memory(figures: Sequence[Summary], path: Path) -> None:
    """Draw peak memory over the effective batch: accumulated, at factor 1, by Keras."""
    drawn = []
    effective_batches = set()
    for figure in figures:
        if figure.part == "memory" and figure.over is not None:
            drawn.append(figure)
            effective_batches.add(figure.over)
    if not drawn:
        return

    picture, axes = _pyplot().subplots(figsize=(10, 3.6), layout="constrained")
    accumulated = f"accumulated, micro-batch {memory.MICRO}"
    by_keras = f"{memory.KERAS}, micro-batch {memory.MICRO}"
    _draw_peaks(axes, drawn, memory.ACCUMULATED, accumulated, "#1f77b4")
    _draw_peaks(axes, drawn, memory.KERAS, by_keras, "#aec7e8")
    _draw_peaks(axes, drawn, memory.ONE_BATCH, "one large batch", "#d62728")

    ticks = sorted(effective_batches)
    axes.set_xscale("log", base=2)
    axes.set(
        xticks=ticks,
        xticklabels=ticks,
        xlabel="effective batch",
        ylabel="peak memory (MiB)",
        ylim=(0, None),
    )
    axes.grid(linewidth=0.4)
    axes.legend(title=drawn[0].subject)
    picture.savefig(path, dpi=110)


def _draw_peaks(
    axes: Any, figures: Sequence[Summary], what: str, label: str, color: str
) -> None:
    points = [(figure.over, figure.median) for figure in figures if figure.what == what]
    effective_batches, peaks = zip(*sorted(points), strict=True)
    axes.plot(
        effective_batches,
        peaks,
        "o-",
        color=color,
        label=label,
        markersize=4,
        linewidth=1,
    )


def _models_of(figures: Sequence[Summary]) -> list[str]:
    """Return the models that have a figure, in the order of `NAMES`."""
    subjects = {figure.subject for figure in figures}
    return [name for name in NAMES if name in subjects]


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _target(figure: Summary) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    if figure.at_least is not None:
        return f"≥ {figure.at_least:.2f}{unit}"
    if figure.at_most is not None:
        return f"≤ {figure.at_most:.2f}{unit}"
    return ""


def _cell(figure: Summary) -> str:
    text = f"{figure.median:.2f}"
    if figure.unit:
        text += f" {figure.unit}"
    if figure.rounds > 1:
        first, third = figure.quartiles
        text += f" [{first:.2f}…{third:.2f}]"
    if figure.what == BEST_PEER:
        text += f", {figure.note}"
    if figure.met is False:
        text += ", **missed**"
    return text


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


if __name__ == "__main__":
    main()
