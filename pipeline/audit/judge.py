"""The verdict on a collection, from the scores of a run: was it trained on, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from pipeline.audit.collection import read_collection
from pipeline.audit.diagnostics import run_blind_test
from pipeline.audit.history import answer_names
from pipeline.audit.scored import Scored
from pipeline.audit.select import Each
from pipeline.audit.summary import BlindDiagnostic, Diagnostic, read_summary
from pipeline.audit.verdict import (
    LEVEL,
    BlockKind,
    BlockTest,
    CollectionVerdict,
    MemberCount,
    Statement,
    count_of,
)
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig, display_name
from pipeline.selection.collection import PERMUTATIONS, SPLITS, PermutationTest, permutation_test
from pipeline.selection.digits import beside, decimal, percentage
from pipeline.store.files import Store

OUTSIDE = "This verdict is outside the schedule of scans: its rates are of this scan alone, and add up over scans."


def judge_collection(
    config: AuditConfig, scored: Scored, limit: int | None, each: Each, blocks: BlockKind | None = None
) -> CollectionVerdict:
    """Was the collection of a run's audited documents trained on? By the selections' counts and a permutation test.

    docs/methods.md, section 3.13, defines both and what is made of them and the blind test.

    Args:
        config: of the run.
        scored: its finished score shards.
        limit: the most documents of each role that were read; None when all were.
        each: reads the shards.
        blocks: what moves whole; by default groups where documents have one.

    Raises:
        UserError: no unseen documents, too few for a permutation test, or damaged scores.
    """
    collection = read_collection(config, scored, each, blocks)
    made = collection.blocks(config.seed)
    result = permutation_test(made, config.seed)
    test = BlockTest(
        p_value=result.p_value,
        p_values=result.p_values,
        permutations=PERMUTATIONS,
        auc=result.auc,
        blocks=collection.kind,
        n_audit=int(made.sizes[made.audited].sum()),
        n_unseen=int(made.sizes[~made.audited].sum()),
        n_audit_blocks=int(made.audited.sum()),
        n_unseen_blocks=int((~made.audited).sum()),
        n_mixed=made.n_mixed,
        differences=dict(zip(collection.columns, result.differences, strict=True)),
    )
    names = answer_names(scored.store, config)
    summaries = [summary for name in names if (summary := read_summary(scored.store, name)) is not None]
    counts = [count for summary in summaries if (count := count_of(summary)) is not None]
    blind = run_blind_test(scored, "unseen", config)
    return _verdict(config, scored.store, limit, counts, test, blind, _direction(result))


def _verdict(
    config: AuditConfig,
    store: Store,
    limit: int | None,
    counts: Sequence[MemberCount],
    test: BlockTest,
    blind: BlindDiagnostic,
    direction: Diagnostic,
) -> CollectionVerdict:
    count = counts[0] if counts else None
    by_test, by_count = test.p_value <= LEVEL, count is not None and count.at_least > 0
    reasons = [] if blind.ok else [blind.sentence]
    if by_test and not by_count and direction.ok is False:
        reasons.append(direction.sentence)
    if by_count and not by_test and count is not None and count.supported is False and blind.ok:
        reasons.append(f"A check of selection {count.selection}, which counts, failed: see its answer.")
    supported = False if blind.ok is False or (reasons and blind.ok) else blind.ok
    answer: Statement = "not shown"
    if by_test or by_count:
        answer = "trained on" if supported else "not supported"
    return CollectionVerdict(
        run=store.url,
        model=_model_name(config),
        limit=limit,
        seed=config.seed,
        answer=answer,
        supported=supported,
        reasons=reasons,
        sentences=[
            *_sentences(_model_name(config), answer, count, test, limit),
            *([OUTSIDE] if config.series is not None else []),
        ],
        level=LEVEL,
        counts=list(counts),
        test=test,
        blind=blind,
        direction=direction,
    )


def _model_name(config: AuditConfig) -> str:
    model = config.model
    name = display_name(model)
    return (
        name if isinstance(model, EndpointConfig) or not model.adapter else f"{name} with adapter {model.adapter_shown}"
    )


def _direction(result: PermutationTest) -> Diagnostic:
    """A fitted score may find any difference; only that to higher scores is one that training makes."""
    mean = sum(result.differences) / len(result.differences)
    if mean > 0:
        sentence = f"Audited documents score higher than unseen ones, by {mean:.2f} standard deviations on average."
    else:
        sentence = (
            f"Audited documents do not score higher than unseen ones ({mean:+.2f} standard deviations on average over "
            "the detectors): training raises scores, so a difference that the test finds is another."
        )
    return Diagnostic(ok=mean > 0, sentence=sentence)


def _sentences(
    model: str, answer: Statement, count: MemberCount | None, test: BlockTest, limit: int | None
) -> list[str]:
    heads = {
        "trained on": f"{model} was trained on documents of this collection.",
        "not shown": f"It is not shown that {model} was trained on this collection. That is no proof that it was not.",
        "not supported": (
            f"Not supported: the audited documents differ from the unseen ones, and that {model} was trained on them "
            "is not shown by it."
        ),
    }
    lines = [heads[answer], _count_sentence(count), _test_sentence(test)]
    if count is not None and answer != "not supported":
        wrong, level = 1 - Fraction(repr(count.confidence)), Fraction(repr(LEVEL))
        lines.append(
            f"Of collections without a trained document the count is wrong for at most {decimal(wrong)} and "
            f"the test (p <= {LEVEL:g}) for at most {LEVEL:g}; one of the two for at most {decimal(wrong + level)}."
        )
    lines.append(
        "Both rest on this: nothing but training tells the audited documents from the unseen ones. The blind test "
        "looks for other differences in their words alone, or in thumbnails, colours and files of pictures."
    )
    if limit is not None:
        lines.append(f"This is a sample: only the first {limit:,} documents of each role were read.")
    return lines


def _count_sentence(count: MemberCount | None) -> str:
    if count is None:
        return "No selection of this run says how many documents were trained on at least."
    by = f"(selection {count.selection}, {', '.join(count.detectors)})"
    sure = f"{percentage(Fraction(repr(count.confidence)))} confidence"
    if not count.at_least:
        return f"The count shows none: {by[1:-1]} at {sure}, {count.n_audit:,} audited."
    condition = "" if count.supported else ", if what the selection rests on holds"
    return (
        f"With {sure} at least {count.at_least:,} of the {count.n_audit:,} audited "
        f"documents were trained on {by}{condition}."
    )


def _test_sentence(test: BlockTest) -> str:
    kinds = {"group": "groups", "family": "families of near copies"}
    number = len(test.differences)
    read = f"{number} detector{'' if number == 1 else 's'}"
    return (
        f"The permutation test gives p = {beside(test.p_value, LEVEL, kind='g')}: a linear score of {read}, "
        f"fitted on half of {test.n_audit_blocks:,} audited and {test.n_unseen_blocks:,} unseen blocks "
        f"({kinds[test.blocks]}; {test.n_audit:,} and {test.n_unseen:,} documents) and tried on the other half "
        f"({PERMUTATIONS:,} permutations of whole blocks, {SPLITS} splits, AUC {test.auc:.2f})."
    )
