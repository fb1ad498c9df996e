"""What a config out of a tracking store may do, and above all what it may not."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError
from pipeline.config import compose
from pipeline.config.plain import plain
from pipeline.rerun.recorded_run import RecordedRun
from pipeline.trust import instantiate, trusted_names
from pipeline.trust.gate import Gate, check_config, check_size, drop_writers, strict
from tests.parameters import mostly_slow
from tests.running import ROOT, environment

CALLBACK = "training.callbacks.it"
MODEL = "pipeline.components.model.mlp"
TEXTS = "pipeline.dataset.text_files"


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """Return a gate with a run directory, a data directory and the prefix `mypkg`.

    `mypkg2` and `evil` write a file when they are imported.
    """
    for folder in ("run", "data", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run/link").symlink_to(tmp_path / "elsewhere")
    leave = f"open({str(tmp_path / 'run/ran')!r}, 'w').close()\n"
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg/__init__.py").write_text(
        "import functools, os, subprocess\nfrom subprocess import Popen\n"
        "from keras.utils import get_file\n"
        "from keras import Sequential\nbound = functools.partial(os.system, 'true')\n"
    )
    (tmp_path / "mypkg/models.py").write_text(
        "import keras\n\n"
        "class Model(keras.Sequential):\n    pass\n\n"
        "def build(classes):\n"
        "    return Model([keras.layers.Flatten(), keras.layers.Dense(classes)])\n"
    )
    for name in ("mypkg2", "evil"):
        (tmp_path / f"{name}.py").write_text(
            f"{leave}def run(*args, **kwargs):\n    {leave}"
        )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Gate(tmp_path / "run", tmp_path / "data", allowed=("mypkg",))
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("mypkg", "mypkg2", "evil"):
            del sys.modules[name]


def recorded(*overrides: str, **values: object) -> dict:
    """A resolved config, as a run records it, with `values` at their dotted names."""
    return put(deepcopy(composed(*overrides)), **values)


@cache
def composed(*overrides: str) -> dict:
    container = plain(compose.composed(overrides))
    container["tracking"].pop("uri")
    return container


def put(container: dict, **values: object) -> dict:
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        node = container
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = deepcopy(value)
    return container


def layers(*nodes: object) -> dict:
    return {
        "_target_": "keras.Sequential",
        "layers": [{"_target_": "keras.layers.Flatten"}, *nodes],
    }


SHELL = {"_target_": "os.system", "_args_": ["touch RAN"]}
KERAS_OBJECT = {
    "module": "evil",
    "class_name": "run",
    "registered_name": "evil>run",
    "config": {},
}
LOSS = "keras.losses.Loss"

ANY_TEXT = {"_target_": "pipeline.components.optimizer.constant", "learning_rate": "x"}
PLAIN = "must be a plain dotted name. Received: "

# (where it stands in the config, what stands there, what the message must name)
REFUSED = [
    # names that are no builder
    ("model", SHELL, "os.system"),
    (
        "model",
        {"_target_": "subprocess.Popen", "args": ["touch", "RAN"]},
        "subprocess.Popen",
    ),
    (
        "model",
        {"_target_": "builtins.eval", "_args_": ["__import__('evil')"]},
        "builtins.eval",
    ),
    (
        "model",
        {"_target_": "builtins.exec", "_args_": ["import evil"]},
        "builtins.exec",
    ),
    ("model", {"_target_": "posix.system", "_args_": ["touch RAN"]}, "posix.system"),
    (
        "model",
        {"_target_": "importlib.import_module", "name": "evil"},
        "importlib.import_module",
    ),
    (
        "model",
        {"_target_": "hydra.utils.get_method", "path": "evil.run"},
        "hydra.utils.get_method",
    ),
    (
        "model",
        {"_target_": "hydra.utils.instantiate", "config": {}},
        "hydra.utils.instantiate",
    ),
    ("model", {"_target_": "functools.partial", "_args_": []}, "functools.partial"),
    ("model", {"_target_": "pickle.loads", "_args_": [""]}, "pickle.loads"),
    ("model", {"_target_": "evil.run"}, "evil.run"),
    ("model", {"_target_": "evil"}, "'evil'"),
    ("model", {"_target_": "mypkg2.run"}, "mypkg2.run"),
    (
        "model",
        {"_target_": "pipeline.tracking.store.Store", "uri": "x"},
        "pipeline.tracking.store.Store",
    ),
    (
        "model",
        {"_target_": "pipeline.components.model.build"},
        "pipeline.components.model.build",
    ),
    ("model", {"_target_": "pipeline.run.run.run"}, "pipeline.run.run.run"),
    (
        "model",
        {"_target_": "pipeline.components.model.keras.saving.load_model"},
        "pipeline.components.model.keras.saving.load_model",
    ),
    (
        "model",
        {"_target_": "tensorflow.keras.Sequential"},
        "tensorflow.keras.Sequential",
    ),
    (
        "model",
        {"_target_": "tensorflow.io.read_file", "filename": "x"},
        "tensorflow.io.read_file",
    ),
    # what is merely reachable through Keras
    (
        "model",
        {"_target_": "keras.utils.get_file", "origin": "x"},
        "keras.utils.get_file",
    ),
    (
        "model",
        {"_target_": "keras.saving.load_model", "filepath": "x"},
        "keras.saving.load_model",
    ),
    (
        "model",
        {"_target_": "keras.models.load_model", "filepath": "x"},
        "keras.models.load_model",
    ),
    (
        "model",
        {"_target_": "keras.config.enable_unsafe_deserialization"},
        "keras.config.enable_unsafe_deserialization",
    ),
    (
        "model",
        {"_target_": "keras.layers.deserialize", "config": {}},
        "keras.layers.deserialize",
    ),
    (
        "model",
        {"_target_": "keras.layers.concatenate", "inputs": []},
        "keras.layers.concatenate",
    ),
    (
        "model",
        {"_target_": "keras.src.layers.Dense", "units": 1},
        "keras.src.layers.Dense",
    ),
    (
        "model",
        {"_target_": "keras.layers.TFSMLayer", "filepath": "x"},
        "keras.layers.TFSMLayer",
    ),
    (
        "model",
        {"_target_": "keras.layers.TorchModuleWrapper", "module": "x"},
        "keras.layers.TorchModuleWrapper",
    ),
    (
        "model",
        layers({"_target_": "keras.layers.Lambda", "function": "x"}),
        "keras.layers.Lambda",
    ),
    (
        "model",
        {"_target_": "keras.applications.resnet50.ResNet50"},
        "keras.applications.resnet50.ResNet50",
    ),
    (
        "model",
        {"_target_": "keras.applications.imagenet_utils"},
        "keras.applications.imagenet_utils",
    ),
    ("training.loss", {"_target_": "keras.losses.os"}, "keras.losses.os"),
    (
        "training.loss",
        {"_target_": "keras.losses.get", "identifier": "mse"},
        "keras.losses.get",
    ),
    (
        "training.loss",
        {"_target_": f"{LOSS}.__init__.__globals__"},
        f"{LOSS}.__init__.__globals__",
    ),
    (
        "training.loss",
        {"_target_": f"{LOSS}.from_config", "config": {}},
        f"{LOSS}.from_config",
    ),
    (
        "optimizer",
        {"_target_": "keras.optimizers.deserialize", "config": {}},
        "keras.optimizers.deserialize",
    ),
    ("optimizer", {"_target_": "keras.optimizers.legacy"}, "keras.optimizers.legacy"),
    (
        "optimizer",
        {"_target_": "keras.optimizers.OptimizerMap"},
        "keras.optimizers.OptimizerMap",
    ),
    (
        "schedule",
        {"_target_": "keras.optimizers.schedules.serialize"},
        "keras.optimizers.schedules.serialize",
    ),
    # what is merely reachable through a package that the user allows
    (
        "model",
        {"_target_": "mypkg.os.system", "_args_": ["touch RAN"]},
        "mypkg.os.system",
    ),
    (
        "model",
        {"_target_": "mypkg.subprocess.run", "args": ["touch", "RAN"]},
        "mypkg.subprocess.run",
    ),
    ("model", {"_target_": "mypkg.Popen", "args": ["touch", "RAN"]}, "mypkg.Popen"),
    ("model", {"_target_": "mypkg.get_file", "origin": "x"}, "mypkg.get_file"),
    ("model", {"_target_": "mypkg.bound"}, "mypkg.bound"),
    (
        "model",
        {"_target_": "mypkg.bound.func", "_args_": ["touch RAN"]},
        "mypkg.bound.func",
    ),
    ("model", {"_target_": "mypkg.Sequential"}, "mypkg.Sequential"),
    (
        "model",
        {"_target_": "mypkg.models.Model.load_weights", "filepath": "x"},
        "mypkg.models.Model.load_weights",
    ),
    (
        "model",
        {"_target_": "mypkg.models.build.__globals__"},
        f"{PLAIN}'mypkg.models.build.__globals__'",
    ),
    ("model", {"_target_": "mypkg.os"}, "mypkg.os"),
    # where a name hides
    ("model", {"_target_": MODEL, "hidden": [64, SHELL]}, "os.system"),
    (
        "model",
        {"_target_": MODEL, "hidden": [[{"deep": [{"deeper": SHELL}]}]]},
        "os.system",
    ),
    ("model", {"_target_": MODEL, "_recursive_": False, "hidden": SHELL}, "os.system"),
    ("model", {"_target_": MODEL, "_args_": [SHELL]}, "os.system"),
    ("model", {"_target_": MODEL, "_convert_": SHELL}, "os.system"),
    ("dataset.preprocess", {**SHELL, "_partial_": True}, "os.system"),
    ("dataset.augment", {"_target_": "evil.run"}, "evil.run"),
    (
        "training.metrics.it",
        {"_target_": "keras.metrics.MeanMetricWrapper", "fn": {"_target_": "evil.run"}},
        "evil",
    ),
    ("scaling.rule", {"_target_": "evil.run"}, "evil.run"),
    ("seed", {"_target_": "evil.run"}, "evil.run"),
    ("tracking.run_name", SHELL, "os.system"),
    ("model", {"_target_": "${training.it}"}, "${training.it}"),
    ("model", {"_target_": MODEL, "dropout": "${oc.env:HOME}"}, "${oc.env:HOME}"),
    ("model", {"_target_": MODEL, "${oc.env:HOME}": 1}, "${oc.env:HOME}"),
    ("tracking.run_name", "\\${oc.env:HOME}", "oc.env:HOME"),
    ("model", {"_target_": ["os.system"]}, "os.system"),
    ("model", {"_target_": {"_target_": "os.system"}}, "os.system"),
    ("model", {"_target_": None}, "model._target_"),
    ("model", {"_target_": "os.system "}, f"{PLAIN}'os.system '"),
    ("model", {"_target_": ".os.system"}, f"{PLAIN}'.os.system'"),
    ("model", {"_target_": "keras.layers.\nDense"}, f"{PLAIN}'keras.layers."),
    ("model", {"_target_": "keras.layers.Dense\n"}, f"{PLAIN}'keras.layers.Dense"),
    ("model", {"_target_": "keras.layers.Ｄense"}, f"{PLAIN}'keras.layers.Ｄense'"),
    ("model", {"_target_": "ｍypkg.models.build"}, f"{PLAIN}'ｍypkg.models.build'"),
    ("model", {"_target_": MODEL, "_partial_": "yes"}, MODEL),
    ("model", {"_target_": MODEL, "_args_": "RAN"}, MODEL),
    ("model", {"_target_": MODEL, "hidden": Path("x")}, "model.hidden"),
    ("hydra", {"callbacks": {"it": {"_target_": "evil.run"}}}, "evil.run"),
    (
        "training.shown.it",
        {"_target_": "evil.run", "_partial_": True},
        "training.shown.it._target_ of a config from a tracking store",
    ),
    ("hydra", {"mode": "RUN"}, "hydra must come from your own config"),
    ("defaults", ["evil"], "defaults must come from your own config"),
    # what Keras would build from a mapping
    ("training.loss", KERAS_OBJECT, "training.loss.class_name"),
    (
        "model",
        layers(
            {"_target_": "keras.layers.Dense", "units": 1, "activation": KERAS_OBJECT}
        ),
        "class_name",
    ),
    (
        "model",
        layers({"_target_": "keras.layers.Masking", "mask_value": KERAS_OBJECT}),
        "class_name",
    ),
    (
        "model",
        layers(
            {
                "_target_": "keras.layers.Dense",
                "units": 1,
                "dtype": {"registered_name": "x"},
            }
        ),
        "registered",
    ),
    # callbacks that send, run code, or write elsewhere
    (
        CALLBACK,
        {"_target_": "keras.callbacks.RemoteMonitor"},
        "keras.callbacks.RemoteMonitor",
    ),
    (
        CALLBACK,
        {"_target_": "keras.callbacks.LambdaCallback"},
        "keras.callbacks.LambdaCallback",
    ),
    (
        CALLBACK,
        {"_target_": "keras.callbacks.OrbaxCheckpoint", "directory": "x"},
        "keras.callbacks.OrbaxCheckpoint",
    ),
    (
        CALLBACK,
        {"_target_": "mlflow.keras.MlflowCallback"},
        "mlflow.keras.MlflowCallback",
    ),
    (
        CALLBACK,
        {"_target_": "keras.callbacks.ModelCheckpoint", "filepath": "it.keras"},
        "must not write files",
    ),
    (
        CALLBACK,
        {"_target_": "keras.callbacks.CSVLogger", "filename": "it.csv"},
        "must not write files",
    ),
    (
        CALLBACK,
        {"_target_": "keras.callbacks.BackupAndRestore", "backup_dir": "it"},
        "must not write files",
    ),
    (CALLBACK, {"_target_": "keras.callbacks.TensorBoard"}, "must not write files"),
    # paths that are read
    (
        "model",
        {"_target_": "keras.applications.VGG16", "weights": "it.weights.h5"},
        "it.weights.h5",
    ),
    (
        "model",
        {"_target_": "keras.applications.VGG16", "_args_": [True, "x.h5"]},
        "keras.applications.VGG16",
    ),
    (
        "model",
        layers({"_target_": "keras.layers.StringLookup", "vocabulary": "/etc/passwd"}),
        "/etc/passwd",
    ),
    (
        "model",
        layers({"_target_": "keras.layers.StringLookup", "vocabulary": "link/words"}),
        "link/words",
    ),
    (
        "model",
        layers({"_target_": "keras.layers.TextVectorization", "vocabulary": ANY_TEXT}),
        "vocabulary",
    ),
    (
        "model",
        {"_target_": "mypkg.models.build", "weights": "/etc/passwd"},
        "/etc/passwd",
    ),
    (
        "model",
        {"_target_": "mypkg.models.build", "weights": " https://example.org/x"},
        "https://example.org/x",
    ),
    ("model", {"_target_": "mypkg.models.build", "weights": "a/../../x"}, "a/../../x"),
    *(
        (
            "model",
            {"_target_": "mypkg.models.build", "weights": text},
            "model.weights must ",
        )
        for text in (
            *(
                "\x01http://evil/x",
                "\ufeffhttps://evil/x",
                "\u200b/etc/passwd",
                "a\u202eb",
                "a\0b",
            ),
            *("file:x", "FILE:x", " data:text/plain,x"),
        )
    ),
    (
        "training.it",
        [["\x1b[31m"]],
        "training.it.0.0 must consist of visible characters",
    ),
    ("dataset.data_dir", "/etc", "/etc"),
    (
        "dataset",
        {"_target_": "pipeline.dataset.from_tfds", "name": "huggingface:x"},
        "huggingface:x",
    ),
    (
        "dataset",
        {"_target_": "pipeline.dataset.from_tfds", "name": "mnist/data_dir=x"},
        "mnist/data_dir=x",
    ),
    (
        "dataset",
        {"_target_": "pipeline.dataset.from_tfds", "name": "mnist/.."},
        "mnist/..",
    ),
    ("dataset", {"_target_": TEXTS, "files": "/etc/passwd"}, "/etc/passwd"),
    ("dataset", {"_target_": TEXTS, "files": ["a", "../x/*.txt"]}, "../x/*.txt"),
    ("dataset", {"_target_": TEXTS, "validation_split": "~/*"}, "~/*"),
    ("dataset", {"_target_": TEXTS, "token_cache": "/etc"}, "/etc"),
    ("dataset", {"_target_": TEXTS, "name": "huggingface:x"}, "huggingface:x"),
    (
        "dataset",
        {"_target_": TEXTS, "files": "a", "tokenizer": {"_target_": "evil.run"}},
        "evil.run",
    ),
    (
        "dataset",
        {"_target_": TEXTS, "files": "a", "validations": {"late": "/etc/passwd"}},
        "dataset.validations.late=/etc/passwd",
    ),
    (
        "dataset",
        {"_target_": TEXTS, "files": "a", "validations": {"late": {"split": "../x"}}},
        "dataset.validations.late.split=../x",
    ),
    (
        "dataset.validations",
        {"late": {"_target_": "evil.run", "every": 5}},
        "evil.run",
    ),
    (
        "dataset.validations",
        {"late": {"_target_": "pipeline.dataset.digits", "data_dir": "/etc"}},
        "/etc",
    ),
    (
        "dataset.validations",
        {"late": {"_target_": "pipeline.dataset.from_tfds", "name": "huggingface:x"}},
        "huggingface:x",
    ),
    ("tracking.uri", "https://example.org", "https://example.org"),
    (
        "start.run",
        "/somewhere/run@40",
        "start.run must be the ID of a run if it comes from a store",
    ),
    ("start.run", "runs", "start.run must be the ID of a run"),
    ("start.run", "abc", "start.run must be the ID of a run"),
    ("start.run", "models:/../1", "start.run must be the ID of a run"),
    ("start.run", "models:/a@b/../c", "start.run must be the ID of a run"),
    ("start.run", "deadbeef@40/..", "start.run must be the ID of a run"),
    ("start", {"run": ["deadbeef", "../run"]}, "start.run must be the ID of a run"),
]


def _there(value: object, folder: Path) -> object:
    """`value` with the folder of the test in place of RAN and DATA."""
    if isinstance(value, dict):
        return {key: _there(entry, folder) for key, entry in value.items()}
    if isinstance(value, list):
        return [_there(entry, folder) for entry in value]
    if isinstance(value, str):
        return value.replace("RAN", str(folder / "run/ran")).replace(
            "DATA", str(folder / "data")
        )
    return value


@pytest.mark.parametrize(
    ("key", "value", "named"),
    REFUSED,
    ids=[f"{key}: {value}"[:90] for key, value, _ in REFUSED],
)
def test_refused_by_name_and_nothing_ran(key, value, named, gate, tmp_path):
    config = recorded(**{key: _there(value, tmp_path)})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError) as refused:
        check_config(config, gate)
    message = str(refused.value)
    named = str(_there(named, tmp_path))
    assert named in message or repr(named).strip("'") in message
    assert not {"evil", "mypkg2"} & set(sys.modules)
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts
    ] == before


BY_TEXT = [
    "keras.losses.get",
    "keras.layers.deserialize",
    "keras.layers._x",
    "keras.applications.resnet50",
]


@pytest.mark.parametrize(
    "name",
    [
        *BY_TEXT,
        "keras.layers.Lambda",
        "pipeline.run.run.run",
        "pipeline.tracking.store.Store",
        "evil.run",
    ],
)
def test_refused_before_anything_is_imported(name, gate):
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        check_config({"model": {"_target_": name}}, gate, imports=False)


BUILT = [
    (key, value)
    for key, value, _ in REFUSED
    if isinstance(value, dict)
    and key in ("model", CALLBACK)
    and "${" not in str(value)
    and "Path" not in str(value)
]


@pytest.mark.parametrize(
    ("key", "value"), BUILT, ids=[f"{key}: {value}"[:90] for key, value in BUILT]
)
def test_what_builds_has_the_same_gate(key, value, gate, tmp_path, monkeypatch):
    monkeypatch.chdir(gate.run_dir)
    with strict(gate), pytest.raises(ConfigError):
        instantiate.build(OmegaConf.create(_there(value, tmp_path)), key)
    assert not {"evil", "mypkg2"} & set(sys.modules)
    assert not (gate.run_dir / "ran").exists()


def test_what_builds_resolves_before_it_checks(gate):
    node = OmegaConf.create(
        {
            "name": "evil.run",
            "it": {"_target_": MODEL, "hidden": [{"_target_": "${name}"}]},
        }
    ).it
    with (
        strict(gate),
        pytest.raises(ConfigError, match=r"model\.hidden\.0\._target_ .* 'evil\.run'"),
    ):
        instantiate.build(node, "model")
    assert "evil" not in sys.modules


def test_without_the_gate_the_payload_does_run(gate, tmp_path):
    instantiate.build(OmegaConf.create({"_target_": "evil.run"}), "model")
    assert (gate.run_dir / "ran").exists()


def test_the_gate_closes_again_and_guards_every_thread(gate):
    node = OmegaConf.create({"_target_": "builtins.dict"})
    with (
        strict(gate),
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ConfigError, match=r"builtins\.dict"),
    ):
        pool.submit(instantiate.build, node, "model").result()
    with pytest.raises(ConfigError), strict(gate):
        instantiate.build(node, "model")
    assert instantiate.build(node, "model") == {}


def test_a_refusal_imports_no_keras(gate):
    """A rejected name costs no ten seconds.

    Names in Keras and in this package are read as text.
    """
    program = (
        "import sys\nfrom pathlib import Path\nfrom pipeline.trust import gate as trust\n"
        "from pipeline.common.errors import ConfigError\n"
        "gate = trust.Gate(Path('run'))\n"
        "good, bad = {'_target_': 'keras.losses.Huber'}, {'_target_': 'os.system'}\n"
        "trust.check_config({'loss': good}, gate, imports=False)\n"
        "try:\n    trust.check_config({'loss': good, 'z': bad}, gate)\n"
        "except ConfigError as error:\n    print(error)\n"
        "assert not {'keras', 'tensorflow', 'mlflow'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "z._target_ of a config from a tracking store must be a builder of this package"
    )
    way = "if the code is your own, trust it with --allow os. Received: 'os.system'."
    assert way in done.stdout


def test_all_packages_that_must_be_allowed_are_named_at_once(gate):
    config = {
        "dataset": {"_target_": "sensors.windows"},
        "loss": {"_target_": "keras.losses.Huber"},
        "model": {"_target_": "forecast.network"},
        "training": {"metrics": [{"_target_": "sensors.Error"}]},
    }
    with pytest.raises(ConfigError, match=r"with --allow sensors --allow forecast\. "):
        check_config(config, gate, imports=False)
    allowed = replace(gate, allowed=("sensors",))
    with pytest.raises(ConfigError, match=r"trust it with --allow forecast\. "):
        check_config(config, allowed, imports=False)


def test_a_small_file_of_a_huge_config_is_refused(gate):
    bomb: object = "x"
    for _ in range(30):
        bomb = [bomb, bomb]
    endless: list = []
    endless.append(endless)
    for value in (bomb, endless):
        with pytest.raises(ConfigError, match="model must have at most"):
            check_config({"model": value}, gate)
        for key in ("hydra", "defaults"):
            with pytest.raises(ConfigError, match=f"{key} must have at most"):
                check_config({key: value}, gate)
    check_size(recorded())


GROUPS = ("dataset", "experiment", "model")
PLAIN = ("optimizer", "scaling", "schedule", "training")
# What builds, reads and nests most.
FAST = (
    "dataset=text_files",
    "dataset=tfds",
    "experiment=images",
    "experiment=tabular_binary",
    "experiment=text",
    "model=decoder",
)


def options(groups: tuple[str, ...]) -> list[str]:
    """Return an override for each file of some config groups."""
    overrides = []
    for group in groups:
        for file in sorted((ROOT / "conf" / group).glob("*.yaml")):
            overrides.append(f"{group}={file.stem}")
    return overrides


@pytest.mark.parametrize(
    "option",
    [
        *mostly_slow(options((*GROUPS, *PLAIN)), FAST),
    ],
)
def test_every_ready_config_passes(option, gate):
    overrides = [option]
    if option == "dataset=tfds":
        overrides.append("dataset.name=mnist:3.0.1")
    check_config(recorded(*overrides), gate)


def test_every_builder_of_a_ready_config_is_on_the_list_and_exists():
    text = "".join(file.read_text() for file in (ROOT / "conf").rglob("*.yaml"))
    named = set(re.findall(r"_target_: (pipeline\.[\w.]+)", text))
    hydras = {"pipeline.config.compose.RunFolders"}  # always from the user's config
    assert named - hydras <= trusted_names.BUILDERS
    for name in trusted_names.BUILDERS:
        assert callable(
            instantiate.locate(OmegaConf.create({"_target_": name}), "model")
        )


ALLOWED = [
    ("model", {"_target_": "mypkg.models.build", "classes": 3}),
    (
        "model",
        {
            "_target_": "mypkg.models.build",
            "weights": "DATA/it.h5",
            "equation": "...x,xy->...y",
        },
    ),
    (
        "model",
        layers({"_target_": "keras.layers.Dense", "units": 3, "activation": "relu"}),
    ),
    (
        "model",
        layers({"_target_": "keras.layers.StringLookup", "vocabulary": ["a", "b"]}),
    ),
    (
        "model",
        {
            "_target_": "keras.applications.MobileNetV2",
            "weights": None,
            "input_shape": [32, 32, 3],
        },
    ),
    (
        "training.loss",
        {"_target_": "keras.losses.mean_squared_error", "_partial_": True},
    ),
    (
        "training.metrics.it",
        {"_target_": "keras.metrics.TopKCategoricalAccuracy", "k": 2},
    ),
    ("optimizer.kernel", {"_target_": "keras.regularizers.L2"}),
    ("optimizer.start", {"_target_": "keras.initializers.HeNormal"}),
    ("optimizer.keep", {"_target_": "keras.constraints.MaxNorm"}),
    ("dataset.augment", {"_target_": "pipeline.dataset.augmentation.Flip"}),
    ("tracking.experiment", "/Users/somebody/it"),
    ("start.run", None),
    ("start.run", "deadbeef"),
    ("start", {"run": "12345678@40", "weights_only": True}),
    (CALLBACK, {"_target_": "keras.callbacks.EarlyStopping", "monitor": "val_loss"}),
    (CALLBACK, {"_target_": "keras.callbacks.ReduceLROnPlateau"}),
    (CALLBACK, {"_target_": "keras.callbacks.TerminateOnNaN"}),
]


@pytest.mark.parametrize(
    ("key", "value"), ALLOWED, ids=[f"{key}: {value}"[:90] for key, value in ALLOWED]
)
def test_allowed(key, value, gate, tmp_path):
    config = recorded(**{key: _there(value, tmp_path)})
    check_config(config, gate)


def test_a_folder_to_begin_with_is_named_by_the_user_alone(gate):
    config = recorded(**{"start.run": "/somewhere/run@40"})
    check_config(
        config,
        Gate(gate.run_dir, allowed=gate.allowed, data_dir=gate.data_dir, start=True),
    )
    config["model"] = SHELL
    with pytest.raises(ConfigError):
        check_config(config, Gate(gate.run_dir, start=True))


def test_only_the_user_allows_their_model(gate):
    config = recorded(
        model={"_target_": "mypkg.models.build", "classes": 3},
        allowed=["mypkg"],
        trust=["mypkg"],
    )
    check_config(config, gate)
    for allowed in ((), ("mypk",), ("mypkg.mod",), ("mypkg.models.build.it",)):
        with pytest.raises(ConfigError, match=r"mypkg\.models\.build"):
            check_config(config, Gate(gate.run_dir, allowed=allowed))
    node = OmegaConf.create(config["model"])
    with strict(gate):
        assert instantiate.build(node, "model")(
            __import__("numpy").zeros((2, 8))
        ).shape == (2, 3)


def test_the_whole_name_of_an_object_allows_it_wherever_it_is_defined(gate):
    config = {"model": {"_target_": "mypkg.Sequential"}}
    check_config(config, Gate(gate.run_dir, allowed=["mypkg.Sequential"]))


def test_what_writes_is_left_out_unless_the_user_allows_it():
    writers = {
        name.rpartition(".")[2]: {"_target_": name, "filename": "it"}
        for name in sorted(trusted_names.WRITERS)
    }
    stop = {"_target_": "keras.callbacks.EarlyStopping"}
    config = {
        "seed": 1,
        "training": {"epochs": 1, "callbacks": {**writers, "stop": stop}},
    }
    kept, dropped = drop_writers(config, [])
    assert kept == {"seed": 1, "training": {"epochs": 1, "callbacks": {"stop": stop}}}
    assert dropped == {
        f"training.callbacks.{name}": node["_target_"] for name, node in writers.items()
    }
    for allowed in (["keras.callbacks"], sorted(trusted_names.WRITERS)):
        assert drop_writers(config, allowed) == (config, {})
    _, dropped = drop_writers(config, ["keras.callbacks.CSVLogger"])
    assert "training.callbacks.CSVLogger" not in dropped
    for odd in (
        {},
        {"training": None},
        {"training": {"callbacks": []}},
        {"training": {"callbacks": {"a": 1}}},
    ):
        assert drop_writers(odd, []) == (odd, {})
    hidden = {
        "training": {"callbacks": {"a": {"_target_": ["keras.callbacks.CSVLogger"]}}}
    }
    assert drop_writers(hidden, []) == (hidden, {})


def test_a_relative_text_is_no_way_to_what_lies_here(gate, monkeypatch, tmp_path):
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_rsa").write_text("x")
    (tmp_path / "data/words.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    node = {"_target_": "mypkg.models.build"}
    for text in (".ssh/id_rsa", "./.ssh", "elsewhere/"):
        with pytest.raises(ConfigError, match=r"model\.weights must lie in"):
            check_config({"model": {**node, "weights": text}}, gate)
    for text in ("data/words.txt", ".ssh/none", "relu", "a/b"):
        check_config({"model": {**node, "weights": text}}, gate)
    (tmp_path / "glue/cola").mkdir(parents=True)
    named = {"_target_": "pipeline.dataset.from_tfds", "name": "glue/cola"}
    check_config({"dataset": named}, gate)


def test_nothing_is_downloaded_unless_the_user_says_so(gate, monkeypatch, tmp_path):
    """TFDS' own code of some datasets unpickles or evaluates what it downloads."""
    import tensorflow_datasets

    from pipeline.dataset import load

    def asked(*_: object) -> None:
        raise InterruptedError("it is asked for")

    monkeypatch.setattr(
        tensorflow_datasets.core.DatasetBuilder, "download_and_prepare", asked
    )
    name = "mnist:3.0.1"
    with (
        strict(gate),
        pytest.raises(ConfigError, match=r"prepared; dataset\.download=true allows"),
    ):
        load.from_tfds(name, data_dir=str(tmp_path))
    with (
        strict(replace(gate, downloads=True)),
        pytest.raises(ConfigError, match="it is asked for"),
    ):
        load.from_tfds(name, data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="it is asked for"):
        load.from_tfds(name, data_dir=str(tmp_path))


def test_a_claimed_run_directory_leads_nowhere_else(gate):
    def check(path: str, claimed: str) -> dict:
        config = {"it": {"_target_": "pipeline.dataset.digits", "data_dir": path}}
        moved = RecordedRun(None, config, {"run_dir": claimed}, {}, {}).moved(
            gate.run_dir
        )
        check_config(moved, gate)
        return moved

    for claimed in ("/", "/etc", ""):
        with pytest.raises(ConfigError, match="it"):
            check("/etc/../etc/it", claimed)
    with pytest.raises(ConfigError, match="/etcetera/it"):
        check("/etcetera/it", "/etc")
    assert check("/etc/it", "/etc")["it"]["data_dir"] == str(gate.run_dir / "it")


def test_confine(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/out").symlink_to(tmp_path)
    (tmp_path / "in/loop").symlink_to(tmp_path / "in/loop")
    monkeypatch.chdir(tmp_path / "in")
    gate = Gate(tmp_path / "in")
    for path in ("a/b", str(tmp_path / "in"), str(tmp_path / "in/out/in/x")):
        gate.confine(path, "data_dir")
    for path in (
        "out/x",
        "loop/x",
        "../in/x",
        "",
        "a\0b",
        "C:/x",
        " file:///x",
        "\\\\host\\x",
        "~root",
    ):
        with pytest.raises(ConfigError, match="data_dir must lie in"):
            gate.confine(path, "data_dir")


def test_a_pattern_matches_no_file_behind_a_link(tmp_path, monkeypatch):
    for folder in ("in", "in/texts", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in/texts/a.txt").touch()
    (tmp_path / "elsewhere/b.txt").touch()
    monkeypatch.chdir(tmp_path / "in")

    arguments_by_key = {
        "dataset.files.0": lambda pattern: {"files": [pattern]},
        "dataset.validation_split": lambda pattern: {"validation_split": pattern},
        "dataset.validations.late": lambda pattern: {"validations": {"late": pattern}},
        "dataset.validations.late.split": lambda pattern: {
            "validations": {"late": {"split": pattern}}
        },
    }

    def check(key, pattern, **strings):
        node = {"_target_": TEXTS, **arguments_by_key[key](pattern)}
        gate = Gate(tmp_path / "in/run", given=strings)
        check_config({"dataset": node}, gate, imports=False)

    for key in arguments_by_key:
        for pattern in ("texts", "*/*.txt"):
            check(key, pattern)
    (tmp_path / "in/texts/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/link").symlink_to(tmp_path / "elsewhere")
    for key in arguments_by_key:
        for pattern in ("texts", "link", "texts/*/b.txt", "**/*.txt"):
            rule = rf"^{re.escape(key)} must lie in .* give it again: \S*{key}="
            with pytest.raises(ConfigError, match=rule):
                check(key, pattern)
            check(key, pattern, **{key: pattern})
        check(key, "texts/*.txt")


def test_data_below_this_folder_or_given_again_are_the_users_own(
    gate, tmp_path, monkeypatch
):
    """It may be a folder or file for any argument of the user's own dataset."""
    monkeypatch.chdir(tmp_path / "elsewhere")

    def at(key: str, path: str) -> dict:
        return {
            key.split(".")[0]: {
                "_target_": "mypkg.models.build",
                key.split(".")[1]: path,
            }
        }

    check_config(at("dataset.table", str(tmp_path / "elsewhere/x.csv")), gate)
    check_config(
        at("dataset.table", "/etc/x y.csv"),
        replace(gate, given={"dataset.table": "/etc/x y.csv"}),
    )
    check_config(at("model.table", "/etc/passwd"), replace(gate, given={"model": None}))
    for key, path, given in (
        ("dataset.table", "/etc/x y.csv", {}),
        (
            "dataset.table",
            "/etc/x y.csv",
            {"dataset.table": "/etc/other", "dataset.other": "/etc/x y.csv"},
        ),
        ("model.table", str(tmp_path / "elsewhere/x.csv"), {"dataset": None}),
    ):
        with pytest.raises(
            ConfigError, match="if the path is your own, give it again: "
        ) as refused:
            check_config(at(key, path), replace(gate, given=given))
        assert f"{key}={path}" in str(refused.value)


# What stands in the source of a class that reads, writes, sends or runs something.
_REACHES_OUT = re.compile(
    r"gfile|\bopen\(|file_utils|load_model|load_weights|saved_model|pickle|marshal|"
    r"func_load|requests|urllib|"
    r"deserialize_keras_object\(mask|jax2tf|import torch"
)


def test_every_keras_layer_that_reaches_out_is_on_a_list():
    import keras

    known = set(trusted_names.REJECTED) | set(trusted_names.READERS)
    found = set()
    for name, layer in inspect.getmembers(keras.layers, inspect.isclass):
        if not issubclass(layer, keras.Layer):
            continue
        base = layer.__mro__.index(keras.layers.Layer)
        for cls in layer.__mro__[:base]:
            if _REACHES_OUT.search(inspect.getsource(cls)):
                found.add(f"keras.layers.{name}")
    assert {
        "keras.layers.StringLookup",
        "keras.layers.TFSMLayer",
        "keras.layers.Lambda",
    } <= found
    # Masking does so from a serialized object only, which no config may hold.
    assert found - known == {"keras.layers.Masking"}


def test_every_keras_callback_is_known():
    import keras

    names = {
        f"keras.callbacks.{name}"
        for name, _ in inspect.getmembers(keras.callbacks, inspect.isclass)
    }
    refused = {f"keras.callbacks.{name}" for name in ("Callback", "CallbackList")}
    rejected = {name for name in trusted_names.REJECTED if "callbacks" in name}
    known = trusted_names.CALLBACKS | trusted_names.WRITERS
    assert names == known | refused | rejected


def test_the_module_that_defines_a_target_is_named():
    rule = "not only be reachable through one; it is defined in mlflow.entities.metric."
    with pytest.raises(ConfigError, match=rule):
        trusted_names.check_object(
            "tests.synthetic.Metric", "model._target_", ["tests"]
        )
