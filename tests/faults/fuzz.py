"""Feed a reader with bytes that an engine chooses by the code that they reach, for as long as it is told.

    python tests/faults/fuzz.py jsonl --seconds 40

What breaks the reader is kept in tests/faults/cases, where `test_readers.py` tries it ever after.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

with atheris.instrument_imports(include=["pipeline"]):
    from oracles import READERS, parquet_file, parquet_footer

    import pipeline.config.yaml
    import pipeline.corpus.inputs  # noqa: F401


CONFIGURATION = b"""run: r
model: {path: m, dtype: auto}
corpus: {audit: {path: [a, b], text: text}, unseen: {path: u}}
detectors: [loss, {min_k: {k: [0.1, 0.2]}}]
limits: {document_bytes: 64MiB}
selections: [{name: s, detectors: [loss], procedure: bh, alpha: 0.1}]
"""
SEEDS = {
    "jsonl": [
        b'{"id": "a", "text": "one"}\n{"text": 1}\n\n[]\n',
        b'\xef\xbb\xbf{"text": "\\ud800"}\r\n{"text": "' + b"x" * 400,
    ],
    "csv": [b'text,n\r\n"a ""b"", c",1\r\n\r\n"two\nlines",2\n', b"text\n" + b'"' + b"x\n" * 200 + b'"\nlast\n'],
    "parquet": [b"", parquet_file()[4:200], parquet_file()[4:]],
    "footer": [parquet_footer()],
    "txt": [b"a text", b"\xef\xbb\xbf\xff"],
    "packed": [b'{"text": "one"}\n', b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"],
    "yaml": [CONFIGURATION, b"a: &a [1]\nb: [*a, *a]\n<<: {c: d}\n"],
    "override": [b"selections.0.alpha=0.05", b"corpus.audit={path: a}", b"seed=1"],
}


def main() -> None:
    """Read the command line and fuzz; a finding ends it with a status that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(READERS))
    parser.add_argument("--seconds", type=int, default=40)
    arguments = parser.parse_args()
    cases = HERE / "cases" / arguments.kind
    cases.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        corpus, work = Path(folder, "corpus"), Path(folder, "work")
        corpus.mkdir()
        work.mkdir()
        for number, seed in enumerate(SEEDS[arguments.kind]):
            (corpus / str(number)).write_bytes(seed)
        options = [f"-max_total_time={arguments.seconds}", "-timeout=20", "-rss_limit_mb=3000", "-max_len=4096"]

        def read(data: bytes) -> None:
            try:
                READERS[arguments.kind](data, work)
            except Exception:
                (cases / f"crash-{hashlib.sha1(data).hexdigest()}").write_bytes(data)
                raise

        artifacts = f"-artifact_prefix={cases}/"
        atheris.Setup([sys.argv[0], *options, artifacts, str(corpus), str(cases)], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
