"""Chats are read alike from Parquet and Arrow files, and what stands in place of a template is one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.chats import Conversation, read_conversation
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.formats.base import Unreadable
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.models.chat_templates import ChatTemplate, ReadChat
from pipeline.plan.description import build_config
from pipeline.stages.registry import check_stages
from tests.helpers import chat_templates as templates
from tests.helpers.chat_runs import chat, chat_audit, save_chat_model
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.commands import user_error

TALKS: list[list[dict[str, Any]]] = [
    chat("Why?", "So."),
    [{"role": "system", "content": "Be brief."}, *chat("Été 数据?", "It is.\n\n", "And?", "Yes.")],
    chat("no answer"),
]
IDS = ["first", "second", "third"]


def arrow_file(table: pa.Table, folder: Path) -> str:
    with pa.ipc.new_file(str(folder / "a.arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=1)
    return str(folder / "a.arrow")


def arrow_stream(table: pa.Table, folder: Path) -> str:
    with pa.ipc.new_stream(str(folder / "b.arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=2)
    return str(folder / "b.arrow")


def feather_file(table: pa.Table, folder: Path) -> str:
    feather.write_feather(table, str(folder / "c.arrow"), compression="zstd")
    return str(folder / "c.arrow")


def parquet_file(table: pa.Table, folder: Path) -> str:
    pq.write_table(table, folder / "d.parquet", row_group_size=1)
    return str(folder / "d.parquet")


def saved_folder(table: pa.Table, folder: Path) -> str:
    datasets.Dataset(table).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


WRITERS = [arrow_file, arrow_stream, feather_file, parquet_file, saved_folder]


def read_documents(path: str, **source: Any) -> list[Document]:
    corpus = CorpusConfig.model_validate({"audit": {"path": path, "id": "id", **source}})
    shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_documents=2))
    return [document for shard in shards for document in read_shard(shard)]


def turns_of(document: Document) -> list[dict[str, str]] | None:
    return None if document.chat is None else [turn.message() for turn in document.chat.turns]


@pytest.mark.parametrize("write", WRITERS)
def test_messages_of_every_format_are_the_same_chats(tmp_path: Path, write: Callable[[pa.Table, Path], str]) -> None:
    path = write(pa.table({"id": IDS, "talk": TALKS}), tmp_path)
    documents = read_documents(path, messages="talk")
    assert [document.doc_id for document in documents] == IDS
    assert [turns_of(document) for document in documents] == [*TALKS[:2], None]
    assert [document.problem and document.problem[0] for document in documents] == [None, None, "not_chat"]


def test_lists_of_saved_datasets_and_of_the_hub_are_chats_versions_and_token_ids(tmp_path: Path) -> None:
    columns = {"id": IDS, "talk": TALKS, "versions": [["a b", "c d"]] * 3, "index": [0, 1, 0], "ids": [[1, 2, 3]] * 3}
    (tmp_path / "data").mkdir()
    parquet_file(pa.table(columns), tmp_path / "data")
    for place in ({"path": saved_folder(pa.table(columns), tmp_path)}, {"dataset": str(tmp_path), "subset": "default"}):
        source = {**place, "id": "id", "split": "train"} if "dataset" in place else {**place, "id": "id"}

        def documents(source: dict[str, Any] = source, **kind: Any) -> list[Document]:
            corpus = CorpusConfig.model_validate({"audit": {**source, **kind}})
            shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig(shard_documents=2))
            return [document for shard in shards for document in read_shard(shard)]

        assert [turns_of(document) for document in documents(messages="talk")] == [*TALKS[:2], None]
        assert [document.text for document in documents(tokens="ids")] == ["1 2 3"] * 3
        versioned = documents(versions={"column": "versions"})
        assert [document.versions and document.versions.texts for document in versioned] == [("a b", "c d")] * 3


@pytest.mark.parametrize("write", WRITERS)
def test_nested_messages_and_pairs_of_every_format_are_chats(
    tmp_path: Path, write: Callable[[pa.Table, Path], str]
) -> None:
    columns = {
        "id": IDS[:2],
        "data": [{"turns": talk} for talk in TALKS[:2]],
        "prompt": ["Why?", "Été?"],
        "completion": ["So.", "Yes."],
    }
    path = write(pa.table(columns), tmp_path)
    assert [turns_of(document) for document in read_documents(path, messages="data.turns")] == TALKS[:2]
    pairs = read_documents(path, prompt="prompt", completion="completion")
    assert [turns_of(document) for document in pairs] == [chat("Why?", "So."), chat("Été?", "Yes.")]


def test_a_turn_of_ten_megabytes_is_cut_or_too_short(tiny_model_folder: Path) -> None:
    made = ChatTemplate(templates.CHATML, chat_tokenizer(tiny_model_folder))
    large = "river stone " * (10_000_000 // 12)
    talks = [read_conversation(talk) for talk in (chat("Why?", large), chat(large, "So."))]
    cut, short = made.read([talk for talk in talks if isinstance(talk, Conversation)], 100)
    assert isinstance(cut, ReadChat)
    assert (len(cut.tokens.ids), cut.tokens.truncated, any(cut.scored)) == (100, True, True)
    assert isinstance(short, Unreadable)
    assert short.reason == "too_short"
    assert "ends before the first answer at character 10,0" in short.message


def test_a_missing_template_is_named_without_reading_a_document(tmp_path: Path, tiny_model_folder: Path) -> None:
    model = save_chat_model(tiny_model_folder, tmp_path / "model")
    (tmp_path / "latin.jinja").write_bytes(b"caf\xe9")
    corpus = {role: {"path": f"{tmp_path}/{role}.jsonl", "messages": "messages"} for role in ("audit", "unseen")}
    for name, problem in (
        ("none.jinja", "does not exist"),
        (".", "is a folder, not a file"),
        ("latin.jinja", "is not in UTF-8"),
    ):
        path = str(tmp_path / name)
        given = chat_audit(model, corpus, chat={"template": path})
        config = build_config({"run": str(tmp_path / "run"), **given})
        line = user_error(check_stages, config)
        assert line == f"chat.template {path} {problem}: give a file with a Jinja template, or leave it out"
        assert "Errno" not in line
