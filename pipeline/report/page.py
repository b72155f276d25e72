"""Write the report: one HTML page that needs nothing else, the same facts as JSON, and the figures as files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined

from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import CorpusConfig, SourceConfig
from pipeline.config.models import ModelConfig
from pipeline.corpus.documents import fetch_texts
from pipeline.corpus.inputs import find_inputs
from pipeline.corpus.shard import Shard
from pipeline.errors import UserError
from pipeline.report import wording
from pipeline.report.facts import Listed, Run, Selection, read_run
from pipeline.report.figures import Drawn, draw
from pipeline.store.files import Store

EXCERPT = 300
NOT_AVAILABLE = "text not available"
CHANGED = "text not available: the file has changed since it was scored"
_COLUMNS = ("doc_id", "role", "source", "row", "stage", "reason", "message")
_Place = tuple[str, int]


def write_report(store: Store, texts: bool = True) -> str:
    """Write report/report.html, report/report.json and report/figures/*.png from the run directory alone.

    Figures of selections that are no longer there are removed. The same run directory gives the same bytes.

    Args:
        store: the run directory.
        texts: whether excerpts of the first selected documents are shown; without them no document's text, nor an
            error message that may quote one, is written anywhere under report/.

    Returns:
        the path or URL of report.html.

    Raises:
        UserError: not a run directory, or a damaged file in it.
    """
    run = read_run(store)
    excerpts = _excerpts(run) if texts else {}
    figures = {selection.name: draw(selection) for selection in run.selections}
    facts = _facts(run, excerpts, figures, texts)
    drawn = [figure for group in figures.values() for figure in group]
    for figure in drawn:
        store.write(f"report/figures/{figure.file}", figure.png)
    for name in store.names("report/figures", ".png"):
        if name not in {figure.file for figure in drawn}:
            store.remove(f"report/figures/{name}")
    store.write_json("report/report.json", facts)
    store.write("report/report.html", _html(facts, run, figures).encode("utf-8", "replace"))
    return f"{store.url}/report/report.html"


# --- facts


def _facts(run: Run, excerpts: dict[_Place, str], figures: dict[str, list[Drawn]], texts: bool) -> dict[str, Any]:
    """Everything that the page says, as plain values: this is report.json."""
    config = run.manifest.get("config", {})
    return {
        "run": run.url,
        "sample": run.limit is not None,
        "limit": run.limit,
        "texts": texts,
        "notices": wording.notices(run),
        "model": _model(run, config),
        "selections": [_selection(run, one, excerpts, figures[one.name], texts) for one in run.selections],
        "not_covered": wording.not_covered(run.selections),
        "documents": [asdict(role) for role in run.roles],
        "quarantine": {
            "reasons": run.quarantine.reasons,
            "examples": [_example(example, texts) for example in run.quarantine.examples],
        },
        "provenance": {
            "run": run.url,
            "seed": run.manifest.get("seed", config.get("seed")),
            "versions": run.manifest.get("versions") or {},
            "fingerprint": run.manifest.get("fingerprint") or {},
            "gradient": run.manifest.get("gradient"),
            "inputs": run.manifest.get("inputs") or [],
            "config": config,
        },
    }


def _model(run: Run, config: dict[str, Any]) -> dict[str, Any]:
    asked = config.get("model", {})
    loaded = run.manifest.get("model") or {}
    fingerprint = json.dumps(run.manifest.get("fingerprint") or {}, sort_keys=True, default=str)
    return {
        "architecture": None,
        "dtype": (run.manifest.get("fingerprint") or {}).get("dtype") or asked.get("dtype"),
        **loaded,
        "name": wording.model_name(asked),
        "path": asked.get("path") or wording.model_name(asked),
        "revision": asked.get("revision"),
        "adapter": asked.get("adapter"),
        "quantization": asked.get("quantization"),
        "fingerprint": hashlib.sha256(fingerprint.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "max_tokens": config.get("max_tokens"),
        "counted": "words" if asked.get("endpoint") else "tokens",
        "fine_tuned": wording.fine_tuned(run),
    }


def _selection(
    run: Run, selection: Selection, excerpts: dict[_Place, str], figures: Sequence[Drawn], texts: bool
) -> dict[str, Any]:
    found = wording.answer(run, selection)
    listed = [_listed(document, excerpts) if texts else asdict(document) for document in selection.listed]
    return {
        "name": selection.name,
        "answer": {
            "sentence": found.sentence,
            "headline": found.headline,
            "terms": found.terms,
            "doubts": list(found.doubts),
            "cautions": list(found.cautions),
        },
        "summary": selection.summary,
        "checks": [asdict(check) for check in wording.checks(selection.summary)],
        "figures": [f"figures/{figure.file}" for figure in figures],
        "selected": listed,
    }


def _listed(document: Listed, excerpts: dict[_Place, str]) -> dict[str, Any]:
    place = (document.source, document.row)
    return {**asdict(document), "excerpt": excerpts.get(place, NOT_AVAILABLE)}


def _example(example: dict[str, Any], texts: bool) -> dict[str, Any]:
    kept = {name: example.get(name) for name in _COLUMNS}
    if not texts:
        del kept["message"]
    return kept


# --- excerpts


def _excerpts(run: Run) -> dict[_Place, str]:
    """The beginnings of the listed documents; a source that is gone or has changed says so instead."""
    wanted: dict[str, set[int]] = {}
    for selection in run.selections:
        for document in selection.listed:
            wanted.setdefault(document.source, set()).add(document.row)
    shards = [Shard.from_dict(value) for value in run.shards if value["role"] == "audit"]
    found: dict[_Place, str] = {}
    for source, rows in sorted(wanted.items()):
        own = [shard for shard in shards if shard.name == source]
        found.update(_texts_of(source, sorted(rows), own))
    return found


def _texts_of(source: str, rows: Sequence[int], shards: Sequence[Shard]) -> dict[_Place, str]:
    places = [(source, row) for row in rows]
    try:
        if shards and not _unchanged(shards[0]):
            return dict.fromkeys(places, CHANGED)
        texts = fetch_texts(shards, places)
    except UserError:
        return {}
    return {place: _shortened(text) for place, text in texts.items() if text}


def _unchanged(shard: Shard) -> bool:
    """Whether the input still is what was scored: the text of another document must never be shown as selected."""
    if shard.format == "hub":
        return True
    audit = SourceConfig(
        path=shard.path, text=shard.text, id=shard.id_column, group=shard.group_column, split=shard.split
    )
    config = AuditConfig(run="", model=ModelConfig(path=""), corpus=CorpusConfig(audit=audit))
    return any(entry.path == shard.path and entry.content == shard.content for entry in find_inputs(config))


def _shortened(text: str) -> str:
    start = " ".join(text[: 8 * EXCERPT].split())
    cut = len(start) > EXCERPT or len(text) > 8 * EXCERPT
    return wording.visible(start[:EXCERPT].rstrip()) + ("…" if cut else "")


# --- the page


def _html(facts: dict[str, Any], run: Run, figures: dict[str, list[Drawn]]) -> str:
    environment = Environment(
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=wording.percent, documents=wording.documents, pretty=_pretty)
    source = resources.files("pipeline.report").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        facts=facts,
        nulls={one.name: wording.null_share(one.summary) for one in run.selections},
        rows={one.name: one.n_rows for one in run.selections},
        figures={name: [(figure, _data_uri(figure.png)) for figure in group] for name, group in figures.items()},
        tested={one.name: wording.tested(one.summary) for one in run.selections},
    )


def _shown(value: Any) -> Any:
    """What the page prints for any value, before escaping: nothing that hides, and a dash for nothing."""
    if value is None:
        return "\N{EN DASH}"
    return wording.visible(value) if type(value) is str else value


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _pretty(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)
