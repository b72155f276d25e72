"""Checks that the files of a model are those of its fingerprint, on every machine and for as long as they are read.

A fingerprint is computed once, by the command. Its workers open the files later, perhaps on other machines, where a
link or a revision of the hub may lead elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.models import AnyModel, ModelConfig, expand_user
from pipeline.errors import StopError
from pipeline.models.checkpoints import locate, locate_adapter
from pipeline.models.load import fingerprint_model
from pipeline.models.model_files import adapter_files

Marks = Mapping[str, tuple[int, ...]]
"""Name of a file -> its size, time stamps and inode, which differ if it was changed or replaced."""

_DIGESTS = ("model", "tokenizer")


def is_a_path(config: ModelConfig) -> bool:
    """Whether a model is a path of this machine, and not a hub id."""
    return Path(expand_user(config.path)).exists()


def model_marks(config: ModelConfig) -> Marks:
    """Marks of all files of a model and of its adapter.

    Raises:
        UserError: a file is missing.
    """
    files = locate(config, weights=True).files
    assert files is not None
    marks = dict(files.marks())
    if config.adapter is not None:
        of_adapter = adapter_files(locate_adapter(config), config.adapter_shown).marks()
        marks |= {f"adapter: {name}" if name in marks else name: mark for name, mark in of_adapter.items()}
    return marks


class ModelDigests:
    """`fingerprint_model` with a cache: files are read once for all stages of a model. Their marks are kept."""

    def __init__(self, recorded: Mapping[AnyModel, Mapping[str, str]] | None = None) -> None:
        """Create a cache with the recorded fingerprints of models whose files are missing."""
        self._digests = dict(recorded or {})
        self._marks: dict[ModelConfig, Marks] = {}
        self._lock = threading.Lock()

    def __call__(self, config: AnyModel) -> Mapping[str, str]:
        """The fingerprint of a model. Raises the errors of `fingerprint_model`."""
        with self._lock:
            if config not in self._digests:
                if isinstance(config, ModelConfig):
                    self._marks[config] = model_marks(config)  # before its files are hashed
                self._digests[config] = fingerprint_model(config)
            return self._digests[config]

    def known(self, config: AnyModel) -> Mapping[str, str] | None:
        """The fingerprint of a model that was computed or recorded; None otherwise."""
        return self._digests.get(config)

    def marks(self, config: ModelConfig) -> Marks:
        """Marks of the files of a model whose fingerprint was computed, at that time."""
        return self._marks.get(config, {})


def check_same_files(config: ModelConfig, marks: Marks, digests: Mapping[str, str]) -> None:
    """Check that the files of a model are those of its fingerprint. They are hashed only where their marks differ.

    Args:
        config: configuration of the model.
        marks: marks of its files when they were hashed; empty if they are unknown.
        digests: its fingerprint, from `fingerprint_model`.

    Raises:
        StopError: a file is another one.
        UserError: a file is missing.
    """
    here = model_marks(config)
    if here == marks:
        return
    current = fingerprint_model(config)
    if all(current[key] == digests[key] for key in _DIGESTS if key in digests):
        return
    names = sorted(name for name in here.keys() | marks.keys() if here.get(name) != marks.get(name))
    raise StopError(
        f"model {config.shown}: {names[0]} is not the file with which the run has started; finished shards are kept: "
        "put that file back and rerun the command, or set another run directory"
    )
