"""Input files, and shards: contiguous runs of their rows, the unit of work."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from pipeline.config.corpus import LIMITS, LabelledConfig, LimitsConfig, Role, SourceConfig, TransformConfig
from pipeline.config.dialect import PLAIN, Dialect


@dataclass(frozen=True, slots=True)
class InputFile:
    """One planned input: a file, a saved dataset, a split of a hub dataset, or the text files of a folder."""

    role: Role
    name: str  # as in the configuration; ids start with it
    path: str  # path for fsspec
    format: str  # its name
    size: int  # bytes; 0 if unknown
    rows: int | None  # None if unknown before the file is read
    content: str  # digest of the size and of both ends of the file, to notice changes
    files: tuple[str, ...] = ()  # names in a folder of text files
    text_bytes: int = 0  # decompressed bytes of the text column, if the metadata contain them
    stamp: str = ""  # digest of its files' modification times; empty for a dataset of the hub
    dialect: Dialect = PLAIN


@dataclass(frozen=True, slots=True)
class Shard:
    """A contiguous run of rows of one input: rows [start, stop), or lines that start in bytes [start, stop)."""

    id: str
    role: Role
    name: str
    path: str
    format: str  # its name
    start: int
    stop: int | None  # None: to the end
    first_row: int  # number of the first row in the input
    max_rows: int | None  # None: no limit
    content: str
    text: str
    id_column: str | None
    group_column: str | None
    files: tuple[str, ...] = ()
    subset: str | None = None
    split: str | None = None
    transform: TransformConfig | None = None  # changes of the texts
    label_column: str | None = None  # only rows whose label corresponds to the role are documents of the shard
    limits: LimitsConfig = LIMITS
    pictures: bool = False  # whether `text` is the column of pictures
    caption_column: str | None = None  # column of captions
    dialect: Dialect = PLAIN
    companions: tuple[str, ...] = ()  # `VersionsConfig.companions`, if `text` is the column of versions
    template: str = ""  # template of the text of items; empty if there are none
    item: tuple[str, ...] = ()  # columns of the template; empty if its options are `text`, to be permuted
    window: int = 0  # number of rows of a document whose versions are their orders; 0: a document is one row
    differing: bool = False  # whether only what differs between versions is scored
    scores: tuple[str, ...] = ()  # `SourceConfig.score_companions`; empty if a model scores the documents
    token_ids: bool = False  # whether `text` is the column of lists of token ids
    chats: bool = False  # whether `text` is the column of messages
    completion: str | None = None  # column of completions, if `text` is that of prompts
    tools: str | None = None  # column of the tools of chats
    answers: tuple[str, ...] = ()  # columns beside the template that may name the right option
    keep_marks: bool = False  # whether marks of options are a part of them
    no_features: bool = False  # whether features of draws are not needed, as of versions that `seenset mark` drew
    revision: str | None = None  # of a dataset on the hub
    follow_links: bool = False  # whether links that lead out of a folder are followed

    def to_dict(self) -> dict[str, Any]:
        """A plain mapping, for JSON and for rows of a dataset."""
        transform = None if self.transform is None else self.transform.model_dump()
        value = {**{name: getattr(self, name) for name in _NAMES}, "transform": transform}
        for name in ("limits", "dialect", *_OMITTED):
            del value[name]
        limits = {} if self.limits == LIMITS else {"limits": self.limits.model_dump()}
        versions = {name: held for name in _OMITTED if (held := getattr(self, name))}
        return {**value, **limits, **versions, **self.dialect.differing()}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Shard:
        """The inverse of `to_dict`."""
        transform = value.get("transform")
        text_transform = None if transform is None else TransformConfig(**transform)
        limits = LimitsConfig(**value["limits"]) if "limits" in value else LIMITS
        differing = {name: value[name] for name in _DIALECT if name in value}
        dialect = Dialect(**differing) if differing else PLAIN
        # values that the shards of an input share are kept in memory once
        shared = {name: sys.intern(text) for name, text in value.items() if isinstance(text, str) and name != "id"}
        files = tuple(value["files"])
        given = {
            "files": files,
            "transform": text_transform,
            "limits": limits,
            "dialect": dialect,
            "companions": tuple(value.get("companions", ())),
            "scores": tuple(value.get("scores", ())),
            "answers": tuple(value.get("answers", ())),
            "item": tuple(value.get("item", ())),
        }
        return cls(**{name: held for name, held in {**value, **shared, **given}.items() if name not in _DIALECT})

    @property
    def versioned(self) -> bool:
        """Whether its documents have versions."""
        return bool(self.companions or self.window)

    @property
    def has_text(self) -> bool:
        """Whether its documents are read, and not only their scores."""
        return self.text not in self.scores

    @property
    def value_columns(self) -> tuple[str, ...]:
        """The columns that are read with the documents: those of versions, scores, items, or completions and tools."""
        of_chats = tuple(column for column in (self.completion, self.tools) if column is not None)
        return (*self.companions, *self.answers) or self.scores or self.item or of_chats


def whole_shard(
    entry: InputFile, source: SourceConfig, transform: TransformConfig | None = None, limits: LimitsConfig = LIMITS
) -> Shard:
    """An input as one shard, without an id."""
    return Shard(
        id="",
        role=entry.role,
        name=entry.name,
        path=entry.path,
        format=entry.format,
        start=0,
        stop=entry.rows,
        first_row=0,
        max_rows=None,
        content=entry.content,
        text=source.content,
        id_column=source.id,
        group_column=source.group,
        files=entry.files,
        subset=source.subset,
        split=source.split,
        transform=transform,
        label_column=source.label if isinstance(source, LabelledConfig) else None,
        limits=limits,
        pictures=source.image is not None,
        caption_column=source.caption,
        dialect=entry.dialect,
        companions=source.companions,
        template=source.item_template,
        item=source.item,
        window=source.window,
        differing=source.differing,
        scores=source.score_companions,
        token_ids=source.tokens is not None,
        chats=source.has_chats,
        completion=source.completion,
        tools=source.tools,
        keep_marks=source.versions is not None and source.versions.marks == "none",
        revision=source.revision,
        follow_links=source.follow_links,
    )


BY_ID = attrgetter("id")


def shard_index(shard_id: str, shards: Sequence[Shard]) -> int | None:
    """The index of a shard among shards sorted by id; None if it is missing.

    A dictionary of hundreds of thousands of shards takes 50 bytes per shard, a sorted list 8.
    """
    place = bisect_left(shards, shard_id, key=BY_ID)
    return place if place < len(shards) and shards[place].id == shard_id else None


_NAMES = tuple(entry.name for entry in fields(Shard))
_DIALECT = ("encoding", "delimiter", "quoting")
_OMITTED = (
    "companions",
    "template",
    "item",
    "window",
    "differing",
    "scores",
    "token_ids",
    "chats",
    "completion",
    "tools",
    "answers",
    "keep_marks",
    "no_features",
    "revision",
    "follow_links",
)

SHARD_FIELDS = frozenset({"rows", "columns", "revision", "follow_links", *_DIALECT})
"""Keys of a fingerprint that may differ between shards of one run."""


def shard_fingerprint(fingerprint: Mapping[str, Any], shard: Shard) -> dict[str, Any]:
    """The run's fingerprint with the input of the shard: rows, digest of the content, columns, document length."""
    rows = f"{shard.content} [{shard.start}, {shard.stop}) {shard.max_rows}"
    label = [] if shard.label_column is None else [shard.label_column]
    columns = [shard.text, shard.id_column, shard.group_column, *label]
    most, default = shard.limits.document_bytes, LIMITS.document_bytes
    limited: dict[str, Any] = (
        {} if most == default else {"document_bytes": int(most)}
    )  # other limits apply to whole files
    if shard.pictures:
        columns += ["captions", shard.caption_column]
        limited |= {"pixels": shard.limits.picture_pixels}
    if shard.companions:
        columns += ["versions", *shard.companions, *([shard.template] if shard.template else [])]
        columns += ["marks of options"] if shard.keep_marks else []
    if shard.window:
        columns += ["window", str(shard.window)]
    if shard.scores:
        columns += ["scores", *shard.scores]
    if shard.item:
        columns += ["template", shard.template]
    if shard.token_ids:
        columns += ["token_ids"]
    if shard.chats:
        columns += ["chats", shard.completion, *([] if shard.tools is None else ["tools", shard.tools])]
    if shard.revision is not None:
        limited |= {"revision": shard.revision}
    if shard.follow_links:
        limited |= {"follow_links": True}
    if shard.differing:
        limited |= {"differing": "from the version of the least digest"}
    return {**fingerprint, "rows": rows, "columns": columns, **limited, **shard.dialect.differing()}
