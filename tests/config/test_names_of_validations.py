"""The names and the form of `dataset.validations`."""

from __future__ import annotations

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config.validation_sets import ValidationSet, check_results, parse

LATE = ValidationSet("late", "test[50%:]", None, None)


def test_an_entry_is_a_split_or_a_node():
    node = {"_target_": "photos.load", "split": "its own argument"}
    entries = {
        "late": "test[50%:]",
        "clean": {"split": "test", "every": "epoch/2"},
        "photos": {**node, "every": 100},
    }
    assert parse(entries) == [
        LATE,
        ValidationSet("clean", "test", None, "epoch/2"),
        ValidationSet("photos", None, node, 100),
    ]
    assert parse(None) == []


@pytest.mark.parametrize(
    ("names", "results", "rule"),
    [
        (["late"], ["loss", "accuracy", "top/5"], ""),
        (["top"], ["loss", "top/5"], "dataset.validations.top must have another name"),
        (["auc"], ["loss", "auc"], "dataset.validations.auc must have another name"),
        # The loss of the output `late`.
        (
            ["late"],
            ["loss", "late_loss"],
            "dataset.validations.late must have another name: in the logs of "
            "callbacks, val_late_loss would be both val/late/loss and val/late_loss.",
        ),
        (
            ["late", "late_top"],
            ["loss", "top_loss"],
            "dataset.validations.late_top must have another name: in the logs of "
            "callbacks, val_late_top_loss would be both val/late_top/loss and "
            "val/late/top_loss.",
        ),
    ],
)
def test_no_two_results_have_one_name(names, results, rule):
    sets = [ValidationSet(name, "test", None, None) for name in names]
    if not rule:
        check_results(sets, results)
        return
    with pytest.raises(ConfigError) as raised:
        check_results(sets, results)
    assert str(raised.value).startswith(rule)
