"""Detectors and procedures from outside are checked when they are registered, and what is wrong is one line."""

import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config.audit import AuditConfig
from pipeline.config.yaml import config_schema
from pipeline.detectors.base import FORWARD, GRADIENT, Continued, Evidence, Pass, detector
from pipeline.detectors.plugins import imported, load_plugins, read_plugins
from pipeline.detectors.registry import parse_detectors, plugin_code
from pipeline.errors import UserError
from pipeline.passes.forward import TokenStatistics
from pipeline.plan.description import build_config
from pipeline.selection.conformal import RankCounts
from pipeline.selection.procedures import PROCEDURES
from pipeline.selection.procedures.record import decide
from pipeline.trial.config import build_trial, trial_audit
from tests.helpers.commands import user_error

pytestmark = pytest.mark.usefixtures("forgotten_plugins")

GOOD = """
from pipeline.detectors.base import FORWARD, detector

@detector(needs={FORWARD: ["log_prob"]})
def lowest(evidence, share: float = 0.5):
    return evidence[FORWARD].log_prob.amin(1) * share
"""
PROCEDURE = """
from pipeline.selection.procedures import decision, procedure
from pipeline.selection.step_up import step_up

@procedure(guarantee="finite-sample", assumption="As BH.", promise="As BH.")
def half(counts, alpha):
    return decision("half", counts, alpha, step_up(counts, alpha / 2))
"""


def write(folder: Path, text: str, name: str = "my_detectors.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def load(*paths: str) -> None:
    load_plugins(read_plugins(paths))


def plugin_fingerprint(paths: list[str], names: list[Any]) -> dict[str, str]:
    code = plugin_code(paths, parse_detectors(names))
    return code.fingerprint() if code is not None else {}


def audit(*paths: str, **changes: Any) -> dict[str, Any]:
    return {
        "run": "runs/x",
        "model": {"path": "m"},
        "corpus": {"audit": {"path": "a.jsonl"}, "unseen": {"path": "u.jsonl"}},
        "detectors": ["loss"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "bh", "alpha": 0.1}],
        "import": list(paths),
        **changes,
    }


@pytest.mark.parametrize("names", [["log_prob"], ("log_prob",), {"log_prob"}, "log_prob"])
def test_names_of_statistics_may_be_written_in_any_way(names: Any) -> None:
    @detector(needs={FORWARD: names})
    def spelled(evidence: Evidence) -> Tensor:
        return evidence[FORWARD].log_prob.sum(1)

    (parsed,) = parse_detectors(["spelled"])
    assert parsed.needs == {FORWARD: frozenset({"log_prob"})}


def test_an_argument_is_checked_by_its_annotation_and_default() -> None:
    @detector(needs={FORWARD: ["log_prob"]})
    def plain(
        evidence: Evidence,
        k: float = 0.2,
        n: int = 1,
        name: str = "a",
        flag: bool = False,
        kind: Literal["x", "y"] = "x",
        limit: int | None = None,
        share: Annotated[float, Field(gt=0, le=1)] = 1,
        bare=3,
    ) -> Tensor:
        return evidence[FORWARD].log_prob.sum(1)

    (parsed,) = parse_detectors([{"plain": {"k": 1, "limit": 4, "kind": "y"}}])
    assert parsed.column == "plain(k=1.0, kind=y, limit=4)"
    assert parsed.arguments["share"] == 1.0
    for argument, value, limit in [
        ("k", "0.1", "must be a finite number, got '0.1'"),
        ("k", True, "must be a finite number, got True"),
        ("k", math.inf, "must be a finite number, got inf"),
        ("n", True, "must be a whole number, got True"),
        ("n", 1.5, "must be a whole number, got 1.5"),
        ("name", 3, "must be text, got 3"),
        ("flag", 1, "must be true or false, got 1"),
        ("kind", "z", "must be one of x, y, got 'z'"),
        ("limit", "a", "must be a whole number or null, got 'a'"),
        ("share", 2, "must be a number in (0, 1], got 2"),
        ("bare", "b", "must be a whole number, got 'b'"),
    ]:
        assert user_error(parse_detectors, [{"plain": {argument: value}}]) == f"detector plain: {argument} {limit}"


class Thing:
    """Nothing that a configuration could hold."""


def test_a_mistake_of_a_detectors_author_is_named_when_it_is_registered_or_scores() -> None:
    def no_default(evidence, k): ...
    def any_number(evidence, *ks): ...
    def bad_default(evidence, k: int = 0.5): ...  # type: ignore[assignment]
    def unchecked(evidence, thing: Thing = Thing()): ...  # noqa: B008
    def plain_sum(evidence): ...
    def group(evidence): ...

    log_prob = {FORWARD: ["log_prob"]}
    mistakes: list[tuple[Any, Any, str]] = [
        (group, {FORWARD: ["log_probs"]}, "score files have a column"),
        (no_default, log_prob, "argument k has no default"),
        (any_number, log_prob, "cannot name the arguments of *ks"),
        (bad_default, log_prob, "the default of k must be a whole number, got 0.5"),
        (unchecked, log_prob, "argument thing of type Thing needs a check"),
        (plain_sum, {FORWARD: ["log_probs"]}, "did you mean 'log_prob'"),
        (plain_sum, {GRADIENT: ["log_prob"]}, "a gradient pass measures no 'log_prob'; it measures: norm"),
        (plain_sum, {FORWARD: []}, "leave the pass out"),
        (plain_sum, {Pass("generate"): "1"}, "must be a number of draws, got '1'"),
        (plain_sum, {Pass("generate", continued=Continued()): ["0"]}, "must be a number of draws, got '0'"),
        (plain_sum, {FORWARD: 3}, "must be names of statistics, got 3"),
        (plain_sum, {FORWARD}, "needs must be {pass: names of statistics}"),
        (plain_sum, {"forward": ["log_prob"]}, "needs must be {pass: names of statistics}"),
        (lambda: 0, log_prob, "must take the evidence"),
        (lambda evidence: evidence, log_prob, "named by its function, which cannot be <lambda>"),
    ]
    for function, needs, message in mistakes:
        assert message in user_error(lambda of=function, wanted=needs: detector(needs=wanted)(of))

    @detector(needs={FORWARD: "log_prob"})
    def per_token(evidence: Evidence) -> Tensor:
        return evidence[FORWARD].log_prob

    statistics = TokenStatistics(torch.zeros(2, 5), torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"per_token must return \(2,\), one score a document, got \(2, 5\)"):
        parse_detectors(["per_token"])[0].score(Evidence(["a", "b"], {FORWARD: statistics}))


def test_a_file_of_the_users_is_loaded_by_its_content(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    load(path)
    (before,) = parse_detectors(["lowest"])
    load(path)
    assert parse_detectors(["lowest"])[0].function is before.function  # the same content is loaded once
    write(tmp_path, GOOD.replace("lowest", "least"))
    load(path)
    assert parse_detectors(["least"])
    assert "unknown detector 'lowest'" in user_error(parse_detectors, ["lowest"])
    assert str(tmp_path) not in sys.path
    user_error(load, write(tmp_path, GOOD + "\n1 / 0\n"))
    with pytest.raises(UserError, match="unknown detector 'lowest'"):  # what a broken plugin had registered
        parse_detectors(["lowest"])


def test_an_import_that_is_no_plugin_or_takes_a_used_name_is_one_line(tmp_path: Path) -> None:
    for text, message in (
        ("x = = 1", "my_detectors.py, line 1: cannot be imported: SyntaxError: invalid syntax"),
        (
            "\nimport none_such",
            "my_detectors.py, line 2: cannot be imported: ModuleNotFoundError: No module named 'none",
        ),
        ("import sys\nsys.exit(3)", "my_detectors.py, line 2: cannot be imported: SystemExit: 3"),
        ("x = 1", "my_detectors.py registers nothing; mark a function with @seenset.detector"),
        (GOOD.replace("lowest", "loss"), "line 4: detector loss: the name is built in; rename the function"),
        (GOOD.replace('"log_prob"', '"logprob"'), "line 4: detector lowest: a forward pass measures no 'logprob'; did"),
        (PROCEDURE.replace("half", "bh"), "procedure bh: the name is built in; rename the function"),
        (PROCEDURE.replace("half", "ktd"), "procedure ktd: the name is built in"),
        (PROCEDURE.replace("finite-sample", "finite"), "did you mean 'finite-sample'"),
        (PROCEDURE.replace('promise="As BH."', 'promise=""'), "one that says what it guarantees"),
    ):
        path = write(tmp_path, text)
        error = user_error(load, path)
        assert error.startswith(f"import: {path}")
        assert message in error
    neither = "import: no-such module is neither a file that ends in .py nor the name of a module"
    missing = "import: no_such_module: cannot be imported: ModuleNotFoundError: No module named"
    assert "import: cannot read none.py: No such file or directory" in user_error(load, "none.py")
    assert neither in user_error(load, "no-such module")
    assert missing in user_error(load, "no_such_module")
    assert "import: json registers nothing" in user_error(load, "json")
    (tmp_path / "other").mkdir()
    first, second = write(tmp_path, GOOD, "one.py"), write(tmp_path / "other", GOOD, "one.py")
    assert "have one name" in user_error(load, first, second)
    load(first)
    assert "detector lowest: the name is taken by one.py" in user_error(load, write(tmp_path, GOOD, "two.py"))


def test_a_check_or_needs_that_raise_are_one_line_with_the_file(tmp_path: Path) -> None:
    load(write(tmp_path, GOOD.replace('["log_prob"]}', '["log_prob"]}, checks={"share": lambda value: {}[value]}')))
    error = user_error(parse_detectors, [{"lowest": {"share": 0.1}}])
    assert error == "detector lowest (my_detectors.py): the check of share raised KeyError: 0.1, got 0.1"
    load(write(tmp_path, GOOD.replace('{FORWARD: ["log_prob"]}', "lambda share: 1 / 0")))
    error = user_error(parse_detectors, ["lowest"])
    assert "lowest (my_detectors.py): its function of needs raised ZeroDivisionError" in error


def test_the_content_of_a_plugin_is_in_the_fingerprint_and_its_place_is_not(tmp_path: Path) -> None:
    first = write(tmp_path, GOOD)
    load(first)
    before = plugin_fingerprint([first], ["lowest"])
    (tmp_path / "moved").mkdir()
    second = write(tmp_path / "moved", GOOD)
    load(second)
    assert plugin_fingerprint([second], ["lowest"]) == before
    write(tmp_path / "moved", GOOD + "# changed\n")
    load(second)
    after = plugin_fingerprint([second], ["lowest"])
    assert set(before) == set(after) == {"my_detectors.py"}
    assert before != after
    procedures = write(tmp_path, PROCEDURE, "procedures.py")
    assert plugin_fingerprint([procedures], ["loss"]) == plugin_fingerprint([], ["loss"]) == {}, "they change no score"


def test_an_installed_module_counts_by_all_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_detectors"
    package.mkdir()
    write(package, "from their_detectors import likelihood", "__init__.py")
    write(package, GOOD, "likelihood.py")
    helper = Path(write(package, "x = 1\n", "helper.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = build_config(audit("their_detectors", detectors=["loss", "lowest"]))
    before = plugin_fingerprint(config.import_, config.detectors)
    assert set(before) == {"their_detectors"}
    helper.write_text("x = 2\n")
    assert plugin_fingerprint(config.import_, config.detectors) != before
    write(package, "\n1 / 0", "broken.py")
    assert "import: their_detectors.broken (broken.py, line 2): cannot" in user_error(load, "their_detectors.broken")
    for name in ("their_detectors", "their_detectors.likelihood"):
        monkeypatch.delitem(sys.modules, name)


def test_a_configuration_names_detectors_and_procedures_of_a_plugin(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + PROCEDURE)
    config = build_config(
        audit(path, detectors=["lowest"]), ["selections.0.detectors=[lowest]", "selections.0.procedure=half"]
    )
    assert config.import_ == [path]
    assert config.model_dump(mode="json")["import"] == [path]
    assert imported(config.import_)[0].source == GOOD + PROCEDURE
    schema = config_schema(AuditConfig, tuple(PROCEDURES))
    assert "import" in schema["properties"]
    procedure = schema["$defs"]["SelectionConfig"]["properties"]["procedure"]
    assert [sorted(option) for option in procedure["anyOf"]] == [["enum", "type"], ["type"]]
    assert "ptdi" in procedure["anyOf"][0]["enum"]
    selections = [{"name": "members", "detectors": ["lowest"]}]
    described = audit(path, detectors=["lowest"], selections=selections, documents={"path": "texts.jsonl"})
    trial, _ = build_trial({key: value for key, value in described.items() if key != "corpus"})
    files = {"audit": "audit.parquet", "unseen": "unseen.parquet"}
    assert trial_audit(trial, trial.model, files).import_ == [path]
    assert "import" in trial.model_dump()


def test_workers_know_detectors_of_packages_not_of_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @detector(needs={FORWARD: "log_prob"})
    def of_a_notebook(evidence: Evidence) -> Tensor:
        return evidence[FORWARD].log_prob.sum(1)

    with pytest.raises(UserError, match=r"of_a_notebook is defined in .*test_plugins, which workers do not load"):
        build_config(audit(detectors=["loss", "of_a_notebook"]))
    write(tmp_path, GOOD.replace("lowest", "of_a_package"), "their_package.py")
    information = tmp_path / "their_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[seenset.detectors]\ntheirs = their_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = build_config(audit(detectors=["loss", {"knockoff": {"base": "of_a_package"}}], paraphraser={"path": "m"}))
    plugin = plugin_fingerprint(config.import_, config.detectors)
    assert set(plugin) == {"their_package"}
    monkeypatch.delitem(sys.modules, "their_package")


def test_a_procedure_of_a_plugin_decides_and_returns_nothing_but_a_decision(tmp_path: Path) -> None:
    load(
        write(tmp_path, PROCEDURE),
        write(tmp_path, PROCEDURE.replace("half", "none").replace("return decision(", "return ("), "b.py"),
    )
    counts = RankCounts.of(np.arange(1, 11), 99)  # p = 0.01, 0.02, ..., 0.1: BH at 0.1 selects all ten, at 0.05 none
    assert [decide("half", counts, Fraction(level, 10)).n_selected for level in (1, 2)] == [0, 10]
    with pytest.raises(UserError, match=r"procedure none .* must return decision\(\.\.\.\), got"):
        decide("none", counts, Fraction(1, 10))
