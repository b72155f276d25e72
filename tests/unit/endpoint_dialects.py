"""Answers with log-probabilities of a prompt as servers write them, over tokenizers of several kinds.

The forms follow public sources: vLLM (completion/serving.py, engine/logprobs.py), SGLang (serving_completions.py),
llama-cpp-python (llama.py), llama.cpp (pull request 15189), Together (docs.together.ai/docs/logprobs) and OpenAI's
reference of legacy completions.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

TRAINING = [
    (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8"),
    "café \N{EN DASH} «naïve» 天地玄黃 🙂",
]


@cache
def tokenizer(kind: str) -> Tokenizer:
    """A byte-level one as of GPT-2, one with marks and bytes as of Llama 2, or an uncased one as of BERT."""
    settings: dict[str, Any] = {"vocab_size": 700, "show_progress": False}
    if kind == "bytes":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **settings)
    elif kind == "sentencepiece":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(special_tokens=names, limit_alphabet=90, **settings)
    else:
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]"], **settings)
    made.train_from_iterator(TRAINING, trainer)
    return made


@dataclass(frozen=True)
class Tokens:
    """The tokens of a prompt as a server holds them."""

    ids: list[int]
    marked: list[str]  # as in the vocabulary
    data: list[bytes]  # what each stands for
    values: list[float]  # log-probabilities, also of the first

    @property
    def expected(self) -> list[float]:
        """The values that an audit reads."""
        return self.values[1:]

    @property
    def decoded(self) -> list[str]:
        """Each token decoded alone, parts of characters as the replacement character."""
        return [one.decode("utf-8", "replace") for one in self.data]

    @property
    def legacy(self) -> list[str]:
        """As in OpenAI's legacy completions: parts of characters as their bytes."""
        texts = []
        for one in self.data:
            try:
                texts.append(one.decode())
            except UnicodeDecodeError:
                texts.append("bytes:" + "".join(f"\\x{byte:02x}" for byte in one))
        return texts


def log_prob(ids: Sequence[int], position: int) -> float:
    """A made-up log-probability of a token after the one before it, so that a text that is read again is as likely."""
    return -0.02 - zlib.crc32(repr(list(ids[max(0, position - 1) : position + 1])).encode()) % 9000 / 1000


def adapter_tokens(text: str, kind: str = "bytes", bos: str = "") -> Tokens:
    """The tokens of a text, with a BOS of this name before them."""
    encoding = tokenizer(kind).encode(text, add_special_tokens=False)
    ids, marked = list(encoding.ids), list(encoding.tokens)
    if kind == "bytes":
        data = [bytes(from_byte_level(token)) for token in marked]
    elif kind == "sentencepiece":
        data = [
            bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace("▁", " ").encode()
            for token in marked
        ]
    else:
        data = [token.encode() for token in marked]
    if bos:
        ids, marked, data = [100_000, *ids], [bos, *marked], [bos.encode(), *data]
    return Tokens(ids, marked, data, [log_prob(ids, place) for place in range(len(ids))])


def from_byte_level(token: str) -> list[int]:
    """The bytes of a token in the alphabet of GPT-2: printing ones stand for themselves, the others from U+0100 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return [ord(sign) if ord(sign) in printing else others[ord(sign) - 0x100] for sign in token]


def usage(prompt: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def echo(
    texts: Sequence[str], values: Sequence[Any], prompt: str, generated: int = 0, counted: int | None = None
) -> dict[str, Any]:
    """OpenAI's form: the prompt's tokens, and behind them generated ones."""
    made = [" and", " so"][:generated] + [" on"] * max(0, generated - 2)
    listed = {
        "tokens": [*texts, *made],
        "token_logprobs": [*values, *[-0.5 - place for place in range(generated)]],
        "text_offset": [0] * (len(texts) + generated),
        "top_logprobs": [None, *[{"x": -0.1}] * (len(texts) + generated - 1)],
    }
    choice = {"index": 0, "text": prompt + "".join(made), "logprobs": listed, "finish_reason": "length"}
    return {"choices": [choice], "usage": usage(len(texts) if counted is None else counted, generated)}


Respond = Callable[[dict[str, Any]], Any]


def echoing(body: dict[str, Any]) -> bool:
    return bool(body.get("echo"))


def refused(body: dict[str, Any], known: str) -> Any:
    """The answer to another way of asking."""
    return 400, {"error": {"message": f"unknown parameter, known: {known}"}}


def openai_legacy(body: dict[str, Any]) -> Any:
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"])
    return echo(tokens.legacy, [None, *tokens.expected], body["prompt"], body["max_tokens"])


def vllm(body: dict[str, Any], decode: Callable[[Tokens], list[str]] = lambda t: t.decoded, **kind: str) -> Any:
    """Prompt log-probabilities by id, with rank and text; the likeliest token stands behind the prompt's own."""
    if echoing(body):
        return refused(body, "prompt_logprobs")
    tokens = adapter_tokens(body["prompt"], **kind)
    texts, candidates = decode(tokens), 1 + body["prompt_logprobs"]
    entries: list[Any] = [None]
    for place in range(1, len(tokens.ids)):
        rank = 1 + tokens.ids[place] % 3
        own = {"logprob": tokens.values[place], "rank": rank, "decoded_token": texts[place]}
        likeliest = {"logprob": -0.01, "rank": 1, "decoded_token": " likely"}
        entries.append({str(tokens.ids[place]): own, **({"99999": likeliest} if rank > 1 and candidates > 1 else {})})
    choice = {"index": 0, "text": " so", "logprobs": None, "prompt_logprobs": entries}
    return {"choices": [choice], "usage": usage(len(tokens.ids), 1)}


def vllm_without_blanks(body: dict[str, Any]) -> Any:
    return vllm(body, lambda t: [text.strip() for text in t.decoded], kind="sentencepiece", bos="<s>")


def vllm_without_names(body: dict[str, Any]) -> Any:
    return vllm(body, lambda t: ["", *t.decoded[1:]], bos="<|begin_of_text|>")


def vllm_marks(body: dict[str, Any]) -> Any:
    return vllm(body, lambda t: t.marked)


def likeliest_first(body: dict[str, Any]) -> Any:
    """Lists the likeliest token also where none was requested, before the prompt's own."""
    if echoing(body):
        return refused(body, "prompt_logprobs")
    answer = vllm(body | {"prompt_logprobs": 1})
    entries = answer["choices"][0]["prompt_logprobs"]
    answer["choices"][0]["prompt_logprobs"] = [
        entry if entry is None else dict(reversed(entry.items())) for entry in entries
    ]
    return answer


def without_ranks(body: dict[str, Any]) -> Any:
    if isinstance(answer := likeliest_first(body), tuple):
        return answer
    for entry in answer["choices"][0]["prompt_logprobs"]:
        for candidate in (entry or {}).values():
            del candidate["rank"]
    return answer


def vllm_echo(body: dict[str, Any]) -> Any:
    """Generates at least one token and does not list it where none was requested; -inf is -9999."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"], "sentencepiece", bos="<s>")
    values = [None, *(max(value, -9999.0) for value in tokens.expected)]
    answer = echo(
        ["<s>", *(text.strip() or text for text in tokens.decoded[1:])], values, body["prompt"], body["max_tokens"]
    )
    answer["usage"]["completion_tokens"] = 1
    return answer


def vllm_token_ids(body: dict[str, Any]) -> Any:
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"])
    return echo([f"token_id:{one}" for one in tokens.ids], [None, *tokens.expected], body["prompt"])


def floats(body: dict[str, Any]) -> Any:
    tokens = adapter_tokens(body["prompt"])
    choice = {"text": " x", "prompt_logprobs": [None, *tokens.expected]}
    return {"choices": [choice], "usage": usage(len(tokens.ids), 1)}


def llama_cpp_python(body: dict[str, Any]) -> Any:
    """Does not list the BOS, has null for the first token behind it, and generates all that fits unless limited."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"], "sentencepiece", bos="<s>")
    texts = [one.decode("utf-8", "ignore") for one in tokens.data[1:]]
    generated = body["max_tokens"] or 40 - len(texts) % 7
    return echo(texts, [None, *tokens.values[2:]], body["prompt"], generated, len(texts) + 1)


def behind_a_bos(body: dict[str, Any]) -> Any:
    """Does not list the BOS, and has a value for the first token."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"], bos="<|endoftext|>")
    return echo(tokens.decoded[1:], tokens.values[1:], body["prompt"], counted=len(tokens.ids))


def llama_cpp_content(body: dict[str, Any]) -> Any:
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"])
    content = [
        {"id": one, "token": text, "bytes": list(data), "logprob": value, "top_logprobs": []}
        for one, text, data, value in zip(
            tokens.ids, tokens.decoded, tokens.data, [None, *tokens.expected], strict=True
        )
    ]
    content.append({"id": 5, "token": " so", "bytes": [32, 115, 111], "logprob": -0.2, "top_logprobs": []})
    choice = {"text": f"{body['prompt']} so", "logprobs": {"content": content}}
    return {"choices": [choice], "usage": usage(len(tokens.ids), 1)}


def together(body: dict[str, Any]) -> Any:
    """The prompt stands beside the choices."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"], "sentencepiece", bos="<s>")
    listed = {"token_ids": tokens.ids, "tokens": tokens.marked, "token_logprobs": [None, *tokens.expected]}
    choice = {"text": " so", "logprobs": {"tokens": [" so"], "token_logprobs": [-0.3]}}
    beside = [{"text": f"<s> {body['prompt']}", "logprobs": listed}]
    return {"prompt": beside, "choices": [choice], "usage": usage(len(tokens.ids), 1)}


def sglang(body: dict[str, Any]) -> Any:
    """Lists marks of the vocabulary and no usage."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"])
    answer = echo(tokens.marked, [None, *tokens.expected], body["prompt"], body["max_tokens"])
    del answer["usage"]
    return answer


def always_sixteen(body: dict[str, Any]) -> Any:
    """Ignores max_tokens."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"])
    return echo(tokens.legacy, [None, *tokens.expected], body["prompt"], 16)


def sixteen_uncounted(body: dict[str, Any]) -> Any:
    answer = always_sixteen(body)
    if isinstance(answer, dict):
        del answer["usage"]
    return answer


def first_is_zero(body: dict[str, Any]) -> Any:
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"], bos="<|begin_of_text|>")
    return echo(tokens.decoded, [0.0, *tokens.expected], body["prompt"], body["max_tokens"])


def uncased(body: dict[str, Any]) -> Any:
    """Lower case, continued words marked, and special tokens on both sides."""
    if not echoing(body):
        return refused(body, "echo")
    tokens = adapter_tokens(body["prompt"], "wordpiece", bos="[CLS]")
    return echo([*tokens.marked, "[SEP]"], [None, *tokens.expected, -1.5], body["prompt"])


def least_one(body: dict[str, Any]) -> Any:
    """Refuses to generate nothing."""
    if echoing(body) and body["max_tokens"] < 1:
        return 400, {"error": {"message": "max_tokens must be at least 1"}}
    return openai_legacy(body)


Read = Callable[[str], list[float]]
"""The values that an audit is to read of a text."""


def all_but_first(kind: str = "bytes", bos: str = "", left_out: int = 1, more: Sequence[float] = ()) -> Read:
    return lambda text: [*adapter_tokens(text, kind, bos).values[left_out:], *more]


GOOD: dict[str, tuple[Respond, Read]] = {
    "OpenAI": (openai_legacy, all_but_first()),
    "vLLM": (vllm, all_but_first()),
    "vLLM, blanks lost": (vllm_without_blanks, all_but_first("sentencepiece", "<s>")),
    "vLLM, BOS empty": (vllm_without_names, all_but_first(bos="<|begin_of_text|>")),
    "vLLM, marks": (vllm_marks, all_but_first()),
    "likeliest first": (likeliest_first, all_but_first()),
    "likeliest first, no ranks": (without_ranks, all_but_first()),
    "vLLM echo": (vllm_echo, all_but_first("sentencepiece", "<s>")),
    "vLLM, ids for tokens": (vllm_token_ids, all_but_first()),
    "numbers alone": (floats, all_but_first()),
    "llama-cpp-python": (llama_cpp_python, all_but_first("sentencepiece", "<s>", 2)),
    "value behind a BOS": (behind_a_bos, all_but_first(bos="<|endoftext|>")),
    "llama.cpp": (llama_cpp_content, all_but_first()),
    "Together": (together, all_but_first("sentencepiece", "<s>")),
    "SGLang": (sglang, all_but_first()),
    "16 tokens behind": (always_sixteen, all_but_first()),
    "16 tokens behind, uncounted": (sixteen_uncounted, all_but_first()),
    "first value 0": (first_is_zero, all_but_first(bos="<|begin_of_text|>")),
    "uncased": (uncased, all_but_first("wordpiece", "[CLS]", more=[-1.5])),
    "at least one token": (least_one, all_but_first()),
}
"""Servers whose answers are read."""
