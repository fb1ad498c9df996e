"""What the commands import of Keras and MLflow: the parts that hardly any training uses when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, inspect, sys
from pipeline.common import imports
with {how}:
    import keras
    looked_for = gc.isenabled()
print(looked_for, gc.isenabled(), gc.get_freeze_count() > 100_000)
inspect.getmodule(len)  # asks every module for its file, as tracing a function does
print([name for name in ("matplotlib.pyplot", "sklearn") if name in sys.modules])
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:  # one executes it, the others wait for it
    list(pool.map(lambda _: keras.visualization.plot_image_gallery, range(4)))
from keras.visualization import plot_image_gallery
from keras.wrappers import *
assert "SKLearnRegressor" in dir(keras.wrappers) and SKLearnRegressor
print(plot_image_gallery.__name__, keras.wrappers.SKLearnClassifier.__name__, hasattr(keras.wrappers, "nothing"))
"""
PLAIN = "__import__('contextlib').nullcontext()"
USED = "plot_image_gallery SKLearnClassifier False"


def printed(how: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(how=how)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_pictures_and_scikit_learn_wait_until_they_are_used_and_no_garbage_is_looked_for_meanwhile():
    assert printed("imports.without_chatter()") == ["False True True", "[]", USED]
    assert printed(PLAIN) == [
        "True True False",
        "['matplotlib.pyplot', 'sklearn']",
        USED,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "imported"), [("imports.executed_on_use()", False), (PLAIN, True)]
)
def test_what_serves_models_waits_until_mlflow_uses_it(how, imported):
    program = f"""
import sys
from pipeline.common import imports
with {how}:
    import mlflow
print("fastapi" in sys.modules)
from mlflow.gateway import set_gateway_uri
print(set_gateway_uri.__name__, mlflow.gateway.get_gateway_uri.__name__, "fastapi" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines() == [
        str(imported),
        "set_gateway_uri get_gateway_uri True",
    ], done.stderr
