"""Several workers train one run; the training itself is TensorFlow's.

In: the run's config and its workers' addresses. Out: workers that have met, agree on the config, and notice who is
gone.
"""

__all__ = ["chief", "worker"]
