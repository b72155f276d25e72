"""Load models and their adapters, check them without loading weights, and compute their fingerprints."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.config.models import AnyModel, EndpointConfig, ModelConfig, ScoredModel
from pipeline.errors import DamagedError, UserError
from pipeline.models.checkpoints import (
    CAUSAL,
    PICTURES,
    SEQ2SEQ,
    Checkpoint,
    Kind,
    ModelFamily,
    check_adapter,
    check_files,
    check_weights,
    dtype_name,
    in_one_line,
    locate,
    locate_adapter,
    max_positions,
    model_family,
    read_model_config,
    weight_files,
)
from pipeline.models.devices import BUILDING, quieten
from pipeline.models.gguf_cache import Opened, is_small, unpacked, unpacked_settings
from pipeline.models.merging import (
    NotMergedError,
    adapter_tokens,
    add_tokens,
    count_tokens,
    keep_beside,
    merge,
    refuse_by_settings,
    refuse_unset,
)
from pipeline.models.model_files import ADAPTER_CONFIG, adapter_files, file_digest, linked
from pipeline.models.opened import LanguageModel, Seq2SeqModel, add_left_out_tail, embedding_rows, use_fused_attention
from pipeline.models.picture_prompts import load_processor
from pipeline.models.probe import check_causal, check_code, probe_logits
from pipeline.models.settings import check_built
from pipeline.models.stored import loaded_names, other_shapes, refuse_integers, refuse_misfit, stored_weights
from pipeline.models.tokens import adds_tokens, load_tokenizer, tokens_beside
from pipeline.models.weight_dtypes import choose_model, processor_here, stored_bytes
from pipeline.store.receipts import DIGEST, is_sealed, sealed

_log = logging.getLogger(__name__)
_KINDS = {None: "none", "8bit": "8bit", "4bit": "4bit nf4"}  # names of quantizations in fingerprints


def open_model(config: ModelConfig, *, gpus: float = 0) -> LanguageModel:
    """Load a model and its tokenizer.

    Args:
        config: configuration of the model.
        gpus: 0: the CPU; up to 1: torch's current GPU; more: the model is spread over the visible GPUs.

    Raises:
        UserError: a file is missing or damaged, the weights are pickles, a library or GPU is missing, or the model is
            not causal (`pipeline.models.probe`).
    """
    opened = _open(config, gpus, "causal")
    assert isinstance(opened, LanguageModel)
    check_causal(opened, _shown(config))
    return opened


def _shown(config: ModelConfig) -> str:
    """A model and its adapter, for errors about both."""
    return config.shown if config.adapter is None else f"{config.shown} with adapter {config.adapter_shown}"


def open_picture_model(config: ModelConfig, *, gpus: float = 0) -> LanguageModel:
    """Load a vision-language model and its processor.

    Arguments are those of `open_model`.

    Raises:
        UserError: as `open_model`, or its processor has no picture token.
    """
    opened = _open(config, gpus, "pictures")
    assert isinstance(opened, LanguageModel)
    processor = load_processor(config, locate(config, weights=False), opened.model.config)
    opened = replace(opened, tokenizer=processor.tokenizer, processor=processor)
    check_causal(opened, config.shown)
    return opened


def open_paraphraser(config: ModelConfig, *, gpus: float = 0) -> LanguageModel | Seq2SeqModel:
    """Load a model that rewrites texts, causal or encoder-decoder according to its checkpoint.

    Arguments and errors are those of `open_model`.
    """
    opened = _open(config, gpus, "rewriter")
    if isinstance(opened, LanguageModel):
        check_causal(opened, config.shown)
    return opened


def _open(config: ModelConfig, gpus: float, kind: Kind) -> LanguageModel | Seq2SeqModel:
    """Load a model of a kind."""
    import torch

    quieten()
    if gpus > 0 and not torch.cuda.is_available():
        raise UserError(f"model {config.shown}: {gpus:g} GPUs an actor are configured, and torch finds none")
    use_fused_attention("cuda" if gpus > 0 else "cpu")
    source = locate(config, weights=True)
    check_weights(config, source)
    if config.dtype == "auto":  # for a model outside of a run, which has chosen the dtype before
        choice = choose_model(config, stored_bytes(config), processor_here(gpus))
        config = config.model_copy(update={"dtype": choice.dtype})
    files = _unpacked(config, source, kind) if _is_cached(config, source) else source
    load = partial(_load, config, files, gpus, kind)
    model, tokenizer = load() if config.adapter is None else _load_with_adapter(config, load, kind)
    model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = str(source.origin)
    family = model_family(model.config, kind)
    model.eval().requires_grad_(False)
    device = model.get_input_embeddings().weight.device
    positions = max_positions(model.config)
    if family is SEQ2SEQ:
        return Seq2SeqModel(model, tokenizer, device, positions)
    opened = LanguageModel(model, tokenizer, device, positions)
    add_left_out_tail(opened)
    return opened


def _load(config: ModelConfig, files: Checkpoint, gpus: float, kind: Kind) -> Opened:
    """Load the model in these files, without the configured adapter, and its tokenizer."""
    tokenizer = load_tokenizer(config, files)
    loaded = read_model_config(config, files, kind)
    return _load_weights(config, files, gpus, loaded, kind), tokenizer


def _is_cached(config: ModelConfig, source: Checkpoint) -> bool:
    """Whether the model is cached unpacked. With `quantization` a GGUF model is refused, with or without a cache."""
    return source.gguf is not None and config.quantization is None


def _unpacked(config: ModelConfig, source: Checkpoint, kind: Kind) -> Checkpoint:
    """The files of a GGUF model from the cache."""

    def opened(files: Checkpoint, dtype: str) -> Opened:
        return _load(config.model_copy(update={"dtype": dtype}), files, 0, kind)

    return unpacked(source, dtype_name(config, source, None), lambda dtype: opened(source, dtype), opened)


def check_model(config: ModelConfig, kind: Kind = "causal") -> dict[str, Any]:
    """Check without loading weights that a model can be opened.

    Args:
        config: configuration of the model.
        kind: type of model: `open_paraphraser` opens rewriters, `open_picture_model` vision-language models.

    Returns:
        "architecture", "dtype", "max_tokens" (None if unknown) and "parameters" (None if unknown before the
        weights are loaded).

    Raises:
        UserError: a file is missing or damaged, a setting is not allowed, or the model is not causal.
    """
    source = check_files(config)
    quieten()
    files = _checked_files(config, source, kind)
    loaded = read_model_config(config, files, kind)
    family = model_family(loaded, kind)
    tokenizer = load_tokenizer(config, files)
    if config.adapter is not None:
        _adapter_folder(config, family)
    if config.quantization is not None:
        _quantization(config, dtype_name(config, source, loaded))
    if kind == "pictures":
        load_processor(config, files, loaded)
    architecture = (loaded.architectures or [family.model_class(loaded) or loaded.model_type])[0]
    dtype = dtype_name(config, source, loaded)
    if config.trust_remote_code:
        empty = _empty_model(config, loaded, kind)
    else:
        with in_one_line(config, "configuration"):  # loading builds it in the same way
            empty = _built_empty(config, loaded, kind)
    if empty is not None:
        _check_built(config, source, empty)
        if not _is_packed(source, empty):
            _check_shapes(config, source, empty)
        if config.adapter is not None:
            add_tokens(empty, _count_tokens(config, empty, _adapter_folder(config, family)))
        if kind != "pictures" and family is not SEQ2SEQ:
            check_code(empty, tokenizer, config.shown)
    return {
        "architecture": architecture,
        "dtype": dtype,
        "max_tokens": max_positions(loaded),
        "parameters": None if empty is None else _distinct_parameters(empty),
    }


def _checked_files(config: ModelConfig, source: Checkpoint, kind: Kind) -> Checkpoint:
    """The files of a model's configuration and tokenizer; a small GGUF file is unpacked first, which saves time."""
    if not _is_cached(config, source):
        return source
    return _unpacked(config, source, kind) if is_small(source) else unpacked_settings(source)


def _auto_class(loaded: Any, kind: Kind) -> Any:
    import transformers

    return getattr(transformers, model_family(loaded, kind).auto_class)


def _count_parameters(config: ModelConfig, loaded: Any, kind: Kind) -> int | None:
    """Number of parameters from a model without weights."""
    empty = _empty_model(config, loaded, kind)
    return None if empty is None else _distinct_parameters(empty)


def _distinct_parameters(model: Any) -> int:
    """Number of parameters, with shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _check_built(config: ModelConfig, source: Checkpoint, empty: Any) -> None:
    """Compare a model without weights with its files.

    Raises:
        UserError: as `check_built`.
    """
    names = weight_files(source)
    size = sum((source.folder / name).stat().st_size for name in names)
    what = f"model {config.shown}: its configuration"
    check_built(what, empty, stored_weights(source.folder), size, _is_packed(source, empty))


def _is_packed(source: Checkpoint, empty: Any) -> bool:
    """Whether the weights are quantized in their files."""
    return source.gguf is not None or getattr(empty.config, "quantization_config", None) is not None


def _check_shapes(config: ModelConfig, source: Checkpoint, empty: Any) -> None:
    """Compare the shapes of a model without weights with those in its files.

    Raises:
        UserError: a weight has another shape.
    """
    refuse_misfit(_misfit(config, empty), (), (), other_shapes(empty, source.folder))


def open_empty(config: ModelConfig) -> Any | None:
    """A causal model without weights, for inspection of its layers; None if its code does not support this.

    Raises:
        UserError: a file is missing or damaged, or a setting is not allowed.
    """
    files = _checked_files(config, check_files(config), "causal")
    return _empty_model(config, read_model_config(config, files), "causal")


def count_parameters(config: ModelConfig) -> int | None:
    """Number of parameters of a model of any kind; None if its code cannot construct an empty one.

    Raises:
        UserError: a file is missing or damaged, or a setting is not allowed.
    """
    return _count_parameters(config, read_model_config(config, locate(config, weights=False), "any"), "any")


def count_positions(config: ModelConfig) -> int | None:
    """Number of positions of a model of any kind; None if its configuration does not state it.

    Raises:
        UserError: a file is missing or damaged, or a setting is not allowed.
    """
    return max_positions(read_model_config(config, locate(config, weights=False), "any"))


def _empty_model(config: ModelConfig, loaded: Any, kind: Kind) -> Any | None:
    try:
        return _built_empty(config, loaded, kind)
    except Exception:  # errors of a model's code are reported at load
        return None


def _built_empty(config: ModelConfig, loaded: Any, kind: Kind) -> Any:
    import torch

    with BUILDING, torch.device("meta"):
        return _auto_class(loaded, kind).from_config(loaded, trust_remote_code=config.trust_remote_code)


def fingerprint_model(config: AnyModel) -> dict[str, str]:
    """Digests of everything that the model's results depend on, independent of the paths of its files.

    Returns:
        "model" (SHA-256 of weights and configuration, including the adapter's), "tokenizer" (of its files, or the
        GGUF), "dtype" and "quantization" ("none" if unset). For an endpoint, "model" is its `identity`: the weights
        that it serves under that name are unknown.

    Raises:
        UserError: a file is missing, or the adapter's record names another base model.
    """
    if isinstance(config, ScoredModel):
        return {"model": f"scores of {config.name}", "tokenizer": "none", "dtype": "none", "quantization": "none"}
    if isinstance(config, EndpointConfig):
        return {"model": config.identity, "tokenizer": "unknown", "dtype": "unknown", "quantization": "none"}
    quieten()
    source = locate(config, weights=True)
    assert source.files is not None
    weights, tokenizer = source.files.model_digest(), source.files
    if config.adapter is not None:
        folder = locate_adapter(config)
        check_base(folder, weights, config.shown, source.files.earlier_digest())
        of_adapter = adapter_files(folder, config.adapter_shown)
        weights = hashlib.sha256(f"{weights}+{of_adapter.model_digest()}".encode()).hexdigest()
        tokenizer = of_adapter if adds_tokens(config, source) else source.files
    dtype = dtype_name(config, source, None if source.gguf else read_model_config(config, source, "any"))
    return {
        "model": weights,
        "tokenizer": tokenizer.tokenizer_digest(),
        "dtype": dtype,
        "quantization": _KINDS[config.quantization],
    }


def _load_weights(config: ModelConfig, source: Checkpoint, gpus: float, loaded: Any, kind: Kind) -> Any:
    import torch

    settings: dict[str, Any] = dict(source.gguf_argument)
    if source.gguf:
        settings |= {"config": loaded, **_dense()}
    else:
        settings["use_safetensors"] = None if config.allow_pickle else True
    dtype = dtype_name(config, source, loaded)
    if config.quantization is not None:
        settings["quantization_config"] = _quantization(config, dtype)
    if gpus > 0:
        settings["device_map"] = "auto" if gpus > 1 else {"": torch.cuda.current_device()}
    quiet = contextlib.redirect_stderr(io.StringIO()) if source.gguf else contextlib.nullcontext()
    if config.quantization is None and not source.gguf and getattr(loaded, "quantization_config", None) is None:
        refuse_integers(f"model {config.shown}", source.folder)
    if (empty := _empty_model(config, loaded, kind)) is not None:
        _check_built(config, source, empty)
    with in_one_line(config, "weights"), quiet:  # the GGUF reader's progress bar has no setting
        try:
            with BUILDING:
                model, info = _auto_class(loaded, kind).from_pretrained(
                    source.folder,
                    dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                    trust_remote_code=config.trust_remote_code,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # refused below, with their names
                    **settings,
                )
        except Exception:
            _refuse_shapes(config, source, loaded, kind)
            raise
    what = _misfit(config, model)
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
    unexpected = set(info["unexpected_keys"])
    if unexpected and model_family(loaded, kind) is CAUSAL:
        unexpected -= _of_pictures(config, loaded, unexpected)
    refuse_misfit(what, info["missing_keys"], unexpected, mismatched)
    if source.gguf and hasattr(model, "hf_quantizer"):  # its weights are no longer quantized
        model.hf_quantizer.remove_quantization_config(model)
    return model


def _of_pictures(config: ModelConfig, loaded: Any, names: Collection[str]) -> set[str]:
    """The weights among these names that a class for texts leaves out of a checkpoint for pictures with text."""
    whole = _empty_model(config, loaded, "pictures") if PICTURES.model_class(loaded) else None
    return set() if whole is None else set(loaded_names(whole, names))


def _misfit(config: ModelConfig, model: Any) -> str:
    return f"model {config.shown}: its weights do not fit {type(model).__name__}"


def _refuse_shapes(config: ModelConfig, source: Checkpoint, loaded: Any, kind: Kind) -> None:
    """Raise for weights with another shape at which the loader itself fails, such as tied weights."""
    if (empty := _empty_model(config, loaded, kind)) is not None:
        _check_shapes(config, source, empty)


def _dense() -> dict[str, Any]:
    """The argument of `from_pretrained` that unpacks a GGUF file even if kernels for its blocks are installed."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}  # this release unpacks every file
    return {"quantization_config": GgufConfig(dequantize=True)}


def _quantization(config: ModelConfig, dtype: str) -> Any:
    """Settings of quantization on load: 8 bits, or 4 bits for normally distributed weights (NF4).

    Args:
        config: configuration of the model.
        dtype: dtype of the model and of computations of 4-bit layers; auto: bfloat16.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise UserError(f"quantization {config.quantization} needs bitsandbytes: pip install 'seenset[quantization]'")
    from transformers import BitsAndBytesConfig

    if config.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = "bfloat16" if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def _adapter_folder(config: ModelConfig, family: ModelFamily) -> Path:
    """The folder of the configured adapter, checked.

    Raises:
        UserError: as `check_adapter` and `refuse_by_settings`.
    """
    folder = check_adapter(config, family.task)
    refuse_by_settings(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")), config.adapter_shown or "")
    return folder


def _count_tokens(config: ModelConfig, model: Any, folder: Path) -> int:
    """The number of tokens of a model with its adapter. Raises UserError as `count_tokens`."""
    settings, shown = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")), config.adapter_shown or ""
    stored = stored_weights(linked(adapter_files(folder, shown)))
    return count_tokens(model, settings, stored, tokens_beside(folder), shown)


def _load_with_adapter(config: ModelConfig, load: Callable[[], Opened], kind: Kind) -> Opened:
    """Load a model with its adapter, merged into the weights where this gives the logits of the adapter."""
    model, tokenizer = load()
    family, shown = model_family(model.config, kind), config.adapter_shown or ""
    folder = _adapter_folder(config, family)
    rows, tokens = embedding_rows(model), _count_tokens(config, model, folder)

    def adapt(model: Any) -> Any:
        add_tokens(model, tokens)
        adapted = load_adapter(model, folder, config.shown).eval()
        if tokens > rows:
            refuse_unset(adapted, rows, shown)
        return adapted

    with in_one_line(config, f"adapter {shown}"):
        adapted = adapt(model)
        read = partial(_logits_of_probe, tokenizer, adapted.active_peft_config, family)
        try:
            return merge(adapted, read), tokenizer
        except NotMergedError as error:
            reason, changed = str(error), error.changed
        if changed:
            del model, adapted
            gc.collect()  # their modules refer to each other, and the weights are read again
            adapted = adapt(load()[0])
        model = keep_beside(adapted, read, shown)
    _log.warning("adapter %s %s: it is computed beside the weights, which takes longer", config.adapter_shown, reason)
    return model, tokenizer


def _logits_of_probe(tokenizer: Any, settings: Any, family: ModelFamily, model: Any) -> Any:
    """Logits of the text of the probe, and of tokens that an adapter has trained; None: it reads pictures alone."""
    device, positions = model.get_input_embeddings().weight.device, max_positions(model.config)
    lm = LanguageModel(model, tokenizer, device, positions)
    try:
        return probe_logits(lm, adapter_tokens(settings), family is SEQ2SEQ)
    except Exception:  # any exception of a model's code
        if family is not PICTURES:
            raise
    return None


RECORD = "training.json"
"""File next to an adapter's weights: settings, versions, base model, loss of every step."""


def adapter_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a trained adapter with digests of its files and of itself."""
    return sealed({**json.loads(json.dumps(record)), "files": _digests(folder)})


def check_adapter_digests(folder: Path) -> None:
    """Refuse an adapter that was changed after training, if its record has digests (other software writes none).

    Raises:
        DamagedError: a file was changed; the message names it.
    """
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, RecursionError):
        raise DamagedError(f"adapter {folder}", f"is damaged: {RECORD} is not JSON") from None
    if not isinstance(record, dict) or not {"files", DIGEST} & record.keys():
        return
    if not is_sealed(record):
        raise DamagedError(f"adapter {folder}", f"is damaged: {RECORD} is not what was written")
    digests = _digests(folder)
    for name, sha256 in record["files"].items():
        if digests.get(name) != sha256:
            fault = "not what was trained" if name in digests else "gone"
            raise DamagedError(f"adapter {folder}", f"is damaged: {name} is {fault}")


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of an adapter except its record, by name."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != RECORD)
    return {path.name: file_digest(path) for path in files}


def check_base(folder: Path, base: str, model_path: str, earlier: str | None = None) -> None:
    """Refuse an adapter whose record states another base model.

    Args:
        folder: folder of the adapter.
        base: SHA-256 of the base model, from `fingerprint_model`.
        model_path: path of the base model, for the error.
        earlier: SHA-256 of the base model as versions before 1.0 computed it.

    Raises:
        UserError: the adapter was trained on another one.
    """
    try:
        base_record = json.loads((folder / RECORD).read_text(encoding="utf-8")).get("base") or {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # written by other software: a mismatch is detected at load
    trained_on = base_record.get("model", base)
    if trained_on not in (base, earlier):
        raise UserError(
            f"adapter {folder} is for another base model: trained on weights {trained_on[:12]}, "
            f"model {model_path} has {base[:12]}"
        )


def load_adapter(model: Any, folder: Path, model_path: str) -> Any:
    """Add an adapter to a model; its file must contain exactly the weights that its settings define.

    Raises:
        UserError: the adapter is for another base model, or its file has missing or additional weights.
    """
    import peft

    links = str(linked(adapter_files(folder, str(folder))))
    problem = f"adapter {folder} is for another base model than {model_path}"
    try:
        with BUILDING:
            # The device is explicit: peft would use any visible GPU, also for a model on the CPU.
            adapted = peft.PeftModel.from_pretrained(model, links, torch_device="cpu")
    except (RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "size mismatch" in str(error) or "not found in the base model" in str(error):
            raise UserError(f"{problem}: {lines[-1]}") from None
        raise
    written = peft.load_peft_weights(links, device="cpu").keys()
    # Not "auto", which queries the hub for the size of the vocabulary.
    least, most = (
        peft.get_peft_model_state_dict(adapted, save_embedding_layers=with_embedding).keys()
        for with_embedding in (False, True)
    )
    refuse_misfit(f"{problem}, or is not whole", least - written, written - most)
    return adapted
