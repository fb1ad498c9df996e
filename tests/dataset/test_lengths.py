"""`dataset.lengths` cuts off the padding of examples, which are then ragged."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from omegaconf import OmegaConf

from pipeline.common.errors import ConfigError, DataError
from pipeline.config.stages import Slice
from pipeline.dataset import Data, Stored, load
from pipeline.dataset import batches as batching
from pipeline.dataset.bad_example import errors_located
from pipeline.dataset.checksums import DataFiles
from tests.parameters import mostly_slow

SIZE = 9
LENGTHS = (3, 9, 1, 0, 4)
HERE = __name__
NODE = {
    "_target_": f"{HERE}.texts",
    "pad": {"multiple": 4, "value": 0},
    "lengths": {"length": "x.length", "parts": ["x.tokens", "x.words", "y.next"]},
}


def arrays(lengths: tuple[int, ...] = LENGTHS) -> tuple[dict, dict]:
    """Return padded texts of these lengths, their words, and labels of both kinds."""
    numbers = np.random.default_rng(0)
    tokens = np.zeros([len(lengths), SIZE], "int32")
    vectors = np.zeros([len(lengths), SIZE, 2], "float32")
    for i, length in enumerate(lengths):
        tokens[i, :length] = numbers.integers(1, 7, length)
        vectors[i, :length] = numbers.normal(size=[length, 2])
    words = np.where(tokens > 0, tokens.astype(str), "")
    x = {"length": np.array(lengths, "int32"), "tokens": tokens, "words": words}
    # The axis of `vectors` after the positions is kept, and so is a label an example.
    return x, {"next": vectors, "class": np.arange(len(lengths))}


def texts(longest: int = SIZE, hidden: int = 0, at: str = "tokens") -> Data:
    """Return the texts as a dataset.

    Args:
        longest: the length that the second text states; it has `SIZE` tokens.
        hidden: a value of the third text after its length.
        at: the part that has this value.
    """
    x, y = arrays()
    x["length"][1] = longest
    part = {**x, **y}[at]
    part[2, 5] = hidden
    split = tf.data.Dataset.from_tensor_slices((x, y))
    return Data(split, split.take(2), name="texts")


def by_records() -> Data:
    """Return the texts as they are made from records, also from shuffled ones."""
    split = texts().train
    records = tf.data.Dataset.range(len(LENGTHS))
    everything = split.batch(len(LENGTHS)).get_single_element()

    def make(number):
        return tf.nest.map_structure(lambda leaf: leaf[number], everything)

    made = records.map(make)
    stored = Stored(made, records, make, shuffled=lambda seed: records.shuffle(5, seed))
    return Data(made, None, stored={"train": stored})


def loaded(**node: object) -> Data:
    return load.load(OmegaConf.create({**NODE, **node}))


def rows(batches) -> list[list]:
    """Return the tokens of each example, in the order of the first labels."""
    examples = []
    for x, y in batches:
        for row, label in zip(x["tokens"].to_list(), y["class"].numpy(), strict=True):
            examples.append((label, row))
    return [row for _, row in sorted(examples)]


def expected_rows() -> list[list]:
    x, _ = arrays()
    pairs = zip(x["tokens"].tolist(), LENGTHS, strict=True)
    return [row[:length] for row, length in pairs]


def test_parts_get_the_length_of_the_example_and_others_stay():
    x, y = arrays()
    data = loaded()
    examples = [*data.train]
    for i, (inputs, labels) in enumerate(examples):
        length = LENGTHS[i]
        assert inputs["length"] == length
        assert inputs["tokens"].numpy().tolist() == x["tokens"][i, :length].tolist()
        assert inputs["words"].shape == (length,)
        assert labels["next"].numpy().tolist() == y["next"][i, :length].tolist()
        assert labels["class"] == i
    assert len(examples) == len(LENGTHS)
    assert len([*data.validation]) == 2


def test_it_pads_again_to_the_longest_of_the_batch():
    data = loaded()
    (first, *_) = batching.in_order(data.train.take(3).skip(2), 1, data_pad())
    inputs, _, weights = first
    assert inputs["tokens"].shape == (1, 4)
    assert weights["next"].numpy().tolist() == [[1, 0, 0, 0]]


def data_pad():
    return OmegaConf.create(NODE["pad"])


WAYS_TO_READ = list(
    itertools.product(
        ["texts", "by_records"],
        [{"in_memory": True}, {"in_memory": False, "shuffle_files": True}],
    )
)


@pytest.mark.parametrize(
    ("target", "reading"),
    mostly_slow(WAYS_TO_READ, [WAYS_TO_READ[0], WAYS_TO_READ[3]]),
)
def test_however_examples_are_read_they_have_no_padding(target, reading):
    node = OmegaConf.create({**NODE, "_target_": f"{HERE}.{target}", **reading})
    data = load.load(node)
    batches = batching.effective_batches(
        node, data, [Slice(2, 1)], seed=0, padded=False
    )
    assert rows(batches) == expected_rows()


def count(x, y):
    """Return the number of tokens in front of the first zero."""
    length = 0
    if tf.reduce_any(x["tokens"] > 0):  # AutoGraph converts it
        length = tf.math.count_nonzero(x["tokens"], dtype=tf.int32)
    return length


def test_a_length_may_be_a_function_and_several_lengths_may_be_known():
    function = {"_target_": f"{HERE}.count", "_partial_": True}
    lengths = [
        {"length": function, "parts": ["x.tokens", "y.next"]},
        {"length": "x.length", "parts": ["x.words"]},
    ]
    for (x, y), (other_x, other_y) in zip(
        loaded(lengths=lengths).train, loaded().train, strict=True
    ):
        assert x["tokens"].shape == other_x["tokens"].shape
        assert x["words"].shape == other_x["words"].shape
        assert y["next"].shape == other_y["next"].shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"longest": 10},
            "example 1 of the train split, counted from 0: dataset.lengths of x.tokens "
            "must be from 0 to 9. Received: 10",
        ),
        pytest.param(
            {"longest": -1},
            "example 1 of the train split, counted from 0: dataset.lengths of x.tokens "
            "must be from 0 to 9. Received: -1",
            marks=pytest.mark.slow,
        ),
        (
            {"hidden": 3},
            "example 2 of the train split, counted from 0: dataset.lengths of x.tokens "
            "must leave out only padding, which is zero. Received: 1",
        ),
        pytest.param(
            {"hidden": 3, "at": "words"},
            "example 2 of the train split, counted from 0: dataset.lengths of x.words "
            "must leave out only padding, which is zero. Received: 1",
            marks=pytest.mark.slow,
        ),
        (
            {"hidden": float("nan"), "at": "next"},
            "example 2 of the train split, counted from 0: dataset.lengths of y.next "
            "must leave out only padding, which is zero. Received: 1",
        ),
    ],
)
def test_an_example_that_would_lose_data_is_named(arguments, message):
    data = loaded(**arguments)
    with pytest.raises(DataError) as error, errors_located(data, DataFiles(())):
        for _ in data.train:
            pass
    assert str(error.value) == f"the data cannot be read: {message}"


def test_a_length_that_is_too_small_is_found():
    # Negative control: a length of 9 is right, one of 8 would lose a token.
    assert len([*loaded(longest=9).train]) == len(LENGTHS)
    with pytest.raises(tf.errors.InvalidArgumentError, match="only padding"):
        list(loaded(longest=8).train)


def two(x, y):
    return x["tokens"][:2]


def no_argument():
    return 3


REJECTED = [
    (
        {"length": "x.lenght", "parts": ["x.tokens"]},
        "dataset.lengths.length must be a part of an example of the train split, or a "
        "node with a _target_. Received: 'x.lenght'. Choices: x.length, x.tokens, "
        "x.words, y.class, y.next. Did you mean 'x.length'?",
    ),
    (
        {"length": "x.tokens", "parts": ["x.tokens"]},
        "dataset.lengths.length must be one integer per example, not "
        "TensorSpec(shape=(9,), dtype=tf.int32, name=None). Received: 'x.tokens'.",
    ),
    (
        {"length": {"_target_": f"{HERE}.two", "_partial_": True}, "parts": ["y.next"]},
        "dataset.lengths.length must be one integer per example, not ",
    ),
    (
        {
            "length": {"_target_": f"{HERE}.no_argument", "_partial_": True},
            "parts": ["y.next"],
        },
        "dataset.lengths.length must be a function of (x, y) (TypeError: ",
    ),
    (
        {"length": {"_target_": f"{HERE}.two"}, "parts": ["y.next"]},
        f"dataset.lengths.length.x must be given: {HERE}.two has no default for it; "
        "if the function itself is meant, set dataset.lengths.length._partial_ to true.",
    ),
    (
        {"length": "x.length", "parts": ["x.tokens", "y"]},
        "dataset.lengths.parts must be parts of an example of the train split. "
        "Received: 'y'. Choices: x.length, x.tokens, x.words, y.class, y.next.",
    ),
    (
        {"length": "x.length", "parts": ["y.class"]},
        "dataset.lengths.parts must be dense parts with an axis of positions, not "
        "TensorSpec(shape=(), dtype=tf.int64, name=None). Received: 'y.class'.",
    ),
    (
        [
            {"length": "x.length", "parts": ["x.tokens"]},
            {"length": "y.class", "parts": ["y.next", "x.tokens"]},
        ],
        "dataset.lengths.1.parts must be parts that have no other length. Received: "
        "'x.tokens'.",
    ),
]


@pytest.mark.parametrize(("lengths", "message"), REJECTED)
def test_what_does_not_fit_the_examples_is_rejected(lengths, message):
    with pytest.raises(ConfigError) as error:
        loaded(lengths=lengths)
    assert str(error.value).startswith(message)


def weighted(weights: str) -> Data:
    """Return the texts with sample weights of this form.

    Args:
        weights: "one" for those of all labels, or "by output".
    """
    x, y = arrays()
    of_positions = (x["tokens"] > 0).astype("float32")
    if weights == "one":
        parts = (x, y["next"], of_positions)
    else:
        of_examples = np.ones(len(LENGTHS), "float32")
        parts = (x, y, {"next": of_positions, "class": of_examples})
    return Data(tf.data.Dataset.from_tensor_slices(parts), None, name="weighted")


@pytest.mark.parametrize(
    ("weights", "parts", "missing", "whose"),
    [
        ("one", ["x.tokens", "y"], "sample_weight", "y"),
        pytest.param(
            *("one", ["sample_weight"], "y", "sample_weight"), marks=pytest.mark.slow
        ),
        ("by output", ["y.next"], "sample_weight.next", "y.next"),
    ],
)
def test_labels_are_cut_with_the_weights_of_their_positions(
    weights, parts, missing, whose
):
    node = {"_target_": f"{HERE}.weighted", "weights": weights}
    with pytest.raises(ConfigError) as error:
        loaded(**node, lengths={"length": "x.length", "parts": parts})
    assert str(error.value) == (
        f"dataset.lengths.parts must also contain {missing}, which has as many "
        f"positions as {whose}. Received: {parts}."
    )

    lengths = {"length": "x.length", "parts": [*parts, missing]}
    data = loaded(**node, lengths=lengths)
    batch = next(iter(batching.in_order(data.train, len(LENGTHS), data_pad())))
    weights_of_next = batch[2]["next"] if weights == "by output" else batch[2]
    assert weights_of_next.numpy().sum(1).tolist() == list(LENGTHS)


def test_batches_of_a_loader_have_no_lengths():
    with pytest.raises(ConfigError, match=r"dataset.lengths cannot be set with"):
        loaded(batched=True, pad=None)
