"""The models of a run: weights, an endpoint, a paraphraser."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, JsonValue, Tag

from pipeline.config.kinds import CONTINUING, SERVED, WEIGHTS, InputKind
from pipeline.config.paths import Place, written
from pipeline.config.yaml import Section
from pipeline.errors import UserError


class ModelConfig(Section):
    """A causal language model and how to load it."""

    path: Annotated[str, Place.MODEL] = Field(description="Hub id, local folder, or a .gguf file.")
    revision: str | None = Field(None, description="Hub revision: a commit, tag or branch.")
    gguf_file: str | None = Field(None, description="Name of the GGUF file inside `path`.")
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto: the fastest of the device that loses nothing of the checkpoint."
    )
    quantization: Literal["8bit", "4bit"] | None = Field(None, description="Load through bitsandbytes.")
    adapter: Annotated[str | None, Place.INPUT] = Field(None, description="A PEFT adapter, merged at load.")
    trust_remote_code: bool = Field(False, description="Run code that ships with the model.")
    allow_pickle: bool = Field(False, description="Load weights that are not safetensors or GGUF.")

    @property
    def shown(self) -> str:
        """The path as it was written, for messages."""
        return written(self.path)

    @property
    def adapter_shown(self) -> str:
        """The adapter's path as it was written, for messages; empty without one."""
        return written(self.adapter or "")


def _base_url(value: Any) -> str:
    """Check an endpoint's address and normalize it, so that `/completions` can be appended."""
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        description = "one with a user" if "@" in str(value) else repr(value)  # may be a key
        raise ValueError(f"must be an address such as https://host/v1, got {description}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"must have a port from 0 to 65535, got {value!r}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must be a bare address, got one with a user or a query: keys come from the environment alone")
    path = parts.path.rstrip("/").removesuffix("/completions").removesuffix("/chat").rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path or "/v1", "", ""))


_SENT = frozenset(
    {
        *("authorization", "accept", "accept-encoding", "connection", "content-encoding", "content-length"),
        *("content-type", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_SECRET = re.compile(
    r"\b(?:\w*(?:api|access|account|auth|client|function|master|pass|private|secret|service|signing|subscription))?"
    r"keys?\d*\b"
    r"|\b\w*(?:token|password|passwd)\d*\b|\b(?:access|api|auth|bearer|refresh|session) ?tokens\d*\b"
    r"|\b(?:secrets?|o?auth|authorization|pass(?:words|phrase)?|signature|credentials?|cookies?|jwt|sas|bearer|session)"
    r"\d*\b|^(?:sig|code)$",
    re.IGNORECASE,
)

_BUDGET = re.compile(r"(?:think|reason)\w*.*(?:budget|max_tokens)", re.IGNORECASE)

LIKE_A_KEY, MIXED = 16, 12
"""Minimum length of a word that looks like a key, and of its parts that mix letters and digits."""

SET_KEYS = frozenset(
    {
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n"),
        *("seed", "stop", "stream", "echo", "logprobs", "prompt_logprobs"),
    }
)
"""Keys of the body of a request that no `extra` may have."""


def names_secret(name: str) -> bool:
    """Whether the name of a header or of a parameter of an address says that its value is a secret."""
    words = re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)).strip()
    return _SECRET.search(words) is not None


def looks_like_key(word: str) -> bool:
    """Whether a word is long and mixes letters and digits, as keys do, and versions, titles and regions do not."""
    parts = (part for part in re.findall(r"[A-Za-z0-9]+", word) if re.search(r"\d", part) and re.search(r"\D", part))
    return len(word) >= LIKE_A_KEY and sum(map(len, parts)) >= MIXED


def _check_headers(value: dict[str, str]) -> dict[str, str]:
    """Check names of headers, and that what stands beside them is the name of an environment variable, and no key."""
    spellings = [name.lower() for name in value]
    if twice := next((name for name in value if spellings.count(name.lower()) > 1), None):
        raise ValueError(f"has header {twice} twice: capitals make no difference")
    for name, variable in value.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
            raise ValueError(f"{name!r} is no name of a header")
        if name.lower() in _SENT:
            extra = ": the key of key_variable is sent in it" if name.lower() == "authorization" else ""
            raise ValueError(f"header {name} is set with every request{extra}")
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable) or _holds_key(variable):
            raise ValueError(
                f"header {name} must have the name of an environment variable in capitals, such as AZURE_KEY: its "
                "value is read there, and keys stand in no configuration"
            )
    return value


def _holds_key(variable: str) -> bool:
    """Whether what should be the name of a variable has a part that looks like a key."""
    return any(map(looks_like_key, variable.split("_")))


def _check_variable(value: str) -> str:
    """Check that a name of an environment variable is none of a key itself, which messages would show."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value) or _holds_key(value):
        raise ValueError(
            "must be the name of an environment variable, such as OPENAI_API_KEY, got something else: the key is read "
            "there, and keys stand in no configuration"
        )
    return value


def _no_blank(value: Any) -> Any:
    """An empty mapping for a key without a value."""
    return {} if value is None else value


def _query_texts(value: Any) -> Any:
    """The values of a query as texts: YAML reads 2024-10-21 as a date."""
    value = _no_blank(value)
    if not isinstance(value, dict):
        return value
    if secret := next((name for name in value if names_secret(str(name))), None):
        raise ValueError(f"may not have {secret}: keys come from the environment alone, through headers")
    plain = (int, float, datetime.date)
    return {
        name: str(one) if isinstance(one, plain) and not isinstance(one, bool) else one for name, one in value.items()
    }


def _check_extra(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if taken := sorted(value.keys() & SET_KEYS):
        raise ValueError(
            f"may not have {taken[0]}, which requests set themselves (temperature, top_p and top_k are arguments of "
            "detectors, and choices limits n)"
        )
    if secret := next(_keys_in(value), None):
        raise ValueError(
            f"may not have a key in {secret}: extra is written to files of the run, and keys come from the environment "
            "alone, through key_variable and headers"
        )
    return value


def _keys_in(value: JsonValue, name: str = "", secret: bool = False) -> Iterator[str]:
    """Names of texts that look like a key, where their name or one around it is that of a secret.

    Args:
        value: a JSON value.
        name: its name, or that of the list around it.
        secret: whether a name around it is that of a secret.
    """
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _keys_in(one, key, secret or names_secret(key))
    elif isinstance(value, list):
        for one in value:
            yield from _keys_in(one, name, secret)
    elif secret and isinstance(value, str) and any(map(looks_like_key, value.split())):
        yield name


def _reasoning_budget(value: JsonValue, key: str = "") -> int:
    """The largest number of tokens below a key that budgets reasoning, >= 0."""
    if isinstance(value, dict):
        return max((_reasoning_budget(one, f"{key} {name}") for name, one in value.items()), default=0)
    counts = isinstance(value, int) and not isinstance(value, bool)
    return max(0, int(value)) if counts and _BUDGET.search(key) else 0  # type: ignore[arg-type]


class BudgetConfig(Section):
    """Limits on the use of an endpoint, over all calls of the run."""

    requests: Annotated[int, Field(ge=1)] | None = Field(None, description="Most requests, including repeated ones.")
    tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Most tokens of prompts and answers together.")


class PriceConfig(Section):
    """Prices of a million tokens, in any currency, for the estimate of `seenset plan`."""

    prompt: float = Field(0.0, ge=0, description="Price of a million tokens of prompts.")
    answer: float = Field(0.0, ge=0, description="Price of a million generated tokens.")


class EndpointConfig(Section):
    """A model behind an OpenAI-compatible interface. The key is read from the environment and never stored."""

    endpoint: Annotated[str, BeforeValidator(_base_url)] = Field(description="Address, such as https://host/v1.")
    name: str = Field(min_length=1, description="Name of the model at the endpoint.")
    api: Literal["completions", "chat"] = Field("completions", description="The interface of the endpoint.")
    instruction: str = Field(
        "Continue the following text as it goes on. Write nothing but the continuation.",
        description="With chat: instruction above a text; a conversation is sent without it.",
    )
    log_probs: Literal["auto", "prompt_logprobs", "echo", "none"] = Field(
        "auto", description="How the endpoint gives log-probabilities of a prompt; auto tries both ways."
    )
    key_variable: Annotated[str, AfterValidator(_check_variable)] = Field(
        "SEENSET_API_KEY", min_length=1, description="Environment variable with the key; unset: none is sent."
    )
    headers: Annotated[dict[str, str], BeforeValidator(_no_blank), AfterValidator(_check_headers)] = Field(
        {}, description="Further headers, by name: the environment variable that holds the value."
    )
    query: Annotated[dict[str, str], BeforeValidator(_query_texts)] = Field(
        {}, description="Parameters of the address of every request, such as api-version."
    )
    extra: Annotated[dict[str, JsonValue], BeforeValidator(_no_blank), AfterValidator(_check_extra)] = Field(
        {}, description="Further keys of the body of every request."
    )
    concurrency: int = Field(16, ge=1, le=1024, description="Most requests at a time.")
    requests_per_minute: float | None = Field(None, gt=0, description="Most requests a minute.")
    timeout: float = Field(120.0, gt=0, description="Seconds for an answer.")
    attempts: int = Field(6, ge=1, description="Most attempts of a request.")
    backoff: float = Field(1.0, gt=0, description="Seconds before the second attempt; doubled after each attempt.")
    choices: int = Field(16, ge=1, description="Most draws in one request; its prompt is billed once.")
    budget: BudgetConfig = BudgetConfig()
    price: PriceConfig = PriceConfig()

    def __hash__(self) -> int:  # mappings have none
        return hash((self.endpoint, self.name, self.api))

    @property
    def variables(self) -> list[str]:
        """The environment variables with secrets: the key's, and those of headers."""
        return list(dict.fromkeys([self.key_variable, *self.headers.values()]))

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that `extra` allows for the reasoning of a draw, which services count in its `max_tokens`; >= 0."""
        return _reasoning_budget(self.extra)

    @property
    def identity(self) -> str:
        """Everything that answers may depend on, without values of headers: they are secrets."""
        parts = [f"{self.name} at {self.endpoint}, {self.api}"]
        given = {"headers": sorted(self.headers), "query": self.query, "extra": self.extra}
        parts += [f"{key} {json.dumps(value, sort_keys=True)}" for key, value in given.items() if value]
        return "; ".join(parts) + (f": {self.instruction}" if self.api == "chat" else "")


class ScoredModel(Section):
    """A model whose scores are in a file."""

    name: str = Field(min_length=1, description="Name for pages.")


def _kind_of_model(value: Any) -> str:
    keys = value.keys() if isinstance(value, dict) else ()
    if isinstance(value, EndpointConfig) or "endpoint" in keys:
        return "model[EndpointConfig]"
    return "model[ScoredModel]" if isinstance(value, ScoredModel) or {*keys} == {"name"} else "model[ModelConfig]"


AnyModel = Annotated[
    Annotated[ModelConfig, Tag("model[ModelConfig]")]
    | Annotated[EndpointConfig, Tag("model[EndpointConfig]")]
    | Annotated[ScoredModel, Tag("model[ScoredModel]")],
    Discriminator(_kind_of_model),
]
"""An endpoint if the key `endpoint` is given, a name if that is the only key, otherwise weights."""


def find_model_kind(model: AnyModel) -> InputKind:
    """The kind of a model that is asked."""
    if not isinstance(model, EndpointConfig):
        return WEIGHTS
    if model.api == "chat" or model.log_probs == "none":
        lacks = "api: chat" if model.api == "chat" else "log_probs: none"
        return replace(CONTINUING, state=f"endpoint {model.name} with {lacks} returns none")
    return replace(SERVED, state=f"{model.name} is an endpoint")


def display_name(model: AnyModel) -> str:
    """The name of a model in messages: its path as written, or its name with its endpoint, if any."""
    if isinstance(model, ScoredModel):
        return model.name
    return f"{model.name} at {model.endpoint}" if isinstance(model, EndpointConfig) else model.shown


def as_model_config(model: AnyModel) -> ModelConfig:
    """The configuration of a model whose weights can be opened.

    Raises:
        UserError: the model is behind an endpoint, or only its name is given.
    """
    if isinstance(model, ScoredModel):
        raise UserError(f"only the name of model {model.name} is given: its scores are read from a file")
    if isinstance(model, EndpointConfig):
        raise UserError(f"model {display_name(model)} is behind an endpoint: its weights are not available")
    return model


class ParaphraserConfig(ModelConfig):
    """A model that rewrites documents: sequence-to-sequence, or causal with a chat template."""

    path: Annotated[str, Place.MODEL] = Field(
        "humarin/chatgpt_paraphraser_on_T5_base", description="Hub id, local folder, or a .gguf file."
    )
    temperature: float = Field(1.9, gt=0, description="Temperature of the draws; higher values increase their variety.")
    top_k: int = Field(50, ge=1, description="Sampling from the k likeliest tokens.")
    top_p: float = Field(0.95, gt=0, le=1, description="Of those, the likeliest with this total probability.")


def expand_user(path: str) -> str:
    """A local path with `~` expanded; a URL is returned unchanged."""
    return path if "://" in path else os.path.expanduser(path)
