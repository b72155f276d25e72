"""Tiny random models that read pictures with text, one of each shape, and pictures to show them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

WORDS = ["red", "blue", "green", "house", "tree", "river", "stone", "cat", "dog", "sky", "quiet", "small"]
SENTENCES = ["USER: Describe this image concisely. ASSISTANT: a red house, a green tree and a quiet river"] * 3
CHAT = (
    "{% for m in messages %}{% for c in m.content %}{{ 'MARK' if c.type == 'image' else c.text }}{% endfor %}"
    "{% endfor %} ASSISTANT:"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}


def tokenizer_with(*marks: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose special tokens are <eos> and these marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>", *marks], show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def save_llava(folder: Path) -> None:
    """A CLIP-shaped tower for 32 x 32 pixels and a Llama, as LLaVA puts them together."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_with("<image>")
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    vision = CLIPVisionConfig(**TOWER, image_size=32, patch_size=8, projection_dim=32)
    config = LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=LlamaConfig(**TEXT, vocab_size=len(tokenizer)).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-2,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


TILED: dict[str, tuple[Any, Any]] = {
    "Idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    "SmolVLM": (SmolVLMConfig, SmolVLMForConditionalGeneration),
}
"""Families whose processor cuts a picture into tiles, each with its own run of picture tokens."""


def save_tiled(folder: Path, family: str) -> None:
    """A model of such a family: 28 x 28 pixels a tile."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    places = (f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    tokenizer = tokenizer_with(*marks, *places)
    vision = {**TOWER, "image_size": 28, "patch_size": 7}
    text = LlamaConfig(**TEXT, vocab_size=len(tokenizer)).to_dict()
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "tie_word_embeddings": False}
    config_kind, model_kind = TILED[family]
    torch.manual_seed(0)
    config = config_kind(vision_config=vision, text_config=text, scale_factor=2, **ids)
    model_kind(config).save_pretrained(folder)
    pixels_kind = Idefics3ImageProcessorPil if family == "Idefics3" else SmolVLMImageProcessorPil
    pixels = pixels_kind(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    settings = {"processor_class": f"{family}Processor", "image_seq_len": 4}
    _save_parts(folder, tokenizer, pixels, settings, "<image>")


def save_qwen_vl(folder: Path, version: str) -> None:
    """A model whose pictures keep their shape, of the architecture Qwen2-VL ("2") or Qwen2.5-VL ("2.5")."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = tokenizer_with(*marks)
    kinds: dict[str, tuple[Any, Any, str]] = {
        "2": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, "Qwen2VLProcessor"),
        "2.5": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, "Qwen2_5_VLProcessor"),
    }
    config_kind, model_kind, processor_kind = kinds[version]
    vision = {
        "2": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        "2.5": {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
    }[version]
    text = {**TEXT, "vocab_size": len(tokenizer), "rope_parameters": ROPE}
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    torch.manual_seed(0)
    model_kind(config_kind(vision_config=vision, text_config=text, **ids)).save_pretrained(folder)
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 9})
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    _save_parts(folder, tokenizer, pixels, {"processor_class": processor_kind}, mark)


def _save_parts(folder: Path, tokenizer: Any, pixels: Any, settings: dict[str, Any], mark: str) -> None:
    """A processor by its files, as on the hub: to make one whole takes a library that reads videos."""
    tokenizer.save_pretrained(folder)
    pixels.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT.replace("MARK", mark))


SAVE: dict[str, Callable[[Path], None]] = {
    "LLaVA": save_llava,
    "Idefics3": lambda folder: save_tiled(folder, "Idefics3"),
    "SmolVLM": lambda folder: save_tiled(folder, "SmolVLM"),
    "Qwen2-VL": lambda folder: save_qwen_vl(folder, "2"),
    "Qwen2.5-VL": lambda folder: save_qwen_vl(folder, "2.5"),
}
"""Each shape of a model -> what saves a tiny one as a folder."""


def random_pictures(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image.Image]:
    """Noise of these sizes, (width, height)."""
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]


def encoded(picture: Image.Image, form: str = "PNG", **settings: Any) -> bytes:
    """The bytes of a picture's file."""
    file = io.BytesIO()
    picture.save(file, form, **settings)
    return file.getvalue()


def write_pictures(path: Path, count: int, seed: int, spoilt: Mapping[int, bytes] = {}) -> None:
    """A Parquet file of pictures with captions; some rows hold other bytes."""
    files = map(encoded, random_pictures([(40, 30), (32, 32)] * count, seed)[:count])
    rng = np.random.default_rng(seed)
    table = {
        "id": [f"{path.stem}-{row}" for row in range(count)],
        "image": [{"bytes": spoilt.get(row, data), "path": None} for row, data in enumerate(files)],
        "caption": [" ".join(rng.choice(WORDS, 5)) for _ in range(count)],
    }
    pq.write_table(pa.table(table), path)


def picture_audit(folder: Path, model: Path, **settings: Any) -> dict[str, Any]:
    """An audit of audit.parquet and unseen.parquet in a folder."""
    columns = {"id": "id", "image": "image", "caption": "caption"}
    return {
        "run": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "corpus": {role: {"path": str(folder / f"{role}.parquet"), **columns} for role in ("audit", "unseen")},
        "resources": {"cluster": "local", "shard_documents": 6, "shard_bytes": 1 << 30},
        **settings,
    }
