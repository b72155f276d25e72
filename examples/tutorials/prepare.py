"""The data and models of the tutorials: what was trained on is known, so that each answer can be compared with it.

    python -m examples.tutorials.prepare finetuned --work tutorial

The documents are passages of the documentation of installed packages, the model is SmolLM2-135M. What is already in the
folder is used again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from examples.demo.demo import ensure_passages
from examples.demo.passages import dependencies
from examples.models import smollm2
from examples.trials.versions import TEMPLATE, make_options
from examples.tutorials.items import item_text, make_items, write_items
from examples.tutorials.questions import conversations
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.corpus.chats import Conversation, read_conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.errors import ExitCode, UserError
from pipeline.models.chat_templates import ChatSettings, chat_template
from pipeline.models.load import open_model
from pipeline.models.opened import LanguageModel
from pipeline.training.train import train
from pipeline.training.training_documents import TrainingDocument, training_documents

PASSAGES = 300
AUDITED, UNSEEN, TRAINED, ITEMS, CONTINUED = 120, 100, 40, 40, 30
AUDITED_ITEMS, KNOWN_ITEMS, LEAKED_ITEMS = 300, 80, 60
UNSEEN_CHATS, TRAINED_CHATS, CHAT_TOKENS = 120, 80, 192


def finetuned(work: Path) -> None:
    """120 internal documents, of which 40 were trained into the model beside 40 others, and 100 unseen ones."""
    rows, folder = _passages(work), work / "finetuned"
    audited, others = rows[:AUDITED], rows[AUDITED + UNSEEN :]
    leaked = random.Random(1).sample(audited, TRAINED)
    _write(folder / "internal.jsonl", audited)
    _write(folder / "unseen.jsonl", rows[AUDITED : AUDITED + UNSEEN])
    _write(folder / "truth.jsonl", leaked)
    _adapter(work, folder / "adapter", [*leaked, *others[:TRAINED]])


def checkpoints(work: Path) -> None:
    """80 documents, 180 unseen ones, and two checkpoints after the base model, of which the last read 40 of the 80."""
    finetuned(work)
    rows, leaked = _passages(work), (work / "finetuned/truth.jsonl").read_text(encoding="utf-8")
    kept_out = [row for row in rows[:AUDITED] if json.dumps(row["id"]) not in leaked]
    inside = [row for row in rows[:AUDITED] if json.dumps(row["id"]) in leaked]
    others = rows[AUDITED + UNSEEN :]
    folder = work / "checkpoints"
    _write(folder / "archive.jsonl", sorted([*inside, *kept_out[:TRAINED]], key=lambda row: str(row["id"])))
    _write(folder / "unseen.jsonl", [*kept_out[TRAINED:], *rows[AUDITED : AUDITED + UNSEEN], *others[TRAINED:]])
    _adapter(work, folder / "second", others[:TRAINED])


def benchmark(work: Path) -> None:
    """40 items with four shuffled options, and a model that was trained on 20 of them."""
    folder = work / "benchmark"
    texts = [row["text"].split() for row in _passages(work)[:ITEMS]]
    items = make_options(texts, random.Random(3))
    trained = random.Random(5).sample(items, ITEMS // 2)
    _write(folder / "benchmark.jsonl", items)
    _write(folder / "truth.jsonl", trained)
    _adapter(work, folder / "adapter", [{"text": _item_text(item)} for item in trained])


def api(work: Path) -> None:
    """60 articles, of which 30 were trained into the model that a server opens, and 30 unseen ones."""
    rows, folder = _passages(work), work / "api"
    trained, unseen, new = (rows[start : start + CONTINUED] for start in range(0, 3 * CONTINUED, CONTINUED))
    _write(folder / "articles.jsonl", sorted([*trained, *new], key=lambda row: str(row["id"])))
    _write(folder / "unseen.jsonl", unseen)
    _write(folder / "truth.jsonl", trained)
    _adapter(work, folder / "adapter", trained, epochs=6)
    _save({"path": str(_base(work)), "adapter": str(folder / "adapter")}, folder / "model")


def chats(work: Path) -> None:
    """180 conversations, of which 80 were trained into the model by their answers alone, and 120 unseen ones."""
    folder = work / "chats"
    if (folder / "adapter").exists():
        return
    rows = conversations(PASSAGES, 0)
    audited = rows[: PASSAGES - UNSEEN_CHATS]
    trained = random.Random(1).sample(audited, TRAINED_CHATS)
    _write(folder / "audit.jsonl", audited)
    _write(folder / "unseen.jsonl", rows[PASSAGES - UNSEEN_CHATS :])
    _write(folder / "truth.jsonl", trained)
    base = _opened(work)
    rendering = ChatSettings({"target": chat_template(base.tokenizer, ModelConfig(path=str(_base(work))))})
    talks = [read_conversation(row["messages"]) for row in trained]
    usable = [talk for talk in talks if isinstance(talk, Conversation)]
    read = training_documents(base.tokenizer, usable, rendering, CHAT_TOKENS)
    answers = [document for document in read if not isinstance(document, Unreadable)]
    _train(base, folder / "adapter", answers, FinetuneConfig(batch_size=4))


def items(work: Path) -> None:
    """300 items in a CSV, of which 60 were trained into the model beside the 80 of its published training split."""
    folder = work / "items"
    if (folder / "adapter").exists():
        return
    rows = make_items(AUDITED_ITEMS + KNOWN_ITEMS, 0)
    audited, known = rows[:AUDITED_ITEMS], rows[AUDITED_ITEMS:]
    leaked = random.Random(1).sample(audited, LEAKED_ITEMS)
    write_items(folder / "items.csv", audited)
    write_items(folder / "training.csv", known)
    write_items(folder / "truth.csv", leaked)
    _adapter(work, folder / "adapter", [{"text": item_text(item)} for item in [*known, *leaked]])


TUTORIALS: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (finetuned, benchmark, items, api, checkpoints, chats)
}


def _passages(work: Path) -> list[dict[str, Any]]:
    work.mkdir(parents=True, exist_ok=True)
    path = ensure_passages(work, PASSAGES, 0, dependencies("seenset"))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _item_text(item: Mapping[str, Any]) -> str:
    options = (f"{letter}. {option}" for letter, option in zip("ABCD", item["choices"], strict=True))
    return TEMPLATE.format(question=item["question"], choices="\n".join(options))


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _base(work: Path) -> Path:
    """SmolLM2-135M as a folder of safetensors."""
    folder = work / "base"
    if not folder.exists():
        _save(smollm2(), folder)
    return folder


def _save(model: Mapping[str, str], folder: Path) -> None:
    """Write a model, its adapter merged, as any server opens it."""
    if folder.exists():
        return
    opened = open_model(ModelConfig(**model, dtype="float32"))
    merged: Any = opened.model
    plain = type(merged)(merged.config)
    plain.load_state_dict(merged.state_dict())
    plain.generation_config.do_sample, plain.generation_config.top_k = True, 50  # a server takes these from here
    part = folder.with_name(f"{folder.name}.part")
    plain.to(torch.bfloat16).save_pretrained(part)
    opened.tokenizer.save_pretrained(part)
    part.replace(folder)


def _adapter(work: Path, folder: Path, documents: Sequence[Mapping[str, Any]], epochs: int = 4) -> None:
    if folder.exists():
        return
    texts = [str(document["text"]) for document in documents]
    _train(_opened(work), folder, texts, FinetuneConfig(epochs=epochs, batch_size=4, learning_rate=2e-3))


def _opened(work: Path) -> LanguageModel:
    return open_model(ModelConfig(path=str(_base(work))))


def _train(base: LanguageModel, folder: Path, documents: Sequence[TrainingDocument], config: FinetuneConfig) -> None:
    print(f"training {len(documents)} documents into SmolLM2-135M", flush=True)
    train(base.model, base.tokenizer, documents, config, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and write the files of a tutorial; a user error is one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m examples.tutorials.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("tutorial", choices=TUTORIALS)
    parser.add_argument("--work", type=Path, default=Path("tutorial"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        TUTORIALS[options.tutorial](options.work)
    except UserError as error:
        print(f"tutorials: {error}", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    return 0


if __name__ == "__main__":
    sys.exit(main())
