"""The verdict on a collection in words: the answer, the count, the permutation test, and their assumptions.

Also the expected results of audits of documents with versions, and inputs that they do not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pipeline.answers.verdict import LEVEL, BlockTest, MemberCount, Statement, VersionsTest
from pipeline.checks.shuffle import ShuffleDiagnostic
from pipeline.run.conclusion import bound_condition
from pipeline.selection.collection import FOLDS, PERMUTATIONS
from pipeline.selection.guarantees import Outcome
from pipeline.selection.procedures.versions import ASSUMPTION
from pipeline.wording import format_against, percent, percentage

OUTSIDE = "This verdict is outside the schedule of scans: its rates are of this scan alone, and add up over scans."
NO_TEST = (
    "No permutation test was made: only labels of blocks of like size are permuted, and no class of size has blocks of "
    "both roles."
)
NO_COUNT = "No selection of this run states how many documents were trained on at least."
UNGROUPED = (
    "No count is stated: a count requires independent documents, and the groups of these are ignored (blocks: family). "
    "The permutation test takes documents of one group to be independent."
)
CALIBRATING = (
    "Unseen documents that depend on each other (groups, near-duplicates) are blocks: one document of each calibrates "
    "the count, drawn by a hash of its id."
)
ASSUMED = (
    "The verdict assumes that nothing but training tells the audited documents from the unseen ones. The blind test "
    "looks for other differences in their words alone, or in thumbnails, colours and files of pictures."
)
IF_GROUPED = "provided documents of one group are independent"

_UNITS = {
    "document": ("document", "documents"),
    "group": ("group", "groups"),
    "family": ("family", "families of near-duplicates"),
}

EXPECTED = (
    "what to expect (8B parameters, 500B tokens, texts inserted at random; Hubble, arXiv 2510.19811): of documents "
    "that a model read {shares} are selected; a collection of 500 to 1,500 may be shown without any document"
)


def model_with_adapter(name: str, adapter: str | None) -> str:
    """The name of a model, with its adapter if there is one."""
    return f"{name} with adapter {adapter}" if adapter else name


def head(model: str, answer: Statement, shown: tuple[str, str], condition: str | None) -> str:
    """States the answer; one that the collection was trained on never without its error rate.

    Args:
        model: name of the model.
        answer: answer of the verdict.
        shown: what shows it, from `by_p_value` or `by_count`.
        condition: condition of the answer, if there is one.
    """
    if answer == "trained on":
        by, chance = shown
        return (
            f"It is shown, {by}, that {model} was trained on documents of this collection{_under(condition)}. {chance}"
        )
    if answer == "not shown":
        return f"It is not shown that {model} was trained on this collection. That is no proof that it was not."
    return (
        f"Contradicted: the audited documents differ from the unseen ones; this does not show that {model} was "
        "trained on them."
    )


def by_p_value(p_value: float, confidence: float | None) -> tuple[str, str]:
    """A test as what shows a verdict, and how often it would by chance.

    Args:
        p_value: p-value of the test.
        confidence: confidence of the count that also would show it; None where there is none.
    """
    level = Fraction(repr(LEVEL))
    chance = f"{_UNTRAINED}, {_some(level)} p <= {LEVEL:g} by chance"
    if confidence is not None:
        chance += f", and at most {_share(level + 1 - Fraction(repr(confidence)))} this or a count above 0"
    return f"with p = {format_against(p_value, LEVEL, kind='g')}", f"{chance}."


def by_count(confidence: float, tested: bool) -> tuple[str, str]:
    """A count as what shows a verdict, and how often it would by chance.

    Args:
        confidence: confidence of the count.
        tested: whether the permutation test, which also would show it, was made.
    """
    sure = Fraction(repr(confidence))
    chance = f"{_UNTRAINED}, {_some(1 - sure)} a count above 0 by chance"
    if tested:
        chance += f", and at most {_share(1 - sure + Fraction(repr(LEVEL)))} this or p <= {LEVEL:g}"
    return f"with {percentage(sure)} confidence", f"{chance}."


_UNTRAINED = "Of collections that it was not trained on"


def _some(share: Fraction) -> str:
    """The share of collections that give something: at most one in 20 gives."""
    return f"at most {_share(share)} {'gives' if share.numerator == 1 else 'give'}"


def _share(share: Fraction) -> str:
    return f"one in {1 / share}" if share.numerator == 1 else percentage(share)


def see_selection(name: str) -> str:
    """Why the verdict is contradicted where its selection is."""
    return f"A check contradicts selection {name}: see its answer."


def direction(mean: float) -> str:
    """States whether audited documents score higher than unseen ones, by the mean difference in standard deviations."""
    if mean > 0:
        return f"Audited documents score higher than unseen ones, by {mean:.2f} standard deviations on average."
    return (
        f"Audited documents do not score higher than unseen ones ({mean:+.2f} standard deviations on average over "
        "the detectors): training raises scores, so the test gives p = 1."
    )


def counted_phrase(count: MemberCount, sampled: bool, checked: bool, bounded: bool) -> list[str]:
    """States the count.

    Args:
        count: count of the first selection.
        sampled: whether the audited documents are a sample.
        checked: whether the blind test was made.
        bounded: whether the count is the bound of the selection itself.
    """
    by = f"selection {count.selection}, {', '.join(count.detectors)}"
    sure = f"{percentage(Fraction(repr(count.confidence)))} confidence"
    noun, units = _UNITS[count.unit]
    of = f"{count.n_units:,} {'sampled ' * sampled}audited {units}"
    if not count.at_least:
        return [f"The count shows none: {by} at {sure}, {of}."]
    single = count.at_least == 1
    what = ("was" if single else "were") + " trained on"
    if count.unit != "document":
        what = ("contains" if single else "contain") + " a document that was trained on"
    condition = _under(bound_condition(count.conclusion, checked))
    line = f"With {sure} at least {count.at_least:,} of the {of} {what} ({by}){condition}."
    if count.unit == "document":
        return [line, *([] if bounded else [CALIBRATING])]
    alone = "" if count.unit == "group" else "A document without near-duplicates is a family of its own. "
    drawn = "one of its documents, drawn by a hash of its id"
    if count.documents_of_each > 1:
        drawn = f"the mean over {count.documents_of_each:,} of its documents, drawn by a hash of their ids"
    mixed = ""
    if count.n_mixed:
        mixed = f" {count.n_mixed:,} documents are left out, because their {units} are in both roles."
    size = "its size is assumed to carry no information on its score."
    return [line, f"{alone}The score of a {noun} is {drawn}; {size}{mixed}"]


def tested(test: BlockTest, compared: bool) -> str:
    """States the result and the inputs of the permutation test; `compared`: whether near-duplicates were searched."""
    units = _UNITS[test.blocks if compared or test.blocks == "group" else "document"][1]
    number = len(test.differences)
    read = f"{number} detector{'' if number == 1 else 's'}"
    return (
        f"The permutation test gives p = {format_against(test.p_value, LEVEL, kind='g')}: a linear score of {read}, "
        f"cross-fitted in {FOLDS} folds of {test.n_audit_blocks:,} audited and {test.n_unseen_blocks:,} unseen blocks "
        f"({units}; {test.n_audit:,} and {test.n_unseen:,} documents; {PERMUTATIONS:,} permutations "
        f"of whole blocks, refitted for each; AUC {test.auc:.2f})."
    )


def _under(condition: str | None) -> str:
    return f", {condition}" if condition else ""


def expected_text(expected: Sequence[Mapping[str, float]]) -> str:
    """States the share of documents with versions that is selected, by how often the model read them.

    Args:
        expected: rows of `EXPECTED` in `pipeline.selection.version_scores`, as in a forecast.
    """
    shares = []
    for row in expected:
        least, most = percent(row["least"]), percent(row["most"])
        shares.append(f"{_times(int(row['copies']))} {least if least == most else f'{least} to {most}'}")
    return EXPECTED.format(shares=", ".join(shares))


def _times(copies: int) -> str:
    return "once" if copies == 1 else f"{copies} times"


def direction_of_versions(above: float) -> str:
    """States how far published versions score from the mean of their document's versions, in standard deviations."""
    side = "above" if above > 0 else "below"
    return (
        f"Published versions score {abs(above):.2f} standard deviations {side} the mean of their document's versions, "
        "on average."
    )


def verdict_on_versions(
    model: str, answer: Statement, test: VersionsTest, limit: int | None, shuffle: ShuffleDiagnostic | None
) -> list[str]:
    """States the verdict on a collection of documents with versions.

    Args:
        model: name of the model.
        answer: answer of the verdict.
        test: the redraws of published versions.
        limit: the most documents that were read; None when all were.
        shuffle: shuffle check of the documents; None where `seenset mark` drew the published versions.
    """
    p_value = f"p = {format_against(test.p_value, LEVEL, kind='g')}"
    redrawn = f"Redrawing the published versions of {test.documents:,} documents {test.redraws:,} times gives {p_value}"
    meaning = [
        f"{redrawn}; of collections that were not trained on at most {LEVEL:g} have p <= {LEVEL:g}. This is exact, for "
        "any model.",
        direction_of_versions(test.above),
        f"The e-value is {test.e_value:.3g}: multiply it by that of documents which arrive later; of collections that "
        "were not trained on at most one in N ever reaches N.",
    ]
    if shuffle is not None and shuffle.outcome == Outcome.FAILED:
        meaning = [
            f"{redrawn}, which says nothing where the published versions can be told without the model.",
            direction_of_versions(test.above),
        ]
    first = head(model, answer, by_p_value(test.p_value, None), "as published")
    if answer == "not supported":
        first = (
            "Contradicted: texts or indices show which versions were published, so that this does not show that "
            f"{model} was trained on them."
        )
    return [
        first,
        *meaning,
        *(
            [] if shuffle is None or shuffle.outcome == Outcome.FAILED else [shuffle.sentence]
        ),  # a failed one is a reason
        f"The verdict assumes that {ASSUMPTION}. No unseen documents are needed.",
        *([] if limit is None else [f"This is a sample: only the first {limit:,} documents were read."]),
    ]
