"""Saves a trained model in MLflow's format, together with the user's own modules.

The saved model is loaded again and its predictions are compared with the original's.
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
from pipeline.common import imports, nvidia, own_code

# Program that loads the model and predicts with it. It runs in another folder and
# without the user's `sys.path`, as if somebody else had downloaded the model.
_PREDICT_ELSEWHERE = """
import pickle, sys
import numpy as np
from pipeline.tracking import logged_model
model, example = pickle.load(sys.stdin.buffer)
np.savez("predicted.npz", *logged_model.predicted(model, example))
"""
# A difference may be this fraction of the output plus this fraction of the largest
# output: 1e-3 or 16 unit roundoffs of the lowest precision, whichever is larger. A GPU
# may choose different algorithms.
TOLERANCE = 1e-3
ROUNDINGS = 16
REQUIREMENTS = ("keras", "tensorflow", "mlflow", "numpy")


def save(folder: Path, model: keras.Model, example: Any, code: Sequence[str]) -> None:
    """Save the model with its signature.

    This changes the process for good: the model loses its optimizer, MLflow's warnings
    about models are silenced, and Keras draws no progress bars.

    The result of `mlflow.pyfunc.load_model` makes the same predictions as the model, up
    to `TOLERANCE`, or `ROUNDINGS` unit roundoffs of the lowest precision if that is
    larger. A model that Keras cannot serialize, such as a subclass without
    `get_config`, is saved as a SavedModel, which can only predict.

    Args:
        folder: the folder to create. It appears atomically, with all its files.
        model: the trained model. Its optimizer is removed.
        example: a few inputs, as NumPy arrays with the examples on axis 0.
        code: files and folders to store with the model; they are importable when the
            model is loaded.

    Raises:
        ValueError: the model cannot be saved or loaded, or the loaded model makes
            different predictions.
    """
    # Silence MLflow's warnings about problems that are checked below.
    logging.getLogger("mlflow.models.model").setLevel(logging.ERROR)
    # Without this, Keras would draw progress bars when MLflow calls the model.
    keras.config.disable_interactive_logging()
    # Remove the optimizer: it may be twice the size of the model, and loading it may
    # require this package.
    model.compiled = False
    model.optimizer = None

    outputs = tf.nest.map_structure(np.asarray, model(example, training=False))
    predictions = tf.nest.flatten(outputs)
    if isinstance(outputs, list | tuple):  # MLflow has no signatures for sequences
        outputs = by_name(model, outputs)

    own_classes = _own_classes(model)
    served = model
    try:
        keras.saving.serialize_keras_object(model)
    except Exception as error:  # `get_config` is user code and may raise anything
        if isinstance(example, dict):  # MLflow calls a SavedModel with arrays only
            raise ValueError(" ".join(str(error).split())) from error
        served = _saved_model(model, example)
        own_classes = set()

    # Save the model to a temporary folder first: a run with confined artifact locations
    # may load models only from there.
    with tempfile.TemporaryDirectory() as temporary:
        path = str(Path(temporary, "model"))
        # Do not use `Model.log`, which would also load and call the model, and read the
        # run.
        mlflow.tensorflow.save_model(
            served,
            path,
            signature=_signature(model, example, outputs),
            input_example=example,
            code_paths=list(code) or None,
            custom_objects={cls.__name__: cls for cls in own_classes} or None,
            # List the requirements: MLflow would load the model in another process to
            # infer them.
            pip_requirements=[_pinned(name) for name in REQUIREMENTS],
        )
        if own_classes:
            reloaded = _predicted_elsewhere(path, example)
        else:
            # Suppress an unfounded error that TensorFlow prints with deterministic
            # operations.
            with imports.without_chatter():
                reloaded = predicted(path, example)
        _check_equal(model, reloaded, predictions)
        _copy_at_once(path, folder)


def _check_equal(
    model: keras.Model, reloaded: Sequence[Any], predictions: Sequence[Any]
) -> None:
    """Raise a ValueError if the outputs differ by more than the tolerance."""
    dtypes = [layer.compute_dtype for layer in (model, *layers_of(model))]
    tolerance = max(TOLERANCE, ROUNDINGS * nvidia.unit_roundoff(dtypes))
    for loaded, trained in zip(reloaded, predictions, strict=True):
        largest = float(np.abs(trained).max())
        absolute = tolerance * largest
        if not np.allclose(loaded, trained, rtol=tolerance, atol=absolute):
            raise ValueError("it predicts differently once it is loaded")


def _copy_at_once(path: str, folder: Path) -> None:
    """Copy a folder so that the copy appears atomically, with all its files.

    The original is not renamed, since it may be on another file system.
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
    """Wrap a model for `tf.saved_model.save`, to accept any number of examples."""
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
    """Return the signature of the model.

    In a model with a single symbolic input, the input's shape has -1 for each dimension
    of unknown size. This holds for a single output, too.
    """
    signature = infer_signature(example, outputs)
    _open_sizes(signature.inputs, getattr(model, "inputs", None))
    _open_sizes(signature.outputs, getattr(model, "outputs", None))
    return signature


def _open_sizes(schema: Any, tensors: Any) -> None:
    """In a schema of one tensor, replace the shape by that of the symbolic tensor.

    A schema of several tensors is left unchanged, since the tensors' names may differ.
    So is a schema without a symbolic tensor.
    """
    symbolic = tf.nest.flatten(tensors or [])
    if len(symbolic) != 1 or len(schema.inputs) != 1:
        return
    spec = schema.inputs[0]
    # Do not copy axis 0: in a `Sequential` without an `Input`, it is the number of
    # examples with which the model was built.
    shape = [-1]
    for size in symbolic[0].shape[1:]:
        if size is None:
            size = -1
        shape.append(size)
    schema.inputs[0] = TensorSpec(spec.type, tuple(shape), spec.name)


def warm_up() -> None:
    """Save an empty model, so that MLflow's slow initialization happens now.

    MLflow imports modules and lists all installed packages once per process.
    """
    with tempfile.TemporaryDirectory() as folder:
        mlflow.pyfunc.save_model(
            Path(folder, "empty"),
            loader_module="mlflow.tensorflow",
            pip_requirements=[_pinned("mlflow")],
        )


def code_to_save(model: keras.Model, targets: Iterable[str]) -> list[str]:
    """Return the paths of user code that is needed to load a model.

    These are modules and packages below the working directory, without `site-packages`,
    and those that they import; see `own_code.with_imports`.
    Code from elsewhere, such as a folder in PYTHONPATH, is not included: it may be any
    library. The user can name such code in `tracking.code`.
    In contrast, `provenance.hashes_of_own_code` includes such code.

    Args:
        model: the model, whose layers may be of the user's own classes.
        targets: the dotted names of the objects that the config builds.
    """
    modules = {cls.__module__ for cls in _own_classes(model)}
    for target in targets:
        for name in sys.modules:
            if target.startswith(f"{name}."):
                modules.add(name)

    paths = set()
    for name in own_code.with_imports(modules, Path.cwd()):
        file = own_code.source(name.partition(".")[0])
        if file is None or not file.is_relative_to(Path.cwd()):
            continue
        if "site-packages" not in file.parts:
            is_package = file.name == "__init__.py"
            path = file.parent if is_package else file
            paths.add(str(path))
    return sorted(paths)


def _own_classes(model: keras.Model) -> set[type]:
    classes = {type(layer) for layer in (model, *layers_of(model))}
    return {cls for cls in classes if not cls.__module__.startswith("keras.")}


def predicted(model_uri: str, example: Any) -> list[Any]:
    """Load a model with MLflow, and return its predictions, one array per output."""
    loaded = mlflow.pyfunc.load_model(model_uri)
    arrays = list(example.values()) if isinstance(example, dict) else [example]
    predict = loaded.predict
    if any(array.dtype == object for array in arrays):
        # Call the model directly: MLflow calls Keras' `predict`, which rejects strings.
        predict = loaded.get_raw_model()
    return tf.nest.flatten(predict(example))


def _predicted_elsewhere(path: str, example: Any) -> list[Any]:
    """Return what the saved model predicts in a new process in another folder.

    Raises:
        ValueError: the model cannot be loaded there.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(Path(imports.__file__).parents[2])
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    # Without this, bytecode files would be saved with the model's code.
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
            reason = reason[:300]
            if reason.startswith("ModuleNotFoundError"):
                reason += "; tracking.code may name the files that it needs"
            raise ValueError(f"it cannot be loaded elsewhere: {reason}")
        return list(np.load(Path(folder) / "predicted.npz").values())
