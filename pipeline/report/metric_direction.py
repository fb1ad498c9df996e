"""Whether lower or higher values of a metric are better."""

import re
from collections.abc import Mapping, Sequence

from pipeline.report.job_results import JobResult

# The metrics of Keras, by class.
_LOWER = frozenset(
    [
        "BinaryCrossentropy",
        "CategoricalCrossentropy",
        "CategoricalHinge",
        "FalseNegatives",
        "FalsePositives",
        "Hinge",
        "KLDivergence",
        "LogCoshError",
        "MeanAbsoluteError",
        "MeanAbsolutePercentageError",
        "MeanSquaredError",
        "MeanSquaredLogarithmicError",
        "Poisson",
        "RootMeanSquaredError",
        "SparseCategoricalCrossentropy",
        "SquaredHinge",
    ]
)
_HIGHER = frozenset(
    [
        "AUC",
        "Accuracy",
        "BinaryAccuracy",
        "BinaryIoU",
        "CategoricalAccuracy",
        "ConcordanceCorrelation",
        "CosineSimilarity",
        "F1Score",
        "FBetaScore",
        "IoU",
        "MeanIoU",
        "OneHotIoU",
        "OneHotMeanIoU",
        "PearsonCorrelation",
        "Precision",
        "PrecisionAtRecall",
        "R2Score",
        "Recall",
        "RecallAtPrecision",
        "SensitivityAtSpecificity",
        "SparseCategoricalAccuracy",
        "SparseTopKCategoricalAccuracy",
        "SpecificityAtSensitivity",
        "TopKCategoricalAccuracy",
        "TrueNegatives",
        "TruePositives",
    ]
)
# A metric with one of these words in its name, or in that of its class, is a cost.
_COSTS = frozenset(
    [
        *("loss", "losses", "logloss", "cost", "nll", "deviance", "brier"),
        *("error", "errors", "err", "mse", "rmse", "mae", "mape", "msle", "rmsle"),
        *("wer", "cer", "ter", "eer", "fpr", "fnr", "fid", "false", "miss"),
        *("entropy", "crossentropy", "divergence", "kl", "kld", "kldivergence"),
        *("seconds", "bytes"),
        *("hinge", "poisson", "logcosh", "perplexity", "ppl", "bpc", "bpd", "bits"),
    ]
)
_COST_ENDINGS = ("loss", "error", "entropy")  # also of a longer word
# A word begins after a character that is not a letter, or with a capital letter.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def lower_is_better(metric: str, jobs: Sequence[JobResult]) -> bool:
    """Return whether lower values of a metric are better.

    The first of these that is known decides: `training.keep_best.mode`, if a job keeps
    the best checkpoint by this metric; the metric's class, if it is one of Keras; and
    the words in the names of the metric and of its class.

    Args:
        metric: the metric, with the name of its split if it has one, such as
            `val/accuracy`, or of a further validation set, such as `val/late/accuracy`.
        jobs: the jobs that may have logged it.
    """
    name = _without_set(metric.partition("/")[2] or metric, jobs)
    for job in jobs:
        kept = job.params.get("training.keep_best.metric", "")
        mode = job.params.get("training.keep_best.mode", "").lower()
        kept_name = _without_set(kept.partition("/")[2], jobs)
        if kept_name == name and mode in ("min", "max"):
            return mode == "min"

    classes = _classes(name, jobs)
    for class_name in classes:
        if class_name in _LOWER:
            return True
        if class_name in _HIGHER:
            return False

    for text in (name, *classes):
        for word in _WORD.findall(text):
            word = word.lower()
            if word in _COSTS or word.endswith(_COST_ENDINGS):
                return True
    return False


def lower_by_params(metric: str, params_of_runs: Sequence[Mapping[str, str]]) -> bool:
    """Return whether lower values of a metric are better, as `lower_is_better` does.

    Args:
        metric: the metric.
        params_of_runs: the params of the runs that may have logged it.
    """
    runs = [JobResult("", params=dict(params)) for params in params_of_runs]
    return lower_is_better(metric, runs)


def _without_set(name: str, jobs: Sequence[JobResult]) -> str:
    """Return the name of a metric without that of its validation set, if it has one."""
    first, _, rest = name.partition("/")
    if any(first in job.validation_sets for job in jobs):
        return rest
    return name


def _classes(name: str, jobs: Sequence[JobResult]) -> list[str]:
    """Return the names of the classes or functions that jobs have for a metric.

    A metric of one output is recorded under the output's name and its own, as in
    `training.metrics.age.error`, and logged as `age_error`.
    """
    classes: dict[str, None] = {}
    for job in jobs:
        for key, target in job.params.items():
            group, _, rest = key.removeprefix("training.").partition(".")
            if group not in ("metrics", "weighted_metrics"):
                continue
            recorded = rest.removesuffix("._target_")
            if recorded != rest and name in (recorded, recorded.replace(".", "_")):
                classes[target.rsplit(".", 1)[-1]] = None
    return list(classes)
