"""A model on disk: locate and check its files, read its configuration and weight names. Weights are not loaded."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pipeline.config.models import ModelConfig, expand_user
from pipeline.corpus.unpacking import LFS_POINTER, LFS_REMEDY
from pipeline.errors import UserError, foreign_as_errors, nearest, not_opened, visible
from pipeline.models.devices import quiet_panics
from pipeline.models.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    PICKLES,
    SAFE,
    Allowed,
    FolderFiles,
    adapter_files,
    find_model_files,
    gguf_files,
    linked,
)
from pipeline.models.settings import check_adapter_settings, check_gguf, check_kernels, check_sizes, gguf_scaling
from pipeline.models.stored import TYPES, stored_weights

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.py", "*.jinja", "*.spm")
ADAPTER_WEIGHTS = "adapter_model.safetensors"
HUB_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The location of a model's files on this machine."""

    folder: Path  # from `locate`: links to exactly the files that loaders may read
    gguf: str | None  # name of the GGUF file in it
    origin: Path | None = field(default=None, compare=False)  # folder that the links lead to, as configured
    files: FolderFiles | None = field(default=None, compare=False)  # files of `folder`, from `locate`

    @property
    def gguf_argument(self) -> dict[str, str]:
        """The argument of `from_pretrained` for a GGUF file; empty without one."""
        return {"gguf_file": self.gguf} if self.gguf else {}


@contextlib.contextmanager
def in_one_line(config: ModelConfig, part: str) -> Iterator[None]:
    """Convert any exception of a loader to a one-line UserError that names the model and the part that was read."""
    try:
        with foreign_as_errors(), quiet_panics():
            yield
    except UserError:
        raise
    except Exception as error:  # loaders raise any exception of their parsers
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = next((n for n, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
        message = " ".join(lines[: first + 1]) or type(error).__name__
        reason = not_opened(error) if isinstance(error, ImportError) else message
        raise UserError(f"model {config.shown}: cannot read its {part}: {reason}") from error


def locate(config: ModelConfig, *, weights: bool) -> Checkpoint:
    """Locate the model's files on this machine; files of a hub model are downloaded, weights only with `weights`.

    Returns:
        A folder of links to the files that loaders may read, which are those of the fingerprint.

    Raises:
        UserError: the folder, file or hub model does not exist, the hub cannot be reached, or as `find_model_files`.
    """
    source = _located(config, weights=weights)
    if source.gguf:
        files = gguf_files(source.folder, source.gguf)
        (path,) = files.places.values()
        check_gguf(f"model {config.shown}", path, path.stat().st_size, path.stat().st_mtime_ns)
        return Checkpoint(linked(files), files.weights[0], source.folder, files)
    _refuse_adapter(config, source.folder)
    local = Path(expand_user(config.path)).is_dir()
    partial = not (weights or local)
    what = f"model {config.shown}"
    _refuse_pointers(what, [source.folder / CONFIG])
    files = find_model_files(source.folder, Allowed(what, config.allow_pickle, config.trust_remote_code, partial))
    _refuse_pointers(what, files.places.values())
    folder = linked(files)
    stored = {} if partial else stored_weights(folder)
    for name, settings in files.configurations():
        check_kernels(what, settings, config.trust_remote_code)
        check_sizes(f"{what}: {name}", settings, stored)
    return Checkpoint(folder, None, source.folder, files)


_MOST_POINTER = 1024  # bytes of a pointer


def _refuse_pointers(what: str, paths: Iterable[Path]) -> None:
    """Refuse pointers of Git LFS in the place of a model's files, which a clone without LFS leaves.

    Raises:
        UserError: a file is one.
    """
    for path in paths:
        if path.is_file() and path.stat().st_size < _MOST_POINTER and path.read_bytes().startswith(LFS_POINTER):
            raise UserError(f"{what}: {path.name}: {LFS_REMEDY}")


def _refuse_adapter(config: ModelConfig, folder: Path) -> None:
    """Refuse an adapter in the place of a model, and one that transformers would load on top of the model.

    Raises:
        UserError: the folder has one that is not the configured adapter.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"model {config.shown} is an adapter ({ADAPTER_CONFIG}); set path to its base model, and adapter to this "
            "folder"
        )
    if config.adapter is None or Path(expand_user(config.adapter)).resolve() != folder.resolve():
        raise UserError(
            f"model {config.shown} has an adapter in its folder ({ADAPTER_CONFIG}); set adapter to this folder to "
            "merge it, or move that file"
        )


def _located(config: ModelConfig, *, weights: bool) -> Checkpoint:
    """The folder of a model as it is."""
    path = Path(expand_user(config.path))
    if path.suffix == ".gguf":
        if config.gguf_file is not None:
            raise UserError(f"model path {config.shown} is a GGUF file already; remove gguf_file {config.gguf_file!r}")
        return _gguf(path.parent, path.name, str(path.parent))
    if path.is_dir():
        return _gguf(path, config.gguf_file, config.shown) if config.gguf_file else Checkpoint(path, None)
    if path.is_file():
        raise UserError(f"model path {config.shown} is a file that is not GGUF; give its folder")
    if _looks_local(config.path):
        raise UserError(f"no model at {config.shown}; {_siblings(path)}")
    return _from_hub(config, weights=weights)


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def is_missing(config: ModelConfig) -> bool:
    """Whether a local path of a model or of its adapter leads nowhere; False for a model of the hub."""
    place = Path(expand_user(config.path))
    local = _looks_local(config.path) or place.suffix == ".gguf"
    places = [place / (config.gguf_file or "")] if local else []
    places += [Path(expand_user(config.adapter))] if config.adapter is not None else []
    return not all(map(os.path.exists, places))


def _gguf(folder: Path, name: str, folder_shown: str) -> Checkpoint:
    if not (folder / name).is_file():
        others = sorted(entry.name for entry in folder.glob("*.gguf")) if folder.is_dir() else []
        tail = nearest(name, others, "GGUF files there") if others else "no GGUF file is there"
        raise UserError(f"no GGUF file {name!r} in {folder_shown}; {tail}")
    with (folder / name).open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{folder / name} is not a GGUF file")
    return Checkpoint(folder, name)


def _siblings(path: Path) -> str:
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir()) if path.parent.is_dir() else []
    if not names:
        return f"no folder is in {path.parent}" if path.parent.is_dir() else f"no folder {path.parent} either"
    return nearest(path.name, names[:20], f"folders in {path.parent}")


def _from_hub(config: ModelConfig, *, weights: bool) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    name = f"{config.shown} at {config.revision}" if config.revision else config.shown
    patterns = [*SMALL_FILES, SAFE, *(PICKLES if config.allow_pickle else ())] if weights else SMALL_FILES
    try:
        folder = snapshot_download(
            config.path,
            revision=config.revision,
            allow_patterns=[config.gguf_file] if config.gguf_file else list(patterns),
            ignore_patterns=None if config.gguf_file else ["*/*", "consolidated*"],
            etag_timeout=HUB_SECONDS,
        )
    except HFValidationError:
        raise UserError(f"no model folder {config.shown}, and it is not a hub id either (owner/name)") from None
    except GatedRepoError:
        raise UserError(f"model {name} is gated on the hub: ask for access and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(f"no model {name}: neither a folder here nor on the hub (private ones need HF_TOKEN)") from None
    except RevisionNotFoundError:
        raise UserError(f"model {config.shown} has no revision {config.revision!r} on the hub") from None
    except (LocalEntryNotFoundError, OSError, ValueError):
        raise UserError(
            f"model {name}: no such folder, and the hub cannot be reached; give a folder or a .gguf file"
        ) from None
    return _gguf(Path(folder), config.gguf_file, config.shown) if config.gguf_file else Checkpoint(Path(folder), None)


def weight_files(source: Checkpoint) -> list[str]:
    """Names of the files from which weights are loaded, relative to the folder."""
    return [] if source.files is None else list(source.files.weights)


def check_weights(config: ModelConfig, source: Checkpoint) -> None:
    """Check that weights exist and are safetensors, GGUF, or pickles that the configuration allows.

    Raises:
        UserError: no weights, or pickles that are not allowed.
    """
    if source.gguf or weight_files(source):
        return
    local = Path(expand_user(config.path)).is_dir()
    names = [path.name for path in (source.origin or source.folder).iterdir()] if local else _hub_names(config)
    if names is None or any(name.endswith(".safetensors") for name in names):
        return
    pickles = sorted(name for name in names if Path(name).match("*.bin") or Path(name).match("*.pt*"))
    if pickles and not config.allow_pickle:
        raise UserError(
            f"model {config.shown}: weights are pickles ({pickles[0]}), which can run code; use a safetensors copy, or "
            "set allow_pickle: true if you trust them"
        )
    if pickles:
        return
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    tail = f"it has GGUF files, name one as gguf_file: {', '.join(ggufs)}" if ggufs else "no *.safetensors is there"
    raise UserError(f"model {config.shown}: no weights; {tail}")


def check_files(config: ModelConfig) -> Checkpoint:
    """Locate a model and check its file names, without importing a model library, which takes seconds.

    Raises:
        UserError: a file is missing, or the format of the weights is not allowed.
    """
    source = locate(config, weights=False)
    check_weights(config, source)
    if not source.gguf:
        _check_has_config(config, source)
    if config.adapter is not None:
        locate_adapter(config)
    return source


def _check_has_config(config: ModelConfig, source: Checkpoint) -> None:
    if not (source.folder / "config.json").is_file():
        raise UserError(f"model {config.shown}: no config.json in its folder")


def _hub_names(config: ModelConfig) -> list[str] | None:
    """File names of a hub model; None if the hub does not answer."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(config.path, revision=config.revision, timeout=HUB_SECONDS)
    except Exception:  # a cached model needs no hub; the load reports missing files
        return None
    return [entry.rfilename for entry in info.siblings or []]


Kind = Literal["causal", "rewriter", "pictures", "any"]
"""Required type of model: causal language model; causal or encoder-decoder; vision-language; any."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models that are loaded by one auto class of transformers."""

    auto_class: str  # name of the class
    mapping: str  # name of its mapping from model types to classes
    refused: tuple[str, ...] = ()  # parts of architecture names that it would load without their head
    task: str = "CAUSAL_LM"  # task type of adapters
    of_pictures: bool = False  # whether the documents are pictures

    def model_class(self, loaded: Any) -> str | None:
        """Name of the model class for a configuration, if this family has one."""
        from transformers.models.auto import modeling_auto

        if self.of_pictures and getattr(loaded, "vision_config", None) is None:
            return None
        name = getattr(modeling_auto, self.mapping).get(loaded.model_type)
        return name if name is None or isinstance(name, str) else name[0]

    def opens(self, loaded: Any) -> bool:
        """Whether this family has a class for a configuration, and the configuration is not for another task."""
        names = loaded.architectures or []
        return self.model_class(loaded) is not None and not any(part in name for name in names for part in self.refused)


CAUSAL = ModelFamily(
    "AutoModelForCausalLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    ("MaskedLM", "Classification", "QuestionAnswering", "MultipleChoice"),
)
SEQ2SEQ = ModelFamily(
    "AutoModelForSeq2SeqLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    ("EncoderModel", "Classification", "QuestionAnswering"),
    "SEQ_2_SEQ_LM",
)
PICTURES = ModelFamily("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", of_pictures=True)
TEXT_PATH = replace(PICTURES, refused=CAUSAL.refused, of_pictures=False)
"""Models that transformers opens for pictures with text alone, whose documents are texts: no picture is given."""


def model_family(loaded: Any, kind: Kind) -> ModelFamily:
    """The family that loads a model of a kind."""
    if kind == "pictures" or (kind == "any" and PICTURES.model_class(loaded) in (loaded.architectures or [])):
        return PICTURES
    if loaded.is_encoder_decoder:
        return CAUSAL if kind == "causal" else SEQ2SEQ
    own_code = not type(loaded).__module__.startswith("transformers.")
    return CAUSAL if own_code or CAUSAL.model_class(loaded) or not TEXT_PATH.model_class(loaded) else TEXT_PATH


def read_model_config(config: ModelConfig, source: Checkpoint, kind: Kind = "causal") -> Any:
    """Read the configuration of a model of a kind.

    Raises:
        UserError: it cannot be read, or the model is of another kind.
    """
    if not source.gguf:
        _check_has_config(config, source)
        with in_one_line(config, "config.json"):
            raw = json.loads((source.folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise UserError(f"model {config.shown}: its {CONFIG} is no JSON object")
        if "auto_map" in raw and not config.trust_remote_code and not _known_type(raw.get("model_type")):
            raise UserError(f"model {config.shown} ships code of its own; set trust_remote_code: true if you trust it")
    with in_one_line(config, "config"):
        changed = (source.folder / (source.gguf or "config.json")).stat().st_mtime_ns
        loaded = copy.deepcopy(_parsed_config(source, config.trust_remote_code, changed))
    shown, family = ", ".join(loaded.architectures or []) or loaded.model_type, model_family(loaded, kind)
    has_code = config.trust_remote_code and family.auto_class in (getattr(loaded, "auto_map", None) or {})
    if family.opens(loaded) or (family is CAUSAL and has_code):
        return loaded
    if family is PICTURES:
        raise UserError(f"model {config.shown} reads texts alone, and the documents are pictures: {shown}")
    if family is SEQ2SEQ:
        raise UserError(f"model {config.shown} writes no text: {shown}")
    tail = "; it reads pictures with text, and no corpus.*.image is given" if PICTURES.model_class(loaded) else ""
    raise UserError(f"model {config.shown} is no causal language model: {shown}{tail}")


@lru_cache(maxsize=8)
def _parsed_config(source: Checkpoint, trust_remote_code: bool, changed: int) -> Any:
    """The configuration from transformers, cached per process: reading it from a GGUF file takes seconds."""
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code, **source.gguf_argument)
    if source.gguf and (scaling := gguf_scaling(source.folder / source.gguf)):
        _set_scaling(loaded.get_text_config(), scaling)
    return loaded


def _set_scaling(config: Any, scaling: Mapping[str, Any]) -> None:
    """Set the scaling of position embeddings, where layers differ of those with full attention.

    A configuration that has another kind already, as the partial rotation of Gemma 4, keeps it: the divisors in its
    GGUF file state the same.
    """
    known = dict(config.rope_parameters or {})
    by_layer = isinstance(known.get("full_attention"), Mapping)
    whole = known["full_attention"] if by_layer else known
    if whole.get("rope_type", "default") != "default":
        return
    more = {"original_max_position_embeddings": config.max_position_embeddings} if "long_factor" in scaling else {}
    whole = {**whole, **scaling, **more}
    config.rope_parameters = {**known, "full_attention": whole} if by_layer else whole


def _known_type(model_type: str | None) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def max_positions(loaded: Any) -> int | None:
    """Number of positions of the model (for T5: in training); None if its configuration does not state it."""
    text_config = loaded.get_text_config()
    value = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def dtype_name(config: ModelConfig, source: Checkpoint, loaded: Any) -> str:
    """Name of the dtype of the loaded weights, such as float32; auto if the files do not state it."""
    if config.dtype != "auto":
        return config.dtype
    if source.gguf:
        return "float32"
    if loaded.dtype is not None:
        return str(loaded.dtype).removeprefix("torch.")
    kinds = {kind for kind, _ in stored_weights(source.folder).values()}
    return next((name for kind, name in TYPES.items() if kind in kinds), "auto")


def locate_adapter(config: ModelConfig) -> Path:
    """The folder of the configured adapter.

    Raises:
        UserError: the folder or its adapter_config.json is missing.
    """
    assert config.adapter is not None
    folder = Path(expand_user(config.adapter))
    if not (folder / ADAPTER_CONFIG).is_file():
        missing = (
            f"no {ADAPTER_CONFIG} in {config.adapter_shown}" if folder.is_dir() else f"no folder {config.adapter_shown}"
        )
        raise UserError(f"adapter: {missing}; {_siblings(folder)}")
    return folder


def check_adapter(config: ModelConfig, task: str = "CAUSAL_LM") -> Path:
    """The folder of the configured adapter, after checking its task and that it contains no pickle.

    Raises:
        UserError: a file is missing, the adapter is for another task, or its weights are a pickle.
    """
    folder = locate_adapter(config)
    with in_one_line(config, f"adapter {config.adapter_shown}"):
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    links = linked(adapter_files(folder, config.adapter_shown))
    check_adapter_settings(f"adapter {config.adapter_shown}", settings, stored_weights(links))
    if settings.get("task_type") not in (None, task):
        raise UserError(f"adapter {config.adapter_shown} is for {settings['task_type']}, the model for {task}")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        if not (folder / "adapter_model.bin").is_file():
            raise UserError(f"adapter {config.adapter_shown}: no {ADAPTER_WEIGHTS} in it")
        if not config.allow_pickle:
            raise UserError(
                f"adapter {config.adapter_shown}: weights are a pickle (adapter_model.bin); set allow_pickle: true if "
                "you trust it"
            )
    return folder


def other_base(config: ModelConfig) -> str | None:
    """A warning if the configured adapter names another base model by its path or hub id; None otherwise.

    Names are compared, not weights: a copy of the base model under another name gives a warning too.

    Raises:
        UserError: a file is missing.
    """
    if config.adapter is None:
        return None
    try:
        settings = json.loads((locate_adapter(config) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):  # reported at load
        return None
    if not isinstance(base, str) or not base.strip():
        return None
    source = locate(config, weights=False)
    names = {config.path, expand_user(config.path), str(source.origin), *_model_names(source)}
    place = Path(expand_user(base))
    if base in names or (place.exists() and source.origin is not None and place.resolve() == source.origin.resolve()):
        return None
    last = {PurePosixPath(name.rstrip("/")).name.casefold() for name in names}
    if PurePosixPath(base.rstrip("/")).name.casefold() in last:
        return None
    return (
        f"adapter {config.adapter_shown} names base model {visible(base)[:120]}, and the model is {config.shown}: if "
        "these are not the same weights, the scores are of a model that was never trained"
    )


def _model_names(source: Checkpoint) -> Iterator[str]:
    """Names of a model beside its path: its hub id, and the name in its configuration."""
    origin = source.origin or source.folder
    if origin.parent.name == "snapshots":
        yield origin.parent.parent.name.removeprefix("models--").replace("--", "/")
    if source.gguf is None:
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            name = json.loads((source.folder / CONFIG).read_text(encoding="utf-8")).get("_name_or_path")
            if isinstance(name, str) and name:
                yield name
