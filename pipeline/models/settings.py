"""Checks of a model's settings before a library reads them: sizes that its weights cannot have, and code of the hub.

A library builds whatever a configuration states: 10^9 layers one by one, a matrix of 10^7 columns, a mask of all pairs
of 10^12 positions. The header of the weights bounds all of them.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, visible

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name of a weight -> its type, such as BF16, and its shape."""

MOST_LAYERS = 1_000
"""Layers or experts of a model whose weights are not known yet."""
SHARED_LAYERS = 256
"""Layers that a model with few weights may have, because they share them."""
MOST_POSITIONS = 1 << 31
MOST_OF_ANY = 10_000_000
"""A number of a configuration that is neither a size nor free, such as an interval."""
MOST_ENTRIES = 10_000
"""Of a list in a configuration."""
LEAST_BUFFERS = 1 << 30
"""Bytes of tables and masks that any model may have."""

_LAYERS = re.compile(r"(n|num|num_hidden|num_\w+|n_\w+|\w+coder|\w+_hidden)_(layers?|blocks|stages)|layers"
                     r"|(\w+_)?depths?|block_count|first_k_dense_replace|attention_types")  # fmt: skip
_POSITIONS = re.compile(r"(\w+_)?(max|n|num)_(position\w*|ctx|seq_len\w*|sequence_length)|(\w+_)?context_length")
_SIZES = re.compile(r"(\w+_)?(size|dim|dims|embd|embed|heads?|inner|rank|width|channels|d_model|d_ff|d_kv|d_inner"
                    r"|d_state|feed_forward_length|embedding_length|key_length|value_length)"
                    r"|n_head\w*|head_count\w*|hidden_sizes")  # fmt: skip
_COUNTS = re.compile(r"(\w+_)?experts|expert_count|(n|num)_\w+")
_NEVER_ZERO = ("hidden_size", "n_embd", "d_model", "vocab_size")
_DIGITS = 40  # of a number in an error
_NO_SIZES = re.compile(r"window|chunk|block|cache|image_size|crop|patch|batch|sample")
_FREE = re.compile(
    r"theta|token|length|window|pixels|seed|param|flos|base|max_|version|freq"
)  # nothing is built by these
_IMPLEMENTATIONS = ("_attn_implementation", "attn_implementation", "_experts_implementation",
                    "experts_implementation")  # fmt: skip
_BUILT_IN = {"eager", "sdpa", "flex_attention", "paged|eager", "batched_mm", "grouped_mm"}
_LARGER = 64  # factor between the largest dimension of the weights and a size: packed and fused weights
_LEAST_SIZE = 1 << 16
_LEAST_COUNT = 1 << 12
_LARGER_RANK = 16  # AdaLoRA removes ranks during its training
_LEAST_RANK = 256
_PER_BYTE = 16  # parameters per byte of a file, with room for any packing
_SPARE = 10_000_000  # parameters that a small file may lack
_ANY_RANK = ("LOKR",)  # a large rank means no decomposition
_NAMES_OTHERS = ("adapters", "shadow_model", "prompt_tuning_init_state_dict_path", "megatron_config")


def check_kernels(what: str, settings: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Check that a configuration takes no code from the hub, unless remote code is allowed.

    Raises:
        UserError: it names a kernel of the hub.
    """
    if trust_remote_code:
        return
    for key, value in _entries(settings):
        if key[-1] not in _IMPLEMENTATIONS and not (len(key) > 1 and key[-2] in _IMPLEMENTATIONS):
            continue
        if isinstance(value, str) and value not in _BUILT_IN and (not _is_flash(value) or _from_the_hub()):
            raise UserError(
                f"{what}: config.json takes {'.'.join(key)} {visible(value)[:80]!r} from the hub, which is code; set "
                "trust_remote_code: true if you trust it, or remove that key"
            )


def _is_flash(value: str) -> bool:
    return re.fullmatch(r"flash_attention_\d", value) is not None


def _from_the_hub() -> bool:
    """Whether transformers would load flash attention from the hub: the package is missing, and `kernels` is not."""
    return find_spec("kernels") is not None and not any(map(find_spec, ("flash_attn", "flash_attn_interface")))


def check_sizes(what: str, settings: Mapping[str, Any], stored: Stored) -> None:
    """Check the sizes in a configuration, before a library reads it.

    Args:
        what: the model and the file, as the start of the error.
        settings: configuration: a JSON object.
        stored: weights of the model; empty if they are unknown.

    Raises:
        UserError: a size is negative, or larger than weights of these shapes can have.
    """
    largest = max((dim for _, shape in stored.values() for dim in shape), default=0)
    layers = max(len(stored), SHARED_LAYERS) if stored else MOST_LAYERS
    limits: dict[str, float] = {
        "layers": layers,
        "count": max(layers, largest, _LEAST_COUNT) if stored else 100 * MOST_LAYERS,
        "positions": MOST_POSITIONS,
        "size": max(_LARGER * largest, _LEAST_SIZE) if stored else MOST_POSITIONS,
        "other": MOST_OF_ANY,
    }
    for key, value in _entries(settings):
        if isinstance(value, list):
            raise UserError(f"{what} states {'.'.join(key)} with {len(value)} entries; it can have {MOST_ENTRIES}")
        kind = _kind(key[-1])
        if kind is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not value <= limits[kind] and not (kind == "other" and isinstance(value, float)):
            bound = _bound(kind, stored, largest, limits[kind])
            raise UserError(f"{what} states {'.'.join(key)} {_shown(value)}{bound}")
        if value == 0 and key[-1] in _NEVER_ZERO and key[:-1] in ((), ("text_config",)):
            raise UserError(f"{what} states {'.'.join(key)} 0; it must be 1 or more")
        if value < 0 and kind in ("layers", "size"):
            raise UserError(f"{what} states {'.'.join(key)} {_shown(value)}; it must be 0 or more")


def _shown(value: float) -> str:
    """A number, cut to its first digits if it has many."""
    text = str(value)
    return text if len(text) <= _DIGITS else f"{text[:_DIGITS]}... ({len(text)} characters)"


def _bound(kind: str, stored: Stored, largest: int, limit: float) -> str:
    if not stored or kind in ("positions", "other"):
        return f"; it can be at most {limit}"
    if kind == "size":
        return f", and no dimension of its weights is larger than {largest}"
    return f", and its weights are {len(stored)} tensors with at most {largest} rows or columns"


def _kind(name: str) -> str | None:
    """What a number of a configuration is; None for numbers by which nothing is built."""
    if _POSITIONS.fullmatch(name):
        return "positions"
    if _LAYERS.fullmatch(name):
        return "layers"
    if _SIZES.fullmatch(name) and not _NO_SIZES.search(name):
        return "size"
    if _FREE.search(name):
        return None
    return "count" if _COUNTS.fullmatch(name) else "other"


def _entries(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values of a JSON object that are neither objects nor lists, and lists that are too long, with their keys."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:  # not by recursion: a file may nest its objects deeply
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*key, str(name)), part) for name, part in reversed(value.items())]
            continue
        if isinstance(value, list):
            waiting += [(key, part) for part in reversed(value[:MOST_ENTRIES])]
        if key and (not isinstance(value, list) or len(value) > MOST_ENTRIES):
            yield key, value


def check_built(what: str, empty: Any, stored: Stored, file_bytes: int, packed: bool) -> None:
    """Check a model without weights against those in its files, before it gets memory.

    Args:
        what: the model, as the start of the error.
        empty: model on the device `meta`.
        stored: weights of the model; empty if they are unknown.
        file_bytes: size of its files; 0 if they are unknown.
        packed: whether weights are quantized, so that they have other shapes.

    Raises:
        UserError: its tables, or its weights in all, are much larger than its files.
    """
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in empty.buffers())
    if buffers > max(LEAST_BUFFERS, 2 * file_bytes):
        raise UserError(
            f"{what} describes tables and masks of {buffers / 2**30:.4g} GiB beside its weights; is "
            "max_position_embeddings right?"
        )
    values = sum(math.prod(shape) for _, shape in stored.values())
    known = 2 * values if values and not packed else _PER_BYTE * file_bytes
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    if known and parameters > known + _SPARE:
        raise UserError(
            f"{what} describes {parameters:.4g} parameters, and its files hold {values or file_bytes:.4g} "
            f"{'values' if values else 'bytes'}{_first_difference(empty, stored)}"
        )


def _first_difference(empty: Any, stored: Stored) -> str:
    for name, weight in empty.state_dict().items():
        if name in stored and stored[name][1] != tuple(weight.shape):
            return f"; {name} is {tuple(weight.shape)}, in its file {stored[name][1]}"
    return ""


def check_adapter_settings(what: str, settings: Any, stored: Stored) -> None:
    """Check the settings of an adapter before peft reads them.

    Args:
        what: the adapter, as the start of the error.
        settings: content of adapter_config.json.
        stored: weights of the adapter; empty if they are unknown.

    Raises:
        UserError: they are no object, name further files or code, or a size is not that of its weights.
    """
    if not isinstance(settings, dict):
        raise UserError(f"{what}: adapter_config.json is no JSON object")
    for name in _NAMES_OTHERS:
        if settings.get(name):
            raise UserError(
                f"{what}: adapter_config.json has {name}, by which peft reads further files or code; merge it with "
                "peft, and set path to the merged model"
            )
    largest = max((dim for _, shape in stored.values() for dim in shape), default=0)
    ranks = max((min(shape) for _, shape in stored.values() if len(shape) > 1), default=largest)
    by_rank = bool(stored) and settings.get("peft_type") not in _ANY_RANK
    for key, value in _entries(settings):
        if isinstance(value, bool) or not isinstance(value, int | float) or "alpha" in key[-1]:
            continue
        is_rank = key[-1] in ("r", "init_r", "target_r") or "rank_pattern" in key
        limit = max(_LARGER_RANK * ranks, _LEAST_RANK) if is_rank and by_rank else max(_LARGER * largest, _LEAST_SIZE)
        if not value <= limit:
            stated = f"{'.'.join(key)} {_shown(value)}"
            raise UserError(f"{what}: adapter_config.json states {stated}; its weights allow {limit}")
        if is_rank and value < 0:
            raise UserError(f"{what}: adapter_config.json states {'.'.join(key)} {_shown(value)}; it must be 1 or more")
    copies = settings.get("layer_replication") or ()
    total = sum(abs(pair[1] - pair[0]) for pair in copies if isinstance(pair, list) and len(pair) == 2)
    if total > max(len(stored), SHARED_LAYERS):
        raise UserError(f"{what}: adapter_config.json replicates {total} layers, and its weights are {len(stored)}")


# --- GGUF

_WIDTHS = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}  # bytes of a value by its type
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 8


def gguf_header(path: Path) -> tuple[dict[str, Any], Stored]:
    """Numbers and texts of a GGUF file's metadata, and the shapes of its tensors.

    Raises:
        ValueError: the file ends before its header does.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Header(data).read()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError):
            raise ValueError("its header leads beyond its end") from None


_FACTORS = "rope_freqs.weight"
_FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
_ALIGNMENT = 32
_READ_BY_TRANSFORMERS = ("gpt-oss",)
"""Architectures whose scaling transformers reads."""


def gguf_scaling(path: Path) -> dict[str, Any]:
    """The scaling of rotary position embeddings that a GGUF file states, and that transformers leaves out.

    Returns:
        `rope_parameters` without `rope_theta`; empty for no scaling. A tensor of divisors, as Llama 3.1 has, is
        LongRoPE with the same divisors for every length.

    Raises:
        ValueError: the file is damaged, or has a scaling that depends on the length (YaRN, LongRoPE).
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        try:
            metadata, stored = header.read()
            named = {name: value for name, value in metadata.items() if isinstance(name, str)}
            architecture = named.get("general.architecture", "")
            prefix = f"{architecture}.rope.scal"
            kind = named.get(f"{prefix}ing.type", "longrope" if stored.keys() & {*_FACTORS_BY_LENGTH} else "linear")
            factor = float(named.get(f"{prefix}ing.factor", named.get(f"{prefix}e_linear", 1.0)) or 1.0)
            divisors = header.floats(_FACTORS, metadata) if _FACTORS in stored else ()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError, TypeError):
            raise ValueError("its header leads beyond its end") from None
    if architecture in _READ_BY_TRANSFORMERS:
        return {}
    if kind not in ("linear", "none") or stored.keys() & {*_FACTORS_BY_LENGTH}:
        raise ValueError(
            f"it scales position embeddings ({kind}, factor {factor:g}), which transformers does not read from such a "
            "file; take its safetensors"
        )
    factor = 1.0 if kind == "none" else factor
    if all(value == 1.0 for value in divisors):
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    values = [factor * value for value in divisors]
    return {"rope_type": "longrope", "short_factor": values, "long_factor": values, "attention_factor": 1.0}


class _Header:
    """A reader of the header of a GGUF file."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.at = 4
        self.places: dict[str, tuple[int, int]] = {}  # name of a tensor -> its type, and its offset behind the header
        self.lengths: dict[str, int] = {}  # name of a tensor -> number of its values

    def read(self) -> tuple[dict[str, Any], Stored]:
        """The metadata without arrays, and the tensors."""
        version, tensors, entries = self.numbers("<IQQ")
        if version not in (2, 3) or max(tensors, entries) > len(self.data):
            raise struct.error
        metadata = {}
        for _ in range(entries):
            name, value = self.text(), self.value(self.numbers("<I")[0])
            if value is not None:
                metadata[name] = value
        shapes = {}
        for _ in range(tensors):
            name, (count,) = self.text(), self.numbers("<I")
            if count > _MOST_DIMENSIONS:
                raise struct.error
            shape = self.numbers(f"<{count}Q")
            kind, offset = self.numbers("<IQ")
            shapes[name] = (f"GGUF{kind}", tuple(reversed(shape)))
            self.places[name] = kind, offset
            self.lengths[name] = math.prod(shape)
        return metadata, shapes

    def floats(self, name: str, metadata: Mapping[str, Any]) -> tuple[float, ...]:
        """The values of a tensor in float32 or float16, after the header was read."""
        kind, offset = self.places[name]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-self.at // alignment) * alignment + offset
        return struct.unpack_from(f"<{self.lengths[name]}{'fe'[kind]}", self.data, start)

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def text(self) -> str:
        (length,) = self.numbers("<Q")
        self.skip(length)
        return bytes(self.data[self.at - length : self.at]).decode()

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.at:
            raise struct.error
        self.at += length

    def value(self, kind: int) -> Any:
        """A number or a text; None for an array or a truth value."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.numbers("<IQ")
            if kind in _WIDTHS:
                self.skip(_WIDTHS[kind] * count)
            else:
                for _ in range(count):
                    self.value(kind)
            return None
        if kind not in _NUMBERS:
            self.skip(_WIDTHS[kind])
            return None
        return self.numbers(_NUMBERS[kind])[0]


@lru_cache(maxsize=16)
def check_gguf(what: str, path: Path, size: int, changed: int) -> None:
    """Check the header of a GGUF file before a library reads it, once per process for a file that is not changed.

    Args:
        what: the model, as the start of the error.
        path: the file.
        size: its bytes.
        changed: time of its last change.

    Raises:
        UserError: it is damaged, one of several parts, scales position embeddings in a way that is not read, or states
            sizes that its tensors cannot have.
    """
    try:
        metadata, stored = gguf_header(path)
        gguf_scaling(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: cannot read its GGUF file: {error}") from None
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UserError(
            f"{what} is one of {parts} parts of a GGUF file; join them: llama-gguf-split --merge FIRST_PART WHOLE"
        )
    architecture = f"{metadata.get('general.architecture', '')}."
    named = {key.rpartition(".")[2]: value for key, value in metadata.items() if key.startswith(architecture)}
    check_sizes(what, named, stored)
