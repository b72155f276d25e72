"""The Python interface. The names in this module are stable and documented; all others are internal.

    import seenset

    run = seenset.audit("audit.yaml")                 # or a dict; resumes an unfinished run
    run.selections["members"].n_selected

    scores = seenset.score("my-model", texts)         # in a notebook: no files, no cluster
    selected = seenset.select(scores, unseen=unseen_scores, alpha=0.1)

`detector` and `procedure` extend both; the other names are for authors of extensions.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.answers.verdict import CollectionVerdict
    from pipeline.config.audit import AuditConfig
    from pipeline.detectors.base import FORWARD, GRADIENT, LOWERCASE, REFERENCE, Evidence, detector
    from pipeline.detectors.likelihood import mean_of_all, mean_of_lowest
    from pipeline.errors import UserError
    from pipeline.selection.conformal import RankCounts
    from pipeline.selection.procedures import Decision, decision, procedure
    from pipeline.selection.step_up import step_up
    from seenset.notebook import Selected, score, select
    from seenset.runs import Run, RunSelection, UnsupportedWarning, audit, open_run, trial, verdict
    from seenset.versions import Versions, VersionsAnswer, audit_versions, read_versions, select_versions

__all__ = [
    "FORWARD",
    "GRADIENT",
    "LOWERCASE",
    "REFERENCE",
    "AuditConfig",
    "CollectionVerdict",
    "Decision",
    "Evidence",
    "RankCounts",
    "Run",
    "RunSelection",
    "Selected",
    "UnsupportedWarning",
    "UserError",
    "Versions",
    "VersionsAnswer",
    "audit",
    "audit_versions",
    "decision",
    "detector",
    "mean_of_all",
    "mean_of_lowest",
    "open_run",
    "procedure",
    "read_versions",
    "score",
    "select",
    "select_versions",
    "step_up",
    "trial",
    "verdict",
]

_HOMES = {
    "pipeline.answers.verdict": ("CollectionVerdict",),
    "pipeline.config.audit": ("AuditConfig",),
    "pipeline.detectors.base": ("FORWARD", "GRADIENT", "LOWERCASE", "REFERENCE", "Evidence", "detector"),
    "pipeline.detectors.likelihood": ("mean_of_all", "mean_of_lowest"),
    "pipeline.errors": ("UserError",),
    "pipeline.selection.conformal": ("RankCounts",),
    "pipeline.selection.procedures": ("Decision", "decision", "procedure"),
    "pipeline.selection.step_up": ("step_up",),
    "seenset.notebook": ("Selected", "score", "select"),
    "seenset.runs": ("Run", "RunSelection", "UnsupportedWarning", "audit", "open_run", "trial", "verdict"),
    "seenset.versions": ("Versions", "VersionsAnswer", "audit_versions", "read_versions", "select_versions"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

# from libraries that are imported on first use: without ipywidgets, a notebook shows their bars as text
warnings.filterwarnings("ignore", message="IProgress not found")


def __getattr__(name: str) -> Any:
    """Import a name on first use, because torch and Ray take seconds to import."""
    if name not in _HOME:
        raise AttributeError(f"module 'seenset' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
