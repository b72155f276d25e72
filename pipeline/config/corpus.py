"""Sources of documents, their roles, and how their text is encoded and changed."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ByteSize,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from pipeline.config.dialect import PLAIN, Dialect, Quoting, checked_delimiter, checked_encoding
from pipeline.config.kinds import TOKENS, Capability, InputKind, check_keys, check_same_kind, find_kind
from pipeline.config.paths import Place
from pipeline.config.yaml import Section, Size

Role = Literal["audit", "unseen", "seen"]
ROLES: tuple[Role, ...] = ("audit", "unseen", "seen")
ROLE_DOCUMENTS: dict[Role, str] = {
    "audit": "documents to audit",
    "unseen": "documents of the same kind that are known not to be in the training data",
    "seen": "documents of the same kind that are known to be in the training data",
}
"""Description of the documents of each role, for messages."""


ANSWER_COLUMNS = {
    "filtered_resps": ("target",),  # of lm-eval
    "model_response.logprobs": ("doc.gold_index", "doc.choices"),  # of lighteval
}
"""Columns of log-likelihoods of answers in files of harnesses, and those of the correct answer and of all answers."""


class ScoreConfig(Section):
    """A column of precomputed scores."""

    column: str = Field(description="Name of the column.")
    higher: Literal["member", "nonmember"] = Field("member", description="Documents that get the higher scores.")


NEAR_SHARE = 0.8

NearShare = Annotated[float, Field(ge=0.5, le=1)]
"""Share of common runs of five words (or eight characters) from which two documents are near-duplicates."""


@lru_cache(maxsize=64)
def template_parts(template: str) -> tuple[tuple[str, str | None], ...]:
    """The parts of a template: a literal text, and the column behind it; None for none.

    Raises:
        ValueError: braces that name no column, or that are not closed.
    """
    parts = []
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError:
        raise ValueError("template: a brace stands alone; write {COLUMN}, and {{ or }} for a brace") from None
    for text, name, form, conversion in parsed:
        if name is not None and (not name or form or conversion or "[" in name):
            raise ValueError(f"template: {{{name}}} names no column; write {{COLUMN}}, and {{{{ for a brace")
        parts.append((text, name))
    return tuple(parts)


def template_columns(template: str) -> list[str]:
    """The columns that a template names in braces, each once, in their order. Raises ValueError as `template_parts`."""
    return list(dict.fromkeys(name for _, name in template_parts(template) if name is not None))


def fill_template(template: str, values: Mapping[str, Any]) -> str:
    """The text of an item: a template with the values of its columns."""
    return "".join(f"{text}{'' if name is None else values[name]}" for text, name in template_parts(template))


class VersionsConfig(Section):
    """Versions of each audited document; one of them, drawn at random, was published."""

    column: str = Field("versions", description="Column with the list of all versions.")
    index: str = Field("index", description="Column with the index of the published version, from 0.")
    kinds: str | None = Field(
        None, description="Column with the kinds of edited sites of `seenset mark`; with `forms`."
    )
    forms: str | None = Field(None, description="Column with the form of each site in each version.")

    differing: bool = Field(
        False, description="Score only tokens that versions do not share, and those after an omission."
    )
    permute: str | None = Field(
        None,
        description="Instead of `column`: the column of lists of options, whose orders are versions; "
        "`order` with `window`.",
    )
    window: Annotated[int, Field(ge=2, le=1000)] | None = Field(
        None, description="With `permute: order`: consecutive rows of a document, whose orders are versions."
    )
    template: str | None = Field(
        None, description="With `permute`: text of an item with columns in braces, such as `{question}\\n{choices}`."
    )
    marks: Literal["place", "none"] = Field(
        "place",
        description="With `template`: marks such as `(A)` before options stay in their places; `none`: options have no "
        "marks, and what looks like one moves with them.",
    )
    drawn_first: bool = Field(
        False, description="With `column`: the drawn version was written first, so that every index is 0."
    )

    @model_validator(mode="after")
    def _consistent(self) -> VersionsConfig:
        if self.window is not None and self.permute != "order":
            raise ValueError("window goes with permute: order, the order of the rows of a file")
        if self.window is None and self.permute == "order" and self.template is None:
            raise ValueError("permute: order needs window, the number of consecutive rows of a document")
        if self.window is None and (self.permute is None) != (self.template is None):
            raise ValueError("permute and template go together: give the column of the options and the text of an item")
        if self.template is None and self.marks != "place":
            raise ValueError("marks goes with permute and template: it is of the options of items")
        if self.permute is None:
            if (self.kinds is None) != (self.forms is None):
                raise ValueError("kinds and forms go together: give both columns, or neither")
            return self
        made = ("column", "index", "kinds", "forms", "drawn_first", *(["template"] if self.window is not None else []))
        if given := [name for name in made if getattr(self, name) != type(self).model_fields[name].default]:
            raise ValueError(f"permute makes the versions: leave out {', '.join(given)}")
        if self.template is None:
            return self
        names = template_columns(self.template)
        if self.permute not in names:
            raise ValueError(f"template does not name the options: put {{{self.permute}}} where they stand")
        if len(names) == 1:
            raise ValueError("template names the options alone: name the column of the question too")
        return self

    @property
    def companions(self) -> tuple[str, ...]:
        """The columns that are read with versions or options: index, kinds and forms, or those of the template.

        Empty if the rows of a file are permuted.
        """
        if self.window is not None:
            return ()
        if self.template is not None:
            return tuple(name for name in template_columns(self.template) if name != self.permute)
        return tuple(name for name in (self.index, self.kinds, self.forms) if name is not None)


Scores = Annotated[list[ScoreConfig | str], Field(min_length=1)]

OF_OTHERS = WithJsonSchema({"type": "null"})
"""A key that states documents of another kind, which a source of this kind may have as null alone."""


class SourceConfig(Section):
    """Source of the documents of one role."""

    path: Annotated[str | list[str] | None, Place.INPUT] = Field(
        None, description="Files, globs, folders, URLs: Parquet, JSONL (.gz, .zst), CSV, .txt, saved datasets."
    )
    dataset: str | None = Field(None, description="Dataset on the hub, instead of `path`.")
    subset: str | None = Field(None, description="Configuration of the hub dataset.")
    split: str | None = Field(
        None, description="Split of a hub dataset (default: train) or of a saved one, or `train[:1000]`, `train+test`."
    )
    revision: str | None = Field(None, description="Revision of the hub dataset: a commit, tag or branch.")
    follow_links: bool = Field(False, description="Read the regular files behind links that lead out of a folder.")
    text: str = Field("text", description="Column of texts.")
    template: str | None = Field(
        None, description="Text of an item with columns in braces, instead of `text`: `{question}\\n{A}\\n{B}`."
    )
    image: Annotated[str | None, OF_OTHERS] = Field(
        None, description="Column of pictures, instead of `text`: bytes, bytes and path, or a path."
    )
    caption: Annotated[str | None, OF_OTHERS] = Field(None, description="Column of captions.")
    tokens: Annotated[str | None, OF_OTHERS] = Field(
        None, description="Column of lists of token ids, instead of `text`."
    )
    messages: Annotated[str | None, OF_OTHERS] = Field(
        None, description="Column of chats, instead of `text`: lists of messages {role, content} or {from, value}."
    )
    prompt: Annotated[str | None, OF_OTHERS] = Field(
        None, description="Column of prompts, with `completion` instead of `messages`: texts, or lists of messages."
    )
    completion: Annotated[str | None, OF_OTHERS] = Field(
        None, description="Column of the answers to `prompt`: texts, or lists of messages."
    )
    tools: Annotated[str | None, OF_OTHERS] = Field(
        None,
        description="Column of the tools of chats, for their template: lists of schemas of functions, or JSON.",
    )
    id: str | None = Field(None, description="Column of ids; default: file#row.")
    group: str | None = Field(None, description="Column of groups.")
    encoding: Annotated[str, AfterValidator(checked_encoding)] = Field(
        PLAIN.encoding, description="Encoding of CSV, JSONL and .txt files, such as cp1252 or utf-16."
    )
    delimiter: Annotated[str, AfterValidator(checked_delimiter)] = Field(
        PLAIN.delimiter, description="Character between the fields of CSV files; of .tsv files a tab."
    )
    quoting: Quoting = Field(
        PLAIN.quoting, description="Quotes around fields of CSV files; none: every quote is part of a text."
    )
    versions: Annotated[VersionsConfig | None, OF_OTHERS] = Field(
        None, description="Versions of each audited document, instead of `text`."
    )
    scores: Annotated[Scores | None, OF_OTHERS] = Field(
        None, description="Columns of scores, instead of `model` and `detectors`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("needs exactly one of 'path' and 'dataset'")
        if self.dataset is not None and self.dialect != PLAIN:
            raise ValueError("encoding, delimiter and quoting apply to files, not to a dataset on the hub")
        for name in ("revision", "subset"):
            if getattr(self, name) is not None and self.dataset is None:
                raise ValueError(f"{name} goes with dataset, the name of a dataset on the hub")
        if self.dataset is not None and self.follow_links:
            raise ValueError("follow_links applies to folders, not to a dataset on the hub")
        check_keys(self.stated)
        if self.template is not None:
            if others := sorted(self.stated & {*type(self).model_fields}):
                inside = "; that of permuted options stands under versions" if "versions" in others else ""
                raise ValueError(f"template and {others[0]}: leave one of them out{inside}")
            if not template_columns(self.template):
                raise ValueError(f"template names no column: write {{COLUMN}} in {self.template[:40]!r}")
        if self.tools is not None and not self.has_chats:
            raise ValueError("tools are of chats: name their messages too, or prompt and completion")
        if self.window and (self.id is not None or self.group is not None):
            raise ValueError("versions.window: a document is a run of rows: leave out id and group")
        return self

    @model_serializer(mode="wrap")
    def _without_versions(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The settings, without keys that do not apply to the documents and without a text key that is not given."""
        values: dict[str, Any] = plain(self)
        for name in (
            "versions",
            "scores",
            "tokens",
            "messages",
            "prompt",
            "completion",
            "tools",
            "revision",
            "template",
        ):
            if getattr(self, name) is None:
                values.pop(name, None)
        if self.quoting == PLAIN.quoting:
            values.pop("quoting", None)
        if not self.follow_links:
            values.pop("follow_links", None)
        if not self.has_text or self.tokens is not None or self.has_chats or self.template is not None:
            values.pop("text", None)
        return values

    @property
    def stated(self) -> frozenset[str]:
        """The given keys that may state the kind of the documents."""
        stating = ("image", "caption", "tokens", "messages", "prompt", "completion", "scores", "versions")
        given = {name for name in stating if getattr(self, name) is not None}
        # the rows that are shuffled are texts, and `text: text` beside pictures and versions states the default
        tolerated = self.window or (self.text == "text" and given & {"image", "versions"})
        given |= set() if tolerated else {"text"} & self.model_fields_set
        return frozenset(given | {"versions.differing"} if self.differing else given)

    @property
    def content(self) -> str:
        """The column of the documents: versions, texts, ids, chats, pictures, or scores without texts."""
        if not self.has_text:
            return self.score_columns[0]
        if self.versions is not None and not self.window:
            return self.versions.permute or self.versions.column
        return next(iter(self.item), None) or self.tokens or self.messages or self.prompt or self.image or self.text

    @property
    def has_text(self) -> bool:
        """Whether the documents are read themselves, and not their scores alone."""
        return self.scores is None or "text" in self.model_fields_set

    @property
    def has_chats(self) -> bool:
        """Whether the documents are conversations."""
        return self.messages is not None or self.prompt is not None

    @property
    def score_columns(self) -> tuple[str, ...]:
        """The columns of precomputed scores; empty if there are none."""
        return tuple(entry if isinstance(entry, str) else entry.column for entry in self.scores or ())

    @property
    def score_companions(self) -> tuple[str, ...]:
        """The columns that are read for scores, followed by those that name the correct one of several answers."""
        return (*self.score_columns, *(name for one in self.score_columns for name in ANSWER_COLUMNS.get(one, ())))

    @property
    def dialect(self) -> Dialect:
        """The encoding, the delimiter and the quoting of text files."""
        return Dialect(self.encoding, self.delimiter, self.quoting)

    @property
    def paths(self) -> list[str]:
        """The configured paths as a list."""
        return [self.path] if isinstance(self.path, str) else list(self.path or [])

    @property
    def companions(self) -> tuple[str, ...]:
        """The columns that are read with a column of versions; empty if there are none."""
        return () if self.versions is None else self.versions.companions

    @property
    def window(self) -> int:
        """Number of rows of a document whose versions are their orders; 0 if a document is one row."""
        return 0 if self.versions is None else self.versions.window or 0

    @property
    def differing(self) -> bool:
        """Whether only tokens that differ between versions are scored."""
        return self.versions is not None and self.versions.differing

    @property
    def item(self) -> tuple[str, ...]:
        """The columns of which the text of an item is made; empty if the text is one column."""
        return () if self.template is None else tuple(template_columns(self.template))

    @property
    def item_template(self) -> str:
        """The template of the text of items, whose options may be permuted; empty if there are none."""
        return self.template or ("" if self.versions is None else self.versions.template or "")

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        given = (self.content, self.completion, self.tools, self.id, self.group, self.caption)
        named = [column for column in given if column is not None]
        return list(dict.fromkeys([*named, *self.item, *self.companions, *self.score_companions]))


def _described(key: str) -> str:
    """The sentence of a key of a source."""
    return SourceConfig.model_fields[key].description or ""


class PictureSource(SourceConfig):
    """Source of pictures."""

    image: str = Field(description=_described("image"))
    caption: str | None = Field(None, description=_described("caption"))


class TokenSource(SourceConfig):
    """Source of lists of token ids."""

    tokens: str = Field(description=_described("tokens"))


class ChatSource(SourceConfig):
    """Source of conversations."""

    messages: str = Field(description=_described("messages"))
    tools: str | None = Field(None, description=_described("tools"))


class CompletionSource(SourceConfig):
    """Source of prompts with their completions."""

    prompt: str = Field(description=_described("prompt"))
    completion: str = Field(description=_described("completion"))
    tools: str | None = Field(None, description=_described("tools"))


class ScoreSource(SourceConfig):
    """Source of scores, perhaps with their texts."""

    scores: Scores = Field(description=_described("scores"))


class VersionSource(SourceConfig):
    """Source of documents with versions."""

    versions: VersionsConfig = Field(description=_described("versions"))


def _find_source(value: Any) -> str:
    """The class of a source, by the keys that are given; which go together is checked by the source."""
    given = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    stated = [name for key, name in STATING.items() if given.get(key) is not None]
    if stated[-1:] == [CompletionSource.__name__] and given.get("completion") is None:
        stated = []  # so that the keys that exclude one another are refused, and not the missing one alone
    return f"source[{stated[-1] if stated else 'SourceConfig'}]"


STATING = {
    "image": "PictureSource",
    "tokens": "TokenSource",
    "messages": "ChatSource",
    "prompt": "CompletionSource",
    "scores": "ScoreSource",
    "versions": "VersionSource",
}
"""Key that states a kind of documents -> class of its source."""

AnySource = Annotated[
    Annotated[SourceConfig, Tag("source[SourceConfig]")]
    | Annotated[PictureSource, Tag("source[PictureSource]")]
    | Annotated[TokenSource, Tag("source[TokenSource]")]
    | Annotated[ChatSource, Tag("source[ChatSource]")]
    | Annotated[CompletionSource, Tag("source[CompletionSource]")]
    | Annotated[ScoreSource, Tag("source[ScoreSource]")]
    | Annotated[VersionSource, Tag("source[VersionSource]")],
    Discriminator(_find_source),
]
"""A source of documents of the kind that its keys state; of texts if they state none."""


def _without(setting: str, reason: str) -> AfterValidator:
    """Refuse a source with a setting, for a reason that the ValueError states."""

    def check(source: SourceConfig) -> SourceConfig:
        if getattr(source, setting) is not None:
            raise ValueError(reason)
        return source

    return AfterValidator(check)


NO_VERSIONS = _without("versions", "versions are of documents to audit, under corpus.audit: leave them out here")
NO_TOKENS = _without(
    "tokens", "tokens are of documents that a model at hand scores, and these are trained on: give text"
)

PlainSource = Annotated[AnySource, NO_VERSIONS]
"""A source of documents without versions."""

TrainingSource = Annotated[PlainSource, NO_TOKENS]
"""A source of texts, chats or pictures that models are trained on."""


class LabelledConfig(SourceConfig):
    """Source of documents with a label that states whether each is in the training data."""

    label: str = Field(description="Column of labels: 1, true, member or seen; 0, false, nonmember or unseen.")
    image: str | None = Field(None, description=_described("image"))
    caption: str | None = Field(None, description=_described("caption"))
    tokens: str | None = Field(None, description=_described("tokens"))
    messages: str | None = Field(None, description=_described("messages"))
    prompt: str | None = Field(None, description=_described("prompt"))
    completion: str | None = Field(None, description=_described("completion"))
    tools: str | None = Field(None, description=_described("tools"))
    versions: VersionsConfig | None = Field(None, description=_described("versions"))
    scores: Scores | None = Field(None, description=_described("scores"))

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [*super().columns, self.label]


class CorpusConfig(Section):
    """Documents to audit, and documents whose membership is known."""

    audit: AnySource | None = Field(None, description="Documents to audit, for all commands but `evaluate`.")
    unseen: PlainSource | None = Field(None, description="Documents that are not in the training data.")
    seen: PlainSource | None = Field(None, description="Documents that are in the training data.")
    labelled: Annotated[LabelledConfig, NO_VERSIONS] | None = Field(
        None, description="For `evaluate`, instead of the others: both kinds in one source, with labels."
    )

    @model_validator(mode="after")
    def _consistent(self) -> CorpusConfig:
        if self.labelled is not None and (self.audit or self.unseen or self.seen):
            raise ValueError("labelled takes the place of audit, unseen and seen: give it alone")
        if self.versions is not None and (self.unseen or self.seen):
            raise ValueError("audit.versions take the place of unseen and seen documents: leave these out")
        check_same_kind({self.key(role): source.stated for role, source in self.roles()})
        if any(source.scores != self.scores for _, source in self.roles()):
            raise ValueError(f"{' and '.join(map(self.key, dict(self.roles())))} need the same scores")
        return self

    @property
    def kind(self) -> InputKind:
        """The kind of the documents, which offers what those of every role offer."""
        stated = [source.stated for _, source in self.roles()]
        return find_kind(frozenset.intersection(*stated) if stated else ())

    @property
    def scores(self) -> list[ScoreConfig | str] | None:
        """The columns of scores of all documents; None if a model scores them."""
        return next((source.scores for _, source in self.roles()), None)

    @property
    def has_text(self) -> bool:
        """Whether the documents are read themselves, and not their scores alone."""
        return Capability.CONTENTS in self.kind.offers

    @property
    def versions(self) -> VersionsConfig | None:
        """The columns of versions of the audited documents; None if they have none."""
        return None if self.audit is None else self.audit.versions

    @property
    def has_versions(self) -> bool:
        """Whether the audited documents have versions, among which answers rank them without known documents."""
        return Capability.VERSIONS in self.kind.offers

    @property
    def has_pictures(self) -> bool:
        """Whether the documents are pictures."""
        return Capability.PART in self.kind.offers

    @property
    def has_ids(self) -> bool:
        """Whether the documents are token ids."""
        return self.kind is TOKENS

    @property
    def has_chats(self) -> bool:
        """Whether the documents are conversations."""
        return Capability.ANSWERED in self.kind.offers

    @property
    def units(self) -> str:
        """The unit of length of a document that is not a picture: words or tokens."""
        return self.kind.units

    def source(self, role: Role) -> SourceConfig | None:
        """Source of the documents of a role; None if there are none."""
        source: SourceConfig | None = getattr(self, role)
        return self.labelled if self.labelled is not None and role != "audit" else source

    def key(self, role: Role) -> str:
        """The setting that names the documents of a role, for messages."""
        return "corpus.labelled" if self.labelled is not None and role != "audit" else f"corpus.{role}"

    def roles(self) -> Iterator[tuple[Role, SourceConfig]]:
        """The roles that have documents, in a fixed order."""
        for role in ROLES:
            source = self.source(role)
            if source is not None:
                yield role, source


class LimitsConfig(Section):
    """Bounds on documents and on files that cannot be split."""

    document_bytes: Annotated[Size, Field(ge=1)] = Field(
        ByteSize(64 << 20), description="Most bytes of a line, record or text, such as 64 MiB."
    )
    shard_documents: Annotated[int, Field(ge=1)] = Field(
        1_000_000, description="Most documents of a file that cannot be split (CSV, .gz, .zst)."
    )
    unpacked_bytes: Annotated[Size, Field(ge=1)] = Field(
        ByteSize(64 << 30), description="Most bytes that a .gz or .zst file unpacks to."
    )
    picture_pixels: Annotated[int, Field(ge=1)] = Field(1 << 26, description="Most pixels of a picture.")


LIMITS = LimitsConfig()
"""Default limits."""


class ChatConfig(Section):
    """How chats are rendered, and which of their tokens are scored."""

    template: Annotated[str | None, Place.SETTINGS_FILE] = Field(
        None, description="File of a Jinja template, instead of that of each model's tokenizer."
    )
    score: Literal["answers", "all"] = Field(
        "answers", description="Tokens of the assistant's answers and ends of its turns, or all."
    )


class TransformConfig(Section):
    """Changes of every text (`pipeline.corpus.documents` lists the patterns)."""

    dates: Literal["remove", "replace_year"] = Field(
        description="Remove dates and years, or replace every year by `year`."
    )
    year: int | None = Field(None, ge=1000, le=9999, description="The new year of replace_year.")

    @model_validator(mode="after")
    def _one_year(self) -> TransformConfig:
        if (self.dates == "replace_year") != (self.year is not None):
            raise ValueError("year goes with dates: replace_year, and only with it")
        return self
