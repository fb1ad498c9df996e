"""The record of a run: nothing secret goes in, and nothing hostile comes out.

The records of the second half are written through MLflow's own client, as somebody with
access to the store would.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
import zipfile
from copy import deepcopy
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from mlflow.tracking import MlflowClient
from omegaconf import OmegaConf

from pipeline.common import secrets
from pipeline.common.errors import ConfigError
from pipeline.common.secrets import mask, remember
from pipeline.config import compose, hydra_errors
from pipeline.config.plain import links as links_of
from pipeline.config.plain import mapped, plain
from pipeline.config.schema import register
from pipeline.rerun.recorded_run import relinked
from pipeline.tracking import provenance
from tests.browser import server
from tests.running import one_process, pipeline
from tests.shared import place_store

# In a URI it is percent-encoded, except the @ that people forget.
PASSWORD = "pass@wörd-Hunter7"
TOKEN = (
    """tok'en "Zaphod9" with: spaces, a\\backslash """
    "and so many words that YAML would fold it into two lines"
)
FRAGMENTS = ("Hunter7", "Zaphod9", "fold it")
SECRETS = {"SOME_API_TOKEN": TOKEN, "HYDRA_FULL_ERROR": "1"}
OWN = """
import keras

def tiny(input_shape, classes, token):
    assert "Zaphod9" in token  # it does arrive
    flatten = keras.layers.Flatten()
    return keras.Sequential([keras.Input(input_shape), flatten, keras.layers.Dense(classes)])

class Boom(keras.callbacks.Callback):
    def __init__(self, token, address=None):
        super().__init__()
        self.token = token
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError(f"refused: {self.token}")

def wrong(token):
    raise ValueError(f"not with {token}")

def data(token):
    from dataclasses import replace
    from pipeline.dataset import digits
    return replace(digits(), name=f"digits of {token}")
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Run runs with secrets in a folder, against a server.

    Returns the folder, that of the server, exit statuses, output, and runs.
    """
    folder = tmp_path_factory.mktemp("secrets")
    served = tmp_path_factory.mktemp("served")
    (folder / "mine.py").write_text(OWN)
    before = Path.cwd()
    os.chdir(served)  # where the server puts its artifacts
    try:
        with server(f"sqlite:///{served}/mlflow.db") as address:
            os.chdir(before)
            host = address.removeprefix("http://")
            uri = f"tracking.uri='http://somebody:{quote(PASSWORD, safe='@')}@{host}'"
            model = "model={_target_: mine.tiny, token: ${oc.env:SOME_API_TOKEN}}"
            small = "dataset=digits training.updates=2 accumulation.factor=2"
            given = f'{small} tracking.system_metrics=false "~model" "+{model}" "{uri}"'
            quiet = f"{given} tracking.log_model=false"
            token = "token: ${oc.env:SOME_API_TOKEN}"
            boom = f'"+training.callbacks.boom={{_target_: mine.Boom, {token}}}"'
            named = "tracking.experiment='team-${oc.env:SOME_API_TOKEN}'"
            data = "+dataset={_target_: mine.data, token: ${oc.env:SOME_API_TOKEN}}"
            answers = one_process(
                {
                    "named": f'train {quiet} hydra.run.dir=named "~dataset" '
                    f'"{data}" "{named}"',
                    "fine": f"train {given} hydra.run.dir=fine",
                    "failing": f"train {quiet} {boom} hydra.run.dir=failing",
                    "wrong": f"train {quiet} {boom.replace('mine.Boom', 'mine.wrong')}",
                    "nobody": f"train {quiet.replace(host, '127.0.0.1:9')}",
                    "no such run": f'rerun nonsense "{uri}"',
                    "scheme": "train tracking.uri='ftp://somebody:Hunter7@127.0.0.1/x'",
                    **_with_passwords("train dataset=digits"),
                    **_with_passwords("rerun nonsense"),
                },
                folder,
                **SECRETS,
            )
            line = shlex.split(f"{quiet} {boom} hydra.sweep.dir=sweep optimizer=sgd")
            sweep = pipeline("train", "-m", *line, cwd=folder, status=1, **SECRETS)
            client = MlflowClient(address)
            experiment = client.get_experiment_by_name("pipeline")
            runs = client.search_runs(
                [experiment.experiment_id], order_by=["start_time ASC"]
            )
            masked = pipeline(
                "rerun",
                runs[0].info.run_id,
                shlex.split(uri)[0],
                "--allow=mine",
                cwd=folder,
                status=2,
            )
            said = {
                name: answer["out"] + answer["err"] for name, answer in answers.items()
            }
            said |= {
                "sweep": sweep.stdout + sweep.stderr,
                "masked": masked.stdout + masked.stderr,
            }
            statuses = {name: answer["status"] for name, answer in answers.items()}
            yield folder, served, statuses, said, runs
    finally:
        os.chdir(before)


def _with_passwords(verb: str) -> dict[str, str]:
    """Return commands whose URI has a password that a parser misreads."""
    passwords = ("Hunter7#x", "Hunter7/x", "x:Hunter7", "x y Hunter7", "ab@Hunter7:x")
    commands = {}
    for password in passwords:
        uri = f"http://me:{password}@127.0.0.1:9"
        commands[f"{verb} {password}"] = f"{verb} \"tracking.uri='{uri}'\""
    return commands


def contents(folder: Path):
    """Yield every file beneath `folder` with what is in it, archives opened."""
    for path in folder.rglob("*"):
        if (
            path.is_file()
            and path.name != "mine.py"
            and "__pycache__" not in path.parts
        ):
            content = path.read_bytes()
            yield path, content
            if zipfile.is_zipfile(io.BytesIO(content)):
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    for name in archive.namelist():
                        yield path / name, archive.read(name)


def test_no_secret_is_in_the_store_or_the_run_directory_of_a_run_that_fails(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    place_store(tmp_path)
    model = "model={_target_: mine.tiny, token: ${oc.env:SOME_API_TOKEN}}"
    boom = '"+training.callbacks.boom={_target_: mine.Boom, token: ${oc.env:SOME_API_TOKEN}}"'
    # The name of the run has the first 40 characters of it, in which there is no @.
    address = "postgresql://me:Hunter7-and-more-than-40-characters@127.0.0.1/db"
    boom += f" '+training.callbacks.boom.address=\"{address}\"'"
    small = "training.updates=2 tracking.system_metrics=false tracking.log_model=false"
    line = f'train {small} hydra.run.dir=failing "~model" "+{model}" {boom}'
    answer = one_process({"failing": line}, tmp_path, **SECRETS)["failing"]
    assert answer["status"] == 1, answer["err"]
    (run,) = MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db").search_runs(["1"])
    assert run.data.params["model.token"] == "***"
    assert "RuntimeError: refused: ***" in run.data.tags["failure"]
    files = dict(contents(tmp_path))
    assert {"config.yaml", "overrides.yaml", "mlflow.db", "traceback.log"} <= {
        path.name for path in files
    }
    for place, content in [
        *files.items(),
        ("said", (answer["out"] + answer["err"]).encode()),
    ]:
        assert not any(fragment.encode() in content for fragment in FRAGMENTS), place


@pytest.mark.slow
def test_the_runs_with_secrets_did_what_they_should(told):
    folder, served, statuses, said, runs = told
    status = {
        "named": 0,
        "fine": 0,
        "failing": 1,
        "wrong": 2,
        "nobody": 2,
        "no such run": 2,
        "scheme": 2,
    }
    unreadable = [name for name in statuses if name not in status]
    assert len(unreadable) == 10
    assert statuses == status | dict.fromkeys(unreadable, 2), said
    for name in unreadable:
        assert (
            said[name]
            .splitlines()[-1]
            .startswith(
                (
                    "pipeline: tracking.uri must be a store that ",
                    "pipeline: tracking.uri must have the form http://HOST:PORT, with "
                    "special characters in a password percent-encoded. "
                    "Received: 'http://***@127.0.0.1:9'",
                )
            )
        )
    assert [run.info.status for run in runs] == [
        "FINISHED",
        "FAILED",
        "FAILED",
        "FAILED",
    ]  # the last are the sweep's
    assert (folder / "sweep" / "multirun.yaml").exists()
    assert any((folder / "sweep").rglob("job.log"))
    files = [path.name for path, _ in contents(served)]
    assert {
        "mlflow.db",
        "config.yaml",
        "overrides.yaml",
        "MLmodel",
        "model.keras",
    } <= set(files)


@pytest.mark.slow
def test_no_secret_is_anywhere(told):
    folder, served, _, said, runs = told
    seen = 0
    for root in (folder, served):
        for path, content in contents(root):
            seen += 1
            for fragment in FRAGMENTS:
                assert fragment.encode() not in content, path
    assert seen > 40
    for name, text in said.items():
        for fragment in FRAGMENTS:
            assert fragment not in text, (name, text)
    for run in runs:
        everything = json.dumps(
            [run.data.params, run.data.tags, run.info.run_name], ensure_ascii=False
        )
        assert not any(fragment in everything for fragment in FRAGMENTS)
    assert runs[0].data.params["model.token"] == "***"
    assert runs[0].data.params["tracking.uri"].startswith("http://***@127.0.0.1:")
    assert "RuntimeError: refused: ***" in runs[1].data.tags["failure"]
    assert "Traceback" in said["failing"]
    assert "Traceback" in said["wrong"]  # HYDRA_FULL_ERROR=1
    assert "refused: ***" in said["sweep"]


@pytest.mark.slow
def test_a_rerun_asks_for_what_was_masked(told):
    last = told[3]["masked"].splitlines()[-1]
    rule = "was a secret and is not in the record: give it again as an override"
    assert last == f"pipeline: model.token {rule}. Received: '***'."


@pytest.mark.parametrize("path", ["/a/hush", "'/a b/hush'", '"/a b/hush"'])
def test_the_path_of_a_secret_is_masked(path):
    for text in (
        f"hardware.secret_file={path}",
        f"hardware={{secret_file: {path}, workers: 2}}",
    ):
        assert "hush" not in mask(text)
    for text in ("secret_file: null", '"secret_file": "None",'):  # there is none
        assert mask(text) == text


def test_mask(monkeypatch):
    for name, value in {
        "MY_TOKEN": "abcdef",
        "DB_PASSWORD": "abcdef-ghi",
        "SHORT_TOKEN": "ab",
        "WHERE": "/tmp/x",
    }.items():
        monkeypatch.setenv(name, value)
    assert (
        mask("x abcdef-ghi abcdef ab /tmp/x") == "x *** *** ab /tmp/x"
    )  # the longer one first
    assert mask("postgresql://me:p@ss@host/db?password=x1&sslmode=on") == (
        "postgresql://***@host/db?password=***&sslmode=on"
    )
    page = (
        "http://127.0.0.1:5000/#/experiments/1/runs"
        "?compareRunsMode=CHART&viewStateShareKey=abc123"
    )
    for text in (
        page,
        "sqlite:////tmp/a@b/mlflow.db",
        "https://host/a/b@main",
        f"cwd {os.environ.get('PWD', '/')}",
    ):
        assert mask(text) == text
    assert mapped({"a": ["abcdef", 1, None], "b": {"c": "u://x:y@h"}}, mask) == {
        "a": ["***", 1, None],
        "b": {"c": "u://***@h"},
    }


@pytest.mark.parametrize(
    ("uri", "masked_uri"),
    [
        ("postgresql://me:Hun/ter7@h/db", "postgresql://***@h/db"),
        ("mysql://me:Hun'ter7@h", "mysql://***@h"),
        ('mysql://me:Hun"ter7@h', "mysql://***@h"),
        ("mysql://me:Hun ter7 x@h", "mysql://***@h"),
        ("http://me:Hunter7#x@127.0.0.1:9", "http://***@127.0.0.1:9"),
        ("postgresql://me:ab@Hunter7:x@h", "postgresql://***@h"),
        ("mssql://h/db?UID=u&PWD=Hunter7", "mssql://h/db?UID=u&PWD=***"),
        (
            "mssql+pyodbc:///?odbc_connect=DRIVER%3DSQL%3BUID%3Dme%3BPWD%3DHunter7",
            "mssql+pyodbc:///?odbc_connect=***",
        ),
    ],
)
def test_a_password_of_any_signs_is_masked_wherever_its_uri_stands(uri, masked_uri):
    assert mask(uri) == mask(masked_uri) == masked_uri
    assert mask(f"tracking.uri={uri}") == f"tracking.uri={masked_uri}"
    assert "unter7" not in str(ConfigError("tracking.uri", "must be another", uri))
    # Where the end of a URI in a text cannot be told, its secrets are remembered.
    if " " not in uri:
        text = f"the store ({uri}), it said"
        assert mask(text) == f"the store ({masked_uri}), it said"


def test_the_pieces_of_a_uri_in_use_are_masked(monkeypatch):
    monkeypatch.setattr(secrets, "_remembered", set())
    remember(
        "postgresql://postgres:ab@Hunter7:x y/Zaphod9@h/db?sslpassword=a%20Marvin42"
    )
    remember("mssql+pyodbc:///?odbc_connect=DRIVER%3DDriver18%3BPWD%3DArthur4242%3B")
    for text in (
        "no port: 'Hunter7'",
        "no host: ab@Hunter7",
        "x y/Zaphod9@h",
        "a Marvin42",
        "PWD: Arthur4242",
    ):
        assert not any(
            secret in mask(text)
            for secret in ("Hunter7", "Zaphod9", "Marvin42", "Arthur4242")
        ), mask(text)
    for text in (
        "postgresql of postgres",
        "DRIVER Driver18",
        "odbc_connect",
        "sslpassword",
    ):
        assert mask(text) == text
    remember("sqlite:////srv/my runs@home/mlflow.db")
    assert mask("/srv/my runs and home") == "/srv/my runs and home"


def test_data_whose_name_is_a_secret_are_compared_masked(monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", TOKEN)
    now = {
        "name": f"data of {TOKEN}",
        "version": "",
        "files": {f"{TOKEN}.npy": "0"},
        "content": {},
        "examples": {},
    }
    recorded = json.loads(mask(json.dumps(now, indent=1)))
    assert recorded["name"] == "data of ***"
    provenance.check_dataset(recorded, now, "1")
    with pytest.raises(ConfigError, match=r"the file \*\*\*\.npy differs"):
        provenance.check_dataset({**recorded, "files": {"***.npy": "1"}}, now, "1")


@pytest.mark.slow
def test_every_byte_of_every_file_counts(tmp_path):
    import tensorflow as tf

    from pipeline.dataset import Data

    def checksum() -> str:
        split = tf.data.Dataset.range(1)
        return provenance.dataset(Data(split, None, files=(tmp_path / "big",)))[
            "files"
        ]["big"]

    with (tmp_path / "big").open("wb") as file:
        file.truncate(300 * 2**20)  # a sparse one
    first = checksum()
    content = str(300 * 2**20).encode() + bytes(300 * 2**20)
    assert first == hashlib.sha256(content).hexdigest()
    with (tmp_path / "big").open("r+b") as file:
        file.seek(100 * 2**20)
        file.write(b"x")
    assert checksum() != first


@pytest.mark.slow
def test_every_example_counts_whatever_it_is_made_of():
    import numpy as np
    import tensorflow as tf

    from pipeline.dataset import Data

    def content(*leaves: object) -> str:
        return provenance.dataset(
            Data(tf.data.Dataset.from_tensor_slices(leaves), None)
        )["content"]["train"]

    x = np.arange(120_000, dtype="float32").reshape(-1, 1)
    y = np.zeros(120_000, "int64")
    rows = hashlib.sha256()
    for row, label in zip(x, y, strict=True):
        rows.update(b"(1,)" + row.tobytes() + b"()" + label.tobytes())
    assert content(x, y) == rows.hexdigest()
    other = x.copy()
    other[-1] += 1
    assert content(other, y) != content(x, y)

    y = np.zeros(2, "int64")
    texts = [[b"a", b"bc"], [b"d", b"e"]]
    assert content(np.array(texts, object), y) == content(
        np.array(texts, object), y
    )  # not their addresses
    assert content(np.array(texts, object), y) != content(
        np.array([[b"ab", b"c"], [b"d", b"e"]], object), y
    )
    assert content(np.array([b"a", b"bc"], object), y) != content(
        np.array([b"ab", b"c"], object), y
    )

    long = np.arange(5000)
    other = long.copy()
    other[2500] = 0  # in the midst, where text about a tensor has dots
    for tensor in (
        lambda values: tf.RaggedTensor.from_row_lengths(values, [4000, 1000]),
        lambda values: tf.sparse.from_dense(np.stack([values, values])),
    ):
        first = content(tensor(long), y)
        assert first == content(tensor(long), y)
        assert first != content(tensor(other), y)
    by_length = [
        tf.RaggedTensor.from_row_lengths(long, lengths)
        for lengths in ([4000, 1000], [3999, 1001])
    ]
    assert content(by_length[0], y) != content(by_length[1], y)


def test_two_runs_share_a_hash_when_they_were_asked_for_the_same():
    one = base()
    first = provenance.config_hash(one, "/a/run")
    other = put(
        base(),
        **{
            "tracking.experiment": "x",
            "trust.allow": ["x"],
            "dataset.data_dir": "/elsewhere",
        },
    )
    assert provenance.config_hash(other, "/b/run") == first
    paths = [
        put(base(), **{"training.callbacks.it": {"filename": f"/{x}/run/rows.csv"}})
        for x in "ab"
    ]
    assert (
        provenance.config_hash(paths[0], "/a/run")
        == provenance.config_hash(paths[1], "/b/run")
        != first
    )
    assert provenance.config_hash(put(base(), seed=1), "/a/run") != first
    # A newer key at its default is as if it were not there.
    lengths = {"length": "x.length", "parts": ["x.tokens"]}
    newer = {"accumulation.micro_batch_tokens": 512, "dataset.lengths": lengths}
    for key, value in newer.items():
        without = put(base(), **{key: None})
        assert provenance.config_hash(without, "/a/run") == first
        assert provenance.config_hash(put(base(), **{key: value}), "/a/run") != first


def test_what_follows_another_key_is_recorded_and_followed():
    config = OmegaConf.create(
        {
            "a": {"rate": 1.0},
            "b": ["${a.rate}", "${times:${a.rate},0.1}"],
            "c": "${b.1}",
            "d": "${oc.env:HOME}",
        }
    )
    links = links_of(config)
    assert links == {"b.0": "${a.rate}", "b.1": "${times:${a.rate},0.1}", "c": "${b.1}"}
    resolved = {"a": {"rate": 1.0}, "b": [1.0, 0.1], "c": 0.1, "d": "x"}
    assert relinked(resolved, links, ["a.rate"]) == {
        **resolved,
        "b": ["${a.rate}", links["b.1"]],
        "c": "${b.1}",
    }
    assert relinked(resolved, links, ["a"])["b"] == ["${a.rate}", links["b.1"]]
    assert relinked(resolved, links, ["a.rate", "b"])["b"] == [
        1.0,
        0.1,
    ]  # it is overridden itself
    assert relinked(resolved, links, ["d", "a.rates"]) == resolved
    evil = {
        "d": "${oc.env:SECRET}",
        "c": "${a.rate}${oc.env:HOME}",
        "b.0": "${times:${oc.env:A},${a.rate}}",
        "e.f": "${a}",
    }
    assert relinked(resolved, evil, ["a.rate"]) == resolved


@pytest.mark.parametrize("values", ["'ab', 3", "[1], 3", "2, null", f"{10**20}, 2"])
def test_only_numbers_are_multiplied(values):
    """Text times a number, or digits that grow with each link, would fill memory."""
    config = OmegaConf.create({"it": f"${{times:{values}}}"})
    register()
    with (
        pytest.raises(ConfigError, match=r"it .*must be given numbers"),
        hydra_errors.translated(),
    ):
        plain(config)
    assert plain(OmegaConf.create({"it": "${times:3,0.5}"})) == {"it": 1.5}


def test_no_link_leads_to_or_from_this_place_and_keys_stay_what_they_are():
    resolved = {
        "dataset": {"x": 1, "tracking.x": 2},
        "tracking": {"uri": "u"},
        "model": {"table": {0: 1.0, 1: 5.0}},
    }
    for link in (
        {"tracking": "${dataset.x}"},
        {"trust": "${dataset.x}"},
        {"hydra.run.dir": "${dataset.x}"},
        {"dataset.x": "${tracking}"},
        {"dataset.x": "${times:${dataset.tracking},${tracking.uri}}"},
    ):
        assert (
            relinked(resolved, link, ["dataset.x", "dataset.tracking", "tracking"])
            == resolved
        )
    assert (
        relinked(resolved, {"dataset.tracking.x": "${dataset.x}"}, ["dataset.x"])
        == resolved
    )
    assert list(relinked(resolved, {}, [])["model"]["table"]) == [0, 1]


@cache
def composed() -> dict:
    return plain(
        compose.composed(["model=mlp", "training.updates=2", "training.epochs=null"])
    )


def base() -> dict:
    """A resolved config, as a run records it."""
    return deepcopy(composed())


def put(container: dict, **values: object) -> dict:
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        node = container
        for parent in parents:
            node = node[parent]
        node[last] = value
    return container


SHELL = {"_target_": "os.system", "_args_": ["touch ran"]}
DENSE = {"_target_": "keras.layers.Dense", "units": 10}
EVIL = {"_target_": "evil.run"}
SAVE = {"_target_": "keras.callbacks.ModelCheckpoint", "filepath": "/etc/it.keras"}

# name → (what is changed in the config, what the message must name)
HOSTILE = {
    "shell": ({"model": SHELL}, "os.system"),
    "popen": (
        {"model": {"_target_": "subprocess.Popen", "args": ["touch", "ran"]}},
        "subprocess.Popen",
    ),
    "eval": (
        {"model": {"_target_": "builtins.eval", "_args_": ["__import__('evil')"]}},
        "builtins.eval",
    ),
    "exec": (
        {"optimizer": {"_target_": "builtins.exec", "_args_": ["import evil"]}},
        "builtins.exec",
    ),
    "posix": (
        {"training.loss": {"_target_": "posix.system", "_args_": ["touch ran"]}},
        "posix.system",
    ),
    "import": (
        {"dataset": {"_target_": "importlib.import_module", "name": "evil"}},
        "importlib.import_module",
    ),
    "own module": ({"model": EVIL}, "evil.run"),
    "no builder": (
        {"model": {"_target_": "pipeline.run.run.run"}},
        "pipeline.run.run.run",
    ),
    "no builder either": (
        {"model": {"_target_": "pipeline.config.compose.train", "arguments": []}},
        "pipeline.config.compose.train",
    ),
    "re-exported": (
        {
            "model": {
                "_target_": "pipeline.tracking.provenance.os.system",
                "_args_": ["touch ran"],
            }
        },
        "pipeline.tracking.provenance.os",
    ),
    "hydra": (
        {"model": {"_target_": "hydra.utils.instantiate", "config": SHELL}},
        "hydra.utils.instantiate",
    ),
    "partial": (
        {"model": {"_target_": "functools.partial", "_args_": [EVIL]}},
        "functools.partial",
    ),
    "pickle": (
        {"model": {"_target_": "pickle.loads", "_args_": ["x"]}},
        "pickle.loads",
    ),
    "load_model": (
        {"model": {"_target_": "keras.saving.load_model", "filepath": "x"}},
        "keras.saving.load_model",
    ),
    "get_file": (
        {"model": {"_target_": "keras.utils.get_file", "origin": "x"}},
        "keras.utils.get_file",
    ),
    "unsafe": (
        {"model": {"_target_": "keras.config.enable_unsafe_deserialization"}},
        "enable_unsafe_deserialization",
    ),
    "lambda": (
        {
            "model": {
                "_target_": "keras.Sequential",
                "layers": [{"_target_": "keras.layers.Lambda"}],
            }
        },
        "Lambda",
    ),
    "nested list": ({"model.hidden": [64, [[SHELL]]]}, "os.system"),
    "deep": (
        {
            "model": {
                "_target_": "keras.Sequential",
                "layers": [DENSE, {**DENSE, "activation": EVIL}],
            }
        },
        "evil.run",
    ),
    "augment": ({"dataset.augment": EVIL}, "evil.run"),
    "metric": ({"training.metrics": {"it": EVIL}}, "evil.run"),
    "callback": ({"training.callbacks": {"it": EVIL}}, "evil.run"),
    "sends": (
        {"training.callbacks": {"it": {"_target_": "keras.callbacks.RemoteMonitor"}}},
        "RemoteMonitor",
    ),
    "writes, hidden": (
        {"model": {"_target_": "keras.Sequential", "layers": [SAVE]}},
        "ModelCheckpoint",
    ),
    "a date": (
        {"model.table": {datetime.date(2020, 1, 1): 1}},
        "model.table must have plain names as its keys",
    ),
    "null": (
        {"model.table": {None: 1, "a": 2}},
        "model.table must have plain names as its keys",
    ),
    "reads": (
        {
            "model": {
                "_target_": "keras.layers.StringLookup",
                "vocabulary": "/etc/passwd",
            }
        },
        "/etc/passwd",
    ),
    "interpolated name": ({"model": {"_target_": "${seed}"}}, "${seed}"),
    "an environment variable": ({"model.dropout": "${oc.env:HOME}"}, "${oc.env:HOME}"),
    "serialized": (
        {"training.loss": {"class_name": "run", "module": "evil"}},
        "class_name",
    ),
    "hydra's callbacks": ({"hydra": {"callbacks": {"it": EVIL}}}, "evil.run"),
    "defaults": ({"defaults": ["evil"]}, "defaults"),
    "allows itself": ({"trust": {"allow": ["evil"]}, "model": EVIL}, "evil.run"),
    "another store": ({"tracking": "evil"}, "tracking"),
    "scaling": ({"scaling": EVIL}, "evil.run"),
    "seed": ({"seed": EVIL}, "evil.run"),
    "of the user, elsewhere": (
        {"dataset.data_dir": "x", "dataset.path": "/etc"},
        "/etc",
    ),
}
# name → (what replaces config.yaml or another file, what the message must name)
UNREADABLE = {
    "tag": (
        "config.yaml",
        "model: !!python/object/apply:os.system ['touch ran']\n",
        "could not determine a constructor",
    ),
    "list": (
        "config.yaml",
        "- 1\n",
        "config.yaml, line 1: the content must be a mapping, but is a list",
    ),
    "no yaml": ("config.yaml", "a: [\n", "must have a record that can be read"),
    "binary": ("config.yaml", b"\xff\xfe\x00", "must have a record that can be read"),
    "endless": (
        "config.yaml",
        "model: &a {b: *a}\n",
        "config.yaml, line 1: an alias is not expected",
    ),
    "bomb": (
        "config.yaml",
        "a0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)),
        "config.yaml, line 2: an alias is not expected",
    ),
    "schema": ("config.yaml", "schema: [1]\n", "of schema 0 to 3"),
    "environment": (
        "environment.json",
        "[]",
        "environment.json, line 1: the content must be a mapping, but is a list",
    ),
    "git": (
        "environment.json",
        '{"git": "x"}',
        "environment.json, line 1: git must be a mapping, but is a text",
    ),
    "dataset": (
        "dataset.json",
        '{"name": "x"}',
        "dataset.json, line 1: version is missing",
    ),
    "dataset's name": (
        "dataset.json",
        '{"version": "", "examples": {}, "files": {}, "content": {}}',
        "dataset.json, line 1: name is missing",
    ),
    "dataset's examples": (
        "dataset.json",
        '{"name": "", "version": "", "examples": {"validation": "abc"}, '
        '"files": {}, "content": {}}',
        "dataset.json, line 1: validation must be an integer, but is a text",
    ),
    "group": (
        "config.yaml",
        "optimizer: sgd\n",
        "config.yaml, line 1: optimizer must be a mapping, but is a text",
    ),
    "schema, endless": (
        "config.yaml",
        "schema: &a [*a, *a]\n",
        "config.yaml, line 1: an alias is not expected",
    ),
    "links": ("links.json", "{", "must have a record that can be read"),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Return the answer of `pipeline rerun` to each record.

    In its folder is `evil.py`, which leaves a file when it is imported.
    """
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "mlruns").mkdir()
    (folder / "evil.py").write_text(
        "open('ran', 'w').close()\ndef run(*args, **kwargs):\n    open('ran', 'w').close()\n"
    )
    client = MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db")
    experiment = client.create_experiment(
        "pipeline", (folder / "mlruns/artifacts").as_uri()
    )

    def run(config: dict | None = None, **files: str | bytes) -> str:
        run_id = client.create_run(experiment, run_name="\x1b[31mred\nline").info.run_id
        if config is None:
            config = base()
        files = {"config.yaml": yaml.safe_dump(config), **files}
        for name, content in files.items():
            path = folder / name
            if isinstance(content, str):
                content = content.encode()
            path.write_bytes(content)
            client.log_artifact(run_id, str(path))
            path.unlink()
        client.set_tag(run_id, "config.hash", provenance.config_hash(base(), None))
        client.set_terminated(run_id)
        return run_id

    commit = {"package": {"version": "7.5.0"}}
    records = {
        name: run(put(base(), **changes)) for name, (changes, _) in HOSTILE.items()
    }
    records |= {
        name: run(**{file: content}) for name, (file, content, _) in UNREADABLE.items()
    }
    records |= {
        "newer": run(
            {**base(), "schema": 99}, **{"environment.json": json.dumps(commit)}
        ),
        "newer, new builder": run(
            {**base(), "schema": 99, "model": EVIL},
            **{"environment.json": json.dumps(commit)},
        ),
        "terminal": run(
            **{"environment.json": json.dumps({"platform": "\x1b]0;owned\x07\nfake"})}
        ),
        "changed since": run(put(base(), seed=5)),
        "data elsewhere": run(put(base(), **{"dataset.table": "/elsewhere/x.csv"})),
        "cuda": run(**{"environment.json": json.dumps({"cuda": "1.0"})}),
    }
    without = client.create_run(experiment).info.run_id
    # First: nothing has loaded TensorFlow yet.
    lines = {"cuda": f"rerun {records['cuda']} --dry"}
    for name, run_id in records.items():
        lines[name] = f"rerun {run_id}"
        if name not in HOSTILE:
            lines[name] += " --dry"
    deleted = run()
    client.delete_run(deleted)
    lines |= {
        "deleted": f"rerun {deleted}",
        "no update": f"rerun {records['changed since']}",
        "no update, dry": f"rerun {records['changed since']} --dry",
        "data given": f"rerun {records['data elsewhere']} --dry dataset.table=/elsewhere/x.csv",
        "no such run": "rerun 0123456789abcdef0123456789abcdef",
        "no record": f"rerun {without}",
        "no store": f"rerun {without} tracking.uri=sqlite:///elsewhere/mlflow.db",
        "no sweep": f"rerun {without} --sweep",
        "no arguments": "rerun",
        "an option": f"rerun {without} -m seed=1,2",
        "no such key": f"rerun {records['changed since']} nonsense=1",
        "not a value": f"rerun {records['changed since']} hardware.replicas=0 --dry",
        "interpolated": f"rerun {records['changed since']} 'hydra.run.dir=${{now:%H}}'",
        "allowed": f"rerun {records['own module']} --allow evil",  # last: it does run
    }
    return (
        folder,
        one_process(lines, folder, warm=False),
        records,
        client.search_runs([experiment], max_results=1000),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HOSTILE, *UNREADABLE])
def test_a_hostile_record_is_refused_and_nothing_runs(refused, name):
    answer = refused[1][name]
    named = HOSTILE[name][1] if name in HOSTILE else UNREADABLE[name][2]
    assert answer["status"] == 2, answer["err"]
    last = answer["err"].splitlines()[-1]
    assert last.startswith("pipeline: ")
    assert named in last
    assert "Traceback" not in answer["err"]
    assert answer["changed"] == []


@pytest.mark.slow
def test_nothing_was_created_for_what_was_refused(refused):
    folder, answers, _, runs = refused
    assert len(HOSTILE) >= 20
    assert len(runs) == len(HOSTILE) + len(UNREADABLE) + 7
    # The negative control: once the user allows it, the same record leaves a file.
    assert "ran" in answers["allowed"]["changed"]
    assert (folder / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no such run",
            "RUN_ID must name one run of the store sqlite:///",
        ),
        (
            "no record",
            "RUN_ID must be a run that recorded its config (config.yaml), as runs of "
            "pipeline train do: a run that your own fit logged has no config",
        ),
        ("no store", "tracking.uri must be a store that exists"),
        (
            "deleted",
            "RUN_ID must be a run that is not deleted: restore it first (mlflow runs restore)",
        ),
        ("no update", "RUN_ID must have logged an update with which its rerun can"),
        ("no sweep", "SWEEP must name one sweep of the store"),
        (
            "no arguments",
            "RUN_ID must be given: see pipeline rerun --help.",
        ),
        (
            "an option",
            "arguments must be those of pipeline rerun: see pipeline rerun --help. "
            "Received: '-m",
        ),
        ("no such key", "nonsense must be a key of the config"),
        ("not a value", "hardware.replicas must be at least 1"),
        ("interpolated", "hydra.run.dir must be the plain path of a folder"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(refused, name, message):
    answer = refused[1][name]
    assert answer["status"] == 2
    last = answer["err"].splitlines()[-1]
    assert last.startswith(f"pipeline: {message}")
    assert answer["changed"] == []


@pytest.mark.slow
def test_a_newer_record_is_refused_with_the_version_that_made_it(refused):
    _, answers, records, _ = refused
    last = answers["newer"]["err"].splitlines()[-1]
    assert answers["newer"]["status"] == 2
    assert (
        f"use the version that made it, 7.5.0: pipeline rerun {records['newer']}"
        in last
    )
    assert "7.5.0" in answers["newer, new builder"]["err"].splitlines()[-1]
    assert (
        "differs: RUN_ID must have logged an update" in answers["no update, dry"]["err"]
    )


@pytest.mark.slow
def test_a_path_of_the_record_is_asked_for_by_its_option_which_then_is_taken(refused):
    _, answers, _, _ = refused
    assert answers["data elsewhere"]["status"] == 2
    assert (
        "give it again: dataset.table=/elsewhere/x.csv"
        in answers["data elsewhere"]["err"]
    )
    assert (
        "differs: dataset.table must be an argument of pipeline.dataset.digits"
        in answers["data given"]["err"]
    )


@pytest.mark.slow
def test_what_a_store_says_does_not_speak_to_the_terminal(refused):
    answer = refused[1]["terminal"]
    assert answer["status"] == 0
    assert "platform: ?]0;owned??fake then" in answer["err"]
    for text in (each["err"] for each in refused[1].values()):
        assert "\x1b" not in text


@pytest.mark.slow
def test_what_only_tensorflow_knows_is_compared_as_well(refused):
    lines = refused[1]["cuda"]["err"].splitlines()
    (said,) = (line for line in lines if line.startswith("  differs: cuda: 1.0 then, "))
    assert lines.index(said) > 0
    assert len(lines) == len(set(lines))  # and nothing twice


def test_no_error_speaks_to_the_terminal():
    escape = "\x1b]0;owned\x07"
    similar = f"{escape}1"
    assert str(ConfigError(escape, f"must be {escape}\u202e", escape, [similar])) == (
        "?]0;owned? must be ?]0;owned??. Received: '\\x1b]0;owned\\x07'. Choices: "
        "?]0;owned?1. Did you mean '\\x1b]0;owned\\x071'?"
    )


@pytest.mark.slow
def test_a_record_that_was_changed_after_the_fact_is_said(refused):
    said = "  differs: the recorded config does not match its tag config.hash"
    _, answers, _, _ = refused
    assert said in answers["changed since"]["err"].splitlines()
    assert said not in answers["terminal"]["err"].splitlines()
    assert answers["changed since"]["status"] == 0


@pytest.mark.slow
def test_the_lock_that_was_installed_is_recorded(tmp_path, monkeypatch):
    """It is the copy that `make` leaves in the environment.

    The checkout's lock may be another one by now.
    """
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not provenance.environment(tmp_path).keys() & {"lock", "lock_file"}
    # As `make` left it before it copied the lock.
    (tmp_path / "requirements.lock.installed").touch()
    assert not provenance.environment(tmp_path).keys() & {"lock", "lock_file"}
    (tmp_path / "requirements.lock.installed").write_text("tensorflow==2.21.0")
    os.utime(tmp_path / "requirements.lock.installed", (1, 1))
    (tmp_path / "requirements-gpu.lock.installed").write_text("nvidia-cudnn-cu12==9")
    then = provenance.environment(tmp_path) | {"git": {}}
    assert then["lock_file"] == "requirements-gpu.lock"
    assert then["lock"] == hashlib.sha256(b"nvidia-cudnn-cu12==9").hexdigest()
    now = {**then, "lock_file": "requirements.lock"}
    assert provenance.differences(then, now) == [
        "lock_file: requirements-gpu.lock then, requirements.lock now"
    ]
    unknown = {
        key: value for key, value in then.items() if key not in ("lock", "lock_file")
    }
    assert provenance.differences(then, unknown) == []


def test_of_two_distributions_with_one_name_the_imported_one_is_recorded(
    tmp_path, monkeypatch
):
    for folder, text in {
        "first/keras-0.1.dist-info": "Metadata-Version: 2.1\nVersion: 0.1\n"
        "Name: keras\n\nName: another\n",
        "second/keras-0.2.dist-info": "Name: keras\nVersion: 0.2\n",
        "second/half-removed.dist-info": "",
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "METADATA").write_text(text)
    monkeypatch.setattr(
        sys, "path", [str(tmp_path / "first"), str(tmp_path / "second"), *sys.path]
    )
    packages = provenance.environment(tmp_path)["packages"]
    assert packages["keras"] == "0.1"
    assert list(packages) == sorted(packages)
    assert "another" not in packages


def test_the_surroundings_are_recorded_and_what_differs_is_named(tmp_path):
    then = provenance.environment(tmp_path)
    assert then["run_dir"] == str(tmp_path)
    assert {
        "python",
        "platform",
        "processor",
        "gpus",
        "driver",
        "git",
        "package",
        "packages",
    } <= set(then)
    assert then["packages"]["keras"]
    then["git"] = {"commit": "e" * 40, "clean": True}
    assert provenance.differences(then, then) == []
    now = {
        **then,
        "gpus": ["a GPU"],
        "python": "2.7",
        "packages": {
            **then["packages"],
            "keras": "0.1",
            "nvidia-cublas-cu12": "1",
            "tqdm": "0.1",
        },
        "package": {"version": "9", "sha256": "x"},
        "git": {"commit": "f" * 40, "clean": False},
    }
    assert provenance.differences(then, now) == [
        f"python: {then['python']} then, 2.7 now",
        f"gpus: {then['gpus']} then, ['a GPU'] now",
        f"commit: {'e' * 40} then, {'f' * 40} now",
        f"keras: {then['packages']['keras']} then, 0.1 now",
        "nvidia-cublas-cu12: absent then, 1 now",  # tqdm changes no number
        "code: the working tree is not clean",
        f"code: the files of the package differ, version {then['package']['version']} then, 9 now",
    ]
    now = then | {"package": then["package"] | {"sha256": "x"}}
    assert provenance.differences(then, now) == [
        "code: the files of the package differ, although its version is "
        f"{then['package']['version']} as before"
    ]


def test_outside_of_a_repository_only_the_users_own_files_are_recorded(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs").mkdir()
    for name in ("__init__", "layers", "data"):
        (tmp_path / f"theirs/{name}.py").write_text("")
        module = "theirs" if name == "__init__" else f"theirs.{name}"
        importlib.import_module(module)
    then = provenance.environment(tmp_path)
    assert then["git"] == {}
    assert not {"git.commit", "mlflow.source.git.commit"} & set(provenance.origin())
    assert provenance.origin()["package.version"] == then["package"]["version"]
    assert {file for file in then["code"] if "theirs" in file} == {
        "theirs/__init__.py",
        "theirs/data.py",
        "theirs/layers.py",
    }
    (tmp_path / "theirs/layers.py").write_text("# other")
    (tmp_path / "theirs/data.py").unlink()
    then["code"]["../secret.py"] = "x"  # of a record that was tampered with
    assert [
        line for line in provenance.differences(then, then) if line.startswith("code: ")
    ] == [
        "code: theirs/data.py is not found",
        "code: theirs/layers.py is not the recorded file",
        "code: ../secret.py is not found",
    ]


def test_changes_of_code_are_those_from_one_segment_of_a_run_to_the_next():
    segments = [
        {"after": 0},  # of an older version
        {"after": 3, "code": {"a.py": "1", "b.py": "1"}},
        {"after": 5, "code": {"a.py": "1", "b.py": "1", "c.py": "1"}},
        {"after": 8, "code": {"a.py": "2", "b.py": "2", "../x.py": "2"}},
    ]
    assert provenance.changes_of_code(segments) == [
        "code: a.py, b.py changed after update 8 of the run, when it was resumed"
    ]
    assert provenance.changes_of_code([]) == []


def test_the_repository_of_a_run_is_only_read(tmp_path, monkeypatch):
    """`git status` alone writes the index again, under a lock.

    A process that is killed leaves the lock behind.
    """
    for command in (
        "init -q",
        "add mine.py",
        "-c user.name=a -c user.email=a@b commit -qm one",
    ):
        (tmp_path / "mine.py").write_text("first\n")
        subprocess.run(
            ["git", "-C", str(tmp_path), *command.split()], check=True, timeout=60
        )
    index = tmp_path / ".git" / "index"
    # The same text at another time, which a refresh notes.
    os.utime(tmp_path / "mine.py", (1, 1))
    before = index.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert provenance.git()["clean"] is True
    (tmp_path / "mine.py").write_text("second\n")
    assert provenance.git()["clean"] is False
    assert "+second" in provenance.diff()
    assert index.read_bytes() == before
