"""Names that stand in users' configs, records and saved models: they do not change.

A name may be added here and a parameter may be added to a name. What is listed stays;
a new name gets an entry in `pipeline.config.former_names`, so that the old one works.
"""

from __future__ import annotations

import inspect

import keras
import pytest
from hydra.utils import get_object

from pipeline import accumulation
from pipeline.components import metrics, optimizer, scaling, stage_rates
from pipeline.config import former_names
from pipeline.trust import trusted_names

# What `_target_` may name → the parameters that a config may give.
TARGETS = {
    "pipeline.components.metrics.BitsPerToken": ["name", "dtype"],
    "pipeline.components.model.application": [
        "input_shape",
        "classes",
        "name",
        "weights",
        "frozen",
    ],
    "pipeline.components.model.cnn": [
        "input_shape",
        "classes",
        "filters",
        "kernel_size",
        "hidden",
        "dropout",
        "l2",
    ],
    "pipeline.components.model.decoder": [
        "classes",
        "length",
        "width",
        "blocks",
        "heads",
        "dropout",
    ],
    "pipeline.components.model.mlp": [
        "input_shape",
        "classes",
        "hidden",
        "dropout",
        "l2",
    ],
    "pipeline.components.model.tabular": [
        "input_shape",
        "training_examples",
        "hidden",
        "activation",
        "dropout",
        "l2",
    ],
    "pipeline.components.optimizer.InverseSquareRoot": [
        "learning_rate",
        "warmup_steps",
    ],
    "pipeline.components.optimizer.WarmupStableDecay": [
        "learning_rate",
        "warmup_steps",
        "decay_steps",
        "total_steps",
    ],
    "pipeline.components.optimizer.constant": ["learning_rate"],
    "pipeline.config.compose.RunFolders": [],
    "pipeline.dataset.augmentation.Flip": [],
    "pipeline.dataset.augmentation.Shift": ["pixels"],
    "pipeline.dataset.breast_cancer": [],
    "pipeline.dataset.diabetes": [],
    "pipeline.dataset.digits": ["data_dir", "download", "test_split"],
    "pipeline.dataset.from_tfds": [
        "name",
        "data_dir",
        "download",
        "train_split",
        "validation_split",
        "input_key",
        "label_key",
        "scale",
        "resize",
        "preprocess",
        "builder",
        "test_split",
    ],
    "pipeline.dataset.text_files": [
        "files",
        "name",
        "builder",
        "data_dir",
        "download",
        "train_split",
        "validation_split",
        "test_split",
        "sample_by",
        "text_key",
        "longest",
        "tokenizer",
        "vocabulary",
        "token_cache",
    ],
    "pipeline.dataset.topics": ["data_dir", "download", "test_split"],
}
# As records of earlier versions have them → the same now.
FORMER = {
    "pipeline.augmentation.Flip": "pipeline.dataset.augmentation.Flip",
    "pipeline.compose.RunFolders": "pipeline.config.compose.RunFolders",
    "pipeline.datasets.digits": "pipeline.dataset.builtin.digits",
    "pipeline.metrics.BitsPerToken": "pipeline.components.metrics.BitsPerToken",
    "pipeline.model.mlp": "pipeline.components.model.mlp",
    "pipeline.optimizer.constant": "pipeline.components.optimizer.constant",
}
# The names under which Keras saves these classes.
SAVED_CLASSES = {
    "accumulation>AccumulatingModel": accumulation.AccumulatingModel,
    "accumulation>AccumulatingOptimizer": accumulation.AccumulatingOptimizer,
    "pipeline>BitsPerToken": metrics.BitsPerToken,
    "pipeline>InverseSquareRoot": optimizer.InverseSquareRoot,
    "pipeline>InFloatx": scaling.InFloatx,
    "pipeline>Scaled": scaling.Scaled,
    "pipeline>StageRates": stage_rates.StageRates,
    "pipeline>WarmupStableDecay": optimizer.WarmupStableDecay,
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_config_may_name_takes_the_same_arguments(name):
    parameters = inspect.signature(get_object(name)).parameters
    assert set(TARGETS[name]) <= set(parameters)


def test_every_name_that_a_record_may_build_is_listed():
    assert set(TARGETS) >= trusted_names.BUILDERS


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_stands_for_the_current_one(name):
    assert former_names.current(name) == FORMER[name]


@pytest.mark.parametrize("name", SAVED_CLASSES)
def test_a_saved_class_is_found_by_its_name(name):
    assert keras.saving.get_registered_object(name) is SAVED_CLASSES[name]
