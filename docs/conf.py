"""The documentation site: `make docs` builds it into docs/_build, with warnings as errors.

Links between pages and to headings are checked, those of the README included. Links to other sites are not checked,
because that needs a network.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent.parent))

project = "accumulation-pipeline"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.reference",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
html_show_copyright = False
myst_heading_anchors = 3
default_role = "code"
autodoc_mock_imports = [
    "keras",
    "tensorflow",
    "tensorflow_datasets",
]  # they take seconds to import
autodoc_typehints = "none"
napoleon_use_ivar = True
nitpick_ignore_regex = [
    ("py:class", ".*")
]  # the types in docstrings are Keras' and TensorFlow's


def _links_of_the_site(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Make the links of files in the repository's root, such as the README, point to the pages of the site."""
    for there, here in (
        ("docs/", ""),
        ("CONTRIBUTING.md", "contributing.md"),
        ("CHANGELOG.md", "changelog.md"),
    ):
        content[0] = content[0].replace(f"]({there}", f"]({here}")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("include-read", _links_of_the_site)
