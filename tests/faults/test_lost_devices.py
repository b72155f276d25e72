"""A device that is lost ends its process and costs no other document a score; memory that ends costs no draw."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.plain_loop import process
from pipeline.config.models import ModelConfig
from pipeline.corpus.shard import Shard
from pipeline.errors import LostDeviceError
from pipeline.models.devices import check_lost
from pipeline.models.load import open_model, open_paraphraser
from pipeline.passes.generate import Prompt, Sampling, continuations
from pipeline.passes.paraphrase import Draws, ParaphraseFailure, ParaphraseSettings, draw_paraphrases
from pipeline.plan.description import build_config
from pipeline.run.plan import make_plan
from pipeline.stages.base import Placement, Stage
from pipeline.stages.process import read_rows
from pipeline.stages.registry import plan_stages
from pipeline.store.files import Store
from tests.helpers.made_up import sentence, write_corpus

ASSERT = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`"


def test_only_an_error_after_which_the_device_answers_no_more_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LostDeviceError, match="device-side assert"):
        check_lost(torch.AcceleratorError(ASSERT))
    with pytest.raises(LostDeviceError):
        check_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))
    check_lost(torch.OutOfMemoryError("CUDA out of memory"))
    check_lost(RuntimeError("CUDA error: out of memory"))
    check_lost(RuntimeError("shapes do not match"))
    check_lost(ValueError("a text that says: CUDA error: device-side assert triggered"))

    def refuse(device: int) -> None:
        raise torch.AcceleratorError(ASSERT)

    asked: list[int] = []  # on a machine with two GPUs, of which this process uses the second
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 512 * device)
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    check_lost(RuntimeError("CUDA error: invalid configuration argument"))  # of one text: the device works on
    assert asked == [1]
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(LostDeviceError):
        check_lost(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"))


@pytest.fixture(scope="module")
def narrow_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer knows a token that it has no embedding of."""
    folder = tmp_path_factory.mktemp("narrow")
    AutoModelForCausalLM.from_pretrained(tiny_model_folder).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.add_tokens(["<beyond>"])
    tokenizer.save_pretrained(folder)
    return folder


def ids_seen(lm: Any) -> list[int]:
    """The largest id of every call of a model's embedding, as it goes on."""
    largest: list[int] = []
    lm.model.get_input_embeddings().register_forward_pre_hook(lambda _, given: largest.append(int(given[0].max())))
    return largest


def worker_of(folder: Path, model: Path, texts: list[str], *detectors: Any) -> tuple[Stage, Any, Shard, Store]:
    """The first stage of an audit of one shard, and a worker of it."""
    folder.mkdir(exist_ok=True)
    corpus = write_corpus(folder, {"audit": texts})
    described = {"run": str(folder / "run"), "model": {"path": str(model)}, "corpus": corpus}
    config = build_config({**described, "detectors": [*detectors]})
    stage, (shard,) = plan_stages(config)[0], make_plan(config).shards
    return stage, stage.make(stage, Placement()), shard, Store(config.run)


def test_an_id_that_the_embedding_has_no_row_for_never_reaches_the_device(narrow_model: Path, tmp_path: Path) -> None:
    texts = [sentence(number) for number in range(6)]
    tables = []
    for name, changed in (("wrong", texts[2] + " <beyond> river"), ("short", "")):
        rows = [*texts[:2], changed, *texts[3:]]
        stage, worker, shard, store = worker_of(tmp_path / name, narrow_model, rows, "loss", "lowercase")
        seen = ids_seen(worker.models["target"])
        receipt = process(stage, worker, shard, store)
        assert max(seen) < worker.rows["target"]
        tables.append(store.read_table(receipt.data, ["row", "loss", "lowercase"]))
        assert receipt.quarantine is not None
        (refused,) = store.read_table(receipt.quarantine).to_pylist()
        assert refused["row"] == 2
        if name == "wrong":
            assert refused["reason"] == "model_error"
            assert f"has no row in the model's embedding of {worker.rows['target']}" in refused["message"]
    assert tables[0].equals(tables[1])  # the neighbours', in the same batches


def test_a_paraphraser_and_a_sampler_never_see_such_an_id_either(narrow_model: Path, tmp_path: Path) -> None:
    lm = open_model(ModelConfig(path=str(narrow_model)))
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    seen, rows = ids_seen(lm), lm.model.get_input_embeddings().weight.shape[0]
    texts = [(1, "The river <beyond> shows winter."), (2, "Ancient music.")]
    settings = ParaphraseSettings(Sampling(1.0, max_new_tokens=4), redraws=1)
    wrong, _ = draw_paraphrases(lm, texts, 2, settings, 0)
    assert isinstance(wrong, ParaphraseFailure)
    assert wrong.message == "the paraphraser's tokenizer gave an id that its model has no embedding of"
    longer = [f"{text} " * 4 for _, text in texts]
    stage, worker, shard, store = worker_of(tmp_path, narrow_model, longer, {"samia": {"draws": 2}})
    seen += ids_seen(worker.lm)
    process(stage, worker, shard, store)
    drawn = read_rows(stage, shard, store)
    assert "has no row in the model's embedding" in drawn[0]["problem"]
    assert drawn[1]["problem"] is None
    assert max(seen) < rows


def short_of_memory(lm: Any, rows: int) -> list[int]:
    """Let a model raise, as a GPU does, where a batch has more rows than fit; the sizes of the batches that fitted."""
    sizes: list[int] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        size = len(kwargs.get("input_ids", kwargs.get("decoder_input_ids")))
        if size > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        sizes.append(size)

    lm.model.register_forward_pre_hook(hook, with_kwargs=True)
    return sizes


def test_draws_of_one_prompt_that_do_not_fit_together_are_made_in_parts(tiny_model_folder: Path) -> None:
    sampling = Sampling(1.0, max_new_tokens=6)
    prompts = [Prompt((key,), range(2, 9 + key), range(5)) for key in range(3)]
    whole = continuations(open_model(ModelConfig(path=str(tiny_model_folder))), prompts, sampling, 3)
    lm = open_model(ModelConfig(path=str(tiny_model_folder)))
    sizes = short_of_memory(lm, 2)
    assert continuations(lm, prompts, sampling, 3) == whole
    assert max(sizes) == 2
    short_of_memory(lm, 0)
    with pytest.raises(torch.OutOfMemoryError):
        continuations(lm, prompts, sampling, 3)


def test_a_paraphraser_short_of_memory_rewrites_a_long_document_in_parts(tiny_t5_folder: Path) -> None:
    text = " ".join(sentence(number) for number in range(8))
    settings = ParaphraseSettings(Sampling(1.0, top_k=50), longest=2.0, piece_tokens=32, redraws=8)
    drawn = []
    for rows in (100, 3):
        lm = open_paraphraser(ModelConfig(path=str(tiny_t5_folder)))
        eos = lm.tokenizer.eos_token_id

        def hook(module: Any, args: Any, output: Any, eos: int = eos) -> None:
            output.logits[..., eos] = output.logits.amax(-1)

        lm.model.register_forward_hook(hook)
        sizes = short_of_memory(lm, rows)
        (result,) = draw_paraphrases(lm, [(7, text)], 4, settings, 1)
        assert isinstance(result, Draws), result
        drawn.append((max(sizes), result))
    assert (drawn[0][0] > 3, drawn[1][0] <= 3) == (True, True)
    assert drawn[0][1] == drawn[1][1]
