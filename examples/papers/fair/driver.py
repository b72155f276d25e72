"""What the four specifications share: read and part the data, compose the audit, and print the figures."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import Field
from rich.table import Table

import seenset
from examples.demo.demo import seenset as command
from examples.papers.judge import error_and_power
from examples.papers.prepare import write_parts
from pipeline.answers.detection import Detection, DetectorScores, detection
from pipeline.config.models import ModelConfig, ParaphraserConfig
from pipeline.config.yaml import Section, build, read_mapping
from pipeline.detectors.base import detector_names
from pipeline.errors import UserError, nearest
from pipeline.plan.description import build_config
from pipeline.report.tables import as_text
from pipeline.selection.procedures import PROCEDURES

FOLDER = Path(__file__).parent
BENCHMARKS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
ALPHA = 0.1
PARTS = ("audit", "unseen", "seen")
FUSED = "td4eval"
"""A selection of it reads every column."""

BEST = "best"
ALL = "all"


class Part(Section):
    """Rows of a split, in the order of the data set."""

    split: str
    files: str | None = None  # of the data set; None: those of the split
    take: int | None = None  # the first of them; None: all
    member: bool | None = None  # of all its rows; None: by the label


class Figure(Section):
    """A figure of the paper: the AUC of a detector, or of the best one."""

    condition: str
    detector: str
    auc: float = Field(ge=0, le=1)


class Specification(Section):
    """A benchmark: its data set on the hub, the model that is audited, and the paper's figures."""

    paper: str
    dataset: str
    parts: list[Part]
    text: str | None = None  # column of texts, or
    tokens: str | None = None  # of token ids
    label: str | None = None  # column of numbers; above 0: trained on
    condition: str | None = None
    model: ModelConfig
    reference_model: ModelConfig | None = None
    paraphraser: ParaphraserConfig | None = None
    figures: list[Figure]


def specification(name: str, settings: Sequence[str] = ()) -> Specification:
    """The specification of a benchmark, with those `a.b=c` settings that are its own."""
    described = [one for one in settings if one.split(".")[0].split("=")[0] in Specification.model_fields]
    return build(Specification, read_mapping(str(FOLDER / f"{name}.yaml"), Specification), described)


def prepare(name: str, work: Path, dataset: str | None = None, settings: Sequence[str] = ()) -> dict[str, int]:
    """Download a data set, or read a copy of it, and part it: half of each label and condition is audited.

    Returns:
        Documents by file.

    Raises:
        UserError: a column is missing, or no data set is there.
    """
    spec = specification(name, settings)
    kinds: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    unlike = 0
    for number, (member, condition, text) in enumerate(_rows(spec, dataset)):
        if text is None:
            unlike += 1
            continue
        entry = {"id": f"{name}-{number}", "text": text, "member": int(member), "condition": condition}
        kinds.setdefault((member, condition), []).append(entry)
    counts = write_parts(((int(kind[0]), kinds[kind]) for kind in sorted(kinds)), work / name)
    print(f"{name}: {', '.join(f'{count} {part}' for part, count in counts.items())} in {work / name}")
    if unlike:
        print(f"{name}: {unlike} rows left out, whose text the tokenizer would not encode alike")
    return counts


def _rows(spec: Specification, dataset: str | None) -> Iterator[tuple[bool, str, str | None]]:
    """Whether a row was trained on, its condition, and its text: None where its tokens have none."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(spec.model.path, revision=spec.model.revision) if spec.tokens else None
    for part in spec.parts:
        files = None if part.files is None else {part.split: part.files}
        try:
            rows = datasets.load_dataset(dataset or spec.dataset, data_files=files, split=part.split, streaming=True)
        except (OSError, ValueError) as error:  # no such data set or split, or no hub
            raise UserError(f"data set {dataset or spec.dataset}: {' '.join(str(error).split())}") from None
        for row in rows if part.take is None else rows.take(part.take):
            label = None if part.member is not None else spec.label
            for column in filter(None, (spec.text, spec.tokens, spec.condition, label)):
                if column not in row:
                    raise UserError(f"no column {column!r} in {spec.dataset}; {nearest(column, row, 'columns')}")
            member = part.member if part.member is not None else float(row[spec.label]) > 0
            condition = str(row[spec.condition]) if spec.condition else ALL
            text = row[spec.text] if spec.text else _decoded(tokenizer, list(row[spec.tokens]))
            yield member, condition, text


def _decoded(tokenizer: Any, ids: list[int]) -> str | None:
    """The text of token ids behind special tokens at the start; None where encoding it gives others."""
    special = set(tokenizer.all_special_ids)
    while ids and ids[0] in special:
        ids = ids[1:]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text if tokenizer(text, add_special_tokens=False)["input_ids"] == ids else None


def trial_audit(name: str, work: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The audit of a benchmark: every registered detector and procedure that a configuration takes with its models.

    A procedure of one detector takes `min_k_plus_plus`, and one of signs `knockoff`.
    """
    spec = specification(name, settings)
    models = {role: getattr(spec, role) for role in ("model", "reference_model", "paraphraser")}
    audit = {
        "run": str((work / "runs" / name).resolve()),
        **{role: one.model_dump(exclude_defaults=True) for role, one in models.items() if one is not None},
        "corpus": {role: {"path": str((work / name / f"{role}.jsonl").resolve()), "id": "id"} for role in PARTS},
        "overlap": "drop",
    }
    detectors = [one for one in detector_names() if _is_accepted({**audit, "detectors": [one]})]
    selections = []
    for procedure, one in PROCEDURES.items():
        columns = detectors if one.several else ["knockoff" if one.signed else "min_k_plus_plus"]
        entry = {"name": procedure, "detectors": columns, "procedure": procedure, "alpha": ALPHA}
        if _is_accepted({**audit, "detectors": detectors, "selections": [entry]}):
            selections.append(entry)
    return {**audit, "detectors": detectors, "selections": selections}


def _is_accepted(audit: dict[str, Any]) -> bool:
    try:
        build_config(copy.deepcopy(audit))
    except UserError:
        return False
    return True


def run(name: str, work: Path, settings: Sequence[str] = ()) -> int:
    """Write the audit and run it; the exit code of the command."""
    path = work / name / "audit.yaml"
    if not path.parent.exists():
        raise UserError(f"no {path.parent}; first run: python -m examples.papers.fair prepare {name}")
    path.write_text(yaml.safe_dump(trial_audit(name, work, settings), sort_keys=False), encoding="utf-8")
    others = [one for one in settings if one.split(".")[0].split("=")[0] not in Specification.model_fields]
    return command("run", str(path), *(word for one in others for word in ("--set", one)))


def measured_areas(name: str, work: Path) -> dict[tuple[str, str], Detection]:
    """AUC by condition and detector, of the audited documents of a finished run.

    Members of a condition are compared with its other documents, or with those of all conditions where it has none.
    """
    rows = [json.loads(line) for line in (work / name / "audit.jsonl").read_text(encoding="utf-8").splitlines()]
    table = seenset.open_run(work / "runs" / name).selections[FUSED].documents()
    place = {doc_id: number for number, doc_id in enumerate(table["doc_id"].to_pylist())}
    at = np.array([place[row["id"]] for row in rows])
    member = np.array([bool(row["member"]) for row in rows])
    condition = np.array([row["condition"] for row in rows])
    columns = [column for column in table.column_names if column in detector_names()]
    values = {column: table[column].to_numpy(zero_copy_only=False)[at].astype(np.float64) for column in columns}
    measured = {}
    for one in [*dict.fromkeys(condition[member].tolist()), *([ALL] if ALL not in condition else [])]:
        seen = member if one == ALL else member & (condition == one)
        others = ~member & (condition == one) if (~member & (condition == one)).any() else ~member
        for column, scores in values.items():
            known = np.isfinite(scores)
            measured[one, column] = detection([DetectorScores(scores[seen & known], scores[others & known])])
    return measured


def print_table(name: str, work: Path) -> None:
    """Print the paper's AUC beside ours, then what each procedure selects."""
    spec, ours = specification(name), measured_areas(name, work)
    papers = {(one.condition, one.detector): one.auc for one in spec.figures}
    for condition in dict.fromkeys(one for one, _ in ours):
        best = max((auc for (one, _), auc in ours.items() if one == condition), key=lambda d: d.auc.value or 0)
        if (condition, BEST) in papers:
            ours[condition, BEST] = best
    table = Table("condition", "detector", title=f"{spec.paper}: AUC")
    for column in ("the paper's", "ours (95% interval over documents)"):
        table.add_column(column, justify="right")
    for key in [*ours, *(key for key in papers if key not in ours)]:
        paper = f"{papers[key]:g}" if key in papers else "see the paper" if not papers else "-"
        table.add_row(*key, paper, _shown(ours[key]) if key in ours else "no such rows")
    lists = Table("procedure", title=f"Lists at alpha {ALPHA:g}")
    for column in ("selected", "share of wrong ones", "power"):
        lists.add_column(column, justify="right")
    for procedure, (count, wrong, power) in error_and_power(
        str(work / "runs" / name), work / name / "audit.jsonl"
    ).items():
        lists.add_row(procedure, str(count), f"{wrong:.3f}", f"{power:.3f}")
    print(as_text([table, lists]), end="")


def _shown(figure: Detection) -> str:
    auc = figure.auc
    return "not defined" if auc.value is None else f"{auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}]"
