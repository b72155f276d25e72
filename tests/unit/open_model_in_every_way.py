"""Opens models as a run does, as a program whose files are watched; its argument is a list of (kind, settings)."""

import json
import sys
from typing import Any

import torch


def open_in_every_way(kind: str, settings: dict[str, Any]) -> None:
    from pipeline.config.models import ModelConfig
    from pipeline.models import load
    from pipeline.models.sharing import own_layers
    from pipeline.models.tokens import open_tokenizer, tokenize

    openers = {
        "causal": load.open_model,
        "rewriter": load.open_paraphraser,
        "pictures": load.open_picture_model,
    }
    config = ModelConfig(**settings)
    load.fingerprint_model(config)
    load.check_model(config, kind)  # type: ignore[arg-type]
    opened = own_layers(openers[kind](config))  # type: ignore[type-var, operator]
    tokens = tokenize(opened.tokenizer, ["A river and a stone, quiet."], 16)[0]
    if kind == "causal":
        with torch.no_grad():
            opened.model(torch.tensor([tokens.ids]) % opened.model.config.vocab_size)
    open_tokenizer(config)


if __name__ == "__main__":
    for kind, settings in json.loads(sys.argv[1]):
        open_in_every_way(kind, settings)
