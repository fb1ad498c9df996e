"""python -m benchmarks.keras_job: the README's main job with Keras' `fit` and MLflow's callback, into ./mlflow.db."""

from __future__ import annotations

import keras
import mlflow
import tensorflow as tf
from mlflow.keras import MlflowCallback
from sklearn.datasets import load_digits

from pipeline.components import model

EPOCHS, MICRO, FACTOR, TRAINING = 10, 32, 4, 1437


def main() -> None:
    digits = load_digits()
    x, y = digits.images[..., None].astype("float32") / 16, digits.target
    training = (
        tf.data.Dataset.from_tensor_slices((x[:TRAINING], y[:TRAINING]))
        .cache()
        .shuffle(TRAINING)
    )
    validation = tf.data.Dataset.from_tensor_slices(
        (x[TRAINING : TRAINING + 180], y[TRAINING : TRAINING + 180])
    )
    network = model.cnn((8, 8, 1), 10)
    steps = EPOCHS * -(-TRAINING // MICRO)  # Keras' schedule counts micro-steps
    rate = keras.optimizers.schedules.CosineDecay(
        0.001, steps - steps // 20, warmup_target=0.01, warmup_steps=steps // 20
    )
    network.compile(
        keras.optimizers.AdamW(
            rate, weight_decay=0.004, gradient_accumulation_steps=FACTOR
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    mlflow.enable_system_metrics_logging()
    with mlflow.start_run():
        network.fit(
            training.batch(MICRO).prefetch(tf.data.AUTOTUNE),
            validation_data=validation.batch(180),
            epochs=EPOCHS,
            callbacks=[MlflowCallback(log_every_epoch=False, log_every_n_steps=1)],
            verbose=0,
        )
        mlflow.keras.log_model(
            network, name="model", pip_requirements=["keras", "tensorflow"]
        )


if __name__ == "__main__":
    main()
