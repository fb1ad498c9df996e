"""Who the workers of a run are: from TF_CONFIG, from the step of a Slurm job, or a number of them on this machine."""

from __future__ import annotations

import json

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config import cluster
from pipeline.config.cluster import Cluster
from tests import programs

TWO = {"worker": ["a:1", "b:2"]}
STEP = {
    **{"SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "3"},
    **{"SLURM_STEP_NODELIST": "node[1-2],x9", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
}


def tf_config(jobs, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


def found(workers, environment):
    team = cluster.resolve(workers, environment)
    return (1 if team is None else len(team.addresses)), team


@pytest.mark.parametrize(
    ("workers", "environment", "expected"),
    [
        (None, tf_config(TWO, index=1), Cluster(("a:1", "b:2"), 1)),
        (2, tf_config(TWO), Cluster(("a:1", "b:2"), 0)),
        (None, tf_config({"chief": ["c:3"], **TWO}, "chief"), Cluster(("c:3", "a:1", "b:2"), 0)),
        (None, tf_config({"chief": ["c:3"], **TWO}, index=1), Cluster(("c:3", "a:1", "b:2"), 2)),
        (None, tf_config({"worker": ["a:1"]}), None),
        (1, tf_config(TWO), None),
        (1, {"TF_CONFIG": "nonsense"}, None),
        (1, STEP, None),
    ],
)
def test_the_workers_that_the_environment_names(workers, environment, expected):
    count, team = found(workers, environment)
    assert team == expected
    assert count == (1 if expected is None else len(expected.addresses))


def test_the_tasks_of_a_step_are_workers_on_their_nodes(tmp_path, monkeypatch):
    programs.need("scontrol")
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\n")  # `scontrol` wants one
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    count, team = found(None, STEP)
    assert count == 5
    assert [address.split(":")[0] for address in team.addresses] == ["node1", "node1", "node2", "node2", "x9"]
    assert len(set(team.addresses)) == 5
    assert (team.index, team.index_on_machine, team.on_machine) == (3, 1, 2)
    assert (team.is_chief, team.started) == (False, False)
    other = found(None, {**STEP, "SLURM_JOB_ID": "1235"})[1]
    assert not set(other.addresses) & set(team.addresses)


def test_workers_of_this_machine_have_addresses_of_their_own():
    count, team = found(3, {})
    assert count == 3
    assert len({*team.addresses}) == 3
    assert all(address.startswith("127.0.0.1:") for address in team.addresses)
    assert (team.is_chief, team.started, team.on_machine) == (True, True, 3)
    assert team.at(2).index_on_machine == 2


@pytest.mark.parametrize(
    ("workers", "environment", "line"),
    [
        (0, {}, "hardware.workers must be at least 1, or null for what TF_CONFIG or Slurm says. Received: 0."),
        (None, {}, "hardware.workers must be a number where neither TF_CONFIG nor a step of a Slurm job (srun) says"),
        (3, tf_config(TWO), "hardware.workers must be null, or the 2 of TF_CONFIG. Received: 3."),
        (None, {"TF_CONFIG": "nonsense"}, "TF_CONFIG must be JSON such as {"),
        (None, {"TF_CONFIG": "[1]"}, "TF_CONFIG must be JSON such as {"),
        (None, tf_config({"worker": ["a", "b"]}), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, index=2), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, "ps"), "TF_CONFIG must be JSON such as {"),
        (None, tf_config({"worker": ["a:1", "a:1"]}), "TF_CONFIG must give each worker an address of its own."),
    ],
)
def test_what_is_refused(workers, environment, line):
    with pytest.raises(ConfigError) as refused:
        found(workers, environment)
    assert str(refused.value).startswith(line)
