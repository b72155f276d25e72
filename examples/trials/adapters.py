"""What an adapter loses when its model is opened in half precision or quantized: one training, opened in several ways.

SmolLM2-135M, stored in bfloat16, is trained on passages of installed packages with LoRA of rank 8 for one epoch. Each
way to open it scores the members and unseen passages, beside the base model in the same type, for the detectors that
compare with it. The table has AUC, its difference from float32, and the power of selections that the unseen passages
calibrate. Scores are kept in the folder: a second call measures only what is new.

    python -m examples.trials.adapters --out runs/adapters --unseen 600
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.demo.passages import gather_passages
from examples.models import smollm2
from pipeline.answers.detection import DetectorScores, detection
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.detectors.base import FORWARD, REFERENCE, Evidence
from pipeline.detectors.likelihood import loss, reference
from pipeline.detectors.pairs import ez
from pipeline.errors import UserError
from pipeline.models.load import load_adapter, open_model
from pipeline.models.opened import LanguageModel
from pipeline.models.tokens import tokenize
from pipeline.passes.forward import TokenStatistics, forward
from pipeline.training.train import train
from seenset import select

DETECTORS = {"loss": loss, "ez": ez, "reference": reference}
FIRST = "float32, merged"
WAYS: dict[str, dict[str, str]] = {
    FIRST: {"dtype": "float32"},
    "bfloat16, merged by peft": {"dtype": "bfloat16"},
    "bfloat16, merged": {"dtype": "bfloat16"},
    "bfloat16, beside": {"dtype": "bfloat16"},
    "8 bits": {"quantization": "8bit", "dtype": "bfloat16"},
    "4 bits": {"quantization": "4bit", "dtype": "bfloat16"},
}
"""Each way to open the model -> its settings; beside: the update is computed in float32, next to the weights."""

SELECTIONS = (("bh", 0.1), ("bh", 0.2), ("storey", 0.1), ("storey", 0.2))
"""Procedure and alpha of each power."""

SPLITS, RESAMPLES, BATCH = 200, 2000, 8

Scores = dict[str, tuple[np.ndarray, np.ndarray]]
"""Detector -> scores of members and of unseen passages, float64."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, score in each way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model and its adapters")
    parser.add_argument("--members", type=int, default=60, help="passages of a training")
    parser.add_argument("--unseen", type=int, default=120, help="passages that no model has seen")
    parser.add_argument("--trainings", type=int, default=1, help="trainings, each on passages of its own")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=1, help="passages in a step")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="; ".join(WAYS))
    options = parser.parse_args(arguments)
    base = save_base(options.out / "base")
    passages = [passage.text for passage in gather_passages(options.trainings * (options.members + options.unseen), 0)]
    measured: dict[str, list[Scores]] = {way: [] for way in options.ways}
    for number in range(options.trainings):
        texts, adapter = passages[number :: options.trainings], options.out / f"adapter-{number}"
        settings = FinetuneConfig(
            epochs=1, rank=8, learning_rate=options.learning_rate, batch_size=options.batch_size, seed=number
        )
        adapt(base, texts[: options.members], settings, adapter)
        for way in list(measured):
            try:
                measured[way].append(kept_scores(way, base, adapter, texts, options.members))
            except UserError as error:
                print(f"{way}: {error}", flush=True)
                del measured[way]
            else:
                print(json.dumps({"training": number, **summarize_way(way, measured[way][-1:])}), flush=True)
    for way, trainings in measured.items():
        for name in DETECTORS:
            print(json.dumps(summarize_detector(way, name, trainings, measured.get(FIRST, ()))))


def save_base(folder: Path) -> Path:
    """SmolLM2 as a folder in bfloat16."""
    if not (folder / "tokenizer_config.json").exists():
        opened = open_model(ModelConfig(**smollm2()))
        model: Any = opened.model
        model.to(torch.bfloat16).save_pretrained(folder)
        opened.tokenizer.save_pretrained(folder)
    return folder


def adapt(base: Path, texts: Sequence[str], settings: FinetuneConfig, folder: Path) -> None:
    """Train an adapter of the base in float32."""
    if not (folder / "adapter_config.json").exists():
        opened = open_model(ModelConfig(path=str(base), dtype="float32"))
        train(opened.model, opened.tokenizer, list(texts), settings, folder)


def opened_in(way: str, base: Path, adapter: Path) -> LanguageModel:
    """The model with its adapter.

    Raises:
        UserError: it cannot be opened so, as without a package.
    """
    config = ModelConfig(path=str(base), **WAYS[way])  # type: ignore[arg-type]
    if way not in ("bfloat16, merged by peft", "bfloat16, beside"):
        return open_model(config.model_copy(update={"adapter": str(adapter)}))
    opened = open_model(config)
    adapted = load_adapter(opened.model, adapter, str(base)).eval().requires_grad_(False)
    model = adapted.merge_and_unload() if "merged" in way else adapted.get_base_model()
    return LanguageModel(model, opened.tokenizer, opened.device, opened.max_tokens)


def statistics(lm: LanguageModel, texts: Sequence[str]) -> list[TokenStatistics]:
    """Statistics of the tokens of the texts, in batches."""
    ids = [list(one.ids) for one in tokenize(lm.tokenizer, texts, 1024)]
    needed = frozenset({"log_prob", "renyi_inf"})
    return [forward(lm, ids[start : start + BATCH], needed) for start in range(0, len(ids), BATCH)]


_of_base: dict[tuple[str, ...], list[TokenStatistics]] = {}


def kept_scores(way: str, base: Path, adapter: Path, texts: Sequence[str], members: int) -> Scores:
    """`score_passages`, once for these texts, in a file beside the adapters."""
    key = sha256(json.dumps([way, texts, members]).encode()).hexdigest()[:16]
    file = adapter.parent / f"{adapter.name}-{key}.json"
    if not file.exists():
        scores = score_passages(way, base, adapter, texts, members)
        file.write_text(json.dumps({name: [part.tolist() for part in parts] for name, parts in scores.items()}))
    kept = json.loads(file.read_text())
    return {name: (np.array(seen), np.array(unseen)) for name, (seen, unseen) in kept.items()}


def score_passages(way: str, base: Path, adapter: Path, texts: Sequence[str], members: int) -> Scores:
    """Scores of the passages of a training, of which the first are members, by the model opened in a way.

    Raises:
        UserError: the model cannot be opened so.
    """
    read = statistics(opened_in(way, base, adapter), texts)
    key = (*WAYS[way].values(), adapter.name)
    if key not in _of_base:
        _of_base[key] = statistics(open_model(ModelConfig(path=str(base), **WAYS[way])), texts)  # type: ignore[arg-type]
    evidence = [
        Evidence(texts[BATCH * number : BATCH * (number + 1)], {FORWARD: one, REFERENCE: other})
        for number, (one, other) in enumerate(zip(read, _of_base[key], strict=True))
    ]
    columns = {
        name: torch.cat([detector(one) for one in evidence]).double().numpy() for name, detector in DETECTORS.items()
    }
    return {name: (values[:members], values[members:]) for name, values in columns.items()}


def power(members: np.ndarray, unseen: np.ndarray, procedure: str, alpha: float, seed: int) -> float:
    """Mean share of the members that is selected over random splits of the unseen.

    A quarter as many unseen passages as members are audited, at most half of them; the others calibrate.
    """
    generator = np.random.default_rng(seed)
    audited = min(members.size // 4, unseen.size // 2)
    shares = []
    for _ in range(SPLITS):
        drawn = generator.permutation(unseen)
        chosen = select([*members, *drawn[:audited]], [*drawn[audited:]], procedure=procedure, alpha=alpha)
        shares.append(np.mean(chosen.selected[: members.size]))
    return float(np.mean(shares))


def area(members: np.ndarray, unseen: np.ndarray) -> float:
    """AUC, ties by half."""
    return float(np.mean((members[:, None] > unseen) + 0.5 * (members[:, None] == unseen)))


def difference(measured: Sequence[Scores], first: Sequence[Scores], name: str) -> list[float]:
    """AUC less that of float32, with a 95% interval: documents are drawn again, the same of both ways."""
    generator = np.random.default_rng(0)

    def once(draw: bool) -> float:
        moved = []
        for one, other in zip(measured, first, strict=True):
            sizes = [len(part) for part in one[name]]
            rows = [generator.integers(0, size, size) if draw else np.arange(size) for size in sizes]
            both = [[part[row] for part, row in zip(way[name], rows, strict=True)] for way in (one, other)]
            moved.append(area(*both[0]) - area(*both[1]))
        return float(np.mean(moved))

    drawn = [once(True) for _ in range(RESAMPLES)]
    return [once(False), *map(float, np.quantile(drawn, [0.025, 0.975]))]


def summarize_way(way: str, trainings: Sequence[Scores]) -> dict[str, Any]:
    """AUC of each detector, and the mean gain of the members over the base in nats a token."""
    areas = {name: np.mean([area(*one[name]) for one in trainings]) for name in DETECTORS}
    gain = np.mean([one["reference"][0].mean() for one in trainings])
    return {"way": way, **_rounded({**areas, "gain of members": gain})}


def summarize_detector(way: str, name: str, trainings: Sequence[Scores], first: Sequence[Scores]) -> dict[str, Any]:
    """AUC with its interval, its difference from float32 with its interval, and power."""
    auc = detection([DetectorScores(*one[name]) for one in trainings]).auc
    row: dict[str, Any] = {"auc": [auc.value, auc.low, auc.high]}
    if first and way != FIRST:
        row["less that of float32"] = difference(trainings, first, name)
    for procedure, alpha in SELECTIONS:
        powers = [power(*one[name], procedure, alpha, seed) for seed, one in enumerate(trainings)]
        row[f"power, {procedure} at {alpha}"] = np.mean(powers)
    return {"way": way, "detector": name, **_rounded(row)}


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.round(np.asarray(value, dtype=float), 3).tolist() for name, value in row.items()}


if __name__ == "__main__":
    main()
