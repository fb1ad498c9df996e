"""A config: its schema, how it is composed, checked, and its sizes.

In: the command line and YAML files. Out: a checked config and the sizes that follow from it. Imports neither
TensorFlow nor MLflow.
"""

__all__ = [
    "cluster",
    "compose",
    "former_names",
    "hydra_errors",
    "lr_scaling",
    "metric_names",
    "objective_nodes",
    "schema",
    "sizes",
    "validate",
]
