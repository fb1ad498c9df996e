"""Strategies over the CPUs of this process."""

from __future__ import annotations

import tensorflow as tf


def strategy_on(devices: int) -> tf.distribute.Strategy:
    """Return the default strategy for one device, else one replica on each CPU."""
    if devices == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(devices)])
