"""A client of an OpenAI-compatible endpoint that respects the configured limits.

`ask` repeats a request until it has a usable answer, within `concurrency` and `requests_per_minute`. It retries after
status 408, 409, 425, 429 or 5xx, a timeout, a broken connection or an unreadable answer. The wait increases with each
attempt and is never shorter than a Retry-After of any answer. A problem that affects every document (a wrong key, an
unknown model, an exhausted budget, an unavailable endpoint) ends the run; any other problem affects only its document.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx2
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from pipeline.config.models import EndpointConfig
from pipeline.corpus.reasons import Reason
from pipeline.endpoint.api_keys import error_without_key, masked, read_secret, without_key
from pipeline.endpoint.error_answers import error_in, has_filter_error, is_filtered, names_key, response_words
from pipeline.endpoint.transport import (
    Received,
    TooLongError,
    exchange,
    get_answer,
    longest_answer,
    open_client,
    proxy_note,
)
from pipeline.errors import ExitCode, StopError, UserError, nearest, one_line

RETRIED_STATUSES = frozenset({408, 409, 425, 429})
OF_A_PROXY = frozenset({403, 407, 502, 503, 504})  # statuses that a proxy answers itself
LONGEST_WAIT = 600.0  # seconds; a longer Retry-After ends the run
FIRST_REFUSALS = 3  # refusals before the first answer after which the run ends
CHECK_SECONDS = 30.0
MESSAGE = 200  # characters of an endpoint's error message that are shown
MOST_COUNTED = 1 << 31  # numbers of tokens from here on are no counts
Parsed = TypeVar("Parsed")


class Fault(Exception):
    """A failed attempt: no answer, or an unusable one. Another attempt may succeed."""

    def __init__(self, message: str, wait: float = 0.0, paid: bool = True, status: int | None = None) -> None:
        super().__init__(message)
        self.wait = wait  # seconds requested by the endpoint
        self.paid = paid  # whether tokens may have been billed
        self.status = status  # of an answer that is an error; None: there was none, or it is unusable


class Refusal(Exception):
    """The endpoint rejects this request permanently, or no answer to it will be usable."""

    def __init__(self, message: str, reason: str = Reason.MODEL_ERROR, words: str = "") -> None:
        super().__init__(message)
        self.reason = reason  # of the document in quarantine
        self.words = words  # of the endpoint; empty where it answered


@dataclass(slots=True)
class Usage:
    """Requests, including repeated ones, and tokens of prompts and answers, as billed or else an upper bound."""

    requests: int = 0
    tokens: int = 0

    def __iadd__(self, other: Usage) -> Usage:
        self.requests += other.requests
        self.tokens += other.tokens
        return self

    def to_dict(self) -> dict[str, int]:
        """A plain mapping, for a receipt."""
        return {"requests": self.requests, "tokens": self.tokens}


class Endpoint:
    """One client of one endpoint. All its users share its limits and its budget."""

    def __init__(self, config: EndpointConfig, spent: Usage | None = None) -> None:
        """Open a client; `spent` is the usage of earlier calls of the run."""
        self.config = config
        self.spent = spent or Usage()
        self.answered = 0
        self.refused = 0
        self.failed = 0  # consecutive failures
        self.forbidden = 0  # consecutive answers with status 403 that do not say why
        self._reserved = Usage()  # upper bound for requests in flight
        self._released = asyncio.Condition()
        self._places = asyncio.Semaphore(config.concurrency)
        self._next = 0.0  # earliest start of the next request
        self._client = open_client(config.endpoint, headers(config), config.timeout, config.concurrency)
        self._proxy = proxy_note(self._client, config.endpoint)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        max_cost: int,
        read: Callable[[dict[str, Any]], Parsed],
        spent: Usage,
        book: Callable[[Usage], None] = lambda most: None,
    ) -> Parsed:
        """Repeat a request until its answer can be read.

        Args:
            path: path below the endpoint's address, such as `/completions`.
            body: body of the request, as JSON values.
            max_cost: maximum number of tokens of a single attempt.
            read: parses the answer; raises `Fault` for an unusable answer, `Refusal` if no answer will be usable.
            spent: each attempt adds its cost, whether or not it succeeds.
            book: called before each attempt with its maximum cost, since the process may be killed during it.

        Raises:
            Fault: every attempt failed; the error of the last one.
            Refusal: the endpoint rejects this request.
            StopError: the endpoint rejects every request, or the budget does not allow this one.
        """
        again = AsyncRetrying(
            stop=stop_after_attempt(self.config.attempts),
            wait=self._wait,
            retry=retry_if_exception_type(Fault),
            reraise=True,
        )
        try:
            async for attempt in again:
                with attempt:
                    async with self._places:
                        answer = await self._attempt(path, body, max_cost, read, spent, book)
        except (Fault, Refusal) as error:
            self._count_failure(error)
            raise
        self.failed = self.forbidden = 0
        return answer

    async def _attempt(
        self,
        path: str,
        body: Mapping[str, Any],
        max_cost: int,
        read: Callable[[dict[str, Any]], Parsed],
        spent: Usage,
        book: Callable[[Usage], None],
    ) -> Parsed:
        """Make one request, within the budget and at the configured rate."""
        reservation = Usage(1, max_cost)
        await self._reserve(reservation)
        cost = Usage()  # zero until the request is sent
        try:
            await self._wait_for_turn()
            book(reservation)
            cost = reservation
            try:
                value = await self._post(path, body, longest_answer(max_cost))
            except Fault as fault:
                cost = reservation if fault.paid else Usage(1, 0)
                raise
            except (Refusal, StopError):
                cost = Usage(1, 0)
                raise
            error = self._shown(error_in(value))
            self.answered += not error
            cost = Usage(1, _billed(value, 0 if error else max_cost))
            try:
                return read(value)
            except Fault as fault:
                if not error:
                    raise
                if has_filter_error(value):
                    raise Refusal(error, Reason.NO_ANSWER, words=error) from None
                raise Fault(f"answer is an error: {error}", fault.wait, status=200) from None
        finally:
            spent += cost
            await self._release(reservation, cost)

    async def _post(self, path: str, body: Mapping[str, Any], most: int) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self.config.timeout):
                body = {**self.config.extra, **body}
                response = await exchange(self._client, "POST", address(self.config, path), most, body)
        except (TimeoutError, httpx2.TimeoutException):
            raise Fault(f"no answer within {self.config.timeout:g} s") from None
        except httpx2.ConnectError as error:
            raise Fault(f"no connection: {without_key(str(error), self.config)}{self._proxy}", paid=False) from None
        except httpx2.HTTPError as error:
            reason = error_without_key(error, self.config, MESSAGE) or type(error).__name__
            raise Fault(f"connection broken: {reason}{self._proxy}") from None
        except TooLongError as error:
            raise Fault(str(error)) from None
        self._raise_for_status(response)
        try:
            value = masked(response.json(), self.config)
        except (ValueError, RecursionError):  # also a number of too many digits, or deep nesting
            raise Fault("answer is not JSON") from None
        if not isinstance(value, dict):
            raise Fault("answer is no JSON object")
        return value

    def _raise_for_status(self, response: Received) -> None:
        """Raise the error that corresponds to the status; nothing for 200."""
        status = response.status_code
        if status == 200:
            return
        reason = f"{status} {self._error_message(response)}{self._proxy if status in OF_A_PROXY else ''}"
        name, where = self.config.name, self.config.endpoint
        keys = " and ".join(self.config.variables)
        filtered = is_filtered(response)
        if status == 401 or (status == 403 and names_key(reason) and not filtered):
            raise StopError(f"endpoint {where} does not accept the key of {keys}: {reason}")
        if status == 403 and not filtered:
            self._count_forbidden(reason, keys)
        if status == 404:
            raise StopError(f"endpoint {where} has no model {name!r}, or no {self.config.api} interface: {reason}")
        if status == 402 or (status == 429 and "insufficient_quota" in reason):
            raise StopError(f"endpoint {where} requires payment: {reason}", ExitCode.INCOMPLETE)
        if status in RETRIED_STATUSES or status >= 500:
            wait = retry_after(response.headers.get("retry-after"))
            if wait > LONGEST_WAIT:
                raise StopError(
                    f"endpoint {where} requests a wait of {wait:.0f} s ({reason}); rerun the command after it",
                    ExitCode.INCOMPLETE,
                )
            self._next = max(self._next, time.monotonic() + wait)
            raise Fault(reason, wait, False, status)
        raise Refusal(reason, Reason.NO_ANSWER if filtered else Reason.MODEL_ERROR, words=reason)

    def _count_forbidden(self, reason: str, keys: str) -> None:
        """Count an answer with status 403 that does not say why; where other requests are answered, one fails alone.

        Raises:
            StopError: no request has been answered, or many in a row have this status.
        """
        answered = self.answered or self.spent.tokens
        self.forbidden += 1
        if not answered or self.forbidden >= max(8, 2 * self.config.concurrency):
            raise StopError(
                f"endpoint {self.config.endpoint} forbids requests: {reason}; the key of {keys} may have no access to "
                f"{self.config.name}",
                ExitCode.INCOMPLETE if answered else ExitCode.USER_ERROR,
            )

    def _error_message(self, response: Received) -> str:
        """The endpoint's error message in one line, with the key removed if it occurs in it."""
        text = response_words(response)
        owed = "insufficient_quota" in response.text and "insufficient_quota" not in text
        return self._shown(f"insufficient_quota: {text}" if owed else text)

    def _shown(self, text: str) -> str:
        """Words of the endpoint as they are shown."""
        return one_line(without_key(" ".join(text.split()), self.config)[:MESSAGE])

    def _wait(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: increasing with every failure, at least the Retry-After."""
        error = state.outcome.exception() if state.outcome is not None else None
        grown = wait_random_exponential(multiplier=self.config.backoff, max=60.0)(state)
        return max(grown, error.wait if isinstance(error, Fault) else 0.0)

    def _count_failure(self, error: Fault | Refusal) -> None:
        """Count a failure. Many consecutive ones mean that the endpoint is unavailable, not that documents are invalid.

        Raises:
            StopError: too many consecutive failures, or every request so far was rejected.
        """
        if isinstance(error, Refusal) and error.reason == Reason.NO_ANSWER:
            return  # of this document's content
        if isinstance(error, Refusal):
            self.refused += 1
            all_of_them = self.refused >= (2 * self.config.concurrency if self._reserved.requests else 0)
            if not self.answered and not self.spent.tokens and all_of_them and self.refused >= FIRST_REFUSALS:
                raise StopError(f"endpoint {self.config.endpoint} refuses every request: {error}")
            return
        self.failed += 1
        if self.failed >= max(8, 2 * self.config.concurrency):
            raise StopError(
                f"endpoint {self.config.endpoint} has not answered {self.failed} requests in a row: {error}; its "
                "answers are kept: rerun the command",
                ExitCode.INCOMPLETE,
            )

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit allows another request."""
        while (now := time.monotonic()) < self._next:
            await asyncio.sleep(self._next - now)
        if self.config.requests_per_minute is not None:
            self._next = now + 60.0 / self.config.requests_per_minute

    async def _reserve(self, max_usage: Usage) -> None:
        """Reserve the maximum cost of a request; if needed, wait for the cost of requests in flight.

        Raises:
            StopError: the budget does not allow it.
        """
        async with self._released:
            while over := self._budget_problem(max_usage):
                if not self._reserved.requests:
                    raise StopError(over, ExitCode.INCOMPLETE)
                await self._released.wait()
            self._reserved += max_usage

    async def _release(self, reservation: Usage, cost: Usage) -> None:
        self._reserved.requests -= reservation.requests
        self._reserved.tokens -= reservation.tokens
        self.spent += cost
        async with self._released:
            self._released.notify_all()

    def _budget_problem(self, max_usage: Usage) -> str | None:
        """Why the budget does not allow a request of this cost; None if it does."""
        for unit in ("requests", "tokens"):
            limit, spent = getattr(self.config.budget, unit), getattr(self.spent, unit)
            if limit is not None and spent + getattr(self._reserved, unit) + getattr(max_usage, unit) > limit:
                remainder = f"has {limit - spent:,} left, and the next request may cost {getattr(max_usage, unit):,}"
                return (
                    f"model.budget.{unit} of {limit:,} {remainder if spent < limit else 'is spent'}; "
                    "answers are kept: raise it and rerun the command"
                )
        return None


def headers(config: EndpointConfig) -> dict[str, str]:
    """The headers of every request.

    Raises:
        UserError: a secret has an invalid character (an error of the HTTP library would show it), or one of a header is
            missing.
    """
    key = read_secret(config.key_variable)
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    for name, variable in config.headers.items():
        sent[name] = read_secret(variable)
        if not sent[name]:
            raise UserError(f"environment variable {variable} is not set: the value of header {name} comes from it")
    for variable in config.variables:
        secret = read_secret(variable)
        if not (secret.isascii() and secret.isprintable()) or (variable == config.key_variable and " " in secret):
            raise UserError(f"the key in {variable} has a blank, a line break or another character that no key has")
    return sent


def address(config: EndpointConfig, path: str) -> str:
    """The URL of a request.

    Args:
        config: the endpoint.
        path: path below its address, such as `/completions`.
    """
    return config.endpoint + path + (f"?{urlencode(config.query)}" if config.query else "")


def retry_after(value: str | None) -> float:
    """Seconds to wait according to a Retry-After header (number or date), >= 0; 0 if missing or unreadable."""
    if value is None:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError, OSError):  # also an offset or a year that no date has
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _billed(value: Mapping[str, Any], max_cost: int) -> int:
    """Tokens that an answer reports as used, or `max_cost` if it reports none."""
    prompt, completion = reported_usage(value)
    return max_cost if prompt is None or completion is None else prompt + completion


def reported_usage(value: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The numbers of tokens of the prompt and the completion in an answer; None where it has no such number."""
    usage = value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MOST_COUNTED:
        return None
    return int(value) if value == int(value) else None


def prompt_tokens(text: str) -> int:
    """Upper bound on the tokens of a prompt: one per byte, and 64 for a chat template."""
    return len(text.encode()) + 64


def check_endpoint(config: EndpointConfig) -> dict[str, Any]:
    """Check that an endpoint answers and has the model, by its list of models, which is free.

    An endpoint without such a list is accepted.

    Returns:
        The same keys as `check_model`; their values are unknown for an endpoint.

    Raises:
        UserError: no answer, the key is not accepted, or the model is not on the list.
    """
    try:
        response = get_answer(address(config, "/models"), headers(config), min(CHECK_SECONDS, config.timeout))
    except (httpx2.HTTPError, TooLongError, TimeoutError) as error:
        reason = error_without_key(error, config, MESSAGE) or type(error).__name__
        raise UserError(f"endpoint {config.endpoint} does not answer: {reason}") from None
    if response.status_code in (401, 403):
        refused = "does not accept" if response.status_code == 401 else "forbids the list of models with"
        raise UserError(
            f"endpoint {config.endpoint} {refused} the key of {' and '.join(config.variables)}"
            f"{'' if headers(config) else ', which is not set'}: {response.status_code}{response.proxy}"
        )
    try:
        entries = response.json()["data"] if response.status_code == 200 else []
        names = [str(entry["id"]) for entry in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        names = []
    if names and config.name not in names:
        near = nearest(config.name, [without_key(name, config) for name in names[:20]])
        raise UserError(f"endpoint {config.endpoint} has no model {config.name!r}; {near}")
    return {"architecture": "endpoint", "dtype": "unknown", "max_tokens": None, "parameters": None}


Item = TypeVar("Item")


async def run_concurrently(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], width: int) -> None:
    """Process items concurrently, at most `width` at a time. The first error cancels the rest and is raised."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    workers = [asyncio.create_task(worker()) for _ in range(width)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
