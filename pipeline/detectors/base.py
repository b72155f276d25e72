"""Definition of detectors: pure functions from evidence to a score, and the passes that measure the evidence."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pipeline.config.paths import written
from pipeline.config.retired import retired
from pipeline.corpus.scripts import units
from pipeline.detectors.arguments import Argument, Check, read_arguments
from pipeline.detectors.plugins import BUILT_IN, Registry, display_module, is_built_in, place_of_error
from pipeline.errors import ForeignError, UserError, error_line, foreign_as_errors, nearest, number_meant
from pipeline.passes.statistics import GIVEN, STATISTICS

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.passes.forward import TokenStatistics


@dataclass(frozen=True, slots=True)
class Continued:
    """Settings of continuations by the model; equal settings are sampled once for all detectors."""

    prefix_ratio: float = 0.5  # share of a document's words in the prompt
    candidate_words: Literal["reference", "all"] = (
        "reference"  # a draw ends with as many words as were left out, or not
    )
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Prefix:
    """Known documents that precede a text, or whose tokens are counted; drawn by the run's seed, not calibrating."""

    role: Literal["unseen", "seen"]
    shots: int  # maximum number of drawn documents: near-duplicates stay together
    joined: bool = True  # True: all of them concatenated; False: one of them, chosen by the document
    counted: bool = False  # their tokens are counted, and none of them precedes a text

    @property
    def named(self) -> str:
        """Their description in an error."""
        return str(self) if self.counted else f"prefix of {self}"

    @property
    def use(self) -> str:
        """Their use in an error."""
        return "counts the tokens of" if self.counted else "reads each text after documents of"

    def __str__(self) -> str:
        if self.counted:
            return f"tokens of {self.shots} of {self.role}"
        return f"{self.shots} of {self.role}" if self.joined else f"one of {self.shots} of {self.role}"


@dataclass(frozen=True, slots=True)
class Pass:
    """One way to put a text through a model; kind count: token frequencies in known documents."""

    kind: Literal["forward", "gradient", "generate", "count"]
    model: Literal["target", "reference"] = "target"
    text: str = "plain"  # or lowercase; repeated: three copies within max_tokens; swapped1, ...: `swapped_words`
    draw: int = 0  # 0: the document; i: its i-th paraphrase
    adapter: str = ""  # "": the target; otherwise the name of its active adapter
    continued: Continued | None = None  # of a generate pass, whose "statistics" are numbers of draws
    part: str = ""  # of a picture with its description, one of `passes.pictures.PARTS`; "": a text
    caption: Literal["", "given", "generated"] = ""  # source of the description
    prefix: Prefix | None = None  # of a forward pass, which then measures only `log_prob` of the text; or of kind count


FORWARD = Pass("forward")
LOWERCASE = Pass("forward", text="lowercase")
REFERENCE = Pass("forward", model="reference")
GRADIENT = Pass("gradient")
Needs = Mapping[Pass, frozenset[str]]
WrittenNeeds = Mapping[Pass, Iterable[str]]
"""Needs as written by the author of a detector: a list, tuple or set of names, or one name."""

Score = Callable[..., "Tensor"]
COLUMNS = frozenset(
    [
        "doc_id",
        "role",
        "group",
        "row",
        "n_tokens",
        "truncated",
        "id_key",
        "text_key",
        "sketch",
        "versions",
        "p_value",
        "selected",
        "source",
        "excerpt",
        "problem",
        "conformal_rank",
        "rank_draw",
        "smoothed_p",
    ]
)
"""Other columns of score files, which are invalid names of detectors."""


def variant(needed: Pass, draw: int = 0, adapter: str = "") -> Pass:
    """The pass for another variant of the documents or of the target; other models have no adapters."""
    return replace(needed, draw=draw, adapter=adapter if needed.model == "target" else "")


@dataclass(frozen=True, slots=True)
class Continuations:
    """Continuations of the prefix of one document, and its actual continuation."""

    reference: str  # the rest of the document
    texts: Sequence[str]  # one per draw; of an endpoint without draws that are no answer, at least one


@dataclass(frozen=True, slots=True)
class Evidence:
    """Results of the passes for a batch of documents, all in the same order.

    Example:
        >>> @seenset.detector(needs={seenset.FORWARD: ["log_prob"], seenset.GRADIENT: ["norm"]})
        ... def loss_per_norm(evidence: seenset.Evidence):
        ...     tokens = evidence[seenset.FORWARD]  # log_prob and mask: (documents, tokens - 1)
        ...     return seenset.mean_of_all(tokens.log_prob, tokens.mask) / evidence.norm(seenset.GRADIENT)
        >>> seenset.score("my-model", ["One text.", "Another."], ["loss_per_norm"]).column_names
        ['doc_id', 'n_tokens', 'loss_per_norm', 'problem']
    """

    texts: Sequence[str]  # the part of each text that max_tokens keeps
    passes: Mapping[Pass, TokenStatistics]  # of the forward passes
    norms: Mapping[Pass, Tensor] = field(default_factory=dict)  # of the gradient passes: (documents,) float64, >= 0
    paraphrases: Sequence[Sequence[str]] = ()  # for each draw, the kept parts of the documents' paraphrases
    draw: int = 0  # variant of the documents, here and in the passes
    adapter: str = ""  # active adapter of the target in the passes
    continuations: Mapping[Continued, Sequence[Continuations]] = field(default_factory=dict)  # one per document
    tokens: Callable[[str], Sequence[Any]] = units  # of a continuation, by the target's tokenizer; words if unknown
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)  # precomputed scores, one per document
    memo: dict[Any, Any] = field(default_factory=dict)  # values shared by several columns of a detector, computed once
    rarity: Mapping[Prefix, Tensor] = field(default_factory=dict)  # ln(1 / frequency) by token id: float64, > 0
    predicted: Mapping[Pass, Tensor] = field(default_factory=dict)  # of the gradient passes: tokens, (documents,) int64

    def __getitem__(self, needed: Pass) -> TokenStatistics:
        """The statistics of one forward pass."""
        return self.passes[self._variant(needed)]

    def norm(self, needed: Pass) -> Tensor:
        """The norms of one gradient pass, (documents,) float64."""
        return self.norms[self._variant(needed)]

    def predicted_tokens(self, needed: Pass) -> Tensor:
        """The numbers of tokens that one gradient pass predicts, (documents,) int64: all but the first."""
        return self.predicted[self._variant(needed)]

    def of_draw(self, draw: int) -> Evidence:
        """The evidence of one draw of the documents' paraphrases, from 1."""
        return replace(self, texts=self.paraphrases[draw - 1], draw=draw)

    def with_adapter(self, name: str) -> Evidence:
        """The evidence with an active adapter of the target."""
        return replace(self, adapter=name)

    def _variant(self, needed: Pass) -> Pass:
        return variant(needed, self.draw, self.adapter)


@dataclass(frozen=True, slots=True)
class Detector:
    """A detector with its arguments: one column of the scores."""

    column: str  # name, with changed arguments: min_k, min_k(k=0.1)
    name: str
    arguments: dict[str, Any]
    needs: Needs
    function: Score
    signed: bool  # whether scores have both signs: a difference whose null value is 0
    same_tokens: bool = False  # whether it compares the target and the reference token by token
    windows: bool = False  # whether it can score a text that is read in several windows

    def __str__(self) -> str:
        return self.column

    def score(self, evidence: Evidence) -> Tensor:
        """Scores of the batch, (documents,) float64, higher = more member-like; NaN if the model gave NaN.

        Raises:
            ValueError: the function did not return one real number per document.
            DetectorError: the function of a plugin raised an error.
        """
        from torch import Tensor

        try:
            with foreign_as_errors():
                scores = self.function(evidence, **self.arguments)
        except Exception as error:
            if (named := _named_error(self, error)) is None:
                raise
            raise named from error
        if not isinstance(scores, Tensor) or scores.shape != (len(evidence.texts),):
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"detector {self} must return ({len(evidence.texts)},), one score a document, got {shape}")
        if scores.is_complex():
            raise ValueError(f"detector {self} must return real numbers, got {scores.dtype}")
        return scores.double()


class DetectorError(RuntimeError):
    """An error in the function of a plugin's detector, with its place."""


def _named_error(detector: Detector, error: Exception) -> DetectorError | None:
    """An error of a plugin's function with its detector and place; None for others, and those of memory and devices."""
    module = _registry.modules.get(detector.name, BUILT_IN)
    of_torch = type(error).__module__.partition(".")[0] == "torch"
    if is_built_in(module) or of_torch or isinstance(error, (UserError, MemoryError, DetectorError)):
        return None
    text = error_line(error)
    raised = text if isinstance(error, ForeignError) else f"{type(error).__name__}{': ' * bool(text)}{text}"
    return DetectorError(f"detector {detector} ({place_of_error(module, error)}) raised {raised}")


@dataclass(frozen=True, slots=True)
class _Entry:
    function: Score
    needs: Needs | Callable[..., WrittenNeeds]
    arguments: Mapping[str, Argument]
    signed: bool
    same_tokens: bool = False
    windows: bool = False


_registry: Registry[_Entry] = Registry("detector")


def detector(
    needs: WrittenNeeds | Callable[..., WrittenNeeds],
    checks: Mapping[str, Check] | None = None,
    signed: bool = False,
    also: Mapping[str, Mapping[str, Any]] | None = None,
    same_tokens: bool = False,
    windows: bool = False,
) -> Callable[[Score], Score]:
    """Register a function as a detector for configurations.

    An argument is checked by its annotation and default: `k: float = 0.2`, `kind: Literal["a", "b"] = "a"`,
    `limit: int | None = None`, or with limits `k: Annotated[float, Field(gt=0, le=1)] = 0.2`.

    Args:
        needs: pass -> statistics that it reads, or a function of its arguments that returns this. A forward pass
            has `STATISTICS` and `GIVEN`; a gradient pass `norm` and `tokens`; a count `rarity`; for a generate pass
            it is the number of draws.
        checks: argument -> function that returns the value to use, or raises ValueError with the limit. Only for
            conditions that an annotation cannot express.
        signed: whether its scores have both signs, which `ktd` requires.
        also: further detectors of the same function: name -> values of arguments that no configuration sets.
        same_tokens: whether it compares the two models token by token, so that their tokenizers must agree.
        windows: whether it can score a text that is read in several windows, with the statistics of its windows side by
            side; `mask` is False between windows.

    Raises:
        UserError: a statistic that its pass does not measure, an argument that cannot be checked, or a name that is
            already registered.

    Example:
        >>> @seenset.detector(needs={seenset.FORWARD: ["log_prob"]})
        ... def mean_of_high(evidence, k: float = 0.2):
        ...     tokens = evidence[seenset.FORWARD]
        ...     return -seenset.mean_of_lowest(-tokens.log_prob, tokens.mask, k)
        >>> scores = seenset.score("my-model", ["One text.", "Another."], [{"mean_of_high": {"k": [0.1, 0.5]}}])
        >>> scores.column_names
        ['doc_id', 'n_tokens', 'mean_of_high(k=0.1)', 'mean_of_high(k=0.5)', 'problem']
    """

    def register(function: Score) -> Score:
        bound = {argument for values in (also or {}).values() for argument in values}
        arguments = read_arguments(function, checks or {}, bound)
        for name, values in {function.__name__: {}, **(also or {})}.items():
            if not name.isidentifier():
                raise UserError(f"a detector is named by its function, which cannot be {name}")
            if name in COLUMNS:
                raise UserError(f"detector {name}: score files have a column of that name; rename the function")
            read = needs if callable(needs) else measurable(needs, f"detector {name}")
            made = partial(function, **values) if values else function
            entry = _Entry(made, read, arguments, signed, same_tokens, windows)
            _registry.register(name, entry, function.__module__)
        return function

    return register


def plan_passes(detectors: Iterable[Detector]) -> dict[Pass, frozenset[str]]:
    """The passes to run, each once, with the union of the statistics that the detectors read of it."""
    planned: dict[Pass, frozenset[str]] = {}
    for needs in (detector.needs for detector in detectors):
        for needed, statistics in needs.items():
            planned[needed] = planned.get(needed, frozenset()) | statistics
    return planned


def measurable(needs: WrittenNeeds, who: str) -> Needs:
    """The needs of a detector with the statistics of each pass as a frozenset, checked against the pass.

    Raises:
        UserError: invalid needs, with the nearest valid name.
    """
    if not isinstance(needs, Mapping) or not all(isinstance(needed, Pass) for needed in needs):
        raise UserError(f'{who}: needs must be {{pass: names of statistics}}, such as {{FORWARD: ["log_prob"]}}')
    return {needed: _statistics(needed, names, who) for needed, names in needs.items()}


def _statistics(needed: Pass, names: Iterable[str], who: str) -> frozenset[str]:
    try:
        statistics = frozenset([names] if isinstance(names, str) else names)
    except TypeError:
        raise UserError(f"{who}: needs of a {needed.kind} pass must be names of statistics, got {names!r}") from None
    if not statistics:
        raise UserError(f"{who}: needs no statistic of a {needed.kind} pass; leave the pass out")
    for name in sorted(statistics, key=str):
        if needed.kind == "generate":
            if needed.continued is None or not str(name).isdecimal() or int(name) < 1:
                raise UserError(f"{who}: needs of a generate pass must be a number of draws, got {name!r}")
            continue
        known = sorted(STATISTICS | GIVEN) if needed.prefix is None else ["log_prob"]
        known = {"gradient": ["norm", "tokens"], "count": ["rarity"]}.get(needed.kind, known)
        if name not in known:
            raise UserError(
                f"{who}: a {needed.kind} pass measures no {name!r}; {nearest(str(name), known, 'it measures')}"
            )
    return statistics


def retired_detector(name: str) -> str | None:
    """The refusal of a detector of an earlier version, also as pages show one with arguments; None for others."""
    call = _CALL.fullmatch(name)
    return retired("detector", name if call is None else call[1])


def is_detector(name: str) -> bool:
    """Whether a detector of this name is registered."""
    return name in _registry


def detector_names(built_in: bool = False) -> list[str]:
    """The names of all registered detectors, in the order of registration; if `built_in`, without those of plugins."""
    return [name for name in _registry if not built_in or is_built_in(_registry.modules[name])]


def detector_modules(detectors: Iterable[Detector]) -> dict[str, str]:
    """Detector -> module of its function, including base detectors of others."""
    modules: dict[str, str] = {}
    for one in detectors:
        modules[one.name] = _registry.modules[one.name]
        for value in one.arguments.values():
            modules.update(detector_modules([value] if isinstance(value, Detector) else getattr(value, "features", ())))
    return modules


def parse(entries: Sequence[str | dict[str, dict[str, Any]]]) -> tuple[Detector, ...]:
    """The registered detectors in a configuration; a list of values gives one column per value.

    Args:
        entries: names, or {name: {argument: value or list of values}}.

    Raises:
        UserError: an unknown name or argument, a value outside its limits, or the same column twice.
    """
    columns: dict[str, Detector] = {}
    for entry in entries:
        for parsed in _parse(entry):
            if parsed.column in columns:
                raise UserError(f"detectors: the column {parsed.column} appears twice")
            columns[parsed.column] = parsed
    return tuple(columns.values())


def _parse(entry: str | dict[str, dict[str, Any]]) -> Iterator[Detector]:
    if isinstance(entry, dict) and len(entry) != 1:
        shown = _as_written(str(entry["name"]), {**entry, "name": None}) if "name" in entry else ""
        raise UserError(
            f"detectors: one name an entry, got {len(entry)}: {', '.join(map(str, entry)) or 'none'}{shown}"
        )
    name, settings = (entry, None) if isinstance(entry, str) else next(iter(entry.items()))
    known = _registry.get(name)
    if known is None:
        line, call = retired_detector(str(name)), _CALL.fullmatch(str(name))
        if line is None and call is not None and call[1] in _registry:
            given = dict(pair.split("=", 1) for pair in call[2].replace(" ", "").split(",") if "=" in pair)
            line = f"unknown detector {name!r}{_as_written(call[1], given)}"
        raise UserError(line or f"unknown detector {name!r}; {nearest(str(name), sorted(_registry))}")
    if settings is not None and not isinstance(settings, dict):
        raise UserError(
            f"detectors: {name} takes {{argument: value}}, got {settings!r}{_with_argument(name, settings)}"
        )
    settings = settings or {}
    for argument in settings:
        if argument not in known.arguments:
            takes = nearest(str(argument), known.arguments, "it takes") if known.arguments else "it takes none"
            raise UserError(f"detector {name} has no argument {argument!r}; {takes}")
    names = [argument for argument in known.arguments if argument in settings]
    choices = [settings[name] if isinstance(settings[name], list) else [settings[name]] for name in names]
    for argument, values in zip(names, choices, strict=True):
        if not values:
            raise UserError(f"detector {name}: {argument} is an empty list")
    for values in itertools.product(*choices):
        yield _detector(name, known, dict(zip(names, values, strict=True)))


_CALL = re.compile(r"(\w+)\((.*)\)")  # how pages show a detector with arguments


def _as_written(name: str, arguments: Mapping[str, Any]) -> str:
    """The end of an error: a detector with arguments as a configuration has it."""
    inner = ", ".join(f"{key}: {value}" for key, value in arguments.items() if value is not None)
    return f"; did you mean {{{name}: {{{inner}}}}}?"


def _with_argument(name: str, value: Any) -> str:
    """The end of an error: a value given instead of arguments, written as the first argument that accepts it."""
    for argument, described in _registry[name].arguments.items():
        try:
            for one in value if isinstance(value, list) and value else [value]:
                described.check(one)
        except Exception:  # a plugin's check may raise anything
            continue
        return f"; did you mean {{{name}: {{{argument}: {json.dumps(value)}}}}}?"
    return ""


def _detector(name: str, known: _Entry, values: Mapping[str, Any]) -> Detector:
    settings = {argument: _checked(name, argument, known, value) for argument, value in values.items()}
    arguments = {**{key: argument.default for key, argument in known.arguments.items()}, **settings}
    assignments = ", ".join(f"{argument}={value}" for argument, value in settings.items())
    naming = next((argument for argument, described in known.arguments.items() if described.names_column), None)
    column = f"{name}({assignments})" if naming is None else str(arguments[naming])
    column = column if assignments else name
    if column in COLUMNS:
        raise UserError(f"score column {column!r}: score files have a column of that name; rename it")
    needs = _resolve_needs(name, known.needs, arguments) if callable(known.needs) else known.needs
    same = known.same_tokens or any(getattr(value, "same_tokens", False) for value in arguments.values())
    return Detector(column, name, arguments, needs, known.function, known.signed, same, known.windows)


def _checked(name: str, argument: str, known: _Entry, value: Any) -> Any:
    try:
        with foreign_as_errors():
            return known.arguments[argument].check(value)
    except (TypeError, ValueError) as error:
        got = written(value) if isinstance(value, str) else value
        meant = number_meant(got, share=_takes_shares(known.arguments[argument].check))
        raise UserError(f"detector {name}: {argument} {error}, got {got!r}{meant}") from None
    except (Exception, SystemExit) as error:  # a plugin's check may raise anything
        raise _broken(name, f"the check of {argument}", error, f", got {value!r}") from None


def _takes_shares(check: Check) -> bool:
    """Whether an argument is a share: a check accepts one half, and nothing above one."""
    try:
        check(0.5)
    except Exception:  # a plugin's check may raise anything
        return False
    try:
        check(1.5)
    except Exception:
        return True
    return False


def _resolve_needs(name: str, needs: Callable[..., WrittenNeeds], arguments: Mapping[str, Any]) -> Needs:
    """The needs of a detector with these arguments; its function receives those in its signature."""
    try:
        with foreign_as_errors():
            read = needs(**{argument: arguments[argument] for argument in inspect.signature(needs).parameters})
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # as above
        raise _broken(name, "its function of needs", error) from None
    return measurable(read, f"detector {name}")


def _broken(name: str, what: str, error: BaseException, tail: str = "") -> UserError:
    """An error in the code of a detector, which its author must correct."""
    text = error_line(error)
    raised = text if isinstance(error, ForeignError) else f"{type(error).__name__}: {text}"
    return UserError(f"detector {name} ({display_module(_registry.modules[name])}): {what} raised {raised}{tail}")
