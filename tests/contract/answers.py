"""What a run directory holds, read as the documentation says: through receipts, with any Parquet and JSON reader."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

EXPECTED = Path(__file__).parent / "expected"
PROVED = {
    "alpha",
    "bound",
    "bound_withheld",
    "calibration",
    "direction",
    "guarantee",
    "minimum_selectable",
    "n_audit",
    "n_calibration",
    "n_quarantined",
    "n_selected",
    "procedure",
    "strict",
}


def receipts(run: Path, stage: str = "score") -> dict[str, dict[str, Any]]:
    """The receipts of a stage, by shard."""
    files = sorted((run / "receipts" / stage).glob("[!.]*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def scores(run: Path) -> dict[str, bytes]:
    """The bytes of the score and quarantine files, by shard and kind."""
    found = {}
    for shard, receipt in receipts(run).items():
        assert receipt["n_in"] == receipt["n_scored"] + receipt["n_quarantined"] + receipt["n_judged"]
        for kind in ("data", "quarantine"):
            if receipt[kind]:
                found[f"{kind} of {shard}"] = (run / receipt[kind]).read_bytes()
    return found


def decisions(run: Path, *names: str) -> dict[str, bytes]:
    """The bytes of all files of the answers, but for digests, which cover where the run lies."""
    folders = [run / "selection" / name for name in names] or [f for f in (run / "selection").iterdir() if f.is_dir()]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.name != "digests.json"}


def check_same(run: Path, reference: Path, *names: str) -> None:
    """The same scores and the same answers to these questions, byte for byte."""
    for of_run, of_reference in (
        (scores(run), scores(reference)),
        (decisions(run, *names), decisions(reference, *names)),
    ):
        assert of_run, "something is compared"
        assert of_run.keys() == of_reference.keys()
        assert [name for name in of_run if of_run[name] != of_reference[name]] == []


def rows(run: Path) -> dict[str, dict[str, Any]]:
    """The scored documents by id, of documents with one id the first; no row of a shard may stand there twice."""
    by_id: dict[str, dict[str, Any]] = {}
    for receipt in receipts(run).values():
        read = pq.read_table(run / receipt["data"]).to_pylist()
        assert len({row["row"] for row in read}) == len(read) == receipt["n_scored"]
        for row in read:
            by_id.setdefault(row["doc_id"], row)
    return by_id


def quarantine(run: Path) -> dict[tuple[str, int], str]:
    """Why documents were quarantined, by id and row."""
    files = [run / one["quarantine"] for one in receipts(run).values() if one["quarantine"]]
    read = [row for file in files for row in pq.read_table(file).to_pylist()]
    return {(row["doc_id"], row["row"]): row["reason"] for row in read}


def exact_text(p: float, most: int) -> str:
    """A number as the fraction that it is, with a denominator of at most so much, or with twelve digits."""
    fraction = Fraction(p).limit_denominator(most)
    return str(fraction) if float(fraction) == p else f"{p:.12g}"


def answer(run: Path, name: str) -> dict[str, Any]:
    """A selection in readable form, each number exact: counts, bounds, documents by p-value, the list in order."""
    summary = json.loads((run / "selection" / name / "summary.json").read_text())
    by_p: dict[str, str] = {}
    for row in pq.read_table(run / "selection" / name / "documents").to_pylist():
        key = exact_text(row["p_value"], summary["n_calibration"] + 1) + (" selected" if row["selected"] else "")
        by_p[key] = f"{by_p.get(key, '')} {row['doc_id']}".strip()
    selected = pq.read_table(run / "selection" / name / "selected.parquet").to_pylist()
    shares = {
        key: summary[key] and exact_text(summary[key], 10 * summary["n_audit"])
        for key in ("threshold", "null_proportion")
    }
    return {
        "numbers": {key: summary[key] for key in sorted(PROVED)} | shares,
        "documents by p-value": by_p,
        "selected": " ".join(f"{Path(row['source']).name}:{row['row']}" for row in selected),
    }


def shape(value: Any, path: str = "") -> dict[str, str]:
    """The keys of a JSON value with the types of what they hold: {"selections[].name": "string"}."""
    if isinstance(value, dict):
        found: dict[str, str] = {path: "object"} if path else {}
        parts = [(f"{path}.{key}".lstrip("."), item) for key, item in value.items()]
    elif isinstance(value, list):
        found, parts = {path: "list"}, [(f"{path}[]", item) for item in value]
    else:
        named = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
        passing = path.rpartition(".")[2] == "eta_s"  # is known only where the run took long enough
        return {path: "null|number" if passing else named[type(value)]}
    for key, item in parts:
        for name, kind in shape(item, key).items():
            found[name] = "|".join(sorted({*found.get(name, kind).split("|"), *kind.split("|")}))
    return found


def check_recorded(name: str, value: Any) -> None:
    """A value is the one in expected/NAME.json; CONTRACT_RECORD=1 writes it anew instead."""
    file = EXPECTED / f"{name}.json"
    if os.environ.get("CONTRACT_RECORD"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value, indent=1, sort_keys=isinstance(value, dict)) + "\n")
    recorded = json.loads(file.read_text())
    if isinstance(recorded, dict):
        assert value.keys() == recorded.keys()
        assert {key: value[key] for key in value if value[key] != recorded[key]} == {}
    assert value == recorded
