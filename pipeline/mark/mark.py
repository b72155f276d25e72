"""`seenset mark`: draw versions of documents, publish one of each, and commit to all of them.

The versions of a text follow from its sites, all drawn from one secret seed.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import hashlib
import heapq
import hmac
import itertools
import math
import os
import posixpath
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import __version__
from pipeline.config.corpus import CorpusConfig, SourceConfig
from pipeline.config.dialect import PLAIN, Dialect
from pipeline.config.models import ParaphraserConfig
from pipeline.config.yaml import build, read_mapping
from pipeline.corpus.csv_records import DelimiterError
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats import FORMATS, by_bytes, format_named
from pipeline.corpus.formats.base import RowEdits, TextEdit
from pipeline.corpus.inputs import InputFile, find_inputs
from pipeline.corpus.reasons import Reason
from pipeline.corpus.shard import Shard, whole_shard
from pipeline.errors import SettingError, UserError, error_line
from pipeline.export.export_folder import source_place
from pipeline.mark.commitment import (
    CommittedDocument,
    leaf_digest,
    merkle_root,
    read_committed,
    text_digests,
    version_digest,
)
from pipeline.mark.rules import RULES_VERSION, MarkRule, canonical, language_rules, with_forms
from pipeline.models.checkpoints import check_files
from pipeline.store.files import HashedFile, Store

PUBLIC, PRIVATE = "public", "private"
VERSIONS_FILE, SEED_FILE, UNMARKED_FILE = (
    f"{PRIVATE}/versions.parquet",
    f"{PRIVATE}/seed.json",
    f"{PRIVATE}/unmarked.parquet",
)
COMMITMENT_FILE = "commitment.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("versions", pa.list_(pa.string())),
        ("index", pa.int32()),  # index of the published version
        ("sites", pa.int32()),  # number of sites; 0 where a model wrote the versions
        ("salt", pa.binary(32)),
        ("kinds", pa.list_(pa.string())),  # kind of each site
        ("forms", pa.list_(pa.binary())),  # for each version, the form at each site, one byte each
    ]
)
SAMPLED = 10
_REASONS = 3  # named where nothing is marked
_LANGUAGES = {"en": "English"}
_AT_ONCE = 16  # documents per batch of a model
_CHARACTERS = 1 << 25  # characters of versions in memory before they are written
_CONTEXT = 4  # words shown around an edit

FEWEST_SITES = 5
"""Minimum number of sites of a marked document; one with fewer is published unchanged."""

MOST_VERSIONS = 1000
MOST_CHARACTERS = 1 << 28
"""Maximum number of characters of all versions of a document."""

SEED_BYTES = 32
MOST_SEED = (1 << 8 * SEED_BYTES) - 1


@dataclass(frozen=True, slots=True)
class Versions:
    """The distinct texts of a document, in the order of the draws."""

    texts: tuple[str, ...]
    choices: tuple[bytes, ...]  # for each version, the form at each site
    kinds: tuple[str, ...]  # kind of each site


Drawer = Callable[[Sequence[tuple[str, str]]], Iterable[Versions | str]]
"""Maps (id, text) of some documents to the versions of each, or to the reason why there are none."""


class KeyedStream:
    """Uniform integers from a seed, a purpose and an id: SHA-256 in counter mode, keyed by HMAC."""

    def __init__(self, seed: int, purpose: str, doc_id: str) -> None:
        """Start the stream of one purpose and one document."""
        self._key = derived(seed, purpose, doc_id)
        self._block, self._count = b"", 0

    def below(self, n: int) -> int:
        """A uniform integer in [0, n), 1 <= n <= 65,536: words of 16 bits, those beyond a multiple of n rejected."""
        most = 65_536 - 65_536 % n
        while True:
            if not self._block:
                self._block = hashlib.sha256(self._key + self._count.to_bytes(8, "big")).digest()
                self._count += 1
            word, self._block = int.from_bytes(self._block[:2], "big"), self._block[2:]
            if word < most:
                return word % n


def new_seed() -> int:
    """A seed of 256 bits from the operating system."""
    return int.from_bytes(secrets.token_bytes(SEED_BYTES), "big")


def derived(seed: int, purpose: str, doc_id: str) -> bytes:
    """32 bytes for one purpose and one document: HMAC-SHA-256(seed, purpose || 0x00 || UTF-8 of the id)."""
    return hmac.digest(seed.to_bytes(SEED_BYTES, "big"), f"{purpose}\0{doc_id}".encode(), "sha256")


def drawn_index(seed: int, doc_id: str, k: int) -> int:
    """The index of the published version among k: uniform in [0, k), independent of the versions."""
    return KeyedStream(seed, "index", doc_id).below(k)


def draw_versions(text: str, doc_id: str, k: int, seed: int, rules: Sequence[MarkRule]) -> Versions | str:
    """Draw k distinct versions of a text, or state why there are none.

    Each is a choice of a form at every site of the canonical text, uniform among all choices not drawn before, so that
    the versions do not depend on the author's choice of forms.

    Args:
        text: text of the document.
        doc_id: id of the document.
        k: number of versions, >= 2.
        seed: seed of the collection.
        rules: rules of its language.
    """
    if k * len(text) > MOST_CHARACTERS:
        return f"more than {MOST_CHARACTERS:,} characters in {k:,} versions"
    form = canonical(text, rules)
    if form is None:
        return "its edits exclude one another"
    base, sites = form
    if len(sites) < FEWEST_SITES:
        return f"fewer than {FEWEST_SITES} sites"
    if math.prod(len(site.forms) for site in sites) < k:
        return f"fewer than {k:,} versions"
    stream, drawn = KeyedStream(seed, "versions", doc_id), dict[str, bytes]()
    counts = [len(site.forms) for site in sites]
    while len(drawn) < k:
        choice = bytes(map(stream.below, counts))
        drawn.setdefault(with_forms(base, sites, choice), choice)
    return Versions(tuple(drawn), tuple(drawn.values()), tuple(site.kind for site in sites))


@dataclass(frozen=True, slots=True)
class MarkRequest:
    """The input and the settings of marking."""

    input: str  # a file or a folder
    out: str
    versions: int = 20
    text: str = "text"
    id: str | None = None
    seed: int = 0  # secret
    language: str = "en"
    model: str | None = None  # model that writes the versions; None: the rules of the language
    created: str | None = None  # date in the commitment
    encoding: str = PLAIN.encoding  # encoding of CSV and .txt files
    delimiter: str = PLAIN.delimiter  # character between the fields of CSV files


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The original and the published text of a document."""

    id: str
    edits: list[tuple[str, str]]  # the differences, each with some words of context


@dataclass(frozen=True, slots=True)
class Marked:
    """The result of marking."""

    folder: str
    versions: int
    documents: int
    marked: int
    unmarked: dict[str, int]  # documents by reason
    sites: list[int]  # minimum, median and maximum per marked document
    root: str
    files: list[str]
    sample: list[SideBySide]

    def plain(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """The output of the command above the sample."""
        least, median, most = self.sites
        lines = [
            f"{self.marked:,} of {self.documents:,} documents are marked, each published in one of {self.versions:,} "
            f"versions; sites of a document: {least} to {most}, median {median}."
        ]
        lines += [f"{count:,} are published as they were: {reason}." for reason, count in self.unmarked.items()]
        if self.marked < 500:
            lines.append(
                "Seen once or a few times, single documents show nothing: a collection of 500 to 1,500 marked ones may."
            )
        return lines


class _Archive:
    """The private files while they are written, and the counts of the summary."""

    def __init__(self, seed: int, file: BinaryIO) -> None:
        self.seed = seed
        self.writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")
        self.rows: list[dict[str, Any]] = []
        self.waiting = 0  # characters of the waiting rows
        self.leaves: list[tuple[str, bytes]] = []
        self.sites: list[int] = []
        self.unmarked: list[tuple[str, str]] = []
        self.sample: list[tuple[int, str, str, str]] = []

    def add(self, doc_id: str, text: str, versions: Versions | str) -> str | None:
        """Store the versions of a document, or why there are none; returns the published version, None: the text."""
        if isinstance(versions, str):
            self.unmarked.append((doc_id, versions))
            return None
        index, salt = drawn_index(self.seed, doc_id, len(versions.texts)), derived(self.seed, "salt", doc_id)
        digests = b"".join(version_digest(salt, one) for one in versions.texts)
        self.leaves.append((doc_id, leaf_digest(doc_id, index, digests)))
        self.sites.append(len(versions.kinds))
        values = (doc_id, versions.texts, index, len(versions.kinds), salt, versions.kinds, versions.choices)
        self.rows.append(dict(zip(SCHEMA.names, values, strict=True)))
        self.waiting += sum(map(len, versions.texts))
        if self.waiting > _CHARACTERS:
            self.flush()
        published = versions.texts[index]
        rank = -int.from_bytes(derived(self.seed, "sample", doc_id), "big")
        push = heapq.heappush if len(self.sample) < SAMPLED else heapq.heappushpop
        push(self.sample, (rank, doc_id, text, published))
        return published

    def flush(self) -> None:
        """Write the waiting rows."""
        if self.rows:
            self.writer.write_table(pa.Table.from_pylist(self.rows, SCHEMA))
            self.rows.clear()
            self.waiting = 0

    def root(self) -> str:
        """The Merkle root over all marked documents, hexadecimal."""
        return merkle_root([leaf for _, leaf in sorted(self.leaves)]).hex()


def check_request(request: MarkRequest) -> None:
    """Check the request before a model is loaded.

    Raises:
        UserError: fewer than 2 versions or more than 1,000; a seed beyond 256 bits; a language without rules; an
            output folder that is not empty or is inside the input.
    """
    if not 2 <= request.versions <= MOST_VERSIONS:
        raise UserError(f"--versions must be between 2 and {MOST_VERSIONS:,}, got {request.versions}")
    if not 0 <= request.seed <= MOST_SEED:
        raise UserError(f"--seed must be between 0 and 2**256 - 1, got {request.seed}")
    language_rules(request.language)
    _as_source(request)
    _check_outside(request)


def read_paraphraser(path: str) -> ParaphraserConfig:
    """The paraphraser that a YAML file describes, in the format of `paraphraser:` of an audit.

    Raises:
        UserError: no such file, an unknown key, or a model whose files are missing or of a kind that is not allowed.
    """
    config = build(ParaphraserConfig, read_mapping(path, ParaphraserConfig))
    check_files(config)
    return config


def mark_documents(request: MarkRequest, draw: Drawer | None = None) -> Marked:
    """Write the public copy of a file or folder, its private versions and the commitment. Nothing is overwritten.

    Args:
        request: input and settings; the same request writes the same bytes.
        draw: draws the versions; None: the rules of the language.

    Raises:
        UserError: the errors of `check_request`; an input that cannot be marked; a repeated id.
    """
    check_request(request)
    inputs, store = _named_inputs(request), Store(request.out)
    if store.local:
        os.makedirs(store.path(PRIVATE), mode=0o700, exist_ok=True)
    try:
        return _written(request, draw or _by_rules(request), inputs, store)
    except BaseException:  # the files are incomplete, and all of them are from this call
        for folder in (PUBLIC, PRIVATE):
            store.remove_folder(folder)
        raise


def _written(request: MarkRequest, draw: Drawer, inputs: list[tuple[Shard, list[str]]], store: Store) -> Marked:
    """Write all files into an empty folder, the commitment last."""
    public: dict[str, str] = {}

    @contextlib.contextmanager
    def open_public(name: str) -> Iterator[HashedFile]:
        with store.replaced(f"{PUBLIC}/{name}") as file:
            yield file
        public[name] = file.sha256

    seen: set[str] = set()
    with store.replaced(VERSIONS_FILE) as file:
        archive = _Archive(request.seed, file)
        with archive.writer:
            for shard, names in inputs:
                edits = RowEdits(_edits(shard, names, archive, draw, seen))
                write_edited = format_named(shard.format).edit
                assert write_edited is not None  # other formats were refused
                with _named_damage(shard):
                    write_edited(shard, names, edits, open_public)
                edits.finish()
            archive.flush()
    if not archive.leaves:
        raise UserError(_nothing_marked(request, archive))
    _write_records(request, archive, store, {VERSIONS_FILE: file.sha256}, public)
    return _marked(request, archive, store.url, sorted(public))


def _nothing_marked(request: MarkRequest, archive: _Archive) -> str:
    """Why no document is marked, and what to do."""
    reasons = Counter(reason for _, reason in archive.unmarked)
    counts = ", ".join(f"{count:,}: {reason}" for reason, count in reasons.most_common(_REASONS))
    what = f"none of the {len(archive.unmarked):,} documents can be marked ({counts})"
    if reasons.get(Reason.UNDECODABLE, 0) > len(archive.unmarked) / 2:
        return f"{what}; --encoding names another encoding than {Dialect(request.encoding).label}"
    if request.model is not None:
        return f"{what}; {request.model} writes fewer than {request.versions:,} different versions: take another"
    language = _LANGUAGES[request.language]
    return f"{what}; the rules are of {language} prose, and --with CONFIG.YAML lets a model write the versions"


@contextlib.contextmanager
def _named_damage(shard: Shard) -> Iterator[None]:
    """Turn an error of a reader into a user error of one line; errors of the operating system pass."""
    try:
        yield
    except (EOFError, csv.Error, pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise UserError(f"{shard.name} is damaged: {error_line(error)}") from None


def _by_rules(request: MarkRequest) -> Drawer:
    rules = language_rules(request.language)

    def draw(documents: Sequence[tuple[str, str]]) -> Iterator[Versions | str]:
        for doc_id, text in documents:
            yield draw_versions(text, doc_id, request.versions, request.seed, rules)

    return draw


def _write_records(
    request: MarkRequest, archive: _Archive, store: Store, private: dict[str, str], public: dict[str, str]
) -> None:
    """Write the documents that are not marked, with the reasons, then the seed, and the commitment last."""
    unmarked = {name: [row[place] for row in archive.unmarked] for place, name in enumerate(("id", "reason"))}
    store.write_table(UNMARKED_FILE, pa.table(unmarked, pa.schema([("id", pa.string()), ("reason", pa.string())])))
    settings = {
        "schema": 1,
        "seenset": __version__,
        "rules": RULES_VERSION,
        "versions": request.versions,
        "language": None if request.model else request.language,
        "model": request.model,
        "text": request.text,
        "id": request.id,
        **Dialect(request.encoding, request.delimiter).differing(),
    }
    store.write_json(SEED_FILE, {"seed": str(request.seed), **settings})
    created = {} if request.created is None else {"created": request.created}
    files = {"private": private, "public": dict(sorted(public.items()))}
    store.write_json(
        COMMITMENT_FILE, {"root": archive.root(), "documents": len(archive.leaves), **settings, **files, **created}
    )


def check_private(folder: str) -> None:
    """Check that the private versions of a folder match its commitment.

    Raises:
        UserError: a file is missing, or the root of the versions differs; the message names the difference.
    """
    store = Store(folder)
    for name in (COMMITMENT_FILE, VERSIONS_FILE):
        if not store.exists(name):
            raise UserError(f"{folder} holds no {name}: seenset mark writes it")
    data, commitment = store.read(VERSIONS_FILE), store.read_json(COMMITMENT_FILE)
    table = pq.read_table(pa.BufferReader(data))
    if missing := [name for name in ("id", "versions", "index", "salt") if name not in table.column_names]:
        raise UserError(f"{folder}/{VERSIONS_FILE} does not match {COMMITMENT_FILE}: it has no column {missing[0]}")
    with pq.ParquetFile(pa.BufferReader(data)) as parquet:
        documents = list(read_committed(parquet))
    root = merkle_root([leaf for _, leaf in sorted((one.id, one.leaf) for one in documents)]).hex()
    if root != commitment["root"]:
        firsts = [texts[0] for texts in table["versions"].to_pylist()]
        raise UserError(
            f"{folder}/{VERSIONS_FILE} does not match {COMMITMENT_FILE}: its root is {root[:16]}..., and "
            f"{commitment['root'][:16]}... was committed to; {_differing(documents, firsts, commitment, store)}"
        )


def _differing(documents: list[CommittedDocument], firsts: list[str], commitment: Any, store: Store) -> str:
    """Describe the first part of the private files that contradicts the seed or the commitment."""
    if len(documents) != commitment["documents"]:
        return f"it holds {len(documents):,} documents, and {commitment['documents']:,} were committed to"
    if (stated := store.read_json(SEED_FILE)) is None:
        return f"{SEED_FILE} is missing, so the document cannot be identified"
    seed, rules = int(stated["seed"]), language_rules(commitment["language"] or "en")
    for one, first in zip(documents, firsts, strict=True):
        k = len(one.digests) // 32
        if one.salt != derived(seed, "salt", one.id):
            return f"document {one.id!r} has a salt that {SEED_FILE} does not give"
        if one.index != (drawn := drawn_index(seed, one.id, k)):
            return f"document {one.id!r} has index {one.index}, and {SEED_FILE} gives {drawn}"
        made = None if commitment["model"] else draw_versions(first, one.id, k, seed, rules)
        if made is not None and (isinstance(made, str) or text_digests(made.texts) != one.texts):
            return f"document {one.id!r} has versions that {SEED_FILE} does not give"
    return f"{PRIVATE}/ is of another collection" + (" or has an edited version" if commitment["model"] else "")


def check_scored(path: str) -> None:
    """`check_private` for the folder of an input, if the input is the private file of a folder with a commitment."""
    folder = path.removesuffix(f"/{VERSIONS_FILE}")
    if folder != path and Store(folder).exists(COMMITMENT_FILE):
        check_private(folder)


def shown_edits(before: str, after: str) -> list[tuple[str, str]]:
    """The differences of two texts, each with some words of context."""
    old, new = before.split(), after.split()
    groups = difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT)
    spans = ((group[0], group[-1]) for group in groups)
    return [(" ".join(old[a[1] : b[2]]), " ".join(new[a[3] : b[4]])) for a, b in spans]


def _marked(request: MarkRequest, archive: _Archive, folder: str, files: list[str]) -> Marked:
    sites = sorted(archive.sites)
    sample = [SideBySide(doc_id, shown_edits(*texts)) for _, doc_id, *texts in sorted(archive.sample, reverse=True)]
    return Marked(
        folder,
        request.versions,
        len(archive.sites) + len(archive.unmarked),
        len(archive.sites),
        dict(Counter(reason for _, reason in archive.unmarked).most_common()),
        [sites[0], int(statistics.median_low(sites)), sites[-1]] if sites else [0, 0, 0],
        archive.root(),
        files,
        sample,
    )


def _edits(shard: Shard, names: list[str], archive: _Archive, draw: Drawer, seen: set[str]) -> Iterator[TextEdit]:
    """The published version of every document of an input, in order.

    Raises:
        UserError: a repeated id.
    """
    files = format_named(shard.format).unit == "file"  # one document per file
    has_ids = shard.id_column is not None and not files
    documents = read_shard(shard)
    while batch := list(itertools.islice(documents, _AT_ONCE)):
        numbered = {d.row: f"{names[d.row]}#0" if files else f"{names[0]}#{d.row}" for d in batch}
        place = {d.row: d.doc_id if has_ids else numbered[d.row] for d in batch}
        for doc_id in place.values():
            if doc_id in seen:
                raise UserError(f"id {doc_id!r} occurs twice in {shard.name}: every document needs one of its own")
            seen.add(doc_id)
        drawn = iter(draw([(place[d.row], d.text) for d in batch if d.problem is None]))
        for d in batch:
            versions = next(drawn) if d.problem is None else d.problem[0]
            yield TextEdit(d.row, d.text, archive.add(place[d.row], d.text, versions))


def _named_inputs(request: MarkRequest) -> list[tuple[Shard, list[str]]]:
    """The files of an input, each as one shard, with the names of its public copies.

    Raises:
        UserError: no file can be read, or one has a format that cannot be marked.
    """
    source = _as_source(request)
    try:
        inputs = find_inputs(CorpusConfig(audit=source))
    except SettingError as error:  # without what a configuration could allow
        raise SettingError("INPUT", error.fault) from None
    except DelimiterError as error:
        raise UserError(f"{error.problem}; give --delimiter {error.written}") from None
    fs, path = fsspec.core.url_to_fs(os.path.expanduser(request.input) if "://" not in request.input else request.input)
    folder = path if fs.isdir(path) else posixpath.dirname(path)
    named = []
    for entry in inputs:
        if format_named(entry.format).edit is None:
            known = ", ".join(form.name for form in FORMATS.values() if form.edit is not None)
            raise UserError(f"{entry.name} has the format {entry.format}; formats that can be marked: {known}")
        relative = posixpath.relpath(fs._strip_protocol(entry.path), folder)
        names = [posixpath.normpath(f"{relative}/{inner}") for inner in entry.files] or [relative]
        named.append((replace(_input_shard(entry, source), name=relative), names))
    return named


def _as_source(request: MarkRequest) -> SourceConfig:
    """The input as a source. Raises UserError: an unknown encoding, or a delimiter of several characters."""
    names = ("text", "id", "encoding", "delimiter")
    try:
        return build(SourceConfig, {"path": request.input, **{name: getattr(request, name) for name in names}})
    except UserError as error:
        raise UserError(f"--{error}") from None


def _input_shard(entry: InputFile, source: SourceConfig) -> Shard:
    shard = whole_shard(entry, source)
    return replace(shard, stop=entry.size) if by_bytes(shard) else shard


def _check_outside(request: MarkRequest) -> None:
    """Check that the folder to write is empty and outside the input. Raises UserError."""
    out, given = source_place(request.out), source_place(request.input)
    if out[: len(given)] == given:
        raise UserError(f"{request.out} is inside {request.input}, whose files are marked: name a folder outside of it")
    if names := Store(request.out).names(""):
        raise UserError(f"{request.out} holds {', '.join(names[:3])}: mark overwrites nothing, name a new folder")
