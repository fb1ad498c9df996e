"""What a run is made of.

In: a checked config. Out: model, optimizer, objective, metrics and devices, put together by `assembly`.
"""

__all__ = ["assembly", "devices"]
