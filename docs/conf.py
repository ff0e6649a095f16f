"""How Sphinx makes the site of these pages: `make docs`."""

import sys
from pathlib import Path

from pyps import __version__

sys.path.insert(0, str(Path(__file__).with_name("extension")))

project = "pyps"
author = "The pyps authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "reference"]
exclude_patterns = ["extension"]

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4
# What stands in single backquotes in a docstring is a name.
default_role = "code"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# Commands and their options are written with --.
smartquotes = False

html_theme = "furo"
html_title = f"pyps {version}"
html_copy_source = html_show_sourcelink = html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
