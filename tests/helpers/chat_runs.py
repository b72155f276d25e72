"""Audits of made-up chats with a tiny model that has a chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM

from pipeline.store.files import Store
from tests.helpers import chat_templates as templates
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.commands import ended
from tests.helpers.made_up import sentence

HERE = {"cluster": "local", "shard_bytes": 1 << 20}  # scores depend on what shares a batch
SELECTIONS = [{"name": "bh", "detectors": ["loss"], "procedure": "bh", "alpha": 0.99}]


def save_chat_model(tiny_model_folder: Path, folder: Path, template: str = templates.CHATML) -> Path:
    """The tiny model with a tokenizer that has a chat template, in a folder."""
    tokenizer = chat_tokenizer(tiny_model_folder, template)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat(*contents: str) -> list[dict[str, str]]:
    """A question, its answer, the next question, ..."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def talks(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows of made-up questions and answers."""
    return [{"messages": chat(sentence(seed + 2 * n), sentence(seed + 2 * n + 1))} for n in range(count)]


def chat_audit(model: Path, corpus: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """The configuration of an audit without its run directory."""
    given = {"model": {"path": str(model), "dtype": "float32"}, "corpus": corpus, "resources": HERE}
    return {**given, "detectors": ["loss"], "selections": SELECTIONS, **changed}


def run_chats(folder: Path, given: Mapping[str, Any], name: str = "run") -> Store:
    """Run an audit by the command."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"run": str(folder / name), **given}))
    assert ended("run", str(path)) == 0
    return Store(str(folder / name))
