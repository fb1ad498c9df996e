"""Checks that the longest input of a dataset fits a model with a table of positions."""

from collections.abc import Mapping
from typing import Any

from pipeline.common.errors import ConfigError

_TEXTS = "pipeline.dataset.text_files"
_DECODER = "pipeline.components.model.decoder"


def check(dataset: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Reject texts that are longer than the decoder's table of positions.

    Beyond its table, TensorFlow raises an error on a CPU, but looks up zeros on a GPU.

    Args:
        dataset, model: these groups of the resolved config, plain.

    Raises:
        ConfigError: `model.length` is below the length to which inputs are padded.
    """
    if dataset["_target_"] != _TEXTS or model["_target_"] != _DECODER:
        return
    longest = dataset.get("longest")
    length = model.get("length")
    if not isinstance(longest, int) or not isinstance(length, int):
        return  # rejected by the functions that take them
    pad = dataset.get("pad") or {"multiple": 1}
    padded = -(-longest // pad["multiple"]) * pad["multiple"]
    if length < padded:
        rule = (
            f"must be at least {padded}, the length to which dataset.pad may pad inputs "
            f"of dataset.longest={longest} tokens"
        )
        raise ConfigError("model.length", rule, length)
