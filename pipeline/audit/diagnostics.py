"""The diagnostics of a selection: checks of its assumptions on the files of the run."""

from __future__ import annotations

import logging

from pipeline.audit.blind import BlindTest, blind_test
from pipeline.audit.preflight import stored_preflight
from pipeline.audit.records import read_part, write_part
from pipeline.audit.resolution import resolution
from pipeline.audit.scored import Overlap, Scored
from pipeline.audit.summary import (
    BlindDiagnostic,
    CountDiagnostic,
    Diagnostics,
    OverlapDiagnostic,
    ResolutionDiagnostic,
    ShareDiagnostic,
    SymmetryDiagnostic,
)
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.errors import DamagedError, UserError
from pipeline.report.wording import documents as wording
from pipeline.report.wording.blind import TOKENS, WORDS, untested
from pipeline.report.wording.conclusion import ONLY_SCORES
from pipeline.report.wording.files import made_again_note
from pipeline.selection.knockoff import SignSymmetry
from pipeline.selection.passes import Answer

_log = logging.getLogger(__name__)


def diagnose(
    answer: Answer,
    scored: Scored,
    overlap: Overlap,
    blind_test: BlindTest,
    role: str,
) -> Diagnostics:
    """The checks of one selection, without those that `select` adds.

    Args:
        answer: the selection's answer.
        scored: the score shards.
        overlap: overlap of the role with the audited documents.
        blind_test: blind test of the role, from `run_blind_test`.
        role: the null role, whose documents calibrate.
    """
    return Diagnostics(
        blind=blind_test.diagnostic,
        resolution=_resolution_diagnostic(answer, role),
        overlap=overlap.diagnostic,
        duplicates=_duplicates_diagnostic(scored),
        truncated=_truncated_diagnostic(scored),
        fine_tuned=_finetuned_diagnostic(scored, role, overlap.n_trained),
        sign_symmetry=_symmetry_diagnostic(answer.symmetry),
    )


def diagnose_scores(answer: Answer, role: str) -> Diagnostics:
    """The checks of a selection with scores only, without texts or reliable ids.

    Args:
        answer: the selection's answer.
        role: the null role, whose documents calibrate.
    """
    return Diagnostics(
        blind=BlindDiagnostic(ok=None, sentence=untested(role, ONLY_SCORES)),
        resolution=_resolution_diagnostic(answer, role),
        overlap=OverlapDiagnostic(ok=None, sentence=wording.untested_overlap(role), n_calibration=0, n_audit=0),
        duplicates=CountDiagnostic(ok=None, sentence=wording.UNTESTED_IDS, count=0),
        truncated=ShareDiagnostic(ok=None, sentence=wording.UNKNOWN_LENGTHS, share=0.0),
        sign_symmetry=_symmetry_diagnostic(answer.symmetry),
    )


def without_texts(diagnostics: Diagnostics, role: str) -> Diagnostics:
    """The checks of scores without texts; checks that compare texts are not made."""
    overlap = OverlapDiagnostic(ok=None, sentence=wording.untested_overlap(role), n_calibration=0, n_audit=0)
    near, unchecked = diagnostics.near_copies, {"ok": None, "sentence": wording.UNCHECKED_DUPLICATES}
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
        return earlier or BlindTest(ok=None, sentence=untested(role, str(error), config.corpus.units))
    write_part(scored.store, name, test)
    return test


def _duplicates_diagnostic(scored: Scored) -> CountDiagnostic:
    """The check for repeated ids, which leave the guarantee intact: they are quarantined and count with p = 1."""
    count = sum(scored.quarantined(role)["duplicate_id"] for role in ("audit", "unseen", "seen"))
    return CountDiagnostic(ok=None if count else True, sentence=wording.repeated_ids_sentence(count), count=count)


def _truncated_diagnostic(scored: Scored) -> ShareDiagnostic:
    if any(shard.scores for shard in scored.shards.values()):
        return ShareDiagnostic(ok=None, sentence=wording.UNKNOWN_LENGTHS, share=0.0)
    total = sum(receipt.n_scored for receipt in scored.receipts)
    truncated = sum(receipt.n_truncated for receipt in scored.receipts)
    share = truncated / total if total else 0.0
    ok = True if total and not truncated else None
    return ShareDiagnostic(ok=ok, sentence=wording.truncated(truncated, total), share=share)


def _finetuned_diagnostic(scored: Scored, role: str, n_trained: int) -> CountDiagnostic | None:
    if not scored.finetuned and not n_trained:
        return None
    count = scored.n_finetuned(role)
    return CountDiagnostic(ok=True, sentence=wording.fine_tuned(count, role, n_trained), count=count)


def _resolution_diagnostic(answer: Answer, role: str) -> ResolutionDiagnostic:
    fewest, enough = answer.resolution(answer.m)
    needed = None if answer.basis.sentence else enough
    figures = resolution(answer.n_calibration, answer.m, fewest, needed, role, answer.basis)
    return ResolutionDiagnostic(**figures)


def _symmetry_diagnostic(symmetry: SignSymmetry | None) -> SymmetryDiagnostic | None:
    """The check of sign symmetry; it never passes, because a test without contradiction proves no symmetry."""
    if symmetry is None:
        return None
    ok = None if symmetry.ok else False
    return SymmetryDiagnostic(ok=ok, sentence=symmetry.sentence, p_value=symmetry.p_value)
