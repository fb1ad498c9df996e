"""`dataset.batched`: several of the user's own batches are one update.

The reference is plain Keras on their concatenation.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipeline.accumulation import Update, accumulate_gradients
from pipeline.accumulation.internals import Batches
from pipeline.common.errors import ConfigError, DataError
from pipeline.config import sizes
from pipeline.config.plan import UNCUT, stream_plan
from pipeline.config.sizes import Horizon
from pipeline.dataset import search_time
from pipeline.dataset.bad_example import errors_located
from pipeline.dataset.batches import evaluation_batches, stream_batches
from pipeline.dataset.checksums import DataFiles
from pipeline.dataset.splits import Data
from pipeline.dataset.stream import Loader, Stream
from tests.checkpoints.test_resume_rules import MINE
from tests.parameters import mostly_slow
from tests.running import ROOT, Store, pipeline

FACTOR = 3
BATCH_SIZES = (3, 5, 2, 4, 1, 6, 2)  # of `generator`
QUIET = ("tracking.system_metrics=false", "tracking.log_model=false")
EXAMPLE = ROOT / "examples" / "own_batches"
PHOTOS = ("--config-dir", str(EXAMPLE / "conf"), "experiment=photos", *QUIET)


def written(folder):
    """Write 38 images in two classes: 10 batches of 4, the last one of 2."""
    numbers = np.random.default_rng(0)
    for name, place in itertools.product("ab", range(19)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = numbers.integers(0, 255, (8, 8, 3))
        keras.utils.save_img(folder / name / f"{place}.png", pixels, scale=False)
    return folder


def images(folder):
    return keras.utils.image_dataset_from_directory(
        folder, image_size=(8, 8), batch_size=4, shuffle=True, seed=1, verbose=False
    )


def generator():
    numbers = np.random.default_rng(0)
    for size in BATCH_SIZES:
        yield numbers.normal(size=(size, 8, 8, 3)), numbers.integers(0, 2, size)


class Bricks(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.epochs = 0
        self.begun = 0

    def __len__(self):
        return len(BATCH_SIZES)

    def __getitem__(self, index):
        x, y = list(generator())[index]
        return x + self.epochs, y, np.linspace(1, 2, len(y))

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.epochs += 1


def model():
    policy = keras.DTypePolicy("float64")
    inputs = keras.Input((8, 8, 3), dtype="float64")
    x = keras.layers.Rescaling(1 / 255, dtype=policy)(inputs)
    x = keras.layers.Flatten(dtype=policy)(x)
    dense = keras.layers.Dense(2, kernel_initializer="zeros", dtype=policy)
    network = keras.Model(inputs, dense(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    network.compile(optimizer, loss, jit_compile=False)
    optimizer.build(network.trainable_variables)
    return network


def windows(source, epochs):
    """Yield the effective batches, made by hand."""
    for _ in range(epochs):
        if isinstance(source, Bricks):
            batches = [source[place] for place in range(len(source))]
            source.on_epoch_end()
        elif callable(source):
            batches = list(source())
        else:
            batches = list(source)
        for start in range(0, len(batches), FACTOR):
            yield concatenated(batches[start : start + FACTOR])


def concatenated(batches):
    """Return one batch of the examples of several."""
    inputs_labels_and_weights = zip(*batches, strict=True)
    return tuple(np.concatenate(parts) for parts in inputs_labels_and_weights)


@pytest.mark.parametrize(
    "kind", mostly_slow(["images", "generator", "pydataset"], ["generator"])
)
def test_updates_equal_those_of_the_large_batches(kind, tmp_path, monkeypatch):
    # The precision that batches are cast to.
    monkeypatch.setattr(keras.config, "floatx", lambda: "float64")
    if kind == "images":
        written(tmp_path)
    source = {
        "images": lambda: images(tmp_path),
        "generator": lambda: generator,
        "pydataset": Bricks,
    }[kind]
    ours = model()
    theirs = model()
    stream = Stream(Loader(source(), "train"), FACTOR)
    update = Update(ours, ours.loss, ours.optimizer, UNCUT)
    step = tf.function(update, autograph=False)
    batches = iter(stream_batches(stream, 0))
    large_batches = list(windows(source(), epochs=2))
    seen = 0
    for number, batch in enumerate(large_batches):
        step(next(batches))
        theirs.train_on_batch(*batch)
        seen += len(batch[0])
        assert stream.windows[number].examples_seen == seen
        assert sum(stream.windows[number].sizes) == len(batch[0])
    # Sums of at most 24 terms in another order: their rounding is below 24 · 2^-53 of
    # the terms in each of six updates.
    for weights, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-14)

    per_epoch = len(large_batches) // 2
    done = stream.windows[: len(large_batches)]
    assert [window.last for window in done].count(True) == 2
    assert done[per_epoch - 1].last
    if kind == "generator":
        assert stream.per_epoch is None
    else:
        assert stream.per_epoch == per_epoch


@pytest.mark.slow
def test_no_batch_is_cut_or_joined_unless_the_micro_batch_size_says_so():
    """Each micro-batch is dense, as the loader made it, also with unequal lengths."""
    lengths = (2, 5, 3)
    batches = [(np.ones((4, length)), np.ones(4)) for length in lengths]
    spec = (tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([None], tf.float32))
    source = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    )
    (batch,) = stream_batches(Stream(Loader(source, "train"), FACTOR), 0).take(1)
    assert isinstance(batch, Batches)
    variable = tf.Variable(1.0)
    shapes = []

    def note(shape):
        shapes.append(tuple(shape.numpy()))

    def loss(x, y):
        tf.py_function(note, [tf.shape(x)], [])
        return tf.reduce_mean(x) * variable * tf.reduce_mean(y)

    def shapes_of_micro_batches(micro_batch_size):
        @tf.function
        def step():
            return accumulate_gradients(
                None, loss, batch, micro_batch_size, variables=[variable]
            )

        shapes.clear()
        assert float(step().mean_loss()) == 1
        return shapes

    assert shapes_of_micro_batches(UNCUT) == [(4, length) for length in lengths]
    in_threes = [(3, 2), (1, 2), (3, 5), (1, 5), (3, 3), (1, 3)]
    assert shapes_of_micro_batches(3) == in_threes


def test_what_comes_before_an_update_is_replayed_and_has_its_checksum(tmp_path):
    folder = written(tmp_path)
    from_start = Stream(Loader(images(folder), "train"), FACTOR)
    from_update_6 = Stream(Loader(images(folder), "train"), FACTOR)
    inputs = [batch.batch[0].numpy() for batch in stream_batches(from_start, 0).take(8)]
    rest = [
        batch.batch[0].numpy() for batch in stream_batches(from_update_6, 6).take(2)
    ]
    np.testing.assert_array_equal(np.concatenate(inputs[6:]), np.concatenate(rest))
    assert from_start.windows[:8] == from_update_6.windows[:8]
    assert len({window.digest for window in from_start.windows[:8]}) == 8


def test_counters_of_batches_of_any_size():
    stream = Stream(Loader(generator, "train"), FACTOR)
    for _ in stream_batches(stream, 0).take(6):
        pass
    cut = sizes.Batching(9, 2, FACTOR)
    two_epochs = Horizon("epochs", 2)
    plan = stream_plan(cut, two_epochs, stream.windows, stream.per_epoch, True)
    updates = range(1, 7)
    batch_sizes = [10, 11, 2, 10, 11, 2]
    assert [plan.batch_size(update) for update in updates] == batch_sizes
    examples_seen = [10, 21, 23, 33, 44, 46]
    assert [plan.examples_seen(update) for update in updates] == examples_seen
    micro_steps = [6, 12, 13, 19]  # 2+3+1, 2+1+3, 1
    assert [plan.micro_steps(update) for update in updates[:4]] == micro_steps
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [plan.place(done) for done in range(5)] == places
    assert [update for update in updates if plan.ends_epoch(update)] == [3, 6]
    assert [update for update in updates if plan.ended(update)] == [6]


def test_the_plan_gives_the_sizes_of_the_first_update():
    stream = Stream(Loader(generator, "train"), 1)

    def text(batching, cut):
        horizon = Horizon("updates", 7)
        return str(stream_plan(batching, horizon, stream.windows, None, cut))

    assert text(sizes.Batching(3, 3, 1), cut=False) == (
        "1 batch per update, the first one with 3 examples; an unknown number of "
        "updates per epoch, 7 in all"
    )
    assert text(sizes.Batching(1024, 60, 2), cut=True).startswith(
        "2 batches per update, the first one with 512 examples, in micro-batches of at "
        "most 60 examples; "
    )


def test_a_loader_without_an_end_has_no_epochs():
    endless = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones(4))).repeat()
    stream = Stream(Loader(endless, "train"), FACTOR)

    def plan(horizon):
        cut = sizes.Batching(12, 4, FACTOR)
        return stream_plan(cut, horizon, stream.windows, stream.per_epoch, False)

    line = (
        r"training\.epochs cannot be the horizon, as the training split repeats without "
        r"an end: set training\.updates"
    )
    with pytest.raises(ConfigError, match=line):
        plan(Horizon("epochs", 2))
    assert plan(Horizon("updates", 2)).per_epoch is None
    with pytest.raises(ConfigError, match="must return a validation split that ends"):
        Loader(endless, "validation")


def test_what_a_loader_raises_in_the_middle_is_shown():
    """TensorFlow's own error for a Python exception begins with lines of no use."""

    def failing():
        yield from itertools.islice(generator(), 2 * FACTOR)
        raise RuntimeError("page 7 is missing\nsecond line")

    loader = Loader(failing, "train")
    data = Data(loader.examples(), None, loaders={"train": loader})
    step = tf.function(lambda batches: next(batches).sizes)
    batches = iter(stream_batches(Stream(loader, FACTOR), 0))
    step(batches)
    place = f"batch {2 * FACTOR} of the train split, counted from 0"
    line = f"^the data cannot be read: {place}: RuntimeError: page 7 is missing$"
    with pytest.raises(DataError, match=line), errors_located(data, DataFiles()):
        step(batches)


def test_a_py_dataset_is_called_at_the_begin_and_the_end_of_each_epoch():
    source = Bricks()
    loader = Loader(source, "train")
    for _ in range(3):
        list(loader.epoch())
    assert (source.begun, source.epochs) == (3, 3)


def test_a_broken_image_of_a_folder_is_named_with_its_batch(tmp_path):
    folder = written(tmp_path / "photos")
    broken = folder / "b" / "7.png"
    broken.write_bytes(b"no image")
    loader = Loader(images(folder), "train")
    with pytest.raises(DataError, match=rf"^batch \d of .*, with {broken}: ") as caught:
        list(loader.epoch())
    assert "Unknown image file format" in str(caught.value)


def nothing():
    yield from ()


def no_batches():
    """Return a generator function and a dataset without a batch."""
    empty = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones(4))).take(0)
    return [nothing, empty]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_loader_without_a_batch_is_named(split):
    line = f"must yield at least one batch in its {split} split. Received: 0"
    for source in no_batches():
        with pytest.raises(ConfigError, match=line):
            Loader(source, split)


def none_for_labels(weights=None):
    """Return a generator function and a dataset with None for labels."""

    def batches():
        yield np.ones((4, 2)), None, weights

    dataset = tf.data.Dataset.from_tensors(np.ones((4, 2)))
    return [batches, dataset.map(lambda x: (x, None, weights))]


def test_none_for_labels_is_the_same_as_no_labels():
    for source in none_for_labels():
        loader = Loader(source, "train")
        assert len(loader.first) == 1
        assert loader.spec == (tf.TensorSpec([None, 2], tf.float64),)


def test_weights_without_labels_are_rejected():
    """The weights were taken for the labels."""
    line = "must not yield sample weights without labels in its train split"
    for source in none_for_labels(np.ones(4)):
        with pytest.raises(ConfigError, match=line):
            Loader(source, "train")


@pytest.mark.parametrize(
    "weights", [{"a": np.full(4, 2.0), "b": None}, (np.full(4, 2.0), None)]
)
def test_an_output_without_weights_has_weights_of_one(weights):
    labels = {"a": np.ones(4), "b": np.ones(4)}

    def batches():
        yield np.ones((4, 2)), labels, weights

    dataset = tf.data.Dataset.from_tensors(np.ones((4, 2)))
    dataset = dataset.map(lambda x: (x, labels, weights))
    for source in (batches, dataset):
        (batch,) = stream_batches(Stream(Loader(source, "train"), FACTOR), 0).take(1)
        first, second = tf.nest.flatten(batch.batch[2])
        assert first.numpy().tolist() == [2.0] * 4
        assert second.numpy().tolist() == [1.0] * 4


def test_lists_of_inputs_and_labels_are_tuples():
    """tf.data has no lists: it would take a list for a tensor."""

    def batches():
        inputs = [np.ones((4, 2)), np.ones((4, 3))]
        yield inputs, [np.zeros(4), np.ones(4)]

    (batch,) = stream_batches(Stream(Loader(batches, "train"), FACTOR), 0).take(1)
    (first, second), labels = batch.batch
    assert (first.shape, second.shape) == ((4, 2), (4, 3))
    assert [label.numpy().tolist() for label in labels] == [[0] * 4, [1] * 4]


class Uneven(keras.utils.PyDataset):
    """Its batches have the shapes or the types of `inputs`."""

    def __init__(self, inputs):
        super().__init__()
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], np.ones(len(self.inputs[index]))


@pytest.mark.parametrize(
    ("second", "form"),
    [(np.ones((4, 7), "float32"), "float32[4, 7]"), (np.ones((3, 5)), "float64[3, 5]")],
    ids=["length", "type"],
)
def test_a_later_batch_of_another_form_is_named(second, form):
    source = Uneven([np.ones((4, 5), "float32"), second])
    train = Loader(source, "train")
    validation = Loader(source, "validation")
    loaders = {"train": train, "validation": validation}
    data = Data(train.examples(), validation.examples(), loaders=loaders)
    line = r"cannot be read: dataset\._target_ must yield batches of one form in its "

    step = tf.function(lambda batches: next(batches).sizes)
    batches = iter(stream_batches(Stream(train, 2), 0))
    raises = pytest.raises(DataError, match=f"{line}train split")
    with raises as caught, errors_located(data, DataFiles()):
        step(batches)
    assert form in str(caught.value)

    evaluated = evaluation_batches(data, "validation", 4, None, None, False)
    raises = pytest.raises(DataError, match=f"{line}validation split")
    with raises, errors_located(data, DataFiles()):
        list(evaluated)


def test_images_are_searched_only_for_errors_of_tensorflow_and_not_for_long(
    tmp_path, monkeypatch, capsys
):
    class Photos:
        def __init__(self, error):
            self.error = error
            self.file_paths = [str(missing)]

        def __call__(self):
            yield np.ones((2, 4)), np.ones(2)
            raise self.error

    missing = tmp_path / "0.png"

    def message(error):
        epoch = Loader(Photos(error), "train").epoch()
        next(epoch)
        with pytest.raises(DataError) as caught:
            next(epoch)
        return str(caught.value)

    place = "batch 1 of the train split, counted from 0"
    lost = tf.errors.DataLossError(None, None, "lost")
    assert message(RuntimeError("lost")) == f"{place}: RuntimeError: lost"
    named = f"{place}, with {missing}: DataLossError: lost"
    assert message(lost) == named
    assert "looking for it" not in capsys.readouterr().err
    monkeypatch.setattr(search_time, "SILENCE", -1.0)
    assert message(lost) == named
    line = "an image could not be read: looking for it"
    assert capsys.readouterr().err.count(line) == 1
    monkeypatch.setattr(search_time, "SECONDS", -1.0)
    assert message(lost) == f"{place}: DataLossError: lost"


@pytest.mark.parametrize(
    ("values", "named", "scaled", "replicas", "line"),
    [
        (
            {"effective_batch_size": 8},
            {sizes.EFFECTIVE},
            False,
            1,
            "effective_batch_size must be left out",
        ),
        ({}, (), True, 1, "scaling.rule must be none"),
        ({}, (), False, 2, "replicas must be 1"),
        (
            {"micro_batch_size": "auto"},
            (),
            False,
            1,
            "micro_batch_size cannot be searched",
        ),
        ({"factor": None}, (), False, 1, "factor must be at least 1"),
        ({"factor": 0}, (), False, 1, r"factor must be at least 1 .* Received: 0\."),
    ],
)
def test_the_factor_alone_counts(values, named, scaled, replicas, line):
    default = {"effective_batch_size": 128, "factor": 4, "micro_batch_size": None}
    without_size = {**default, "effective_batch_size": None}
    assert sizes.of_batches(default, False, 1) == without_size
    with pytest.raises(ConfigError, match=line):
        sizes.of_batches({**default, **values}, scaled, replicas, named)


def test_a_micro_batch_of_no_examples_is_rejected():
    values = {"effective_batch_size": None, "factor": 3, "micro_batch_size": 0}
    line = r"micro_batch_size must be at least 1\. Received: 0"
    with pytest.raises(ConfigError, match=line):
        sizes.batching(values, 1, batched=True)


def train_photos(folder, *overrides, status=0, **variables):
    """Train on the example's own batches in `folder`."""
    variables["PYTHONPATH"] = str(EXAMPLE)
    return pipeline(
        "train", *PHOTOS, *overrides, cwd=folder, status=status, **variables
    )


@pytest.mark.slow
def test_a_run_of_batches_that_is_killed_within_an_epoch_is_resumed_to_the_bit(
    tmp_path,
):
    written(tmp_path / "photos")
    (tmp_path / "mine.py").write_text(MINE)

    def train(folder, *more, status=0, **variables):
        overrides = (
            f"hydra.run.dir={folder}",
            "training.checkpoint_every=1",
            "schedule=constant",
            "+training.callbacks.it={_target_: mine.Interrupt}",
            *more,
        )
        return train_photos(tmp_path, *overrides, status=status, **variables).stderr

    err = train("through", "training.updates=7")
    line = (
        "3 batches per update, the first one with 4 examples; 4 updates per epoch, "
        "7 in all"
    )
    assert line in err
    train("parted", "training.updates=7", status=-9, AT="6", BY="9")
    err = train("parted", "training.updates=7", "training.resume=auto")
    assert "continues after update " in err

    store = Store(tmp_path)
    through, parted = [store.histories(run, "train/") for run in store.trained()]
    assert through == parted
    batch_sizes = list(through["train/effective_batch_size"].values())
    assert batch_sizes == [12, 12, 12, 2, 12, 12, 12]

    for image in (tmp_path / "photos" / "b").iterdir():
        keras.utils.save_img(image, np.zeros((8, 8, 3)), scale=False)
    again = ("training.updates=8", "training.resume=auto", "dataset.checksum=none")
    err = train("parted", *again, status=2)
    line = (
        "must yield the batches of the run again, but the batch of update 7 is "
        "different"
    )
    assert line in err


@pytest.mark.slow
def test_a_generator_of_unknown_length(tmp_path):
    endless = "dataset=endless"
    err = train_photos(tmp_path, endless, status=2).stderr
    assert "must be a number of updates if the length of an epoch is not known" in err
    train_photos(tmp_path, endless, "schedule=constant")
    train_photos(tmp_path, endless, "training.updates=4")
    store = Store(tmp_path)
    in_epochs, in_updates = [
        store.history(run, "train/effective_batch_size") for run in store.trained()
    ]
    assert list(in_epochs.values()) == [10, 11, 2, 10, 11, 2]
    assert list(in_updates.values()) == [10, 11, 2, 10]
