"""Results of classifiers that never saw the model: the blind test, and in an evaluation.

A difference of roles in words or looks is not membership, and the absence of a difference does not prove them alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.checks.held_out_auc import LEAST, LEAST_BLOCKS, PASSING, TOLERANCE, Blind, documents_to_decide
from pipeline.run.summary import LEAST_SHARED
from pipeline.selection.guarantees import Outcome
from pipeline.wording import format_against

WORDS, TOKENS, OF_PICTURES = "words", "tokens", "thumbnails, colours and files"
OF_CAPTIONED = "thumbnails, colours, files and captions"
"""The input of a classifier."""

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
    return (
        f"A classifier that knows only their {by} tells the {role} documents from the audited ones, with an AUC above "
        f"{_DIFFERENT:.2f} at 99% confidence ({_interval(test)}): they differ in more than membership, and the "
        "guaranteed error rate is not supported."
    )


def decided_by(first: str, second: str = "audited", by: str = WORDS) -> str:
    """States how many documents of two kinds would decide the test.

    Args:
        first: name of one kind.
        second: name of the other kind.
        by: input of the classifier.
    """
    return (
        f"About {documents_to_decide():,} {first} and as many {second} documents would decide it: "
        f"if their {by} are alike, nine of ten tests then pass."
    )


def how_decided(by: str, blocks: bool) -> str:
    """Explains inconclusive tests; stated once for all of them.

    Args:
        by: input of the classifiers.
        blocks: whether some of the documents are of one group, or near-duplicates.
    """
    once = " (documents of one group and near-duplicates count once)" if blocks else ""
    return (
        f'A lower limit above {_DIFFERENT:.2f} decides a test as "different", an upper limit of at most {_ALIKE:.2f} '
        f'as "alike" (an AUC below 0.50 is taken as 0.50). With about {documents_to_decide():,} documents of each '
        f"kind{once} nine of ten tests pass if the {by} are alike; with fewer it is normal that they stay inconclusive."
    )


def untested(role: str, why: str, by: str = WORDS) -> str:
    """States that the blind test of a role was not made, and why."""
    return f"Whether the {by} of {role} and audited documents differ was not tested: {why}."


def telling_words_phrase(role: str, audited: Sequence[str], known: Sequence[str], by: str = WORDS) -> str:
    """The words or tokens that distinguish a role from the audited documents, by where they are more frequent."""
    return f"{by} that tell them apart: {', '.join(audited) or 'none'} (audited); {', '.join(known) or 'none'} ({role})"


def matched(
    place: str, count: int, total: int, role: str, before: Blind | None, after: Blind | None, by: str = WORDS
) -> str:
    """States how many documents of a role were kept because their words resemble the audited ones, and the effect.

    Args:
        place: path of the file of these documents.
        count: number of kept documents.
        total: number of readable documents of the role.
        role: role of the documents.
        before: blind test with all documents.
        after: blind test with the kept documents; None where they are too few.
        by: `WORDS` or `TOKENS`, which are also columns of the file.
    """
    text = f"{place}: {count:,} of {total:,} {role} documents whose {by} resemble the audited"
    if after is None:
        return f"{text}; fewer than {LEAST}, too few to calibrate on: give others"
    if before is not None:
        text += f"; blind AUC {before.auc:.2f} before, {after.auc:.2f} with these"
    if after.outcome == Outcome.FAILED:
        return f"{text}: {by} still tell them apart, so this set repairs nothing"
    column = ", tokens: tokens" if by == TOKENS else ""
    use = f"corpus.{role}: {{path: {place}, id: id{column}}}"
    return f"{text}. To calibrate on them: {use}; then seenset plan states what they can select"


def _interval(test: Blind) -> str:
    """The AUC and its interval, whose ends are rounded to the side of the limit that they are compared with."""
    low, high = format_against(test.low, _DIFFERENT), format_against(test.high, 0.5 if test.below else _ALIKE)
    return f"AUC {test.auc:.2f}, 99% interval {low} to {high}; 0.50 is chance"
