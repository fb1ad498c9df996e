"""The trained model in MLflow: logged with the user's own modules, then loaded back and compared."""

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

# Run in another folder and without the user's path, as by someone who loads the model from the store.
_ELSEWHERE = """
import pickle, sys
import numpy as np
from pipeline.tracking import logged_model
model, example = pickle.load(sys.stdin.buffer)
np.savez("predicted.npz", *logged_model.predicted(model, example))
"""
TOLERANCE, ROUNDINGS = (
    1e-3,
    16,
)  # of the largest output; roundings if they are more: a GPU has several algorithms


def save(folder: Path, model: keras.Model, example: Any, code: Sequence[str]) -> None:
    """Save the model with its signature, so that `mlflow.pyfunc.load_model` predicts the same; else it is a ValueError.

    Args:
        model: trained; not compiled any more afterwards.
        example: a few inputs, as NumPy arrays with the examples on axis 0.
        code: files and folders that are stored with the model and imported when it is loaded.

    A model without a config, as a subclass without `get_config`, is saved as a SavedModel, which only predicts.
    """
    logging.getLogger("mlflow.models.model").setLevel(
        logging.ERROR
    )  # it warns about what is checked below
    keras.config.disable_interactive_logging()  # MLflow calls the model, which would draw progress bars
    # Without the optimizer, which is twice the size of the model and may need this package to be loaded.
    model.compiled, model.optimizer = False, None
    outputs = tf.nest.map_structure(np.asarray, model(example, training=False))
    predictions = tf.nest.flatten(outputs)
    if isinstance(outputs, list | tuple):  # MLflow has no signature for these
        outputs = by_name(model, outputs)
    # Given here, because MLflow would infer them by loading the model in another process.
    requirements = [
        f"{name}=={metadata.version(name)}"
        for name in ("keras", "tensorflow", "mlflow", "numpy")
    ]
    own, served = _own_classes(model), model
    try:
        keras.saving.serialize_keras_object(model)
    except Exception as error:  # what a config lacks, its own code says
        if isinstance(example, dict):  # MLflow gives a SavedModel arrays alone
            raise ValueError(" ".join(str(error).split())) from error
        own, served = set(), _saved_model(model, example)
    # Not by `Model.log`, which loads and asks the model as well, and reads the whole run.
    with (
        tempfile.TemporaryDirectory() as temporary
    ):  # a run that is confined loads models from there alone
        path = str(Path(temporary, "model"))
        shown: dict[str, Any] = {
            "signature": _signature(model, example, outputs),
            "input_example": example,
        }
        brought = {
            "code_paths": list(code) or None,
            "custom_objects": {cls.__name__: cls for cls in own} or None,
        }
        mlflow.tensorflow.save_model(
            served, path, pip_requirements=requirements, **shown, **brought
        )
        reloaded = (
            _predicted_elsewhere(path, example) if own else predicted(path, example)
        )
        roundoff = nvidia.unit_roundoff(
            layer.compute_dtype for layer in (model, *layers_of(model))
        )
        bound = max(TOLERANCE, ROUNDINGS * roundoff)
        for loaded, trained in zip(reloaded, predictions, strict=True):
            if not np.allclose(
                loaded, trained, rtol=bound, atol=bound * float(np.abs(trained).max())
            ):
                raise ValueError("it predicts something else once it is loaded")
        partial = folder.with_name(
            f".{folder.name}"
        )  # a copy: the run directory may be another file system
        try:
            shutil.copytree(path, partial)
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _saved_model(model: keras.Model, example: Any) -> tf.Module:
    """Return a module that `tf.saved_model.save` takes, and that predicts for any number of examples."""
    served = tf.Module()
    served.model, served.state = model, [variable.value for variable in model.variables]
    predict = tf.function(
        lambda x: model(x, training=False),
        input_signature=[slice_specs(example)],
        autograph=False,
    )
    served.__call__ = predict
    return served


def _signature(model: keras.Model, example: Any, outputs: Any) -> ModelSignature:
    """Return the signature of the example, with size -1 for every axis that the model leaves open."""
    found = infer_signature(example, outputs)
    for schema, tensors in ((found.inputs, "inputs"), (found.outputs, "outputs")):
        symbolic = tf.nest.flatten(getattr(model, tensors, None) or [])
        if (
            len(symbolic) == len(schema.inputs) == 1
        ):  # several can be matched by name only
            (spec,), (tensor,) = schema.inputs, symbolic
            shape = tuple(-1 if size is None else size for size in tensor.shape)
            schema.inputs[0] = TensorSpec(spec.type, shape, spec.name)
    return found


def warm_up() -> None:
    """Do what MLflow does once in a process: import itself, and list all installed packages."""
    with tempfile.TemporaryDirectory() as folder:
        path, requirements = (
            Path(folder, "empty"),
            [f"mlflow=={metadata.version('mlflow')}"],
        )
        mlflow.pyfunc.save_model(
            path, loader_module="mlflow.tensorflow", pip_requirements=requirements
        )


def own_code(model: keras.Model, targets: Iterable[str]) -> list[str]:
    """Return the files and packages in the working directory that define the `targets` or the model's layers."""
    modules = {cls.__module__ for cls in _own_classes(model)}
    modules |= {
        name
        for target in targets
        for name in sys.modules
        if target.startswith(f"{name}.")
    }
    files = {
        Path(getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or "/")
        for name in modules
    }
    own = [
        file
        for file in files
        if file.is_relative_to(Path.cwd()) and "site-packages" not in file.parts
    ]
    return sorted(
        {str(file.parent if file.name == "__init__.py" else file) for file in own}
    )


def _own_classes(model: keras.Model) -> set[type]:
    classes = {type(layer) for layer in (model, *layers_of(model))}
    return {cls for cls in classes if not cls.__module__.startswith("keras.")}


def predicted(model_uri: str, example: Any) -> list[Any]:
    """Return a logged model's predictions for a few inputs, one array per output."""
    loaded = mlflow.pyfunc.load_model(model_uri)
    arrays = example.values() if isinstance(example, dict) else [example]
    # Keras' `predict`, which MLflow calls, takes no strings; the model itself does.
    predict = (
        loaded.get_raw_model()
        if any(a.dtype == object for a in arrays)
        else loaded.predict
    )
    return tf.nest.flatten(predict(example))


def _predicted_elsewhere(path: str, example: Any) -> list[Any]:
    """Return what the logged model predicts in a new process in another folder."""
    package = str(Path(imports.__file__).parents[2])
    with tempfile.TemporaryDirectory() as folder:
        # No bytecode, which would be logged beside the code.
        env = {
            **os.environ,
            "PYTHONPATH": package,
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command, given = (
            [sys.executable, "-P", "-c", _ELSEWHERE],
            pickle.dumps((path, example)),
        )
        done = subprocess.run(
            command, input=given, cwd=folder, env=env, capture_output=True
        )
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().splitlines()
            why = (last[-1] if last else f"status {done.returncode}").removeprefix(
                "Exception encountered: "
            )
            raise ValueError(f"it cannot be loaded elsewhere: {why[:300]}")
        return list(np.load(Path(folder) / "predicted.npz").values())
