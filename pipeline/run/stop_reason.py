"""Why a run ends between two updates."""

from pipeline.common.errors import say
from pipeline.common.signals import STOP_TAG, Interruption, Terminated
from pipeline.tracking.journal import Journal


class StopReason:
    """Returns why a run has to end: a signal, or the tag `STOP_TAG` of its MLflow run.

    Args:
        interruption: records a signal.
        journal: its shipper reads the tag.
    """

    def __init__(self, interruption: Interruption, journal: Journal):
        self._interruption = interruption
        self._journal = journal

    def __call__(self) -> BaseException | None:
        """Return the exception that ends the run, or None to continue."""
        reason = self._interruption.asked()
        if reason is None and self._journal.stop_requested():
            say(f"the run has the tag {STOP_TAG} in MLflow: it ends now")
            reason = Terminated(f"the tag {STOP_TAG} was set in MLflow")
        return reason
