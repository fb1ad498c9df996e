"""The parts of a run.

In: a spec. Out: model, optimizer, objective, metrics and devices, put together by `assembly`, trained by `fitting`.
"""

__all__ = ["added_losses", "assembly", "devices", "fitting"]
