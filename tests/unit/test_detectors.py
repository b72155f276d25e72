"""Detectors are the formulas of their papers, and a config's mistakes are named."""

import math
import zlib

import pytest
import torch

from pipeline.detectors.base import FORWARD, GRADIENT, LOWERCASE, REFERENCE, Evidence, Pass, is_detector, plan_passes
from pipeline.detectors.registry import parse_detectors
from pipeline.errors import UserError
from pipeline.passes.forward import RENYI_ORDERS, TokenStatistics
from pipeline.passes.statistics import MODIFIED_ORDERS
from tests.helpers.commands import user_error

COUNTS = (12, 1, 7)
TEXTS = [" ".join(f"{i * i % 127:b}" for i in range(100)), "é", "the third"]  # the first is longer at level 7


def statistics(seed: int) -> TokenStatistics:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(COUNTS), max(COUNTS))

    def draw() -> torch.Tensor:
        return torch.rand(shape, generator=generator) * 9 + 0.1

    mask = torch.arange(shape[1]) < torch.tensor(COUNTS)[:, None]
    renyi, modified = ({order: draw() for order in orders} for orders in (RENYI_ORDERS, MODIFIED_ORDERS))
    return TokenStatistics(-draw(), mask, -draw(), draw(), draw(), renyi, modified)


@pytest.fixture
def evidence() -> Evidence:
    return Evidence(TEXTS, {p: statistics(seed) for seed, p in enumerate((FORWARD, LOWERCASE, REFERENCE))})


def rows(values: torch.Tensor) -> list[list[float]]:
    return [row[:count] for row, count in zip(values.double().tolist(), COUNTS, strict=True)]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def lowest(values: list[float], k: float) -> float:
    return mean(sorted(values)[: max(1, int(k * len(values)))])


def score(entry, evidence: Evidence) -> list[float]:
    (detector,) = parse_detectors([entry])
    found = detector.score(evidence)
    assert found.dtype == torch.float64
    return found.tolist()


def test_likelihood_detectors_are_their_formulas(evidence):
    own, lower, other = (rows(evidence[p].log_prob) for p in (FORWARD, LOWERCASE, REFERENCE))
    sizes = [len(zlib.compress(text.encode(), 6)) for text in TEXTS]
    expected = {
        "loss": [mean(row) for row in own],
        "perplexity": [-math.exp(-mean(row)) for row in own],
        "zlib": [mean(row) / size for row, size in zip(own, sizes, strict=True)],
        "lowercase": [mean(b) / mean(a) for a, b in zip(own, lower, strict=True)],
        "reference": [mean(a) - mean(b) for a, b in zip(own, other, strict=True)],
        "min_k": [lowest(row, 0.2) for row in own],
        "m_entropy": [-mean(row) for row in rows(evidence[FORWARD].m_entropy)],
        "mod_renyi": [-mean(row) for row in rows(evidence[FORWARD].mod_renyi["0.5"])],
        "renyi": [lowest([-value for value in row], 0.2) for row in rows(evidence[FORWARD].renyi["1"])],
    }
    for name, values in expected.items():
        assert score(name, evidence) == pytest.approx(values, rel=1e-12), name


def test_the_deviation_of_perplexity_orders_otherwise_than_that_of_the_loss(evidence):
    """FSD, eqs. 2 and 5: a fall of the perplexity from 9 to 8 is larger than one from 4 to 3.2, one of the loss not."""
    passes = {}
    for name, losses in (("", (9, 4)), ("default", (8, 3.2))):
        log_prob = -torch.tensor(losses).log()[:, None]
        passes[Pass("forward", adapter=name)] = TokenStatistics(log_prob, torch.ones(2, 1, dtype=torch.bool))
    falls = {base: score({"fsd": {"base": base}}, Evidence(["a", "b"], passes)) for base in ("loss", "perplexity")}
    assert falls["perplexity"] == pytest.approx([-1, -0.8], rel=1e-6)
    assert falls["loss"] == pytest.approx([-math.log(9 / 8), -math.log(4 / 3.2)], rel=1e-6)
    assert falls["perplexity"][0] < falls["perplexity"][1]
    assert falls["loss"][0] > falls["loss"][1]


def test_the_perplexity_of_any_loss_is_finite_or_named_as_not():
    """A loss above 709 has no perplexity in float64: the score is infinite, which quarantines the document."""
    log_prob = -torch.tensor([0.0, 709.0, 710.0, math.nan])[:, None]
    t = TokenStatistics(log_prob, torch.ones(4, 1, dtype=torch.bool))
    found = score("perplexity", Evidence(["a"] * 4, {FORWARD: t}))
    assert found[:2] == pytest.approx([-1, -math.exp(709)])
    assert not any(map(math.isfinite, found[2:]))


@pytest.mark.parametrize("of", ["mean", "sum"])
def test_the_gradient_of_the_sum_is_that_of_the_mean_times_the_predicted_tokens(of):
    norms, counts = torch.tensor([0.5, 2.0]).double(), torch.tensor([7, 1])
    evidence = Evidence(["a", "b"], {}, {GRADIENT: norms}, predicted={GRADIENT: counts})
    assert score({"gradient_norm": {"of": of}}, evidence) == ([-3.5, -2.0] if of == "sum" else [-0.5, -2.0])


@pytest.mark.parametrize("k", [0.05, 0.3, 1.0])
def test_shares_take_at_least_one_token_and_round_down(evidence, k):
    t = evidence[FORWARD]
    assert score({"min_k": {"k": k}}, evidence) == pytest.approx([lowest(row, k) for row in rows(t.log_prob)])
    for order in RENYI_ORDERS:
        expected = [lowest([-value for value in row], k) for row in rows(t.renyi[order])]
        assert score({"renyi": {"order": order, "k": k}}, evidence) == pytest.approx(expected)
    z = (t.log_prob - t.mean) / t.variance.sqrt()
    expected = [lowest(row, k) for row in rows(z)]
    assert score({"min_k_plus_plus": {"k": k}}, evidence) == pytest.approx(expected, rel=1e-5)


def test_limits_of_shares_and_orders_are_special_cases_and_variance_0_is_clamped(evidence):
    expected = [-max(row) for row in rows(evidence[FORWARD].renyi["2"])]
    assert score({"renyi": {"order": 2, "k": 0}}, evidence) == pytest.approx(expected)
    assert score({"mod_renyi": {"order": 1}}, evidence) == score("m_entropy", evidence)
    expected = [-mean(row) for row in rows(evidence[FORWARD].mod_renyi["2"])]
    assert score({"mod_renyi": {"order": "2"}}, evidence) == pytest.approx(expected)
    zero = torch.zeros(1, 1)
    t = TokenStatistics(zero - 1e-6, torch.ones(1, 1, dtype=torch.bool), zero, zero)
    assert score("min_k_plus_plus", Evidence([""], {FORWARD: t})) == pytest.approx([-1.0])


@pytest.mark.parametrize("window", [1, 2, 3, 6, 7, 12, 13])
def test_gaps_to_the_likeliest_token_are_averaged_over_neighbours(evidence, window):
    t = evidence[FORWARD]
    expected = []
    for row in rows((t.log_prob + t.renyi["inf"]) / t.variance.sqrt()):
        moving = [mean(row[at : at + window]) for at in range(len(row) - window + 1)]
        expected.append(lowest(moving or row, 0.3))
    assert score({"gap_k": {"k": 0.3, "window": window}}, evidence) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", ["loss", "perplexity", "zlib", "lowercase", "reference", "min_k", "min_k_plus_plus", "gap_k", "renyi"]
)
def test_nan_gives_nan_in_its_document_alone(evidence, name):
    broken = {}
    for needed in (FORWARD, LOWERCASE, REFERENCE):
        t = evidence[needed]
        for values in (t.log_prob, t.mean, *t.renyi.values()):
            values[0, 3] = math.nan
        broken[needed] = t
    found = score(name, Evidence(TEXTS, broken))
    assert [math.isnan(value) for value in found] == [True, False, False]


def test_columns_and_passes_have_the_names_and_statistics_that_are_read():
    entries = ["min_k", {"min_k": {"k": [0.1, 0.2]}}, {"renyi": {"k": 0.1, "order": [2, "inf"]}}]
    columns = [detector.column for detector in parse_detectors(entries)]
    assert columns == ["min_k", "min_k(k=0.1)", "min_k(k=0.2)", "renyi(order=2, k=0.1)", "renyi(order=inf, k=0.1)"]
    for value in ("inf", ".inf", "INF", math.inf):
        (detector,) = parse_detectors([{"renyi": {"order": value}}])
        assert (detector.column, detector.needs) == ("renyi(order=inf)", {FORWARD: frozenset({"renyi_inf"})})
    names = ["loss", "zlib", "lowercase", "reference", "min_k", "min_k_plus_plus", "m_entropy", "renyi"]
    assert plan_passes(parse_detectors(names)) == {
        FORWARD: frozenset({"log_prob", "mean", "variance", "m_entropy", "renyi_1"}),
        LOWERCASE: frozenset({"log_prob"}),
        REFERENCE: frozenset({"log_prob"}),
    }
    both = plan_passes(parse_detectors(["etd", "min_k_plus_plus"]))
    assert both == {FORWARD: frozenset({"log_prob", "mean", "variance", "token"})}
    assert "token" not in plan_passes(parse_detectors(["min_k_plus_plus", "gap_k"]))[FORWARD]
    assert [is_detector(name) for name in ("min_k", "min_kk")] == [True, False]
    (detector,) = parse_detectors([{"renyi": {"part": "image", "caption": "given", "order": 2}}])
    assert detector.column == "renyi(order=2, part=image, caption=given)"
    assert detector.needs == {Pass("forward", part="image", caption="given"): frozenset({"renyi_2"})}
    for name in ("loss", "min_k", "min_k_plus_plus", "gap_k"):
        assert "part" in user_error(parse_detectors, [{name: {"part": "image"}}])
        (detector,) = parse_detectors([{name: {"part": "description"}}])
        assert [(needed.part, needed.caption) for needed in detector.needs] == [("description", "generated")]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["min_kk"], "unknown detector 'min_kk'; did you mean 'min_k'"),
        ([{"min_k": {"kk": 0.1}}], "detector min_k has no argument 'kk'; did you mean 'k'"),
        ([{"zlib": {"k": 0.1}}], "detector zlib has no argument 'k'; it takes none"),
        ([{"min_k": {"k": 0}}], r"min_k: k must be a number in \(0, 1\], got 0"),
        ([{"min_k": {"k": [0.1, 1.5]}}], "got 1.5"),
        ([{"min_k": {"k": "a"}}], "got 'a'"),
        ([{"min_k": {"k": math.nan}}], "got nan"),
        ([{"min_k": {"k": True}}], "got True"),
        ([{"min_k": {"k": []}}], "k is an empty list"),
        ([{"renyi": {"order": 3}}], "order must be one of 0.5, 1, 2, inf, got 3"),
        ([{"renyi": {"order": None}}], "got None"),
        ([{"renyi": {"k": 1.5}}], "k must be .* got 1.5"),
        (["loss", "loss"], "the column loss appears twice"),
        ([{"min_k": {"k": [0.1, 0.1]}}], r"the column min_k\(k=0.1\) appears twice"),
        ([{"min_k": {"k": 0.1}, "loss": {}}], "one name an entry, got 2: min_k, loss"),
        ([{"min_k": {"window": 0}}], "window .*1.* got 0"),
        ([{"min_k_plus_plus": {"window": 2.5}}], "window .* got 2.5"),
        ([{"camia": {"signal": "median"}}], "signal .* got 'median'"),
        ([{"etd": {"beta": -1}}], "beta .*0.* got -1"),
        ([{"min_k": 0.1}], r"min_k takes {argument: value}, got 0.1; did you mean {min_k: {k: 0.1}}\?"),
        ([{"knockoff": {"base": {"min_k": {"k": [0.1, 0.2]}}}}], "base must be one detector of the documents"),
        ([{"knockoff": {"base": "samia"}}], "base must be one detector of the documents"),
    ],
)
def test_a_mistake_in_the_config_is_named(entries, message):
    with pytest.raises(UserError, match=message):
        parse_detectors(entries)
