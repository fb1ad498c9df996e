"""`pipeline rerun RUN_ID`: repeat a run from its record, then compare the two runs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from pipeline.checkpoints import fork
from pipeline.common import imports, nvidia, secrets
from pipeline.common.errors import ConfigError, count, first_line, say
from pipeline.config import hydra_errors, key_kinds, sizes
from pipeline.config.overrides import hydra_quoted
from pipeline.config.plain import plain
from pipeline.config.resolve import XLA, resolve
from pipeline.launch import recorded_job
from pipeline.rerun import adapted_config, agreement, last_horizon, recorded_run
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.rerun.request import Request, parse_command_line
from pipeline.tracking import provenance, resumed_settings
from pipeline.tracking.foreign_store import ForeignStore, SweepRecord
from pipeline.trust.artifact_locations import confined
from pipeline.trust.gate import Gate, check_config, strict

DIFFERENT = 3  # exit status


def rerun(arguments: Sequence[str]) -> int:
    """Run a recorded run again, and compare the two runs."""
    request = parse_command_line(arguments, rerun.__doc__)
    own_config = request.own_config()
    store = ForeignStore.open(own_config.tracking.uri, own_config.trust.allow)
    if request.sweep:
        return _rerun_sweep(store, request)
    with confined(store.uri, store.places):
        recorded = recorded_run.fetch(store, request.run_id)
        if request.other is not None:
            return _compare_with(store, recorded, request.other)
        request = last_horizon.requested(recorded, request)
        gate = adapted_config.gate_of(request, own_config)
        return Rerun(request, own_config, store, recorded, gate).run()


@dataclass(frozen=True)
class Rerun:
    """The rerun of one recorded run, in the store that holds it.

    Attributes:
        request: the parsed command line.
        own_config: the user's own config.
        store: the store of the recorded run and of the new run.
        recorded: the record of the run.
        gate: the permissions of the recorded config.
    """

    request: Request
    own_config: DictConfig
    store: ForeignStore
    recorded: RecordedRun
    gate: Gate

    def run(self) -> int:
        """Rerun the run, compare the two runs, and return the exit status."""
        self._say_plan()
        try:
            experiment = self._experiment()
            config = adapted_config.adapt(
                self.recorded, self.request, self.own_config, self.gate, experiment
            )
        finally:
            # Compare the environments only now: the gate has loaded TensorFlow, from
            # which the versions of CUDA and cuDNN are read.
            self._say_differences_of_environment()
        new_run_id = self._train(config)
        if new_run_id is None:
            return 0
        return self._compare(new_run_id)

    def _say_plan(self) -> None:
        info = self.recorded.run.info
        say(f"rerun of {info.run_id} ({info.run_name}), {info.status}")
        if not self.recorded.is_unchanged():
            say("  differs: the recorded config does not match its tag config.hash")
        for override in self.request.changes:
            say(f"  changed: {override}")

        recorded_dir = self.recorded.data_dir
        data_dir = adapted_config.data_dir(self.recorded, self.gate)
        if recorded_dir is not None and data_dir is None:
            say(
                f"  differs: dataset.data_dir: {recorded_dir} then, the default now; "
                "to change it, override dataset.data_dir"
            )

    def _experiment(self) -> str:
        """Return the name of the experiment for the new run.

        It is the recorded experiment if its artifact location is allowed and no
        override names another experiment; otherwise, it is the user's experiment.

        Raises:
            ConfigError: the artifact location of the user's experiment is not allowed.
        """
        own_experiment = str(self.own_config.tracking.experiment)
        recorded_experiment = self.recorded.experiment
        is_overridden = "tracking.experiment" in self.request.values
        if recorded_experiment is not None and not is_overridden:
            try:
                self.store.check_experiment(recorded_experiment)
                return recorded_experiment
            except ConfigError as error:
                if recorded_experiment == own_experiment:
                    raise
                say(f"  changed: tracking.experiment={own_experiment}, since {error}")
        self.store.check_experiment(own_experiment)
        return own_experiment

    def _say_differences_of_environment(self) -> None:
        now = provenance.environment(Path())
        lines = provenance.differences(self.recorded.environment, now)
        lines += provenance.changes_of_code(self.recorded.segments)
        lines += resumed_settings.differences(self.recorded.segments)
        for line in lines:
            say(f"  differs: {line}")

    def _train(self, config: dict[str, Any]) -> str | None:
        """Train with the adapted config; with `--dry`, only check it.

        Returns:
            The ID of the new run, or None if `--dry` was given.
        """
        from pipeline.run import run  # imported late, since the import takes seconds

        new_run_ids: list[str] = []

        def task(composed: DictConfig, overrides: list[str], run_dir: Path) -> float:
            with strict(self.gate):
                self._check_composed(composed)
                if self.request.dry:
                    self._check_without_running(composed, overrides)
                    return 0.0
                run_id, loss = run.run(
                    composed,
                    overrides,
                    run_dir,
                    tags=self._tags(),
                    check_dataset=self._check_dataset,
                )
            new_run_ids.append(run_id)
            return loss

        recorded_job.run_recorded(
            config,
            self.request.overrides_of_record(),
            task,
            self.request.own_folders,
        )
        if not new_run_ids:
            return None
        return new_run_ids[0]

    def _check_composed(self, config: DictConfig) -> None:
        """Check the composed config, in which the recorded links are now resolved.

        Raises:
            ConfigError: the config is not trusted, or it leaves the micro-batch size
                or the use of XLA to a measurement.
        """
        with hydra_errors.translated():
            check_config(plain(config), self.gate, imports=False)
        micro_batch_size = config.accumulation.micro_batch_size
        if micro_batch_size in sizes.SEARCHED:
            rule = "must be a number, because a rerun does not search for a size"
            raise ConfigError(sizes.MICRO, rule, micro_batch_size)
        xla = config.hardware.xla
        if xla == "fastest":
            rule = "must be true, false or auto, because a rerun does not time anything"
            raise ConfigError(XLA, rule, xla)

    def _check_without_running(
        self, config: DictConfig, overrides: Sequence[str]
    ) -> None:
        """Make the checks that precede training.

        If the data cannot be loaded or differ from the recorded data, print why.
        """
        spec = resolve(config, overrides)
        fork.find_fork(spec, self.gate.run_dir)
        with imports.without_chatter():
            from pipeline.dataset import load

            try:
                data = load.load(spec.dataset, prepare=False)
                self._check_dataset(provenance.dataset(data))
            except ConfigError as error:
                say(f"  differs: {error}")

    def _check_dataset(self, now: dict[str, Any]) -> None:
        """Reject data other than the recorded data, unless an override may change them.

        Args:
            now: the record of the current data.

        Raises:
            ConfigError: the data differ, or the recorded run has no training metrics.
        """
        if not any(key.startswith("train/") for key in self.recorded.run.data.metrics):
            rule = "must have logged an update with which its rerun can be compared"
            raise ConfigError("RUN_ID", rule, self.recorded.run_id)
        if not self.recorded.dataset:
            return
        try:
            provenance.check_dataset(self.recorded.dataset, now, self.recorded.run_id)
        except ConfigError as error:
            if not any(_changes_data(key) for key in self.request.values):
                raise
            say(f"  differs: {error}")

    def _tags(self) -> dict[str, str]:
        """Return the tags of the new run."""
        overrides = [secrets.mask(text) for text in self.request.overrides]
        command = " ".join(["pipeline rerun", self.recorded.run_id, *overrides])
        return {"rerun.of": self.recorded.run_id, "mlflow.source.name": command}

    def _compare(self, new_run_id: str) -> int:
        """Compare the new run with the recorded one; return the exit status."""
        client = self.store.client()
        new = client.get_run(new_run_id)
        outcome, page = agreement.compare_runs(
            client,
            self.recorded.run,
            new,
            self.recorded.dataset.get("examples") or {},
            self.recorded.is_in_tf32() or _is_in_tf32(new),
            schema=self.recorded.config.get("schema", 0),
            segments=self.recorded.segments,
        )

        client.log_text(new_run_id, page, "rerun/comparison.html")
        client.set_tag(new_run_id, "rerun.verdict", outcome.verdict)
        say(f"rerun {new_run_id} of {self.recorded.run_id}: {outcome.text}")
        is_deterministic = new.data.params.get("hardware.deterministic") == "true"
        is_bit_equal = outcome.verdict == agreement.BIT_EQUAL
        if not (is_bit_equal or self.request.changes or is_deterministic):
            say(
                "bit-equal results on one machine are guaranteed only with "
                "hardware.deterministic=true"
            )
        self._link_to(new_run_id)

        if outcome.runs_agree:
            return 0
        return DIFFERENT

    def _link_to(self, new_run_id: str) -> None:
        """Add the new run to the tag `rerun.by` of the recorded run."""
        client = self.store.client()
        run_id = self.recorded.run_id
        try:
            reruns = client.get_run(run_id).data.tags.get("rerun.by")
            if reruns:
                reruns = f"{reruns}, {new_run_id}"
            else:
                reruns = new_run_id
            client.set_tag(run_id, "rerun.by", reruns)
        except Exception as error:
            # Do not fail: the verdict is valid even if the recorded run is read-only.
            say(f"run {run_id} has no link to its rerun: {first_line(error)}")


def _compare_with(store: ForeignStore, recorded: RecordedRun, other_id: str) -> int:
    """Compare two recorded runs point by point, and return the exit status.

    Nothing is written to the store.
    """
    other = recorded_run.fetch(store, other_id)
    outcome, _ = agreement.compare_runs(
        store.client(),
        recorded.run,
        other.run,
        recorded.dataset.get("examples") or {},
        recorded.is_in_tf32() or other.is_in_tf32(),
        schema=recorded.config.get("schema", 0),
        segments=[*recorded.segments, *other.segments],
    )
    say(f"run {other.run_id} compared with {recorded.run_id}: {outcome.text}")
    return 0 if outcome.runs_agree else DIFFERENT


def _changes_data(key: str) -> bool:
    """Return whether an override of `key` may change the data that are used."""
    in_group = f"{key}.".startswith("dataset.")
    return in_group and not key_kinds.facts_of(key).same_data


def _is_in_tf32(new: Any) -> bool:
    """Return whether a run in this process computed float32 in TF32."""
    is_float32 = new.data.params.get("hardware.precision") == "float32"
    return is_float32 and nvidia.computes_in_tf32()


def _rerun_sweep(store: ForeignStore, request: Request) -> int:
    """Rerun all jobs of a sweep, one after the other, each in a process of its own.

    Return the exit status; see `_worst`.

    Raises:
        ConfigError: no sweep or several sweeps match, or the sweep has no runs.
    """
    parent = store.sweep(request.run_id).info
    children = SweepRecord(store.uri, parent.run_id, parent.experiment_id).children()
    if not children:
        raise ConfigError("RUN_ID", "must be a sweep with runs", request.run_id)

    options = list(request.own_config_options)
    for entry in request.allow:
        options.append(f"--allow={entry}")
    if request.dry:
        options.append("--dry")
    for override in request.overrides:
        if not override.startswith("hydra.run.dir="):
            options.append(override)

    # -P: import nothing from the working directory.
    verb = [sys.executable, "-P", "-m", "pipeline", "rerun"]
    environment = {**os.environ, "PYTHONPATH": imports.path_of_processes()}
    folder = request.run_dir
    statuses = []
    for number, (name, run) in enumerate(children.items()):
        say(f"{name}:")
        run_dir = hydra_quoted(folder / str(number))
        command = [*verb, run.info.run_id, *options, f"hydra.run.dir={run_dir}"]
        statuses.append(subprocess.call(command, env=environment))

    verdict = "can be run again" if request.dry else "agree"
    say(
        f"rerun of sweep {parent.run_id}: "
        f"{statuses.count(0)} of {count(len(statuses), 'run')} {verdict}"
    )
    return _worst(statuses)


def _worst(statuses: list[int]) -> int:
    """Return the exit status of a sweep: the highest status of a failed rerun.

    If no rerun failed, return `DIFFERENT` if one of them differs, or else 0.
    """
    failures = [status for status in statuses if status not in (0, DIFFERENT)]
    if failures:
        return max(failures)
    return max(statuses)
