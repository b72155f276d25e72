"""Every public function and class of `seenset` has an example in its docstring, and the examples run."""

import doctest
import inspect
import shutil
from pathlib import Path
from statistics import NormalDist

import pytest
import yaml

import seenset
from tests.helpers.commands import ended
from tests.helpers.made_up import sentence, write_jsonl, write_rows
from tests.helpers.marked_runs import write_texts

PUBLIC = [
    name for name in seenset.__all__ if inspect.isroutine(thing := getattr(seenset, name)) or inspect.isclass(thing)
]
WRITTEN = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
QUANTILES = NormalDist().inv_cdf


@pytest.fixture(scope="module")
def example_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the examples: a model, documents, configurations and a finished run."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(tiny_model_folder, folder / "my-model")
    write_texts(folder / "essays.jsonl", 20)
    options = ("--versions", "10", "--seed", "0", "--id", "id")
    assert ended("mark", folder / "essays.jsonl", "--out", folder / "marked", *options) == 0
    scores = {
        "unseen": [QUANTILES((place + 0.5) / 200) for place in range(200)],
        "audited": [5.0 + place / 20 for place in range(20)] + [QUANTILES((place + 0.25) / 80) for place in range(80)],
    }
    for name, values in scores.items():
        rows = ({"id": f"{name}-{place}", "loss": value} for place, value in enumerate(values))
        write_rows(folder / f"{name}.jsonl", rows)
    write_jsonl(folder / "notes.jsonl", [sentence(number) for number in range(40)])
    selection = {"name": "members", "detectors": ["loss"], "procedure": "storey", "alpha": 0.1}
    sources = {"audit": "audited.jsonl", "unseen": "unseen.jsonl"}
    settings = {
        "audit": {
            "run": "runs/my-audit",
            "model": {"name": "my-model"},
            "corpus": {role: {"path": path, "id": "id", "scores": ["loss"]} for role, path in sources.items()},
            "selections": [selection],
            "resources": {"cluster": "local"},
        },
        "trial": {
            "run": "runs/my-trial",
            "model": {"path": "./my-model"},
            "documents": {"path": "notes.jsonl", "id": "id"},
            "contaminate": {"share": 0.5, "epochs": 1},
            "repeats": 3,
            "detectors": ["loss"],
            "selections": [selection],
            "resources": {"cluster": "local"},
        },
    }
    for name, config in settings.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    seenset.audit(folder / "audit.yaml", quiet=True)
    return folder


@pytest.mark.floating_point
@pytest.mark.usefixtures("forgotten_plugins")
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_that_runs(
    name: str, example_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example_folder)
    found = doctest.DocTestFinder().find(getattr(seenset, name), name, globs={"seenset": seenset, "__name__": __name__})
    assert [one.name for one in found if one.examples][:1] == [name], "its own docstring needs an example"
    printed: list[str] = []
    for one in found:
        doctest.DocTestRunner(optionflags=WRITTEN).run(one, out=printed.append)
    assert not printed, "".join(printed)
