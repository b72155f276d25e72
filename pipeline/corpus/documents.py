"""Documents of shards: reading of the rows, and checks that send invalid documents to quarantine."""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

import pyarrow as pa

from pipeline.config.corpus import ANSWER_COLUMNS, Role, TransformConfig
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.corpus.csv_records import UnclosedQuoteError
from pipeline.corpus.draw_features import ChoiceItem, DrawFeatures, item_features, rows_features, versions_features
from pipeline.corpus.formats import format_named
from pipeline.corpus.formats.base import DEADLY, Row, Unreadable, Watch, encodable, overlong, unwatched
from pipeline.corpus.input_files import Overlong
from pipeline.corpus.notes import Notes
from pipeline.corpus.options import item_text, order_options, window_orders
from pipeline.corpus.picture_files import picture_bytes, picture_problem
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, error_line

_DAMAGE = (OSError, EOFError, pa.ArrowException, csv.Error, UnicodeDecodeError)
"""Exceptions raised when a damaged file is read."""

MONTH = (
    r"(?:Jan(?:uary|\.)?|Feb(?:ruary|\.)?|Mar(?:ch|\.)?|Apr(?:il|\.)?|May|June?|July?|Aug(?:ust|\.)?|"
    r"Sept?(?:ember|\.)?|Oct(?:ober|\.)?|Nov(?:ember|\.)?|Dec(?:ember|\.)?)"
)

DAY = r"(?:0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
WEEKDAY = r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,?\s+)?"
YEAR = r"(?<![\d.,/-])(?:1[5-9]|2[01])\d\d(?![\d]|[.,]\d)"
"""A year from 1500 to 2199 that is not part of a longer number."""

ANY_YEAR = r"(?:1[5-9]|2[01])\d\d"
DATES = (
    rf"\b{ANY_YEAR}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?\b",  # 2023-05-17T08:30:00Z
    r"(?<![\d./])\d{1,2}([./-])\d{1,2}\1(?:\d{4}|\d\d)(?![\d./])",  # 17/05/2023, 17.5.23
    rf"\b{WEEKDAY}{DAY}(?:\s+of)?\s+{MONTH}(?:,?\s+{ANY_YEAR})?\b",  # Wednesday, 17th of May 2023; 17 May
    rf"\b{WEEKDAY}{MONTH}\s+{DAY}(?:,?\s+{ANY_YEAR})?\b",  # May 17, 2023; May 17
    rf"\b{MONTH},?\s+{ANY_YEAR}\b",  # May 2023
    rf"{YEAR}(?:\s*[-\u2013]\s*(?:{ANY_YEAR}|\d\d)(?!\d))?s?\b",  # 2023, 2019-2023, 1990s
)

_DATES = tuple(re.compile(pattern) for pattern in DATES)
_YEAR = re.compile(rf"(?:{YEAR}|(?<={ANY_YEAR}[-\u2013]){ANY_YEAR}(?!\d))(?!s\b)")
_YEAR_OF_A_DATE = re.compile(rf"(?<=[\d.,/-]){ANY_YEAR}(?!\d)|\b{ANY_YEAR}(?=-\d\d-\d\d)")
_GAPS = ((re.compile(r"\(\s*[,;]?\s*\)"), ""), (re.compile(r"[ \t]{2,}"), " "), (re.compile(r" +([,.;:!?)])"), r"\1"))


class UnclosedError(UserError):
    """An input that ends inside a quoted field, so that its last documents are unknown."""


@dataclass(frozen=True, slots=True)
class TextVersions:
    """The k >= 2 distinct versions of one document."""

    texts: tuple[str, ...]
    published: int  # index of the published version, in [0, k)
    digests: bytes  # concatenated SHA-256 of each version before transforms, so that all differ
    kinds: tuple[str, ...] = ()  # kinds of the edited sites
    forms: tuple[bytes, ...] = ()  # of each version, a byte for each site; empty if unknown
    differing: bool = False  # whether only what differs between versions is scored
    features: DrawFeatures | None = None  # of the draw; None where `seenset mark` drew the published version
    item: ChoiceItem | None = None  # whose options are permuted

    @property
    def text(self) -> str:
        """The published version."""
        return self.texts[self.published]


def row_versions(
    where: str, value: Any, companions: Sequence[Any], text_problem: Callable[[Any], Unreadable | None]
) -> TextVersions | Unreadable:
    """The versions of a row; the reason if one of the texts, and therefore none of them, can be scored.

    Args:
        where: file and row, for messages.
        value: value of the column of versions.
        companions: values of `Shard.companions`: the index and, if configured, kinds and forms.
        text_problem: returns why a text cannot be scored.

    Raises:
        UserError: fewer than two versions, equal ones, an index out of range, or forms that do not match the versions.
    """
    index, *sites = companions
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{where} has no list of versions, but {type(value).__name__}")
    if len(value) < 2:
        raise UserError(f"{where} has {len(value)} version{'s' * (len(value) != 1)}; a document needs 2 or more")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(value):
        whole = index is None or (isinstance(index, int) and not isinstance(index, bool))
        kind = "" if whole else f" ({type(index).__name__}, not a whole number)"
        first = "; are these numbers from 1? subtract 1" if index == len(value) else ""
        raise UserError(f"{where} has index {index!r:.40}{kind}, outside its {len(value)} versions (from 0){first}")
    for place, text in enumerate(value):
        if (problem := text_problem(text)) is not None:
            return Unreadable(problem.reason, f"version {place}: {problem.message}")
    if len(set(value)) < len(value):
        raise UserError(f"{where} has two equal versions")
    kinds, forms = (tuple(one or ()) for one in sites) if sites else ((), ())
    fitting = all(isinstance(form, bytes) and len(form) == len(kinds) for form in forms)
    if sites and not (len(forms) == len(value) and fitting):
        raise UserError(f"{where} has forms that are not of its versions: a version has a byte for each of its sites")
    digests = b"".join(sha256(text.encode()).digest() for text in value)
    return TextVersions(tuple(value), index, digests, kinds, forms)


@dataclass(frozen=True, slots=True)
class Document:
    """One row of a shard. `problem` is (reason, message) when it cannot be scored; its text is then empty.

    The text of a picture is its caption (empty if the corpus has none), that of versions the published one, that of a
    conversation the contents of its messages, and that of token ids their numbers separated by blanks, so that
    everything that compares texts applies to them.
    """

    row: int
    doc_id: str
    text: str
    group: str | None
    problem: tuple[str, str] | None = None
    picture: bytes | None = None  # bytes of its file, not decoded
    versions: TextVersions | None = None
    scores: tuple[float, ...] = ()  # precomputed, finite, of `Shard.scores`; the text is empty if not given
    chat: Conversation | None = None
    cause: str = ""  # what keeps the orders of its options or rows from being its versions, as in "equal options"

    @property
    def texts(self) -> tuple[str, ...]:
        """All versions of the text; only the text for a document without versions."""
        return (self.text,) if self.versions is None else self.versions.texts


def read_shard(
    shard: Shard,
    content: ContentDigest | None = None,
    watch: Watch = unwatched,
    wanted: Container[int] | None = None,
    notes: Notes | None = None,
) -> Generator[Document]:
    """All documents of a shard, valid and invalid, in order. Memory holds one batch, within the shard's limits.

    Args:
        shard: shard to read.
        content: digest that is updated with every row.
        watch: called with every row number before the row is read.
        wanted: numbers of the rows whose documents are checked and returned; None: all rows.
        notes: receives what the reader completed, left out or doubts.

    Raises:
        UserError: the file itself is damaged (truncated, corrupt, missing), or exceeds a limit.
    """
    row = shard.first_row
    notes = Notes() if notes is None else notes
    try:
        for count, (row, text, identity, group, _, caption) in enumerate(_read_rows(shard, watch, notes)):
            if shard.stop is None and count == shard.limits.shard_documents:
                raise UserError(
                    f"{shard.name} holds more documents than limits.shard_documents, which is "
                    f"{shard.limits.shard_documents:,}: raise it, or write several files"
                )
            if content is not None and text is DEADLY:
                content.skip()
            elif content is not None:
                value = "" if shard.pictures else (text, caption) if shard.value_columns or shard.versioned else text
                content.add(row, (text.reason,) if isinstance(text, Unreadable) else value, identity, group)
            if shard.pictures:
                text = _picture(shard, text)
                if content is not None:
                    content.add_picture(text if isinstance(text, bytes) else None, caption)
            if wanted is None or row in wanted:
                yield _checked(shard, row, text, identity, group, caption)
            if watch(row + max(1, shard.window), True):
                raise UserError(f"{shard.name} cannot be read beyond row {row}: that killed its reader again and again")
    except UnclosedQuoteError as error:
        raise UnclosedError(f"{shard.name} is damaged after row {row}: {error}") from None
    except _DAMAGE as error:
        raise UserError(f"{shard.name} is damaged after row {row}: {error_line(error)}") from None


def _read_rows(shard: Shard, watch: Watch, notes: Notes) -> Iterator[Row]:
    """The rows of a shard that have its role. Raises the exceptions of the format's library."""
    read = format_named(shard.format).rows if shard.label_column is None else _rows_of_role
    rows = read(shard, watch, notes)
    rows = itertools.islice(rows, shard.max_rows)
    return _windows(rows, shard.window) if shard.window else rows


def _windows(rows: Iterator[Row], size: int) -> Iterator[Row]:
    """Runs of consecutive rows, the last of which may be shorter: number of the first row, and the texts."""
    while window := list(itertools.islice(rows, size)):
        texts = [text for _, text, *_ in window]
        unreadable = [text for text in texts if isinstance(text, Unreadable)]
        deadly = [text for text in unreadable if text is DEADLY]
        value = (deadly or unreadable)[0] if unreadable else texts
        yield window[0][0], value, None, None, None, ()


def _rows_of_role(shard: Shard, watch: Watch, notes: Notes) -> Iterator[Row]:
    """The rows whose label corresponds to the shard's role; a row without a label counts as unseen and is refused."""
    rows = format_named(shard.format).rows(replace(shard, max_rows=None), watch, notes)
    for row, text, identity, group, label, caption in rows:
        role = _role_of_label(label, shard.name)
        if role == shard.role:
            yield row, text, identity, group, label, caption
        elif role is None and shard.role == "unseen":
            unlabelled = Unreadable(Reason.NO_LABEL, f"no label in column {shard.label_column!r}")
            yield row, text if isinstance(text, Unreadable) else unlabelled, identity, group, label, caption


def text_key(text: str) -> int:
    """A 64-bit key of the normalised text (NFKC, case folded, white space collapsed): equal texts are one document."""
    return _key(collapsed(unicodedata.normalize("NFKC", text).casefold()))


def collapsed(text: str) -> str:
    """A text with each run of white space replaced by one blank, and none at its ends."""
    if text.isprintable() and "  " not in text and text[:1] != " " != text[-1:]:  # its only white space is blanks
        return text
    return " ".join(text.split())


def id_key(doc_id: str) -> int:
    """A 64-bit key of an id."""
    return _key(doc_id)


def _key(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _picture(shard: Shard, value: Any) -> bytes | Unreadable:
    """The picture of a row, or why the row has no picture that can be decoded."""
    if isinstance(value, Unreadable):
        return value
    data = picture_bytes(value, _picture_folder(shard), shard.limits.document_bytes, shard.follow_links)
    if not isinstance(data, bytes):
        return Unreadable(*data)
    problem = picture_problem(data, shard.limits.picture_pixels)
    return data if problem is None else Unreadable(*problem)


def _picture_folder(shard: Shard) -> str:
    """The folder that picture paths of a shard are relative to; empty if there is none."""
    form = format_named(shard.format)
    if form.is_folder or not form.has_path:
        return shard.path if form.is_folder else ""
    return shard.path.rstrip("/").rsplit("/", 1)[0] if "/" in shard.path else "."


def _versions(shard: Shard, row: int, value: Any, companions: Any) -> TextVersions | Unreadable:
    """The versions of a row as scored, or why they cannot be scored. Raises UserError like `row_versions`."""
    if isinstance(value, Unreadable):
        return value
    where, change = f"row {row} of {shard.name}", shard.transform
    features, item = None, None
    if shard.window:
        permuted = window_orders(value, row, text_problem)
        if isinstance(permuted, Unreadable):
            return permuted
        features = None if shard.no_features else rows_features(value)
        value, *companions = permuted
    if shard.template:
        given = dict(zip(shard.value_columns, companions, strict=True))
        others = {name: given[name] for name in shard.companions}
        orders = order_options(value, shard.text, others, shard.template, shard.keep_marks)
        if isinstance(orders, Unreadable):
            return orders
        item = ChoiceItem(value, others, {name: given[name] for name in shard.answers}, shard.keep_marks)
        value, *companions = orders
    versions = row_versions(where, value, companions, lambda text: _too_large(text, shard) or text_problem(text))
    if isinstance(versions, Unreadable):
        return versions
    if item is not None and not shard.no_features:
        features = item_features(item)
    elif not (shard.window or shard.no_features):
        features = versions_features(versions.texts, versions.published, versions.forms)
    versions = replace(versions, differing=shard.differing, features=features, item=item)
    if change is None:
        return versions
    versions = replace(versions, texts=tuple(transform(text, change) for text in versions.texts))
    blank = not all(map(str.strip, versions.texts))
    return Unreadable(Reason.EMPTY, "nothing is left of a version by text_transform") if blank else versions


def _caption(shard: Shard, caption: Any) -> str | Unreadable:
    """The caption of a picture; empty if the corpus has no captions."""
    if shard.caption_column is None:
        return ""
    if isinstance(caption, Unreadable):
        return caption
    return _too_large(caption, shard) or text_problem(caption) or str(caption)


def _checked(shard: Shard, row: int, text: Any, identity: Any, group: Any, caption: Any) -> Document:
    doc_id = encodable(str(identity) if identity is not None else _default_id(shard, row))
    label = None if group is None else encodable(str(group))
    picture: bytes | None = None
    if shard.pictures and isinstance(text, bytes):
        picture, text = text, _caption(shard, caption)
        if not isinstance(text, Unreadable):
            return Document(row, doc_id, text, label, picture=picture)
    if shard.versioned:
        versions = _versions(shard, row, text, caption)
        if isinstance(versions, Unreadable):
            return Document(row, doc_id, "", label, (versions.reason, versions.message), cause=versions.cause)
        return Document(row, doc_id, versions.text, label, versions=versions)
    scores: tuple[float, ...] = ()
    if shard.scores and caption is not None and text is not DEADLY:
        given = read_scores(shard.scores, caption)
        if isinstance(given, Unreadable):
            return Document(row, doc_id, "", label, (given.reason, given.message))
        if not shard.has_text:
            return Document(row, doc_id, "", label, scores=given)
        scores = given
    text = ids_text(text) if shard.token_ids else text
    if shard.item and not isinstance(text, Unreadable):
        text = item_text(shard.template, dict(zip(shard.item, caption, strict=True)), text_problem)
    chat: Conversation | None = None
    if shard.chats:
        read = _conversation(shard, text, caption)
        chat, text = (None, read) if isinstance(read, Unreadable) else (read, read.text)
    problem = text if isinstance(text, Unreadable) else _too_large(text, shard) or text_problem(text)
    if problem is None and shard.transform is not None:
        change = partial(transform, config=shard.transform)
        chat = None if chat is None else chat.changed(change)
        text = change(text) if chat is None else chat.text
        if not text.strip() or (chat is not None and not chat.answered):
            problem = Unreadable(Reason.EMPTY, "nothing is left of it by text_transform")
    if problem is not None:
        return Document(row, doc_id, "", label, (problem.reason, problem.message), cause=problem.cause)
    return Document(row, doc_id, text, label, scores=scores, chat=chat)


def _conversation(shard: Shard, value: Any, others: Any) -> Conversation | Unreadable:
    """The conversation of a row; `others` are the values of `Shard.value_columns`, None if the row cannot be read."""
    given = dict(zip(shard.value_columns, others or (), strict=False))
    tools = None if shard.tools is None else given.get(shard.tools)
    try:
        if shard.completion is None:
            return read_conversation(value, tools)
        return read_completion(value, given.get(shard.completion), tools)
    except RecursionError:
        return Unreadable(Reason.NOT_CHAT, "its messages or tools are nested too deeply")


def _default_id(shard: Shard, row: int) -> str:
    file = f"/{shard.files[row - shard.first_row]}" if shard.files not in ((), ("",)) else ""
    return f"{shard.name}{file}#{0 if shard.files else row}"


def read_scores(columns: Sequence[str], values: Sequence[Any]) -> tuple[float, ...] | Unreadable:
    """The finite scores of a row, in the order of `Shard.scores`; the reason if a value is not a finite number."""
    scores, given = [], dict(zip(columns, values, strict=True))
    naming = {column: names for column in columns if (names := ANSWER_COLUMNS.get(column))}
    scored = columns[
        : len(columns) - sum(map(len, naming.values()))
    ]  # the columns that name correct answers are the last
    for column in scored:
        value = given[column]
        if column in naming:
            value = _answer_score(value, *map(given.get, naming[column]))
        try:
            score = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            return Unreadable(Reason.NON_FINITE_SCORE, f"column {column!r} holds {value!r:.40}, not a finite number")
        scores.append(score)
    return tuple(scores)


def ids_text(value: Any) -> str | Unreadable:
    """Token ids as a text of numbers separated by blanks; the reason if a value is not a token id."""
    if isinstance(value, Unreadable):
        return value
    if not isinstance(value, list):
        return Unreadable(Reason.NOT_TEXT, f"{type(value).__name__}, not a list of token ids")
    for one in value:
        if type(one) is not int or one < 0:
            return Unreadable(Reason.NOT_TEXT, f"{one!r:.40} is no token id: an id is an integer from 0")
    return " ".join(map(str, value)) if value else Unreadable(Reason.EMPTY, "no token ids")


def _answer_score(answers: Any, target: Any, choices: Any = None) -> Any:
    """The log-likelihood of the correct or only answer; `answers` unchanged if there is none, or several.

    Args:
        answers: a number for each answer, or a list that begins with it.
        target: place of the correct one, or a list of places.
        choices: the answers; None: not known. Without as many, the numbers are not those of answers.
    """
    if not isinstance(answers, list) or not answers or (isinstance(choices, list) and len(choices) != len(answers)):
        return answers
    target = target[0] if isinstance(target, list) and len(target) == 1 else target
    place = 0 if len(answers) == 1 else int(target) if str(target).isdecimal() else len(answers)
    if place >= len(answers):
        return answers
    answer = answers[place]
    return answer[0] if isinstance(answer, list) and answer else answer


def _too_large(text: Any, shard: Shard) -> Unreadable | None:
    most = shard.limits.document_bytes
    if not isinstance(text, str) or 4 * len(text) <= most:
        return None
    size = len(text.encode("utf-8", "surrogatepass"))
    return overlong(Overlong(size), "bytes", shard) if size > most else None


def text_problem(text: Any) -> Unreadable | None:
    """Why a value is not a text that can be scored; None if it is."""
    if text is None:
        return Unreadable(Reason.NOT_TEXT, "no text in this row")
    if not isinstance(text, str):
        return Unreadable(Reason.NOT_TEXT, f"{type(text).__name__}, not text")
    if not (text.replace("\0", " ") if "\0" in text else text).strip():
        return Unreadable(
            Reason.EMPTY, "nothing but white space" if "\0" not in text else "nothing but null characters"
        )
    try:
        text.isascii() or text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Unreadable(
            Reason.UNDECODABLE, f"character {error.start} is {text[error.start]!a}: not valid Unicode text"
        )
    return None


def read_labels(shard: Shard) -> Iterator[Any]:
    """The label of every row in the range of a shard, of any role, as written in the file.

    Raises:
        UserError: the file itself is damaged.
    """
    try:
        for *_, label, _ in format_named(shard.format).rows(shard, unwatched, Notes()):
            yield label
    except _DAMAGE as error:
        raise UserError(f"{shard.name} is damaged: {error_line(error)}") from None


def fetch_texts(shards: Sequence[Shard], places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Texts of single rows, by (input name, row). Reads the shards of their inputs up to the last of them.

    Raises:
        UserError: an input is missing or damaged.
    """
    texts: dict[tuple[str, int], str] = {}
    for shard in shards:
        rows = {row for name, row in places if name == shard.name and row >= shard.first_row} - {
            row for name, row in texts if name == shard.name
        }
        if rows:
            texts.update(((shard.name, d.row), d.text) for d in read_shard(shard, wanted=rows))
    return texts


class ContentDigest:
    """SHA-256 of the numbers, ids, groups and untransformed texts of documents, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._whole = True

    def add(self, row: int, text: Any, identity: Any, group: Any) -> None:
        """Add a row; a value that is not a text is added by its representation."""
        kind, value = ("text", text) if isinstance(text, str) else ("none", repr(text))
        data = value.encode("utf-8", "surrogatepass")
        head = f"{row} {identity!r} {group!r} {kind} {len(data)}\n"
        self._digest.update(head.encode("utf-8", "backslashreplace"))
        self._digest.update(data)

    def add_picture(self, picture: bytes | None, caption: Any) -> None:
        """Add the picture and the caption of the last row."""
        data = picture or b""
        self._digest.update(f"{picture is None} {len(data)} {caption!r}\n".encode("utf-8", "backslashreplace"))
        self._digest.update(data)

    def skip(self) -> None:
        """Record that a row could not be read, so that there is no digest of the whole."""
        self._whole = False

    def hexdigest(self) -> str:
        """Hexadecimal digest of all rows so far; empty if a row was skipped because it kills its reader."""
        return self._digest.hexdigest() if self._whole else ""


def text_digest(text: str) -> str:
    """16 hexadecimal digits of the SHA-256 of an unnormalised text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def transform(text: str, config: TransformConfig) -> str:
    """The text with its dates changed; a text without dates is returned unchanged."""
    if config.dates == "replace_year":
        year = str(config.year)
        for date in _DATES[:2]:
            text = date.sub(lambda match: _YEAR_OF_A_DATE.sub(year, match[0]), text)
        return _YEAR.sub(year, text)
    removed = text
    for date in _DATES:
        removed = date.sub("", removed)
    if removed == text:
        return text
    for gap, closed in _GAPS:
        removed = gap.sub(closed, removed)
    return removed.strip(" \t")


SPELLINGS: dict[Role, tuple[str, ...]] = {
    "seen": ("1", "true", "member", "seen"),
    "unseen": ("0", "false", "nonmember", "unseen"),
}
"""Role -> valid labels; variants such as 1.0, True and non-member are also accepted."""

_ROLE_OF: dict[str, Role] = {spelling: role for role, spellings in SPELLINGS.items() for spelling in spellings}
_ACCEPTED = " and ".join(
    f"{', '.join(spellings[:-1])} or {spellings[-1]} for {kind}"
    for kind, spellings in (("members", SPELLINGS["seen"]), ("nonmembers", SPELLINGS["unseen"]))
)
_LISTED = 5
_CHARACTERS = 30


def _role_of_label(label: Any, source: str) -> Role | None:
    """The role that corresponds to a label; None for an empty label (null, NaN or only white space).

    Args:
        label: value in the row.
        source: name of the input, for errors.

    Raises:
        UserError: the label is not one of `SPELLINGS`.
    """
    spelling = _spelling(label)
    if spelling is not None and spelling not in _ROLE_OF:
        raise UserError(f"label {_shortened(label)} in {source} is unknown; labels are {_ACCEPTED}")
    return None if spelling is None else _ROLE_OF[spelling]


def check_labels(labels: Iterable[Any], column: str, source: str) -> None:
    """Check that a column holds two values, one for members and one for nonmembers; rows may lack a label.

    Args:
        labels: label of every row, as written.
        column: column that holds them.
        source: names of the inputs, for errors.

    Raises:
        UserError: the column holds other labels, or only one kind; the message lists them.
    """
    values: dict[str, str] = {}
    for label in labels:
        spelling = _spelling(label)
        if spelling is not None and spelling not in values:
            values[spelling] = _shortened(label)
            if len(values) > _LISTED:
                break
    where = f"column {column!r} in {source}"
    if not values:
        raise UserError(f"{where} holds no label; labels are {_ACCEPTED}")
    known = {_ROLE_OF.get(spelling) for spelling in values}
    if len(values) > 2 or None in known:
        count = f"more than {_LISTED}" if len(values) > _LISTED else str(len(values))
        shown = ", ".join(list(values.values())[:_LISTED])
        noun = "value" if len(values) == 1 else "values"
        raise UserError(f"{where} holds {count} {noun}: {shown}; it takes two: {_ACCEPTED}")
    if len(known) == 1:
        missing = "nonmembers" if "seen" in known else "members"
        raise UserError(f"{where} holds no label of {missing}, only {' and '.join(values.values())}; {_ACCEPTED}")


def _spelling(label: Any) -> str | None:
    """The normalised label; None if it is empty."""
    if label is None or (isinstance(label, float) and math.isnan(label)):
        return None
    text = str(label).strip().casefold()
    text = text.removesuffix(".0") if text in ("0.0", "1.0") else text
    return {"non-member": "nonmember", "non_member": "nonmember", "": None}.get(text, text)


def _shortened(label: Any) -> str:
    text = " ".join(str(label).split())
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
