"""A list that rests on documents of a kind that calibration lacks is contradicted, and an honest one is not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.checks.families import one_role_p
from pipeline.results.summary import Summary
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, sealed
from ray_jobs.select import select_again
from tests.helpers.finished import refile, run, with_column
from tests.helpers.made_up import write_audit, write_corpus

N, UNLIKE, MEMBERS = 240, 24, 30
VOCABULARY = [f"word{number}" for number in range(400)]
NOTICE = "the publisher reserves all rights and no part may be copied without permission of the publisher"


def some_texts(rng: np.random.Generator, count: int, words: int = 30) -> list[str]:
    return [" ".join(rng.choice(VOCABULARY, words)) for _ in range(count)]


def ending_with(last: Sequence[str]) -> dict[str, list[str]]:
    """Texts of both roles that are alike but for the last audited ones."""
    rng = np.random.default_rng(0)
    return {"unseen": some_texts(rng, N), "audit": [*some_texts(rng, N - len(last)), *last]}


def finished(root: Path, model: Path, texts: Mapping[str, Sequence[str]], **columns: Any) -> Store:
    """A finished run over given texts of each role."""
    rows = {
        role: [{"text": text, "author": f"{role} {i // 4}"} for i, text in enumerate(of_role)]
        for role, of_role in texts.items()
    }
    settings = {
        "corpus": write_corpus(root, rows, **columns),
        "detectors": ["loss"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.1}],
        "resources": {"shard_bytes": 1 << 20},
    }
    run(write_audit(root, model, **settings))
    return Store(str(root / "run"))


@pytest.fixture(scope="module")
def notices(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Store:
    """A part that calibration lacks: half of each text is a notice, and no two are near-duplicates."""
    last = [f"{text} {NOTICE}" for text in some_texts(np.random.default_rng(6), UNLIKE, 12)]
    return finished(tmp_path_factory.mktemp("notices"), tiny_model_folder, ending_with(last))


def answered(store: Store, high: int, low: int = 0) -> Summary:
    """The answer where MEMBERS of the first and some of the last audited documents score higher than all others.

    Of the others, `low` of the last ones score lower than all, so that none is selected by chance.
    """
    rng = np.random.default_rng(1)

    def changed(table: pa.Table, receipt: Receipt) -> pa.Table:
        values = rng.normal(size=len(table))
        row = table["row"].to_numpy()
        if receipt.role == "audit":
            values[(row < MEMBERS) | (row >= N - high)] += 9
            values[row >= N - low] -= 9
        return with_column(table, "loss", pa.array(values))

    refile(Path(store.root), changed)
    (summary,) = select_again(store.url, [])
    return summary


def test_a_list_of_a_small_part_that_calibration_lacks_is_contradicted_and_names_it(notices: Store) -> None:
    summary = answered(notices, UNLIKE)
    tail = summary.diagnostics.tail
    assert summary.diagnostics.blind.outcome != "failed", "the average sees nothing"
    assert tail.p_value <= 0.01
    assert (tail.outcome, summary.conclusion, summary.n_selected) == ("failed", "contradicted", tail.n_compared)
    assert tail.n_selected >= 10
    assert len(tail.documents) == 10
    assert sum(int(name.removeprefix("audit-")) >= N - UNLIKE for name in tail.documents) >= 8
    assert f"Of {summary.n_selected} selected documents {tail.n_selected} (" in tail.sentence
    assert tail.documents[0] in tail.sentence
    assert tail.sentence in summary.reasons
    note = answered(notices, 0, low=UNLIKE).diagnostics.tail
    assert (note.outcome, note.p_value <= 0.01) == ("inconclusive", True), "the part is not selected"
    assert note.sentence.endswith("That is too few to contradict the list.")
    # the check is filed, and does not need the texts again
    name = "diagnostics/blind-unseen.json"
    filed = notices.read_json(name)
    kept = [place for place in filed["tail"]["documents"] if place[1] >= N - UNLIKE][:3]  # selected, whatever is drawn
    filed["tail"]["documents"] = kept
    notices.write_json(name, sealed({key: filed[key] for key in filed if key != "digest"}))
    again = answered(notices, UNLIKE).diagnostics.tail
    assert (again.n_selected, {*again.documents}) == (3, {f"audit-{row}" for _, row, _ in kept})


def test_a_family_of_near_duplicates_in_one_role_contradicts_its_list(tmp_path: Path, tiny_model_folder: Path) -> None:
    store = finished(tmp_path, tiny_model_folder, ending_with(some_texts(np.random.default_rng(6), 1) * 12))
    summary = answered(store, 12)
    families = summary.diagnostics.families
    assert (families.outcome, families.role, families.size, families.n_selected) == ("failed", "audit", 12, 12)
    assert families.p_value == pytest.approx(2 * 0.5**12, rel=0.5)
    assert "12 audited documents are near-duplicates of one another" in families.sentence
    assert " and 2 more. 12 of the " in families.sentence
    assert f"audit-{N - 12}" in families.sentence
    assert summary.conclusion == "contradicted"
    note = answered(store, 0, low=12).diagnostics.families
    assert (note.outcome, note.n_selected) == ("inconclusive", 0)
    assert one_role_p(5, 10, 10, 1) == pytest.approx(2 * (252 / 15504)), "hypergeometric"
    assert one_role_p(5, 10, 3, 2) == pytest.approx(2 * (252 / 1287))
    assert one_role_p(5, 500, 500, 100) == 1.0


def test_neither_check_contradicts_an_honest_audit_of_groups(tmp_path: Path, tiny_model_folder: Path) -> None:
    """Authors with words of their own, each wholly in one role."""
    rng = np.random.default_rng(7)
    words = {role: rng.integers(0, 1_000, (N // 4, 12)) for role in ("unseen", "audit")}
    texts = {
        role: [" ".join(f"word{word}" for word in rng.choice(words[role][i // 4], 30)) for i in range(N)]
        for role in words
    }
    grouped = answered(finished(tmp_path, tiny_model_folder, texts, group="author"), 60)
    assert grouped.n_selected > 60
    assert grouped.diagnostics.families is None
    assert grouped.diagnostics.tail.outcome != "failed"
