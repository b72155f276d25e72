"""Groups of documents that may depend on one another, and their effect on a guarantee and on bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pipeline.checks.check import KNOWN, AnswerFacts, Check, Planned, SampleCheck, SampleLine
from pipeline.checks.dependence_plan import BlockCounts, count_blocks, dependence_lines
from pipeline.checks.dependent_documents import (
    GroupsDiagnostic,
    answers_that_hold,
    estimate_by_blocks,
    is_unsafe,
    selected_by_storey,
)
from pipeline.checks.document_sample import DocumentSample
from pipeline.config.corpus import Role
from pipeline.selection.blocks import INFLATION, Blocks
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures import procedure_of
from pipeline.wording import documents, format_against


def group_diagnostic(facts: AnswerFacts) -> GroupsDiagnostic | None:
    """The effect of groups on the guarantee of a selection and on its bounds; None where there is none."""
    answer, role, procedure = facts.answer, facts.role, facts.selection.procedure
    sides = dict(zip(("audited", role), facts.groups, strict=True))
    unbounded = [name for name, sizes in sides.items() if sizes.breaks_bounds]
    dependence = answer.dependence if answer.dependence is not None and answer.dependence.joined else None
    if not unbounded and dependence is None:
        return None
    sentences = [grouped(unbounded or [name for name, sizes in sides.items() if sizes.n_grouped])]
    unsafe = bh_stands = False
    if dependence is not None:
        bh_stands = dependence.factor <= INFLATION
        unsafe = is_unsafe(answer, dependence.audited)
        if unsafe:
            sentences.append(dependent_estimate(procedure, dependence.audited.blocks, dependence.audited.largest))
        if unsafe and bh_stands and facts.alone:
            sentences += answers_that_hold(answer, "groups")
        sentences += estimate_by_blocks(facts.selection, answer, dependence)
        if dependence.factor > max(Fraction(1), dependence.family_factor):
            factor = format_against(float(dependence.factor), float(INFLATION))
            sentences.append(small_p_values(dependence.n_calibration, dependence.n_blocks, role, factor))
    if unbounded:
        sentences.append(unbounded_groups(facts.selection.direction == "members"))
    per_list = bool(unbounded) and procedure_of(procedure).per_list
    failed = per_list or unsafe or (dependence is not None and not bh_stands)
    return GroupsDiagnostic(
        outcome=Outcome.FAILED if failed else Outcome.INCONCLUSIVE,
        sentence=" ".join(sentences),
        n_selected_by_bh=answer.n_bh if unsafe else None,
        n_selected_by_storey=selected_by_storey(answer) if unsafe else None,
        bh_stands=dependence is None or bh_stands,
    )


def blocks_of_sample(sample: DocumentSample) -> dict[Role, dict[str, BlockCounts]]:
    """The blocks of dependent documents among the audited documents and those of each known role that has any."""
    counted = {role: count_blocks(sample.near["audit"][1], sample.near[role][1]) for role in sample.known}
    return {role: counts for role, counts in counted.items() if counts}


def _lines(results: Mapping[Role, Mapping[str, BlockCounts]], planned: Planned) -> list[SampleLine]:
    """What the blocks will do to each selection."""
    lines = dependence_lines(planned.config, results, planned.documents, planned.whole)
    return [SampleLine(Outcome.FAILED if failing else Outcome.INCONCLUSIVE, line) for failing, line in lines]


# --- sentences


def grouped(roles: Sequence[str]) -> str:
    """States that documents of these roles are grouped."""
    return f"The {' and '.join(roles)} documents are grouped, and documents of one group may depend on each other."


def unbounded_groups(instead: bool) -> str:
    """States that groups leave no bound; `instead`: whether the verdict on the collection counts groups."""
    other = "; seenset verdict counts groups" if instead else ""
    return f"A bound on numbers of documents requires independent documents, so none is stated{other}."


def dependent_estimate(procedure: str, blocks: int, largest: int) -> str:
    """States that groups make a procedure that estimates the share of nulls unsafe."""
    return (
        f"They form {blocks:,} blocks, the largest of {documents(largest)}, too few for {procedure}: it estimates the "
        "share of nulls as if they were independent documents, and its share of wrong ones can be larger than alpha."
    )


def small_p_values(n: int, n_blocks: int, role: str, factor: str) -> str:
    """States the effect of groups in calibration on p-values; `factor` is the maximum, as text."""
    return (
        f"The {n:,} {role} documents that calibrate rank as {n_blocks:,} independent ones, so the p-values of every "
        f"procedure can be too small by a factor of up to {factor}; calibrate: one_per_block takes one document of "
        "each group."
    )


CHECK = Check(
    name="groups",
    title="Dependence within groups",
    record=GroupsDiagnostic,
    description=("Whether documents are grouped, so that they may depend on each other; null where none or few are."),
    place=5,
    needs=KNOWN,
    on_scores=group_diagnostic,
    sample=SampleCheck(
        "blocks",
        dict[Role, dict[str, BlockCounts]],
        "By known role, and by pooled or by_group calibration, the blocks of dependent documents among the audited "
        "documents and its own; left out where there are none.",
        blocks_of_sample,
        _lines,
        empty={},
    ),
    finding=Blocks.dependence,
    joins="group",
    recomputed=True,
    of_answer=True,
)
