"""A detector: a pure function from evidence to a score, and the passes whose evidence it reads."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from pipeline.errors import UserError, nearest

if TYPE_CHECKING:
    from pipeline.passes.forward import TokenStatistics  # whose import costs seconds


@dataclass(frozen=True, slots=True)
class Continued:
    """How documents are continued by the model: what is equal here is sampled once, whoever reads it."""

    prefix_ratio: float = 0.5  # share of a document's words that the model is given
    candidate_words: Literal["reference", "all"] = (
        "reference"  # a draw ends with as many words as were left out, or not
    )
    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Pass:
    """One way to put a text through a model."""

    kind: Literal["forward", "gradient", "generate"]
    model: Literal["target", "reference"] = "target"
    text: Literal["plain", "lowercase"] = "plain"
    draw: int = 0  # 0: the document; i: its i-th paraphrase
    adapter: str = ""  # "": the target as it is; otherwise the name of the adapter that is switched on over it
    continued: Continued | None = None  # of a generate pass, whose statistics are numbers of draws


FORWARD = Pass("forward")
LOWERCASE = Pass("forward", text="lowercase")
REFERENCE = Pass("forward", model="reference")
GRADIENT = Pass("gradient")
Needs = Mapping[Pass, frozenset[str]]
Score = Callable[..., Tensor]


def variant(needed: Pass, draw: int = 0, adapter: str = "") -> Pass:
    """A pass over another variant of the documents, or of the target; other models have no adapters."""
    return replace(needed, draw=draw, adapter=adapter if needed.model == "target" else "")


@dataclass(frozen=True, slots=True)
class Continuations:
    """What a model wrote behind the prefix of one document, and what stands there."""

    reference: str  # the rest of the document
    texts: Sequence[str]  # one a draw


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the passes measured on a batch of documents, in the same order everywhere."""

    texts: Sequence[str]  # the part of each text that max_tokens keeps
    passes: Mapping[Pass, TokenStatistics]  # of the forward passes
    norms: Mapping[Pass, Tensor] = field(default_factory=dict)  # of the gradient passes: (documents,) float64, >= 0
    paraphrases: Sequence[Sequence[str]] = ()  # for each draw the kept parts of the documents' paraphrases
    draw: int = 0  # which variant of the documents is read, here and in the passes
    adapter: str = ""  # which adapter of the target is on in the passes that are read
    continuations: Mapping[Continued, Sequence[Continuations]] = field(default_factory=dict)  # one a document

    def __getitem__(self, needed: Pass) -> TokenStatistics:
        """The statistics of one forward pass."""
        return self.passes[self._variant(needed)]

    def norm(self, needed: Pass) -> Tensor:
        """The norms of one gradient pass, (documents,) float64."""
        return self.norms[self._variant(needed)]

    def of_draw(self, draw: int) -> Evidence:
        """The same measured on the documents' paraphrases of one draw, from 1."""
        return replace(self, texts=self.paraphrases[draw - 1], draw=draw)

    def with_adapter(self, name: str) -> Evidence:
        """The same measured with an adapter of the target switched on."""
        return replace(self, adapter=name)

    def _variant(self, needed: Pass) -> Pass:
        return variant(needed, self.draw, self.adapter)


@dataclass(frozen=True, slots=True)
class Detector:
    """A detector with its arguments: one column of the scores."""

    column: str  # as in the config: min_k; with settings of its own: min_k(k=0.1)
    name: str
    arguments: dict[str, Any]
    needs: Needs
    function: Score
    signed: bool  # whether it has both signs: a difference, of which 0 means nothing

    def __str__(self) -> str:
        return self.column

    def score(self, evidence: Evidence) -> Tensor:
        """Scores of the batch, (documents,) float64, higher = more member-like; NaN where the model gave NaN."""
        return self.function(evidence, **self.arguments).double()


@dataclass(frozen=True, slots=True)
class _Entry:
    function: Score
    needs: Needs | Callable[..., Needs]
    checks: Mapping[str, Callable[[Any], Any]]
    signed: bool
    defaults: Mapping[str, Any]


_known: dict[str, _Entry] = {}


def detector(
    needs: Needs | Callable[..., Needs],
    checks: Mapping[str, Callable[[Any], Any]] | None = None,
    signed: bool = False,
) -> Callable[[Score], Score]:
    """Make a function a detector that a config can name.

    Args:
        needs: The statistics that it reads of each pass, or a function of its arguments that says so.
        checks: For each argument, a function that returns the value to use, or raises ValueError with the limit.
        signed: Whether its scores have both signs, which `ktd` needs.
    """

    def register(function: Score) -> Score:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        defaults = {parameter.name: parameter.default for parameter in parameters}
        _known[function.__name__] = _Entry(function, needs, checks or {}, signed, defaults)
        return function

    return register


def parse(entries: Sequence[str | dict[str, dict[str, Any]]]) -> tuple[Detector, ...]:
    """The detectors that a config names, of those that are registered; a list of values gives a column each.

    Args:
        entries: Names, or {name: {argument: value or list of values}}.

    Raises:
        UserError: an unknown name or argument, a value outside its limits, or the same column twice.
    """
    found: dict[str, Detector] = {}
    for entry in entries:
        for parsed in _parse(entry):
            if parsed.column in found:
                raise UserError(f"detectors: the column {parsed.column} appears twice")
            found[parsed.column] = parsed
    return tuple(found.values())


def _parse(entry: str | dict[str, dict[str, Any]]) -> Iterator[Detector]:
    if isinstance(entry, dict) and len(entry) != 1:
        raise UserError(f"detectors: one name an entry, got {len(entry)}: {', '.join(map(str, entry)) or 'none'}")
    name, given = (entry, None) if isinstance(entry, str) else next(iter(entry.items()))
    known = _known.get(name)
    if known is None:
        raise UserError(f"unknown detector {name!r}; {nearest(str(name), sorted(_known))}")
    if given is not None and not isinstance(given, dict):
        raise UserError(f"detectors: {name} takes {{argument: value}}, got {given!r}")
    given = given or {}
    for argument in given:
        if argument not in known.defaults:
            takes = nearest(str(argument), known.defaults, "it takes") if known.defaults else "it takes none"
            raise UserError(f"detector {name} has no argument {argument!r}; {takes}")
    arguments = [argument for argument in known.defaults if argument in given]
    choices = [given[argument] if isinstance(given[argument], list) else [given[argument]] for argument in arguments]
    for argument, values in zip(arguments, choices, strict=True):
        if not values:
            raise UserError(f"detector {name}: {argument} is an empty list")
    for values in itertools.product(*choices):
        yield _detector(name, known, dict(zip(arguments, values, strict=True)))


def _detector(name: str, known: _Entry, given: Mapping[str, Any]) -> Detector:
    settings = {}
    for argument, value in given.items():
        try:
            settings[argument] = known.checks[argument](value)
        except (TypeError, ValueError) as error:
            raise UserError(f"detector {name}: {argument} {error}, got {value!r}") from None
    arguments = {**known.defaults, **settings}
    shown = ", ".join(f"{argument}={value}" for argument, value in settings.items())
    needs = known.needs(**arguments) if callable(known.needs) else known.needs
    return Detector(f"{name}({shown})" if shown else name, name, arguments, needs, known.function, known.signed)
