"""The lines of a journal: one class for each kind, for the writer and all readers.

On disk, a line is a JSON object. It begins with a checksum, which
`pipeline.tracking.journal_file` adds, and the time in milliseconds since 1970. The
other keys are the fields of one class:

    {"start": {…}}                              the run: format, store, params, tags
    {"run": {"run_id": …, "experiment_id": …}}  the run's IDs in the store, with
                                                "store": URI if it is not that of
                                                `start`, and "complete": true
                                                if it has all lines before this one
    {"dataset": {…}, "context": "training"}     one input of the run
    {"step": updates, "metrics": {…}}           one row of metrics, with
                                                "logged": true if the user's own code
                                                has logged it; with "evaluation":
                                                {"name": …, "checksum": …} if `pipeline
                                                evaluate` has logged it
    {"tags": {…}}                               tags to set
    {"artifact": name}                          a file in the run directory
    {"model": ID, "update": updates}            a model in `logged_model-ID` there, with
                                                "register": name if it is registered
    {"step": updates, "shown": [path, …]}       pictures and tables of one evaluation,
                                                in folders of the run directory
    {"fork_of": run_id}                         the run that this run was forked from
    {"end": "FINISHED" | "FAILED" | "KILLED"}   the end of a segment
    {"resume": {…}}                             the start of another segment

`start` is the first line. A segment is the part of a run between its start, or a
resume, and its end. If the trainer died, the segment has no `end` line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from pipeline.common.recorded import FormError, check

FORMAT = 1  # version of the line format, recorded in the first line
# Tag of a run: when its loss exploded, and from which value.
LOSS_EXPLODED = "loss.exploded"
NOT_LOGGED = "model.not_logged"  # tag of a run: why its model is not in the store
# Tag of a run: the checksum of the data of an evaluation after `step` updates.
EVALUATED = "eval.{name}.{step}"

Form = dict[Any, Any]  # the form of a line on disk; see `pipeline.common.recorded`


@dataclass(frozen=True)
class Line:
    """One line of a journal.

    There is a subclass for each kind of line that this version knows. A line of any
    other kind is read as a `Line`. The fields of a subclass are its keys on disk, in
    the same order. A field that is None is left out.

    Attributes:
        time: milliseconds since 1970. A line without it gets the current time when it
            is written.
        KEY: the key by which this kind of line is recognized.
        FORM: the form that a line of this kind must have.
    """

    time: int | None = field(default=None, kw_only=True)

    KEY: ClassVar[str] = ""
    FORM: ClassVar[Form] = {}

    def content(self) -> dict[str, Any]:
        """Return the line as a JSON object, without the checksum."""
        return _without_none(self)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return the line for a JSON object that has the form of this class."""
        return cls(**_known(cls, content))


@dataclass(frozen=True)
class RunStart:
    """The description of a run. A journal of an older version may lack some fields.

    Attributes:
        format: the version of the line format.
        store: the URI of the store, with secrets masked.
        experiment: the name of the run's experiment.
        name: the name of the run.
        params: the params of the run.
        tags: the tags with which the run is created. The tag `journal` identifies the
            run.
        system_metrics: whether to sample system metrics.
        gpus: the GPUs of the run, as indices into the visible GPUs. None means all GPUs
            of the machine.
        segment: the settings of the first segment; see `provenance.segment`.
    """

    format: Any = None
    store: str = ""
    experiment: str = ""
    name: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    system_metrics: bool = False
    gpus: Sequence[int] | None = None
    segment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start(Line):
    """The first line of a journal, which describes the run."""

    start: RunStart

    KEY = "start"
    FORM: ClassVar[Form] = {
        "start": {
            "store?": str,
            "experiment?": str,
            "name?": str,
            "params?": dict,
            "tags?": {"journal?": str},
            "system_metrics?": bool,
            "gpus?": [int],
            "segment?": dict,
        }
    }

    def content(self) -> dict[str, Any]:
        """Return the line as a JSON object, without the checksum."""
        return {**super().content(), "start": _without_none(self.start)}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return the line for a JSON object that has the form of this class."""
        start = RunStart(**_known(RunStart, content["start"]))
        return cls(start, time=content.get("time"))


@dataclass(frozen=True)
class RunIds:
    """The IDs of a run in its store."""

    run_id: str
    experiment_id: str = ""


@dataclass(frozen=True)
class Created(Line):
    """The store has the run.

    Attributes:
        run: the IDs of the run.
        store: the URI of the store with secrets masked, if it is not that of the first
            line: a run that was in no store may be uploaded to any.
        complete: True if the store has all lines before this one, too.
    """

    run: RunIds
    store: str | None = None
    complete: bool | None = None

    KEY = "run"
    FORM: ClassVar[Form] = {
        "run": {"run_id": str, "experiment_id?": str},
        "store?": str,
        "complete?": bool,
    }

    def content(self) -> dict[str, Any]:
        """Return the line as a JSON object, without the checksum."""
        return {**super().content(), "run": _without_none(self.run)}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return the line for a JSON object that has the form of this class."""
        values = _known(cls, content)
        return cls(**values | {"run": RunIds(**_known(RunIds, content["run"]))})


@dataclass(frozen=True)
class Input(Line):
    """One split of the data.

    Attributes:
        dataset: the fields of MLflow's `Dataset`.
        context: `training`, or the name of the split.
    """

    dataset: Mapping[str, str]
    context: str

    KEY = "dataset"
    FORM: ClassVar[Form] = {
        "dataset": {
            "name": str,
            "digest": str,
            "source_type": str,
            "source": str,
            "schema?": str,
            "profile?": str,
        },
        "context": str,
    }


@dataclass(frozen=True)
class Row(Line):
    """Metrics of one step.

    Attributes:
        step: the number of completed updates.
        metrics: the values by name.
        logged: True if the user's own code has logged the metrics.
    """

    step: int
    metrics: Mapping[str, float]
    logged: bool | None = None

    KEY = "metrics"
    FORM: ClassVar[Form] = {
        "time": int,
        "step": int,
        "metrics": dict,
        "logged?": bool,
    }

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        """Return the line for a JSON object that has the form of this class."""
        for value in content["metrics"].values():
            if not isinstance(value, int | float):
                raise FormError("metrics must be numbers")
        return super().read(content)


@dataclass(frozen=True)
class Evaluated(Row):
    """Metrics of a split at a checkpoint, which `pipeline evaluate` has computed.

    Such a line is written after the run has ended. A version of this package without
    this class reads it as a `Row`.

    Attributes:
        evaluation: the `name` of the evaluation, and the `checksum` of its data.
    """

    evaluation: Mapping[str, str] = field(default_factory=dict)

    KEY = "evaluation"
    FORM: ClassVar[Form] = {
        **Row.FORM,
        "evaluation": {"name": str, "checksum": str},
    }

    @property
    def tags(self) -> dict[str, str]:
        """The tag of the run that names the data of this evaluation."""
        tag = EVALUATED.format(name=self.evaluation["name"], step=self.step)
        return {tag: self.evaluation["checksum"]}


@dataclass(frozen=True)
class Tags(Line):
    """Tags to set on the run."""

    tags: Mapping[str, str]

    KEY = "tags"
    FORM: ClassVar[Form] = {"tags": {str: str}}


@dataclass(frozen=True)
class Artifact(Line):
    """A file to upload. The uploader checks the name; see `StoredRun`."""

    artifact: str

    KEY = "artifact"
    FORM: ClassVar[Form] = {"artifact": str}


@dataclass(frozen=True)
class Model(Line):
    """A model to upload. The uploader checks the ID and the name; see `StoredRun`.

    Attributes:
        model: the ID.
        update: the number of completed updates of its weights. Journals of older
            versions lack it.
        register: the name under which the model is registered, or None.
    """

    model: str
    update: int | None = None
    register: str | None = None

    KEY = "model"
    FORM: ClassVar[Form] = {"model": str, "update?": int, "register?": str}


@dataclass(frozen=True)
class Shown(Line):
    """The pictures and tables of one evaluation, which are shipped together.

    Attributes:
        step: the number of completed updates.
        shown: the paths of the files in the run directory. The uploader checks them;
            see `StoredRun`.
    """

    step: int
    shown: Sequence[str]

    KEY = "shown"
    FORM: ClassVar[Form] = {"step": int, "shown": [str]}


@dataclass(frozen=True)
class Fork(Line):
    """The run began with a checkpoint of the run with this ID."""

    fork_of: str

    KEY = "fork_of"
    FORM: ClassVar[Form] = {"fork_of": str}


@dataclass(frozen=True)
class End(Line):
    """The end of a segment, with the status of the run."""

    end: str

    KEY = "end"
    FORM: ClassVar[Form] = {"time": int, "end": str}


@dataclass(frozen=True)
class Resume(Line):
    """The start of another segment, with its settings; see `provenance.segment`."""

    resume: Mapping[str, Any]

    KEY = "resume"
    FORM: ClassVar[Form] = {"resume": dict}


_KINDS = (
    Evaluated,  # before `Row`, since it has the key of a row, too
    Row,
    Start,
    Created,
    Input,
    Tags,
    Artifact,
    Model,
    Shown,
    Fork,
    End,
    Resume,
)


def parsed(content: Any) -> Line:
    """Return the line with the content of a JSON object.

    A line of a kind that this version does not know is accepted: it is a `Line` with
    nothing but its time.

    Raises:
        FormError: the line lacks a key, or has a value of a wrong type.
    """
    check(content, {"time?": int}, [])
    for kind in _KINDS:
        if kind.KEY in content:
            check(content, kind.FORM, [])
            return kind.read(content)
    return Line.read(content)


def _without_none(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not None, by name."""
    values = {entry.name: getattr(record, entry.name) for entry in fields(record)}
    return {name: value for name, value in values.items() if value is not None}


def _known(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of a dataclass and not null."""
    names = [entry.name for entry in fields(kind)]
    return {name: content[name] for name in names if content.get(name) is not None}
