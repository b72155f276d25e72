"""Open the target and reference models, adapters and GGUF files; what they are made of; their tokens."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
from torch import nn

from pipeline.adapters import check_base, load_adapter
from pipeline.checkpoints import (
    Checkpoint,
    adapter_folder,
    causal_class,
    check_adapter,
    check_weights,
    digest,
    dtype_name,
    in_one_line,
    load_config,
    locate,
    matching,
    max_positions,
    seq2seq_class,
    weight_files,
)
from pipeline.config import EndpointConfig, ModelConfig
from pipeline.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "tekken.json",
)  # fmt: skip
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A causal language model, ready to be asked: eval mode, no gradients."""

    model: nn.Module
    tokenizer: Any
    device: torch.device  # where token ids go
    max_tokens: int | None  # positions that the model has, if it says


@dataclass(frozen=True, slots=True)
class Seq2SeqModel:
    """An encoder-decoder model such as T5, ready to be asked: eval mode, no gradients."""

    model: nn.Module
    tokenizer: Any
    device: torch.device  # where token ids go
    max_tokens: int | None  # tokens that it reads, and as many that it writes, if it says


@dataclass(frozen=True, slots=True)
class Tokens:
    """One document as the model reads it."""

    ids: list[int]
    truncated: bool
    kept: int  # characters of the text that the ids cover


def open_model(config: ModelConfig, *, gpus: float = 0) -> LanguageModel:
    """Load a model and its tokenizer.

    Args:
        config: Which model, and how.
        gpus: 0 is the CPU, up to 1 torch's current GPU, more spreads the model over the visible GPUs.

    Raises:
        UserError: a file is missing or damaged, the weights are pickles, or a library or GPU is missing.
    """
    opened = _open(config, gpus, seq2seq=False)
    assert isinstance(opened, LanguageModel)
    return opened


def open_paraphraser(config: ModelConfig, *, gpus: float = 0) -> LanguageModel | Seq2SeqModel:
    """Load a model that rewrites texts: a causal one, or an encoder-decoder one where the checkpoint is of that kind.

    Arguments and errors are those of `open_model`.
    """
    return _open(config, gpus, seq2seq=True)


def _open(config: ModelConfig, gpus: float, *, seq2seq: bool) -> LanguageModel | Seq2SeqModel:
    """A causal model, or if `seq2seq` allows it an encoder-decoder one."""
    _quieten()
    if gpus > 0 and not torch.cuda.is_available():
        raise UserError(f"model {config.path}: {gpus:g} GPUs an actor were asked for and torch sees none")
    source = locate(config, weights=True)
    check_weights(config, source)
    tokenizer = _load_tokenizer(config, source)
    loaded = load_config(config, source, seq2seq=seq2seq) if seq2seq or not source.gguf else None
    two_sided = loaded is not None and seq2seq and loaded.is_encoder_decoder
    model = _load_weights(config, source, gpus, loaded, seq2seq=two_sided)
    if config.adapter is not None:
        model = _merge_adapter(config, model, "SEQ_2_SEQ_LM" if two_sided else "CAUSAL_LM")
    model.eval().requires_grad_(False)
    device = model.get_input_embeddings().weight.device
    positions = max_positions(model.config)
    return (
        Seq2SeqModel(model, tokenizer, device, positions)
        if two_sided
        else LanguageModel(model, tokenizer, device, positions)
    )


def open_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of a model, without its weights.

    Raises:
        UserError: a file is missing or damaged.
    """
    _quieten()
    return _load_tokenizer(config, locate(config, weights=False))


def check_model(config: ModelConfig | EndpointConfig, *, paraphraser: bool = False) -> dict[str, Any]:
    """Check without loading weights that a model can be opened.

    Args:
        config: Which model, and how.
        paraphraser: By `open_paraphraser`, which opens encoder-decoder models too.

    Returns:
        "architecture", "dtype", "max_tokens" (None if the model does not say) and "parameters" (None if only
        loading would tell).

    Raises:
        UserError: in one line, what is missing or refused.
    """
    if isinstance(config, EndpointConfig):
        from pipeline.endpoint.client import check_endpoint

        return check_endpoint(config)
    _quieten()
    source = locate(config, weights=False)
    check_weights(config, source)
    loaded = load_config(config, source, seq2seq=paraphraser)
    two_sided = paraphraser and loaded.is_encoder_decoder
    _load_tokenizer(config, source)
    if config.adapter is not None:
        check_adapter(config, "SEQ_2_SEQ_LM" if two_sided else "CAUSAL_LM")
    if config.quantization is not None:
        _quantization(config)
    known = seq2seq_class(loaded) if two_sided else causal_class(loaded)
    architecture = (loaded.architectures or [known or loaded.model_type])[0]
    dtype = dtype_name(config, source, loaded)
    parameters = _count_parameters(config, loaded, seq2seq=two_sided)
    return {
        "architecture": architecture,
        "dtype": dtype,
        "max_tokens": max_positions(loaded),
        "parameters": parameters,
    }


def _auto_class(*, seq2seq: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM


def _count_parameters(config: ModelConfig, loaded: Any, *, seq2seq: bool) -> int | None:
    """Parameters of the model, shared ones once, from a copy of it that holds no weights."""
    try:
        with torch.device("meta"):
            empty = _auto_class(seq2seq=seq2seq).from_config(loaded, trust_remote_code=config.trust_remote_code)
    except Exception:  # an estimate is all that it is for: whatever a model's code raises, loading decides
        return None
    return sum(parameter.numel() for parameter in empty.parameters())


def fingerprint_model(config: ModelConfig | EndpointConfig) -> dict[str, str]:
    """What the model's answers depend on: content, wherever it lies.

    Returns:
        "model" (SHA-256 over weights and configuration, the adapter's too), "tokenizer" (over its files, or the GGUF),
        "dtype" and "quantization" ("none" without one). Of an endpoint: what it is called, and how it is asked; what
        it serves under that name only its owner knows.

    Raises:
        UserError: a file is missing, or the adapter's record names another base model.
    """
    if isinstance(config, EndpointConfig):
        asked = f"{config.name} at {config.endpoint}, {config.api}"
        asked += f": {config.instruction}" if config.api == "chat" else ""
        return {"model": asked, "tokenizer": "unknown", "dtype": "unknown", "quantization": "none"}
    _quieten()
    source = locate(config, weights=True)
    if source.gguf:
        weights = tokenizer = digest([source.folder / source.gguf])
    else:
        code = ["*.py"] if config.trust_remote_code else []
        weights = digest(matching(source.folder, [*weight_files(config, source), "config.json", *code]))
        tokenizer = digest(matching(source.folder, TOKENIZER_FILES))
    if config.adapter is not None:
        folder = adapter_folder(config)
        check_base(folder, weights, config.path)
        adapter = digest(matching(folder, ["adapter_config.json", "adapter_model.*"]))
        weights = hashlib.sha256(f"{weights}+{adapter}".encode()).hexdigest()
    dtype = dtype_name(config, source, None if source.gguf else load_config(config, source, seq2seq=True))
    return {"model": weights, "tokenizer": tokenizer, "dtype": dtype, "quantization": config.quantization or "none"}


def tokenize(lm_or_tokenizer: Any, texts: list[str], max_tokens: int) -> list[Tokens]:
    """Token ids of texts, cut to max_tokens. A BOS or EOS appears only if the tokenizer adds one by itself.

    Args:
        lm_or_tokenizer: A LanguageModel or its tokenizer.
        texts: The texts.
        max_tokens: Most ids a text, >= 1.
    """
    tokenizer = lm_or_tokenizer.tokenizer if isinstance(lm_or_tokenizer, LanguageModel) else lm_or_tokenizer
    if not texts:
        return []
    if not tokenizer.is_fast:
        return [_tokenize_slowly(tokenizer, text, max_tokens) for text in texts]
    encoded = tokenizer(
        texts, add_special_tokens=True, return_attention_mask=False, return_offsets_mapping=True, verbose=False
    )
    found = []
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if len(ids) <= max_tokens:
            found.append(Tokens(ids, False, len(text)))
        else:
            found.append(Tokens(ids[:max_tokens], True, max(end for _, end in offsets[:max_tokens])))
    return found


def count_words(texts: Sequence[str], max_tokens: int) -> list[Tokens]:
    """Texts as a model reads them whose tokenizer is not at hand: each word stands for a token, and all ids are 0."""
    found = []
    for text in texts:
        ends = [word.end() for word in islice(_WORD.finditer(text), max_tokens + 1)]
        cut = len(ends) > max_tokens
        found.append(Tokens([0] * min(len(ends), max_tokens), cut, ends[max_tokens - 1] if cut else len(text)))
    return found


def _tokenize_slowly(tokenizer: Any, text: str, max_tokens: int) -> Tokens:
    """The same with a tokenizer that gives no offsets: the characters kept are those that decode back."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) <= max_tokens:
        return Tokens(ids, False, len(text))
    decoded = tokenizer.decode(ids[:max_tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Tokens(ids[:max_tokens], True, min(len(text), len(decoded)))


def _quieten() -> None:
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # imported to save a model; says on stdout that no GPU is there


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _load_tokenizer(config: ModelConfig, source: Checkpoint) -> Any:
    from transformers import AutoTokenizer

    with in_one_line(config, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=config.trust_remote_code, **source.gguf_argument
        )


def _load_weights(config: ModelConfig, source: Checkpoint, gpus: float, loaded: Any, *, seq2seq: bool) -> Any:
    settings: dict[str, Any] = dict(source.gguf_argument)
    if not source.gguf:
        settings["use_safetensors"] = None if config.allow_pickle else True
    if config.quantization is not None:
        settings["quantization_config"] = _quantization(config)
    if gpus > 0:
        settings["device_map"] = "auto" if gpus > 1 else {"": torch.cuda.current_device()}
    dtype = dtype_name(config, source, loaded)
    quiet = contextlib.redirect_stderr(io.StringIO()) if source.gguf else contextlib.nullcontext()
    with in_one_line(config, "weights"), quiet:  # the GGUF reader's progress bar knows no switch
        return _auto_class(seq2seq=seq2seq).from_pretrained(
            source.folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            trust_remote_code=config.trust_remote_code,
            **settings,
        )


def _quantization(config: ModelConfig) -> Any:
    """Settings of a quantised load.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {config.quantization} needs bitsandbytes: pip install 'seenset[quantization]'")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=config.quantization == "8bit", load_in_4bit=config.quantization == "4bit")


def _merge_adapter(config: ModelConfig, model: Any, task: str) -> Any:
    """The model with the adapter added to its weights."""
    folder = check_adapter(config, task)
    with in_one_line(config, f"adapter {config.adapter}"):
        return load_adapter(model, folder, config.path).merge_and_unload()
