"""Detectors and procedures of plugins, tried on made-up inputs before a run: their faults cost seconds, not a scan.

Each is tried in a process of its own where the system can fork, because its code may hang or end its process.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config.audit import AuditConfig
from pipeline.detectors.base import Continuations, Detector, Evidence, Pass, detector_modules, plan_passes
from pipeline.detectors.plugins import display_module, is_built_in
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import IncompleteError, UserError, error_line
from pipeline.passes.forward import TokenStatistics
from pipeline.passes.statistics import MODIFIED_ORDERS, RENYI_ORDERS
from pipeline.selection.conformal import RankCounts
from pipeline.selection.procedures import PROCEDURES, procedure_of
from pipeline.selection.procedures.record import Given

LENGTHS = (24, 3, 60, 9, 41, 17)
"""Tokens of the made-up documents after their first."""

VOCABULARY = 512
SECONDS = 120.0
"""Time limit for one detector or procedure."""

CALIBRATION, AUDITED = 99, 200
"""Made-up documents of a procedure."""

_WORDS = ("river", "stone", "quiet", "number", "seven", "Winter", "letter", "café", "paper", "17", "garden", "music")
_TEXT_WORDS = (20, 4, 48, 8, 33, 14)


def check_plugins(config: AuditConfig) -> list[str]:
    """Try the detectors and the procedures of plugins.

    Args:
        config: configuration whose plugins are loaded.

    Returns:
        A warning for each detector without a finite score for some made-up documents.

    Raises:
        UserError: one of them raises an error, gives no finite score at all, or returns something else than scores.
        IncompleteError: its code ends its process, or takes too long.
    """
    detectors = parse_detectors(config.detectors)
    passes = plan_passes(detectors)
    lines = []
    for one in detectors:
        modules = [module for module in detector_modules([one]).values() if not is_built_in(module)]
        if modules:
            name = f"detector {one} ({display_module(modules[0])})"
            lines += _isolated(name, partial(_problem_of_detector, one, passes))
    for selection in config.selections:
        for procedure in dict.fromkeys((selection.procedure, selection.step_up)):
            if not procedure_of(procedure).built_in and procedure in PROCEDURES:
                name = f"procedure {procedure} ({display_module(PROCEDURES.modules[procedure])})"
                lines += _isolated(name, partial(_try_procedure, procedure, selection.exact_alpha))
    return lines


def _problem_of_detector(detector: Detector, passes: Mapping[Pass, frozenset[str]]) -> str | None:
    """Score made-up documents together, and one alone.

    Returns:
        What is not finite, as the end of a sentence; None where all is.

    Raises:
        UserError: a fault.
    """
    several = made_up_evidence(passes, range(len(LENGTHS)))
    before = list(_tensors(several))
    kept = [values.clone() for _, values in before]
    scores = _scores(detector, several)
    for (where, values), copy in zip(before, kept, strict=True):
        if not torch.equal(values, copy):
            raise UserError(f"changes its evidence in place ({where}), which other detectors read: copy it first")
    _scores(detector, made_up_evidence(passes, [2]))  # a document that fails with others is scored alone
    finite = int(scores.isfinite().sum())
    if not finite:
        raise UserError(f"gives no finite score for any of {len(scores)} made-up documents")
    missing = len(scores) - finite
    return None if not missing else f"gives no finite score for {missing} of {len(scores)} made-up documents"


def _scores(detector: Detector, evidence: Evidence) -> Tensor:
    many = f"{len(evidence.texts)} made-up document{'s' * (len(evidence.texts) != 1)}"
    try:
        return detector.score(evidence).detach().cpu()
    except UserError:
        raise
    except SystemExit as error:
        raise UserError(f"calls sys.exit({error.code!r}) for {many}") from None
    except Exception as error:  # a plugin may raise anything
        raise UserError(f"fails for {many}: {error_line(error) or type(error).__name__}") from None


def _try_procedure(name: str, alpha: Any) -> None:
    """Decide on made-up counts: some ranks are small, all others uniform."""
    ranks = np.concatenate([np.arange(40) % 3 + 1, np.arange(AUDITED - 40) * 7 % (CALIBRATION + 1) + 1])
    counts = RankCounts.of(ranks, CALIBRATION)
    decide = procedure_of(name).decide
    assert decide is not None
    decision = decide(Given(counts, alpha))
    if not isinstance(decision.rank, (int, np.integer)) or not 0 <= decision.rank <= counts.grid.size:
        raise UserError(f"returns rank {decision.rank!r}, which must be an integer in 0..{counts.grid.size}")


# --- made-up evidence


def made_up_evidence(passes: Mapping[Pass, frozenset[str]], documents: Sequence[int]) -> Evidence:
    """Evidence as passes measure it, from random numbers; the same for the same documents.

    Args:
        passes: pass -> statistics that are read.
        documents: indices in `LENGTHS`.
    """
    generator = torch.Generator().manual_seed(len(documents))
    draws = max((needed.draw for needed in passes), default=0)
    continued = {needed.continued: read for needed, read in passes.items() if needed.continued is not None}
    return Evidence(
        texts=[_text(index, _TEXT_WORDS[index]) for index in documents],
        passes={
            needed: _statistics(needed, read, documents, generator)
            for needed, read in passes.items()
            if needed.kind == "forward"
        },
        norms={
            needed: torch.rand(len(documents), generator=generator, dtype=torch.float64) + 0.1
            for needed in passes
            if needed.kind == "gradient"
        },
        paraphrases=[
            [_text(index + 7 * draw, _TEXT_WORDS[index]) for index in documents] for draw in range(1, draws + 1)
        ],
        continuations={
            sampled: [_continuations(index, max(map(int, read))) for index in documents]
            for sampled, read in continued.items()
        },
        rarity={
            needed.prefix: torch.rand(VOCABULARY, generator=generator, dtype=torch.float64) * 9 + 0.1
            for needed in passes
            if needed.kind == "count" and needed.prefix is not None
        },
    )


def _text(start: int, words: int) -> str:
    return " ".join(_WORDS[(start + 3 * place + place // 5) % len(_WORDS)] for place in range(words)) + "."


def _continuations(index: int, draws: int) -> Continuations:
    words = _TEXT_WORDS[index] // 2
    return Continuations(_text(index + 11, words), [_text(index + 5 * draw, words) for draw in range(draws)])


def _statistics(
    needed: Pass, read: frozenset[str], documents: Sequence[int], generator: torch.Generator
) -> TokenStatistics:
    """Statistics of the tokens of a forward pass; those that are not read are missing, as in a run."""
    lengths = torch.tensor([LENGTHS[index] * (3 if needed.text == "repeated" else 1) for index in documents])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def drawn(low: float, high: float) -> Tensor:
        values = low + (high - low) * torch.rand(mask.shape, generator=generator)
        return values.where(mask, 0.0)

    log_prob = -drawn(0.01, 3.0).square()
    entropy = drawn(0.2, 5.0)
    of_order = {order: entropy * scale for order, scale in zip(RENYI_ORDERS, (1.2, 1.0, 0.8), strict=False)}
    of_order["inf"] = -log_prob * drawn(0.2, 1.0)  # the likeliest token is at least as likely
    optional = {"mean": -entropy - 2.0 * mask, "variance": drawn(0.5, 9.0), "m_entropy": drawn(0.1, 4.0)}
    tokens = torch.randint(VOCABULARY, mask.shape, generator=generator).where(mask, 0)
    return TokenStatistics(
        log_prob=log_prob,
        mask=mask,
        renyi={order: values for order, values in of_order.items() if f"renyi_{order}" in read},
        mod_renyi={order: drawn(0.1, 4.0) for order in MODIFIED_ORDERS if f"mod_renyi_{order}" in read},
        token=tokens if "token" in read else None,
        **{name: values for name, values in optional.items() if name in read},
    )


def _tensors(evidence: Evidence) -> Iterator[tuple[str, Tensor]]:
    """The tensors of evidence, with names for a message."""
    for needed, statistics in evidence.passes.items():
        where = f"of the {needed.kind} pass over the {needed.text} text"
        for name in ("log_prob", "mask", "mean", "variance", "m_entropy", "token"):
            if (values := getattr(statistics, name)) is not None:
                yield f"{name} {where}", values
        for prefix, by_order in (("renyi", statistics.renyi), ("mod_renyi", statistics.mod_renyi)):
            yield from ((f"{prefix}_{order} {where}", values) for order, values in by_order.items())
    yield from ((f"norms of the {needed.kind} pass", values) for needed, values in evidence.norms.items())
    yield from ((f"rarity of {prefix}", values) for prefix, values in evidence.rarity.items())


# --- isolation


def _isolated(name: str, work: Callable[[], str | None]) -> list[str]:
    """Run work in a child process, or in this one where the system cannot fork.

    Args:
        name: subject of the sentences.
        work: returns the end of a warning, or None.

    Returns:
        A warning, if any.

    Raises:
        UserError: the error of the work, after its subject.
        IncompleteError: the child ended, or took too long.
    """
    error, warning = _outcome_in_child(name, work) if sys.platform == "linux" else _try_outcome(work)
    if error is not None:
        raise UserError(error if error.startswith(name.split(" (")[0]) else f"{name} {error}")
    return [] if warning is None else [f"warning: {name} {warning}: such documents are quarantined"]


_Outcome = tuple[str | None, str | None]
"""An error of the user's code and a warning, in one line each."""


def _try_outcome(work: Callable[[], str | None]) -> _Outcome:
    try:
        return None, work()
    except UserError as error:
        return error_line(error), None


def _outcome_in_child(name: str, work: Callable[[], str | None]) -> _Outcome:
    sys.stdout.flush()
    sys.stderr.flush()
    source, sink = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread of its parent
        child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(2, 1)  # what the code prints is no output of the command
            torch.set_num_threads(1)
            os.write(sink, pickle.dumps(_try_outcome(work)))
            status = 0
        finally:
            os._exit(status)
    os.close(sink)
    data, end = b"", time.monotonic() + SECONDS
    while select.select([source], [], [], max(0.0, end - time.monotonic()))[0] and (part := os.read(source, 1 << 16)):
        data += part
    os.close(source)
    if late := time.monotonic() >= end:
        os.kill(child, signal.SIGKILL)
    _, ended = os.waitpid(child, 0)
    if late:
        raise IncompleteError(f"{name} takes more than {SECONDS:.0f} s for made-up input")
    code = os.waitstatus_to_exitcode(ended)
    if code or not data:
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise IncompleteError(f"{name} ends its process on made-up input ({how})")
    outcome: _Outcome = pickle.loads(data)
    return outcome
