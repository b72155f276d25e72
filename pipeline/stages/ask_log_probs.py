"""One shard of documents -> the log-probabilities that an endpoint gives to their tokens, where it tells them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from pipeline import __version__
from pipeline.config.audit import AuditConfig
from pipeline.config.models import EndpointConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.detectors.base import Pass
from pipeline.detectors.registry import parse_detectors, plan_passes
from pipeline.endpoint.answers import Answers
from pipeline.endpoint.client import Endpoint, Fault, Refused, Spent, prompt_tokens, side_by_side
from pipeline.errors import ExitCode, StopError, UserError
from pipeline.models.load import fingerprint_model
from pipeline.models.tokens import count_words
from pipeline.store.files import Store
from pipeline.store.receipts import Receipt, read_receipt, write_receipt

FOLDER = "log_probs"
PROBE = "The quick brown fox jumps over the lazy dog."
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("row", pa.int64()),
        ("log_probs", pa.list_(pa.float64())),
        ("reason", pa.string()),
        ("problem", pa.string()),
    ]
)

Way = Literal["prompt_logprobs", "echo"]
WAYS: tuple[Way, ...] = ("prompt_logprobs", "echo")


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The log-probabilities of one document's tokens, or why there are none."""

    values: tuple[float, ...]  # natural, <= 0; the first token has none
    problem: tuple[str, str] | None  # reason and message


def model_of(config: AuditConfig, needed: Pass) -> Any:
    """The model that a pass asks: weights or an endpoint."""
    return config.model if needed.model == "target" else config.reference_model


def endpoint_passes(config: AuditConfig) -> list[Pass]:
    """The forward passes that an endpoint has to make."""
    planned = plan_passes(parse_detectors(config.detectors))
    return [p for p in planned if p.kind == "forward" and isinstance(model_of(config, p), EndpointConfig)]


def stage_of(needed: Pass) -> str:
    """The stage that makes a pass through an endpoint."""
    return f"log_probs/{needed.model}-{needed.text}"


def stage_fingerprint(config: AuditConfig, needed: Pass) -> dict[str, Any]:
    """All that could change a log-probability."""
    found: dict[str, Any] = {**fingerprint_model(model_of(config, needed)), "max_tokens": config.max_tokens}
    if config.text_transform is not None:
        found["text_transform"] = config.text_transform.model_dump()
    return {**found, "code": __version__}


class EndpointReader:
    """Asks how likely each token of a shard's documents is."""

    def __init__(self, needed: Pass, config: AuditConfig, fingerprint: Mapping[str, Any]) -> None:
        self.needed = needed
        self.config = config
        self.model: EndpointConfig = model_of(config, needed)
        self.fingerprint = fingerprint
        self.stage = stage_of(needed)
        self._way: Way | None = None
        self._trying = asyncio.Lock()

    async def process(self, shard: Shard, store: Store, endpoint: Endpoint) -> Receipt:
        """Read a shard's documents and file the receipt; an already filed receipt is returned as it is.

        Raises:
            StopError: the endpoint tells no log-probabilities of prompts, or as `Endpoint.ask`.
            UserError: the shard's file is damaged.
        """
        if done := read_receipt(store, self.stage, shard.id):
            return done
        began = time.monotonic()
        wanted = shard_fingerprint(self.fingerprint, shard)
        folder = f"{FOLDER}/{self.needed.model}-{self.needed.text}"
        answers = Answers(store, folder, self.stage, shard, wanted)
        before = {line["row"]: line["log_probs"] for line in answers.found()}
        rows: list[dict[str, Any]] = []
        async with self._trying:  # one shard finds out for all
            if self._way is None:
                spent = Spent()
                try:
                    self._way = await find_way(self.config, self.model, endpoint, spent)
                finally:
                    answers.add(spent)

        async def work(document: Document) -> None:
            rows.append(await self._read(document, before.get(document.row), answers, endpoint))

        await side_by_side(_good(shard), work, self.model.concurrency)
        rows.sort(key=lambda row: row["row"])
        data = f"{folder}/{shard.id}-{uuid.uuid4().hex[:8]}.parquet"
        store.write_table(data, pa.Table.from_pylist(rows, schema=SCHEMA))
        reasons = Counter(row["reason"] for row in rows if row["reason"] is not None)
        receipt = Receipt(
            shard=shard.id,
            role=shard.role,
            n_in=len(rows),
            n_scored=len(rows) - reasons.total(),
            n_quarantined=reasons.total(),
            data=data,
            quarantine=None,
            reasons=dict(sorted(reasons.items())),
            fingerprint=wanted,
            tokens=sum(len(row["log_probs"]) for row in rows),
            seconds=round(time.monotonic() - began, 3),
            spent=answers.spent.to_dict(),
        )
        filed = write_receipt(store, self.stage, receipt)
        answers.close()
        return filed

    async def _read(
        self, document: Document, before: list[float] | None, answers: Answers, endpoint: Endpoint
    ) -> dict[str, Any]:
        values, reason, problem = before, None, None
        if values is None:
            text = document.text[: count_words([document.text], self.config.max_tokens)[0].kept]
            text = text.lower() if self.needed.text == "lowercase" else text
            assert self._way is not None
            spent = Spent()
            try:
                values = await ask_log_probs(endpoint, self.model, self._way, text, spent)
            except (Fault, Refused) as error:
                values, reason, problem = [], "model_error", f"endpoint: {error}"
            finally:
                answers.add(spent, **({"row": document.row, "log_probs": values} if values else {}))
        return {
            "doc_id": document.doc_id,
            "row": document.row,
            "log_probs": values,
            "reason": reason,
            "problem": problem,
        }


def _good(shard: Shard) -> Iterator[Document]:
    """The documents that scoring will ask for."""
    ids: set[str] = set()
    for document in read_shard(shard):
        if document.problem is None and document.doc_id not in ids:
            ids.add(document.doc_id)
            yield document


def read_log_probs(store: Store, needed: Pass, shard: Shard) -> dict[int, LogProbs]:
    """The log-probabilities of a finished shard's documents, by row.

    Raises:
        UserError: the shard was not read.
    """
    receipt = read_receipt(store, stage_of(needed), shard.id)
    if receipt is None:
        raise UserError(f"shard {shard.id} of {shard.name} has no log-probabilities yet")
    return {
        row["row"]: LogProbs(
            tuple(row["log_probs"]), None if row["reason"] is None else (row["reason"], row["problem"])
        )
        for row in store.read_table(receipt.data).to_pylist()
    }


async def ask_log_probs(endpoint: Endpoint, model: EndpointConfig, way: Way, text: str, spent: Spent) -> list[float]:
    """Natural log-probabilities of a text's tokens but the first, in order.

    Raises:
        Fault, Refused, StopError: as `Endpoint.ask`.
    """
    body: dict[str, Any] = {"model": model.name, "prompt": text, "temperature": 0}
    if way == "prompt_logprobs":
        body |= {"max_tokens": 1, "prompt_logprobs": 0}
    else:
        body |= {"max_tokens": 0, "echo": True, "logprobs": 1}
    read = _of_prompt if way == "prompt_logprobs" else _of_echo
    return await endpoint.ask("/completions", body, prompt_tokens(text) + 1, lambda value: read(value, text), spent)


def _of_prompt(value: dict[str, Any], text: str) -> list[float]:
    """vLLM: for each token of the prompt a mapping from token ids to what is known of them, its own first."""
    told = _choice(value).get("prompt_logprobs") or value.get("prompt_logprobs")
    if not isinstance(told, list):
        raise Refused("no prompt_logprobs in the answer")
    try:
        return _checked([None if not entry else next(iter(entry.values()))["logprob"] for entry in told])
    except (AttributeError, KeyError, TypeError):
        raise Fault("prompt_logprobs are not what they should be") from None


def _of_echo(value: dict[str, Any], text: str) -> list[float]:
    """OpenAI's echo: the prompt's tokens, and behind them any that came new."""
    choice = _choice(value)
    told = choice.get("logprobs")
    values = told.get("token_logprobs") if isinstance(told, dict) else None
    if not isinstance(values, list) or not str(choice.get("text", "")).startswith(text[:16]):
        raise Refused("no log-probabilities of the prompt in the answer")
    usage = value.get("usage")
    prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return _checked(values[:prompt] if isinstance(prompt, int) and 0 < prompt < len(values) else values)


def _choice(value: dict[str, Any]) -> dict[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Fault("answer has no choices")
    return choices[0]


def _checked(values: list[Any]) -> list[float]:
    rest = values[1:] if values and values[0] is None else values
    if any(isinstance(entry, bool) or not isinstance(entry, (int, float)) for entry in rest):
        raise Fault("a token has no log-probability")
    return [float(entry) for entry in rest]


async def find_way(config: AuditConfig, model: EndpointConfig, endpoint: Endpoint, spent: Spent) -> Way:
    """How the endpoint tells log-probabilities of a prompt: as configured, or by trying.

    Raises:
        StopError: it does not, or nobody answers.
    """
    said, answered = [], False
    for way in WAYS if model.log_probs == "auto" else (model.log_probs,):
        assert way in WAYS
        try:
            if len(await ask_log_probs(endpoint, model, way, PROBE, spent)) >= 2:
                return way
            said.append(f"{way}: too few values")
            answered = True
        except Refused as error:
            said.append(f"{way}: {error}")
            answered = True
        except Fault as error:  # some servers break on what they do not know
            said.append(f"{way}: {error}")
    if not answered:
        raise StopError(f"endpoint {model.endpoint} does not answer: {'; '.join(said)}", ExitCode.INCOMPLETE)
    asking = [
        d.column
        for d in parse_detectors(config.detectors)
        if any(p.kind == "forward" and model_of(config, p) == model for p in d.needs)
    ]
    raise StopError(
        f"detectors {', '.join(asking)} need prompt log-probabilities, which endpoint {model.endpoint} does not tell "
        f"({'; '.join(said)}); without them there are samia and samia_zlib"
    )


def check_log_probs(config: AuditConfig) -> None:
    """Try whether the endpoints tell the log-probabilities that detectors need, at the price of a request or two.

    Raises:
        StopError: one does not.
    """

    async def check(model: EndpointConfig) -> None:
        async with Endpoint(model) as endpoint:
            await find_way(config, model, endpoint, Spent())

    for said in {json.dumps(model_of(config, p).model_dump(), sort_keys=True) for p in endpoint_passes(config)}:
        asyncio.run(check(EndpointConfig.model_validate_json(said)))
