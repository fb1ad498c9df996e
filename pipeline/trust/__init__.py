"""The one gate before anything that a tracking store names (code, paths, hosts), and what is built behind it.

In: a config or an address that came out of a store. Out: the same, checked, or a `ConfigError`. `gate` checks configs,
`artifact_locations` checks where a store keeps its artifacts, and `instantiate` builds what a checked `_target_` names.
"""

__all__ = ["artifact_locations", "gate", "instantiate"]
