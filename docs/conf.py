"""The site: Markdown pages by Sphinx, MyST and Furo. It builds without network, and a warning is an error."""

from importlib import metadata, util

project = "Seenset"
author = "the Seenset authors"
version = release = metadata.version("seenset")
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
suppress_warnings = [] if util.find_spec("seenset") else ["autodoc.import_object"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"Seenset {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
