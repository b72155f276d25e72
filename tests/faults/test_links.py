"""No link in a corpus brings a file into it that its owner did not put there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.documents import Document, read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard, shard_fingerprint
from tests.helpers.commands import here, refusal, user_error
from tests.helpers.made_up import sentence


def shards_of(path: Any, **source: Any) -> list[Shard]:
    corpus = CorpusConfig.model_validate({"audit": {"path": path if isinstance(path, list) else str(path), **source}})
    return plan_shards(corpus, find_inputs(corpus), ResourcesConfig())


def read(path: Any, **source: Any) -> list[Document]:
    return [document for shard in shards_of(path, **source) for document in read_shard(shard)]


def texts(path: Any, **source: Any) -> list[str]:
    return [document.text for document in read(path, **source)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of texts, beside which there is another one."""
    (tmp_path / "corpus/inner").mkdir(parents=True)
    (tmp_path / "other/deep").mkdir(parents=True)
    for name in ("corpus/a", "corpus/inner/b", "other/x", "other/deep/y"):
        (tmp_path / f"{name}.txt").write_text(f"The text of {name}.")
    return tmp_path / "corpus"


def test_a_link_out_of_a_folder_stops_with_the_count_and_the_first(corpus: Path) -> None:
    (corpus / "k.txt").symlink_to("/proc/self/environ")
    found = user_error(texts, corpus)
    assert found == (
        f"corpus.audit: 1 link leads out of {corpus} (first: k.txt -> /proc/self/environ); remove them, or set "
        "follow_links: true to read the regular files behind them"
    )
    (corpus / "inner/c.txt").symlink_to("../../other/x.txt")
    assert "2 links lead out of" in user_error(texts, corpus)
    assert "first: inner/c.txt -> ../../other/x.txt" in user_error(texts, corpus)
    found = user_error(texts, corpus, follow_links=True)
    assert found.startswith("corpus.audit: link k.txt -> /proc/self/environ leads to /proc/")
    assert found.endswith("files of /proc, /sys and /dev are never read")


@pytest.mark.parametrize("place", ["/proc/cpuinfo", "/sys/kernel/notes", "/dev/shm/seenset.txt"])
def test_files_of_the_system_are_never_read(corpus: Path, place: str) -> None:
    if place.startswith("/dev/shm"):
        Path(place).write_text("shared")
    (corpus / "k.txt").symlink_to(place)
    try:
        assert "never read" in user_error(texts, corpus, follow_links=True)
        (corpus / "k.txt").unlink()
        (corpus / "deep").symlink_to(os.path.dirname(place))
        (corpus / "link.txt").symlink_to(f"deep/{os.path.basename(place)}")
        assert "never read" in user_error(texts, corpus, follow_links=True)
    finally:
        Path("/dev/shm/seenset.txt").unlink(missing_ok=True)


def test_a_path_that_is_a_link_to_a_file_of_the_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "k.txt").symlink_to("/proc/self/environ")
    assert "k.txt: it leads to /proc/" in user_error(texts, tmp_path / "k.txt")


def test_links_inside_a_folder_are_read(corpus: Path) -> None:
    (corpus / "c.txt").symlink_to("inner/b.txt")
    assert texts(corpus) == ["The text of corpus/a.", "The text of corpus/inner/b.", "The text of corpus/inner/b."]
    assert shards_of(corpus) == shards_of(corpus, follow_links=False)


def test_links_to_files_and_folders_are_followed_where_that_is_configured(corpus: Path) -> None:
    (corpus / "c.txt").symlink_to("../other/x.txt")
    (corpus / "more").symlink_to("../other")
    (corpus.parent / "other/circle").symlink_to(corpus.parent / "other")
    (corpus.parent / "other/back").symlink_to("deep")
    assert "2 links lead out of" in user_error(texts, corpus)
    documents = read(corpus, follow_links=True)
    assert [document.doc_id.removeprefix(f"{corpus}/") for document in documents] == [
        "a.txt#0", "c.txt#0", "inner/b.txt#0", "more/back/y.txt#0", "more/x.txt#0",
    ]  # fmt: skip
    (shard, *_) = shards_of(corpus, follow_links=True)
    assert shard_fingerprint({}, shard)["follow_links"] is True
    assert Shard.from_dict(shard.to_dict()) == shard
    assert "follow_links" not in shards_of(corpus / "inner")[0].to_dict()


def test_a_link_to_a_folder_is_not_left_out_silently(corpus: Path) -> None:
    (corpus / "more").symlink_to("../other")
    assert "1 link leads out of" in user_error(texts, corpus)
    (corpus / "more").unlink()
    (corpus / "more").symlink_to("inner")
    assert len(texts(corpus)) == 2, "its files are read where they are"


def test_links_that_are_no_documents_do_not_matter(corpus: Path) -> None:
    (corpus / "README.md").symlink_to("/etc/hostname")
    (corpus / ".hidden.txt").symlink_to("/etc/hostname")
    assert len(texts(corpus)) == 2


def test_a_link_to_a_device_or_to_nothing_is_an_error_also_where_links_are_followed(corpus: Path) -> None:
    (corpus / "k.txt").symlink_to("/nowhere")
    assert "link" in user_error(texts, corpus)
    assert "a link to nothing" in user_error(texts, corpus, follow_links=True)
    (corpus / "k.txt").unlink()
    os.mkfifo(corpus.parent / "other/fifo.txt")
    (corpus / "k.txt").symlink_to("../other/fifo.txt")
    assert "it is a FIFO, not a regular file" in user_error(texts, corpus, follow_links=True)


def test_a_path_in_the_configuration_may_be_a_link(corpus: Path) -> None:
    (corpus.parent / "link").symlink_to("corpus")
    (corpus.parent / "link.txt").symlink_to("other/x.txt")
    assert len(texts(corpus.parent / "link")) == 2
    assert texts(corpus.parent / "link.txt") == ["The text of other/x."]


def test_a_glob_is_held_to_the_folder_in_which_it_looks(corpus: Path) -> None:
    (corpus / "c.txt").symlink_to("../other/x.txt")
    found = user_error(texts, f"{corpus}/*.txt")
    assert f"1 link leads out of {corpus} (first: c.txt -> ../other/x.txt)" in found
    assert len(texts(f"{corpus}/*.txt", follow_links=True)) == 2
    (corpus / "c.txt").unlink()
    (corpus / "c.txt").symlink_to("inner/b.txt")
    assert len(texts(f"{corpus}/*.txt")) == 2


@pytest.mark.parametrize("pattern", ["*/*.txt", "**/*.txt", "mo*/[x].txt", "more/*.txt"])
def test_a_glob_leaves_out_no_folder_behind_a_link(corpus: Path, pattern: str) -> None:
    inside = len(texts(f"{corpus}/{pattern}")) if "mo" not in pattern else 0
    (corpus / "more").symlink_to("../other")
    if pattern.startswith("more"):  # the part before the glob may be a link
        assert texts(f"{corpus}/{pattern}") == ["The text of other/x."]
        return
    refused = user_error(texts, f"{corpus}/{pattern}")
    assert f"1 link leads out of {corpus} (first: more -> ../other); remove them" in refused
    found = texts(f"{corpus}/{pattern}", follow_links=True)
    assert "The text of other/x." in found
    assert len(found) == inside + (2 if "**" in pattern else 1)
    (corpus / "more").unlink()
    (corpus.parent / "notes").mkdir()
    (corpus / "more").symlink_to("../notes")
    assert len(texts(f"{corpus}/*/*.txt")) == 1, "nothing matches behind the link"
    (corpus / "more").unlink()
    (corpus / "more").symlink_to("/proc/self")
    assert "never read" in user_error(texts, f"{corpus}/{pattern}", follow_links=True)


def test_a_glob_of_folders_is_held_to_the_same(corpus: Path) -> None:
    (corpus / "inner/deep").mkdir()
    (corpus / "inner/deep/z.txt").write_text("The text of corpus/inner/deep/z.")
    (corpus / "more").symlink_to("../other")
    assert "1 link leads out of" in user_error(texts, f"{corpus}/*/deep")
    assert texts(f"{corpus}/*/deep", follow_links=True) == [
        "The text of corpus/inner/deep/z.",
        "The text of other/deep/y.",
    ]


def test_a_snapshot_of_the_hub_is_read_and_no_other_place_of_the_cache(tmp_path: Path) -> None:
    entry = tmp_path / "hub/datasets--org--name"
    (entry / "blobs").mkdir(parents=True)
    (entry / "snapshots/abc/data").mkdir(parents=True)
    pq.write_table(pa.table({"text": [sentence(n) for n in range(5)]}), entry / "blobs/1234")
    (entry / "snapshots/abc/data/train.parquet").symlink_to("../../../blobs/1234")
    for path in (entry, entry / "snapshots/abc", entry / "snapshots/abc/data", f"{entry}/snapshots/abc/*/*.parquet"):
        assert len(read(path)) == 5
    other = tmp_path / "hub/datasets--org--other/blobs/5678"
    other.parent.mkdir(parents=True)
    other.write_bytes((entry / "blobs/1234").read_bytes())
    (entry / "snapshots/abc/data/more.parquet").symlink_to(other)
    assert "1 link leads out of" in user_error(read, entry / "snapshots/abc")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_files_of_tables_are_held_to_the_same(corpus: Path, name: str) -> None:
    from tests.helpers.made_up import write_columns

    write_columns(corpus.parent / "other" / name, {"text": ["some words", "other words"]})
    for path in (corpus / "a.txt", corpus / "inner/b.txt"):
        path.unlink()
    (corpus / name).symlink_to(f"../other/{name}")
    assert "1 link leads out of" in user_error(texts, corpus)
    assert texts(corpus, follow_links=True) == ["some words", "other words"]


def test_a_saved_dataset_with_a_link_is_refused(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.rename(tmp_path / "elsewhere.arrow")
    file.symlink_to(tmp_path / "elsewhere.arrow")
    assert "1 link leads out of" in user_error(texts, tmp_path / "saved")
    assert texts(tmp_path / "saved", follow_links=True) == ["one", "two"]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("named", ["../other/data-00000-of-00001.arrow", "{top}/other/data-00000-of-00001.arrow"])
def test_a_saved_dataset_names_no_file_outside_of_its_folder(tmp_path: Path, splits: bool, named: str) -> None:
    saved = Dataset.from_dict({"text": ["one", "two"]})
    Dataset.from_dict({"text": ["three", "four"]}).save_to_disk(tmp_path / ("saved/other" if splits else "other"))
    (DatasetDict({"train": saved}) if splits else saved).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == ["one", "two"]
    state = tmp_path / ("saved/train/state.json" if splits else "saved/state.json")
    name = named.format(top=state.parent.parent)
    assert Path(state.parent, name).exists()
    edit_json(state, _data_files=[{"filename": name}])
    shown = state.relative_to(tmp_path / "saved")
    assert f"saved: {shown} names {name!r}, which is outside of its folder" in user_error(texts, tmp_path / "saved")


def test_a_saved_dataset_names_no_split_outside_of_its_folder(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_dict({"text": ["one", "two"]})}).save_to_disk(tmp_path / "saved")
    Dataset.from_dict({"text": ["three", "four"]}).save_to_disk(tmp_path / "other")
    edit_json(tmp_path / "saved/dataset_dict.json", splits=["../other"])
    assert "dataset_dict.json names '../other', which is outside" in user_error(texts, tmp_path / "saved")


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"_data_files": null}', '{"_data_files": [3]}', '{"_data_files": [{}]}']
)
def test_a_damaged_saved_dataset_is_one_line(tmp_path: Path, content: str) -> None:
    Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text(content)
    assert "saved is not a readable saved dataset" in user_error(texts, tmp_path / "saved")


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_pictures_and_their_captions(tmp_path: Path) -> None:
    for folder in ("corpus/inner", "other"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("corpus/a", "corpus/inner/b", "other/x"):
        Image.new("RGB", (8, 8), (len(name), 3, 4)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"Caption of {name}.")
    settings, corpus = {"image": "image", "caption": "txt"}, tmp_path / "corpus"

    def captions(**more: Any) -> list[str]:
        documents = read(corpus, **settings, **more)
        assert all(document.problem is None and document.picture for document in documents)
        return [document.text for document in documents]

    (corpus / "c.png").symlink_to("inner/b.png")
    (corpus / "c.txt").symlink_to("inner/b.txt")
    assert captions() == ["Caption of corpus/a.", "Caption of corpus/inner/b.", "Caption of corpus/inner/b."]
    (corpus / "c.txt").unlink()
    (corpus / "c.txt").symlink_to("/proc/self/environ")
    assert "1 link leads out of" in user_error(captions)
    assert "never read" in user_error(captions, follow_links=True)
    (corpus / "c.txt").unlink()
    (corpus / "c.txt").symlink_to("../other/x.txt")
    (corpus / "d.png").symlink_to("../other/x.png")
    (corpus / "d.txt").write_text("Caption of its own.")
    assert "2 links lead out of" in user_error(captions)
    assert captions(follow_links=True)[1:3] == ["Caption of other/x.", "Caption of its own."]
    (tmp_path / "single.png").symlink_to("other/x.png")
    (document,) = read(tmp_path / "single.png", image="image")
    assert document.problem is None


def test_the_command_stops_before_anything_is_read(
    corpus: Path, make_audit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        (corpus / f"{number}.txt").write_text(sentence(number))
    (corpus / "k.txt").symlink_to("/proc/self/environ")
    path = make_audit(corpus={"audit": {"path": "corpus"}, "unseen": {"path": "unseen.jsonl"}})
    (corpus.parent / "unseen.jsonl").write_text("".join(f'{{"text": "{sentence(n)}"}}\n' for n in range(1000, 1040)))
    for command in ("plan", "run"):
        assert "1 link leads out of corpus (first: k.txt -> /proc/self/environ)" in refusal(capsys, command, path)
    (corpus / "k.txt").unlink()
    (corpus / "k.txt").symlink_to("../other/x.txt")
    here(capsys, "run", path, "--set", "corpus.audit.follow_links=true")
    refused = refusal(capsys, "mark", corpus, "--out", corpus.parent / "marked")
    assert refused.endswith("(first: k.txt -> ../other/x.txt); remove them\n")


def test_follow_links_is_for_folders_and_not_for_the_hub() -> None:
    settings = {"audit": {"dataset": "org/name", "follow_links": True}}
    with pytest.raises(ValueError, match="follow_links applies to folders, not to a dataset on the hub"):
        CorpusConfig.model_validate(settings)
