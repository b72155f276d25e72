"""The whole method on one page: which of these texts was this model trained on, with at most a share alpha wrong?

    python -m examples.method_data runs/method    # writes 200 texts, and a model that was trained on 50 of them
    python -m examples.method runs/method         # lists what was found; so does: seenset run runs/method/audit.yaml

1. Score. A model gives texts that it was trained on a higher probability than others. The score of a text is the mean
   log-probability of its tokens, each given those before it (detector `loss`).
2. Rank. Which score is high? It is compared with those of n unseen texts: of the same source, and not trained on. If an
   audited text was not trained on either, each rank of its score among theirs is equally likely, so that
   p = (1 + #{unseen >= score}) / (n + 1) is a p-value: P(p <= t) <= t for every t. A tie counts against the text.
3. Select. If a share pi0 of the m audited texts was not trained on, at most m pi0 t of them are expected at p <= t.
   Benjamini-Hochberg takes the largest t for which that is at most a share alpha of all texts with p <= t, and selects
   those texts, with pi0 = 1. Storey estimates pi0 from the large p-values, which few texts have that were trained on.

If the audited texts that were not trained on are exchangeable with the unseen ones, the expected share of wrong texts
in either list is at most alpha. Comparisons are made in exact fractions, because rounding could decide a tie.
"""

import json
import math
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

ALPHA = Fraction(1, 10)


def score_texts(model_folder: Path, texts: list[str]) -> np.ndarray:
    """The mean log-probability of each text's tokens, float64 (texts,); higher is more like a training text."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32").eval()
    scores = []
    for text in texts:
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=1024)
        logits = model(**tokens).logits[0].detach().numpy().astype(np.float64)  # (tokens, vocabulary)
        predicted = tokens["input_ids"][0, 1:].numpy()  # the first token has none before it
        log_probs = logits[np.arange(predicted.size), predicted] - np.logaddexp.reduce(logits[:-1], axis=1)
        scores.append(log_probs.mean())
    return np.array(scores)


def conformal_ranks(scores: np.ndarray, unseen: np.ndarray) -> np.ndarray:
    """The rank k = 1 + #{unseen >= score} of each score, in 1..n + 1; the p-value is k / (n + 1)."""
    return 1 + (unseen[None, :] >= scores[:, None]).sum(axis=1)


def storey_share(ranks: np.ndarray, n: int) -> Fraction:
    """Storey's estimate of pi0: of the texts not trained on, a share 1 - lambda is expected to have p >= lambda."""
    lambda_ = Fraction(1, 2) if n < 200 else Fraction(4, 5)  # a function of n alone, so fixed before scores are read
    cut = math.ceil(lambda_ * (n + 1))  # the first rank with p >= lambda; 1 + # and no cap at 1, for the guarantee
    return (1 + int((ranks >= cut).sum())) / (len(ranks) * (1 - Fraction(cut, n + 1)))


def last_selected_rank(ranks: np.ndarray, n: int, alpha: Fraction, pi0: Fraction = Fraction(1)) -> int:
    """Benjamini-Hochberg: the largest k with m pi0 k / (n + 1) <= alpha #{ranks <= k}; 0 if there is none."""
    m, selected = len(ranks), [int((ranks <= k).sum()) for k in range(n + 2)]
    return max((k for k in range(1, n + 2) if m * pi0 * Fraction(k, n + 1) <= alpha * selected[k]), default=0)


def find_trained(folder: Path) -> dict[str, list[str]]:
    """The ids of the audited texts that Benjamini-Hochberg (`bh`) and that Storey (`storey`) select, in their order."""
    lines = {role: (folder / f"{role}.jsonl").read_text(encoding="utf-8").split("\n") for role in ("audit", "unseen")}
    audited, unseen = ([json.loads(line) for line in lines[role] if line] for role in lines)
    scores, calibration = (score_texts(folder / "model", [row["text"] for row in rows]) for rows in (audited, unseen))
    ranks, n = conformal_ranks(scores, calibration), len(calibration)
    shares = {"bh": Fraction(1), "storey": storey_share(ranks, n)}
    last = {name: last_selected_rank(ranks, n, ALPHA, pi0) for name, pi0 in shares.items()}
    return {name: [row["id"] for row, k in zip(audited, ranks, strict=True) if k <= last[name]] for name in last}


if __name__ == "__main__":
    for procedure, ids in find_trained(Path(*sys.argv[1:2] or ["runs/method"])).items():
        print(f"{procedure}: {len(ids)} texts", *ids)
