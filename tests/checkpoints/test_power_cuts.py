"""The machine of a run loses its power at any moment.

The run resumes with all rows, or is rejected with a way on. A run of 12 updates is
recorded once, see tests/power_cuts.py. For each disk that a power cut may leave, what
would be resumed is decided in this process, without TensorFlow. `make soak` trains each
distinct decision to its end.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.checkpoints import resume_rules
from pipeline.common.errors import ConfigError
from pipeline.config import compose
from pipeline.config.resolve import RunSpec, resolve
from pipeline.tracking.journal_file import JOURNAL_NAME
from tests import power_cuts
from tests.checkpoints.left import metrics_in, weights_in
from tests.power_cuts import VARIABLE, Disk
from tests.running import Store, pipeline

UPDATES = 12
RUN = (
    "model=mlp",
    "dataset.in_memory=true",
    "model.hidden=[8]",
    "model.dropout=0.2",
    "optimizer=momentum",
    "hardware.deterministic=true",
    f"training.updates={UPDATES}",
    "training.checkpoint_every=3",
    "training.evaluate_every=2",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "tracking.patience=30",
    "+training.callbacks.recording={_target_: tests.power_cuts.recording_callback}",
    "training.resume=auto",
    "hydra.run.dir=run",
)
ROWS = {
    "train": frozenset(range(1, UPDATES + 1)),
    "val": frozenset(range(2, UPDATES + 1, 2)),
}
# Each error has to name one of these.
WAYS_ON = ("training.resume=auto", "MLflow has a copy")


@dataclass(frozen=True)
class Decision:
    """What the next command would do with a disk.

    Attributes:
        resumes: whether there is a run to resume.
        update: completed updates of the checkpoint; 0 without one.
        rows: the steps in the journal, by the kind of row.
        described: whether the description of the run is complete.
        refused: the line of a refusal; empty without one.
    """

    resumes: bool = False
    update: int = 0
    rows: tuple[tuple[str, frozenset[int]], ...] = ()
    described: bool = False
    refused: str = ""

    @property
    def lost(self) -> set[tuple[str, int]]:
        """The rows of completed updates that the journal lacks, and nobody writes again."""
        rows = dict(self.rows)
        lost = set()
        for kind, steps in ROWS.items():
            for step in steps:
                if step <= self.update and step not in rows.get(kind, ()):
                    lost.add((kind, step))
        return lost


@dataclass
class Recorded:
    """A run, all that it has brought to the disk, and what it has left."""

    folder: Path
    syncs: list[power_cuts.Sync]
    root: int
    spec: RunSpec
    left: tuple

    def disks(self) -> Iterator[dict[str, bytes | None]]:
        """Yield each disk: all prefixes of what is synced, in the order of the syncs."""
        disk = Disk(self.root)
        for sync in self.syncs:
            before = disk.tree()
            yield before
            if sync.content is not None:
                path = _path_of(disk, sync.inode)
                for _, content in disk.partly(sync):
                    yield before if path is None else {**before, path: content}
            disk.apply(sync)
        yield disk.tree()

    def disks_between(self) -> Iterator[dict[str, bytes | None]]:
        """Yield the disk after each sync."""
        disk = Disk(self.root)
        for sync in self.syncs:
            disk.apply(sync)
            yield disk.tree()

    def disks_ahead(self) -> Iterator[dict[str, bytes | None]]:
        """Yield disks on which the system has written the journal before a sync."""
        journal = self.last()[JOURNAL_NAME]
        disk = Disk(self.root)
        for sync in self.syncs:
            disk.apply(sync)
            tree = disk.tree()
            if JOURNAL_NAME in tree:
                for end in _line_ends(journal):
                    if len(tree[JOURNAL_NAME]) < end <= sync.journal:
                        yield {**tree, JOURNAL_NAME: journal[: end - 1]}
                        yield {**tree, JOURNAL_NAME: journal[:end]}

    def last(self) -> dict[str, bytes | None]:
        """Return the disk after the run."""
        disk = Disk(self.root)
        for sync in self.syncs:
            disk.apply(sync)
        return disk.tree()

    def decide(self, tree: dict[str, bytes | None], folder: Path) -> Decision:
        """Return what the command would do, as `pipeline.run.run` asks for it."""
        shutil.rmtree(folder, ignore_errors=True)
        power_cuts.write(tree, folder)
        try:
            run = resume_rules.find_continuation(folder, self.spec, required=False)
        except ConfigError as error:
            return Decision(refused=str(error))
        if run is None:
            return Decision()
        run.past.close()
        rows = []
        for kind, steps in sorted(run.past.steps.items()):
            rows.append((kind, frozenset(steps)))
        return Decision(True, run.updates_done, tuple(rows), run.past.described)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    file = folder / "syncs"
    pipeline("train", *RUN, cwd=folder, **{VARIABLE: str(file)})
    # The spec has the store of the run already, which a decision would else give it.
    store = f"tracking.uri=sqlite:///{folder}/mlruns/mlflow.db"
    spec = resolve(compose.composed([*RUN, store]), RUN)
    root = (folder / "run").stat().st_ino
    return Recorded(folder, power_cuts.syncs(file), root, spec, _left_in(folder))


def test_a_sample_of_power_cuts(recorded, tmp_path):
    """Each cut resumes with all rows of the updates that it does not train again."""
    seen = {}
    for number, tree in enumerate(_different(recorded.disks())):
        if number % 200 == 0:
            _check(recorded.decide(tree, tmp_path / "run"), seen)
    for number, tree in enumerate(_different(recorded.disks_ahead())):
        if number % 40 == 0:
            _check(recorded.decide(tree, tmp_path / "run"), seen)
    assert {decision.update for decision in seen} >= {0, 3, 9}


def test_the_newest_checkpoint_is_used_once_it_is_on_the_disk(recorded, tmp_path):
    """Its rows were brought to the disk before it."""
    updates = set()
    for tree in _different(recorded.disks_between()):
        complete = [0]
        for path in tree:
            match = re.fullmatch(r"checkpoints/([0-9]+)/manifest.json", path)
            if match is not None:
                complete.append(int(match[1]))
        if b'"end":' in (tree.get(JOURNAL_NAME) or b""):
            break  # The run is over, so that no checkpoint is read.
        decision = recorded.decide(tree, tmp_path / "run")
        assert decision.update == max(complete)
        updates.add(decision.update)
    assert updates == {0, 3, 6, 9, 12}


@pytest.mark.slow
def test_every_power_cut(recorded, tmp_path):
    decisions = _all_decisions(recorded, tmp_path / "run")
    assert sum(decisions.values()) >= 2000
    assert {decision.update for decision in decisions} == {0, 3, 6, 9, 12}
    print(f"{sum(decisions.values())} disks, {len(decisions)} decisions")


@pytest.mark.soak
def test_every_decision_trains_to_the_same_rows_and_weights(recorded, tmp_path):
    trees = {}
    for tree in (*_sampled(recorded), *recorded.disks_ahead()):
        decision = recorded.decide(tree, tmp_path / "run")
        trees.setdefault(decision, tree)
    assert len(trees) > 20
    for decision, tree in trees.items():
        assert _trained(recorded, tree) == recorded.left, decision


def test_a_lost_row_of_an_evaluation_is_evaluated_again(recorded, tmp_path):
    """The journal ends between the two rows of update 12, whose checkpoint is there."""
    tree = recorded.last()
    journal = tree[JOURNAL_NAME]
    start = journal.index(b'"val/loss"', journal.index(b'"step":12,"metrics":{"train'))
    line = journal.rindex(b"\n", 0, start) + 1
    changed = bytearray(journal)
    changed[start] ^= 1
    for damaged in (journal[:line], bytes(changed)):
        decision = recorded.decide({**tree, JOURNAL_NAME: damaged}, tmp_path / "run")
        assert (decision.update, decision.lost) == (9, set())
    assert _trained(recorded, {**tree, JOURNAL_NAME: journal[:line]}) == recorded.left


def test_without_the_position_in_the_journal_rows_are_lost(
    recorded, tmp_path, monkeypatch
):
    """The negative control: any beginning of the journal beside the last checkpoints."""
    tree = recorded.last()
    cuts = []
    for end in _line_ends(tree[JOURNAL_NAME])[::2]:
        cuts.append({**tree, JOURNAL_NAME: tree[JOURNAL_NAME][:end]})
    decisions = [recorded.decide(cut, tmp_path / "run") for cut in cuts]
    assert not any(decision.lost for decision in decisions)
    monkeypatch.setattr(resume_rules, "_has_rows", lambda *_: True)
    unchecked = [recorded.decide(cut, tmp_path / "run") for cut in cuts]
    assert any(decision.lost for decision in unchecked)


def test_another_horizon_does_not_mix_with_the_rows_of_this_one(recorded, tmp_path):
    """Updates after the checkpoint have rows, of which MLflow replaces none."""
    longer = (*RUN, "training.updates=19")
    store = f"tracking.uri={recorded.spec.config.tracking.uri}"
    other = replace(recorded, spec=resolve(compose.composed([*longer, store]), longer))
    tree = recorded.last()
    assert other.decide(tree, tmp_path / "run").update == UPDATES

    def refusal(*checkpoints: str) -> str:
        """Return what is said to the disk without some checkpoints."""
        lost = tuple(f"checkpoints/{update}" for update in checkpoints)
        left = {path: tree[path] for path in tree if not path.startswith(lost)}
        assert recorded.decide(left, tmp_path / "run").refused == ""
        return other.decide(left, tmp_path / "run").refused

    said = refusal("12")
    assert re.fullmatch(
        r"hydra\.run\.dir cannot be continued: it has finished, with rows up to update "
        r"12, but its last checkpoint is that of update 9\. To train on from there, begin "
        r"a new run with the same overrides and start\.run=\S+/run@9\. Received: \S+",
        said,
    ), said
    said = refusal("12", "9", "6", "3")
    assert re.fullmatch(
        r"hydra\.run\.dir must be resumed with its own horizon, since 12 updates after "
        r"update 0 will be trained again and already have rows; for another horizon, "
        r"train into another folder\. Received: \{updates: 19\}\.",
        said,
    ), said


def _check(decision: Decision, seen: dict[Decision, int]) -> None:
    assert not decision.lost, decision
    if decision.refused:
        assert any(way in decision.refused for way in WAYS_ON), decision
    seen[decision] = seen.get(decision, 0) + 1


def _all_decisions(recorded: Recorded, folder: Path) -> dict[Decision, int]:
    decisions: dict[Decision, int] = {}
    for tree in (*_sampled(recorded), *_different(recorded.disks_ahead())):
        _check(recorded.decide(tree, folder), decisions)
    return decisions


def _sampled(recorded: Recorded) -> Iterator[dict[str, bytes | None]]:
    """Yield every 4th of the disks, and each one that ends with a line of the journal."""
    for number, tree in enumerate(_different(recorded.disks())):
        journal = tree.get(JOURNAL_NAME, b"")
        if number % 4 == 0 or journal[-1:] == b"\n":
            yield tree


def _different(
    trees: Iterator[dict[str, bytes | None]],
) -> Iterator[dict[str, bytes | None]]:
    """Yield the trees that differ from the one before: most bytes have no name yet."""
    before = None
    for tree in trees:
        if tree != before:
            yield tree
        before = tree


def _trained(recorded: Recorded, tree: dict[str, bytes | None]) -> tuple:
    """Let the command go on from a disk, with a store that has nothing of the run."""
    for name in ("run", "mlruns"):
        shutil.rmtree(recorded.folder / name)
    power_cuts.write(tree, recorded.folder / "run")
    pipeline("train", *RUN, cwd=recorded.folder)
    return _left_in(recorded.folder)


def _left_in(folder: Path) -> tuple:
    """Return the status, the rows and the weights that a run has left."""
    status = Store(folder).run().info.status
    return status, metrics_in(folder), weights_in(folder, UPDATES)


def _path_of(disk: Disk, inode: int) -> str | None:
    """Return the path of a file on the disk; None if it has no name there."""
    for name, (number, _) in disk.folders.get(disk.root, {}).items():
        if number == inode:
            return name
    return None


def _line_ends(journal: bytes) -> list[int]:
    ends = []
    for place, byte in enumerate(journal):
        if byte == ord("\n"):
            ends.append(place + 1)
    return ends
