"""Repeats: calibration and audit sets drawn repeatedly over one model's stored scores, with all answers.

Intervals of means over them hold for few repeats and for rare events, over one model or several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipeline.answers.detection import CONFIDENCE, LEAST_MODELS, UNDEFINED, Estimate
from pipeline.checks.classifier import Known, blind_result, hold_out_known, picture_features, read_known
from pipeline.checks.dependent_documents import is_dependent
from pipeline.checks.held_out_auc import Compared, blocks_among
from pipeline.checks.words import Words
from pipeline.config.corpus import Role
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.run.conclusion import conclude
from pipeline.selection.engine import Scores, Verdict, answer_all
from pipeline.selection.guarantees import ConclusionValue, Outcome
from pipeline.trial.config import TrialConfig
from pipeline.trial.splits import Drawable, Split, draw_split

ROWS_SCHEMA = pa.schema(
    [
        ("model", pa.int64()),
        ("repeat", pa.int64()),
        ("selection", pa.string()),
        ("n_audit", pa.int64()),
        ("n_members", pa.int64()),
        ("n_calibration", pa.int64()),
        ("n_selected", pa.int64()),
        ("n_false", pa.int64()),
        ("n_sought", pa.int64()),
        ("null_proportion", pa.float64()),
        ("null_share", pa.float64()),
        ("strict_selected", pa.int64()),
        ("guarantee", pa.string()),
        ("wrong_at_most", pa.int64()),
        ("sought_at_least", pa.int64()),
        ("conclusion", pa.string()),
    ]
)

_GRID = 2001
_TRUNCATION = 0.75
_LIMIT = math.log(2 / (1 - CONFIDENCE))  # limit of the logarithm of the wealth of each of two gamblers


def known_of_documents(texts: Sequence[str], pictures: Sequence[bytes] | None = None) -> Known:
    """The input of a trial's documents for the classifier of the blind test.

    Args:
        texts: texts of the documents, as read by an audit.
        pictures: their files; None where the documents are texts.
    """
    return read_known(texts) if pictures is None else picture_features(pictures)


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The documents of one contaminated model, with the truth and the scores of the audit.

    Selections read `scores`; only the trial reads `trained`.
    """

    ids: list[str]
    family: np.ndarray  # int64, (documents,)
    trained: np.ndarray  # bool, (documents,)
    scored: np.ndarray  # bool, (documents,); False: in quarantine, or a training document of an adapter
    scores: Scores  # scores of all documents; NaN where not scored
    finetuned: Mapping[Role, np.ndarray] = field(default_factory=dict)  # bool, (documents,): trained adapters; unscored
    places: Mapping[str, np.ndarray] = field(default_factory=dict)  # `by` of a shift -> result of `splits.positions`
    words: Known | None = None  # result of `known_of_documents`; None without shifts


def check_repeat(
    pool: Pool, words: Known, roles: Mapping[Role, np.ndarray], selections: Sequence[SelectionConfig], seed: int
) -> dict[Role, Outcome]:
    """Whether words alone hardly distinguish the calibration documents of each known role from the audited ones.

    Args:
        pool: the documents.
        words: features of all documents, from `known_of_documents`.
        roles: role -> int64 positions.
        selections: selections of the trial.
        seed: seed of this repeat.

    Returns:
        The outcome of the blind test of each role; roles with too few documents are missing.
    """
    tests: dict[Role, Outcome] = {}
    for role in dict.fromkeys(NULL_ROLE[selection.direction] for selection in selections):
        if role not in roles:
            continue
        places = np.concatenate([roles[role], roles["audit"]])
        audited = np.arange(places.size) >= roles[role].size
        some = words.part(places) if isinstance(words, Words) else words[places]
        block = blocks_among(pool.family[places], pool.scores.group_numbers[places], audited)
        held = hold_out_known(some, Compared.of(audited, block), seed)
        if held is not None:
            tests[role] = blind_result(held).outcome
    return tests


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """One repeat: the scored audited documents, and each selection's verdict on them."""

    number: int
    split: Split
    audited: np.ndarray  # int64 positions in the pool
    quarantined: int
    verdicts: list[Verdict]
    tests: Mapping[Role, Outcome]  # result of `check_repeat`; empty without a shift

    def conclusion(self, selection: SelectionConfig, verdict: Verdict) -> ConclusionValue:
        """The conclusion of the tests of words and of dependent documents; inconclusive where none is made."""
        if is_dependent(verdict.answer):
            return ConclusionValue.CONTRADICTED
        return conclude([self.tests.get(NULL_ROLE[selection.direction], Outcome.INCONCLUSIVE)])


def repeats(pool: Pool, config: TrialConfig, model: int) -> Iterator[Repeat]:
    """Split the pool and answer the trial's selections, `config.repeats` times.

    Raises:
        UserError: too few documents for a split, or a selection that cannot be answered.
    """
    known, shift = config.roles(), config.split.shift
    lean = None if shift is None else shift.strength * pool.places[shift.by]
    documents = Drawable(pool.trained, pool.family, pool.finetuned, lean)
    for number in range(config.repeats):
        drawn = draw_split(documents, known, config.split, config.seed, model, number)
        roles = {role: drawn.of(role)[pool.scored[drawn.of(role)]] for role in ("audit", *known)}
        quarantined = drawn.audit.size - roles["audit"].size
        tests: Mapping[Role, Outcome] = {}
        seed = config.seed + number
        if pool.words is not None and shift is not None:
            tests = check_repeat(pool, pool.words, roles, config.selections, seed)
        verdicts = answer_all(config.selections, pool.scores, roles, quarantined, seed)
        yield Repeat(number, drawn, roles["audit"], quarantined, verdicts, tests)


def judge(pool: Pool, selection: SelectionConfig, repeat: Repeat, verdict: Verdict) -> dict[str, object]:
    """Compare one verdict with the truth: a row of the table of repeats.

    A false selection is an untrained document with direction members, a trained one with direction clean. The
    null share is that of the audited documents, quarantined ones included, which is the target of its estimates. The
    bounds are null where there are none.
    """
    members = int(pool.trained[repeat.split.audit].sum())
    audited = int(repeat.split.audit.size)
    chosen = int(verdict.selected.sum())
    trained = int(pool.trained[repeat.audited][verdict.selected].sum())
    sought, false = (members, chosen - trained) if selection.direction == "members" else (audited - members, trained)
    bound = verdict.answer.bound
    return {
        "repeat": repeat.number,
        "selection": selection.name,
        "n_audit": audited,
        "n_members": members,
        "n_calibration": verdict.answer.n_calibration,
        "n_selected": chosen,
        "n_false": false,
        "n_sought": sought,
        "null_proportion": float(verdict.answer.null_proportion),
        "null_share": (audited - sought) / audited,
        "strict_selected": verdict.answer.strict.n_selected,
        "guarantee": verdict.answer.guarantee,
        "wrong_at_most": None if bound is None else bound.wrong_at_most,
        "sought_at_least": None if bound is None else bound.members_at_least,
        "conclusion": repeat.conclusion(selection, verdict),
    }


def measure(pool: Pool, config: TrialConfig, model: int) -> pa.Table:
    """All repeats of one model, one row per repeat and selection (`ROWS_SCHEMA`)."""
    rows = []
    for repeat in repeats(pool, config, model):
        for selection, verdict in zip(config.selections, repeat.verdicts, strict=True):
            rows.append({"model": model, **judge(pool, selection, repeat, verdict)})
    return pa.Table.from_pylist(rows, schema=ROWS_SCHEMA)


def align_scores(table: pa.Table, ids: list[str], family: np.ndarray, trained: np.ndarray, columns: list[str]) -> Pool:
    """Align an audit's scores with the trial's documents.

    Args:
        table: columns doc_id, id_key, group and the detectors, for scored documents in any order.
        ids: ids of the trial's documents.
        family: int64, (documents,).
        trained: bool, (documents,).
        columns: detector columns.
    """
    place = {doc_id: index for index, doc_id in enumerate(ids)}
    at = np.array([place[doc_id] for doc_id in table["doc_id"].to_pylist()], dtype=np.int64)
    scored = np.zeros(len(ids), dtype=bool)
    scored[at] = True
    values = {}
    for column in columns:
        values[column] = np.full(len(ids), np.nan)
        values[column][at] = table[column].to_numpy()
    keys = np.zeros(len(ids), dtype=np.int64)
    keys[at] = table["id_key"].to_numpy()
    order = np.zeros(len(ids), dtype=np.int64)
    order[at] = np.arange(at.size)
    groups = table["group"].combine_chunks().take(pa.array(order, mask=~scored))
    return Pool(ids, family, trained, scored, Scores(values, keys, groups, family))


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of a mean of numbers in [0, 1], by betting (Waudby-Smith & Ramdas 2024, theorem 3).

    For each candidate mean, two gamblers bet that the numbers are above and below it; a candidate is excluded
    when the wealth of either exceeds its limit. The stakes are the predictable plug-in, adaptive to a small variance.

    Guaranteed: the interval covers the mean with probability at least 0.95, for any number of values and any
    distribution on [0, 1], provided that each value has that mean given the ones before it. No normal approximation:
    a share of wrong selections that was zero in all of 20 repeats is not reported as certainly zero.

    Args:
        values: float, (repeats,), in [0, 1]; the order has a small effect.

    Returns:
        Lower and upper bound, on a grid of 0.0005 that is rounded outwards; (0, 1) without values. The mean of the
        values is inside, even where the later values differ from the earlier ones.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return 0.0, 1.0
    means = np.linspace(0, 1, _GRID)
    plausible = np.flatnonzero(np.maximum(*_wealth(x, means)) < _LIMIT)
    if plausible.size == 0:  # the values contradict one common mean
        return 0.0, 1.0
    low, high = max(plausible[0] - 1, 0), min(plausible[-1] + 1, _GRID - 1)
    return min(float(means[low]), float(x.mean())), max(float(means[high]), float(x.mean()))


def models_interval(samples: Sequence[np.ndarray]) -> tuple[float, float] | None:
    """95% interval, over models, of the mean of numbers in [0, 1]; None with fewer than LEAST_MODELS.

    Repeats over one model's scores share that model, so each model is one draw regardless of their number. The interval
    is Student's over the models' means, with the number of models minus one degrees of freedom. Means that agree by
    chance would give it no width, so it is never narrower than the models' own intervals are on average.

    Approximate: it covers at the level where the models' means are about normal. Where a rare model is very
    different, a small number of models may include none of that kind.

    Args:
        samples: for each model, float, (repeats,), in [0, 1], at least one.
    """
    if len(samples) < LEAST_MODELS:
        return None
    from scipy.stats import t

    means = np.array([np.mean(values) for values in samples])
    centre = float(means.mean())
    reach = float(t.ppf((1 + CONFIDENCE) / 2, means.size - 1) * means.std(ddof=1) / math.sqrt(means.size))
    low, high = np.mean([mean_interval(values) for values in samples], axis=0)
    return max(0.0, min(centre - reach, float(low))), min(1.0, max(centre + reach, float(high)))


def mean_exceeds(values: np.ndarray, bound: float) -> bool:
    """Whether numbers in [0, 1] contradict that each has a mean of at most `bound`, given the previous ones.

    The means may differ, as between models. The gambler of `mean_interval` who bets on larger numbers
    loses on average where they keep the bound, and exceeds the limit with a probability of at most 0.025.

    Args:
        values: float, (repeats,), in [0, 1], in an order that does not depend on them.
        bound: in [0, 1].
    """
    x = np.asarray(values, dtype=np.float64)
    return bool(x.size and _wealth(x, np.array([bound]))[0][0] >= _LIMIT)


def by_model(values: np.ndarray, model: np.ndarray) -> list[np.ndarray]:
    """The values, (repeats,), of each model that has values."""
    return [values[model == one] for one in np.unique(model)]


def mean_estimate(samples: Sequence[np.ndarray]) -> Estimate:
    """The mean over models of the means over their repeats, and its 95% interval, over repeats or over models."""
    if not samples:
        return UNDEFINED
    mean = float(np.mean([values.mean() for values in samples]))
    interval = mean_interval(samples[0]) if len(samples) == 1 else models_interval(samples)
    return Estimate(mean, *(interval or (None, None)))


def contradicts(samples: Sequence[np.ndarray], target: float) -> bool | None:
    """Whether repeats contradict that each model has a mean of at most `target`; None without repeats.

    Args:
        samples: for each model, float, (repeats,), in [0, 1].
        target: in [0, 1].
    """
    if not samples:
        return None
    if len(samples) > 1:
        return mean_exceeds(np.concatenate(samples), target)
    return mean_interval(samples[0])[0] > target


def _wealth(x: np.ndarray, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The maximum wealth of the gamblers against each mean, above and below it: logarithms, (means,)."""
    n = x.size
    count = np.arange(1, n + 1)
    running = (0.5 + np.cumsum(x)) / (count + 1)
    variance = (0.25 + np.cumsum((x - running) ** 2)) / (count + 1)
    before = np.concatenate([[0.25], variance[:-1]])
    stake = np.sqrt(2 * _LIMIT / (n * before))
    above, below = np.zeros(means.size), np.zeros(means.size)
    most_above, most_below = above.copy(), below.copy()
    with np.errstate(divide="ignore"):
        for value, bet in zip(x, stake, strict=True):
            above += np.log1p(np.minimum(bet, _TRUNCATION / means) * (value - means))
            below += np.log1p(-np.minimum(bet, _TRUNCATION / (1 - means)) * (value - means))
            np.maximum(most_above, above, out=most_above)
            np.maximum(most_below, below, out=most_below)
    return most_above, most_below
