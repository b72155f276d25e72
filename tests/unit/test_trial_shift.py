"""A trial that calibrates on documents that differ: by a column or by words, the others alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_density_ratio import texts

from pipeline.corpus.near_duplicates import draw_families
from pipeline.errors import UserError
from pipeline.selection.engine import Scores
from pipeline.trial.config import Point, SplitConfig, TrialConfig, build_trial
from pipeline.trial.repeats import Pool, known_of_documents, measure
from pipeline.trial.splits import Drawable, check_shifts, draw_split, positions
from pipeline.trial.table import selection_rows, selection_table
from pipeline.trial.trial_documents import read_documents
from tests.helpers.made_up import write_rows
from tests.helpers.trials import trial

PROCEDURES = ("bh", "storey")


def shifted(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> tuple[TrialConfig, list[Point]]:
    path = write_rows(folder / "documents.jsonl", lines)
    selections = [{"name": name, "detectors": ["loss"], "procedure": name} for name in PROCEDURES]
    return build_trial(trial(documents={"path": path, "id": "id"}, selections=selections, **settings))


def lines_of(count: int, **columns: Any) -> list[dict[str, Any]]:
    made = texts(1, count, 0.1)
    return [{"id": f"d{i}", "text": made[i], **{k: v[i] for k, v in columns.items()}} for i in range(count)]


@pytest.mark.parametrize(
    "values",
    [[2015.5, "9", 2023], ["2014-03", "2014-11", "2023-01"], [10, 100, 9]],
    ids=["numbers", "dates", "not as words sort"],
)
def test_a_column_places_documents_by_its_values(tmp_path: Path, values: list[Any]) -> None:
    config, _ = shifted(tmp_path, lines_of(30, when=values * 10))
    places = positions(config, read_documents(config), "when")
    try:
        order = np.argsort([float(value) for value in values])
    except ValueError:
        order = np.argsort(values)
    assert len(set(places.round(9))) == 3
    assert (np.diff(places[order]) > 0).all()
    assert abs(places.mean()) < 1e-9


@pytest.mark.parametrize(
    ("when", "by", "line"),
    [
        (list(range(30)), "wen", r"split\.shift\.by: no column 'wen' in .*documents\.jsonl; .*when"),
        ([*range(29), None], "when", r"split\.shift\.by when: 1 of 30 documents have no value there"),
        ([2023] * 30, "when", r"split\.shift\.by when: all documents have '2023' there, which distinguishes none"),
        (list(range(30)), "classifier", r"split\.shift\.by classifier needs at least 40 documents, got 30"),
    ],
)
def test_a_shift_that_cannot_be_made_is_one_line(tmp_path: Path, when: list[Any], by: str, line: str) -> None:
    config, points = shifted(tmp_path, lines_of(30, when=when), split={"shift": {"by": by}})

    def place() -> None:
        check_shifts(points)
        positions(config, read_documents(config), by)

    with pytest.raises(UserError, match=line):
        place()


@pytest.mark.parametrize("strength", [".inf", "much"])
def test_a_strength_that_is_no_number_is_one_line(tmp_path: Path, strength: str) -> None:
    with pytest.raises(UserError, match="shift"):
        shifted(tmp_path, lines_of(30), split={"shift": {"strength": strength}})


def test_words_place_the_documents_of_two_topics_apart(tmp_path: Path) -> None:
    both = [*texts(1, 60, 0.9), *texts(2, 60, 0.0)]
    config, _ = shifted(tmp_path, [{"id": f"d{i}", "text": text} for i, text in enumerate(both)])
    places = positions(config, read_documents(config), "classifier")
    first, second = places[:60], places[60:]
    assert max((first > np.median(places)).mean(), (second > np.median(places)).mean()) > 0.9
    assert (positions(config, read_documents(config), "classifier") == places).all()


@pytest.mark.parametrize("lean", [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
def test_documents_are_drawn_with_their_odds(lean: list[float]) -> None:
    rng, leans, hits = np.random.default_rng(0), np.array(lean), np.zeros(3)
    for _ in range(6_000):
        hits += draw_families(np.ones(3, dtype=bool), np.arange(3), 1, rng, leans if any(lean) else None)
    due = np.exp(leans) / np.exp(leans).sum()
    assert (np.abs(hits / 6_000 - due) < 4 * np.sqrt(due * (1 - due) / 6_000)).all()


def test_calibration_leans_one_way_and_all_audited_documents_the_other_way() -> None:
    rng = np.random.default_rng(0)
    place, trained = rng.normal(size=3_000), rng.random(3_000) < 0.4
    means = []
    for repeat in range(20):
        drawn = draw_split(
            Drawable(trained, np.arange(3_000), lean=1.5 * place), {"unseen": 600}, SplitConfig(), 0, 0, repeat
        )
        assert drawn.unseen.size == 600
        assert not trained[drawn.unseen].any()
        members = trained[drawn.audit]
        means.append(
            [place[drawn.unseen].mean(), place[drawn.audit][members].mean(), place[drawn.audit][~members].mean()]
        )
    calibrating, member, other = np.mean(means, axis=0)
    assert calibrating > 0.5
    assert other < -0.2
    assert abs(member - other) < 0.12
    assert abs(members.mean() - trained.mean()) < 0.03  # as large a share of either was taken away


@pytest.mark.slow
def test_a_shift_breaks_the_guarantee_and_the_checks_say_so(tmp_path: Path) -> None:
    """Of untrained documents whose score falls with the share of topical words, by which the shift goes."""
    rng, n = np.random.default_rng(3), 900
    topic = rng.random(n) < 0.5
    made = [texts(i, 1, 0.6 if topical else 0.1)[0] for i, topical in enumerate(topic)]
    config, _ = shifted(
        tmp_path,
        [{"id": f"d{i}", "text": text, "topic": int(topic[i])} for i, text in enumerate(made)],
        split={"unseen": n // 3, "shift": {"by": "topic", "strength": 1.0}},
        repeats=12,
    )
    documents = read_documents(config)
    trained = np.zeros(n, dtype=bool)
    trained[rng.permutation(n)[: n // 3]] = True
    loss = rng.normal(size=n) - 1.2 * topic + 3.5 * trained
    scores = Scores({"loss": loss}, rng.integers(-(2**62), 2**62, n), pa.nulls(n, pa.string()))
    places, everything = {"topic": positions(config, documents, "topic")}, np.ones(n, dtype=bool)
    pool = Pool(documents.ids, np.arange(n), trained, everything, scores, {}, places, known_of_documents(made))
    repeats = measure(pool, config, 0)
    rows = {row["selection"]: row for row in selection_rows({}, config.selections, repeats)}
    assert rows["storey"]["fdr"] > 0.16
    assert rows["storey"]["unsupported"] == rows["bh"]["unsupported"] == 1
    table = selection_table(list(rows.values()), [])
    assert [column.header for column in table.columns][-1] == "called contradicted"
    fewer = config.model_copy(update={"repeats": 2})
    assert measure(pool, fewer, 0).equals(repeats.slice(0, 2 * len(config.selections)))
