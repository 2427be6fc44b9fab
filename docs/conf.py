"""Configuration of the documentation; every warning is an error (`tox -e docs`)."""

from importlib.metadata import version as installed_version

project = "celery_lease"
author = "the celery_lease authors"
copyright = "2026, the celery_lease authors"
release = installed_version("celery-lease")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"celery_lease {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
