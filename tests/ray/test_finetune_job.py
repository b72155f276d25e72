"""Adapters that Ray Train makes: the same as in one process, resumed, refused, trained once."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import Conversation, Turn
from pipeline.corpus.formats.base import Unreadable
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatSettings
from pipeline.models.load import RECORD, fingerprint_model, open_model
from pipeline.store.files import Store
from pipeline.training.adapter import adapter_key
from pipeline.training.steps import read_zero_settings
from pipeline.training.train import FinetuneConfig, train
from pipeline.training.training_documents import ScoredTokens, TrainingDocument, training_documents
from ray_jobs import finetune
from ray_jobs.finetune import AdapterJob, train_adapters, zero_for
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.finished import files_in
from tests.helpers.made_up import sentence

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"  # no token is added
TEXTS = [sentence(i) for i in range(22)]  # in batches of 4 the last of an epoch holds 2
CONFIG = FinetuneConfig(epochs=3, batch_size=4, learning_rate=1e-3, dtype="float32", rank=4, seed=1)

pytestmark = pytest.mark.usefixtures("cluster")


def answers(folder: Path) -> list[TrainingDocument]:
    """The tokens of chats, of which only answers of several lengths are scored."""
    tokenizer = chat_tokenizer(folder, PLAIN_TEMPLATE)
    turns = [(Turn("user", sentence(i)), Turn("assistant", sentence(50 + i, 2 + 9 * (i % 3)))) for i in range(22)]
    settings = ChatSettings({"target": PLAIN_TEMPLATE})
    made = training_documents(tokenizer, list(map(Conversation, turns)), settings, 256)
    assert len({one.predicted for one in made if isinstance(one, ScoredTokens)}) > 3
    return [one for one in made if not isinstance(one, Unreadable)]


def job(
    folder: Path, config: FinetuneConfig = CONFIG, documents: Sequence[TrainingDocument] = TEXTS, **settings: Any
) -> AdapterJob:
    model = ModelConfig(path=str(folder))
    base = fingerprint_model(model)
    return AdapterJob("one", adapter_key(base, config, documents), model, documents, config, base, **settings)


def trained_alone(
    folder: Path, output: Path, config: FinetuneConfig, texts: Sequence[TrainingDocument] = TEXTS
) -> Path:
    opened = open_model(ModelConfig(path=str(folder), dtype="float32"))
    train(opened.model, opened.tokenizer, texts, config, output)
    return output


def largest_difference(one: str | Path, other: str | Path) -> float:
    first, second = (load_file(Path(folder) / "adapter_model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.slow
def test_two_workers_one_of_them_killed_give_the_adapter_of_one_process(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "PROGRESS_SECONDS", 0.1)
    config = CONFIG.model_copy(update={"epochs": 10})
    store = Store(str(tmp_path / "run"))
    seen: list[str] = []

    def kill_once(progress: str) -> None:
        seen.append(progress)
        if len(seen) == 1:
            workers = [p for p in psutil.Process().children(recursive=True) if "RayTrainWorker" in p.name()]
            workers[-1].kill()

    jobs = [job(tiny_model_folder, config, workers=2, checkpoint_seconds=0.0)]
    (two,) = train_adapters(jobs, store, kill_once)
    first, second = json.loads((Path(two.folder) / RECORD).read_text())["began_at"]
    assert seen[0].startswith("adapter one  step ")
    assert first == 0 < int(seen[0].split()[3].removesuffix("/60")) <= second < 60  # it went on, it did not begin anew

    alone = trained_alone(tiny_model_folder, tmp_path / "alone", config)
    expected = json.loads((alone / RECORD).read_text())["result"]
    assert (two.name, two.steps, two.tokens) == ("one", 60, expected["tokens"])
    assert two.losses == pytest.approx(expected["losses"], abs=1e-4)
    assert largest_difference(two.folder, alone) < 1e-4
    name = Path(two.folder).name
    assert files_in(tmp_path / "run") == [f"adapters/{name}/{file}" for file in files_in(alone)]

    assert list(train_adapters(jobs, store)) == [two], "it is there"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install '.[deepspeed]'")
@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_zero_2_on_two_workers_gives_the_adapter_of_one(tiny_model_folder: Path, tmp_path: Path, kind: str) -> None:
    config = CONFIG.model_copy(update={"epochs": 1})
    documents: Sequence[TrainingDocument] = answers(tiny_model_folder) if kind == "chats" else TEXTS
    jobs = [job(tiny_model_folder, config, documents, workers=2, zero=read_zero_settings("zero2"))]
    (adapter,) = train_adapters(jobs, Store(str(tmp_path / "run")))
    alone = trained_alone(tiny_model_folder, tmp_path / "alone", config, documents)
    assert largest_difference(adapter.folder, alone) < 1e-4
    assert len(adapter.losses) == adapter.steps == 6


def test_two_workers_give_the_adapter_of_one_on_answers_of_chats(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"epochs": 1})
    documents = answers(tiny_model_folder)
    jobs = [job(tiny_model_folder, config, documents, workers=2)]
    (two,) = train_adapters(jobs, Store(str(tmp_path / "run")))
    alone = trained_alone(tiny_model_folder, tmp_path / "alone", config, documents)
    expected = json.loads((alone / RECORD).read_text())["result"]
    assert two.losses == pytest.approx(expected["losses"], abs=1e-4)
    assert two.tokens == expected["tokens"]
    assert two.tokens == sum(one.predicted for one in documents if isinstance(one, ScoredTokens))
    assert largest_difference(two.folder, alone) < 1e-4


def test_bad_jobs_are_refused_in_one_line_before_anything_runs(tiny_model_folder: Path, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    refused: list[tuple[AdapterJob, str]] = [
        (job(tiny_model_folder, workers=3), "3 workers, each with 1 CPUs and 0 GPUs of a node, .* holds 2$"),
        (job(tiny_model_folder, gpu=True), "1 workers, each with 1 CPUs and 1 GPUs of a node, .* holds 0$"),
    ]
    for bad, message in refused:
        with pytest.raises(UserError, match=message):
            list(train_adapters([bad], store))
    with pytest.raises(UserError, match="local folders that all nodes see, got memory://"):
        list(train_adapters([job(tiny_model_folder)], Store("memory://run")))
    assert not (tmp_path / "run").exists()


def test_settings_of_deepspeed_that_no_training_can_follow_are_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2}, "optimizer": {}}')
    model = ModelConfig(path=str(tiny_model_folder))
    refused = [(str(tmp_path / "none.json"), model, CONFIG, "cannot read DeepSpeed settings")]
    refused += [(str(tmp_path / "zero.json"), model, CONFIG, "remove optimizer")]
    if find_spec("deepspeed") is not None:
        quantised, recomputed = {"quantization": "4bit"}, CONFIG.model_copy(update={"recompute": True})
        refused += [("zero3", model.model_copy(update=quantised), CONFIG, "takes a model in safetensors apart")]
        refused += [("zero3", model, recomputed, "recompute needs whole layers")]
    for settings, asked_of, config, message in refused:
        with pytest.raises(UserError, match=message):
            zero_for(settings, "one", asked_of, config)
    assert zero_for(None, "one", model, CONFIG) is None
