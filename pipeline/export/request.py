"""What is to be exported: one selection of a finished run, which of its documents, and in which form."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.audit.history import answer_names
from pipeline.audit.manifest import Manifest, read_run
from pipeline.audit.summary import Summary, read_summary
from pipeline.corpus.shard import Shard
from pipeline.errors import IncompleteError, UserError, nearest
from pipeline.report.wording.conclusion import WARNING
from pipeline.store.files import Store

Keep = Literal["selected", "rest"]
Form = Literal["files", "list", "samples", "huggingface"]


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What a user asks for."""

    run: str  # a run directory
    out: str | None = None  # a folder, local or an fsspec URL; None: one in the working directory
    selection: str | None = None  # None: the only one
    keep: Keep | None = None  # None: by direction
    form: Form = "files"
    task: str | None = None  # of samples; None: the group column names tasks
    quarantined: bool = True  # whether quarantined documents stand among the rest
    unsupported_too: bool = False  # whether a selection may be exported that a check speaks against


@dataclass(frozen=True, slots=True)
class ExportQuestion:
    """A request that a run can answer."""

    store: Store
    manifest: Manifest
    shards: tuple[Shard, ...]  # of the audited documents
    summary: Summary
    out: str
    keep: Keep
    form: Form
    task: str | None
    quarantined: bool

    @property
    def keeps_selected(self) -> bool:
        """Whether the selected documents are what is exported."""
        return self.keep == "selected"

    @property
    def keeps_quarantined(self) -> bool:
        """Whether documents that could not be scored are exported: they are never selected."""
        return not self.keeps_selected and self.quarantined

    @property
    def run_digest(self) -> str:
        """Which run this is, without its place: 16 hexadecimal digits."""
        return _digest(self.store.url)

    @property
    def fingerprint_digest(self) -> str:
        """A digest of all that could change a score of the run: 16 hexadecimal digits."""
        return _digest(json.dumps(self.manifest.fingerprint, sort_keys=True))


def form_of(chosen: Mapping[Form, bool]) -> Form:
    """The one form that is chosen, by name; else files.

    Raises:
        UserError: several are.
    """
    forms = [form for form, is_chosen in chosen.items() if is_chosen]
    if len(forms) > 1:
        raise UserError(f"--{' and --'.join(forms)} exclude one another: export twice, into two folders")
    return forms[0] if forms else "files"


def settle_request(request: ExportRequest) -> ExportQuestion:
    """Find what a request asks of a run.

    Raises:
        UserError: not a run directory, one of another version or without answers, no such selection or several and
            none named, one that a check contradicts, options that do not go together.
    """
    store = Store(request.run)
    manifest, shards = read_run(store)
    summary = _summary(store, manifest, request)
    if request.task is not None and request.form != "samples":
        raise UserError("--task names the task of --samples: give both")
    if summary.conclusion == "contradicted" and not request.unsupported_too:
        raise UserError(
            f"selection {summary.name} is {WARNING}: {' '.join(summary.reasons)} "
            "To export it nevertheless, marked so: --unsupported-too"
        )
    default: Keep = "selected" if summary.direction == "clean" or request.form == "list" else "rest"
    keep = request.keep or default
    if summary.limit is not None and keep == "rest":
        raise UserError(
            f"the run judged only the first {summary.limit:,} documents (--limit), so nothing is known of the others: "
            "run it without --limit, or export with --keep selected"
        )
    if not request.quarantined and keep == "selected":
        raise UserError("--without-quarantined goes with --keep rest: a quarantined document is never selected")
    audited = tuple(shard for shard in shards if shard.role == "audit")
    if request.form == "samples" and request.task is None and audited[0].group_column is None:
        raise UserError("--samples needs the name of the task: --task NAME, as corpus.audit names no group column")
    out = request.out or _default_folder(store, summary, request.form)
    return ExportQuestion(store, manifest, audited, summary, out, keep, request.form, request.task, request.quarantined)


def _summary(store: Store, manifest: Manifest, request: ExportRequest) -> Summary:
    if manifest.config.corpus.audit is None:
        raise UserError(f"{store.url} compares documents of known membership: nothing was selected, nothing to export")
    names = answer_names(store, manifest.config)
    name = request.selection
    if name is None:
        if not names:
            raise UserError(f"{store.url} was asked nothing: seenset select asks a finished run")
        if len(names) > 1:
            raise UserError(f"{store.url} has several selections, say which: --selection {', '.join(names)}")
        name = names[0]
    if name not in names:
        raise UserError(f"no selection {name!r} in {store.url}; {nearest(name, names, 'selections')}")
    summary = read_summary(store, name)
    if summary is None:
        raise IncompleteError(f"selection {name} of {store.url} is not made yet: run the audit to its end")
    return summary


def _default_folder(store: Store, summary: Summary, form: Form) -> str:
    base = os.path.basename(store.root) or "run"
    return f"{base}-{summary.name}" + ("" if form == "files" else f"-{form}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
