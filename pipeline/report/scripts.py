"""The script of the page: DataTables, which the package `itables` carries, and this room's `documents.js`."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from pipeline.errors import UserError, visible

_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")
_EXPORTS = re.compile(r"export\s*\{[^}]*?([\w$]+) as default[^}]*\};?")


@cache
def page_script() -> str:
    """One module script: DataTables, and what the page does with it.

    Raises:
        UserError: the package that carries DataTables is not installed, or is of a form that is not known.
    """
    bundle = _bundle().read_text(encoding="utf-8")
    exports = _EXPORTS.search(bundle)
    if exports is None or "</script" in bundle.lower():
        raise UserError(f"{_bundle()} is not the DataTables that the page needs: install itables 2.9")
    table = f"const DataTable = {exports.group(1)};"
    documents = resources.files("pipeline.report").joinpath("documents.js").read_text(encoding="utf-8")
    before, after = bundle[: exports.start()], bundle[exports.end() :]
    script = f"{before}{{\n{table}\n{documents}}}\n{after}"  # in a block: its names are not those of the bundle
    return _UNUSUAL.sub(_shown, script)


def _shown(unusual: re.Match[str]) -> str:
    """A character that hides as JavaScript writes it, so that nothing hides on the page; any other as it is."""
    character = unusual.group()
    return character if visible(character) == character else f"\\u{ord(character):04x}"


def script_hash(script: str) -> str:
    """How a Content-Security-Policy names a script that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


def _bundle() -> Path:
    package = find_spec("itables")  # which is read and not imported: that would load notebooks
    if package is None or not package.submodule_search_locations:
        raise UserError("the report needs the package itables, which carries DataTables: pip install 'itables>=2.9'")
    return Path(package.submodule_search_locations[0]) / "html" / "dt_bundle.js"
