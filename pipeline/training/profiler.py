"""Traces some updates of a run, as `hardware.profile` asks."""

import gzip
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from pipeline.training.recorder import Recorder


@dataclass
class Profiler(AbstractContextManager["Profiler"]):
    """Traces `updates` updates from number `start` on, those of them that this process runs; leaving it ends the trace.

    In `folder` they are `profile_<first update>.xplane.pb` for TensorBoard and `profile_<…>.trace.json.gz` for
    Perfetto; `log` gets these names.
    """

    folder: Path = Path()
    start: int = 0
    updates: int = 0
    log: Callable[[str], object] = print
    _first: int = 0  # update of the trace; 0 while there is none

    @contextmanager
    def update(self, number: int, recorder: Recorder) -> Iterator[None]:
        """Run update `number` inside; beginning and ending a trace is not in the update times."""
        traced = self.start <= number < self.start + self.updates
        if traced != bool(self._first):
            recorder.fetch()
            if traced:
                tf.profiler.experimental.start(str(self.folder))
                self._first = number
            else:
                self._stop()
            recorder.restart_clock()
        with (
            tf.profiler.experimental.Trace("update", step_num=number, _r=1)
            if traced
            else nullcontext()
        ):
            yield

    def __exit__(self, *_: object) -> None:
        if self._first:
            self._stop()

    def _stop(self) -> None:
        name, self._first = f"profile_{self._first}", 0
        tf.profiler.experimental.stop()
        # `tensorboard --logdir` finds it by this path, in the run directory and among the artifacts.
        written = max(
            self.folder.glob("plugins/profile/*/*.xplane.pb"),
            key=lambda path: path.stat().st_mtime,
        )
        shutil.copy(written, self.folder / f"{name}.xplane.pb")
        # Private, as read in TensorFlow 2.21: TensorBoard's plugin, by which it makes what a browser shows.
        from tensorflow.python.profiler.internal import (
            _pywrap_profiler_plugin as plugin,
        )

        trace, _ = plugin.xspace_to_tools_data([str(written)], "trace_viewer@", {})
        (self.folder / f"{name}.trace.json.gz").write_bytes(gzip.compress(trace))
        for kept in written.parent.glob(
            "*.SSTABLE"
        ):  # what the plugin would read next time
            kept.unlink()
        self.log(f"{name}.xplane.pb")
        self.log(f"{name}.trace.json.gz")
