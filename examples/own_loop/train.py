"""A training loop of your own that accumulates gradients: no config, no tracker.

Command:   python examples/own_loop/train.py
Run time:  about 10 seconds on two CPU cores, most of it to start TensorFlow
Expect:    five lines; the loss falls below 0.3
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from pipeline.accumulation import accumulate_gradients

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
