"""Profiles some updates of a run, for `hardware.profile`."""

import gzip
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from pipeline.common import durable
from pipeline.training.recorder import Recorder


@dataclass
class Profiler(AbstractContextManager["Profiler"]):
    """Traces updates; leaving the context ends a trace that is under way.

    In `folder`, a trace is written as `profile_<first update>.xplane.pb`, for
    TensorBoard, and as `profile_<first update>.trace.json.gz`, for Perfetto.

    Attributes:
        folder: where the traces are written.
        start: number of the first update that is traced.
        updates: number of updates to trace. A resumed run traces only those that an
            earlier process has not completed.
        log: called with the name of each file that is written.
    """

    folder: Path = Path()
    start: int = 0
    updates: int = 0
    log: Callable[[str], object] = print
    _first_traced: int = 0  # Number of the first update in the trace; 0 without one.

    @contextmanager
    def update(self, number: int, recorder: Recorder) -> Iterator[None]:
        """Run update `number` within the block, and trace it if it is in the range.

        The range is `updates` updates from `start` on.

        The trace ends with the last update to trace, or with the last one of the plan.
        The update times exclude the time that it takes to start and stop a trace.
        """
        last = self.start + self.updates - 1
        if not self.start <= number <= last:
            yield
            return

        if not self._first_traced:
            with recorder.paused():
                tf.profiler.experimental.start(str(self.folder))
            self._first_traced = number
        with tf.profiler.experimental.Trace("update", step_num=number, _r=1):
            yield
        if number == last or recorder.plan.ended(number):
            with recorder.paused():
                self.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End and write the trace that is under way, if there is one."""
        if not self._first_traced:
            return
        from pipeline.training import profiler_internals

        name = f"profile_{self._first_traced}"
        self._first_traced = 0
        tf.profiler.experimental.stop()
        # Copy the trace out of the profiler's own folder, under a name with the number
        # of the first traced update.
        traces = self.folder.glob("plugins/profile/*/*.xplane.pb")
        latest = max(traces, key=lambda path: path.stat().st_mtime)
        shutil.copy(latest, self.folder / f"{name}.xplane.pb")
        trace = gzip.compress(profiler_internals.trace_json(latest))
        (self.folder / f"{name}.trace.json.gz").write_bytes(trace)
        for ending in ("xplane.pb", "trace.json.gz"):
            durable.sync(self.folder / f"{name}.{ending}")
            self.log(f"{name}.{ending}")
