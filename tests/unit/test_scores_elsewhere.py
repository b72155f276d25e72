"""Scores from elsewhere: the answers of the run that they come from, without its model; and what is refused."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.small_model import WORDS
from pipeline.answers.verdict import read_verdict
from pipeline.bundle.verify import verify_bundle
from pipeline.config.corpus import SourceConfig
from pipeline.corpus.documents import read_scores
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from pipeline.plan.matching import write_matched
from pipeline.run.plan import make_plan
from pipeline.store.files import Store
from tests.helpers.commands import ended, here, user_error
from tests.helpers.finished import rows as rows_scored
from tests.helpers.made_up import write_corpus, write_rows
from tests.helpers.report_run import summary_in

Row = dict[str, Any]
ROLES = ("audit", "unseen", "seen")
COLUMNS = ["loss", "min_k(k=0.5)"]
SELECTIONS = [
    {"name": "bh", "detectors": ["loss"], "procedure": "bh", "alpha": 0.95},
    {"name": "fused", "detectors": COLUMNS, "procedure": "td4eval", "alpha": 0.95},
    {"name": "storey", "detectors": ["min_k(k=0.5)"], "procedure": "storey", "alpha": 0.95},
]


def run(folder: Path, name: str, given: Mapping[str, Any], do: str = "run") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run": str(folder / name), "resources": {"cluster": "local"}, **given}))
    assert ended(do, path) == 0
    return folder / name


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The folder of a run by a model, of the files of its documents, and of these with its scores: scored-ROLE."""
    folder, rng = tmp_path_factory.mktemp("elsewhere"), np.random.default_rng(5)
    texts = {role: [" ".join(WORDS[i] for i in rng.integers(30, size=9 + n % 5)) for n in range(45)] for role in ROLES}
    rows = {role: [{"id": f"{role}{n}", "text": text} for n, text in enumerate(of)] for role, of in texts.items()}
    given = {
        "model": {"path": str(tiny_model_folder), "dtype": "float32"},
        "corpus": write_corpus(folder, rows),
        "detectors": ["loss", {"min_k": {"k": 0.5}}],
        "selections": SELECTIONS,
    }
    held = rows_scored(run(folder, "first", given))
    assert ended("verdict", folder / "first") == 0
    for role, of in rows.items():
        write_rows(folder / f"scored-{role}.jsonl", [{**row, **{c: held[row["id"]][c] for c in COLUMNS}} for row in of])
    return folder


@pytest.fixture(scope="module", params=["with", "without"])
def again(request: pytest.FixtureRequest, scored: Path) -> Path:
    """The run of imported scores, with texts or without."""
    return run(scored, request.param, imported(scored, **({"text": "text"} if request.param == "with" else {})))


def imported(scored: Path, **settings: Any) -> dict[str, Any]:
    sources = {
        role: {"path": str(scored / f"scored-{role}.jsonl"), "id": "id", "scores": COLUMNS, **settings}
        for role in ROLES
    }
    return {"corpus": sources, "selections": SELECTIONS}


def verdicts(folder: Path, name: str) -> list[Row]:
    table = pq.read_table(folder / f"selection/{name}/documents")
    return sorted(table.drop_columns(["source"]).to_pylist(), key=lambda row: row["doc_id"])


def test_imported_scores_are_planned_packed_and_verified_to_the_answers_of_their_run(
    scored: Path, again: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_texts = again.name == "with"
    blocks = " ".join(here(capsys, "verdict", again)[0].split())
    assert ("families of near-duplicates;" in blocks) is with_texts
    for selection in SELECTIONS:
        label = str(selection["name"])
        assert verdicts(again, label) == verdicts(scored / "first", label)
        first, other = (summary_in(Store(str(one)), label).model_dump() for one in (scored / "first", again))
        checks, others = first.pop("diagnostics"), other.pop("diagnostics")
        assert other["assumption"].startswith(first["assumption"])
        assert "was not fitted to the documents that calibrate" in other["assumption"]
        differing = {"assumption", *(() if with_texts else ("conclusion", "condition", "next"))}
        assert {key for key in first if first[key] != other[key]} <= differing
        changed = {key for key in checks if checks[key] != others[key]}
        texts = set() if with_texts else {"blind", "overlap", "near_copies", "families", "tail"}
        assert changed <= {"truncated", *texts}
    first, other = (read_verdict(Store(str(one))) for one in (scored / "first", again))
    assert any(summary_in(Store(str(again)), str(selection["name"])).n_selected for selection in SELECTIONS)
    assert (other.counts, other.test) == (first.counts, first.test)
    shown = " ".join(here(capsys, "plan", again.with_suffix(".yaml"))[0].split())
    assert ("the words of at most" in shown) is with_texts
    assert ended("pack", again, tmp_path / "run.bundle") == 0
    assert verify_bundle((tmp_path / "run.bundle").read_bytes(), "run.bundle").holds


@pytest.mark.parametrize("again", ["without"], indirect=True)
def test_checks_that_need_texts_are_not_made_without_them(again: Path) -> None:
    summary = summary_in(Store(str(again)), "bh")
    diagnostics = summary.diagnostics
    assert (summary.conclusion, diagnostics.blind.outcome, diagnostics.blind.tested) == (*["inconclusive"] * 2, False)
    assert "their documents independent; this was not checked" in summary.condition
    assert diagnostics.near_copies.outcome == "inconclusive"
    assert diagnostics.near_copies.sentence.startswith("Near-duplicates were not checked")
    assert (diagnostics.overlap.outcome, diagnostics.truncated.outcome) == ("inconclusive", "inconclusive")
    assert "Near-duplicates were not checked" in (again / "report/report.html").read_text()


def rows_of(count: int, name: str = "d", above: float = 0.0) -> list[Row]:
    rng = np.random.default_rng(len(name))
    return [{"id": f"{name}{n}", "loss": float(rng.normal(above)), "other": n} for n in range(count)]


def small(folder: Path, audit: Sequence[Row], scores: Sequence[Any] = ("loss",), **changed: Any) -> dict[str, Any]:
    rows = {"audit": audit, "unseen": rows_of(30, "unseen")}
    selections = [{"name": "bh", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}]
    plain = {
        "run": str(folder / "run"),
        "corpus": write_corpus(folder, rows, scores=list(scores)),
        "selections": selections,
    }
    return {**plain, **changed}


def test_a_document_without_a_finite_score_is_quarantined_and_counts(tmp_path: Path) -> None:
    values = [float("nan"), None, "much", True, [1.0], 10**400]
    audit = [*rows_of(40), *({"id": f"bad{n}", "loss": value} for n, value in enumerate(values)), {"id": "none"}]
    folder = run(tmp_path, "run", small(tmp_path, audit, error_budget=0.2))
    summary = summary_in(Store(str(folder)), "bh")
    assert (summary.n_audit, summary.n_quarantined) == (47, 7)
    refused = pq.read_table(folder / "quarantine").to_pylist()
    assert {row["reason"] for row in refused} == {"non_finite_score"}
    assert "column 'loss' holds 'much', not a finite number" in {row["message"] for row in refused}
    assert sum(row["p_value"] == 1.0 and row["loss"] is None for row in verdicts(folder, "bh")) == 7


def test_smoothed_ranks_of_a_run_are_stated_and_verified_from_its_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = [*rows_of(40), *rows_of(20, "members", 2.5), rows_of(1)[0], {"id": "bad", "loss": None}]
    smoothed = {"name": "smoothed", "detectors": ["loss"], "procedure": "storey", "alpha": 0.2, "ranks": "smoothed"}
    whole = {**smoothed, "name": "whole", "ranks": "whole"}
    given = small(tmp_path, audit, error_budget=0.2, selections=[smoothed, whole], seed=0)
    folder = run(tmp_path, "run", given)
    drawn, plain = (summary_in(Store(str(folder)), name) for name in ("smoothed", "whole"))
    assert drawn.smoothed is not None
    sentence = drawn.smoothed.sentence(drawn.n_selected)
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert drawn.smoothed.n_whole == plain.n_selected <= drawn.n_selected
    listed = pq.read_table(folder / "selection/smoothed/selected.parquet")
    p, rank, u = (listed[name].to_numpy() for name in ("smoothed_p", "conformal_rank", "rank_draw"))
    assert p == pytest.approx((rank - 1 + (u + 0.5) / 2**64) / 31)
    assert p.tolist() == sorted(p)
    assert listed["p_value"].to_numpy() == pytest.approx(rank / 31)
    assert "bad" not in listed["doc_id"].to_pylist()
    page = json.loads((folder / "report/report.json").read_text())["selections"][0]
    assert sentence in page["answer"]["cautions"]
    assert page["brief"]["drawn"] == sentence
    html = (folder / "report/report.html").read_text()
    assert sentence in html.partition("<summary>The answer in full")[0], "not in a fold"
    assert html.count(sentence) == 1
    assert html.count("They are of whole ranks; smoothed ones decide.") == 1, "beside one of two histograms"
    assert page["selected"][0]["smoothed_p"] == p[0]
    assert page["selected"][0]["conformal_rank"] == rank[0]
    assert ended("pack", folder, tmp_path / "bundle") == 0
    assert verify_bundle((tmp_path / "bundle").read_bytes(), "bundle").holds
    seeded = run(tmp_path, "seeded", {**given, "run": str(tmp_path / "seeded"), "seed": 9})
    again = pq.read_table(seeded / "selection/smoothed/selected.parquet")
    assert again["rank_draw"].to_pylist() == u.tolist(), "the seed draws nothing"


def test_the_first_screen_states_weights_and_how_they_were_found(tmp_path: Path) -> None:
    audit = [*rows_of(40), *rows_of(20, "members", 2.5)]
    learnt = {"detectors": ["loss", "other"], "procedure": "adadetect", "learn": "pool", "alpha": 0.5}
    plain = {"name": "plain", "detectors": ["loss"], "procedure": "bh", "alpha": 0.2}
    boosted = {**plain, "name": "boosted", "calibration": "by_group", "boost": "group"}
    one = {**learnt, "name": "one", "detectors": ["loss"]}
    selections = [{**learnt, "name": "pool"}, boosted, one, plain]
    rows = {"audit": audit, "unseen": rows_of(30, "unseen")}
    grouped = {role: [{**row, "kind": "ab"[n % 2]} for n, row in enumerate(of)] for role, of in rows.items()}
    corpus = write_corpus(tmp_path, grouped, scores=["loss", "other"], group="kind")
    folder = run(tmp_path, "run", {"corpus": corpus, "selections": selections})
    page = json.loads((folder / "report/report.json").read_text())["selections"]
    pool, weighed, single, none = (entry["brief"].get("weights") for entry in page)
    assert "other" in pool
    assert "found without knowing which documents are which" in pool
    assert weighed.startswith("A document is selected by its p-value divided by the weight of its group")
    assert single == "With one detector there is nothing to learn: learn: pool ranks by loss."
    assert none is None
    html = " ".join((folder / "report/report.html").read_text().split())
    assert html.count("They are those before the division by the weights of groups.") == 1
    for sentence in (pool, weighed, single):
        assert f"<dt>Weights</dt><dd>{sentence}</dd>" in html
        assert html.count(sentence) == 1


@pytest.mark.parametrize(
    ("above", "higher", "advice"),
    [
        (-1.0, None, "mean not trained on, write {column: loss, higher: nonmember} in scores of every role"),
        (1.0, None, None),
        (1.0, "nonmember", "mean trained on, leave out higher: nonmember in scores of every role"),
        (-1.0, "nonmember", None),
    ],
)
def test_evaluate_warns_of_a_direction_that_the_labels_contradict(
    tmp_path: Path, above: float, higher: str | None, advice: str | None
) -> None:
    kinds = rows_of(40, "n"), rows_of(40, "mm", above)
    rows = [{**row, "label": label} for label, of in enumerate(kinds) for row in of]
    source = {"path": write_rows(tmp_path / "rows.jsonl", rows), "id": "id", "label": "label"}
    source["scores"] = ["loss" if higher is None else {"column": "loss", "higher": higher}]
    folder = run(tmp_path, "run", {"corpus": {"labelled": source}}, "evaluate")
    notices = json.loads((folder / "evaluation/evaluation.json").read_text())["notices"]
    warnings = [notice for notice in notices if notice.startswith("Warning: column 'loss' ranks seen documents below")]
    assert [advice in warning for warning in warnings] == [True] * (advice is not None)
    assert any("by their words was not checked" in notice for notice in notices)


def test_samples_of_lm_eval_are_scored_by_the_likelihood_of_the_right_answer(tmp_path: Path) -> None:
    pairs = [["-3.5", "False"], ["-1.25", "True"]]
    audit = [
        {"doc_id": 0, "target": "1", "filtered_resps": pairs},  # multiple choice: numbers are written as text
        {"doc_id": 1, "target": 0, "filtered_resps": pairs},
        {"doc_id": 2, "target": "a text", "filtered_resps": [-7.0]},  # of a whole text
        {"doc_id": 3, "target": "a text", "filtered_resps": [[-8.0, False]]},
        {"doc_id": 4, "target": "5", "filtered_resps": pairs},
        {"doc_id": 5, "target": "a text", "filtered_resps": ["an answer"]},
    ]
    given = small(tmp_path, audit, scores=["filtered_resps"], error_budget=1.0, selections=[])
    unseen = [{"doc_id": n, "target": "x", "filtered_resps": [-float(n)]} for n in range(30)]
    for role, some in (("audit", audit), ("unseen", unseen)):
        given["corpus"][role] |= {"path": write_rows(tmp_path / f"samples_{role}.jsonl", some), "id": "doc_id"}
    rows = pq.read_table(run(tmp_path, "run", given) / "scores").to_pylist()
    scores = {row["doc_id"]: (row["filtered_resps"], row["n_tokens"]) for row in rows if row["role"] == "audit"}
    assert scores == {"0": (-1.25, 0), "1": (-3.5, 0), "2": (-7.0, 0), "3": (-8.0, 0)}


def test_details_of_lighteval_are_scored_by_the_likelihood_of_the_right_answer(tmp_path: Path) -> None:
    def detail(row: int, logprobs: list[float], gold: list[int], choices: list[str]) -> Row:
        doc = {"id": str(row), "query": f"query {row} of some words", "choices": choices, "gold_index": gold}
        return {"doc": doc, "metric": {"acc": 1.0}, "model_response": {"logprobs": logprobs}}

    two = ["yes", "no"]
    audit = [
        detail(0, [-3.5, -1.25], [1], two),
        detail(1, [-3.5, -1.25], [0], two),
        detail(2, [-7.0], [0], ["yes"]),
        detail(3, [-3.5, -1.25], [0, 1], two),  # several right answers
        detail(4, [-0.5, -0.25, -0.125], [0], ["a text of three tokens"]),  # of tokens, not of answers
        detail(5, [], [0], two),
    ]
    given = small(tmp_path, rows_of(6), scores=["model_response.logprobs"], error_budget=1.0, selections=[])
    unseen = [detail(n, [-float(n), -1.0], [0], two) for n in range(30)]
    for role, some in (("audit", audit), ("unseen", unseen)):
        path = tmp_path / f"details_{role}.parquet"
        pq.write_table(pa.Table.from_pylist(some), path)
        given["corpus"][role] |= {"path": str(path), "id": "doc.id", "text": "doc.query"}
    folder = run(tmp_path, "run", given)
    rows = pq.read_table(folder / "scores").to_pylist()
    scores = {row["doc_id"]: row["model_response.logprobs"] for row in rows if row["role"] == "audit"}
    assert scores == {"0": -1.25, "1": -3.5, "2": -7.0}
    refused = pq.read_table(folder / "quarantine").to_pylist()
    assert [row["reason"] for row in refused] == ["non_finite_score"] * 3


def test_the_target_of_an_answer_may_be_a_column_of_scores_too() -> None:
    columns = SourceConfig(path="t.jsonl", scores=["target", "filtered_resps"]).score_companions
    assert read_scores(columns, [0.5, [["-1.2", "True"]], 0.5]) == (0.5, -1.2)


Change = Callable[[dict[str, Any]], None]


def at(*keys: str | int, **settings: Any) -> Change:
    """Changes what stands at some keys; at `corpus` what stands in both roles."""

    def change(given: dict[str, Any]) -> None:
        node: Any = given
        for key in keys:
            node = node[key]
        for one in node.values() if keys == ("corpus",) else [node]:
            one.update(settings)

    return change


REFUSED: list[tuple[str, Change]] = [
    ("no column 'othr' in .*; did you mean 'other'", at("corpus", scores=["loss", "othr"])),
    ("no model is asked: leave out model;", at(model={"path": "org/model"})),
    ("leave out reference_model", at(reference_model={"path": "org/model"})),
    ("leave out detectors", at(detectors=["zlib"])),
    ("the column loss appears twice", at("corpus", scores=["loss", {"column": "loss"}])),
    ("input should be 'member' or 'nonmember'", at("corpus", scores=[{"column": "loss", "higher": "lower"}])),
    ("corpus.audit.scores: .*list", at("corpus", scores="loss")),
    ("image and scores: a source has documents of one kind", at("corpus", image="picture")),
    ("score column 'row': score files have a column of that name", at("corpus", scores=["loss", "row"])),
    (
        "against needs the contents of the documents, and the .* leave it out",
        at(against="another"),
    ),
    ("corpus.audit and corpus.unseen need the same scores", at("corpus", "unseen", scores=["other"])),
    ("got scores of texts in corpus.audit and scores in corpus.unseen", at("corpus", "audit", text="t")),
    ("detector 'lost' is not scored; did you mean 'loss'", at("selections", 0, detectors=["lost"])),
    ("none of the first 40 documents has a score: column 'id' holds 'd0'", at("corpus", scores=["id", "loss"])),
]


@pytest.mark.parametrize(("message", "change"), REFUSED)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, message: str, change: Change) -> None:
    given = small(tmp_path, rows_of(40))
    change(given)
    with pytest.raises(UserError, match=message):
        make_plan(build_config(given))


def test_scores_without_texts_have_no_words_to_match_by(tmp_path: Path) -> None:
    refused = user_error(write_matched, make_plan(build_config(small(tmp_path, rows_of(40)))), str(tmp_path / "alike"))
    assert refused == (
        "--matched needs words or tokens of the documents, and the documents are scores without texts: "
        "choose others by hand, or give texts (corpus.*.text)"
    )
    assert not (tmp_path / "alike").exists()


def test_scores_of_a_table_are_numbers_and_a_name_alone_is_no_model(tmp_path: Path) -> None:
    table = pa.table({"id": ["a", "b"], "loss": ["1", "2"], "lost": [1.0, 2.0]})
    pq.write_table(table, tmp_path / "t.parquet")
    given = small(tmp_path, rows_of(40))
    given["corpus"]["audit"]["path"] = str(tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"column 'loss' in .* holds string, not numbers; did you mean 'lost'"):
        make_plan(build_config(given))
    for of in given["corpus"].values():
        del of["scores"]
    assert "add corpus.*.scores" in user_error(build_config, {**given, "model": {"name": "OLMo"}})
    with pytest.raises(UserError, match=r"add corpus\.\*\.scores"):
        build_config({**given, "model": {"path": "org/model"}, "reference_model": {"name": "OLMo"}})
    with pytest.raises(UserError, match=r"add corpus\.\*\.scores"):
        build_config({**given, "model": {"path": "org/model"}, "detectors": ["from_column"]})
