"""Several workers that train one run: they meet, agree, and notice which one is lost.

In: the spec of a run, with the addresses of its workers. Out: every worker has the
chief's spec. The training itself is TensorFlow's.
"""

__all__ = ["chief", "worker"]
