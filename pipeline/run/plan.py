"""Plan a run from metadata alone: inputs, shards, passes, and pending shards."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.models import AnyModel, EndpointConfig, ModelConfig, ScoredModel, expand_user
from pipeline.config.paths import check_run_folder, irregular_kind, written
from pipeline.corpus.formats import by_bytes, format_named, measure_extent
from pipeline.corpus.inputs import check_limit, find_inputs, plan_shards
from pipeline.corpus.shard import InputFile, Shard
from pipeline.detectors.base import Pass, plan_passes
from pipeline.detectors.registry import needed_continuations, parse_detectors
from pipeline.endpoint.client import check_endpoint
from pipeline.errors import UserError
from pipeline.models.checkpoints import check_files, is_missing, other_base
from pipeline.models.load import check_model
from pipeline.run.dtypes import MODELS
from pipeline.run.manifest import RecordedModel, read_manifest
from pipeline.stages import SCORING
from pipeline.store.files import Store

BYTES_PER_TOKEN = 4.0
"""Approximate value for English text."""

PICTURE_TOKENS = 640
"""Approximate value of a picture with its instruction and description; the picture has 576 tokens in LLaVA-1.5."""

RUN_OR_LEDGER = "the folder of a run or a ledger"


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one audit: inputs cut into shards, in a fixed order."""

    config: AuditConfig
    inputs: tuple[InputFile, ...]
    shards: tuple[Shard, ...]
    limit: int | None
    recorded: Mapping[str, RecordedModel] = field(default_factory=dict)
    """By key of the configuration, models whose files are missing, as the run recorded them."""

    def documents(self, role: Role) -> tuple[int, bool]:
        """Number of documents of a role, and whether it is exact; an estimate where only reading determines it."""
        extents = [measure_extent(entry) for entry in self.inputs if entry.role == role]
        source = self.config.corpus.source(role)
        window = max(1, 0 if source is None else source.window)  # rows of a document
        count, exact = sum(-(-extent.rows // window) for extent in extents), all(extent.exact for extent in extents)
        if self.limit is not None and self.limit <= count:
            return self.limit, exact
        return count, exact

    def passes(self) -> list[dict[str, Any]]:
        """The passes that the detectors need; each runs once per document and once per paraphrase of it."""
        planned = plan_passes(parse_detectors(self.config.detectors))
        draws = Counter(replace(p, draw=0) for p in planned if p.draw)
        passes: list[dict[str, Any]] = [
            {
                "kind": p.kind,
                "model": p.model,
                "text": p.text,
                "adapter": p.adapter or None,
                "paraphrases": draws[p],
                "statistics": sorted(read),
                **({} if p.prefix is None else {"prefix": str(p.prefix)}),
            }
            for p, read in planned.items()
            if not p.draw and p.continued is None
        ]
        if self.config.corpus.has_pictures:
            return _picture_passes(planned)
        sample_counts = needed_continuations(parse_detectors(self.config.detectors))
        split = {"prefix_ratio": None} if self.config.corpus.has_chats else {}  # a chat ends before its last answer
        passes += [
            {"kind": "generate", **asdict(continued), **split, "draws": m} for continued, m in sample_counts.items()
        ]
        return passes

    def text_bytes(self) -> int:
        """Estimated bytes of text of all inputs, decompressed; for pictures, of the equivalent of a model's input."""
        if self.config.corpus.has_pictures:
            return round(sum(measure_extent(entry).rows for entry in self.inputs) * PICTURE_TOKENS * BYTES_PER_TOKEN)
        return sum(measure_extent(entry).text_bytes for entry in self.inputs)

    def estimated_tokens(self) -> dict[str, float]:
        """Tokens of every shard, by id; an estimate."""
        row_bytes: dict[str, float] = {}
        for entry in self.inputs:
            try:
                extent = measure_extent(entry)
            except UserError:  # a damaged file: its shards fail, with their names, when they are read
                row_bytes[entry.path] = float(entry.size)
            else:
                row_bytes[entry.path] = extent.text_bytes / max(1, extent.rows)
            if self.config.corpus.has_pictures:
                row_bytes[entry.path] = PICTURE_TOKENS * BYTES_PER_TOKEN
        sizes = {}
        for shard in self.shards:
            by_row = row_bytes[shard.path]
            if by_bytes(shard) and not shard.pictures:  # for pictures, a file of lines holds only their paths
                most = float((shard.stop or 0) - shard.start)
            elif shard.stop is not None:
                most = (shard.stop - shard.start) * by_row
            else:
                most = float("inf")
            rows = float("inf") if shard.max_rows is None else shard.max_rows * by_row
            size = min(most, rows)
            sizes[shard.id] = (size if size < float("inf") else by_row) / BYTES_PER_TOKEN
        return sizes


def _picture_passes(planned: Mapping[Pass, frozenset[str]]) -> list[dict[str, Any]]:
    """The passes over pictures: one per description, whatever the number of parts that are read."""
    passes = []
    for caption in sorted({p.caption for p in planned}):
        parts = {p.part: read for p, read in planned.items() if p.caption == caption}
        passes.append(
            {
                "kind": "forward",
                "model": "target",
                "text": pictures_with(caption, sorted(parts)),
                "adapter": None,
                "paraphrases": 0,
                "statistics": sorted(frozenset().union(*parts.values())),
            }
        )
    return passes


def make_plan(config: AuditConfig, limit: int | None = None) -> Plan:
    """Find the inputs and cut them into shards.

    Raises:
        UserError: a bad file or column, a role without documents, a limit below 1.
    """
    check_limit(limit)
    _check_folder("against", config.against, RUN_OR_LEDGER)
    _check_folder("series.ledger", config.series.ledger if config.series is not None else None, "a folder")
    config, recorded = _with_recorded_models(config)
    inputs = find_inputs(config.corpus, config.limits)
    files = {entry.path: entry.name for entry in inputs if format_named(entry.format).has_path}
    paths = [path for model in _models(config) for path in (model.path, model.adapter) if path is not None]
    check_run_folder(config.run, {path: written(path) for path in paths if os.path.exists(path)} | files)
    shards = plan_shards(config.corpus, inputs, config.resources, config.text_transform, limit, config.limits)
    return Plan(config, tuple(inputs), tuple(shards), limit, recorded)


def _with_recorded_models(config: AuditConfig) -> tuple[AuditConfig, dict[str, RecordedModel]]:
    """A configuration, and its models whose files are missing, as the run recorded them, by key.

    A missing folder beside the configuration looks like an id of the hub: the model gets its recorded path.
    """
    models = {key: model for key in MODELS if isinstance(model := getattr(config, key), ModelConfig)}
    if all(os.path.exists(expand_user(model.path)) and not is_missing(model) for model in models.values()):
        return config, {}
    try:
        manifest = read_manifest(Store(config.run))
    except (UserError, OSError):  # damaged or unreachable: the missing files are reported
        return config, {}
    if manifest is None:
        return config, {}
    recorded: dict[str, RecordedModel] = {}
    for key, model in models.items():
        before = getattr(manifest.config, key)
        if key not in manifest.models or not isinstance(before, ModelConfig):
            continue
        if model.path not in (before.path, written(before.path)):
            continue
        placed = model.model_copy(update={"path": before.path})
        decided = placed.model_copy(update={"dtype": before.dtype}) if placed.dtype == "auto" else placed
        if decided == before and is_missing(before):
            recorded[key] = manifest.models[key]
            config = config.model_copy(update={key: placed})
    return config, recorded


def _check_folder(key: str, path: str | None, what: str) -> None:
    if path is not None and os.path.exists(path) and not os.path.isdir(path):
        raise UserError(f"{key}: {written(path)} is {irregular_kind(path) or 'a file'}, not {what}")


def _models(config: AuditConfig) -> list[ModelConfig]:
    models = (config.model, config.reference_model, config.paraphraser)
    return [model for model in models if isinstance(model, ModelConfig)]


def check_model_files(plan: Plan) -> None:
    """Check that the files of every model exist, before any slow import; not those of recorded ones of finished scores.

    Raises:
        UserError: a file is missing, or the weights are of a kind that is not allowed.
    """
    finished = bool(plan.recorded) and not pending(plan, SCORING, Store(plan.config.run))
    recorded = [getattr(plan.config, key) for key in plan.recorded] if finished else []
    for model in _models(plan.config):
        if model not in recorded:
            check_files(model)


def other_bases(config: AuditConfig) -> list[str]:
    """A warning for each adapter of the configuration that names another base model than it is merged into."""
    return [warning for model in _models(config) if (warning := other_base(model)) is not None]


def describe_model(model: AnyModel, pictures: bool = False) -> dict[str, Any]:
    """Check without loading weights that a model can be used: `check_model` or `check_endpoint`.

    Args:
        model: a model of the audit.
        pictures: whether the documents are pictures.
    """
    if isinstance(model, ScoredModel):
        return {"architecture": "not asked", "dtype": "none", "max_tokens": None, "parameters": None}
    if isinstance(model, EndpointConfig):
        return check_endpoint(model)
    return check_model(model, "pictures" if pictures else "causal")


def pending(plan: Plan, stage: str, store: Store) -> list[Shard]:
    """The shards without a receipt of a stage."""
    names = store.names(f"receipts/{stage}", ".json")  # sorted; a set would take 40 bytes more for each

    def is_done(name: str) -> bool:
        place = bisect_left(names, name)
        return place < len(names) and names[place] == name

    return [shard for shard in plan.shards if not is_done(f"{shard.id}.json")]


def pictures_with(caption: str, parts: Sequence[str]) -> str:
    """The content that a pass over pictures reads."""
    return f"pictures with {caption} descriptions ({', '.join(parts)})"
