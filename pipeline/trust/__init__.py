"""The gate for everything that a tracking store names, and for what it may build.

A store may name code, paths and hosts. In: a config or an address that came out of a
store. Out: the same, checked, or a `ConfigError`. `gate` checks configs against the
lists in `trusted_names`, `artifact_locations` checks where a store keeps its artifacts,
and `instantiate` builds what a checked `_target_` names.
"""

__all__ = ["artifact_locations", "gate", "instantiate"]
