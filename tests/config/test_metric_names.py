"""Names of metrics and params that MLflow accepts."""

import pytest

from pipeline.config.metric_names import is_name


@pytest.mark.parametrize("name", ["loss", "val/loss", "a b", "a.b", ".hidden", "a-b:c"])
def test_a_name_that_mlflow_accepts(name):
    assert is_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "/a", "a//b", "a/.", "a/", "a,b", "a" * 251]
)
def test_a_name_that_mlflow_rejects(name):
    assert not is_name(name)
