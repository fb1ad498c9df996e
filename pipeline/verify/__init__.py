"""Whether an update in pieces is the update of the whole batch: `pipeline verify`, and the engine for any model.

In: a config, or an `Update` and batches. Out: how far the two are apart, beside what rounding explains.
"""

__all__ = ["command"]
