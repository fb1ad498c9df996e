"""Whether an update in micro-batches equals that of one large batch, for any config.

In: a config, or an `Update` and batches. Out: how far the two are apart, and how much
of it rounding explains.
"""

__all__ = ["command"]
