"""Templates of pages: one style, everything escaped, nothing loaded from anywhere."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from pydantic import BaseModel

from pipeline.errors import visible
from pipeline.report.names import Folders
from pipeline.report.wording import brief, numbers


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
    environment.filters.update(percent=numbers.percent, pretty=_pretty, relative=_relative)
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


def _relative(name: str, folders: Folders) -> str:
    return folders.relative(name)


def _pretty(value: Any) -> str:
    """A mapping, list or configuration as readable JSON."""
    plain = value.model_dump(mode="json", by_alias=True) if isinstance(value, BaseModel) else value
    return json.dumps(plain, indent=2, ensure_ascii=False)
