"""Pictures with captions trained into a small model of LLaVA's architecture that the example of the trial makes."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from examples.trials.pictures import make_model, make_pictures
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.corpus.picture_files import open_picture
from pipeline.models.load import open_model, open_picture_model
from pipeline.models.opened import LanguageModel
from pipeline.models.picture_prompts import caption_ids, padded_prompts, picture_prompt
from pipeline.training import memory as memory_module
from pipeline.training.train import TrainingOptions, TrainingResult, TrainingStep, train_pictures
from tests.helpers.commands import user_error
from tests.helpers.picture_models import SAVE, encoded, random_pictures

pytestmark = pytest.mark.floating_point

SIZES = [(40, 30), (64, 64), (33, 70)]
CAPTIONS = ["a red house", "a quiet river and a green tree", "Red"]
Open = Callable[[], LanguageModel]
Captioned = list[tuple[bytes, str]]
Trained = tuple[ModelConfig, LanguageModel, TrainingResult]
CONFIG = FinetuneConfig(method="full", epochs=3, batch_size=4, learning_rate=3e-3, dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pictures")
    make_pictures(made / "pictures.parquet", 12)
    make_model(made / "model")
    return made


@pytest.fixture(scope="module")
def captioned(folder: Path) -> Captioned:
    rows = pq.read_table(folder / "pictures.parquet").to_pylist()
    return [(row["image"]["bytes"], row["caption"]) for row in rows]


@pytest.fixture(scope="module")
def open_base(folder: Path) -> Open:
    return lambda: open_picture_model(ModelConfig(path=str(folder / "model"), dtype="float32"))


@pytest.fixture(scope="module")
def trained(folder: Path, open_base: Open, captioned: Captioned) -> Trained:
    """The model trained in full: as it is on disk, as it came back, and what was measured."""
    lm, steps = open_base(), list[TrainingStep]()
    result = train_pictures(lm, captioned, config_of(epochs=10), folder / "trained", TrainingOptions(steps.append))
    assert len(steps) == result.steps
    return ModelConfig(path=str(folder / "trained"), dtype="float32"), lm, result


def config_of(**changes: Any) -> FinetuneConfig:
    return CONFIG.model_copy(update=changes)


def caption_loss(lm: LanguageModel, captioned: Captioned) -> float:
    """Mean cross-entropy over the tokens of all captions in nats, one picture and one token at a time."""
    losses: list[float] = []
    for picture, caption in captioned:
        prompt, answer = picture_prompt(lm, open_picture(picture)), caption_ids(lm, caption)
        batch, _ = padded_prompts(lm, [prompt], [answer])
        with torch.no_grad():
            log_probs = lm.model(**batch).logits[0].double().log_softmax(-1)
        losses += [-float(log_probs[place - 1, token]) for place, token in enumerate(answer, len(prompt.ids))]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("shape", SAVE)
def test_models_of_every_shape_learn_captions_of_pictures_of_any_size(shape: str, tmp_path: Path) -> None:
    SAVE[shape](tmp_path / "model")
    lm = open_picture_model(ModelConfig(path=str(tmp_path / "model"), dtype="float32"))
    lm.model.float()
    captioned = list(zip(map(encoded, random_pictures(SIZES)), CAPTIONS, strict=True))
    before = caption_loss(lm, captioned)
    config = config_of(method="lora", epochs=2, batch_size=len(SIZES), pass_tokens=10_000)
    result = train_pictures(lm, captioned, config, tmp_path / "adapter")
    assert result.losses[0] == pytest.approx(before, abs=1e-3)
    assert result.losses[1] < result.losses[0]


def test_training_in_full_learns_captions_and_writes_a_model_that_opens(trained: Trained, captioned: Captioned) -> None:
    written, lm, result = trained
    assert result.steps == 30
    learnt = caption_loss(open_picture_model(written), captioned)
    assert learnt < 0.7 * result.losses[0]
    assert learnt == pytest.approx(caption_loss(lm, captioned), abs=1e-6), "the model came back trained"


@pytest.mark.parametrize("method", ["lora", "adalora", "ia3"])
def test_adapters_learn_and_weights_stay(method: Any, trained: Trained, captioned: Captioned, tmp_path: Path) -> None:
    base, untouched, _ = trained
    lm = open_picture_model(base)
    others = [(picture, caption) for (picture, _), (_, caption) in pairwise(captioned)]
    before = caption_loss(lm, others)
    train_pictures(lm, others, config_of(method=method, epochs=10, learning_rate=1e-2), tmp_path / "a")
    weights = dict(untouched.model.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in lm.model.named_parameters())
    merged = open_picture_model(base.model_copy(update={"adapter": str(tmp_path / "a")}))
    assert caption_loss(merged, others) < before - 0.01


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_killed_training_ends_with_the_same_bytes_unless_its_pictures_changed(
    method: Any, open_base: Open, captioned: Captioned, tmp_path: Path
) -> None:
    def train(place: str, some: Captioned, step: Callable[[TrainingStep], Any]) -> None:
        options = TrainingOptions(step, checkpoint_seconds=0.0)
        train_pictures(open_base(), some, config_of(method=method), tmp_path / place, options)

    def kill(step: TrainingStep) -> None:
        if step.step == 4:
            raise KeyboardInterrupt

    for place in ("cut", "swapped"):
        with pytest.raises(KeyboardInterrupt):
            train(place, captioned, kill)
    steps: dict[str, list[TrainingStep]] = {"whole": [], "cut": [], "swapped": []}
    for place, some in steps.items():
        others = [(captioned[1][0], captioned[0][1]), *captioned[1:]]
        train(place, others if place == "swapped" else captioned, some.append)
    assert [some[0].step for some in steps.values()] == [1, 5, 1]
    (name,) = (path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("short", [256, 30])  # at 30 the tower reads a short text and the rest a long one
def test_activations_that_are_computed_again_give_the_same_losses(
    short: int, open_base: Open, captioned: Captioned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "SHORT_TOKENS", short)
    kept, again = (
        train_pictures(open_base(), captioned, config_of(epochs=1, recompute=recompute), tmp_path / str(recompute))
        for recompute in (False, True)
    )
    assert again.losses == pytest.approx(kept.losses, abs=1e-5)


def test_max_tokens_and_positions_cut_captions_alone(open_base: Open, captioned: Captioned, tmp_path: Path) -> None:
    lm = open_base()
    prompt = len(picture_prompt(lm, open_picture(captioned[0][0])).ids)
    result = train_pictures(lm, captioned, config_of(epochs=1, max_tokens=3), tmp_path / "a")
    assert result.tokens == 3 * len(captioned)
    result = train_pictures(replace(lm, max_tokens=prompt + 2), captioned, config_of(epochs=1), tmp_path / "b")
    assert result.tokens == 2 * len(captioned)
    error = user_error(train_pictures, replace(lm, max_tokens=prompt), captioned, CONFIG, tmp_path / "c")
    assert f"picture 0 and the instruction are {prompt} tokens, " in error
    assert f" has {prompt} pos" in error


def test_bad_jobs_are_one_line(open_base: Open, captioned: Captioned, tmp_path: Path, tiny_model_folder: Path) -> None:
    def refusal(lm: LanguageModel, some: Captioned) -> str:
        return user_error(train_pictures, lm, some, CONFIG, tmp_path / "a")

    nameless = [captioned[0], (captioned[1][0], ""), *captioned[2:]]
    assert refusal(open_base(), nameless) == "fine-tuning picture 1 has no caption: ''"
    assert "at least batch_size = 4 texts, got 3" in refusal(open_base(), captioned[:3])
    reader = open_model(ModelConfig(path=str(tiny_model_folder)))
    assert "this model reads texts alone" in refusal(reader, captioned)
    assert list(tmp_path.iterdir()) == []
