"""A commented starter configuration for the files of a folder; comments state what was guessed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES, Role, SourceConfig
from pipeline.config.misplaced import what_folder
from pipeline.config.selection import NULL_ROLE, Direction, SelectionConfig
from pipeline.config.yaml import Written, comment, commented, config_schema
from pipeline.corpus.discovery import (
    DEPTH,
    HIDDEN,
    MOST_ENTRIES,
    DataFiles,
    FolderData,
    discover_data,
    discover_models,
)
from pipeline.corpus.formats import document_suffixes, format_named
from pipeline.corpus.formats.picture import IMAGE
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.plan import starter_text as wording
from pipeline.plan.starter_text import add_role
from pipeline.selection.procedures import PROCEDURES
from pipeline.store.files import to_json, whole
from pipeline.wording import some_of

SCHEMA_FOLDER = ".seenset"
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M"
HUB_PICTURE_MODEL = "llava-hf/llava-1.5-7b-hf"
DETECTOR = "min_k_plus_plus"
RECOMMENDED: Mapping[str, Any] = {"procedure": "storey", "ranks": "smoothed"}
"""What a selection is recommended to ask: docs/procedures.md states why, README.md and the demo ask the same."""
PICTURE_DETECTOR = {"renyi": {"part": "description"}}


@dataclass(frozen=True, slots=True)
class Source:
    """The data of one role: the values of its setting, and the guesses."""

    files: tuple[DataFiles, ...]  # with the same columns for text and id
    reason: str  # reason for this role
    left_out: tuple[DataFiles, ...] = ()  # files of the same role with other columns

    @property
    def paths(self) -> list[str]:
        """The value of the setting `path`."""
        return [path for files in self.files for path in files.paths]


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A row of the table of everything in a folder."""

    files: str  # paths, a folder or a glob
    count: int
    taken_as: str | None  # a role, or `documents` of a trial
    reason: str  # what is read of them, or why they are not taken


@dataclass(frozen=True, slots=True)
class Starter:
    """A starter configuration and its notes for the user."""

    name: str  # file name without suffix
    kind: type[BaseModel]
    text: str
    guesses: tuple[str, ...]  # one line each
    missing: tuple[str, ...]  # settings to add before a run, one line each
    contents: tuple[FolderEntry, ...]  # everything in the folder


def audit_starter(folder: str) -> Starter:
    """The starter configuration for an audit of the data in a folder.

    Raises:
        UserError: no such folder, or no data in it.
    """
    data = find_data(folder)
    sources, unused, others = _assigned(data)
    pictured = any(files.image for source in sources.values() for files in source.files)
    direction: Direction = "clean" if "seen" in sources and "unseen" not in sources else "members"
    needed: tuple[Role, ...] = ("audit", NULL_ROLE[direction])
    roles = [_role(role, sources.get(role), role in needed, pictured) for role in ROLES]
    left = [wording.without_role(files.shown) for files in unused]
    left += [wording.of_other_kind(files.shown, pictured) for files in others]
    model, model_guess = model_setting(folder, pictured)
    settings = [
        Written("run", "runs/audit"),
        Written("model", model),
        Written("corpus", roles, tuple(left)),
        detectors_setting(AuditConfig, pictured),
        Written("max_tokens", AuditConfig.model_fields["max_tokens"].default),
        Written("overlap", AuditConfig.model_fields["overlap"].default),
        Written("error_budget", AuditConfig.model_fields["error_budget"].default),
        Written("selections", (selection_setting(direction, pictured),)),
        Written("seed", AuditConfig.model_fields["seed"].default),
    ]
    guesses = [f"{role}: {some_of(source.paths)}; {_columns(source.files[0])}" for role, source in sources.items()]
    return Starter(
        "audit.yaml",
        AuditConfig,
        whole_file(AuditConfig, "audit", wording.AUDIT_HEAD, ("plan", "run"), settings, data),
        (*guesses, model_guess),
        tuple(add_role(role) for role in needed if role not in sources),
        folder_contents(
            data,
            sources,
            [(files, wording.NO_ROLE) for files in unused] + [(files, wording.OTHER_KIND) for files in others],
        ),
    )


def folder_contents(
    data: FolderData, sources: Mapping[Any, Source], unused: Sequence[tuple[DataFiles, str]]
) -> tuple[FolderEntry, ...]:
    """The table of everything in a folder: what was taken, what not, and why.

    Args:
        data: data of the folder.
        sources: role, or `documents` -> its source.
        unused: further data, with the reason why it is not taken.
    """
    rows = []
    for name, source in sources.items():
        rows += [FolderEntry(_named(files), files.count, name, _columns(files)) for files in source.files]
    for source in sources.values():
        for files in source.left_out:
            reason = wording.differs_from(_named(source.files[0]), _columns(files))
            rows.append(FolderEntry(_named(files), files.count, None, reason))
    rows += [FolderEntry(_named(files), files.count, None, reason) for files, reason in unused]
    rows += [FolderEntry(left.shown, left.count, None, left.reason) for left in data.left]
    if not data.complete:
        rows.append(FolderEntry("...", 0, None, wording.first_files(MOST_ENTRIES)))
    return tuple(rows)


def _named(files: DataFiles) -> str:
    return some_of(files.paths)


def write_starter(folder: str, starter: Starter) -> tuple[str, str]:
    """Write the configuration and its JSON schema next to it; returns both paths.

    Raises:
        UserError: the file exists already, or the folder cannot be written to.
    """
    path, schema = Path(folder, starter.name), Path(folder, SCHEMA_FOLDER, f"{Path(starter.name).stem}.schema.json")
    try:
        with path.open("x", encoding="utf-8") as file, whole(path):
            file.write(starter.text)
            file.flush()
            schema.parent.mkdir(exist_ok=True)
            schema.write_bytes(to_json(config_schema(starter.kind, tuple(PROCEDURES))))
    except FileExistsError:
        raise UserError(f"{path} exists already; remove it, or give another folder") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return str(path), str(schema)


def find_data(folder: str) -> FolderData:
    """The data of a folder.

    Raises:
        UserError: no such folder, or no data in it.
    """
    data = discover_data(folder)
    if not data.files:
        left_out = [wording.counted(left.shown, left.count, left.reason) for left in data.left if left.reason != HIDDEN]
        unread = f"; not taken: {some_of(left_out)}" if left_out else wording.ALL_HIDDEN if data.left else wording.EMPTY
        if (what := what_folder(folder)) is not None:
            unread = f"; {what}"
        raise UserError(
            f"no documents in {os.path.abspath(folder)}: init looks {DEPTH} folders deep for files that end in "
            f"{document_suffixes(pictures=False)}, for pictures and for saved "
            f"datasets{unread}"
        )
    return data


def source_settings(source: Source) -> list[Written]:
    """The settings of a source, with guesses about its columns."""
    files, paths = source.files[0], source.paths
    settings = [Written("path", paths[0] if len(paths) == 1 else paths)]
    for name, value in files.dialect.differing().items():
        settings.append(Written(name, value, (wording.DIALECT,)))
    if files.image is not None:
        settings.append(Written("image", files.image, (wording.PICTURES,)))
        if files.caption is not None:
            settings.append(Written("caption", files.caption, (wording.CAPTIONS,)))
        if files.id is not None:
            settings.append(Written("id", files.id, (wording.PICTURE_IDS,)))
    elif files.text is not None:
        settings.append(Written(files.content, files.text, (wording.guessed_text(files.text_reason, files.columns),)))
        if files.completion is not None:
            settings.append(Written("completion", files.completion))
        settings.append(Written("id", files.id, (wording.NO_IDS if files.id is None else wording.IDS,)))
    return settings


def source_notes(source: Source) -> list[str]:
    """The reason for the role of documents, and the files that were left out."""
    notes = [source.reason, *([f"Warning: {files.warning}"] if (files := source.files[0]).warning else [])]
    for files in source.left_out:
        notes.append(wording.of_other_columns(files.shown, _columns(files)))
    return notes


def joined(files: Sequence[DataFiles], reason: str) -> Source:
    """One source of files: those with the columns of the first table, if there is a table."""
    first = next((one for one in files if one.text is not None or one.id is not None), files[0])
    columns = (first.content, first.text), first.id, first.image, first.caption, first.dialect
    same = tuple(
        one for one in files if ((one.content, one.text), one.id, one.image, one.caption, one.dialect) == columns
    )
    return Source(same, reason, tuple(one for one in files if one not in same))


def model_setting(folder: str, pictured: bool) -> tuple[list[Written], str]:
    """The model: one in the folder, or a hub id as a placeholder; and a line about it."""
    models = discover_models(folder)
    if not models:
        name = HUB_PICTURE_MODEL if pictured else HUB_MODEL
        return [Written("path", name, (wording.NO_MODEL,))], wording.model_stands_in(name)
    return [Written("path", models[0], (wording.model_found(models[1:]),))], f"model: {models[0]}"


def detectors_setting(kind: type[BaseModel], pictured: bool) -> Written:
    """The default detectors; for pictures, one that reads their descriptions."""
    return Written("detectors", [PICTURE_DETECTOR] if pictured else kind.model_fields["detectors"].default)


def selection_setting(direction: Direction, pictured: bool) -> list[Written]:
    """One selection as it is recommended, with the default alpha."""
    (detector,) = parse_detectors([PICTURE_DETECTOR if pictured else DETECTOR])
    return [
        Written("name", direction),
        Written("direction", direction),
        Written("detectors", [detector.column]),
        Written("procedure", RECOMMENDED["procedure"]),
        Written("ranks", RECOMMENDED["ranks"], (wording.SMOOTHED,)),
        Written("alpha", SelectionConfig.model_fields["alpha"].default),
    ]


def whole_file(
    kind: type[BaseModel],
    name: str,
    head: str,
    commands: Sequence[str],
    settings: Sequence[Written],
    data: FolderData,
) -> str:
    """The YAML file: a comment for editors, its purpose and the next steps, then the settings."""
    lines = [f"# yaml-language-server: $schema={SCHEMA_FOLDER}/{name}.schema.json", *comment(head), "#"]
    lines += comment(wording.GUESSES_MARKED)
    lines += [f"#   seenset {command} {name}.yaml" for command in commands]
    if data.unread:
        lines += ["#", *comment(f"Not taken: {some_of(data.unread)}.")]
    if not data.complete:
        lines += ["#", *comment(wording.first_files(MOST_ENTRIES))]
    return "\n".join(lines) + "\n\n" + commented(kind, settings)


def _assigned(data: FolderData) -> tuple[dict[Role, Source], list[DataFiles], list[DataFiles]]:
    """The sources of each role, files without a role, and files of the other kind: all are texts, or all pictures."""
    texts, pictures = one_kind(data.files)
    kept, others = (pictures, texts) if takes_pictures(texts, pictures) else (texts, pictures)
    sources: dict[Role, Source] = {}
    unnamed = [files for files in kept if files.role is None]
    for role in ROLES:
        files = [one for one in kept if one.role == role]
        if files:
            words = [*dict.fromkeys(one.word for one in files)]
            sources[role] = joined(files, wording.role_by_name(words, role))
    if "audit" not in sources and unnamed:
        sources["audit"], unnamed = joined(unnamed, wording.audited_by_default()), []
    return {role: sources[role] for role in ROLES if role in sources}, unnamed, others


def one_kind(files: Sequence[DataFiles]) -> tuple[list[DataFiles], list[DataFiles]]:
    """The files with texts, and those with pictures."""
    return [one for one in files if one.image is None], [one for one in files if one.image is not None]


def takes_pictures(texts: Sequence[DataFiles], pictures: Sequence[DataFiles]) -> bool:
    """Whether pictures are audited: their names give more roles, or else they are in tables or have more files."""

    def weight(some: Sequence[DataFiles]) -> tuple[int, bool, int]:
        tables = any(format_named(one.format).unit != "file" for one in some)
        return len({one.role for one in some} - {None}), tables, sum(one.count for one in some)

    return weight(pictures) > weight(texts)


def _role(role: Role, source: Source | None, needed: bool, pictured: bool) -> Written:
    if source is not None:
        return Written(role, source_settings(source), tuple(source_notes(source)))
    note = wording.role_missing(role) if needed else wording.NOT_NEEDED
    columns: Mapping[str, Any] = {"path": "PATH"}
    columns = {**columns, **({"image": IMAGE} if pictured else {"text": SourceConfig.model_fields["text"].default})}
    return Written(role, [Written(key, value) for key, value in columns.items()], (note,), off=True)


def _columns(files: DataFiles) -> str:
    if files.image is not None:
        return f"pictures: {files.image}, captions: {files.caption or 'none'}"
    dialect = "".join(f", {name}: {json.dumps(value)}" for name, value in files.dialect.differing().items())
    if files.text is None:
        return f"{wording.ONE_A_FILE}{dialect}"
    warning = f"; warning: {files.warning}" if files.warning else ""
    completion = "" if files.completion is None else f", completion: {files.completion}"
    return f"{files.content}: {files.text}{completion}, id: {files.id or 'file#row'}{dialect}{warning}"
