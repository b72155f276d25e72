"""The allocation: known documents that train adapters or form prefixes, disjoint from those that calibrate.

Parts are drawn with the run's seed. Near-duplicates stay together: no calibration document has one in a part.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES, CorpusConfig, Role
from pipeline.config.models import as_model_config
from pipeline.config.training import AdapterConfig, FinetuneConfig
from pipeline.corpus.chats import Conversation
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.keys import Keys, keyed, sketch_column
from pipeline.corpus.near_duplicates import NearDuplicateIndex, draw_families, near_families
from pipeline.corpus.shard import Shard
from pipeline.detectors.base import Prefix
from pipeline.detectors.registry import needed_adapters, needed_prefixes, parse_detectors
from pipeline.errors import SettingError, UserError, nearest
from pipeline.models.load import check_model, open_empty
from pipeline.models.opened import embedding_rows, unknown_id
from pipeline.models.tokens import open_tokenizer, plain_ids, tokenize_each
from pipeline.plan.starter_text import AND_TO_CALIBRATE
from pipeline.run.manifest import AdapterRecord, Allocation
from pipeline.run.records import KEYS_FILE
from pipeline.run.scored import KEYS_SCHEMA
from pipeline.stages.chat_scoring import chat_settings
from pipeline.stages.prefixes import Prefixes, Shots, cut_to_room, given_ids, joined_ids
from pipeline.store.files import Store
from pipeline.training.adapter import check_targets
from pipeline.training.training_documents import TrainingDocument, training_documents

KNOWN: tuple[Role, ...] = tuple(role for role in ROLES if role != "audit")

OWN_CORPUS = "its own corpus"

_PART = 3  # the stream of random numbers that parts are drawn from


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The training documents and settings of one adapter."""

    settings: AdapterConfig
    training: FinetuneConfig
    documents: list[TrainingDocument]
    keys: Keys
    left_out: int = 0  # drawn documents of which nothing can be learnt

    def line(self, name: str) -> str:
        """How many of its documents the adapter with a name does not learn, and why."""
        drawn = self.left_out + len(self.documents)
        return (
            f"adapter {name}: {self.left_out:,} of its {drawn:,} documents are left out, of which nothing can be "
            f"learnt within max_tokens = {self.training.max_tokens:,}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The allocation of the known documents of a run."""

    adapters: dict[str, Part]  # by name
    calibration: dict[Role, np.ndarray]  # text keys of the documents without a near-duplicate in a part; int64
    shots: dict[Prefix, tuple[Shots, Keys]] = field(default_factory=dict)

    def taken(self) -> dict[str, Keys]:
        """The documents that do not calibrate, by the adapter or the prefix that holds them."""
        adapters = {name: part.keys for name, part in self.adapters.items()}
        return {**adapters, **{prefix.named: keys for prefix, (_, keys) in self.shots.items()}}

    def prefixes(self) -> Prefixes | None:
        """The prefixes of documents; None where no detector reads one."""
        return Prefixes({prefix: shots for prefix, (shots, _) in self.shots.items()}) if self.shots else None

    def keys(self) -> pa.Table:
        """The keys of all parts (`KEYS_SCHEMA`)."""
        tables = []
        for name, keys in self.taken().items():
            names = pa.array([name] * len(keys), pa.string())
            tables.append(pa.table([names, keys.text, sketch_column(keys.sketch)], schema=KEYS_SCHEMA))
        return pa.concat_tables(tables) if tables else KEYS_SCHEMA.empty_table()


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """The usable documents of one role or corpus, in the order of the files."""

    name: str  # corpus.unseen
    shards: tuple[Shard, ...]
    keys: Keys
    free: np.ndarray  # bool, (documents,): whether a document may be used for training


def check_adapters(config: AuditConfig, shards: Sequence[Shard]) -> None:
    """Check, without training, that every adapter and prefix of the detectors can be made.

    Known documents are read only for a prefix or for an adapter that is trained on a group.

    Raises:
        UserError: the model lacks a named layer; also the errors of `allocate`.
    """
    detectors = parse_detectors(config.detectors)
    settings = [config.fsd.adapter(name) for name in needed_adapters(detectors)]
    named = [adapter.target_modules for adapter in settings if adapter.target_modules is not None]
    if named and (model := open_empty(as_model_config(config.model))) is not None:
        for target_modules in named:
            check_targets(model, target_modules)
    if any(adapter.group is not None for adapter in settings) or needed_prefixes(detectors):
        allocate(config, shards)


def allocate(config: AuditConfig, shards: Sequence[Shard]) -> Parts:
    """Draw the part of every adapter and prefix that the detectors need.

    A part depends only on the documents, the seed and the settings of its adapter or prefix. With `overlap: drop`, no
    part has a near-duplicate of an audited document; all audited documents are read for this.

    Args:
        config: the audit's configuration.
        shards: the audit's shards.

    Raises:
        UserError: too few documents to split, an unknown group, or a bad file of an adapter's own corpus.
    """
    detectors = parse_detectors(config.detectors)
    names, prefixes = needed_adapters(detectors), needed_prefixes(detectors)
    if not names and not prefixes:
        return Parts({}, {})
    role_pools = {
        role: _read(f"corpus.{role}", [shard for shard in shards if shard.role == role])
        for role in KNOWN
        if config.corpus.source(role) is not None
    }
    tokenizer = open_tokenizer(as_model_config(config.model))
    adapter_settings = {name: config.fsd.adapter(name) for name in names}
    corpus_pools = {
        name: _own_corpus(config, settings, name) for name, settings in adapter_settings.items() if not settings.roles
    }
    if config.corpus.has_ids and (model := open_empty(as_model_config(config.model))) is not None:
        _free_of_unknown(role_pools.values(), embedding_rows(model))
    if config.overlap == "drop":
        _free_of_audited([*role_pools.values(), *corpus_pools.values()], shards, config.near_copies)
    read = _training_reader(config, tokenizer)
    adapters = {
        name: _part(config, name, [role_pools[role] for role in settings.roles] or [corpus_pools[name]], read)
        for name, settings in adapter_settings.items()
    }
    shots = {prefix: _shots(prefix, role_pools[prefix.role], tokenizer, config) for prefix in prefixes}
    parts = Parts(adapters, {}, shots)
    return replace(parts, calibration=_calibration(role_pools, parts.taken(), config.near_copies))


_Read = Callable[[Sequence[str | Conversation], int], list[TrainingDocument | Unreadable]]
"""What a training reads of documents, cut to a number of tokens; the reason where it learns nothing."""


def _training_reader(config: AuditConfig, tokenizer: Any) -> _Read:
    """The reader of the training documents of an audit: what it scores of chats is what adapters learn of them."""
    if not config.corpus.has_chats:
        return lambda documents, cut: training_documents(tokenizer, documents, None, cut)
    chat = chat_settings(config, parse_detectors(config.detectors))
    positions = check_model(as_model_config(config.model))["max_tokens"] or sys.maxsize
    return lambda documents, cut: training_documents(tokenizer, documents, chat, min(cut, positions))


def _part(config: AuditConfig, name: str, pools: Sequence[_Pool], read: _Read) -> Part:
    """The documents that an adapter takes from pools, without those of which it would learn nothing.

    Raises:
        UserError: as `allocate`.
    """
    settings = config.fsd.adapter(name)
    drawn = [_draw(pool, settings, place, name, config) for place, pool in enumerate(pools)]
    chosen = [document for pool, places in zip(pools, drawn, strict=True) for document in _taken(pool, places)]
    made = read([document.chat or document.text for document in chosen], min(config.max_tokens, settings.max_tokens))
    kept = [document for document in made if not isinstance(document, Unreadable)]
    if not kept:
        faults = Counter(document.message for document in made if isinstance(document, Unreadable))
        raise UserError(
            f"fsd adapter {name} learns from none of its {len(made)} documents: {faults.most_common(1)[0][0]}"
        )
    usable = np.array([not isinstance(document, Unreadable) for document in made], dtype=bool)
    keys = Keys.joined(pool.keys.take(places) for pool, places in zip(pools, drawn, strict=True)).take(usable)
    return Part(settings, settings.training(config.max_tokens, len(kept)), kept, keys, len(made) - len(kept))


def allocation_record(parts: Parts, keys: Mapping[str, str]) -> Allocation:
    """The manifest's record: the documents that each adapter is trained on and those that calibrate, by hash."""
    if not parts.taken():
        return Allocation()
    adapters = {
        name: AdapterRecord(
            folder=f"adapters/{keys[name]}",
            training=part.training,
            train_on=list(part.settings.roles) or [OWN_CORPUS],
            documents=hashes(part.keys.text),
        )
        for name, part in parts.adapters.items()
    }
    calibration = {role: hashes(text_keys) for role, text_keys in parts.calibration.items()}
    shots = {str(prefix): hashes(keys.text) for prefix, (_, keys) in parts.shots.items()}
    return Allocation(adapters=adapters, shots=shots, calibration=calibration)


def write_document_keys(parts: Parts, store: Store) -> None:
    """Write the keys of the documents that adapters are trained on; selection leaves these out of calibration."""
    store.keeping().write_table(KEYS_FILE, parts.keys())


def hashes(keys: np.ndarray) -> list[str]:
    """Keys of texts as listed in the manifest: 16 hexadecimal digits of BLAKE2b over the normalised text."""
    return [f"{key:016x}" for key in keys.astype(np.int64).view(np.uint64).tolist()]


def _calibration(
    role_pools: dict[Role, _Pool], parts: Mapping[str, Keys], near_copies: float
) -> dict[Role, np.ndarray]:
    taken = NearDuplicateIndex.of(np.concatenate([keys.sketch for keys in parts.values()]), near_copies)
    remaining = {role: pool.keys.text[~taken.matches(pool.keys.sketch)] for role, pool in role_pools.items()}
    listed = " and ".join(name if name.startswith("prefix ") else f"fsd adapter {name}" for name in parts)
    for role, keys in remaining.items():
        if not keys.size:
            raise UserError(
                f"{listed} leave none of corpus.{role}'s {len(role_pools[role].keys)} documents to calibrate "
                "on: fine-tune on fewer, or set fewer shots"
            )
    return remaining


def _draw(pool: _Pool, settings: AdapterConfig, place: int, name: str, config: AuditConfig) -> np.ndarray:
    """Positions of the documents that an adapter takes from the pool at a place of its roles, ascending."""
    allowed, restriction = pool.free, ""
    if settings.group is not None:
        restriction = f" of group {settings.group!r}"
        groups = np.array(pool.keys.group.to_pylist(), dtype=object)
        allowed = allowed & (groups == settings.group)
        if not allowed.any():
            group_names = sorted(set(pool.keys.group.drop_null().to_pylist()))
            if not group_names:
                raise UserError(f"fsd adapter {name}: group {settings.group!r} needs {pool.name}.group, a column")
            raise UserError(
                f"fsd adapter {name}: no document of group {settings.group!r} in {pool.name}; "
                f"{nearest(settings.group, group_names[:20])}"
            )
    available = int(allowed.sum())
    count = settings.count(available, place)
    reserve = 1 if settings.corpus is None else 0
    if count + reserve > available:
        raise too_few(name, pool.name, available, count, reserve, restriction)
    return _drawn(pool, allowed, count, f"fsd adapter {name}", config)


def _drawn(pool: _Pool, allowed: np.ndarray, count: int, name: str, config: AuditConfig) -> np.ndarray:
    """Ascending positions of `count` random allowed documents of a pool, in whole families."""
    family = near_families(pool.keys.sketch, config.near_copies)
    chosen = draw_families(allowed, family, count, np.random.default_rng([config.seed, _PART]))
    if not chosen.any():
        raise UserError(
            f"{name}: near-duplicates among the documents of {pool.name} must stay together, and they are never as few "
            f"as {count}"
        )
    return np.flatnonzero(chosen)


def _shots(prefix: Prefix, pool: _Pool, tokenizer: Any, config: AuditConfig) -> tuple[Shots, Keys]:
    """The shots or counted documents of a prefix, drawn as for adapters: smaller parts are subsets of larger ones."""
    available = int(pool.free.sum())
    if prefix.shots + 1 > available:
        raise too_few_shots(prefix, available)
    chosen = _drawn(pool, pool.free, prefix.shots, prefix.named, config)
    texts, keys = [document.text for document in _taken(pool, chosen)], pool.keys.take(chosen)
    if config.corpus.has_ids:
        sequences, bare = given_ids(texts, tokenizer.bos_token_id, prefix.joined)
    else:
        refused = np.array([entry.truncated and not entry.ids for entry in tokenize_each(tokenizer, texts, 1)])
        if refused.any():
            pool.free[chosen[refused]] = False
            return _shots(prefix, pool, tokenizer, config)
        sequences = [joined_ids(tokenizer, some) for some in ([texts] if prefix.joined else [[text] for text in texts])]
        bare = [plain_ids(tokenizer, text) for text in texts] if prefix.counted else []
    if prefix.counted:
        return Shots(tuple(ids[: config.max_tokens] for ids in bare), keys.sketch, config.near_copies), keys
    positions = check_model(as_model_config(config.model))["max_tokens"]
    cut = tuple(cut_to_room(ids, config.max_tokens, positions) for ids in sequences)
    return Shots(cut, keys.sketch, config.near_copies), keys


def too_few_shots(prefix: Prefix, available: int) -> UserError:
    """The error for a prefix with too few documents; at least one must remain for calibration."""
    argument = "documents" if prefix.counted else "shots"
    return UserError(
        f"{prefix.named}: corpus.{prefix.role} has {available} documents, {prefix.shots} {argument} need "
        f"{prefix.shots + 1}{AND_TO_CALIBRATE}; set {argument} to at most {max(0, available - 1)}"
    )


def too_few(name: str, source: str, available: int, count: int, reserve: int, restriction: str = "") -> UserError:
    """The error for an adapter with too few documents; `reserve` documents must remain for calibration."""
    return UserError(
        f"fsd adapter {name}: {source} has {available} documents{restriction}, "
        f"fine-tuning on {count} needs {count + reserve}{AND_TO_CALIBRATE if reserve else ''}"
    )


def adapter_corpus_shards(config: AuditConfig, settings: AdapterConfig, name: str) -> list[Shard]:
    """The shards of an adapter's own corpus.

    Raises:
        UserError: no such file, column or kind of file.
    """
    assert settings.corpus is not None
    corpus = CorpusConfig(audit=settings.corpus)
    try:
        inputs = find_inputs(corpus, config.limits)
        return plan_shards(corpus, inputs, config.resources, config.text_transform, limits=config.limits)
    except SettingError as error:
        raise SettingError(_setting_name(config, name), error.fault, error.offer) from None
    except UserError as error:
        raise UserError(f"{_setting_name(config, name)}: {error}") from None


def _setting_name(config: AuditConfig, name: str) -> str:
    return f"fsd.adapters.{name}.corpus" if name in config.fsd.adapters else "fsd.corpus"


def _own_corpus(config: AuditConfig, settings: AdapterConfig, name: str) -> _Pool:
    shards, where = adapter_corpus_shards(config, settings, name), _setting_name(config, name)
    try:
        return _read(where, shards)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _read(name: str, shards: Sequence[Shard]) -> _Pool:
    shards = tuple(shards)
    keys = Keys.joined(part for _, part in keyed(_documents(shards)))
    return _Pool(name, shards, keys, np.ones(len(keys), dtype=bool))


def _free_of_audited(pools: Sequence[_Pool], shards: Sequence[Shard], near_copies: float) -> None:
    """Exclude near-duplicates of audited documents. Memory grows with the pools only."""
    indexes = [NearDuplicateIndex.of(pool.keys.sketch, near_copies) for pool in pools]
    for _, audited in keyed(_documents([shard for shard in shards if shard.role == "audit"])):
        for pool, index in zip(pools, indexes, strict=True):
            pool.free[index.documents(index.near(audited.sketch)[1])] = False


def _free_of_unknown(pools: Iterable[_Pool], rows: int) -> None:
    """Exclude documents with a token id that the model does not know; scoring puts them into quarantine."""
    for pool in pools:
        for place, document in enumerate(_documents(pool.shards)):
            pool.free[place] = unknown_id(list(map(int, document.text.split())), rows) is None


def _documents(shards: Sequence[Shard]) -> Iterator[Document]:
    """The documents without a problem."""
    for shard in shards:
        yield from (document for document in read_shard(shard) if document.problem is None)


def _taken(pool: _Pool, chosen: np.ndarray) -> Iterator[Document]:
    positions = set(chosen.tolist())
    return (document for position, document in enumerate(_documents(pool.shards)) if position in positions)
