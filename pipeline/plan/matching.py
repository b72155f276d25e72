"""Find calibration documents that resemble the audited ones: distinguishing words, and a matched subset."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.checks.blind import TOKENS, WORDS, blind_diagnostic, blocks_of_documents, sample_documents
from pipeline.checks.classifier import blind, word_model
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.checks.document_sample import calibrating
from pipeline.checks.held_out_auc import LEAST, TOLERANCE, Blind
from pipeline.checks.words import SHARES, character_shares, tokens, word_counts
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.kinds import Capability, check_offered
from pipeline.corpus.documents import Document, id_key, read_shard
from pipeline.corpus.inputs import number_rows
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError, visible
from pipeline.plan.density_ratio import DensityRatio, LearntRatio, effective_number, learn_ratio, weighted_auc
from pipeline.run.plan import Plan
from pipeline.selection.conformal import halves, hash_for, mix
from pipeline.selection.guarantees import Outcome
from pipeline.store.files import whole

SHOWN_WORDS = 12
RARE = 3
"""Minimum number of documents with a word for it to be shown: rarer words distinguish documents, not their kinds."""

KEPT_SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
"""Quantiles of the calibration documents' odds above which all documents are kept, in descending order."""

SAMPLE = 1_000
"""Number of texts of each role that a match is learnt from."""

AT_ONCE = 1_000
_Sampled = Sequence[tuple[Shard, Document]]
_DRAW, _TEST = 4, 5  # hashes that differ from that of the parts of a density ratio

MATCHED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("group", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("kept_with", pa.float64()),
    ]
)
"""For token ids there is a further column `tokens`, and `text` holds their numbers."""

MOST_ID = (1 << 63) - 1  # limit of an integer column; no model has so many ids


def telling_words(known: Sequence[str], audit: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with the largest effect on the blind classifier, by their share of the mean difference of the kinds.

    Args:
        known: texts of the role, at least 20.
        audit: audited texts, at least 20.

    Returns:
        Words that are more frequent among the audited documents, and among the known ones, in descending order of
        weight; at most SHOWN_WORDS of each.
    """
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.preprocessing import normalize

    texts = [*known, *audit]
    vectorizer = CountVectorizer(min_df=RARE, analyzer=tokens)
    names: list[str] = [*SHARES]
    features: Any = csr_matrix(character_shares(texts))
    try:
        features = hstack([features, normalize(vectorizer.fit_transform(texts))], "csr")
        names += map(visible, vectorizer.get_feature_names_out())
    except ValueError:  # no word is in enough documents
        pass
    labels = np.r_[np.zeros(len(known), dtype=int), np.ones(len(audit), dtype=int)]
    coefficients = word_model().fit(features, labels).coef_[0]
    more = np.asarray(features[labels == 1].mean(axis=0) - features[labels == 0].mean(axis=0)).ravel()
    weight = np.where(coefficients * more > 0, np.abs(coefficients * more), 0.0)
    order = [int(place) for place in np.argsort(-weight, kind="stable") if weight[place] > 0]
    audited = [names[place] for place in order if more[place] > 0]
    return audited[:SHOWN_WORDS], [names[place] for place in order if more[place] < 0][:SHOWN_WORDS]


Words = dict[Role, dict[str, list[str]]]
"""By role: the words more frequent among the audited documents, and those more frequent in the role."""


def advice(plan: Plan, blind_tests: Mapping[Role, BlindDiagnostic], texts: int) -> tuple[Words, list[str]]:
    """The words by which the blind test distinguished each known role from the audited documents.

    Args:
        plan: plan of the audit.
        blind_tests: blind tests of the known roles.
        texts: maximum number of texts of each role.

    Returns:
        The words, and readable lines.

    Raises:
        UserError: a file is missing or damaged.
    """
    words: Words = {}
    lines: list[str] = []
    for role in calibrating(plan.config):
        test = blind_tests.get(role)
        if test is None or test.outcome != Outcome.FAILED:
            continue
        known, audit = ([d.text for _, d in sample_documents(_shards(plan, kind), texts)] for kind in (role, "audit"))
        audited, known_words = telling_words(known, audit)
        words[role] = {"audit": audited, role: known_words}
        lines.append(telling_words_phrase(role, audited, known_words, test.by))
    return words, lines


def _shards(plan: Plan, role: str) -> list[Shard]:
    return [shard for shard in plan.shards if shard.role == role]


@dataclass(frozen=True, slots=True)
class Matched:
    """Documents of a known role that were kept because their words resemble those of the audited ones."""

    role: Role
    path: str
    count: int
    total: int  # readable documents of the role
    before: Blind | None  # blind test with all documents
    after: Blind | None  # blind test with the kept documents; None where they are too few
    by: str  # words or tokens

    def sentence(self) -> str:
        """One sentence with the number of kept documents and the blind test before and after."""
        return matched_sentence(self)

    def facts(self) -> dict[str, Any]:
        """The same as plain values."""
        tests = {"before": self.before, "after": self.after}
        plain = {name: blind_diagnostic(test, self.role, self.by).plain() for name, test in tests.items()}
        return {"role": self.role, "path": self.path, "documents": self.count, "of": self.total, **plain}


def check_matched(config: AuditConfig, folder: str) -> None:
    """Check, before an input is listed, that documents can be matched and written.

    Raises:
        UserError: the documents have no words, or the folder is a file.
    """
    check_offered("--matched", {Capability.WORDS}, config.corpus.kind, lambda _: "choose others by hand")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"--matched: {folder} is a file, and the documents are written into a folder")


def write_matched(plan: Plan, folder: str) -> list[Matched]:
    """Write, for each known role that calibrates, the subset of its documents that resembles the audited ones.

    A document is kept with a probability that increases with the odds, from its words, of being audited. The draw is a
    hash of its id; the classifier was not trained on it. Half of the audited documents train the classifier, the other
    half tests the subset. The subset is the largest whose blind AUC is within chance, if there is one. Scores are not
    read, so the choice leaves the guarantee intact. One Parquet file per role: id, text,
    group, source, row and the probability. Memory holds few texts at a time.

    Args:
        plan: plan of the audit.
        folder: local folder of the files.

    Raises:
        UserError: fewer than 20 readable documents of a role, a missing or damaged file, a folder that cannot be
            written, or documents that have no words to match by.
    """
    check_matched(plan.config, folder)
    return [_write_role(plan, role, folder) for role in calibrating(plan.config)]


def _write_role(plan: Plan, role: Role, folder: str) -> Matched:
    shards = number_rows(_shards(plan, role))
    known, audit = ([*sample_documents(some, SAMPLE)] for some in (shards, _shards(plan, "audit")))
    if len(known) < LEAST or len(audit) < 2 * LEAST:
        raise UserError(
            f"to match {role} documents takes at least {LEAST} of them and {2 * LEAST} audited ones, "
            f"got {len(known)} and {len(audit)}"
        )
    seed = plan.config.seed
    tested = halves(np.array([id_key(document.doc_id) for _, document in audit], dtype=np.int64), seed)
    taught = [audit[place] for place in np.flatnonzero(~tested).tolist()]
    learnt = learn_ratio([document for _, document in known], [document for _, document in taught], plan.config)
    certain = _certain(learnt, seed)
    ids = plan.config.corpus.has_ids
    schema = MATCHED_SCHEMA.append(pa.field(TOKENS, pa.list_(pa.int64()))) if ids else MATCHED_SCHEMA
    path = os.path.join(folder, f"{role}.parquet")
    part = Path(folder, f".{role}.{uuid.uuid4().hex[:8]}.part")
    total, kept = 0, 0
    sample: list[tuple[int, str, str | None]] = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with whole(part):
            with pq.ParquetWriter(part, schema) as writer:
                for some in _windows(shards):
                    table = _kept(some, learnt.ratio, certain, seed, schema)
                    writer.write_table(table)
                    total, kept = total + len(some), kept + len(table)
                    keys = np.array([id_key(name) for name in table["id"].to_pylist()])
                    hashes = hash_for(keys, seed, _TEST).tolist()
                    rows = zip(hashes, table["text"].to_pylist(), table["group"].to_pylist(), strict=True)
                    sample = sorted([*sample, *rows], key=itemgetter(0, 1))[:SAMPLE]
            part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    others = [audit[place][1] for place in np.flatnonzero(tested).tolist()]
    matched = [Document(0, "", text, group) for _, text, group in sample]
    tests = [_tested(some, others, plan.config) for some in ([document for _, document in known], matched)]
    return Matched(role, path, kept, total, tests[0], tests[1], plan.config.corpus.units)


def _tested(known: Sequence[Document], audit: Sequence[Document], config: AuditConfig) -> Blind | None:
    """The blind test of documents; None with too few calibration documents."""
    if min(len(known), len(audit)) < LEAST:
        return None
    documents = [*known, *audit]
    block = blocks_of_documents(documents, np.arange(len(documents)) >= len(known), config.near_copies)
    return blind([document.text for document in known], [document.text for document in audit], config.seed, block)


def _certain(learnt: LearntRatio, seed: int) -> float:
    """The smallest odds from which documents are always kept that leave words uninformative, otherwise the largest."""
    odds, audited = learnt.odds(), learnt.compared.audited
    strictest = float(np.max(odds[~audited]))
    best = strictest
    for share in KEPT_SHARES:
        limit = float(np.quantile(odds[~audited], share))
        kept = np.minimum(odds / limit, 1.0)
        if effective_number(kept[~audited]) < 2:
            continue
        auc = weighted_auc(learnt.words, learnt.compared, kept, seed)
        if auc is None or auc > 0.5 + TOLERANCE:
            break
        best = limit
    return best


def _windows(shards: Sequence[Shard]) -> Iterator[list[tuple[Shard, Document]]]:
    readable = ((shard, document) for shard in shards for document in read_shard(shard) if document.problem is None)
    while some := list(islice(readable, AT_ONCE)):
        yield some


def _kept(some: _Sampled, ratio: DensityRatio, certain: float, seed: int, schema: pa.Schema) -> pa.Table:
    keys = np.array([id_key(document.doc_id) for _, document in some], dtype=np.int64)
    share = np.minimum(ratio.odds(word_counts([document.text for _, document in some]), keys) / certain, 1.0)
    draws = (mix(hash_for(keys, seed, _DRAW)) >> np.uint64(11)).astype(np.float64) / 2.0**53
    chosen = [(some[place], float(share[place])) for place in np.flatnonzero(draws < share).tolist()]
    rows = [
        {
            "id": document.doc_id,
            "text": document.text,
            "group": document.group,
            "source": shard.name,
            "row": document.row,
            "kept_with": chance,
        }
        for (shard, document), chance in chosen
    ]
    table = pa.Table.from_pylist(rows, schema=MATCHED_SCHEMA)
    if TOKENS not in schema.names:
        return table
    ids = [[min(int(one), MOST_ID) for one in text.split()] for text in table["text"].to_pylist()]
    return table.append_column(schema.field(TOKENS), pa.array(ids, schema.field(TOKENS).type))


# --- sentences


def telling_words_phrase(role: str, audited: Sequence[str], known: Sequence[str], by: str = WORDS) -> str:
    """The words or tokens that distinguish a role from the audited documents, by where they are more frequent."""
    return f"{by} that tell them apart: {', '.join(audited) or 'none'} (audited); {', '.join(known) or 'none'} ({role})"


def matched_sentence(made: Matched) -> str:
    """States how many documents of a role were kept because their words resemble the audited ones, and the effect."""
    text = f"{made.path}: {made.count:,} of {made.total:,} {made.role} documents whose {made.by} resemble the audited"
    if made.after is None:
        return f"{text}; fewer than {LEAST}, too few to calibrate on: give others"
    if made.before is not None:
        text += f"; blind AUC {made.before.auc:.2f} before, {made.after.auc:.2f} with these"
    if made.after.outcome == Outcome.FAILED:
        return f"{text}: {made.by} still tell them apart, so this set repairs nothing"
    column = ", tokens: tokens" if made.by == TOKENS else ""
    use = f"corpus.{made.role}: {{path: {made.path}, id: id{column}}}"
    return f"{text}. To calibrate on them: {use}; then seenset plan states what they can select"
