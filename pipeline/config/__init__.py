"""The config of a run: its schema, its composition, its checks, and its `RunSpec`.

The input is the command line and YAML files; the result is a `RunSpec`. This package
imports neither TensorFlow nor MLflow, which would take seconds.
"""

__all__ = [
    "cluster",
    "compose",
    "former_names",
    "hydra_errors",
    "hydra_internals",
    "installed_configs",
    "key_guide",
    "key_kinds",
    "metric_names",
    "model_uris",
    "objective_nodes",
    "overrides",
    "plain",
    "plan",
    "resolve",
    "schema",
    "session",
    "sizes",
    "stages",
    "suggestions",
    "text_keys",
    "trust_entries",
    "validate",
    "validation_sets",
]
