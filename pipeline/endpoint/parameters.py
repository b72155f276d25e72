"""Parameters of requests that an endpoint refuses: found by a few requests at the start of a run, and left out.

Some models take `max_completion_tokens` in the place of `max_tokens`, and no temperature but their own; other services
refuse `top_k`, `seed` or `n` as unknown. Each refused request is repeated without the parameter that the refusal names.
Where it names none, parameters are added one at a time to a request that the endpoint accepts.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.endpoint.client import Endpoint, Fault, Refusal, Usage, prompt_tokens
from pipeline.endpoint.error_answers import OUTPUT_LIMIT, error_in
from pipeline.errors import ExitCode, StopError

EFFECTS = {
    "top_p": "the endpoint's default applies",
    "top_k": "the endpoint's default applies",
    "seed": "a repeated run draws other texts",
    "n": "every draw is a request of its own, whose prompt is billed again",
    "temperature": "the endpoint's default temperature applies, which changes what the scores measure, and not the "
    "error rate of an answer",
    "max_tokens": "only the endpoint limits the length of an answer, and answers may exceed the budget",
}
"""Parameters that a request can do without -> the effect, those with the smallest effect first."""

RENAMED = "max_completion_tokens"
"""The other name of `max_tokens`."""

MOST_PROBES = 12
"""Maximum number of requests that find the refused parameters."""

PROBE_TOKENS = 16
"""Length of an answer to such a request; some services refuse less."""

PROBE_TEXT = "The harbour office of Vellmark keeps one book for ropes and another for lamps, and the clerk"
"""Text of such a request."""

_OF_A_LENGTH = re.compile(r"context|too (?:large|long|many)|maximum length|output limit|input tokens", re.IGNORECASE)
_NOT_BOTH = re.compile(r"\bboth\b|\bonly one of\b|\buse only one\b|\beither\b|\btogether\b|\bmutually\b", re.IGNORECASE)
_OF_ONE_REQUEST = re.compile(r"[\w-]*\d[\w-]*")
_BEFORE = r"(?:(?<![\w.-])|(?<=body\.)|(?<=config\.)|(?<=parameters\.)|(?<=request\.))"
_PATTERNS = {
    name: re.compile(rf"{_BEFORE}{name}(?![\w-])", re.IGNORECASE) for name in ("top_p", "top_k", "seed", "temperature")
} | {
    "n": re.compile(
        r"""["'`\[]n["'`\\\]]|"""
        r"""(?i:parameters?|arguments?|fields?|property|keys?|supplied|model|option)[: ] *n(?![\w-])|"""
        rf"""{_BEFORE}n\b *(?:[:=<>]|must|should|greater|larger|parameter|value of|exceeds"""
        r"""|is (?:not|un|too|only|limited|greater|larger|above|out))"""
    ),
    "max_tokens": re.compile(rf"{_BEFORE}max_(?:completion_)?tokens(?![\w-])"),
}
"""How messages name a parameter: a single letter is part of many messages."""

_LIMIT = re.compile(
    r"(?:<=?|at most|maximum(?: value)?(?: of| is|:)?|up to|(?:less|lower) than or equal to|no more than|not exceed"
    r"|limited to|between \d+ and) *(\d{1,4})(?![\d.])",
    re.IGNORECASE,
)
"""How messages state the largest value of a parameter."""

Change = str | int | None
"""The name under which a parameter is sent, or its largest value; None: it is left out."""

Names = Mapping[str, Change]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The changes of the parameters of all requests to an endpoint, because it refuses some of them."""

    names: tuple[tuple[str, Change], ...] = ()  # parameter -> its change

    @classmethod
    def of(cls, names: Names) -> Adjustments:
        """The changes as a mapping, in the order of `EFFECTS`."""
        return cls(tuple((name, names[name]) for name in EFFECTS if name in names))

    def adjust(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a request without the parameters that are left out, with the other names and largest values."""
        names, adjusted = dict(self.names), dict[str, Any]()
        for name, value in body.items():
            change = names.get(name, name)
            if isinstance(change, int):
                adjusted[name] = min(value, change)
            elif change is not None:
                adjusted[change] = value
        return adjusted

    def most_draws(self, choices: int) -> int:
        """The number of draws in a request, at most `choices`."""
        change = dict(self.names).get("n", choices)
        return min(choices, change) if isinstance(change, int) else 1

    def fingerprint(self) -> dict[str, Change]:
        """The changes as in the fingerprint of a stage and in a manifest; the argument of `of`."""
        return dict(self.names)

    @property
    def changes_scores(self) -> bool:
        """Whether a parameter is left out that decides what the scores measure."""
        return ("temperature", None) in self.names

    def sentences(self) -> list[str]:
        """A clause for each change, with its effect."""
        return [_sentence(name, change) for name, change in self.names]


def _sentence(name: str, change: Change) -> str:
    if change is None:
        return f"{name} is refused and left out: {EFFECTS[name]}"
    if isinstance(change, int):
        return f"{name} is refused above {change}: more draws are several requests, and each has its prompt billed"
    return f"{name} is sent as {change}"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request of a stage about `PROBE_TEXT`, with all parameters of its requests."""

    path: str
    body: Mapping[str, Any]

    @property
    def max_cost(self) -> int:
        """Maximum number of tokens of an attempt."""
        sent = self.body.get("prompt", self.body.get("messages"))
        each = max(PROBE_TOKENS, int(self.body.get("max_tokens", PROBE_TOKENS)))
        return prompt_tokens(str(sent)) + each * int(self.body.get("n", 1))


@dataclass(frozen=True, slots=True)
class _Refused:
    """A refusal of a request."""

    words: str
    failed: bool = False  # whether the endpoint failed, which may be due to a parameter

    def resembles(self, other: _Refused) -> bool:
        """Whether two refusals differ only in numbers and in ids of requests."""
        return _OF_ONE_REQUEST.sub("", self.words) == _OF_ONE_REQUEST.sub("", other.words)


Attempt = Callable[[Names], Awaitable[_Refused | None]]


async def find_adjustments(
    endpoint: Endpoint,
    request: SampleRequest,
    spent: Usage,
    book: Callable[[Usage], None] = lambda most: None,
) -> Adjustments:
    """Find the parameters that an endpoint refuses, with at most `MOST_PROBES` requests.

    An endpoint that refuses the request without any of them refuses something else: nothing is changed then.

    Args:
        endpoint: client of the endpoint.
        request: a request with all parameters.
        spent: each attempt adds its cost.
        book: called before each attempt with its maximum cost.

    Raises:
        StopError: no end after `MOST_PROBES` requests, the endpoint does not answer, or an error of `Endpoint.ask`.
    """
    count, last = 0, _Refused("")

    async def attempt(names: Names) -> _Refused | None:
        """Send the request with changes."""
        nonlocal count, last
        count += 1
        if count > MOST_PROBES:
            raise StopError(
                f"endpoint {endpoint.config.endpoint} refuses parameters of requests in {MOST_PROBES} trials, at last "
                f"with: {last.words}; detectors with top_k: null and model.choices of 1 send fewer parameters"
            )
        refused = await _refusal(endpoint, request, Adjustments.of(names), spent, book)
        last = refused or last
        return refused

    body = dict(request.body)
    names, refused, innocent = dict[str, Change](), await attempt({}), set[str]()
    while refused is not None:
        name = named_parameter(refused.words, [one for one in _still_sent(body, names) if one not in innocent])
        if name is None:
            added = await _add_one_by_one(body, names, attempt)
            if added is None and last.failed:
                raise _no_answer(endpoint, last.words)
            return Adjustments.of(added or {})
        changed = {**names, name: _change(name, refused.words, body, names)}
        after = await attempt(changed)
        if after is not None and after.resembles(refused) and not isinstance(changed[name], int):
            innocent.add(name)
        else:
            names, refused = changed, after
    return Adjustments.of(names)


def _change(name: str, words: str, body: Mapping[str, Any], names: Names) -> Change:
    """What to try for a parameter that a refusal names."""
    if name == "max_tokens" and name not in names:
        return RENAMED
    sent = names.get(name, body[name])
    stated = _LIMIT.search(words) if name == "n" else None
    return int(stated[1]) if stated is not None and isinstance(sent, int) and 1 < int(stated[1]) < sent else None


async def check_still_taken(
    endpoint: Endpoint,
    request: SampleRequest,
    parameters: Adjustments,
    error: Refusal,
    bill: tuple[Usage, Callable[[Usage], None]],
) -> None:
    """Stop a run if a refusal of a document's request is that of a parameter, as a request with another text shows.

    Args:
        endpoint: client of the endpoint.
        request: a request with all parameters.
        parameters: the changes that were found at the start of the run.
        error: refusal of the request about a document.
        bill: usage and `book`, as of `find_adjustments`.

    Raises:
        StopError: the endpoint refuses a parameter that it took at the start.
    """
    sent = _still_sent(request.body, dict(parameters.names))
    if _OF_A_LENGTH.search(error.words) or named_parameter(error.words, sent) is None:
        return
    refused = await _refusal(endpoint, request, parameters, *bill)
    if refused is None or (name := named_parameter(refused.words, sent)) is None:
        return
    what = f"{name}, which it took at the start of the run"
    remedy = "rerun the command once the endpoint takes it, or set another run directory"
    if name == "n":  # the start may have asked for fewer draws: `choices` is in no fingerprint
        what, remedy = f"n of {parameters.adjust(request.body)[name]}", "rerun the command with smaller model.choices"
    raise StopError(
        f"endpoint {endpoint.config.endpoint} refuses {what}: {refused.words}; finished documents are kept: {remedy}",
        ExitCode.INCOMPLETE,
    )


async def _refusal(
    endpoint: Endpoint,
    request: SampleRequest,
    parameters: Adjustments,
    spent: Usage,
    book: Callable[[Usage], None],
) -> _Refused | None:
    """The refusal of a request by an endpoint; None if it takes its parameters.

    Raises:
        StopError: the endpoint does not answer, or an error of `Endpoint.ask`.
    """
    body = parameters.adjust(request.body)
    sent = _still_sent(request.body, dict(parameters.names))

    def check(value: Mapping[str, Any]) -> None:
        """Check that an answer has choices: some servers refuse a parameter with status 200."""
        words = error_in(value)
        if words and named_parameter(words, sent) is not None:
            raise Refusal(words, words=words)
        if words or not isinstance(value.get("choices"), list) or not value["choices"]:
            raise Fault("answer has no choices")

    try:
        await endpoint.ask(request.path, body, request.max_cost, check, spent, book)
    except Refusal as error:
        return None if OUTPUT_LIMIT in error.words else _Refused(error.words)  # reasoning took all `PROBE_TOKENS`
    except Fault as fault:
        if fault.status in (200, 500, 502):  # some servers fail on unknown parameters
            return _Refused(str(fault), failed=True)
        raise _no_answer(endpoint, str(fault)) from None
    finally:
        endpoint.refused = 0  # a refused parameter is no refused document
    return None


def _no_answer(endpoint: Endpoint, reason: str) -> StopError:
    return StopError(f"endpoint {endpoint.config.endpoint} does not answer: {reason}", ExitCode.INCOMPLETE)


async def _add_one_by_one(body: Mapping[str, Any], names: Names, attempt: Attempt) -> dict[str, Change] | None:
    """Find refused parameters that no message names; None if the request is refused without them, too.

    Args:
        body: body of the request.
        names: the changes so far.
        attempt: sends the request with changes.
    """
    sent = [name for name in _still_sent(body, names) if name != "max_tokens"]
    lengths = [names["max_tokens"]] if "max_tokens" in names else ["max_tokens", RENAMED, None]
    for length in lengths if "max_tokens" in body else [None]:
        changes = {**names, **dict.fromkeys(sent)}
        if length != "max_tokens" and "max_tokens" in body:
            changes["max_tokens"] = length
        if await attempt(changes) is None:
            break
    else:
        return None
    for name in reversed(sent):  # those with the largest effect first
        without = {one: changes[one] for one in changes if one != name}
        with_it = {**without, name: names[name]} if name in names else without  # with the largest value, if known
        if await attempt(with_it) is None:
            changes = with_it
    return changes


def named_parameter(message: str, sent: Sequence[str]) -> str | None:
    """The parameter that a refusal names, the first one of several; None if it names none.

    Args:
        message: words of the endpoint.
        sent: parameters of the request, those with the smallest effect first.
    """
    places = {name: match.start() for name in sent if (match := _PATTERNS[name].search(message)) is not None}
    if not places:
        return None
    return next(iter(places)) if _NOT_BOTH.search(message) else min(places, key=lambda name: places[name])


def _still_sent(body: Mapping[str, Any], names: Names) -> list[str]:
    """The parameters of a request with changes, also under another name, in the order of `EFFECTS`."""
    return [name for name in EFFECTS if name in body and names.get(name, name) is not None]
