"""The stages that an audit's detectors need, in order, each with all that its rows depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pipeline.audit.budgets import model_budget, scoring_budget
from pipeline.config.audit import AuditConfig
from pipeline.config.models import AnyModel, EndpointConfig, weights_of
from pipeline.config.paths import written
from pipeline.config.training import AdapterConfig
from pipeline.corpus.near_copies import SKETCH_KIND
from pipeline.corpus.pictures import PICTURE_SKETCH_KIND
from pipeline.detectors.base import Pass
from pipeline.detectors.registry import (
    DetectorChoice,
    adapters_of,
    draws_of,
    parse_detectors,
    plan_passes,
    plugin_code,
    sampled_of,
)
from pipeline.models.devices import CPU, Device
from pipeline.stages import ask_log_probs, continuations, describe, paraphrase, score
from pipeline.stages.ask_log_probs import EndpointReader, LogProbSettings
from pipeline.stages.ask_samples import EndpointSampler
from pipeline.stages.base import Digest, Stage, model_digests
from pipeline.stages.continuations import SampleSettings
from pipeline.stages.describe import Describer, DescriptionSettings
from pipeline.stages.judged import JudgedTexts
from pipeline.stages.paraphrase import Paraphraser, ParaphraserSettings, check_other_model, drawing
from pipeline.stages.sample import Sampler
from pipeline.stages.score import Scorer, ScoreSettings, score_schema
from pipeline.stages.score_pictures import PictureScorer


def stages_of(
    config: AuditConfig,
    adapters: Mapping[str, str] | None = None,
    digest: Digest | None = None,
    device: Device = CPU,
    judged: JudgedTexts | None = None,
) -> tuple[Stage, ...]:
    """The stages of an audit; the last one scores and reads the rows of the others.

    Args:
        config: of the audit.
        adapters: name -> key of the folder of each adapter; where it is not known yet, its settings stand for it.
        digest: of models, from `model_digests`; reads each model's weights once.
        device: that the actors compute on.
        judged: texts whose audit documents are left out.

    Raises:
        UserError: a model's file is missing, the paraphraser is the audited model, or a model leaves no room for a
            batch on the device.
    """
    make = _maker(config, digest or model_digests(), judged)
    earlier: list[Stage] = []
    if draws := draws_of(parse_detectors(config.detectors)):
        earlier.append(_paraphrases(make, config, draws, device))
    earlier += _descriptions(make, config, device)
    earlier += [_log_probs(make, config, needed) for needed in endpoint_passes(config)]
    earlier += [_samples(make, config, samples) for samples in sample_settings(config, device)]
    reference = _reads_reference(config)
    budget = scoring_budget(config, device, reference)
    detectors = DetectorChoice(tuple(config.detectors))
    parsed = detectors.parse()
    columns = [detector.column for detector in parsed]
    scoring = make(
        score.STAGE,
        score.FOLDER,
        score_schema(columns),
        ScoreSettings(
            config.model,
            config.reference_model if reference else None,
            detectors,
            plugin_code(config.import_, parsed),
            adapters if adapters is not None else _adapter_settings(config),
            config.max_tokens,
            budget.forward,
            budget.gradient,
            device.mark,
            PICTURE_SKETCH_KIND if config.corpus.has_pictures else SKETCH_KIND,
        ),
        make=PictureScorer if config.corpus.has_pictures else Scorer,
        reads=tuple(earlier),
        quarantines=True,
    )
    return (*earlier, scoring)


def log_prob_stages(config: AuditConfig) -> list[Stage]:
    """The stages that ask endpoints for log-probabilities; no weights are read for them."""
    return [_log_probs(_maker(config, model_digests()), config, needed) for needed in endpoint_passes(config)]


def model_of(config: AuditConfig, needed: Pass) -> AnyModel:
    """The model that a pass asks: weights or an endpoint."""
    model = config.model if needed.model == "target" else config.reference_model
    assert model is not None
    return model


def endpoint_passes(config: AuditConfig) -> list[Pass]:
    """The forward passes that an endpoint has to make."""
    passes = plan_passes(parse_detectors(config.detectors))
    return [p for p in passes if p.kind == "forward" and isinstance(model_of(config, p), EndpointConfig)]


def sample_settings(config: AuditConfig, device: Device = CPU) -> list[SampleSettings]:
    """The continuations that the detectors read, drawn on a device or by an endpoint."""
    samples = sampled_of(parse_detectors(config.detectors))
    place: tuple[str, int] | tuple[()] = ()
    if samples and not isinstance(config.model, EndpointConfig):
        place = device.mark, model_budget([config.model], device, config.max_tokens).cache
    return [
        SampleSettings(config.model, continued, draws, config.max_tokens, *place)
        for continued, draws in samples.items()
    ]


def _maker(config: AuditConfig, digest: Digest, judged: JudgedTexts | None = None) -> Callable[..., Stage]:
    """`Stage`, given what every stage of an audit shares."""
    return partial(Stage, transform=config.text_transform, seed=config.seed, digest=digest, judged=judged)


def _paraphrases(make: Callable[..., Stage], config: AuditConfig, draws: int, device: Device) -> Stage:
    assert config.paraphraser is not None
    settings = ParaphraserSettings(
        weights_of(config.model),
        config.paraphraser,
        drawing(config.paraphraser),
        draws,
        config.max_tokens,
        device.mark,
        model_budget([config.paraphraser], device, config.max_tokens).cache,
    )
    stage = make(paraphrase.STAGE, paraphrase.FOLDER, paraphrase.SCHEMA, settings, make=Paraphraser)
    check_other_model(stage)
    return stage


def _descriptions(make: Callable[..., Stage], config: AuditConfig, device: Device) -> list[Stage]:
    """The stage that describes pictures, where a detector reads what the model writes of them."""
    if all(needed.caption != "generated" for needed in plan_passes(parse_detectors(config.detectors))):
        return []
    model = weights_of(config.model)
    budget = model_budget([model], device, config.max_tokens)
    # a picture is read as in scoring, whatever little its keys and values take
    batch = min(budget.cache, budget.forward) if device.gpus else budget.cache
    settings = DescriptionSettings(model, device.mark, batch)
    return [make(describe.STAGE, describe.FOLDER, describe.SCHEMA, settings, make=Describer)]


def _log_probs(make: Callable[..., Stage], config: AuditConfig, needed: Pass) -> Stage:
    model = model_of(config, needed)
    assert isinstance(model, EndpointConfig)
    settings = LogProbSettings(model, needed, config.max_tokens)
    columns = [
        detector.column
        for detector in parse_detectors(config.detectors)
        if any(p.kind == "forward" and model_of(config, p) == model for p in detector.needs)
    ]
    return make(
        settings.folder,
        settings.folder,
        ask_log_probs.SCHEMA,
        settings,
        make=EndpointReader,
        endpoint=model,
        wanted_by=tuple(columns),
    )


def _samples(make: Callable[..., Stage], config: AuditConfig, settings: SampleSettings) -> Stage:
    endpoint = config.model if isinstance(config.model, EndpointConfig) else None
    return make(
        settings.stage,
        settings.folder,
        continuations.SCHEMA,
        settings,
        make=EndpointSampler if endpoint is not None else Sampler,
        endpoint=endpoint,
        grows="draws",
    )


def _reads_reference(config: AuditConfig) -> bool:
    return any(p.model == "reference" for p in plan_passes(parse_detectors(config.detectors)))


def _adapter_settings(config: AuditConfig) -> dict[str, Any] | None:
    names = adapters_of(parse_detectors(config.detectors))
    return {name: _settings_of(config.fsd.adapter(name)) for name in names} or None


def _settings_of(adapter: AdapterConfig) -> dict[str, Any]:
    """The settings of an adapter; where its corpus lies on this machine is none of them."""
    settings = adapter.model_dump(mode="json")
    if adapter.corpus is not None and adapter.corpus.path is not None:
        settings["corpus"]["path"] = [written(path) for path in adapter.corpus.paths]
    return settings
