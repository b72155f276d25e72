"""The types of an audit's models and trainings: decided once per run, recorded, and kept by every later command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field

from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig, FsdConfig
from pipeline.config.yaml import Section
from pipeline.detectors.registry import needed_adapters, parse_detectors
from pipeline.errors import DamagedError
from pipeline.models.weight_dtypes import (
    Processor,
    check_explicit,
    choose_model,
    choose_training,
    stored_bytes,
)
from pipeline.run.records import Record, VersionedRecord, read_record, write_record
from pipeline.run.remedies import OTHER_VERSION, made_again_note
from pipeline.store.files import Store

ARITHMETIC_FILE = "arithmetic.json"
MODELS = ("model", "reference_model", "paraphraser")
TRAININGS = ("contaminate", "fsd")

Configured = TypeVar("Configured", bound=Section)


class DtypeChoice(Record):
    """The type of one model or training."""

    dtype: str = Field(description="Type of the weights, or of the products of a training, such as float32.")
    reason: str = Field(description="Why dtype auto chose it.")


class Arithmetic(VersionedRecord):
    """What `dtype: auto` chose for a run: `arithmetic.json`."""

    sealed = True

    types: dict[str, DtypeChoice] = Field(description="Types by key of the configuration, such as model.")
    flags: list[str] = Field(description="CPU flags that a choice depends on, as detected when the types were chosen.")

    def chosen(self, config: Section, key: str) -> DtypeChoice | None:
        """The choice for a model or training of a configuration; None where the configuration states its type.

        Args:
            config: an audit's configuration before its types are filled in.
            key: key of the configuration, such as model.
        """
        return self.types.get(key) if _is_auto(getattr(config, key, None)) else None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts about the workers that a decision depends on."""

    processor: Processor
    copies: int  # copies of the weights in the memory of one machine


def decide_types(
    config: Section, earlier: Arithmetic | None, ask: Callable[[], WorkerFacts], say: Callable[[str], None]
) -> Arithmetic:
    """The types of all models and trainings of a configuration whose dtype is auto.

    Args:
        config: configuration of an audit or a trial.
        earlier: the record in the run directory, whose choices are kept.
        ask: returns the workers' processor; called only where a decision or a check needs it.
        say: prints a line.

    Raises:
        UserError: the errors of `choose_model` and `check_explicit`.
    """
    types = {} if earlier is None else dict(earlier.types)
    opened = _models(config)
    missing = [key for key in (*opened, *_trainings(config)) if _is_auto(getattr(config, key)) and key not in types]
    stated = [key for key in opened if opened[key].dtype in ("bfloat16", "float16")]
    if earlier is not None and not missing:
        return earlier
    if not missing and not stated:
        return Arithmetic(types=types, flags=[])
    deciding = ask()
    for key in stated:
        if warning := check_explicit(f"{key}.dtype", opened[key].dtype, deciding.processor):
            say(warning)
    total = deciding.copies * sum(stored_bytes(model) for model in opened.values()) if missing else 0
    for key in missing:
        part = getattr(config, key)
        if isinstance(part, ModelConfig):
            choice = choose_model(part, total, deciding.processor)
        else:
            choice = choose_training(deciding.processor)
        if choice.warning:
            say(f"warning: {key}: {choice.warning}")
        types[key] = DtypeChoice(dtype=choice.dtype, reason=choice.reason)
    return Arithmetic(types=types, flags=list(deciding.processor.flags))


def with_types(config: Configured, types: Mapping[str, DtypeChoice]) -> Configured:
    """The configuration with each dtype auto replaced by the decided type."""
    changes: dict[str, Any] = {}
    for key in (*MODELS, *TRAININGS):
        part = getattr(config, key, None)
        if part is not None and key in types and _is_auto(part):
            changes[key] = _typed(part, types[key].dtype)
    return config.model_copy(update=changes) if changes else config


def _typed(part: Section, dtype: str) -> Section:
    """A model or training with its type set, also in each named adapter whose dtype is auto."""
    changes: dict[str, Any] = {"dtype": dtype} if getattr(part, "dtype", None) == "auto" else {}
    if isinstance(part, FsdConfig):
        changes["adapters"] = {
            name: {**settings, "dtype": dtype} if settings.get("dtype") == "auto" else settings
            for name, settings in part.adapters.items()
        }
    return part.model_copy(update=changes)


def _models(config: Section) -> dict[str, ModelConfig]:
    """The models of a configuration whose weights are opened, by key."""
    parts = {key: getattr(config, key, None) for key in MODELS}
    return {key: part for key, part in parts.items() if isinstance(part, ModelConfig)}


def _trainings(config: Section) -> list[str]:
    """Keys of the trainings of a configuration."""
    keys = ["contaminate"] if hasattr(config, "contaminate") else []
    return [*keys, "fsd"] if needed_adapters(parse_detectors(config.detectors)) else keys  # type: ignore[attr-defined]


def _is_auto(part: object) -> bool:
    """Whether a model, a training, or one of the named adapters of the `fsd` detector has dtype auto."""
    if isinstance(part, FsdConfig) and any(settings.get("dtype") == "auto" for settings in part.adapters.values()):
        return True
    return isinstance(part, (ModelConfig, FinetuneConfig)) and part.dtype == "auto"


def read_arithmetic(store: Store, name: str = ARITHMETIC_FILE) -> Arithmetic | None:
    """The recorded types of a run; None where none were decided.

    Args:
        store: the run directory.
        name: file name.

    Raises:
        UserError: a damaged record, or one of another version.
    """
    return read_record(store, name, Arithmetic, OTHER_VERSION)


def earlier_arithmetic(store: Store, say: Callable[[str], None], name: str = ARITHMETIC_FILE) -> Arithmetic | None:
    """As `read_arithmetic`, but None with a notice for a damaged record; the types are then decided again.

    Args:
        store: the run directory.
        say: prints a line.
        name: file name.

    Raises:
        VersionError: a record of another version.
    """
    try:
        return read_arithmetic(store, name)
    except DamagedError as error:
        say(made_again_note(error, "the decision is"))
        return None


def note_arithmetic(store: Store, arithmetic: Arithmetic, name: str = ARITHMETIC_FILE) -> None:
    """Record the decided types. The run's lock must be held."""
    if arithmetic.types and earlier_arithmetic(store, lambda line: None, name) != arithmetic:
        write_record(store, name, arithmetic)
