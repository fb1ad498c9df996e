"""What the commands import of Keras: the parts that hardly any training uses when they are used."""

from __future__ import annotations

import subprocess
import sys

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
USED = "plot_image_gallery SKLearnClassifier False"


def printed(how: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(how=how)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pictures_and_scikit_learn_wait_until_they_are_used_and_no_garbage_is_looked_for_meanwhile():
    assert printed("imports.without_chatter()") == ["False True True", "[]", USED]
    plain = "__import__('contextlib').nullcontext()"
    assert printed(plain) == ["True True False", "['matplotlib.pyplot', 'sklearn']", USED]
