"""The workloads in PyTorch: `python -m benchmarks.pytorch`.

The interpreter of `.venv-peers` runs them. This package imports neither TensorFlow nor
Keras nor `pipeline`.
"""
