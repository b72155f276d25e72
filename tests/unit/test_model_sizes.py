"""Sizes that no weights can have are refused in one line, soon and in little memory, and real sizes never are.

The memory of these tests is limited: a size that is not refused makes a test fail, and not the machine.
"""

import contextlib
import json
import re
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.models import ModelConfig
from pipeline.errors import UserError
from pipeline.models.checkpoints import check_adapter, other_base
from pipeline.models.load import check_model, fingerprint_model, open_model
from pipeline.models.settings import check_kernels, check_sizes, gguf_header
from pipeline.models.tokens import open_tokenizer
from tests.helpers.commands import user_error

HUGE = {
    "num_hidden_layers": (10**9, 10**4, -1, "12", 1e9, float("inf"), {"text": 10**9}),
    "hidden_size": (10**7, 10**12, -64, 0, "64", [10**7], float("nan")),
    "vocab_size": (10**12, 10**7, -1, "x", 10**400),
    "layer_types": (["full_attention"] * 10**6,),
    "rope_parameters": ({"rope_type": "longrope", "long_factor": [1.0] * 10**6},),
    "intermediate_size": (10**9, -8),
    "num_attention_heads": (10**9, -4),
    "num_key_value_heads": (10**9,),
    "head_dim": (10**9,),
    "max_position_embeddings": (10**12, "long"),
    "num_labels": (10**9,),
    "first_k_dense_replace": (10**9,),
    "attention_types": ([[["global"], 10**9]],),
    "chunk_size": (10**9,),
    "num_codebooks": (10**9,),
}
MEMORY = 1 << 30  # bytes that a test may take beyond those of the libraries
SECONDS = 5  # far more than a refusal takes, far less than 10,000 layers


def peak() -> int:
    """Peak of the memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(autouse=True)
def bounded(folder: Path) -> Iterator[None]:
    """Limit the data of this process, and restore the limit afterwards."""
    with open("/proc/self/status", encoding="utf-8") as status:
        used = next((1024 * int(line.split()[1]) for line in status if line.startswith("VmData:")), 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if used:
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def soon(work: Any, *arguments: Any) -> str:
    """The error of a call, which takes little time and memory."""
    began, before = time.process_time(), peak()
    message = user_error(work, *arguments)
    assert not re.search("allocat|out of memory|DefaultCPU", message), message
    assert len(message) < 1000
    assert time.process_time() - began < SECONDS
    assert peak() - before < 300 << 20
    return message


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    open_model(ModelConfig(path=str(tiny_model_folder)))  # libraries are imported, once
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in HUGE.items() for value in values])
def test_a_configuration_that_its_weights_cannot_have_is_refused_soon(folder: Path, key: str, value: Any) -> None:
    change(folder / "config.json", **{key: value})
    config = ModelConfig(path=str(folder))
    for work in (check_model, open_model):
        assert str(folder) in soon(work, config)


def test_a_value_of_another_type_is_named_with_its_type(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers="12")
    assert "expected int, got str (value: '12')" in user_error(check_model, ModelConfig(path=str(folder)))


def test_a_model_without_layers_is_one_line(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=0)
    config = ModelConfig(path=str(folder))
    check_model(config)
    assert "its weights do not fit" in user_error(open_model, config)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"])
def test_a_size_that_is_missing_is_refused_before_a_run(folder: Path, key: str) -> None:
    """The architecture has a default, which is not the size of these weights."""
    settings = json.loads((folder / "config.json").read_text())
    del settings[key]
    (folder / "config.json").write_text(json.dumps(settings | {"head_dim": None}))
    assert str(folder) in soon(check_model, ModelConfig(path=str(folder)))


def test_the_limit_of_these_tests_holds() -> None:
    import torch

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.zeros(2 * MEMORY, dtype=torch.uint8)


@pytest.mark.parametrize("depth", [400, 900, 970, 100_000])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "adapter_config.json"]
)
def test_a_file_of_nested_objects_is_one_line(folder: Path, adapter: Path, name: str, depth: int) -> None:
    file = (adapter if name == "adapter_config.json" else folder) / name
    nested = json.loads(file.read_text()) if file.exists() else {}
    text = json.dumps(nested)[:-1]
    for opening, closing in (('{"a":', "}"), ("[", "]")):
        file.write_text(f'{text}{", " if nested else ""}"init_inputs": {opening * depth}1{closing * depth}}}')
        for work in (fingerprint_model, check_model, open_tokenizer, open_model, other_base):
            with contextlib.suppress(UserError):
                work(ModelConfig(path=str(folder), adapter=str(adapter)))


def test_a_hub_model_whose_weights_are_not_here_yet_is_checked_too() -> None:
    for key, value in (("num_hidden_layers", 10**9), ("n_layer", 2000), ("num_experts", 10**9), ("vocab_size", 10**12)):
        assert f"config.json states {key} {value}" in user_error(check_sizes, "config.json", {key: value}, {})
    assert "text_config.num_hidden_layers" in user_error(
        check_sizes, "config.json", {"text_config": {"num_hidden_layers": 10**9}}, {}
    )


@pytest.mark.slow
def test_no_configuration_that_transformers_ships_is_refused() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    checked = 0
    for name in CONFIG_MAPPING:
        try:
            settings = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
        except Exception:  # some need settings, or packages
            continue
        check_sizes(name, settings, {})
        check_kernels(name, settings, False)
        checked += 1
    assert checked > 250
    check_sizes("long", {"max_position_embeddings": 10_485_760, "model_max_length": 10**30, "rope_theta": 10**12}, {})


def test_weights_bound_the_memory_of_tables_masks_and_pickles(folder: Path, tmp_path: Path) -> None:
    """Tables of positions that are no weights, and weights whose shapes only their loader knows."""
    import torch
    from safetensors.torch import load_file
    from transformers import GPTJConfig, GPTJForCausalLM

    small = GPTJConfig(vocab_size=512, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    place = tmp_path / "gptj"
    GPTJForCausalLM(small).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, place / name)
    check_model(ModelConfig(path=str(place)))
    change(place / "config.json", n_positions=10**9)
    for work in (check_model, open_model):
        assert "is max_position_embeddings right?" in soon(work, ModelConfig(path=str(place)))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    pickled = ModelConfig(path=str(folder), allow_pickle=True)
    check_model(pickled)
    change(folder / "config.json", hidden_size=10**7)
    for work in (check_model, open_model):
        assert "parameters, and its files hold" in soon(work, pickled)


def test_a_matrix_that_is_only_much_too_large_is_refused_before_it_gets_memory(folder: Path) -> None:
    change(folder / "config.json", vocab_size=32_000, intermediate_size=32_000)
    config = ModelConfig(path=str(folder))
    for work in (check_model, open_model):  # within what files of that size might hold
        assert "of another shape (" in soon(work, config)
    change(folder / "config.json", hidden_size=32_000, head_dim=8)
    for work in (check_model, open_model):
        assert "model.embed_tokens.weight is (32000, 32000), in its file (" in soon(work, config)


def test_what_cannot_be_built_is_refused_by_plan(folder: Path) -> None:
    change(folder / "config.json", pad_token_id=10**9)
    for work in (check_model, open_model):
        assert "Padding_idx must be within num_embeddings" in user_error(work, ModelConfig(path=str(folder)))
    (folder / "config.json").write_text("[1]")
    assert "no JSON object" in user_error(check_model, ModelConfig(path=str(folder)))


@pytest.fixture
def gguf(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from gguf_files import write_gguf

    monkeypatch.setenv("SEENSET_CACHE", str(tmp_path / "cache"))
    return write_gguf(folder, tmp_path / "model.gguf")


def patched(file: Path, key: str, value: int, width: int = 4) -> None:
    """Overwrite a number of the metadata of a GGUF file, which stands behind its key and type."""
    data = bytearray(file.read_bytes())
    at = data.index(key.encode()) + len(key) + 4
    data[at : at + width] = value.to_bytes(width, "little")
    file.write_bytes(data)


@pytest.mark.parametrize(
    "key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "vocab_size"]
)
def test_sizes_of_a_gguf_file_are_those_of_its_tensors(gguf: Path, key: str) -> None:
    config = ModelConfig(path=str(gguf))
    check_model(config)
    patched(gguf, f"llama.{key}", 10**9)
    for work in (check_model, open_model):
        assert f"states {key.rpartition('.')[2]} 1000000000" in soon(work, config)


def test_a_damaged_or_divided_gguf_file_is_one_line(gguf: Path, smollm2_file: Path) -> None:
    metadata, tensors = gguf_header(smollm2_file)
    assert metadata["llama.block_count"] == 30
    assert tensors["token_embd.weight"][1] == (49152, 576)
    whole = gguf.read_bytes()
    for at, value in ((8, 2**62), (16, 2**62), (24, 2**62)):  # tensors, entries, length of the first key
        gguf.write_bytes(whole[:at] + value.to_bytes(8, "little") + whole[at + 8 :])
        assert "its header leads beyond its end" in soon(check_model, ModelConfig(path=str(gguf)))
    for length in (30, 200, 2000):
        gguf.write_bytes(whole[:length])
        assert "its header leads beyond its end" in soon(open_model, ModelConfig(path=str(gguf)))
    key = b"split.count"
    entry = len(key).to_bytes(8, "little") + key + (2).to_bytes(4, "little") + (3).to_bytes(2, "little")
    entries = int.from_bytes(whole[16:24], "little") + 1
    gguf.write_bytes(whole[:16] + entries.to_bytes(8, "little") + entry + whole[24:])
    assert "one of 3 parts" in soon(check_model, ModelConfig(path=str(gguf)))


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", rank_pattern={"k_proj": 2})
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 10**9},
        {"r": 5000},
        {"r": -4},
        {"rank_pattern": {"q_proj": 10**9}},
        {"layer_replication": [[0, 2], [0, 10**4]]},
        {"num_virtual_tokens": 10**9},
        {"peft_type": "XLORA", "adapters": {"0": "/elsewhere"}},
        {"peft_type": "SHADOW", "shadow_model": "somebody/model"},
        {"megatron_config": {"x": 1}, "megatron_core": "antigravity"},
        {"peft_type": "MULTITASK_PROMPT_TUNING", "prompt_tuning_init_state_dict_path": "x.bin"},
        {"r": "4"},
    ],
)
def test_an_adapter_with_sizes_or_files_of_others_is_refused_soon(
    folder: Path, adapter: Path, settings: dict[str, Any]
) -> None:
    config = ModelConfig(path=str(folder), adapter=str(adapter))
    check_adapter(config)
    change(adapter / "adapter_config.json", **settings)
    assert str(adapter) in soon(open_model, config)
    if settings != {"r": "4"}:  # whose type peft checks
        assert str(adapter) in soon(check_model, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "somebody/attention@main:forward"},
        {"text_config": {"_attn_implementation": "kernels-community/x"}},
        {"_attn_implementation": {"text_config": "kernels-community/x"}},
        {"_experts_implementation": "sonicmoe"},
    ],
)
def test_a_kernel_of_the_hub_is_code(folder: Path, settings: dict[str, Any]) -> None:
    change(folder / "config.json", **settings)
    for work in (check_model, open_model):
        message = user_error(work, ModelConfig(path=str(folder)))
        assert "from the hub, which is code; set trust_remote_code: true" in message
    check_kernels("model", settings, True)


@pytest.mark.parametrize("value", ["sdpa", "eager", None])
def test_attention_of_transformers_is_no_code_of_the_hub(folder: Path, value: str | None) -> None:
    change(folder / "config.json", _attn_implementation=value)
    open_model(ModelConfig(path=str(folder)))
