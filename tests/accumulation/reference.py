"""What the tests' plain Keras loops have in common: these know no micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices | None


def gradients_of(
    tape: tf.GradientTape,
    value: tf.Tensor,
    variables: keras.Model | Sequence[keras.Variable],
) -> list[Gradient]:
    """Return the gradients of `value` by a model's trainable variables, or by others.

    Those of an embedding's table are rows, and None where `value` does not depend on
    the variable.
    """
    if isinstance(variables, keras.Model):
        variables = variables.trainable_variables
    return tape.gradient(value, [variable.value for variable in variables])


def dense(gradients: Sequence[Gradient]) -> list[tf.Tensor | None]:
    """Return the gradients with the rows of embeddings made dense.

    From rows that were looked up twice Keras' optimizers make another step: Adam, for
    one, squares each of them for itself.
    """
    dense_gradients = []
    for gradient in gradients:
        if gradient is not None:
            gradient = tf.convert_to_tensor(gradient)
        dense_gradients.append(gradient)
    return dense_gradients
