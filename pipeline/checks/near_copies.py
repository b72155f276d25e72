"""Near-duplicates among the documents of one role, and the guarantees for independent documents that they break."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from pipeline.checks.check import KNOWN, AnswerFacts, Check, Planned, SampleCheck, SampleLine
from pipeline.checks.dependent_documents import (
    NearDuplicatesDiagnostic,
    answers_that_hold,
    breaks_bounds,
    estimate_by_blocks,
    is_unsafe,
    near_duplicates_among,
    selected_by_storey,
)
from pipeline.checks.diagnostic import NearDuplicates
from pipeline.checks.document_sample import DocumentSample, calibrating
from pipeline.config.corpus import Role
from pipeline.config.kinds import Capability
from pipeline.selection.blocks import INFLATION
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures import procedure_of
from pipeline.wording import format_against


def near_duplicates_diagnostic(facts: AnswerFacts) -> NearDuplicatesDiagnostic | None:
    """The effect of near-duplicates on a selection's guarantee; None where these were not looked for.

    Clusters of near-duplicates among the audited documents make an estimate of the share of nulls noisier than its
    procedure assumes, unless it allows for them. Clusters among those that calibrate make p-values too small: n
    documents of N families give P(p <= t) <= t (n + 1) / (N + 1), and near that at t = 1 / (n + 1).
    """
    if not facts.near:
        return None
    answer, procedure = facts.answer, facts.selection.procedure
    audit, calibration, dependence = facts.near["audit"], facts.near[facts.role], answer.dependence
    factor = Fraction(1) if dependence is None else dependence.family_factor
    unsafe = dependence is not None and is_unsafe(answer, dependence.families)
    unbounded = breaks_bounds(*facts.near_of_bound)
    sentences = [count_sentence(audit, "audited documents")]
    if unsafe:
        sentences.append(too_few_independent(audit.effective, procedure))
    if unsafe and facts.alone and factor <= INFLATION:
        sentences += answers_that_hold(answer, "near-duplicates")
    if dependence is not None and not dependence.joined:
        sentences += estimate_by_blocks(facts.selection, answer, dependence)
    sentences += _calibrating(facts, calibration, factor)
    if unbounded:
        sentences.append(NO_BOUND)
    failed = unsafe or factor > INFLATION or (procedure_of(procedure).per_list and unbounded)
    harmless = Outcome.INCONCLUSIVE if audit.n_copies or calibration.n_copies else Outcome.PASSED
    outcome, compared = Outcome.FAILED if failed else harmless, Capability.CONTENTS in facts.offers
    return NearDuplicatesDiagnostic(
        outcome=outcome if compared else Outcome.INCONCLUSIVE,
        sentence=" ".join(sentences) if compared else UNCHECKED,
        audit=audit,
        calibration=calibration,
        n_selected_by_bh=answer.n_bh if unsafe else None,
        n_selected_by_storey=selected_by_storey(answer) if unsafe else None,
        bh_stands=factor <= INFLATION,
    )


def _calibrating(facts: AnswerFacts, calibration: NearDuplicates, factor: Fraction) -> list[str]:
    """States the near-duplicates among the known documents of the null role, and what they do to p-values."""
    if facts.selection.calibrate != "all":
        sentence = count_sentence(calibration, f"{facts.role} documents that may calibrate")
        return [sentence, one_of_each(facts.answer.n_calibration, facts.role)]
    sentences = [count_sentence(calibration, f"{facts.role} documents that calibrate")]
    if calibration.n_copies:
        shown = format_against(float(factor), float(INFLATION))
        sentences.append(small_p_values(calibration.n_distinct, shown))
    return sentences


def _of_sample(sample: DocumentSample) -> dict[Role, NearDuplicates]:
    return {role: record for role, (record, _) in sample.near.items()} if sample.config.corpus.has_text else {}


def _lines(results: Mapping[Role, NearDuplicates], planned: Planned) -> list[SampleLine]:
    """The near-duplicates among the audited documents and those of the roles that calibrate."""
    lines = []
    for role, record in results.items():
        if role == "audit" or role in calibrating(planned.config):
            sentence = count_sentence(record, "audited documents" if role == "audit" else f"{role} documents")
            lines.append(SampleLine(Outcome.INCONCLUSIVE if record.n_copies else Outcome.PASSED, sentence))
    return lines


# --- sentences

UNCHECKED = "Near-duplicates were not checked: the documents are scores without texts."

NO_BOUND = "A bound assumes independent documents, so none is stated."
"""The effect of near-duplicates on an answer for independent documents."""


def count_sentence(duplicates: NearDuplicates, documents: str) -> str:
    """States the number of near-duplicates.

    Args:
        duplicates: near-duplicates among the documents.
        documents: their name in the plural, such as "audited documents".
    """
    sample = "" if duplicates.whole else f"In a sample of {duplicates.n_documents:,}: "
    if not duplicates.n_copies:
        return f"{sample}{'N' if duplicates.whole else 'n'}one of the {documents} is a near-duplicate of another."
    families = "1 family" if duplicates.n_families == 1 else f"{duplicates.n_families:,} families"
    return (
        f"{sample}{duplicates.n_copies:,} of {duplicates.n_documents:,} {documents} are near-duplicates of others "
        f"among them ({families}, the largest of {duplicates.largest:,})."
    )


def too_few_independent(effective: float, procedure: str) -> str:
    """States that near-duplicates make a procedure that estimates the share of nulls unsafe."""
    return (
        f"They count as about {effective:,.0f} independent documents, too few for {procedure}: it estimates the share "
        "of nulls from them, and its share of wrong documents can be larger than alpha."
    )


def small_p_values(n_distinct: int, factor: str) -> str:
    """States the effect of near-duplicates in calibration on p-values; `factor` is the maximum, as text."""
    return (
        f"They rank as {n_distinct:,} distinct documents, so the p-values of every procedure can be too small by a "
        f"factor of up to {factor}; calibrate: one_per_block takes one document of each family."
    )


def one_of_each(n: int, role: str) -> str:
    """States that one document of each block calibrates."""
    return f"One {role} document of each group or family of near-duplicates calibrates, {n:,} in all."


CHECK = Check(
    name="near_copies",
    title="Near-duplicates",
    record=NearDuplicatesDiagnostic,
    description="Near-duplicates among the documents of one role; null where there were no texts.",
    place=4,
    needs=KNOWN,
    on_scores=near_duplicates_diagnostic,
    sample=SampleCheck(
        "copies",
        dict[Role, NearDuplicates],
        "Near-duplicates among the documents of each role.",
        _of_sample,
        _lines,
    ),
    finding=near_duplicates_among,
    joins="family of near-duplicates, which diagnostics/near-copies-*.parquet list,",
    of_answer=True,
)
