"""The example of a distributed loop: both halves are plain Keras on whole batches.

Plain Keras runs on one device.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.running import ROOT, python

MODULE = "tests.examples.test_own_distributed_loop"
SCRIPT = ROOT / "examples" / "own_distributed_loop" / "train.py"
# In units of how far the weights have moved: 45 updates of sums of 128 terms in another
# order are 45 · 128 · 2⁻⁵³ = 6e-13.
CLOSE = 1e-12


def main(replacements: list[str]) -> None:
    """Run the script in float64, and print how far each half is from plain Keras.

    Args:
        replacements: texts to replace in its code, each followed by the new one.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    code = SCRIPT.read_text(encoding="utf-8")
    for old, new in zip(replacements[::2], replacements[1::2], strict=True):
        assert code.count(old) == 1
        code = code.replace(old, new)
    # It has to be a file, where AutoGraph reads the source.
    Path("train.py").write_text(code, encoding="utf-8")
    script = runpy.run_path("train.py")

    model = script["network"]()
    start = model.get_weights()
    model.compile(keras.optimizers.AdamW(0.01), script["loss"])
    batches = script["examples"].shuffle(2000, seed=0).batch(128)
    for _ in range(3):
        for batch in batches:
            model.train_on_batch(*batch)
    expected = model.get_weights()
    moved = distance(expected, start)
    by_kernel = distance(script["by_kernel"].get_weights(), expected) / moved
    by_parts = distance(script["by_parts"].get_weights(), expected) / moved
    print(by_kernel, by_parts)


def distance(weights: list, others: list) -> float:
    """Return the Euclidean distance of two lists of arrays."""
    squares = 0.0
    for array, other in zip(weights, others, strict=True):
        squares += ((array - other) ** 2).sum()
    return float(np.sqrt(squares))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replacements", "least"),
    [
        ((), None),
        # Shares of the last batch that differ count alike.
        (("weight=len(x)", "weight=1"), 1e-6),
        # AdamW takes nearly the same step of half the gradient: the difference is what
        # its ε of 1e-7 makes of it.
        pytest.param(
            (" * strategy.num_replicas_in_sync", ""), 1e-7, marks=pytest.mark.soak
        ),
    ],
    ids=["as it is", "unweighted", "as Keras divides"],
)
def test_both_halves_are_plain_keras_on_whole_batches(tmp_path, replacements, least):
    # A process has one strategy.
    process = python("-m", MODULE, *replacements, cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    losses = re.findall(r"^epoch . +loss (\S+)$", out, re.MULTILINE)
    assert len(losses) == 6
    by_kernel, by_parts = map(float, out.splitlines()[-1].split())
    assert by_kernel < CLOSE
    if least is not None:
        assert by_parts > least
        return
    assert by_parts < CLOSE
    assert losses[:3] == losses[3:]
    assert float(losses[2]) < 0.5


if __name__ == "__main__":
    main(sys.argv[1:])
