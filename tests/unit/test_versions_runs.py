"""Runs over documents with versions: every version scored, whole documents refused, one answer whatever the shards."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.small_model import WORDS
from pipeline.answers.verdict import read_verdict
from pipeline.config.corpus import SourceConfig
from pipeline.corpus.documents import read_shard, row_versions
from pipeline.corpus.formats.base import check_columns
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from pipeline.run.plan import BYTES_PER_TOKEN, make_plan
from pipeline.selection.version_scores import log_e_values, preference_residuals, redraw_p_value, version_ranks
from pipeline.store.files import Store
from pipeline.store.receipts import read_receipts
from seenset import read_versions, score, select_versions
from tests.helpers.commands import ended, here, refusal
from tests.helpers.finished import rows as rows_scored
from tests.helpers.marked_runs import finite_scores, run_here, versions_audit
from tests.helpers.report_run import summary_in

K = 6
Row = dict[str, Any]
LISTS = ("list", "both", "ranks")
SELECTIONS = [
    {"name": "list", "detectors": ["loss"], "procedure": "versions", "alpha": 0.2},
    {"name": "both", "detectors": ["loss", "min_k"], "procedure": "versions", "alpha": 0.2},
    {"name": "ranks", "detectors": ["loss"], "procedure": "bh", "alpha": 0.5},
]


def rows_of(count: int) -> list[Row]:
    """Documents with three sites of two forms each, in `K` versions of one length."""
    rng = np.random.default_rng(3)
    rows = []
    for number in range(count):
        words = [WORDS[i] for i in rng.integers(20, size=12 + number % 7)]
        kinds = [f"kind {kind}" for kind in rng.choice(4, 3)]
        forms = [bytes(int(choice) >> site & 1 for site in range(3)) for choice in rng.permutation(8)[:K]]
        texts = [" ".join([*words, *(WORDS[20 + 2 * site + form[site]] for site in range(3))]) for form in forms]
        index = int(rng.integers(K))
        rows.append({"id": f"d{number}", "versions": texts, "index": index, "kinds": kinds, "forms": forms})
    return rows


def settings(folder: Path, model: Path, rows: Sequence[Row], **changed: Any) -> dict[str, Any]:
    path = folder / "versions.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    source = {"path": str(path), "id": "id", "versions": {"kinds": "kinds", "forms": "forms"}}
    resources = {"cluster": "local", "shard_documents": 7, "shard_bytes": 1 << 30}
    plain = {"detectors": ["loss", "min_k"], "selections": SELECTIONS, "resources": resources}
    return versions_audit(folder, model, source, **{**plain, **changed})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    assert run_here(folder, settings(folder, tiny_model_folder, rows_of(40))) == 0
    return folder


Described = Callable[..., dict[str, Any]]


@pytest.fixture
def described(tmp_path: Path, tiny_model_folder: Path) -> Described:
    """Writes rows and describes their audit: (rows, **settings) -> configuration."""
    return partial(settings, tmp_path, tiny_model_folder)


def verdicts(folder: Path, name: str) -> dict[str, tuple[float, bool]]:
    rows = pq.read_table(folder / f"run/selection/{name}/documents").to_pylist()
    return {row["doc_id"]: (row["p_value"], row["selected"]) for row in rows}


def test_a_run_gives_the_list_that_python_gives(folder: Path, tiny_model_folder: Path) -> None:
    versions = read_versions(folder / "versions.parquet")
    scores = score(tiny_model_folder, [text for one in versions.texts for text in one], ["loss"])["loss"].to_numpy()
    answer = select_versions(versions, scores, alpha=0.2)
    expected = {row["doc_id"]: (row["rank"] / row["versions"], row["selected"]) for row in answer.documents.to_pylist()}
    assert verdicts(folder, "list") == expected


def test_the_summary_states_a_finite_sample_guarantee_that_names_the_draw(folder: Path) -> None:
    summaries = [summary_in(Store(str(folder / "run")), name) for name in LISTS]
    for summary in summaries:
        assert (summary.guarantee, summary.conclusion, summary.n_calibration) == ("finite-sample", "supported", 0)
        assert "drawn uniformly and independently" in summary.assumption
        assert summary.details["versions"] == K
        assert summary.bound is None
    assert [summary.minimum_selectable for summary in summaries] == [2, 2, 14]


def test_every_version_has_a_score_and_the_row_holds_that_of_the_published_one(folder: Path) -> None:
    scored = rows_scored(folder / "run")
    assert len(scored) == 40
    for source in rows_of(40):
        row = scored[source["id"]]
        held = row["versions"]
        both = np.array(held["scores"]).reshape(K, 2)
        assert held["published"] == source["index"]
        assert both[source["index"]].tolist() == [row["loss"], row["min_k"]]
        assert (held["kinds"], held["forms"]) == (source["kinds"], source["forms"])


def test_the_page_draws_the_ranks_and_names_what_is_not_needed(folder: Path) -> None:
    report = json.loads((folder / "run/report/report.json").read_text())
    for selection in report["selections"]:
        assert f"figures/{selection['summary']['name']}-version-ranks.svg" in selection["figures"]
        assert not any("p-values" in figure for figure in selection["figures"])
        lights = {light["label"]: light["colour"] for light in selection["brief"]["lights"]}
        assert lights["Unseen documents"] == lights["Shortest possible list"] == "grey"
        assert "calibrat" not in selection["answer"]["sentence"]


def test_the_answer_does_not_depend_on_shards_or_on_a_second_asking(
    folder: Path, tmp_path: Path, described: Described
) -> None:
    whole = {"cluster": "local", "shard_documents": 40, "shard_bytes": 1 << 30}
    audit = described(rows_of(40), resources=whole)
    for asked in (lambda: run_here(tmp_path, audit), lambda: ended("select", tmp_path / "run")):
        assert asked() == 0
        assert all(verdicts(tmp_path, name) == verdicts(folder, name) for name in LISTS)


def test_the_verdict_redraws_all_indices_and_its_e_value_multiplies(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("verdict", folder / "run") == 0
    assert "Redrawing the published versions of 40 documents 9,999 times gives p = " in capsys.readouterr().out
    verdict = read_verdict(Store(str(folder / "run")))
    assert (verdict.conclusion, verdict.counts, verdict.test) == ("supported", [], None)
    scores = preference_residuals(finite_scores(folder / "audit.yaml", ["loss", "min_k"]))
    assert verdict.versions.p_value == redraw_p_value(scores, 0)
    values = log_e_values(version_ranks(scores, 0, "against"), scores.sizes)
    assert verdict.versions.e_value == pytest.approx(math.exp(values[-1]))
    shutil.copytree(folder / "run", tmp_path / "unread")
    shutil.rmtree(tmp_path / "unread/scores")
    blocks = refusal(capsys, "verdict", tmp_path / "unread", "--blocks", "family")
    assert "--blocks is of documents that are compared with unseen ones" in blocks


@pytest.mark.parametrize(("text", "reason", "published"), [(" ", "empty", 0), ("a", "too_short", 2)])
def test_a_version_without_a_score_refuses_its_document_and_a_cut_one_truncates_it(
    tmp_path: Path, described: Described, text: str, reason: str, published: int
) -> None:
    rows = rows_of(20)
    rows[4]["versions"][2], rows[4]["index"] = text, published
    rows[5]["versions"][(rows[5]["index"] + 1) % K] += " red" * 40
    given = described(rows, error_budget=0.5, max_tokens=50)
    assert run_here(tmp_path, given) == 0
    assert sum(one.n_truncated for one in read_receipts(Store(given["run"]), "score")) == 1
    (receipt,) = [one for one in read_receipts(Store(given["run"]), "score") if one.n_quarantined]
    assert (receipt.n_in, receipt.n_scored, receipt.reasons) == (7, 6, {reason: 1})
    (row,) = pq.read_table(tmp_path / "run" / str(receipt.quarantine)).to_pylist()
    assert (row["doc_id"], row["message"][:11]) == ("d4", "version 2: ")
    for name in LISTS:
        assert verdicts(tmp_path, name)["d4"] == (1.0, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": K}, f"has index {K}, outside its {K} versions"),
        ({"index": K}, rf"has index {K}, .* \(from 0\); are these numbers from 1\? subtract 1"),
        ({"index": -1}, "has index -1, outside its"),
        ({"index": None}, "has index None, outside its"),
        (
            {"versions": ["red blue", "red blue"], "forms": [b"", b""], "kinds": [], "index": 0},
            "has two equal versions",
        ),
        ({"versions": ["red blue"], "index": 0}, "has 1 version; a document needs 2 or more"),
        ({"versions": [], "index": 0}, "has 0 versions; a document needs 2 or more"),
        ({"versions": None}, "has no list of versions, but NoneType"),
        ({"forms": [b"abc"]}, "has forms that are not of its versions"),
    ],
)
def test_a_row_that_no_draw_can_have_made_stops_the_plan(described: Described, change: Row, message: str) -> None:
    rows = rows_of(9)
    rows[8] = {**rows[8], **change}
    config = build_config(described(rows))
    with pytest.raises(UserError, match=f"row 8 of .*versions.parquet {message}"):
        make_plan(config)


def test_a_public_file_names_the_private_one_that_is_missing(tmp_path: Path, described: Described) -> None:
    given = described(rows_of(9))
    (tmp_path / "marked/public").mkdir(parents=True)
    for name in ("a.jsonl", "a.csv"):
        path = tmp_path / "marked/public" / name
        path.write_text('{"text": "red blue", "id": "x"}\n' if name == "a.jsonl" else "id,text\nx,red blue\n")
        given["corpus"]["audit"]["path"] = str(path)
        with pytest.raises(UserError, match=r"missing as corpus\.audit\.path is .*/marked/private/versions.parquet"):
            make_plan(build_config(given))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"detectors": ["loss", "knockoff"], "paraphraser": {"path": "t5"}},
            "detector knockoff needs paraphrases of a text, and the documents have versions",
        ),
        ({"detectors": ["loss", "samia"]}, "detector samia needs continuations of a text"),
        ({"detectors": ["loss", "recall"]}, "detector recall needs other documents before each"),
        ({"against": "other"}, "against needs documents without versions, and the documents have"),
        ({"selections": [{**SELECTIONS[0], "procedure": "storey"}]}, "take procedure bh, versions, or give texts"),
        (
            {"selections": [{**SELECTIONS[0], "direction": "clean"}]},
            "direction clean needs documents without versions, .* take direction members",
        ),
        (
            {"selections": [{**SELECTIONS[2], "calibration": "conditional"}]},
            "calibration conditional needs .*: take calibration pooled",
        ),
        ({"selections": [{**SELECTIONS[0], "confidence": 0.9}]}, "no bound at confidence 0.9 is available"),
        ({"unseen": {"path": "u.parquet"}}, "take the place of unseen and seen documents"),
        ({"audit": {"text": "body"}}, "text and versions: a source has documents of one kind"),
        ({"audit": {"versions": {"kinds": "kinds"}}}, "kinds and forms go together"),
        (
            {"audit": {"versions": None}},
            "procedure versions needs documents with versions, .* or give documents with versions",
        ),
        (
            {"audit": {"versions": None}, "unseen": {"path": "u.parquet", "versions": {}}},
            "versions are of documents to audit",
        ),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused(
    described: Described, changed: dict[str, Any], message: str
) -> None:
    sources = {role: changed[role] for role in ("audit", "unseen") if role in changed}
    rest = {key: value for key, value in changed.items() if key not in sources}
    given = described(rows_of(3), **rest)
    given["corpus"] |= {**sources, "audit": {**given["corpus"]["audit"], **sources.get("audit", {})}}
    with pytest.raises(UserError, match=message):
        build_config(given)


def test_lines_of_json_hold_versions_too_and_a_shard_of_them_survives_its_dictionary(
    tmp_path: Path, described: Described
) -> None:
    given = described(rows_of(9))
    lines = [{"name": row["id"], "of": row["versions"], "which": row["index"]} for row in rows_of(9)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    columns = {"column": "of", "index": "which"}
    given["corpus"]["audit"] = {"path": str(tmp_path / "a.jsonl"), "id": "name", "versions": columns}
    documents = []
    for shard in make_plan(build_config(given)).shards:
        assert Shard.from_dict(json.loads(json.dumps(shard.to_dict()))) == shard
        documents += list(read_shard(shard))
    for document, row in zip(documents, rows_of(9), strict=True):
        assert (document.doc_id, list(document.versions.texts)) == (row["id"], row["versions"])
        assert document.texts == document.versions.texts
        assert document.text == row["versions"][row["index"]]


def test_plan_states_the_shortest_list_and_what_to_expect(
    tmp_path: Path, described: Described, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.yaml"
    rows = rows_of(30)
    path.write_text(yaml.safe_dump(described(rows)))
    printed = " ".join(here(capsys, "plan", path)[0].split())
    assert "The shortest possible list of procedure versions has 2 documents." in printed
    assert "the shortest possible list of procedure bh has 3 of 30 documents" in printed
    assert "once 0%, 4 times 0%, 16 times 0% to 15%, 64 times 90%" in printed
    selection, *_ = json.loads(here(capsys, "plan", path, "--json")[0])["selections"]
    assert [row["auc"] for row in selection["expected"]] == [0.54, 0.56, 0.73, 0.996]  # Hubble, by copies
    tokens = sum(len(text.encode()) for row in rows for text in row["versions"]) / BYTES_PER_TOKEN
    assert f"about {tokens:,.0f} tokens a pass" in printed  # of every version


@pytest.mark.parametrize("index", ["1", 1.0, True, [1], math.nan])
def test_an_index_that_is_no_whole_number_is_named_with_its_type(index: object) -> None:
    kind = type(index).__name__
    with pytest.raises(UserError, match=rf"row 5 has index .* \({kind}, not a whole number\), outside its 2 versions"):
        row_versions("row 5", ["one text", "another"], [index], lambda _: None)


def test_a_misspelt_column_of_a_private_file_is_not_taken_for_a_public_file() -> None:
    source = SourceConfig.model_validate({"path": "versions.parquet", "versions": {"column": "version"}})
    with pytest.raises(UserError, match=r"no column 'version' in versions\.parquet; did you mean 'versions'"):
        check_columns(source, "versions.parquet", ["id", "versions", "index"])
    source = SourceConfig.model_validate({"path": "versions.parquet", "versions": {}})
    with pytest.raises(UserError, match=r"no column 'index' in versions\.parquet; .*columns: id, versions, published"):
        check_columns(source, "versions.parquet", ["id", "versions", "published"])
    with pytest.raises(UserError, match="the public files of seenset mark hold no versions"):
        check_columns(source, "public.parquet", ["id", "text"])
