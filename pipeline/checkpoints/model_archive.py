"""Loads the weights in a Keras archive into a model that was built from the config."""

import textwrap
import warnings
from pathlib import Path

import keras

from pipeline.common.errors import ConfigError
from pipeline.common.secrets import mask

_LONGEST_REASON = 400  # maximum number of characters of Keras' error


def load_weights(model: keras.Model, archive: Path, key: str, name: str) -> None:
    """Load the weights of an archive; nothing else in it is read.

    Keras matches the layers by their order, not by their names.

    Args:
        model: the model, built and compiled.
        archive: a file in Keras' format, with the ending `.keras`.
        key: the config key or argument that an error names.
        name: the model in the archive, for errors.

    Raises:
        ConfigError: the weights do not fit the model, or cannot be read.
    """
    optimizer = model.optimizer
    # The archive has no optimizer, whose variables Keras would look for.
    model.optimizer = None
    try:
        with warnings.catch_warnings():
            # Keras only warns about layers that keep their initial weights.
            warnings.simplefilter("error", UserWarning)
            model.load_weights(archive)
    except Exception as error:  # the file may be anything
        reason = textwrap.shorten(mask(str(error)), _LONGEST_REASON)
        rule = f"must have weights that fit the model ({reason})"
        raise ConfigError(key, rule, name) from error
    finally:
        model.optimizer = optimizer
