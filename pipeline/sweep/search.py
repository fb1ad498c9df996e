"""`hydra/sweeper=search`: Optuna chooses the jobs of a sweep to minimize their loss.

The published `hydra-optuna-sweeper` 1.3.0 is pinned to Optuna 2; this one uses the
ask-and-tell interface of current Optuna. The search space has the same grammar, under
`hydra.sweeper.params`:

    KEY: interval(1e-4, 1e-1)               a number between the two
    KEY: tag(log, interval(1e-4, 1e-1))     the same on a log scale
    KEY: 1,2,4,8    or choice(…), range(…)  one of these
    KEY: value                              the same for every job
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

# Digits of a sampled number: enough for a learning rate, and few enough for a job's
# name.
DIGITS = 4


@dataclass(frozen=True, order=True)
class _Result:
    """The last loss of a job, infinite if it failed, and its overrides."""

    loss: float
    overrides: list[str]


class SearchSweeper(Sweeper):
    """Runs jobs in batches; Optuna chooses each batch from the losses before it.

    Set `hardware.parallel_jobs` to `at_once`, too. With the same `seed`, `--again`
    chooses the same jobs.

    Args:
        trials: number of jobs in all.
        at_once: number of jobs in a batch.
        seed: seed of Optuna's sampler.
        params: the search space of the config; that of the command line is added.
    """

    def __init__(
        self, trials: int, at_once: int, seed: int, params: Mapping[str, Any] | None
    ):
        self.trials = trials
        self.at_once = at_once
        self.seed = seed
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, **context: Any) -> None:
        """Prepare the parser of overrides and the launcher."""
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, **context
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run all trials, and record the best one in the sweep's parent run."""
        try:
            import optuna
        except ImportError:
            rule = (
                "must be one that is installed; this one needs Optuna: "
                "pip install 'accumulation-pipeline[search]'"
            )
            raise ConfigError("hydra/sweeper", rule, "search") from None
        for key in ("trials", "at_once"):
            value = getattr(self, key)
            if value < 1:
                raise ConfigError(f"hydra.sweeper.{key}", "must be at least 1", value)

        space = self._space(arguments)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        results: list[_Result] = []
        while len(results) < self.trials:
            count = min(self.at_once, self.trials - len(results))
            trials = [study.ask() for _ in range(count)]
            jobs = [_choose(trial, space) for trial in trials]
            returned = self._launcher.launch(jobs, len(results))
            for trial, job, job_return in zip(trials, jobs, returned, strict=True):
                loss = float(job_return.return_value)
                if not math.isfinite(loss):
                    loss = math.inf
                results.append(_Result(loss, job))
                study.tell(trial, loss)
        self._record_best(min(results), space)

    def _space(self, arguments: list[str]) -> dict[str, Override]:
        """Return the overrides of a job by key; those of the command line win."""
        texts = [f"{key}={value}" for key, value in self.params.items()]
        overrides = self._parser.parse_overrides([*texts, *arguments])
        return {override.get_key_element(): override for override in overrides}

    def _record_best(self, best: _Result, space: Mapping[str, Override]) -> None:
        chosen = []
        for text, override in zip(best.overrides, space.values(), strict=True):
            if override.is_sweep_override():
                chosen.append(text)
        say(f"best of {self.trials}: loss {best.loss:.4g} with {' '.join(chosen)}")

        parent = getattr(self._launcher, "sweep", None)
        if parent is not None:  # the launcher is one of this package
            record = {"loss": best.loss, "overrides": chosen}
            parent.tag("sweep.best", json.dumps(record))


def _choose(trial: Any, space: Mapping[str, Override]) -> list[str]:
    return [_choose_value(trial, override) for override in space.values()]


def _choose_value(trial: Any, override: Override) -> str:
    """Return an override with the value that Optuna suggests for the trial."""
    key = override.get_key_element()
    value = override.value()
    if isinstance(value, IntervalSweep):
        number = trial.suggest_float(
            key,
            float(value.start),  # type: ignore
            float(value.end),  # type: ignore
            log="log" in value.tags,
        )
        return f"{key}={number:.{DIGITS}g}"
    if override.is_sweep_override():
        choices = list(override.sweep_iterator(transformer=Transformer.encode))
        return f"{key}={trial.suggest_categorical(key, choices)}"
    return str(override.input_line)
