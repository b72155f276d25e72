"""Read an audit's configuration and check it as a whole, with the dependencies between its parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from shlex import quote
from typing import Any

from pipeline.config.audit import AuditConfig
from pipeline.config.paths import check_run_folder
from pipeline.config.selection import SOUGHT_ROLE
from pipeline.config.yaml import build, read_mapping
from pipeline.detectors.plugins import load_plugins, read_plugins
from pipeline.detectors.registry import check_workers_know, parse_detectors
from pipeline.errors import UserError
from pipeline.plan.combinations import check_combinations
from pipeline.selection.engine import refuse_uncovered


def load_config(path: str, overrides: Sequence[str] = (), labelled: bool = False) -> AuditConfig:
    """Read the configuration of an audit, or of `seenset evaluate` where documents are labelled, from a YAML file.

    Args:
        path: path of the file.
        overrides: settings as `a.b=c`.
        labelled: whether the membership of the documents is known, as for `build_evaluation`.

    Raises:
        UserError: no such file, not YAML, or a value outside its limits (one line, with the near miss).
    """
    data = read_mapping(path, AuditConfig)
    if "documents" in data and "corpus" not in data:
        raise UserError(f"{path} describes a trial (documents): seenset trial {quote(path)}")
    config = build_evaluation(data, overrides) if labelled else _built(data, overrides, written=True)
    check_run_folder(config.run, {os.path.dirname(path): path})
    return config


def build_config(data: dict[str, Any], overrides: Sequence[str] = ()) -> AuditConfig:
    """Check a plain mapping (and `a.b=c` overrides), load its plugins and return the audit that it describes.

    Raises:
        UserError: an unknown key, a value outside its limits, no audited documents, or a plugin that cannot be loaded.
    """
    return _built(data, overrides, written=False)


def _built(data: dict[str, Any], overrides: Sequence[str], written: bool) -> AuditConfig:
    """As `build_config`; `written` states whether every value is from the user and none is a default."""
    config = build(AuditConfig, data, overrides)
    _check_alphas(config, written)
    if config.corpus.audit is None:
        given = ", ".join(f"corpus.{name}" for name in type(config.corpus).model_fields if getattr(config.corpus, name))
        raise UserError(
            f"missing key 'corpus.audit', the documents to judge (given: {given or 'nothing'}): add corpus.audit: "
            "{path: ...}, or compare documents of known membership with seenset evaluate"
        )
    return _checked(config)


def build_evaluation(data: dict[str, Any], overrides: Sequence[str] = ()) -> AuditConfig:
    """Check a plain mapping (and `a.b=c` overrides) of documents of known membership; audited documents are optional.

    Without audited documents, the selections of the mapping are left out.

    Raises:
        UserError: as `build_config`, or a corpus without seen or without unseen documents.
    """
    config = build(AuditConfig, data, overrides)
    for key in ("series", "against"):
        if getattr(config, key) is not None:
            raise UserError(f"{key} is of a scan that selects, and evaluate selects nothing: --set {key}=null")
    for role in SOUGHT_ROLE.values():
        if config.corpus.source(role) is None:
            raise UserError(
                f"evaluate compares documents of known membership, and corpus.{role} is not given: add corpus.{role}: "
                "{path: ...}, or name both kinds as corpus.labelled: {path: ..., label: COLUMN}"
            )
    if config.corpus.audit is None:
        config = config.model_copy(update={"selections": []})
    return _checked(config)


def _checked(config: AuditConfig) -> AuditConfig:
    """The audit, its plugins loaded and its parts checked against one another."""
    load_plugins(read_plugins(config.import_))
    detectors = parse_detectors(config.detectors)
    check_workers_know(config.import_, detectors)
    check_combinations(config, detectors)
    return _with_alpha_of_series(config)


def _check_alphas(config: AuditConfig, written: bool) -> None:
    """Check that no selection in a schedule of scans states alpha: the ledger gives each scan its part of alpha.

    Raises:
        UserError: a selection states alpha, there is no selection, or a schedule does not cover it.
    """
    if config.series is None:
        return
    if not config.selections:
        raise UserError("series: a scan without selections cannot use its part of alpha; add selections")
    for index, selection in enumerate(config.selections):
        if "alpha" in selection.model_fields_set and (written or selection.alpha != config.series.alpha):
            raise UserError(
                f"selections.{index}.alpha is {selection.alpha:g}, and in a series the ledger sets the level of each "
                f"scan: leave it out (series.alpha, {config.series.alpha:g}, is of all scans together)"
            )
        refuse_uncovered(selection)


def _with_alpha_of_series(config: AuditConfig) -> AuditConfig:
    """The audit, with the alpha of the schedule in the selections of a scan; the ledger gives each scan its part."""
    if config.series is None:
        return config
    selections = [selection.model_copy(update={"alpha": config.series.alpha}) for selection in config.selections]
    return config.model_copy(update={"selections": selections})
