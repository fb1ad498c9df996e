"""The example of a distributed loop by hand: both halves are plain Keras on whole batches, on one device."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.running import ROOT, python

SCRIPT = ROOT / "examples" / "own_distributed_loop" / "train.py"
# Of how far the weights have gone: 45 updates of sums of 128 terms in another order, 45 · 128 · 2⁻⁵³ = 6e-13.
CLOSE = 1e-12


def difference(*replaced: str) -> dict[str, float]:
    """Run the script in float64, with `replaced` in its code, and return how far each half is from plain Keras."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    code = SCRIPT.read_text(encoding="utf-8")
    for old, new in zip(replaced[::2], replaced[1::2], strict=True):
        assert code.count(old) == 1
        code = code.replace(old, new)
    script = Path("train.py")
    script.write_text(
        code, encoding="utf-8"
    )  # a file, where AutoGraph reads the source
    found = runpy.run_path(str(script))
    model, start = found["network"](), found["network"]().get_weights()
    model.compile(keras.optimizers.AdamW(0.01), found["loss"])
    batches = found["examples"].shuffle(2000, seed=0).batch(128)
    for batch in (batch for _ in range(3) for batch in batches):
        model.train_on_batch(*batch)
    expected = model.get_weights()

    def norm(weights: list, others: list) -> float:
        return float(
            np.sqrt(
                sum(
                    ((one - other) ** 2).sum()
                    for one, other in zip(weights, others, strict=True)
                )
            )
        )

    far = norm(expected, start)
    return {
        half: norm(found[half].get_weights(), expected) / far
        for half in ("by_kernel", "by_parts")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replaced", "least"),
    [
        ((), 0.0),
        (
            ("weight=len(x)", "weight=1"),
            1e-6,
        ),  # shares of the last batch that differ count alike
        # AdamW takes nearly the same step of half the gradient: all but what its ε of 1e-7 makes of it.
        pytest.param(
            (" * strategy.num_replicas_in_sync", ""), 1e-7, marks=pytest.mark.soak
        ),
    ],
    ids=["as it is", "unweighted", "as Keras divides"],
)
def test_both_halves_are_plain_keras_on_whole_batches(tmp_path, replaced, least):
    process = python(
        "-m", "tests.examples.test_own_distributed_loop", *replaced, cwd=tmp_path
    )  # one strategy each
    out, err = process.communicate()
    assert process.returncode == 0, err
    losses = re.findall(r"^epoch . +loss (\S+)$", out, re.MULTILINE)
    assert len(losses) == 6
    kernel, parts = map(float, out.splitlines()[-1].split())
    assert kernel < CLOSE
    assert parts > least if least else parts < CLOSE
    if not replaced:
        assert losses[:3] == losses[3:]
        assert float(losses[2]) < 0.5


if __name__ == "__main__":
    print(*difference(*sys.argv[1:]).values())
