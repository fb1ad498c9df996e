"""`hydra/sweeper=search`: Optuna chooses the jobs of a sweep to minimize their last loss.

The published `hydra-optuna-sweeper` 1.3.0 is pinned to Optuna 2; this one uses ask and tell of today's Optuna. The
search space has the same grammar, under `hydra.sweeper.params`:

    KEY: interval(1e-4, 1e-1)               a number between the two; tag(log, interval(…)) for a log scale
    KEY: 1,2,4,8    or choice(…), range(…)  one of these
    KEY: value                              the same for every job
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Transformer
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext

from pipeline.common.errors import ConfigError, say

DIGITS = 4  # of a sampled number: enough for a learning rate, and short enough for a job's name


class SearchSweeper(Sweeper):
    """Runs `trials` jobs in batches of `at_once`; Optuna chooses each batch from the losses of those before it.

    Set `hardware.parallel_jobs` to `at_once`, too. With the same `seed`, `--again` chooses the same jobs.
    """

    def __init__(
        self, trials: int, at_once: int, seed: int, params: Mapping[str, Any] | None
    ):
        self.trials, self.at_once, self.seed, self.params = (
            trials,
            at_once,
            seed,
            params or {},
        )

    def setup(self, *, hydra_context: HydraContext, **given: Any) -> None:
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, **given
        )

    def sweep(self, arguments: list[str]) -> None:
        try:
            import optuna
        except ImportError:
            rule = "must be one that is installed; this one needs Optuna: pip install 'accumulation-pipeline[search]'"
            raise ConfigError("hydra/sweeper", rule, "search") from None
        for key in ("trials", "at_once"):
            if getattr(self, key) < 1:
                raise ConfigError(
                    f"hydra.sweeper.{key}", "must be at least 1", getattr(self, key)
                )
        given = self._parser.parse_overrides(
            [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        )
        space = {
            override.get_key_element(): override for override in given
        }  # the command line's come last
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        results: list[tuple[float, list[str]]] = []
        while len(results) < self.trials:
            trials = [
                study.ask()
                for _ in range(min(self.at_once, self.trials - len(results)))
            ]
            jobs = [
                [_choose(trial, override) for override in space.values()]
                for trial in trials
            ]
            for trial, job, returned in zip(
                trials, jobs, self._launcher.launch(jobs, len(results)), strict=True
            ):
                loss = float(returned.return_value)
                results.append(
                    (loss if math.isfinite(loss) else math.inf, job)
                )  # infinite if the job failed
                study.tell(trial, results[-1][0])
        loss, overrides = min(results)
        best = [
            text
            for text, of in zip(overrides, space.values(), strict=True)
            if of.is_sweep_override()
        ]
        say(f"best of {self.trials}: loss {loss:.4g} with {' '.join(best)}")
        if (
            parent := getattr(self._launcher, "sweep", None)
        ) is not None:  # a launcher of this package
            parent.tag("sweep.best", json.dumps({"loss": loss, "overrides": best}))


def _choose(trial: Any, override: Override) -> str:
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        number = trial.suggest_float(
            key,
            float(value.start),  # type: ignore
            float(value.end),  # type: ignore
            log="log" in value.tags,
        )
        return f"{key}={number:.{DIGITS}g}"
    if override.is_sweep_override():
        return f"{key}={trial.suggest_categorical(key, list(override.sweep_iterator(transformer=Transformer.encode)))}"
    return str(override.input_line)
