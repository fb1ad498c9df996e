"""What users import, and former exports, which warn and name their new place."""

from __future__ import annotations

import importlib
import warnings

import pytest

from pipeline import accumulation
from pipeline.accumulation import internals


def test_users_call_these():
    assert accumulation.__all__ == [
        "AccumulatingModel",
        "AccumulatingOptimizer",
        "Evaluation",
        "GradientAccumulator",
        "GradientSums",
        "NoiseScale",
        "Update",
        "accumulate_gradients",
        "choose_xla_lengths",
        "fused_adam",
        "training_flops",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in accumulation.__all__:
            assert getattr(accumulation, name).__name__ == name


@pytest.mark.parametrize("name", ["Objective", "slice_of", "load_cuda_libraries"])
def test_a_former_export_warns_and_names_its_new_place(name):
    place = f"import it from {internals.__name__}"
    with pytest.warns(DeprecationWarning, match=f"{name} is deprecated: {place}"):
        value = getattr(accumulation, name)
    assert value is getattr(internals, name)


def test_no_name_has_two_places():
    assert not set(accumulation.__all__) & set(internals.__all__)
    for name in internals.__all__:
        assert hasattr(internals, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        importlib.import_module("pipeline.accumulation").no_such_name  # noqa: B018
