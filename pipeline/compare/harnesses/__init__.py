"""Per-item results of models, in the formats of several harnesses: one module defines the record of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import fsspec

from pipeline.compare.harnesses.base import Harness, ItemResults, ResultOptions, ResultPlace
from pipeline.compare.harnesses.inspect_ai import INSPECT
from pipeline.compare.harnesses.lighteval import LIGHTEVAL
from pipeline.compare.harnesses.lm_eval import LM_EVAL
from pipeline.compare.harnesses.results_table import TABLE
from pipeline.errors import UserError, not_opened

HARNESSES = (LM_EVAL, INSPECT, LIGHTEVAL, TABLE)
"""All formats; the first that owns a file reads it."""

READ = "; ".join(harness.files for harness in HARNESSES)
"""All formats in words, for messages."""


def read_all_results(paths: Sequence[str], options: ResultOptions) -> list[ItemResults]:
    """Read results of models: one entry per model and task, in the order of the files.

    Args:
        paths: files of a harness, or folders of them; `NAME=path` names the model of files that have one model.
        options: what is read of them.

    Raises:
        UserError: no results, an unknown format, an unknown metric or filter, or two results of one item.
    """
    results: dict[tuple[str, str], ItemResults] = {}
    for path in paths:
        for one in _read(path, options):
            earlier = results.setdefault((one.model, one.task), one)
            if earlier is not one:
                raise UserError(
                    f"model {one.model!r} has two files of task {one.task!r}: {earlier.path} and {one.path}; "
                    "NAME=FILE names the model of a file"
                )
    return list(results.values())


def task_inputs(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `TASK=INPUT` pairs: task -> input.

    Raises:
        UserError: a pair has another form.
    """
    inputs = {}
    for pair in pairs:
        task, equals, source = pair.partition("=")
        if not (task and equals and source):
            raise UserError(f"--task must be TASK=INPUT, got {pair!r}")
        inputs[task] = source
    return inputs


def _read(path: str, options: ResultOptions) -> list[ItemResults]:
    name, where = _named(path)
    read = []
    for harness, file in _files(where):
        if options.filter is not None and not harness.filters:
            raise UserError(f"--filter is of {LM_EVAL.files}, and {file} is of {harness.files}")
        for one in harness.read(file, options):
            read.append(one if name is None or harness.place is None else replace(one, model=name))
    return read


def _named(path: str) -> tuple[str | None, str]:
    """The model's name in front of a path, if one is given."""
    name, equals, rest = path.partition("=")
    if not equals or "/" in name or not name or not rest:
        return None, path
    return name, rest


def _harness(file: str) -> Harness | None:
    """The harness that owns a file."""
    base = file.rsplit("/", 1)[-1]
    return next((harness for harness in HARNESSES if harness.owns(base)), None)


def _files(path: str) -> list[tuple[Harness, str]]:
    """A file of results, or those in a folder: the last of each model and task."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
        if not fs.exists(root):
            raise UserError(f"no results {path}: no such file or folder")
        folder = fs.isdir(root)
        files = sorted(fs.find(root)) if folder else [path]
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot read results {path}: {not_opened(error)}") from None
    if not folder:
        harness = _harness(path)
        if harness is None:
            raise UserError(f"{path} is no file of results that is read: {READ}")
        return [(harness, path)]
    last: dict[ResultPlace, tuple[str, Harness, str]] = {}
    for file in files:
        harness = _harness(file)
        if harness is None or harness.place is None:
            continue
        full = fs.unstrip_protocol(file) if "://" in path else file
        place = harness.place(full)
        key = replace(place, date="")
        last[key] = max(last.get(key, ("", harness, full)), (place.date, harness, full), key=lambda one: one[0])
    if not last:
        kinds = "; ".join(harness.files for harness in HARNESSES if harness.place is not None)
        raise UserError(f"{path} holds no files of results that are read: {kinds}")
    return [(harness, file) for _, harness, file in last.values()]
