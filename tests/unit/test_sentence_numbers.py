"""Every number that a sentence names, held against counts: what a reader would find who tried it."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import binom
from test_fused_selections import verdict_of
from test_preflight_checks import planned, text

import seenset
from pipeline.answers import verdict_text as wording
from pipeline.answers.stated_bounds import bound_text, sureness
from pipeline.answers.verdict import LEVEL, BlockTest, MemberCount
from pipeline.checks.blind import blind_diagnostic
from pipeline.checks.check import AnswerFacts
from pipeline.checks.diagnostic import NearDuplicates
from pipeline.checks.held_out_auc import Blind
from pipeline.checks.near_copies import near_duplicates_diagnostic
from pipeline.checks.resolution import ResolutionDiagnostic, resolution_diagnostic
from pipeline.config.kinds import SCORES, TEXTS
from pipeline.config.models import ModelConfig
from pipeline.config.selection import SelectionConfig
from pipeline.plan.description import build_config
from pipeline.plan.forecast import forecast
from pipeline.plan.preflight import RUN, Effort, check_documents
from pipeline.report.facts import RunFacts, SelectionFacts, read_facts
from pipeline.report.selection_text import answer_text
from pipeline.results.summary import Summary
from pipeline.run.plan import describe_model, make_plan
from pipeline.selection.calibrations import simes_grid
from pipeline.selection.conformal import Grid, RankCounts, halves
from pipeline.selection.engine import Scores, answer_all
from pipeline.selection.folds import Answer
from pipeline.selection.guarantees import ConclusionValue
from pipeline.selection.knockoff import sign_symmetry
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.bound import guarantee_of_bound
from pipeline.selection.procedures.record import Rule, decide
from pipeline.selection.ranked import factor_at, fewest_at_best, fewest_selectable, known_needed
from pipeline.selection.step_up import minimum_selectable
from pipeline.wording import at_most, decimal, format_against, percentage
from tests.helpers.commands import here
from tests.helpers.made_up import write_audit, write_corpus
from tests.helpers.report_run import build_run

ALPHA = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFacts:
    return read_facts(build_run(tmp_path_factory.mktemp("numbers")))


def terms_of(run: RunFacts, summary: Summary) -> str:
    return answer_text(run, SelectionFacts(summary.name, summary, None, None, ())).terms


def draw_table(values: np.ndarray, detectors: int, **columns: Any) -> pa.Table:
    return pa.table({**{f"d{index}": values for index in range(detectors)}, **columns})


def asked(n: int, m: int, strongest: int = 0, detectors: int = 1, seen: int = 0, **settings: Any) -> Summary:
    """The answer where so many audited documents score higher than all others, and the rest lower than all."""
    audit = np.full(m, -1.0)
    audit[:strongest] = 1e6
    known = {"unseen": draw_table(np.arange(n, dtype=float), detectors)}
    if seen:
        known["seen"] = draw_table(np.full(seen, float(n)), detectors)
    return seenset.select(draw_table(audit, detectors), **known, alpha=ALPHA, **settings).summary


def selected(procedure: str, n: int, m: int, strongest: int, alpha: Fraction) -> int:
    """How many a procedure selects of m documents, so many of them above all n that calibrate and the others below."""
    counts = np.zeros(n + 1, dtype=np.int64)
    counts[0] = strongest
    counts[n] += m - strongest
    return decide(procedure, RankCounts(counts), alpha).n_selected


LIMIT = re.compile(
    r"With only (?P<n>\d+) documents? for calibration nothing could (?P<ever>.*?): the smallest possible p-value is "
    r"1/(?P<p>\d+), and at least (?P<needed>[\d,]+) of (?P<m>\d+) documents would have to reach it\. To change this, "
    r"give more calibration documents \(at least about (?P<least>[\d,]+) for anything to be selectable; about "
    r"(?P<good>[\d,]+) for a selection of (?P<size>one in a hundred|a single one)(?P<half>, half of which calibrate)?\)"
)


def limit_of(text: str) -> dict[str, Any]:
    matched = LIMIT.search(text)
    assert matched is not None, text
    parts = matched.groupdict()
    return {key: int(value.replace(",", "")) if value and value[0].isdigit() else value for key, value in parts.items()}


def check_limit(said: dict[str, Any], m: int, selected_of: Callable[[int, int], int]) -> None:
    """So many known documents let all of m be selected, or one in a hundred; with one document fewer nothing is."""
    for known, strongest in ((said["least"], m), (said["good"], max(1, m // 100))):
        assert (selected_of(known, strongest), selected_of(known - 1, strongest)) == (strongest, 0)


@pytest.mark.parametrize("m", [40, 230])
@pytest.mark.parametrize(("procedure", "detectors"), [("bh", 1), ("by", 1), ("ebh", 1), ("td4eval", 1), ("td4eval", 2)])
def test_a_report_says_why_nothing_could_be_selected_and_what_would_change_it(
    run: RunFacts, procedure: str, detectors: int, m: int
) -> None:
    settings: dict[str, Any] = {"procedure": procedure, "detectors": detectors}
    said = limit_of(terms_of(run, asked(4, m, **settings)))
    assert (said["n"], said["p"], said["m"]) == (4, 5, m)
    assert (said["ever"], said["half"]) == ("ever have been selected", None)
    assert said["size"] == ("one in a hundred" if m >= 200 else "a single one")
    assert said["needed"] > m
    assert asked(4, m, m, **settings).n_selected == 0, "not even if all stand out"
    check_limit(said, m, lambda known, strongest: asked(known, m, strongest, **settings).n_selected)


@pytest.mark.parametrize("procedure", ["storey", "bky", "quantile", "ptdi", "kernel", "known_members"])
def test_the_same_holds_at_the_share_of_nulls_that_was_estimated(run: RunFacts, procedure: str) -> None:
    m = 230
    summary = asked(4, m, procedure=procedure, seen=9 if procedure == "known_members" else 0)
    said = limit_of(terms_of(run, summary))
    assert said["ever"].startswith("have been selected (as estimated, ")
    alpha = Fraction(1, 10) / Fraction(repr(summary.factor))  # which the share of nulls stretches alpha to
    assert said["needed"] == math.ceil(m / 5 / alpha)
    assert selected("bh", 4, m, m, alpha) == 0
    check_limit(said, m, lambda known, strongest: selected("bh", known, m, strongest, alpha))


FEWEST = re.compile(
    r"calibration the shortest possible list has ([\d,]+) documents(?: \(as estimated, [^)]*\))?: fewer"
)


def fewest_of(text: str) -> int:
    matched = FEWEST.search(text)
    assert matched is not None, text
    return int(matched[1].replace(",", ""))


def check_fewest(run: RunFacts, m: int, answer: Callable[[int], Summary]) -> None:
    """The fewest that an empty answer names can be selected, where so many stand out, and one fewer cannot."""
    fewest = fewest_of(terms_of(run, answer(0)))
    assert 1 < fewest <= m
    assert (answer(fewest).n_selected, answer(fewest - 1).n_selected) == (fewest, 0)


@pytest.mark.parametrize(
    "settings",
    [
        *({"procedure": name, "calibration": how} for name in ("bh", "by", "ebh") for how in ("pooled", "conditional")),
        {"procedure": "adadetect", "seen": 40},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_an_empty_answer_says_the_fewest_that_there_could_have_been(run: RunFacts, settings: dict[str, Any]) -> None:
    check_fewest(run, 90, lambda strongest: asked(400, 90, strongest, **settings))


def test_the_fewest_of_groups_are_those_of_the_sentence(run: RunFacts) -> None:
    """The large group's smallest p-value is 1/181."""
    n, m = 200, 150
    unseen = draw_table(np.arange(n, dtype=float), 1, group=["few"] * 20 + ["many"] * 180)

    def answer(strongest: int) -> Summary:
        scores = np.full(m, -1.0)
        scores[:strongest] = 1e6
        audit = draw_table(scores, 1, group=["many"] * m)
        return seenset.select(audit, unseen, procedure="bh", alpha=ALPHA, calibration="by_group").summary

    check_fewest(run, m, answer)


def test_no_list_of_procedure_bound_is_shorter_than_the_report_and_the_plan_say(run: RunFacts, tmp_path: Path) -> None:
    n, m = 200, 90
    planned_for = outlook(tmp_path, known=n, audited=m, procedure="bound")["sentence"]
    (needed,) = re.findall(r"the shortest possible list has ([\d,]+) documents", planned_for)
    fewest = max(int(needed), fewest_of(terms_of(run, asked(n, m, procedure="bound"))))
    sizes = [asked(n, m, strongest, procedure="bound").n_selected for strongest in range(m + 1)]
    assert all(size == 0 or size >= fewest for size in sizes)
    assert max(sizes) == m


@pytest.mark.parametrize("count", [60, 200])
def test_a_plan_says_what_one_group_takes_and_of_few_documents_that_it_is_one(tmp_path: Path, count: int) -> None:
    sentence = outlook(tmp_path, known=5, audited=count, procedure="bh", calibration="by_group")["sentence"]
    few = max(1, count // 100)
    smallest = "a single document" if few == 1 else "as few as 1% of the audited documents"
    matched = re.search(rf"With ([\d,]+) unseen documents of one group {smallest} can be selected\.", sentence)
    assert matched is not None, sentence
    known = int(matched[1].replace(",", ""))
    assert selected("bh", known, count, few, Fraction(1, 10)) == few
    assert selected("bh", known - 1, count, few, Fraction(1, 10)) == 0


@pytest.mark.parametrize("value", [0.5304, 0.5296, 0.53, 0.5500001, 0.55, 0.1234])
@pytest.mark.parametrize("limit", [0.53, 0.55])
def test_rounding_takes_no_number_to_the_other_side_of_its_limit(value: float, limit: float) -> None:
    shown = format_against(value, limit)
    assert (float(shown) > limit) == (value > limit)
    assert (float(shown) < limit) == (value < limit)
    assert len(shown) <= 9
    if (round(value, 2) > limit, round(value, 2) < limit) == (value > limit, value < limit):
        assert shown == f"{value:.2f}", "with no more digits than it takes"
    assert format_against(5e-17, 0.0) == "5e-17"


def test_an_interval_is_shown_on_the_side_of_the_limit_that_decided() -> None:
    for low, high in itertools.product((0.45, 0.5299, 0.53, 0.5301), (0.5499, 0.55, 0.5501, 0.5549)):
        sentence = blind_diagnostic(Blind(0.53, low, high, 100, 100), "unseen").sentence
        ends = re.findall(r"99% interval ([\d.]+) to ([\d.]+);", sentence)
        shown = Blind(0.53, *map(float, ends[0]), 100, 100)
        assert shown.outcome == Blind(0.53, low, high, 100, 100).outcome


def test_a_p_value_of_the_verdict_is_shown_on_its_side_of_the_level() -> None:
    common = {"permutations": 9_999, "auc": 0.5, "blocks": "family", "n_mixed": 0, "differences": {}}
    sizes = dict.fromkeys(("n_audit", "n_unseen", "n_audit_blocks", "n_unseen_blocks"), 30)
    for count in [*range(480, 520), 2, 10_000]:
        p = count / 10_000
        (shown,) = re.findall(r"gives p = ([\d.e-]+):", wording.tested(BlockTest(p_value=p, **common, **sizes), True))  # type: ignore[arg-type]
        assert (float(shown) <= LEVEL) == (p <= LEVEL)
        assert float(shown) == pytest.approx(p, rel=0.06)


@pytest.mark.parametrize("confidence", [0.95, 0.999, 0.9999999, 0.5, 0.12345678])
def test_a_confidence_is_told_as_it_was_set_and_never_as_certainty(confidence: float) -> None:
    summary = seenset.select(
        np.r_[np.full(60, 9.0), np.zeros(40)], unseen=np.arange(99.0) / 99, procedure="bh", confidence=confidence
    ).summary
    count = MemberCount(
        selection="a",
        detectors=["loss"],
        confidence=confidence,
        at_least=3,
        n_audit=9,
        conclusion=ConclusionValue.SUPPORTED,
    )
    exact = 100 * Fraction(repr(confidence))
    told = [
        sureness(summary.bound),
        bound_text(summary.model_copy(update={"conclusion": ConclusionValue.INCONCLUSIVE})) or "",
        wording.counted_phrase(count, sampled=False, checked=True, bounded=True)[0],
        guarantee_of_bound(Fraction(repr(confidence))).promise,
    ]
    for sentence in told:
        (share,) = re.findall(r"([\d.]+)% confidence", sentence)
        assert Fraction(share) == exact
    for sentence in (told[1], told[3]):
        (rest,) = re.findall(
            r"at most ([\d.]+)%? (?:would give|of such audits)|fail in at most ([\d.]+)% of", sentence
        )[:1]
        assert Fraction("".join(rest)) == 100 - exact


def test_exact_decimals_are_written_as_they_are() -> None:
    for exact in ("0.05", "1", "100", "0.0000001", "99.99999"):
        assert decimal(Fraction(exact)) == exact
    assert percentage(Fraction(1, 8)) == "12.5%"


def copies(sizes: list[int]) -> NearDuplicates:
    total = sum(sizes)
    return NearDuplicates(
        n_documents=total,
        whole=True,
        n_copies=sum(size for size in sizes if size > 1),
        n_families=sum(size > 1 for size in sizes),
        largest=max(sizes),
        n_distinct=len(sizes),
        effective=round(total**2 / sum(size**2 for size in sizes), 1),
        families=[],
    )


def resolution_of(answer: Answer) -> ResolutionDiagnostic:
    """The check of the number of calibration documents, which depends on the answer alone."""
    selection = SelectionConfig(name="a", detectors=["d0"])
    return resolution_diagnostic(AnswerFacts(selection=selection, answer=answer, offers=SCORES.offers))


@pytest.mark.parametrize("sizes", [[3, 1, 1, 1], [2, 2, 2], [4, 3, 2, 1, 1]])
def test_copies_that_calibrate_shrink_p_values_by_the_stated_factor_and_no_more(sizes: list[int]) -> None:
    """Every order of the families and one null document, by enumeration."""
    n, families = sum(sizes), len(sizes)
    family = np.concatenate([np.repeat(np.arange(families), sizes), np.arange(families, families + 9)])
    roles = {"unseen": np.arange(n), "audit": np.arange(n, n + 9)}
    selection = SelectionConfig(name="a", detectors=["x"])
    scores = Scores({"x": np.arange(n + 9.0)}, np.arange(n + 9), family=family)
    (verdict,) = answer_all([selection], scores, roles, 0, 0)  # type: ignore[arg-type]
    near = near_duplicates_diagnostic(
        AnswerFacts(
            selection=selection,
            answer=verdict.answer,
            offers=TEXTS.offers,
            near={"audit": copies([1] * 9), "unseen": copies(sizes)},
        )
    )
    assert near is not None
    sentence = near.sentence
    (distinct, factor) = re.findall(
        r"rank as (\d+) distinct documents, so .* by a factor of up to ([\d.]+);", sentence
    )[0]
    assert int(distinct) == families
    p = []
    for order in itertools.permutations(range(families + 1)):  # the null document is the last number
        above = order[: order.index(families)]
        p.append(Fraction(1 + sum(sizes[family] for family in above), n + 1))
    reached = max(Fraction(sum(value <= t for value in p), len(p)) / t for t in set(p))
    assert reached == Fraction(n + 1, families + 1), "reached at the smallest p-value"
    assert float(factor) == pytest.approx(float(reached), abs=0.005)


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize(("heads", "tosses"), [(12, 19), (10, 10), (2, 15), (8, 16), (14, 18)])
def test_the_signs_of_a_sentence_are_counted_against_the_coin_that_it_names(
    heads: int, tosses: int, draws: int
) -> None:
    result, fair = sign_symmetry(np.r_[np.ones(heads), -np.ones(tosses - heads)], draws), 1 / (draws + 1)
    exact = min(1.0, 2 * min(binom.cdf(heads, tosses, fair), binom.sf(heads - 1, tosses, fair)))
    (p,) = re.findall(r"\(p = ([\d.e-]+)\)", result.sentence)
    assert (result.p_value, float(p)) == (pytest.approx(exact), pytest.approx(exact, rel=0.05))
    assert (
        (float(p) < 0.01) == (result.outcome == "failed") == (f": of all {heads / tosses:.0%} are" in result.sentence)
    )


@pytest.mark.parametrize("repeated", [1, 2])
def test_ids_that_repeat_end_a_run_exactly_where_the_sentence_says_so(tmp_path: Path, repeated: int) -> None:
    """The run stops above its budget: of 90 + 10 documents more than one."""
    ids = [*(f"a{i}" for i in range(90 - repeated)), *(f"a{i}" for i in range(repeated))]
    plan = planned(tmp_path, list(map(text, range(90))), list(map(text, range(100, 110))), audit_ids=ids)
    sentence = check_documents(plan, RUN).duplicates.sentence
    assert ("the run would end without an answer" in sentence) == (repeated > 0.01 * 100)


def test_of_a_sample_it_is_not_said_that_a_run_would_end(tmp_path: Path) -> None:
    ids = [f"a{i // 2}" for i in range(60)]
    plan = planned(tmp_path, list(map(text, range(60))), list(map(text, range(300, 320))), audit_ids=ids)
    some = check_documents(plan, Effort(30_000, 10))
    assert not some.whole
    assert some.duplicates.count > 0
    assert "error_budget 0.01 allows fewer: if the others are like these, the run would end" in some.duplicates.sentence


ALPHAS = [Fraction(1, 10), Fraction(1, 4), Fraction(1, 2)]
HALF = Fraction(1, 2)
DELTA = Fraction(1, 10)
PLUGINS = {"bh", "by", "ebh", "storey", "right_boundary", "bky", "quantile", "ptdi", "kernel"}


def outcomes(ranks: int, m: int) -> Iterator[np.ndarray]:
    """Every way in which m documents can spread over the ranks."""
    for cuts in itertools.combinations(range(m + ranks - 1), ranks - 1):
        yield np.diff([-1, *cuts, m + ranks - 1]) - 1


@pytest.mark.parametrize("alpha", ALPHAS, ids=str)
@pytest.mark.parametrize("delta", [None, DELTA], ids=["pooled", "conditional"])
@pytest.mark.parametrize("procedure", sorted(PLUGINS & set(PROCEDURES)))
def test_no_outcome_selects_fewer_than_is_said(procedure: str, delta: Fraction | None, alpha: Fraction) -> None:
    for n, m in ((4, 4), (6, 3), (3, 6), (9, 2), (20, 2)):
        grid = Grid.uniform(n) if delta is None else simes_grid(n, delta)
        rule = Rule(PROCEDURES[procedure], alpha, delta)
        sizes, factors = set(), set()
        for counts in outcomes(n + 1, m):
            decision = decide(procedure, RankCounts(counts, grid), alpha)
            uncapped = rule.procedure.factor.uncapped
            share = float(decision.factor) if uncapped else decision.null_proportion
            factors.add(decision.factor)
            if decision.n_selected:
                sizes.add(decision.n_selected)
                assert decision.n_selected >= fewest_selectable(rule, n, m, decision.factor)
                for at in (HALF, Fraction(1)):
                    if share >= at:
                        assert decision.n_selected >= fewest_selectable(rule, n, m, factor_at(rule, m, at))
        assert min(sizes, default=m + 1) >= min(m + 1, fewest_at_best(rule, n, m))
        if uncapped and n == 20 and delta is None:  # enough p-values for every lambda
            assert rule.procedure.factor.least is not None
            assert min(factors) == rule.procedure.factor.least(rule, n, m)
        if procedure in ("bh", "by", "ebh"):
            assert min(sizes, default=m + 1) == min(m + 1, fewest_selectable(rule, n, m))


def test_the_fewest_at_best_are_those_of_the_smallest_estimates() -> None:
    names = "storey", "right_boundary", "bky", "quantile", "ptdi", "kernel", "known_members", "ptdi_known_members"
    rules = [Rule(PROCEDURES[name], Fraction(1, 1_000)) for name in names]
    assert [fewest_at_best(rule, 19, 1_000) for rule in rules] == [100, 56, 51, 50, 50, 550, 1, 1]  # ceil(50,000 x)
    assert (factor_at(rules[2], 1_000, HALF), fewest_at_best(rules[0], 1, 1_000)) == (Fraction(1_001, 2_000), 1_000)
    assert known_needed(Rule(PROCEDURES["bh"], HALF), 1, 1) == 1


@pytest.mark.parametrize(
    "settings", [{"calibration": "conditional", "alpha": 1e-25}, {"procedure": "ebh", "alpha": 1e-7}]
)
def test_a_very_small_alpha_gets_an_answer(settings: dict[str, Any]) -> None:
    assert seenset.select([9.0, 9.0, 1.5], unseen=[1.0, 2.0, 3.0], **settings).summary.n_selected == 0


def test_a_plan_with_conditional_p_values_counts_what_they_take(tmp_path: Path) -> None:
    planned = outlook(tmp_path, known=1_000, calibration="conditional", alpha=0.1)
    (taken,) = re.findall(r"\. With ([\d,]+) unseen documents as few", planned["sentence"])
    needed = int(taken.replace(",", ""))
    assert 4_000 < needed < 5_000
    for known, enough in ((needed, True), (needed - 1, False)):
        assert (minimum_selectable(simes_grid(known, DELTA), 200, Fraction(1, 10)) <= 2) == enough


FUSED: list[dict[str, Any]] = [
    {"procedure": "adadetect", "learn": "split", "detectors": ["loss", "zlib"]},
    {"procedure": "td4eval", "detectors": ["loss", "zlib"], "reconformal": True},
]


@pytest.mark.parametrize("selection", FUSED, ids=["adadetect", "reconformal"])
def test_where_half_of_the_documents_calibrate_every_count_is_of_that_half(
    run: RunFacts, tmp_path: Path, selection: dict[str, Any]
) -> None:
    settings = {key: value for key, value in selection.items() if key != "detectors"}
    said = limit_of(terms_of(run, asked(9, 230, detectors=2, **settings)))

    def half(known: int) -> int:
        return int((~halves(np.arange(known), 0)).sum())

    check_limit(said, 230, lambda known, strongest: selected("bh", half(known), 230, strongest, Fraction(1, 10)))
    assert (bool(said["half"]), said["n"], said["p"]) == (True, half(9), half(9) + 1)
    planned = outlook(tmp_path, known=100, **selection)
    assert planned["sentence"].startswith(
        "With 50 unseen documents to calibrate on, half of those that are known, and 200 to judge, the shortest "
        "possible list has 40 documents."
    )
    assert (
        "With 1,997 unseen documents, half of which calibrate, as few as 1% of the audited documents can"
        in planned["sentence"]
    )
    rng = np.random.default_rng(0)
    answer = verdict_of(rng.normal(size=(100, 2)), rng.normal(size=(200, 2)), **settings).answer
    assert resolution_of(answer).sentence == planned["sentence"]


def test_an_answer_says_of_which_share_of_nulls_its_figures_are() -> None:
    rng = np.random.default_rng(1)
    audit = np.concatenate([rng.normal(size=(100, 1)), rng.normal(3.0, size=(100, 1))])
    answer = verdict_of(rng.normal(size=(100, 1)), audit, procedure="storey").answer
    resolution = resolution_of(answer)
    assert f"at an estimated null share of {answer.factor:.3g}, the shortest" in resolution.sentence
    assert resolution.minimum_selectable == minimum_selectable(100, 200, Fraction(1, 10), Fraction(repr(answer.factor)))
    plain = resolution_of(verdict_of(rng.normal(size=(100, 1)), audit, procedure="bh").answer)
    assert "share of nulls" not in plain.sentence


def test_the_plan_of_an_estimating_procedure_says_what_holds_at_a_share_of_1(
    tmp_path: Path,
) -> None:
    planned = outlook(tmp_path, procedure="storey")
    assert (
        "the length of the shortest possible list depends on the estimated null share: 20 at a share of 1, 10 at 0.5, "
        "never fewer than 1. With 999 unseen documents as few as 1% of the audited documents can be selected; fewer "
        "suffice if part of the audited documents were trained on." in planned["sentence"]
    )
    assert (planned["minimum_selectable"], planned["minimum_at_best"], planned["outcome"]) == (20, 1, "inconclusive")
    assert "null share" not in outlook(tmp_path, procedure="bh")["sentence"]
    few = outlook(tmp_path, known=5, procedure="storey")
    assert few["minimum_selectable"] > 200
    assert few["outcome"] == "inconclusive", "an estimate can be as small as it takes"


def outlook(
    tmp_path: Path, known: int | None = 100, audited: int = 200, seen: int | None = None, **selection: Any
) -> dict[str, Any]:
    rows = {
        role: [{"text": f"{role} {i}", "group": "a"} for i in range(count)]
        for role, count in (("audit", audited), ("unseen", known), ("seen", seen))
        if count is not None
    }
    corpus = write_corpus(tmp_path, rows, group="group")
    signed = selection.get("procedure") == "ktd"
    asked = {"name": "a", "detectors": ["min_k_plus_plus" if signed else "loss"], "alpha": 0.1, **selection}
    config = build_config({"run": "run", "model": {"path": "m"}, "corpus": corpus, "selections": [asked]})
    found: dict[str, Any] = forecast(make_plan(config), {"dtype": "float32"})["selections"][0]
    return found


def test_an_ordinary_audit_is_planned_without_a_warning(tmp_path: Path) -> None:
    usual = outlook(tmp_path, procedure="bh")
    assert usual["minimum_selectable"] == 20  # 200 / (.1 * 101) = 19.8
    assert outlook(tmp_path, procedure="td4eval")["sentence"] == usual["sentence"], "of one detector"
    assert outlook(tmp_path, procedure="by")["minimum_selectable"] == 117  # times 1 + 1/2 + ... + 1/200 = 5.878
    assert usual["outcome"] == "inconclusive", "10% of the audited documents: a number to know"
    assert "With 999 unseen documents as few as 1% of the audited documents can be selected." in usual["sentence"]
    assert outlook(tmp_path, known=1000, procedure="bh")["outcome"] == "passed"


def test_an_audit_that_cannot_select_anything_is_warned_of(
    tmp_path: Path, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_audit(tmp_path, tiny_model_folder)
    for alpha, mark in ((0.2, ""), (0.001, "warning: ")):
        shown = " ".join(here(capsys, "plan", path, "--set", f"selections.0.alpha={alpha}")[0].split())
        assert f"alpha {alpha}): {mark}With 40 unseen documents to calibrate on and 60 to judge, " in shown
    assert "to judge, nothing can be selected: the shortest possible list would have" in shown


def test_a_knockoff_selection_is_answered_without_a_word_of_calibration_documents(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    answer = verdict_of(rng.normal(size=(40, 1)), rng.normal(size=(120, 1)), procedure="ktd", alpha=0.2).answer
    resolution = resolution_of(answer)
    assert resolution.sentence == "The shortest possible list of the knockoff filter has 5 documents."
    assert resolution.calibration_for_1_percent is None
    found = outlook(tmp_path, known=None, procedure="ktd")
    assert found["outcome"] == "passed"
    assert "list of the knockoff filter has 10 documents." in found["sentence"]
    beyond = outlook(tmp_path, known=None, procedure="ktd", alpha=0.001)
    assert beyond["outcome"] == "failed"
    assert "has 1,000 documents and only 200 are audited, so nothing can be selected" in beyond["sentence"]


def test_the_time_is_a_guess_from_the_number_of_parameters(tmp_path: Path, tiny_model_folder: Path) -> None:
    about = describe_model(ModelConfig(path=str(tiny_model_folder)))
    corpus = write_corpus(tmp_path, {"audit": [f"some words {i}" for i in range(50)]})
    described = {"run": "run", "model": {"path": str(tiny_model_folder)}, "corpus": corpus}
    plan = make_plan(build_config({**described, "detectors": ["loss"]}))
    small, large = (forecast(plan, {**about, "parameters": parameters}) for parameters in (10**6, 10**9))
    assert small["estimated_seconds_one_worker"] > 0
    assert large["estimated_seconds_one_worker"] > 20 * small["estimated_seconds_one_worker"]
    assert small["estimated_from"] == "a matrix product on it"
    unknown = forecast(plan, {**about, "parameters": None})
    assert unknown["estimated_seconds_one_worker"] is None
    assert unknown["estimated_from"] is None


def test_a_computed_share_is_rounded_up_to_three_digits_and_a_written_one_is_kept() -> None:
    written = [at_most(share) for share in (0.00123, 0.123456789012, 0.1234567890123, 0.1 + 0.2, 0.1 / 3)]
    assert written == [Fraction(one) for one in ("0.00123", "0.123456789012", "0.124", "0.301", "0.0334")]
