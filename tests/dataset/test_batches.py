"""The order and the augmentation depend on (seed, epoch, example) and on nothing else; the digits' fixed splits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.accumulation.internals import Share
from pipeline.common.errors import ConfigError
from pipeline.config import sizes
from pipeline.config.plan import Plan, plan_of
from pipeline.config.schema import TrainingConfig
from pipeline.config.stages import Asked, Slice
from pipeline.dataset import Data, load
from pipeline.dataset import batches as batching
from pipeline.dataset.batches import Reader
from pipeline.dataset.builtin.digits import Digits
from pipeline.dataset.class_weights import weigher
from tests.parameters import mostly_slow
from tests.running import ROOT, python

EXAMPLES = 23


def numbered() -> Data:
    """Images that are zero but for one pixel in the middle, labelled by their number."""
    images = np.zeros((EXAMPLES, 7, 7, 1), np.float32)
    images[:, 3, 3] = 1
    return Data(tf.data.Dataset.from_tensor_slices((images, np.arange(EXAMPLES))), None)


def epochs(size, *, seed=0, epochs=2, **node):
    """Per epoch, the (number, image) of every example in the order they come."""
    node = OmegaConf.create(node)
    arguments = {"seed": seed, "slices": [Slice(size, epochs)]}
    batches = list(
        batching.effective_batches(node, numbered(), **arguments).as_numpy_iterator()
    )
    tail = [EXAMPLES % size] * (EXAMPLES % size > 0)
    assert [len(y) for _, y in batches] == ([size] * (EXAMPLES // size) + tail) * epochs
    x, y = (
        np.concatenate(parts).reshape(epochs, EXAMPLES, -1)
        for parts in zip(*batches, strict=True)
    )
    return y[..., 0].tolist(), x


SHIFT = {"augment": {"_target_": "pipeline.dataset.augmentation.Shift", "pixels": 3}}
IN_MEMORY, STREAMED, BUFFERED = (
    {"in_memory": True},
    {"in_memory": False},
    {"in_memory": False, "shuffle_buffer": 5},
)


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
    order, images = epochs(8, **node, **augment)
    assert [sorted(epoch) for epoch in order] == [
        list(range(EXAMPLES))
    ] * 2  # each exactly once
    assert order[0] != order[1] != list(range(EXAMPLES))
    for size in (1, 5, EXAMPLES):
        other, other_images = epochs(size, **node, **augment)
        assert other == order
        assert (other_images == images).all()
    assert epochs(8, seed=1, **node, **augment)[0] != order


def test_no_thread_tunes_an_iterator():
    """Deleting it would wait for that thread, up to a minute; in a process that exits meanwhile, TensorFlow aborts."""
    trained = batching.effective_batches(
        OmegaConf.create({}), numbered(), [Slice(8, 1)], seed=0
    )
    evaluated = batching.in_order(numbered().train, 8)
    assert [batches.options().autotune.enabled for batches in (trained, evaluated)] == [
        False,
        False,
    ]


AUGMENTED = []  # by `noting_shift`


def noting_shift(image, seed):
    AUGMENTED.append(1)
    return tf.roll(
        image, tf.random.stateless_uniform([2], seed, 0, 3, tf.int32), [0, 1]
    )


def augmentation():
    """Shifts an image, and notes each that it has shifted."""
    return lambda image, seed: tf.ensure_shape(
        tf.py_function(noting_shift, [image, seed], image.dtype), image.shape
    )


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
    """Of 3 updates an epoch, the last one of 7 examples: the rest is what it was, and nothing before it is made."""
    read = []
    data = numbered()
    note = lambda number: read.append(1) or number  # noqa: E731
    data = Data(
        data.train.map(
            lambda x, y: (x, tf.ensure_shape(tf.py_function(note, [y], y.dtype), []))
        ),
        None,
    )

    def batches(first_update):
        settings = {
            "seed": 0,
            "slices": Plan(sizes.derive(8, 1, None), EXAMPLES, 9).slices(first_update),
        }
        return list(
            batching.effective_batches(
                OmegaConf.create({**node, **augment}), data, **settings
            ).as_numpy_iterator()
        )

    whole = batches(0)
    assert [len(y) for _, y in whole] == [8, 8, 7] * 3
    for first_update in range(10):
        read.clear(), AUGMENTED.clear()
        rest = batches(first_update)
        assert len(rest) == 9 - first_update
        for one, two in zip(rest, whole[first_update:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        assert len(AUGMENTED) == (sum(len(y) for _, y in rest) if augment else 0)
        assert len(read) == (
            EXAMPLES if node["in_memory"] else EXAMPLES * (3 - first_update // 3)
        )


def by_readers(workers, replicas, batches_of):
    """What each of so many workers, with so many replicas each, reads: `batches_of(reader)`."""
    readers = [
        Reader(worker * replicas, replicas, workers * replicas)
        for worker in range(workers)
    ]
    return [list(batches_of(reader)) for reader in readers]


def assert_shares(whole, of_workers, replicas):
    """Of every batch each worker has the examples of its replicas, some of them none, and knows where they are."""
    assert [len(shares) for shares in of_workers] == [len(whole)] * len(of_workers)
    for batch, *shares in zip(whole, *of_workers, strict=True):
        count = len(batch[1])
        size = replicas * -(-count // (replicas * len(of_workers)))
        assert [int(share.examples) for share in shares] == [count] * len(shares)
        assert [int(share.start) for share in shares] == [
            worker * size for worker in range(len(shares))
        ]
        sizes = [
            min(max(count - worker * size, 0), size) for worker in range(len(shares))
        ]
        assert [len(share.batch[1]) for share in shares] == sizes
        for part, *parts in zip(batch, *(share.batch for share in shares), strict=True):
            assert np.array_equal(np.concatenate(parts), part)


@pytest.mark.parametrize(
    ("node", "augment", "workers", "replicas"),
    mostly_slow(
        [
            *(
                (IN_MEMORY, {}, 3, 1),
                (IN_MEMORY, SHIFTING, 9, 1),
                (IN_MEMORY, {}, 2, 2),
            ),
            *(
                (STREAMED, {}, 3, 1),
                (STREAMED, SHIFTING, 2, 2),
                (STREAMED, SHIFTING, 9, 1),
            ),
            *((BUFFERED, {}, 9, 1), (BUFFERED, SHIFTING, 3, 1)),
        ],
        [],
        [(IN_MEMORY, SHIFTING, 9, 1), (STREAMED, SHIFTING, 2, 2), (BUFFERED, {}, 9, 1)],
    ),
)
def test_each_worker_makes_its_share_alone(node, augment, workers, replicas):
    """Of 23 examples in batches of 8: the last one has 7, so that one of nine workers has two times none."""

    def batches_of(reader):
        settings = {
            "seed": 0,
            "slices": Plan(sizes.derive(8, 1, None), EXAMPLES, 6).slices(1),
        }
        settings["weigh"] = weigher(
            TrainingConfig(class_weight={3: 5.0}, loss=None), numbered()
        )
        node_of = OmegaConf.create({**node, **augment})
        return batching.effective_batches(
            node_of, numbered(), **settings, reader=reader
        ).as_numpy_iterator()

    whole = list(batches_of(None))
    AUGMENTED.clear()
    of_workers = by_readers(workers, replicas, batches_of)
    assert_shares(whole, of_workers, replicas)
    assert len(AUGMENTED) == (2 * EXAMPLES - 8 if augment else 0)


@pytest.mark.parametrize("node", [IN_MEMORY, STREAMED], ids=["in_memory", "streamed"])
def test_workers_read_examples_of_unequal_length_whole(node):
    """How long a batch is follows from all of it."""
    lengths = [1 + number % 4 for number in range(EXAMPLES)]
    texts = tf.data.Dataset.from_generator(
        lambda: ((np.full(length, 7), number) for number, length in enumerate(lengths)),
        output_signature=(tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)),
    ).apply(tf.data.experimental.assert_cardinality(EXAMPLES))
    settings = {"seed": 0, "slices": [Slice(8, 1)]}
    for pad in (None, {"multiple": 4, "value": 0}):
        made = OmegaConf.create({**node, "pad": pad})
        one, two = (
            list(
                batching.effective_batches(
                    made, Data(texts, None), **settings, reader=reader
                )
            )
            for reader in (None, Reader(1, 1, 2))
        )
        for (x, y), (also_x, also_y) in zip(one, two, strict=True):
            assert (y == also_y).numpy().all()
            assert (
                x.to_list() == also_x.to_list()
                if pad is None
                else (x == also_x).numpy().all()
            )


def staged():
    """23 examples an epoch: 5, 5, 3 · 3 and 4; 8 and 15; 15 and 8; two stages begin in the first epoch."""
    asked = [
        Asked("updates", 0, 5),
        Asked("updates", 2, 3),
        Asked("examples", 19, 8),
        Asked("examples", 31, 15),
    ]
    return plan_of(
        sizes.derive(5, 1, None), EXAMPLES, sizes.Horizon("epochs", 3), asked
    )


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
    plan, order = staged(), [5, 5, 3, 3, 3, 4, 8, 15, 15, 8]
    whole, images = epochs(8, epochs=3, **node, **augment)
    numbers, images = (
        [number for epoch in whole for number in epoch],
        images.reshape(3 * EXAMPLES, -1),
    )
    made = OmegaConf.create({**node, **augment})
    for done in (0, 3, 6):  # the begin, in a stage, where one begins
        given = {"seed": 0, "slices": plan.slices(done)}
        found = list(
            batching.effective_batches(made, numbered(), **given).as_numpy_iterator()
        )
        x, y = (np.concatenate(parts) for parts in zip(*found, strict=True))
        assert [len(labels) for _, labels in found] == order[done:]
        assert y.tolist() == numbers[sum(order[:done]) :]
        assert (x.reshape(len(x), -1) == images[sum(order[:done]) :]).all()
    shares = {"seed": 0, "slices": plan.slices(1)}
    batches_of = lambda reader: batching.effective_batches(  # noqa: E731
        made, numbered(), **shares, reader=reader
    )
    assert_shares(list(batches_of(None)), by_readers(3, 1, batches_of), 1)


@pytest.mark.slow
def test_examples_of_unequal_length_come_in_stages():
    lengths = [1 + number % 4 for number in range(EXAMPLES)]
    rows = tf.data.Dataset.from_tensor_slices(
        (np.arange(EXAMPLES), np.arange(EXAMPLES))
    )
    texts = rows.map(lambda x, y: (tf.repeat(x, 1 + x % 4), y))
    given = {"seed": 0, "slices": staged().slices(0)}
    for node in (IN_MEMORY, STREAMED):
        found = list(
            batching.effective_batches(
                OmegaConf.create(node), Data(texts, None), **given
            )
        )
        assert [len(y) for _, y in found] == [5, 5, 3, 3, 3, 4, 8, 15, 15, 8]
        for x, y in found:
            assert x.to_list() == [[number] * lengths[number] for number in y.numpy()]


def test_the_augmentation_is_of_the_example_in_this_epoch():
    by_number = []
    for node in (IN_MEMORY, STREAMED):  # two orders
        order, images = epochs(8, **node, **SHIFT)
        by_number.append(
            [
                image[np.argsort(numbers)]
                for numbers, image in zip(order, images, strict=True)
            ]
        )
    assert (np.array(by_number[0]) == np.array(by_number[1])).all()
    places = np.argmax(by_number[0], -1)  # (epoch, number) → where the pixel went
    assert (np.max(by_number[0], -1) == 1).all()
    assert (places[0] != places[1]).any()
    assert len(set(places[0].tolist())) > EXAMPLES / 4


def test_ragged_examples_stay_together():
    lengths = [1 + number % 4 for number in range(EXAMPLES)]
    x = tf.ragged.constant([[number] * length for number, length in enumerate(lengths)])
    data = Data(
        tf.data.Dataset.from_tensor_slices((x, np.arange(EXAMPLES))).map(
            lambda x, y: (x.to_tensor() if isinstance(x, tf.RaggedTensor) else x, y)
        ),
        None,
    )
    for node in (IN_MEMORY, STREAMED):
        settings = {"seed": 0, "slices": [Slice(8, 1)]}
        seen = []
        for batch, numbers in batching.effective_batches(
            OmegaConf.create(node), data, **settings
        ):
            assert batch.to_list() == [
                [number] * lengths[number] for number in numbers.numpy()
            ]
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


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The digits, prepared by two processes at once in one empty folder."""
    folder = str(tmp_path_factory.mktemp("digits"))
    both = [python("-c", PREPARE, folder, cwd=ROOT) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == "1437"
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
    assert (
        data.stored["train"].shuffled(tf.constant(0, tf.int64)).element_spec.dtype
        == tf.string
    )  # as it is stored
    settings = {"seed": 3, "slices": [Slice(100, 1)]}
    node = OmegaConf.create(
        {"in_memory": False, "shuffle_files": True, "shuffle_buffer": 200, **augment}
    )
    batches = list(
        batching.effective_batches(node, data, **settings).as_numpy_iterator()
    )
    examples = [(x.tobytes(), int(y)) for x, y in data.train.as_numpy_iterator()]
    seen = [
        (x[number].tobytes(), int(y[number]))
        for x, y in batches
        for number in range(len(y))
    ]
    assert seen != examples
    if not augment:
        assert sorted(seen) == sorted(examples)
    else:  # the same order, each image moved
        plain = batching.effective_batches(
            OmegaConf.create({**node, "augment": None}), data, **settings
        )
        assert [label for _, label in seen] == np.concatenate(
            [y for _, y in plain.as_numpy_iterator()]
        ).tolist()
        kept = {image for image, _ in seen} & {image for image, _ in examples}
        assert len(kept) < 1437 / 10  # one place of 49 is where it was
        assert {x.dtype for x, _ in batches} == {np.dtype("float32")}


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

    return replace(
        data, stored={name: counting(stored) for name, stored in data.stored.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "augment", [pytest.param({}, id="plain"), pytest.param(SHIFT, id="augmented")]
)
@pytest.mark.parametrize("shuffle_files", [True, False])
def test_each_worker_decodes_its_share_alone(digits, shuffle_files, augment):
    data = load.load(OmegaConf.merge(DIGITS, {"data_dir": digits}))
    node = OmegaConf.create(
        {
            "in_memory": False,
            "shuffle_files": shuffle_files,
            "shuffle_buffer": 200,
            **augment,
        }
    )
    settings = {"seed": 3, "slices": [Slice(100, 1)]}
    whole = list(batching.effective_batches(node, data, **settings).as_numpy_iterator())
    STORED.clear()

    def batches_of(reader):
        return batching.effective_batches(
            node, counted(data), **settings, reader=reader
        ).as_numpy_iterator()

    assert_shares(whole, by_readers(3, 1, batches_of), 1)
    assert sorted(STORED) == sorted(np.concatenate([y for _, y in whole]).tolist())


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
    node = OmegaConf.create(
        {"in_memory": False, "shuffle_files": True, "shuffle_buffer": 200}
    )
    settings = {"seed": 3, "slices": [Slice(500, 1)]}
    for reader in (None, Reader(0, 1, 2)):
        splits = [
            batching.effective_batches(node, data, **settings, reader=reader),
            batching.in_order(
                data.validation, 500, None, reader, data.made_of("validation")
            ),
        ]
        for batch in (batch for split in splits for batch in split.as_numpy_iterator()):
            x, y = batch if reader is None else batch.batch
            assert ((x.max((1, 2, 3)) >= 100) == (y >= 5)).all()
            assert len(set(y.tolist())) == 10


@pytest.mark.slow
def test_each_worker_decodes_its_share_of_an_evaluation_alone(digits):
    data = load.load(OmegaConf.merge(DIGITS, {"data_dir": digits}))
    whole = list(batching.in_order(data.validation, 50).as_numpy_iterator())

    def batches_of(reader, data):
        made_of = data.made_of("validation")
        return batching.in_order(
            data.validation, 50, None, reader, made_of
        ).as_numpy_iterator()

    STORED.clear()
    assert_shares(
        whole, by_readers(2, 1, lambda reader: batches_of(reader, counted(data))), 1
    )
    assert len(STORED) == 180
    # Another split in its place is read as it is.
    brighter = replace(data, validation=data.validation.map(lambda x, y: (x + 1, y)))
    STORED.clear()
    of_workers = by_readers(2, 1, lambda reader: batches_of(reader, counted(brighter)))
    assert_shares([(x + 1, y) for x, y in whole], of_workers, 1)
    assert STORED == []


@pytest.mark.slow
def test_a_training_split_of_ones_own_is_not_read_as_it_was_stored(digits, monkeypatch):
    """Its examples are changed, so the records that they were made of are not asked."""
    plain = load.digits(digits)
    brighter = lambda: replace(plain, train=plain.train.map(lambda x, y: (x + 1, y)))  # noqa: E731
    monkeypatch.setattr(load, "digits", brighter)
    data = load.load(DIGITS)
    node = OmegaConf.create(
        {"in_memory": False, "shuffle_files": True, "shuffle_buffer": 200}
    )
    batches = batching.effective_batches(node, data, [Slice(500, 1)], seed=0)
    assert min(x.min() for x, _ in batches.as_numpy_iterator()) == 1
    assert data.made_of("train") is None
    assert data.made_of("validation") is not None


class BrighterDigits(Digits):
    """Makes its examples in a way of its own, which the stored records do not show."""

    __module__ = (
        Digits.__module__
    )  # TFDS looks for a builder's files beside its module, in a package

    def _as_dataset(self, *args, **options):
        features = super()._as_dataset(*args, **options)
        return features.map(lambda each: {**each, "image": each["image"] + 1})


def test_a_builder_with_a_way_of_its_own_to_read_is_never_read_another_way(tmp_path):
    data = load.from_tfds(
        builder=f"{__name__}.BrighterDigits",
        data_dir=str(tmp_path),
        validation_split="validation",
    )
    read = [
        batching.in_order(
            data.validation, 90, None, Reader(0, 1, 2), data.made_of("validation")
        )
    ]
    for in_memory in (True, False):
        node = OmegaConf.create(
            {"in_memory": in_memory, "shuffle_files": True, "shuffle_buffer": 200}
        )
        read.append(batching.effective_batches(node, data, [Slice(500, 1)], seed=0))
        read.append(
            batching.effective_batches(
                node, data, [Slice(500, 1)], seed=0, reader=Reader(0, 1, 2)
            )
        )
    for batches in read:
        images = [
            (each.batch if isinstance(each, Share) else each)[0]
            for each in batches.as_numpy_iterator()
        ]
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
    splits = [
        next(batching.in_order(split, 2000).as_numpy_iterator())
        for split in (data.train, data.validation)
    ]
    assert [len(y) for _, y in splits] == [1437, 180]
    for x, y in splits:
        assert (x.min(), x.max()) == (0, 1)
        # Stratified: a class has 174 to 183 of the 1797 images, so 9.7% to 10.2% of each split, rounded.
        assert (np.abs(np.bincount(y) - len(y) / 10) <= 0.005 * len(y) + 1).all()
    images = {
        image.tobytes() for x, _ in splits for image in np.rint(x * 16).astype(np.uint8)
    }
    assert len(images) == 1437 + 180  # no image is in both
    assert images < {image.astype(np.uint8).tobytes() for image in load_digits().images}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_target_": "builtins.dict"},
            "dataset._target_ must give (train, validation[, test]) as tf.data.Datasets",
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
            "dataset.data_dir must hold mnist",
        ),
    ],
)
def test_what_is_no_dataset_is_refused(node, message):
    with pytest.raises(ConfigError) as refused:
        load.load(OmegaConf.create(node))
    assert message in str(refused.value)


MAPS = np.random.default_rng(0).integers(0, 3, (4, 5, 3))
KINDS = MAPS[:, 0, 0]
ONE_HOT = np.eye(3)[KINDS]
WEIGHTS = {1: 2.0, 2: 3.0}
OF_CLASS = np.array([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("labels", "classes", "loss", "expected"),
    [
        (KINDS, 3, "keras.losses.SparseCategoricalCrossentropy", OF_CLASS[KINDS]),
        (
            MAPS,
            3,
            "keras.losses.SparseCategoricalCrossentropy",
            OF_CLASS[MAPS],
        ),  # as many columns as classes
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
    data = Data(
        tf.data.Dataset.from_tensor_slices((np.zeros(4), labels)), None, classes=classes
    )
    *_, weights = weigher(
        TrainingConfig(class_weight=WEIGHTS, loss={"_target_": loss}), data
    )(None, tf.constant(labels))
    np.testing.assert_array_equal(weights, expected)


def test_labels_that_may_be_one_hot_or_not_are_not_weighed():
    data = Data(tf.data.Dataset.from_tensor_slices((np.zeros(4), MAPS)), None)
    with pytest.raises(
        ConfigError,
        match=r"class_weight must be null where labels \(5, 3\) may be one-hot or a class",
    ):
        weigher(
            TrainingConfig(class_weight=WEIGHTS, loss={"_target_": "mine.focal"}), data
        )


@pytest.mark.parametrize(
    "weights", [[0, 0, 0], [1, -2, 0], [1, np.nan, 1], [1, np.inf, 1]]
)
def test_weights_that_train_nothing_are_refused(weights):
    data = Data(
        tf.data.Dataset.from_tensor_slices(
            (np.zeros(3), np.zeros(3), np.float32(weights))
        ),
        None,
    )
    with pytest.raises(
        ConfigError,
        match="dataset must give sample weights with a positive and finite sum",
    ):
        batching.effective_batches(
            OmegaConf.create(IN_MEMORY), data, [Slice(2, 1)], seed=0
        )
