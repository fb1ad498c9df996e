"""`pipeline rerun RUN_ID`: repeat a run from its record in MLflow, then compare the two."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.checkpoints import fork, run_dirs
from pipeline.common import imports, nvidia, secrets
from pipeline.common.errors import ConfigError, first_line, printable, say
from pipeline.config import (
    allow_list,
    compose,
    former_names,
    hydra_errors,
    key_kinds,
    schema,
    sizes,
)
from pipeline.config.plain import leaves, plain
from pipeline.config.resolve import resolve
from pipeline.launch import record
from pipeline.rerun import agreement, recorded_run
from pipeline.rerun.request import Request, parsed
from pipeline.tracking import provenance
from pipeline.tracking.foreign_store import ForeignStore, SweepRecord
from pipeline.trust.artifact_locations import confined, is_inside
from pipeline.trust.gate import Gate, check_config, drop_writers, strict, texts

DIFFERENT = 3  # exit status
# A limit of memory names no place of a machine: the recorded one holds in a rerun.
_LIMITS = ("hardware.memory", "hardware.gpu_memory")
# Overrides of these groups also apply to the user's own config.
_OWN = re.compile(rf"[+~]*({'|'.join(key_kinds.groups_apart())})[.=]")


def rerun(arguments: Sequence[str]) -> int:
    """Run a recorded run again and compare the two."""
    request = parsed(arguments, rerun.__doc__)
    # Only the user's own config says where the store is and what is trusted, never the record.
    overrides = [override for override in request.overrides if _OWN.match(override)]
    own = compose.composed([*request.own, *overrides])
    own.trust.allow = [*own.trust.allow, *map(former_names.current, request.allow)]
    store = ForeignStore.open(own.tracking.uri, own.trust.allow)
    if request.sweep:
        return _rerun_sweep(store, request)
    with confined(store.uri, store.places):
        return Rerun(
            request,
            own,
            store,
            recorded_run.fetch(store, request.run_id),
            _gate(request, own),
        ).run()


@dataclass(frozen=True)
class Rerun:
    """The rerun of one recorded run, in the store that holds it; `own` is the user's own config."""

    request: Request
    own: DictConfig
    store: ForeignStore
    recorded: recorded_run.RecordedRun
    gate: Gate

    @property
    def run_id(self) -> str:
        return str(self.recorded.run.info.run_id)

    def run(self) -> int:
        self._say_plan()
        try:
            config = self._config(self._experiment())
        finally:  # the gate has loaded TensorFlow, which knows the versions of CUDA and cuDNN
            now = provenance.environment(Path())
            say(
                *(
                    f"  differs: {line}"
                    for line in provenance.differences(self.recorded.environment, now)
                )
            )
        new = self._train(config)
        return 0 if new is None else self._compare(new)

    def _say_plan(self) -> None:
        info = self.recorded.run.info
        say(f"rerun of {info.run_id} ({info.run_name}), {info.status}")
        if not self.recorded.is_unchanged():
            say(
                "  differs: the record: its config is not the one that its tag config.hash was taken of"
            )
        say(*(f"  changed: {override}" for override in self.request.changing))
        then = (self.recorded.config.get("dataset") or {}).get("data_dir")
        if isinstance(then, str) and self._data_dir is None:
            say(
                f"  differs: dataset.data_dir: {then} then, its default now: an override dataset.data_dir=… changes it"
            )

    @property
    def _data_dir(self) -> str | None:
        """Return where the data are: where the caller says, else where the record does if that is below this folder."""
        if self.gate.data_dir is not None:
            return str(self.gate.data_dir)
        then = (self.recorded.config.get("dataset") or {}).get("data_dir")
        return (
            then
            if isinstance(then, str)
            and is_inside(Path(then), [Path.cwd()])
            and Path(then).exists()
            else None
        )

    def _experiment(self) -> str:
        mine, theirs = (
            str(self.own.tracking.experiment),
            (self.recorded.config.get("tracking") or {}).get("experiment"),
        )
        if (
            "tracking.experiment" not in self.request.values
            and isinstance(theirs, str)
            and theirs != mine
        ):
            try:
                self.store.check_experiment(theirs)
                return theirs
            except ConfigError as error:
                say(f"  changed: tracking.experiment={mine}, since {error}")
        self.store.check_experiment(mine)
        return mine

    def _config(self, experiment: str) -> dict[str, Any]:
        """Return the recorded config, adapted to this machine, once it has passed the gate."""
        values, links = self.request.values, self.recorded.links
        config = self._placed(experiment)
        self.recorded.check_schema()
        deleted = {
            override.key_or_group
            for override in self.request.parsed
            if override.is_delete()
        }
        # A value that an override replaces is not checked. One that it deletes stays, as Hydra has to find it.
        for key in values.keys() - deleted:
            if key in self.request.groups or (
                key != "dataset.data_dir" and not isinstance(values[key], dict)
            ):
                *parents, last = key.split(".")
                node: Any = config
                for part in parents:
                    node = node.get(part) if isinstance(node, dict) else None
                if isinstance(node, dict):
                    node.pop(last, None)
        config, writers = drop_writers(config, self.gate.allowed)
        for key, target in writers.items():
            say(
                f"  left out: {key}, a {target}: it writes files, which --allow {target} allows"
            )
        # The store is the user's own, and the experiment's name is masked in the store too.
        passed = ("tracking.", *(f"{key}." for key in deleted))
        for key, value in leaves(config).items():
            if (
                isinstance(value, str)
                and secrets.HIDDEN in value
                and not f"{key}.".startswith(passed)
            ):
                raise ConfigError(
                    key,
                    "was a secret and is not in the record: give it again as an override",
                    value,
                )
        with imports.without_chatter():
            check_config(config, self.gate)
        if (
            "optimizer.learning_rate" in values
            and not links
            and not any(key.startswith("sched") for key in values)
        ):
            rule = "must come with an override of the schedule: this record does not say what follows it"
            raise ConfigError(
                "optimizer.learning_rate", rule, values["optimizer.learning_rate"]
            )
        return recorded_run.relinked(config, links, values)

    def _placed(self, experiment: str) -> dict[str, Any]:
        """Return the recorded config with this call's store, data and run directory."""
        config = self.recorded.moved(self.gate.run_dir)
        config.pop("trust", None)
        name = printable(f"rerun of {self.recorded.run.info.run_name}")
        here = {
            **key_kinds.outside_a_sweep(),
            "uri": self.own.tracking.uri,
            "experiment": experiment,
            "run_name": name,
        }
        here["code"] = self.own.tracking.code  # paths on this machine
        config |= {
            "schema": schema.SCHEMA,
            "tracking": (config.get("tracking") or {}) | here,
        }
        ours = {}
        for key in key_kinds.keys_of(schema.Kind.MACHINE):
            group, _, name = key.partition(".")
            if group == "hardware" and key not in _LIMITS:
                ours[name] = self.own.hardware[name]
        config["hardware"] = (config.get("hardware") or {}) | ours
        if (config.get("start") or {}).get(
            "run"
        ) is not None:  # recorded as given: maybe ambiguous
            tags = self.recorded.run.data.tags
            config["start"]["run"] = f"{tags.get(fork.RUN)}@{tags.get(fork.UPDATE)}"
        if "data_dir" in (config.get("dataset") or {}):
            config["dataset"]["data_dir"] = self._data_dir
        return config

    def _train(self, config: dict[str, Any]) -> str | None:
        from pipeline.run import run

        run_ids: list[str] = []
        command = " ".join(
            ["pipeline rerun", self.run_id, *map(secrets.mask, self.request.overrides)]
        )
        tags = {"rerun.of": self.run_id, "mlflow.source.name": command}

        def task(composed: DictConfig, overrides: list[str], run_dir: Path) -> float:
            with strict(self.gate):
                with (
                    hydra_errors.as_config_error()
                ):  # again, since links of the record are resolved now
                    check_config(plain(composed), self.gate, imports=False)
                if (size := composed.accumulation.micro_batch_size) in sizes.SEARCHED:
                    raise ConfigError(
                        sizes.MICRO,
                        "must be a number: a rerun does what the record says",
                        size,
                    )
                if self.request.dry:
                    self._check_without_running(composed, overrides)
                    return 0.0
                run_id, loss = run.run(
                    composed,
                    overrides,
                    run_dir,
                    tags=tags,
                    check_dataset=self._check_dataset,
                )
            run_ids.append(run_id)
            return loss

        record.run_recorded(
            config,
            self.request.for_hydra(self.gate.run_dir),
            task,
            self.request.folders[1:],
        )
        return next(iter(run_ids), None)

    def _check_dataset(self, now: dict[str, Any]) -> None:
        if not any(key.startswith("train/") for key in self.recorded.run.data.metrics):
            raise ConfigError(
                "RUN_ID",
                "must have logged an update, to compare its rerun with",
                self.run_id,
            )
        try:
            if self.recorded.dataset:
                provenance.check_dataset(self.recorded.dataset, now, self.run_id)
        except ConfigError as error:
            if not any(
                f"{key}.".startswith("dataset.")
                and not key_kinds.facts_of(key).same_data
                for key in self.request.values
            ):
                raise
            say(f"  differs: {error}")

    def _check_without_running(
        self, config: DictConfig, overrides: Sequence[str]
    ) -> None:
        spec = resolve(config, overrides)
        fork.of(spec, self.gate.run_dir)
        with imports.without_chatter():
            from pipeline.dataset import load

            try:
                self._check_dataset(
                    provenance.dataset(load.load(spec.dataset, prepare=False))
                )
            except ConfigError as error:
                say(f"  differs: {error}")

    def _compare(self, run_id: str) -> int:
        client = self.store.client()
        new = client.get_run(run_id)
        validation = (self.recorded.dataset.get("examples") or {}).get("validation")
        single = new.data.params.get("hardware.precision") == "float32"
        in_tf32 = self.recorded.is_in_tf32() or (single and nvidia.computes_in_tf32())
        found, page = agreement.of_runs(
            client,
            self.recorded.run,
            new,
            validation,
            in_tf32,
            schema=self.recorded.config.get("schema", 0),
        )
        client.log_text(run_id, page, "rerun/comparison.html")
        client.set_tag(run_id, "rerun.verdict", found.verdict)
        say(f"rerun {run_id} of {self.run_id}: {found.text}")
        deterministic = new.data.params.get("hardware.deterministic") == "true"
        if (
            found.verdict != "bit-equal"
            and not self.request.changing
            and not deterministic
        ):
            say(
                "equal to the bit on one machine is guaranteed with hardware.deterministic=true only"
            )
        try:
            earlier = client.get_run(self.run_id).data.tags.get("rerun.by")
            client.set_tag(
                self.run_id, "rerun.by", f"{earlier}, {run_id}" if earlier else run_id
            )
        except (
            Exception
        ) as error:  # the verdict holds, even if the recorded run is read-only
            say(f"run {self.run_id} has no link to its rerun: {first_line(error)}")
        return (
            0 if found.verdict in ("bit-equal", "equal within rounding") else DIFFERENT
        )


def _gate(request: Request, own: DictConfig) -> Gate:
    data_dir = request.values.get(
        "dataset.data_dir", OmegaConf.select(own, "dataset.data_dir")
    )
    folder = None if data_dir is None else Path(str(data_dir)).absolute()
    downloads = request.values.get("dataset.download") is True
    starts = any(key.split(".")[0] == "start" for key in request.values)
    given = texts(request.values) | dict.fromkeys(request.groups)
    names = allow_list.allowed_names(own.trust.allow)
    return Gate(
        _run_dir(request),
        folder,
        names,
        own.tracking.uri,
        downloads=downloads,
        start=starts,
        given=given,
    )


def _run_dir(request: Request) -> Path:
    named = request.values.get(
        "hydra.run.dir", f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    )
    if not isinstance(named, str) or "${" in named:
        raise ConfigError("hydra.run.dir", "must be a folder, named as it is", named)
    return Path(named).absolute()


def _rerun_sweep(store: ForeignStore, request: Request) -> int:
    """Rerun all jobs of a sweep, one after the other, each in a process of its own."""
    parent = store.sweep(request.run_id).info
    children = SweepRecord(store.uri, parent.run_id, parent.experiment_id).children()
    if not children:
        raise ConfigError("RUN_ID", "must be a sweep with runs", request.run_id)
    options = [
        *request.own,
        *(f"--allow={entry}" for entry in request.allow),
        *(["--dry"] if request.dry else []),
    ]
    given = [
        override
        for override in request.overrides
        if not override.startswith("hydra.run.dir=")
    ]
    folder, statuses = _run_dir(request), []
    # -P: import nothing from the working directory
    verb, environment = (
        ["-P", "-m", "pipeline", "rerun"],
        {**os.environ, "PYTHONPATH": imports.path_of_processes()},
    )
    for number, (name, run) in enumerate(children.items()):
        say(f"{name}:")
        command = [
            *verb,
            run.info.run_id,
            *options,
            *given,
            f"hydra.run.dir={run_dirs.quoted(folder / str(number))}",
        ]
        statuses.append(subprocess.call([sys.executable, *command], env=environment))
    verdict = "can be run again" if request.dry else "agree"
    say(
        f"rerun of sweep {parent.run_id}: {statuses.count(0)} of {len(statuses)} runs {verdict}"
    )
    return max(statuses, key=lambda status: (status not in (0, DIFFERENT), status))
