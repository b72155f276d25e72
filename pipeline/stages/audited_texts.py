"""Texts that earlier runs have audited: documents with such a text are counted, and no stage processes them."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.corpus.documents import Document
from pipeline.corpus.keys import document_key
from pipeline.errors import UserError
from pipeline.store.files import Store

AGAINST = "against"
"""Key of a fingerprint for the digest of these texts."""

AUDITED_FILE = "judged.npy"
"""File of a run directory with the keys of these texts, int64, ascending, written once at the start of the run."""


@dataclass(frozen=True, slots=True)
class AuditedTexts:
    """The already audited texts of a run: location and digest of their keys, which are read when needed."""

    run: str  # run directory
    sha256: str  # hexadecimal digest of the file
    count: int

    def fingerprint(self) -> str:
        """The value in the fingerprints of stages."""
        return self.sha256

    def hold(self, document: Document) -> bool:
        """Whether an earlier run has audited a document with the same text, or the same pixels.

        Raises:
            UserError: the file is missing, or differs from the one that was written.
        """
        if not self.count:
            return False
        keys, key = _keys(self.run, self.sha256), document_key(document)
        if key is None:
            return False
        place = int(np.searchsorted(keys, key))
        return place < keys.size and int(keys[place]) == key


def write_audited_keys(store: Store, keys: np.ndarray) -> AuditedTexts:
    """Write the keys of audited texts, int64, (texts,), in any order and with repeats, into a run directory."""
    keys = np.unique(keys.astype(np.int64))
    file = io.BytesIO()
    np.save(file, keys)
    data = file.getvalue()
    store.write(AUDITED_FILE, data)
    return AuditedTexts(store.url, hashlib.sha256(data).hexdigest(), keys.size)


def read_audited_keys(store: Store, sha256: str) -> np.ndarray:
    """Read the keys of a run directory: int64, ascending.

    Raises:
        UserError: the file is missing, or does not have this SHA-256.
    """
    try:
        data = store.read(AUDITED_FILE)
    except FileNotFoundError:
        raise _damaged(store, "is missing") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _damaged(store, "is not the one that was written")
    return np.asarray(np.load(io.BytesIO(data)), dtype=np.int64)


@lru_cache(maxsize=1)
def _keys(run: str, sha256: str) -> np.ndarray:
    """The keys of a run directory, opened once per process: mapped from a local file, else read."""
    store = Store(run)
    if not store.local:
        return read_audited_keys(store, sha256)
    try:
        return np.asarray(np.load(store.path(AUDITED_FILE), mmap_mode="r"))
    except (OSError, ValueError):
        raise _damaged(store, "cannot be read") from None


def _damaged(store: Store, problem: str) -> UserError:
    return UserError(f"{store.url}/{AUDITED_FILE} {problem}: put it back, or start a new run directory")
