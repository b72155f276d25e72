"""Speed of describing and measuring pictures beside a loop over single pictures. Prints one JSON line.

The loop is what one writes after arXiv 2411.02902: for each picture the processor, `generate`, a pass over picture,
instruction and description, and a softmax in float64 over all positions, from which come the Renyi entropies of orders
0.5, 1, 2 and infinity of every part. Ours takes the same pictures in batches to the same entropies.

All is measured in one run, alternating, and reported as medians: on a shared machine only ratios mean anything. On a
CPU each ratio comes a second time by CPU seconds, which other programs disturb less.

- whole: from pictures to entropies.
- all_parts: the passes alone, of pictures that are described already.
- image, description: the same where one part is read, at order 0.5. Ours then applies the head to that part alone.

The model has LLaVA's architecture, 256 tokens a picture, a vocabulary of 32,000 and random weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.small_model import fast_type
from pipeline.models.devices import quieten
from pipeline.models.opened import LanguageModel
from pipeline.models.picture_prompts import INSTRUCTION, PicturePrompt, picture_prompt
from pipeline.passes.forward import TokenStatistics
from pipeline.passes.picture_forward import describe, forward_pictures
from pipeline.passes.statistics import RENYI_ORDERS

MARK = "<image>"
SIDE, PATCH = 224, 14
VOCABULARY = 32_000
NEW_TOKENS = 32
QUESTION = f"USER: {MARK}\n{INSTRUCTION} ASSISTANT:"
EVERY = frozenset(f"renyi_{order}" for order in RENYI_ORDERS)
ALL_PARTS = dict.fromkeys(("image", "instruction", "description", "instruction_description"), EVERY)
ONE = frozenset({"renyi_0.5"})
Entropies = dict[str, dict[str, Tensor]]


def llava(hidden: int, layers: int, device: str, dtype: torch.dtype) -> LanguageModel:
    """A random model of LLaVA's architecture, whose descriptions run to their limit.

    Args:
        hidden: size of its text part; the tower's is half of it.
        layers: of each.
        device: of its weights.
        dtype: of its weights.
    """
    alphabet = [MARK, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    table = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    table.add_special_tokens([MARK])
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=table)
    side = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=MARK,
        num_additional_image_tokens=1,
    )
    vision = CLIPVisionConfig(
        hidden_size=hidden // 2,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=alphabet.index(MARK))
    model = LlavaForConditionalGeneration(config).eval().requires_grad_(False).to(device, dtype)
    return LanguageModel(model, tokenizer, torch.device(device), 2048, processor)


def made_up_pictures(count: int) -> list[Image.Image]:
    """Pictures of noise, 320 x 240."""
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (240, 320, 3), dtype=np.uint8)) for _ in range(count)]


def plain_entropies(logits: Tensor, ids: Sequence[int], prompt: int, mark: int) -> Entropies:
    """Renyi entropies by part and order, of one picture's logits (tokens, vocabulary)."""
    log_p = torch.log_softmax(logits.double(), -1)
    p = log_p.exp()
    orders = {
        "0.5": 2 * p.sqrt().sum(-1).log(),
        "1": -(p * log_p).sum(-1),
        "2": -(p * p).sum(-1).log(),
        "inf": -log_p.amax(-1),
    }
    picture = [place for place, token in enumerate(ids) if token == mark]
    after = picture[-1] + 1
    parts = {
        "image": picture,
        "instruction": list(range(after, prompt)),
        "description": list(range(prompt, len(ids))),
        "instruction_description": list(range(after, len(ids))),
    }
    return {
        part: {order: values[[place - 1 for place in places[1:]]].cpu() for order, values in orders.items()}
        for part, places in parts.items()
    }


def plain_describe(lm: LanguageModel, picture: Image.Image) -> tuple[Any, list[int]]:
    """The processor's inputs of one picture, and the ids of prompt and description by `generate`."""
    model, processor = lm.model, lm.processor
    inputs: Any = processor(images=picture, text=QUESTION, return_tensors="pt").to(lm.device)  # type: ignore[misc]
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        written = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)  # type: ignore[operator]
    return inputs, written[0].tolist()


def plain_forward(lm: LanguageModel, inputs: Any, ids: list[int]) -> Entropies:
    """One pass over a picture, its instruction and its description."""
    whole = torch.tensor([ids], device=lm.device)
    with torch.inference_mode():
        logits = lm.model(input_ids=whole, pixel_values=inputs["pixel_values"], use_cache=False).logits[0]
        mark: Any = lm.model.config.image_token_index
        return plain_entropies(logits, ids, inputs["input_ids"].shape[1], mark)


def our_whole(lm: LanguageModel, pictures: Sequence[Image.Image], size: int) -> list[dict[str, TokenStatistics]]:
    """Pictures in batches, from their pixels to their entropies."""
    prompts = [picture_prompt(lm, picture) for picture in pictures]
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [forward_pictures(lm, batch, describe(lm, batch, NEW_TOKENS), ALL_PARTS) for batch in batches]


def our_forward(
    lm: LanguageModel,
    described: Sequence[tuple[PicturePrompt, list[int]]],
    size: int,
    wanted: Mapping[str, frozenset[str]],
) -> list[dict[str, TokenStatistics]]:
    """Passes over described pictures in batches."""
    batches = [described[start : start + size] for start in range(0, len(described), size)]
    return [forward_pictures(lm, [p for p, _ in batch], [d for _, d in batch], wanted) for batch in batches]


def agreement(ours: Sequence[Mapping[str, TokenStatistics]], plain: Sequence[Entropies]) -> float:
    """The largest difference of an entropy, in nats."""
    rows = [(batch, row) for batch in ours for row in range(len(batch["image"].mask))]
    return max(
        (batch[part].renyi[order][row, : len(values)].cpu().double() - values).abs().max().item()
        for (batch, row), entropies in zip(rows, plain, strict=True)
        for part, orders in entropies.items()
        for order, values in orders.items()
    )


def seconds(lm: LanguageModel, job: Callable[[], Any]) -> tuple[float, float]:
    """Of a job, of the clock and of the CPU."""
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    began, busy = time.perf_counter(), time.process_time()
    job()
    if lm.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, time.process_time() - busy


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time every job once a round, alternating, and take medians of the ratios."""
    quieten()
    dtype = arguments.dtype or fast_type(arguments.device)
    lm = llava(arguments.hidden, arguments.layers, arguments.device, getattr(torch, dtype))
    pictures, size = made_up_pictures(arguments.pictures), arguments.batch
    read = [plain_describe(lm, picture) for picture in pictures]
    described = [
        (picture_prompt(lm, picture), ids[-NEW_TOKENS:]) for picture, (_, ids) in zip(pictures, read, strict=True)
    ]
    jobs: dict[str, Callable[[], Any]] = {
        "whole": lambda: our_whole(lm, pictures, size),
        "plain_whole": lambda: [plain_forward(lm, *plain_describe(lm, picture)) for picture in pictures],
        "all_parts": lambda: our_forward(lm, described, size, ALL_PARTS),
        "image": lambda: our_forward(lm, described, size, {"image": ONE}),
        "description": lambda: our_forward(lm, described, size, {"description": ONE}),
        "plain_forward": lambda: [plain_forward(lm, inputs, ids) for inputs, ids in read],
    }
    difference = agreement(jobs["all_parts"](), jobs["plain_forward"]())
    rounds = [{name: seconds(lm, job) for name, job in jobs.items()} for _ in range(arguments.rounds)]

    def ratios(clock: int) -> dict[str, float]:
        against = {name: "plain_whole" if name == "whole" else "plain_forward" for name in jobs if "plain" not in name}
        return {
            name: round(statistics.median(each[other][clock] / each[name][clock] for each in rounds), 2)
            for name, other in against.items()
        }

    return {
        "benchmark": "pictures",
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine(),
        "pictures": len(pictures),
        "batch": size,
        "tokens": len(read[0][1]),
        **ratios(0),
        **({"by_cpu_seconds": ratios(1)} if arguments.device == "cpu" else {}),
        "seconds": {name: round(statistics.median(each[name][0] for each in rounds), 3) for name in jobs},
        "largest_difference": difference,
        "rounds": arguments.rounds,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="pictures of a batch of ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: what dtype auto takes")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
