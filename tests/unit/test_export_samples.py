"""Samples: a harness evaluates exactly the items that are kept. Dataset folders: `datasets` opens them."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.helpers.export_runs import export, finished_run, refusal
from tests.helpers.made_up import sentence, write_rows


def benchmark(folder: Path, groups: list[str | None], **columns: list[Any]) -> Path:
    """Items, some of which are not lines of JSON."""
    path = folder / "data/items.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = ({"text": sentence(i), "task": group} for i, group in enumerate(groups))
    write_rows(path, ({**row, **{name: values[i] for name, values in columns.items()}} for i, row in enumerate(rows)))
    return path


def samples_in(folder: Path) -> dict[str, list[int]]:
    return json.loads((folder / "samples.json").read_text())


def test_items_are_counted_within_their_task(tmp_path: Path) -> None:
    groups = ["a", "b", "a", None, "a", "b", "b", "a", "c", "a", "b", "a"]
    path = benchmark(tmp_path, groups)
    run = finished_run(tmp_path / "w", {"path": str(path), "group": "task"}, direction="clean")
    exported = export(run, tmp_path / "out", form="samples")
    # rows 0, 3, 6 and 9 are clean
    assert samples_in(tmp_path / "out") == {"a": [0, 4], "b": [2]}
    assert exported.remarks == [
        "No item of c is kept: leave these out of --tasks, as lm-evaluation-harness evaluates all items of a task "
        "without indices.",
        "1 documents name no task and are items of none.",
    ]
    assert "leave these out of --tasks" in (tmp_path / "out/README.md").read_text()


def test_with_a_task_all_documents_are_its_items_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = benchmark(tmp_path, ["a"] * 12)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]) + "\n")
    run = finished_run(tmp_path / "w", {"path": str(path)}, chosen=lambda document: "Text 5" in document.text)
    export(run, tmp_path / "out", form="samples", task="mine")
    assert samples_in(tmp_path / "out") == {"mine": list(range(12))}, "one document is too few to be selected"
    run = finished_run(tmp_path / "v", {"path": str(path)}, chosen=lambda document: document.row in (0, 5, 9))
    export(run, tmp_path / "out2", form="samples", task="mine")
    assert samples_in(tmp_path / "out2") == {"mine": [i for i in range(12) if i not in (0, 4, 8)]}
    assert len(datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))) == 12


def test_nothing_is_written_where_nothing_is_kept(tmp_path: Path) -> None:
    """An empty list would stand for every item, and no library opens a dataset without rows."""
    source = {"path": str(benchmark(tmp_path, ["a"] * 12))}
    run = finished_run(tmp_path / "w", source, lambda document: False, direction="clean")
    part = "no item is kept, so there are no samples to write"
    assert part in refusal(run, tmp_path / "out", form="samples", task="mine")
    assert "no document is kept" in refusal(run, tmp_path / "out", form="huggingface")
    assert not (tmp_path / "out").exists()


def test_an_item_of_an_unknown_task_stops_the_count(tmp_path: Path) -> None:
    path = benchmark(tmp_path, ["a"] * 12)
    lines = path.read_text().splitlines()
    lines[4] = "broken"
    path.write_text("\n".join(lines) + "\n")
    run = finished_run(tmp_path / "w", {"path": str(path), "group": "task"})
    refused = refusal(run, tmp_path / "out", form="samples")
    assert refused.startswith("row 4 of ")
    assert "items.jsonl cannot be read, so it is unknown which task" in refused
    export(run, tmp_path / "out", form="samples", task="a")
    assert samples_in(tmp_path / "out") == {"a": [1, 2, 4, 5, 7, 8, 10, 11]}


@pytest.mark.slow
def test_the_harness_evaluates_exactly_these_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval==0.4.13")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it asks the hub for its metrics
    from lm_eval import simple_evaluate
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.tasks import TaskManager

    texts = [sentence(i) for i in range(15)]
    path = benchmark(tmp_path, ["mine"] * 15)
    run = finished_run(tmp_path / "w", {"path": str(path), "group": "task"}, direction="clean")
    export(run, tmp_path / "out", form="samples")
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["yes", "no"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/mine.yaml").write_text(yaml.safe_dump(task))
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    for given in (str(tmp_path / "out/samples.json"), (tmp_path / "out/samples.json").read_text()):
        (tmp_path / "harness.yaml").write_text(yaml.safe_dump({"model": "dummy", "tasks": ["mine"], "samples": given}))
        config = EvaluatorConfig.from_config(tmp_path / "harness.yaml")
        results = simple_evaluate(
            model=config.model, tasks=config.tasks, samples=config.samples, task_manager=manager, bootstrap_iters=0
        )
        evaluated = results["samples"]["mine"]
        assert [sample["doc"]["text"] for sample in evaluated] == [texts[i] for i in range(0, 15, 3)]
        assert [sample["doc_id"] for sample in evaluated] == list(range(0, 15, 3))
    empty = {"mine": []}
    everything = simple_evaluate(model="dummy", tasks=["mine"], samples=empty, task_manager=manager, bootstrap_iters=0)
    assert len(everything["samples"]["mine"]) == 15, "which is why no empty list is written"


def opened(folder: Path, cache: Path) -> datasets.Dataset:
    """The one split of a dataset folder, as a user opens it."""
    whole = datasets.load_dataset(str(folder), cache_dir=str(cache))
    ((_, split),) = whole.items()
    return split


def test_a_dataset_folder_has_the_columns_of_jsonl(tmp_path: Path) -> None:
    n = 24
    columns: dict[str, list[Any]] = {
        "when": ["2024-01-01T00:00:00"] * n,
        "zip": ["00123"] * n,
        "size": [i if i < 12 else i + 0.5 for i in range(n)],
        "deep": [{"a": [{"b": i}], "c": None if i < 20 else "<late>"} for i in range(n)],
        "maybe": [None] * 20 + ["late"] * 4,
        "flag": [i % 2 == 0 for i in range(n)],
    }
    path = benchmark(tmp_path, ["a"] * n, **columns)
    lines = path.read_text().splitlines()
    lines[5] = "[1, 2]"
    path.write_text("\n".join(lines))
    run = finished_run(tmp_path / "w", {"path": str(path)})
    exported = export(run, tmp_path / "out", form="huggingface")
    kept = [i for i in range(n) if i % 3 and i != 5]
    written = opened(tmp_path / "out", tmp_path / "cache")
    assert written.column_names == ["text", "task", *columns]
    assert written.to_list() == [json.loads(lines[i]) | {"size": float(columns["size"][i])} for i in kept]
    assert exported.remarks == ["1 documents that would be kept cannot be rows of a table and are left out."]
    assert exported.plain()["n_kept"] == len(kept)
    front = yaml.safe_load((tmp_path / "out/README.md").read_text().split("---\n")[1])
    files = [{"split": "train", "path": ["data/train-00000-of-00001.parquet"]}]
    assert front["configs"] == [{"config_name": "default", "data_files": files}]
    assert front["size_categories"] == ["n<1K"]


def test_a_dataset_folder_keeps_the_text_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "data/a.csv"
    path.parent.mkdir()
    path.write_text("text,n\n" + "".join(f'"{sentence(i)}\nNA",{["01", "", "NA", "1e5"][i % 4]}\n' for i in range(12)))
    run = finished_run(tmp_path / "w", {"path": str(path)}, direction="clean")
    export(run, tmp_path / "out", form="huggingface")
    written = opened(tmp_path / "out", tmp_path / "cache")
    assert written["n"] == [["01", "", "NA", "1e5"][i % 4] for i in (0, 3, 6, 9)]
    assert written["text"] == [f"{sentence(i)}\nNA" for i in (0, 3, 6, 9)]


def test_a_dataset_folder_keeps_types_of_parquet_and_features_of_datasets(tmp_path: Path) -> None:
    texts = [sentence(i) for i in range(12)]
    (tmp_path / "data").mkdir()
    kinds = pa.array([["x", "y"][i % 2] for i in range(12)]).dictionary_encode()
    table = pa.table({"text": texts, "n": pa.array(range(12), pa.int16()), "kind": kinds})
    for name in ("a", "b"):
        pq.write_table(table, tmp_path / f"data/{name}.parquet")
    run = finished_run(tmp_path / "w", {"path": str(tmp_path / "data/*.parquet")})
    files = export(run, tmp_path / "out", form="huggingface").files
    assert files == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    written = opened(tmp_path / "out", tmp_path / "cache")
    assert written["n"] == [i for i in range(12) if i % 3] * 2
    assert written.features["n"].dtype == "int16"
    assert written["kind"][:2] == ["y", "x"]
    labels = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    whole = datasets.Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(12)]}, features=features)
    datasets.DatasetDict({"test": whole}).save_to_disk(tmp_path / "saved")
    run = finished_run(tmp_path / "v", {"path": str(tmp_path / "saved"), "split": "test"})
    export(run, tmp_path / "out2", form="huggingface")
    loaded = datasets.load_dataset(str(tmp_path / "out2"), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["test"]
    assert loaded["test"].features == whole.features


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1] * 11 + ["one"], "holds values that no single type of a table can hold, from row 1 on"),
        ([1] * 11 + [2**70], "holds values that no single type of a table can hold"),
        (["\ud800"] * 12, "holds values that no single type of a table can hold"),
        ([{}] * 12, "is struct"),
    ],
)
def test_a_column_that_no_table_can_hold_is_named(tmp_path: Path, values: list[Any], message: str) -> None:
    run = finished_run(tmp_path / "w", {"path": str(benchmark(tmp_path, ["a"] * 12, n=values))})
    refused = refusal(run, tmp_path / "out", form="huggingface")
    assert refused.startswith("column 'n' ")
    assert message in refused
    assert not (tmp_path / "out").exists()
    export(run, tmp_path / "files")


def test_a_dataset_of_the_hub_becomes_one_parquet_file(tmp_path: Path) -> None:
    """A folder stands for the hub: the library opens both by the same call."""
    texts = [sentence(i) for i in range(12)]
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.table({"text": texts, "n": pa.array(range(12), pa.int16())}), tmp_path / "hub/train.parquet")
    run = finished_run(tmp_path / "w", {"dataset": str(tmp_path / "hub"), "split": "train"})
    assert export(run, tmp_path / "out").files == ["hub-train.parquet"]
    written = pq.read_table(tmp_path / "out/hub-train.parquet")
    assert written["n"].type == pa.int16()
    assert written["text"].to_pylist() == [text for i, text in enumerate(texts) if i % 3]


def test_an_input_of_which_no_row_is_kept_has_the_columns_of_the_others(tmp_path: Path) -> None:
    benchmark(tmp_path, ["a"] * 12, n=list(range(12)))
    other = tmp_path / "data/other.jsonl"
    other.write_text("".join(json.dumps({"text": sentence(i)}) + "\n" for i in range(50, 56)))
    folder = {"path": str(tmp_path / "data/*.jsonl")}
    run = finished_run(tmp_path / "w", folder, lambda document: "items" in document.doc_id, direction="clean")
    export(run, tmp_path / "out", form="huggingface")
    assert opened(tmp_path / "out", tmp_path / "cache")["n"] == list(range(12))
