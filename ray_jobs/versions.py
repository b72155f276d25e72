"""Versions of the programs that scores are made with; alone of this project it reaches a node by value.

So a node without Seenset, or with another one, can answer too: nothing of this project is imported at its head.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
from collections.abc import Mapping
from importlib import metadata

PROGRAMS = ("ray", "torch", "transformers", "tokenizers", "peft", "bitsandbytes")
GROUPS = ("seenset.detectors",)
"""Entry points of packages whose code makes scores."""


def versions_here() -> dict[str, str]:
    """Versions of Python, Seenset, what computes scores and the installed plugins; what is missing is left out."""
    versions = {"python": platform.python_version()}
    with contextlib.suppress(ImportError):  # whoever compares sees that it is missing
        versions["seenset"] = str(importlib.import_module("pipeline").__version__)
    for name in PROGRAMS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for group in GROUPS:
        for entry in metadata.entry_points(group=group):
            if entry.dist is not None:
                versions[entry.dist.name] = entry.dist.version
    return versions


def version_differences(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """What another place has otherwise, as "transformers 5.1.0 (here 5.2.0)"; empty where all is the same.

    What a version says of a build (`+cpu`, `+cu128`) is no difference, as nodes with and without GPUs may share a run,
    nor is the last number of Python's.

    Args:
        here: versions of the driver.
        there: of a node.
    """
    lines = []
    for name in dict.fromkeys([*here, *there]):
        mine, other = here.get(name), there.get(name)
        if _release(name, mine) != _release(name, other):
            lines.append(f"{name} {other or 'missing'} (here {mine or 'missing'})")
    return lines


def _release(name: str, version: str | None) -> str | None:
    if version is None:
        return None
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]
