"""A GGUF file is unpacked once a machine, and is always opened from what was unpacked."""

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pipeline.config.models import ModelConfig
from pipeline.models import gguf_cache
from pipeline.models.checkpoints import locate
from pipeline.models.load import LanguageModel, check_model, fingerprint_model, open_model
from pipeline.models.model_files import process_folder
from pipeline.models.tokens import open_tokenizer, tokenize
from pipeline.passes.forward import forward
from tests.helpers.commands import in_a_process, user_error

TEXTS = ["The river learns the garden letter.", "Winter, a morning of quiet numbers; naïve ☃ twice."]
READER = "transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint"


@pytest.fixture(scope="module")
def file(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_model_folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SEENSET_CACHE", str(tmp_path / "cache"))
    gguf_cache._warn.cache_clear()
    yield tmp_path / "cache"
    gguf_cache._warn.cache_clear()


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / "gguf").glob("*") if path.is_dir())


def as_transformers_reads_it(file: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))


def assert_same(one: Any, other: Any) -> None:
    for left, right in (
        (one.state_dict(), other.state_dict()),
        (dict(one.named_buffers()), dict(other.named_buffers())),
    ):
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert tensor.dtype == right[name].dtype
            assert torch.equal(tensor, right[name]), name


def scores(opened: LanguageModel) -> torch.Tensor:
    ids = [tokens.ids for tokens in tokenize(opened.tokenizer, TEXTS, 64)]
    return forward(opened, ids, frozenset({"log_prob"})).log_prob


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_model_is_what_transformers_reads_first_and_without_a_cache(
    dtype: str, file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(file), dtype=dtype)
    parts = ModelConfig(path=str(file.parent), gguf_file=file.name, dtype=dtype)
    first, again = open_model(config), open_model(parts)
    (tmp_path / "taken").write_text("no folder")
    monkeypatch.setenv("SEENSET_CACHE", str(tmp_path / "taken"))
    check_model(config)
    without = open_model(config)
    expected = as_transformers_reads_it(file, dtype)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for opened in (first, again, without):
        assert_same(opened.model, expected)
        assert torch.equal(scores(opened), scores(first))
        assert opened.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
        assert opened.tokenizer(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
        assert opened.model.name_or_path == opened.model.config.name_or_path == expected.name_or_path
        assert opened.tokenizer.name_or_path == tokenizer.name_or_path
        assert opened.model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert opened.max_tokens == 2048
        assert getattr(opened.model.config, "quantization_config", None) is None, "it can be saved and trained"


def refuse_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_again(*_: Any, **__: Any) -> None:
        raise AssertionError("the GGUF file is read again")

    monkeypatch.setattr(READER, read_again)


def test_a_file_is_unpacked_once_for_all_dtypes_and_for_its_settings(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(file))
    facts = check_model(config)
    (entry,) = entries(cache)

    refuse_to_read(monkeypatch)
    assert open_model(config).model.dtype == torch.float32
    assert open_model(config.model_copy(update={"dtype": "bfloat16"})).model.dtype == torch.bfloat16
    assert check_model(config) == facts
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["dtype"] == "float32"
    open_tokenizer(config)
    assert entries(cache) == [entry]


def test_an_unwritable_cache_costs_one_unpacking_a_process_and_one_warning(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("no folder")
    config = ModelConfig(path=str(file))
    expected = as_transformers_reads_it(file, "float32")
    with caplog.at_level(logging.WARNING):
        facts = check_model(config)
        refuse_to_read(monkeypatch)
        assert_same(open_model(config).model, expected)
        assert check_model(config) == facts
    (warning,) = caplog.records
    assert warning.getMessage().startswith(f"the cache of unpacked GGUF files in {cache} cannot be used")
    assert "each process unpacks into a temporary folder" in warning.getMessage()


OPEN = """
import sys
from pipeline.config.models import ModelConfig
from pipeline.models.model_files import process_folder
from pipeline.models.load import open_model

open_model(ModelConfig(path=sys.argv[1]))
(weights,) = process_folder().glob("gguf/*/*/model.safetensors")
print(weights)
"""


@pytest.mark.slow
def test_what_a_process_unpacks_for_itself_is_removed_at_its_end(file: Path, cache: Path) -> None:
    cache.write_text("no folder")
    command = [sys.executable, "-c", OPEN, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    weights = Path(done.stdout.splitlines()[-1])
    assert weights.name == "model.safetensors"
    assert not weights.exists()


def test_a_user_without_a_home_directory_has_a_folder_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("SEENSET_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert gguf_cache.cache_folder() == process_folder()


def _lose(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.0.mlp.down_proj.weight"]


def _add(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.mlp.other.weight"] = torch.zeros(2)


def _reshape(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (_lose, "1 missing from the file (model.layers.0.mlp.down_proj.weight)"),
        (_add, "1 unknown to the model (model.layers.0.mlp.other.weight)"),
        (_reshape, "1 of another shape (model.norm.weight"),
    ],
)
def test_weights_that_are_not_written_as_they_were_are_refused(
    change: Callable[[dict[str, torch.Tensor]], None],
    refused: str,
    file: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a fault of the library that writes them would leave them."""
    save = PreTrainedModel.save_pretrained

    def damaged(model: Any, folder: Path) -> None:
        save(model, folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", damaged)
    assert refused in user_error(open_model, ModelConfig(path=str(file)))
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]


DAMAGE: dict[str, Callable[[Path, Path, bytes], object]] = {
    "a flipped bit": lambda weights, record, data: weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1])),
    "a lost end": lambda weights, record, data: weights.write_bytes(data[:-100]),
    "a lost file": lambda weights, record, data: weights.with_name("tokenizer.json").unlink(),
    "a lost record": lambda weights, record, data: record.unlink(),
    "a further file": lambda weights, record, data: weights.with_name("adapter_config.json").write_text("{}"),
    "no JSON": lambda weights, record, data: record.write_text(record.read_text()[:40]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_and_what_a_killed_process_left_are_made_anew(damage: str, file: Path, cache: Path) -> None:
    config = ModelConfig(path=str(file))
    open_model(config)
    (entry,) = entries(cache)
    data = (entry / "model.safetensors").read_bytes()
    DAMAGE[damage](entry / "model.safetensors", entry / gguf_cache.ENTRY_FILE, data)
    half = entry.with_name(f".{entry.name}-killed")
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert_same(open_model(config).model, as_transformers_reads_it(file, "float32"))
    assert (entry / "model.safetensors").read_bytes() == data
    assert entries(cache) == [entry]


def test_a_disk_that_is_full_in_both_places_is_one_line(file: Path, cache: Path) -> None:
    config = ModelConfig(path=str(file))

    def fail() -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the weights take more
        try:
            for _ in range(2):
                said = user_error(open_model, config)
                assert said.startswith(f"GGUF file tiny.gguf cannot be unpacked, neither in {cache} nor in ")
                assert "File too large" in said
                assert said.endswith(
                    "set SEENSET_CACHE to a folder that can be written and has space for its weights in float32"
                )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for folder in gguf_cache._folders(locate(config, weights=True), "float32"):
            assert [path.name for path in folder.parent.iterdir()] == [f"{folder.name}.lock"]
        assert_same(open_model(config).model, as_transformers_reads_it(file, "float32"))

    assert in_a_process(fail) == 0
    assert len(entries(cache)) == 1


def test_processes_that_ask_at_once_get_the_same_model_and_one_entry(file: Path, cache: Path) -> None:
    expected = as_transformers_reads_it(file, "float32")

    def ask(number: int) -> int:
        return in_a_process(lambda: assert_same(open_model(ModelConfig(path=str(file))).model, expected))

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(ask, range(3))] == [0, 0, 0]
    assert len(entries(cache)) == 1


def test_a_large_file_is_kept_in_the_dtype_that_is_asked_for(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_cache, "SMALL_FILE", 1000)
    config = ModelConfig(path=str(file), dtype="bfloat16")
    check_model(config)
    assert entries(cache) == []  # a plan of a large model unpacks nothing
    for _ in range(2):
        assert_same(open_model(config).model, as_transformers_reads_it(file, "bfloat16"))
    (entry,) = entries(cache)
    assert json.loads((entry / "config.json").read_text())["dtype"] == "bfloat16"
    open_tokenizer(config)
    assert entries(cache) == [entry]


def test_a_fingerprint_is_of_the_file_and_knows_no_cache(file: Path, cache: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(file))
    before = fingerprint_model(config)
    open_model(config)
    assert fingerprint_model(config) == before
    other = tmp_path / "other.gguf"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    other.write_bytes(data)
    changed = open_model(ModelConfig(path=str(other)))
    assert_same(changed.model, as_transformers_reads_it(other, "float32"))
    assert len(entries(cache)) == 2


def test_the_cache_has_the_place_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("SEENSET_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert gguf_cache.cache_folder() == Path("/home/somebody/.cache/seenset")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert gguf_cache.cache_folder() == Path("/scratch/seenset")
    monkeypatch.setenv("SEENSET_CACHE", "~/models")
    assert gguf_cache.cache_folder() == Path("/home/somebody/models")
