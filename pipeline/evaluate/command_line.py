"""The arguments that `pipeline evaluate` and `pipeline predict` share."""

from argparse import Namespace
from typing import TYPE_CHECKING

from pipeline.common.errors import ConfigError, Parser
from pipeline.config import compose, key_kinds
from pipeline.config.overrides import keys_set
from pipeline.rerun.request import Request, add_config_options

if TYPE_CHECKING:  # importing this takes seconds
    from pipeline.components.assembly import Parts

SPLITS = ("validation", "test", "train")
# Keys that overrides may set: the data, and where and how it is evaluated.
_ALLOWED = (
    "accumulation.micro_batch_size",
    "accumulation.micro_batch_tokens",
    "dataset",
    "hardware",
    "tracking.patience",
    "tracking.uri",
    "trust.allow",
)
_ONE_REPLICA = ("hardware.replicas", "hardware.workers")


def add_arguments(parser: Parser) -> None:
    """Add the arguments that both verbs have."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run directory, the ID of a run, or models:/NAME@ALIAS; RUN@UPDATE or "
        "RUN@best selects a checkpoint, by default the last one",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PREFIX",
        help="if the record is from a store, trust what begins with this dotted name, "
        "or artifacts at this location",
    )
    add_config_options(parser)
    # Without a default, argparse would call them required if RUN is missing.
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help=f"overrides of {', '.join(_ALLOWED)}, except {' and '.join(_ONE_REPLICA)}",
    )


def request_of(options: Namespace) -> Request:
    """Return the request for the record that the parsed options name.

    Raises:
        ConfigError: an override sets a key that does not affect an evaluation.
    """
    _check_keys(options.overrides)
    return Request(
        run_id=options.run,
        dry=False,
        sweep=False,
        allow=options.allow,
        config_dir=options.config_dir or compose.own_folder(),
        config_name=options.config_name,
        overrides=options.overrides,
    )


def changes_data(request: Request) -> bool:
    """Return whether an override may select other data than those of the run."""
    for key in keys_of_data(request):
        # Further validation sets change no split.
        is_set = f"{key}.".startswith("dataset.validations.")
        if not is_set and not key_kinds.facts_of(key).same_data:
            return True
    return False


def keys_of_data(request: Request) -> list[str]:
    """Return the keys of `dataset` that overrides set."""
    return [key for key in request.values if f"{key}.".startswith("dataset.")]


def split_keys(parts: "Parts") -> dict[str, str]:
    """Return the keys of all splits in `Data.splits`, by their names for `--split`.

    A set of `dataset.validations` is named without the prefix `validations.`.
    """
    keys: dict[str, str] = {}
    for key in parts.data.splits:
        keys.setdefault(key.removeprefix("validations."), key)
    return keys


def split_key(parts: "Parts", name: str) -> str:
    """Return the key in `Data.splits` of the split that `--split` names.

    Raises:
        ConfigError: the dataset has no such split, or the split repeats endlessly.
    """
    keys = split_keys(parts)
    if name not in keys:
        raise ConfigError("--split", "must be a split of the dataset", name, list(keys))
    loader = parts.data.loaders.get(keys[name])
    if loader is not None and loader.endless:
        raise ConfigError("--split", "must be a split that does not repeat", name)
    return keys[name]


def _check_keys(overrides: list[str]) -> None:
    for key in sorted(keys_set(overrides)):
        if key in _ONE_REPLICA:
            rule = "must be left out: an evaluation uses one replica"
            raise ConfigError(key, rule)
        names = [f"{name}." for name in _ALLOWED]
        if not f"{key}.".startswith(tuple(names)):
            rule = "must be left out: the run decides it"
            raise ConfigError(key, rule, choices=_ALLOWED)
