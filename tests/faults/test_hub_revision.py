"""The revision of a dataset on the hub decides which documents are read, and stands in their fingerprint."""

import json
from pathlib import Path

from tests.helpers.clusters import output_of

BEGIN = """
import json, sys
import hub_server
hub_server.start(sys.argv[1])
from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import CorpusConfig
from pipeline.corpus.documents import read_shard
from pipeline.corpus.inputs import find_inputs, plan_shards
from pipeline.corpus.shard import Shard, shard_fingerprint
from pipeline.errors import UserError

def read(**source):
    try:
        corpus = CorpusConfig(audit={"dataset": "org/name", **source})
        shards = plan_shards(corpus, find_inputs(corpus), ResourcesConfig())
        shards = [Shard.from_dict(json.loads(json.dumps(shard.to_dict()))) for shard in shards]
        documents = [document for shard in shards for document in read_shard(shard)]
        return len(documents), documents[-1].text, shard_fingerprint({}, shards[0])
    except UserError as error:
        return str(error)
"""


def test_a_revision_is_read_and_is_in_the_fingerprint(tmp_path: Path) -> None:
    code = f"""{BEGIN}
print(json.dumps([read(**source) for source in (
    {{}}, {{"revision": "v1"}}, {{"revision": "main"}}, {{"revision": "a" * 40}}, {{}}, {{"revision": "none"}},
    {{"revision": "v1", "split": "train[:7]"}},
)]))
"""
    default, tag, branch, commit, again, missing, part = json.loads(output_of(code, tmp_path, seconds=120))
    assert default[:2] == branch[:2] == [50, "the text of row 49 in commit bbb"]
    assert tag[:2] == commit[:2] == [30, "the text of row 29 in commit aaa"]
    assert part[:2] == [7, "the text of row 6 in commit aaa"]
    assert again == default, "what is cached is the same input"
    assert "revision" not in default[2]
    assert [one[2]["revision"] for one in (tag, branch, commit)] == ["v1", "main", "a" * 40]
    assert default[2]["rows"] == branch[2]["rows"] != tag[2]["rows"], "the commit is in the digest of the content"
    assert "cannot open dataset org/name" in missing
