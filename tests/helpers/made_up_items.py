"""Made-up multiple-choice items and documents with versions, for checks of how their published versions were drawn."""

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.checks.shuffle import DrawsPreview, VersionDraws, table_in_memory, version_draws
from pipeline.config.corpus import NEAR_SHARE, VersionsConfig
from pipeline.corpus.draw_features import ChoiceItem, DrawFeatures, item_features, versions_features
from pipeline.plan.description import build_config
from pipeline.plan.preflight import PLAN, check_documents
from pipeline.run.plan import Plan, make_plan

Row = dict[str, Any]
SYLLABLES = (
    "ka",
    "lem",
    "tor",
    "vin",
    "dan",
    "pel",
    "ros",
    "hal",
    "tus",
    "mo",
    "ny",
    "gar",
    "bel",
    "dri",
    "fen",
    "ruk",
)
TEMPLATE = "{question}\n{choices}"


def name(rng: random.Random, syllables: int = 2) -> str:
    return "".join(rng.choices(SYLLABLES, k=syllables)).capitalize()


def make_items(count: int, seed: int = 0, options: int = 4) -> list[Row]:
    """Items with shuffled options, and the text of the right one, which is longer."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        right = f"{name(rng)} {name(rng, rng.choice((2, 3)))} of {name(rng)}"
        choices = [right, *(f"{name(rng)} {name(rng)}" for _ in range(options - 1))]
        rng.shuffle(choices)
        question = f"In {name(rng)}, who {rng.choice(('sells', 'keeps', 'guards'))} the {name(rng, 3)} of {name(rng)}?"
        rows.append({"id": f"v{number}", "question": question, "choices": choices, "right": right})
    return rows


def make_versions(
    count: int, published: Callable[[random.Random, list[str]], int], seed: int = 0, versions: int = 6
) -> list[Row]:
    """Documents with versions of a few words, one of which a function publishes."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        texts = [" ".join(name(rng, rng.choice((2, 3))) for _ in range(8)) for _ in range(versions)]
        rows.append({"id": f"d{number}", "versions": texts, "index": published(rng, texts)})
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preview_of(path: Path, rows: Sequence[Row], versions: dict[str, Any], **source: Any) -> DrawsPreview:
    """What `seenset plan` says of rows, with the model left out."""
    return preview_in(write_rows(path, rows), versions, **source)


def preview_in(path: Path, versions: dict[str, Any], **source: Any) -> DrawsPreview:
    """What `seenset plan` says of a file, with the model left out."""
    preview = check_documents(plan_of(path, versions, **source), PLAN).draws
    assert preview is not None
    return preview


def plan_of(path: Path, versions: dict[str, Any], **source: Any) -> Plan:
    """The plan of an audit of a file, with the model left out."""
    given = {"path": str(path), "versions": versions, **source}
    config = build_config(
        {
            "run": str(path.parent / "run"),
            "model": {"path": "model"},
            "corpus": {"audit": given},
            "detectors": ["loss"],
            "selections": [{"name": "list", "detectors": ["loss"], "procedure": "versions"}],
        }
    )
    return make_plan(config)


@lru_cache(maxsize=20_000)
def _features(question: str, choices: tuple[str, ...]) -> DrawFeatures:
    return item_features(ChoiceItem(choices, {"question": question}))


def draws_of_items(rows: Sequence[Row], near_copies: float = NEAR_SHARE) -> VersionDraws:
    """The independent items among some, and their shuffle check."""
    drawn = [(0, 24, _features(row["question"], tuple(row["choices"]))) for row in rows]
    settings = VersionsConfig(permute="choices", template=TEMPLATE)
    return version_draws(table_in_memory([row["id"] for row in rows], drawn), settings, near_copies)


def draws_of_versions(rows: Sequence[Row], drawn_first: bool = False) -> VersionDraws:
    """The independent documents with versions among some, and their shuffle check."""
    drawn = [(row["index"], len(row["versions"]), versions_features(row["versions"], row["index"])) for row in rows]
    table = table_in_memory([row["id"] for row in rows], drawn)
    return version_draws(table, VersionsConfig(drawn_first=drawn_first), NEAR_SHARE)
