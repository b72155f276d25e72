"""Versions written by a model, including the published one, so that all have the same generator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch

from pipeline.config.models import ParaphraserConfig
from pipeline.corpus.documents import id_key
from pipeline.mark.mark import Drawer, Versions, derived
from pipeline.models.load import check_model, open_paraphraser
from pipeline.passes.paraphrase import Draws, draw_paraphrases
from pipeline.stages.paraphrase import drawing


def paraphrasing(config: ParaphraserConfig, k: int, seed: int) -> Drawer:
    """A function that draws k paraphrases of each document; it uses the first GPU if there is one.

    Args:
        config: configuration of the model, which is opened at the first document.
        k: number of versions of each document.
        seed: seed of the collection.

    Returns:
        The function, which raises UserError if the model cannot be opened or has too few positions for a text.

    Raises:
        UserError: the model is damaged, or no paraphraser.
    """
    check_model(config, "rewriter")
    opened = cache(partial(open_paraphraser, config, gpus=float(torch.cuda.is_available())))
    run_seed = int.from_bytes(derived(seed, "paraphrases", "")[:7], "big")

    def draw(documents: Sequence[tuple[str, str]]) -> list[Versions | str]:
        texts = [(id_key(doc_id), text) for doc_id, text in documents]
        results = draw_paraphrases(opened(), texts, k, drawing(config), run_seed)
        return [_versions(result.texts, k) if isinstance(result, Draws) else result.message for result in results]

    return draw


def _versions(texts: Sequence[str], k: int) -> Versions | str:
    distinct = tuple(dict.fromkeys(texts))
    return Versions(distinct, (b"",) * k, ()) if len(distinct) == k else f"fewer than {k:,} different paraphrases"
