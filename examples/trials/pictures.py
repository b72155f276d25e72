"""Pictures with captions that no model has seen, and a small vision-language model like LLaVA, made in the run."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from examples.trials.family import make_tokenizer

SIDE = 32
"""Pixels of a side of a picture."""
PATCH = 8
PATCHES = 4
"""Patches of one colour along a side of a picture."""
HIDDEN = 64
VOCABULARY = 512
PICTURE = "<image>"
THINGS_IN_CAPTION = 4
QUALITIES = ("red", "green", "blue", "small", "large", "old", "bright", "round", "flat", "wooden", "broken", "quiet")
THINGS = ("bird", "boat", "bridge", "cat", "chair", "cup", "door", "garden", "hat", "lamp", "path", "tower", "wall")
RELATIONS = ("above", "across", "behind", "below", "beside", "inside", "near", "on", "past", "under", "with", "without")


def make_pictures(path: Path, count: int, seed: int = 0) -> None:
    """Write a Parquet file of random pictures with random captions: columns `id`, `image` and `caption`.

    Args:
        path: of the file, which appears whole or not at all; one that is there stays.
        count: of the pictures.
        seed: of pictures and captions.
    """
    if path.exists():
        return
    colours, words = np.random.default_rng(seed), random.Random(seed)
    rows = [
        {
            "id": f"picture-{number:04d}",
            "image": {"bytes": _picture(colours), "path": None},
            "caption": _caption(words),
        }
        for number in range(count)
    ]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("id", pa.string()), ("image", image), ("caption", pa.string())])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), part)
    part.replace(path)


def _picture(colours: np.random.Generator) -> bytes:
    """A PNG of patches of random colours."""
    patches = colours.integers(0, 256, (PATCHES, PATCHES, 3), dtype=np.uint8)
    written = BytesIO()
    Image.fromarray(patches).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(written, "PNG")
    return written.getvalue()


def _caption(words: random.Random) -> str:
    """A sentence of things that stand somewhere."""
    things = [f"{words.choice(QUALITIES)} {words.choice(THINGS)}" for _ in range(THINGS_IN_CAPTION)]
    sentence = things[0] + "".join(f" {words.choice(RELATIONS)} {thing}" for thing in things[1:])
    return sentence.capitalize() + "."


def make_model(folder: Path, seed: int = 0) -> None:
    """Write an untrained model of LLaVA's architecture with its processor; a folder that is there stays.

    Args:
        folder: of the model, which appears whole or not at all.
        seed: of its weights.
    """
    if folder.exists():
        return
    processor = make_processor()
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(model_config(processor.tokenizer))
    part = folder.with_name(f".{folder.name}.part")
    model.save_pretrained(part)
    processor.save_pretrained(part)
    part.replace(folder)


def model_config(tokenizer: Any) -> LlavaConfig:
    """About 200,000 weights: a tower as of CLIP over 16 patches, and a Llama of 2 layers."""
    return LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            projection_dim=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=len(tokenizer),
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(PICTURE),
        image_seq_length=(SIDE // PATCH) ** 2,
    )


def make_processor() -> Any:
    """The processor of the model: a picture of 32 x 32 pixels becomes 16 picture tokens."""
    tokenizer = make_tokenizer([f" {word}" for word in (*QUALITIES, *THINGS, *RELATIONS)], VOCABULARY)
    tokenizer.add_special_tokens({"additional_special_tokens": [PICTURE]})
    side = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=PICTURE,
        num_additional_image_tokens=1,
    )
