"""An unknown key or option is answered with the one that was probably meant."""

from __future__ import annotations

import pytest

from pipeline.common.errors import ConfigError
from pipeline.config.compose import composed, read_command_line
from pipeline.config.resolve import resolve


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("batch_size=64", "accumulation.effective_batch_size"),
        ("training.batch_size=64", "accumulation.effective_batch_size"),
        ("optimizer.lr=0.1", "optimizer.learning_rate"),
        ("precision=float64", "hardware.precision"),
        ("training.epoch=3", "epochs"),
        ("model=mpl", "mlp"),
    ],
)
def test_an_unknown_key_or_option_is_answered_with_a_near_one(override, meant):
    with pytest.raises(ConfigError) as rejected:
        composed([override])
    assert str(rejected.value).endswith(f" Did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.max_epochs=3", "training.epochs"),
        ("+trainer.max_epochs=3", "training.epochs"),
        ("trainer.devices=2", "hardware.replicas"),
        ("trainer.unknown=2", "training"),
        ("trainer=gpu", "training"),
        ("logger=wandb", "tracking.uri"),
        ("logger.wandb.project=mine", "tracking.uri"),
        ("ckpt_path=last.ckpt", "start.run"),
        ("data.batch_size=8", "accumulation.effective_batch_size"),
        ("lr=0.1", "optimizer.learning_rate"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_ours_and_the_page(override, meant):
    with pytest.raises(ConfigError) as rejected:
        resolve(composed([override]), [override], {})
    assert "docs/coming_from.md has the keys for those of other tools. " in str(
        rejected.value
    )
    assert str(rejected.value).endswith(f" Did you mean {meant!r}?")


def test_a_name_that_is_like_no_key_gets_no_suggestion():
    with pytest.raises(ConfigError) as rejected:
        composed(["zebra=1"])
    assert "Did you mean" not in str(rejected.value)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--epochs=5", "training.epochs=5"),
        ("--batch-size=64", "accumulation.effective_batch_size=64"),
        ("--lr", "optimizer.learning_rate=VALUE"),
    ],
)
def test_an_option_of_other_tools_is_answered_with_an_override(option, meant):
    with pytest.raises(ConfigError) as rejected:
        read_command_line([option])
    assert str(rejected.value).endswith(f" Did you mean {meant!r}?")


def test_the_word_received_is_not_suggested():
    """It may be a key at another place."""
    error = ConfigError("trainer", "must be a key", "trainer", ["model", "trainer"])
    assert "Did you mean" not in str(error)
