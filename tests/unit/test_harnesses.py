"""Claims about results of harnesses: logs of inspect_ai, details of lighteval and CSV are read as they are meant."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.compare.harnesses import read_all_results
from pipeline.compare.harnesses.base import ItemResults, ResultOptions
from pipeline.compare.harnesses.results_table import read_results_table
from pipeline.corpus.formats.base import ExportSource
from pipeline.corpus.formats.inspect_log import INSPECT_LOG
from pipeline.errors import UserError
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from tests.helpers.commands import ended, refusal, user_error

DATE = "2026-02-03T04-05-06.789012"
Evaluated = Callable[..., Path]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Run inspect_ai itself on 9 items, of which a model that always answers "1" has three right."""
    inspect_ai = pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import Score, accuracy, match, scorer
    from inspect_ai.solver import generate

    @scorer(metrics={"strict": [accuracy()], "partly": [accuracy()]})
    def two() -> Any:
        async def score(state: Any, target: Any) -> Any:
            return Score(value={"strict": "C", "partly": 0.25})

        return score

    def outputs() -> Iterator[Any]:
        while True:
            output = ModelOutput.from_content("mockllm/model", "1")
            output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
            yield output

    def evaluate(name: str, shuffle: bool = False, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        samples = [
            Sample(input=f"{'long ' * 100}question {row}", target=str(row % 3), metadata={"uid": f"u{row}"})
            for row in range(9)
        ]
        dataset = MemoryDataset(samples)
        if shuffle:
            dataset.shuffle(3)
        task = inspect_ai.Task(dataset=dataset, solver=generate(), scorer=[match(), two()], name="sums")
        model = get_model("mockllm/model", custom_outputs=outputs())
        (log,) = inspect_ai.eval(task, model=model, log_dir=str(folder), display="none", **settings)
        assert log.status == "success"
        return Path(log.location)

    return evaluate


def read(path: Path | str, **options: Any) -> ItemResults:
    (results,) = read_all_results([str(path)], ResultOptions(**options))
    return results


def test_a_log_of_inspect_ai_is_read_by_row_and_by_id(evaluated: Evaluated) -> None:
    log = evaluated("plain")
    by_row = read(log, metric="match")
    assert (by_row.model, by_row.task, by_row.metric, by_row.by_id) == ("mockllm/model", "sums", "match", False)
    assert by_row.values == {str(row): float(row % 3 == 1) for row in range(9)}
    assert by_row.fields["4"] == [f"{'long ' * 100}question 4"]
    by_id = read(log, metric="match", id_field="uid")
    assert by_id.values == {f"u{row}": float(row % 3 == 1) for row in range(9)}
    assert set(read(log, metric="two.partly").values.values()) == {0.25}
    assert read(f"name={log}", metric="match").model == "name"
    (of_folder,) = read_all_results([str(log.parent)], ResultOptions(metric="match"))
    assert of_folder.values == by_row.values


def test_epochs_are_averaged_and_other_data_sets_need_ids(evaluated: Evaluated) -> None:
    assert read(evaluated("twice", epochs=2), metric="match").values == {
        str(row): float(row % 3 == 1) for row in range(9)
    }
    shuffled = evaluated("shuffled", shuffle=True)
    with pytest.raises(UserError, match=r"its data set was shuffled, so that rows are unknown; --id FIELD"):
        read(shuffled, metric="match")
    assert read(shuffled, metric="match", id_field="uid").values["u4"] == 1
    with pytest.raises(UserError, match="its data set has 9 items, of which 4 were asked"):
        read(evaluated("few", limit=4), metric="match")


def test_logs_that_hold_no_results_are_one_line(evaluated: Evaluated, tmp_path: Path) -> None:
    log = evaluated("bad")
    assert "choose with --metric one of match, two.strict, two.partly" in user_error(read, log)
    assert "no metric 'mach'; did you mean 'match'" in user_error(read, log, metric="mach")
    assert "no field 'uit' in its doc; did you mean 'uid'" in user_error(read, log, metric="match", id_field="uit")
    assert "--filter is of sample files of lm-eval" in user_error(read, log, metric="match", filter="none")
    assert "has no samples: run inspect eval" in user_error(read, evaluated("none", log_samples=False))
    (tmp_path / "x.eval").write_text("{}")
    assert "is no log of inspect_ai" in user_error(read, tmp_path / "x.eval")
    (tmp_path / "y.eval").write_bytes(log.read_bytes()[:500])
    assert "is no whole zip archive" in user_error(read, tmp_path / "y.eval")


def write_details(folder: Path, rows: Sequence[dict[str, Any]], model: str = "org/model", date: str = DATE) -> Path:
    """Details where lighteval 0.13 puts them."""
    path = folder / "details" / model / date / f"details_lighteval|sums|0_{date}.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def detail(row: int, **metric: Any) -> dict[str, Any]:
    """A row of details, with the fields of `Doc` and `ModelResponse` that matter."""
    doc = {
        "query": f"what is {row}",
        "choices": ["yes", "no"],
        "gold_index": [row % 2],
        "id": str(row),
        "task_name": "lighteval|sums|0",
        "specific": {"uid": f"u{row}"},
    }
    return {"doc": doc, "metric": metric, "model_response": {"logprobs": [-1.0, -2.0], "text": []}}


def test_details_of_lighteval_are_read_by_the_row_before_its_shuffling(tmp_path: Path) -> None:
    rows = [detail(row, acc=row % 2, em=0.5) for row in (3, 0, 2, 1)]
    path = write_details(tmp_path, rows)
    results = read(path)
    assert (results.model, results.task, results.metric) == ("org/model", "sums", "acc")
    assert results.values == {"0": 0.0, "1": 1.0, "2": 0.0, "3": 1.0}
    assert results.fields["3"] == ["what is 3", "yes", "no"]
    assert read(path, id_field="uid", metric="em").values == {f"u{row}": 0.5 for row in range(4)}
    later = "2026-03-01T00-00-00.000000"
    write_details(tmp_path, [detail(row, acc=1.0) for row in range(4)], date=later)
    write_details(tmp_path, [detail(row, acc=0.0) for row in range(4)], model="org/other")
    first, second = read_all_results([str(tmp_path)], ResultOptions())
    assert (first.model, sum(first.values.values())) == ("org/model", 4)
    assert (second.model, sum(second.values.values())) == ("org/other", 0)


def test_details_of_another_version_are_one_line(tmp_path: Path) -> None:
    old = tmp_path / f"details_sums_{DATE}.parquet"
    pq.write_table(pa.table({"example": ["x"], "metrics": [{"acc": 1.0}]}), old)
    line = user_error(read, old)
    assert "has no column 'doc', as lighteval writes it from version 0.10 on; columns: example, metrics" in line
    named = write_details(tmp_path, [{**detail(0, acc=1.0), "doc": {"query": "x", "id": "a"}}])
    assert "doc.id must be the row of the item, got 'a'" in user_error(read, named)
    first = write_details(tmp_path, [detail(0, acc=None, em=1), detail(1, acc=1, em=0)], model="null")
    assert "row 1: acc must be a number in [0, 1], got None" in user_error(read, first)
    flat = write_details(tmp_path, [{**detail(0), "metric": "acc"}], model="flat")
    assert "row 1: doc and metric must be objects, got dict and str" in user_error(read, flat)
    none = write_details(tmp_path, [detail(0, acc=1.0)], model="empty")
    pq.write_table(pq.read_table(none).slice(0, 0), none)
    assert "holds no results" in user_error(read, none)


def test_a_table_in_csv_keeps_ids_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text('\ufeffmodel,item,correct\na,007,true\na,08,0\nb,007,0.5\nb,08,FALSE\n"a","x,y",1\n', "utf-8")
    assert read_results_table(str(path)) == {
        "a": {"007": 1.0, "08": 0.0, "x,y": 1.0},
        "b": {"007": 0.5, "08": 0.0},
    }
    for text, line in (
        ("model,item\na,1\n", "no column 'correct' in"),
        ("model;item;correct\na;1;1\n", "columns: model;item;correct"),
        ("model,item,correct\na,1,maybe\n", "correct must be true, false or in [0, 1], got maybe for item '1'"),
        ("model,item,correct\na,1,\n", "correct must be true, false or in [0, 1], got  for item '1'"),
        ("model,item,correct\na,1,nan\n", "got nan for item '1'"),
        ("model,item,correct\na,1,1\na,1,0\n", "model 'a' has two results for item '1'"),
        ("model,item,correct\n", "holds no results"),
        ("model,item,correct,correct\na,1,1,1\n", "column 'correct' occurs 2 times in"),
        ("", "cannot read results"),
    ):
        path.write_text(text)
        assert line in user_error(read_results_table, str(path)), json.dumps(text)


def test_a_table_is_read_in_the_encoding_of_its_mark_and_another_is_named(tmp_path: Path) -> None:
    path, text = tmp_path / "my items.csv", "model,item,correct\na,caf\xe9,1\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes(text.encode(encoding))
        assert read_results_table(str(path)) == {"a": {"caf\xe9": 1.0}}, encoding
    path.write_bytes(b"\xfe\xff" + text.encode("utf-16-be"))
    assert read_results_table(str(path)) == {"a": {"caf\xe9": 1.0}}
    path.write_bytes(text.encode("latin-1"))
    line = f"byte 24 is not UTF-8; save the file in UTF-8: iconv -f cp1252 -t utf-8 '{path}' > utf8.csv"
    assert line in user_error(read_results_table, str(path))


def test_blanks_around_values_of_a_csv_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text('model , item, correct\n a ,\t7, 1\n"a " , "b c" ,0 \n')
    assert read_results_table(str(path)) == {"a": {"7": 1.0, '"b c"': 0.0}}
    path.write_text("model,item,correct\na,1,1\na, ,1\n")
    assert f"{path}: row 2 has no item" in user_error(read_results_table, str(path))
    path.write_text("model,item,correct\na,1,1\na, 1,1\n")
    assert "model 'a' has two results for item '1'" in user_error(read_results_table, str(path))


def test_a_parquet_table_may_hold_decimals_and_repeat_columns_that_are_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "items.parquet")
    arrays = [pa.array(["a"]), pa.array([7]), pa.array([Decimal("1.0")]), pa.array([1]), pa.array([2])]
    pq.write_table(pa.Table.from_arrays(arrays, names=["model", "item", "correct", "x", "x"]), path)
    assert read_results_table(path) == {"a": {"7": 1.0}}
    pq.write_table(pa.Table.from_arrays(arrays, names=["model", "item", "correct", "correct", "x"]), path)
    assert "column 'correct' occurs 2 times in" in user_error(read_results_table, path)
    pq.write_table(pa.Table.from_arrays(arrays, names=["model", "item", "right", "x", "x"]), path)
    assert "no column 'correct' in" in (line := user_error(read_results_table, path))
    assert line.endswith("columns: model, item, right, x, x")


def test_another_file_named_as_a_log_is_one_line_of_our_own(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")
    path = tmp_path / "x.eval"
    for names, line in (
        (
            ["a.txt", "b.txt"],
            f"{path} is no log of inspect_ai: a zip archive without header.json; it holds a.txt, b.txt",
        ),
        ([], f"{path} is no log of inspect_ai: a zip archive without header.json"),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "x")
        assert user_error(read, path) == line
    path.write_text("{}")
    assert user_error(read, path) == f"{path} is no log of inspect_ai: it is no whole zip archive, as .eval files are"


def test_scores_of_a_log_of_inspect_ai_are_audited(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = evaluated("audited", epochs=2)
    source = {"path": str(log), "id": "metadata.uid", "text": "input", "scores": ["scores.match", "scores.two.partly"]}
    config = {
        "run": str(tmp_path / "run"),
        "resources": {"cluster": "local"},
        "corpus": {"audit": source, "unseen": {**source, "id": "id"}},
        "selections": [],
    }
    path = tmp_path / "audit.yaml"
    path.write_text(yaml.safe_dump(config))
    assert ended("run", path) == 0
    rows = {row["doc_id"]: row for row in pq.read_table(tmp_path / "run/scores").to_pylist() if row["role"] == "audit"}
    assert {name: row["scores.match"] for name, row in rows.items()} == {
        f"u{row}": float(row % 3 == 1) for row in range(9)
    }
    assert {row["scores.two.partly"] for row in rows.values()} == {0.25}
    (shard, *_) = [one for one in make_plan(build_config(config)).shards if one.role == "audit"]
    sink = io.BytesIO()
    marks = SimpleNamespace(following=lambda count: np.arange(count) % 2 == 0)
    INSPECT_LOG.export.copy(ExportSource((shard,), "log.eval"), marks, lambda name: nullcontext(sink))
    kept = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [row["metadata"]["uid"] for row in kept] == ["u0", "u2", "u4", "u6", "u8"]
    assert kept[1]["scores"] == {"match": 0.0, "two.strict": 1.0, "two.partly": 0.25}
    config["corpus"]["audit"]["scores"] = ["scores.mach"]
    config["corpus"]["unseen"]["scores"] = ["scores.mach"]
    path.write_text(yaml.safe_dump(config))
    assert "no column 'scores.mach' in" in refusal(capsys, "plan", path)
