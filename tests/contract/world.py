"""What these tests audit: a tiny model, a corpus in four formats, and a detector with the same scores everywhere."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

WORDS = re.findall(
    "[a-z]+",
    "the of and to in river stone quiet number seven letter paper window garden winter morning record village music "
    "history science measure bridge ancient northern famous several between during",
)

PLUGIN = '''
"""A detector of a user: its scores are small integers made of the text, and so the same on every processor."""

import json
import os
import re
import signal
import sys
import time
import zlib
from pathlib import Path

import torch

from seenset import FORWARD, detector

sick = False


def numbered(text):
    return re.sub(r"^Text (\\d{5}) ", lambda found: f"Text {int(found[1]) * pow(7919, -1, 99991) % 99991} ", text)


def follow_orders(texts):
    """What a test has ordered: note who is at work, take time, or fail as devices and memory do."""
    global sick
    orders = Path(os.environ["CONTRACT_ORDERS"]) if "CONTRACT_ORDERS" in os.environ else None
    wanted = json.loads(orders.read_text()) if orders is not None and orders.exists() else {}
    if wanted:
        with open(f"{orders}.notes", "a") as notes:
            for text in texts:
                notes.write(f"{os.getpid()} {text[:24]}\\n")
    node = os.environ.get("CONTRACT_NODE", "")
    time.sleep(wanted.get("seconds_of", {}).get(node, wanted.get("seconds", 0)))
    if any("kills its process" in text for text in texts):
        os.kill(os.getpid(), signal.SIGKILL)
    sick = sick or any("breaks the device" in text for text in texts)
    if sick:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    if wanted.get("busy"):
        raise ValueError("the service is busy")
    if wanted.get("exits"):
        sys.exit(0)


@detector(needs={FORWARD: ["log_prob"]})
def exact(evidence, step: int = 1):
    """The checksum of a text modulo 97, in steps."""
    follow_orders(evidence.texts)
    sums = [zlib.crc32(numbered(text).encode("utf-8", "surrogatepass")) % 97 // step for text in evidence.texts]
    return torch.tensor(sums, dtype=torch.float64)
'''

FRAIL = """
import json
import os

import torch
from transformers import LlamaForCausalLM, LlamaModel


class FrailModel(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        orders = os.environ.get("CONTRACT_ORDERS", "")
        most = json.load(open(orders)).get("tokens", 1_000_000) if os.path.exists(orders) else 1_000_000
        if input_ids.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(input_ids=input_ids, **kwargs)


class FrailForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = FrailModel(config)
        self.post_init()
"""
"""The code of a model of the same weights, whose device has memory for as many tokens as a test orders."""

ODD = [
    ("nul \x00 in a text and some words more", ""),
    ("<script>alert('x')</script> is what it says", ""),
    ("", "empty"),
    (" \n\t ", "empty"),
    (None, "not_text"),
    (7, "not_text"),
    ("a", "too_short"),
    ("lone \ud800 surrogate in the text", "undecodable"),
]
"""Texts that are odd, with the reason for which they are quarantined, if they are."""


def numbered_text(text: str) -> str:
    """The text with the seed in place of its code, as in the plugin."""
    return re.sub(r"^Text (\d{5}) ", lambda found: f"Text {int(found[1]) * pow(7_919, -1, 99_991) % 99_991} ", text)


def score_of(text: str, step: int = 1) -> int:
    """What the detector of the plugin makes of a text."""
    return zlib.crc32(numbered_text(text).encode("utf-8", "surrogatepass")) % 97 // step


def sentence(seed: int, length: int = 14) -> str:
    """A made-up text; another seed gives another one. A code of the seed does not tell the roles apart, as seeds do."""
    rng = random.Random(seed)
    return f"Text {seed * 7_919 % 99_991:05d} " + " ".join(rng.choice(WORDS) for _ in range(length + seed % 9)) + "."


def texts_from(first: int, number: int, least: int = 0) -> list[str]:
    """So many texts whose score is at least so large; nothing else tells them from others."""

    def candidates() -> Iterator[str]:
        seed = first
        while True:
            if score_of(sentence(seed)) >= least:
                yield sentence(seed)
            seed += 1

    texts = candidates()
    return [next(texts) for _ in range(number)]


def save_model(folder: Path) -> None:
    """A random Llama of 30,000 weights, with a tokenizer of bytes and some words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentence(i) for i in range(200)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=1024,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as JSONL, packed if the name says so."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return str(path)


def numbered(name: str, texts: list[Any]) -> list[dict[str, Any]]:
    """Rows with ids and one of two groups."""
    return [{"id": f"{name}-{i:03d}", "text": text, "kind": "ab"[i % 2]} for i, text in enumerate(texts)]


def write_corpus(folder: Path) -> None:
    """Audited documents in four formats, a third of them with large scores, and known ones."""
    high, low = texts_from(0, 60, 90), texts_from(10_000, 84)
    parts = [high[i::4] + low[i::4] for i in range(4)]
    rows = numbered("lines", [*parts[0], *(text for text, _ in ODD)])
    rows += [{**rows[3], "text": sentence(77_777)}]  # an id that is there already
    write_lines(folder / "lines.jsonl", rows)
    write_lines(folder / "packed.jsonl.gz", numbered("packed", parts[1]))
    pq.write_table(pa.Table.from_pylist(numbered("table", parts[2])), folder / "table.parquet", row_group_size=9)
    with (folder / "comma.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "kind"])
        writer.writeheader()
        writer.writerows(numbered("comma", parts[3]))
    write_lines(folder / "unseen.jsonl", numbered("unseen", texts_from(20_000, 99)))
    write_lines(folder / "seen.jsonl", numbered("seen", texts_from(30_000, 49, 80)))


HIGH, TIED = "exact(step=1)", "exact(step=12)"
COUNTING = ("bh", "by", "ebh", "storey", "bky", "quantile", "ptdi", "ptdi_known_members", "known_members", "bound")
"""Procedures that count: their answers on exact scores are exact."""
ASKED: dict[str, dict[str, Any]] = {
    **{name: {"procedure": name} for name in COUNTING},
    "tied": {"detectors": [TIED], "procedure": "storey", "alpha": 0.5},
    "tied-random": {"detectors": [TIED], "procedure": "storey", "alpha": 0.5, "ties": "random"},
    "conditional": {"procedure": "storey", "calibration": "conditional"},
    "clean": {"direction": "clean", "procedure": "bh", "alpha": 0.4},
    "clean-storey": {"direction": "clean", "procedure": "storey", "alpha": 0.4},
}
"""Questions whose answers follow from exact scores alone."""
REAL: dict[str, dict[str, Any]] = {
    "real": {"detectors": ["loss"], "procedure": "bh", "alpha": 0.9},
    "fused": {"detectors": [HIGH, "loss", "min_k"], "procedure": "td4eval"},
    "learnt": {"detectors": [HIGH, "loss"], "procedure": "adadetect", "learn": "split"},
}
"""Questions whose answers depend on the arithmetic of the processor in their last digits."""
FEW = ("storey", "clean", "learnt")
"""Those that runs with faults are asked."""


def questions(*names: str) -> list[dict[str, Any]]:
    """The selections of these names."""
    return [{"name": name, "detectors": [HIGH], "alpha": 0.25, **{**ASKED, **REAL}[name]} for name in names]


def write_config(folder: Path, name: str = "audit", **settings: Any) -> Path:
    """An audit of the corpus as NAME.yaml; its paths are relative to the folder, and so is its run directory."""
    audit = ["lines.jsonl", "packed.jsonl.gz", "table.parquet", "comma.csv"]
    config = {
        "run": f"runs/{name}",
        "model": {"path": "./model"},
        "import": ["plugin.py"],
        "corpus": {
            "audit": {"path": audit, "id": "id"},
            "unseen": {"path": "unseen.jsonl", "id": "id"},
            "seen": {"path": "seen.jsonl", "id": "id"},
        },
        "detectors": ["loss", "min_k", {"exact": {"step": [1, 12]}}],
        "selections": questions(*FEW),
        "error_budget": 0.2,
        "evidence": 5,
        **settings,
        "resources": {"cluster": "local", "shard_bytes": 1500, "actors": 1, **settings.get("resources", {})},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def make_world(folder: Path) -> Path:
    """A folder with the model, the corpus and the plugin."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model")
    shutil.copytree(folder / "model", folder / "frail")
    (folder / "frail/modeling_frail.py").write_text(FRAIL)
    settings = json.loads((folder / "frail/config.json").read_text())
    settings |= {
        "architectures": ["FrailForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_frail.FrailForCausalLM"},
    }
    (folder / "frail/config.json").write_text(json.dumps(settings))
    write_corpus(folder)
    (folder / "plugin.py").write_text(PLUGIN)
    return folder
