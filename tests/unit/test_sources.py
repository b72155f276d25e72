"""Sources of documents are a union chosen by their keys: messages name what the user wrote, and the schema fits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_combinations import FORMS, KINDS, holds

from docs.blocks import ROOT, all_pages, blocks
from pipeline.config import kinds
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import (
    STATING,
    ChatSource,
    CompletionSource,
    CorpusConfig,
    PictureSource,
    ScoreSource,
    SourceConfig,
    TokenSource,
    VersionSource,
)
from pipeline.config.yaml import build, load_yaml
from pipeline.errors import UserError
from pipeline.stages.scoring import SCORERS
from pipeline.trial.config import TrialConfig

SOURCES = {
    "text": SourceConfig,
    "picture": PictureSource,
    "picture with caption": PictureSource,
    "tokens": TokenSource,
    "chat": ChatSource,
    "chat of completions": CompletionSource,
    "scores": ScoreSource,
    "scores with text": ScoreSource,
}


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((ROOT / f"docs/schemas/{name}.schema.json").read_text()))


def audit_with(corpus: dict[str, Any]) -> dict[str, Any]:
    return {"run": "run", "model": {"path": "org/model"}, "corpus": corpus}


def test_every_kind_of_documents_has_a_source_and_a_worker_that_scores_it() -> None:
    assert {kind.keys[0] for kind in kinds.KINDS} == SCORERS.keys() == {"text", *STATING}


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_choose_the_class_of_a_source_which_survives_a_round_trip(kind: str) -> None:
    given = {"path": "documents.parquet", **KINDS[kind], "group": None}
    corpus = build(CorpusConfig, {"audit": given})
    assert type(corpus.audit) is SOURCES.get(kind, VersionSource)
    assert build(CorpusConfig, corpus.model_dump()) == corpus


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "data.jsonl",
            "corpus.audit: must be a section with keys of its own, got 'data.jsonl'; did you mean audit: {pa",
        ),
        ({"path": "x", "imgae": "i"}, "unknown key 'corpus.audit.imgae'; did you mean 'image'? known: path, dataset, "),
        ({"path": "x", "toknes": "i"}, "unknown key 'corpus.audit.toknes'; did you mean 'tokens'? known: path, "),
        ({"path": "x", "tokens": "t", "columns": "c"}, "unknown key 'corpus.audit.columns'; known: path, dataset, "),
        ({"path": "x", "image": "i", "captoin": "c"}, "unknown key 'corpus.audit.captoin'; did you mean 'caption'?"),
        ({"path": "x", "image": "i", "id": 5}, "corpus.audit.id: input should be a valid string, got 5"),
        ({"image": "i"}, "corpus.audit: needs exactly one of 'path' and 'dataset'"),
        ({"path": "x", "image": 5}, "corpus.audit.image: input should be a valid string, got 5"),
        ({"path": "x", "scores": "loss"}, "corpus.audit.scores: input should be a valid list, got 'loss'"),
        (
            {"path": "x", "scores": [{"colum": "a"}]},
            "unknown key 'corpus.audit.scores.0.colum'; did you mean 'column'?",
        ),
        ({"path": "x", "versions": {"indx": "a"}}, "unknown key 'corpus.audit.versions.indx'; did you mean 'index'?"),
        ({"path": "x", "prompt": "p"}, "corpus.audit: prompt goes with completion, and only with it"),
        ({"path": "x", "prompt": "p", "completions": "c"}, "unknown key 'corpus.audit.completions'; did you mean 'com"),
        ({"path": "x", "prompt": "p", "text": "t"}, "corpus.audit: prompt goes with completion, and only with it, and"),
        ({"path": "x", "tokens": "t", "image": "i"}, "corpus.audit: image and tokens: a source has documents of one"),
    ],
)
@pytest.mark.parametrize("role", ["audit", "unseen"])
def test_a_refused_source_is_answered_in_the_words_of_the_user(role: str, source: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        build(AuditConfig, audit_with({role: source}))
    assert str(error.value).startswith(message.replace("audit", role))


@pytest.mark.parametrize("role", ["audit", "unseen", "seen", "labelled"])
def test_the_published_schema_accepts_what_is_accepted_and_no_two_kinds_at_once(role: str) -> None:
    schema, accepted, refused = validator("audit"), 0, 0
    for values in product(*FORMS.values()):
        given = {key: value for key, value in zip(FORMS, values, strict=True) if value is not None}
        label = {"label": "label"} if role == "labelled" else {}
        for more in ({}, {key: None for key in FORMS if key not in (*given, "text")}):
            corpus = {role: {"path": "documents.parquet", **given, **more, **label}}
            if holds(build, CorpusConfig, corpus):
                assert list(schema.iter_errors(audit_with(corpus))) == [], corpus
                accepted += 1
            elif role != "labelled" and len({"image", "tokens", "scores", "versions"} & given.keys()) > 1:
                assert not schema.is_valid(audit_with(corpus)), corpus
                refused += 1
    assert accepted >= 20
    assert refused or role == "labelled"


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole configurations in pages, examples, tests and the files for clusters, with where they stand."""
    texts = [(str(block), block.text) for page in all_pages() for block in blocks(page) if block.language == "yaml"]
    files = [path for folder in ("examples", "tests", "cluster", "docs") for path in (ROOT / folder).rglob("*.y*ml")]
    texts += [(str(Path(path).relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in sorted(files)]
    for where, text in texts:
        for part in map(load_yaml, text.split("\n---\n")):
            embedded = part.get("data", {}) if isinstance(part, dict) and part.get("kind") == "ConfigMap" else {}
            for config in (part, *map(load_yaml, embedded.values())):
                if isinstance(config, dict) and "run" in config and {"corpus", "documents"} & config.keys():
                    yield where, config


def test_every_configuration_of_this_project_fits_the_published_schemas() -> None:
    found = list(configurations())
    schemas = {"corpus": validator("audit"), "documents": validator("trial")}
    for where, config in found:
        (name,) = schemas.keys() & config.keys()
        errors = [(list(error.absolute_path), error.message) for error in schemas[name].iter_errors(config)]
        # editors read 2e-3 as a number, as YAML 1.2 does
        assert [one for one in errors if not re.fullmatch(r"'\de-\d' is not of type 'number'", one[1])] == [], where
    assert len(found) > 30, [where for where, _ in found]


def test_a_trial_takes_pictures_by_the_same_union() -> None:
    given = {"path": "x.parquet", "image": "picture", "caption": "caption"}
    trial = {"run": "run", "model": {"path": "m"}, "documents": given, "detectors": [{"loss": {"part": "description"}}]}
    config = build(TrialConfig, {**trial, "selections": [{"name": "a", "detectors": ["loss(part=description)"]}]})
    assert isinstance(config.documents, PictureSource)
