"""The uploader and a store in memory, in which any request fails: nothing is missing.

Real stores fail in test_outages.py and test_databases.py, and processes are killed in
tests/checkpoints/test_kills.py. Here each single request fails in turn.
"""

from __future__ import annotations

import contextlib
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    PERMISSION_DENIED,
    RESOURCE_DOES_NOT_EXIST,
    UNAUTHENTICATED,
)

from pipeline.tracking import journal_file, run_creation, uploader
from pipeline.tracking.expected import MOST_FAILED_LISTS
from pipeline.tracking.foreign_store import LONGEST_TAG
from pipeline.tracking.journal_file import JOURNAL_NAME
from pipeline.tracking.journal_lines import Created, Fork, RunIds
from pipeline.tracking.stored_run import IncompleteError, StoredRun
from pipeline.tracking.uploader import Uploader
from tests.tracking.memory_store import (
    PICTURE,
    TABLE,
    UPDATES,
    MemoryStore,
    lines,
    row,
    write_files,
)


class Killed(BaseException):
    """The process of the uploader is gone."""


@pytest.fixture(autouse=True)
def small_requests(monkeypatch):
    """Let a run take several requests, and lose no time between two tries."""
    monkeypatch.setattr(uploader, "POINTS_PER_REQUEST", 6)
    monkeypatch.setattr(uploader, "POINTS_AFTER_FAILURE", 3)
    monkeypatch.setattr(uploader, "RETRY", 0.0)
    monkeypatch.setattr(run_creation, "CREATE_RETRY", 0.0)


@pytest.fixture
def path(tmp_path):
    """The journal of a run that failed, was resumed, and has ended."""
    write_files(tmp_path)
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines():
        writer.write(line)
    writer.close()
    return tmp_path / JOURNAL_NAME


def ship(store, path):
    """Ship the journal, as a shipper does; open the run again if that fails."""
    may_exist = False
    while True:
        try:
            opened = Uploader(store, path, may_exist=may_exist)
            break
        except MlflowException:
            may_exist = True
    with closing(opened):
        opened.finish(60.0)


@pytest.fixture
def undisturbed(path):
    store = MemoryStore()
    ship(store, path)
    run, points = store.content()
    assert (run["status"], run["end"]) == ("FINISHED", 9)
    assert run["tags"] == {"journal": "j", "mine": "1"}
    assert run["inputs"] == {("d", "1"), ("d", "2")}
    assert run["artifacts"] == {"note.txt", PICTURE, TABLE}
    assert len(points) == 2 * UPDATES
    return store


def test_all_points_are_in_the_store_before_the_run_ends(path):
    store = MemoryStore()
    ship(store, path)
    assert store.run["status"] == "FINISHED"
    assert len(store.points) == 2 * UPDATES


def test_a_journal_that_says_where_it_was_uploaded_still_ends_the_run(
    path, undisturbed
):
    writer = journal_file.LockedPast.open(path.parent).truncated_writer()
    writer.write(Created(RunIds("a" * 32, "1"), "sqlite:///x", True).content())
    writer.close()
    store = MemoryStore()
    ship(store, path)
    assert store.content() == undisturbed.content()


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "no answer"])
def test_a_request_that_fails_loses_nothing(path, undisturbed, is_done):
    """The uploader keeps what the store has not confirmed, and goes on.

    It repeats one request, and first reads in at most six what the store has. If it
    lost what it was sending, it would find that at the end, and ship all once more, in
    fourteen requests.
    """
    for number in range(1, undisturbed.requests + 1):
        store = MemoryStore(MlflowException("away"), number, is_done)
        ship(store, path)
        assert store.content() == undisturbed.content(), number
        assert 0 < store.requests - undisturbed.requests < 10, number


@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "no answer"])
def test_another_process_goes_on_where_one_was_killed(path, undisturbed, is_done):
    for number in range(1, undisturbed.requests + 1):
        store = MemoryStore(Killed(), number, is_done)
        with pytest.raises(Killed):
            ship(store, path)
        # Whoever sees the run's last status does not ship it again.
        if store.run is not None and store.run["status"] == "FINISHED":
            assert store.content() == undisturbed.content(), number
        with closing(Uploader(store, path, may_exist=True)) as second:
            missing = 2 * UPDATES - len(store.points)
            second.finish(60.0)
        assert second.sent == missing, number
        assert store.content() == undisturbed.content(), number


@pytest.mark.parametrize("rejections", [uploader.TRIES - 1, uploader.TRIES])
def test_a_line_is_left_out_once_it_was_rejected_several_times(
    path, undisturbed, monkeypatch, rejections
):
    """It does not keep the run from its end, and a tag says so."""
    store = MemoryStore()
    set_tag = store.set_tag
    error = MlflowException("it is too long", INVALID_PARAMETER_VALUE)
    errors = [error] * rejections

    def rejecting(run_id, key, value):
        if key == "mine" and errors:
            raise errors.pop()
        set_tag(run_id, key, value)

    monkeypatch.setattr(store, "set_tag", rejecting)
    ship(store, path)
    assert store.run["status"] == "FINISHED"
    if rejections < uploader.TRIES:
        assert store.content() == undisturbed.content()
    else:
        assert "mine" not in store.run["tags"]
        note = store.run["tags"]["not_shipped"]
        assert note == "tags: it is too long"


def tag_of_missing_files(folder, names):
    """Ship a journal that names files that do not exist; return `not_shipped`."""
    writer = journal_file.create(folder / JOURNAL_NAME)
    for line in lines():
        if line.get("artifact"):
            for name in names:
                writer.write({**line, "artifact": name})
        elif "shown" not in line:
            writer.write(line)
    writer.close()
    store = MemoryStore()
    ship(store, folder / JOURNAL_NAME)
    # A process that ships the journal again names nothing twice.
    with closing(Uploader(store, folder / JOURNAL_NAME, may_exist=True)) as second:
        second.finish(60.0)
    return store.run["tags"]["not_shipped"]


def test_all_that_is_left_out_is_named(tmp_path):
    """Only the last one was."""
    reason = "No such file or directory"
    note = tag_of_missing_files(tmp_path, ["a.txt", "b.txt", "c.txt"])
    assert note == f"a.txt: {reason}; b.txt: {reason}; c.txt: {reason}"


def test_what_a_tag_has_no_room_for_is_counted(tmp_path):
    names = [f"{number:0100}.txt" for number in range(100)]
    note = tag_of_missing_files(tmp_path, names)
    assert 4_700 < len(note) <= LONGEST_TAG
    named = note.count("No such file")
    assert note.endswith(f"; and {100 - named} more")


def test_a_point_that_is_rejected_is_not_left_out(path, monkeypatch):
    """The run stays open, as docs/resume.md says."""
    store = MemoryStore()
    log_batch = store.log_batch

    def rejecting(run_id, metrics=(), params=()):
        if metrics:
            raise MlflowException("it is no number", INVALID_PARAMETER_VALUE)
        log_batch(run_id, metrics, params)

    monkeypatch.setattr(store, "log_batch", rejecting)
    with (
        closing(Uploader(store, path, may_exist=False)) as opened,
        pytest.raises(MlflowException, match="it is no number"),
    ):
        opened.finish(0.1)
    assert store.run["status"] == "RUNNING"
    assert "not_shipped" not in store.run["tags"]


def test_an_end_that_only_the_store_has_stays_the_end(tmp_path):
    """The disk of the journal was full, and the trainer handed over the last lines."""
    write_files(tmp_path)
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines(end=False):
        writer.write(line)
    written = (tmp_path / JOURNAL_NAME).stat().st_size
    writer.write({"time": 9, "end": "FINISHED"})
    writer.close()
    unwritten = (tmp_path / JOURNAL_NAME).read_bytes()[written:].decode()
    with (tmp_path / JOURNAL_NAME).open("r+b") as file:
        file.truncate(written)

    store = MemoryStore()
    with closing(Uploader(store, tmp_path / JOURNAL_NAME, may_exist=False)) as first:
        first.read()
        first.add_unwritten(unwritten)
        first.finish(60.0)
    for _ in range(2):
        assert (store.run["status"], store.run["end"]) == ("FINISHED", 9)
        assert "failure" not in store.run["tags"]
        with closing(Uploader(store, tmp_path / JOURNAL_NAME, may_exist=True)) as sync:
            sync.finish(60.0)


@dataclass
class ForgetfulStore(MemoryStore):
    """Confirms some requests and loses them, as a gateway does that answers `{}`.

    Attributes:
        loses: the numbers of these requests.
    """

    loses: range = range(0)

    def _request(self, change: Any) -> None:
        self.requests += 1
        if self.requests not in self.loses:
            change()


def test_what_is_confirmed_and_lost_is_shipped_once_more(path, undisturbed):
    """Each request in turn, and all of them for a while."""
    first = 2  # the run itself is looked for after it was created
    for number in range(first, undisturbed.requests + 1):
        for loses in (range(number, number + 1), range(number, number + 8)):
            store = ForgetfulStore(loses=loses)
            with closing(Uploader(store, path, may_exist=False)) as opened:
                opened.finish(60.0)
            run, points = undisturbed.content()
            assert store.content() == (run, points), loses


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("away"),
        MlflowException("not now", UNAUTHENTICATED),
        ConnectionError("cut"),
    ],
    ids=str,
)
def test_artifacts_that_cannot_be_listed_now_are_not_all_there(
    path, undisturbed, monkeypatch, error
):
    """Any error passed for a list of all artifacts, of which one was lost."""
    store = MemoryStore()
    list_artifacts = store.list_artifacts
    errors = [error]

    def failing(run_id, path=None):
        if errors:
            store.run["artifacts"].clear()  # the file was confirmed, and is lost
            raise errors.pop()
        return list_artifacts(run_id, path)

    monkeypatch.setattr(store, "list_artifacts", failing)
    ship(store, path)
    assert store.content() == undisturbed.content()


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError(),
        PermissionError(),
        MlflowException("no", PERMISSION_DENIED),
        MlflowException("no", INVALID_PARAMETER_VALUE),
    ],
    ids=repr,
)
def test_a_location_that_never_lists_its_files_does_not_keep_a_run_open(
    path, monkeypatch, error
):
    store = MemoryStore()

    def failing(run_id, path=None):
        raise error

    monkeypatch.setattr(store, "list_artifacts", failing)
    ship(store, path)
    assert store.run["status"] == "FINISHED"


def test_a_server_that_fails_whenever_it_lists_does_not_keep_a_run_open(
    path, monkeypatch
):
    store = MemoryStore()
    failures = []

    def failing(run_id, path=None):
        failures.append(run_id)
        raise MlflowException("too many 500 error responses")

    monkeypatch.setattr(store, "list_artifacts", failing)
    ship(store, path)
    assert store.run["status"] == "FINISHED"
    # Once more for the pictures, and once at the end.
    assert len(failures) == MOST_FAILED_LISTS + 2


def test_what_stays_lost_is_no_success(path):
    """Without the check before the end, this run was FINISHED without its points."""
    store = ForgetfulStore(loses=range(2, 10**9))
    with (
        closing(Uploader(store, path, may_exist=False)) as opened,
        pytest.raises(IncompleteError, match="the store lacks the param a, which"),
    ):
        opened.finish(0.1)
    assert store.run["status"] == "RUNNING"


def test_lines_that_only_the_trainer_has_are_shipped_once_more(tmp_path):
    write_files(tmp_path)
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines(end=False):
        writer.write(line)
    written = (tmp_path / JOURNAL_NAME).stat().st_size
    writer.write(row(UPDATES + 1))
    writer.write({"time": 9, "end": "FINISHED"})
    writer.close()
    unwritten = (tmp_path / JOURNAL_NAME).read_bytes()[written:].decode()
    with (tmp_path / JOURNAL_NAME).open("r+b") as file:
        file.truncate(written)

    store = ForgetfulStore()
    with closing(Uploader(store, tmp_path / JOURNAL_NAME, may_exist=False)) as opened:
        opened.read()
        store.loses = range(1, 10**9)
        opened.add_unwritten(unwritten)
        with contextlib.suppress(OSError):
            opened.ship()
        store.loses = range(0)
        opened.finish(60.0)
    assert len(store.points) == 2 * (UPDATES + 1)
    assert (store.run["status"], store.run["end"]) == ("FINISHED", 9)


def test_a_step_of_somebody_else_is_no_length(path, undisturbed):
    """A millisecond time as a step took an array of as many bytes."""
    store = MemoryStore()
    with closing(Uploader(store, path, may_exist=False)) as first:
        first.finish(60.0)
    store.points["theirs", 1_790_000_000_000, 1] = 1.0
    store.points["train/loss", 1_790_000_000_000, 1] = 1.0
    store.points["system/cpu", 1_790_000_000_000, 1] = 1.0
    with closing(Uploader(store, path, may_exist=True)) as again:
        again.finish(60.0)
    assert (again.sent, store.run["status"]) == (0, "FINISHED")


def test_a_store_that_is_away_uses_up_no_try(path, undisturbed, monkeypatch):
    """One rejection after four outages left a line out."""
    store = MemoryStore()
    set_tag = store.set_tag
    errors = [MlflowException("it is wrong", INVALID_PARAMETER_VALUE)]
    errors += [MlflowException("away")] * uploader.TRIES

    def failing(run_id, key, value):
        if key == "mine" and errors:
            raise errors.pop()
        set_tag(run_id, key, value)

    monkeypatch.setattr(store, "set_tag", failing)
    ship(store, path)
    assert store.content() == undisturbed.content()


def test_the_tag_of_the_source_waits_for_a_store_that_is_away(path, monkeypatch):
    errors = [
        MlflowException("gone", RESOURCE_DOES_NOT_EXIST),
        MlflowException("away"),
    ]
    source = SimpleNamespace(data=SimpleNamespace(tags={}))
    asked = []

    def get_run(run_id):
        asked.append(run_id)
        if errors:
            raise errors.pop()
        return source

    store = MemoryStore()
    ship(store, path)
    monkeypatch.setattr(store, "get_run", get_run)
    run = StoredRun(store, store, "r", "1", path.parent, lambda: None)
    line = Fork("source")
    with pytest.raises(MlflowException, match="away"):
        run.ship(line, is_last=False)
    run.ship(line, is_last=False)  # it is gone
    assert "forks" not in store.run["tags"]
    run.ship(line, is_last=False)
    assert asked == ["source"] * 3
    assert store.run["tags"]["forks"] == "r"


def shipped_again(store, path, picture):
    """Ship a journal whose last lines were lost, with the picture made once more."""
    (path.parent / picture).write_text(picture)
    path.unlink()
    writer = journal_file.create(path)
    for line in lines():
        if "shown" in line:
            line["shown"] = [picture, TABLE]
        writer.write(line)
    writer.close()
    with closing(Uploader(store, path, may_exist=True)) as again:
        again.finish(60.0)


def test_a_picture_that_is_made_again_after_a_power_cut_is_there_once(
    path, undisturbed
):
    """Its line was shipped and not on the disk: the new one has another time."""
    later = PICTURE.replace("+timestamp+105+", "+timestamp+999+")
    assert later != PICTURE
    shipped_again(undisturbed, path, later)
    assert undisturbed.run["artifacts"] == {"note.txt", PICTURE, TABLE}
    # That of another update is another picture.
    other = PICTURE.replace("+step+5+", "+step+6+")
    shipped_again(undisturbed, path, other)
    assert undisturbed.run["artifacts"] == {"note.txt", PICTURE, other, TABLE}


@pytest.mark.parametrize(
    "name",
    [
        "secret.txt",
        "../secret.txt",
        "images/../../secret.txt",
        "images/inner/picture.png",
        "elsewhere/picture.png",
        "images/link.png",
        "linked/picture.png",
        "images/missing.png",
        "images/",
        "/etc/passwd",
        "shown/a\0b",
    ],
)
def test_a_journal_ships_no_file_but_those_in_its_two_folders(tmp_path, name):
    """A run directory may come from somebody else."""
    write_files(tmp_path)
    (tmp_path / "secret.txt").write_text("secret")
    for folder in ("images/inner", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "picture.png").write_text("secret")
    (tmp_path / "images" / "link.png").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines():
        if "shown" in line:
            line["shown"] = [name, TABLE]
        writer.write(line)
    writer.close()
    store = MemoryStore()
    ship(store, tmp_path / JOURNAL_NAME)
    assert store.run["status"] == "FINISHED"
    assert store.run["artifacts"] == {"note.txt", TABLE}
    assert store.run["tags"]["not_shipped"]


def test_a_folder_of_pictures_that_is_a_link_ships_nothing(tmp_path):
    write_files(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    (tmp_path / "images").symlink_to(tmp_path / "elsewhere")
    writer = journal_file.create(tmp_path / JOURNAL_NAME)
    for line in lines():
        writer.write(line)
    writer.close()
    store = MemoryStore()
    ship(store, tmp_path / JOURNAL_NAME)
    assert store.run["artifacts"] == {"note.txt", TABLE}
