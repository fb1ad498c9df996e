"""`pipeline predict`: the peak of memory does not grow with the number of examples."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.running import pipeline, python

FEW = 10_000
MANY = 50_000
OUTPUTS = 1024  # of each example, float32
MIB = 2**20
# The outputs that MANY has more than FEW: 40,000 × 4 KiB, 156 MiB. If they were kept,
# even once, the peak would be higher by as much. Both numbers fill several parts, whose
# buffers take some 100 MiB. The bound is half of it; parts that were kept until the end
# took 914 MiB more.
MOST_GROWTH = (MANY - FEW) * OUTPUTS * 4 / 2 / MIB

WIDE = f"""
import keras, tensorflow as tf
from pipeline.dataset import Data

def rows(test):
    def example(number):
        x = tf.random.stateless_uniform([16], [0, tf.cast(number, tf.int32)])
        return x, number % 2
    data = tf.data.Dataset.range(200 + test).map(example)
    return Data(data.take(100), data.skip(100).take(100), classes=2, test=data.skip(200))

def wide(input_shape, classes):
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Dense({OUTPUTS})(inputs))
"""
PEAK = """
import sys
from pipeline.__main__ import main
status = main(sys.argv[1:])
from pipeline.components import devices
print(devices.peak_memory(devices.Devices(None, False, "")) / 2**20)
sys.exit(status)
"""


def peak_of_predict(folder: Path, rows: int) -> float:
    """Return the peak memory of a command that predicts so many examples, in MiB."""
    command = ["predict", "run", "--split", "test", "--out", f"{rows}.parquet"]
    # A new process, as a warm one shares memory with others.
    process = python(
        *("-c", PEAK, *command, f"dataset.test={rows}"), cwd=folder, warm=False
    )
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert pq.ParquetFile(folder / f"{rows}.parquet").metadata.num_rows == rows
    return float(printed.split()[-1])


@pytest.mark.slow
def test_the_peak_of_memory_is_that_of_fewer_examples(tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    for group, target in {"dataset": "rows", "model": "wide"}.items():
        file = tmp_path / "conf" / group / f"{target}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(f"_target_: wide.{target}\n")
    with (tmp_path / "conf" / "dataset" / "rows.yaml").open("a") as config:
        config.write("test: 200\n")
    pipeline(
        *("train", "--config-dir", "conf", "experiment=quick", "hydra.run.dir=run"),
        *("dataset=rows", "model=wide", "training.epochs=1"),
        *("accumulation.effective_batch_size=50", "tracking.log_model=false"),
        cwd=tmp_path,
    )
    few = peak_of_predict(tmp_path, FEW)
    many = peak_of_predict(tmp_path, MANY)
    assert many - few < MOST_GROWTH
