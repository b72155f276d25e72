"""Templates of pages and their script: one style, everything escaped, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from pydantic import BaseModel

from pipeline.errors import UserError, visible
from pipeline.report.wording import brief, numbers

_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")
_EXPORTS = re.compile(r"export\s*\{[^}]*?([\w$]+) as default[^}]*\};?")


def render(template: str, **values: Any) -> str:
    """A page: a template of this folder, or of another room, with its values, every one of which is escaped.

    Args:
        template: name of the file; of another room's, behind its name and a slash: `pipeline.compare/comparison.html`.
        values: that it names; a missing one is an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    """Which keeps what it compiled: that takes longer than to fill it in."""
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=numbers.percent, pretty=_pretty)
    environment.filters.update(relative=lambda name, folders: folders.relative(name))
    environment.globals.update(null_share=numbers.null_share, share_text=numbers.share_text)
    environment.globals.update(role_names={"audit": "audited", "unseen": "known unseen", "seen": "known seen"})
    environment.globals.update(marks=brief.MARKS, terms_on_page=brief.terms_on_page)
    return environment


def _source(name: str) -> str:
    room, _, file = name.rpartition("/")
    return resources.files(room or "pipeline.report").joinpath(file).read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    """What a page prints for any value, before escaping: nothing that hides, and a dash for nothing."""
    if value is None:
        return "\N{EN DASH}"
    return visible(value) if type(value) is str else value


def _pretty(value: Any) -> str:
    """A mapping, list or configuration as readable JSON."""
    plain = value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value
    return json.dumps(plain, indent=2, ensure_ascii=False)


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
    return _UNUSUAL.sub(_as_base64, script)


def _as_base64(unusual: re.Match[str]) -> str:
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
