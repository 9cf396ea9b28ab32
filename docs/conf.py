"""The site of the documents: `make site` writes it to docs/_build. Sphinx reads this file."""

project = "minimal-gpt"
copyright = "the minimal-gpt contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = project
exclude_patterns = ["_build"]
html_extra_path = ["demo.html"]  # the page that runs a model in a browser

myst_heading_anchors = 3  # links to a heading within a page
# Some links lead to files of the repository outside this folder. tests/test_docs.py checks that they exist.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
