"""Documents given as token ids: the scores of the texts that they come from; and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.small_model import WORDS
from pipeline.config.corpus import SourceConfig, TrainingSource
from pipeline.corpus.documents import ids_text
from pipeline.corpus.formats.base import Unreadable
from pipeline.errors import UserError
from pipeline.plan.allocation import allocate
from pipeline.plan.description import build_config
from pipeline.plan.forecast import forecast
from pipeline.results.summary import read_summary
from pipeline.run.plan import make_plan
from pipeline.stages.prefixes import given_ids
from pipeline.stages.registry import check_stages
from pipeline.store.files import Store
from tests.helpers.commands import ended
from tests.helpers.finished import rows as rows_scored
from tests.helpers.made_up import write_corpus, write_rows

ROLES = ("audit", "unseen", "seen")
DETECTORS: list[Any] = [
    "loss", "zlib", "min_k", "min_k_plus_plus", "gradient_norm", "camia", "ez", "wbc", "reference",
    {"recall": {"shots": 1}}, {"con_recall": {"shots": 1}}, {"codec": {"shots": 4}}, {"dc_pdd": {"documents": 7}},
]  # fmt: skip
SELECTIONS = [{"name": "bh", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}]
MAX_TOKENS = 24
"""Of which some documents have more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """Texts, and their ids by the tokenizer of the tiny model, as Parquet; and another model beside."""
    folder, rng = tmp_path_factory.mktemp("ids"), np.random.default_rng(7)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    other = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    torch.nn.init.normal_(other.lm_head.weight, generator=torch.Generator().manual_seed(1))
    other.save_pretrained(folder / "other")
    tokenizer.save_pretrained(folder / "other")
    for role in ROLES:
        texts = [" ".join(WORDS[i] for i in rng.integers(30, size=6 + n % 30)) for n in range(40)]
        ids = pa.array([tokenizer(text)["input_ids"] for text in texts], pa.list_(pa.int32()))
        table = pa.table({"id": [f"{role}{n}" for n in range(40)], "text": texts, "input_ids": ids})
        pq.write_table(table, folder / f"{role}.parquet")
    return folder


def settings(folder: Path, sources: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    corpus = {role: {"id": "id", **source} for role, source in sources.items()}
    given = {"model": {"path": str(folder), "dtype": "float32"}, "corpus": corpus, "max_tokens": MAX_TOKENS}
    resources = {"cluster": "local", "shard_bytes": 1 << 20}  # scores depend on what shares a batch
    return {**given, "detectors": ["loss"], "selections": SELECTIONS, "resources": resources, **changed}


def run(folder: Path, name: str, given: Mapping[str, Any]) -> Store:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run": str(folder / name), **given}))
    assert ended("run", str(path)) == 0
    return Store(str(folder / name))


def test_token_ids_give_the_scores_of_their_texts_to_the_byte(folder: Path, tiny_model_folder: Path) -> None:
    stores = {}
    for column in ("text", "tokens"):
        held = "text" if column == "text" else "input_ids"
        sources = {role: {"path": str(folder / f"{role}.parquet"), column: held} for role in ROLES}
        given = settings(tiny_model_folder, sources, detectors=DETECTORS, overlap="drop")
        given["reference_model"] = {"path": str(folder / "other"), "dtype": "float32"}
        stores[column] = run(folder, column, given)
    texts, ids = (rows_scored(store.root) for store in stores.values())
    same = [name for name in texts["audit0"] if name not in ("text_key", "sketch")]
    assert {name: [row[name] for row in ids.values()] for name in same} == {
        name: [row[name] for row in texts.values()] for name in same
    }
    assert {row["truncated"] for row in ids.values()} == {True, False}
    for key in ("text_key", "sketch"):  # of the numbers
        assert len({str(row[key]) for row in ids.values()}) == 120
    summaries = [read_summary(store, "bh") for store in stores.values()]
    assert all(summaries)
    assert summaries[0].n_selected == summaries[1].n_selected > 0
    blind = summaries[1].diagnostics.blind
    assert (blind.by, blind.auc is not None, "word" in blind.sentence) == ("tokens", True, False)
    assert stores["text"].names("selection/bh", "evidence.parquet")
    assert not stores["tokens"].names("selection/bh", "evidence.parquet")  # no text is shown token by token


BAD: list[tuple[Any, str, str]] = [
    ("1 2", "not_text", "str, not a list of token ids"),
    (7, "not_text", "int, not a list of token ids"),
    ([], "empty", "no token ids"),
    ([3, -1], "not_text", "-1 is no token id: an id is an integer from 0"),
    ([3, 1.0], "not_text", "1.0 is no token id: an id is an integer from 0"),
    ([True, 3], "not_text", "True is no token id: an id is an integer from 0"),
    ([3], "too_short", "1 tokens; a score needs 2"),
    ([3, 4, 10**6], "model_error", "token id 1000000 has no row in the model's embedding of "),
    ([3, 4, 10**30], "model_error", f"token id {10**30} has no row in the model's embedding of "),
]


def test_bad_ids_send_a_document_to_quarantine_and_equal_ids_are_found(tmp_path: Path, tiny_model_folder: Path) -> None:
    rng = np.random.default_rng(3)
    of = {role: [{"id": f"{role}{n}", "ids": rng.integers(3, 90, 12).tolist()} for n in range(20)] for role in ROLES}
    of["unseen"][4]["ids"] = of["audit"][7]["ids"]
    of["audit"] += [{"id": f"bad{n}", "ids": value} for n, (value, *_) in enumerate(BAD)]
    sources = write_corpus(tmp_path, of, tokens="ids")
    changed = {"error_budget": 0.5, "detectors": ["loss", "zlib"], "overlap": "drop"}
    store = run(tmp_path, "run", settings(tiny_model_folder, sources, **changed))
    refused = {row["doc_id"]: row for row in pq.read_table(f"{store.root}/quarantine").to_pylist()}
    assert len(refused) == len(BAD)
    for number, (_, reason, message) in enumerate(BAD):
        row = refused[f"bad{number}"]
        assert (row["reason"], row["message"][: len(message)]) == (reason, message)
    assert len(rows_scored(store.root)) == 60
    summary = read_summary(store, "bh")
    assert (summary.n_calibration, summary.n_quarantined) == (19, len(BAD))  # the same ids are the same document


def test_ids_are_a_text_of_numbers() -> None:
    assert ids_text([12, 5, 0]) == "12 5 0"
    damaged = Unreadable("undecodable", "no JSON")
    assert ids_text(damaged) is damaged


@pytest.mark.parametrize("detector", ["recall", "con_recall", "codec", "dc_pdd"])
def test_a_known_document_with_an_unknown_id_is_neither_shown_nor_counted(
    tmp_path: Path, tiny_model_folder: Path, detector: str
) -> None:
    rng = np.random.default_rng(3)
    rows = {role: [{"ids": rng.integers(3, 90, 12).tolist()} for n in range(12)] for role in ROLES}
    for row in (*rows["unseen"][:7], *rows["seen"][:7]):
        row["ids"][5] = 10**9
    sources = write_corpus(tmp_path, rows, tokens="ids")
    argument = "documents" if detector == "dc_pdd" else "shots"
    given = settings(tiny_model_folder, sources, error_budget=1, selections=[])
    store = run(tmp_path, "run", {**given, "detectors": [{detector: {argument: 4}}]})
    assert len(pq.read_table(f"{store.root}/quarantine")) == 14
    config = build_config({**given, "run": str(tmp_path / "more"), "detectors": [{detector: {argument: 5}}]})
    with pytest.raises(UserError, match=f"has 5 documents, 5 {argument} need 6"):
        allocate(config, make_plan(config).shards)


def test_documents_of_a_prefix_are_joined_with_one_mark_of_the_beginning() -> None:
    texts = ["1 5 6", "1 7", "8 1 9"]
    bare = [[5, 6], [7], [8, 1, 9]]
    assert given_ids(texts, 1, joined=True) == ([[1, 5, 6, 7, 8, 1, 9]], bare)
    assert given_ids(texts, 1, joined=False) == ([[1, 5, 6], [1, 7], [8, 1, 9]], bare)
    assert given_ids(texts[:2], None, joined=True) == ([[1, 5, 6, 1, 7]], [[1, 5, 6], [1, 7]])


def test_a_reference_scores_token_ids_only_with_the_vocabulary_of_the_target(
    folder: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    """A tokenizer that splits otherwise and begins otherwise will do: it tokenises nothing."""
    sources = {role: {"path": str(folder / f"{role}.parquet"), "tokens": "input_ids"} for role in ROLES}
    AutoModelForCausalLM.from_pretrained(tiny_model_folder).save_pretrained(tmp_path / "apart")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(tmp_path / "apart")
    given = settings(tiny_model_folder, sources, run=str(tmp_path / "run"), selections=[])
    given["reference_model"] = {"path": str(tmp_path / "apart"), "dtype": "float32"}
    for name in ("reference", "ez"):
        check_stages(build_config({**given, "detectors": [name]}))
    tokenizer.add_tokens(["unheard-of"])
    tokenizer.save_pretrained(tmp_path / "apart")
    for name in ("reference", "wbc"):
        expected = f"^detector {name} gives model .* the same ids, .*'unheard-of' has id none"
        with pytest.raises(UserError, match=expected):
            check_stages(build_config({**given, "detectors": [name]}))


IDS_TAKE = "camia, gradient_norm, loss, .* more, or give texts"
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("corpus.audit: text and tokens: a source has documents of one kind; leave one of them out", {"text": "text"}, {}),
    ("image and tokens: a source has documents of one kind", {"image": "text"}, {}),
    ("tokens and versions: a source has documents of one kind", {"versions": {}}, {}),
    ("tokens and scores: a source has documents of one kind", {"scores": ["x"]}, {}),
    ("no column 'inputs' in .*; did you mean 'input_ids'", {"tokens": "inputs"}, {}),
    ("column 'text' in .* holds string, not lists of integers", {"tokens": "text"}, {}),
    (
        "all documents must be of one kind, got texts in corpus.audit and token ids in corpus.unseen and ",
        {"tokens": None},
        {},
    ),
    (
        "text_transform needs texts to change, and the documents are token ids",
        {},
        {"text_transform": {"dates": "remove"}},
    ),
    (
        "endpoint m needs texts to send, and the documents are token ids: give weights, or give texts",
        {},
        {"model": {"endpoint": "http://x/v1", "name": "m"}},
    ),
    *(
        (f"detector {name}.* needs .*, and the documents are token ids: take {IDS_TAKE}", {}, {"detectors": [name]})
        for name in ("lowercase", "pac", "samia", "coverage", "cdd", "fsd", "knockoff")
    ),
]


@pytest.mark.parametrize(("message", "audited", "changed"), REFUSED, ids=[str(case[1:]) for case in REFUSED])
def test_what_token_ids_do_not_take_is_refused_in_one_line(
    folder: Path, tiny_model_folder: Path, message: str, audited: dict[str, Any], changed: dict[str, Any]
) -> None:
    sources = {role: {"path": str(folder / f"{role}.parquet"), "tokens": "input_ids"} for role in ROLES}
    sources["seen"] = {**sources["unseen"]}
    sources["audit"] |= audited
    others = {"reference_model": {"path": str(folder / "other")}, "paraphraser": {"path": str(folder / "other")}}
    given = settings(tiny_model_folder, sources, **{"run": str(folder / "refused"), **others, **changed})
    with pytest.raises(UserError, match=message):
        make_plan(build_config(given))


def test_tokens_are_read_of_tables_that_hold_lists(tmp_path: Path, tiny_model_folder: Path) -> None:
    lists = {"id": ["a", "b"], "ids": pa.array([[1, 2], [3, 4]], pa.list_(pa.uint16(), 2)), "far": [[1.0], [2.0]]}
    feather.write_feather(pa.table(lists), tmp_path / "t.arrow")
    (tmp_path / "t.csv").write_text("id,ids\na,1 2\n")

    def plan(file: str, column: str) -> int:
        sources = {role: {"path": str(tmp_path / file), "tokens": column} for role in ROLES}
        given = settings(tiny_model_folder, sources, run=str(tmp_path / "run"))
        return make_plan(build_config(given)).documents("audit")[0]

    assert plan("t.arrow", "ids") == 2
    with pytest.raises(UserError, match=r"column 'far' in .* holds list<.*double>, not lists of integers"):
        plan("t.arrow", "far")
    with pytest.raises(UserError, match=r"corpus\.\w+\.tokens: a column of lists is read of parquet, jsonl, "):
        plan("t.csv", "ids")


def test_nothing_is_trained_on_token_ids_and_the_manifest_reads_back() -> None:
    source = SourceConfig(path="x.parquet", tokens="input_ids")
    assert SourceConfig(**source.model_dump()) == source
    assert "tokens" not in SourceConfig(path="x.parquet").model_dump()
    with pytest.raises(ValidationError, match="these are trained on: give text"):
        TypeAdapter(TrainingSource).validate_python(source.model_dump())


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_plan_counts_the_ids_of_the_first_documents(
    form: str, folder: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    sources, expected = {}, 0
    for role in ROLES:
        rows = pq.read_table(folder / f"{role}.parquet", columns=["id", "input_ids"])
        expected += sum(min(len(ids), MAX_TOKENS) for ids in rows["input_ids"].to_pylist())
        path = tmp_path / f"{role}.{form}"
        if form == "parquet":
            pq.write_table(rows, path)
        else:
            write_rows(path, rows.to_pylist())
        sources[role] = {"path": str(path), "tokens": "input_ids"}
    described = {"run": str(tmp_path / "run"), **settings(tiny_model_folder, sources)}
    facts = forecast(make_plan(build_config(described)), {"dtype": "float32"})
    assert facts["estimated_tokens"] == pytest.approx(expected, rel=0.05)
