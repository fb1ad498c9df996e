"""The documentation site: `make docs` builds it into docs/_build.

Warnings are errors. Links between pages and to headings are checked, those of the
README included. Links to other sites are not checked, because that needs a network.
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
# They take seconds to import.
autodoc_mock_imports = ["keras", "tensorflow", "tensorflow_datasets"]
autodoc_typehints = "none"
napoleon_use_ivar = True
# The types and errors in docstrings are mostly those of Keras and TensorFlow.
nitpick_ignore_regex = [("py:(class|exc)", ".*")]

# How links begin in the repository's root, and how they begin on the site.
SITE_LINKS = {
    "docs/": "",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def _point_to_site(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Make the links of an included file, such as the README, point to the site."""
    for in_repository, on_site in SITE_LINKS.items():
        content[0] = content[0].replace(f"]({in_repository}", f"]({on_site}")


def setup(app: Sphinx) -> None:
    """Register what this file adds; Sphinx calls it."""
    app.connect("include-read", _point_to_site)
