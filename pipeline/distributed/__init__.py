"""Coordinates several workers of one run: connects them, and detects lost workers.

Input: the spec of a run, with the addresses of its workers. Output: every worker has
the chief's spec. TensorFlow does the distributed training itself.
"""

__all__ = ["chief", "worker"]
