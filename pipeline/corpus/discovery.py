"""Discovery of data in a folder: its files by format, their columns, and the role that a name suggests."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from pipeline.config.corpus import Role, SourceConfig
from pipeline.config.dialect import PLAIN, Dialect
from pipeline.config.misplaced import instead_of_documents
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.corpus.formats import (
    REMEDIES,
    content_format,
    first_rows,
    format_named,
    remedy_by_content,
    retired_suffix,
    suffix_format,
)
from pipeline.corpus.formats.base import Format, Unreadable, is_message, unwatched
from pipeline.corpus.formats.csv_file import CSV
from pipeline.corpus.formats.jsonl import remedy_of_one
from pipeline.corpus.formats.picture import IMAGE, PICTURE, is_picture
from pipeline.corpus.formats.saved import SAVED
from pipeline.corpus.formats.text import TEXT
from pipeline.corpus.input_files import detected, single_column_note
from pipeline.corpus.links import leads_out
from pipeline.corpus.notes import Notes
from pipeline.corpus.scripts import count_units
from pipeline.corpus.shard import InputFile, Shard, whole_shard
from pipeline.errors import UserError, error_line

_CAPTIONS = "txt"
"""Suffix of the files next to pictures that are assumed to be their captions."""

_IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp")
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")

DEPTH = 4
"""Maximum depth of folders that are searched."""

MOST_ENTRIES = 10_000
OUTPUT_MARKS = frozenset({"shards.json", "trial.json", "trial_status.json", "adapter_config.json", "pyvenv.cfg"})
"""Files that identify folders of runs, trials, adapters and installed packages."""

_PAIRS = (("prompt", "completion", ""), ("instruction", "output", "input"))
"""Names of columns of prompts, of their answers, and of what follows a prompt in Alpaca, if anything does."""

FEW_WORDS = 3
"""Minimum mean number of words of the values of a column of documents."""

TEXT_NAMES = ("text", "content", "body", "document", "passage", "article", "input", "sentence", "question", "abstract")
ID_NAMES = ("id", "doc_id", "document_id", "docid", "_id", "uid", "uuid", "guid", "key", "url", "link")
_NOT_DATA = re.compile(
    r"(readme|licen[cs]e|notice|changelog|requirements|constraints|robots|cmakelists)[^.]*\.txt|"
    r"(package(-lock)?|.*\.schema)\.json"
)
_SKIPPED = {"node_modules", "__pycache__", "site-packages", "venv"}
_INDEX = re.compile(r"(?<!\d)(?!(?:19|20)\d\d(?!\d))\d+")
"""A number in a file name that is not a year: the index of a part."""

_HEAD, _LONGEST_REASON = 1 << 10, 300

HIDDEN = "hidden"
"""Reason of files and folders whose names begin with a dot."""

_PICTURE_CAPTIONS = "captions of the pictures beside them"
_BESIDE_TABLES = (
    "text files beside tables, which may describe them; to audit them, move them into a folder, or join them"
)


ROLE_WORDS: dict[Role, str] = {
    "unseen": (
        "unseen unpublished draft drafts after aftercutoff postcutoff holdout heldout nonmember nonmembers notseen "
        "fresh novel future control controls calibration negatives"
    ),
    "audit": (
        "audit audited candidate candidates suspect suspects suspected query queries target targets judge unknown "
        "mixed benchmark benchmarks"
    ),
    "seen": "seen member members trained pretrained pretraining pretrain positives",
}
WEAK_WORDS: dict[Role, str] = {"seen": "train training trainset"}
"""Words that count only if no other part of a path suggests a role: hubs name every file `train`."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files of one format with the same columns, or a saved dataset."""

    paths: tuple[str, ...]  # relative to the folder, as a configuration names them: files, a folder or a glob
    format: str  # its name
    text: str | None  # column of the documents; None for text files
    text_reason: str  # why this column was chosen
    id: str | None
    columns: tuple[str, ...]  # the others
    role: Role | None  # suggested by the name
    word: str  # part of the name that suggests the role
    image: str | None = None  # column of the pictures; None for texts
    caption: str | None = None  # column of the captions, or suffix of their files
    count: int = 1  # number of files
    dialect: Dialect = PLAIN
    warning: str = ""  # about the columns
    content: Literal["text", "messages", "prompt"] = "text"  # setting that names `text`
    completion: str | None = None  # column of the answers to prompts

    @property
    def shown(self) -> str:
        """The paths in one line."""
        return ", ".join(self.paths)


@dataclass(frozen=True, slots=True)
class LeftFiles:
    """Files or folders of a folder that hold no documents for a configuration, or none that can be read."""

    shown: str  # a path, or a glob for several files
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class FolderData:
    """The data found in a folder, and everything else in it."""

    files: tuple[DataFiles, ...]
    unread: tuple[str, ...]  # files of a known format without documents, each with the reason
    left: tuple[LeftFiles, ...]  # everything that is not in `files`, with the reason
    complete: bool  # False if there were too many entries to examine all


def discover_data(folder: str) -> FolderData:
    """Search a folder for documents. Only the first rows of each file are read.

    Hidden folders, run directories, folders of trials, models and installed packages are not searched.

    Raises:
        UserError: the folder does not exist.
    """
    instead = instead_of_documents(folder)
    if not os.path.isdir(folder):
        raise UserError(f"no folder {folder}{f'; {instead}' if instead else ''}")
    if instead is not None:
        raise UserError(f"{folder} is no folder of documents: {instead}")
    left: list[tuple[str, str]] = []
    entries = list(itertools.islice(_entries(folder, "", DEPTH, left), MOST_ENTRIES + 1))
    files: list[DataFiles] = []
    unread: list[str] = []
    groups: dict[tuple[Any, ...], list[str]] = {}
    samples: dict[tuple[Any, ...], Sequence[Mapping[str, Any]]] = {}
    texts: dict[str, list[str]] = {}
    pictures = [path for path, form in entries[:MOST_ENTRIES] if form.only_pictures]
    captions = {f"{os.path.splitext(path)[0]}.{_CAPTIONS}" for path in pictures}
    for path, form in entries[:MOST_ENTRIES]:
        if form.only_pictures or path in captions:
            if path in captions:
                left.append((path, _PICTURE_CAPTIONS))
            continue
        if form.columns is None:
            texts.setdefault(os.path.dirname(path), []).append(path)
            continue
        try:
            key, rows = _table_in(folder, path, form, samples)
        except _NotReadError as error:
            unread.append(f"{path} ({error})")
            left.append((path, str(error)))
            continue
        groups.setdefault(key, []).append(path)
        samples.setdefault(key[:-1], rows)
    for key, paths in groups.items():
        named = _as_named(folder, paths, key[1])
        described = _described(named, key[2], key[3], samples[key[:-1]], image=key[-1])
        note = single_column_note(key[3]) if key[2] == CSV.name else ""
        files.append(replace(described, dialect=key[4], warning=note or described.warning, count=len(paths)))
    for names, paths in _picture_groups(entries[:MOST_ENTRIES], captions, groups, samples).items():
        role, word = guess_role(names[0])
        caption = _captions_beside(folder, paths)
        files.append(DataFiles(names, PICTURE.name, None, "", None, (), role, word, IMAGE, caption, len(paths)))
    for place, paths in texts.items():
        dialect = detected(os.path.join(folder, paths[0]), TEXT.settings)
        taken = dict(_text_files(folder, place, paths, alone=not groups))
        files += (replace(one, dialect=dialect) for one in taken)
        covered = {path for some in taken.values() for path in some}
        left += ((path, _BESIDE_TABLES) for path in paths if path not in covered)
    return FolderData(tuple(files), tuple(unread), _as_left(left), len(entries) <= MOST_ENTRIES)


class _NotReadError(Exception):
    """A file of a known format has no documents; states why."""


def _table_in(
    folder: str, path: str, form: Format, samples: Mapping[tuple[Any, ...], Sequence[Mapping[str, Any]]]
) -> tuple[tuple[Any, ...], Sequence[Mapping[str, Any]]]:
    """What the files of one kind have in common, and first rows of them.

    Args:
        folder: the folder that is searched.
        path: path of a table in it.
        form: format of its suffix.
        samples: first rows by kind, but for the column of pictures.

    Returns:
        (folder, pattern of names, format, columns, dialect, column of pictures), and the rows.

    Raises:
        _NotReadError: the table is not readable, has no rows, or no column of text.
    """
    place, name = os.path.split(path)
    pattern = path if form.is_folder else _INDEX.sub("*", name)
    try:
        where = os.path.join(folder, path)
        form = form if form.is_folder else content_format(form, where)
        assert form.columns is not None  # content is of tables only
        dialect = detected(where, form.settings)
        entry = InputFile("audit", path, where, form.name, 0, None, "", dialect=dialect)
        shard = whole_shard(entry, SourceConfig(path=where))
        columns = tuple(form.columns(shard))
        key: tuple[Any, ...] = (place, pattern, form.name, columns, dialect)
        rows = samples.get(key) or first_rows(shard)
        if not rows:
            raise ValueError(_first_problem(shard))
    except (
        UserError,
        ValueError,
        OSError,
        EOFError,
        LookupError,
        csv.Error,
        RecursionError,
        pa.ArrowException,
    ) as error:
        raise _NotReadError(_why_not_readable(os.path.join(folder, path), form.name, error)) from None
    image = _image_column(columns, rows, os.path.join(folder, place))
    if image is None and not chat_columns(columns, rows) and text_column(columns, rows) is None:
        content = _other_content(os.path.join(folder, path))  # a packed file may be read as a table of one odd column
        raise _NotReadError(content or f"no column of text{_where_texts_are(rows)}")
    return (*key, image), rows


def _first_problem(shard: Shard) -> str:
    """Why the first row of an input cannot be read; empty if it has no rows."""
    rows = format_named(shard.format).rows(shard, unwatched, Notes())
    return next((value.message for _, value, *_ in rows if isinstance(value, Unreadable)), "it has no rows")


def _why_not_readable(where: str, form: str, error: Exception) -> str:
    """The reason why a file of a known format, or a folder with a dataset, cannot be read."""
    return _other_content(where) or f"not readable as {form}: {error_line(error, _LONGEST_REASON)}"


def _other_content(where: str) -> str | None:
    """What a file is that is empty, or whose first bytes are of another kind than its suffix; None for others."""
    if not os.path.isfile(where):
        return None
    with open(where, "rb") as file:
        head = file.read(_HEAD)
    return remedy_by_content(where, head) if head else "it is empty"


def _where_texts_are(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the texts of rows without a column of text are; empty where none are found."""
    if len(rows) == 1 and (remedy := remedy_of_one(rows[0], "FILE")):
        return f": it is one object{remedy}"
    for name, value in rows[0].items():
        if isinstance(value, Mapping):
            objects = [one for row in rows if isinstance(one := row.get(name), Mapping)]
            inner = [{f"{name}.{key}": one for key, one in each.items()} for each in objects]
            if (column := text_column(list(inner[0]), inner)) is not None:
                return f", but a field of {name} may be one: text: {column[0]}"
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and is_message(value[0]):
            return f", but {name} holds lists of messages without an answer of the assistant"
        if isinstance(value, list) and value and isinstance(value[0], str):
            return f", but {name} holds lists of texts: join those of each"
    return ""


def _as_left(left: Sequence[tuple[str, str]]) -> tuple[LeftFiles, ...]:
    """The files that are left out, those of one folder, suffix and reason together, in order of their paths."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for path, reason in left:
        name = os.path.basename(path)
        suffix = "" if path.endswith("/") else ".*" if name.startswith(".") else os.path.splitext(name)[1].lower()
        together.setdefault((os.path.dirname(path.rstrip("/")), suffix, reason), []).append(path)
    entries = []
    for (place, suffix, reason), paths in together.items():
        glob = suffix if suffix == ".*" else f"*{suffix or '/' * paths[0].endswith('/')}"
        shown = paths[0] if len(paths) == 1 else os.path.join(place, glob)
        entries.append(LeftFiles(shown, len(paths), reason))
    return tuple(sorted(entries, key=lambda one: one.shown))


def _picture_groups(
    entries: Sequence[tuple[str, Format]],
    captions: Container[str],
    groups: Mapping[tuple[Any, ...], Sequence[str]],
    samples: Mapping[tuple[Any, ...], Sequence[Mapping[str, Any]]],
) -> dict[tuple[str, ...], list[str]]:
    """Picture files that no table refers to, by folders or globs as in a configuration.

    A folder whose name suggests a role holds the pictures of that role, with the folders in it; without such a name
    the outermost folder is used. Globs select the files if the folder also contains other data or another role, and
    for files outside of any folder.
    """
    by_path = [key for key in groups if key[-1] and isinstance(samples[key[:-1]][0].get(key[-1]), str)]
    named = tuple(os.path.join(key[0], "") for key in by_path)
    pictures = [path for path, form in entries if form.only_pictures and not path.startswith(named)]
    others = [path for path, form in entries if not form.only_pictures and path not in captions]
    tops: defaultdict[str, list[str]] = defaultdict(list)
    for path in pictures:
        parts = path.split("/")[:-1]
        ends = [end for end in range(len(parts), 0, -1) if guess_role(parts[end - 1])[0]]
        tops["/".join(parts[: (ends or [1])[0]])].append(path)
    by_name = {}
    for top, paths in tops.items():
        inside = [*others, *(path for other, some in tops.items() if other != top for path in some)]
        plain = top and not any(path.startswith(f"{top}/") for path in inside)
        names = {f"{os.path.dirname(path)}/*{os.path.splitext(path)[1]}".lstrip("/") for path in paths}
        by_name[(top,) if plain else tuple(sorted(names))] = paths
    return by_name


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a language model: a configuration that states its type."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool({"model_type", "architectures"} & settings.keys())


def discover_models(folder: str) -> list[str]:
    """GGUF files and folders of models in a folder, as a configuration names them, in order.

    At most MOST_ENTRIES files are examined; folders of runs and trials are skipped.
    """
    models: list[str] = []
    entries = 0
    for place, folders, names in os.walk(folder):
        inside = os.path.relpath(place, folder)
        entries += len(names)
        here = "" if inside == "." else f"{inside}/"
        models += [f"./{here}{name}" for name in sorted(names) if name.endswith(".gguf")]
        is_model = any(name.endswith((".safetensors", ".bin")) for name in names) and is_model_folder(Path(place))
        if is_model:
            models.append(f"./{inside}" if here else "./")
        deep = inside.count(os.sep) >= DEPTH or entries > MOST_ENTRIES
        folders[:] = (
            []
            if is_model or deep or OUTPUT_MARKS & set(names)
            else sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        )
    return models


def guess_role(path: str) -> tuple[Role | None, str]:
    """The role that a path suggests, and the word that suggests it: the last part of the path takes precedence."""
    parts = [_words(part) for part in reversed(path.split("/"))]
    for kinds in (ROLE_WORDS, WEAK_WORDS):
        for words in parts:
            pairs = ["".join(pair) for pair in itertools.pairwise(words)]
            for candidates in (pairs, words):
                for role, known in kinds.items():
                    if word := next((word for word in candidates if word in known.split()), ""):
                        denied = role == "seen" and {"not", "non", "never"} & set(words)
                        return ("unseen", f"not {word}") if denied else (role, word)
    return None, ""


def text_column(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The column that holds the documents, and why it was chosen; None if no column does."""
    lengths: dict[str, float] = {}
    for column in columns:
        values = [row.get(column) for row in rows if row.get(column) is not None]
        texts = [value for value in values if isinstance(value, str) and value.strip()]
        if texts and 2 * len(texts) >= len(values):
            lengths[column] = sum(map(count_units, texts)) / len(texts)
    for name in TEXT_NAMES:
        for column in lengths:
            if column.lower() == name and (name == TEXT_NAMES[0] or lengths[column] >= FEW_WORDS):
                return column, "by its name"
    longest = max(lengths, key=lambda column: lengths[column], default=None)
    if longest is None or lengths[longest] < FEW_WORDS:
        return None
    return longest, "it holds the longest texts"


def chat_columns(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The column of conversations, or the columns of prompts and of their answers, named as in `_PAIRS`.

    Empty if there are no chats, or a column of texts has the default name.
    """
    if any(isinstance(row.get(TEXT_NAMES[0]), str) for row in rows):
        return ()
    for column in columns:
        values = [row.get(column) for row in rows if row.get(column) is not None]
        read = [isinstance(read_conversation(value), Conversation) for value in values]
        if read and 2 * sum(read) >= len(read):
            return (column,)
    for *names, _ in _PAIRS:
        pairs = [[row[name] for name in names] for row in rows if {*names} <= row.keys()]
        read = [isinstance(read_completion(*pair), Conversation) for pair in pairs]
        if read and 2 * sum(read) >= len(read):
            return tuple(names)
    return ()


def _what_follows(prompt: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A warning about texts that follow the prompts in a column of their own; empty if there are none."""
    name = next(further for name, _, further in _PAIRS if name == prompt)
    held = sum(isinstance(value := row.get(name), str) and bool(value.strip()) for row in rows)
    stated = f"{name} is not read, which {held:,} of the first {len(rows):,} rows have: in a training a prompt is"
    warning = f"{stated} usually {prompt}, a blank line and {name}; write them into one column and name it here."
    return warning if held else ""


def id_column(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """The column of ids: chosen by its name, if no value is repeated in the first rows."""
    named = [column for name in ID_NAMES for column in columns if column.lower() == name]
    named += [column for column in columns if column.lower().endswith("_id") and column not in named]
    for column in named:
        values = [row.get(column) for row in rows]
        plain = all(isinstance(value, (str, int)) and not isinstance(value, bool) for value in values)
        if column != text and plain and len(set(values)) == len(values):
            return column
    return None


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\d)(?=[A-Za-z])|(?<=[A-Za-z])(?=\d)", " ", name)
    return re.findall(r"[a-z]+|\d+", spaced.lower())


def _entries(folder: str, place: str, depth: int, left: list[tuple[str, str]]) -> Iterator[tuple[str, Format]]:
    """Relative paths of data files and saved datasets, in order; others are added to `left`, with the reason."""
    try:
        entries = sorted(os.scandir(os.path.join(folder, place)), key=lambda entry: entry.name)
    except OSError as error:
        left.append((f"{place}/", f"not readable: {error.strerror}"))
        return
    for entry in entries:
        path = os.path.join(place, entry.name)
        if entry.name.startswith("."):
            left.append((path, HIDDEN))
        elif entry.is_symlink() and (reason := _why_not_followed(os.path.join(folder, path), folder)):
            left.append((f"{path}/" if entry.is_dir() else path, reason))
        elif entry.is_file():
            form = suffix_format(entry.name, pictures=True)
            if form is None:
                left.append((path, _why_not_read(entry.name)))
            elif _NOT_DATA.fullmatch(entry.name.lower()):
                left.append((path, "by its name no documents"))
            else:
                yield path, form
        elif not entry.is_dir():
            left.append((path, "not a regular file"))
        elif entry.name in _SKIPPED:
            left.append((f"{path}/", "installed packages"))
        else:
            yield from _below(folder, path, depth, left)


def _why_not_followed(path: str, folder: str) -> str:
    """The reason why a link is not followed; empty for one to a file of the folder."""
    if not os.path.exists(path):
        return "a link to nothing"
    if leads_out(path, folder):
        return "a link out of the folder; follow_links: true reads what is behind it"
    return "a link to another folder in it" if os.path.isdir(path) else ""


def _why_not_read(name: str) -> str:
    """The reason why a file of no known format is not read, with a remedy where there is one."""
    suffix = os.path.splitext(name.lower())[1]
    if suffix == ".gguf":
        return "a model"
    if line := retired_suffix(name):
        return line
    return f"not read; {REMEDIES[suffix]}" if suffix in REMEDIES else "not read: no format of documents"


def _below(folder: str, path: str, depth: int, left: list[tuple[str, str]]) -> Iterator[tuple[str, Format]]:
    inside = Path(folder, path)
    if (inside / "dataset_dict.json").is_file():
        yield from ((f"{path}/{part.parent.name}", SAVED) for part in sorted(inside.glob("*/dataset_info.json")))
    elif (inside / "dataset_info.json").is_file():
        yield path, SAVED
    elif is_model_folder(inside):
        left.append((f"{path}/", "a model"))
    elif any((inside / name).is_file() for name in OUTPUT_MARKS):
        left.append((f"{path}/", "a run, a trial, an adapter or an environment of Python"))
    elif depth == 0:
        left.append((f"{path}/", f"not searched: deeper than {DEPTH} folders"))
    else:
        yield from _entries(folder, path, depth - 1, left)


def _as_named(folder: str, paths: Sequence[str], pattern: str) -> tuple[str, ...]:
    """Paths as a configuration names them: a glob if it matches exactly these files."""
    if len(paths) == 1:
        return tuple(paths)
    place = os.path.dirname(paths[0])
    matching = sorted(os.path.join(place, match.name) for match in Path(folder, place).glob(pattern))
    return (os.path.join(place, pattern),) if matching == sorted(paths) else tuple(paths)


def _described(
    paths: tuple[str, ...],
    form: str,
    columns: tuple[str, ...],
    rows: Sequence[Mapping[str, Any]],
    image: str | None,
) -> DataFiles:
    chats = chat_columns(columns, rows) if image is None else ()
    text, reason = text_column(columns, rows) or ("", "")
    content: Literal["text", "messages", "prompt"] = "prompt" if len(chats) > 1 else "messages" if chats else "text"
    completion = chats[1] if content == "prompt" else None
    if chats:
        text, reason = chats[0], "it holds chats"
    name = id_column(columns, rows, text)
    others = tuple(column for column in columns if column not in (text, completion, name, image))
    role, word = guess_role(paths[0])
    if image is None:
        warning = _what_follows(text, rows) if completion else ""
        made = DataFiles(paths, form, text, reason, name, others, role, word, content=content)
        return replace(made, warning=warning, completion=completion)
    return DataFiles(paths, form, None, "", name, others, role, word, image, text or None)


def _text_files(
    folder: str, place: str, paths: Sequence[str], alone: bool
) -> Iterator[tuple[DataFiles, Sequence[str]]]:
    """Text files as documents, with their paths: a folder's together, also the outermost one's if it has no tables.

    A text file whose name has a role is one document. Others next to tables usually describe them.
    """
    plain = DataFiles((), TEXT.name, None, "", None, (), None, "")
    named = {path: guess_role(path) for path in paths}
    if place and len(paths) > 1:
        yield (
            replace(plain, paths=(place,), role=guess_role(place)[0], word=guess_role(place)[1], count=len(paths)),
            paths,
        )
        return
    for path, (role, word) in named.items():
        if role is not None:
            yield replace(plain, paths=(path,), role=role, word=word), [path]
    others = [path for path, (role, _) in named.items() if role is None]
    if alone and others:
        yield replace(plain, paths=_as_named(folder, others, f"*{TEXT.suffixes[0]}"), count=len(others)), others


def _image_column(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], place: str) -> str | None:
    """The column that holds pictures, or paths of picture files relative to the table; None if no column does.

    Args:
        columns: columns of the table.
        rows: some of its rows.
        place: folder of the table.
    """
    held = []
    for column in columns:
        values = [row[column] for row in rows if row.get(column) is not None]
        if values and 2 * sum(_is_picture(value, place) for value in values) > len(values):
            held.append(column)
    named = [column for name in _IMAGE_NAMES for column in held if column.lower() == name]
    return next(iter([*named, *held]), None)


def _is_picture(value: Any, place: str) -> bool:
    if isinstance(value, dict):
        return value.keys() == {"bytes", "path"}
    if isinstance(value, str):
        return is_picture(value) and "://" not in value and os.path.isfile(os.path.join(place, value))
    if isinstance(value, bytes):
        return value.startswith(_BEGINNINGS)
    return hasattr(value, "getbands")  # decoded by a saved dataset


def _captions_beside(folder: str, pictures: Sequence[str]) -> str | None:
    """The suffix of the caption files of picture files: at least half of the pictures have such a file next to them."""
    count = sum(Path(folder, os.path.splitext(path)[0] + f".{_CAPTIONS}").is_file() for path in pictures)
    return _CAPTIONS if 2 * count >= len(pictures) else None
