"""The CUDA library of NVIDIA's wheels that TensorFlow does not find by itself."""

import ctypes
import importlib.util
from contextlib import suppress
from pathlib import Path

# TensorFlow 2.21 opens it from libtensorflow_framework.so.2, whose search path has the
# folders of all other wheels (tensorflow/tensorflow#112973); then it registers no GPU.
# A library that is loaded already is found by its name.
_PACKAGE = "nvidia.cusolver"
_FILE = "lib/libcusolver.so.11"


def load_cuda_libraries() -> None:
    """Open cuSOLVER, where its wheel is installed.

    Call it before TensorFlow lists GPUs, which is when it needs the library. Without
    the wheel, or without one that the wheel needs, TensorFlow reports what it misses.
    """
    with suppress(ImportError, OSError):
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            return
        for folder in spec.submodule_search_locations or ():
            ctypes.CDLL(str(Path(folder, _FILE)))
