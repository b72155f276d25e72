"""Feed a reader with bytes that an engine chooses by the code that they reach, for as long as it is told.

    python tests/faults/fuzz.py jsonl --seconds 40

What breaks the reader is kept in tests/faults/cases, where `test_readers.py` tries it ever after.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

with atheris.instrument_imports(include=["pipeline"]):
    from oracles import READERS, parquet_footer
    from test_readers import SCRAPS

    import pipeline.config.yaml
    import pipeline.corpus.inputs  # noqa: F401


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
        for number, seed in enumerate(SCRAPS.get(arguments.kind, [parquet_footer()])):
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
