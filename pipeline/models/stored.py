"""The weights in the safetensors files of a model: their dtypes and shapes, and whether they fit the model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.errors import UserError
from pipeline.models.model_files import SAFE

TYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of dtypes: in safetensors files -> in torch."""

MOST_OF_HEADER = 100_000_000
"""Maximum bytes of the header of a safetensors file; its library has the same limit."""

NAMED = 3
"""Maximum number of weights of a kind in an error."""


def stored_weights(folder: Path) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Dtype, such as BF16, and shape of every weight in the safetensors files of a folder; weights are not read.

    A damaged file is skipped: the loader reports the problem.
    """
    files = []
    for path in sorted(folder.rglob(SAFE)):
        with contextlib.suppress(OSError):
            facts = path.stat()
            files.append((str(path), facts.st_size, facts.st_mtime_ns))
    return _stored_in_all(tuple(files))


@lru_cache(maxsize=8)
def _stored_in_all(files: tuple[tuple[str, int, int], ...]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every weight in files; cached per process for the same sizes and times of change."""
    weights: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, size, _ in files:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            weights |= _stored_in(path, size)
    return MappingProxyType(weights)


def _stored_in(path: str, size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every weight in a file of a size.

    Its header is read without a library, which would import torch.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, MOST_OF_HEADER):
            raise ValueError("the header leads beyond the end")
        header = json.loads(file.read(length))
    return {
        name: (str(part["dtype"]), tuple(int(dim) for dim in part["shape"]))
        for name, part in header.items()
        if name != "__metadata__"
    }


def refuse_integers(what: str, folder: Path) -> None:
    """Refuse a checkpoint without quantization whose weights are integers: their scales are unknown.

    Args:
        what: the model, as the start of the error.
        folder: folder of the safetensors files.

    Raises:
        UserError: a weight is an integer; the first three are named.
    """
    stored = stored_weights(folder)
    integers = [name for name, (kind, _) in stored.items() if name.endswith(".weight") and kind[0] in "IU"]
    if integers:
        raise UserError(
            f"{what}: {len(integers)} of its weights are integers of type {stored[integers[0]][0]} "
            f"({_named(integers)}), and its config.json states no quantization; take the checkpoint in float32"
        )


def other_shapes(empty: Any, folder: Path) -> list[str]:
    """Names of the weights of a model that have another shape in the safetensors files of a folder.

    Weights that transformers converts on loading, such as experts that it joins, are not compared.

    Args:
        empty: model of transformers; its weights are not read.
        folder: folder of the files.
    """
    expected = {name: tuple(weight.shape) for name, weight in empty.state_dict().items()}
    stored = {name: shape for name, (_, shape) in stored_weights(folder).items()}
    loaded = loaded_names(empty, stored)
    return [loaded[name] for name, shape in stored.items() if name in loaded and shape != expected[loaded[name]]]


def loaded_names(empty: Any, stored: Collection[str]) -> dict[str, str]:
    """Names of stored weights -> their names in the model, without weights that are converted or unknown to it.

    Args:
        empty: model of transformers; its weights are not read.
        stored: names of weights in files.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        changes = get_model_conversion_mapping(empty)
        renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        converters = [change for change in changes if isinstance(change, WeightConverter)]
        prefix, names = empty.base_model_prefix, dict.fromkeys(empty.state_dict(), True)
        loaded = {}
        for name in sorted(stored):
            renamed, converted = rename_source_key(name, renamings, converters, prefix, names)
            if renamed not in names and name in names:
                renamed, converted = name, None
            if renamed in names and converted is None:
                loaded[name] = renamed
        return loaded
    except Exception:  # of a release that renames in another way; the loader compares the weights again
        return {}


def refuse_misfit(
    what: str, missing: Collection[str], unexpected: Collection[str], mismatched: Collection[str] = ()
) -> None:
    """Refuse weights that do not match the model: a missing or mismatched weight would have random values.

    Args:
        what: the file and the model, as the start of the error.
        missing: weights of the model that the file lacks, without tied weights and weights that the architecture
            initializes itself.
        unexpected: weights of the file that the model lacks, without those that the architecture ignores.
        mismatched: weights with another shape.

    Raises:
        UserError: there is such a weight; the first three of each kind are named.
    """
    kinds = (
        ("missing from the file", missing),
        ("unknown to the model", unexpected),
        ("of another shape", mismatched),
    )
    problems = [f"{len(names)} {kind} ({_named(names)})" for kind, names in kinds if names]
    if problems:
        raise UserError(f"{what}: {'; '.join(problems)}")


def _named(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:NAMED]) + (", ..." if len(names) > NAMED else "")
