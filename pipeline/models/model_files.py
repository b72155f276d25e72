"""The files of a model's folder that its loaders read, and a folder of links to exactly these.

A loader chooses files by their names, by what other files name (an index of shards, the configurations of the model
and of its tokenizer) and by what else the folder contains. Here the choice is made before any loader runs: the chosen
files are those of the fingerprint, and the loaders get a folder of links to them, so that they find no other file.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import UserError, visible

CONFIG = "config.json"
GENERATION = "generation_config.json"
SAFE = "*.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.*")
TEMPLATES = "additional_chat_templates"

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "tekken.json", "chat_template.*",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
"""Files of tokenizers and processors, in every fingerprint."""

RARE_TOKENIZER_FILES = (
    "bpe.codes", "byte_maps.json", "emoji.json", "entity_vocab.json", "normalizer.json", "prophetnet.tokenizer",
    "source.spm", "target.spm", "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "word_pronunciation.json",
    "word_shape.json",
)  # fmt: skip
"""Files of the tokenizers of single architectures; in a fingerprint if they exist."""

NEUTRAL = {
    "model.safetensors.index.json": "names exactly the shards that their names imply",
    "pytorch_model.bin.index.json": "names exactly the shards that their names imply",
    "generation_config.json": "only its eos_token_id is used, and enters the fingerprint if config.json has another",
    "training.json": "the record of a training: read for errors only",
}
"""Files that are read, but not in the fingerprint: why their content cannot change a score."""

NEUTRAL_OF_ADAPTER = {"training.json": NEUTRAL["training.json"]}
"""The same of an adapter."""

_CODE_SETTINGS = (CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_PRUNED = re.compile(r"\.|__pycache__$|checkpoint-\d+$|(original|onnx|openvino|coreml|runs|wandb)$")  # folders
_OTHER_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|ot|tflite|npz)$", re.I)
_DOCUMENTS = re.compile(r"\.(md|png|jpe?g|gif|svg|pdf|webp|ipynb)$|^(license|notice|\.git)", re.I)
_VERSION = re.compile(r"config\..+\.json")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})(?P<end>\.safetensors|\.bin)")
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")

_BLOCK = 1 << 24  # bytes per read: a thread that imports libraries delays each read by milliseconds
_READERS = 4  # threads that hash files
_SETTLED = 2_000_000_000  # nanoseconds after which a change of a file changes its time stamps


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files of a model's folder by purpose, as names relative to the folder with forward slashes."""

    folder: Path  # links resolved
    model: tuple[str, ...]  # weights, configuration and code, as in the digests of all versions
    more: tuple[str, ...] = ()  # further files of the model that a loader reads
    tokenizer: tuple[str, ...] = ()  # of the tokenizer and the processor, as in the digests of all versions
    more_tokenizer: tuple[str, ...] = ()
    neutral: tuple[str, ...] = ()  # read, but not in the fingerprint
    weights: tuple[str, ...] = ()  # files of `model` and `more` from which weights are loaded
    ends: tuple[int, ...] | None = None  # EOS of generation_config.json if config.json has another
    places: Mapping[str, Path] = field(default_factory=dict)  # name -> file, links resolved

    @property
    def hashed(self) -> tuple[str, ...]:
        """Names of the files in the fingerprint."""
        return tuple(dict.fromkeys((*self.model, *self.more, *self.tokenizer, *self.more_tokenizer)))

    def model_digest(self) -> str:
        """SHA-256 of weights, configuration and code."""
        generation = [f"{GENERATION} eos_token_id {list(self.ends)}"] if self.ends is not None else []
        return self._digest(self.model, self.more, generation)

    def earlier_digest(self) -> str:
        """`model_digest` as versions before 1.0 computed it; the same unless `more` or `ends` is given."""
        return self._digest(self.model, (), ())

    def tokenizer_digest(self) -> str:
        """SHA-256 of the files of the tokenizer and the processor."""
        return self._digest(self.tokenizer, self.more_tokenizer, ())

    def marks(self) -> dict[str, tuple[int, ...]]:
        """Size, time stamps and inode of each file of the fingerprint, which differ if it was changed or replaced."""
        return {name: _identity(self.places[name])[1:] for name in self.hashed}

    def configurations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and content of config.json, and of its forms for other versions of transformers."""
        for name in (*self.model, *self.more):
            if name == CONFIG or _VERSION.fullmatch(name):
                yield name, _settings(self.places[name])

    def _digest(self, names: Sequence[str], more: Sequence[str], lines: Sequence[str]) -> str:
        paths = [self.places[name] for name in (*names, *more)]
        digests = dict(zip((*names, *more), _digests(paths), strict=True))
        whole = hashlib.sha256()
        for name in names:
            whole.update(f"{PurePosixPath(name).name} {digests[name]}\n".encode())
        if not more and not lines:
            return whole.hexdigest()
        further = "".join(f"{name} {digests[name]}\n" for name in more) + "".join(f"{line}\n" for line in lines)
        return hashlib.sha256(f"{whole.hexdigest()}\n{further}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the configuration of a model allows."""

    what: str  # the model or adapter, as the start of messages
    pickles: bool = False  # weights that are pickles
    code: bool = False  # code that ships with the model
    partial: bool = False  # weights may be missing: they are not downloaded yet


def find_model_files(folder: Path, allowed: Allowed) -> FolderFiles:
    """The files that loaders read of a model's folder.

    Args:
        folder: folder of the model; may be a link.
        allowed: permissions of the configuration.

    Raises:
        UserError: a file names one outside of the folder, a pickle or another repository, or is a link that leads
            elsewhere; or files contradict each other.
    """
    return _Chooser(Path(os.path.realpath(folder)), allowed).chosen()


def gguf_files(folder: Path, name: str) -> FolderFiles:
    """The files that loaders read of a GGUF model: the file alone, whatever is beside it."""
    place = Path(os.path.realpath(folder / name))
    here = PurePosixPath(name).name
    return FolderFiles(place.parent, (here,), tokenizer=(here,), weights=(here,), places={here: place})


def adapter_files(folder: Path, shown: str) -> FolderFiles:
    """The files that peft reads of an adapter, and those of a tokenizer beside it.

    Raises:
        UserError: a file is a link that leads elsewhere, or names one.
    """
    chooser = _Chooser(Path(os.path.realpath(folder)), Allowed(f"adapter {shown}"))
    names = chooser.matching(*ADAPTER_FILES)
    places = {name: chooser.place(name, weights=name != ADAPTER_CONFIG) for name in names}
    tokenizer, neutral = chooser.matching(*TOKENIZER_FILES), chooser.matching(*NEUTRAL_OF_ADAPTER)
    places |= {name: chooser.place(name) for name in (*tokenizer, *neutral)}
    chooser.refuse_paths(chooser.settings("tokenizer_config.json"), "tokenizer_config.json", places.values())
    weights = tuple(name for name in names if name != ADAPTER_CONFIG)
    return FolderFiles(chooser.folder, names, tokenizer=tokenizer, neutral=neutral, weights=weights, places=places)


class _Chooser:
    """Chooses the files of one folder."""

    def __init__(self, folder: Path, allowed: Allowed) -> None:
        self.folder = folder
        self.allowed = allowed
        self.is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
        self.blobs = Path(os.path.realpath(folder.parent.parent / "blobs"))  # of the same entry of the hub's cache

    def chosen(self) -> FolderFiles:
        """The files of the folder.

        Raises:
            UserError: as `find_model_files`.
        """
        config = self.settings(CONFIG)
        tokenizer = self.settings("tokenizer_config.json")
        pool = self.matching(SAFE) or (self.matching(*PICKLES) if self.allowed.pickles else ())
        weights, index = self.weights(config, pool)
        code = self.matching("*.py") if self.allowed.code else ()
        model = _by_name((*pool, *self.matching(CONFIG), *code))
        templates = self.matching(f"{TEMPLATES}/*.jinja")
        more = [*weights, *self.versioned(config, "configuration_files", "config")]
        for name in more[len(weights) :]:
            if {"transformers_weights", "auto_map"} & self.settings(name).keys():
                raise self.error(f"{name} names weights or code (transformers_weights, auto_map); only {CONFIG} may")
        vocabulary = [*self.matching(*RARE_TOKENIZER_FILES), *templates, *self.bartpho(tokenizer)]
        vocabulary += [*self.versioned(tokenizer, "fast_tokenizer_files", "tokenizer"), *self.videos()]
        known = self.matching(*TOKENIZER_FILES)
        neutral = list(self.matching(GENERATION))
        if index is not None:
            (neutral if index in NEUTRAL and set(weights) == _implied(pool) else more).append(index)
        if self.allowed.code and self.has_code():
            neutral = [name for name in neutral if name != GENERATION]
            more += self.others({*model, *more, *known, *vocabulary, *neutral})
        more = [name for name in dict.fromkeys(more) if name not in model]
        names = (*model, *more, *known, *vocabulary, *neutral)
        places = {name: self.place(name, weights=name in weights or name in pool) for name in names}
        ends = self.ends(config) if GENERATION in neutral else None
        self.refuse_paths(tokenizer, "tokenizer_config.json", places.values())
        if self.settings("processor_config.json").get("audio_tokenizer"):
            raise self.error("processor_config.json names another model (audio_tokenizer), which is not read here")
        kinds = (tuple(sorted(set(more))), known, tuple(sorted(set(vocabulary) - set(known))), tuple(neutral))
        return FolderFiles(self.folder, model, *kinds, weights, ends, places)

    def matching(self, *patterns: str) -> tuple[str, ...]:
        """Names of the files that match any of the patterns, sorted."""
        paths = {path for pattern in patterns for path in self.folder.glob(pattern) if path.is_file()}
        return tuple(path.relative_to(self.folder).as_posix() for path in sorted(paths))

    def settings(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of the folder; empty if it is missing or damaged, which its loader reports.

        Raises:
            UserError: as `place`.
        """
        return _settings(self.place(name)) if (self.folder / name).is_file() else {}

    # --- weights

    def weights(self, config: Mapping[str, Any], pool: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
        """The files from which weights are loaded, in the order of preference of transformers, and their index."""
        explicit = config.get("transformers_weights")
        for key, part in config.items():
            if isinstance(part, dict) and part.get("transformers_weights") not in (None, explicit):
                raise self.error(f"{CONFIG} has transformers_weights in {key}; only the one at its top is read")
        if any(_DISTRIBUTED.fullmatch(name) for name in pool):
            return tuple(pool), None
        if explicit is not None:
            return self.named_by(explicit, f"{CONFIG} (transformers_weights)")
        forms = ["model.safetensors", "model.safetensors.index.json"]
        forms += ["pytorch_model.bin", "pytorch_model.bin.index.json"] if self.allowed.pickles else []
        for name in forms:
            if (self.folder / name).is_file():
                return self.named_by(name, CONFIG)
        return tuple(pool), None  # the loader finds none of them

    def named_by(self, name: Any, origin: str) -> tuple[tuple[str, ...], str | None]:
        """The weights behind a name: a file, or the shards of an index."""
        name = self.checked(name, origin)
        if not name.endswith(".index.json"):
            self.refuse_pickle(name, origin)
            return self.existing((name,), origin), None
        path = self.place(name)
        shards = _shards(path, *_identity(path)[1:])
        if shards is None:
            raise self.error(f"{name} is no index of weights: it has no weight_map")
        names = tuple(sorted({self.checked(shard, name) for shard in shards}))
        for shard in names:
            self.refuse_pickle(shard, name)
        return self.existing(names, name), name

    def existing(self, names: Sequence[str], origin: str) -> tuple[str, ...]:
        """The names that exist.

        Raises:
            UserError: one is missing, unless weights may be missing.
        """
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing and not self.allowed.partial:
            raise self.error(f"{origin} names {_quoted(missing[0])}, which is not a file in its folder")
        return tuple(name for name in names if name not in missing)

    def refuse_pickle(self, name: str, origin: str) -> None:
        """Refuse a file of weights that is a pickle, unless pickles are allowed."""
        if not name.endswith(".safetensors") and not self.allowed.pickles:
            raise self.error(
                f"{origin} names {_quoted(name)}, which is not a safetensors file: a pickle can run code; use a "
                "safetensors copy, or set allow_pickle: true if you trust it"
            )

    # --- configurations and code

    def versioned(self, settings: Mapping[str, Any], key: str, stem: str) -> list[str]:
        """Files for certain versions of transformers, such as tokenizer.4.0.0.json, that a configuration lists."""
        listed = settings.get(key) or ()
        origin = f"{CONFIG if stem == 'config' else 'tokenizer_config.json'} ({key})"
        names = [self.checked(name, origin) for name in listed if isinstance(name, str)]
        return [name for name in names if re.search(rf"{stem}\..*\.json", name) and (self.folder / name).is_file()]

    def bartpho(self, tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
        """The vocabulary of BARTpho, whose name other models give to a file that is not read."""
        return self.matching("dict.txt") if "bartpho" in str(tokenizer.get("tokenizer_class")).lower() else ()

    def videos(self) -> tuple[str, ...]:
        """The settings of videos, which name the class of a processor that has no other settings."""
        others = self.matching("processor_config.json", "preprocessor_config.json")
        return () if others else self.matching("video_preprocessor_config.json")

    def has_code(self) -> bool:
        """Whether code of the folder is run. Checks the files that are named.

        Raises:
            UserError: the code is outside of the folder.
        """
        runs = (self.folder / "custom_generate").is_dir()
        for name in _CODE_SETTINGS:
            entries = self.settings(name).get("auto_map")
            for reference in _strings(entries):
                runs = True
                if "--" in reference:
                    repository = reference.partition("--")[0]
                    raise self.error(
                        f"{name} runs code of another repository, {_quoted(repository)}, which its fingerprint does "
                        "not cover; copy its *.py files into the folder, and remove "
                        f"{_quoted(repository + '--')} from auto_map"
                    )
                self.checked(reference.partition(".")[0] + ".py", f"{name} (auto_map)")
        return runs

    def others(self, known: Collection[str]) -> list[str]:
        """All other files that code of the folder might read; weights and documents are left out."""
        names = []
        for place, folders, files in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not _PRUNED.match(name))
            for file in sorted(files):
                name = Path(place, file).relative_to(self.folder).as_posix()
                if name not in known and not _OTHER_WEIGHTS.search(file) and not _DOCUMENTS.search(file):
                    names += [name] if Path(place, file).is_file() else []
        return names

    def ends(self, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The EOS of generation_config.json if config.json has another."""
        text = config.get("text_config")
        stated = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        wanted = self.settings(GENERATION).get("eos_token_id")
        return None if _ids(wanted) == _ids(stated) else _ids(wanted)

    # --- names and links

    def checked(self, name: Any, origin: str) -> str:
        """A name that a file gives, if it is inside of the folder by its letters.

        Raises:
            UserError: it is not.
        """
        if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
            raise self.error(f"{origin} names {_quoted(name)}, which is not a name of a file")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name):
            raise self.error(f"{origin} names {_quoted(name)}, which is outside of its folder")
        return path.as_posix()

    def place(self, name: str, weights: bool = False) -> Path:
        """The file behind a name, links resolved.

        Raises:
            UserError: a link leads out of the folder. Weights of a local folder may be elsewhere.
        """
        path = Path(os.path.realpath(self.folder / name))
        inside = path.is_relative_to(self.folder) or (self.is_snapshot and path.is_relative_to(self.blobs))
        if inside or (weights and not self.is_snapshot):
            return path
        what = "a file of the same entry of the hub's cache" if self.is_snapshot else "a file of the folder"
        raise self.error(f"{name} is a link to {_quoted(str(path))}, not to {what}; replace the link by a copy")

    def refuse_paths(self, settings: Mapping[str, Any], name: str, allowed: Iterable[Path]) -> None:
        """Refuse settings of a tokenizer that name an existing file which is not one of the chosen ones."""
        for key, value in settings.items():
            if key in _IGNORED_PATHS or not (key in _PATHS or key.endswith(("_file", "_spm")) or key == "init_inputs"):
                continue
            for path in _strings(value):
                if _is_file(path) and Path(os.path.realpath(path)) not in {*allowed}:
                    raise self.error(f"{name} names the file {_quoted(path)} ({key}), which is outside of its folder")

    def error(self, message: str) -> UserError:
        return UserError(f"{self.allowed.what}: {message}")


_PATHS = ("vocab", "merges", "gguf_file", "tokenizer_object")
_IGNORED_PATHS = (
    "tokenizer_file", "special_tokens_map_file", "added_tokens_file", "tokenizer_config_file", "chat_template_file",
)  # fmt: skip
"""Settings of a tokenizer that may be paths of the machine which wrote it: the loader replaces or ignores them."""


def _settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@lru_cache(maxsize=16)
def _shards(path: Path, *identity: int) -> tuple[Any, ...] | None:
    """The files that an index names, each once; None if it is no index. Cached for a file that is not changed."""
    index = _settings(path)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata", {}), dict):
        return None
    return tuple({str(place): place for place in places.values()}.values())


def _by_name(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(names)))


def _implied(pool: Collection[str]) -> set[str]:
    """The shards that the names of weights imply: the only complete set `STEM-0000i-of-0000n`, else all of them."""
    sets: dict[tuple[str, str, str], set[str]] = {}
    for name in pool:
        if match := _SHARD.fullmatch(name):
            sets.setdefault((match["stem"], match["total"], match["end"]), set()).add(name)
    whole = [names for (_, total, _), names in sets.items() if len(names) == int(total)]
    return whole[0] if len(whole) == 1 else set(pool)


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids of a setting, sorted; empty for none."""
    values = value if isinstance(value, list) else [value]
    return tuple(sorted({one for one in values if isinstance(one, int)}))


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    waiting = [value]
    while waiting:  # not by recursion: a file may nest its objects deeply
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)


def _is_file(path: str) -> bool:
    try:
        return os.path.isfile(path)
    except ValueError:  # a NUL
        return False


def _quoted(value: Any) -> str:
    text = visible(str(value))
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


# --- digests


def _identity(path: Path) -> tuple[str, int, int, int, int]:
    """What changes if a file is changed or replaced: path, size, time of change, time of change of its inode, inode."""
    facts = path.stat()
    return str(path), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


_digest_lock = threading.Lock()
_known_digests: dict[tuple[str, int, int, int, int], str] = {}


def file_digest(path: Path) -> str:
    """Hexadecimal SHA-256 of the content of a file."""
    content = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            content.update(block)
    return content.hexdigest()


def known_digest(path: Path) -> str:
    """`file_digest`, once per process for a file that is not changed."""
    path = Path(os.path.realpath(path))
    identity = _identity(path)
    with _digest_lock:
        digest = _known_digests.get(identity)
    if digest is None:
        digest = file_digest(path)
        settled = time.time_ns() - max(identity[2:4]) > _SETTLED  # else a further change may keep the time stamps
        if settled and _identity(path) == identity:
            with _digest_lock:
                _known_digests[identity] = digest
    return digest


def _digests(paths: Sequence[Path]) -> list[str]:
    if len(paths) < 2:
        return [known_digest(path) for path in paths]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(known_digest, paths))


# --- folders of links


def process_folder() -> Path:
    """The temporary folder of this process; removed when the process ends."""
    return _root(os.getpid())


@cache
def _root(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="seenset-models-"))

    def remove() -> None:
        if os.getpid() == process:  # not a fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _link(place: str, link: Path) -> None:
    """Make a link; a hard one where the system permits no symbolic ones.

    Raises:
        OSError: it permits neither.
    """
    try:
        os.symlink(place, link)
    except OSError:
        os.link(place, link)


_link_lock = threading.Lock()


def linked(files: FolderFiles) -> Path:
    """A folder of links to the files, and to nothing else.

    It has the name of the original folder, by which transformers names modules of code.

    Raises:
        UserError: the folder for temporary files takes no links.
    """
    table = sorted((name, str(place)) for name, place in files.places.items())
    identity = hashlib.sha256(json.dumps([str(files.folder), table]).encode()).hexdigest()[:16]
    with _link_lock:
        folder = process_folder() / identity / (files.folder.name or "model")
        try:
            for name, place in table:
                link = folder / name
                if not os.path.lexists(link):
                    link.parent.mkdir(parents=True, exist_ok=True)
                    _link(place, link)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make links in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR") from error
    return folder
