"""The allocation: which known documents the adapters of a run are trained on, and which calibrate, never both.

Parts are drawn at random by the run's seed. Documents that share their first 8 normalised words stay together, because
corpora hold the same article cut to several lengths; but for beginnings that many texts share
(`families.common_beginnings`), which are headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.audit.manifest import AdapterRecord, Allocation
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import ROLES, CorpusConfig, Role
from pipeline.config.models import weights_of
from pipeline.config.training import AdapterConfig, FinetuneConfig
from pipeline.corpus.documents import Document, read_shard, text_keys
from pipeline.corpus.families import common_beginnings, draw_families, families, family_keys
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.shard import Shard
from pipeline.corpus.shards import plan_shards
from pipeline.detectors.registry import adapters_of, parse_detectors
from pipeline.errors import UserError, nearest
from pipeline.models.tokens import open_tokenizer, tokenize
from pipeline.store.files import Store
from pipeline.training.adapter import adapter_key


def adapter_folders(parts: Parts, base: Mapping[str, str]) -> dict[str, str]:
    """Adapter name -> its folder under adapters/, a digest of its texts, its settings and the base model."""
    return {name: adapter_key(base, part.training, part.texts) for name, part in parts.adapters.items()}


def allocation_record(parts: Parts, keys: Mapping[str, str]) -> Allocation:
    """The manifest's record: the documents that each adapter is trained on and those that calibrate, by hash."""
    if not parts.adapters:
        return Allocation()
    adapters = {
        name: AdapterRecord(
            folder=f"adapters/{keys[name]}",
            training=part.training,
            train_on=list(part.settings.roles) or [OWN_CORPUS],
            documents=hashes(part.text_key),
        )
        for name, part in parts.adapters.items()
    }
    calibration = {role: hashes(text_keys) for role, text_keys in parts.calibration.items()}
    return Allocation(adapters=adapters, calibration=calibration)


def write_document_keys(parts: Parts, store: Store) -> None:
    """Write the keys of the documents that adapters are trained on; selection leaves these out of calibration."""
    store.write_table(KEYS_FILE, parts.keys())


KNOWN: tuple[Role, ...] = tuple(role for role in ROLES if role != "audit")

KEYS_FILE = "adapters/documents.parquet"
"""File of a run directory with the keys of the documents that adapters were trained on."""

KEYS_SCHEMA = pa.schema([("adapter", pa.string()), ("text_key", pa.int64()), ("prefix_key", pa.int64())])
"""Columns of that file; `prefix_key` is null where many texts begin so."""

OWN_CORPUS = "its own corpus"

_PART = 3  # the stream of random numbers that parts are drawn from


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The documents that one adapter is trained on, and how."""

    settings: AdapterConfig
    training: FinetuneConfig
    texts: list[str]
    text_key: np.ndarray  # int64, (documents,)
    prefix_key: np.ndarray  # int64, (documents,)
    header: np.ndarray  # bool, (documents,): begins with what many texts begin with


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The allocation of the known documents of a run."""

    adapters: dict[str, Part]  # by name
    calibration: dict[Role, np.ndarray]  # text keys of the documents that are not `trained_on`; int64

    def keys(self) -> pa.Table:
        """The keys of all parts (`KEYS_SCHEMA`)."""
        tables = []
        for name, part in self.adapters.items():
            names = pa.array([name] * part.text_key.size, pa.string())
            prefixes = pa.array(part.prefix_key, pa.int64(), mask=part.header)
            tables.append(pa.table([names, part.text_key, prefixes], schema=KEYS_SCHEMA))
        return pa.concat_tables(tables) if tables else KEYS_SCHEMA.empty_table()


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """The usable documents of one role or corpus, in the order of the files."""

    name: str  # corpus.unseen
    shards: tuple[Shard, ...]
    text_key: np.ndarray  # int64, (documents,)
    prefix_key: np.ndarray  # int64, (documents,)
    groups: list[str | None]
    free: np.ndarray  # bool, (documents,), that may be trained on
    header: np.ndarray  # bool, (documents,): begins with what many texts begin with

    def note_headers(self, common: np.ndarray) -> None:
        """Mark the documents with one of these beginnings."""
        self.header[np.isin(self.prefix_key, common)] = True


def allocate(config: AuditConfig, shards: Sequence[Shard]) -> Parts:
    """Draw the part of every adapter that the detectors need.

    The same documents, seed and settings of an adapter give the same part, whatever other adapters there are. With
    `overlap: drop` no part has a document that is audited too, for which all audited documents are read here.

    Args:
        config: of the audit.
        shards: of the audit.

    Raises:
        UserError: too few documents to split, an unknown group, or a bad file of an adapter's own corpus.
    """
    names = adapters_of(parse_detectors(config.detectors))
    if not names:
        return Parts({}, {})
    role_pools = {
        role: _read(f"corpus.{role}", [shard for shard in shards if shard.role == role])
        for role in KNOWN
        if config.corpus.source(role) is not None
    }
    tokenizer = open_tokenizer(weights_of(config.model))
    adapter_settings = {name: config.fsd.adapter(name) for name in names}
    corpus_pools = {
        name: _own_corpus(config, settings, name) for name, settings in adapter_settings.items() if not settings.roles
    }
    _note_headers(list(role_pools.values()), list(corpus_pools.values()))
    if config.overlap == "drop":
        _free_of_audited([*role_pools.values(), *corpus_pools.values()], shards)
    adapters: dict[str, Part] = {}
    for name, settings in adapter_settings.items():
        pools = [role_pools[role] for role in settings.roles] or [corpus_pools[name]]
        drawn = [_draw(pool, settings, place, name, config.seed) for place, pool in enumerate(pools)]
        cut = min(config.max_tokens, settings.max_tokens)
        texts = [text for pool, chosen in zip(pools, drawn, strict=True) for text in _texts(pool, chosen)]
        tokens = tokenize(tokenizer, texts, cut)
        long_enough = np.array([len(entry.ids) > 1 for entry in tokens], dtype=bool)
        texts = [text for text, usable in zip(texts, long_enough, strict=True) if usable]
        if not texts:
            raise UserError(f"fsd adapter {name}: none of its documents has 2 tokens, which training needs")
        keys = [
            np.concatenate([getattr(pool, key)[chosen] for pool, chosen in zip(pools, drawn, strict=True)])[long_enough]
            for key in ("text_key", "prefix_key", "header")
        ]
        adapters[name] = Part(settings, settings.training(config.max_tokens, len(texts)), texts, *keys)
    return Parts(adapters, _calibration(role_pools, adapters))


def trained_on(text_key: np.ndarray, prefix_key: np.ndarray, keys: pa.Table) -> np.ndarray:
    """Which documents share their text or their first 8 words with a document that an adapter was trained on.

    What calibrates must not be like what was trained on: training lowers the deviation of a text, and with it that of
    a longer, shorter or edited version; null documents would then stand out from a calibration that is too low. So
    here, unlike between calibration and audit, an equal beginning is enough. It costs at most a few documents, because
    beginnings that many texts share do not count: an adapter learns a header alike for all that have it.

    Args:
        text_key: int64, (documents,).
        prefix_key: int64, (documents,).
        keys: of the parts (`KEYS_SCHEMA`).

    Returns:
        bool, (documents,).
    """
    return np.asarray(trained_text(text_key, keys) | np.isin(prefix_key, _beginnings(keys)))


def trained_text(text_key: np.ndarray, keys: pa.Table) -> np.ndarray:
    """Which documents have the text of one that an adapter was trained on: bool, (documents,)."""
    return np.asarray(np.isin(text_key, keys["text_key"].to_numpy()))


def trained_beginning(text_key: np.ndarray, prefix_key: np.ndarray, keys: pa.Table) -> np.ndarray:
    """Which documents only begin like one that an adapter was trained on: bool, (documents,)."""
    return np.asarray(np.isin(prefix_key, _beginnings(keys)) & ~trained_text(text_key, keys))


def _beginnings(keys: pa.Table) -> np.ndarray:
    return np.asarray(keys["prefix_key"].drop_null().to_numpy())


def hashes(keys: np.ndarray) -> list[str]:
    """Keys of texts as the manifest lists them: 16 hexadecimal digits of BLAKE2b over the normalised text."""
    return [f"{key:016x}" for key in keys.astype(np.int64).view(np.uint64).tolist()]


def _calibration(role_pools: dict[Role, _Pool], adapters: dict[str, Part]) -> dict[Role, np.ndarray]:
    taken = Parts(adapters, {}).keys()
    remaining = {
        role: pool.text_key[~trained_on(pool.text_key, pool.prefix_key, taken)] for role, pool in role_pools.items()
    }
    for role, keys in remaining.items():
        if not keys.size:
            raise UserError(
                f"the fsd adapters {', '.join(adapters)} leave none of corpus.{role}'s "
                f"{role_pools[role].text_key.size} documents to calibrate on: fine-tune on fewer"
            )
    return remaining


def _draw(pool: _Pool, settings: AdapterConfig, place: int, name: str, seed: int) -> np.ndarray:
    """Positions of the documents that an adapter takes from the pool at a place of its roles, ascending."""
    allowed, restriction = pool.free, ""
    if settings.group is not None:
        restriction = f" of group {settings.group!r}"
        allowed = allowed & np.array([group == settings.group for group in pool.groups], dtype=bool)
        if not allowed.any():
            group_names = sorted({group for group in pool.groups if group is not None})
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
    family = families(family_keys(pool.text_key, pool.prefix_key, pool.header))
    chosen = draw_families(allowed, family, count, np.random.default_rng([seed, _PART]))
    if not chosen.any():
        raise UserError(
            f"fsd adapter {name}: documents of {pool.name} that begin with the same 8 words must stay together, and "
            f"they are never as few as {count}"
        )
    return np.flatnonzero(chosen)


def too_few(name: str, source: str, available: int, count: int, reserve: int, restriction: str = "") -> UserError:
    """The error of an adapter for which there are too few documents; `reserve` documents must be left to calibrate."""
    tail = ", so that at least one is left to calibrate on" if reserve else ""
    return UserError(
        f"fsd adapter {name}: {source} has {available} documents{restriction}, "
        f"fine-tuning on {count} needs {count + reserve}{tail}"
    )


def adapter_corpus_shards(config: AuditConfig, settings: AdapterConfig, name: str) -> list[Shard]:
    """The shards of an adapter's own corpus.

    Raises:
        UserError: no such file, column or kind of file.
    """
    assert settings.corpus is not None
    corpus = CorpusConfig(audit=settings.corpus)
    try:
        return plan_shards(corpus, find_inputs(corpus), config.resources, config.text_transform)
    except UserError as error:
        raise UserError(f"{_setting_name(config, name)}: {str(error).removeprefix('corpus.audit: ')}") from None


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
    keys: list[tuple[int, int]] = []
    groups: list[str | None] = []
    for document in _documents(shards):
        keys.append(text_keys(document.text))
        groups.append(document.group)
    key_table = np.array(keys, dtype=np.int64).reshape(-1, 2)
    free, header = np.ones(len(key_table), dtype=bool), np.zeros(len(key_table), dtype=bool)
    return _Pool(name, shards, key_table[:, 0].copy(), key_table[:, 1].copy(), groups, free, header)


def _note_headers(roles: Sequence[_Pool], corpora: Sequence[_Pool]) -> None:
    """Mark what begins as many texts do: of all known roles for every pool, of an adapter's corpus for it alone.

    So another adapter, with a corpus of its own, moves no document.
    """
    common = common_beginnings(*(_all_of(roles, key) for key in ("text_key", "prefix_key")))
    for pool in (*roles, *corpora):
        pool.note_headers(common)
    for pool in corpora:
        pool.note_headers(common_beginnings(pool.text_key, pool.prefix_key))


def _all_of(pools: Sequence[_Pool], key: str) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.int64), *(getattr(pool, key) for pool in pools)])


def _free_of_audited(pools: Sequence[_Pool], shards: Sequence[Shard]) -> None:
    """Exclude documents that share text or first words with an audited one. Memory grows with the pools only."""
    texts = {key for pool in pools for key in pool.text_key.tolist()}
    prefixes = {key for pool in pools for key in pool.prefix_key[~pool.header].tolist()}
    audited_texts, audited_prefixes = set(), set()
    for document in _documents([shard for shard in shards if shard.role == "audit"]):
        text, prefix = text_keys(document.text)
        audited_texts |= {text} & texts
        audited_prefixes |= {prefix} & prefixes
    for pool in pools:
        alike = np.isin(pool.prefix_key, list(audited_prefixes)) & ~pool.header
        pool.free[np.isin(pool.text_key, list(audited_texts)) | alike] = False


def _documents(shards: Sequence[Shard]) -> Iterator[Document]:
    """The documents without a problem."""
    for shard in shards:
        yield from (document for document in read_shard(shard) if document.problem is None)


def _texts(pool: _Pool, chosen: np.ndarray) -> Iterator[str]:
    positions = set(chosen.tolist())
    for position, document in enumerate(_documents(pool.shards)):
        if position in positions:
            yield document.text
