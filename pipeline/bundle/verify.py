"""`seenset verify`: recompute the answers in a bundle from its scores, without the model and without texts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.answers.collection_test import Setting, audited_model, judge_parts, judge_scores
from pipeline.answers.scored_collection import MOST_DOCUMENTS, Collection, depends
from pipeline.answers.summarise import make_summary, summary_in_run
from pipeline.bundle.container import INDEX, BundleIndex, RefutedError, unpack
from pipeline.bundle.members import (
    DOCUMENTS,
    VERDICTS,
    BundledVersions,
    bundled_schema,
    check_values,
    member_names,
    score_column,
    summary_member,
    verdicts_member,
)
from pipeline.checks.check import AnswerFacts
from pipeline.checks.dependent_documents import NO_GROUPS, GroupSizes, NearDuplicatesDiagnostic
from pipeline.checks.diagnostic import BlindDiagnostic
from pipeline.checks.registry import CHECK_NAMED, Conclusion
from pipeline.config.corpus import ROLES, Role
from pipeline.config.models import ModelConfig
from pipeline.config.selection import NULL_ROLE, SelectionConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import id_key
from pipeline.corpus.reasons import Reason
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError, error_line
from pipeline.results.summary import Summary
from pipeline.run.manifest import Manifest
from pipeline.run.records import MANIFEST_FILE, VERDICT_FILE, opened
from pipeline.selection.collection import joined_blocks
from pipeline.selection.engine import LATE, Scores, Verdict, answer_all
from pipeline.selection.procedures import check_known
from pipeline.selection.schedule import Slot, alpha_share
from pipeline.selection.smoothing import IdDigest, model_key
from pipeline.stages.events import FEATURES

Finding = Literal["holds", "stated", "refuted"]

CLOSE = 1e-9
"""Relative tolerance for floating-point numbers, because processors round differently."""

MOST_NAMED = 20
"""Maximum number of differing values that are named for each answer."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A statement of a bundle, and the result of its check."""

    outcome: Finding  # stated: by the run only; scores do not determine it
    about: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.about}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class BundleVerification:
    """The results of checking a bundle."""

    bundle: str
    sha256: str  # SHA-256 of the file
    findings: list[Checked] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing is refuted."""
        return all(finding.outcome != "refuted" for finding in self.findings)

    def plain(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {**asdict(self), "holds": self.holds}


def verify_bundle(data: bytes, name: str, commitment: Mapping[str, Any] | None = None) -> BundleVerification:
    """Check the digests of a bundle, and recompute what its scores determine.

    Args:
        data: content of the file.
        name: name of the file, for messages.
        commitment: required commitment of the documents with versions, from `parse_commitment`.

    Raises:
        UserError: not a bundle, or one of another version.
        RefutedError: a damaged bundle, or members with invalid content.
    """
    index, members = unpack(data, name)
    try:
        bundle = _Bundle.parse(index, members)
        findings = [
            Checked("holds", "container", f"{len(members)} members are as {INDEX} lists them"),
            *bundle.stated(),
            *bundle.check_commitment(commitment),
            *bundle.check_draws(),
            *(finding for selection in index.selections for finding in bundle.check(selection)),
            *bundle.check_verdict(),
        ]
    except UserError as error:
        raise RefutedError(f"{name}: {error}") from None
    return BundleVerification(name, hashlib.sha256(data).hexdigest(), findings)


@dataclass(frozen=True)
class _Bundle:
    """The well-formed members of a bundle."""

    index: BundleIndex
    manifest: Manifest
    documents: pa.Table
    members: dict[str, bytes]
    versions: BundledVersions | None  # None where documents have no versions
    summaries: dict[str, Summary] = field(default_factory=dict)  # recomputed summaries

    @classmethod
    def parse(cls, index: BundleIndex, members: dict[str, bytes]) -> _Bundle:
        """Read the members.

        Raises:
            UserError: a member is missing or has invalid content.
        """
        if list(members)[1:] != member_names(index, VERDICT_FILE in members):
            raise UserError(f"{INDEX} does not list the members that its selections need")
        for selection in index.selections:
            check_known(selection.procedure, f"selection {selection.name}: ")
        manifest = build(Manifest, opened(_json(members, MANIFEST_FILE), MANIFEST_FILE))
        has_versions = manifest.config.corpus.has_versions
        schema = bundled_schema(index.selections, index.columns, index.texts, has_versions)
        documents = _table(members, DOCUMENTS, schema)
        check_values(documents)
        versions = BundledVersions.parse(documents, manifest.config) if has_versions else None
        return cls(index, manifest, documents, members, versions)

    @cached_property
    def roles(self) -> dict[Role, np.ndarray]:
        """Places of the scored documents, int64, by role."""
        role = self.documents["role"].cast(pa.string()).to_numpy()
        scored = self.documents["reason"].is_null().to_numpy()
        return {one: np.flatnonzero(scored & (role == one)) for one in ROLES}

    @cached_property
    def audit(self) -> np.ndarray:
        """Places of all audited documents, int64."""
        return np.flatnonzero(self.documents["role"].cast(pa.string()).to_numpy() == "audit")

    @cached_property
    def scores(self) -> Scores:
        """The scores and groups of all documents."""
        columns = {
            name.removeprefix("score:"): self.documents[name].to_numpy()
            for name in self.documents.column_names
            if name.startswith("score:")
        }
        keys = np.array([id_key(name) for name in self.documents["id"].to_pylist()], dtype=np.int64)
        if "family" not in self.documents.column_names:
            return Scores(columns, keys)
        groups, family = (self.documents[name].combine_chunks() for name in ("group", "family"))
        alone = np.arange(len(family), dtype=np.int64) + len(family)
        numbers = np.where(family.is_null().to_numpy(zero_copy_only=False), alone, family.fill_null(0).to_numpy())
        return Scores(columns, keys, groups, numbers)

    def stated(self) -> Iterator[Checked]:
        """Statements of the run on its model, its corpora and its questions."""
        config, versions = self.manifest.config, self.manifest.versions
        programs = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Checked("stated", "environment", programs)
        digests = {key: value for key, value in self.manifest.fingerprint.items() if isinstance(value, str)}
        of_model = ", ".join(f"{key} {value}" for key, value in digests.items())
        yield Checked("stated", "model", f"{audited_model(config)}; the scores were made under {of_model}")
        for entry in self.manifest.inputs[:MOST_NAMED]:
            yield Checked("stated", f"corpus {entry.role}", f"{entry.name}, content {entry.content}")
        several = self.index.several
        if several is None and config.series is None and config.selections != self.index.selections:
            several = "The questions are not those of the configuration: they are from seenset select."
        yield Checked("stated", "questions", several or "They are those of the configuration, asked at once.")

    def check(self, selection: SelectionConfig) -> Iterator[Checked]:
        """Recompute the answer of a selection."""
        about, stated = f"selection {selection.name}", _json(self.members, summary_member(selection.name))
        slot = self._slot(stated)
        if slot is not None:
            selection = selection.model_copy(update={"alpha": float(slot.level)})
        recomputed = self._answer(selection, slot)
        yield from self._check_documents(about, selection, recomputed)
        summary = self._summary(selection, recomputed, stated, slot)
        self.summaries[selection.name] = summary
        refuted = list(_refuted(about, stated, summary.plain()))
        yield from refuted[:MOST_NAMED]
        if not refuted:
            yield Checked("holds", about, f"its answer follows from the scores: {_in_words(summary)}")
        for name, diagnostic in summary.diagnostics.by_name().items():
            if not CHECK_NAMED[name].recomputed:
                yield Checked("stated", f"{about}, check {name}", f"by the run, not recomputed: {diagnostic.sentence}")
        if summary.bound_withheld is not None:
            yield Checked("stated", f"{about}, bound", summary.bound_withheld)

    def _answer(self, selection: SelectionConfig, slot: Slot | None) -> Verdict:
        """The answer of a selection from the scores."""
        quarantined = self.audit.size - self.roles["audit"].size
        if self.versions is not None:
            return self.versions.answer(selection, quarantined)
        role, scores = NULL_ROLE[selection.direction], self.scores
        if selection.ranks != "whole":
            scores = replace(scores, key=self._draw_key(role))
        roles = {**self.roles, role: self._calibrating(role)}
        (recomputed,) = answer_all([selection], scores, roles, quarantined, self.manifest.config.seed, slot)
        return recomputed

    def _draw_key(self, role: Role) -> bytes:
        """The key of the draws of smoothed ranks, as the run derives it."""
        if isinstance(self.manifest.config.model, ModelConfig):
            return model_key(str(self.manifest.fingerprint["model"]))
        distinct = pc.fill_null(pc.not_equal(self.documents["reason"].cast(pa.string()), Reason.DUPLICATE_ID), True)
        audited = self.audit[distinct.to_numpy()[self.audit]]
        return IdDigest.of(self.scores.keys[np.concatenate([audited, self.roles[role]])]).key()

    def check_commitment(self, commitment: Mapping[str, Any] | None) -> Iterator[Checked]:
        """Recompute the root from the indices and the salted digests of the versions."""
        about = "commitment"
        if self.versions is None:
            if commitment is not None:
                yield Checked("refuted", about, "the documents of this bundle have no versions to commit to")
            return
        roots, scored = self.versions.roots(), len(self.versions.table)
        if sum(roots.values()) < scored:
            outcome: Finding = "stated" if commitment is None else "refuted"
            missing = scored - sum(roots.values())
            yield Checked(outcome, about, f"{missing:,} of {scored:,} documents have no salt, so none leads to a root")
        for root, count in roots.items():
            led = f"{count:,} documents with their indices lead to root {root.hex()}"
            if commitment is None:
                yield Checked("stated", about, f"{led}; verify --commitment FILE compares it with commitment.json")
            elif root.hex() == commitment["root"]:
                yield Checked("holds", about, f"{led} of {commitment['documents']:,} committed documents")
            else:
                yield Checked("refuted", about, f"{led}, and the commitment has root {commitment['root']}")
        if not self.index.texts:
            yield Checked("stated", "versions", "that scores are of the committed versions needs their texts")
        elif changed := list(self.versions.changed_texts()):
            yield Checked(
                "refuted", "texts", f"document {changed[0]!r} has texts with other digests ({len(changed):,} do)"
            )
        else:
            yield Checked("holds", "texts", f"the versions of {scored:,} documents match their digests")

    def check_draws(self) -> Iterator[Checked]:
        """State which documents with versions have no features of their draws."""
        if self.versions is None:
            return
        if unknown := self.versions.table[FEATURES].null_count:
            about = f"that published versions were drawn at random, of {unknown:,} documents by seenset mark"
            yield Checked("stated", "draws", about)

    def check_verdict(self) -> Iterator[Checked]:
        """Recompute the verdict on the collection, if there is one."""
        if VERDICT_FILE not in self.members:
            yield Checked("stated", "verdict", "none: seenset verdict was not run before the run was packed")
            return
        stated = opened(_json(self.members, VERDICT_FILE), VERDICT_FILE)
        config = self.manifest.config
        sampled = self.roles["audit"].size > MOST_DOCUMENTS
        of_run = (str(stated.get("run")), audited_model(config), self.manifest.limit, config.seed)
        setting, blind = Setting(*of_run, sampled, config.series is not None), None
        if self.versions is not None:
            part = self.versions.part([one.column for one in parse_detectors(config.detectors)])
            recomputed = judge_parts([part], setting, self.versions.draws.diagnostic)
        else:
            seeking = [one for one in self.index.selections if one.direction == "members"]
            answers = [(one, self.summaries[one.name]) for one in seeking]
            blind = build(BlindDiagnostic, stated.get("blind") or {})
            recomputed = judge_scores(self._collection(), answers, blind, setting)
        plain = recomputed.model_copy(update={"answers": stated.get("answers")}).plain()
        refuted = list(_refuted("verdict", stated, plain))
        yield from refuted[:MOST_NAMED]
        if not refuted:
            test = recomputed.test or recomputed.versions
            p = "no permutation test" if test is None else f"p = {test.p_value:.4g}"
            yield Checked("holds", "verdict", f"it follows from the scores: {recomputed.answer}, {p}")
        if blind is None:
            return
        yield Checked("stated", "verdict, blind test", f"by the run, not recomputed: {blind.sentence}")
        yield Checked(
            "stated", "verdict, blocks", "which documents are near-duplicates of each other needs their texts"
        )

    def _check_documents(self, about: str, selection: SelectionConfig, recomputed: Verdict) -> Iterator[Checked]:
        """Compare the p-values and the list of a selection."""
        table = _table(self.members, verdicts_member(selection.name), VERDICTS)
        ids = self.documents["id"].take(pa.array(self.audit))
        if not table["id"].combine_chunks().equals(ids.combine_chunks()):
            raise UserError(f"{verdicts_member(selection.name)} is not of the audited documents of {DOCUMENTS}")
        p_values, selected = np.ones(self.audit.size), np.zeros(self.audit.size, dtype=bool)
        scored = np.searchsorted(self.audit, self.roles["audit"])
        p_values[scored], selected[scored] = recomputed.p, recomputed.selected
        for name, values in (("p_value", p_values), ("selected", selected)):
            stated = table[name].to_numpy()
            wrong = ~np.isclose(stated, values, rtol=CLOSE, atol=0) if name == "p_value" else stated != values
            if not wrong.any():
                counted = (
                    f"{values.size:,} p-values" if name == "p_value" else f"the list of {values.sum():,} documents"
                )
                verb = "follow" if name == "p_value" else "follows"
                yield Checked("holds", about, f"{counted} {verb} from the scores")
                continue
            first = int(np.flatnonzero(wrong)[0])
            yield Checked(
                "refuted",
                about,
                f"{name} of document {ids[first].as_py()!r} is stated as {stated[first]}, and the scores give "
                f"{values[first]} ({int(wrong.sum()):,} of {values.size:,} documents differ)",
            )

    def _summary(
        self, selection: SelectionConfig, recomputed: Verdict, stated: dict[str, Any], slot: Slot | None
    ) -> Summary:
        """The summary from the scores, with the checks that only the run can state.

        The numbers of near-duplicates are those that the run states; families and groups of documents are bundled.
        """
        config, checks = self.manifest.config, build(Conclusion, stated.get("diagnostics") or {})
        role, near = NULL_ROLE[selection.direction], checks.find(NearDuplicatesDiagnostic)
        facts = AnswerFacts(
            selection=selection,
            answer=recomputed.answer,
            offers=config.corpus.kind.offers,
            groups=(NO_GROUPS, NO_GROUPS) if self.versions is not None else self._groups(role, recomputed),
            near={} if near is None else {"audit": near.audit, role: near.calibration},
            shuffle=None if self.versions is None else self.versions.draws.diagnostic,
        )
        counts = int(recomputed.selected.sum()), self.audit.size - self.roles["audit"].size
        return summary_in_run(make_summary(facts, *counts, self.manifest.limit, checks), config, slot)

    def _groups(self, role: Role, recomputed: Verdict) -> tuple[GroupSizes, GroupSizes]:
        """The groups of the audited documents, and of those that calibrate."""
        groups, calibrating = self.scores.groups, self._calibrating(role)[recomputed.calibrating]
        assert groups is not None
        audited, known = (GroupSizes.of_names(groups.take(pa.array(one))) for one in (self.roles["audit"], calibrating))
        return audited, known

    def _calibrating(self, role: Role) -> np.ndarray:
        """Places of the scored documents of a role that may calibrate, int64."""
        places = self.roles[role]
        return places[self.documents["calibrates"].to_numpy()[places]]

    def _slot(self, stated: dict[str, Any]) -> Slot | None:
        """The place of a scan in its schedule."""
        series = self.manifest.config.series
        if series is None:
            return None
        number = _at(stated, "series", "slot")
        if not isinstance(number, int) or number < 1:
            raise UserError("the summary of a scan does not state its place in the schedule")
        share = alpha_share(number, series.horizon)
        late = stated.get("promise") == LATE
        return Slot(number, Fraction(repr(series.alpha)), share, late)

    def _collection(self) -> Collection:
        """The documents of the verdict."""
        block = self.documents["block"]
        places = np.concatenate([self.roles["audit"], self.roles["unseen"]])
        places = places[block.is_valid().to_numpy()[places]]
        audited = np.isin(places, self.roles["audit"])
        columns = [self.documents[score_column(name)].to_numpy()[places] for name in self.index.columns]
        together = joined_blocks(np.arange(places.size), self.scores.group_numbers[places])
        return Collection(
            columns=self.index.columns,
            kind=self.index.blocks or "family",
            scores=np.stack(columns, axis=1),
            audited=audited,
            block=np.asarray(block.fill_null(0).to_numpy()[places]),
            keys=self.scores.keys[places],
            ungrouped=self.index.blocks == "family" and depends(together, audited),
        )


def _refuted(about: str, stated: Any, recomputed: Any, path: str = "") -> Iterator[Checked]:
    """Each value of a record that differs from the recomputed one."""
    if isinstance(stated, dict) and isinstance(recomputed, dict):
        for key in dict.fromkeys([*stated, *recomputed]):
            yield from _refuted(about, stated.get(key), recomputed.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(stated, list) and isinstance(recomputed, list) and len(stated) == len(recomputed):
        for place, pair in enumerate(zip(stated, recomputed, strict=True)):
            yield from _refuted(about, *pair, f"{path}.{place}")
    elif not _same(stated, recomputed):
        yield Checked("refuted", about, f"{path} is stated as {stated!r:.300}, and the scores give {recomputed!r:.300}")


def _same(stated: Any, recomputed: Any) -> bool:
    if isinstance(stated, float) and isinstance(recomputed, (float, int)) and not isinstance(recomputed, bool):
        return math.isclose(stated, recomputed, rel_tol=CLOSE)
    return type(stated) is type(recomputed) and stated == recomputed


def _in_words(summary: Summary) -> str:
    """The numbers of an answer."""
    parts = [summary.line().partition(": ")[2], f"{summary.n_calibration:,} calibration documents"]
    if summary.threshold is not None:
        parts.append(f"threshold p {summary.threshold:.4g}")
    parts.append(f"null share {summary.null_proportion:.4g}")
    if summary.bound is not None:
        kind = "trained on" if summary.direction == "members" else "not trained on"
        sure = f"{summary.bound.confidence:g} confidence"
        parts.append(f"at least {summary.bound.members_at_least:,} audited documents {kind} with {sure}")
    return ", ".join(parts)


def _at(value: Any, *keys: str) -> Any:
    """A value inside mappings; None where it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _json(members: dict[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(members[name])
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{name} is not a JSON object")
    return value


def _table(members: dict[str, bytes], name: str, schema: pa.Schema) -> pa.Table:
    try:
        table = pq.read_table(pa.BufferReader(members[name]))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{name} is not a Parquet file: {error_line(error)}") from None
    if not table.schema.equals(schema):
        raise UserError(f"{name} has the columns {', '.join(table.schema.names)}, not {', '.join(schema.names)}")
    return table
