"""The manifest and the shard table of a run directory: the configuration, the origin of the scores, and the shards.

The table is written and read one shard at a time, because it may have hundreds of thousands.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.config.corpus import Role
from pipeline.config.misplaced import instead_of_run
from pipeline.config.selection import recorded
from pipeline.config.training import FinetuneConfig
from pipeline.corpus.formats import by_bytes
from pipeline.corpus.formats.base import encodable
from pipeline.corpus.shard import Shard
from pipeline.endpoint.parameters import Adjustments
from pipeline.errors import DamagedError, UserError
from pipeline.run.digests import changed_file
from pipeline.run.records import MANIFEST_FILE, SHARDS_FILE, Record, VersionedRecord, read_record, write_record
from pipeline.run.remedies import OTHER_VERSION, REWRITTEN
from pipeline.store.files import Store

PACKAGES = ("torch", "transformers", "peft", "ray", "numpy", "pyarrow")


class InputRecord(Record):
    """One input file, saved dataset, hub dataset or folder of text files."""

    role: Role = Field(description="Role of its documents: audit, unseen or seen.")
    name: str = Field(description="Its name in the configuration; ids of documents start with it.")
    path: Annotated[str, AfterValidator(encodable)] = Field(description="Where it was opened.")
    format: str = Field(description="How it was read.")
    size: int = Field(description="Size in bytes; 0 where unknown.")
    rows: int | None = Field(description="Rows; null where only reading determines it.")
    content: str = Field(description="Digest of its size and of both its ends, to detect a change.")
    stamp: str | None = Field(
        None, description="Digest of the modification times of its files; if it differs, the input is read again."
    )


class AuditedModel(Record):
    """The properties of the audited model that are known without loading its weights."""

    architecture: str = Field(description="Class of the model; endpoint for a model behind an endpoint.")
    dtype: str = Field(description="Type of the weights; unknown behind an endpoint.")
    chosen: str | None = Field(
        None, description="Why dtype auto chose this type; null where the configuration states it."
    )
    max_tokens: int | None = Field(description="Number of positions of the model; null where not stated.")
    parameters: int | None = Field(description="Number of parameters; null where only loading determines it.")


class GradientRecord(Record):
    """The parameters and the method of the gradient norm."""

    method: str = Field(description="batched, or one at a time.")
    reason: str = Field(description="Why one document at a time; empty for a batched model.")
    uncovered: list[str] = Field(description="Parameters that no rule of the batched method covers.")
    differentiable: int = Field(description="Parameter tensors that the norm is taken over.")
    quantised: int = Field(description="Quantised parameter tensors, which it leaves out: they have no gradient.")


class RecordedModel(Record):
    """A model that a run opened, as far as a repeated run needs it where the files are gone."""

    fingerprint: dict[str, str] = Field(description="Digests of everything that the model's results depend on.")
    shape: dict[str, JsonValue] | None = Field(
        None, description="Its dimensions, which determine the batches on a GPU; null on a CPU."
    )
    parameters: dict[str, dict[str, str | int | None]] = Field(
        {},
        description="Of an endpoint, by folder of the answers: the parameters of requests that it refuses, with the "
        "name under which they are sent instead, or the largest value; null where they are left out.",
    )

    @property
    def changes(self) -> dict[str, Adjustments]:
        """The changes of requests to an endpoint, by folder of the answers."""
        return {folder: Adjustments.of(names) for folder, names in self.parameters.items()}


class AdapterRecord(Record):
    """An adapter, and the documents that it was trained on."""

    folder: str = Field(description="Folder of its weights in the run directory.")
    training: FinetuneConfig = Field(description="How it was trained.")
    train_on: list[str] = Field(description="Where its documents come from: roles, or a corpus of its own.")
    documents: list[str] = Field(description="Hashes of the normalised texts of its documents.")


class Allocation(Record):
    """The known documents for training, for prefixes and for calibration, which are disjoint; may be empty."""

    adapters: dict[str, AdapterRecord] = Field({}, description="The adapters, by name.")
    shots: dict[str, list[str]] = Field(
        {}, description="Hashes of the normalised texts of the known documents in prefixes and prefix counts."
    )
    calibration: dict[Role, list[str]] = Field(
        {}, description="Hashes of the normalised texts that calibrate, by role; empty without adapters and prefixes."
    )


def _recorded_audit(config: Any) -> Any:
    """The configuration of a run as its file has it, with what earlier versions left out."""
    if isinstance(config, dict) and isinstance(config.get("selections"), list):
        return {**config, "selections": [recorded(selection) for selection in config["selections"]]}
    return config


class Provenance(Record):
    """The origin of the scores of a run."""

    config: Annotated[AuditConfig, BeforeValidator(_recorded_audit)] = Field(
        description="The configuration of the run, with every default; selections of seenset select are in the history."
    )
    limit: int | None = Field(description="The most documents of each role that are read; null when all are.")
    seed: int = Field(description="Seed of all random draws.")
    versions: dict[str, str] = Field(description="Versions of this program and of what computes its scores.")
    fingerprint: dict[str, JsonValue] = Field(description="All values that could change a score.")
    inputs: list[InputRecord] = Field(description="The inputs of every role.")
    passes: list[dict[str, JsonValue]] = Field(description="The passes of the model over each document.")
    model: AuditedModel = Field(description="The audited model.")
    gradient: GradientRecord | None = Field(
        None, description="How the gradient norm was taken; null where no detector reads it."
    )


class Manifest(Allocation, Provenance, VersionedRecord):
    """The configuration of a run and the origin of its scores: `manifest.json`."""

    sealed = True

    schema_: Literal[3] = Field(  # type: ignore[assignment]
        3, alias="schema", description="Version of the form of this file and of the run directory."
    )
    shard_table: str | None = Field(None, description="SHA-256 of shards.json; null until it is written.")
    models: dict[str, RecordedModel] = Field({}, description="The opened models, by key of the configuration.")


def read_manifest(store: Store) -> Manifest | None:
    """The manifest of a run directory; None where there is none.

    Raises:
        DamagedError: the manifest was changed.
        UserError: a damaged manifest, or one of another version.
    """
    return read_record(store, MANIFEST_FILE, Manifest, OTHER_VERSION, REWRITTEN)


def check_changed(scored: AuditConfig, other: AuditConfig) -> None:
    """Check that two configurations have the same scores.

    Args:
        scored: configuration of a run.
        other: that of another selection from its scores.

    Raises:
        UserError: another setting differs than those of selections; the message names it.
    """
    changed = {key for key in AuditConfig.model_fields if getattr(other, key) != getattr(scored, key)}
    if refused := sorted(changed - {"selections", "overlap", "error_budget"}):
        raise UserError(
            f"seenset select takes selections, overlap and error_budget; {', '.join(refused)} needs seenset run"
        )


def recorded_parameters(store: Store) -> dict[str, Adjustments]:
    """The changes of requests to the endpoints of a run, by folder of the answers; empty without an intact manifest.

    Raises:
        UserError: a manifest of another version.
    """
    try:
        manifest = read_manifest(store)
    except DamagedError:  # it is written again; the receipts hold the changes, too
        return {}
    models = () if manifest is None else manifest.models.values()
    return {folder: changes for model in models for folder, changes in model.changes.items()}


def refused_parameters(models: Mapping[str, RecordedModel]) -> list[str]:
    """A clause for each parameter that an endpoint refuses, with the key of the model in front."""
    lines = [
        f"{key}: {sentence}"
        for key, model in models.items()
        for changes in model.changes.values()
        for sentence in changes.sentences()
    ]
    return list(dict.fromkeys(lines))


def read_run(store: Store) -> tuple[Manifest, list[Shard]]:
    """The manifest and the shard table of a run directory.

    Raises:
        UserError: there is none, or one of both files is missing or damaged.
    """
    manifest = read_manifest(store)
    if manifest is not None:
        check_shard_table(store, manifest)
    try:
        shards = read_shards(store)
    except DamagedError as error:
        raise error.with_remedy(REWRITTEN) from None
    if manifest is None or shards is None:
        if store.exists("receipts"):
            raise changed_file(store, MANIFEST_FILE if manifest is None else SHARDS_FILE, missing=True)
        instead = instead_of_run(store.url)
        missing = f"it has no {MANIFEST_FILE} and {SHARDS_FILE}"
        raise UserError(f"{store.url} is not a run directory: {missing}{f'; {instead}' if instead else ''}")
    return manifest, shards


def check_shard_table(store: Store, manifest: Manifest) -> None:
    """Check that the shard table belongs to the manifest.

    Raises:
        DamagedError: it does not.
    """
    digest = store.digest(SHARDS_FILE)
    if manifest.shard_table is not None and digest != manifest.shard_table:
        raise changed_file(store, SHARDS_FILE, missing=digest is None)


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Write the manifest of a run directory, after its shard table."""
    write_record(store, MANIFEST_FILE, manifest.model_copy(update={"shard_table": store.digest(SHARDS_FILE)}))


def versions() -> dict[str, str]:
    """Versions of this program and of what computes its scores."""
    programs = {"seenset": __version__, "python": platform.python_version()}
    return {**programs, **{name: metadata.version(name) for name in PACKAGES}}


def write_shards(store: Store, shards: Iterable[Shard]) -> None:
    """Write the table: a JSON list, one shard per line.

    Raises:
        UserError: the run directory cannot be written to.
    """
    with store.replaced(SHARDS_FILE) as file:
        separator = "["
        for shard in shards:
            file.write(f"{separator}\n{json.dumps(shard.to_dict())}".encode())
            separator = ","
        file.write(b"[]\n" if separator == "[" else b"\n]\n")


def read_shards(store: Store) -> list[Shard] | None:
    """The shard table of a run directory; None where there is none.

    Raises:
        DamagedError: a damaged table.
    """
    try:
        return list(_shards(store))
    except FileNotFoundError:
        return None


def reconciled_shards(store: Store, planned: Sequence[Shard]) -> tuple[Shard, ...] | None:
    """The planned shards with the row numbers of the table; None where there is no table, or one of other shards.

    Raises:
        DamagedError: a damaged table.
    """
    shards, expected = [], enumerate(planned)
    try:
        for filed in _shards(store):
            for position, shard in expected:
                if shard.id == filed.id:
                    break
                if not _may_have_no_rows(planned, position):
                    return None
            else:
                return None
            # the numbered shard shares memory with the planned one, which the caller may also hold
            numbered = shard if shard.first_row == filed.first_row else replace(shard, first_row=filed.first_row)
            if numbered != filed:
                return None
            shards.append(numbered)
    except FileNotFoundError:
        return None
    return tuple(shards) if next(expected, None) is None else None


def _may_have_no_rows(planned: Sequence[Shard], position: int) -> bool:
    """Whether counting rows may omit a planned shard: a range after the first of a file and before its last."""
    if position + 1 == len(planned):
        return False
    shard, following = planned[position : position + 2]
    return by_bytes(shard) and shard.start > 0 and (shard.role, shard.path) == (following.role, following.path)


def _shards(store: Store) -> Iterator[Shard]:
    """The shards of the table. Raises FileNotFoundError."""
    with store.fs.open(store.path(SHARDS_FILE), "rb") as file:
        try:
            first, second = file.readline(), file.readline()
            if first == b"[\n" and second.startswith(b"{"):
                yield from _of_lines(file, second)
            else:  # an empty table
                yield from map(Shard.from_dict, json.loads(first + second + file.read()))
        except (json.JSONDecodeError, RecursionError):
            raise DamagedError(f"{store.url}/{SHARDS_FILE}", "is damaged: not JSON") from None
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DamagedError(f"{store.url}/{SHARDS_FILE}", f"is damaged: {error}") from None


def _of_lines(file: Iterable[bytes], line: bytes) -> Iterator[Shard]:
    """One shard per line, up to the bracket that ends the list. Raises ValueError."""
    for following in file:
        yield Shard.from_dict(json.loads(line.rstrip(b",\n")))
        line = following
    if line.strip() != b"]":
        raise ValueError("it is cut off")
