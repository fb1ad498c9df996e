"""Wrong input: exit status 2, one line on stderr, and nothing is created.

The line has the key, the rule, the value and the choices. All command lines of a table
run in one process (see refused.py), in a folder that is compared before and after.
"""

from __future__ import annotations

import re
import shutil
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.config.compose import Session
from tests.config.wrong_configs import CONFIG
from tests.config.wrong_objects import PREPARED, PREPARED_TOO
from tests.running import Store, one_process, pipeline, start
from tests.shared import migrated_store, place_store

SHORT_RUN = (
    "train",
    "model=mlp",
    "training.updates=2",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
)

USER_MODULE = """
def not_a_dataset(data_dir):
    return 3

def not_a_model(**anything):
    return 3

def recurrent(input_shape, **anything):
    import keras
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Reshape((8, 8))])
    model.add(keras.layers.LSTM(2, dropout=0.5, name="lstm"))
    model.add(keras.layers.Dense(10))
    return model

def pooled(classes, **anything):
    import keras
    inputs = keras.Input([None], dtype="int32")
    vectors = keras.layers.Embedding(classes, 4)(inputs)
    vectors += keras.ops.mean(vectors, axis=1, keepdims=True)
    return keras.Model(inputs, keras.layers.Dense(classes)(vectors))

def flagged(norm: "bool" = None, hidden=(), dropout=0, l2=0):
    return 3

def one_argument(x):
    return x

def keeping():
    import keras
    class Keeping(keras.callbacks.Callback):
        set_state = None

        def get_state(self):
            return {"seen": {1}}

    return Keeping()

def cropped(x, seed):
    return x[:4]

def counted(x, seed):
    import tensorflow as tf
    return tf.cast(x, tf.int32)

def unreadable(data_dir):
    import tensorflow as tf
    def example(n):
        x = tf.cast(n, tf.float32)
        return tf.debugging.check_numerics(x / (x - 3), "a hole"), n

    return tf.data.Dataset.range(200).map(example), None

def sliced(*parts):
    import tensorflow as tf
    if len(parts) == 1:
        (parts,) = parts
    return tf.data.Dataset.from_tensor_slices(parts), None

def weighted(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), np.zeros(200, int), np.ones((200, 3)))

def negative(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), np.arange(200) % 3 - 1)

def bare():
    return 3

def batched(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), np.zeros(200, int))[0].batch(32), None

def unlabelled(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)))

def of_two(data_dir):
    import numpy as np
    return sliced(np.ones((200, 4)), {"a": np.ones(200), "b": np.ones(200)})

def two(input_shape):
    import keras
    inputs = keras.Input(input_shape)
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    return keras.Model(inputs, outputs)

def one_hot(data_dir):
    import tensorflow as tf
    def example(n):
        return tf.ones(4), tf.one_hot(n % 3, 3)

    return tf.data.Dataset.range(200).map(example), None

class Vector:
    def __new__(cls, name):
        import keras
        return keras.metrics.F1Score(name=name)

def scalar_loss(y, outputs):
    import keras
    return keras.ops.mean(outputs)

def column_loss(y, outputs):
    import keras
    return keras.ops.mean(outputs, axis=0)

def branching_loss(y, outputs):
    import keras
    values = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
    return values if keras.ops.mean(values) > 0 else 2 * values

class Branching:
    def __new__(cls, name):
        import keras
        class Metric(keras.metrics.Mean):
            def update_state(self, y, outputs, sample_weight=None):
                if keras.ops.mean(outputs) > 0:
                    super().update_state(outputs)
        metric = Metric(name=name)
        type(metric).__name__ = "Branching"
        return metric

def flat_loss(y, outputs):
    import keras
    return keras.ops.cast(keras.ops.argmax(outputs, -1), "float32")
"""

USER_CONFIGS = {
    "model/latin.yaml": b"# caf\xc3\xa9\n_target_: mine.model\nname: caf\xe9\n",
    "model/broken.yaml": b"filters: [1\nhidden: 3\n",
    "model/scalar.yaml": b"3\n",
    "model/empty.yaml": b"",
    "model/orphan.yaml": b"defaults: [nope]\n",
    "model/two.yaml": b"_target_: mine.two\n",
    "objective/two.yaml": (
        b"# @package training\n"
        b"loss:\n"
        b"  a: {_target_: keras.losses.Huber}\n"
        b"  b: {_target_: keras.losses.Huber}\n"
        b"loss_weights: null\n"
        b"metrics: {}\n"
    ),
    "objective/listed.yaml": (
        b"# @package training\n"
        b"loss: {_target_: keras.losses.Huber}\n"
        b"metrics: [accuracy]\n"
    ),
    "objective/off.yaml": (
        b"# @package training\n"
        b"loss: {_target_: keras.losses.Huber}\n"
        b"metrics: {off: {_target_: keras.metrics.AUC}}\n"
    ),
    "scaling/gone.yaml": b"rule: adascale\nreference_batch_size: 16\n",
    "training/listed.yaml": b"epochs: 1\nweighted_metrics: [accuracy]\n",
    "training/typo.yaml": b"epoch: 3\n",
    "training/wrong.yaml": b"epochs: many\n",
}


class NotMLflow(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Somebody's working folder, with things in it that are not what they should be."""
    folder = tmp_path_factory.mktemp("bad input")
    (folder / "outputs").mkdir()  # somebody's own, and empty: it stays
    (folder / "file").write_text("text, and no database")
    (folder / "used").mkdir()
    (folder / "used" / "journal.jsonl").write_text('{"start":{}}\n')
    (folder / "mine.py").write_text(USER_MODULE)
    for name, content in USER_CONFIGS.items():
        (folder / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mine" / name).write_bytes(content)
    with sqlite3.connect(folder / "other.db") as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    connection.close()
    return folder


def pattern(expected: str) -> str:
    """The regular expression of a line in which `…` stands for any text."""
    return ".*".join(re.escape(part) for part in f"pipeline: {expected}\n".split("…"))


def check(answers: dict[str, dict], expected: dict[str, str]) -> None:
    """Fail with all command lines whose answer is not the expected line."""
    differences = []
    for line, message in expected.items():
        answer = answers[line]
        rejected = answer["status"] == 2 and answer["out"] == ""
        nothing_created = answer["changed"] == []
        right_line = re.fullmatch(pattern(message), answer["err"])
        if not (rejected and nothing_created and right_line):
            differences.append(f"$ pipeline {line}\n  wanted: {message}\n  {answer}")
    assert not differences, "\n" + "\n".join(differences)


def some(lines: dict[str, str], step: int) -> dict[str, str]:
    """Return the second line and each `step`th after it."""
    return dict(list(lines.items())[1::step])


@pytest.mark.parametrize(
    "lines",
    [
        some(CONFIG, 12),
        pytest.param(some(CONFIG, 4), marks=pytest.mark.slow),
        pytest.param(CONFIG, marks=pytest.mark.soak),
    ],
    ids=["every twelfth", "every fourth", "all"],
)
def test_a_wrong_config_is_refused_without_tensorflow_and_mlflow(folder, lines):
    answers = one_process(dict(zip(lines, lines, strict=True)), folder, warm=False)
    check(answers, lines)
    assert [line for line in lines if answers[line]["loaded"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        PREPARED,
        pytest.param(PREPARED_TOO, marks=pytest.mark.soak),
    ],
    ids=["one of each kind", "more"],
)
def test_what_only_tensorflow_or_the_store_can_refuse_creates_nothing_either(
    folder, tmp_path, lines
):
    from mlflow.tracking import MlflowClient

    shutil.copyfile(migrated_store(), folder / "store.db")
    client = MlflowClient(f"sqlite:///{folder}/store.db")
    if client.get_experiment_by_name("old") is None:
        client.delete_experiment(
            client.create_experiment("old", (folder / "artifacts").as_uri())
        )
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotMLflow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with server, socket.socket() as closed:
        # It does not listen, so that each connection is refused.
        closed.bind(("127.0.0.1", 0))
        ports = {
            "closed": closed.getsockname()[1],
            "open": server.server_port,
            "elsewhere": tmp_path / "elsewhere",
        }

        def filled(text: str) -> str:
            for name, value in ports.items():
                text = text.replace(f"{{{name}}}", str(value))
            return text

        expected = {filled(line): filled(message) for line, message in lines.items()}
        answers = one_process(
            dict(zip(expected, expected, strict=True)),
            folder,
            CUDA_VISIBLE_DEVICES="-1",
            HTTPS_PROXY=f"http://127.0.0.1:{ports['closed']}",
        )
        server.shutdown()
    check(answers, expected)
    experiments = [found.experiment_id for found in client.search_experiments()]
    assert client.search_runs(experiments) == []


def test_the_whole_traceback_comes_before_the_line_where_it_is_asked_for(folder):
    line = "training.epochs must be an integer, or null. Received: 'many'."
    short = pipeline(
        "train", "training.epochs=many", cwd=folder, status=2, HYDRA_FULL_ERROR="0"
    )
    full = pipeline(
        "train", "training.epochs=many", cwd=folder, status=2, HYDRA_FULL_ERROR="1"
    )
    assert short.stderr == f"pipeline: {line}\n"
    assert full.stderr.startswith("Traceback (most recent call last):")
    assert "omegaconf.errors.ValidationError" in full.stderr
    assert full.stderr.endswith(f"\npipeline: {line}\n")


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("UnicodeError('late')", "UnicodeError: late"),
        ("SystemExit(0)", "RunError: the run's code called exit(0)"),
    ],
)
@pytest.mark.slow
def test_an_error_of_the_users_own_code_while_running_is_no_config_error(
    tmp_path, raised, line
):
    (tmp_path / "late.py").write_text(
        "import keras\n"
        "class Late(keras.callbacks.Callback):\n"
        "    def on_train_batch_end(self, batch, logs=None):\n"
        f"        raise {raised}\n"
    )
    done = pipeline(
        *SHORT_RUN,
        "+training.callbacks.late._target_=late.Late",
        cwd=tmp_path,
        status=1,
    )
    last, file = re.fullmatch(
        r"pipeline: (.*) \(traceback in (.+)\)", done.stderr.splitlines()[-1]
    ).groups()
    assert last == line
    assert Store(tmp_path).run().info.status == "FAILED"
    assert "Traceback" not in done.stderr
    assert Path(file).parent == next((tmp_path / "outputs").glob("*/*"))
    assert "on_train_batch_end" in Path(file).read_text()


def test_two_runs_that_are_refused_at_once_remove_the_folders_of_both(tmp_path):
    """As two workers do that begin in one second, with the default run directory."""
    outer = tmp_path / "2026-11-26"
    inner = outer / "10-00-00"

    def refuse(_):
        for _ in range(300):
            with suppress(OSError):  # another one removes them meanwhile
                inner.mkdir(parents=True, exist_ok=True)
            Session(new_folders=[inner, outer]).remove_empty_folders()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(refuse, range(4)))
    assert not outer.exists()


@pytest.mark.slow
def test_of_two_runs_at_once_in_one_folder_the_second_is_refused(tmp_path):
    # The store is there, so that both are ready at nearly the same moment.
    place_store(tmp_path)
    both = [start(*SHORT_RUN, "hydra.run.dir=same", cwd=tmp_path) for _ in range(2)]
    answers = sorted((run.wait(timeout=300), run.stderr.read()) for run in both)
    assert [status for status, _ in answers] == [0, 2]
    # The first one may be in its folder already, or only have taken it.
    rules = [
        f"pipeline: hydra.run.dir must be {rule}. Received: '{tmp_path / 'same'}'.\n"
        for rule in (
            "a folder without a run in it",
            "a folder that no other process trains in",
        )
    ]
    assert answers[1][1] in rules
    assert [run.info.status for run in Store(tmp_path).runs()] == ["FINISHED"]
