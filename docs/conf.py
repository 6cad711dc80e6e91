"""The documentation site: `make site`. Its pages are the Markdown files of the repository, at the same paths."""

import re
import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

project = "Persia"
version = release = re.findall(r'__version__ = "(.+)"', (ROOT / "persia_py/persia/__init__.py").read_text())[0]
extensions = ["myst_parser"]
root_doc = "docs/index"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**", "examples/*/README.md"),
    *("examples/dlrm/data/README.md", "tests/checklist.md", "tests/chaos/RECORD.md"),
]
exclude_patterns = [
    *(
        ".*",
        "**/.*",
        "benches",
        "dist",
        "docs/site",
        "launch",
        "persia_py",
        "requirements",
        "runs",
        "rust_core",
        "services",
        "site",
    ),
    *("third_party", "tools", "tests/*/__pycache__", "tests/compose", "tests/gpu", "tests/integration", "tests/unit"),
    *("examples/*/runs", "examples/*/checkpoint", "examples/*/config"),
]
highlight_language = "none"
smartquotes = False  # they change --option
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Persia {release}"
html_extra_path = ["site/root"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Write the pages of the Python API before the sources are listed."""
    import api_pages
    from check_links import PLAIN

    api_pages.write(ROOT / "docs" / "reference" / "api")
    for language in PLAIN:
        app.add_lexer(language, TextLexer)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
