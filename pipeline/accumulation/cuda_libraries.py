"""Loads the CUDA library that TensorFlow does not find in NVIDIA's wheels."""

import ctypes
import importlib.util
from contextlib import suppress
from pathlib import Path

# In TensorFlow 2.21, the search path of libtensorflow_framework.so.2 lacks the folder
# of this wheel (tensorflow/tensorflow#112973). TensorFlow then registers no GPU, unless
# the library is already loaded.
_PACKAGE = "nvidia.cusolver"
_FILE = "lib/libcusolver.so.11"


def load_cuda_libraries() -> None:
    """Load cuSOLVER if its wheel is installed.

    Call this before TensorFlow lists the GPUs, which is when TensorFlow needs the
    library. If the wheel or one of its dependencies is missing, nothing is loaded, and
    TensorFlow reports the missing library.
    """
    with suppress(ImportError, OSError):
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None:
            return
        for folder in spec.submodule_search_locations or ():
            ctypes.CDLL(str(Path(folder, _FILE)))
