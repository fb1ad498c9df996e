"""Who the workers of a run are.

TF_CONFIG names them, or the step of a Slurm job, or the config gives their number.
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.common.errors import ConfigError
from pipeline.common.secrets import mask
from pipeline.config import cluster
from pipeline.config.cluster import Cluster
from pipeline.config.compose import composed
from pipeline.config.resolve import resolve
from tests import programs
from tests.composing import spec_of

TWO = {"worker": ["a:1", "b:2"]}
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[1-2],x9",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def tf_config(jobs, kind="worker", index=0):
    config = {"cluster": jobs, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


@pytest.mark.parametrize(
    ("workers", "environment", "expected"),
    [
        (None, tf_config(TWO, index=1), Cluster(("a:1", "b:2"), 1)),
        (2, tf_config(TWO), Cluster(("a:1", "b:2"), 0)),
        (
            None,
            tf_config({"chief": ["c:3"], **TWO}, "chief"),
            Cluster(("c:3", "a:1", "b:2"), 0),
        ),
        (
            None,
            tf_config({"chief": ["c:3"], **TWO}, index=1),
            Cluster(("c:3", "a:1", "b:2"), 2),
        ),
        (None, tf_config({"worker": ["a:1"]}), None),
        (1, tf_config(TWO), None),
        (1, {"TF_CONFIG": "nonsense"}, None),
        (1, STEP, None),
    ],
)
def test_the_workers_that_the_environment_names(workers, environment, expected):
    assert cluster.workers_of_run(workers, environment) == expected


def test_the_tasks_of_a_step_are_workers_on_their_nodes(tmp_path, monkeypatch):
    programs.need("scontrol")
    # `scontrol` wants a configuration.
    file = tmp_path / "slurm.conf"
    file.write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(file))
    team = cluster.workers_of_run(None, STEP)
    assert [address.split(":")[0] for address in team.addresses] == [
        "node1",
        "node1",
        "node2",
        "node2",
        "x9",
    ]
    assert team.rendezvous.startswith("node1:")
    assert (team.index, team.index_on_machine, team.on_machine) == (3, 1, 2)
    assert (team.is_chief, team.started) == (False, False)

    # What may run on one node at one time meets at different ports.
    steps = [
        STEP,
        {**STEP, "SLURM_JOB_ID": "1235"},
        {**STEP, "SLURM_JOB_ID": "1609"},
        {**STEP, "SLURM_JOB_ID": "7234"},
        {**STEP, "SLURM_STEP_ID": "1"},
    ]
    points = {cluster.workers_of_run(None, step).rendezvous for step in steps}
    assert len(points) == 5


def test_workers_of_this_machine_choose_their_ports_later():
    team = cluster.workers_of_run(3, {})
    assert team.addresses == ("127.0.0.1:0",) * 3
    assert (team.is_chief, team.started, team.on_machine) == (True, True, 3)
    assert replace(team, index=2).index_on_machine == 2


@pytest.mark.parametrize(
    ("workers", "environment", "line"),
    [
        (
            0,
            {},
            "hardware.workers must be at least 1, or null to read TF_CONFIG or the "
            "Slurm step. Received: 0.",
        ),
        (
            1000000,
            {},
            "hardware.workers must be at most 256 on one machine. Received: 1000000.",
        ),
        (
            None,
            {},
            "hardware.workers must be a number if neither TF_CONFIG nor a step of a "
            "Slurm job (srun) names",
        ),
        (
            3,
            tf_config(TWO),
            "hardware.workers must be 2, as in TF_CONFIG, or null. Received: 3.",
        ),
        (None, {"TF_CONFIG": "nonsense"}, "TF_CONFIG must be JSON such as {"),
        (None, {"TF_CONFIG": "[1]"}, "TF_CONFIG must be JSON such as {"),
        (None, tf_config({"worker": ["a", "b"]}), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, index=2), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, index=0.9), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, index=1e999), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, index=True), "TF_CONFIG must be JSON such as {"),
        (None, {"TF_CONFIG": 100_000 * "["}, "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, "ps"), "TF_CONFIG must be JSON such as {"),
        (
            None,
            tf_config({"worker": ["a:1", "a:1"]}),
            "TF_CONFIG must give each worker an address of its own.",
        ),
    ],
)
def test_what_is_refused(workers, environment, line):
    with pytest.raises(ConfigError) as refused:
        cluster.workers_of_run(workers, environment)
    assert str(refused.value).startswith(line)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "x"},
            "SLURM_STEP_NUM_TASKS must be a number of at least 0. Received: 'x'.",
        ),
        (
            {"SLURM_STEP_NODELIST": None},
            "SLURM_STEP_NODELIST must be set in a task of a Slurm step: start the run "
            "with srun.",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": ""},
            "SLURM_STEP_TASKS_PER_NODE must be set in a task of a Slurm step: start",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            "SLURM_STEP_TASKS_PER_NODE must have a number of tasks for each of the 3 "
            "nodes. Received: '2(x2)'.",
        ),
        (
            {"SLURM_PROCID": "5"},
            "SLURM_PROCID must be below the number of tasks in the step, 5. "
            "Received: 5.",
        ),
        (
            {"SLURM_PROCID": "-1"},
            "SLURM_PROCID must be a number of at least 0. Received: '-1'.",
        ),
        (
            {"SLURM_JOB_ID": None},
            "SLURM_JOB_ID must be set in a task of a Slurm step: start the run with "
            "srun.",
        ),
        (
            {"SLURM_STEP_ID": "batch"},
            "SLURM_STEP_ID must be a number of at least 0. Received: 'batch'.",
        ),
    ],
)
def test_a_step_that_its_variables_describe_wrongly(changed, line, monkeypatch):
    monkeypatch.setattr(cluster.imports, "output_of", lambda *_: "node1\nnode2\nx9")
    environment = {}
    for name, value in {**STEP, **changed}.items():
        if value is not None:
            environment[name] = value
    with pytest.raises(ConfigError) as rejected:
        cluster.workers_of_run(None, environment)
    assert str(rejected.value).startswith(line)


def interfaces(*addresses):
    """What psutil returns for interfaces with these addresses, and for the hardware."""
    hardware = SimpleNamespace(family=17, address="02:42:ac:11:00:02")
    by_name = {}
    for number, address in enumerate(addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        entry = SimpleNamespace(family=family, address=address)
        by_name[f"if{number}"] = [entry]
    return {**by_name, "hw": [hardware]}


@pytest.mark.parametrize(
    ("addresses", "reached"),
    [
        (("127.0.0.1", "::1"), []),
        pytest.param(("127.0.0.1", "127.8.0.1"), [], marks=pytest.mark.slow),
        (("127.0.0.1", "10.0.0.5"), ["10.0.0.5"]),
        (("::1", "fe80::1%eth0"), ["fe80::1%eth0"]),
        ((), []),
    ],
)
def test_workers_open_no_port_to_others_unasked(addresses, reached, monkeypatch):
    monkeypatch.setattr(cluster.psutil, "net_if_addrs", lambda: interfaces(*addresses))
    assert cluster.reachable() == reached
    overrides = ["hardware.workers=2", "model=mlp"]
    if reached:
        with pytest.raises(ConfigError) as refused:
            spec_of(overrides)
        assert str(refused.value).startswith(
            "hardware.open_ports must be true for several workers: for each worker, "
            f"TensorFlow opens a port on {reached[0]} without a password, and anyone "
            "who can reach this port can read and write "
        )
    else:
        spec_of(overrides)
    for more in ("hardware.open_ports=true", "hardware=multi_worker"):
        assert spec_of([more, *overrides]).workers.started
    spec_of(["hardware.workers=1"])


SECRET = "a secret of the workers"
WRONG_SECRET = re.escape(
    "hardware.secret_file must be a file of mode 0600 with at least 16 characters"
)


def secret_file(folder, text, mode):
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_workers_have_the_secret_of_a_file(tmp_path):
    file = secret_file(tmp_path, f"{SECRET}\n", 0o600)
    assert cluster.secret(str(file), {}) == SECRET.encode()

    overrides = [
        "hardware=multi_worker",
        "hardware.workers=2",
        f"hardware.secret_file={file}",
    ]
    spec = resolve(composed(overrides), overrides, {})
    assert spec.config.hardware.secret_file == str(file)
    assert str(file) not in str(spec.recorded)
    assert str(file) not in spec.shared_text()
    assert str(file) not in mask(" ".join(spec.overrides))


@pytest.mark.parametrize(
    ("text", "mode"),
    [(f"{SECRET}\n", 0o640), ("short\n", 0o600)],
)
def test_a_secret_that_others_read_or_guess_is_refused(tmp_path, text, mode):
    file = secret_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=WRONG_SECRET):
        cluster.secret(str(file), {})


def test_a_folder_is_no_secret(tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=WRONG_SECRET):
        cluster.secret(str(folder), {})


@pytest.mark.parametrize(
    ("text", "mode"),
    [(f"{SECRET}\n", 0o600), (f"{SECRET}\n", 0o640), ("short\n", 0o600)],
)
def test_the_environment_outranks_the_file(tmp_path, text, mode):
    file = secret_file(tmp_path, text, mode)
    assert cluster.secret(str(file), {"PIPELINE_SECRET": 16 * "x"}) == 16 * b"x"
    assert cluster.secret(str(tmp_path), {"PIPELINE_SECRET": 16 * "x"}) == 16 * b"x"
    with pytest.raises(
        ConfigError, match="PIPELINE_SECRET must have at least 16 characters"
    ):
        cluster.secret(None, {"PIPELINE_SECRET": ""})


def test_a_secret_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be a file that can be read"):
        cluster.secret(str(tmp_path / "nowhere"), {})
