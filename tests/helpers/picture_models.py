"""Tiny random models that read pictures with text, one of each shape, and pictures to show them."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tokenizer_with("<image>")
    processor = transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=32, patch_size=8, projection_dim=32).to_dict(),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_layer=-2,
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


_TILE_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_PIXELS: dict[str, Any] = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def _save_tiled(folder: Path, kind: str) -> PreTrainedTokenizerFast:
    """A model that takes a picture in tiles of 28 x 28 pixels, each a run of picture tokens; its tokenizer."""
    tokenizer = tokenizer_with(*_TILE_MARKS, *_PLACES)
    config = getattr(transformers, f"{kind}Config")(
        vision_config={**TOWER, "image_size": 28, "patch_size": 7},
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(folder)
    return tokenizer


def save_idefics3(folder: Path) -> None:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    pixels, chat = Idefics3ImageProcessorPil(**_PIXELS), CHAT.replace("MARK", "<image>")
    tokenizer = _save_tiled(folder, "Idefics3")
    transformers.Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=chat).save_pretrained(folder)


def save_smolvlm(folder: Path) -> None:
    """As `save_idefics3`, of the SmolVLM architecture."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    _save_parts(folder, _save_tiled(folder, "SmolVLM"), SmolVLMImageProcessorPil(**_PIXELS), settings, "<image>")


def save_qwen_vl(folder: Path, version: str) -> None:
    """A model whose pictures keep their shape, of the architecture Qwen2-VL ("2") or Qwen2.5-VL ("2_5_")."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    marks = {name: f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    tokenizer = tokenizer_with(*marks.values())
    vision = {
        "2": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "2_5_": {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
    }[version]
    config = getattr(transformers, f"Qwen{version}VLConfig")(
        vision_config={**vision, "depth": 2, "num_heads": 2},
        text_config={**TEXT, "vocab_size": len(tokenizer), "rope_parameters": ROPE},
        **{
            f"{name.removesuffix('_pad')}_token_id": tokenizer.convert_tokens_to_ids(mark)
            for name, mark in marks.items()
        },
    )
    torch.manual_seed(0)
    getattr(transformers, f"Qwen{version}VLForConditionalGeneration")(config).save_pretrained(folder)
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 9})
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    _save_parts(folder, tokenizer, pixels, {"processor_class": f"Qwen{version}VLProcessor"}, mark)


def _save_parts(folder: Path, tokenizer: Any, pixels: Any, settings: dict[str, Any], mark: str) -> None:
    """A processor by its files, as on the hub: to make one whole takes a library that reads videos."""
    tokenizer.save_pretrained(folder)
    pixels.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT.replace("MARK", mark))


SAVE: dict[str, Callable[[Path], None]] = {
    "LLaVA": save_llava,
    "Idefics3": save_idefics3,
    "SmolVLM": save_smolvlm,
    "Qwen2-VL": lambda folder: save_qwen_vl(folder, "2"),
    "Qwen2.5-VL": lambda folder: save_qwen_vl(folder, "2_5_"),
}
"""Each shape of a model -> what saves a tiny one as a folder."""


def random_pictures(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image.Image]:
    """Noise of these sizes, (width, height)."""
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]


def encoded(picture: Image.Image, form: str = "PNG", **settings: Any) -> bytes:
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
