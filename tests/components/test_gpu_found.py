"""TensorFlow finds the CUDA libraries of NVIDIA's wheels.

They lie as the wheels place them. No GPU is needed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from pipeline.accumulation import cuda_libraries
from pipeline.common import nvidia
from pipeline.common.errors import ConfigError

# Names in site-packages/nvidia/…/lib of what TensorFlow 2.21 opens.
WHEELS = {
    "cuda_runtime": ["libcudart.so.12"],
    "cublas": ["libcublas.so.12", "libcublasLt.so.12"],
    "cufft": ["libcufft.so.11"],
    "cusolver": ["libcusolver.so.11"],
    "cusparse": ["libcusparse.so.12"],
    "cudnn": ["libcudnn.so.9"],
}
# TensorFlow's own function, called by its symbol: listing the devices would ask the
# driver first, which is not there.
ASKS = """
import ctypes, sys
{before}
library = ctypes.CDLL(sys.argv[1])
opens = library._ZN3tsl8internal9DsoLoader26MaybeTryDlopenGPULibrariesEv
opens.argtypes = [ctypes.c_void_p]
opens(ctypes.create_string_buffer(64))
"""
# By itself: its package imports the TensorFlow that is installed, which has no such
# neighbors.
LOADS = f"""
import runpy
runpy.run_path({cuda_libraries.__file__!r})["load_cuda_libraries"]()
"""


@pytest.fixture
def site(tmp_path):
    """A folder like site-packages: TensorFlow's files, and libraries of NVIDIA's names.

    The libraries are empty.
    """
    if shutil.which("gcc") is None:
        pytest.skip("gcc makes the libraries, and is not installed")
    (tmp_path / "tensorflow").mkdir()
    for file in Path(tf.__file__).parent.glob("libtensorflow_*.so.2"):
        (tmp_path / "tensorflow" / file.name).symlink_to(file)
    for package, names in WHEELS.items():
        folder = tmp_path / "nvidia" / package / "lib"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        for name in names:
            command = [
                "gcc",
                "-shared",
                "-x",
                "c",
                os.devnull,
                f"-Wl,-soname,{name}",
                "-o",
                str(folder / name),
            ]
            subprocess.run(command, check=True)
    return tmp_path


def not_opened(site: Path, before: str = "") -> list[str]:
    library = str(site / "tensorflow" / "libtensorflow_framework.so.2")
    shown = {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "dso_loader=1",
        "PYTHONPATH": f"{site}:{os.getcwd()}",
    }
    command = [sys.executable, "-c", ASKS.format(before=before), library]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **shown}, check=True
    )
    names = []
    for line in done.stderr.splitlines():
        if "Could not load dynamic library" in line:
            names.append(line.split("'")[1])
    return names


def test_all_of_them_are_found(site):
    assert not_opened(site, LOADS) == []


def test_without_help_one_is_not(site):
    """If this fails, TensorFlow has mended its search: `cuda_libraries.py` can go."""
    assert not_opened(site) == ["libcusolver.so.11"]


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A driver that lists two GPUs."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: A\necho GPU 1: B\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_that_tensorflow_does_not_use_is_no_reason_to_train_on_the_cpu(
    site, driver, monkeypatch
):
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(
        nvidia, "gpus_of_tensorflow", lambda: (0, ["libcusolver.so.11"])
    )
    message = r"uses none of 2 GPUs, and could not open libcusolver\.so\.11"
    with pytest.raises(ConfigError, match=message):
        nvidia.why_no_gpu()
    with pytest.raises(ConfigError, match=message):
        raise nvidia.no_gpu_error()


def test_a_process_that_lost_the_gpu_does_not_go_on_on_the_cpu(driver, monkeypatch):
    """Such as a process that tries a micro-batch size for a run on the GPU."""
    monkeypatch.setattr(nvidia, "gpus_of_tensorflow", lambda: (2, []))
    why = "TensorFlow lists 2 GPUs in a new process and none in this one"
    with pytest.raises(ConfigError, match=rf"can use none \({why}"):
        nvidia.why_no_gpu()


@pytest.mark.slow
def test_tensorflow_is_asked_in_a_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    listed, missing = nvidia.gpus_of_tensorflow.__wrapped__()
    assert listed == 0
    # The driver's library is looked for first.
    assert set(missing) <= {"libcuda.so.1"}


def test_what_is_not_installed_or_hidden_is_said(driver, monkeypatch):
    monkeypatch.setattr(nvidia, "gpus_of_tensorflow", lambda: (0, ["libcudnn.so.9"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "are not installed: see requirements-gpu.lock" in nvidia.why_no_gpu()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert nvidia.why_no_gpu() == "CUDA_VISIBLE_DEVICES hides the GPUs"
    with pytest.raises(
        ConfigError, match=r"can use none \(CUDA_VISIBLE_DEVICES hides the GPUs\)"
    ):
        raise nvidia.no_gpu_error()
