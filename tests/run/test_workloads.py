"""The ready workloads: each trains, is exact at any factor, and gives its result."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tests.parameters import mostly_slow
from tests.running import ROOT, Store, pipeline, python

QUIET = ("tracking.system_metrics=false", "tracking.log_model=false")
# What the files say of each, and which metrics are compared.
RESULTS = {
    "images": ("test/accuracy", lambda value: value > 0.98),
    "tabular_binary": ("test/accuracy", lambda value: value > 0.93),
    "tabular_regression": ("test/loss", lambda value: value < 4000),
    # 2.94 was seen with Python 3.11, whose texts these are.
    "text": ("test/bits_per_byte", lambda value: value < 3.1),
}


def test_every_workload_says_what_to_expect():
    for name, (metric, _) in RESULTS.items():
        text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
        assert f"# Run: pipeline train experiment={name}" in text
        assert f"Result: {metric} " in text


@pytest.mark.slow
def test_a_workload_trains(tmp_path):
    few = ("training.updates=3", "training.evaluate_every=3")
    pipeline("train", "experiment=tabular_binary", *few, *QUIET, cwd=tmp_path)
    measures_all(Store(tmp_path).run().data.metrics, "tabular_binary")


def measures_all(metrics, name):
    measured = RESULTS[name][0].removeprefix("test/")
    assert {f"train/{measured}", f"val/{measured}", "test/loss"} <= metrics.keys()
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("name", mostly_slow(RESULTS, [], ["images"]))
def test_a_workload_gives_the_stated_result(tmp_path, name):
    pipeline(
        "train", f"experiment={name}", "tracking.system_metrics=false", cwd=tmp_path
    )
    run = Store(tmp_path).run()
    measures_all(run.data.metrics, name)
    metric, holds = RESULTS[name]
    assert holds(run.data.metrics[metric]), run.data.metrics[metric]
    assert "model.not_logged" not in run.data.tags
    if name == "text":  # of whatever length
        client = Store(tmp_path).client
        (logged,) = client.search_logged_models([run.info.experiment_id])
        loaded = mlflow.pyfunc.load_model(logged.artifact_location)
        for length in (1, 40):
            logits = loaded.predict(np.ones((2, length), "int32"))
            assert logits.shape == (2, length, 257)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tabular_binary", "text"])
def test_a_workload_is_exact(tmp_path, name):
    """It is in float64 at factors 1 and 8, at each of 6 updates.

    An effective batch of another size is the control.
    """
    overrides = [
        f"experiment={name}",
        "hardware.precision=float64",
        "training.updates=6",
        "training.evaluate_every=6",
        *QUIET,
    ]
    changes = ["factor=1", "factor=8"]
    if name == "tabular_binary":
        overrides.append("model.dropout=0")
        changes.append("effective_batch_size=48")
    for number, change in enumerate(changes):
        pipeline(
            "train",
            *overrides,
            f"accumulation.{change}",
            f"hydra.run.dir={number}",
            cwd=tmp_path,
        )
    store = Store(tmp_path)
    whole, cut, *others = (store.histories(run) for run in store.runs())
    metric = RESULTS[name][0].removeprefix("test/")
    assert len(whole["val/loss"]) == 1
    for key in ("train/loss", "train/gradient_norm", f"train/{metric}"):
        assert len(whole[key]) == 6
    for key in ("train/loss", "train/gradient_norm", f"train/{metric}", "val/loss"):
        values = np.array(list(whole[key].values()))
        cut_values = np.array(list(cut[key].values()))
        assert (np.abs(cut_values / values - 1) < 1e-10).all(), key
    for other in others:
        assert abs(other["train/loss"][6] / whole["train/loss"][6] - 1) > 1e-6


SMALL = {
    "exact": ("model.filters=[4]",),
    "images": ("model.filters=[4]",),
    "quick": (),
    "text": ("model.blocks=1", "model.width=16"),
    "tabular_binary": (),
    "tabular_regression": (),
    "moons": (
        "--config-dir",
        str(ROOT / "examples" / "own_project" / "conf"),
        "model.units=8",
    ),
    "tagger": (
        "--config-dir",
        str(ROOT / "examples" / "two_outputs" / "conf"),
        "model.units=4",
    ),
    "towers": (
        "--config-dir",
        str(ROOT / "examples" / "contrastive" / "conf"),
        "accumulation.same_noise=true",
    ),
}


def test_small_are_all_experiments():
    files = [
        *ROOT.glob("conf/experiment/*.yaml"),
        *ROOT.glob("examples/*/conf/experiment/*.yaml"),
    ]
    # The batches of `photos`, which have any size, reject xla=true. `from_fit` is an
    # example of a config for the documentation, whose tests compose it. `words` has
    # tests of text files, and a cut by tokens, as that of `paragraphs`, rejects
    # xla=true; `shapes` is tested beside it. The others are the runs of one example,
    # which begin with each other's weights.
    others = {"photos", "from_fit", "words", "paragraphs", "shapes"}
    others |= {"base", "frozen", "lora"}
    assert {file.stem for file in files} == SMALL.keys() | others


@pytest.mark.parametrize("name", mostly_slow(SMALL, [], ["quick"]))
def test_a_workload_computes_the_same_by_xla(tmp_path, name):
    """It is in float64 at each of two updates, with noise that does not depend on XLA.

    `auto` compiles nothing on a CPU.
    """
    few = (
        "hardware.precision=float64",
        "training.updates=2",
        "training.epochs=null",
        "training.evaluate_every=2",
    )
    # XLA lacks deterministic kernels.
    free = ("accumulation.same_noise=auto", "hardware.deterministic=false")
    for module in ROOT.glob("examples/*/*.py"):
        shutil.copy(module, tmp_path)
    overrides = [f"experiment={name}", *few, *QUIET, *free, *SMALL[name]]
    lines = []
    for xla in ("auto", "true"):
        place = [f"hardware.xla={xla}", f"hydra.run.dir={xla}"]
        lines.append(["train", *overrides, *place])
    program = (
        "from pipeline.__main__ import main\n"
        f"for line in {lines}:\n"
        "    assert not main(line)"
    )
    process = python("-c", program, cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    store = Store(tmp_path)
    plain, compiled = (store.histories(run, "train/", "val/") for run in store.runs())
    assert compiled.keys() == plain.keys() > {"train/loss", "val/loss"}
    for key, values in plain.items():
        # 1e-15 in the first update, which an optimizer may amplify if a gradient is
        # next to zero.
        np.testing.assert_allclose(
            list(compiled[key].values()), list(values.values()), rtol=1e-10, atol=1e-10
        )


def folder_like(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    """Write a folder of TFDS like that of a dataset that cannot be downloaded here."""
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=shape),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
    )
    place = folder / name / "1.0.0"
    place.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    splits = []
    for split, count in (("train", 60), ("test", 20)):
        template = tfds.core.ShardedFileTemplate(
            data_dir=place, dataset_name=name, split=split, filetype_suffix="tfrecord"
        )
        path = str(template.sharded_filepath(shard_index=0, num_shards=1))
        with tf.io.TFRecordWriter(path) as writer:
            for label in numbers.integers(0, 10, count):
                image = numbers.integers(0, 256, shape).astype("uint8")
                example = {"image": image, "label": label}
                writer.write(features.serialize_example(example))
        info = tfds.core.SplitInfo(
            name=split, shard_lengths=[count], num_bytes=0, filename_template=template
        )
        splits.append(info)
    tfds.folder_dataset.write_metadata(
        data_dir=place, features=features, split_infos=splits
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("mnist", (28, 28, 1)), ("cifar10", (32, 32, 3))]
)
def test_a_dataset_that_others_prepared(tmp_path, name, shape):
    folder_like(tmp_path / "data", name, shape)
    data = (
        f"dataset={name}",
        f"dataset.data_dir={tmp_path}/data",
        f"dataset.name={name}:1.0.0",
    )
    sizes = (
        "accumulation.effective_batch_size=16",
        "training.epochs=1",
        "model.filters=[4]",
    )
    pipeline("train", *data, *sizes, *QUIET, cwd=tmp_path)
    run = Store(tmp_path).run()
    assert run.data.metrics["train/examples_seen"] == 54
    assert run.data.tags["updates"] == "4"
    assert "test/accuracy" in run.data.metrics
    assert run.data.params["derived.factor"] == "4"


FINE_TUNED = (
    "dataset.resize=[32,32]",
    "accumulation.effective_batch_size=8",
    "training.updates=2",
    "schedule=constant",
    "tracking.system_metrics=false",
)


@pytest.mark.parametrize("kind", mostly_slow(["keras", "weights.h5"], [], ["keras"]))
def test_a_network_with_weights_of_ones_own_is_fine_tuned(tmp_path, kind):
    """What is frozen stays as it was in the file.

    The logged model predicts the same, which the run has checked.
    """
    import keras

    from pipeline.components import model as models

    folder_like(tmp_path / "data", "cifar10", (32, 32, 3))
    keras.utils.set_random_seed(5)
    theirs = models.application((32, 32, 3), 10, "MobileNetV2")
    file = tmp_path / f"mine.{kind}"
    if kind == "keras":
        theirs.save(file)
    else:
        theirs.save_weights(file)
    overrides = (
        "dataset=cifar10",
        f"dataset.data_dir={tmp_path}/data",
        "dataset.name=cifar10:1.0.0",
        "model=mobilenetv2",
        *FINE_TUNED,
    )
    frozen = (
        "model.frozen=['Conv*','bn_*','block_*','expanded*']",
        f"model.weights={file}",
    )
    pipeline("train", *overrides, *frozen, cwd=tmp_path)
    store = Store(tmp_path)
    run = store.run()
    assert "model.not_logged" not in run.data.tags
    assert int(run.data.params["derived.parameters"]) < 20_000  # of 2.3 M: the logits
    (logged,) = store.client.search_logged_models([run.info.experiment_id])
    folder = Path(logged.artifact_location.removeprefix("file://"))
    trained = keras.models.load_model(next(folder.rglob("*.keras")))
    for name in ("Conv1", "block_5_expand"):
        kept = trained.get_layer(name).get_weights()
        pairs = zip(kept, theirs.get_layer(name).get_weights(), strict=True)
        for array, expected in pairs:
            assert np.array_equal(array, expected)
    logits = trained.get_layer("logits").get_weights()[0]
    assert not np.array_equal(logits, theirs.get_layer("logits").get_weights()[0])

    rules = {
        "model.frozen=[nothing_*]": "frozen must have only patterns that match a "
        "layer's name. "
        "Received: nothing_*",
        "model.weights=nowhere.keras": "weights must be a file that exists. "
        "Received: nowhere.keras",
    }
    for wrong, rule in rules.items():
        rejected = pipeline("train", *overrides, wrong, cwd=tmp_path, status=2)
        assert rule in rejected.stderr
