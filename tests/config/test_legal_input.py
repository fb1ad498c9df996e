"""What `fit` takes, a run takes.

Callbacks, models, losses and metrics are of other kinds than in the ready configs. The
command lines of a table run in one process (see refused.py), each into an experiment of
its own.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tests.running import Store, one_process, python
from tests.shared import migrated_store, place_store

MODULE = '''
import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from keras import layers
from pipeline.dataset import Data

rng = np.random.default_rng(0)

def examples(*arrays):
    splits = [tf.data.Dataset.from_tensor_slices(arrays) for _ in range(2)]
    return Data(*splits)

def classes():
    x = rng.normal(size=(200, 4)).astype("float32")
    return examples(x, rng.integers(0, 3, 200))

def speech():
    x = rng.normal(size=(200, 6, 4)).astype("float32")
    return examples(x, rng.integers(1, 3, (200, 2)))

def segmented():
    x = rng.normal(size=(200, 6, 4)).astype("float32")
    # 255 is the class of a pixel that nobody knows.
    return examples(x, rng.choice([0, 1, 2, 255], (200, 6)))

def sick():
    x = rng.normal(size=(200, 4)).astype("float32")
    return examples(x, (x[:, :1] > 0).astype("float32"))

def heights():
    x = rng.normal(size=(200, 4)).astype("float32")
    return examples(x, x[:, :1])

def text():
    tokens = rng.integers(1, 9, (200, 7))
    tokens[:, 5:] *= rng.integers(0, 2, (200, 2))
    return examples(tokens[:, :-1], tokens[:, 1:])

def sides():
    left = rng.normal(size=(200, 3)).astype("float32")
    right = rng.normal(size=(200, 3)).astype("float32")
    return examples({"left": left, "right": right}, rng.integers(0, 3, 200))

def partly():
    x = rng.normal(size=(200, 4))
    labels = (rng.normal(size=(200, 1)), rng.normal(size=(200, 1)))
    # The second output has no sample weights.
    weights = (np.ones(200), None)
    train = tf.data.Dataset.from_tensor_slices((x, labels, weights))
    return train, tf.data.Dataset.from_tensor_slices((x, labels, weights))

def two_headed():
    inputs = keras.Input((4,))
    return keras.Model(inputs, [layers.Dense(1, name=name)(inputs) for name in "ab"])

def unbuilt():
    model = keras.Sequential([layers.Dense(8, "tanh"), layers.Dropout(0.1)])
    model.add(layers.Dense(3))
    return model

class Waves(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        image = tfds.features.Tensor(shape=(4,), dtype=np.float32)
        label = tfds.features.ClassLabel(num_classes=3)
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(200):
            image = rng.normal(size=4).astype("float32")
            yield number, {"image": image, "label": number % 3}

class Doubling(layers.Layer):
    def call(self, x):
        return 2 * x

def doubled():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu")])
    model.add(Doubling())
    model.add(layers.Dense(3))
    return model

class Unreadable(layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return self.factor * x

def unreadable():
    return keras.Sequential([keras.Input((4,)), Unreadable(2.0), layers.Dense(3)])

class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(self.hidden(x))

def probable():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])

def sigmoid():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu")])
    model.add(layers.Dense(1, "sigmoid"))
    return model

def linear():
    return keras.Sequential([keras.Input((4,)), layers.Dense(1)])

def recurrent():
    model = keras.Sequential([keras.Input((6,))])
    model.add(layers.Embedding(9, 4, mask_zero=True))
    model.add(layers.GRU(8, return_sequences=True))
    model.add(layers.Dense(9))
    return model

def embedding():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.add(layers.UnitNormalization())
    return model

def two_sided():
    inputs = {side: keras.Input((3,), name=side) for side in ("left", "right")}
    both = layers.Concatenate()([inputs["left"], inputs["right"]])
    return keras.Model(inputs, layers.Dense(3)(both))

class Confidence(keras.metrics.Metric):
    """It takes neither a name nor a sample weight, as Keras allows."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight(initializer="zeros")
        self.count = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred):
        self.total.assign_add(tf.reduce_sum(tf.reduce_max(tf.nn.softmax(y_pred), -1)))
        self.count.assign_add(tf.cast(tf.size(y_true), "float32"))

    def result(self):
        return self.total / self.count
'''

MODELS = (
    "unbuilt",
    "Subclassed",
    "probable",
    "embedding",
    "two_sided",
    "sigmoid",
    "linear",
    "recurrent",
    "two_headed",
)
LOGGED = ("doubled", "unreadable")
DATASETS = (
    "classes",
    "speech",
    "segmented",
    "sides",
    "sick",
    "heights",
    "text",
    "partly",
)
WAVES = """
_target_: pipeline.dataset.from_tfds
builder: mine.Waves
data_dir: null
validation_split: null
"""
OBJECTIVE = """
# @package training
loss: {_target_: keras.losses.Huber, delta: 0.5}
metrics: {far: {_target_: keras.metrics.MeanAbsoluteError}}
"""
MONITORS = {
    "stop": (
        "keras.callbacks.EarlyStopping, monitor: val_accuracy, patience: 0, "
        "min_delta: 2"
    ),
    "save": (
        "keras.callbacks.ModelCheckpoint, monitor: val_accuracy, "
        "save_best_only: true, filepath: best.keras"
    ),
    "slow": "keras.callbacks.ReduceLROnPlateau, monitor: accuracy",
    "bar": "keras.callbacks.ProgbarLogger",
}
CALLBACKS = " ".join(
    f"'+training.callbacks.{name}={{_target_: {value}}}'"
    for name, value in MONITORS.items()
)
LOSS = (
    "~training.metrics.accuracy ~training.loss.from_logits "
    "training.loss._target_=keras.losses"
)
CONFIDENCE = "+training.metrics.sure._target_=mine.Confidence"
PARTLY = (
    "model=two_headed dataset=partly objective=regression "
    "~training.metrics.mean_absolute_error"
)
FUNCTION = (
    "'+training.metrics.own={_target_: keras.metrics.sparse_categorical_accuracy, "
    "_partial_: true}'"
)
LEGAL = {
    # Two logical devices first: TensorFlow takes them once a process.
    "subclassed": "model=Subclassed dataset=classes hardware.replicas=2",
}
WIDER = {
    "partly weighted": f"{PARTLY} hardware.replicas=2",
    "builder": f"model=unbuilt dataset=waves dataset.data_dir=data {FUNCTION}",
    "monitored": (
        "model=unbuilt dataset=classes schedule=constant training.epochs=9 "
        f"{CALLBACKS} {CONFIDENCE}"
    ),
    "own objective": "model=linear dataset=heights objective=mine",
    "two_sided": "model=two_sided dataset=sides tracking.log_model=true",
    "unreadable": "model=unreadable dataset=classes tracking.log_model=true",
    "ctc": f"model=unbuilt dataset=speech {LOSS}.CTC",
    "regression": "model=linear dataset=heights objective=regression",
    "ignored": (
        "model=unbuilt dataset=segmented +training.loss.ignore_class=255 "
        "~training.metrics.accuracy"
    ),
    "circle": (
        f"model=embedding dataset=classes {LOSS}.Circle "
        "training.loss_over=effective_batch"
    ),
    "doubled": "model=doubled dataset=classes tracking.log_model=true",
}
WIDEST = {
    "partly weighted and streamed": f"{PARTLY} +dataset.in_memory=false",
    "generalized": (
        f"model=probable dataset=classes {LOSS}.CategoricalGeneralizedCrossEntropy"
    ),
    "softmax": "model=probable dataset=classes training.loss.from_logits=false",
    "binary": "model=sigmoid dataset=sick objective=binary",
    "language": "model=recurrent dataset=text objective=language_model",
}
SHORT = "accumulation.effective_batch_size=50 tracking.system_metrics=false"


@dataclass
class Ran:
    """Where command lines ran, and what each of them answered."""

    folder: Path
    store: Store
    answers: dict[str, dict]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("legal"), LEGAL)


@pytest.fixture(scope="module")
def ran_wider(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("wider"), WIDER)


@pytest.fixture(scope="module")
def ran_widest(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("widest"), WIDEST)


def run_in(folder, legal):
    (folder / "mine.py").write_text(MODULE)
    write_configs(folder / "conf")
    place_store(folder)
    (folder / "home").mkdir()
    shutil.copyfile(migrated_store(), folder / "home" / "store.db")

    defaults = {"tracking.log_model": "false", "training.epochs": "1"}
    lines = {}
    for name, line in legal.items():
        line = f"train --config-dir conf {line} {SHORT} tracking.experiment='{name}'"
        for key, value in defaults.items():
            if f"{key}=" not in line:
                line += f" {key}={value}"
        lines[name] = line
    # Hydra wants the second in quotes.
    home = "tracking.uri=sqlite:///~/store.db \"hydra.run.dir='~/run'\""
    lines["at home"] = (
        "train --config-dir conf model=unbuilt dataset=classes "
        f"{SHORT} training.updates=1 {home}"
    )

    environment = {"CUDA_VISIBLE_DEVICES": "-1", "HOME": str(folder / "home")}
    return Ran(folder, Store(folder), one_process(lines, folder, **environment))


def write_configs(conf):
    for group, names in {"model": MODELS + LOGGED, "dataset": DATASETS}.items():
        (conf / group).mkdir(parents=True)
        for name in names:
            (conf / group / f"{name}.yaml").write_text(f"_target_: mine.{name}\n")
    (conf / "dataset" / "waves.yaml").write_text(WAVES)
    (conf / "objective").mkdir()
    (conf / "objective" / "mine.yaml").write_text(OBJECTIVE)


@pytest.mark.parametrize("name", LEGAL)
def test_it_runs_to_its_end(ran, name):
    answer = ran.answers[name]
    assert answer["status"] == 0, answer["err"]
    assert ran.store.run(name).info.status == "FINISHED"


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDER)
def test_what_is_of_another_kind_runs_to_its_end(ran_wider, name):
    test_it_runs_to_its_end(ran_wider, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", WIDEST)
def test_the_rest_runs_to_its_end(ran_widest, name):
    test_it_runs_to_its_end(ran_widest, name)


def test_a_tilde_is_the_home_directory(ran):
    answer = ran.answers["at home"]
    assert answer["status"] == 0, answer["err"]
    client = MlflowClient(f"sqlite:///{ran.folder}/home/store.db")
    experiment = client.get_experiment_by_name("pipeline")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert (ran.folder / "home" / "run" / "journal.jsonl").exists()
    assert not [path for path in ran.folder.rglob("*") if "~" in path.name]


@pytest.mark.slow
def test_a_function_for_a_metric_is_the_mean_of_its_values(ran_wider):
    metrics = ran_wider.store.run("builder").data.metrics
    assert metrics["train/own"] == metrics["train/accuracy"]


@pytest.mark.slow
def test_an_objective_replaces_the_loss_and_the_metrics_whole(ran_wider):
    run = ran_wider.store.run("own objective")
    assert run.data.params["training.loss.delta"] == "0.5"
    assert "training.loss.from_logits" not in run.data.params
    assert {key for key in run.data.metrics if key.startswith("val/")} == {
        "val/loss",
        "val/far",
        "val/examples_seen",
    }


@pytest.mark.slow
def test_a_monitored_metric_has_its_direction(ran_wider):
    store = ran_wider.store
    # The second epoch is no better by 2, so it is the last.
    run = store.run("monitored")
    assert list(store.history(run, "val/accuracy")) == [4, 8]
    best = keras.saving.load_model(ran_wider.folder / "best.keras", compile=False)
    assert best.count_params() == 4 * 8 + 8 + 8 * 3 + 3


@pytest.mark.slow
def test_a_metric_without_a_name_is_logged_by_its_key(ran_wider):
    store = ran_wider.store
    run = store.run("monitored")
    assert 1 / 3 < store.history(run, "train/sure")[4] < 1
    assert 1 / 3 < store.history(run, "val/sure")[4] < 1


@pytest.mark.slow
def test_a_logged_model_of_named_inputs_predicts_the_same(ran_wider, monkeypatch):
    import mlflow

    store = ran_wider.store
    run = store.run("two_sided")
    assert run.data.tags.get("model.not_logged") is None
    monkeypatch.chdir(ran_wider.folder)
    mlflow.set_tracking_uri(store.client.tracking_uri)
    model = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/model")
    values = np.random.default_rng(1).normal(size=(5, 3)).astype("float32")
    x = {"left": values, "right": values}
    outputs = model.predict(x)
    np.testing.assert_allclose(outputs, model.get_raw_model()(x), rtol=1e-6)
    assert set(model.metadata.signature.inputs.input_names()) == {"left", "right"}


@pytest.mark.slow
def test_a_logged_model_of_own_layers_is_loaded_in_another_folder(ran_wider, tmp_path):
    store = ran_wider.store
    run = store.run("doubled")
    error = ran_wider.answers["doubled"]["err"]
    assert run.data.tags.get("model.not_logged") is None, error
    script = (
        "import sys, mlflow, numpy as np\n"
        f"mlflow.set_tracking_uri({store.client.tracking_uri!r})\n"
        f"model = mlflow.pyfunc.load_model('runs:/{run.info.run_id}/model')\n"
        "assert 'mine' in sys.modules\n"
        "print(model.predict(np.ones((5, 4), 'float32')).shape)"
    )
    out, err = python("-P", "-c", script, cwd=tmp_path).communicate()
    assert out.endswith("(5, 3)\n"), err


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_not_left_in_the_store(ran_wider):
    store = ran_wider.store
    run = store.run("unreadable")
    assert run.info.status == "FINISHED"
    assert run.data.tags["model.not_logged"]
    assert "the model was not logged: " in ran_wider.answers["unreadable"]["err"]
    models = store.client.search_logged_models([run.info.experiment_id])
    assert run.info.run_id not in [model.source_run_id for model in models]
