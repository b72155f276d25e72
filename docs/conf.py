"""The site: Markdown pages by Sphinx, MyST and Furo. It builds without network, and a warning is an error."""

from importlib import metadata

project = "Seenset"
author = "the Seenset authors"
version = release = metadata.version("seenset")
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
default_role = "code"  # `name` in docstrings
python_maximum_signature_line_length = 100

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"Seenset {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
