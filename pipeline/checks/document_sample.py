"""Read documents before any model is loaded: all, or shards drawn at random, as tables of keys that checks look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipeline.checks.dependence_plan import relate_documents
from pipeline.checks.dependent_documents import near_duplicates_among
from pipeline.checks.diagnostic import NearDuplicates
from pipeline.checks.input_findings import DocumentTally
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES, Role
from pipeline.config.selection import NULL_ROLE
from pipeline.corpus.documents import Document, UnclosedError, read_shard
from pipeline.corpus.draw_features import ChoiceItem, DrawFeatures
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.keys import Keys, content_size, keyed
from pipeline.corpus.known_texts import repeated_ids
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.selection.blocks import Related

if TYPE_CHECKING:
    from pipeline.run.plan import Plan  # imports the models, which a reader of summaries does not need

DOCUMENT_COST = 256  # fixed cost of a document, in characters
_ORDER = 5  # random number stream of the sampled shards


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of the reading. A corpus within them is checked as a whole; of a larger one shards are drawn at random.

    The audited documents get at least half of it, each known role at most a quarter. This also limits the memory: half
    a kilobyte per document, of which there are at most `characters / DOCUMENT_COST`.
    """

    characters: int  # maximum; each document counts as its length plus DOCUMENT_COST
    texts: int  # maximum for each role of the blind test


@dataclass(frozen=True, slots=True, eq=False)
class RoleKeys:
    """The keys of the documents of one role that were read, in the order of the files."""

    shards: list[Shard]
    ends: np.ndarray  # int64, (shards,): cumulative number of documents at the end of each
    keys: Keys
    repeats: np.ndarray  # int64: positions of documents with an id of an earlier one
    compared: np.ndarray  # int64: positions of the others that have more than one word, or a picture
    whole: bool

    @property
    def once(self) -> np.ndarray:
        """Positions of documents that do not repeat an id: int64."""
        return np.setdiff1d(np.arange(len(self.keys)), self.repeats)

    def doc_id(self, position: int) -> str:
        """The id of a document, from its file."""
        index = int(np.searchsorted(self.ends, position, side="right"))
        offset = position - (int(self.ends[index - 1]) if index else 0)
        (shard,) = number_rows([self.shards[index]])
        readable = (document for document in read_shard(shard) if document.problem is None)
        for document in itertools.islice(readable, offset, None):
            return document.doc_id
        raise UserError(f"{self.shards[index].name} changed while it was read")

    def whole_file(self, position: int) -> Shard:
        """A shard of all rows of the file that holds a document."""
        inside = self.shards[int(np.searchsorted(self.ends, position, side="right"))]
        some = [shard for shard in self.shards if shard.path == inside.path]
        return replace(some[0], stop=some[-1].stop)

    def compared_ids(self, places: Sequence[int]) -> list[str]:
        """The ids of documents by their places among the compared ones."""
        return [self.doc_id(int(self.compared[place])) for place in places]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the texts of a document with versions show of its draw."""

    published: int  # index of the published version
    versions: int  # their number
    features: DrawFeatures
    item: ChoiceItem | None


@dataclass(frozen=True, eq=False)
class DocumentSample:
    """The documents that were read of an audit, for the checks before scoring."""

    plan: Plan
    effort: Effort
    tally: DocumentTally = field(default_factory=DocumentTally)
    damaged: list[str] = field(default_factory=list)  # inputs that could not be read to their end, one line each
    drawn: dict[str, Drawn] = field(default_factory=dict)  # by id, the first of each
    read: dict[Role, RoleKeys] = field(default_factory=dict)

    @property
    def config(self) -> AuditConfig:
        """The audit's configuration."""
        return self.plan.config

    @property
    def whole(self) -> bool:
        """Whether all documents were read."""
        return all(keys.whole for keys in self.read.values())

    @property
    def known(self) -> list[Role]:
        """The known roles beside the audited documents; empty where nothing is audited."""
        return [role for role in self.read if role != "audit"] if "audit" in self.read else []

    @property
    def compared(self) -> list[Role]:
        """The known roles whose contents are compared with those of the audited documents."""
        return self.known if self.config.corpus.has_text else []

    @cached_property
    def near(self) -> Mapping[Role, tuple[NearDuplicates, Related]]:
        """The near-duplicates among the documents of each role, and what makes these depend on one another."""
        return {role: self._near(keys) for role, keys in self.read.items()}

    def _near(self, keys: RoleKeys) -> tuple[NearDuplicates, Related]:
        compared = keys.compared if self.config.corpus.has_text else keys.compared[:0]
        sketches = keys.keys.sketch[compared]
        record, family = near_duplicates_among(sketches, self.config.near_copies, True, keys.compared_ids)
        return record, relate_documents(keys.keys, keys.once, compared, family)


def calibrating(config: AuditConfig) -> list[Role]:
    """The roles that calibrate a selection."""
    needed = {NULL_ROLE[selection.direction] for selection in config.selections}
    return [role for role in ROLES if role in needed]


def read_sample(plan: Plan, effort: Effort) -> DocumentSample:
    """Read the documents of every role of an audit, up to limits.

    Args:
        plan: plan of the audit.
        effort: limits of the reading.

    Raises:
        UserError: the inputs of the plan are missing, or an input ends inside a quoted field.
    """
    sample = DocumentSample(plan, effort)
    roles = [role for role, _ in plan.config.corpus.roles()]
    quarter = effort.characters // 4
    for role in roles:
        sample.read[role] = _read(
            sample, role, effort.characters - (len(roles) - 1) * quarter if role == "audit" else quarter
        )
    return sample


def _read(sample: DocumentSample, role: Role, characters: int) -> RoleKeys:
    """Read the documents of a role: all, or shards drawn at random up to the given number of characters."""
    candidates = [shard for shard in sample.plan.shards if shard.role == role]
    order = np.random.default_rng([sample.config.seed, _ORDER]).permutation(len(candidates)).tolist()
    parts: dict[int, list[Keys]] = {}
    left = characters
    for index in order:
        if left <= 0:
            break
        parts[index] = []
        try:
            for documents, keys in keyed(_distinct(candidates[index], sample)):
                rest = left - np.cumsum([0, *(content_size(document) + DOCUMENT_COST for document in documents)])
                parts[index].append(keys.take(rest[:-1] > 0))
                left = int(rest[-1])
                if left <= 0:
                    break
        except UnclosedError:
            raise
        except UserError as error:  # of one file; the run finishes the others and reports it
            sample.damaged.append(str(error))
    read = {index: Keys.joined(parts[index]) for index in sorted(parts)}
    keys = Keys.joined(read.values())
    repeats = repeated_ids([(0, keys.id)], len(keys)).get(0, np.empty(0, dtype=np.int64))
    once = np.ones(len(keys), dtype=bool)
    once[repeats] = False
    ends = np.cumsum([len(part) for part in read.values()], dtype=np.int64)
    compared = np.flatnonzero(once & (keys.length > 1))
    return RoleKeys([candidates[index] for index in read], ends, keys, repeats, compared, left > 0)


def _distinct(shard: Shard, sample: DocumentSample) -> Iterator[Document]:
    """The readable documents of a shard, with ids that cannot repeat by their row number alone."""
    for document in sample.tally.readable(shard):
        versions = document.versions
        if versions is not None and versions.features is not None and document.doc_id not in sample.drawn:
            seen = Drawn(versions.published, len(versions.texts), versions.features, versions.item)
            sample.drawn[document.doc_id] = seen
        # without a column ids are file#row, which cannot repeat; a plan has not counted the rows yet
        yield document if shard.id_column else replace(document, doc_id=f"{shard.id} {document.doc_id}")
