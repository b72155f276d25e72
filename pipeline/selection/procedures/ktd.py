"""The knockoff filter: selection by the sign and size of one statistic of a document and its paraphrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np

from pipeline.detectors.knockoff import simultaneous_draws, spread_column
from pipeline.errors import UserError
from pipeline.selection import knockoff
from pipeline.selection.folds import Answer, Basis, Fold, Judge, Query, RoleScores, SelectionInput, search_values
from pipeline.selection.guarantees import ON_AVERAGE, SHARE, Guarantee, StrictAnswer
from pipeline.selection.procedures.record import ONLY_POOLED, Procedure
from pipeline.selection.ranked import ranked
from pipeline.selection.thresholds import Threshold


def _answer(question: SelectionInput) -> Query[Answer]:
    """Select by the knockoff filter; if documents calibrate, p-values are those of bh on the same statistic."""
    selection, known, quarantined = question.selection, question.known, question.quarantined
    q, draws = question.level.alpha, simultaneous_draws(selection.detectors[0]) or 1
    m = quarantined + ((yield Fold(lambda batch: len(batch.matrix))) or 0)
    if m == 0:
        raise UserError("no audit documents")
    scale = None
    if len(selection.detectors) > 1:
        scale = yield from search_values(knockoff.find_scale(draws), lambda batch: batch.matrix[:, 1])
    cut = yield from search_values(knockoff.find_threshold(q * draws), partial(_scaled_w, scale))
    conformal = None
    if len(known.matrix):
        as_bh = selection.model_copy(update={"procedure": "bh", "detectors": selection.detectors[:1]})
        conformal = yield from ranked(replace(question, selection=as_bh))
    stated = filter_guarantee(draws)
    least, sentence = knockoff.fewest(q, m, draws)
    return Answer(
        judge=partial(_judge_knockoff, cut, scale, conformal.judge if conformal is not None else None),
        n_calibration=len(known.matrix),
        m=m,
        guarantee=stated.guarantee,
        assumption=stated.assumption,
        promise=stated.promise,
        details=_details(cut, scale),
        resolution=lambda _: (least, len(known.matrix)),
        strict=conformal.strict if conformal is not None else StrictAnswer("bh", 0, None, "finite-sample"),
        symmetry=knockoff.sign_symmetry(_scaled_w(scale, known), draws),
        basis=Basis(sentence=sentence),
        dependence=question.dependence,
    )


def _scaled_w(scale: knockoff.Scale | None, batch: RoleScores) -> np.ndarray:
    """W of documents, scaled if the second detector gives a scale."""
    return batch.first if scale is None else batch.first / scale.of(batch.matrix[:, 1])


def _details(cut: Threshold, scale: knockoff.Scale | None) -> dict[str, float]:
    if scale is None:
        return {} if cut.value is None else {"smallest_w_selected": cut.value}
    return {"scale_kept": scale.share, **({} if cut.value is None else {"smallest_scaled_w_selected": cut.value})}


def _judge_knockoff(
    cut: Threshold, scale: knockoff.Scale | None, conformal: Judge | None, batch: RoleScores
) -> tuple[np.ndarray, np.ndarray]:
    p = conformal(batch)[0] if conformal is not None else np.ones(len(batch.matrix))
    return p, knockoff.is_selected(_scaled_w(scale, batch), cut)


def filter_guarantee(draws: int) -> Guarantee:
    """The guarantee of the knockoff filter; `draws`: number of paraphrases that compete with each text."""
    stated = KTD.terms
    if draws == 1:
        return stated
    assumption = (
        f"Every audited document that was never trained on scores higher than all {draws} of its paraphrases with a "
        f"probability of at most 1/{draws + 1}, whatever the size of W, as it would if it were exchangeable with them; "
        "real paraphrases are not quite. A test in this report checks that on the known documents."
    )
    return replace(stated, assumption=assumption, promise=f"{SHARE} is at most alpha only if that holds. {ON_AVERAGE}")


def _fewest(detectors: Sequence[str], alpha: Fraction, m: int) -> tuple[int, str]:
    return knockoff.fewest(alpha, m, simultaneous_draws(detectors[0]) or 1)


KTD = Procedure(
    "ktd",
    Guarantee(
        "heuristic",
        "For every audited document that was never trained on, the statistic W is as likely to be positive as "
        "negative, whatever its size; the sign test in this report checks that on the known documents.",
        f"{SHARE} is at most alpha only if that symmetry holds. {ON_AVERAGE}",
    ),
    answer=_answer,
    fewest=_fewest,
    refuses=ONLY_POOLED,
    companion=spread_column,
)
