"""What one writes in an afternoon: scores of texts by a language model, one text at a time.

`python -m benchmarks.plain_script MODEL TEXTS OUT DTYPE`: a folder or a GGUF file, a JSONL file with `text`, and
where the scores go. `benchmarks.first_use` compares `seenset run` with it.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Score every text."""
    path, texts, out, dtype = sys.argv[1:]
    model_path = Path(path)
    gguf = {"gguf_file": model_path.name} if model_path.suffix == ".gguf" else {}
    folder = model_path.parent if gguf else model_path
    tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **gguf).eval()
    rows = []
    for line in Path(texts).read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        probabilities = torch.softmax(logits, dim=-1)
        log_probs = torch.log_softmax(logits, dim=-1)
        token = log_probs.gather(1, ids[0, 1:, None]).squeeze(1)
        mean = (probabilities * log_probs).sum(-1)
        variance = (probabilities * log_probs.square()).sum(-1) - mean.square()
        standardised = (token - mean) / variance.clamp_min(1e-12).sqrt()
        lowest = max(1, int(0.2 * len(token)))
        loss = float(token.mean())
        rows.append(
            {
                "loss": loss,
                "zlib": loss / len(zlib.compress(text.encode())),
                "min_k": float(token.sort().values[:lowest].mean()),
                "min_k_plus_plus": float(standardised.sort().values[:lowest].mean()),
            }
        )
    Path(out).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
