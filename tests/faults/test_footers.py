"""No footer of a Parquet file ends the process that plans or reads it: it is one line that names the file."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.audit import ResourcesConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.formats.parquet import check_chunks, count_text_bytes
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.errors import UserError
from pipeline.plan.description import load_config
from tests.helpers.clusters import output_of
from tests.helpers.commands import refusal
from tests.helpers.made_up import MakeAudit

FLIPS = 60
SLOW_FLIPS = 2000


@pytest.mark.parametrize("flips", [FLIPS, pytest.param(SLOW_FLIPS, marks=pytest.mark.slow)])
def test_no_flipped_byte_of_a_footer_ends_the_process_or_is_a_traceback(flips: int) -> None:
    code = "import json, sys, flips; print(json.dumps(flips.main(int(sys.argv[1]))))"
    ends = json.loads(output_of(code, flips, seconds=500))
    assert len(ends.pop("documents or one line")) == flips, ends


def damaged_histogram(path: Path) -> None:
    """Let the footer contradict itself where PyArrow's metadata would end the process."""
    table = pa.table({"text": ["one", None, "two words"]})
    file = io.BytesIO()
    pq.write_table(table, file, compression="none", write_statistics=False)
    data = bytearray(file.getvalue())
    optional = data.index(b"\x25\x02\x18\x04text")  # of the schema: the text may be missing
    data[optional + 1] = 0
    path.write_bytes(data)


def test_a_footer_that_ended_the_process_is_refused_by_the_plan_in_one_line(
    make_audit: MakeAudit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_histogram(tmp_path / "bad.parquet")
    path = make_audit()
    line = refusal(capsys, "plan", str(path), "--set", f"corpus.audit={{path: {tmp_path}/bad.parquet}}")
    assert "bad.parquet is damaged: Definition level histogram size mismatch" in line


def test_a_footer_that_is_damaged_after_it_was_planned_fails_its_shard_by_name(
    make_audit: MakeAudit, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["one", None, "two words"]}), tmp_path / "bad.parquet")
    settings = [f"corpus.audit={{path: {tmp_path}/bad.parquet}}"]
    corpus = load_config(str(make_audit()), settings).corpus
    shard = next(s for s in plan_shards(corpus, find_inputs(corpus), ResourcesConfig()) if s.role == "audit")
    damaged_histogram(tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet is damaged"):
        list(read_shard(shard))


def test_a_footer_is_checked_without_a_page_whatever_the_number_of_row_groups() -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["one"] * 500, "other": range(500)}), file, row_group_size=1)
    metadata = pq.read_metadata(file)
    check_chunks(metadata, ["text", "missing"], len(file.getvalue()))
    assert metadata.num_row_groups == 500
    assert count_text_bytes(metadata, "text") > 500 * len("one")
    with pytest.raises(OSError, match="Invalid column metadata"):
        check_chunks(metadata, ["text"], 100)
