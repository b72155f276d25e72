"""Which combinations of documents, detectors, models, procedures and settings are accepted is as recorded.

`combinations.json` has a line for each row of a table and a digit for each of its columns: 1 accepted, 0 refused.
COMBINATIONS_RECORD=1 writes it anew; a new detector, procedure or kind of documents adds lines and changes none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline.config.corpus import CorpusConfig
from pipeline.config.selection import CalibrationName, Direction, SelectionConfig
from pipeline.config.training import FsdConfig
from pipeline.config.yaml import build
from pipeline.detectors.base import _registry
from pipeline.errors import UserError
from pipeline.plan.description import build_config, build_evaluation
from pipeline.selection.procedures import PROCEDURES, check_settings

RECORDED = Path(__file__).with_name("combinations.json")
Table = dict[str, str]

KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "picture": {"image": "picture"},
    "picture with caption": {"image": "picture", "caption": "caption"},
    "tokens": {"tokens": "ids"},
    "chat": {"messages": "messages"},
    "chat of completions": {"prompt": "prompt", "completion": "completion"},
    "scores": {"scores": ["score"]},
    "scores with text": {"scores": ["score"], "text": "text"},
    "versions": {"versions": {}},
    "versions marked": {"versions": {"kinds": "kinds", "forms": "forms"}},
    "versions differing": {"versions": {"differing": True}},
    "versions of items": {"versions": {"permute": "choices", "template": "{question} {choices}"}},
    "versions of rows": {"versions": {"permute": "order", "window": 4}},
}
"""Kind of documents -> the keys of a source that state it."""

WEIGHTS, OTHER = {"path": "org/model"}, {"path": "org/other"}
ENDPOINT = {"endpoint": "http://127.0.0.1:9/v1", "name": "served"}
MODELS: dict[str, dict[str, Any]] = {
    "weights": {"model": WEIGHTS},
    "weights, reference and paraphraser": {"model": WEIGHTS, "reference_model": OTHER, "paraphraser": {}},
    "endpoint": {"model": ENDPOINT, "paraphraser": {}},
    "endpoint and reference": {"model": ENDPOINT, "reference_model": OTHER},
    "reference at an endpoint": {"model": WEIGHTS, "reference_model": ENDPOINT, "paraphraser": {}},
    "two endpoints": {"model": ENDPOINT, "reference_model": {**ENDPOINT, "name": "other"}},
    "chat endpoint": {"model": {**ENDPOINT, "api": "chat"}},
    "endpoint without log_probs": {"model": {**ENDPOINT, "log_probs": "none"}},
    "reference at a chat endpoint": {"model": WEIGHTS, "reference_model": {**ENDPOINT, "api": "chat"}},
    "name": {"model": {"name": "theirs"}},
    "nothing": {},
}


def written(value: Any) -> str:
    """A value of a configuration without quotes, as the name of a row."""
    return json.dumps(value).replace('"', "")


def digits(accepted: Iterable[bool]) -> str:
    return "".join("01"[one] for one in accepted)


def holds(check: Callable[..., object], *arguments: object) -> bool:
    """Whether a check accepts; any error but a refusal fails the test."""
    try:
        check(*arguments)
    except UserError:
        return False
    return True


def source_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"path": "documents.parquet", **KINDS[kind], **more}


def corpus_of(kind: str, roles: tuple[str, ...] = ("unseen", "seen"), **more: Any) -> dict[str, Any]:
    """Audited documents of a kind, and known ones, where the kind takes them."""
    known = () if kind.startswith("versions") else roles
    groups = {} if kind == "versions of rows" else more
    return {role: source_of(kind, **groups) for role in ("audit", *known)}


def audit_of(kind: str, **settings: Any) -> dict[str, Any]:
    scored = {} if kind.startswith("scores") else {"model": WEIGHTS}
    part = {"loss": {"part": "description"}} if kind.startswith("picture") else "loss"
    detectors = {} if kind.startswith("scores") else {"detectors": [part]}
    return {"run": "run", "corpus": corpus_of(kind), **scored, **detectors, **settings}


def detector_entries() -> list[Any]:
    """Every built-in detector, and each variant of it that makes other passes."""
    entries: list[Any] = []
    for name, module in _registry.modules.items():
        if module.startswith("pipeline."):
            entries.append(name)
            for part, caption in product(("image", "description"), ("given", "generated")):
                if "part" in _registry[name].arguments:
                    entries.append({name: {"part": part, "caption": caption}})
    bases: list[Any] = ["lowercase", "gradient_norm", "reference", "pac", {"loss": {"part": "description"}}]
    entries += [{name: {"base": base}} for base in bases for name in ("fsd", "knockoff")]
    return [*entries, {"mod_renyi": {"order": "1"}}, {"samia": {"temperature": 0}}, {"gradient_norm": {"of": "sum"}}]


def detectors_and_models() -> Table:
    """Kind of documents and detector, for each choice of `MODELS`."""
    return {
        f"{kind}: {written(entry)}": digits(
            holds(build_config, {"run": "run", "corpus": corpus_of(kind), "detectors": [entry], **given})
            for given in MODELS.values()
        )
        for kind in KINDS
        for entry in detector_entries()
    }


def windows_and_models() -> Table:
    """Detectors of texts, and some of every other kind, with several windows, for each choice of `MODELS`."""
    entries = {"text": detector_entries(), **{kind: columns_of(kind)[0] for kind in KINDS if kind != "text"}}
    return {
        f"{kind}: {written(entry)}": digits(
            holds(build_config, {"run": "run", "corpus": corpus_of(kind), "detectors": [entry], "windows": 4, **given})
            for given in MODELS.values()
        )
        for kind, some in entries.items()
        for entry in some
    }


ROLES: list[tuple[str, ...]] = [(), ("unseen",), ("seen",), ("unseen", "seen")]


def detectors_and_roles() -> Table:
    """Detectors of texts, for each choice of roles of known documents."""
    rows: list[tuple[Any, dict[str, Any]]] = [(entry, {}) for entry in detector_entries()]
    rows += [("fsd", {"fsd": {"train_on": role}}) for role in ("seen", "mix")]
    rows += [("fsd", {"fsd": {"corpus": {"path": "other.jsonl"}}})]
    given = {**audit_of("text"), **MODELS["weights, reference and paraphraser"]}
    return {
        f"{written(entry)} {written(more)}": digits(
            holds(build_config, {**given, **more, "detectors": [entry], "corpus": corpus_of("text", roles)})
            for roles in ROLES
        )
        for entry, more in rows
    }


OF_PART = {"part": "description"}
SIGNED = {"text": "camia", "tokens": "camia", "versions": "camia", "picture": {"min_k_plus_plus": OF_PART}}


def columns_of(kind: str) -> tuple[list[Any], str, str]:
    """Detectors of a kind; the columns of one whose scores have one sign and of one whose scores have both."""
    first = kind.split()[0]
    if first == "scores":
        return ["from_column"], "score", "score"
    if first == "picture":
        return (
            [{"loss": OF_PART}, SIGNED[first]],
            "loss(part=description)",
            "min_k_plus_plus(part=description)",
        )
    if kind == "versions differing" or first == "chat":
        return ["loss", "min_k_plus_plus"], "loss", "min_k_plus_plus"
    return ["loss", SIGNED[first]], "loss", str(SIGNED[first])


def selections(plain: str, signed: str) -> Iterator[dict[str, Any]]:
    for column, calibration, direction in product((plain, signed), get_args(CalibrationName), get_args(Direction)):
        yield {"name": "one", "detectors": [column], "calibration": calibration, "direction": direction}


def built_in() -> list[str]:
    return [name for name in PROCEDURES if PROCEDURES[name].built_in]


def selected(kind: str, procedure: str, given: Mapping[str, Any]) -> str:
    detectors, plain, signed = columns_of(kind)
    scores = [] if kind.startswith("scores") else detectors
    return digits(
        holds(build_config, {**given, **({"detectors": scores} if scores else {}), "selections": [asked]})
        for asked in ({**one, "procedure": procedure} for one in selections(plain, signed))
    )


def procedures_and_kinds() -> Table:
    """Kind and procedure, for each sign of a detector, calibration and direction; all roles and groups are given."""
    return {
        f"{kind}: {name}": selected(kind, name, {**audit_of(kind), "corpus": corpus_of(kind, group="group")})
        for kind in KINDS
        for name in built_in()
    }


def procedures_and_roles() -> Table:
    """Roles of texts, which roles have groups, and procedure; columns as in `procedures_and_kinds`."""
    table = {}
    for roles, grouped, name in product(ROLES, ((), ("audit",), ("audit", "unseen"), ("audit", "seen")), built_in()):
        corpus = {
            role: {**source, **({"group": "group"} if role in grouped else {})}
            for role, source in corpus_of("text", roles).items()
        }
        row = f"{' '.join(roles)}; groups of {' '.join(grouped)}: {name}"
        table[row] = selected("text", name, {**audit_of("text"), "corpus": corpus})
    return table


def settings_of_selections() -> Table:
    """Procedure, calibration, direction and detectors of a selection, for settings that some procedures take alone."""
    spread = "knockoff_spread(base=loss, draws=10)"
    choices: list[list[str]] = [["loss"], ["loss", "zlib"], ["knockoff", spread], ["loss", "zlib", "min_k"]]
    changes = [
        {"step_up": step_up, "reconformal": reconformal, "lambda": share, "confidence": confidence, "ties": ties}
        for step_up, reconformal, share, confidence, ties in product(
            ("bh", "storey"), (False, True), (None, 0.5), (0.95, 0.9), ("conservative", "random")
        )
    ]
    table = {}
    kinds = product(built_in(), get_args(CalibrationName), get_args(Direction), choices)
    for name, calibration, direction, columns in kinds:
        one = {"name": "one", "procedure": name, "calibration": calibration, "direction": direction}
        row = f"{name}, {calibration}, {direction}, {len(columns)} of {columns[0]}"
        table[row] = digits(
            holds(check_settings, build(SelectionConfig, {**one, "detectors": columns, **changed}), "selections.0")
            for changed in changes
        )
    return table


CHANGES: dict[str, Any] = {
    "series": {"ledger": "schedule", "alpha": 0.1},
    "against": "other",
    "text_transform": {"dates": "remove"},
}


def settings_and_kinds() -> Table:
    """Kind and settings, for an audit without a selection, with one, of conditional calibration, and an evaluation."""
    table = {}
    for kind, names in product(KINDS, product((False, True), repeat=len(CHANGES))):
        given = {key: CHANGES[key] for key, taken in zip(CHANGES, names, strict=True) if taken}
        detectors, plain, _ = columns_of(kind)
        scored = {} if kind.startswith("scores") else {"detectors": detectors}
        one = {"name": "one", "detectors": [plain], "procedure": "bh"}
        whole: dict[str, Any] = {**audit_of(kind), **scored, **given}
        asked = {**whole, "selections": [one]}
        labelled = {**whole, "corpus": {"labelled": source_of(kind, label="label")}}
        table[f"{kind}: {' '.join(given)}"] = digits(
            holds(check, one)
            for check, one in [
                (build_config, whole),
                (build_config, asked),
                (build_config, {**whole, "selections": [{**one, "alpha": 0.05}]}),
                (build_config, {**whole, "selections": [{**one, "calibration": "conditional"}]}),
                (build_evaluation, asked),
                (build_evaluation, {**asked, "corpus": {**asked["corpus"], "audit": None}}),
                (build_evaluation, labelled),
                (build_config, labelled),
            ]
        )
    return table


def kinds_together() -> Table:
    """Kind of the audited documents, for each kind of unseen ones, of labelled ones, and of an adapter's."""
    table = {}
    for kind in KINDS:
        others = [{"audit": source_of(kind), role: source_of(other)} for role in ("unseen", "seen") for other in KINDS]
        labelled = [{"labelled": source_of(kind, label="label")}, {"labelled": source_of(kind)}]
        beside = [{**labelled[0], role: source_of(kind)} for role in ("audit", "unseen", "seen")]
        trained = {"corpus": source_of(kind)}
        table[kind] = digits(
            [
                *(holds(build, CorpusConfig, corpus) for corpus in [*others, *labelled, *beside]),
                holds(build, FsdConfig, trained),
                *(holds(build_config, audit_of(one, fsd=trained)) for one in KINDS),
            ]
        )
    return table


FORMS: dict[str, list[Any]] = {
    "text": [None, "text", "body"],
    "image": [None, "picture"],
    "caption": [None, "caption"],
    "tokens": [None, "ids"],
    "scores": [None, ["score"], [{"column": "score", "higher": "nonmember"}]],
    "versions": [None, {}, {"differing": True}, {"permute": "order", "window": 4}],
}
FORMS_OF_CHATS: dict[str, list[Any]] = {
    "text": [None, "text", "body"],
    "template": [None, "{question}"],
    "messages": [None, "messages"],
    "prompt": [None, "prompt"],
    "completion": [None, "completion"],
    "tools": [None, "tools"],
}
PLACES = ("audit", "unseen", "seen", "labelled")


def keys_of_sources() -> Table:
    """Keys of a source, for each role and for documents to train on, with id and group and without them."""
    return of_forms(FORMS)


def keys_of_chats() -> Table:
    """Keys of a source of chats, beside those of texts; columns as in `keys_of_sources`."""
    return of_forms(FORMS_OF_CHATS)


def of_forms(forms: Mapping[str, list[Any]]) -> Table:
    table = {}
    for values in product(*forms.values()):
        given = {key: value for key, value in zip(forms, values, strict=True) if value is not None}
        ends: list[dict[str, Any]] = [
            {},
            {"id": "id"},
            {"group": "group"},
            {key: None for key in forms if key not in (*given, "text")},
        ]
        accepted = []
        for role, more in product(PLACES, ends):
            label = {"label": "label"} if role == "labelled" else {}
            corpus = {role: {"path": "documents.parquet", **given, **more, **label}}
            accepted.append(holds(build, CorpusConfig, corpus))
        training = {"corpus": {"path": "documents.parquet", **given}}
        table[written(given)] = digits([*accepted, holds(build, FsdConfig, training)])
    return table


PLACED: dict[str, dict[str, Any]] = {
    "path": {"path": "documents.parquet"},
    "paths": {"path": ["a.jsonl", "b.jsonl"]},
    "dataset": {"dataset": "org/documents"},
    "both": {"path": "documents.parquet", "dataset": "org/documents"},
    "neither": {},
}
HOW: dict[str, Any] = {
    "subset": "en",
    "split": "train[:10]",
    "revision": "main",
    "follow_links": True,
    "encoding": "cp1252",
    "delimiter": ";",
    "quoting": "none",
    "label": "label",
}


def places_of_sources() -> Table:
    """Kind and place of documents, for each further key."""
    table = {}
    for kind, (place, where) in product(KINDS, PLACED.items()):
        sources = [{**KINDS[kind], **where}, *({**KINDS[kind], **where, key: value} for key, value in HOW.items())]
        table[f"{kind}: {place}"] = digits(holds(build, CorpusConfig, {"audit": source}) for source in sources)
    return table


TABLES = (
    detectors_and_models,
    windows_and_models,
    detectors_and_roles,
    procedures_and_kinds,
    procedures_and_roles,
    settings_of_selections,
    settings_and_kinds,
    kinds_together,
    keys_of_sources,
    keys_of_chats,
    places_of_sources,
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_the_accepted_combinations_are_the_recorded_ones(table: Callable[[], Table]) -> None:
    found = table()
    assert len({*"".join(found.values())}) == 2, "some are accepted, and some refused"
    if os.environ.get("COMBINATIONS_RECORD"):
        recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        RECORDED.write_text(json.dumps({**recorded, table.__name__: found}, indent=1) + "\n")
    recorded = json.loads(RECORDED.read_text())[table.__name__]
    assert found.keys() == recorded.keys()
    assert {row: (found[row], recorded[row]) for row in found if found[row] != recorded[row]} == {}
