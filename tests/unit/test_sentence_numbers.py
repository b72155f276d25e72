"""Every number that a sentence names, held against counts: what a reader would find who tried it."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from report_run import build_run
from test_fused_selections import verdict_of
from test_plan import outlook
from test_preflight_checks import planned, text

import seenset
from pipeline.audit.blind import blind_diagnostic
from pipeline.audit.density_weights import weighted_diagnostic, weighting_diagnostic
from pipeline.audit.dependence import near_copies_diagnostic
from pipeline.audit.halvings import LEAST, Blind
from pipeline.audit.preflight import RUN, Effort, check_documents
from pipeline.audit.summary import NearCopies, Summary
from pipeline.audit.verdict import LEVEL, BlockTest, MemberCount
from pipeline.report.facts import RunFacts, SelectionFacts, read_facts
from pipeline.report.wording import verdict as wording
from pipeline.report.wording.bounds import bound_text, sureness
from pipeline.report.wording.selection import answer_text
from pipeline.selection.conformal import RankCounts, halves
from pipeline.selection.knockoff import sign_symmetry
from pipeline.selection.procedures.bound import terms_of_bound
from pipeline.selection.procedures.ktd import filter_terms
from pipeline.selection.procedures.record import decide
from pipeline.selection.promises import beside, decimal, percentage

ALPHA = 0.1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFacts:
    """A run that the sentences are of."""
    return read_facts(build_run(tmp_path_factory.mktemp("numbers")))


def terms_of(run: RunFacts, summary: Summary) -> str:
    """What the report says below an answer's first sentence."""
    return answer_text(run, SelectionFacts(summary.name, summary, None, None, ())).terms


def table_of(values: np.ndarray, detectors: int, **columns: Any) -> pa.Table:
    return pa.table({**{f"d{index}": values for index in range(detectors)}, **columns})


def asked(n: int, m: int, strongest: int = 0, detectors: int = 1, seen: int = 0, **settings: Any) -> Summary:
    """The answer where so many audited documents score higher than all others, and the rest lower than all."""
    audit = np.full(m, -1.0)
    audit[:strongest] = 1e6
    known = {"unseen": table_of(np.arange(n, dtype=float), detectors)}
    if seen:
        known["seen"] = table_of(np.full(seen, float(n)), detectors)
    return seenset.select(table_of(audit, detectors), **known, alpha=ALPHA, **settings).summary


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
    """The numbers of the sentence that says why nothing could be selected."""
    matched = LIMIT.search(text)
    assert matched is not None, text
    parts = matched.groupdict()
    return {key: int(value.replace(",", "")) if value and value[0].isdigit() else value for key, value in parts.items()}


@pytest.mark.parametrize("m", [40, 230])
@pytest.mark.parametrize("procedure", ["bh", "by", "ebh"])
def test_a_report_says_why_nothing_could_be_selected_and_what_would_change_it(
    run: RunFacts, procedure: str, m: int
) -> None:
    summary = asked(4, m, procedure=procedure)
    said = limit_of(terms_of(run, summary))
    assert (said["n"], said["m"], said["ever"], said["half"]) == (4, m, "ever have been selected", None)
    answer = seenset.select(np.full(m, 9.0), unseen=np.arange(4.0), procedure=procedure, alpha=ALPHA)
    assert answer.p_values.min() == 1 / said["p"]
    alpha, few = Fraction(1, 10), max(1, m // 100)
    assert said["size"] == ("one in a hundred" if few > 1 else "a single one")
    assert said["needed"] > m
    assert selected(procedure, 4, m, m, alpha) == 0, "not even if all stand out"
    for known, strongest in ((said["least"], m), (said["good"], few)):
        assert selected(procedure, known, m, strongest, alpha) == strongest
        assert selected(procedure, known - 1, m, strongest, alpha) == 0


@pytest.mark.parametrize("procedure", ["storey", "bky", "quantile", "ptdi", "kernel", "known_members"])
def test_the_same_holds_at_the_share_of_nulls_that_was_estimated(run: RunFacts, procedure: str) -> None:
    m = 230
    summary = asked(4, m, procedure=procedure, seen=9 if procedure == "known_members" else 0)
    said = limit_of(terms_of(run, summary))
    assert said["ever"].startswith("have been selected (as estimated, ")
    assert summary.factor is not None
    alpha = Fraction(1, 10) / Fraction(repr(summary.factor))  # which the share of nulls stretches alpha to
    assert said["needed"] == math.ceil(m / 5 / alpha)
    assert selected("bh", 4, m, m, alpha) == 0
    for known, strongest in ((said["least"], m), (said["good"], m // 100)):
        assert selected("bh", known, m, strongest, alpha) == strongest
        assert selected("bh", known - 1, m, strongest, alpha) == 0


@pytest.mark.parametrize(
    "settings", [{"procedure": "adadetect"}, {"procedure": "td4eval", "reconformal": True}], ids=["adadetect", "strict"]
)
def test_where_half_of_the_documents_calibrate_the_report_counts_all_that_it_takes(
    run: RunFacts, settings: dict[str, Any]
) -> None:
    m, alpha = 230, Fraction(1, 10)
    said = limit_of(terms_of(run, asked(9, m, detectors=2, **settings)))
    assert said["half"]
    for known, strongest in ((said["least"], m), (said["good"], m // 100)):
        for count, enough in ((known, strongest), (known - 1, 0)):
            calibrating = int((~halves(np.arange(count), 0)).sum())
            assert selected("bh", calibrating, m, strongest, alpha) == enough
    calibrating = int((~halves(np.arange(9), 0)).sum())
    assert (said["n"], said["p"]) == (calibrating, calibrating + 1)


@pytest.mark.parametrize("detectors", [1, 2])
def test_td4eval_takes_what_the_report_says(run: RunFacts, detectors: int) -> None:
    m = 230
    said = limit_of(terms_of(run, asked(4, m, procedure="td4eval", detectors=detectors)))
    for known, strongest in ((said["least"], m), (said["good"], m // 100)):
        for count, enough in ((known, strongest), (known - 1, 0)):
            values = np.stack([np.arange(count, dtype=float)] * detectors, axis=1)
            audit = np.full((m, detectors), -1.0)
            audit[:strongest] = 1e6
            answer = verdict_of(values, audit, procedure="td4eval", alpha=ALPHA)
            assert answer.selected.sum() == enough


FEWEST = re.compile(
    r"calibration the shortest possible list has ([\d,]+) documents(?: \(as estimated, [^)]*\))?: fewer"
)


def fewest_of(text: str) -> int:
    matched = FEWEST.search(text)
    assert matched is not None, text
    return int(matched[1].replace(",", ""))


@pytest.mark.parametrize(
    "settings",
    [
        *({"procedure": name, "calibration": how} for name in ("bh", "by", "ebh") for how in ("pooled", "conditional")),
        {"procedure": "adadetect", "seen": 40},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_an_empty_answer_says_the_fewest_that_there_could_have_been(run: RunFacts, settings: dict[str, Any]) -> None:
    n, m = 400, 90
    fewest = fewest_of(terms_of(run, asked(n, m, **settings)))
    assert 1 < fewest <= m
    assert asked(n, m, fewest, **settings).n_selected == fewest
    assert asked(n, m, fewest - 1, **settings).n_selected == 0


@pytest.mark.parametrize("kind", ["by_group", "weighted"])
def test_the_fewest_of_groups_and_of_weighted_documents_are_those_of_the_sentence(run: RunFacts, kind: str) -> None:
    """The large group's smallest p-value is 1/181; the audited documents weigh as much as nine of the others."""
    n, m = 200, 150
    columns: dict[str, Any] = {"group": ["few"] * 20 + ["many"] * 180}
    audited: dict[str, Any] = {"group": ["many"] * m}
    if kind == "weighted":
        columns, audited = {"weight": np.r_[np.full(20, 9.0), np.ones(180)]}, {"weight": np.full(m, 1.0)}
    unseen = table_of(np.arange(n, dtype=float), 1, **columns)

    def answer(strongest: int) -> Summary:
        scores = np.full(m, -1.0)
        scores[:strongest] = 1e6
        audit = table_of(scores, 1, **audited)
        return seenset.select(audit, unseen, procedure="bh", alpha=ALPHA, calibration=kind).summary  # type: ignore[arg-type]

    fewest = fewest_of(terms_of(run, answer(0)))
    assert 1 < fewest <= m
    assert answer(fewest).n_selected == fewest
    assert answer(fewest - 1).n_selected == 0


def test_no_list_of_procedure_bound_is_shorter_than_the_report_says(run: RunFacts) -> None:
    n, m = 200, 90
    fewest = fewest_of(terms_of(run, asked(n, m, procedure="bound")))
    sizes = [asked(n, m, strongest, procedure="bound").n_selected for strongest in range(m + 1)]
    assert all(size == 0 or size >= fewest for size in sizes)
    assert max(sizes) == m


@pytest.mark.parametrize("count", [60, 200])
def test_a_plan_says_what_one_group_takes_and_of_few_documents_that_it_is_one(tmp_path: Path, count: int) -> None:
    texts = {"audit": count, "unseen": 5}
    corpus = {role: {"path": str(tmp_path / f"{role}.jsonl"), "group": "g"} for role in texts}
    for role, size in texts.items():
        rows = "".join(f'{{"text": "{role} {row}", "g": "a"}}\n' for row in range(size))
        (tmp_path / f"{role}.jsonl").write_text(rows)
    from pipeline.audit.description import build_config
    from pipeline.audit.forecast import forecast
    from pipeline.audit.plan import make_plan

    selection = {"name": "a", "detectors": ["loss"], "alpha": ALPHA, "procedure": "bh", "calibration": "by_group"}
    config = build_config({"run": "r", "model": {"path": "m"}, "corpus": corpus, "selections": [selection]})
    sentence = forecast(make_plan(config), {"dtype": "float32"})["selections"][0]["sentence"]
    few = max(1, count // 100)
    smallest = "a single document" if few == 1 else "as few as 1% of the audited documents"
    matched = re.search(rf"With ([\d,]+) unseen documents of one group {smallest} can be selected\.", sentence)
    assert matched is not None, sentence
    known = int(matched[1].replace(",", ""))
    assert selected("bh", known, count, few, Fraction(1, 10)) == few
    assert selected("bh", known - 1, count, few, Fraction(1, 10)) == 0


def test_what_a_plan_says_of_a_list_of_procedure_bound_no_list_falls_short_of(tmp_path: Path) -> None:
    planned_for = outlook(tmp_path, known=200, procedure="bound", detectors=["loss"])
    (needed,) = re.findall(r"the shortest possible list has ([\d,]+) documents", planned_for["sentence"])
    for strongest in range(int(needed)):
        assert asked(200, 200, strongest, procedure="bound").n_selected == 0


# --- numbers that are held against a limit


@pytest.mark.parametrize("value", [0.5304, 0.5296, 0.53, 0.5500001, 0.55, 0.1234])
@pytest.mark.parametrize("limit", [0.53, 0.55])
def test_rounding_takes_no_number_to_the_other_side_of_its_limit(value: float, limit: float) -> None:
    shown = beside(value, limit)
    assert (float(shown) > limit) == (value > limit)
    assert (float(shown) < limit) == (value < limit)
    assert len(shown) <= 9
    if (round(value, 2) > limit, round(value, 2) < limit) == (value > limit, value < limit):
        assert shown == f"{value:.2f}", "with no more digits than it takes"


def test_an_interval_is_shown_on_the_side_of_the_limit_that_decided() -> None:
    """It was told: it would take at most 0.55 (99% interval 0.45 to 0.55)."""
    for low, high in itertools.product((0.45, 0.5299, 0.53, 0.5301), (0.5499, 0.55, 0.5501, 0.5549)):
        sentence = blind_diagnostic(Blind(0.53, low, high, 100, 100), "unseen").sentence
        ends = re.findall(r"99% interval ([\d.]+) to ([\d.]+);", sentence)
        shown = Blind(0.53, *map(float, ends[0]), 100, 100)
        assert shown.outcome == Blind(0.53, low, high, 100, 100).outcome


def test_a_p_value_of_the_verdict_is_shown_on_its_side_of_the_level() -> None:
    """It was told: not shown, p = 0.05, where p <= 0.05 shows it."""
    common = {"p_values": [], "permutations": 9_999, "auc": 0.5, "blocks": "family", "n_mixed": 0, "differences": {}}
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
    assert summary.bound is not None
    count = MemberCount(selection="a", detectors=["loss"], confidence=confidence, at_least=3, n_audit=9, supported=True)
    exact = 100 * Fraction(repr(confidence))
    told = [
        sureness(summary.bound),
        bound_text(summary.model_copy(update={"supported": None})) or "",
        wording.counted_phrase(count, sampled=False, checked=True, bounded=True)[0],
        terms_of_bound(Fraction(repr(confidence))).promise,
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
    assert [decimal(Fraction(text)) for text in ("0.05", "1", "100", "0.0000001", "99.99999")] == [
        "0.05",
        "1",
        "100",
        "0.0000001",
        "99.99999",
    ]
    assert percentage(Fraction(1, 8)) == "12.5%"


# --- near-duplicates, weights, signs


def copies(sizes: list[int]) -> NearCopies:
    total = sum(sizes)
    return NearCopies(
        n_documents=total,
        whole=True,
        n_copies=sum(size for size in sizes if size > 1),
        n_families=sum(size > 1 for size in sizes),
        largest=max(sizes),
        n_distinct=len(sizes),
        effective=round(total**2 / sum(size**2 for size in sizes), 1),
        families=[],
    )


@pytest.mark.parametrize("sizes", [[3, 1, 1, 1], [2, 2, 2], [5, 1], [4, 3, 2, 1, 1], [1, 1, 1, 2]])
def test_copies_that_calibrate_shrink_p_values_by_the_factor_of_the_sentence_and_no_more(sizes: list[int]) -> None:
    """Every order of the families and one null document, by enumeration."""
    n, families = sum(sizes), len(sizes)
    sentence = near_copies_diagnostic("bh", None, "unseen", copies([1] * 9), copies(sizes)).sentence
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


def test_the_independent_documents_of_the_sentence_are_what_a_mean_is_worth() -> None:
    sizes = [20] * 3 + [5] * 8 + [1] * 20
    sentence = near_copies_diagnostic("storey", 7, "unseen", copies(sizes), copies([1] * 99)).sentence
    (worth,) = re.findall(r"count as about (\d+) independent documents, too few for storey", sentence)
    assert "The guarantee of bh holds with near-duplicates among the audited documents; bh selects 7." in sentence
    runs, family = 4_000, np.repeat(np.arange(len(sizes)), sizes)
    means = np.random.default_rng(0).normal(size=(runs, len(sizes)))[:, family].mean(axis=1)
    assert 1 / means.var() == pytest.approx(int(worth), rel=4 * math.sqrt(2 / runs) + 0.5 / int(worth))


def test_the_effective_number_of_weighted_documents_is_what_their_mean_is_worth() -> None:
    weights = np.r_[np.full(30, 1.0), np.full(30, 4.0), 30.0]
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    sentence = weighting_diagnostic(effective, weights.size, "unseen").sentence
    (told,) = re.findall(r"the 61 unseen documents count as much as ([\d.]+) of equal weight", sentence)
    runs = 4_000
    means = np.random.default_rng(0).normal(size=(runs, weights.size)) @ (weights / weights.sum())
    assert 1 / means.var() == pytest.approx(float(told), rel=4 * math.sqrt(2 / runs))
    for number, few in ((49.96, True), (50.0, False)):
        sentence = weighting_diagnostic(number, 61, "unseen").sentence
        (told,) = re.findall(r"as much as ([\d.]+) of equal weight", sentence)
        assert (float(told) < 50) == few == ("fewer than 50" in sentence)


def tail(heads: range, tosses: int, share: float) -> float:
    return sum(math.comb(tosses, h) * share**h * (1 - share) ** (tosses - h) for h in heads)


@pytest.mark.parametrize(("heads", "tosses"), [(27, 39), (12, 19), (31, 45), (10, 10)])
def test_the_signs_of_a_sentence_are_counted_against_the_coin_that_it_names(heads: int, tosses: int) -> None:
    for draws in (1, 4):
        w = np.concatenate([np.ones(heads), -np.ones(tosses - heads)])
        result = sign_symmetry(np.random.default_rng(0).permutation(w), draws)
        groups = max(1, min(10, tosses // 10))
        fair = 1 / (draws + 1)
        (p,) = re.findall(r"\(p = ([\d.e-]+)\)", result.sentence)
        if groups == 1:
            tails = tail(range(heads + 1), tosses, fair), tail(range(heads, tosses + 1), tosses, fair)
            assert float(p) == pytest.approx(min(1.0, 2 * min(tails)), rel=0.05)
        assert (float(p) < 0.01) == (not result.ok)
        if not result.ok:
            continue
        share, low, high = (int(x) / 100 for x in re.findall(r"(\d+)%", result.sentence.replace("(95%", "("))[:3])
        assert share == pytest.approx(heads / tosses, abs=0.005)
        within = 0.006
        if low:
            assert (
                tail(range(heads, tosses + 1), tosses, low - within)
                < 0.025
                < tail(range(heads, tosses + 1), tosses, low + within)
            )
        if high < 1:
            assert tail(range(heads + 1), tosses, high + within) < 0.025 < tail(range(heads + 1), tosses, high - within)


@pytest.mark.parametrize("draws", [2, 4, 6])
def test_exchangeable_paraphrases_give_a_text_the_odds_that_the_assumption_names(draws: int) -> None:
    orders = list(itertools.permutations(range(draws + 1)))
    wins = sum(order[0] == draws for order in orders)
    assert f"higher than all {draws} of its paraphrases with a probability of at most 1/{draws + 1}," in (
        filter_terms(draws).assumption
    )
    assert Fraction(wins, len(orders)) == Fraction(1, draws + 1)


# --- documents


@pytest.mark.parametrize("repeated", [1, 2])
def test_ids_that_repeat_end_a_run_exactly_where_the_sentence_says_so(tmp_path: Path, repeated: int) -> None:
    """The run stops above its budget: of 90 + 10 documents more than one."""
    ids = [*(f"a{i}" for i in range(90 - repeated)), *(f"a{i}" for i in range(repeated))]
    plan = planned(tmp_path, list(map(text, range(90))), list(map(text, range(100, 110))), audit_ids=ids)
    sentence = check_documents(plan, RUN).duplicates.sentence
    assert ("the run would end without an answer" in sentence) == (repeated > 0.01 * 100)


def test_of_a_sample_it_is_not_said_that_a_run_would_end(tmp_path: Path) -> None:
    """The repeated ids of the shards that were read say nothing certain of the others."""
    ids = [f"a{i // 2}" for i in range(60)]
    plan = planned(tmp_path, list(map(text, range(60))), list(map(text, range(300, 320))), audit_ids=ids)
    some = check_documents(plan, Effort(30_000, 10))
    assert not some.whole
    assert some.duplicates.count > 0
    assert "error_budget 0.01 allows fewer: if the others are like these, the run would end" in some.duplicates.sentence


def test_as_many_documents_as_a_weighted_test_is_said_to_take_are_enough_in_every_split() -> None:
    sentence = weighted_diagnostic(None, "unseen").sentence
    (count,) = map(int, re.findall(r"at least (\d+) documents of each kind are needed", sentence))
    chosen = [
        int(halves(np.random.default_rng(seed).integers(0, 2**62, 2 * count), seed)[:count].sum())
        for seed in range(500)
    ]
    assert min(min(half, count - half) for half in chosen) >= LEAST
    fewer = [
        int(halves(np.random.default_rng(seed).integers(0, 2**62, count), seed)[: count // 2].sum())
        for seed in range(500)
    ]
    assert min(min(half, count // 2 - half) for half in fewer) < LEAST, "half as many are often too few"
