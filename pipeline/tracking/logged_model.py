"""The trained model in MLflow.

It is saved with the user's own modules, then loaded back and compared.
"""

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import tensorflow as tf
from mlflow.models import ModelSignature, infer_signature
from mlflow.types import TensorSpec

from pipeline.accumulation.internals import by_name, layers_of, slice_specs
from pipeline.common import imports, nvidia

# Run in another folder and without the user's path, as by someone who loads the model
# from the store.
_PREDICT_ELSEWHERE = """
import pickle, sys
import numpy as np
from pipeline.tracking import logged_model
model, example = pickle.load(sys.stdin.buffer)
np.savez("predicted.npz", *logged_model.predicted(model, example))
"""
# A loaded model may differ by a thousandth of its largest output. In low precision it
# may differ by 16 roundings, since a GPU has several algorithms.
TOLERANCE = 1e-3
ROUNDINGS = 16
REQUIREMENTS = ("keras", "tensorflow", "mlflow", "numpy")


def save(folder: Path, model: keras.Model, example: Any, code: Sequence[str]) -> None:
    """Save the model with its signature.

    `mlflow.pyfunc.load_model` of the saved model predicts what the model predicts. A
    model without a config, such as a subclass without `get_config`, is saved as a
    SavedModel, which only predicts.

    Args:
        folder: must not exist yet; it appears at once, with all files.
        model: the trained model; it is not compiled anymore afterwards.
        example: a few inputs, as NumPy arrays with the examples on axis 0.
        code: files and folders that are stored with the model, and imported when it is
            loaded.

    Raises:
        ValueError: the model cannot be saved, or it predicts something else once it is
            loaded.
    """
    # MLflow warns about what is checked below.
    logging.getLogger("mlflow.models.model").setLevel(logging.ERROR)
    # MLflow calls the model, which would draw progress bars.
    keras.config.disable_interactive_logging()
    # The optimizer is twice the size of the model, and may need this package when the
    # model is loaded.
    model.compiled = False
    model.optimizer = None

    outputs = tf.nest.map_structure(np.asarray, model(example, training=False))
    predictions = tf.nest.flatten(outputs)
    if isinstance(outputs, list | tuple):  # MLflow has no signature for these
        outputs = by_name(model, outputs)

    own_classes = _own_classes(model)
    served = model
    try:
        keras.saving.serialize_keras_object(model)
    except Exception as error:  # from the code of a class whose config is incomplete
        if isinstance(example, dict):  # MLflow calls a SavedModel with arrays only
            raise ValueError(" ".join(str(error).split())) from error
        served = _saved_model(model, example)
        own_classes = set()

    # A run that is confined loads models from a temporary folder only.
    with tempfile.TemporaryDirectory() as temporary:
        path = str(Path(temporary, "model"))
        # `Model.log` would also load and call the model, and read all of the run.
        mlflow.tensorflow.save_model(
            served,
            path,
            signature=_signature(model, example, outputs),
            input_example=example,
            code_paths=list(code) or None,
            custom_objects={cls.__name__: cls for cls in own_classes} or None,
            # MLflow would infer them by loading the model in another process.
            pip_requirements=[_pinned(name) for name in REQUIREMENTS],
        )
        if own_classes:
            reloaded = _predicted_elsewhere(path, example)
        else:
            # With deterministic operations, TensorFlow prints a false error.
            with imports.without_chatter():
                reloaded = predicted(path, example)
        _check_equal(model, reloaded, predictions)
        _copy_at_once(path, folder)


def _check_equal(
    model: keras.Model, reloaded: Sequence[Any], predictions: Sequence[Any]
) -> None:
    """Raise a ValueError if the outputs differ by more than rounding."""
    dtypes = [layer.compute_dtype for layer in (model, *layers_of(model))]
    tolerance = max(TOLERANCE, ROUNDINGS * nvidia.unit_roundoff(dtypes))
    for loaded, trained in zip(reloaded, predictions, strict=True):
        largest = float(np.abs(trained).max())
        absolute = tolerance * largest
        if not np.allclose(loaded, trained, rtol=tolerance, atol=absolute):
            raise ValueError("it predicts something else once it is loaded")


def _copy_at_once(path: str, folder: Path) -> None:
    """Copy a folder to one that appears with all its files.

    It is copied and not renamed, as the run directory may be on another file system.
    """
    partial = folder.with_name(f".{folder.name}")
    try:
        shutil.copytree(path, partial)
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _pinned(name: str) -> str:
    return f"{name}=={metadata.version(name)}"


def _saved_model(model: keras.Model, example: Any) -> tf.Module:
    """Return a module that `tf.saved_model.save` takes.

    It predicts for any number of examples.
    """
    served = tf.Module()
    served.model = model
    served.state = [variable.value for variable in model.variables]
    served.__call__ = tf.function(
        lambda x: model(x, training=False),
        input_signature=[slice_specs(example)],
        autograph=False,
    )
    return served


def _signature(model: keras.Model, example: Any, outputs: Any) -> ModelSignature:
    """Return the signature of the model, with -1 for each size that it leaves open."""
    signature = infer_signature(example, outputs)
    _open_sizes(signature.inputs, getattr(model, "inputs", None))
    _open_sizes(signature.outputs, getattr(model, "outputs", None))
    return signature


def _open_sizes(schema: Any, tensors: Any) -> None:
    """Give a schema of one tensor the shape of the model's symbolic tensor.

    Several tensors could be matched by name only.
    """
    symbolic = tf.nest.flatten(tensors or [])
    if len(symbolic) != 1 or len(schema.inputs) != 1:
        return
    spec = schema.inputs[0]
    # A `Sequential` without an `Input` keeps the number of examples that built it.
    shape = [-1]
    for size in symbolic[0].shape[1:]:
        if size is None:
            size = -1
        shape.append(size)
    schema.inputs[0] = TensorSpec(spec.type, tuple(shape), spec.name)


def warm_up() -> None:
    """Let MLflow do what it does once in a process.

    It imports itself, and lists all installed packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        mlflow.pyfunc.save_model(
            Path(folder, "empty"),
            loader_module="mlflow.tensorflow",
            pip_requirements=[_pinned("mlflow")],
        )


def own_code(model: keras.Model, targets: Iterable[str]) -> list[str]:
    """Return the files and packages of the user that a model needs to be loaded.

    They lie in the working directory.

    Args:
        model: the model, whose layers may be the user's.
        targets: the dotted names that the config builds.
    """
    modules = {cls.__module__ for cls in _own_classes(model)}
    for target in targets:
        for name in sys.modules:
            if target.startswith(f"{name}."):
                modules.add(name)

    paths = set()
    for name in modules:
        module = sys.modules.get(name.partition(".")[0])
        file = Path(getattr(module, "__file__", None) or "/")
        if file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts:
            is_package = file.name == "__init__.py"
            path = file.parent if is_package else file
            paths.add(str(path))
    return sorted(paths)


def _own_classes(model: keras.Model) -> set[type]:
    classes = {type(layer) for layer in (model, *layers_of(model))}
    return {cls for cls in classes if not cls.__module__.startswith("keras.")}


def predicted(model_uri: str, example: Any) -> list[Any]:
    """Return a logged model's predictions for a few inputs, one array per output."""
    loaded = mlflow.pyfunc.load_model(model_uri)
    arrays = list(example.values()) if isinstance(example, dict) else [example]
    predict = loaded.predict
    if any(array.dtype == object for array in arrays):
        # Keras' `predict`, which MLflow calls, takes no strings; the model itself does.
        predict = loaded.get_raw_model()
    return tf.nest.flatten(predict(example))


def _predicted_elsewhere(path: str, example: Any) -> list[Any]:
    """Return what the logged model predicts in a new process in another folder.

    Raises:
        ValueError: it cannot be loaded there.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(Path(imports.__file__).parents[2])
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    # Bytecode would be logged beside the code.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-P", "-c", _PREDICT_ELSEWHERE],
            input=pickle.dumps((path, example)),
            cwd=folder,
            env=environment,
            capture_output=True,
        )
        if process.returncode:
            lines = process.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"status {process.returncode}"
            reason = reason.removeprefix("Exception encountered: ")
            raise ValueError(f"it cannot be loaded elsewhere: {reason[:300]}")
        return list(np.load(Path(folder) / "predicted.npz").values())
