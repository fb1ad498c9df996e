"""A training loop of your own on several devices: no config, no tracker.

Command:   python examples/own_distributed_loop/train.py
Run time:  about 15 seconds on two CPU cores, which are two devices here
Expect:    six lines; the loss falls below 0.5, and the last three are like the first

It uses MirroredStrategy by hand.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from pipeline.accumulation import GradientAccumulator, Update

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # on GPUs: no argument
x, y = load_digits(return_X_y=True)
examples = tf.data.Dataset.from_tensor_slices((x.astype("float32") / 16, y))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(64, "relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


# The kernel: of an effective batch of 128 each replica computes its half, in
# micro-batches of 16.
with strategy.scope():
    by_kernel = network()
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(by_kernel.trainable_variables)

batches = examples.shuffle(2000, seed=0).batch(128)
kernel = Update(by_kernel, loss, optimizer, micro_batch_size=16, strategy=strategy)
update = tf.function(kernel)
for epoch in range(3):
    mean = keras.metrics.Mean()
    for batch in batches:  # 14 of 128 and one of 5
        mean.update_state(update(batch)["loss"], sample_weight=len(batch[0]))
    print(f"epoch {epoch + 1}  loss {mean.result():.4f}")

# The accumulator: the strategy cuts each batch of 32 into shares; four batches are an
# update.
with strategy.scope():
    by_parts = network()
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(by_parts.trainable_variables)
    # It keeps a sum on each replica.
    accumulator = GradientAccumulator(by_parts.trainable_variables)


def add(x, y):  # on each replica, for its share
    with tf.GradientTape() as tape:
        # Inside strategy.run Keras' losses divide by the number of replicas.
        value = loss(y, by_parts(x, training=True)) * strategy.num_replicas_in_sync
    gradients = tape.gradient(value, by_parts.trainable_variables)
    # Shares may differ: 5 examples are 3 and 2.
    accumulator.add(gradients, weight=len(x))
    return value * tf.cast(len(x), value.dtype)


@tf.function
def part(batch):
    return strategy.reduce("SUM", strategy.run(add, batch), axis=None)


@tf.function
def apply():  # outside strategy.run: inside, Keras would add up the replicas' averages
    optimizer.apply(accumulator.average(), by_parts.trainable_variables)
    accumulator.reset()


loader = examples.shuffle(2000, seed=0).batch(32)
distributed = strategy.experimental_distribute_dataset(loader)
for epoch in range(3):
    total = 0.0
    for number, batch in enumerate(distributed, start=1):
        total += part(batch)
        if number % 4 == 0 or number == len(loader):
            apply()
    print(f"epoch {epoch + 1}  loss {total / len(x):.4f}")
