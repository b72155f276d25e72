"""Scores and selections in memory, without files or a cluster, with the same numbers as those of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from pipeline.answers.summarise import learnt_sentences, make_summary
from pipeline.checks.check import AnswerFacts
from pipeline.checks.dependent_documents import NO_GROUPS, GroupSizes
from pipeline.config.corpus import Role
from pipeline.config.kinds import SCORES
from pipeline.config.models import ModelConfig
from pipeline.config.retired import retired
from pipeline.config.selection import NULL_ROLE, SOUGHT_ROLE, CalibrationName, Direction, SelectionConfig
from pipeline.config.yaml import build
from pipeline.corpus.documents import Document, id_key, text_problem
from pipeline.detectors.base import FORWARD, GRADIENT, LOWERCASE, Detector
from pipeline.detectors.registry import DetectorChoice, parse_detectors
from pipeline.errors import UserError, nearest
from pipeline.models.devices import Device, nominal_memory
from pipeline.models.load import LanguageModel, open_model
from pipeline.models.opened import use_fused_attention
from pipeline.models.probe import check_causal
from pipeline.models.sharing import Adapters, Opened
from pipeline.passes.budget import CPU_BUDGET, Budget, Card, pass_budget, read_shape
from pipeline.results.summary import Summary
from pipeline.selection.calibrations import calibration_of
from pipeline.selection.engine import Scores, answer_all
from pipeline.selection.procedures import check_settings, procedure_of
from pipeline.selection.procedures.adadetect import PoolQuestion
from pipeline.selection.procedures.td4eval import Weights
from pipeline.selection.smoothing import IdDigest
from pipeline.stages import SCORE_FOLDER, SCORING
from pipeline.stages.base import Output, Placement, Stage
from pipeline.stages.score import Inputs, Scorer, ScoreSettings, score_schema
from pipeline.stages.worker import prepare, work_through
from seenset.runs import warn_of_unsupported


@dataclass(frozen=True, slots=True)
class _Held(Placement):
    """The device of an opened model."""

    model: Any = None

    def set_up(self, mark: str, gradients: bool = False) -> None:
        """Leave the settings of the process unchanged."""

    def open(self, opener: Callable[..., Opened], config: ModelConfig) -> Opened:
        """The opened model."""
        held: Opened = self.model
        return held


def score(
    model: str | PathLike[str] | ModelConfig | LanguageModel,
    texts: Iterable[Any],
    detectors: Iterable[str | dict[str, dict[str, Any]]] = ("min_k_plus_plus",),
    *,
    ids: Sequence[str] | None = None,
    max_tokens: int = 1024,
    batch_tokens: int | None = None,
) -> pa.Table:
    """Score texts with a local model, on a GPU if there is one.

    Args:
        model: A folder, a file or a name on the hub, a `ModelConfig`, or a model opened by `pipeline.models.load`.
        texts: The documents. One that cannot be scored raises no error: its row states the problem.
        detectors: As in a configuration; only detectors that read the model's own passes over the text.
        ids: One per text; by default its position.
        max_tokens: Texts are cut to this many tokens, >= 2: only the beginning of a long one is read. `seenset.audit`
            reads several pieces with its key `windows`.
        batch_tokens: Padded tokens in a batch; by default 2048 on a CPU, and on a GPU what its memory holds.

    Returns:
        One row per text, in order: doc_id, n_tokens, one float64 column per detector (higher = more member-like) and
        `problem`; for a text without scores these and n_tokens are null, and `problem` states the reason.

    Raises:
        UserError: one text instead of several, a model that cannot be opened, or a detector that needs more than
            the model's own passes.

    Example:
        >>> texts = ["A first text.", "A second one.", ""]
        >>> scores = seenset.score("my-model", texts, detectors=["loss", {"min_k": {"k": 0.5}}])
        >>> scores.column_names
        ['doc_id', 'n_tokens', 'loss', 'min_k(k=0.5)', 'problem']
        >>> scores["problem"].to_pylist()
        [None, None, 'empty: nothing but white space']
    """
    check_model_kind(model)
    _check_kinds(texts, detectors)
    texts, entries = list(texts), list(detectors)
    parsed = _own_passes(entries)
    names = [str(name) for name in (range(len(texts)) if ids is None else ids)]
    if len(names) != len(texts):
        raise UserError(f"ids must be one per text, got {len(names)} ids for {len(texts)} texts")
    _check_sizes(max_tokens, batch_tokens)
    lm = _opened(model)
    output, worker = Output(), _scorer(lm, parsed, entries, max_tokens, batch_tokens)
    documents = []
    for number, (name, text) in enumerate(zip(names, texts, strict=True)):
        if (problem := text_problem(text)) is not None:
            output.refuse(Document(number, name, "", None), problem.reason, problem.message)
        else:
            documents.append(Document(number, name, text, None))
    work_through(worker, prepare(worker, documents, Inputs("audit"), output), output)
    problems = {number: f"{reason}: {message}" for number, (_, reason, message) in output.refused.items()}
    rows = [
        {"doc_id": name, "problem": problems.get(number), **output.rows.get(number, {})}
        for number, name in enumerate(names)
    ]
    columns = [(detector.column, pa.float64()) for detector in parsed]
    fields = [("doc_id", pa.string()), ("n_tokens", pa.int32()), *columns, ("problem", pa.string())]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


def check_model_kind(model: Any) -> None:
    """Refuse a model of a type that `score` does not accept. Raises UserError."""
    if not isinstance(model, (str, PathLike, ModelConfig, LanguageModel)):
        raise UserError(f"model must be a path, a ModelConfig or an opened model, got {type(model).__name__}")


def _check_kinds(texts: Any, detectors: Any) -> None:
    """Refuse texts or detectors of a type that `score` does not accept. Raises UserError."""
    if isinstance(texts, (str, bytes)):
        raise UserError(f"texts must be a sequence of texts, got one {type(texts).__name__}; write [text] to score one")
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping):
        raise UserError(f"texts must be a sequence of texts, got {type(texts).__name__}")
    if isinstance(detectors, (str, Mapping)) or not isinstance(detectors, Iterable):
        guess = f"; write [{detectors!r}]" if isinstance(detectors, (str, Mapping)) else ""
        raise UserError(f"detectors must be a sequence, got {detectors!r}{guess}")


def _check_sizes(max_tokens: int, batch_tokens: int | None) -> None:
    """Refuse numbers of tokens outside their limits. Raises UserError."""
    if max_tokens < 2:
        raise UserError(f"max_tokens must be at least 2, got {max_tokens}")
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens must be at least 1, got {batch_tokens}")


def _own_passes(entries: Sequence[str | dict[str, dict[str, Any]]]) -> tuple[Detector, ...]:
    """The detectors, which read only the model's own passes over a text. Raises UserError otherwise."""
    parsed = parse_detectors(entries)
    for detector in parsed:
        if any(needed not in (FORWARD, LOWERCASE, GRADIENT) for needed in detector.needs):
            raise UserError(
                f"seenset.score runs the model's own passes over a text, and detector {detector.column} needs more: "
                "use seenset.audit"
            )
    return parsed


def _opened(model: str | PathLike[str] | ModelConfig | LanguageModel) -> LanguageModel:
    """The model, on a GPU if there is one. Raises UserError if it cannot be opened, or predicts no next token."""
    if isinstance(model, (str, PathLike)):
        model = ModelConfig(path=str(model))
    lm = model if isinstance(model, LanguageModel) else open_model(model, gpus=int(torch.cuda.is_available()))
    check_causal(lm, getattr(lm.model, "name_or_path", "") or "opened elsewhere")
    use_fused_attention(lm.device)
    return lm


def _scorer(
    lm: LanguageModel, detectors: Sequence[Detector], entries: list[Any], max_tokens: int, batch_tokens: int | None
) -> Scorer:
    """The worker of a run, restricted to scoring texts, with an opened model."""
    budget, gpus = _budget(lm, max_tokens), int(lm.device.type == "cuda")
    tokens = batch_tokens or max(1, budget.forward)
    settings = ScoreSettings(
        ModelConfig(path="model"),
        None,
        DetectorChoice(tuple(entries)),
        None,
        None,
        max_tokens,
        tokens,
        min(tokens, max(1, budget.gradient)) if gpus else tokens,
        Device(gpus).mark,
    )
    schema = score_schema([detector.column for detector in detectors])
    stage = Stage(SCORING, SCORE_FOLDER, schema, settings, None, 0, Scorer, lambda _: {"model": ""})
    scorer = Scorer(stage, _Held(gpus, model=lm))
    scorer.adapters = Adapters(lm, {}, "", "")
    return scorer


def _budget(lm: LanguageModel, max_tokens: int) -> Budget:
    """The sizes of batches for the device of a model."""
    if lm.device.type != "cuda":
        return CPU_BUDGET
    model: Any = lm.model
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = Card(nominal_memory(torch.cuda.get_device_properties(lm.device).total_memory))
    return pass_budget(read_shape(model.config, dtype, parameters), card, max_tokens)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Selected:
    """The selection of documents, in their order. Its printed form states its guarantee.

    Example:
        >>> answer = seenset.select([9.0, 8.0, 1.5], unseen=range(-14, 5), alpha=0.1)
        >>> answer
        Selected(selection: 2 of 3 selected (storey, alpha 0.1, finite-sample), ...)
        >>> answer.selected.tolist(), answer.p_values.tolist()
        ([True, True, False], [0.05, 0.05, 0.2])
    """

    selected: np.ndarray  # bool, (documents,)
    p_values: np.ndarray  # float64 in (0, 1], (documents,)
    summary: Summary  # the guarantee and its assumption
    smoothed_p: np.ndarray | None = None  # float64 in (0, 1], (documents,); None: ranks are whole

    def __repr__(self) -> str:
        return f"Selected({self.summary.line()})"


def select(
    scores: Any,
    unseen: Any = None,
    *,
    seen: Any = None,
    procedure: str = "storey",
    alpha: float = 0.1,
    direction: Direction = "members",
    detectors: Sequence[str] | None = None,
    calibration: CalibrationName = "pooled",
    calibrate: Literal["all", "one_per_block"] = "all",
    boost: Literal["group"] | None = None,
    delta: float = 0.1,
    lambda_: float | None = None,
    ties: Literal["conservative", "random"] = "conservative",
    ranks: Literal["whole", "smoothed"] = "whole",
    weights: Weights = "rejections",
    step_up: Literal["bh", "storey"] = "bh",
    learn: Literal["pool", "split"] | None = None,
    reconformal: bool = False,
    confidence: float = 0.95,
    seed: int = 0,
) -> Selected:
    """Select documents by scores in memory, as a selection of an audit does.

    Args:
        scores: Scores of the audited documents: a table of `score`, or numbers (documents,), higher = more member-like.
            A null, NaN or infinite score is a document that could not be scored: it counts as a hypothesis with p = 1
            (of the other roles: it is left out). Documents with one name in a column `group` may depend on one
            another; all others are taken as independent. Without a column `doc_id` the position is the id.
        unseen: Scores of documents that the model has not seen.
        seen: Scores of documents that it was trained on; direction clean is calibrated on them.
        procedure: Procedure of the selection.
        alpha: Largest share of the selected that may be wrong, in (0, 1).
        direction: `members` selects documents that were trained on, `clean` the others.
        detectors: Columns of the tables; by default the only one of floating-point numbers, or all of these where the
            procedure fuses them. `UserWarning` if a column of other numbers is left out.
        calibration: Rank among all known documents, those of the column `group`, or for the given known ones.
        calibrate: Calibrate on all known documents, or on one of each group.
        boost: For calibration by_group: divide p-values by weights, larger for groups with more high scores.
        delta: For calibration conditional: share of calibration sets for which the guarantee may fail.
        lambda_: Threshold of Storey's estimate, in (0, 1); by default from the number of calibration documents.
        ties: Equal scores count against selection, or are ordered by a hash of the id.
        ranks: Whole, or smoothed by numbers that are drawn from the ids alone: without a column doc_id, documents in
            another order draw others.
        weights: For procedure td4eval: weighting of the detectors.
        step_up: For procedure adadetect, and td4eval reconformal: take the share of nulls as 1, or estimate it.
        learn: For procedure adadetect without `seen`: learn from the unordered pool of all calibration and audited
            documents (the default), or from half of the calibration documents.
        reconformal: For procedure td4eval: rank the fused statistic again.
        confidence: Confidence of the bounds of this one list and of all documents (`summary.bound`), in (0, 1).
        seed: Seed of ties, splits and weights.

    Returns:
        The selection, the p-values of whole ranks, the summary, and with smoothed ranks the smoothed p-values. With
        scores alone most checks cannot be made; `UnsupportedWarning` if a check contradicts the guarantee.

    Raises:
        UserError: an unknown column, procedure or setting, or missing documents.

    Example:
        >>> import numpy as np
        >>> unseen = np.random.default_rng(0).normal(size=500)
        >>> audited = np.concatenate([np.random.default_rng(1).normal(size=80), np.full(20, 6.0)])
        >>> answer = seenset.select(audited, unseen=unseen, procedure="bh", alpha=0.1)
        >>> int(answer.selected[80:].sum()), answer.summary.guarantee
        (20, 'finite-sample')
    """
    values: dict[Role, Any] = {"audit": scores, "unseen": unseen, "seen": seen}
    tables = {role: _as_table(value, role) for role, value in values.items() if value is not None or role == "audit"}
    settings = {
        "name": "selection", "detectors": _columns(tables, detectors, procedure), "procedure": procedure,
        "direction": direction, "alpha": alpha, "calibration": calibration, "calibrate": calibrate, "boost": boost,
        "delta": delta, "lambda": lambda_, "ties": ties, "ranks": ranks, "weights": weights, "step_up": step_up,
        "learn": learn, "reconformal": reconformal, "confidence": confidence,
    }  # fmt: skip
    selection = build(SelectionConfig, settings)
    check_settings(selection, "seenset.select")
    _check_roles(selection, tables)
    answer = _answer(selection, tables, seed)
    if learn == "pool" and "known_members" in answer.summary.details:
        warnings.warn(" ".join(learnt_sentences(answer.summary)), UserWarning, stacklevel=2)
    warn_of_unsupported([answer.summary])
    return answer


def _answer(selection: SelectionConfig, tables: Mapping[Role, pa.Table], seed: int) -> Selected:
    """The answer for the documents with all scores; audited documents without are hypotheses with p = 1."""
    where = {role: _scored(table, selection.detectors) for role, table in tables.items()}
    kept = {role: _needed(table, selection).filter(pa.array(where[role])) for role, table in tables.items()}
    ends = np.cumsum([len(table) for table in kept.values()])
    roles = {role: np.arange(end - len(table), end) for (role, table), end in zip(kept.items(), ends, strict=True)}
    everything = pa.concat_tables(kept.values(), promote_options="default")
    role = NULL_ROLE[selection.direction]
    ids = [name for one in ("audit", role) if one in tables for name in map(str, tables[one]["doc_id"].to_pylist())]
    groups = everything["group"].combine_chunks() if "group" in everything.column_names else None
    documents = Scores(
        {column: everything[column].to_numpy() for column in selection.detectors},
        np.array([id_key(name) for name in everything["doc_id"].to_pylist()], dtype=np.int64),
        groups,
        key=IdDigest.of(np.array([id_key(name) for name in ids], dtype=np.int64)).key(),
    )
    audited = where["audit"]
    quarantined = int((~audited).sum())
    (verdict,) = answer_all([selection], documents, roles, quarantined, seed)
    selected, p_values = np.zeros(audited.size, dtype=bool), np.ones(audited.size)
    selected[audited], p_values[audited] = verdict.selected, verdict.p
    smoothed = None
    if verdict.answer.smoothing is not None:
        smoothed = np.ones(audited.size)
        batch = documents.batch(roles["audit"], selection)
        columns = verdict.answer.smoothing.columns(verdict.answer.smoothing.rank(batch), batch.keys)
        smoothed[audited] = columns["smoothed_p"]
    calibrating = roles.get(role, np.empty(0, dtype=np.int64))[verdict.calibrating]
    sizes = [
        NO_GROUPS if groups is None else GroupSizes.of_names(groups.take(pa.array(places)))
        for places in (roles["audit"], calibrating)
    ]
    facts = AnswerFacts(selection=selection, answer=verdict.answer, offers=SCORES.offers, groups=(sizes[0], sizes[1]))
    summary = make_summary(facts, int(selected.sum()), quarantined)
    if summary.learn is not None:
        note = PoolQuestion.of(selection, summary.n_calibration, summary.n_audit).note()
        if note is not None:
            warnings.warn(note, UserWarning, stacklevel=3)
    return Selected(selected, p_values, summary, smoothed)


def _as_table(value: Any, role: Role) -> pa.Table:
    """Scores as a table: doc_id, optionally group, float64 columns.

    Raises:
        UserError: an array of another shape, values that are not numbers, or a document without an id.
    """
    if isinstance(value, pa.Table):
        if "doc_id" in value.column_names:
            if missing := value["doc_id"].null_count:
                raise UserError(f"{role}: {missing:,} of {len(value):,} documents have no doc_id: give each one")
            return value
        return value.append_column("doc_id", pa.array([f"{role}-{index}" for index in range(len(value))]))
    arrow = _as_arrow(value)
    try:
        if value is None or arrow is not None or np.iscomplexobj(value):
            raise TypeError
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        remedy = "" if arrow is None else f"; write {arrow}"
        raise UserError(f"{role}: scores must be a table or numbers, got {type(value).__name__}{remedy}") from None
    if numbers.ndim != 1:
        raise UserError(f"{role}: scores must be a table or one number per document, got shape {numbers.shape}")
    return pa.table({"doc_id": [f"{role}-{index}" for index in range(numbers.size)], "score": numbers})


def _as_arrow(value: Any) -> str | None:
    """How a table of another library becomes one of pyarrow; None for what is no table."""
    if isinstance(value, Mapping):
        return "pyarrow.table(scores)"
    if isinstance(value, pa.RecordBatch):
        return "pyarrow.Table.from_batches([scores])"
    if hasattr(value, "to_arrow"):  # of polars, datasets and others
        return "scores.to_arrow()"
    of_pandas = type(value).__module__.partition(".")[0] == "pandas" and type(value).__name__ == "DataFrame"
    return "pyarrow.Table.from_pandas(scores)" if of_pandas else None


def _columns(tables: Mapping[Role, pa.Table], names: Sequence[str] | None, procedure: str) -> list[str]:
    """The score columns to read, which every table must have.

    Raises:
        UserError: an unknown column, several to choose from, or a column of an earlier version.
    """
    if isinstance(names, (str, Mapping)):
        raise UserError(f"detectors must be a sequence of columns, got {names!r}; write [{names!r}]")
    floats = [field.name for field in tables["audit"].schema if pa.types.is_floating(field.type)]
    known = [name for name in floats if name != "group"]
    columns = known if names is None else list(names)
    if names is None and known:
        _warn_of_unread(tables["audit"].schema)
    empty = [field.name for field in tables["audit"].schema if pa.types.is_null(field.type)]
    if not columns and empty:
        raise UserError(f"audit: column {empty[0]!r} holds only nulls, and no other holds floating-point numbers")
    for role, table in tables.items():
        for column in set(table.column_names).difference(names or ()):
            if line := retired("column", column):
                raise UserError(f"{role}: {line}")
        for column in columns or ["score"]:
            if column not in table.column_names:
                raise UserError(f"{role}: no score column {column!r}; {nearest(column, table.column_names)}")
            if not _is_number(kind := table.schema.field(column).type):
                raise UserError(f"{role}: column {column!r} holds no numbers, but {kind}")
    if not columns:
        raise UserError("audit: no column of scores is of floating-point numbers; name it, as in detectors=['score']")
    if names is None and len(columns) != 1 and not procedure_of(procedure).several:
        raise UserError(f"the scores have the columns {', '.join(known)}: choose, as in detectors=[{known[0]!r}]")
    return columns


def _is_number(kind: pa.DataType) -> bool:
    """Whether values of a type are numbers, or all null."""
    types = pa.types
    kinds = (types.is_floating, types.is_integer, types.is_boolean, types.is_decimal, types.is_null)
    return any(of(kind) for of in kinds)


def _warn_of_unread(schema: pa.Schema) -> None:
    """Warn of columns of numbers that are no floating-point numbers and could be scores."""
    no_scores = {"group", *score_schema([]).names}
    unread = [
        f"{field.name} ({field.type})"
        for field in schema
        if _is_number(field.type)
        and not pa.types.is_floating(field.type)
        and field.name not in no_scores
        and not field.name.startswith("__")
    ]
    if unread:
        warnings.warn(
            f"not read as scores: {', '.join(unread)}; without detectors only columns of floating-point numbers are",
            UserWarning,
            stacklevel=4,
        )


def _check_roles(selection: SelectionConfig, tables: Mapping[Role, pa.Table]) -> None:
    """Check that a selection has its calibration documents.

    Raises:
        UserError: they are missing or have no groups, or audited documents share the draw of a smoothed rank.
    """
    role, other = NULL_ROLE[selection.direction], SOUGHT_ROLE[selection.direction]
    chosen, calibration = procedure_of(selection.procedure), calibration_of(selection.calibration)
    if chosen.only_versions:
        raise UserError(f"procedure {selection.procedure} takes documents with versions: use seenset.select_versions")
    if not chosen.signed and role not in tables:
        raise UserError(f"direction {selection.direction} is calibrated on {role} documents, which are not given")
    if chosen.needs_sought and other not in tables:
        raise UserError(f"procedure {selection.procedure} needs {other} documents too, which are not given")
    ids = tables["audit"]["doc_id"]
    if selection.ranks != "whole" and (distinct := len(ids.unique())) < len(ids):
        raise UserError(
            f"ranks smoothed draws one number for each doc_id, and the {len(ids):,} audited documents have "
            f"{distinct:,}: give each its own, or take ranks: whole"
        )
    if calibration.grouped:
        for name in ("audit", role):
            if "group" not in tables[name].column_names:
                raise UserError(f"calibration by_group needs a column group, which the {name} documents do not have")


def _needed(table: pa.Table, selection: SelectionConfig) -> pa.Table:
    """The columns that a selection reads, with one type in every table."""
    kinds = dict.fromkeys(selection.detectors, pa.float64())
    names = ["doc_id", *(["group"] if "group" in table.column_names else [])]
    schema = pa.schema([*((name, pa.string()) for name in names), *kinds.items()])
    arrays = []
    for column in schema:
        values = table[column.name]
        try:
            arrays.append(values.cast(column.type))
        except pa.ArrowException:
            kind = "numbers" if column.name in kinds else "texts"
            raise UserError(f"column {column.name!r} must hold {kind}, got {values.type}") from None
    return pa.table(arrays, schema=schema)


def _scored(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Whether each document has all scores, bool (documents,)."""
    return np.all([np.isfinite(table[column].to_numpy().astype(np.float64)) for column in columns], axis=0)
