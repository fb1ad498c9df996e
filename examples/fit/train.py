"""Keras' `compile` and `fit` on batches of 128, in micro-batches of 32.

Command:   python examples/fit/train.py
Run time:  about 10 seconds on two CPU cores, most of it to start TensorFlow
Expect:    five lines; the loss falls below 0.3, the validation accuracy rises above 0.8

Plain Keras has neither the import of `AccumulatingModel` nor the line that uses it.
"""

import keras
from sklearn.datasets import load_digits

from pipeline.accumulation import AccumulatingModel

keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
inner = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
)

model = AccumulatingModel(inner, micro_batch_size=32)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"])
# The 1437 examples for training are 11 batches of 128 and one of 29.
history = model.fit(
    x[:1437],
    y[:1437],
    batch_size=128,
    epochs=5,
    validation_data=(x[1437:], y[1437:]),
    verbose=0,
)

losses = history.history["loss"]
accuracies = history.history["val_accuracy"]
for epoch in range(5):
    line = f"loss {losses[epoch]:.4f}  val_accuracy {accuracies[epoch]:.4f}"
    print(f"epoch {epoch + 1}  {line}")
