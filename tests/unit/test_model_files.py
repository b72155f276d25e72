"""Two folders with one fingerprint open as one model: whatever else is in a folder is refused, hashed or not read."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipeline.config.models import ModelConfig
from pipeline.models.checkpoints import check_files
from pipeline.models.load import check_model, fingerprint_model, open_model
from pipeline.models.model_files import NEUTRAL, RARE_TOKENIZER_FILES, TOKENIZER_FILES
from pipeline.models.tokens import open_tokenizer
from pipeline.passes.generate import Prompt, Sampling, continuations
from tests.helpers.commands import here, user_error

TEXT = "The river learns the garden letter."
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], object]


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_folder, tmp_path / "model")


def settings(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | changes))


def shards(folder: Path, names: tuple[str, str] = ("model-00001-of-00002", "model-00002-of-00002")) -> dict[str, str]:
    """Cut the weights of a folder into two shards with an index, and remove the whole file."""
    weights = load_file(folder / "model.safetensors")
    keys = sorted(weights)
    halves = dict(zip(names, (keys[: len(keys) // 2], keys[len(keys) // 2 :]), strict=True))
    for name, part in halves.items():
        save_file({key: weights[key] for key in part}, folder / f"{name}.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    places = {key: f"{name}.safetensors" for name, part in halves.items() for key in part}
    index(folder, places)
    return places


def index(folder: Path, places: dict[str, str], name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def scaled(file: Path, target: Path, factor: float = 2.0) -> None:
    """The weights of a file, changed."""
    weights = {key: value * factor for key, value in load_file(file).items()}
    target.parent.mkdir(exist_ok=True)
    save_file(weights, target, {"format": "pt"})


def pickled(file: Path, target: Path) -> None:
    torch.save({key: value * 3 for key, value in load_file(file).items()}, target)


def by_the_earlier_rule(folder: Path, weights: str = "*.safetensors") -> tuple[str, str]:
    """The digests of model and tokenizer as version 0.10 computed them."""

    def digest(*patterns: str) -> str:
        total = hashlib.sha256()
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
            total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
        return total.hexdigest()

    return digest(weights, "config.json"), digest(*TOKENIZER_FILES)


def results(config: ModelConfig) -> tuple[Any, ...]:
    """What scores depend on: logits, token ids, the chat template, the tokens that end a text, and drawn texts."""
    opened = open_model(config.model_copy(update={"dtype": "float32"}))
    ids = opened.tokenizer(TEXT)["input_ids"]
    known = [min(one, opened.model.config.vocab_size - 1) for one in ids]  # of added tokens too
    with torch.no_grad():
        logits = opened.model(torch.tensor([known])).logits
    ends = opened.model.generation_config.eos_token_id
    drawn = continuations(opened, [Prompt((1,), known, range(3))], Sampling(5.0, max_new_tokens=8), seed=1)
    ends = ends if isinstance(ends, list) else [ends]
    return logits.numpy().tobytes(), ids, opened.tokenizer.chat_template, ends, drawn


def digests(config: ModelConfig) -> tuple[str, str]:
    found = fingerprint_model(config)
    return found["model"], found["tokenizer"]


def test_folders_of_the_usual_kinds_keep_the_fingerprint_of_earlier_versions(folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(path=str(folder))
    assert digests(config) == by_the_earlier_rule(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "vocab.txt").write_text("not read")
    (folder / "README.md").write_text("not read")
    (folder / "notes.json").write_text("{}")
    settings(folder / "generation_config.json", temperature=0.1, top_k=1)
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert digests(config) == by_the_earlier_rule(folder)
    shards(folder)
    assert digests(config) == by_the_earlier_rule(folder)
    whole = shutil.copytree(folder, tmp_path / "link" / "target")
    assert digests(ModelConfig(path=str(whole))) == by_the_earlier_rule(folder)
    os.symlink(whole, tmp_path / "by-link")
    assert digests(ModelConfig(path=str(tmp_path / "by-link"))) == by_the_earlier_rule(folder)
    for file in folder.glob("*.safetensors"):
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    (folder / INDEX).unlink()
    index(folder, {key: name.replace(".safetensors", ".bin") for key, name in places.items()},
          "pytorch_model.bin.index.json")  # fmt: skip
    assert digests(ModelConfig(path=str(folder), allow_pickle=True)) == by_the_earlier_rule(folder, "*.bin")


def add_pickle_to_index(folder: Path) -> None:
    places = shards(folder)
    pickled(folder / "model-00001-of-00002.safetensors", folder / "extra.bin")
    index(folder, {**places, "model.norm.weight": "extra.bin"})


def add_outside(name: str) -> Change:
    def change(folder: Path) -> None:
        places = shards(folder)
        shutil.move(folder / "model-00002-of-00002.safetensors", folder.parent / "outside.safetensors")
        target = name.format(parent=folder.parent)
        index(folder, {key: target if place.startswith("model-00002") else place for key, place in places.items()})

    return change


def explicit_weights(name: str) -> Change:
    def change(folder: Path) -> None:
        scaled(folder / "model.safetensors", folder.parent / "outside.safetensors")
        pickled(folder / "model.safetensors", folder / "adapter_model.bin")
        settings(folder / "config.json", transformers_weights=name.format(parent=folder.parent))

    return change


def own_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder)


def vocabulary_elsewhere(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    (folder.parent / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer.json").unlink()
    settings(folder / "tokenizer_config.json", vocab=str(folder.parent / "vocab.json"), tokenizer_class="GPT2Tokenizer")


def linked_out(name: str) -> Change:
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / f"elsewhere-{name}")
        os.symlink(folder.parent / f"elsewhere-{name}", folder / name)

    return change


def version_of_config(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.4.0.0.json").write_text(json.dumps(text))
    settings(folder / "config.json", configuration_files=["config.4.0.0.json"])


REFUSED: dict[str, tuple[Change, str]] = {
    "an index that names a pickle": (add_pickle_to_index, "names 'extra.bin', which is not a safetensors file"),
    "an index that names a parent": (add_outside("../outside.safetensors"), "is outside of its folder"),
    "an index that names a place": (add_outside("{parent}/outside.safetensors"), "is outside of its folder"),
    "an index that names a parent inside": (add_outside("sub/../../outside.safetensors"), "is outside of its folder"),
    "an index that names what is not there": (add_outside("gone.safetensors"), "which is not a file in"),
    "an index that names numbers": (lambda f: (shards(f), index(f, {"a": 3})), "names '3'"),  # type: ignore[dict-item]
    "an index without names": (lambda f: (shards(f), (f / INDEX).write_text("[]")), "it has no weight_map"),
    "weights elsewhere": (explicit_weights("../outside.safetensors"), "is outside of its folder"),
    "weights at a place": (explicit_weights("{parent}/outside.safetensors"), "is outside of its folder"),
    "weights in a pickle": (explicit_weights("adapter_model.bin"), "set allow_pickle: true"),
    "weights of a part": (lambda f: settings(f / "config.json", text_config={"transformers_weights": "x.safetensors"}),
                          "transformers_weights in text_config"),
    "an adapter beside the weights": (own_adapter, "has an adapter in its folder"),
    "a tokenizer of another folder": (lambda f: settings(f / "tokenizer_config.json",
                                      fast_tokenizer_files=["../tokenizer.4.0.0.json"]), "is outside of its folder"),
    "a vocabulary of another folder": (vocabulary_elsewhere, "names the file"),
    "weights of a configuration for some versions": (lambda f: (version_of_config(f), settings(
        f / "config.4.0.0.json", transformers_weights="other.safetensors")), "only config.json may"),
    "a kernel of a configuration for some versions": (lambda f: (version_of_config(f), settings(
        f / "config.4.0.0.json", _attn_implementation="somebody/kernel")), "from the hub, which is code"),
    "sizes of a configuration for some versions": (lambda f: (version_of_config(f), settings(
        f / "config.4.0.0.json", num_hidden_layers=10**9)), "config.4.0.0.json states num_hidden_layers"),
    "a configuration without an end": (lambda f: ((f / "config.json").unlink(), os.symlink(
        "/dev/zero", f / "config.json")), "no config.json"),
    "a model of a processor": (lambda f: settings(f / "processor_config.json", audio_tokenizer={
        "audio_tokenizer_name_or_path": "somebody/model"}), "names another model (audio_tokenizer)"),
    "a link to another configuration": (linked_out("config.json"), "config.json is a link to"),
    "a link to another tokenizer": (linked_out("tokenizer.json"), "replace the link by a copy"),
    "a link to other settings of generation": (linked_out("generation_config.json"), "replace the link by a copy"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_reads_from_elsewhere_is_refused_by_every_command(folder: Path, name: str) -> None:
    change, message = REFUSED[name]
    change(folder)
    config = ModelConfig(path=str(folder))
    for work in (check_files, fingerprint_model, open_model):
        assert message in user_error(work, config), work
    if name != "a configuration without an end":
        assert message in user_error(open_tokenizer, config)


def sharded_twice(folder: Path) -> None:
    """Shards of two models; the index takes one of each."""
    scaled(folder / "model.safetensors", folder.parent / "other" / "model.safetensors")
    shards(folder.parent / "other", ("other-00001-of-00002", "other-00002-of-00002"))
    for file in (folder.parent / "other").glob("*.safetensors"):
        shutil.move(file, folder / file.name)
    shards(folder)


def mixed(folder: Path) -> None:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    index(folder, {key: name.replace("model-00002", "other-00002") for key, name in places.items()})


def scaled_in(name: str, **config: Any) -> Change:
    def change(folder: Path) -> None:
        scaled(folder / "model.safetensors", folder / name)
        settings(folder / "config.json", **config)

    return change


def rescaled(name: str) -> Change:
    return lambda folder: scaled(folder / name, folder / name, 1.5)


def reordered(name: str) -> Change:
    """A tokenizer with two exchanged ids."""

    def change(folder: Path) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        ids = tokenizer["model"]["vocab"]
        one, two = list(ids)[60:62]
        for first in (one, "r"):
            ids[first], ids[two] = ids[two], ids[first]
        (folder / name).write_text(json.dumps(tokenizer))

    return change


def for_versions(version: str) -> Change:
    """A further file of the tokenizer, for versions of transformers from this one on."""

    def change(folder: Path) -> None:
        shutil.copy(folder / "tokenizer.json", folder / f"tokenizer.{version}.json")
        settings(folder / "tokenizer_config.json", fast_tokenizer_files=[f"tokenizer.{version}.json"])

    return change


def template(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def shard_in(sub: str) -> Change:
    def change(folder: Path) -> None:
        places = shards(folder)
        (folder / sub).mkdir()
        shutil.move(folder / "model-00002-of-00002.safetensors", folder / sub / "b.safetensors")
        index(folder, {k: f"{sub}/b.safetensors" if v.startswith("model-00002") else v for k, v in places.items()})

    return change


def linked_shard(folder: Path) -> None:
    shards(folder)
    shutil.move(folder / "model-00002-of-00002.safetensors", folder.parent / "b.safetensors")
    os.symlink(folder.parent / "b.safetensors", folder / "model-00002-of-00002.safetensors")


def other_metadata(folder: Path) -> None:
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = {**opened.metadata(), "note": "another"}
    save_file(load_file(file), file, metadata)


def distributed(folder: Path) -> None:
    """Weights as a distributed training saves them: its loader takes every safetensors file of the folder."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "shard-00001-model-00001-of-00001.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()


def bracketed(folder: Path) -> None:
    places = shards(folder)
    shutil.move(folder / "model-00002-of-00002.safetensors", folder / "model[2].safetensors")
    index(folder, {k: "model[2].safetensors" if v.startswith("model-00002") else v for k, v in places.items()})


def nothing(folder: Path) -> None:
    pass


PAIRS: dict[str, tuple[Change, Change]] = {
    "weights": (nothing, rescaled("model.safetensors")),
    "only the metadata of weights": (nothing, other_metadata),
    "another selection of shards": (sharded_twice, mixed),
    "an index beside the whole": (nothing, lambda f: index(f, {"a": "model.safetensors"})),
    "shards beside the whole": (nothing, lambda f: (scaled(f / "model.safetensors", f / "b.safetensors"),
                                                    index(f, {"a": "b.safetensors"}))),
    "a second index": (shards, lambda f: index(f, {"a": "x.safetensors"}, "other.safetensors.index.json")),
    "the order of an index": (shards, lambda f: index(f, dict(reversed(json.loads(
        (f / INDEX).read_text())["weight_map"].items())))),
    "weights that config.json names": (scaled_in("w.safetensors", transformers_weights="w.safetensors"),
                                       rescaled("w.safetensors")),
    "weights that config.json names in a folder": (
        scaled_in("sub/w.safetensors", transformers_weights="sub/w.safetensors"), rescaled("sub/w.safetensors")),
    "weights that config.json begins to name": (scaled_in("w.safetensors"),
                                       lambda f: settings(f / "config.json", transformers_weights="w.safetensors")),
    "a shard in a folder": (shard_in("sub"), rescaled("sub/b.safetensors")),
    "a shard behind a link": (linked_shard, lambda f: rescaled("b.safetensors")(f.parent)),
    "a shard with a pattern as its name": (bracketed, rescaled("model[2].safetensors")),
    "weights of a distributed training": (distributed, rescaled("shard-00001-model-00001-of-00001.safetensors")),
    "a variant of the weights": (nothing, lambda f: scaled(f / "model.safetensors", f / "model.fp16.safetensors")),
    "names in capitals": (nothing, lambda f: scaled(f / "model.safetensors", f / "MODEL.SAFETENSORS")),
    "a tokenizer": (nothing, reordered("tokenizer.json")),
    "a tokenizer for some versions": (for_versions("4.0.0"), reordered("tokenizer.4.0.0.json")),
    "a tokenizer for later versions": (for_versions("99.0.0"), reordered("tokenizer.99.0.0.json")),
    "a configuration for some versions": (version_of_config,
                                          lambda f: settings(f / "config.4.0.0.json", rms_norm_eps=0.5)),
    "added tokens": (nothing, lambda f: settings(f / "added_tokens.json", rden=3)),
    "special tokens": (nothing, lambda f: settings(f / "special_tokens_map.json", mask_token="r")),
    "a chat template": (nothing, template("chat_template.jinja", "{{ messages[0].content }}")),
    "a chat template in JSON": (nothing, template("chat_template.json", json.dumps({"chat_template": "{{ 1 }}"}))),
    "further chat templates": (template("chat_template.jinja", "a"),
                               template("additional_chat_templates/x.jinja", "b")),
    "tokens that end a text": (nothing, lambda f: settings(f / "generation_config.json", eos_token_id=[0, 5])),
    "no tokens that end a text": (nothing, lambda f: settings(f / "generation_config.json", eos_token_id=None)),
    "other settings of generation": (nothing, lambda f: settings(
        f / "generation_config.json", temperature=0.01, do_sample=True, min_length=9, suppress_tokens=[3])),
    "a function for generation": (nothing, template("custom_generate/generate.py", "def generate(model): return 1")),
    "code that may not run": (nothing, template("modeling.py", "raise SystemExit")),
    "records of a training": (nothing, template("training.json", "{}")),
}  # fmt: skip
UNHASHED = {
    "an index beside the whole", "a second index", "the order of an index", "names in capitals",
    "other settings of generation", "a function for generation", "code that may not run", "records of a training",
}  # fmt: skip
"""Pairs with one fingerprint. (Names in capitals are another file on Linux.)"""


@pytest.mark.parametrize("name", PAIRS)
def test_what_changes_a_result_changes_the_fingerprint(folder: Path, tmp_path: Path, name: str) -> None:
    prepare, change = PAIRS[name]
    prepare(folder)
    config = ModelConfig(path=str(folder))
    before, first = digests(config), results(config)
    change(folder)
    after, second = digests(config), results(config)
    assert before != after or first == second, "one fingerprint, and two models"
    assert (before == after) == (name in UNHASHED)


def test_a_pickle_is_read_and_hashed_only_where_it_is_allowed(folder: Path) -> None:
    add_pickle_to_index(folder)
    allowed = ModelConfig(path=str(folder), allow_pickle=True)
    before = digests(allowed)
    torch.save({"model.norm.weight": torch.ones(32)}, folder / "extra.bin")
    assert digests(allowed) != before
    assert str(folder / "extra.bin") in map(str, check_files(allowed).files.places.values())  # type: ignore[union-attr]


def test_pickles_beside_safetensors_that_no_loader_finds_are_hashed(folder: Path) -> None:
    """transformers reads pytorch_model.bin where no model.safetensors is; earlier versions hashed the other file."""
    shutil.move(folder / "model.safetensors", folder / "consolidated.safetensors")
    pickled(folder / "consolidated.safetensors", folder / "pytorch_model.bin")
    config = ModelConfig(path=str(folder), allow_pickle=True)
    before, first = digests(config), results(config)
    torch.save(load_file(folder / "consolidated.safetensors"), folder / "pytorch_model.bin")
    assert digests(config) != before
    assert results(config) != first


def test_a_link_that_is_changed_after_hashing_is_hashed_anew(folder: Path, tmp_path: Path) -> None:
    linked_shard(folder)
    config = ModelConfig(path=str(folder))
    before, first = digests(config), results(config)
    scaled(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    link = folder / "model-00002-of-00002.safetensors"
    facts = link.stat()
    link.unlink()
    os.utime(tmp_path / "c.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.symlink(tmp_path / "c.safetensors", link)
    assert results(config) != first
    assert digests(config) != before


def snapshot_of(folder: Path, top: Path) -> Path:
    """A model as the cache of the hub keeps it: a snapshot of links to blobs."""
    entry = top / "models--somebody--tiny"
    snapshot = entry / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    for file in folder.iterdir():
        name = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, entry / "blobs" / name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", name))
    return snapshot


def test_a_snapshot_of_the_hub_opens_by_its_blobs_and_no_others(folder: Path, tmp_path: Path) -> None:
    hub_entry = snapshot_of(folder, tmp_path / "hub")
    plain = ModelConfig(path=str(folder))
    config = ModelConfig(path=str(hub_entry))
    assert digests(config) == digests(plain)
    assert results(config) == results(plain)
    os.symlink(tmp_path / "hub", tmp_path / "cache")
    by_link = ModelConfig(path=str(tmp_path / "cache" / hub_entry.relative_to(tmp_path / "hub")))
    assert digests(by_link) == digests(plain)
    other = tmp_path / "hub" / "models--somebody--other" / "blobs" / "x"
    other.parent.mkdir(parents=True)
    scaled(folder / "model.safetensors", other)
    (hub_entry / "model.safetensors").unlink()
    (hub_entry / "model.safetensors").symlink_to(other)
    for work in (fingerprint_model, open_model):
        assert "not to a file of the same entry of the hub's cache" in user_error(work, config)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
from pathlib import Path
{imports}
class HomeConfig(LlamaConfig):
    model_type = "home"
class HomeModel(LlamaForCausalLM):
    config_class = HomeConfig
    def __init__(self, config):
        super().__init__(config)
        self.factor = {factor}
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **settings):
        settings = {{**settings, "position_ids": position_ids, "past_key_values": past_key_values}}
        out = super().forward(input_ids, attention_mask, **settings)
        out.logits = out.logits * self.factor
        return out
"""


def with_code(folder: Path, imports: str = "", factor: str = "1.0", reference: str = "home.HomeModel") -> ModelConfig:
    (folder / "home.py").write_text(CODE.format(imports=imports, factor=factor))
    auto_map = {"AutoConfig": "home.HomeConfig", "AutoModelForCausalLM": reference}
    settings(folder / "config.json", model_type="home", architectures=["HomeModel"], auto_map=auto_map)
    settings(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return ModelConfig(path=str(folder), trust_remote_code=True)


def test_files_that_code_of_the_model_reads_are_in_its_fingerprint(folder: Path) -> None:
    reads = 'float((Path(config._name_or_path) / "parts" / "factor.txt").read_text())'
    config = with_code(folder, "from .helper import NUMBER", f"NUMBER * {reads}")
    (folder / "helper.py").write_text("NUMBER = 1.0")
    (folder / "parts").mkdir()
    (folder / "parts" / "factor.txt").write_text("2.0")
    seen = {digests(config): results(config)}
    for name, text in (("parts/factor.txt", "3.0"), ("helper.py", "NUMBER = 4.0"), ("parts/factor.txt", "5.0")):
        (folder / name).write_text(text)
        assert digests(config) not in seen, name
        seen[digests(config)] = results(config)
    assert len({first for first, *_ in seen.values()}) == 4
    (folder / "README.md").write_text("not read")
    assert digests(config) in seen


def test_code_that_reads_what_is_not_hashed_finds_no_file(folder: Path) -> None:
    config = with_code(folder, factor='float((Path(config._name_or_path) / "factor.ckpt").read_text())')
    (folder / "factor.ckpt").write_text("2.0")
    assert "factor.ckpt" in user_error(open_model, config)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("somebody/model--home.HomeModel", "code of another repository, 'somebody/model'"),
        ("/tmp/home.HomeModel", "outside of its folder"),
    ],
)
def test_code_of_another_repository_is_refused(folder: Path, reference: str, message: str) -> None:
    config = with_code(folder, reference=reference)
    for work in (check_files, fingerprint_model, open_model):
        assert message in user_error(work, config)


def test_nothing_beside_a_gguf_file_changes_its_model(smollm2_file: Path, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "gguf"
    place.mkdir()
    os.symlink(smollm2_file, place / smollm2_file.name)
    config = ModelConfig(path=str(place / smollm2_file.name))
    before, first = fingerprint_model(config), results(config)
    for file in folder.iterdir():
        shutil.copy(file, place / file.name)
    shutil.rmtree(os.environ.get("SEENSET_CACHE", "/nonexistent"), ignore_errors=True)
    assert fingerprint_model(config) == before
    assert results(config) == first
    assert before == fingerprint_model(ModelConfig(path=str(smollm2_file)))


def test_every_file_of_a_tokenizer_that_transformers_knows_is_listed() -> None:
    """Of each class of tokenizers, by its source: some cannot be imported without further packages."""
    import re

    import transformers

    names: set[str] = set()
    for source in Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        block = re.search(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", source.read_text(), re.DOTALL)
        names |= set(re.findall(r':\s*"([^"]+)"', block[1])) if block else set()
    assert len(names) > 20
    known = {*TOKENIZER_FILES, *RARE_TOKENIZER_FILES, "dict.txt"}
    assert {name for name in names if name not in known and not name.endswith(".model")} == set()


def test_the_list_of_files_that_change_no_score_is_tested() -> None:
    covered = {
        "model.safetensors.index.json": "the order of an index",
        "pytorch_model.bin.index.json": "the order of an index",
        "generation_config.json": "other settings of generation",
        "training.json": "records of a training",
    }
    assert covered.keys() == NEUTRAL.keys()
    assert set(covered.values()) <= UNHASHED


def test_adapters_are_read_by_two_names_alone(folder: Path, tmp_path: Path) -> None:
    own_adapter(folder)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.move(folder / name, adapter / name)
    config = ModelConfig(path=str(folder), adapter=str(adapter))
    before, first = digests(config), results(config)
    (adapter / "training.json").write_text("{}")
    (adapter / "README.md").write_text("not read")
    (adapter / "config.json").write_text("{")
    assert digests(config) == before
    assert results(config) == first
    scaled(adapter / "adapter_model.safetensors", adapter / "adapter_model.safetensors")
    assert digests(config) != before
    assert results(config) != first
    shutil.move(adapter / "adapter_config.json", tmp_path / "settings.json")
    os.symlink(tmp_path / "settings.json", adapter / "adapter_config.json")
    for work in (fingerprint_model, open_model):
        assert "adapter_config.json is a link to" in user_error(work, config)
    (adapter / "config.json").unlink()
    assert "is an adapter" in user_error(check_files, ModelConfig(path=str(adapter)))


def test_an_adapter_beside_the_weights_is_merged_where_the_configuration_names_it(folder: Path) -> None:
    plain = results(ModelConfig(path=str(folder)))
    own_adapter(folder)
    named = ModelConfig(path=str(folder), adapter=str(folder))
    assert results(named)[0] != plain[0]
    assert digests(named)[1] == digests(named.model_copy(update={"adapter": str(folder / ".")}))[1]


@pytest.mark.parametrize(
    ("base", "warned"),
    [
        (None, False),
        ("", False),
        ("{model}", False),
        ("somebody/MODEL", False),
        ("somebody/tiny-7b", False),
        ("/another/place/model", False),
        ("somebody/another-7b", True),
        ("/another/place/base", True),
        ("mo\ndel-\u202e", True),
    ],
)
def test_plan_warns_of_an_adapter_that_names_another_base(
    folder: Path,
    tmp_path: Path,
    make_audit: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    base: str | None,
    warned: bool,
) -> None:
    own_adapter(folder)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.move(folder / name, adapter / name)
    settings(folder / "config.json", _name_or_path="somebody/tiny-7b")
    name = None if base is None else base.format(model=folder)
    settings(adapter / "adapter_config.json", base_model_name_or_path=name)
    audit = make_audit(9, 9, model={"path": str(folder), "adapter": str(adapter)})
    output, _ = here(capsys, "plan", audit)
    assert (f"adapter {adapter} names base model" in output) == warned
    assert "\u202e" not in output


def test_a_tokenizer_trained_with_dropout_gives_the_same_tokens_at_every_call(folder: Path) -> None:
    plain = open_tokenizer(ModelConfig(path=str(folder)))(TEXT)["input_ids"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    opened = open_tokenizer(ModelConfig(path=str(folder)))
    assert all(opened(TEXT)["input_ids"] == plain for _ in range(20))


def test_a_hub_id_opens_from_the_cache_without_a_network(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: the library reads the place of the cache when it is imported."""
    snapshot = snapshot_of(folder, tmp_path / "hub")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    program = (
        "import json; from pipeline.config.models import ModelConfig; from pipeline.models import load;"
        "config = ModelConfig(path='somebody/tiny'); load.check_model(config); opened = load.open_model(config);"
        "print(json.dumps([load.fingerprint_model(config), opened.model.name_or_path]))"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    fingerprint, name = json.loads(printed.stdout.splitlines()[-1])
    assert fingerprint == fingerprint_model(ModelConfig(path=str(folder)))
    assert name == str(snapshot)


def test_without_symbolic_links_hard_ones_are_made_and_without_both_it_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(1, "Operation not permitted")

    config = ModelConfig(path=str(folder))
    first = results(config)
    (folder / "vocab.txt").write_text("another folder of links")
    monkeypatch.setattr(os, "symlink", refused)
    assert results(config) == first
    (folder / "vocab.txt").unlink()
    (folder / "added_tokens.json").write_text("{}")
    monkeypatch.setattr(os, "link", refused)
    assert "cannot make links in" in user_error(check_files, config)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_in_the_place_of_a_file_is_named(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
    (folder / "pytorch_model.bin").write_text(pointer)  # which is not read
    check_model(ModelConfig(path=str(folder)))
    (folder / name).write_text(pointer)
    line = user_error(check_model, ModelConfig(path=str(folder)))
    assert line.startswith(
        f"model {folder}: {name}: it is a pointer of Git LFS and not the file itself: run git lfs pull"
    )
