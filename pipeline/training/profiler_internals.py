"""Uses of private interfaces of TensorFlow's profiler, as of TensorFlow 2.21.

TensorFlow writes a trace as `xplane.pb`, which only TensorBoard reads. TensorFlow's
converter to JSON, which browsers can show, has no public function.
"""

from pathlib import Path

from tensorflow.python.profiler.internal import _pywrap_profiler_plugin


def trace_json(xplane: Path) -> bytes:
    """Return a trace as JSON for Perfetto."""
    trace, _ = _pywrap_profiler_plugin.xspace_to_tools_data(
        [str(xplane)], "trace_viewer@", {}
    )
    for cache in xplane.parent.glob("*.SSTABLE"):
        cache.unlink()  # A later conversion would read this outdated cache.
    return trace
