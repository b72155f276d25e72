"""The data card of an export: the removed documents and the guarantee. It names no local folder."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined

from pipeline import __version__
from pipeline.answers.stated_bounds import bound_sentence
from pipeline.config.models import ModelConfig
from pipeline.config.paths import MARK
from pipeline.errors import visible
from pipeline.export import export_text as wording
from pipeline.export.request import ExportPlan
from pipeline.results.history import HistoryEntry, read_history, several_questions
from pipeline.selection.guarantees import ConclusionValue

_MARKDOWN = re.compile(r"([\\`*_\[\]|#~])")
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """The exported part of one input."""

    name: str
    documents: int  # audited documents of the input
    kept: int


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """Counts of the documents of a run by their treatment."""

    audited: int
    selected: int
    quarantined: int
    kept: int
    files: tuple[ExportedFile, ...]
    unwritten: int = 0  # documents to keep that the form cannot hold


def make_card(plan: ExportPlan, counts: ExportCounts, remarks: Sequence[str], data_files: list[Any]) -> bytes:
    """The card of an export, in Markdown with Hugging Face's front matter.

    Args:
        plan: plan of the export.
        counts: counts of the documents.
        remarks: sentences on the written files.
        data_files: data files of the configuration of a dataset folder; empty for other forms.
    """
    summary = plan.summary
    history = read_history(plan.store)
    stated = {
        "selection": summary.name,
        "direction": summary.direction,
        "procedure": summary.procedure,
        "alpha": f"{summary.alpha:g}",
        "detectors": ", ".join(summary.detectors),
        "calibration": summary.calibration,
    }
    if summary.series is not None:
        stated["schedule"] = summary.series.sentence
    others = {key: str(value) for key, value in _settings(history, summary.name).items() if key not in stated}
    template = _environment().get_template("card.md")
    text: str = template.render(
        front=_front(plan, counts, data_files),
        title=f"{_kind(plan)}: {summary.name}",
        headline=answer_sentence(plan, counts),
        sentences=[quarantine_sentence(plan, counts), *remarks],
        promise=_guarantee(plan, history),
        summary=summary,
        guarantee=summary.guarantee if summary.conclusion != ConclusionValue.CONTRADICTED else "none: see above",
        alpha=f"{summary.alpha:g}",
        strict=f"{summary.strict.n_selected:,} selected ({summary.strict.procedure})",
        counts=_count_rows(plan, counts),
        files=counts.files,
        settings=stated | others,
        provenance=_provenance(plan),
    )
    return text.encode()


def answer_sentence(plan: ExportPlan, counts: ExportCounts) -> str:
    """A sentence on the documents of an export that claims no more than the selection does."""
    summary = plan.summary
    return wording.exported_documents(
        wording.audited_sample(counts.audited, summary.limit),
        _model_name(plan),
        (counts.selected, counts.kept),
        summary.direction,
        plan.keeps_selected,
    )


def quarantine_sentence(plan: ExportPlan, counts: ExportCounts) -> str:
    """A sentence on the documents that could not be scored."""
    return wording.quarantined_documents(counts.quarantined, plan.keeps_selected, plan.keeps_quarantined)


def _guarantee(plan: ExportPlan, history: Sequence[HistoryEntry]) -> list[str]:
    summary = plan.summary
    bound = bound_sentence(summary)
    repeated = several_questions(history)
    lines = list(summary.remarks)
    if not plan.keeps_selected:
        lines.append(wording.SELECTED_NOT_HERE)
    if summary.conclusion != ConclusionValue.CONTRADICTED:
        lines += wording.stated_guarantee(summary.alpha, summary.promise, summary.assumption)
    lines += [bound] if bound is not None else []
    return lines + ([repeated] if repeated is not None else [])


def _count_rows(plan: ExportPlan, counts: ExportCounts) -> dict[str, str]:
    rows = {
        "audited": counts.audited,
        "selected": counts.selected,
        wording.QUARANTINED_LABEL: counts.quarantined,
        "here": counts.kept - counts.unwritten,
        "left out": counts.audited - counts.kept + counts.unwritten,
        wording.CALIBRATED_LABEL: plan.summary.n_calibration,
    }
    return {name: f"{count:,}" for name, count in rows.items()}


def _provenance(plan: ExportPlan) -> dict[str, str]:
    manifest = plan.manifest
    versions = {f"version of {name}": version for name, version in manifest.versions.items()}
    return {
        "model": _model_name(plan),
        wording.FINGERPRINT_LABEL: plan.fingerprint_digest,
        "seed": str(manifest.seed),
        **versions,
        "exported by": f"seenset {__version__}",
        "export": f"{wording.FORM_PHRASES[plan.form]}, keep {plan.keep}",
    }


def _settings(history: Sequence[HistoryEntry], name: str) -> dict[str, Any]:
    """The settings of a selection as last requested; empty where they are not recorded."""
    questions = [one for one in history[-1].questions if one.name == name] if history else []
    settings = questions[0].settings if questions else {}
    return {key: value for key, value in settings.items() if value is not None and key != "name"}


def _model_name(plan: ExportPlan) -> str:
    """The audited model without the folders of its path, unless it is a hub id."""
    model = plan.manifest.config.model
    if not isinstance(model, ModelConfig):
        return model.name
    name = _without_folders(model.path) + (f" ({model.gguf_file})" if model.gguf_file else "")
    return f"{name} with adapter {_without_folders(model.adapter)}" if model.adapter else name


def _without_folders(path: str) -> str:
    local = path.startswith(("/", "~", ".")) or "://" in path or MARK in path or path.count("/") > 1
    return path.rstrip("/").rsplit("/", 1)[-1] if local else path


def _kind(plan: ExportPlan) -> str:
    if plan.form == "samples":
        return "Samples for lm-evaluation-harness"
    if plan.form == "list":
        return "List of documents"
    return "Documents"


def _front(plan: ExportPlan, counts: ExportCounts, data_files: list[Any]) -> str:
    size = next((name for most, name in _SIZES if counts.kept < most), "n>10M")
    front: dict[str, Any] = {
        "pretty_name": f"{_kind(plan)}: {plan.summary.name}",
        "tags": ["seenset", "training-data-audit"],
        "size_categories": [size],
    }
    if data_files:
        front["configs"] = [{"config_name": "default", "data_files": data_files}]
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: resources.files("pipeline.export").joinpath(name).read_text("utf-8")),
        autoescape=False,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment


def _shown(value: Any) -> Any:
    """Any text escaped for Markdown, because names of files and models may contain any characters."""
    if not isinstance(value, str) or value.endswith("\n"):  # the front matter is YAML already
        return f"{value:,}" if type(value) is int else value
    return _MARKDOWN.sub(r"\\\1", html.escape(visible(" ".join(value.split())), quote=False))
