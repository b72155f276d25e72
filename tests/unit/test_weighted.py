"""Calibration documents that differ from the audited: weights by words, and what they leave and repair."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from finished import score_run
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import write_audit

import seenset
from pipeline.audit.blind import blind, blind_diagnostic
from pipeline.audit.density_weights import (
    blind_after,
    blind_weighted,
    effective_number,
    fit_ratio,
    weighted_diagnostic,
    weighting_diagnostic,
)
from pipeline.audit.description import load_config
from pipeline.audit.halvings import Compared
from pipeline.audit.scored import each_in_turn, read_scored
from pipeline.audit.select import select_all
from pipeline.audit.summary import Summary, unsettled
from pipeline.audit.words import word_counts
from pipeline.config.audit import AuditConfig
from pipeline.errors import UserError
from pipeline.selection.conformal import RankCounts, calibrate, ranks, tie_draws
from pipeline.selection.weighted import (
    LEVELS,
    PRECISION,
    calibrate_weighted,
    least_ranks,
    ranks_by_weight,
    weight_levels,
    weighted_grid,
    weighted_resolution,
)

HALF = Fraction(1, 2)
WORDS = [f"word{i}" for i in range(300)]


def texts(seed: int, count: int, topic: float, common: int = 60, words: int = 300) -> list[str]:
    """Texts of 30 words; a share `topic` of them comes from the first `common` of 300 words, or as many."""
    rng = random.Random(seed)
    return [
        " ".join(rng.choice(WORDS[: common if rng.random() < topic else words]) for _ in range(30)) + f" {seed}x{i}"
        for i in range(count)
    ]


def sample(known: Sequence[str], audit: Sequence[str]) -> tuple[Any, np.ndarray, np.ndarray]:
    audited = np.r_[np.zeros(len(known), dtype=bool), np.ones(len(audit), dtype=bool)]
    return word_counts([*known, *audit]), audited, np.random.default_rng(1).integers(-(2**62), 2**62, audited.size)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 60),
    direction=st.sampled_from(["members", "clean"]),
    tied=st.booleans(),
)
def test_a_weighted_p_value_is_that_of_its_definition_rounded_up_by_less_than_a_thousandth(
    seed: int, n: int, direction: Any, tied: bool
) -> None:
    rng = np.random.default_rng(seed)
    known, audit = rng.normal(size=n), rng.normal(size=20)
    if tied:
        known, audit = known.round(), audit.round()
    w, v = (weight_levels(rng.lognormal(size=size), 8.0) for size in (n, 20))
    calibration = calibrate_weighted(known, w)
    p = calibration.grid.values[ranks_by_weight(audit, v, calibration, direction) - 1]
    for score, weight, value in zip(audit, v, p, strict=True):
        beyond = w[known >= score] if direction == "members" else w[known <= score]
        exact = (beyond.sum() + weight) / (w.sum() + weight)
        assert exact <= value <= min(1.0, exact * (1 + 2.0**-PRECISION))
    assert calibration.effective == pytest.approx(effective_number(w))


def test_equal_weights_are_no_weights() -> None:
    rng = np.random.default_rng(2)
    known, audit, keys = rng.normal(size=99).round(1), rng.normal(size=500).round(1), rng.integers(-(2**60), 2**60, 500)
    calibration = calibrate_weighted(known, weight_levels(np.ones(99), 1.0))
    weights = weight_levels(np.ones(500), 1.0)
    for direction in ("members", "clean"):
        p = calibration.grid.values[ranks_by_weight(audit, weights, calibration, direction) - 1]
        draws = tie_draws(keys, 5)
        tied = calibration.grid.values[ranks_by_weight(audit, weights, calibration, direction, draws) - 1]
        discrete = ranks(audit, calibrate(known), direction, draws) / 100
        assert (np.abs(tied - discrete) <= 0.0101).all()
        assert tied.mean() < p.mean()
    assert weight_levels(np.array([0.0, 1.0, 2.5, 9.0]), 4.0).tolist() == [1, 1 << 18, 655_360, 1 << 20]
    assert weighted_grid(1, 1).size == 2 * 1024 + 1
    for total in (1, 2, 3, 4):
        assert weighted_grid(total, 1).values[0] < 1 / (total + 1) <= 2 * weighted_grid(total, 1).values[0]


@pytest.mark.parametrize(("alpha", "factor"), [(Fraction(1, 20), Fraction(1)), (HALF, Fraction(3, 10)), (HALF, HALF)])
@pytest.mark.parametrize("m", [1, 7, 100, 200, 250])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_as_few_documents_can_be_selected_as_their_smallest_p_values_allow_and_1_percent_takes_so_many_that_calibrate(
    m: int, spread: float, alpha: Fraction, factor: Fraction
) -> None:
    known, audit = (weight_levels(np.exp(spread * np.random.default_rng(m).normal(size=n)), 20.0) for n in (9, m))
    calibration = calibrate_weighted(np.arange(9.0), known)
    places = np.sort(least_ranks(audit, calibration))
    needs = [math.ceil(calibration.grid.p(int(place)) * m * factor / alpha) for place in places]
    least = RankCounts(np.bincount(places - 1, minlength=calibration.grid.size), calibration.grid)
    fewest, needed = weighted_resolution(least, alpha, factor)
    assert fewest == min((r for r in range(1, m + 1) if needs[r - 1] <= r), default=max(m + 1, needs[0]))
    few = max(1, m // 100)
    level = float(alpha * few / (factor * m))
    assert needed == pytest.approx(max(1, 9 * (1 / level - 1) * np.sort(audit)[few - 1] / known.sum()), rel=2e-3, abs=1)
    without_scores = RankCounts.empty(calibration.grid).with_quarantined(m)
    assert weighted_resolution(without_scores, alpha, factor) == (math.ceil(m * factor / alpha), 1 if level >= 1 else 9)


def test_a_draw_takes_from_almost_none_to_all_of_the_documents_with_an_equal_score() -> None:
    calibration = calibrate_weighted(np.array([0.0] * 4 + [1, 1, 2]), np.full(7, 1 << 20, dtype=np.int64))
    scores, weights = np.ones(2), np.full(2, 1 << 20, dtype=np.int64)
    for draws, p in ((None, 1 / 2), (np.array([2**32 - 1, 0], dtype=np.uint64), pytest.approx(1 / 8, rel=1e-3))):
        places = ranks_by_weight(scores, weights, calibration, "members", draws)
        assert calibration.grid.values[places - 1].tolist() == [1 / 2, p]


def test_weights_repair_a_shift_that_words_show_and_a_gap_that_nothing_bridges_is_not_called_repaired() -> None:
    known, audit = texts(1, 400, 0.0, 8, 40), texts(2, 400, 0.12, 8, 40)
    before = blind(known, audit, 0)
    words, audited, keys = sample(known, audit)
    weights = fit_ratio(words, audited, keys, 0).weigh([*known, *audit], keys)
    after = blind_after(words, Compared.of(audited), keys, 0)
    assert not before.ok
    assert after.auc < before.auc - 0.1
    assert 50 < effective_number(weights[~audited]) < 350
    assert weighted_diagnostic(after, "unseen").ok is not False
    shown = weighting_diagnostic(200.0, 900, "unseen", blind_diagnostic(before, "unseen"))
    assert shown.ok
    known, audit = texts(1, 300, 0.0), [f"{text} zzz yyy xxx" for text in texts(2, 300, 0.9)]
    words, audited, keys = sample(known, audit)
    weights = fit_ratio(words, audited, keys, 0).weigh([*known, *audit], keys)
    effective = effective_number(weights[~audited])
    after = weighted_diagnostic(blind_after(words, Compared.of(audited), keys, 0), "unseen")
    assert weighting_diagnostic(effective, 300, "unseen").ok is False or after.ok is False
    assert after.ok is not True


def test_the_test_after_weighting_is_not_fooled_by_the_documents_that_taught_the_weights() -> None:
    """Weights that repair little: tested on what taught them they look right, and held apart they do not."""
    known, audit = texts(1, 250, 0.0), texts(2, 250, 0.35)
    words, audited, keys = sample(known, audit)
    ratio = fit_ratio(words, audited, keys, 0)
    weights = np.minimum(ratio.odds(words, keys), ratio.largest)
    lenient = blind_weighted(words, Compared.of(audited), weights, 0)
    after = blind_after(words, Compared.of(audited), keys, 0)
    assert lenient[0] < after.auc - 0.05


def test_words_that_tell_nothing_weigh_nothing() -> None:
    effective = []
    for seed in range(6):
        words, audited, keys = sample(texts(10 + seed, 200, 0.2), texts(50 + seed, 200, 0.2))
        ratio = fit_ratio(words, audited, keys, seed)
        effective.append(effective_number(ratio.odds(words, keys)[~audited]) / 200)
    assert np.mean(effective) > 0.9


def test_too_few_documents_to_learn_from_or_to_test_weights_say_how_many_it_takes_and_no_other_remedy() -> None:
    words, audited, keys = sample(texts(1, 19, 0.2), texts(2, 50, 0.2))
    with pytest.raises(UserError, match=r"at least 20 calibration and 20 audited documents .*, got 19 and 50"):
        fit_ratio(words, audited, keys, 0)
    test = weighted_diagnostic(None, "unseen")
    assert (test.outcome, test.n_to_settle) == ("not tested", 80)
    assert unsettled(test) == (
        "Not checked: Whether words still tell the weighted unseen documents from the audited ones could not be tested"
        ": at least 80 documents of each kind are needed."
    )


def test_no_document_is_weighed_by_a_classifier_that_read_it() -> None:
    known, audit = texts(1, 100, 0.2), texts(2, 100, 0.2)
    words, audited, keys = sample(known, audit)
    ratio = fit_ratio(words, audited, keys, 3)
    odds = ratio.odds(words, keys)
    for place in (0, 5, 150):
        swapped = audited.copy()
        swapped[place] = ~swapped[place]  # had it been taught, its other label would change its weight
        again = fit_ratio(words, swapped, keys, 3).odds(words, keys)
        assert again[place] == odds[place]
        assert (again != odds).any()


def test_scores_in_memory_take_known_weights_and_say_that_nothing_is_proved() -> None:
    rng = np.random.default_rng(0)
    topic = {"unseen": rng.normal(size=2_000), "audit": rng.normal(0.5, size=500)}
    tables = {
        role: pa.table({"loss": x + rng.normal(size=x.size), "weight": np.exp(0.5 * x)}) for role, x in topic.items()
    }
    loss = tables["audit"]["loss"].to_numpy().copy()
    loss[:100] += 5
    audit = tables["audit"].set_column(0, "loss", pa.array(loss))
    found = seenset.select(audit, unseen=tables["unseen"], procedure="bh", alpha=0.2, calibration="weighted")
    weighting = found.summary.diagnostics.weighting
    assert found.selected[:100].sum() > 60
    assert weighting.effective == pytest.approx(effective_number(tables["unseen"]["weight"].to_numpy()), rel=1e-3)
    assert (found.summary.guarantee, found.summary.supported) == ("heuristic", None)
    scaled = audit.set_column(1, "weight", pc.multiply(audit["weight"], 7.0))
    known = tables["unseen"].set_column(1, "weight", pc.multiply(tables["unseen"]["weight"], 7.0))
    again = seenset.select(scaled, unseen=known, procedure="bh", alpha=0.2, calibration="weighted")
    assert (again.p_values == found.p_values).all()


def test_few_effective_documents_are_not_supported_and_a_missing_weight_is_named() -> None:
    rng = np.random.default_rng(0)
    weights = np.r_[np.full(10, 1.0), np.full(490, 1e-5)]
    unseen = pa.table({"loss": rng.normal(size=500), "weight": weights})
    audit = pa.table({"loss": rng.normal(size=50), "weight": np.ones(50)})
    with pytest.warns(seenset.UnsupportedWarning, match="count as much as 10.0 of equal weight: fewer than 50"):
        found = seenset.select(audit, unseen=unseen, procedure="bh", calibration="weighted")
    assert found.summary.supported is False
    with pytest.raises(UserError, match="needs a column weight, which the audit documents do not have"):
        seenset.select(audit.select(["loss"]), unseen=unseen, procedure="bh", calibration="weighted")


def described(
    tmp_path: Path, model: Path, audit: Sequence[str], unseen: Sequence[str], **selection: Any
) -> AuditConfig:
    chosen = {"name": "members", "detectors": ["loss"], "alpha": 0.3, "calibration": "weighted", **selection}
    settings = {"detectors": ["loss"], "selections": [chosen], "max_tokens": 16, "resources": {"shard_bytes": 6_000}}
    return load_config(str(write_audit(tmp_path, model, audit, unseen, **settings)))


def score(config: AuditConfig) -> Any:
    plan, store = score_run(config)
    return read_scored(store, plan.shards)


def answer(config: AuditConfig, scored: Any, order: Any = each_in_turn) -> tuple[Summary, dict[str, bytes]]:
    (summary,) = select_all(config, scored, None, order)
    folder = Path(config.run)
    names = [*folder.glob("weights/**/*.parquet"), *folder.glob("selection/members/**/*.parquet")]
    return summary, {str(name.relative_to(folder)): name.read_bytes() for name in names}


def test_a_run_weighs_its_documents_and_says_what_that_repairs(
    tmp_path: Path, tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = described(tmp_path, tiny_model_folder, texts(2, 200, 0.3), texts(1, 300, 0.15))
    scored = score(config)
    assert len(scored.of("audit")) > 3
    summary, first = answer(config, scored)
    weighting = summary.diagnostics.weighting
    assert weighting.auc_before > 0.65
    assert (summary.calibration, summary.guarantee, summary.strict.n_selected) == ("weighted", "heuristic", 0)
    assert weighting.effective < 300
    assert summary.supported is (weighting.ok and summary.diagnostics.blind.ok)
    weights = pq.read_table(next((tmp_path / "run/weights/unseen").glob("audit*")))["weight"].to_numpy()
    assert ((weights >= 1) & (weights <= LEVELS)).all()
    rows = pq.read_table(tmp_path / "run/selection/members/documents").to_pylist()
    assert len(rows) == 200
    assert len({row["p_value"] for row in rows}) > 150  # not a multiple of 1 / (n + 1) any more

    for name in ("unseen", "audit"):  # a second answer needs no text
        (tmp_path / f"{name}.jsonl").rename(tmp_path / f"{name}.gone")
    assert answer(config, scored)[1] == first
    for name in ("unseen", "audit"):
        (tmp_path / f"{name}.gone").rename(tmp_path / f"{name}.jsonl")
    one, other, *_ = sorted((tmp_path / "run/weights/unseen").glob("audit*"))
    one.write_bytes(other.read_bytes())
    assert answer(config, scored)[1] == first
    assert f"weights/unseen/{one.name} is not as it was written; the weights are made again" in caplog.text
    (tmp_path / "run/diagnostics/weights-unseen.json").unlink()
    backwards = answer(config, scored, lambda receipts, work: map(work, reversed(receipts)))
    assert backwards[1] == first


def test_texts_that_changed_since_they_were_scored_are_not_weighed(tmp_path: Path, tiny_model_folder: Path) -> None:
    config = described(tmp_path, tiny_model_folder, texts(2, 60, 0.3), texts(1, 60, 0.15))
    scored = score(config)
    path = tmp_path / "audit.jsonl"
    path.write_text(path.read_text().replace("word1 ", "wordX "))
    with pytest.raises(UserError, match=r"the texts again, and those of .*audit\.jsonl.* are not the ones"):
        answer(config, scored)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"procedure": "ptdi_known_members"}, "selections.0: procedure ptdi_known_members compares p-values of two"),
        ({"procedure": "td4eval"}, "procedure td4eval takes calibration pooled, got weighted"),
        ({"procedure": "adadetect"}, "procedure adadetect takes calibration pooled, got weighted"),
    ],
)
def test_calibration_weighted_refuses_what_it_makes_no_sense_of(
    tmp_path: Path, tiny_model_folder: Path, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=line):
        described(tmp_path, tiny_model_folder, ["a b"], ["c d"], **settings)
