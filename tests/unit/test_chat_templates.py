"""Places of answers under templates that name tags of their own, end turns in several ways, or take parts."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.config.corpus import ChatSource
from pipeline.corpus.chats import Conversation, read_conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.formats.columns import check_schema
from pipeline.errors import UserError
from pipeline.models.chat_templates import ChatTemplate, ReadChat, RenderedChat
from tests.helpers import chat_templates as templates
from tests.helpers.chat_templates import chat_tokenizer

OTHERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    tokenizer = chat_tokenizer(tiny_model_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*templates.CONTROL, *OTHERS]})
    return tokenizer


def chat(*contents: str) -> list[dict[str, str]]:
    """A question, its answer, the next question, ..."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def conversation(messages: Any) -> Conversation:
    read = read_conversation(messages)
    assert isinstance(read, Conversation), read
    return read


def rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> RenderedChat:
    made = template.rendered(conversation(messages))
    assert isinstance(made, RenderedChat), made
    return made


def answers(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rendered parts of each answer."""
    made = rendered(template, messages)
    return [[made.text[start:stop] for start, stop in spans] for spans in made.answers]


def ends(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The scored tokens that begin in no answer."""
    made = rendered(template, messages)
    (read,) = template.read([conversation(messages)], 10_000)
    assert isinstance(read, ReadChat)
    inside = {at for spans in made.answers for start, stop in spans for at in range(start, stop)}
    offsets = template.tokenizer(made.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    tokens = zip(read.tokens.ids[1:], offsets[1:], read.scored, strict=True)
    names = template.tokenizer.convert_ids_to_tokens
    return [names(number) for number, (begin, _), keep in tokens if keep and begin not in inside]


TALK = chat("What is it?", "It is this.", "And that?", "That is another.")
ENDS = {
    "CHATML": ["<|im_end|>"] * 2,
    "MISTRAL": ["<eos>"] * 2,
    "HARMONY": ["<|end|>", "<|return|>"],
    "BETWEEN": ["<|end|>"],  # the last turn is not closed
    "ROLES_ONLY": [],  # the token of the next role begins a turn, and ends none
}


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_ends_a_turn_is_scored_and_that_which_begins_the_next_is_not(tokenizer: Any, name: str) -> None:
    assert ends(ChatTemplate(getattr(templates, name), tokenizer), TALK) == ENDS[name]


def test_an_end_of_a_turn_that_is_an_added_token_need_not_be_special(tiny_model_folder: Path) -> None:
    tokenizer = chat_tokenizer(tiny_model_folder)
    tokenizer.add_tokens(["<|over|>"])
    assert ends(ChatTemplate(templates.CHATML.replace("<|im_end|>", "<|over|>"), tokenizer), TALK) == ["<|over|>"] * 2


def test_tags_at_the_ends_of_an_answer_belong_to_it(tokenizer: Any) -> None:
    """The token that ends the turn is scored behind them."""
    messages = chat("q", "The tag is <think>", "r", "<think> opens, it closes by </think>\n", "s", "<think>hm</think>")
    expected = {"CHATML": "</think>\n", "LLAMA": "</think>", "QWEN": "</think>\n"}
    for name, closing in expected.items():
        template = ChatTemplate(getattr(templates, name), tokenizer)
        first, second, *third = ("".join(parts) for parts in answers(template, messages))
        assert first == "The tag is <think>", name
        if name != "QWEN":  # which takes what stands before </think> for reasoning
            assert (second, *third) == (f"<think> opens, it closes by {closing}", "<think>hm</think>")
            assert len(ends(template, messages)) == 3


def test_a_template_takes_contents_in_parts(tokenizer: Any) -> None:
    for messages in (TALK, chat("", "It is this. ")):
        template = ChatTemplate(templates.IN_PARTS, tokenizer)
        theirs = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        text = tokenizer.apply_chat_template(theirs, chat_template=templates.IN_PARTS, tokenize=False)
        assert rendered(template, messages).text == text
        assert answers(template, messages) == [[one["content"]] for one in messages[1::2]]
        assert answers(template, messages) == answers(ChatTemplate(templates.CHATML, tokenizer), messages)


def test_reasoning_in_the_tags_of_a_template_is_scored_where_it_is_rendered(tokenizer: Any) -> None:
    template = ChatTemplate(templates.OWN_TAGS, tokenizer)
    thought = "<seed:think>Let me see</seed:think>"
    messages = chat("q", f"{thought}It is this", "r", f"{thought}It is that")
    assert answers(template, messages) == [["It is this"], [f"{thought}It is that"]]
    assert rendered(template, messages).removed == 1


@pytest.mark.parametrize("name", ["CHATML", "QWEN", "DEEPSEEK"])
def test_an_answer_of_tags_alone_is_counted_apart_from_what_a_template_leaves_out(tokenizer: Any, name: str) -> None:
    template = ChatTemplate(getattr(templates, name), tokenizer)
    read = rendered(template, chat("q", "<think></think>", "r", "It is that"))
    assert (read.removed, read.tags, read.turns) == (0, 1, (3,))
    (only,) = template.read([conversation(chat("q", "<think>\n</think>"))], 100)
    assert isinstance(only, Unreadable)
    assert (only.reason, only.message) == ("no_span", "no answer has a word beside its tags")


def test_an_answer_without_a_token_of_its_own_says_so(tiny_model_folder: Path) -> None:
    tokenizer = chat_tokenizer(tiny_model_folder)
    tokenizer.add_tokens(["\tx"])
    template = ChatTemplate("{% for one in messages %}{{ one['content'] + '\t' }}{% endfor %}", tokenizer)
    (read,) = template.read([conversation(chat("Why?", "x"))], 100)
    assert isinstance(read, Unreadable)
    assert read.message == "no token begins in an answer; that of the first one begins before it, at character 5"


def test_answers_with_a_weight_of_0_are_left_out(tokenizer: Any) -> None:
    """As in fine-tuning by OpenAI."""
    template = ChatTemplate(templates.CHATML, tokenizer)
    for weight in (0, 0.0, "0", "0.0", " 0 ", "-0", "0e0", ".0", False):
        messages = [{**one, "weight": weight} if number == 1 else one for number, one in enumerate(TALK)]
        assert answers(template, messages) == [["That is another."]]
        assert ends(template, messages) == ["<|im_end|>"]
    for weight in (1, 1.0, None, "1", "0.5", "", "none", ".", [0]):
        assert len(answers(template, [{**one, "weight": weight} for one in TALK])) == 2
    none = read_conversation([{**one, "weight": 0} for one in TALK])
    assert isinstance(none, Unreadable)
    assert none.message == "4 turns, none of the assistant with a weight other than 0"
    last = read_conversation([*TALK, *chat("q", " "), {"role": "assistant", "content": "x", "weight": 0}])
    assert isinstance(last, Unreadable)
    assert last.message == "turn 6: the last answer is empty"


def test_offsets_that_lack_the_first_character_of_a_word_cost_no_token() -> None:
    """Those of byte-level tokenizers that put a blank before each part of a text and then trim it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(["It is this"] * 9, trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_sep|>", "<|im_end|>"])
    template = ChatTemplate(templates.PHI, PreTrainedTokenizerFast(tokenizer_object=made))
    for answer in ("a", "It is this"):
        (read,) = template.read([conversation(chat("q", answer))], 100)
        assert isinstance(read, ReadChat)
        scored = [number for number, keep in zip(read.tokens.ids[1:], read.scored, strict=True) if keep]
        assert "".join(template.tokenizer.convert_ids_to_tokens(scored)).lstrip("\u0120").replace("\u0120", " ") == (
            f"{answer}<|im_end|>"
        )


def test_a_surrogate_in_another_field_than_the_content_is_no_text(tokenizer: Any) -> None:
    template = ChatTemplate("{{ messages[1]['reason'] }}" + templates.CHATML, tokenizer)
    talks = [[*TALK[:1], {**TALK[1], "reason": reason}] for reason in ("\ud800", "\U0001f600")]
    broken, whole = template.read([conversation(talk) for talk in talks], 100)
    assert isinstance(broken, Unreadable)
    assert broken.message == "the chat template renders '\\ud800', which is not valid Unicode text"
    assert isinstance(whole, ReadChat)


def test_a_null_role_is_named() -> None:
    refused = read_conversation([{"role": None, "content": "a"}, *TALK])
    assert isinstance(refused, Unreadable)
    assert refused.message == "turn 1: role is null"


def test_messages_may_be_maps_of_arrow() -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    (value,) = pa.array([[list(one.items()) for one in TALK]], kind).to_pylist()
    assert conversation(value) == conversation(TALK)
    source = ChatSource(path="chats.parquet", messages="messages")
    check_schema(pa.schema({"messages": kind}), source, "chats.parquet")
    with pytest.raises(UserError, match="holds list<item: int64>, not lists of messages"):
        check_schema(pa.schema({"messages": pa.list_(pa.int64())}), source, "chats.parquet")


PARTS = ("a", "b ", "\n", " ", "<think>", "</think>", "<|im_end|>", "assistant", "é", "<eos>", "user\n", "[INST]", "🎉")
FIXED = ("CHATML", "MARKED", "MACRO", "PHI", "LLAMA", "GEMMA", "HARMONY", "BETWEEN", "ROLES_ONLY", "IN_PARTS")


@pytest.mark.parametrize("name", [*FIXED, "QWEN", "DEEPSEEK", "OWN_TAGS"])
def test_a_changed_character_of_an_answer_changes_the_text_in_its_span_alone(tokenizer: Any, name: str) -> None:
    """Without any probe: what follows from one character of a content, of answers that hold tags and control tokens."""
    template, draw, seen = ChatTemplate(getattr(templates, name), tokenizer), random.Random(3), 0
    for _ in range(60):
        messages = chat(*("".join(draw.choices(PARTS, k=draw.randint(1, 6))) + "z" for _ in range(4)))
        made = rendered(template, messages)
        inside = {at for spans in made.answers for start, stop in spans for at in range(start, stop)}
        changing = set()
        for number in (1, 3):
            content = messages[number]["content"]
            for at, character in enumerate(content):
                if character.isspace():
                    continue
                other = [dict(one) for one in messages]
                other[number]["content"] = f"{content[:at]}Q{content[at + 1 :]}"
                text = rendered(template, other).text
                if len(text) == len(made.text):  # a tag that is broken moves others
                    places = {place for place, (a, b) in enumerate(zip(made.text, text, strict=True)) if a != b}
                    assert len(places) <= 1
                    changing |= places
        assert changing <= inside
        if name in FIXED:  # which take tags for words
            assert changing == {at for at in inside if not made.text[at].isspace()}
        seen += len(changing)
    assert seen > 500
