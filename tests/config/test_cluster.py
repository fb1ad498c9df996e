"""Who the workers of a run are: from TF_CONFIG, from the step of a Slurm job, or a number of them on this machine."""

from __future__ import annotations

import json
import re
import socket
from contextlib import nullcontext
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

TWO = {"worker": ["a:1", "b:2"]}
STEP = {
    **{
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_PROCID": "3",
    },
    **{"SLURM_STEP_NODELIST": "node[1-2],x9", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
}


def tf_config(jobs, kind="worker", index=0):
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": jobs, "task": {"type": kind, "index": index}}
        )
    }


def found(workers, environment):
    team = cluster.workers_of_run(workers, environment)
    return (1 if team is None else len(team.addresses)), team


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
    count, team = found(workers, environment)
    assert team == expected
    assert count == (1 if expected is None else len(expected.addresses))


def test_the_tasks_of_a_step_are_workers_on_their_nodes(tmp_path, monkeypatch):
    programs.need("scontrol")
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=test\nSlurmctldHost=localhost\n"
    )  # `scontrol` wants one
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    count, team = found(None, STEP)
    assert count == 5
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
    others = [{"SLURM_JOB_ID": str(1234 + later)} for later in (1, 375, 6000)] + [
        {"SLURM_STEP_ID": "1"}
    ]
    points = {found(None, {**STEP, **other})[1].rendezvous for other in ({}, *others)}
    assert (
        len(points) == 5
    )  # what may run on one node at one time meets at different ports


def test_workers_of_this_machine_choose_their_ports_later():
    count, team = found(3, {})
    assert count == 3
    assert team.addresses == ("127.0.0.1:0",) * 3
    assert (team.is_chief, team.started, team.on_machine) == (True, True, 3)
    assert replace(team, index=2).index_on_machine == 2


@pytest.mark.parametrize(
    ("workers", "environment", "line"),
    [
        (
            0,
            {},
            "hardware.workers must be at least 1, or null for what TF_CONFIG or Slurm says. Received: 0.",
        ),
        (
            1000000,
            {},
            "hardware.workers must be at most 256 on one machine. Received: 1000000.",
        ),
        (
            None,
            {},
            "hardware.workers must be a number where neither TF_CONFIG nor a step of a Slurm job (srun) says",
        ),
        (
            3,
            tf_config(TWO),
            "hardware.workers must be null, or the 2 of TF_CONFIG. Received: 3.",
        ),
        (None, {"TF_CONFIG": "nonsense"}, "TF_CONFIG must be JSON such as {"),
        (None, {"TF_CONFIG": "[1]"}, "TF_CONFIG must be JSON such as {"),
        (None, tf_config({"worker": ["a", "b"]}), "TF_CONFIG must be JSON such as {"),
        (None, tf_config(TWO, index=2), "TF_CONFIG must be JSON such as {"),
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
        found(workers, environment)
    assert str(refused.value).startswith(line)


def interfaces(*addresses):
    """What psutil says of interfaces with these addresses, and of the hardware's."""
    families = [
        socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses
    ]
    pairs = zip(families, addresses, strict=True)
    found = {
        f"if{n}": [SimpleNamespace(family=f, address=a)]
        for n, (f, a) in enumerate(pairs)
    }
    return {**found, "hw": [SimpleNamespace(family=17, address="02:42:ac:11:00:02")]}


@pytest.mark.parametrize(
    ("addresses", "reached"),
    [
        (("127.0.0.1", "::1"), []),
        (("127.0.0.1", "127.8.0.1"), []),
        (("127.0.0.1", "10.0.0.5"), ["10.0.0.5"]),
        (("::1", "fe80::1%eth0"), ["fe80::1%eth0"]),
        ((), []),
    ],
)
def test_workers_open_no_port_to_others_unasked(addresses, reached, monkeypatch):
    monkeypatch.setattr(cluster.psutil, "net_if_addrs", lambda: interfaces(*addresses))
    assert cluster.reachable() == reached
    given = ["hardware.workers=2", "model=mlp"]
    with pytest.raises(ConfigError) if reached else nullcontext() as refused:
        resolve(composed(given), given, {})
    if refused:
        line = f"hardware.open_ports must be true for several workers: TensorFlow opens a port of each on {reached[0]} "
        assert str(refused.value).startswith(
            f"{line}without a password, and whoever reaches it can read and write "
        )
    for more in ("hardware.open_ports=true", "hardware=multi_worker"):
        assert resolve(composed([more, *given]), given, {}).workers.started
    resolve(composed(["hardware.workers=1"]), [], {})


@pytest.mark.parametrize(
    ("text", "mode", "line"),
    [
        ("a secret of the workers\n", 0o600, ""),
        (
            "a secret of the workers\n",
            0o640,
            "hardware.secret_file must be a file of mode 0600 with at least 16 char",
        ),
        (
            "short\n",
            0o600,
            "hardware.secret_file must be a file of mode 0600 with at least 16 characters",
        ),
        (
            None,
            0o700,
            "hardware.secret_file must be a file of mode 0600 with at least 16 characters",
        ),
    ],
)
def test_the_secret_of_the_workers(tmp_path, text, mode, line):
    file = tmp_path / "secret"
    file.mkdir() if text is None else file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(line)) if line else nullcontext():
        assert cluster.secret(str(file), {}) == b"a secret of the workers"
    assert cluster.secret(str(file), {"PIPELINE_SECRET": 16 * "x"}) == 16 * b"x"
    with pytest.raises(
        ConfigError, match="PIPELINE_SECRET must have at least 16 characters"
    ):
        cluster.secret(None, {"PIPELINE_SECRET": ""})
    with pytest.raises(ConfigError, match="must be a file that can be read"):
        cluster.secret(str(tmp_path / "nowhere"), {})
    given = [
        "hardware=multi_worker",
        "hardware.workers=2",
        f"hardware.secret_file={file}",
    ]
    if not line:
        spec = resolve(composed(given), given, {})
        assert spec.config.hardware.secret_file == str(file)
        assert (
            str(file)
            not in f"{spec.recorded} {spec.shared_text()} {mask(' '.join(spec.overrides))}"
        )
