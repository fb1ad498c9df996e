"""`dataset.batched`: the user's own batches, several of them an update, against plain Keras on their concatenation."""

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
from pipeline.dataset.bad_example import located
from pipeline.dataset.batches import of_stream
from pipeline.dataset.checksums import Files
from pipeline.dataset.splits import Data
from pipeline.dataset.stream import Loader, Stream
from tests.checkpoints.test_resume_rules import MINE
from tests.parameters import mostly_slow
from tests.running import ROOT, Store, pipeline

FACTOR = 3
OF_EXAMPLES = (3, 5, 2, 4, 1, 6, 2)  # of each batch of `generator`
QUIET = ("tracking.system_metrics=false", "tracking.log_model=false")


def written(folder):
    """38 images in two classes: 10 batches of 4, the last one of 2."""
    numbers = np.random.default_rng(0)
    for name, place in itertools.product("ab", range(19)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        keras.utils.save_img(
            folder / name / f"{place}.png",
            numbers.integers(0, 255, (8, 8, 3)),
            scale=False,
        )
    return folder


def images(folder):
    return keras.utils.image_dataset_from_directory(
        folder, image_size=(8, 8), batch_size=4, shuffle=True, seed=1, verbose=False
    )


def generator():
    numbers = np.random.default_rng(0)
    for size in OF_EXAMPLES:
        yield numbers.normal(size=(size, 8, 8, 3)), numbers.integers(0, 2, size)


class Bricks(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.epochs = 0

    def __len__(self):
        return len(OF_EXAMPLES)

    def __getitem__(self, index):
        x, y = list(generator())[index]
        return x + self.epochs, y, np.linspace(1, 2, len(y))

    def on_epoch_end(self):
        self.epochs += 1


def model():
    policy = keras.DTypePolicy("float64")
    inputs = keras.Input((8, 8, 3), dtype="float64")
    x = keras.layers.Flatten(dtype=policy)(
        keras.layers.Rescaling(1 / 255, dtype=policy)(inputs)
    )
    made = keras.Model(
        inputs, keras.layers.Dense(2, kernel_initializer="zeros", dtype=policy)(x)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
    made.optimizer.build(made.trainable_variables)
    return made


def windows(source, epochs):
    """The effective batches by hand."""
    for _ in range(epochs):
        made = (
            [source[place] for place in range(len(source))]
            if isinstance(source, Bricks)
            else source
        )
        batches = list(made() if callable(made) else made)
        for first in range(0, len(batches), FACTOR):
            group = batches[first : first + FACTOR]
            yield tuple(
                np.concatenate([np.asarray(part) for part in parts])
                for parts in zip(*group, strict=True)
            )
        if isinstance(source, Bricks):
            source.on_epoch_end()


@pytest.mark.parametrize(
    "kind", mostly_slow(["images", "generator", "pydataset"], ["generator"])
)
def test_updates_equal_those_of_the_large_batches(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(
        keras.config, "floatx", lambda: "float64"
    )  # which batches are cast to
    folder = written(tmp_path) if kind == "images" else None
    source = {
        "images": lambda: images(folder),
        "generator": lambda: generator,
        "pydataset": Bricks,
    }[kind]
    ours, theirs = model(), model()
    stream = Stream(Loader(source(), "train"), FACTOR)
    update = Update(ours, ours.loss, ours.optimizer, UNCUT)
    step, batches = tf.function(update, autograph=False), iter(of_stream(stream, 0))
    seen = 0
    for number, batch in enumerate(windows(source(), epochs=2)):
        step(next(batches))
        theirs.train_on_batch(
            *batch[:2], sample_weight=None if len(batch) < 3 else batch[2]
        )
        seen += len(batch[0])
        assert stream.windows[number].examples_seen == seen
        assert sum(stream.windows[number].sizes) == len(batch[0])
    # Sums of at most 24 terms in another order: their rounding is below 24 · 2^-53 of the terms in each of six updates.
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert np.any(b)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    per_epoch = (number + 1) // 2
    assert [window.last for window in stream.windows[: number + 1]].count(True) == 2
    assert stream.windows[per_epoch - 1].last
    assert stream.per_epoch == (None if kind == "generator" else per_epoch)


@pytest.mark.slow
def test_no_batch_is_cut_or_joined_unless_the_micro_batch_size_says_so():
    """Batches of unequal length too: each micro-batch is dense, as the loader made it."""
    lengths, seen = (2, 5, 3), []
    spec = (tf.TensorSpec([None, None], tf.float32), tf.TensorSpec([None], tf.float32))
    batches = [(np.ones((4, length)), np.ones(4)) for length in lengths]
    source = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    )
    (batch,) = of_stream(Stream(Loader(source, "train"), FACTOR), 0).take(1)
    variable = tf.Variable(1.0)

    def loss(x, y):
        tf.py_function(
            lambda shape: seen.append(tuple(shape.numpy())), [tf.shape(x)], []
        )
        return tf.reduce_mean(x) * variable * tf.reduce_mean(y)

    def shapes(micro_batch_size):
        seen.clear()
        step = tf.function(
            lambda: accumulate_gradients(
                None, loss, batch, micro_batch_size, variables=[variable]
            )
        )
        assert float(step().mean_loss()) == 1
        return seen

    assert isinstance(batch, Batches)
    assert shapes(UNCUT) == [(4, length) for length in lengths]
    assert shapes(3) == [(size, length) for length in lengths for size in (3, 1)]


def test_what_comes_before_an_update_is_replayed_and_has_its_checksum(tmp_path):
    folder = written(tmp_path)
    through, later = (Stream(Loader(images(folder), "train"), FACTOR) for _ in range(2))
    every = [batch.batch[0].numpy() for batch in of_stream(through, 0).take(8)]
    rest = [batch.batch[0].numpy() for batch in of_stream(later, 6).take(2)]
    np.testing.assert_array_equal(np.concatenate(every[6:]), np.concatenate(rest))
    assert through.windows[:8] == later.windows[:8]
    assert len({window.digest for window in through.windows[:8]}) == 8


def test_counters_of_batches_of_any_size():
    stream = Stream(Loader(generator, "train"), FACTOR)
    for _ in of_stream(stream, 0).take(6):
        pass
    cut = sizes.Batching(9, 2, FACTOR)
    plan = stream_plan(
        cut, Horizon("epochs", 2), stream.windows, stream.per_epoch, True
    )
    assert [plan.batch_size(update) for update in range(1, 7)] == [10, 11, 2, 10, 11, 2]
    assert [plan.examples_seen(update) for update in range(1, 7)] == [
        10,
        21,
        23,
        33,
        44,
        46,
    ]
    assert [plan.micro_steps(update) for update in range(1, 5)] == [
        6,
        12,
        13,
        19,
    ]  # 2+3+1, 2+1+3, 1
    assert [plan.place(done) for done in range(5)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
    assert [update for update in range(1, 7) if plan.ends_epoch(update)] == [3, 6]
    assert [update for update in range(1, 7) if plan.ended(update)] == [6]
    with pytest.raises(ConfigError, match=r"training\.examples must be null"):
        stream_plan(cut, Horizon("examples", 9), stream.windows, None, True)


def test_a_loader_without_an_end_has_no_epochs():
    endless = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones(4))).repeat()
    stream = Stream(Loader(endless, "train"), FACTOR)
    of = sizes.Batching(12, 4, FACTOR), stream.windows, stream.per_epoch, False
    line = r"training\.epochs must be null where the training split repeats without an end; set training\.updates"
    with pytest.raises(ConfigError, match=line):
        stream_plan(of[0], Horizon("epochs", 2), *of[1:])
    assert stream_plan(of[0], Horizon("updates", 2), *of[1:]).per_epoch is None
    with pytest.raises(ConfigError, match="must give a validation split that ends"):
        Loader(endless, "validation")


def test_what_a_loader_raises_in_the_middle_is_shown():
    """Of a Python exception TensorFlow's own error begins with lines that say nothing."""

    def failing():
        yield from itertools.islice(generator(), 2 * FACTOR)
        raise RuntimeError("page 7 is missing\nsecond line")

    loader = Loader(failing, "train")
    data = Data(loader.examples(), None, loaders={"train": loader})
    step = tf.function(lambda batches: next(batches).sizes)
    batches = iter(of_stream(Stream(loader, FACTOR), 0))
    step(batches)
    place = f"batch {2 * FACTOR} of the train split, counted from 0"
    line = f"^the data cannot be read: {place}: RuntimeError: page 7 is missing$"
    with pytest.raises(DataError, match=line), located(data, Files()):
        step(batches)


def test_a_broken_image_of_a_folder_is_named_with_its_batch(tmp_path):
    folder = written(tmp_path / "photos")
    broken = folder / "b" / "7.png"
    broken.write_bytes(b"no image")
    loader = Loader(images(folder), "train")
    with pytest.raises(DataError, match=rf"^batch \d of .*, with {broken}: ") as caught:
        list(loader.epoch())
    assert "Unknown image file format" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "named", "scaled", "replicas", "line"),
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
            "micro_batch_size must be null or a number",
        ),
        ({"factor": None}, (), False, 1, "factor must be at least 1"),
        ({"factor": 0}, (), False, 1, r"factor must be at least 1 .* Received: 0\."),
    ],
)
def test_the_factor_alone_counts(asked, named, scaled, replicas, line):
    default = {"effective_batch_size": 128, "factor": 4, "micro_batch_size": None}
    found = sizes.of_batches(default, False, 1)
    assert found == {**default, "effective_batch_size": None}
    with pytest.raises(ConfigError, match=line):
        sizes.of_batches({**default, **asked}, scaled, replicas, named)


def test_a_micro_batch_of_no_examples_is_refused():
    with pytest.raises(
        ConfigError, match=r"micro_batch_size must be at least 1\. Received: 0"
    ):
        sizes.batching(
            {"effective_batch_size": None, "factor": 3, "micro_batch_size": 0},
            1,
            batched=True,
        )


@pytest.mark.slow
def test_a_run_of_batches_that_is_killed_in_the_middle_of_an_epoch_is_resumed_to_the_bit(
    tmp_path,
):
    written(tmp_path / "photos")
    (tmp_path / "mine.py").write_text(MINE)
    killer = "+training.callbacks.it={_target_: mine.Interrupt}"
    of_example = (
        "--config-dir",
        str(ROOT / "examples" / "own_batches" / "conf"),
        "experiment=photos",
        *QUIET,
    )
    code = {"PYTHONPATH": str(ROOT / "examples" / "own_batches")}

    def train(folder, *more, status=0, **variables):
        given = (
            f"hydra.run.dir={folder}",
            "training.checkpoint_every=1",
            "schedule=constant",
            killer,
            *more,
        )
        return pipeline(
            "train",
            *of_example,
            *given,
            cwd=tmp_path,
            status=status,
            **code,
            **variables,
        )

    done = train("through", "training.updates=7")
    assert (
        "3 batches, the first of 4, are an update; 4 updates per epoch, 7 in all"
        in done.stderr
    )
    train("parted", "training.updates=7", status=-9, AT="6", BY="9")
    assert (
        "goes on after update "
        in train("parted", "training.updates=7", "training.resume=auto").stderr
    )
    store = Store(tmp_path)
    through, parted = (store.histories(run, "train/") for run in store.trained())
    assert through == parted
    assert list(through["train/effective_batch_size"].values()) == [
        12,
        12,
        12,
        2,
        12,
        12,
        12,
    ]
    for image in (tmp_path / "photos" / "b").iterdir():
        keras.utils.save_img(image, np.zeros((8, 8, 3)), scale=False)
    line = "must give the batches of the run again: that of update 7 is another one"
    assert (
        line
        in train(
            "parted",
            "training.updates=8",
            "training.resume=auto",
            "dataset.checksum=none",
            status=2,
        ).stderr
    )


@pytest.mark.slow
def test_a_generator_of_unknown_length(tmp_path):
    of_example = (
        "--config-dir",
        str(ROOT / "examples" / "own_batches" / "conf"),
        "experiment=photos",
        *QUIET,
    )
    code = {"PYTHONPATH": str(ROOT / "examples" / "own_batches")}
    given = (*of_example, "dataset=endless")
    refused = pipeline("train", *given, cwd=tmp_path, status=2, **code).stderr
    assert "must be a number of updates where no epoch has a known length" in refused
    pipeline("train", *given, "schedule=constant", cwd=tmp_path, **code)
    pipeline("train", *given, "training.updates=4", cwd=tmp_path, **code)
    in_epochs, in_updates = (
        Store(tmp_path).history(run, "train/effective_batch_size")
        for run in Store(tmp_path).trained()
    )
    assert list(in_epochs.values()) == [10, 11, 2, 10, 11, 2]
    assert list(in_updates.values()) == [10, 11, 2, 10]
