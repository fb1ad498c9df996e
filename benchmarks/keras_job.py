"""python -m benchmarks.keras_job: the README's main job with Keras' `fit`.

MLflow's callback logs into ./mlflow.db.
"""

from __future__ import annotations

import keras
import mlflow
import tensorflow as tf
from mlflow.keras import MlflowCallback
from sklearn.datasets import load_digits

from benchmarks.main_job_sizes import (
    EPOCHS,
    FACTOR,
    MICRO,
    TRAINING_EXAMPLES,
    VALIDATION_EXAMPLES,
)
from pipeline.components import model


def main() -> None:
    digits = load_digits()
    x = digits.images[..., None].astype("float32") / 16
    y = digits.target
    end = TRAINING_EXAMPLES + VALIDATION_EXAMPLES
    training = tf.data.Dataset.from_tensor_slices(
        (x[:TRAINING_EXAMPLES], y[:TRAINING_EXAMPLES])
    )
    training = training.cache().shuffle(TRAINING_EXAMPLES)
    validation = tf.data.Dataset.from_tensor_slices(
        (x[TRAINING_EXAMPLES:end], y[TRAINING_EXAMPLES:end])
    )

    network = model.cnn((8, 8, 1), 10)
    # Keras' schedule counts micro-steps.
    steps = EPOCHS * -(-TRAINING_EXAMPLES // MICRO)
    warmup_steps = steps // 20
    rate = keras.optimizers.schedules.CosineDecay(
        0.001, steps - warmup_steps, warmup_target=0.01, warmup_steps=warmup_steps
    )
    optimizer = keras.optimizers.AdamW(
        rate, weight_decay=0.004, gradient_accumulation_steps=FACTOR
    )
    network.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.enable_system_metrics_logging()
    with mlflow.start_run():
        network.fit(
            training.batch(MICRO).prefetch(tf.data.AUTOTUNE),
            validation_data=validation.batch(VALIDATION_EXAMPLES),
            epochs=EPOCHS,
            callbacks=[MlflowCallback(log_every_epoch=False, log_every_n_steps=1)],
            verbose=0,
        )
        requirements = ["keras", "tensorflow"]
        mlflow.keras.log_model(network, name="model", pip_requirements=requirements)


if __name__ == "__main__":
    main()
