"""Hydra's private interface that this package uses, in the one place that touches it.

It was read in Hydra 1.3.2 to 1.3.8. `get_args_parser` is the parser of Hydra's own
command line. It tells overrides from options, and lets a wrong option be rejected in
one line instead of by Hydra's usage. No public function does that.
"""

from hydra._internal.utils import get_args_parser as get_args_parser
