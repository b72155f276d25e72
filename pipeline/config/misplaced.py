"""What a path is that stands in the place of a configuration, a run directory or a folder of documents, and what to do.

Only names and the first bytes of local files are looked at. Each clause ends a message of an error.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from itertools import islice

CONFIG_SUFFIXES = (".yaml", ".yml")
DATA_SUFFIXES = (
    *(".parquet", ".pq", ".jsonl", ".ndjson", ".csv", ".tsv", ".arrow", ".arrows", ".feather", ".tar", ".txt", ".json"),
    *(".gz", ".zst", ".eval"),
)
"""Suffixes of files that hold documents, or may."""

OTHER_DOCUMENTS = (
    *(".pdf", ".docx", ".doc", ".odt", ".rtf", ".epub", ".xlsx", ".xls", ".pptx", ".md", ".tex", ".xml"),
)
"""Suffixes of documents whose text Seenset does not read from their files."""

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
PAGES = (".html", ".htm")
ARCHIVES = (".zip", ".bz2", ".xz", ".7z", ".rar")
"""Suffixes of files that are not unpacked."""

OTHER_SETTINGS = (".toml", ".ini", ".cfg", ".conf", ".env", ".py", ".sh", ".ipynb", ".r")
"""Suffixes of settings and programs that are not YAML."""

MODEL_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
RUN_FILES = ("manifest.json", "shards.json")
"""The files of every run directory."""

_MODEL_FILES = ("adapter_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_BUNDLE_END = b"seenset evidence bundle"
_MAGIC = (b"PAR1", b"ARROW1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # Parquet, Arrow, gzip, zstd
_PACKED = (b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"7z\xbc\xaf", b"Rar!")
_LINES = re.compile(rb"\s*\{[^\n]*\}\r?\n\s*\{")  # two lines of JSON
_RUN_SETTING = re.compile(r"^run:\s*['\"]?([^'\"#\n]+?)['\"]?\s*(?:#.*)?$", re.MULTILINE)
_DRIVE = re.compile(r"([A-Za-z]):[\\/]")
_MOST, _DEEPEST, _BYTES = 200, 6, 1 << 16


def instead_of_config(path: str) -> str | None:
    """What to do where a path is no configuration; None where it may be one."""
    if "://" in path:
        local = path.removeprefix("file://")
        return f"give {_word(local)}" if local != path else "a configuration is a file of this machine: copy it here"
    if not _exists(path):
        if (run := run_around(path)) is not None:
            return f"its folder is in a run directory: seenset status {_word(run)} shows the run"
        return _instead_of_missing(path, CONFIG_SUFFIXES, _init(os.path.dirname(os.path.expanduser(path))))
    if os.path.isdir(path):
        return what_folder(path) or _configurations(path) or (_init(path) if _names(path) else "it is empty")
    if not path.endswith(CONFIG_SUFFIXES) and (run := run_around(path)) is not None:
        return f"it is a file of a run directory: seenset status {_word(run)} shows the run"
    return _what_file(path)


def instead_of_run(path: str) -> str | None:
    """What to do where a path is no run directory; None where nothing is known."""
    if "://" in path:
        return None
    if not _exists(path):
        return _instead_of_missing(path, (), None)
    if (run := run_around(path)) is not None:
        return f"it is in a run directory: give {_word(run)}"
    if os.path.isdir(path):
        if configs := _configs_in(path):
            return _advise_run(configs[0])
        return what_folder(path) or (_init(path) if _names(path) else "it is empty")
    return _advise_run(path) if path.endswith(CONFIG_SUFFIXES) else _what_file(path)


def _advise_run(config: str) -> str:
    """What to do in place of naming a configuration: name its run directory, or make it."""
    setting = _RUN_SETTING.search(_beginning(config).decode("utf-8-sig", "replace"))
    if setting is None:
        return f"give the folder that the setting run of {_word(config)} names"
    run = setting[1].strip()
    run = run if "://" in run else os.path.join(os.path.dirname(config), os.path.expanduser(run))
    made = "" if "://" in run or is_run(run) else f", which seenset run {_word(config)} makes"
    return f"give the folder that its setting run names, {_word(run)}{made}"


def instead_of_documents(path: str) -> str | None:
    """What to do where `init` is given something other than a folder of documents; None for another folder."""
    if "://" in path:
        return "init looks through a folder of this machine: name documents elsewhere by their URL in a configuration"
    if not _exists(path):
        return _instead_of_missing(path, None, None)
    if (run := path if is_run(path) else run_around(path)) is not None:
        return f"it is {'a' if run == path else 'in a'} run directory: seenset status {_word(run)} shows the run"
    if os.path.isdir(path):
        return None
    if path.endswith(CONFIG_SUFFIXES):
        return f"it is a configuration: seenset plan {_word(path)}"
    return f"it is a file: {_init(os.path.dirname(path))}"


_ESCAPES = {character: f"\\{letter}" for character, letter in zip("\0\a\b\t\n\v\f\r\x1b", "0abtnvfre", strict=True)}
"""What YAML makes of a letter behind a backslash in double quotes -> both."""


def with_backslashes(path: str) -> str:
    r"""A path as it was written: YAML makes a tab of the t in `"C:\temp"`, which has double quotes."""
    return re.sub("[\0\a\b\t\n\v\f\r\x1b]", lambda escaped: _ESCAPES[escaped[0]], path)


def of_other_system(path: str, folder: str = "") -> str | None:
    """What to write in place of a path of Windows on another system; None for other paths.

    Args:
        path: path that does not exist.
        folder: folder that it is relative to; empty for the working directory.
    """
    written = with_backslashes(path)
    if os.name == "nt" or ("\\" not in written and not _DRIVE.match(path)):
        return None
    slashed = written.replace("\\", "/")
    if _exists(os.path.join(folder, slashed)):
        return f"did you mean {slashed}?"
    if "\\" not in path and not _DRIVE.match(written):
        return None  # a name with a line break
    if drive := _DRIVE.match(slashed.removeprefix(f"{os.getcwd()}/")):
        slashed = drive.string
        mounted = f"/mnt/{drive[1].lower()}/{slashed[3:]}"
        return f"a path of Windows; under WSL it is {mounted}"
    return f"paths are written with /: {slashed}"


def is_run(path: str) -> bool:
    """Whether a local path is a run directory."""
    return all(_exists(os.path.join(path, name)) for name in RUN_FILES)


def run_around(path: str) -> str | None:
    """The run directory that a local path is in; None where it is in none."""
    inner = os.path.abspath(path)
    for _ in range(_DEEPEST):
        inner = os.path.dirname(inner)
        if is_run(inner):
            return _shown(inner)
    return None


def what_folder(path: str) -> str | None:
    """What a folder is; None for one of documents, or an unknown one."""
    if is_run(path):
        given = _word(path)
        return f"it is a run directory: seenset status {given} shows it, seenset report {given} writes its report again"
    if (run := run_around(path)) is not None:
        return f"it is in a run directory: seenset status {_word(run)} shows the run"
    if _is_model(path):
        return f"it is a model: name it in a configuration, as model: {{path: {_shown(path)}}}"
    runs = [name for name in sorted(_names(path)) if is_run(os.path.join(path, name))]
    if runs:
        return f"it holds run directories: give {' or '.join(_word(os.path.join(path, run)) for run in runs[:3])}"
    return None


def _is_model(folder: str) -> bool:
    return any(name in _MODEL_FILES or name.endswith(MODEL_SUFFIXES) for name in _names(folder))


def _what_file(path: str) -> str | None:
    """What a file is; None where it may be a configuration."""
    start, folder = _beginning(path), os.path.dirname(path)
    lower = path.lower()
    if lower.endswith(MODEL_SUFFIXES):
        named = path if lower.endswith(".gguf") else folder or "."
        return f"it is a model: name it in a configuration, as model: {{path: {_shown(named)}}}"
    if not start:
        return f"it is empty: {_init(folder)}" if _exists(path) and os.path.isfile(path) else None
    if _BUNDLE_END in _end(path):
        return f"it is a bundle: seenset verify {_word(path)}"
    if lower.endswith(PAGES) or re.match(rb"\s*(<!doctype html|<html)", start, re.IGNORECASE):
        return f"it is a page of HTML, not settings: {_init(folder)}"
    if lower.endswith(".json") and _is_model(folder or "."):
        return f"it belongs to a model: name it in a configuration, as model: {{path: {_shown(folder or '.')}}}"
    if lower.endswith(OTHER_SETTINGS):
        return f"a configuration is YAML: {_init(folder)}"
    if lower.endswith(OTHER_DOCUMENTS) or start.startswith(b"%PDF"):
        return f"write the texts of such documents to .txt, .jsonl or .parquet files; then {_init(folder)}"
    if lower.endswith(ARCHIVES) or start.startswith(_PACKED):
        return f"it is an archive: unpack it; then {_init(folder)}"
    if (
        lower.endswith(PICTURES)
        or start.startswith(_MAGIC)
        or _LINES.match(start)
        or (lower.endswith(DATA_SUFFIXES) and not _has_settings(start))
    ):
        return f"it holds documents: {_init(folder)}"
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "save it as UTF-8 text"
    return f"it holds no text: {_init(folder)}" if b"\0" in start or start.startswith(b"\x80") else None


def _has_settings(start: bytes) -> bool:
    """Whether the beginning of a text names settings that every configuration has."""
    return re.search(rb"(^|[{,]\s*)\"?(run|corpus|documents)\"?\s*:", start, re.MULTILINE) is not None


def _instead_of_missing(path: str, suffixes: tuple[str, ...] | None, otherwise: str | None) -> str | None:
    """What may be meant by a path that does not exist: one of Windows, of the home folder, or a similar name.

    Args:
        path: the path.
        suffixes: of the files that may be meant; none for run directories, None for folders of documents.
        otherwise: what to do where there is no such name.
    """
    if (windows := of_other_system(path)) is not None:
        return windows
    home = os.path.expanduser(path)
    if home != path and _exists(home):
        return f"did you mean {home}?"
    folder, name = os.path.split(home.rstrip("/"))
    if folder and not os.path.isdir(folder):
        return f"no folder {folder} either"
    known = {one: os.path.join(folder, one) for one in _names(folder) if not one.startswith(".")}
    if suffixes is None:
        known = {one: place for one, place in known.items() if os.path.isdir(place) and what_folder(place) is None}
    elif suffixes:
        known = {one: place for one, place in known.items() if one.endswith(suffixes)}
    else:
        below = os.path.join(folder, "runs")
        known |= {one: os.path.join(below, one) for one in _names(below)}
        known = {one: place for one, place in known.items() if is_run(place)}
    full = [one for one in known if name.lower() in (one.lower(), suffixes and os.path.splitext(one)[0].lower())]
    near = full or difflib.get_close_matches(name, known, n=1, cutoff=0.5) or (list(known) if len(known) == 1 else [])
    return f"did you mean {_shown(known[near[0]])}?" if near else otherwise


def _configurations(path: str) -> str | None:
    configs = _configs_in(path)
    return f"did you mean {' or '.join(configs[:3])}?" if configs else None


def _configs_in(path: str) -> list[str]:
    return [os.path.join(path, name) for name in sorted(_names(path)) if name.endswith(CONFIG_SUFFIXES)]


def _init(folder: str) -> str:
    """The command that makes a configuration for the documents in a folder, or reads the one in it."""
    folder = _shown(folder or ".")
    if _exists(os.path.join(folder, "audit.yaml")):
        return f"seenset plan {_word(os.path.join(folder, 'audit.yaml'))} reads the configuration in its folder"
    return f"seenset init {_word(folder)} writes {_word(os.path.join(folder, 'audit.yaml'))} for the documents in it"


def _names(folder: str) -> list[str]:
    try:
        with os.scandir(folder or ".") as entries:
            return [entry.name for entry in islice(entries, _MOST)]
    except OSError:
        return []


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # a null byte
        return False


def _beginning(path: str) -> bytes:
    return _read(path, 0)


def _end(path: str) -> bytes:
    return _read(path, -len(_BUNDLE_END))


def _read(path: str, place: int) -> bytes:
    """Bytes of a regular file from a place; empty where they cannot be read."""
    try:
        if not os.path.isfile(path):
            return b""
        with open(path, "rb") as file:
            file.seek(max(place + os.path.getsize(path), 0) if place < 0 else place)
            return file.read(_BYTES)
    except (OSError, ValueError):
        return b""


def _shown(path: str) -> str:
    """A path as a command in the working directory names it."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") and os.path.isabs(path) else relative


def _word(path: str) -> str:
    return path if "://" in path else shlex.quote(_shown(path))
