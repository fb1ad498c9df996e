"""Finds out in which form labels and outputs give classes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import keras
import tensorflow as tf

from pipeline.accumulation.internals import Term

_BINARY = (keras.losses.BinaryCrossentropy, keras.losses.BinaryFocalCrossentropy)
_ONE_HOT = (
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
)


class Labels(Enum):
    """The form of labels and outputs."""

    INDICES = "indices"  # labels (…), outputs (…, classes)
    ONE_HOT = "one_hot"  # labels and outputs (…, classes)
    BINARY = "binary"  # labels and outputs (…, 1) or (examples,), of the class 1


@dataclass(frozen=True)
class ClassForm:
    """The classes of an output.

    Attributes:
        labels: the form of labels and outputs.
        classes: the number of classes.
        from_logits: whether the outputs are logits and not probabilities; None if the
            loss does not say so.
    """

    labels: Labels
    classes: int
    from_logits: bool | None

    @classmethod
    def of_term(cls, term: Term) -> ClassForm | None:
        """Return the form of an output, or None if its labels are not classes.

        If the loss is a binary or categorical cross-entropy of Keras, it decides the
        form. For another loss, labels are classes if they are integers and the output
        has one more axis.
        """
        if not (isinstance(term.y, tf.Tensor) and isinstance(term.output, tf.Tensor)):
            return None
        from_logits = _from_logits(term.loss)
        rank = term.output.shape.rank
        last = term.output.shape[-1] if rank else None
        if isinstance(term.loss, _BINARY):
            if rank == 1 or last == 1:
                return cls(Labels.BINARY, 2, from_logits)
            return None
        if last is None or last < 2:
            return None
        if isinstance(term.loss, _ONE_HOT):
            return cls(Labels.ONE_HOT, last, from_logits)
        is_sparse = isinstance(term.loss, keras.losses.SparseCategoricalCrossentropy)
        if not is_sparse and not term.y.dtype.is_integer:
            return None
        if term.y.shape.rank == rank - 1 or term.y.shape[1:] == [*_inner(term), 1]:
            return cls(Labels.INDICES, last, from_logits)
        return None

    def labels_of(self, y: tf.Tensor) -> tf.Tensor:
        """Return the class of each label, int32. A last axis of size 1 may remain."""
        if self.labels is Labels.ONE_HOT:
            return tf.argmax(y, -1, tf.int32)
        if self.labels is Labels.BINARY:
            return tf.cast(tf.cast(y, tf.float32) > 0.5, tf.int32)
        return tf.cast(y, tf.int32)

    def probabilities(self, output: tf.Tensor) -> tf.Tensor:
        """Return the probability of each class, of shape (…, classes), float32.

        Outputs of a loss without `from_logits` are returned as they are, so only their
        order is meaningful.
        """
        output = tf.cast(output, tf.float32)
        if self.labels is Labels.BINARY:
            if output.shape.rank > 1:
                output = tf.squeeze(output, -1)
            positive = tf.sigmoid(output) if self.from_logits else output
            return tf.stack([1 - positive, positive], -1)
        return tf.nn.softmax(output) if self.from_logits else output


def _inner(term: Term) -> list[int | None]:
    """Return the sizes of the axes between examples and classes."""
    return list(term.output.shape.as_list()[1:-1])


def _from_logits(loss: keras.losses.Loss) -> bool | None:
    """Return whether the outputs are logits, or None if the loss does not say so.

    A loss function says so by its argument `from_logits` in the config.
    """
    arguments = getattr(getattr(loss, "fn", None), "keywords", {})
    from_logits = getattr(loss, "from_logits", arguments.get("from_logits"))
    return None if from_logits is None else bool(from_logits)
