"""Checks configs and addresses from a tracking store, which is not trusted.

A store may name code, paths and hosts; a name that is not accepted raises a
`ConfigError`. `gate` checks configs against the lists in `trusted_names`,
`artifact_locations` checks where a store keeps its artifacts, and `instantiate` builds
the object that a checked `_target_` names.
"""

__all__ = ["artifact_locations", "gate", "instantiate", "trusted_names"]
