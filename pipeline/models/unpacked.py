"""Cache of unpacked GGUF files as plain weights, so that each machine unpacks a file once.

Reading a GGUF file takes many times as long as reading the same weights from safetensors. An entry is written by
transformers, and kept only if it reads back identically, bit for bit.
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

from pipeline.models.checkpoints import Checkpoint
from pipeline.models.files import known_digest

_log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the entries: entries of version 1 may hold random values for weights that a file lacked."""
LIBRARIES = ("gguf", "numpy", "tokenizers", "torch", "transformers")
"""Libraries whose versions may affect unpacked weights."""

ENTRY_FILE = "entry.json"
"""File of an entry with the digests of all its other files."""

SMALL_FILE = 1 << 30
"""Maximum bytes of a GGUF file that is cached in float32, for every dtype, and unpacked by the first check."""

DTYPES = ("float32", "bfloat16", "float16")

Opened = tuple[Any, Any]
"""A model and its tokenizer."""


def cache_folder() -> Path:
    """Folder of unpacked files: $SEENSET_CACHE, else $XDG_CACHE_HOME/seenset, else ~/.cache/seenset."""
    if folder := os.environ.get("SEENSET_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "seenset"


def is_small(source: Checkpoint) -> bool:
    """Whether a GGUF file is small enough to be unpacked by its first reader, even if only its settings are read."""
    return _file(source).stat().st_size <= SMALL_FILE


def unpacked_settings(source: Checkpoint) -> Checkpoint:
    """The files of a GGUF model's configuration and tokenizer: an entry of the cache if present, else the GGUF file."""
    for dtype in DTYPES:
        folder = _entry_folder(source, dtype)
        record = _whole_record(folder, weights=False)
        if record is not None and record["same"]:
            return Checkpoint(folder, None)
    return source


def unpacked(
    source: Checkpoint,
    dtype: str,
    unpack: Callable[[str], Opened],
    read_back: Callable[[Checkpoint, str], Opened],
) -> Checkpoint:
    """A folder with the model of a GGUF file as safetensors; it is created if the cache has none.

    Of concurrent processes one creates it and the others wait. If the cache cannot be written, a warning is logged once
    and the GGUF file is used.

    Args:
        source: GGUF file.
        dtype: dtype that the model will be loaded in.
        unpack: loads the GGUF file in a dtype, on the CPU.
        read_back: loads a folder in a dtype, on the CPU.

    Returns:
        The folder, which contains the same model as the file, or `source` if there is none.
    """
    kept = _kept_dtype(source, dtype)
    folder = _entry_folder(source, kept)
    if (record := _whole_record(folder)) is not None:
        return Checkpoint(folder, None) if record["same"] else source
    try:
        with _alone(folder):
            record = _whole_record(folder)
            if record is None:
                with _parsed_once():
                    opened = unpack(kept)
                record = _write(folder, opened, lambda attempt: read_back(Checkpoint(attempt, None), kept))
    except _CacheError as error:
        _warn(str(error))
        return source
    return Checkpoint(folder, None) if record["same"] else source


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
    """The cache cannot be used; the model is not affected."""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder for one process on this machine."""
    lock = FileLock(f"{folder}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # NotImplementedError: the file system has no locks
        raise _CacheError(_reason(error)) from error
    try:
        yield
    finally:
        lock.release()


def _write(folder: Path, opened: Opened, read_back: Callable[[Path], Opened]) -> dict[str, Any]:
    """Create an entry atomically. Its record states whether it reads back identically."""
    import torch

    model, tokenizer = opened
    if not torch.cuda.is_available():  # else DeepSpeed, imported by saving, prints that there is no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    attempt = None
    try:
        for left in folder.parent.glob(f".{folder.name}-*"):  # left by a killed process; this one has the lock
            shutil.rmtree(left, ignore_errors=True)
        attempt = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        model.save_pretrained(attempt)
        tokenizer.save_pretrained(attempt)
        same = _is_same(opened, read_back(attempt))
        if not same:
            for path in attempt.iterdir():
                path.unlink()
        record = {"files": {path.name: _digest(path) for path in sorted(attempt.iterdir())}, "same": same}
        (attempt / ENTRY_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # damaged
        attempt.rename(folder)
    except Exception as error:  # each library has another exception for a full disk
        raise _CacheError(_reason(error)) from error
    finally:
        if attempt is not None:
            shutil.rmtree(attempt, ignore_errors=True)
    return record


def _is_same(one: Opened, other: Opened) -> bool:
    """Whether two models and tokenizers are equal, with bitwise equal weights."""
    import torch

    left, right = one[0].state_dict(), other[0].state_dict()
    weights = left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
    return weights and _settings(one[0].config) == _settings(other[0].config) and _is_same_tokenizer(one[1], other[1])


def _settings(config: Any) -> dict[str, Any]:
    """The settings of a model that affect its results."""
    settings: dict[str, Any] = config.to_dict()
    return {key: value for key, value in settings.items() if key not in ("_name_or_path", "architectures", "dtype")}


def _is_same_tokenizer(one: Any, other: Any) -> bool:
    facts = ("is_fast", "special_tokens_map", "all_special_ids", "padding_side", "truncation_side", "model_max_length",
             "model_input_names", "chat_template", "clean_up_tokenization_spaces")  # fmt: skip
    if not one.is_fast or any(getattr(one, fact, None) != getattr(other, fact, None) for fact in facts):
        return False
    return bool(one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str())


def _whole_record(folder: Path, weights: bool = True) -> dict[str, Any] | None:
    """The record of an entry if its files (without weights, if not `weights`) are unchanged; else None."""
    try:
        record: dict[str, Any] = json.loads((folder / ENTRY_FILE).read_text(encoding="utf-8"))
        files = record["files"].items()
        read = [(name, digest) for name, digest in files if weights or not name.endswith(".safetensors")]
        names = {path.name for path in folder.iterdir()} - {ENTRY_FILE}  # a loader would read further ones
        whole = isinstance(record["same"], bool) and names == {*record["files"]}
        whole = whole and all(_digest(folder / name) == digest for name, digest in read)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return record if whole else None


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


def _entry_folder(source: Checkpoint, dtype: str) -> Path:
    """The folder of an entry; its name depends on the file's content, the dtype, and the library versions."""
    content = known_digest(_file(source))
    versions = {name: metadata.version(name) for name in LIBRARIES}
    identity = hashlib.sha256(json.dumps([FORMAT, content, dtype, versions]).encode()).hexdigest()
    return cache_folder() / "gguf" / identity[:32]


def _file(source: Checkpoint) -> Path:
    assert source.gguf is not None
    return source.folder / source.gguf


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@functools.cache
def _warn(reason: str) -> None:
    _log.warning(
        "the cache of unpacked GGUF files in %s cannot be used, so that each process unpacks for itself: %s",
        cache_folder(),
        reason,
    )
