"""What the page calls a model and a document: by name, without the folders of the machine that they stood on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from pipeline.audit.manifest import InputRecord
from pipeline.config.models import AnyModel, ModelConfig, display_name
from pipeline.corpus.formats import format_named

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CACHED = re.compile(r"models--(.+?)--(.+?)/snapshots/[^/]+/?$")


def model_name(model: AnyModel) -> str:
    """The audited model by its name: its name where no weights are at hand, a hub id, or the last part of a path."""
    if not isinstance(model, ModelConfig):
        return model.name
    name = _last_part(model.path, display_name(model)) + (f" ({model.gguf_file})" if model.gguf_file else "")
    adapter = model.adapter_shown
    return f"{name} with adapter {_last_part(str(model.adapter), adapter)}" if adapter else name


def run_names(first: str, second: str) -> tuple[str, str]:
    """Two run directories by the last parts of their paths, as many as tell them apart."""
    parts = [path.rstrip("/").split("/") for path in (first, second)]
    last = 1
    while parts[0][-last:] == parts[1][-last:] and last < max(map(len, parts)):
        last += 1
    return "/".join(parts[0][-last:]), "/".join(parts[1][-last:])


def _last_part(path: str, shown: str) -> str:
    """The last part of a path of this machine or of a store; a hub id as it is."""
    if cached := _CACHED.search(path):
        return "/".join(cached.groups())
    local = os.path.isabs(path) or _URL.match(path) or path.startswith(".")
    return os.path.basename(shown.rstrip("/")) or shown if local else shown


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a run's inputs, which no name on its page begins with."""

    prefixes: tuple[str, ...]  # longest first; each ends with a slash

    @classmethod
    def of(cls, inputs: Iterable[InputRecord]) -> Folders:
        """The longest folder that the inputs of each role have in common, or where that is the root, each one's own."""
        names: dict[str, list[str]] = {}
        for entry in inputs:
            if format_named(entry.format).has_path:
                names.setdefault(entry.role, []).append(entry.name)
        folders = {common_folder(group) for group in names.values()}
        folders |= {
            f"{os.path.dirname(name)}/" for group in names.values() if common_folder(group) == "/" for name in group
        }
        return cls(tuple(sorted(folders - {"", "/"}, key=lambda folder: (-len(folder), folder))))

    def relative(self, name: str) -> str:
        """A document's id or the name of an input, relative to its corpus."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
        return name[len(prefix) :]

    def without(self, text: str) -> str:
        """A message in which names of files are relative to their corpus."""
        for prefix in self.prefixes:
            if prefix.startswith("/") or "://" in prefix:
                text = text.replace(prefix, "")
        return text


def common_folder(names: Iterable[str]) -> str:
    """The longest folder of all of them, with a slash at its end; empty where there is none."""
    folders = [name.split("/")[:-1] for name in names]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return "".join(f"{parts[0]}/" for parts in common)
