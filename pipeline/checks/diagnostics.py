"""The diagnostics of a selection: checks of its assumptions on the files of the run."""

from __future__ import annotations

import logging

from pipeline.checks import document_text as wording
from pipeline.checks.blind import BlindTest, blind_test
from pipeline.checks.blind_text import TOKENS, WORDS, untested
from pipeline.checks.document_checks import stored_preflight
from pipeline.checks.overlap import Overlap
from pipeline.checks.resolution import resolution
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.corpus.reasons import Reason
from pipeline.errors import DamagedError, UserError
from pipeline.run.conclusion_text import ONLY_SCORES
from pipeline.run.records import read_part, write_part
from pipeline.run.remedies import made_again_note
from pipeline.run.scored import Scored
from pipeline.run.summary import (
    BlindDiagnostic,
    Conclusion,
    CountDiagnostic,
    OverlapDiagnostic,
    ResolutionDiagnostic,
    ShareDiagnostic,
    SymmetryDiagnostic,
)
from pipeline.selection.folds import Answer
from pipeline.selection.guarantees import Outcome
from pipeline.selection.knockoff import SignSymmetry

_log = logging.getLogger(__name__)


def diagnose(
    answer: Answer,
    scored: Scored,
    overlap: Overlap,
    blind_test: BlindTest,
    role: str,
) -> Conclusion:
    """The checks of one selection, without those that `select` adds.

    Args:
        answer: the selection's answer.
        scored: the score shards.
        overlap: overlap of the role with the audited documents.
        blind_test: blind test of the role, from `run_blind_test`.
        role: the null role, whose documents calibrate.
    """
    return Conclusion(
        blind=blind_test.diagnostic,
        resolution=_resolution_diagnostic(answer, role),
        overlap=overlap.diagnostic,
        duplicates=_duplicates_diagnostic(scored),
        truncated=_truncated_diagnostic(scored),
        fine_tuned=_finetuned_diagnostic(scored, role, overlap.n_trained),
        sign_symmetry=_symmetry_diagnostic(answer.symmetry),
    )


def diagnose_scores(answer: Answer, role: str) -> Conclusion:
    """The checks of a selection with scores only, without texts or reliable ids.

    Args:
        answer: the selection's answer.
        role: the null role, whose documents calibrate.
    """
    unknown = Outcome.INCONCLUSIVE
    return Conclusion(
        blind=BlindDiagnostic(outcome=unknown, tested=False, sentence=untested(role, ONLY_SCORES)),
        resolution=_resolution_diagnostic(answer, role),
        overlap=OverlapDiagnostic(outcome=unknown, sentence=wording.untested_overlap(role), n_calibration=0, n_audit=0),
        duplicates=CountDiagnostic(outcome=unknown, sentence=wording.UNTESTED_IDS, count=0),
        truncated=ShareDiagnostic(outcome=unknown, sentence=wording.UNKNOWN_LENGTHS, share=0.0),
        sign_symmetry=_symmetry_diagnostic(answer.symmetry),
    )


def without_texts(diagnostics: Conclusion, role: str) -> Conclusion:
    """The checks of scores without texts; checks that compare texts are not made."""
    unknown, untested_pairs = Outcome.INCONCLUSIVE, wording.untested_overlap(role)
    overlap = OverlapDiagnostic(outcome=unknown, sentence=untested_pairs, n_calibration=0, n_audit=0)
    near, unchecked = diagnostics.near_copies, {"outcome": unknown, "sentence": wording.UNCHECKED_DUPLICATES}
    near = None if near is None else near.model_copy(update=unchecked)
    return diagnostics.model_copy(update={"overlap": overlap, "near_copies": near, "families": None})


def blind_file(role: str) -> str:
    """Path of the blind test of a role in a run directory."""
    return f"diagnostics/blind-{role}.json"


def run_blind_test(scored: Scored, role: Role, config: AuditConfig) -> BlindTest:
    """The blind test of a role, made once per run because the texts may be gone later.

    One of version 0.10, which saw words of scripts with blanks alone, is made again while the texts can be read.

    Raises:
        UserError: the file of an earlier test was written by another version.
    """
    name = blind_file(role)
    earlier = None
    try:
        earlier = read_part(scored.store, name, BlindTest)
    except DamagedError as error:
        _log.warning(made_again_note(error, "the test is"))
    if earlier is not None and ("shared" in earlier.model_fields_set or earlier.by not in (WORDS, TOKENS)):
        return earlier
    shards = list(scored.shards.values())
    before = stored_preflight(scored.store, shards, config.seed)
    try:
        test = before.blind[role] if before and role in before.blind else blind_test(shards, role, config)
    except UserError as error:
        sentence = untested(role, str(error), config.corpus.units)
        return earlier or BlindTest(outcome=Outcome.INCONCLUSIVE, tested=False, sentence=sentence)
    write_part(scored.store, name, test)
    return test


def _duplicates_diagnostic(scored: Scored) -> CountDiagnostic:
    """The check for repeated ids, which leave the guarantee intact: they are quarantined and count with p = 1."""
    count = sum(scored.quarantined(role)[Reason.DUPLICATE_ID] for role in ("audit", "unseen", "seen"))
    outcome = Outcome.INCONCLUSIVE if count else Outcome.PASSED
    return CountDiagnostic(outcome=outcome, sentence=wording.repeated_ids_sentence(count), count=count)


def _truncated_diagnostic(scored: Scored) -> ShareDiagnostic:
    if any(shard.scores for shard in scored.shards.values()):
        return ShareDiagnostic(outcome=Outcome.INCONCLUSIVE, sentence=wording.UNKNOWN_LENGTHS, share=0.0)
    total = sum(receipt.n_scored for receipt in scored.receipts)
    truncated = sum(receipt.n_truncated for receipt in scored.receipts)
    share = truncated / total if total else 0.0
    outcome = Outcome.PASSED if total and not truncated else Outcome.INCONCLUSIVE
    return ShareDiagnostic(outcome=outcome, sentence=wording.truncated(truncated, total), share=share)


def _finetuned_diagnostic(scored: Scored, role: str, n_trained: int) -> CountDiagnostic | None:
    if not scored.finetuned and not n_trained:
        return None
    count = scored.n_finetuned(role)
    return CountDiagnostic(outcome=Outcome.PASSED, sentence=wording.fine_tuned(count, role, n_trained), count=count)


def _resolution_diagnostic(answer: Answer, role: str) -> ResolutionDiagnostic:
    fewest, enough = answer.resolution(answer.m)
    needed = None if answer.basis.sentence else enough
    figures = resolution(answer.n_calibration, answer.m, fewest, needed, role, answer.basis)
    return ResolutionDiagnostic(**figures)


def _symmetry_diagnostic(symmetry: SignSymmetry | None) -> SymmetryDiagnostic | None:
    """The check of sign symmetry; it never passes, because a test without contradiction proves no symmetry."""
    if symmetry is None:
        return None
    return SymmetryDiagnostic(outcome=symmetry.outcome, sentence=symmetry.sentence, p_value=symmetry.p_value)
