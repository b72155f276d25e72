"""What 0.10 had and 1.0 has not: one line a thing, which names what to do instead.

The name of a retired thing is refused where names of its kind are read; the refusal ends with the line of this table.
"""

from __future__ import annotations

from collections.abc import Mapping

_MATCHED = (
    "take calibration pooled; seenset plan AUDIT.YAML --matched FOLDER keeps the known documents whose words resemble "
    "the audited ones"
)

CALIBRATIONS: Mapping[str, str] = {"weighted": _MATCHED}

COLUMNS: Mapping[str, str] = {"weight": f"leave it out, and {_MATCHED}"}
"""Of tables of scores."""

DETECTORS: Mapping[str, str] = {
    "learnt": "an attack of your own is a detector in a file (import: [FILE.py])",
    "token_quantile": "take min_k, the mean of the lowest log-probabilities",
    "difference_quantile": "take reference, ez or wbc",
}

_ENDED_WITH = ["plan", "run", "evaluate", "status", "select", "verdict", "series", "pack", "verify", "trial"]

OPTIONS: Mapping[str, str] = {
    "preflight --all": "leave it out; the preflight scores no batch, which seenset run --limit 200 does",
    "preflight --batch-timeout": "leave it out; the preflight scores no batch, which seenset run --limit 200 does",
    "trial --learn": "an attack of your own is a detector in a file (import: [FILE.py])",
    **{
        f"{command} --exit-zero-on": "let the script of the job map the exit codes, as cluster/kuberay/setup/scan.sh "
        "does: code=$?; case $code in 4|5) exit 0;; *) exit $code;; esac"
        for command in _ENDED_WITH
    },
}
"""By command and option."""

COMMANDS: Mapping[str, str] = {
    "retry": "run seenset run AUDIT.YAML --retry REASON, such as --retry all",
    "review": "unseen documents have to be unseen; remove the others before the run",
    "schema": "seenset init writes the schema beside its YAML; docs/schemas holds that of an audit and that of a trial",
}

SETTINGS: Mapping[str, str] = {
    "corpus.unseen.review": "unseen documents have to be unseen; remove the others before the run",
    "corpus.unseen.review_count": "unseen documents have to be unseen; remove the others before the run",
    "series.rule": "leave it out; each scan has its part of alpha, which was rule spend",
}
"""By path, without positions in lists."""

MODULES: Mapping[str, str] = {
    "cluster.weekly": "kubectl apply -k cluster/kuberay/cronjob starts the week's RayJob by a CronJob",
}
"""That python -m ran."""

REASONS: Mapping[str, str] = dict.fromkeys(
    ("options_number", "options_equal", "options_ordered", "options_refer", "rows_equal"),
    "its name is not_permutable, and the message of the document states the cause, which another attempt meets again",
)
"""Of quarantine."""

SUFFIXES: Mapping[str, str] = {
    ".arrows": "rename the file to .arrow",
    ".feather": "rename the file to .arrow",
}
"""Of input files."""

RETIRED: Mapping[str, Mapping[str, str]] = {
    "calibration": CALIBRATIONS,
    "column": COLUMNS,
    "command": COMMANDS,
    "detector": DETECTORS,
    "module": MODULES,
    "option": OPTIONS,
    "reason": REASONS,
    "setting": SETTINGS,
    "suffix": SUFFIXES,
}
"""By kind."""


def retired(kind: str, name: str) -> str | None:
    """The refusal of a retired thing.

    Args:
        kind: key of `RETIRED`, or another kind, of which nothing was retired.
        name: name as the user wrote it.

    Returns:
        One line, or None if there was no such thing.
    """
    instead = RETIRED.get(kind, {}).get(name)
    return None if instead is None else f"{kind} {name} was removed in 1.0: {instead}"
