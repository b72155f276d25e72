"""Cut input files into shards by metadata alone: file sizes, Parquet footers, row counts of datasets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import fsspec

from pipeline.config.audit import ResourcesConfig
from pipeline.config.corpus import LIMITS, CorpusConfig, LimitsConfig, TransformConfig
from pipeline.corpus.documents import read_labels, read_shard
from pipeline.corpus.formats import by_bytes, extent_of
from pipeline.corpus.formats.jsonl import lines
from pipeline.corpus.labels import check_labels
from pipeline.corpus.shard import InputFile, Shard, whole_shard
from pipeline.errors import UserError

SHARDS = 32
_FIRST = 100  # documents of which some must have scores from elsewhere
_BLOCK = 1 << 18  # bytes that are read together where lines are counted
LEAST_BYTES, MOST_BYTES = 1 << 11, 1 << 20
"""Of a shard, where the configuration does not say: about SHARDS of a corpus, within these limits."""

PICTURE_BYTES = 1 << 18, 1 << 26
"""The same of pictures: one takes as long as some hundred words, and a hundred times their bytes."""


def plan_shards(
    corpus: CorpusConfig,
    inputs: Sequence[InputFile],
    resources: ResourcesConfig,
    transform: TransformConfig | None = None,
    limit: int | None = None,
    limits: LimitsConfig = LIMITS,
) -> list[Shard]:
    """Cut inputs into shards.

    Args:
        corpus: the sources of every role.
        inputs: from `find_inputs`.
        resources: `shard_bytes`, about, and at most `shard_documents` make a shard.
        transform: of every text.
        limit: keeps the first rows of each role.
        limits: of documents, and of files that cannot be split.

    Raises:
        UserError: a limit below 1; a label column that does not say which documents are members.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, got {limit}")
    if (labelled := corpus.labelled) is not None:
        files = [entry for entry in inputs if entry.role == "unseen"]  # each stands there as seen too
        labels = (label for entry in files for label in read_labels(whole_shard(entry, labelled, transform, limits)))
        check_labels(labels, labelled.label, ", ".join(entry.name for entry in files))
    if corpus.audit is not None and corpus.audit.window and limit is not None:  # of documents, not of rows
        limit *= corpus.audit.window
    if corpus.audit is not None and corpus.audit.companions:  # an answer rests on every index
        for entry in inputs:
            for _ in read_shard(whole_shard(entry, corpus.audit, transform, limits)):
                pass
    for entry, source in ((entry, corpus.source(entry.role)) for entry in inputs):
        if source is not None and source.scores:
            _check_scores(whole_shard(entry, source, transform, limits))
    shards: list[Shard] = []
    if corpus.versions is not None:  # of which a file packs many into few bytes
        inputs = [replace(entry, size=max(entry.size, entry.text_bytes)) for entry in inputs]
    shard_bytes = _shard_bytes(inputs, resources, limit, corpus.has_pictures)
    for role, source in corpus.roles():
        parts = (
            shard
            for entry in inputs
            if entry.role == role
            for shard in _split_input(
                entry, whole_shard(entry, source, transform, limits), shard_bytes, resources.shard_documents
            )
        )
        kept = parts if limit is None else _first_rows(parts, limit)
        shards += (replace(shard, id=f"{role}-{number:06d}") for number, shard in enumerate(kept))
    return shards


def _check_scores(whole: Shard) -> None:
    """Look whether some of the first documents of an input have scores.

    Raises:
        UserError: none of them has.
    """
    first = list(itertools.islice(read_shard(whole), _FIRST))
    problems = [one.problem[1] for one in first if one.problem is not None and one.problem[0] == "non_finite_score"]
    if first and len(problems) == len(first):
        raise UserError(f"{whole.name}: none of the first {len(first)} documents has a score: {problems[0]}")


def number_rows(shards: Sequence[Shard]) -> list[Shard]:
    """Fill in the first row of byte ranges by counting the lines before them, each byte read once.

    Ranges in which no line begins, as inside a long one, are left out: there is nothing to read in them.
    """
    numbered: list[Shard] = []
    for (_, path), group in itertools.groupby(shards, key=lambda shard: (shard.role, shard.path)):
        of_file = list(group)
        counts = _lines_before(path, [shard.start for shard in of_file if by_bytes(shard) and shard.start > 0])
        for position, shard in enumerate(of_file):
            if by_bytes(shard) and shard.start > 0:
                first_row = next(counts)
                if position and numbered[-1].first_row == first_row:
                    numbered.pop()
                shard = replace(shard, first_row=first_row)
            numbered.append(shard)
    return numbered


def _shard_bytes(inputs: Sequence[InputFile], resources: ResourcesConfig, limit: int | None, pictures: bool) -> int:
    """Text bytes in a shard: as configured, or so many that a small corpus has shards for every worker too.

    It follows from the inputs alone, never from the machine: scores depend on what shares a batch.
    """
    if resources.shard_bytes != "auto":
        return resources.shard_bytes
    total = float(sum(entry.size for entry in inputs))
    if limit is not None:
        rows = sum(extent_of(entry).rows for entry in inputs)
        total *= min(1.0, limit * len({entry.role for entry in inputs}) / max(1, rows))
    step = 1 << max(0, int(total / SHARDS).bit_length() - 1)  # a power of 2: some more text leaves the cuts as they are
    least, most = PICTURE_BYTES if pictures else (LEAST_BYTES, MOST_BYTES)
    return min(most, max(least, step))


def _split_input(entry: InputFile, whole: Shard, shard_bytes: int, shard_documents: int) -> Iterator[Shard]:
    if entry.rows == 0:
        return
    if whole.window:  # bytes would cut the rows at places that depend on their order
        yield replace(whole, stop=entry.size) if by_bytes(whole) else whole
        return
    if ranges := by_bytes(whole):
        step, total = shard_bytes, entry.size
    elif entry.rows is None:  # the rows of the file can only be read from its beginning
        yield whole
        return
    else:
        total = entry.rows
        step = max(1, min(shard_documents, shard_bytes * total // max(1, entry.text_bytes or entry.size)))
    # where one ends the next begins: memory holds one number of both
    for start, stop in itertools.pairwise(itertools.chain(range(0, total, step), [total])):
        yield replace(whole, start=start, stop=stop, first_row=0 if ranges else start, files=entry.files[start:stop])


def _first_rows(shards: Iterable[Shard], limit: int) -> Iterator[Shard]:
    """The shards that hold the first rows of a role, the last one cut."""
    for shard in shards:
        shard, rows = _limited(shard, limit)
        if rows:
            yield shard
        limit -= rows
        if limit == 0:
            return


def _limited(shard: Shard, remaining: int) -> tuple[Shard, int]:
    """The shard cut to at most so many rows, and how many rows that is."""
    if by_bytes(shard) and shard.label_column is None:
        rows = sum(1 for _ in lines(replace(shard, max_rows=remaining)))
    elif shard.stop is None or shard.label_column is not None:
        rows = sum(1 for _ in read_shard(replace(shard, max_rows=remaining, window=0)))
    else:
        rows = min(remaining, shard.stop - shard.start)
        return replace(shard, stop=shard.start + rows, files=shard.files[:rows]), rows
    return replace(shard, max_rows=rows), rows


def _lines_before(path: str, stops: Sequence[int]) -> Iterator[int]:
    """How many lines begin in bytes [0, stop) of a file, for ascending stops above 0."""
    position = ends = 0
    with fsspec.open(path, "rb") as file:
        for stop in stops:
            last = stop - 1  # a line that begins at a byte ends before it
            while position < last and (block := file.read(min(_BLOCK, last - position))):
                ends += block.count(b"\n")
                position += len(block)
            yield 1 + ends
