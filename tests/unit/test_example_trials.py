"""The trials in examples/trials: they load, share one contaminated model, and ask what they say they ask."""

import json
import random
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, LlamaForCausalLM, LlavaForConditionalGeneration

from benchmarks.small_model import WORDS
from examples.trials import benchmark, run, versions
from examples.trials.benchmark import ITEMS, make_exercises, make_facts, make_items
from examples.trials.family import FAMILY, Size, from_scratch, make_tokenizer
from examples.trials.pictures import make_model, make_pictures
from examples.trials.systems import object_columns
from pipeline.training.train import FinetuneConfig
from pipeline.trial.config import Point, TrialConfig, load_trial
from pipeline.trial.splits import Drawable, choose_trained, draw_split
from tests.helpers.commands import ended
from tests.helpers.marked_runs import EDITABLE

SHARING = ("alpha", "procedures", "share", "calibration_size", "label_noise", "fusion", "known_members")
FOLDER = Path(__file__).parents[2] / "examples/trials"


def trial(name: str) -> tuple[TrialConfig, list[Point]]:
    return load_trial(str(FOLDER / f"{name}.yaml"))


def test_every_trial_in_the_folder_can_be_run_by_name() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(run.NAMES)
    assert len({trial(name)[0].run for name in run.NAMES}) == len(run.NAMES)
    for name in run.NAMES:
        config, _ = trial(name)
        made = set().union(*(object_columns(entry) for entry in config.detectors))
        assert {column for selection in config.selections for column in selection.detectors} <= made


@pytest.mark.parametrize("name", SHARING)
def test_seven_trials_share_one_contaminated_model_and_its_scores(name: str) -> None:
    config, points = trial(name)
    first, _ = trial(SHARING[0])
    for one in (config, *(point.config for point in points)):
        for section in ("work", "model", "documents", "contaminate", "detectors", "max_tokens", "seed", "models"):
            assert getattr(one, section) == getattr(first, section), section
    assert config.roles() == first.roles()  # calibration sizes decide who is trained in


@pytest.mark.parametrize("name", run.NAMES)
def test_the_documents_suffice_for_every_point(name: str) -> None:
    config, points = trial(name)
    family = np.arange({"ranking": ITEMS, "pictures": run.PICTURES}.get(name, run.PASSAGES))
    for point in points:
        trained = choose_trained(family, point.config.contaminate.share, config.roles(), 0)
        draw_split(Drawable(trained, family), point.config.roles(), point.config.split, 0, 0, 0)


def test_the_items_are_distinct_their_answers_right_and_no_exercise_is_one() -> None:
    facts = make_facts(ITEMS, seed=0)
    items = make_items(facts, seed=0)
    assert len(items) >= 400
    assert len({item.text for item in items}) == len({fact.question for fact in facts}) == len(items)
    assert {item.kind for item in items} == {"arithmetic", "lookup"}
    for fact, item in zip(facts, items, strict=True):
        assert item.text == f"{item.question}{item.answer}."
        assert item.question.endswith(fact.question)
        assert item.answer == fact.answer
        if item.kind == "arithmetic":
            one, plus, other, equals = item.question.split()[-4:]
            assert (plus, equals) == ("+", "=")
            assert int(item.answer) == int(one) + int(other)
    assert make_items(make_facts(ITEMS, seed=0), seed=0) == items
    tokenizer = make_tokenizer([item.text for item in items], benchmark.SIZE.vocabulary)
    for item in items[:50]:
        question, text = (tokenizer(text)["input_ids"] for text in (item.question, item.text))
        assert text[: len(question)] == question, "a question is read as the beginning of its text"
    exercises = make_exercises(facts[:10], 80, items, seed=0)
    assert set(exercises).isdisjoint(item.text for item in items)
    ends = [f"{fact.question}{fact.answer}." for fact in facts[:10]]
    assert [sum(text.endswith(end) for text in exercises) for end in ends] == [8] * 10, "each fact is taught alike"


def test_the_family_grows() -> None:
    counts = [
        sum(weight.numel() for weight in LlamaForCausalLM(size.config()).parameters()) for size in FAMILY.values()
    ]
    assert counts == sorted(counts)
    assert [f"{count / 1e6:.1f}M" for count in counts] == list(FAMILY)
    _, points = trial("model_size")
    assert [Path(point.config.model.path).name for point in points] == list(FAMILY)


def test_a_model_that_knows_the_items_answers_them(tmp_path: Path) -> None:
    items = make_items(make_facts(12, seed=0), seed=0)
    training = FinetuneConfig(method="full", epochs=100, batch_size=12, learning_rate=5e-3, dtype="float32")
    from_scratch(tmp_path / "model", Size(hidden=64, layers=1, vocabulary=320), [i.text for i in items], training)
    benchmark.write_items(items, tmp_path / "items.jsonl")
    assert list(benchmark.read_items(tmp_path / "items.jsonl").values()) == items
    given = benchmark.answers(tmp_path / "model", [item.question for item in items])
    assert sum(one == item.answer for one, item in zip(given, items, strict=True)) >= 11


def test_pictures_are_the_same_each_time_no_two_alike_and_16_tokens_of_the_model(tmp_path: Path) -> None:
    make_pictures(tmp_path / "a" / "pictures.parquet", 20)
    make_pictures(tmp_path / "b.parquet", 20)
    rows = pq.read_table(tmp_path / "a" / "pictures.parquet").to_pylist()
    assert pq.read_table(tmp_path / "b.parquet").to_pylist() == rows
    for column in ("id", "image", "caption"):
        assert len({str(row[column]) for row in rows}) == 20
    assert all(row["image"]["bytes"].startswith(b"\x89PNG") and row["image"]["path"] is None for row in rows)
    make_pictures(tmp_path / "b.parquet", 30)
    assert pq.read_table(tmp_path / "b.parquet").num_rows == 20, "a file that is there stays"
    make_model(tmp_path / "model")
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "model")
    assert 180_000 < sum(weight.numel() for weight in model.parameters()) < 220_000
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    picture, caption = Image.open(BytesIO(rows[0]["image"]["bytes"])), rows[0]["caption"]
    batch = processor(images=picture, text=f"USER: <image>\n{caption}", return_tensors="pt")
    assert int((batch["input_ids"] == model.config.image_token_id).sum()) == 16
    assert torch.isfinite(model(**batch).logits).all()
    assert caption in processor.tokenizer.decode(batch["input_ids"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["options", "versions"])
def test_a_trial_of_versions_runs_in_a_relative_folder(
    name: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "EPOCHS", (1,))
    monkeypatch.setattr(versions, "REDRAWS", 40)
    monkeypatch.setattr(versions, "seenset", ended)
    folder, rng = Path("work") / f"{name}-10", random.Random(1)
    folder.mkdir(parents=True)
    count, sentences = 10, [" ".join(["{}"] * 30)]
    if name == "versions":
        count, sentences = count * versions.JOINED * versions.MANY, [f"{one}." for one in EDITABLE]
    texts = [{"text": " ".join(one.format(*rng.choices(WORDS, k=30)) for one in sentences)} for _ in range(count)]
    (folder / "passages.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    assert versions.run_trial_of_versions(name, Path("work"), {"path": str(tiny_model_folder)}, 10) == 0
    shown = (folder / "tables.txt").read_text()
    assert "10 documents" in shown
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    parts = ["whole", "differing"][: 1 + (name == "versions")]
    trained = [("1", f"{part}{less}") for part in parts for less in ("", " less untouched")]
    assert [(row[0], row[1]) for row in rows if len(row) == 8] == [*(("0", part) for part in parts), *trained]
    for row in rows[-len(parts) :]:
        assert float(row[1]) > 0.001
        assert float(row[2].split()[0]) >= 1 - versions.ALPHA
