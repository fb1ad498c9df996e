"""Training loops of your own that accumulate gradients: no config, no tracker.

Command:   python examples/own_loop/train.py
Run time:  about 10 seconds on two CPU cores, most of it to start TensorFlow
Expect:    ten lines; the loss falls below 0.3, and the last five are like the first
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from pipeline.accumulation import GradientAccumulator, accumulate_gradients

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
examples = tf.data.Dataset.from_tensor_slices((x.astype("float32") / 16, y))
batches = examples.shuffle(2000, seed=0).batch(128)
inputs = keras.Input((64,))
hidden = keras.layers.Dense(64, "relu")(inputs)
model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.AdamW(0.01)
optimizer.build(model.trainable_variables)


@tf.function
def update(batch):  # (x, y) or (x, y, sample_weight); nests and ragged tensors too
    sums = accumulate_gradients(model, loss, batch, micro_batch_size=32)
    optimizer.apply(sums.gradients(), model.trainable_variables)
    return sums.mean_loss()


for epoch in range(5):
    mean = keras.metrics.Mean()
    for batch in batches:  # 1797 examples are 14 batches of 128 and one of 5
        mean.update_state(update(batch), sample_weight=len(batch[0]))
    print(f"epoch {epoch + 1}  loss {mean.result():.4f}")


# The same training, where a loader yields batches of 32: four of them are an update.
keras.utils.set_random_seed(0)
model = keras.models.clone_model(model)
optimizer = keras.optimizers.AdamW(0.01)
optimizer.build(model.trainable_variables)
accumulator = GradientAccumulator(model.trainable_variables)


@tf.function
def add(x, y):
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    accumulator.add(gradients, weight=len(x))  # the number of examples in the mean
    return value


@tf.function
def apply():
    optimizer.apply(accumulator.average(), model.trainable_variables)
    accumulator.reset()


loader = examples.shuffle(2000, seed=0).batch(32)
for epoch in range(5):
    mean = keras.metrics.Mean()
    for number, (x, y) in enumerate(loader, start=1):
        mean.update_state(add(x, y), sample_weight=len(x))
        # The last update has the 5 examples that remain.
        if number % 4 == 0 or number == len(loader):
            apply()
    print(f"epoch {epoch + 1}  loss {mean.result():.4f}")
