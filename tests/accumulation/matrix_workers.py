"""Two workers, processes that TensorFlow joins, which compute what a test requests.

They read a line of JSON for each request, and write a line for each answer.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.running import ROOT, python


class Pair:
    """The two processes, as a test has them."""

    def __init__(self) -> None:
        self.ports = _free_ports(2)
        self.folder = tempfile.TemporaryDirectory(prefix="workers-")
        self._processes = []
        for index in range(2):
            log = Path(self.folder.name) / f"{index}.log"
            arguments = ("-m", __name__, str(log), str(index), *map(str, self.ports))
            process = python(*arguments, cwd=ROOT, stdin=subprocess.PIPE)
            self._processes.append(process)
        atexit.register(self._end)

    def ask(self, what: str, **more: Any) -> Any:
        """Return the answer of worker 0; both compute it."""
        request = json.dumps({"what": what, "folder": self.folder.name, **more})
        for process in self._processes:
            process.stdin.write(request + "\n")
            process.stdin.flush()

        answers = [process.stdout.readline() for process in self._processes]
        files = sorted(Path(self.folder.name).glob("*.log"))
        assert all(answers), [file.read_text()[-2000:] for file in files]
        return json.loads(answers[0])

    def _end(self) -> None:
        """Close their input: where it ends they end.

        The warm process that forked them ends them at the latest.
        """
        for process in self._processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
        self.folder.cleanup()


def _free_ports(count: int) -> list[int]:
    ports = []
    with ExitStack() as sockets:
        for _ in range(count):
            server = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(server.getsockname()[1])
    return ports


@cache
def pair() -> Pair:
    """Return the two workers of this process."""
    return Pair()


def weights_after(case: Any, run: Any) -> list[np.ndarray]:
    """Return the trained weights of a case of the matrix, by two workers."""
    file = pair().ask("weights", case=list(case), precision=run.precision)
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays.files]


def _serve(index: int, ports: list[int]) -> None:
    import keras
    import tensorflow as tf

    from pipeline.accumulation.internals import Share
    from tests.accumulation import matrix, test_reductions

    cluster = tf.train.ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, "", "worker", index, rpc_layer="grpc"
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)

    def set_precision(precision: str) -> None:
        keras.config.set_floatx(precision)
        keras.config.set_dtype_policy(precision)

    def share(batch: Any) -> Share:
        return Share.for_replicas(batch, index, 1, len(ports))

    def weights(case: list[str], precision: str, folder: str) -> str:
        set_precision(precision)
        run = matrix.FLOAT64 if precision == "float64" else matrix.FLOAT32
        file = f"{folder}/weights-{index}.npz"
        np.savez(file, *matrix.accumulated(matrix.Case(*case), run, strategy, share))
        return file

    def reductions(factor: int, folder: str) -> Any:
        set_precision("float32")
        update = test_reductions.update_of(strategy, factor)
        return test_reductions.reductions(lambda x, y: update(share((x, y))))

    def updates(factor: int, count: int, folder: str) -> int:
        set_precision("float32")
        update = test_reductions.update_of(strategy, factor, width=20_000)
        x = tf.ones([test_reductions.EFFECTIVE, test_reductions.WIDTH])

        def apply() -> Any:
            y = tf.zeros([test_reductions.EFFECTIVE], tf.int64)
            return update(share((x, y)))

        step = tf.function(apply)
        for _ in range(count):
            step()
        return count

    answers = {"weights": weights, "reductions": reductions, "updates": updates}
    for line in sys.stdin:
        request = json.loads(line)
        answer = answers[request.pop("what")]
        print(json.dumps(answer(**request)), flush=True)


if __name__ == "__main__":
    # To a file: a pipe that nobody reads would fill up.
    log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    _serve(int(sys.argv[2]), [int(port) for port in sys.argv[3:]])
