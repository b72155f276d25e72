"""`seenset.score` and `seenset.select` say in memory what a run says."""

import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import seenset
from pipeline.answers.summarise import learnt_sentences
from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import forward
from tests.helpers.commands import user_error

TEXTS = ["The river of the village.", "seven Letters and a Bridge", "history, " * 40, "winter morning"]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> LanguageModel:
    return open_model(ModelConfig(path=str(tiny_model_folder)))


def log_prob(model: LanguageModel, text: str) -> torch.Tensor:
    (tokens,) = tokenize(model.tokenizer, [text], 1024)
    return forward(model, [tokens.ids], frozenset({"log_prob"})).log_prob[0].double()


def test_the_package_is_imported_in_a_moment_and_names_what_is_stable() -> None:
    code = "import seenset, sys; assert not {'torch', 'ray', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert dir(seenset) == sorted(seenset.__all__)
    assert all(getattr(seenset, name) is not None for name in seenset.__all__)
    with pytest.raises(AttributeError, match="no attribute 'scores'"):
        seenset.scores  # noqa: B018


def test_scores_are_those_of_the_passes_whatever_the_batch_also_of_an_own_detector(model: LanguageModel) -> None:
    @seenset.detector(needs={seenset.FORWARD: "log_prob"})
    def worst_token(evidence: seenset.Evidence) -> torch.Tensor:
        return evidence[seenset.FORWARD].log_prob.amin(1)

    detectors = ["loss", "lowercase", "gradient_norm", {"min_k": {"k": [0.5, 1.0]}}, "worst_token"]
    table, alone = (seenset.score(model, TEXTS, detectors, **size) for size in ({}, {"batch_tokens": 1}))
    assert table["doc_id"].to_pylist() == ["0", "1", "2", "3"]
    assert table["problem"].null_count == len(TEXTS)
    for column in ("loss", "lowercase", "gradient_norm", "min_k(k=0.5)", "min_k(k=1.0)", "worst_token"):
        assert alone[column].to_pylist() == pytest.approx(table[column].to_pylist(), rel=1e-4), column
    own = [log_prob(model, text) for text in TEXTS]
    assert table["loss"].to_pylist() == pytest.approx([one.mean().item() for one in own], rel=1e-4)
    assert alone["worst_token"].to_pylist() == pytest.approx([one.min().item() for one in own], rel=1e-4)
    assert table["n_tokens"].to_pylist() == [1 + len(one) for one in own]


def test_a_bad_text_is_a_row_without_a_score(model: LanguageModel) -> None:
    bad: list[Any] = [None, 7, " ", "\ud800", "a", "good enough to score"]
    table = seenset.score(model, bad, ["loss"], ids=list("abcdef"))
    assert table["doc_id"].to_pylist() == list("abcdef")
    reasons = [None if problem is None else problem.split(":")[0] for problem in table["problem"].to_pylist()]
    assert reasons == ["not_text", "not_text", "empty", "undecodable", "too_short", None]
    assert [value is None for value in table["loss"].to_pylist()] == [True] * 5 + [False]
    assert seenset.score(model, [], ["loss"]).num_rows == 0


def test_what_scoring_in_memory_cannot_do_is_one_line(model: LanguageModel) -> None:
    for detectors, settings, message in (
        (["reference"], {}, "detector reference needs more: use seenset.audit"),
        (["samia"], {}, "detector samia needs more"),
        ([{"knockoff": {"base": "loss"}}], {}, "needs more"),
        (["fsd"], {}, "needs more"),
        (["losss"], {}, "did you mean 'loss'"),
        (["loss"], {"max_tokens": 1}, "max_tokens must be at least 2, got 1"),
        (["loss"], {"ids": ["a"]}, "ids must be one per text, got 1 ids for 4 texts"),
    ):
        with pytest.raises(UserError, match=message):
            seenset.score(model, TEXTS, detectors, **settings)


def made_up(seed: int, members: int = 0, documents: int = 200) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=documents)
    scores[:members] += 5
    return scores


def test_a_document_without_a_score_is_a_hypothesis_with_p_1() -> None:
    audited = made_up(1, members=40)
    audited[[0, 100]] = math.nan
    answer = seenset.select(audited, made_up(2), procedure="storey", alpha=0.1)
    assert answer.p_values[[0, 100]].tolist() == [1.0, 1.0]
    assert not answer.selected[[0, 100]].any()
    assert (answer.summary.n_audit, answer.summary.n_quarantined) == (200, 2)
    assert answer.selected[1:40].all()


def table(seed: int, members: int = 0) -> pa.Table:
    """Scores of two detectors, of documents in two groups."""
    columns = {"loss": made_up(seed, members), "min_k": made_up(seed + 100, members), "group": ["a", "b"] * 100}
    return pa.table({"doc_id": [f"{seed}-{i}" for i in range(200)], **columns})


def test_tables_of_several_detectors_are_fused_and_groups_calibrated_on_their_own() -> None:
    assert "columns loss, min_k: choose, as in" in user_error(seenset.select, table(1, 40), table(2))
    one = seenset.select(table(1, 40), table(2), detectors=["min_k"])
    assert (one.p_values == seenset.select(made_up(101, 40), made_up(102)).p_values).all()
    both = seenset.select(table(1, 40), table(2), procedure="td4eval", reconformal=True)
    assert both.selected[:40].mean() > 0.5
    clean = seenset.select(-made_up(3, 40), seen=-made_up(4), direction="clean", procedure="bh")
    assert clean.selected.shape == (200,)
    answer = seenset.select(table(1, 40), table(2), calibration="by_group", detectors=["loss"])
    scores, unseen = made_up(1, 40), made_up(2)
    for first in (0, 1):
        p = [(1 + (unseen[first::2] >= score).sum()) / 101 for score in scores[first::2]]
        assert np.allclose(answer.p_values[first::2], p)


def test_what_a_selection_cannot_do_is_one_line() -> None:
    for arguments, message in (
        ({"alpha": 1.5}, r"alpha: must be in \(0, 1\), got 1.5"),
        ({"procedure": "storeyy"}, "unknown procedure 'storeyy'; did you mean 'storey'"),
        ({"direction": "clean"}, "direction clean is calibrated on seen documents"),
        ({"procedure": "ptdi_known_members"}, "needs seen documents too"),
        ({"procedure": "known_members"}, "needs seen documents too"),
        ({"lambda_": 1.0}, r"lambda: must be in \(0, 1\), got 1.0"),
        ({"procedure": "bh", "lambda_": 0.5}, "lambda is of Storey's estimate, and procedure bh makes none"),
        ({"procedure": "adadetect", "lambda_": 0.5}, "take procedure storey or step_up storey"),
        ({"procedure": "bh", "step_up": "storey"}, "step_up storey is for procedures adadetect and td4eval"),
        ({"step_up": "storey"}, "got procedure storey, which estimates by itself"),
        ({"procedure": "ptdi_known_members", "calibration": "by_group"}, "takes calibration pooled or conditional"),
        ({"calibration": "by_group"}, "needs a column group"),
        ({"detectors": ["los"]}, "no score column 'los'"),
        ({"detectors": "score"}, r"detectors must be a sequence of columns, got 'score'; write \['score'\]"),
        ({"detectors": ["doc_id"]}, "audit: column 'doc_id' holds no numbers, but string"),
        ({"detectors": ["score", "score"], "procedure": "adadetect"}, "detectors names 'score' twice"),
        ({"unseen": np.zeros((2, 2))}, r"unseen: scores must be a table or one number per document, got shape"),
        ({"unseen": "abc"}, "scores must be a table or numbers, got str"),
        ({"unseen": np.array([])}, "no calibration documents"),
        ({"unseen": None}, "calibrated on unseen documents, which are not given"),
    ):
        with pytest.raises(UserError, match=message):
            seenset.select(**{"scores": made_up(1), "unseen": made_up(2), **arguments})


def test_an_answer_prints_what_its_guarantee_is_worth_and_warns_where_it_is_void() -> None:
    rng = np.random.default_rng(0)
    audited, fair = rng.normal(size=80), rng.normal(size=200)
    untested = seenset.select(audited, unseen=fair, procedure="bh")
    assert repr(untested) == f"Selected({untested.summary.line()})"
    assert repr(untested).endswith("of 80 selected (bh, alpha 0.1, finite-sample), inconclusive (not checked))")
    with pytest.warns(seenset.UnsupportedWarning, match="CONTRADICTED") as caught:
        void = seenset.select(audited, unseen=np.abs(fair), procedure="ktd")  # every sign is positive
    assert caught[0].filename == __file__
    assert repr(void).startswith("Selected(selection: CONTRADICTED, do not act on it: ")


def test_documents_without_an_own_id_or_a_score_of_floats_are_one_line() -> None:
    scores = np.arange(30.0)
    unseen = pa.table({"doc_id": [f"u{i}" for i in range(30)], "score": scores})
    without = pa.table({"doc_id": ["a", None, *(f"d{i}" for i in range(28))], "score": scores})
    same = pa.table({"doc_id": ["x", "x", *(f"d{i}" for i in range(28))], "score": scores})
    whole_numbers = pa.table({"doc_id": [f"d{i}" for i in range(30)], "score": np.arange(30)})
    assert "1 of 30 documents have no doc_id" in user_error(seenset.select, without, unseen)
    said = user_error(seenset.select, same, unseen, ranks="smoothed")
    assert "the 30 audited documents have 29: give each its own" in said
    seenset.select(same, unseen)
    assert "no column of scores is of floating-point numbers" in user_error(seenset.select, whole_numbers, unseen)
    assert "must be a table or numbers" in user_error(seenset.select, [10**400, 1], scores)
    nulls = pa.table({"doc_id": [f"d{i}" for i in range(30)], "loss": pa.nulls(30)})
    assert "audit: column 'loss' holds only nulls" in user_error(seenset.select, nulls, unseen)
    lists = unseen.append_column("group", pa.array([["a"]] * 30))
    line = user_error(seenset.select, lists, lists, calibration="by_group")
    assert line == "column 'group' must hold texts, got list<item: string>"


def test_groups_without_calibration_documents_are_counted_with_a_remedy() -> None:
    audited, known = (
        pa.table({"doc_id": list("abcdef"), "score": np.arange(6.0), "group": list(groups)})
        for groups in ("uvwuvw", "uuuuuu")
    )
    line = user_error(seenset.select, audited, known, calibration="by_group")
    assert "group 'v' has audit documents and no calibration documents, and 1 more have none: add some" in line
    split = {"procedure": "adadetect", "learn": "split", "detectors": ["score", "other"]}
    two = [table.append_column("other", pa.array(np.arange(6.0))) for table in (audited, known.slice(0, 6))]
    line = user_error(seenset.select, two[0], two[1].slice(0, 1), **split)
    assert "take learn: pool, or give more calibration documents" in line


def scored_table(count: int, name: str, **columns: Any) -> pa.Table:
    ids = [f"{name}{number}" for number in range(count)]
    return pa.table(
        {"doc_id": ids, "loss": made_up(len(name), documents=count), "n_tokens": np.arange(count), **columns}
    )


def test_columns_of_other_numbers_are_named_where_they_are_not_read() -> None:
    label, flag = np.arange(30) % 2, np.arange(30) % 3 == 0
    table, unseen = scored_table(30, "a", label=label, flag=flag), scored_table(30, "uu", label=label, flag=flag)
    with pytest.warns(UserWarning, match=r"not read as scores: label \(int64\), flag \(bool\); without") as caught:
        by_default = seenset.select(table, unseen)
    assert caught[0].filename == __file__
    assert by_default.summary.detectors == ["loss"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for column in ("loss", "label", "flag"):
            assert seenset.select(table, unseen, detectors=[column]).summary.detectors == [column]
        seenset.select(scored_table(30, "a"), scored_table(30, "uu"))  # the columns that seenset.score adds


def test_what_is_no_table_is_refused_with_what_makes_one_of_it() -> None:
    table = scored_table(30, "a")

    class OfPolars:
        def to_arrow(self) -> pa.Table:
            return table

    for scores, remedy in (
        (table.to_pandas(), "got DataFrame; write pyarrow.Table.from_pandas(scores)"),
        (table.to_pydict(), "got dict; write pyarrow.table(scores)"),
        (table.to_batches()[0], "got RecordBatch; write pyarrow.Table.from_batches([scores])"),
        (OfPolars(), "got OfPolars; write scores.to_arrow()"),
        (None, "got NoneType"),
        (np.array([1 + 2j]), "got ndarray"),
    ):
        said = user_error(seenset.select, scores, made_up(2))
        assert said == f"audit: scores must be a table or numbers, {remedy}"


def test_a_score_that_is_not_finite_is_missing_in_every_role() -> None:
    scores, unseen = made_up(1), made_up(2)
    scores[:3], unseen[:2] = (np.inf, -np.inf, np.nan), (np.inf, -np.inf)
    summary = seenset.select(scores, unseen).summary
    assert (summary.n_quarantined, summary.n_calibration) == (3, unseen.size - 2)


def test_known_members_teach_a_score_and_it_is_said_what_it_was_learnt_from() -> None:
    def table(seed: int, count: int, shift: float = 0.0) -> pa.Table:
        columns = np.random.default_rng(seed).normal(shift, size=(2, count))
        return pa.table(dict(zip(("a", "b"), columns, strict=True)))

    given = {"scores": table(1, 60), "unseen": table(2, 50), "seen": table(3, 1, 2.0), "procedure": "adadetect"}
    stated = "The score is learnt from 1 known seen document and the unordered pool of all others; learn is of"
    with pytest.warns(UserWarning, match=stated) as caught:
        pool = seenset.select(**given, learn="pool")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = seenset.select(**given, learn="split")
    for answer in (pool, split):
        assert learnt_sentences(answer.summary)[0].startswith(stated)


@pytest.mark.parametrize(
    "ids", [pa.array(["a", "b", "c"]).dictionary_encode(), pa.array(["a", "b", "c"], pa.string_view())]
)
def test_smoothed_ranks_take_ids_of_any_type_of_text(ids: pa.Array) -> None:
    unseen = pa.table({"doc_id": [str(one) for one in range(60)], "x": [0.0] * 60})
    audited = pa.table({"doc_id": ids, "x": [9.0] * 3})
    assert seenset.select(audited, unseen=unseen, procedure="bh", ranks="smoothed").selected.all()
    with pytest.raises(UserError, match="no audit documents"):
        seenset.select([], unseen=[1.0, 2.0], procedure="bh", ranks="smoothed")
