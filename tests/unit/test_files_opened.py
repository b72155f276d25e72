"""Every file that is opened below a model's folder is in its fingerprint, or on the list of those that change no score.

The system is asked, not Python: its audit hook does not see what safetensors, tokenizers and pyarrow open.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opened_files import NoWatchError, opened_by
from test_model_files import (
    add_pickle_to_index,
    linked_shard,
    own_adapter,
    settings,
    shards,
    snapshot_of,
    template,
    version_of_config,
    with_code,
)

from pipeline.config.models import ModelConfig
from pipeline.models.checkpoints import check_files
from pipeline.models.model_files import NEUTRAL, NEUTRAL_OF_ADAPTER, adapter_files

WORK = str(Path(__file__).with_name("open_model_in_every_way.py"))
Prepare = Callable[[Path, Path], dict[str, Any]]


def model(change: Callable[[Path], object] | None = None, **config: Any) -> Prepare:
    """The tiny model, changed, with files beside it that no loader may read."""

    def prepare(tiny: Path, folder: Path) -> dict[str, Any]:
        shutil.copytree(tiny, folder)
        if change is not None:
            change(folder)
        for name in ("notes.json", "video_preprocessor_config.json", "modeling.py", "config.4.9.json", "flax.msgpack"):
            if not (folder / name).exists() and not config.get("trust_remote_code"):
                (folder / name).write_text("{}")
        return {"path": str(folder), **config}

    return prepare


def with_adapter(tiny: Path, folder: Path) -> dict[str, Any]:
    found = model(own_adapter)(tiny, folder / "model")
    (folder / "adapter").mkdir()
    for file in (folder / "model").glob("adapter_*"):
        shutil.move(file, folder / "adapter" / file.name)
    for name in ("training.json", "tokenizer.json", "tokenizer_config.json", "README.md"):
        (folder / "adapter" / name).write_text("{}")
    return {**found, "adapter": str(folder / "adapter")}


def without_fast_tokenizer(tiny: Path, folder: Path) -> dict[str, Any]:
    """A model whose tokenizer is written in Python, with vocabulary and merges in files."""
    from transformers import CTRLConfig, CTRLLMHeadModel

    small = CTRLConfig(vocab_size=40, n_positions=64, n_embd=16, dff=32, n_layer=1, n_head=2, tie_word_embeddings=True)
    CTRLLMHeadModel(small).save_pretrained(folder)
    letters = ["<unk>", *"abcdefghijklmnopqrstuvwxyz", *(f"{one}</w>" for one in "arvenotqui")]
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\nr i\n")
    settings(folder / "tokenizer_config.json", tokenizer_class="CTRLTokenizer")
    (folder / "emoji.json").write_text("{}")
    return {"path": str(folder)}


def japanese(tiny: Path, folder: Path) -> dict[str, Any]:
    """A model whose tokenizer has a file with a name of its own."""
    from transformers import GPTNeoXJapaneseConfig, GPTNeoXJapaneseForCausalLM

    small = GPTNeoXJapaneseConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_multiple_size=2
    )
    GPTNeoXJapaneseForCausalLM(small).save_pretrained(folder)
    words = [*map(chr, range(32, 127)), *(f"<|byte{i}|>" for i in range(128)), "<|endoftext|>", "<SP>", "<BR>"]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "emoji.json").write_text(json.dumps({"emoji": {"☃": "<|emoji1|>"}, "emoji_inv": {"<|emoji1|>": "☃"}}))
    settings(folder / "tokenizer_config.json", tokenizer_class="GPTNeoXJapaneseTokenizer")
    return {"path": str(folder)}


def pictures(tiny: Path, folder: Path) -> dict[str, Any]:
    from tests.helpers.picture_models import save_llava

    save_llava(folder)
    (folder / "video_preprocessor_config.json").write_text("{}")
    return {"path": str(folder)}


def of_code(tiny: Path, folder: Path) -> dict[str, Any]:
    shutil.copytree(tiny, folder)
    reads = 'float((Path(config._name_or_path) / "parts" / "factor.txt").read_text())'
    with_code(folder, "from .helper import NUMBER", f"NUMBER * {reads}")
    (folder / "helper.py").write_text("NUMBER = 1.0")
    template("parts/factor.txt", "2.0")(folder)
    return {"path": str(folder), "trust_remote_code": True}


def templates(folder: Path) -> None:
    template("chat_template.jinja", "a")(folder)
    template("additional_chat_templates/x.jinja", "b")(folder)
    version_of_config(folder)
    shutil.copy(folder / "tokenizer.json", folder / "tokenizer.4.0.0.json")
    settings(folder / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])


def rewriter(tiny: Path, folder: Path) -> dict[str, Any]:
    from tests.helpers.tiny_t5 import save_tiny_t5

    save_tiny_t5(folder)
    (folder / "spiece.model.old").write_text("{}")
    return {"path": str(folder)}


def gguf(tiny: Path, folder: Path) -> dict[str, Any]:
    """A GGUF file, with a model of another kind beside it."""
    from gguf_files import write_gguf

    shutil.copytree(tiny, folder)
    write_gguf(tiny, folder / "model.gguf")
    return {"path": str(folder / "model.gguf")}


def snapshot(tiny: Path, folder: Path) -> dict[str, Any]:
    return {"path": str(snapshot_of(tiny, folder))}


KINDS: dict[str, tuple[str, Prepare]] = {
    "safetensors": ("causal", model()),
    "shards": ("causal", model(shards)),
    "a shard behind a link": ("causal", model(linked_shard)),
    "pickles": ("causal", model(add_pickle_to_index, allow_pickle=True)),
    "an adapter": ("causal", with_adapter),
    "files for versions": ("causal", model(templates)),
    "a tokenizer in Python": ("causal", without_fast_tokenizer),
    "a tokenizer with a file of its own": ("causal", japanese),
    "a snapshot of the hub": ("causal", snapshot),
    "a GGUF file": ("causal", gguf),
    "a paraphraser": ("rewriter", rewriter),
    "pictures": ("pictures", pictures),
    "code": ("causal", of_code),
}


@pytest.fixture(scope="module")
def prepared(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path, Any]]:
    """Name -> kind, folder and settings of each model."""
    top = tmp_path_factory.mktemp("models").resolve()
    found = {}
    for number, (name, (kind, prepare)) in enumerate(KINDS.items()):
        folder = top / f"{number}"
        folder.mkdir()
        found[name] = kind, folder, prepare(tiny_model_folder, folder / "model")
    return found


@pytest.fixture(scope="module", params=["inotify", "strace"])
def opened(request: pytest.FixtureRequest, prepared: dict[str, tuple[str, Path, Any]]) -> set[Path]:
    """The files below all of these folders that one process opens."""
    work = json.dumps([(kind, config) for kind, _, config in prepared.values()])
    try:
        found = opened_by([sys.executable, WORK, work], [folder for _, folder, _ in prepared.values()], request.param)
    except NoWatchError as error:
        pytest.skip(str(error))
    return {path.resolve() for path in found}


@pytest.mark.parametrize("name", KINDS)
def test_only_files_of_the_fingerprint_are_opened(
    name: str, prepared: dict[str, tuple[str, Path, Any]], opened: set[Path]
) -> None:
    _, folder, settings = prepared[name]
    config = ModelConfig(**settings)
    known, neutral = [check_files(config).files], NEUTRAL.keys()
    if config.adapter is not None:
        known.append(adapter_files(Path(config.adapter), ""))
        neutral |= NEUTRAL_OF_ADAPTER.keys()
    here = {path for path in opened if path.is_relative_to(folder)}
    hashed = {each.places[name] for each in known for name in each.hashed}
    unhashed = {each.places[name] for each in known for name in each.neutral if Path(name).name in neutral}
    assert here <= hashed | unhashed, sorted(map(str, here - hashed - unhashed))
    assert {each.places[name] for each in known for name in each.weights} <= here, "the watch saw too little"
    assert len(here & hashed) >= (1 if "GGUF" in name else 3)


@pytest.mark.slow
def test_of_a_whole_run_too(
    tiny_model_folder: Path, paraphraser: dict[str, str], tmp_path: Path, make_audit: Callable[..., Path]
) -> None:
    """Model with an adapter, reference model, paraphraser, and the adapters that the run itself trains."""
    model = with_adapter(tiny_model_folder, tmp_path / "target")
    reference = prepare_reference(tiny_model_folder, tmp_path / "reference")
    fsd = {"documents": 8, "dtype": "float32", "epochs": 1}
    detectors = ["loss", "reference", {"knockoff": {"base": "loss", "draws": 1}}, {"fsd": {"base": "loss"}}]
    audit = make_audit(12, 24, model=model, reference_model=reference, paraphraser=paraphraser, detectors=detectors,
                       fsd=fsd, selections=[], error_budget=1.0)  # fmt: skip
    folders = [tmp_path / "target", tmp_path / "reference", Path(paraphraser["path"])]
    program = "import sys; from ray_jobs.cli import main; main(sys.argv[1:])"
    known = [check_files(ModelConfig(**config)).files for config in (model, reference, paraphraser)]
    known.append(adapter_files(Path(model["adapter"]), ""))
    allowed = {each.places[name] for each in known if each is not None for name in (*each.hashed, *each.neutral)}
    for command in ("plan", "run"):
        try:
            found = opened_by([sys.executable, "-c", program, command, str(audit)], folders)
        except NoWatchError as error:
            pytest.skip(str(error))
        assert found <= allowed, sorted(map(str, found - allowed))
    assert {each.places[name] for each in known if each is not None for name in each.weights} <= found
    assert [*(tmp_path / "run" / "adapters").glob("*/adapter_model.safetensors")]


def prepare_reference(tiny: Path, folder: Path) -> dict[str, Any]:
    return model(shards)(tiny, folder)
