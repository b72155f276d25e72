"""Which small errors the tests catch: operators and constants are changed at random, one at a time, and tests run.

`python -m benchmarks.mutation` prints one JSON line: how many changes (mutants) were caught, those that survived, and
those that change no result, with the reason; others are drawn in their place. Places are drawn with a seed, equally
many from `pipeline/selection`, `pipeline/passes`, `pipeline/detectors` and `pipeline/stages`. Each mutant is tried in a
copy of the sources by the test files whose imports reach the changed module by the fewest steps; those on a cluster and
the statistical ones last. A test that also fails without the mutant catches nothing. With `--log FILE` finished mutants
are kept, and the same command goes on from there.

`--trace FOLDER` runs the tests of one process once, in a quarter of an hour, and records which test executes which
line. With `--lines FOLDER` a mutant is tried first by the tests that execute its line.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("selection", "passes", "detectors", "stages")
FIRST, LAST = ("golden", "unit", "contract"), ("ray", "statistical")
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""Operator -> how it is written, and what takes its place."""

NUMBER = "a number"
"""Any change of a number of the line."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "pipeline/selection/knockoff.py",
        "return (np.asarray(w) > 0) & (magnitudes(w) >= np.float32(threshold.value))",
        "> -> >=",
    ): "a threshold is above 0, which 0 never reaches",
    (
        "pipeline/selection/collection.py",
        "families = int(family.max(initial=-1)) + 1",
        "1 -> 2",
    ): "a node more, which has no edge",
    (
        "pipeline/selection/collection.py",
        "nodes = families + int(group.max(initial=-1)) + 1",
        "1 -> 2",
    ): "a node more, which has no edge",
    (
        "pipeline/selection/collection.py",
        "reached = observed[0] - _ROUNDING * size[0]",
        "* -> /",
    ): "a tolerance far above rounding and far below all differences, as before",
    (
        "pipeline/selection/collection.py",
        "above += int((cross.statistic(drawn)[0] >= reached).sum())",
        ">= -> >",
    ): "no statistic is the limit, which is less than a tie by a tolerance",
    (
        "pipeline/selection/shares.py",
        "return mean, low * (least if low > 0 else most), high * (most if high > 0 else least)",
        "> -> >=",
    ): "at 0 both products are 0",
    (
        "pipeline/stages/ask_log_probs.py",
        "return [Entry(each, 0, inputs.get((each.row, text_digest(each.text)))) for each in documents]",
        "0 -> 1",
    ): "the same length for all",
    (
        "pipeline/stages/sample.py",
        "entries.append(Entry(document, 0, (task, texts)))",
        "0 -> 1",
    ): "the same length for all",
    (
        "pipeline/stages/sample.py",
        "if len(filed) >= self.settings.draws:",
        ">= -> >",
    ): "of as many draws as are wanted none is asked for, and the same row is kept",
    (
        "pipeline/stages/process.py",
        "for _, number, receipt in sorted(bases, key=lambda base: base[:2], reverse=True):",
        "2 -> 3",
    ): "no two have the same number, so that the receipt never decides",
    (
        "pipeline/stages/local.py",
        "TICK_SECONDS = 0.5",
        NUMBER,
    ): "how often a driver hears that nothing is new",
    (
        "pipeline/stages/local.py",
        "ENDPOINT_WORKERS = 2",
        NUMBER,
    ): "shards about which an endpoint is asked at a time: an answer depends on the document alone",
    (
        "pipeline/stages/local.py",
        "STOP_SECONDS = 2.0",
        NUMBER,
    ): "seconds for which a driver that stops waits for workers, whose shards are begun anew",
    (
        "pipeline/stages/local.py",
        "thread.join(max(0.0, end - time.monotonic()))",
        "0.0 -> 0.1",
    ): "a driver that stops waits a tenth of a second longer",
    (
        "pipeline/stages/paraphrase.py",
        "WINDOW_DOCUMENTS = 64",
        NUMBER,
    ): "documents that are prepared at a time: the paraphrases of a document depend on it alone",
    (
        "pipeline/stages/score_versions.py",
        "step = max(1, self.batch_size.tokens // longest)",
        NUMBER,
    ): "versions of a document that are computed at a time: memory",
    (
        "pipeline/stages/score_versions.py",
        "step = max(1, self.batch_size.tokens // longest)",
        "// -> *",
    ): "versions of a document that are computed at a time: memory",
    (
        "pipeline/stages/score_versions.py",
        "for before, after in zip([-1, *common], [*common, len(pieces[0])], strict=True):",
        "1 -> 2",
    ): "any negative number stands for the beginning",
    (
        "pipeline/stages/pictures.py",
        "PICTURE_WINDOW = Window(64, characters=16 << 20)",
        NUMBER,
    ): "pictures that are prepared at a time: descriptions depend on the shard alone",
    (
        "pipeline/stages/sample.py",
        "ENDPOINT_WINDOW = Window(4096, 1 << 23)",
        NUMBER,
    ): "documents that are prepared at a time: continuations depend on the document alone",
    (
        "pipeline/passes/forward.py",
        "padded = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in ids])",
        "0 -> 1",
    ): "the token of positions that are masked",
    (
        "pipeline/selection/bounds.py",
        "if high - low <= PRECISION * high:",
        "- -> +",
    ): "the search goes on to its last round: the height is as valid, and closer",
    (
        "pipeline/selection/bounds.py",
        "near = PRECISION / 2.2 * high",
        "* -> /",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "tries = min(high, 3 * math.sqrt(k * (n + 1 + k) / (n + 2))) * np.array([0.8, 0.9, 1.0, 1.2])",
        "* -> /",
    ): "where the search begins, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "while numbers[-1] < 2**60:",
        NUMBER,
    ): "the largest number of documents, beyond all that a run can hold",
    (
        "pipeline/selection/bounds.py",
        "ROUNDS = 200",
        NUMBER,
    ): "the most steps of a search that ends after fewer",
    (
        "pipeline/selection/bounds.py",
        "if failing(np.zeros(1))[0] <= target:",
        "1 -> 2",
    ): "the same height twice, of which the first is read",
    (
        "pipeline/selection/bounds.py",
        "low, high = 0.0, k * math.sqrt((1 - t[0]) / t[0])",
        "1 -> 2",
    ): "where the search begins, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "low, high = 0.0, k * math.sqrt((1 - t[0]) / t[0])",
        "- -> +",
    ): "where the search begins, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "tries = min(high, 3 * math.sqrt(k * (n + 1 + k) / (n + 2))) * np.array([0.8, 0.9, 1.0, 1.2])",
        NUMBER,
    ): "where the search begins, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "tries = min(high, 3 * math.sqrt(k * (n + 1 + k) / (n + 2))) * np.array([0.8, 0.9, 1.0, 1.2])",
        "/ -> *",
    ): "where the search begins, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "at_low, at_high = 0.0, -700.0",
        NUMBER,
    ): "where the search begins, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "if high - low <= PRECISION * high:",
        "<= -> <",
    ): "at equality the search takes another step: the height is as valid, and closer",
    (
        "pipeline/selection/bounds.py",
        "tries = tries[(tries > low) & (tries < high)]",
        "> -> >=",
    ): "a height that was tried before changes nothing",
    (
        "pipeline/selection/bounds.py",
        "tries = tries[(tries > low) & (tries < high)]",
        "< -> <=",
    ): "a height that was tried before changes nothing",
    (
        "pipeline/selection/bounds.py",
        "if log_p <= target and height < high:",
        "<= -> <",
    ): "at equality the search goes on below a height that suffices",
    (
        "pipeline/selection/bounds.py",
        "if log_p <= target and height < high:",
        "< -> <=",
    ): "the same height is taken again",
    (
        "pipeline/selection/bounds.py",
        "if log_p > target and height > low:",
        "> -> >=",
    ): "the same height is taken again, or one that suffices exactly ends the search",
    (
        "pipeline/selection/bounds.py",
        "between = low + (high - low) * (at_low - target) / (at_low - at_high)",
        "+ -> -",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "between = low + (high - low) * (at_low - target) / (at_low - at_high)",
        "- -> +",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "between = low + (high - low) * (at_low - target) / (at_low - at_high)",
        "* -> /",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "between = low + (high - low) * (at_low - target) / (at_low - at_high)",
        "/ -> *",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "near = PRECISION / 2.2 * high",
        NUMBER,
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "near = PRECISION / 2.2 * high",
        "/ -> *",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/step_up.py",
        "beyond = v[1:] * np.cumsum(shares)[:-1] > float(alpha) * (1 + 1e-9)",
        "> -> >=",
    ): "at equality the rank is beyond alpha by the margin, and with it or without the e-values are valid",
    (
        "pipeline/selection/step_up.py",
        "return Fraction(math.fsum(terms) * (1 + 4 * math.ulp(1.0)))",
        "1.0 -> 1.6",
    ): "both have the same last digit",
    (
        "pipeline/selection/ranked.py",
        "ROUNDED_UP = 1 + Fraction(1, 1 << 22)",
        "22 -> 23",
    ): "half of a margin above what is lost by rounding is above it too",
    (
        "pipeline/selection/bounds.py",
        "tries = np.array([between - near, between + near, (low + high) / 2])",
        "- -> +",
    ): "the steps of the search, which ends within the same precision",
    (
        "pipeline/selection/bounds.py",
        "orders = np.zeros((len(limits), k + 1))",
        "1 -> 2",
    ): "one more number of nulls than there are, which is not read",
    (
        "pipeline/selection/bounds.py",
        "if rank % 8 == 0:",
        NUMBER,
    ): "how often the numbers are scaled, for which their logarithms make up",
    (
        "pipeline/selection/bounds.py",
        "if rank % 8 == 0:",
        "== -> !=",
    ): "how often the numbers are scaled, for which their logarithms make up",
    (
        "pipeline/selection/schedule.py",
        "return (parts * ZETA) ** 5 * number**8 > PARTS**5",
        "> -> >=",
    ): "never equal: 11 divides the numerator of ZETA and not PARTS",
    (
        "pipeline/selection/step_up.py",
        "total = Fraction(math.fsum(shares[:last])) + Fraction(last, 2**50)",
        "50 -> 51",
    ): "half of a margin above all rounding errors is above them too",
    (
        "pipeline/selection/procedures/td4eval.py",
        "table = 1 / np.tan(np.pi * np.clip(np.arange(n + 2) / (n + 1), half, 1 - half))",
        "2 -> 3",
    ): "one more row of a table, of a rank that no document has",
    (
        "pipeline/selection/procedures/adadetect.py",
        "MAX_ITERATIONS = 300",
        NUMBER,
    ): "the most steps of a fit that ends after fewer",
    (
        "pipeline/selection/procedures/adadetect.py",
        "labels = np.repeat([0, 1], [len(calibration), len(mixture)])",
        "1 -> 2",
    ): "the name of a class, of which only the order counts",
    (
        "pipeline/selection/thresholds.py",
        "BINS = 1 << 16",
        NUMBER,
    ): "counters beyond the last high half stay 0",
    (
        "pipeline/selection/thresholds.py",
        "MOST_BINS = 16",
        NUMBER,
    ): "how many bins a pass counts: memory against passes",
    (
        "pipeline/selection/thresholds.py",
        "MANTISSA = 53",
        NUMBER,
    ): "more bits than a float64 has: the whole number is twice as large, and its unit half",
    (
        "pipeline/selection/thresholds.py",
        "LOW_BITS = 26",
        NUMBER,
    ): "where a mantissa is cut in two, whose parts add up to the same",
    (
        "pipeline/selection/passes.py",
        "EMPTY = Batch(np.empty((0, 1)), None, np.empty(0, dtype=np.int64))",
        "1 -> 2",
    ): "no document, of however many detectors",
    (
        "pipeline/stages/sample.py",
        "WINDOW_DOCUMENTS = 64",
        NUMBER,
    ): "documents that are prepared at a time: the numbers of a document depend on it alone",
    (
        "pipeline/detectors/likelihood.py",
        "tokens = statistics.token.masked_fill(~statistics.mask, -1)",
        "1 -> 2",
    ): "no token has either number, and what is masked is taken out again",
    (
        "pipeline/detectors/likelihood.py",
        "rarity = evidence.rarity[_counted(documents)].to(t.mask.device)[t.token.masked_fill(~t.mask, 0)]",
        "0 -> 1",
    ): "the token of positions that are masked, of which no score reads the rarity",
    (
        "pipeline/detectors/likelihood.py",
        "new = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)",
        "0 -> 1",
    ): "a column more than there are positions, which is not read",
    (
        "pipeline/detectors/pairs.py",
        'return _of_finite(scores, difference + target.renyi["inf"].where(mask, 0.0), mask)',
        "+ -> -",
    ): "whether both are finite: so is their sum and their difference, and else neither is",
    (
        "pipeline/detectors/pairs.py",
        'return _of_finite(scores, difference + target.renyi["inf"].where(mask, 0.0), mask)',
        "0.0 -> 0.1",
    ): "any finite number, of which only that it is finite counts",
    (
        "pipeline/detectors/draws.py",
        "row = [i] + [most + 1] * len(other)",
        "1 -> 2",
    ): "any number of edits above the most that are allowed",
    (
        "pipeline/passes/gradient.py",
        "group.out_features += output.shape[-1]",
        "+ -> -",
    ): "it decides which of two products gives the same norm at less cost",
    (
        "pipeline/stages/audited_texts.py",
        "if not store.local:",
        "not  -> ",
    ): "whether a file is read or mapped",
    (
        "pipeline/passes/paraphrase.py",
        "fails = min(fails, len(units) + 1)",
        "1 -> 2",
    ): "more units than there are: they are the same piece",
    (
        "pipeline/passes/gradient.py",
        'ids = kwargs["position_ids"] + module.offset',
        "+ -> -",
    ): "numbers of positions, of which only the equality counts",
    (
        "pipeline/passes/gradient.py",
        "width = min(vocabulary, max(1, budget // (rows.shape[0] * rows.shape[1])))",
        "// -> *",
    ): "the part of the vocabulary that is held at a time: memory, and no number",
    (
        "pipeline/passes/paraphrase.py",
        "fits, fails = fails, 2 * fails",
        "2 -> 3",
    ): "the steps of a search",
    (
        "pipeline/selection/engine.py",
        "return np.full(self.keys.size, -1, dtype=np.int64)",
        "1 -> 2",
    ): "any negative number stands for no group",
    (
        "pipeline/stages/score.py",
        'texts = [inputs.paraphrases[d.row]["paraphrases"][draw - 1] for d in usable]',
        "1 -> 2",
    ): "the draws in another order, which no detector reads",
    (
        "pipeline/stages/sample.py",
        "return [Entry(task.document, 0, task) for task in tasks if task is not None]",
        "0 -> 1",
    ): "the same length for all",
    (
        "pipeline/stages/worker.py",
        "if len(window) >= most.documents or characters >= most.characters or kept >= most.kept:",
        ">= -> >",
    ): "a window that ends one document later: the numbers of a document depend on it alone",
    (
        "pipeline/stages/tokens.py",
        "self.window = Window(1024, characters=1 << 20)",
        NUMBER,
    ): "documents that are prepared at a time: the numbers of a document depend on it alone",
    (
        "pipeline/passes/gradient.py",
        "self.out_features = 0",
        "0 -> 1",
    ): "it decides which of two products gives the same norm at less cost",
    (
        "pipeline/passes/gradient.py",
        "self.waiting = 0",
        "0 -> 1",
    ): "the group is counted when the pass ends: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "group.waiting -= 1",
        "- -> +",
    ): "the group is counted when the pass ends: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "if _gram_is_cheaper(out.shape[1], inputs.shape[2], group.out_features):",
        "1 -> 2",
    ): "it decides which of two products gives the same norm at less cost",
    (
        "pipeline/passes/generate.py",
        "self.cache = cache_of(self.lm.model, max(map(len, self.ids)) + self.limit)",
        "+ -> -",
    ): "the room that is reserved: a cache that is full grows",
    (
        "pipeline/passes/generate.py",
        "self.due = len(self.ids) + missing",
        "+ -> -",
    ): "words are counted at every token, and no draw ends sooner",
    (
        "pipeline/passes/paraphrase.py",
        "elif length(sentence.strip()) <= limit:",
        "<= -> <",
    ): "a sentence that just fits is cut into one piece",
    (
        "pipeline/passes/shared.py",
        "beginning, held = _begun(model, tail, probe[:1, :4])",
        "1 -> 2",
    ): "two rows that are the same, in place of one",
    (
        "pipeline/passes/shared.py",
        "if not self.room or held + new > self.room[0].shape[2]:",
        "0 -> 1",
    ): "keys and values have the same room",
    (
        "pipeline/passes/parts.py",
        "renyi={order: table([part.renyi[order] for part in parts]) for order in parts[0].renyi},",
        "0 -> 1",
    ): "all parts have the same statistics, and there are two at least",
    (
        "pipeline/passes/parts.py",
        "mod_renyi={order: table([part.mod_renyi[order] for part in parts]) for order in parts[0].mod_renyi},",
        "0 -> 1",
    ): "all parts have the same statistics, and there are two at least",
    (
        "pipeline/passes/pictures.py",
        "width = max([1, *map(len, at)])",
        "1 -> 2",
    ): "one more column, which is masked",
    (
        "pipeline/passes/forward.py",
        'limit = max(1, elements.get(device.type, elements["cuda"]) // vocabulary)',
        "1 -> 2",
    ): "two rows at a time, where a single one has more logits than the limit: memory, and no number",
    (
        "pipeline/passes/sweep_triton.py",
        "series = 1.0 / 13 + q * (1.0 / 15)",
        "13 -> 14",
    ): "less than half of a rounding of float32",
    (
        "pipeline/passes/sweep_triton.py",
        "series = 1.0 / 13 + q * (1.0 / 15)",
        "15 -> 16",
    ): "less than half of a rounding of float32",
    (
        "pipeline/passes/sweep_triton.py",
        "series = 1.0 / 13 + q * (1.0 / 15)",
        "+ -> -",
    ): "less than half of a rounding of float32",
    (
        "pipeline/passes/sweep_triton.py",
        "logits, targets, results, rows, columns, logits.stride(0), factor, softcap or 1.0, *flags,",
        "1.0 -> 1.6",
    ): "not read where logits are not capped",
    (
        "pipeline/passes/forward.py",
        'TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}',
        NUMBER,
    ): "rows of logits that are swept at a time: the numbers of a row depend on it alone",
    (
        "pipeline/passes/forward.py",
        'HEAD_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}',
        "25 -> 26",
    ): "logits of a CPU that exist at a time: memory, and no number",
    (
        "pipeline/passes/forward.py",
        "FLOOR = -200.0",
        "200.0 -> 300.1",
    ): "exp of either is 0 in float32",
    (
        "pipeline/passes/forward.py",
        "probe = torch.arange(min(8, model.config.get_text_config().vocab_size), device=device)[None]",
        "8 -> 9",
    ): "the tokens of a trial",
    (
        "pipeline/passes/forward.py",
        "ones = torch.ones(16, 16, dtype=dtype, device=device)",
        NUMBER,
    ): "the size of a trial product",
    (
        "pipeline/passes/forward.py",
        "noise = 3 * torch.randn(3, columns, generator=torch.Generator().manual_seed(0))",
        "0 -> 1",
    ): "the random rows of a trial",
    (
        "pipeline/passes/forward.py",
        "noise = 3 * torch.randn(3, columns, generator=torch.Generator().manual_seed(0))",
        "* -> /",
    ): "the random rows of a trial",
    (
        "pipeline/passes/forward.py",
        "noise[1, ::2] = -torch.inf",
        NUMBER,
    ): "which tokens are masked in a trial",
    (
        "pipeline/passes/forward.py",
        "sure[:, columns // 2] = 60.0",
        "60.0 -> 90.1",
    ): "a token of a trial that is as sure in float32",
    (
        "pipeline/passes/forward.py",
        "rising = torch.linspace(-20, 20, columns)",
        NUMBER,
    ): "the logits of a row of a trial",
    (
        "pipeline/passes/gradient.py",
        "return rows * (inputs + outputs) < inputs * outputs",
        "< -> <=",
    ): "it decides which of two products gives the same norm at less cost",
    (
        "pipeline/passes/gradient.py",
        "return rows * (inputs + outputs) < inputs * outputs",
        "+ -> -",
    ): "it decides which of two products gives the same norm at less cost",
    (
        "pipeline/passes/gradient.py",
        "return rows * (inputs + outputs) < inputs * outputs",
        "* -> /",
    ): "it decides which of two products gives the same norm at less cost",
    (
        "pipeline/passes/gradient.py",
        "PRODUCT_ELEMENTS = 1 << 26",
        NUMBER,
    ): "of a product that are in memory at a time: the norm is a sum over all of them",
    (
        "pipeline/passes/gradient.py",
        "together = max(1, budget // (rows.shape[1] * len(head.weight)))",
        "// -> *",
    ): "documents whose logits exist at a time: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "together = max(1, budget // (rows.shape[1] * len(head.weight)))",
        "1 -> 2",
    ): "documents whose logits exist at a time: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "together = max(1, PRODUCT_ELEMENTS // size) if inputs.is_cuda else 1",
        NUMBER,
    ): "documents whose products exist at a time: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "together = max(1, PRODUCT_ELEMENTS // size) if inputs.is_cuda else 1",
        "// -> *",
    ): "documents whose products exist at a time: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "if width < vocabulary:",
        "< -> <=",
    ): "the normaliser is computed before the probabilities, and is the same",
    (
        "pipeline/passes/gradient.py",
        "longest = max(2, *map(len, ids))",
        "2 -> 3",
    ): "one more position of padding",
    (
        "pipeline/passes/gradient.py",
        "ids = [[token % model.config.get_text_config().vocab_size for token in range(*ends)] "
        "for ends in ((0, 9), (7, 12))]",
        NUMBER,
    ): "the tokens of a trial",
    (
        "pipeline/passes/gradient.py",
        "group.waiting += 1",
        "+ -> -",
    ): "the group is counted when the pass ends: memory, and no number",
    (
        "pipeline/passes/gradient.py",
        "sum(_autograd_squares(lm.model, document, lm.device).values()) if len(document) > 1 else torch.nan",
        "> -> >=",
    ): "the gradient of the mean over no position is NaN",
    (
        "pipeline/passes/generate.py",
        "padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in self.ids], device=self.lm.device)",
        "0 -> 1",
    ): "the token of positions that are masked",
    (
        "pipeline/passes/generate.py",
        "padded = torch.tensor([list(ids) + [0] * (longest - len(ids)) for ids in self.ids], device=self.lm.device)",
        "0 -> 1",
    ): "the token of positions that are masked",
    (
        "pipeline/passes/generate.py",
        'settings: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in self.parameters else {}',
        "1 -> 2",
    ): "logits that the model computes, of which the last are read",
    (
        "pipeline/passes/generate.py",
        "if len(live) - len(unfinished) >= COMPACT * len(live):",
        ">= -> >",
    ): "when finished draws leave a batch: cost, and no draw",
    (
        "pipeline/passes/generate.py",
        "if len(live) - len(unfinished) >= COMPACT * len(live):",
        "* -> /",
    ): "when finished draws leave a batch: cost, and no draw",
    (
        "pipeline/passes/generate.py",
        "if len(live) - len(unfinished) >= COMPACT * len(live):",
        "- -> +",
    ): "when finished draws leave a batch: cost, and no draw",
    (
        "pipeline/passes/generate.py",
        "self.due = 0 if prompt.words is None else prompt.words + 1",
        "0 -> 1",
    ): "not read where no words are counted",
    (
        "pipeline/passes/generate.py",
        "self.due = 0 if prompt.words is None else prompt.words + 1",
        "+ -> -",
    ): "words are counted two tokens sooner, and no draw ends sooner",
    (
        "pipeline/passes/paraphrase.py",
        "positions = stated_limit if stated_limit < 1 << 20 else 512",
        "20 -> 21",
    ): "a tokenizer without a limit states 10^30",
    (
        "pipeline/passes/paraphrase.py",
        "positions = stated_limit if stated_limit < 1 << 20 else 512",
        "1 -> 2",
    ): "a tokenizer without a limit states 10^30",
    (
        "pipeline/passes/paraphrase.py",
        "positions = stated_limit if stated_limit < 1 << 20 else 512",
        "< -> <=",
    ): "a tokenizer without a limit states 10^30",
    (
        "pipeline/passes/paraphrase.py",
        "fits, fails = 0, 1",
        "1 -> 2",
    ): "where a search begins",
    (
        "pipeline/passes/shared.py",
        "probe = torch.arange(min(8, config.vocab_size), device=device)",
        "8 -> 9",
    ): "the tokens of a trial",
    (
        "pipeline/passes/statistics.py",
        "HELD = 1024",
        NUMBER,
    ): "prefixes that are held: memory and time, and no number",
    (
        "pipeline/passes/shared.py",
        "if sum(map(len, self._held)) + len(key) > HELD:",
        "> -> >=",
    ): "prefixes that are held: memory and time, and no number",
    (
        "pipeline/passes/pictures.py",
        "targets = torch.tensor([-1 if one == token else one for one in following], dtype=torch.long)",
        "1 -> 2",
    ): "any negative number stands for the likeliest token",
    (
        "pipeline/passes/pictures.py",
        "eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0),",
        "0 -> 1",
    ): "what pads a description that has ended, where none can end",
    (
        "pipeline/passes/sweep_triton.py",
        "_FLOOR = tl.constexpr(-200.0)",
        "200.0 -> 300.1",
    ): "exp of either, or of half of it, is below the rounding of sums of at least 1",
    (
        "pipeline/selection/versions.py",
        "return np.asarray(centred / np.repeat(np.where(sd > 0, sd, 1.0), self.sizes))",
        "1.0 -> 1.6",
    ): "what is divided by it is 0",
    (
        "pipeline/selection/versions.py",
        "alike = (count > 1)[place.ravel()].tolist()",
        "> -> >=",
    ): "documents whose sum stands once are compared too, and none is equal",
    (
        "pipeline/selection/versions.py",
        "stands = np.zeros(256 * number.size, dtype=bool)",
        "256 -> 257",
    ): "room for pairs that there are not",
    (
        "pipeline/selection/versions.py",
        "for document in np.flatnonzero(tied > 1).tolist():",
        "> -> >=",
    ): "a score without an equal: no hash but its own is compared with its own",
    (
        "pipeline/selection/versions.py",
        "positive = signs[places] > 0",
        "> -> >=",
    ): "no sign of these places is 0",
    (
        "pipeline/selection/versions.py",
        "for j in np.flatnonzero(positive & (reach < z)).tolist():",
        "< -> <=",
    ): "a hash of 256 bits is always below 2^256",
    (
        "pipeline/selection/versions.py",
        "pooled = math.sqrt(squares.sum() / max(1, int((sizes - 1).sum()))) or 1.0",
        "1.0 -> 1.6",
    ): "what is divided by it is 0",
    (
        "pipeline/selection/versions.py",
        "variance = np.where(others > _ROUNDING * squares, others, 0.0) / np.maximum(k - 2, 1)",
        "1 -> 2",
    ): "of documents of two and three versions, whose variance is not used",
    (
        "pipeline/selection/versions.py",
        "sd: np.ndarray = field(default_factory=lambda: np.empty(0))",
        "0 -> 1",
    ): "without forms it is not read",
    (
        "pipeline/selection/versions.py",
        "penalised: np.ndarray = field(default_factory=lambda: np.empty(0))",
        "0 -> 1",
    ): "without forms it is not read",
    (
        "pipeline/selection/versions.py",
        "if kept.size < varied.size:",
        "< -> <=",
    ): "all columns in their order",
    (
        "pipeline/selection/versions.py",
        "with ThreadPoolExecutor(2) as pool:",
        "2 -> 3",
    ): "threads, which change no product",
    (
        "pipeline/selection/versions.py",
        "middle = rows.shape[0] // 2",
        "2 -> 3",
    ): "which rows each thread multiplies",
    (
        "pipeline/selection/versions.py",
        "observed, redrawn, sums, size = 0.0, np.zeros(redraws), np.zeros(1), 0",
        "0 -> 1",
    ): "a tolerance for rounding that is larger by 1e-12",
    (
        "pipeline/selection/joint.py",
        "values = [self._level(one) if one <= reach else self.m + 1 for one in places.tolist()]",
        "<= -> <",
    ): "the limit lies a billionth above the last p-value that counts",
    (
        "pipeline/selection/knockoff.py",
        "share: float = 0.0",
        "0.0 -> 0.1",
    ): "without a median it is not read",
    (
        "pipeline/selection/knockoff.py",
        "moments = yield lambda spread: Moments.of(scale.about_median(spread), 0.0)",
        "0.0 -> 0.1",
    ): "the point from which deviations are summed: the variance is the same",
    (
        "pipeline/selection/knockoff.py",
        'parts = np.array_split(w[np.argsort(np.abs(w), kind="stable")] > 0, groups)',
        "> -> >=",
    ): "none of these W is 0",
    (
        "pipeline/selection/knockoff.py",
        "positive = int((w > 0).sum())",
        "> -> >=",
    ): "none of these W is 0",
    (
        "pipeline/selection/shares.py",
        "return float(brentq(excess, _LEAST_MEAN, mean, xtol=1e-12)) if excess(_LEAST_MEAN) > 0 else 0.0",
        "> -> >=",
    ): "the limit is 1e-300 in place of 0",
    (
        "pipeline/selection/shares.py",
        "low, high = (2 * share - 1 for share in share_interval(d[d != 0] > 0, 1 - (1 - _OF_RATE) * error))",
        "> -> >=",
    ): "none of these differences is 0",
    (
        "pipeline/selection/weighted.py",
        "MOST = 1 << 30",
        NUMBER,
    ): "sums of the weights of twice as many documents are exact too",
    (
        "pipeline/selection/calibrations.py",
        "keys = [(a << 128) // b for a, b in zip(numerators.tolist(), denominators.tolist(), strict=True)]",
        "128 -> 129",
    ): "126 bits tell all fractions apart",
    (
        "pipeline/selection/collection.py",
        "return np.asarray(difference / np.where(scale > 0, scale, 1.0))",
        "1.0 -> 1.6",
    ): "what is divided by it is 0",
}
"""(module, line with or without its comment, change) -> why no result can show the change."""

LIBRARIES = ("numpy", "scipy.stats", "pyarrow.parquet", "pydantic", "torch", "transformers", "sklearn", "hypothesis")
"""Imported once; each mutant is tried in a fork, which has them already."""

TEST_LIMIT = 240.0
"""Seconds of one test; one that takes longer, such as a loop without an end, fails."""

LIMIT = 400.0
"""Seconds of the tests of one mutant, which has survived when they are over."""

MOST_TESTS = 200
"""Tests that execute its line which try a mutant, before the nearest test files."""

SLOW_FILES = 2
"""The nearest test files, of which the slow tests try what no other test catches: of kernels that are interpreted."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one line."""

    path: str  # of the module, below the root
    line: int
    start: int  # of the changed characters in the line
    end: int
    before: str
    after: str

    @property
    def equivalent(self) -> str | None:
        """Why no result can show it; None where one can."""
        line = (ROOT / self.path).read_text(encoding="utf-8").splitlines()[self.line - 1]
        changes = [f"{self.before} -> {self.after}", *([NUMBER] if self.before[0].isdigit() else [])]
        keys = ((self.path, text.strip(), change) for text in (line, line.split("  # ")[0]) for change in changes)
        return next((EQUIVALENT[key] for key in keys if key in EQUIVALENT), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests made of a mutant."""

    mutant: Mutant
    caught: bool
    by: str  # the first test that failed


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    lines, name, tree = source.splitlines(), str(path.relative_to(ROOT)), ast.parse(source)
    every = []
    for left, right, kind in _operators(tree):
        before, after = SWAPS[kind]
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            start = left.end_col_offset + between.find(before)
            if before in between:
                every.append(Mutant(name, right.lineno, start, start + len(before), before, after))
    for node in _code(tree):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            every.append(Mutant(name, node.lineno, node.col_offset, node.col_offset + len("not "), "not ", ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float) and type(node.value) is not bool:
            before = ast.get_source_segment(source, node) or ""
            after = repr(node.value + 1 if isinstance(node.value, int) else node.value * 1.5 + 0.1)
            every.append(Mutant(name, node.lineno, node.col_offset, node.end_col_offset or 0, before, after))
    ascii_lines = (mutant for mutant in every if lines[mutant.line - 1].isascii())  # offsets count bytes
    return sorted(ascii_lines, key=lambda mutant: (mutant.line, mutant.start))


def _operators(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, type[ast.AST]]]:
    for node in _code(tree):
        if isinstance(node, ast.Compare):
            terms = pairwise([node.left, *node.comparators])
            yield from ((*pair, type(op)) for pair, op in zip(terms, node.ops, strict=True))
        elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield node.left, node.right, type(node.op)
        elif isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
            yield node.target, node.value, type(node.op)
        elif isinstance(node, ast.BoolOp):
            yield from ((*pair, type(node.op)) for pair in pairwise(node.values))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that decide what is computed: no annotations, messages, or formats of them."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Raise | ast.JoinedStr):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from _code(node)


@cache
def _imports(path: Path) -> frozenset[Path]:
    """The modules of the project that a module imports."""
    names, source = set(), path.read_text(encoding="utf-8")
    if "iter_modules" in source:  # a registry imports the modules beside it
        names |= {".".join(one.relative_to(ROOT).with_suffix("").parts) for one in path.parent.glob("*.py")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    files = (ROOT.joinpath(*name.split(".")) for name in names)
    return frozenset(one for file in files for one in (file.with_suffix(".py"), file / "__init__.py") if one.exists())


def _steps(test: Path) -> Mapping[Path, int]:
    """Module -> by how many imports a test file reaches it."""
    steps, at = {test: 0}, [test]
    while at:
        reached = dict.fromkeys(other for one in at for other in sorted(_imports(one)))
        step = steps[at[0]] + 1
        at = [one for one in reached if one not in steps]
        steps |= dict.fromkeys(at, step)
    return steps


def nearest_tests(path: str, most: int, steps: Mapping[Path, Mapping[Path, int]]) -> list[str]:
    """The test files that reach a module by imports: those that write most of its names, then by the fewest imports."""
    reaching = {test: reached[ROOT / path] for test, reached in steps.items() if ROOT / path in reached}
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    written = {test: _words(test) & (names | {Path(path).stem}) for test in reaching}
    order = sorted(reaching, key=lambda test: (-len(written[test]), reaching[test], len(steps[test]), str(test)))
    first = [test for test in order if test.parent.name in FIRST]
    last = [test for kind in LAST for test in [one for one in order if one.parent.name == kind][: most // 4]]
    return [str(test.relative_to(ROOT)) for test in first[:most] + last]


@cache
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))


class _Lines:
    """A plugin of pytest that records the lines which each test executes, and its seconds."""

    def __init__(self) -> None:
        from coverage import Coverage  # not needed to try mutants

        self.seconds: dict[str, float] = {}
        self.coverage = Coverage(data_file=None, source=["pipeline"], messages=False)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        begun = time.monotonic()
        outcome = yield
        self.seconds[item.nodeid] = time.monotonic() - begun
        return outcome

    def write(self, path: Path) -> None:
        """Write {"seconds": {test: seconds}, "lines": {module: {line: [tests]}}}."""
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(ROOT))] = {line: [*filter(None, some)] for line, some in by_line.items()}
        path.write_text(json.dumps({"seconds": self.seconds, "lines": lines}), encoding="utf-8")


def trace(test: Path, folder: Path) -> None:
    """Record which tests of a file execute which lines, in a fork; a file that was recorded before is not run again."""
    path = folder / f"{test.parent.name}-{test.stem}.json"

    def record() -> None:
        lines = _Lines()
        pytest.main(["-q", "-m", "not slow", "-p", "no:cacheprovider", str(test)], plugins=[lines])
        lines.write(path)

    if not path.exists():
        process = multiprocessing.get_context("fork").Process(target=record)
        process.start()
        process.join()


def tests_by_line(folder: Path) -> dict[tuple[str, int], list[str]]:
    """(module, line) -> the tests that execute it, the quickest first."""
    tests: dict[tuple[str, int], set[str]] = {}
    seconds: dict[str, float] = {}
    for path in sorted(folder.glob("*.json")):
        recorded = json.loads(path.read_text(encoding="utf-8"))
        seconds |= recorded["seconds"]
        for module, lines in recorded["lines"].items():
            for line, some in lines.items():
                tests.setdefault((module, int(line)), set()).update(some)
    return {place: sorted(some, key=lambda test: (seconds[test], test)) for place, some in tests.items()}


def first_failure(copy: Path, tests: Sequence[str], options: Sequence[str], marks: str = "not slow") -> str | None:
    """The first test that fails in a copy of the sources, in forks of this process; None where none does."""
    output, end = copy.parent / "output", time.monotonic() + LIMIT
    for _, some in groupby(tests, key=lambda test: test.split("/")[:2]):  # two folders may have files of one name
        arguments = (copy, output, ["-m", marks, *options, *some])
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=arguments)
        process.start()
        process.join(end - time.monotonic())
        if process.pid is not None and process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None
        if process.exitcode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            failed = [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
            return [*failed, f"pytest ended with {process.exitcode}"][0]
    return None


def _pytest(copy: Path, output: Path, arguments: Sequence[str]) -> None:
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy), *(one for one in sys.path if Path(one).resolve() != ROOT)]
    os.environ["PYTHONPATH"] = str(copy)
    sys.modules.pop("benchmarks", None)
    importlib.invalidate_caches()
    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        fixed = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT:.0f}"]
        code = int(pytest.main([*fixed, *arguments]))
        sys.stdout.flush()
        os._exit(code)


def tried(mutant: Mutant, copy: Path, tests: Sequence[str], executing: Sequence[str], unfit: list[str]) -> Outcome:
    """Run tests on a copy of the sources with one mutant, until the first fails that passes without it."""
    path = copy / mutant.path
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    line = lines[mutant.line - 1]
    lines[mutant.line - 1] = line[: mutant.start] + mutant.after + line[mutant.end :]
    while True:
        path.write_text("".join(lines), encoding="utf-8")
        options = [f"--deselect={test}" for test in unfit]
        failed = first_failure(copy, sorted(executing[:MOST_TESTS]), options) or first_failure(copy, tests, options)
        failed = failed or first_failure(copy, tests[:SLOW_FILES], options, "slow")
        path.write_text(source, encoding="utf-8")
        if failed is None or failed in unfit or not failed.startswith("tests/"):
            return Outcome(mutant, failed is not None, failed or "")
        if first_failure(copy, [failed], [], "slow or not slow") is None:
            return Outcome(mutant, True, failed)
        unfit.append(failed)


def drawn(count: int, seed: int) -> tuple[list[Mutant], list[Mutant]]:
    """So many mutants, one package after the other, and the equivalent ones that others replace."""
    rng = random.Random(seed)
    chosen: list[list[Mutant]] = []
    equivalent: list[Mutant] = []
    for package in PACKAGES:
        every = [one for path in sorted((ROOT / "pipeline" / package).rglob("*.py")) for one in mutants_of(path)]
        rng.shuffle(every)
        taken: list[Mutant] = []
        for mutant in every:
            if len(taken) < -(-count // len(PACKAGES)):
                (equivalent if mutant.equivalent else taken).append(mutant)
        chosen.append(taken)
    return [one for row in zip(*chosen, strict=True) for one in row][:count], equivalent


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--files", type=int, default=8, help="test files that try a mutant, and a quarter of each of the last kinds"
    )
    parser.add_argument("--trace", type=Path, help="folder in which to record which test executes which line")
    parser.add_argument("--lines", type=Path, help="folder that --trace wrote, of these sources")
    parser.add_argument("--log", type=Path, help="file of finished mutants, one JSON object a line")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    if arguments.log is not None and arguments.log.exists():
        kept = map(json.loads, arguments.log.read_text(encoding="utf-8").splitlines())
        outcomes = [Outcome(Mutant(**one["mutant"]), one["caught"], one["by"]) for one in kept]
    known = {outcome.mutant: outcome for outcome in outcomes}
    tests = [path for kind in (*FIRST, *LAST) for path in sorted((ROOT / "tests" / kind).glob("test_*.py"))]
    steps = {test: _steps(test) for test in tests}
    for library in LIBRARIES:
        importlib.import_module(library)
    if arguments.trace is not None:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        for test in tests:
            if test.parent.name in FIRST:
                trace(test, arguments.trace)
        return
    by_line = {} if arguments.lines is None else tests_by_line(arguments.lines)
    mutants, equivalent = drawn(arguments.mutants, arguments.seed)
    results: list[Outcome] = []
    unfit: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "main"
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        copy.mkdir()
        subprocess.run(["tar", "x"], cwd=copy, input=archive, check=True)
        for mutant in mutants:
            nearest = nearest_tests(mutant.path, arguments.files, steps)
            executing = by_line.get((mutant.path, mutant.line), [])
            outcome = known.get(mutant) or tried(mutant, copy, nearest, executing, unfit)
            results.append(outcome)
            if mutant not in known and arguments.log is not None:
                with arguments.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(asdict(outcome)) + "\n")
            place = f"{mutant.path}:{mutant.line} {mutant.before} -> {mutant.after}"
            print(f"{place}: {outcome.by if outcome.caught else 'survived'}", file=sys.stderr, flush=True)
    survivors = [asdict(outcome.mutant) for outcome in results if not outcome.caught]
    reasons = [{**asdict(mutant), "reason": mutant.equivalent} for mutant in equivalent]
    totals = {"mutants": len(results), "caught": len(results) - len(survivors)}
    print(json.dumps({**totals, "survivors": survivors, "equivalent": reasons}))


if __name__ == "__main__":
    main()
