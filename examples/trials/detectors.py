"""Every registered detector on one small model: what it tells apart, what a selection finds by it, and what it costs.

The same passages are trained into the model twice, once among many others, four times, and once. Each detector scores
them beside passages that no model has seen, of which 30, 100 or 200 calibrate in each split. Scores are kept, so the
same call again goes on where the last one ended.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from examples.demo.demo import console, ensure_passages
from pipeline.answers.detection import DetectorScores, Estimate, detection, least_untrained
from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import id_key
from pipeline.detectors.base import FORWARD, LOWERCASE, REFERENCE, Detector, detector_names
from pipeline.detectors.camia import COPIES
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.models.load import open_model
from pipeline.run.manifest import read_run
from pipeline.run.scored import read_scored
from pipeline.selection.engine import Scores
from pipeline.store.files import Store
from pipeline.training.train import train
from pipeline.trial.config import TrialConfig
from pipeline.trial.repeats import Pool, measure
from pipeline.trial.table import selection_rows
from seenset import audit

EXPOSURES = {"twice": 2, "once among others": 1, "four times": 4, "once": 1}  # name -> epochs, in order of interest
AMONG = "once among others"
QUESTIONS = tuple((procedure, ranks) for procedure in ("bh", "storey") for ranks in ("whole", "smoothed"))
ALPHAS = (0.1, 0.05)
CALIBRATION = (30, 100, 200)
AUDITED, MEMBER_SHARE = 200, 0.3
RATES = (0.01, 0.05)
REPEATS = 100
FSD_DOCUMENTS = 40
SETTINGS: dict[str, dict[str, Any]] = {"camia": {"of": "difference"}, "knockoff": {"draws": 2}}
"""Arguments in place of defaults: the default column of `camia` is `loss`; `knockoff` takes hours with its default."""
LIGHT = frozenset({FORWARD, LOWERCASE, REFERENCE})
"""Passes that cost so little that the detectors which read no others share a run."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many passages there are of each kind."""

    members: int = 60
    unseen: int = 480  # 40 train the adapter of fsd, and 437 are needed for an interval at 1%
    seen: int = 12  # trained in like the members, and known as such to detectors that ask for some
    others: int = 108  # read once, among which the members are read once
    few: int = 30  # members that a costly detector scores, beside three times as many unseen ones


@dataclass(frozen=True, slots=True)
class Cost:
    """The passes of a detector over a document."""

    forward: int
    gradient: int
    written: int  # continuations and paraphrases
    adapter: bool  # trained once for all documents

    @classmethod
    def of(cls, detector: Detector) -> Cost:
        """What its `needs` come to."""
        forward = sum(COPIES if one.text == "repeated" else 1 for one in detector.needs if one.kind == "forward")
        gradient = sum(one.kind == "gradient" for one in detector.needs)
        generated = [(one, names) for one, names in detector.needs.items() if one.kind == "generate"]
        written = sum(max(map(int, names)) for _, names in generated)
        written += max((one.draw for one in detector.needs), default=0)
        return cls(int(forward), gradient, written, any(one.adapter for one in detector.needs))

    def __str__(self) -> str:
        counts = (self.forward, self.gradient, self.written, int(self.adapter))
        parts = zip(counts, ("forward", "gradient", "written", "adapter"), strict=True)
        return " + ".join(f"{count} {kind}" for count, kind in parts if count)


@dataclass(frozen=True, slots=True)
class Group:
    """Detectors that read the same passes, and are scored and timed together."""

    entries: tuple[Any, ...]  # as a configuration names them
    weight: float  # forward passes that they are worth
    light: bool
    costly: bool  # scores few documents

    @property
    def columns(self) -> list[str]:
        """The columns of its detectors."""
        return [one.column for one in parse_detectors(self.entries)]


def known_detectors() -> tuple[list[Detector], dict[str, str]]:
    """All registered detectors with their defaults or `SETTINGS`, and name -> why of those that need arguments."""
    known: list[Detector] = []
    unusable: dict[str, str] = {}
    for name in detector_names():
        try:
            (one,) = parse_detectors([{name: SETTINGS[name]} if name in SETTINGS else name])
        except UserError as error:
            unusable[name] = str(error)
        else:
            known += [one] if one.needs else []
            unusable |= {} if one.needs else {name: "reads no pass of a model"}
    return known, unusable


def groups_of(detectors: Sequence[Detector]) -> list[Group]:
    """The detectors by what they read, the cheapest first; all those that sample are one group."""
    groups: dict[Any, Group] = {}
    for one in detectors:
        cost = Cost.of(one)
        sampled = any(needed.continued for needed in one.needs)
        key = "sampled" if sampled else frozenset(one.needs)
        weight = cost.forward + 3 * cost.gradient + (20 if sampled else 40) * cost.written
        entry = {one.name: SETTINGS[one.name]} if one.name in SETTINGS else one.name
        earlier = groups.get(key, Group((), 0, set(one.needs) <= LIGHT, cost.written > 0))
        groups[key] = replace(earlier, entries=(*earlier.entries, entry), weight=max(earlier.weight, weight))
    return sorted(groups.values(), key=lambda group: (group.weight / len(group.entries), group.columns))


def run_detectors(folder: Path, model: dict[str, str], sizes: Sizes = Sizes(), minutes: float | None = None) -> int:
    """Train, score what is not scored yet, print the tables; 0, also where the time did not suffice for all.

    Args:
        folder: of all files, which are used again.
        model: as a configuration names it.
        sizes: numbers of passages.
        minutes: after so many no further group is scored, and the tables say what is left out; None: no limit.

    Raises:
        UserError: too few passages in the installed packages, or a model that cannot be trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    parts = _write_documents(folder, sizes)
    known, unusable = known_detectors()
    groups = groups_of(known)
    first, *rest = EXPOSURES
    costly = [column for group in groups if group.costly for column in group.columns]
    left_out = {first: dict(unusable)}
    left_out |= {exposure: unusable | dict.fromkeys(costly, f"costly: {first} alone") for exposure in rest}
    for exposure, group in _in_order(groups):
        if end is not None and time.monotonic() > end and _seconds(folder, exposure, group, sizes) is None:
            left_out[exposure] |= dict.fromkeys(group.columns, f"no time: {minutes:g} minutes were over")
            continue
        target = _contaminated(folder, model, exposure, parts)
        try:
            _score(folder, exposure, group, model, target, sizes)
        except UserError as error:
            left_out[exposure] |= dict.fromkeys(group.columns, str(error))
    return _print_tables(folder, groups, left_out, sizes)


def _in_order(groups: Sequence[Group]) -> Iterator[tuple[str, Group]]:
    """What is scored, in order: each group alone on the first exposure, where it is timed; the light ones on all."""
    first, *rest = EXPOSURES
    light = [group for group in groups if group.light]
    heavy = [group for group in groups if not group.light and not group.costly]
    for group in light:
        yield first, group
    if light:
        entries = tuple(entry for group in light for entry in group.entries)
        together = Group(entries, sum(group.weight for group in light), True, False)
        for exposure in rest:
            yield exposure, together
    for exposure in EXPOSURES:
        for group in heavy:
            yield exposure, group
    for group in groups:
        if group.costly:
            yield first, group


def _write_documents(folder: Path, sizes: Sizes) -> dict[str, list[str]]:
    """Gather the passages and write a file of each role, also of the few; returns the texts of each kind."""
    count = sizes.members + sizes.unseen + sizes.seen + sizes.others
    lines = ensure_passages(folder, count, seed=0).read_text(encoding="utf-8").splitlines()
    ends = np.cumsum([sizes.members, sizes.unseen, sizes.seen])
    members, unseen, seen, others = (lines[a:b] for a, b in zip((0, *ends), (*ends, count), strict=True))
    files = {"members": members, "unseen": unseen, "seen": seen, "seen_few": seen}
    files |= {"members_few": members[: sizes.few], "unseen_few": unseen[: 3 * sizes.few]}
    for name, part in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in part), encoding="utf-8")
    return {"trained": _texts(members + seen), "others": _texts(others)}


def _texts(lines: Sequence[str]) -> list[str]:
    return [json.loads(line)["text"] for line in lines]


def _contaminated(folder: Path, model: dict[str, str], exposure: str, parts: dict[str, list[str]]) -> dict[str, str]:
    """The model with the members trained in as the exposure says; trained once."""
    adapter = folder / "models" / exposure.replace(" ", "-")
    if not adapter.exists():
        console.print(f"training: {exposure}", highlight=False)
        texts = parts["trained"] + (parts["others"] if exposure == AMONG else [])
        training = FinetuneConfig(epochs=EXPOSURES[exposure], batch_size=4, learning_rate=2e-3)
        opened = open_model(ModelConfig(**model))
        train(opened.model, opened.tokenizer, texts, training, adapter)
    return {**model, "adapter": str(adapter.resolve())}


def _run_folder(folder: Path, exposure: str, group: Group, sizes: Sizes) -> Path:
    """Of the scores of these detectors: another detector in the group makes another run."""
    identity = json.dumps([*group.entries, asdict(sizes)])
    name = f"{parse_detectors(group.entries)[0].name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return folder / "runs" / exposure.replace(" ", "-") / name


def _seconds(folder: Path, exposure: str, group: Group, sizes: Sizes) -> float | None:
    """What the scoring of a group took; None where it is not done."""
    noted = _run_folder(folder, exposure, group, sizes).with_suffix(".json")
    return json.loads(noted.read_text(encoding="utf-8"))["seconds"] if noted.exists() else None


def _score(
    folder: Path, exposure: str, group: Group, model: dict[str, str], target: dict[str, str], sizes: Sizes
) -> None:
    """Score the documents with the detectors of a group, unless their scores are there, and note the seconds."""
    if _seconds(folder, exposure, group, sizes) is not None:
        return
    run = _run_folder(folder, exposure, group, sizes)
    console.print(f"scoring: {exposure}, {', '.join(group.columns)}", highlight=False)
    few = "_few" if group.costly else ""
    settings = {
        "run": str(run.resolve()),
        "model": target,
        "reference_model": model,
        "paraphraser": model,
        "corpus": {
            role: {"path": str((folder / f"{name}{few}.jsonl").resolve()), "id": "id"}
            for role, name in (("audit", "members"), ("unseen", "unseen"), ("seen", "seen"))
        },
        "detectors": list(group.entries),
        "fsd": {"documents": min(FSD_DOCUMENTS, sizes.unseen // 4)},
        "selections": [{"name": "bh", "detectors": [group.columns[0]], "procedure": "bh", "alpha": ALPHAS[0]}],
        "overlap": "drop",
        "error_budget": 0.1,
        "evidence": 0,
        "resources": {"cluster": "local"},
    }
    start = time.monotonic()
    audit(settings, quiet=True)
    seconds = time.monotonic() - start
    run.with_suffix(".json").write_text(json.dumps({"seconds": seconds}) + "\n", encoding="utf-8")


def _pool(run: Path, columns: Sequence[str]) -> Pool:
    """The scores of a run, members first; what an adapter was trained on is left out."""
    store = Store(str(run.resolve()))
    scored = read_scored(store, read_run(store)[1])
    tables = [
        scored.table(receipt, ["doc_id", *columns]).append_column("trained", pa.repeat(role == "audit", rows))
        for role in ("audit", "unseen")
        for receipt in scored.of(role)
        if (rows := len(scored.table(receipt, ["doc_id"])))
    ]
    table = pa.concat_tables(tables)
    ids = table["doc_id"].to_pylist()
    values = {column: table[column].to_numpy() for column in columns}
    keys = np.array([id_key(name) for name in ids], dtype=np.int64)
    trained = np.asarray(table["trained"].to_numpy(), dtype=bool)
    groups = pa.nulls(len(ids), pa.string())
    return Pool(ids, np.arange(len(ids)), trained, np.ones(len(ids), dtype=bool), Scores(values, keys, groups))


def _powers(pool: Pool, unseen: int) -> dict[str, list[Estimate]]:
    """The power of each question at each alpha by each score, where so many unseen documents calibrate.

    All members are audited, beside as many unseen documents as give them their share; empty where there are too few.
    """
    members = int(pool.trained.sum())
    audited = min(AUDITED, round(members / MEMBER_SHARE))
    if len(pool.ids) - members < unseen + audited - round(MEMBER_SHARE * audited):
        return {}
    columns = list(pool.scores.columns)
    questions = [(alpha, procedure, ranks) for alpha in ALPHAS for procedure, ranks in QUESTIONS]
    settings = {
        "run": "detectors",
        "model": {"path": "detectors"},
        "documents": {"path": "detectors"},
        "split": {"unseen": unseen, "audited": audited, "member_share": MEMBER_SHARE},
        "repeats": REPEATS,
        "selections": [
            {
                "name": f"{procedure}-{ranks}-{alpha:g}-{number}",
                "detectors": [column],
                "procedure": procedure,
                "ranks": ranks,
                "alpha": alpha,
            }
            for number, column in enumerate(columns)
            for alpha, procedure, ranks in questions
        ],
    }
    config = build(TrialConfig, settings)
    rows = selection_rows({}, config.selections, measure(pool, config, 0))
    powers = [Estimate(row["power"], row["power_low"], row["power_high"]) for row in rows]
    each = len(questions)
    return {column: powers[each * number : each * (number + 1)] for number, column in enumerate(columns)}


def _print_tables(folder: Path, groups: Sequence[Group], left_out: dict[str, dict[str, str]], sizes: Sizes) -> int:
    """A table of each exposure in Markdown, on the terminal and in tables.md."""
    head = (
        f"{sizes.members} trained and {sizes.unseen} unseen passages (`*`: {sizes.few} and {3 * sizes.few}, fewer than "
        f"the {least_untrained(min(RATES))} that an interval at 1% takes); once among others: {sizes.others} others. "
        f"95% intervals: AUC and TPR over passages, power over {REPEATS} splits, {MEMBER_SHARE:.0%} of up to {AUDITED} "
        "audited passages trained. Seconds: of the run of all detectors that read the same passes (after the first "
        "table of all that take at most two passes)."
    )
    tables = []
    for exposure, reasons in left_out.items():
        scored = [
            (group, _run_folder(folder, exposure, group, sizes), seconds)
            for name, group in _in_order(groups)
            if name == exposure and (seconds := _seconds(folder, exposure, group, sizes)) is not None
        ]
        tables.append(_table(exposure, scored, reasons))
    text = "\n\n".join([head, *tables]) + "\n"
    (folder / "tables.md").write_text(text, encoding="utf-8")
    print(text, end="", flush=True)
    return 0


def _table(exposure: str, scored: Sequence[tuple[Group, Path, float]], reasons: dict[str, str]) -> str:
    """What one exposure's runs came to, the largest AUC first, and what is left out and why."""
    costs = {detector.column: str(Cost.of(detector)) for detector in known_detectors()[0]}
    areas: list[tuple[float, list[str]]] = []
    powers: dict[int, list[tuple[float, list[str]]]] = {unseen: [] for unseen in CALIBRATION}
    for group, run, seconds in scored:
        columns = group.columns
        pool = _pool(run, columns)
        by_unseen = {unseen: _powers(pool, unseen) for unseen in CALIBRATION}
        for column in columns:
            values = pool.scores.columns[column]
            one = detection([DetectorScores(values[pool.trained], values[~pool.trained])])
            name = f"`{column}`{' *' if group.costly else ''}"
            place = -(one.auc.value or 0)
            figures = [one.auc, *(one.tpr[rate] for rate in RATES)]
            areas.append((place, [name, costs[column], f"{seconds:.0f}", *map(_shown, figures)]))
            for unseen, of_column in by_unseen.items():
                if column in of_column:
                    powers[unseen].append((place, [name, *map(_shown, of_column[column])]))
    names = ["detector", "passes", "seconds", "AUC", *(f"TPR at {rate:.0%} FPR" for rate in RATES)]
    tables = [f"Read {exposure}:\n\n{_markdown(names, areas)}"]
    names = ["detector", *(f"`{one}`, {ranks}, {alpha:g}" for alpha in ALPHAS for one, ranks in QUESTIONS)]
    for unseen, rows in powers.items():
        tables.append(f"Read {exposure}, {unseen} unseen calibrate: power by alpha.\n\n{_markdown(names, rows)}")
    by_reason: dict[str, list[str]] = {}
    for column, why in reasons.items():
        by_reason.setdefault(why, []).append(f"`{column}`")
    missing = [f"Not in it: {', '.join(columns)} ({why})." for why, columns in by_reason.items()]
    return "\n\n".join([*tables, *missing])


def _markdown(names: Sequence[str], rows: Sequence[tuple[float, list[str]]]) -> str:
    """A table of rows in the order of their first value."""
    lines = [f"| {' | '.join(cells)} |" for _, cells in sorted(rows)]
    return "\n".join([f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *lines])


def _shown(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
