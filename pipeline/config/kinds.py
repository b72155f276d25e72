"""Kinds of documents, of models and of ways to read: what each offers, compared with what a detector or setting needs.

A kind is one record. Detectors state what they need by their passes, procedures, calibrations and settings by name;
`check_offered` compares. Nothing else decides which of them go together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from pipeline.errors import UserError


class Capability(Enum):
    """What a kind may offer. The value completes "needs ..." in a message."""

    PAIR = "two models that read the same tokens"
    FORWARD = "log-probabilities of a whole text"
    PART = "a part of a picture and its description"
    CAPTION = "captions in all roles"
    DISTRIBUTION = "the distribution of each token"
    GRADIENT = "gradients"
    REPEATED = "repeated copies of a text"
    CHANGED = "changed copies of a text"
    PARAPHRASED = "paraphrases of a text"
    CONTINUED = "continuations of a text"
    SPLIT = "texts that are split at prefix_ratio"
    TRAINED = "a model that is trained further on known texts"
    PRECEDED = "other documents before each document, or their tokens"
    TRANSFORMED = "texts to change"
    CONTENTS = "the contents of the documents"
    WORDS = "words or tokens of the documents"
    SINGLE = "documents without versions"
    VERSIONS = "documents with versions"
    ENDPOINT = "texts to send"
    CHAT_ENDPOINT = "texts or messages to send"
    ANSWERED = "chats"
    ATTRIBUTED = "texts whose tokens are shown"
    REFERENCE_ENDPOINT = "texts to send for comparison"
    WINDOWS = "texts whose tokens are known"
    WHOLE = "a text in one piece"


@dataclass(frozen=True, slots=True)
class InputKind:
    """A kind of documents, of models or of ways to read, and what it offers."""

    name: str  # as a plural, for messages
    state: str  # clause of a message that states the kind
    keys: tuple[str, ...]  # keys of a source of documents that state it; none for models and ways to read
    offers: frozenset[Capability]
    units: str = "words"  # of the length of a document

    @property
    def shown(self) -> str:
        """The name, and the setting that states the kind."""
        return f"{self.name} (corpus.*.{self.keys[-1]})" if self.keys else self.name


_C = Capability
_SEQUENCES = frozenset(
    {_C.CONTENTS, _C.WORDS, _C.FORWARD, _C.DISTRIBUTION, _C.GRADIENT, _C.REPEATED, _C.PAIR, _C.WHOLE}
)
_DOCUMENTS = frozenset({_C.CONTENTS, _C.SINGLE, _C.WHOLE})

TEXTS = InputKind(
    "texts",
    "the documents are texts",
    ("text",),
    frozenset(Capability) - {_C.PART, _C.CAPTION, _C.VERSIONS, _C.ANSWERED},
)
PICTURES = InputKind(
    "pictures",
    "the documents are pictures",
    ("image",),
    # a model of pictures reads no reference_model, so that one behind an endpoint is never asked
    _DOCUMENTS | {_C.PART, _C.DISTRIBUTION, _C.REFERENCE_ENDPOINT},
)
CAPTIONED = InputKind("pictures with captions", PICTURES.state, ("image", "caption"), PICTURES.offers | {_C.CAPTION})
TOKENS = InputKind(
    "token ids",
    "the documents are token ids",
    ("tokens",),
    _SEQUENCES | _DOCUMENTS | {_C.PRECEDED},
    "tokens",
)
CHATS = InputKind(
    "chats",
    "the documents are chats",
    ("messages",),
    _DOCUMENTS
    | {_C.FORWARD, _C.DISTRIBUTION, _C.GRADIENT, _C.PAIR, _C.CHANGED, _C.TRANSFORMED, _C.ANSWERED}
    | {_C.ATTRIBUTED, _C.TRAINED, _C.CONTINUED, _C.CHAT_ENDPOINT, _C.PARAPHRASED},
)
COMPLETIONS = InputKind("prompts with completions", CHATS.state, ("prompt", "completion"), CHATS.offers)
SCORES = InputKind("scores", "the documents are scores without texts", ("scores",), frozenset({_C.SINGLE, _C.WHOLE}))
SCORED_TEXTS = InputKind(
    "scores of texts", "the documents are scores", ("scores", "text"), _DOCUMENTS | {_C.WORDS, _C.TRANSFORMED}
)
VERSIONS = InputKind(
    "documents with versions",
    "the documents have versions",
    ("versions",),
    _SEQUENCES | {_C.CHANGED, _C.TRANSFORMED, _C.VERSIONS, _C.ATTRIBUTED},
)
DIFFERING = InputKind(
    VERSIONS.name,
    "of documents with versions.differing only some tokens are scored",
    ("versions", "versions.differing"),
    VERSIONS.offers - {_C.GRADIENT, _C.REPEATED, _C.CHANGED},
)
KINDS = (TEXTS, PICTURES, CAPTIONED, TOKENS, CHATS, COMPLETIONS, SCORES, SCORED_TEXTS, VERSIONS, DIFFERING)
"""All kinds of documents."""

WEIGHTS = InputKind("weights", "the model is given by its weights", (), frozenset(Capability))
SERVED = InputKind(
    "endpoints", "the model is an endpoint", (), frozenset({_C.FORWARD, _C.CHANGED, _C.CONTINUED, _C.SPLIT, _C.WHOLE})
)
CONTINUING = InputKind(
    "endpoints without log-probabilities",
    "the endpoint returns no log-probabilities of prompts",
    (),
    frozenset({_C.CONTINUED, _C.SPLIT, _C.WHOLE}),
)
MODELS = (WEIGHTS, SERVED, CONTINUING)
"""All kinds of models."""

FROM_BEGINNING = InputKind("windows: 1", "a text is read from its beginning", (), frozenset(Capability))
IN_WINDOWS = InputKind(
    "windows above 1", "windows above 1 reads a text in several pieces", (), frozenset(Capability) - {_C.WHOLE}
)
WAYS_TO_READ = (FROM_BEGINNING, IN_WINDOWS)
"""All ways to read a text."""


def find_kind(given: Collection[str]) -> InputKind:
    """The kind of documents that most of the given keys of a source state; without any, texts."""
    stated = [kind for kind in KINDS if set(kind.keys) <= {*given}]
    return max(reversed(stated), key=lambda kind: len(kind.keys), default=TEXTS)


def check_keys(given: Collection[str]) -> None:
    """Check that the given keys of a source state one kind of documents.

    Raises:
        ValueError: a key is of another kind, or goes with one that is not given.
    """
    kind = find_kind(given)
    for key in sorted({*given} - {*kind.keys}):
        stated = next(one for one in KINDS if key in one.keys).keys
        missing = [other for other in stated if other not in given]
        if missing:
            beside = sorted({*given} - {*stated})
            excluded = f", and a source has documents of one kind: leave out {beside[0]} or {key}" if beside else ""
            raise ValueError(f"{key} goes with {missing[0]}, and only with it{excluded}")
        raise ValueError(f"{key} and {kind.keys[0]}: a source has documents of one kind; leave one of them out")


def check_same_kind(given: Mapping[str, frozenset[str]]) -> None:
    """Check that the documents of all sources are of one kind; of pictures some may have captions.

    Args:
        given: source -> its given keys.

    Raises:
        ValueError: they are of several; the message names the kind of each source.
    """
    kinds = {source: find_kind(keys - {"caption"}) for source, keys in given.items()}
    if len({*kinds.values()}) > 1:
        each = " and ".join(f"{kind.name} in {source}" for source, kind in kinds.items())
        raise ValueError(f"all documents must be of one kind, got {each}")


def check_offered(
    who: str, needs: Collection[Capability], kind: InputKind, instead: Callable[[InputKind], str]
) -> None:
    """Check that a kind offers what a detector, a procedure, a model or a setting needs.

    Args:
        who: what needs it, for the message.
        needs: the needed capabilities.
        kind: the kind of the documents, of the model, or the way to read.
        instead: what to write instead with documents or a model of this kind; empty if there is nothing.

    Raises:
        UserError: the kind does not offer a needed capability; the message states the need, the kind and what works.
    """
    lacking = [need for need in Capability if need in needs and need not in kind.offers]
    if not lacking:
        return
    family = next(kinds for kinds in (KINDS, MODELS, WAYS_TO_READ) if kind.name in {one.name for one in kinds})
    others = [one.shown for one in family if one.offers.issuperset(needs)]
    works = ", or ".join(filter(None, [instead(kind), f"give {others[0]}" if others else ""]))
    raise UserError(f"{who} needs {lacking[0].value}, and {kind.state}: {works}")
