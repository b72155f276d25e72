"""The record of scoring, of texts, of versions and of pictures: what scores depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.config.models import ModelConfig
from pipeline.config.paths import written
from pipeline.config.training import AdapterConfig
from pipeline.corpus.near_copies import SKETCH_KIND
from pipeline.corpus.pictures import PICTURE_SKETCH_KIND
from pipeline.detectors.base import Pass
from pipeline.detectors.camia import COPIES
from pipeline.detectors.registry import DetectorChoice, adapters_of, parse_detectors, plugin_code
from pipeline.models.tokens import check_same_tokens, open_tokenizer
from pipeline.passes.budget import Budget
from pipeline.stages import SCORE_FOLDER, SCORING
from pipeline.stages.base import Placement, Stage, Worker
from pipeline.stages.record import StageKind, Wanted
from pipeline.stages.score import Scorer, ScoreSettings, pair_of, score_schema
from pipeline.stages.score_columns import ColumnScorer
from pipeline.stages.score_ids import IdScorer
from pipeline.stages.score_pictures import PictureScorer
from pipeline.stages.score_versions import VersionScorer, versions_schema

_GRADIENT_COST = 3.0  # in forward passes


def _stages(wanted: Wanted, earlier: Sequence[Stage]) -> list[Stage]:
    config, detectors = wanted.config, wanted.detectors
    reference = config.reference_model if any(p.model == "reference" for p in wanted.passes) else None
    budget = _budget(wanted, wanted.budget(config.model, reference))
    settings = ScoreSettings(
        config.model,
        reference,
        DetectorChoice.of(config.detectors),
        plugin_code(config.import_, detectors),
        wanted.adapters if wanted.adapters is not None else _adapter_settings(wanted),
        config.max_tokens,
        budget.forward,
        budget.gradient,
        wanted.device.mark,
        PICTURE_SKETCH_KIND if config.corpus.has_pictures else SKETCH_KIND,
        wanted.prefixes,
    )
    columns = [detector.column for detector in detectors]
    stage = wanted.stage(
        SCORING,
        folder=SCORE_FOLDER,
        schema=score_schema(columns) if config.corpus.versions is None else versions_schema(columns),
        settings=settings,
        make=_scorer_of(config.corpus),
        reads=tuple(earlier),
        quarantines=True,
    )
    return [stage]


def _scorer_of(corpus: CorpusConfig) -> Callable[[Stage, Placement], Worker]:
    """The worker that scores the documents of a corpus."""
    if corpus.scores is not None:
        return ColumnScorer
    if corpus.versions is not None:
        return VersionScorer
    if corpus.has_ids:
        return IdScorer
    return PictureScorer if corpus.has_pictures else Scorer


def _budget(wanted: Wanted, budget: Budget) -> Budget:
    """The sizes of batches, as the configuration states them where it does."""
    tokens = wanted.config.resources.batch_tokens
    if tokens == "auto":
        return budget
    return replace(budget, forward=tokens, gradient=min(tokens, budget.gradient) if wanted.device.gpus else tokens)


def _adapter_settings(wanted: Wanted) -> dict[str, Any] | None:
    return {name: _settings_of(wanted.config.fsd.adapter(name)) for name in adapters_of(wanted.detectors)} or None


def _settings_of(adapter: AdapterConfig) -> dict[str, Any]:
    """The settings of an adapter; where its corpus lies on this machine is none of them."""
    settings = adapter.model_dump(mode="json")
    if adapter.corpus is not None and adapter.corpus.path is not None:
        settings["corpus"]["path"] = [written(path) for path in adapter.corpus.paths]
    return settings


def _serves(needed: Pass, config: AuditConfig) -> bool:
    return needed.kind in KIND.costs


def _forward(entry: Mapping[str, Any]) -> float:
    each = (COPIES if entry.get("text") == "repeated" else 1.0) * (1 + float(entry["paraphrases"]))
    return each + float(entry.get("prefix_cost", 0.0))


def _gradient(entry: Mapping[str, Any]) -> float:
    return _GRADIENT_COST * (1 + entry["paraphrases"])


def _check(config: AuditConfig) -> None:
    """Compare the tokenizers of two models that a detector gives the same tokens. Raises UserError."""
    pair = pair_of(parse_detectors(config.detectors), config.corpus.has_ids)
    if pair is not None:
        assert isinstance(config.model, ModelConfig)
        assert isinstance(config.reference_model, ModelConfig)
        models = (config.model, config.reference_model)
        first, second = map(open_tokenizer, models)
        check_same_tokens(first, second, (models[0].shown, models[1].shown), pair, config.corpus.has_ids)


KIND = StageKind(SCORING, SCORE_FOLDER, _serves, _stages, _check, costs={"forward": _forward, "gradient": _gradient})
