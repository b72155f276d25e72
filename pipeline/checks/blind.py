"""The blind test: can a classifier that never saw the model distinguish calibration documents from audited ones?

A difference of roles in words or looks is not membership, and the absence of a difference does not prove them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
from pydantic import Field

from pipeline.checks.check import KNOWN_TEXTS, AnswerFacts, Check, Planned, SampleCheck, SampleLine, first_sentence
from pipeline.checks.classifier import (
    BLOCKS,
    Shown,
    blind_result,
    classifier_input,
    count_compared,
    hold_out,
    hold_out_known,
    hold_out_sides,
)
from pipeline.checks.diagnostic import LEAST_SHARED, BlindDiagnostic
from pipeline.checks.document_sample import DocumentSample, calibrating
from pipeline.checks.held_out_auc import (
    LEAST_BLOCKS,
    PASSING,
    TOLERANCE,
    Blind,
    BlindBlock,
    Compared,
    HeldOut,
    blocks_among,
    documents_to_decide,
    is_alike,
)
from pipeline.checks.held_out_tail import TailTest, tail_test
from pipeline.checks.words import CHARACTERS, read_words
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.kinds import Capability
from pipeline.config.models import as_model_config
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.keys import Keys, keyed
from pipeline.corpus.near_duplicates import near_families
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.models.tokens import open_tokenizer
from pipeline.models.windows import count_windows
from pipeline.run.conclusion import SelectionResult
from pipeline.run.conclusion_text import ONLY_SCORES
from pipeline.selection.guarantees import Outcome
from pipeline.wording import format_against

SAMPLED_TEXTS = 5_000
SAMPLED_SHARDS = 25

WORDS, TOKENS, OF_PICTURES = "words", "tokens", "thumbnails, colours and files"
OF_WINDOWED = "words and numbers of windows"
OF_CAPTIONED = "thumbnails, colours, files and captions"
OF_CHATS = "questions and answers"
"""The input of a classifier."""

_PARTS = {OF_CHATS: len(BLOCKS)}
"""Number of classifiers that decide, by input; of all others one."""


def blind_file(role: str) -> str:
    """Path of the blind test of a role in a run directory."""
    return f"diagnostics/blind-{role}.json"


def blind_diagnostic(test: Blind | None, role: str, by: str = WORDS) -> BlindDiagnostic:
    """The record of the test of a role, for summary.json and the report.

    Args:
        test: None where there were too few documents for one.
        role: the role whose documents calibrate.
        by: the classifier's input, such as `WORDS`.
    """
    outcome = Outcome.INCONCLUSIVE if test is None else test.outcome
    decidable = test is None or (test.looked and not test.below)
    numbers = {} if test is None else asdict(test)
    return BlindDiagnostic(
        outcome=outcome,
        by=by,
        sentence=blind_sentence(test, role, by),
        n_to_settle=documents_to_decide(_PARTS.get(by, 1)) if outcome == Outcome.INCONCLUSIVE and decidable else None,
        **numbers,
    )


class BlindTest(BlindDiagnostic):
    """The blind test of a role with the tail check of the same scores: `diagnostics/blind-<role>.json`."""

    tail: TailTest | None = Field(None, description="The tail check; null where the test was not made.")

    @property
    def diagnostic(self) -> BlindDiagnostic:
        """The blind test alone."""
        return BlindDiagnostic(**self.model_dump(exclude={"tail"}))


def blind_test(shards: Sequence[Shard], role: str, config: AuditConfig, texts: int = SAMPLED_TEXTS) -> BlindTest:
    """The test of a role against the audited documents, in blocks of groups and families of near-duplicates.

    Args:
        shards: shards of all roles.
        role: the role whose documents calibrate.
        config: the audit's configuration.
        texts: maximum number of texts of each role.

    Raises:
        UserError: a file is missing or damaged, or documents are scores without texts.
    """
    if not config.corpus.has_text:
        raise UserError(ONLY_SCORES)
    sample = draw_sample(shards, role, config.near_copies, texts)
    held = _hold_out(sample, config)
    by = OF_WINDOWED if config.windows > 1 else input_kind(shards, role)
    sides = {} if held is None else hold_out_sides(sample.shown, sample.compared, config.seed, held)
    diagnostic = blind_diagnostic(None if held is None else blind_result(held, sides), role, by)
    tail = None if held is None else tail_test(held, sample.places)
    return BlindTest(**{**diagnostic.model_dump(), **count_compared(sample.compared)}, tail=tail)


def _hold_out(sample: BlindSample, config: AuditConfig) -> HeldOut | None:
    """Held-out scores of a sample; with several windows their number for each text is a feature beside its words."""
    if config.windows == 1 or not sample.compared.enough:
        return hold_out(sample.shown, sample.compared, config.seed)
    texts = [text for text in sample.shown if isinstance(text, str)]
    counts = np.array(windows_of_texts(config, texts))
    known = read_words(texts).with_feature(counts / config.windows)
    return hold_out_known(known, sample.compared, config.seed)


def windows_of_texts(config: AuditConfig, texts: Sequence[str]) -> list[int]:
    """The number of windows of each text, by the audited model's tokenizer and `max_tokens` of the configuration.

    Raises:
        UserError: a file of the tokenizer is missing or damaged.
    """
    return count_windows(open_tokenizer(as_model_config(config.model)), texts, config.max_tokens, config.windows)


def blind_tests_of_sample(sample: DocumentSample) -> dict[Role, BlindTest]:
    """The blind test of each known role before scoring; a role with unreadable texts is missing."""
    tests: dict[Role, BlindTest] = {}
    for role in sample.compared:
        try:
            tests[role] = blind_test(sample.plan.shards, role, sample.config, sample.effort.texts)
        except UserError as error:
            sample.damaged.append(str(error))
    return tests


def _lines(results: Mapping[Role, BlindTest], planned: Planned) -> list[SampleLine]:
    """The results of the roles that calibrate, what decides a test, and what to do after those that failed."""
    tests = {role: results[role] for role in calibrating(planned.config) if role in results}
    lines = [SampleLine(test.outcome, test.sentence, role) for role, test in tests.items()]
    undecided = [
        test for test in tests.values() if test.tested and test.outcome == Outcome.INCONCLUSIVE and not test.below
    ]
    if undecided:
        blocks = any(test.n_audit_blocks is not None for test in undecided)
        lines.append(SampleLine(Outcome.INCONCLUSIVE, how_decided(undecided[0].by, blocks)))
    steps = [after_blind(test, role) for role, test in tests.items() if test.outcome == Outcome.FAILED]
    return [*lines, *(SampleLine(Outcome.PASSED, f"next: {step}") for step in steps if step)]


@dataclass(frozen=True, slots=True, eq=False)
class BlindSample:
    """The documents that the test compares, calibration documents first."""

    shown: list[Shown]
    compared: Compared
    places: list[tuple[str, int]]  # shard, and row in it from 0


def draw_sample(shards: Sequence[Shard], role: str, near_copies: float, texts: int = SAMPLED_TEXTS) -> BlindSample:
    """Up to `texts` documents of a role and as many audited ones, with their blocks; memory holds few pictures.

    Args:
        shards: shards of all roles.
        role: the role whose documents calibrate.
        near_copies: minimum share of common runs of near-duplicates.
        texts: maximum number of texts of each role.

    Raises:
        UserError: a file is missing or damaged.
    """
    shown: list[Shown] = []
    kinds: list[bool] = []
    places: list[tuple[str, int]] = []

    def documents() -> Iterator[Document]:
        for kind in (role, "audit"):
            for shard, document in sample_documents([shard for shard in shards if shard.role == kind], texts):
                places.append((shard.id, document.row - shard.first_row))
                shown.append(classifier_input(document))
                kinds.append(kind == "audit")
                yield document

    keys = Keys.joined(part for _, part in keyed(documents(), _beginning))
    audited = np.array(kinds, dtype=bool)
    return BlindSample(shown, Compared.of(audited, dependent_blocks(keys, audited, near_copies)), places)


def dependent_blocks(keys: Keys, audited: np.ndarray, near_copies: float) -> np.ndarray:
    """`blocks_among` documents by their keys; a document of unknown content is near no other.

    Args:
        keys: keys of the documents.
        audited: bool, (documents,).
        near_copies: minimum share of common runs of near-duplicates.
    """
    family = np.arange(len(keys))
    read = np.flatnonzero(keys.length)
    if read.size:
        families = near_families(keys.sketch[read], near_copies)
        family[read] = read[np.unique(families, return_index=True)[1]][families]
    return blocks_among(np.unique(family, return_inverse=True)[1], keys.group_numbers(), audited)


def blocks_of_documents(documents: Sequence[Document], audited: np.ndarray, near_copies: float) -> np.ndarray:
    """`dependent_blocks` of documents that are all texts or all pictures, by the classifier's input."""
    keys = Keys.joined(part for _, part in keyed(documents, _beginning))
    return dependent_blocks(keys, audited, near_copies)


def _beginning(document: Document) -> str:
    """The beginning of a text, which the classifier reads."""
    return document.text[:CHARACTERS]


def input_kind(shards: Sequence[Shard], role: str) -> str:
    """The classifier's input for documents of shards: `WORDS`, `TOKENS`, `OF_CHATS` or a kind of pictures."""
    if any(shard.chats for shard in shards):
        return OF_CHATS
    if not any(shard.pictures for shard in shards):
        return TOKENS if any(shard.token_ids for shard in shards) else WORDS
    compared = [shard for shard in shards if shard.role in ("audit", role)]
    return OF_CAPTIONED if all(shard.caption_column is not None for shard in compared) else OF_PICTURES


def sample_documents(shards: Sequence[Shard], texts: int = SAMPLED_TEXTS) -> Iterator[tuple[Shard, Document]]:
    """Up to about `texts` readable documents, with their shards: the first of at most SAMPLED_SHARDS shards.

    Of pictures a fifth as many, because they must be decoded. One document is in memory at a time.

    Raises:
        UserError: a file is missing or damaged.
    """
    if not shards:
        return
    if shards[0].pictures:
        texts = -(-texts // 5)
    places = np.linspace(0, len(shards) - 1, min(SAMPLED_SHARDS, len(shards)))
    some = [shards[place] for place in sorted({round(place) for place in places})]
    share = -(-texts // len(some))
    for shard in some:
        readable = (document for document in read_shard(shard) if document.problem is None)
        for document in islice(readable, share):
            yield shard, document


# --- sentences

TO_LOOK = "Longer documents, or more of their kind, would let it."
"""What lets a test that could not look decide."""

PAIRED = "The two roles are not independent samples of one kind, but for example pairs, one document of each role"
"""Why an AUC is below 0.5."""

_OR_CHARACTERS = {WORDS: "or pairs of characters "}
_DIFFERENT, _ALIKE = 0.5 + TOLERANCE, 0.5 + PASSING


def blind_sentence(test: Blind | None, role: str, by: str) -> str:
    """States the result of the blind test.

    Args:
        test: None where there were too few documents for one.
        role: the role whose documents calibrate.
        by: input of the classifier.
    """
    if test is None:
        return (
            f"Inconclusive: fewer than {LEAST_BLOCKS} {role} or audited documents, where documents of one group and "
            f"near-duplicates count once: whether their {by} differ could not be tested."
        )
    if test.outcome == Outcome.INCONCLUSIVE and not test.looked:
        return (
            f"Inconclusive: the test could not look. Half of the documents have at most {test.shared:g} different {by} "
            f"{_OR_CHARACTERS.get(by, '')}in common with another of them, and a difference shows only with "
            f"{LEAST_SHARED} or more ({_interval(test)}). {TO_LOOK}"
        )
    if test.outcome == Outcome.INCONCLUSIVE and test.below:
        return (
            f"Inconclusive: the AUC is further below 0.50 than chance explains ({_interval(test)}). {PAIRED}, "
            f"so the test cannot determine whether their {by} differ."
        )
    if test.outcome == Outcome.INCONCLUSIVE:
        return (
            f"Inconclusive: too few documents to determine whether the {by} of the {role} and the audited documents "
            f"differ ({_interval(test)})."
        )
    if test.outcome == Outcome.PASSED:
        return (
            f"A classifier that knows only their {by} hardly tells the {role} documents from the audited ones: with an "
            f"AUC of at most {_ALIKE:.2f} at 99% confidence ({_interval(test)}). It does not prove them alike."
        )
    blocks = f": {_by_part(test.blocks)}. They" if test.blocks else ": they"
    return (
        f"A classifier that knows only their {by} tells the {role} documents from the audited ones, with an AUC above "
        f"{_DIFFERENT:.2f} at 99% confidence ({_interval(test)}){blocks} differ in more than membership, and the "
        "guaranteed error rate is not supported."
    )


def _by_part(blocks: Sequence[BlindBlock]) -> str:
    """Which parts of conversations tell the roles apart."""
    parts = [one for one in blocks if one.by != BLOCKS[-1]]
    if not any(one.differs for one in parts):
        return "only questions and answers together show it"
    shown = []
    for one in parts:
        state = "differ" if one.differs else "do not" if is_alike(one.auc, one.high) else "may differ"
        shown.append(f"the {one.by} {state} (AUC {one.auc:.2f})")
    return ", ".join(shown)


def how_decided(by: str, blocks: bool) -> str:
    """Explains inconclusive tests; stated once for all of them.

    Args:
        by: input of the classifiers.
        blocks: whether some of the documents are of one group, or near-duplicates.
    """
    once = " (documents of one group and near-duplicates count once)" if blocks else ""
    needed = documents_to_decide(_PARTS.get(by, 1))
    return (
        f'A lower limit above {_DIFFERENT:.2f} decides a test as "different", an upper limit of at most {_ALIKE:.2f} '
        f'as "alike" (an AUC below 0.50 is taken as 0.50). With about {needed:,} documents of each '
        f"kind{once} nine of ten tests pass if the {by} are alike; with fewer it is normal that they stay inconclusive."
    )


def untested(role: str, why: str, by: str = WORDS) -> str:
    """States that the blind test of a role was not made, and why."""
    return f"Whether the {by} of {role} and audited documents differ was not tested: {why}."


def _interval(test: Blind) -> str:
    """The AUC and its interval, whose ends are rounded to the side of the limit that they are compared with."""
    low, high = format_against(test.low, _DIFFERENT), format_against(test.high, 0.5 if test.below else _ALIKE)
    decisive = next((one.by for one in test.blocks if (one.auc, one.low) == (test.auc, test.low)), None)
    if decisive is not None:
        return f"AUC of {decisive} {test.auc:.2f}, {low} to {high} with 99% confidence for all parts; 0.50 is chance"
    return f"AUC {test.auc:.2f}, 99% interval {low} to {high}; 0.50 is chance"


NO_BLIND_TEST = BlindTest(
    outcome=Outcome.PASSED,
    tested=False,
    sentence="Not needed: the published version of each document is compared with its other versions, not with other "
    "documents.",
)
"""The test of documents with versions."""


def untested_note(blind: BlindDiagnostic) -> str:
    """The caution for a blind test that was not made or was inconclusive."""
    differ = "audited and calibration documents differ in more than membership"
    if not blind.tested:
        return f"Whether {differ} was not checked."
    if not blind.looked:
        return f"Whether {differ} is not known: they have too few {blind.by} in common to look. {TO_LOOK}"
    if blind.below:
        return f"Whether {differ} is not known. {PAIRED}, so the test of their {blind.by} cannot determine it."
    return (
        f"Whether {differ} is not known: the test of their {blind.by} was inconclusive. About "
        f"{blind.n_to_settle or documents_to_decide():,} documents of each kind would decide it."
    )


def differing_clause(blind: BlindDiagnostic) -> str:
    """Why an answer is contradicted, after a blind test that failed."""
    return (
        f"their {blind.by} alone tell the audited from the calibration documents, so they differ in more than "
        "membership"
    )


def _brief(blind: BlindDiagnostic, summary: SelectionResult) -> str:
    """Why the blind test has no result."""
    if blind.outcome != Outcome.INCONCLUSIVE:
        return first_sentence(blind, summary)
    if not blind.tested:
        return "Not checked: audited and calibration documents are assumed to be alike."
    if not blind.looked:
        return f"Inconclusive: the documents have too few {blind.by} in common to look."
    if blind.below:
        return "Inconclusive: the two roles are not independent samples, but for example pairs."
    return f"Inconclusive: about {blind.n_to_settle or documents_to_decide():,} documents of each kind would decide it."


# --- what to do next

WHICH = {
    "unseen": "documents like the audited ones that the model cannot have seen, such as drafts or unpublished ones of "
    "the same authors and years",
    "seen": "documents of the training data that are of the same source, kind and years as the audited ones",
}
"""The calibration documents that would do, by role."""

MATCHABLE = (WORDS, TOKENS)
"""Inputs of a blind test by which documents can be matched; pictures cannot."""

MATCHED = (
    "; seenset plan AUDIT.YAML --matched FOLDER keeps those of the present ones whose {by} resemble the audited ones"
)


def after_blind(blind: BlindDiagnostic, role: str) -> str | None:
    """The next step after a blind test; None where it passed.

    Args:
        blind: the test, its numbers included.
        role: the role whose documents calibrate.
    """
    if blind.outcome == Outcome.PASSED:
        return None
    if blind.outcome == Outcome.FAILED:
        matched = MATCHED.format(by=blind.by) if blind.by in MATCHABLE else ""
        return f"Calibrate on {WHICH[role]}{_alike_in(blind)}{matched}."
    if not blind.tested:
        if ONLY_SCORES in blind.sentence:
            return "Give the texts beside the scores, and make a new run: then the blind test is made."
        return "Repeat the selection where the texts can be read: then the blind test is made."
    return _undecided(blind, role)


def _alike_in(blind: BlindDiagnostic) -> str:
    """The parts of chats in which calibration documents differ; empty for other documents."""
    blamed = [one.by for one in blind.blocks if one.low > _DIFFERENT and one.by != BLOCKS[-1]]
    return f"; it is their {' and their '.join(blamed)} that differ" if blamed else ""


def _undecided(blind: BlindDiagnostic, role: str) -> str:
    """States that a test stays inconclusive with so few documents, and how many would decide it."""
    audited, known, needed = blind.n_audit, blind.n_calibration, blind.n_to_settle
    blocks = blind.n_audit_blocks, blind.n_calibration_blocks
    once = ", where documents of one group and near-duplicates count once," if blocks != (None, None) else ""
    counts = [of if of is not None else n for of, n in zip(blocks, (audited, known), strict=True)]
    given = (
        f"With {audited:,} audited and {known:,} {role} documents compared,"
        if audited and known
        else "With so few documents"
    )
    stated = "or state the answer with its condition"
    if blind.below:
        return f"Draw the {role} documents at random, not each beside an audited one, {stated}."
    if not blind.looked:
        return f"Give longer documents, or more of their kind, so that they have {blind.by} in common, {stated}."
    if needed and min((n for n in counts if n is not None), default=0) >= needed:
        return (
            f"{given} the blind test is inconclusive where most decide, so the {blind.by} may differ a little: "
            f"calibrate on documents closer to the audited ones, {stated}."
        )
    decide = f"about {needed:,} of each{once} decide" if needed else "more decide"
    return (
        f"{given} the blind test stays inconclusive, which is normal ({decide} nine of ten tests if their {blind.by} "
        f"are alike): give more of both, {stated}."
    )


# --- the check


def _unmade(facts: AnswerFacts) -> BlindDiagnostic:
    if Capability.VERSIONS in facts.offers:
        return NO_BLIND_TEST.diagnostic
    return BlindDiagnostic(outcome=Outcome.INCONCLUSIVE, tested=False, sentence=untested(facts.role, ONLY_SCORES))


CHECK = Check(
    name="blind",
    title="Blind test",
    record=BlindDiagnostic,
    description="Whether words alone distinguish calibration documents from audited ones.",
    absent="never",
    place=1,
    title_of_versions="Unseen documents",
    needs=KNOWN_TEXTS,
    on_scores=lambda facts: facts.blind,
    unmade=_unmade,
    sample=SampleCheck(
        "blind",
        dict[Role, BlindTest],
        "Whether words alone distinguish a known role from the audited documents; a role with unreadable texts is "
        "missing.",
        blind_tests_of_sample,
        _lines,
        slow=True,
    ),
    finding=blind_test,
    brief=_brief,
    next=after_blind,
)
