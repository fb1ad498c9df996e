"""`hydra/sweeper=search`: Optuna chooses the jobs of a sweep to minimize their loss.

The published `hydra-optuna-sweeper` 1.3.0 requires Optuna 2. This sweeper uses the
ask-and-tell interface of current Optuna versions. The search space is defined in
`hydra.sweeper.params`, in the grammar of `hydra-optuna-sweeper`:

    KEY: interval(1e-4, 1e-1)               a number between the two bounds
    KEY: tag(log, interval(1e-4, 1e-1))     the same, sampled on a logarithmic scale
    KEY: 1,2,4,8    or choice(…), range(…)  one of the listed values
    KEY: value                              the same value for every job
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Transformer
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext

from pipeline.common.errors import ConfigError, say
from pipeline.sweep.parent_run import set_tag

# Significant digits of a sampled number. Four are precise enough for a learning rate,
# and keep the job's name short.
DIGITS = 4
# Maximum number of draws per trial. If none of them gives new values, the batch has
# fewer than `at_once` jobs. If only one of eight sets of values is left and all are
# equally probable, 50 draws miss it about once in 800 times.
DRAWS = 50


@dataclass(frozen=True)
class _Asked:
    """An Optuna trial, and the overrides of its job."""

    trial: Any
    overrides: list[str]


@dataclass(frozen=True, order=True)
class _Result:
    """The last loss of a job (infinity if the job failed) and the job's overrides."""

    loss: float
    overrides: list[str]


class SearchSweeper(Sweeper):
    """Runs jobs in batches; Optuna chooses each batch based on the losses so far.

    Set `hardware.parallel_jobs` to the value of `at_once`, so that a whole batch runs
    at once. With the same `seed`, `--again` chooses the same jobs.

    Args:
        trials: total number of jobs.
        at_once: number of jobs per batch. A batch is smaller if the space has fewer
            different sets of values.
        seed: seed of Optuna's sampler.
        params: the search space in the config. Overrides on the command line add keys
            and replace values.
    """

    def __init__(
        self,
        trials: int,
        at_once: int,
        seed: int,
        params: Mapping[str, Any] | None,
        **unknown: Any,
    ):
        self.trials = trials
        self.at_once = at_once
        self.seed = seed
        self.params = params or {}
        self._unknown = unknown

    def setup(self, *, hydra_context: HydraContext, **context: Any) -> None:
        """Check the keys of the search, then create the parser and the launcher.

        Raises:
            ConfigError: a key is unknown, or a number of jobs is not a positive integer.
        """
        for key in self._unknown:
            keys = ["trials", "at_once", "seed", "params"]
            rule = "must be a key of the search"
            raise ConfigError(f"hydra.sweeper.{key}", rule, key, keys)
        for key in ("trials", "at_once"):
            value = getattr(self, key)
            # `type` and not `isinstance`, since a bool is an int.
            if type(value) is not int or value < 1:
                raise ConfigError(f"hydra.sweeper.{key}", "must be at least 1", value)
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, **context
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run all trials, and record the best trial in the sweep's parent run.

        Args:
            arguments: the overrides on the command line.

        Raises:
            ConfigError: Optuna is not installed, or a parameter or an interval is
                invalid.
        """
        try:
            import optuna
        except ImportError:
            rule = (
                "must be another sweeper unless Optuna is installed: "
                "pip install 'optuna>=4,<6'"
            )
            raise ConfigError("hydra/sweeper", rule, "search") from None

        space = self._space(arguments)
        choices = _choices(space)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        results: list[_Result] = []
        while len(results) < self.trials:
            count = min(self.at_once, self.trials - len(results))
            batch = _ask(study, count, space, choices)
            jobs = [asked.overrides for asked in batch]
            returned = self._launcher.launch(jobs, len(results))
            for asked, job_return in zip(batch, returned, strict=True):
                loss = float(job_return.return_value)
                if not math.isfinite(loss):
                    loss = math.inf
                results.append(_Result(loss, asked.overrides))
                study.tell(asked.trial, loss)
        self._record_best(min(results), space, choices)

    def _space(self, arguments: list[str]) -> dict[str, Override]:
        """Return the overrides that define the search space, by key.

        Overrides on the command line take precedence over `params`.
        """
        texts = [f"{key}={value}" for key, value in self.params.items()]
        overrides = self._parser.parse_overrides([*texts, *arguments])
        return {override.get_key_element(): override for override in overrides}

    def _record_best(
        self,
        best: _Result,
        space: Mapping[str, Override],
        choices: Mapping[str, list[str]],
    ) -> None:
        """Print the best result, and set the tag `sweep.best` of the parent run."""
        chosen = []
        for text, override in zip(best.overrides, space.values(), strict=True):
            if override.is_sweep_override():
                chosen.append(text)
        say(
            f"best of {self.trials} trials: loss {best.loss:.4g} with {' '.join(chosen)}"
        )

        sweep = getattr(self._launcher, "sweep", None)
        if sweep is not None:  # only launchers of this package have a parent run
            record = {
                "loss": best.loss,
                "overrides": chosen,
                "ranges": _ranges(space, choices),
            }
            set_tag(sweep.parent, "sweep.best", json.dumps(record))


def _choices(space: Mapping[str, Override]) -> dict[str, list[str]]:
    """Return the list of alternatives for each swept key that is not an interval.

    Call this once, since Optuna requires the same alternatives in every trial.

    Raises:
        ConfigError: the start of an interval is above its end, or is not positive on a
            logarithmic scale.
    """
    choices: dict[str, list[str]] = {}
    for key, override in space.items():
        swept: Any = override.value()
        if isinstance(swept, IntervalSweep):
            _check_interval(override, swept)
        elif override.is_sweep_override():
            # Iterate once only: `shuffle` would change the order each time.
            values = override.sweep_iterator(transformer=Transformer.encode)
            choices[key] = [str(value) for value in values]
    return choices


def _ranges(
    space: Mapping[str, Override], choices: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """Return the lowest and highest number of each swept key, as they are recorded.

    A key with a choice that is not a number is left out.
    """
    ranges: dict[str, dict[str, Any]] = {}
    for key, override in space.items():
        swept: Any = override.value()
        if isinstance(swept, IntervalSweep):
            bounds = _bounds(swept)
        elif key in choices:
            try:
                bounds = [float(text) for text in choices[key]]
            except ValueError:
                continue
        else:
            continue
        ranges[key.lstrip("+~")] = {
            "low": min(bounds),
            "high": max(bounds),
            "log": "log" in getattr(swept, "tags", ()),
            "listed": key in choices,
        }
    return ranges


def _bounds(interval: Any) -> list[float]:
    return [float(interval.start), float(interval.end)]


def _check_interval(override: Override, interval: Any) -> None:
    rule = ""
    if interval.start > interval.end:
        rule = "must be an interval whose start is not above its end"
    elif "log" in interval.tags and interval.start <= 0:
        rule = "must be an interval that starts above 0 on a logarithmic scale"
    if rule:
        key = override.get_key_element().lstrip("+~")
        raise ConfigError(key, rule, str(override.input_line).partition("=")[2])


def _ask(
    study: Any,
    count: int,
    space: Mapping[str, Override],
    choices: Mapping[str, list[str]],
) -> list[_Asked]:
    """Return a batch of 1 to `count` trials that all have different values.

    Without the losses of the trials in the batch, Optuna may suggest their values
    again. Such a trial is ended as failed, which Optuna's sampler ignores, and another
    one is drawn, up to `DRAWS` times.
    """
    from optuna.trial import TrialState

    batch: list[_Asked] = []
    for _ in range(count):
        for _ in range(DRAWS):
            trial = study.ask()
            overrides = _choose(trial, space, choices)
            if all(overrides != asked.overrides for asked in batch):
                batch.append(_Asked(trial, overrides))
                break
            study.tell(trial, state=TrialState.FAIL)
    return batch


def _choose(
    trial: Any, space: Mapping[str, Override], choices: Mapping[str, list[str]]
) -> list[str]:
    """Return the overrides of a trial, with the values that Optuna suggests."""
    overrides = []
    for key, override in space.items():
        swept: Any = override.value()
        if isinstance(swept, IntervalSweep):
            overrides.append(f"{key}={_suggested_number(trial, key, swept)}")
        elif key in choices:
            overrides.append(f"{key}={trial.suggest_categorical(key, choices[key])}")
        else:
            overrides.append(str(override.input_line))
    return overrides


def _suggested_number(trial: Any, key: str, interval: Any) -> str:
    """Return the number that Optuna suggests in an interval, as a string.

    It is an integer if both bounds are, as in `int(interval(…))`; otherwise it has
    `DIGITS` significant digits.
    """
    log = "log" in interval.tags
    if isinstance(interval.start, int) and isinstance(interval.end, int):
        return str(trial.suggest_int(key, interval.start, interval.end, log=log))
    number = trial.suggest_float(
        key, float(interval.start), float(interval.end), log=log
    )
    return f"{number:.{DIGITS}g}"
