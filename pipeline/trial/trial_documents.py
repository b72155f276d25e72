"""The documents of a trial in memory: ids, texts or pictures with captions, groups and families."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.config.corpus import CorpusConfig, TransformConfig
from pipeline.config.kinds import TEXTS, InputKind, find_kind
from pipeline.corpus.chats import Conversation
from pipeline.corpus.documents import Document, read_shard, transform
from pipeline.corpus.inputs import find_inputs, number_rows, plan_shards
from pipeline.corpus.near_duplicates import near_families, sketch, stack_sketches
from pipeline.corpus.picture_files import open_picture, picture_sketches
from pipeline.corpus.reasons import Reason
from pipeline.corpus.scripts import count_units
from pipeline.corpus.shard import InputFile
from pipeline.errors import SettingError, UserError, VersionError, error_line
from pipeline.models.checkpoints import check_files
from pipeline.models.load import check_model
from pipeline.run.manifest import read_manifest
from pipeline.store.files import Store
from pipeline.trial.config import Point, TrialConfig

MIN_WORDS = 2
"""A shorter text or caption may be a single token, which can neither be trained on nor scored."""

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""A picture in a table, in the format of the Image feature of Hugging Face's datasets."""


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a trial, in the order of the files."""

    ids: list[str]
    texts: list[str]  # captions for pictures, contents for chats
    groups: list[str | None]
    family: np.ndarray  # int64, (documents,): equal numbers are near-duplicates, which stay together
    left_out: dict[str, int]  # reason -> number of documents that no model can be trained on
    pictures: list[bytes] | None = None  # encoded, as read; None where the documents have none
    chats: list[Conversation] | None = None  # None where the documents are no chats
    kind: InputKind = TEXTS

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """SHA-256 of the documents."""
        columns = [self.ids, self.texts, self.groups]
        content = json.dumps([*columns, *self.contents], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def contents(self) -> list[list[str]]:
        """What a training learns besides the texts, of every document: SHA-256 of pictures, or turns as JSON."""
        pictures = [] if self.pictures is None else [[hashlib.sha256(picture).hexdigest() for picture in self.pictures]]
        return pictures if self.chats is None else [*pictures, [_written(chat) + _tools(chat) for chat in self.chats]]

    def without(self, reasons: Mapping[int, str]) -> Documents:
        """The documents without those at some positions, which are counted by their reasons.

        Raises:
            UserError: none is left.
        """
        kept = [i for i in range(len(self)) if i not in reasons]
        left_out = Counter(self.left_out) + Counter(reasons.values())
        if not kept:
            raise _none_left(left_out)
        return Documents(
            [self.ids[i] for i in kept],
            [self.texts[i] for i in kept],
            [self.groups[i] for i in kept],
            self.family[kept],
            dict(left_out),
            None if self.pictures is None else [self.pictures[i] for i in kept],
            None if self.chats is None else [self.chats[i] for i in kept],
            self.kind,
        )

    def read(self, changed: TransformConfig | None) -> list[str]:
        """The texts as read by an audit with this text transform."""
        return self.texts if changed is None else [transform(text, changed) for text in self.texts]

    def table(self, positions: np.ndarray) -> pa.Table:
        """The documents at these positions, in the input format of an audit.

        Columns are id, group and text; for pictures id, group, caption and image; for chats id, group, tools, and
        messages or prompt and completion.

        Raises:
            UserError: messages with fields of several types, which no column can hold.
        """
        *others, last = self.kind.keys
        tools = [] if self.chats is None else ["tools"]
        names = ("id", last, "group", *others, *tools)
        return pa.table([self._column(name, positions) for name in names], names=names)

    def _column(self, key: str, positions: np.ndarray) -> pa.Array:
        """A column of the documents at some positions: ids, groups, or what a key of their kind names."""
        if key in ("id", "group"):
            values: Sequence[str | None] = self.ids if key == "id" else self.groups
            return pa.array([values[i] for i in positions], pa.string())
        if key == "image" and self.pictures is not None:
            return pa.array([{"bytes": self.pictures[i], "path": None} for i in positions], PICTURE)
        if self.chats is None:
            return pa.array([self.texts[i] for i in positions], pa.string())
        chats = [self.chats[i] for i in positions]
        if key == "messages":
            return pa.array(map(_written, chats), pa.string())
        if key == "tools":
            return pa.array(map(_tools, chats), pa.string())
        parts = [chat.turns[: chat.prompt] if key == "prompt" else chat.turns[chat.prompt :] for chat in chats]
        try:
            return pa.array([[turn.message() for turn in turns] for turns in parts])
        except pa.ArrowException as error:
            raise UserError(f"documents.{key}: the fields of its messages differ: {error_line(error)}") from None


def _written(chat: Conversation) -> str:
    """The messages of a conversation as JSON, as a column of messages may hold them."""
    return json.dumps([turn.message() for turn in chat.turns], default=str)


def _tools(chat: Conversation) -> str:
    """The tools of a conversation as JSON; empty without tools."""
    return json.dumps(chat.tools, default=str) if chat.tools else ""


def check_inputs(config: TrialConfig, points: Sequence[Point]) -> None:
    """Check that documents and models exist and that folders are local, by names and metadata alone.

    Args:
        config: the trial as written.
        points: the points of its sweep.

    Raises:
        UserError: a bad file or column, a missing model, a text model for pictures, or a folder that is not local.
        VersionError: the folder has audits of another version.
    """
    for folder in (config.run, config.work_folder):
        if not Store(folder).local:
            raise UserError(f"a trial trains into local folders, got {folder}")
    _refuse_other_versions(Store(config.work_folder))
    _list_inputs(CorpusConfig(audit=config.documents), config)
    if config.documents.image is not None:
        for model in {repr(point.config.model): point.config.model for point in points}.values():
            check_model(model, "pictures")
    models = [
        model
        for at in (point.config for point in points)
        for model in (at.model, at.reference_model, at.paraphraser)
        if model is not None
    ]
    for model in {repr(model): model for model in models}.values():
        check_files(model)


def _refuse_other_versions(work: Store) -> None:
    """Refuse the folder of a trial with audits of another version, before its documents are read."""
    for name in work.names("audits"):
        try:
            read_manifest(Store(work.path(f"audits/{name}/run")))
        except VersionError as error:
            raise error.with_remedy("name another folder as run of the trial, or use that version") from None
        except (UserError, OSError):  # the audit itself states what is damaged
            continue


def _list_inputs(corpus: CorpusConfig, config: TrialConfig) -> list[InputFile]:
    """The inputs of a trial. Raises UserError as `find_inputs`, with the name of the section of a trial."""
    try:
        return find_inputs(corpus, config.limits)
    except SettingError as error:
        raise SettingError(error.setting.replace("corpus.audit", "documents", 1), error.fault, error.offer) from None


def documents_in(corpus: CorpusConfig, config: TrialConfig, limit: int | None) -> Iterator[Document]:
    """The documents of a corpus for a trial, in the order of the files.

    Raises:
        UserError: a bad file or column, or a damaged file.
    """
    inputs = _list_inputs(corpus, config)
    for shard in number_rows(plan_shards(corpus, inputs, config.resources, limit=limit, limits=config.limits)):
        yield from read_shard(shard)


def read_documents(config: TrialConfig, limit: int | None = None) -> Documents:
    """Read the documents of a trial. Bad ones, texts and captions of one word and repeated ids are left out, counted.

    Raises:
        UserError: a bad file or column, a damaged file, or no documents.
    """
    left_out: Counter[str] = Counter()
    earlier_ids: set[str] = set()
    kept: list[Document] = []
    sketches: list[bytes] = []
    for document in documents_in(CorpusConfig(audit=config.documents), config, limit):
        if document.problem is not None:
            left_out[document.problem[0]] += 1
        elif count_units(document.text) < MIN_WORDS:
            left_out[Reason.TOO_SHORT] += 1
        elif document.doc_id in earlier_ids:
            left_out[Reason.DUPLICATE_ID] += 1
        elif (content := _sketch(document, config.text_transform)) is None:
            left_out[Reason.UNDECODABLE] += 1
        else:
            earlier_ids.add(document.doc_id)
            kept.append(document)
            sketches.append(content)
    if not kept:
        raise _none_left(left_out)
    family = near_families(stack_sketches(sketches), config.near_copies)
    return Documents(
        [document.doc_id for document in kept],
        [document.text for document in kept],
        [document.group for document in kept],
        family,
        dict(left_out),
        [document.picture for document in kept if document.picture is not None] or None,
        [document.chat for document in kept if document.chat is not None] or None,
        find_kind(config.documents.stated),
    )


def _none_left(left_out: Mapping[str, int]) -> UserError:
    return UserError(f"no documents to try on; left out: {dict(left_out)}")


def _sketch(document: Document, changed: TransformConfig | None) -> bytes | None:
    """The sketch of a document as read by the audits; None for a picture that cannot be decoded completely."""
    if document.picture is None:
        return sketch(document.text if changed is None else transform(document.text, changed))
    try:
        return picture_sketches([open_picture(document.picture)])[0]
    except ValueError:
        return None
