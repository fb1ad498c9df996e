"""The CUDA library of NVIDIA's wheels that TensorFlow does not find by itself."""

import ctypes
import importlib.util
from contextlib import suppress
from pathlib import Path

# TensorFlow 2.21 opens it from libtensorflow_framework.so.2, whose search path has the folders of all other wheels
# (tensorflow/tensorflow#112973); then it registers no GPU. What is loaded already is found by its name.
_PACKAGE, _FILE = "nvidia.cusolver", "lib/libcusolver.so.11"


def load_cuda_libraries() -> None:
    """Open cuSOLVER, where its wheel is installed, before TensorFlow asks for it, which is when GPUs are listed."""
    with suppress(
        ImportError, OSError
    ):  # without the wheel, or without one that it needs: TensorFlow says so
        found = importlib.util.find_spec(_PACKAGE)
        for folder in found.submodule_search_locations or () if found else ():
            ctypes.CDLL(str(Path(folder, _FILE)))
