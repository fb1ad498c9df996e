"""Order and augmentation depend on (seed, epoch, example) only; the digits' splits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation.internals import Share
from pipeline.common.errors import ConfigError
from pipeline.config import sizes
from pipeline.config.plan import Plan, plan_of
from pipeline.config.schema import TrainingConfig
from pipeline.config.stages import ScheduledStage, Slice
from pipeline.dataset import Data, load
from pipeline.dataset import batches as batching
from pipeline.dataset.builtin import digits as builtin_digits
from pipeline.dataset.builtin.digits import Digits
from pipeline.dataset.class_weights import weigher
from pipeline.dataset.source import ShareReader
from tests.parameters import mostly_slow
from tests.running import ROOT, python

EXAMPLES = 23


def numbered() -> Data:
    """Return images that are zero except one pixel, labeled by their number."""
    images = np.zeros((EXAMPLES, 7, 7, 1), np.float32)
    images[:, 3, 3] = 1
    numbers = np.arange(EXAMPLES)
    return Data(tf.data.Dataset.from_tensor_slices((images, numbers)), None)


class Epochs(NamedTuple):
    """Some epochs, in their order.

    Attributes:
        order: the numbers of the examples of each epoch.
        images: (epochs, examples, pixels).
    """

    order: list[list[int]]
    images: np.ndarray


def epochs(size, *, seed=0, epochs=2, **node):
    """Return the epochs of `numbered`, which come in batches of a size."""
    node = OmegaConf.create(node)
    batches = as_arrays(node, numbered(), slices=[Slice(size, epochs)], seed=seed)
    sizes_of_epoch = [size] * (EXAMPLES // size)
    if EXAMPLES % size:
        sizes_of_epoch.append(EXAMPLES % size)
    assert sizes_of(batches) == sizes_of_epoch * epochs

    x, y = concatenated(batches)
    order = y.reshape(epochs, EXAMPLES).tolist()
    images = x.reshape(epochs, EXAMPLES, -1)
    return Epochs(order, images)


def as_arrays(node, data, **arguments):
    """Return the effective batches of an `effective_batches` as arrays."""
    batches = batching.effective_batches(node, data, **arguments)
    return list(batches.as_numpy_iterator())


def sizes_of(batches):
    return [len(y) for _, y in batches]


def concatenated(batches):
    """Return the inputs and the labels of several batches."""
    x = np.concatenate([x for x, _ in batches])
    y = np.concatenate([y for _, y in batches])
    return x, y


SHIFT = {"augment": {"_target_": "pipeline.dataset.augmentation.Shift", "pixels": 3}}
IN_MEMORY = {"in_memory": True}
STREAMED = {"in_memory": False}
BUFFERED = {"in_memory": False, "shuffle_buffer": 5}
BY_FILES = {"in_memory": False, "shuffle_files": True, "shuffle_buffer": 200}


@pytest.mark.parametrize(
    ("node", "augment"),
    [
        pytest.param(IN_MEMORY, {}, id="in_memory-plain"),
        pytest.param(STREAMED, SHIFT, id="streamed-augmented"),
        pytest.param(BUFFERED, {}, id="buffered-plain"),
        pytest.param(
            IN_MEMORY, SHIFT, id="in_memory-augmented", marks=pytest.mark.soak
        ),
        pytest.param(STREAMED, {}, id="streamed-plain", marks=pytest.mark.slow),
        pytest.param(BUFFERED, SHIFT, id="buffered-augmented", marks=pytest.mark.slow),
    ],
)
def test_the_order_depends_on_seed_and_epoch_alone(node, augment):
    shuffled = epochs(8, **node, **augment)
    in_order = list(range(EXAMPLES))
    for order_of_epoch in shuffled.order:
        assert sorted(order_of_epoch) == in_order  # each exactly once
    first, second = shuffled.order
    assert first != second != in_order

    for size in (1, 5, EXAMPLES):
        in_other_batches = epochs(size, **node, **augment)
        assert in_other_batches.order == shuffled.order
        assert (in_other_batches.images == shuffled.images).all()
    by_another_seed = epochs(8, seed=1, **node, **augment)
    assert by_another_seed.order != shuffled.order


def test_a_buffer_of_one_example_keeps_the_order_of_the_data():
    node = {"in_memory": False, "shuffle_buffer": 1, "shuffle_files": False}
    order, _ = epochs(8, **node)
    assert len(order) > 1
    for epoch in order:
        assert epoch == list(range(EXAMPLES))


def test_no_thread_tunes_an_iterator():
    """Deleting it would wait for that thread, up to a minute.

    In a process that exits meanwhile, TensorFlow aborts.
    """
    trained = batching.effective_batches(
        OmegaConf.create({}), numbered(), [Slice(8, 1)], seed=0
    )
    evaluated = batching.in_order(numbered().train, 8)
    assert trained.options().autotune.enabled is False
    assert evaluated.options().autotune.enabled is False


AUGMENTED = []  # by `noting_shift`


def noting_shift(image, seed):
    AUGMENTED.append(1)
    pixels = tf.random.stateless_uniform([2], seed, 0, 3, tf.int32)
    return tf.roll(image, pixels, [0, 1])


def augmentation():
    """Return a function that shifts an image, and notes each call."""

    def shift(image, seed):
        shifted = tf.py_function(noting_shift, [image, seed], image.dtype)
        return tf.ensure_shape(shifted, image.shape)

    return shift


SHIFTING = {"augment": {"_target_": f"{__name__}.augmentation"}}


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(IN_MEMORY, id="in_memory", marks=pytest.mark.soak),
        pytest.param(STREAMED, id="streamed", marks=pytest.mark.slow),
        pytest.param(BUFFERED, id="buffered"),
    ],
)
@pytest.mark.parametrize(
    "augment",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param(SHIFTING, id="shift"),
    ],
)
def test_what_comes_before_an_update_is_left_out(node, augment):
    """The rest is what it was, and nothing before it is made.

    An epoch has 3 updates, the last one of 7 examples.
    """
    read = []

    def note(number):
        read.append(1)
        return number

    def noted(x, y):
        return x, tf.ensure_shape(tf.py_function(note, [y], y.dtype), [])

    data = Data(numbered().train.map(noted), None)
    plan = Plan(sizes.derive(8, 1, None), EXAMPLES, 9)
    node_of_run = OmegaConf.create({**node, **augment})

    def batches(first_update):
        slices = plan.slices(first_update)
        return as_arrays(node_of_run, data, slices=slices, seed=0)

    all_batches = batches(0)
    assert sizes_of(all_batches) == [8, 8, 7] * 3
    for first_update in range(10):
        read.clear()
        AUGMENTED.clear()
        rest = batches(first_update)
        assert len(rest) == 9 - first_update
        for batch, expected in zip(rest, all_batches[first_update:], strict=True):
            for part, expected_part in zip(batch, expected, strict=True):
                assert np.array_equal(part, expected_part)

        augmented = 0
        if augment:
            augmented = sum(sizes_of(rest))
        assert len(AUGMENTED) == augmented

        # What is in memory is read once, and other data once in each epoch.
        passes = 1
        if not node["in_memory"]:
            passes = 3 - first_update // 3
        assert len(read) == passes * EXAMPLES


def by_readers(workers, replicas, batches_of):
    """Return what each of the workers reads: the list of `batches_of(reader)`.

    `replicas` are those of each worker.
    """
    shares_of_workers = []
    for worker in range(workers):
        reader = ShareReader(worker * replicas, replicas, workers * replicas)
        shares_of_workers.append(list(batches_of(reader)))
    return shares_of_workers


def assert_shares(batches, shares_of_workers, replicas):
    """Each worker has the examples of its replicas of each batch, and their place.

    Some workers have none.
    """
    workers = len(shares_of_workers)
    for shares in shares_of_workers:
        assert len(shares) == len(batches)
    for batch, *shares in zip(batches, *shares_of_workers, strict=True):
        _, labels, *_ = batch
        count = len(labels)
        examples_of_replica = math.ceil(count / (replicas * workers))
        size = replicas * examples_of_replica
        for worker, share in enumerate(shares):
            start = worker * size
            rest = max(count - start, 0)
            _, labels_of_share, *_ = share.batch
            assert int(share.examples) == count
            assert int(share.start) == start
            assert len(labels_of_share) == min(rest, size)
        parts_of_shares = [share.batch for share in shares]
        for part, *parts in zip(batch, *parts_of_shares, strict=True):
            assert np.array_equal(np.concatenate(parts), part)


@pytest.mark.parametrize(
    ("node", "augment", "workers", "replicas"),
    mostly_slow(
        [
            (IN_MEMORY, {}, 3, 1),
            (IN_MEMORY, SHIFTING, 9, 1),
            (IN_MEMORY, {}, 2, 2),
            (STREAMED, {}, 3, 1),
            (STREAMED, SHIFTING, 2, 2),
            (STREAMED, SHIFTING, 9, 1),
            (BUFFERED, {}, 9, 1),
            (BUFFERED, SHIFTING, 3, 1),
        ],
        [],
        [(IN_MEMORY, SHIFTING, 9, 1), (STREAMED, SHIFTING, 2, 2), (BUFFERED, {}, 9, 1)],
    ),
)
def test_each_worker_makes_its_share_alone(node, augment, workers, replicas):
    """Of 23 examples in batches of 8 the last batch has 7.

    So one of nine workers has two times none.
    """
    training = TrainingConfig(class_weight={3: 5.0}, loss=None)
    node_of_run = OmegaConf.create({**node, **augment})
    plan = Plan(sizes.derive(8, 1, None), EXAMPLES, 6)
    after_first_update = plan.slices(1)

    def batches_of(reader):
        return as_arrays(
            node_of_run,
            numbered(),
            slices=after_first_update,
            seed=0,
            weigh=weigher(training, numbered()),
            reader=reader,
        )

    all_batches = batches_of(None)
    AUGMENTED.clear()
    shares_of_workers = by_readers(workers, replicas, batches_of)
    assert_shares(all_batches, shares_of_workers, replicas)
    augmented = 0
    if augment:
        # Two epochs, without the first update.
        augmented = 2 * EXAMPLES - 8
    assert len(AUGMENTED) == augmented


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(IN_MEMORY, id="in_memory", marks=pytest.mark.slow),
        pytest.param(STREAMED, id="streamed"),
    ],
)
def test_workers_read_examples_of_unequal_length_whole(node):
    """How long a batch is follows from all of it."""

    def examples():
        for number in range(EXAMPLES):
            yield np.full(1 + number % 4, 7), number

    spec = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64))
    texts = tf.data.Dataset.from_generator(examples, output_signature=spec)
    texts = texts.apply(tf.data.experimental.assert_cardinality(EXAMPLES))
    for pad in (None, {"multiple": 4, "value": 0}):
        node_of_run = OmegaConf.create({**node, "pad": pad})

        def batches(reader, node=node_of_run):
            data = Data(texts, None)
            slices = [Slice(8, 1)]
            return batching.effective_batches(node, data, slices, 0, reader=reader)

        alone = list(batches(None))
        of_a_worker = list(batches(ShareReader(1, 1, 2)))
        for (x, y), (worker_x, worker_y) in zip(alone, of_a_worker, strict=True):
            assert (y == worker_y).numpy().all()
            if pad is None:
                assert x.to_list() == worker_x.to_list()
            else:
                assert (x == worker_x).numpy().all()


# The batches of `staged`: 5, 5, 3 · 3 and 4 are an epoch, 8 and 15, then 15 and 8.
STAGED_SIZES = [5, 5, 3, 3, 3, 4, 8, 15, 15, 8]


def staged():
    """Return a plan of 23 examples an epoch, in four stages.

    Two of them begin in the first epoch.
    """
    stages = [
        ScheduledStage("updates", 0, 5),
        ScheduledStage("updates", 2, 3),
        ScheduledStage("examples", 19, 8),
        ScheduledStage("examples", 31, 15),
    ]
    horizon = sizes.Horizon("epochs", 3)
    return plan_of(sizes.derive(5, 1, None), EXAMPLES, horizon, stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "augment"),
    [
        pytest.param(IN_MEMORY, SHIFT, id="in_memory"),
        pytest.param(BUFFERED, SHIFT, id="buffered", marks=pytest.mark.soak),
        pytest.param(STREAMED, {}, id="streamed", marks=pytest.mark.soak),
    ],
)
def test_the_order_does_not_depend_on_stages(node, augment):
    plan = staged()
    without_stages = epochs(8, epochs=3, **node, **augment)
    numbers = np.concatenate(without_stages.order).tolist()
    images = np.concatenate(without_stages.images)
    node_of_run = OmegaConf.create({**node, **augment})
    for done in (0, 3, 6):  # the begin, in a stage, where one begins
        slices = plan.slices(done)
        batches = as_arrays(node_of_run, numbered(), slices=slices, seed=0)
        assert sizes_of(batches) == STAGED_SIZES[done:]

        x, y = concatenated(batches)
        pixels = x.reshape(len(x), -1)
        examples_done = sum(STAGED_SIZES[:done])
        assert y.tolist() == numbers[examples_done:]
        assert (pixels == images[examples_done:]).all()

    def batches_of(reader):
        slices = plan.slices(1)
        return batching.effective_batches(
            node_of_run, numbered(), slices, seed=0, reader=reader
        )

    all_batches = list(batches_of(None))
    shares_of_workers = by_readers(3, 1, batches_of)
    assert_shares(all_batches, shares_of_workers, replicas=1)


@pytest.mark.slow
def test_examples_of_unequal_length_come_in_stages():
    numbers = np.arange(EXAMPLES)
    rows = tf.data.Dataset.from_tensor_slices((numbers, numbers))
    texts = Data(rows.map(lambda x, y: (tf.repeat(x, 1 + x % 4), y)), None)
    slices = staged().slices(0)
    for node in (IN_MEMORY, STREAMED):
        node_of_run = OmegaConf.create(node)
        batches = list(batching.effective_batches(node_of_run, texts, slices, seed=0))
        assert sizes_of(batches) == STAGED_SIZES
        for x, y in batches:
            assert x.to_list() == [text_of(number) for number in y.numpy()]


def text_of(number):
    """Return an example of its own length, 1 to 4."""
    return [number] * (1 + number % 4)


def test_the_augmentation_is_of_the_example_in_this_epoch():
    def images_by_number(node):
        """Return the images in the order of the numbers: (epoch, number, pixel)."""
        shifted = epochs(8, **node, **SHIFT)
        ranks = np.argsort(shifted.order, axis=1)
        return np.take_along_axis(shifted.images, ranks[..., np.newaxis], axis=1)

    # The two have other orders.
    images = images_by_number(IN_MEMORY)
    assert (images == images_by_number(STREAMED)).all()

    # (epoch, number) → where the one pixel of an image went
    places = np.argmax(images, -1)
    assert (np.max(images, -1) == 1).all()
    first_epoch, second_epoch = places
    assert (first_epoch != second_epoch).any()
    assert len(set(first_epoch.tolist())) > EXAMPLES / 4


def test_ragged_examples_stay_together():
    x = tf.ragged.constant([text_of(number) for number in range(EXAMPLES)])
    examples = tf.data.Dataset.from_tensor_slices((x, np.arange(EXAMPLES)))

    def dense(x, y):
        if isinstance(x, tf.RaggedTensor):
            x = x.to_tensor()
        return x, y

    data = Data(examples.map(dense), None)
    for node in (IN_MEMORY, STREAMED):
        node_of_run = OmegaConf.create(node)
        batches = batching.effective_batches(node_of_run, data, [Slice(8, 1)], seed=0)
        seen = []
        for batch, numbers in batches:
            expected = [text_of(number) for number in numbers.numpy()]
            assert batch.to_list() == expected
            seen += numbers.numpy().tolist()
        assert sorted(seen) == list(range(EXAMPLES))


def test_inputs_come_in_the_precision_of_the_run(float64):
    ((x, y),) = batching.in_order(numbered().train, EXAMPLES)
    assert (x.dtype, y.dtype) == (tf.float64, tf.int64)
    assert y.numpy().tolist() == list(range(EXAMPLES))


DIGITS = OmegaConf.create({"_target_": "pipeline.dataset.digits"})

PREPARE = """
import sys
from pipeline import dataset
print(dataset.digits(sys.argv[1]).examples)
"""


DIGITS_IN_TRAINING = 1437
DIGITS_IN_VALIDATION = 180


def as_bytes(examples):
    """Return the image of each example as bytes, and its label."""
    return [(x.tobytes(), int(y)) for x, y in examples]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The digits, prepared by two processes at once in one empty folder."""
    folder = str(tmp_path_factory.mktemp("digits"))
    both = [python("-c", PREPARE, folder, cwd=ROOT) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == str(DIGITS_IN_TRAINING)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "small",
    [pytest.param(2**16, id="a batch at a time"), pytest.param(0, id="one by one")],
)
@pytest.mark.parametrize(
    "augment", [pytest.param({}, id="plain"), pytest.param(SHIFT, id="augmented")]
)
def test_what_is_streamed_as_it_is_stored_becomes_the_same_examples(
    digits, augment, small, monkeypatch
):
    monkeypatch.setattr(batching, "SMALL", small)
    data = load.load(OmegaConf.merge(DIGITS, {"data_dir": digits}))
    records = data.stored["train"].shuffled(tf.constant(0, tf.int64))
    assert records.element_spec.dtype == tf.string  # as it is stored
    settings = {"seed": 3, "slices": [Slice(100, 1)]}
    batches = as_arrays(OmegaConf.create({**BY_FILES, **augment}), data, **settings)

    examples = as_bytes(data.train.as_numpy_iterator())
    x, y = concatenated(batches)
    seen = as_bytes(zip(x, y, strict=True))
    assert seen != examples
    if not augment:
        assert sorted(seen) == sorted(examples)
        return

    # The order is the same, and each image is moved.
    plain = as_arrays(OmegaConf.create(BY_FILES), data, **settings)
    _, labels_of_plain = concatenated(plain)
    assert y.tolist() == labels_of_plain.tolist()
    stored_images = {image for image, _ in examples}
    seen_images = {image for image, _ in seen}
    unmoved = seen_images & stored_images
    assert len(unmoved) < DIGITS_IN_TRAINING / 10  # one place of 49 is where it was
    for x, _ in batches:
        assert x.dtype == np.float32


STORED = []  # examples that `counted` has made


def counted(data):
    """Note each example that is made of what is stored."""

    def noted(label):
        STORED.append(int(label))
        return label

    def counting(stored):
        def make(record):
            x, y = stored.make(record)
            return x, tf.ensure_shape(tf.numpy_function(noted, [y], y.dtype), y.shape)

        return replace(stored, make=make)

    stored_by_split = {name: counting(stored) for name, stored in data.stored.items()}
    return replace(data, stored=stored_by_split)


@pytest.mark.slow
@pytest.mark.parametrize(
    "augment", [pytest.param({}, id="plain"), pytest.param(SHIFT, id="augmented")]
)
@pytest.mark.parametrize("shuffle_files", [True, False])
def test_each_worker_decodes_its_share_alone(digits, shuffle_files, augment):
    data = load.load(OmegaConf.merge(DIGITS, {"data_dir": digits}))
    node = OmegaConf.create({**BY_FILES, "shuffle_files": shuffle_files, **augment})
    settings = {"seed": 3, "slices": [Slice(100, 1)]}
    all_batches = as_arrays(node, data, **settings)
    STORED.clear()

    def batches_of(reader):
        return as_arrays(node, counted(data), **settings, reader=reader)

    shares_of_workers = by_readers(3, 1, batches_of)
    assert_shares(all_batches, shares_of_workers, replicas=1)
    _, labels = concatenated(all_batches)
    assert sorted(STORED) == sorted(labels.tolist())


def brighter_from_5_on(features):
    """As a user writes it: TensorFlow makes a branch of the graph of this `if`."""
    x = tf.cast(features["image"], tf.float32)
    if features["label"] >= 5:
        x += 100
    return x, features["label"]


@pytest.mark.slow
def test_what_makes_an_example_may_have_an_if_of_a_tensor(digits):
    data = load.from_tfds(
        builder="pipeline.dataset.builtin.digits.Digits",
        data_dir=digits,
        validation_split="validation",
        preprocess=brighter_from_5_on,
    )
    node = OmegaConf.create(BY_FILES)
    for reader in (None, ShareReader(0, 1, 2)):
        trained = batching.effective_batches(
            node, data, [Slice(500, 1)], seed=3, reader=reader
        )
        records = data.made_of("validation")
        evaluated = batching.in_order(data.validation, 500, None, reader, records)
        for element in trained.concatenate(evaluated).as_numpy_iterator():
            x, y = parts_of(element)
            is_brighter = x.max((1, 2, 3)) >= 100
            assert (is_brighter == (y >= 5)).all()
            assert len(set(y.tolist())) == 10


def parts_of(element):
    """Return the parts of a batch or of a share."""
    if isinstance(element, Share):
        return element.batch
    return element


@pytest.mark.slow
def test_each_worker_decodes_its_share_of_an_evaluation_alone(digits):
    data = load.load(OmegaConf.merge(DIGITS, {"data_dir": digits}))
    all_batches = list(batching.in_order(data.validation, 50).as_numpy_iterator())

    def shares_of(data):
        made_of = data.made_of("validation")

        def batches_of(reader):
            batches = batching.in_order(data.validation, 50, None, reader, made_of)
            return batches.as_numpy_iterator()

        return by_readers(2, 1, batches_of)

    STORED.clear()
    assert_shares(all_batches, shares_of(counted(data)), 1)
    assert len(STORED) == DIGITS_IN_VALIDATION

    # Another split in its place is read as it is.
    brighter = replace(data, validation=data.validation.map(lambda x, y: (x + 1, y)))
    STORED.clear()
    brighter_batches = [(x + 1, y) for x, y in all_batches]
    assert_shares(brighter_batches, shares_of(counted(brighter)), 1)
    assert STORED == []


@pytest.mark.slow
def test_a_training_split_of_ones_own_is_not_read_as_it_was_stored(digits, monkeypatch):
    """Its examples are changed, so the records that they come from are not read."""
    plain = builtin_digits.digits(digits)

    def brighter():
        return replace(plain, train=plain.train.map(lambda x, y: (x + 1, y)))

    monkeypatch.setattr(builtin_digits, "digits", brighter)
    data = load.load(DIGITS)
    node = OmegaConf.create(BY_FILES)
    batches = as_arrays(node, data, slices=[Slice(500, 1)], seed=0)
    assert min(x.min() for x, _ in batches) == 1
    assert data.made_of("train") is None
    assert data.made_of("validation") is not None


class BrighterDigits(Digits):
    """Makes its examples in a way of its own, which the stored records do not show."""

    # TFDS looks for a builder's files beside its module, which has to be in a package.
    __module__ = Digits.__module__

    def _as_dataset(self, *args, **options):
        examples = super()._as_dataset(*args, **options)
        return examples.map(
            lambda features: {**features, "image": features["image"] + 1}
        )


def test_a_builder_with_a_way_of_its_own_to_read_is_never_read_another_way(tmp_path):
    data = load.from_tfds(
        builder=f"{__name__}.BrighterDigits",
        data_dir=str(tmp_path),
        validation_split="validation",
    )
    reader = ShareReader(0, 1, 2)
    records = data.made_of("validation")
    ways = [batching.in_order(data.validation, 90, None, reader, records)]
    for in_memory in (True, False):
        node = OmegaConf.create({**BY_FILES, "in_memory": in_memory})
        for reader_or_none in (None, reader):
            batches = batching.effective_batches(
                node, data, [Slice(500, 1)], seed=0, reader=reader_or_none
            )
            ways.append(batches)
    for batches in ways:
        images = [parts_of(element)[0] for element in batches.as_numpy_iterator()]
        assert min(map(np.min, images)) == 1


def test_the_digits_are_split_once_and_for_all(digits):
    from sklearn.datasets import load_digits

    data = load.load(OmegaConf.merge(DIGITS, {"data_dir": digits}))
    assert (data.examples, data.input_shape, data.classes, data.name) == (
        1437,
        (8, 8, 1),
        10,
        "digits",
    )
    images = set()
    for split, count in ((data.train, 1437), (data.validation, 180)):
        x, y = next(batching.in_order(split, 2000).as_numpy_iterator())
        assert len(y) == count
        assert (x.min(), x.max()) == (0, 1)
        # Stratified: a class has 174 to 183 of the 1797 images, so 9.7% to 10.2% of
        # each split, rounded.
        assert (np.abs(np.bincount(y) - len(y) / 10) <= 0.005 * len(y) + 1).all()
        pixels = np.rint(x * 16).astype(np.uint8)
        images.update(image.tobytes() for image in pixels)
    assert len(images) == 1437 + 180  # no image is in both
    all_pixels = load_digits().images.astype(np.uint8)
    assert images < {image.tobytes() for image in all_pixels}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "builtins.dict"},
            "dataset._target_ must return (train, validation[, test]) as "
            "tf.data.Datasets",
        ),
        (
            {"_target_": "pipeline.dataset.from_tfds", "name": "no_such"},
            "dataset.name must be a TFDS dataset",
        ),
        (
            {
                "_target_": "pipeline.dataset.from_tfds",
                "name": "mnist",
                "download": False,
                "data_dir": "/nowhere",
            },
            "dataset.data_dir must contain mnist",
        ),
    ],
)
def test_what_is_no_dataset_is_rejected(node, message):
    with pytest.raises(ConfigError) as error:
        load.load(OmegaConf.create(node))
    assert message in str(error.value)


MAPS = np.random.default_rng(0).integers(0, 3, (4, 5, 3))
KINDS = MAPS[:, 0, 0]
ONE_HOT = np.eye(3)[KINDS]
WEIGHTS = {1: 2.0, 2: 3.0}
OF_CLASS = np.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("labels", "classes", "loss", "expected"),
    [
        (KINDS, 3, "keras.losses.SparseCategoricalCrossentropy", OF_CLASS[KINDS]),
        # as many columns as classes
        (MAPS, 3, "keras.losses.SparseCategoricalCrossentropy", OF_CLASS[MAPS]),
        (MAPS, 7, "mine.focal", OF_CLASS[MAPS]),
        (MAPS[..., :1], None, "mine.focal", OF_CLASS[MAPS[..., 0]]),
        (
            KINDS[:, None].astype("float32"),
            None,
            "keras.losses.BinaryCrossentropy",
            OF_CLASS[KINDS],
        ),
        (ONE_HOT, 3, "mine.focal", OF_CLASS[KINDS]),
        (ONE_HOT, None, "keras.losses.CategoricalCrossentropy", OF_CLASS[KINDS]),
    ],
)
def test_a_class_weighs_its_elements(labels, classes, loss, expected):
    examples = tf.data.Dataset.from_tensor_slices((np.zeros(4), labels))
    training = TrainingConfig(class_weight=WEIGHTS, loss={"_target_": loss})
    weigh = weigher(training, Data(examples, None, classes=classes))
    *_, weights = weigh(None, tf.constant(labels))
    np.testing.assert_array_equal(weights, expected)


def test_labels_that_may_be_one_hot_or_not_are_not_weighed():
    data = Data(tf.data.Dataset.from_tensor_slices((np.zeros(4), MAPS)), None)
    training = TrainingConfig(class_weight=WEIGHTS, loss={"_target_": "mine.focal"})
    line = r"class_weight cannot be applied to labels of shape \(5, 3\), which may be one-hot"
    with pytest.raises(ConfigError, match=line):
        weigher(training, data)


@pytest.mark.parametrize(
    "weights", [[0, 0, 0], [1, -2, 0], [1, np.nan, 1], [1, np.inf, 1]]
)
def test_weights_that_train_nothing_are_rejected(weights):
    parts = (np.zeros(3), np.zeros(3), np.float32(weights))
    data = Data(tf.data.Dataset.from_tensor_slices(parts), None)
    node = OmegaConf.create(IN_MEMORY)
    line = "dataset must give sample weights with a positive and finite sum"
    with pytest.raises(ConfigError, match=line):
        batching.effective_batches(node, data, [Slice(2, 1)], seed=0)
