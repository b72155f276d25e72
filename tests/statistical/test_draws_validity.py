"""Monte Carlo claims about draws: levels with near-duplicate items, marks that return by place, and the shuffle check.

Seeds are fixed, so a test passes always or never. A rate that a theorem bounds may exceed the bound by four standard
errors of the Bernoulli law at the bound; a figure of docs/methods.md may differ by four standard errors of both runs.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import kstest

from pipeline.config.corpus import CorpusConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.shard import whole_shard
from pipeline.selection.version_scores import (
    VersionPart,
    VersionScores,
    joined_versions,
    mirrored_list,
    preference_residuals,
    redraw_p_value,
)
from tests.helpers.made_up_items import TEMPLATE, Row, draws_of_items, make_items, write_rows

pytestmark = pytest.mark.slow

LETTERS = "ABCDEFG"
ORDERS = 24
TENTH = Fraction(1, 10)


def above(bound: float, runs: int) -> float:
    """The largest rate in some runs that does not contradict a bound."""
    return bound + 4 * math.sqrt(bound * (1 - bound) / runs)


# --- near-duplicate items


def family_scores(rng: np.random.Generator, families: int, each: int) -> VersionScores:
    """Null items in families that share their published order and, nearly, the scores of their versions."""
    published, count = np.repeat(rng.integers(ORDERS, size=families), each), families * each
    scores = np.repeat(rng.normal(size=(families, ORDERS)), each, axis=0) + 0.1 * rng.normal(size=(count, ORDERS))
    digests = np.zeros((scores.size, 32), dtype=np.uint8)
    digests[:, :8] = rng.integers(256, size=(scores.size, 8))
    ids = tuple(f"i{number:03}" for number in range(count))
    return VersionScores(scores.ravel(), np.arange(0, scores.size + 1, ORDERS), published, ids, digests)


def family_items(families: int, each: int, seed: int) -> list[Row]:
    """Items in families: the question with another ending, and options that differ in case and punctuation."""
    rows, rng = [], random.Random(seed)
    for family, row in enumerate(make_items(families, seed)):
        for copy in range(each):
            choices = [text.upper() if copy % 2 else f"{text}." for text in row["choices"]]
            question = f"{row['question']} {' '.join(rng.choices(LETTERS, k=copy % 3))}"
            rows.append({"id": f"i{family * each + copy:03}", "question": question, "choices": choices})
    return rows


def used_of(scores: VersionScores, left_out: frozenset[str]) -> VersionScores:
    kinds, forms = (pa.array([[]] * len(scores.ids), pa.list_(kind)) for kind in (pa.string(), pa.binary()))
    return joined_versions([VersionPart(scores, kinds, forms, left_out=left_out)])


@pytest.mark.parametrize(("families", "each"), [(100, 2), (10, 10), (5, 20)])
def test_list_and_verdict_keep_their_levels_with_near_duplicate_items(families: int, each: int) -> None:
    """Nothing was learnt. With every item as a draw of its own, the verdict has p <= .05 in .12, .33 and .38."""
    runs, rng, hits, listed = 300, np.random.default_rng(1), np.zeros(2), np.zeros(2)
    left_out = draws_of_items(family_items(families, each, 1)).left_out
    assert len(left_out) == families * (each - 1)
    for run in range(runs):
        scores = family_scores(rng, families, each)
        for place, some in enumerate((used_of(scores, frozenset()), used_of(scores, left_out))):
            hits[place] += redraw_p_value(some, run, redraws=999) <= 0.05
            listed[place] += mirrored_list(some, TENTH, run).selected.any()
    assert hits[0] / runs > 0.08
    if each == 20:
        assert listed[0] / runs > 0.1, "of items that nothing was learnt from, any list is wrong"
    assert hits[1] / runs <= above(0.05, runs)
    assert listed[1] / runs <= above(0.1, runs)


# --- sets of items with the same options


def test_an_honest_set_is_reduced_in_a_tenth_and_a_used_one_accuses_no_model() -> None:
    runs, rng, reduced = 250, random.Random(3), 0
    questions = make_items(60)
    for run in range(runs):
        count = rng.randrange(20, 61)
        rows = [{**row, "choices": rng.sample(["Yes", "No"], 2)} for row in questions[:count]]
        if len(draws_of_items(rows).left_out):
            reduced += 1
            continue
        first = np.array([row["choices"][0] == "Yes" for row in rows])
        for prefers in (first, ~first):
            scores = np.stack([prefers, ~prefers], axis=1).astype(float)
            digests = np.arange(2 * count * 32, dtype=np.uint32).astype(np.uint8).reshape(-1, 32)
            some = VersionScores(
                scores.ravel(),
                np.arange(0, 2 * count + 1, 2),
                np.zeros(count, int),
                (*map(str, range(count)),),
                digests,
            )
            assert redraw_p_value(some, run) > 0.05 - 4 * math.sqrt(0.05 / 9_999)
    assert 0 < reduced / runs <= above(0.1, runs)


# --- marks


def published_order(rng: random.Random, rows: list[Row]) -> list[Row]:
    """The same items after another shuffle, with marks of the places of their options."""
    return [
        {**row, "choices": [f"({m}) {o}" for m, o in zip(LETTERS, rng.sample(row["choices"], 4), strict=False)]}
        for row in rows
    ]


def scores_by(path: Path, rows: list[Row], marks: str, score: Callable[[str], float]) -> VersionScores:
    """Scores of all versions of items, as a run reads them."""
    versions = {"permute": "choices", "template": TEMPLATE, "marks": marks}
    corpus = build(CorpusConfig, {"audit": {"path": str(write_rows(path, rows)), "id": "id", "versions": versions}})
    (entry,) = find_inputs(corpus)
    assert corpus.audit is not None
    documents = [one for one in read_shard(whole_shard(entry, corpus.audit)) if one.versions is not None]
    held = [one.versions for one in documents if one.versions is not None]
    kinds = pa.array([one.kinds for one in held], pa.list_(pa.string()))
    forms = pa.array([one.forms for one in held], pa.list_(pa.binary()))
    texts = list(itertools.chain.from_iterable(one.texts for one in held))
    scores = VersionScores(
        np.array(list(map(score, texts))),
        np.cumsum([0, *(len(one.texts) for one in held)]),
        np.array([one.published for one in held]),
        tuple(one.doc_id for one in documents),
        np.frombuffer(b"".join(one.digests for one in held), dtype=np.uint8).reshape(-1, 32),
    )
    return preference_residuals(joined_versions([VersionPart(scores, kinds, forms)]))


def prefers_order(text: str) -> float:
    """The score of a model that knows nothing but the alphabet, and likes some texts better than others."""
    marks = [line[line.index("(") + 1] for line in text.splitlines() if "(" in line]
    taste = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
    return sum(a < b for a, b in itertools.pairwise(marks)) + taste


def test_p_values_of_items_with_marks_are_uniform_over_reshuffles(tmp_path: Path) -> None:
    """With marks in their options, as versions before 1.0 read them, every reshuffle is an accusation."""
    rng, rows, runs = random.Random(4), make_items(30), 120
    p_values = []
    for run in range(runs):
        shuffled = published_order(rng, rows)
        scores = scores_by(tmp_path / "items.jsonl", shuffled, "place", prefers_order)
        p_values.append(redraw_p_value(scores, run, redraws=999))
        if run < 3:
            assert not mirrored_list(scores, TENTH, run).selected.any()
            accused = scores_by(tmp_path / "kept.jsonl", shuffled, "none", prefers_order)
            assert redraw_p_value(accused, run, redraws=999) == 0.001
            assert mirrored_list(accused, TENTH, run).selected.sum() >= 28
    assert np.mean(np.array(p_values) <= 0.05) <= above(0.05, runs)
    assert kstest(p_values, "uniform").pvalue > 0.001


# --- the shuffle check


def test_an_honest_shuffle_passes_and_its_p_values_are_exact_bounds() -> None:
    """The Bonferroni bound of each set of tests is below .05 in at most a twentieth; no collection is contradicted."""
    runs, rng, low = 150, random.Random(5), np.zeros(2)
    items = {k: make_items(400, seed=k, options=k) for k in (2, 3, 4, 5)}
    for _ in range(runs):
        rows = []
        for number in range(40):
            row = rng.choice(items[rng.choice((2, 3, 4, 4, 4, 5))])
            rows.append({**row, "id": str(number), "choices": rng.sample(row["choices"], len(row["choices"]))})
        check = draws_of_items(rows).check
        assert not check.failed()
        for place, first in enumerate((True, False)):
            found = [test.p_value for test in check.tests if test.first == first]
            low[place] += min(found) * len(found) <= 0.05
    assert (low / runs <= above(0.05, runs)).all()


def test_sorted_options_in_a_tenth_of_300_items_are_found_in_nine_of_ten() -> None:
    runs, rng, found = 80, random.Random(6), 0
    items = make_items(300)
    for _ in range(runs):
        rows = [
            {**row, "choices": sorted(row["choices"]) if rng.random() < 0.1 else rng.sample(row["choices"], 4)}
            for row in items
        ]
        failed = draws_of_items(rows).check.failed()
        found += any("options ascend by code points" in test.about for test in failed)
    assert abs(found / runs - 0.91) <= 4 * math.sqrt(0.91 * 0.09 / runs)
