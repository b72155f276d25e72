"""Cache of unpacked GGUF files as plain weights, so that each machine unpacks a file once.

Reading a GGUF file takes many times as long as reading the same weights from safetensors. An entry is written by
transformers, reopened before it is used, and checked by the digests of its files at every opening. A GGUF model is
always opened from an entry: where the cache cannot be written, from one in the temporary folder of the process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash
from filelock import FileLock

from pipeline.errors import FullError, UserError, error_line, is_full
from pipeline.models.checkpoints import Checkpoint
from pipeline.models.model_files import known_digest, process_folder
from pipeline.models.stored import TYPES

_log = logging.getLogger(__name__)

FORMAT = 4
"""Version of the entries; those of other versions are not read."""

LIBRARIES = ("gguf", "numpy", "tokenizers", "torch", "transformers")
"""Libraries whose versions may affect unpacked weights."""

ENTRY_FILE = "entry.json"
"""File of an entry with the digests of all its other files."""

SMALL_FILE = 1 << 30
"""Maximum bytes of a GGUF file that is unpacked in float32, for every dtype, and by the first check."""

Opened = tuple[Any, Any]
"""A model and its tokenizer."""


def cache_folder() -> Path:
    """Folder of unpacked files: $SEENSET_CACHE, else $XDG_CACHE_HOME/seenset, else ~/.cache/seenset.

    A process whose user has no home directory has its own temporary folder.
    """
    try:
        if folder := os.environ.get("SEENSET_CACHE"):
            return Path(folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "seenset"
    except RuntimeError:  # no home directory
        return process_folder()


def is_small(source: Checkpoint) -> bool:
    """Whether a GGUF file is small enough to be unpacked by its first reader, even if only its settings are read."""
    return _file(source).stat().st_size <= SMALL_FILE


def unpacked_settings(source: Checkpoint) -> Checkpoint:
    """The files of a GGUF model's configuration and tokenizer: an entry of any dtype if present, else the GGUF file."""
    folders = [folder for dtype in TYPES.values() for folder in _folders(source, dtype)]
    whole = next((folder for folder in folders if _is_whole(folder, weights=False)), None)
    return source if whole is None else Checkpoint(whole, None)


def unpacked(
    source: Checkpoint, dtype: str, unpack: Callable[[str], Opened], reopen: Callable[[Checkpoint, str], object]
) -> Checkpoint:
    """A folder with the model of a GGUF file as safetensors; it is created if there is none.

    Of concurrent processes one creates it and the others wait. If the cache cannot be written, a warning is logged once
    and the folder is one of this process.

    Args:
        source: GGUF file.
        dtype: dtype that the model will be loaded in.
        unpack: loads the GGUF file in a dtype, on the CPU.
        reopen: loads a new folder in a dtype, on the CPU; raises UserError for weights that are missing, unexpected or
            of another shape.

    Raises:
        UserError: the errors of `unpack` and `reopen`, or no folder can be written.
    """
    kept = _kept_dtype(source, dtype)
    folders = _folders(source, kept)
    for folder in folders:
        if _is_whole(folder):
            return Checkpoint(folder, None)
    for folder in folders:
        try:
            _create(folder, lambda: unpack(kept), lambda attempt: reopen(attempt, kept))
        except _CacheError as error:
            reason, full = str(error), is_full(error)
            if folder is folders[0]:
                _warn(reason)
            continue
        return Checkpoint(folder, None)
    kind = FullError if full else UserError
    raise kind(
        f"GGUF file {source.gguf} cannot be unpacked, neither in {cache_folder()} nor in {tempfile.gettempdir()}: "
        f"{reason}; set SEENSET_CACHE to a folder that can be written and has space for its weights in {kept}"
    )


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Cache repeated work of transformers while it unpacks a file.

    It parses the file for settings, tokenizer and weights, and lists the names of all tensors for each module.
    """
    import gguf

    library: Any = gguf
    repeated = {"GGUFReader": library.GGUFReader, "get_tensor_name_map": library.get_tensor_name_map}
    for name, function in repeated.items():
        setattr(library, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in repeated.items():
            setattr(library, name, function)


class _CacheError(Exception):
    """A folder cannot be written; the model is not affected."""


@contextmanager
def _writing() -> Iterator[None]:
    """Convert errors of locks and of writing: each library has another exception for a full disk."""
    try:
        yield
    except Exception as error:
        raise _CacheError(error_line(error) or type(error).__name__) from error


def _create(folder: Path, unpack: Callable[[], Opened], reopen: Callable[[Checkpoint], object]) -> None:
    """Create an entry atomically, unless another process did so before this one had the lock."""
    with _writing():
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        lock.acquire()
    try:
        if _is_whole(folder):
            return
        for left in folder.parent.glob(f".{folder.name}-*"):  # left by a killed process; this one has the lock
            shutil.rmtree(left, ignore_errors=True)
        with _writing():
            attempt = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with _parsed_once():
                opened = unpack()
            with _writing():
                _save(opened, attempt)
            del opened  # else two models are in memory
            reopen(Checkpoint(attempt, None))
            with _writing():
                shutil.rmtree(folder, ignore_errors=True)  # damaged
                attempt.rename(folder)
        finally:
            shutil.rmtree(attempt, ignore_errors=True)
    finally:
        lock.release()


def _save(opened: Opened, folder: Path) -> None:
    """Write a model, its tokenizer, and the digests of their files."""
    import torch

    if not torch.cuda.is_available():  # else DeepSpeed, imported by saving, prints that there is no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for part in opened:
        part.save_pretrained(folder)
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / ENTRY_FILE).write_text(json.dumps({"files": digests}, indent=1) + "\n", encoding="utf-8")


def _is_whole(folder: Path, weights: bool = True) -> bool:
    """Whether the files of an entry (without weights, if not `weights`) exist and are unchanged."""
    try:
        digests: dict[str, str] = json.loads((folder / ENTRY_FILE).read_text(encoding="utf-8"))["files"]
        names = {path.name for path in folder.iterdir()} - {ENTRY_FILE}  # a loader would read further ones
        read = [name for name in digests if weights or not name.endswith(".safetensors")]
        return names == {*digests} and all(_digest(folder / name) == digests[name] for name in read)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    """XXH3 of a file's content: as fast as memory, and sufficient to detect damage."""
    content = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            content.update(block)
    return content.hexdigest()


def _kept_dtype(source: Checkpoint, dtype: str) -> str:
    """The dtype of a cached file: float32 if transformers itself casts from float32.

    A large file is cached in the requested dtype, so that unpacking takes no more memory than loading.
    """
    if dtype == "float32" or (is_small(source) and _is_unpacked_in_float32(_file(source))):
        return "float32"
    return dtype


def _is_unpacked_in_float32(path: Path) -> bool:
    """Whether transformers unpacks a file in float32 and then casts; some architectures are unpacked in the dtype."""
    try:
        from transformers.integrations.gguf.reader import read_gguf_metadata
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:
        return True  # this release has only one way
    try:
        return not is_gguf_arch_supported(read_gguf_metadata(str(path))[0]["general.architecture"])
    except Exception:  # damaged file: the loader reports the problem
        return False


def _folders(source: Checkpoint, dtype: str) -> list[Path]:
    """The folders of an entry, in the cache and of this process, which has one for each cache that it cannot write to.

    The name depends on the content of the file, the dtype, and the versions of libraries.
    """
    content, cache = known_digest(_file(source)), cache_folder()
    versions = {name: metadata.version(name) for name in LIBRARIES}
    identity = hashlib.sha256(json.dumps([FORMAT, content, dtype, versions]).encode()).hexdigest()[:32]
    other = hashlib.sha256(os.fsencode(cache)).hexdigest()[:16]
    return [cache / "gguf" / identity, process_folder() / "gguf" / other / identity]


def _file(source: Checkpoint) -> Path:
    assert source.gguf is not None
    return source.folder / source.gguf


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(
        "the cache of unpacked GGUF files in %s cannot be used, so that each process unpacks into a temporary folder: "
        "%s",
        cache_folder(),
        reason,
    )
