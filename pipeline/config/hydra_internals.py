"""Hydra's private interface that this package uses, in the one place where it is touched.

Read in Hydra 1.3.2 to 1.3.8. `get_args_parser` is the parser of Hydra's own command line. It is used to tell
overrides from options, and to refuse a wrong option in one line instead of Hydra's usage; no public function does that.
"""

from hydra._internal.utils import get_args_parser as get_args_parser
