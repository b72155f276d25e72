"""A pass over a batch in parts that fit into memory: by its budget and, if memory is still insufficient, in halves.

The composition of a part affects the last bits of a result, so parts depend only on the batch: each batch starts at the
whole size, and sizes that failed before only save attempts that would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
from torch import Tensor

from pipeline.models.devices import out_of_memory
from pipeline.models.opened import LanguageModel
from pipeline.passes.forward import TokenStatistics, forward, joined_statistics, rearranged, to_device
from pipeline.passes.gradient import gradient_norms
from pipeline.passes.shared import (
    HeldPrefixes,
    common_beginning,
    forward_behind,
    forward_of_versions,
    shares_beginnings,
)

if TYPE_CHECKING:  # the benchmarks of passes run with torch and transformers alone
    from pipeline.models.tokens import Cut

Item = TypeVar("Item")
Result = TypeVar("Result")
Size = tuple[int, int]


@dataclass(slots=True)
class PassSizes:
    """Sizes of one kind of pass that succeeded or failed in one worker, as (items, tokens of the longest)."""

    worked: list[Size] = field(default_factory=list)  # the largest
    failed: list[Size] = field(default_factory=list)  # the smallest; larger ones fail too

    def run(
        self,
        work: Callable[[Sequence[Item]], Result],
        items: Sequence[Item],
        lengths: Sequence[int],
        tokens: int | None = None,
    ) -> list[Result]:
        """The results of the parts of a batch, in order.

        Args:
            work: pass to run.
            items: items of the batch.
            lengths: numbers of tokens of the items.
            tokens: maximum padded tokens of a part, with at least one item; None: the batch is one part.

        Raises:
            Exception: raised by the pass; an out-of-memory error only with a single item.
        """
        results = []
        for start, stop in _cuts(lengths, tokens):
            results += self._halved(work, items[start:stop], lengths[start:stop])
        return results

    def _halved(
        self, work: Callable[[Sequence[Item]], Result], items: Sequence[Item], lengths: Sequence[int]
    ) -> list[Result]:
        size = len(items), max(lengths)
        single = len(items) == 1
        if single or not any(_within(failure, size) for failure in self.failed):
            if results := self._attempt(work, items, last=False):
                self._note_success(size)
                return results
            empty_cache()  # it may be fragmented
            if results := self._attempt(work, items, last=single):
                self._note_success(size)
                return results
            empty_cache()
            self._note_failure(size)
        half = len(items) // 2
        return [
            *self._halved(work, items[:half], lengths[:half]),
            *self._halved(work, items[half:], lengths[half:]),
        ]

    def _attempt(self, work: Callable[[Sequence[Item]], Result], items: Sequence[Item], last: bool) -> list[Result]:
        """The result in a list; empty if out of memory and not the last attempt."""
        try:
            return [work(items)]
        except Exception as error:
            if last or not out_of_memory(error):
                raise
        return []

    def _note_success(self, size: Size) -> None:
        if not any(_within(size, other) for other in self.worked):
            self.worked = [*(other for other in self.worked if not _within(other, size)), size]

    def _note_failure(self, size: Size) -> None:
        """Record a failed size, unless it succeeded before: other processes then used the memory temporarily."""
        if not any(_within(size, other) for other in self.worked):
            self.failed = [*(other for other in self.failed if not _within(size, other)), size]


def empty_cache() -> None:
    """Release unused memory that torch holds on GPUs."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def forward_in_parts(
    lm: LanguageModel, ids: Sequence[Sequence[int]], statistics: frozenset[str], parts: PassSizes
) -> TokenStatistics:
    """`forward`, in halves if out of memory.

    Args:
        lm: The model.
        ids: Token ids of each document.
        statistics: As of `forward`.
        parts: Of forward passes of this model.
    """
    return joined_statistics(parts.run(lambda some: forward(lm, some, statistics), ids, [len(one) for one in ids]))


def versions_in_parts(
    lm: LanguageModel, ids: Sequence[Sequence[int]], statistics: frozenset[str], parts: PassSizes
) -> TokenStatistics:
    """`forward_of_versions` if it saves enough and the model supports it, else `forward_in_parts`.

    Args:
        lm: The model.
        ids: Token ids of each version of one document.
        statistics: As of `forward`.
        parts: Of forward passes of this model.
    """

    def work(some: Sequence[Sequence[int]]) -> TokenStatistics:
        common = common_beginning(some)
        return forward_of_versions(lm, some, statistics, common) if common else forward(lm, some, statistics)

    if not common_beginning(ids) or not shares_beginnings(lm):
        return forward_in_parts(lm, ids, statistics, parts)
    return joined_statistics(parts.run(work, ids, [len(one) for one in ids]))


def behind_in_parts(
    lm: LanguageModel,
    prefixes: Sequence[Sequence[int]],
    texts: Sequence[tuple[int, Sequence[int]]],
    tokens: int,
    parts: PassSizes,
    held: HeldPrefixes | None = None,
) -> TokenStatistics:
    """`forward_behind` of a batch in parts of `tokens` padded tokens, and in halves if out of memory.

    Args:
        lm: model.
        prefixes: token ids of each prefix.
        texts: of each text the index of its prefix, and its token ids.
        tokens: maximum tokens of a part, including the prefix.
        parts: sizes of such passes of this model.
        held: prefixes of earlier batches of the same pass.

    Returns:
        `log_prob` of the tokens of each text from its second on.
    """
    measured: list[TokenStatistics] = []
    order: list[int] = []
    for place in sorted({place for place, _ in texts}):
        prefix, rows = prefixes[place], [row for row, (other, _) in enumerate(texts) if other == place]
        some, order = [texts[row][1] for row in rows], [*order, *rows]
        work = partial(forward_behind, lm, prefix, statistics=frozenset({"log_prob"}), held=held)
        measured += parts.run(work, some, [len(prefix) + len(one) for one in some], tokens)
    joined = joined_statistics(measured)
    back = to_device(torch.tensor(order).argsort(), joined.mask.device)
    return TokenStatistics(joined.log_prob.index_select(0, back), joined.mask.index_select(0, back))


Cuts: TypeAlias = "Sequence[Sequence[Cut]]"
"""The windows of each document of a batch; none: the document is one piece."""


def windows_in_parts(
    lm: LanguageModel,
    ids: Sequence[Sequence[int]],
    cuts: Cuts,
    statistics: frozenset[str],
    parts: PassSizes,
    tokens: int,
) -> TokenStatistics:
    """`forward` of the windows of documents in parts of `tokens` padded tokens, and in halves if out of memory.

    Args:
        lm: the model.
        ids: token ids of the windows of each document, one after the other.
        cuts: the windows of each document.
        statistics: as of `forward`.
        parts: sizes of forward passes of this model.
        tokens: maximum tokens of a part.

    Returns:
        The statistics of each document, those of its windows side by side (`side_by_side`).
    """
    if not any(cuts):
        return joined_statistics(parts.run(lambda some: forward(lm, some, statistics), ids, [*map(len, ids)]))
    pieces = [piece for one, windows in zip(ids, cuts, strict=True) for piece in _split(one, windows)]
    work = parts.run(lambda some: forward(lm, some, statistics), pieces, [*map(len, pieces)], tokens)
    return side_by_side(joined_statistics(work), ids, cuts)


def _split(ids: Sequence[int], windows: Sequence[Cut]) -> list[Sequence[int]]:
    """The ids of each window."""
    ends = [0]
    for window in windows:
        ends.append(ends[-1] + window.length)
    return [ids[start:stop] for start, stop in pairwise(ends)] if windows else [ids]


def side_by_side(statistics: TokenStatistics, ids: Sequence[Sequence[int]], cuts: Cuts) -> TokenStatistics:
    """The statistics of documents from those of their windows; a token in two windows has those of the earlier one.

    Between two windows the mask is False at one place, so that what is computed of neighbouring tokens, such as moving
    averages, stays inside a window.

    Args:
        statistics: of all windows, one row each, document by document.
        ids: token ids of the windows of each document.
        cuts: the windows of each document.
    """
    width = statistics.mask.shape[1]
    rows, places = 0, []
    for one, windows in zip(ids, cuts, strict=True):
        joined: list[Tensor] = []
        for length, skipped in [(cut.length, cut.skipped) for cut in windows] or [(len(one), 0)]:
            joined += [torch.arange(rows * width + skipped, rows * width + length - 1), torch.tensor([-1])]
            rows += 1
        places.append(torch.cat(joined[:-1]))
    table = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1)
    table = to_device(table, statistics.mask.device)
    mask, order = table >= 0, table.clamp_min(0)
    return rearranged(statistics, mask, lambda values: values.flatten()[order])


def gradients_in_parts(
    lm: LanguageModel,
    ids: Sequence[Sequence[int]],
    keep: Sequence[Sequence[bool]] | None,
    tokens: int,
    parts: PassSizes,
) -> Tensor:
    """`gradient_norms` in parts of `tokens` padded tokens, and in halves if out of memory.

    Args:
        lm: The model.
        ids: Token ids of each document.
        keep: As of `gradient_norms`.
        tokens: maximum tokens of a part.
        parts: sizes of gradient passes of this model.
    """
    lengths = [len(one) for one in ids]
    if keep is None:
        return torch.cat(parts.run(lambda some: gradient_norms(lm, some), ids, lengths, tokens))

    def work(some: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Tensor:
        return gradient_norms(lm, [one for one, _ in some], [kept for _, kept in some])

    return torch.cat(parts.run(work, list(zip(ids, keep, strict=True)), lengths, tokens))


def _cuts(lengths: Sequence[int], tokens: int | None) -> list[tuple[int, int]]:
    """Bounds of parts: as many items as fit, at least one."""
    cuts, start, longest = [], 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if tokens is not None and place > start and longest * (place - start + 1) > tokens:
            cuts.append((start, place))
            start, longest = place, length
    return [*cuts, (start, len(lengths))] if lengths else []


def _within(small: Size, large: Size) -> bool:
    return small[0] <= large[0] and small[1] <= large[1]
