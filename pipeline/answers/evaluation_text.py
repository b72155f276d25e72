"""Cautions for readers of an evaluation: the basis of its figures, and whether words alone distinguish the roles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.answers.detection import RATES, least_untrained
from pipeline.answers.evaluation import BLIND, COMPARED, DetectorEvaluation, Evaluated, Evaluation, is_blind
from pipeline.checks.blind import OF_PICTURES, PAIRED, SAMPLED_SHARDS, WORDS
from pipeline.checks.held_out_auc import LEAST, PASSING, TOLERANCE, documents_to_decide, is_alike
from pipeline.wording import sample_of


def too_few_untrained(count: int, kind: str, models: int = 1) -> list[str]:
    """One sentence for each false positive rate without an interval, for want of independent untrained documents.

    Args:
        count: number of these documents, of the model with the fewest.
        kind: their name, such as "unseen documents".
        models: number of models that the TPR is averaged over.
    """
    rates = [rate for rate in RATES if count < least_untrained(rate, models)]
    return [f"Too few {kind} ({count:,}) for an interval at a false positive rate of {rate:.0%}." for rate in rates]


def notices(evaluated: Evaluated) -> Iterator[str]:
    """Cautions that precede the figures."""
    evaluation = evaluated.evaluation
    if evaluation.limit is not None:
        yield sample_of(evaluation.limit)
    yield from (f"{doubt}." for doubt in evaluated.doubts)
    yield about_words(evaluation.rows[0], evaluated.units) if evaluated.has_text else NO_WORDS
    yield from _against_labels(evaluated)
    yield from _about_sample(evaluation)
    if evaluation.n_shared:
        yield (
            f"{evaluation.n_shared:,} seen documents have the same text as an unseen one: their labels contradict "
            "each other. They are compared all the same."
        )
    seen, unseen = (entry.n_compared for entry in evaluation.documents)
    blunt = [f"{rate:.0%}" for rate in RATES if rate * unseen < 1]
    if blunt:
        yield (
            f"With {unseen:,} unseen documents a false positive rate of {' or '.join(blunt)} allows no false positive: "
            "the TPR there is the share of seen documents above every unseen one."
        )
    if seen + unseen and min(seen, unseen) < LEAST:
        yield f"Fewer than {LEAST} documents of one kind are compared: the figures are too uncertain to rely on."
    yield from _about_intervals(evaluated, seen + unseen)
    if evaluated.n_groups_left_out:
        yield f"{evaluated.n_groups_left_out:,} smaller groups are left out of the table."


NO_WORDS = "Whether a classifier tells seen from unseen documents by their words was not checked: there are no texts."


def _against_labels(evaluated: Evaluated) -> Iterator[str]:
    """The columns of external scores whose direction contradicts the labels."""
    for row in evaluated.evaluation.rows:
        column, auc = row.detector, row.auc.value
        if column not in evaluated.higher or row.group is not None or auc is None or auc >= 0.5:
            continue
        meaning, change = "not trained on", f"write {{column: {column}, higher: nonmember}} in scores of every role"
        if evaluated.higher[column] == "nonmember":
            meaning, change = "trained on", "leave out higher: nonmember in scores of every role"
        yield (
            f"Warning: column {column!r} ranks seen documents below unseen ones (AUC {auc:.3f}): if its higher values "
            f"mean {meaning}, {change}. It applies to selections of both directions."
        )


def _about_sample(evaluation: Evaluation) -> Iterator[str]:
    """The documents that the classifier's row counts, and those that it omits; nothing without such a row."""
    row = evaluation.rows[0]
    if not is_blind(row.detector):
        return
    yield f'The TPR of the row "{row.detector}" has no interval: ten classifiers score the documents.'
    counts = [
        (counted, entry.n_compared, entry.role)
        for entry, counted in zip(evaluation.documents, (row.n_seen, row.n_unseen), strict=True)
    ]
    if all(counted == compared for counted, compared, _ in counts):
        each = " and ".join(f"{counted:,} {role}" for counted, _, role in counts)
        yield f'The row "{row.detector}" counts all of the {each} documents that are compared.'
        return
    each = " and ".join(f"{counted:,} of the {compared:,} {role}" for counted, compared, role in counts)
    yield (
        f'The row "{row.detector}" counts {each} documents that are compared: the first ones of at most '
        f"{SAMPLED_SHARDS} shards of each role, evenly spaced over its files."
    )


def _about_intervals(evaluated: Evaluated, n_compared: int) -> Iterator[str]:
    """The units of the intervals over all documents, and the figures without intervals."""
    seen, unseen = (evaluated.n_blocks[role] for role in COMPARED)
    units = "documents"
    if seen + unseen < n_compared:
        units = "blocks"
        yield (
            "Documents of one group, and near-duplicates, may depend on one another: the intervals over all documents "
            f"are over {seen:,} seen and {unseen:,} unseen blocks (groups, families of near-duplicates, single "
            "documents), and those of the TPR count one document of each, drawn by a hash of its text."
        )
    if evaluated.shares_groups:
        yield "Groups with seen and unseen documents are taken as given: their documents count one by one."
    yield from too_few_untrained(evaluated.n_independent, f"unseen {units}")


def about_words(row: DetectorEvaluation, units: str = WORDS) -> str:
    """The meaning of the classifier's row for the documents, or of its absence."""
    if not is_blind(row.detector):
        return (
            f"Fewer than {LEAST} seen or unseen documents, or too few groups: whether a classifier tells them apart "
            "was not tested."
        )
    by = units if row.detector == BLIND else OF_PICTURES
    value, low, high = row.auc.value, row.auc.low, row.auc.high
    assert value is not None  # there are documents of both kinds
    claim = f"a classifier that never saw the model tells seen from unseen documents by their {by}"
    if low is None or high is None:
        return (
            f"Whether {claim} cannot be determined: there are too few groups for an interval of its AUC "
            f"({value:.3f}; 0.5 is chance)."
        )
    interval = f"AUC {value:.3f}, 95% interval {low:.3f} to {high:.3f}; 0.5 is chance"
    if low > 0.5 + TOLERANCE:
        return (
            f"{claim[0].upper()}{claim[1:]} ({interval}): they differ in more than membership. A detector may have "
            "found that difference, and these figures do not say how much of what it finds is membership."
        )
    if high < 0.5:
        return (
            f"Whether {claim} cannot be determined: the AUC is further below 0.5 than chance explains ({interval}). "
            f"{PAIRED}."
        )
    if not is_alike(value, high):
        return (
            f"Whether {claim} cannot be determined from so few documents ({interval}): the test is inconclusive. "
            f"{decided_by('seen', 'unseen', by)}"
        )
    return (
        f"A classifier that never saw the model hardly tells seen from unseen documents by their {by}: with an AUC of "
        f"at most {0.5 + PASSING:g} ({interval}). This supports the comparison; it does not prove that the "
        "documents differ in membership alone."
    )


def worded(evaluated: Evaluated) -> Evaluated:
    """The evaluation with the notices for evaluation.json."""
    evaluation = evaluated.evaluation.model_copy(update={"notices": list(notices(evaluated))})
    return replace(evaluated, evaluation=evaluation)


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
