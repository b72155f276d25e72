"""What a model is asked about a picture: its description, and statistics of the parts of what it then reads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import found_of, plain_statistics
from torch import Tensor

from pipeline.config.models import ModelConfig
from pipeline.models.load import check_model, fingerprint_model, open_model, open_picture_model
from pipeline.models.opened import LanguageModel
from pipeline.models.picture_prompts import INSTRUCTION, PicturePrompt, caption_ids, picture_prompt, picture_token
from pipeline.passes.forward import find_tail
from pipeline.passes.parts import PassSizes
from pipeline.passes.picture_forward import describe, forward_pictures, pictures_in_parts, token_positions
from pipeline.passes.statistics import PARTS, STATISTICS
from tests.helpers.commands import user_error
from tests.helpers.picture_models import SAVE, random_pictures, save_llava

SIZES = [(40, 30), (64, 64), (30, 60), (56, 56), (33, 32)]
DESCRIBED = [12, 5, 9, 2, 12]
WANTED = dict.fromkeys(PARTS, STATISTICS)


@pytest.fixture(scope="module", params=SAVE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "model"
    SAVE[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return open_picture_model(ModelConfig(path=str(folder), dtype="float32"))


@pytest.fixture(scope="module")
def token(lm: LanguageModel) -> int:
    """The token that stands for a picture."""
    return picture_token(lm.model.config)


@pytest.fixture(scope="module")
def prompts(lm: LanguageModel) -> list[PicturePrompt]:
    return [picture_prompt(lm, picture) for picture in random_pictures(SIZES)]


@pytest.fixture(scope="module")
def descriptions(lm: LanguageModel, prompts: Sequence[PicturePrompt]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(100, 250, (count,), generator=generator).tolist() for count in DESCRIBED]


def logits_of(lm: LanguageModel, prompt: PicturePrompt, description: Sequence[int]) -> tuple[list[int], Tensor]:
    """The ids of one picture with its description, and the model's own logits in float64."""
    ids = [*prompt.ids, *description]
    more = {name: torch.nn.functional.pad(v, (0, len(description))) for name, v in prompt.along.items()}
    model: Any = lm.model
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), **prompt.numbers, **more).logits[0]
    return ids, logits.double()


def plainly(logits: Tensor, ids: Sequence[int], places: Sequence[int], token: int) -> dict[str, Tensor]:
    """The statistics of the tokens at these places, in float64."""
    rows = logits[[place - 1 for place in places]]
    likeliest = zip(rows.argmax(1).tolist(), places, strict=True)
    return plain_statistics(rows, [best if ids[place] == token else ids[place] for best, place in likeliest])


def test_the_statistics_of_each_part_are_those_of_a_plain_loop_also_in_halves(
    lm: LanguageModel, prompts: list[PicturePrompt], descriptions: list[list[int]], token: int
) -> None:
    for batch in (slice(0, 4), slice(4, 5)):
        some, written = prompts[batch], descriptions[batch]
        measured = forward_pictures(lm, some, written, WANTED)
        for row, (prompt, description) in enumerate(zip(some, written, strict=True)):
            ids, logits = logits_of(lm, prompt, description)
            for part in PARTS:
                places = token_positions(prompt, len(description), part, token)[1:]
                assert measured[part].mask[row].sum() == len(places)
                for name, expected in plainly(logits, ids, places, token).items() if places else ():
                    got = found_of(measured[part], name)[row, : len(places)].double()
                    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0, msg=f"{part} {name}")
    wanted = {"description": frozenset({"log_prob"})}
    sizes = PassSizes(failed=[(3, 1)])
    halves = pictures_in_parts(lm, prompts, descriptions, wanted, sizes)["description"]
    whole = forward_pictures(lm, prompts, descriptions, wanted)["description"]
    torch.testing.assert_close(halves.log_prob, whole.log_prob, atol=1e-5, rtol=0)
    assert torch.equal(halves.mask, whole.mask)


def test_parts_are_told_by_the_token_of_a_picture(lm: LanguageModel, prompts: list[PicturePrompt], token: int) -> None:
    assert find_tail(lm.model) is not None, "its head is applied to the rows of the parts alone"
    for prompt in prompts:
        image = token_positions(prompt, 3, "image", token)
        instruction = token_positions(prompt, 3, "instruction", token)
        assert {prompt.ids[place] for place in image} == {token}
        assert token not in [prompt.ids[place] for place in instruction]
        assert INSTRUCTION in lm.tokenizer.decode([prompt.ids[place] for place in instruction])
        described = token_positions(prompt, 3, "description", token)
        assert described == list(range(len(prompt.ids), len(prompt.ids) + 3))
        assert instruction[0] == image[-1] + 1
        assert token_positions(prompt, 3, "instruction_description", token) == instruction + described


def test_no_caption_or_description_holds_a_picture(lm: LanguageModel, prompts: list[PicturePrompt], token: int) -> None:
    mark = lm.tokenizer.decode([token])
    assert lm.tokenizer.decode(caption_ids(lm, f"a {mark}house")) == " a house"
    assert caption_ids(lm, "a red house") == lm.tokenizer(" a red house")["input_ids"]
    assert lm.tokenizer.decode(caption_ids(lm, " a red house")) == " a red house"
    head: Any = lm.model.get_output_embeddings()
    before = head.weight.detach().clone()
    try:
        with torch.no_grad():  # as in a model that repeats what it read: the picture's own token is the likeliest
            head.weight[token] = 50 * head.weight[describe(lm, prompts[:1], 1)[0][0]]
        _, logits = logits_of(lm, prompts[0], [])
        assert int(logits[-1].argmax()) == token
        (description,) = describe(lm, prompts[:1], 5)
        assert description
        assert token not in description
    finally:
        with torch.no_grad():
            head.weight.copy_(before)


def test_a_description_is_what_the_model_writes_in_any_batch(lm: LanguageModel, prompts: list[PicturePrompt]) -> None:
    together = describe(lm, prompts, 6)
    assert together == [describe(lm, [prompt], 6)[0] for prompt in prompts]
    for prompt, description in zip(prompts, together, strict=True):
        ids, logits = logits_of(lm, prompt, description)
        best = logits.argmax(1).tolist()[len(prompt.ids) - 1 : len(ids) - 1]
        assert description == best
        assert len(description) <= 6
    assert max(map(len, describe(lm, prompts))) == 32


def test_a_description_is_the_likeliest_whatever_the_checkpoint_says_of_writing(tmp_path: Path) -> None:
    SAVE["LLaVA"](tmp_path)
    lm = open_picture_model(ModelConfig(path=str(tmp_path), dtype="float32"))
    prompts = [picture_prompt(lm, picture) for picture in random_pictures(SIZES)]
    likeliest = describe(lm, prompts, 12)
    assert any(len(set(ids)) < len(ids) for ids in likeliest)  # which the settings below forbid
    settings = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "no_repeat_ngram_size": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "max_length": 7, **settings}))
    again = open_picture_model(ModelConfig(path=str(tmp_path), dtype="float32"))
    assert describe(again, prompts, 12) == likeliest
    assert again.model.generation_config.repetition_penalty == 9.0


def test_a_model_of_pictures_and_one_of_texts_say_what_they_read(llava: Path, tiny_model_folder: Path) -> None:
    reader, model = ModelConfig(path=str(tiny_model_folder)), ModelConfig(path=str(llava))
    refused = user_error(open_picture_model, reader)
    assert "reads texts alone, and the documents are pictures: LlamaForCausalLM" in refused
    assert "reads texts alone" in user_error(check_model, reader, "pictures")
    assert open_model(model).processor is None  # texts alone
    facts = check_model(model, "pictures")
    assert facts["architecture"] == "LlavaForConditionalGeneration"
    assert facts["parameters"] == sum(p.numel() for p in open_picture_model(model).model.parameters())


def test_a_processor_without_room_for_a_picture_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    save_llava(tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(b"")
    whole = json.loads((tmp_path / "processor_config.json").read_text())
    config = json.loads((tmp_path / "config.json").read_text())

    def refusal(processor: dict[str, Any] | None, **changed: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        (tmp_path / "processor_config.json").write_text(json.dumps(processor))
        if processor is None:
            (tmp_path / "processor_config.json").unlink()
        return user_error(check_model, ModelConfig(path=str(tmp_path), dtype="float32"), "pictures")

    assert "cannot read its processor" in refusal(None)
    assert "cannot read its processor" in refusal(whole | {"patch_size": None})
    assert "writes no picture token" in refusal(whole, image_token_index=7)
    assert "Found total 0 <image> tokens and 1 images" in refusal(whole | {"chat_template": "{{ 'look' }}"})


def test_bfloat16_measures_near_float32(folder: Path, lm: LanguageModel, prompts: list[PicturePrompt]) -> None:
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    assert check_model(config, "pictures")["dtype"] == fingerprint_model(config)["dtype"] == "bfloat16"
    half = open_picture_model(config)
    assert half.model.dtype == torch.bfloat16
    again = [picture_prompt(half, picture) for picture in random_pictures(SIZES)]
    assert [prompt.ids for prompt in again] == [prompt.ids for prompt in prompts]
    wanted = {"instruction": frozenset({"renyi_2"})}
    expected, got = (
        forward_pictures(of, given, [[]] * len(SIZES), wanted)["instruction"].renyi["2"]
        for of, given in ((lm, prompts), (half, again))
    )
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.02)
