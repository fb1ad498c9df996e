"""Creates the parent run of a sweep, or reopens it with `--again`.

The launcher calls `open_sweep` before the first job starts. The command line closes the
sweep after the last job has ended.
"""

import json
import re
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipeline.common.errors import ConfigError, count, say, say_id
from pipeline.common.secrets import mask
from pipeline.config import session, trust_entries
from pipeline.config.overrides import keys_set
from pipeline.sweep import again, files, liveness, stop_request, sweep_file
from pipeline.sweep.closing import close_as_killed
from pipeline.sweep.parent_run import ParentRun, set_tag
from pipeline.sweep.running_sweep import RunningSweep
from pipeline.tracking.foreign_store import MULTIRUN, ForeignStore, listed
from pipeline.tracking.params import param_text

# Tag of the parent while a process reopens it: the time in ms since the epoch, and a
# random ID of the process.
_CLAIM = "sweep.claim"
# Seconds to wait before checking that no other process has overwritten the claim. It
# must exceed the duration of a request.
CLAIM_SECONDS = 3.0
# Seconds after which a claim is ignored: by then, the process that made it has died, or
# writes heartbeats.
_CLAIM_LASTS = 30.0


def open_sweep(
    config: DictConfig,
    names: Collection[str],
    varied: Sequence[str],
    experiment: str,
) -> RunningSweep:
    """Create the parent run of a new sweep, or reopen that of `tracking.sweep`.

    Also store the sweep in the session, record the jobs, start the threads that write
    heartbeats and obey a request to stop, and lock the sweep's folder.

    Args:
        config: the config of the multirun.
        names: the names of the jobs in the first batch.
        varied: the config keys that the sweep varies.
        experiment: the name of the experiment of a new sweep.

    Raises:
        ConfigError: the sweep cannot be reopened, or another process works on it.
    """
    if config.tracking.sweep:
        sweep = reopen(config, names, varied)
    else:
        sweep = _create(config, len(names), varied, experiment)
    say_id(sweep.parent.run_id)
    # From now on, the command line closes the sweep, even if the next lines fail.
    session.session().sweep = sweep

    if not config.tracking.sweep:  # `reopen` has locked the folder
        _lock_folder(sweep.parent, config)
    sweep.parent.plan(names, varied)
    for function in (liveness.write_heartbeats, stop_request.obey):
        arguments = [sweep.parent, sweep.closed]
        threading.Thread(target=function, args=arguments, daemon=True).start()
    return sweep


def _lock_folder(parent: ParentRun, config: DictConfig) -> None:
    """Lock the folder of a sweep, which shows that this process runs the sweep."""
    folder = Path(config.hydra.sweep.dir)
    process_id = sweep_file.write_locked(folder, parent, parent.name)
    parent.client().set_tag(parent.run_id, sweep_file.PROCESS, process_id)


def _create(
    config: DictConfig, jobs: int, varied: Sequence[str], experiment: str
) -> RunningSweep:
    """Create the parent run of a new sweep of `jobs` jobs, with its tags and params."""
    from mlflow.entities import Param

    from pipeline.tracking.store import Store

    store = Store(config.tracking.uri)
    experiment_id = store.experiment(experiment)

    # `recordable` leaves out the store, whose URI may hold a password: `--again` gets it
    # from the user's config.
    overrides = again.recordable(_unresolved_overrides(config))
    name = _sweep_name(config)
    tags = {
        "sweep.name": name,
        again.RECORD: json.dumps(overrides),
        "sweep.folder": mask(str(Path(config.hydra.sweep.dir).absolute())),
        "mlflow.source.name": "pipeline",
    }
    if config.hydra.sweeper.get("trials"):
        tags["sweep.search"] = "true"
    question = files.question(name)
    if question:
        tags["sweep.question"] = question
    params = {
        "sweep": name,
        "jobs": config.hydra.sweeper.get("trials") or jobs,
        "varied": " ".join(varied),
        "overrides": " ".join(overrides),
        "dataset._target_": config.dataset.get("_target_"),
    }

    client = store.client()
    run = client.create_run(experiment_id, tags=tags, run_name=f"sweep {name}")
    run_id = run.info.run_id
    entries = [Param(key, param_text(value)) for key, value in params.items()]
    client.log_batch(run_id, params=entries)
    say(f"sweep {run_id} ({name}): {count(params['jobs'], 'job')}")

    parent = ParentRun(
        config.tracking.uri,
        run_id,
        experiment_id,
        name,
        varied=list(varied),
        metrics=_metric_names(config),
    )
    # Allow the run's artifact location, since the user's own store chose it.
    places = tuple(trust_entries.allowed_places([run.info.artifact_uri]))
    return RunningSweep(
        parent, str(config.hydra.sweep.dir), config.tracking.patience, places
    )


def reopen(
    config: DictConfig, names: Collection[str], varied: Sequence[str]
) -> RunningSweep:
    """Reopen the sweep `tracking.sweep`, after closing the runs of its dead jobs.

    Also record the overrides, so that the next `--again` continues what this one began.
    They are not recorded if they do not plan all jobs that have not finished, as these
    would then be lost.

    Args:
        config: the config of the multirun.
        names: the names of the jobs in the first batch.
        varied: the config keys that the sweep varies.

    Raises:
        ConfigError: the command line does not name the sweep or names another
            experiment, the store has no such sweep, the sweep or one of its jobs is
            still running, or another process reopens the sweep.
    """
    # `pipeline train` sets `confined` if the command line names the sweep.
    if not config.tracking.confined:
        raise ConfigError(
            "tracking.sweep", "must be given on the command line", config.tracking.sweep
        )
    store = ForeignStore.open(config.tracking.uri, config.trust.allow)
    stored_parent = store.sweep(config.tracking.sweep)
    parent = ParentRun(
        store.uri,
        stored_parent.info.run_id,
        stored_parent.info.experiment_id,
        _sweep_name(config),
        listed(stored_parent.data.tags, "sweep.jobs"),
        list(varied),
        _metric_names(config),
    )
    client = parent.client()
    # Use the experiment's current name for new jobs, since it may have been renamed.
    experiment = client.get_experiment(parent.experiment_id).name
    _check_experiment_override(config, experiment)
    store.check_experiment(experiment)

    children = parent.children()
    close_dead_jobs(client, stored_parent, children)
    _claim(client, parent.run_id)
    unplanned = []
    # A search plans its later jobs only when the earlier ones have ended.
    if not config.hydra.sweeper.get("trials"):
        unplanned = _unplanned_jobs(parent.job_names, children, names)
    if not unplanned:
        given = _unresolved_overrides(config)
        record = again.updated_record(stored_parent.data.tags, given)
        set_tag(parent, again.RECORD, json.dumps(record))
    stop_request.withdraw(parent)
    _lock_folder(parent, config)
    liveness.write_heartbeat(parent)
    client.update_run(parent.run_id, "RUNNING")
    with suppress(Exception):  # a claim that remains is ignored after a while
        client.delete_tag(parent.run_id, _CLAIM)
    return RunningSweep(
        parent,
        str(config.hydra.sweep.dir),
        config.tracking.patience,
        store.places,
        experiment,
        former_status=_terminal_status(stored_parent),
        unplanned=unplanned,
    )


def _unresolved_overrides(config: DictConfig) -> list[str]:
    """Return the overrides of a multirun; resolved values might hold secrets."""
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    return [*overrides["hydra"], *overrides["task"]]


def _unplanned_jobs(
    job_names: Sequence[str], children: Mapping[str, Any], planned: Collection[str]
) -> list[str]:
    """Return the names of unfinished jobs of a sweep that are not planned any more.

    Args:
        job_names: the names of all jobs that were ever planned.
        children: the runs of the sweep's jobs, by the job's name.
        planned: the names of the jobs that are planned now.
    """
    unplanned = []
    for name in job_names:
        run = children.get(name)
        is_finished = run is not None and run.info.status == "FINISHED"
        if not is_finished and name not in planned:
            unplanned.append(name)
    return unplanned


def _terminal_status(stored_parent: Any) -> str:
    """Return the status of a sweep that has ended; KILLED if it was not closed."""
    status: str = stored_parent.info.status
    return "KILLED" if status == "RUNNING" else status


def _sweep_name(config: DictConfig) -> str:
    """Return the name of the sweep file; `multirun` for a sweep without a file."""
    name = str(config.hydra.job.config_name)
    if name == "config":
        return MULTIRUN
    return name


def _metric_names(config: DictConfig) -> list[str]:
    metrics = [str(metric) for metric in config.training.metrics]
    names = list(metrics)
    for validation_set in config.dataset.get("validations") or ():
        names += [f"{validation_set}/{metric}" for metric in ("loss", *metrics)]
    return names


def _check_experiment_override(config: DictConfig, experiment: str) -> None:
    """Reject an override that would put the new jobs into another experiment.

    The value in a config file does not count: it may be a name that the experiment
    of the sweep had before it was renamed.
    """
    key = "tracking.experiment"
    is_given = key in keys_set(config.hydra.overrides.task)
    if is_given and config.tracking.experiment != experiment:
        rule = "must be the experiment of the sweep, or be left out"
        raise ConfigError(key, rule, config.tracking.experiment, [experiment])


def close_dead_jobs(
    client: Any, stored_parent: Any, children: Mapping[str, Any]
) -> None:
    """Close the RUNNING runs of a dead sweep's jobs, as KILLED.

    Args:
        client: an MLflow client for the store.
        stored_parent: MLflow's run of the sweep, which stays as it is.
        children: the runs of the sweep's jobs, by the job's name.

    Raises:
        ConfigError: the sweep or one of its jobs is alive.
    """
    running_jobs = [run for run in children.values() if run.info.status == "RUNNING"]
    liveness.reject_if_alive(client, stored_parent, running_jobs)
    for run in running_jobs:
        close_as_killed(client, run)


def _claim(client: Any, run_id: str) -> None:
    """Claim a sweep, so that only one of several processes reopens it.

    The process reads the sweep, writes its claim, waits `CLAIM_SECONDS`, and reads the
    claim again. If two processes reopen the sweep at once, either the second one sees
    the claim or the heartbeat of the first, or it overwrites the claim before the first
    reads it again. In the latter case, the first one is rejected.

    Raises:
        ConfigError: another process has just reopened the sweep, or is reopening it.
    """
    rule = "must be run by one command at a time: another command has just begun it"
    stored_parent = client.get_run(run_id)
    earlier = stored_parent.data.tags.get(_CLAIM, "")
    if re.fullmatch("[0-9]{1,15} [0-9a-f]{32}", earlier):
        if time.time() - int(earlier.split()[0]) / 1000 < _CLAIM_LASTS:
            raise ConfigError("SWEEP", rule, run_id)
    # Another process may have reopened the sweep since its jobs were found to be dead.
    liveness.reject_if_alive(client, stored_parent)

    claim = f"{int(time.time() * 1000)} {uuid.uuid4().hex}"
    try:
        client.set_tag(run_id, _CLAIM, claim)
    except Exception:
        # A database rejects a tag that another process writes at the same moment.
        if _CLAIM in client.get_run(run_id).data.tags:
            raise ConfigError("SWEEP", rule, run_id) from None
        raise
    time.sleep(CLAIM_SECONDS)
    if client.get_run(run_id).data.tags.get(_CLAIM) != claim:
        raise ConfigError("SWEEP", rule, run_id)
