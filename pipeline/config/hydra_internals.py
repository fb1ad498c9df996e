"""The only module of this package that imports from Hydra's private interface.

`get_args_parser` returns the parser for Hydra's own command line. With it, overrides
are separated from options, and a wrong option is rejected in one line instead of with
Hydra's usage text. No public function offers this. The source was checked in Hydra
1.3.2 to 1.3.8.
"""

from hydra._internal.utils import get_args_parser as get_args_parser
