"""Hydra's private interfaces that this package uses, in the one place where they are touched.

Read in Hydra 1.3.2 to 1.3.8. `get_args_parser` is the parser of Hydra's own command line. It is used to tell
overrides from options, and to refuse a wrong option in one line instead of Hydra's usage; no public function does that.
`failure` reads the exception of a job that failed: the public property prints to the terminal before it raises it.
"""

from __future__ import annotations

from hydra._internal.utils import get_args_parser
from hydra.core.utils import JobReturn

__all__ = ["failure", "get_args_parser"]


def failure(returned: JobReturn) -> BaseException:
    """Return the exception of a job that failed."""
    error: BaseException = returned._return_value
    return error
