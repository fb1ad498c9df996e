"""The same workloads in PyTorch, run by the interpreter of `.venv-peers`: `python -m benchmarks.pytorch`.

Nothing here imports TensorFlow, Keras or the package.
"""
