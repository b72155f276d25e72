"""What `dtype: auto` decides, and that a run keeps it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config.models import ModelConfig
from pipeline.config.training import FinetuneConfig
from pipeline.errors import UserError
from pipeline.models import weight_dtypes
from pipeline.models.load import open_model
from pipeline.models.weight_dtypes import (
    FLAGS_VARIABLE,
    Processor,
    check_explicit,
    choose,
    choose_model,
    choose_training,
    processor_here,
)
from pipeline.plan.description import build_config
from pipeline.run.dtypes import WorkerFacts, decide_types, read_arithmetic, with_types
from pipeline.run.manifest import read_run
from pipeline.store.files import Store
from tests.helpers.commands import ended, user_error

pytestmark = pytest.mark.floating_point

OLD_CPU = Processor(flags=("avx2",), free=100 << 30)
NEW_CPU = Processor(flags=("avx2", "avx512f", "avx512_bf16"), free=100 << 30)
OLD_GPU = Processor(capability=(7, 5), free=100 << 30)
NEW_GPU = Processor(capability=(9, 0), free=100 << 30)


@pytest.mark.parametrize(
    ("processor", "types"),
    [
        (NEW_GPU, {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}),
        (OLD_GPU, {"bfloat16": "float32", "float16": "float16", "float32": "float32"}),
        (NEW_CPU, {"bfloat16": "bfloat16", "float16": "float32", "float32": "float32"}),
        (OLD_CPU, {"bfloat16": "float32", "float16": "float32", "float32": "float32"}),
    ],
)
def test_auto_is_fast_on_the_device_and_no_less_exact_than_the_checkpoint(
    processor: Processor, types: dict[str, str]
) -> None:
    for stored, opened in types.items():
        choice = choose(stored, 1 << 30, processor)
        assert (choice.dtype, choice.warning) == (opened, "")
        own = opened == stored
        assert choice.reason == ("the checkpoint's own" if own else f"chosen for this {processor.name}")
    # trainings compute in bfloat16 only where it is native
    assert choose_training(processor).dtype == types["bfloat16"]


SLOW = "products in {} may take many times as long as in float32 on this CPU"
NOT_NATIVE = SLOW.format("bfloat16") + ", which lists neither avx512_bf16 nor amx_bf16"


@pytest.mark.parametrize(
    ("stored", "flags", "capability", "slow"),
    [
        ("bfloat16", ("avx2",), None, f"; {NOT_NATIVE}"),
        ("bfloat16", (), None, f"; {NOT_NATIVE}"),
        ("float16", ("avx2", "amx_bf16"), None, f"; {SLOW.format('float16')}"),
        ("bfloat16", (), (7, 5), ""),
    ],
)
def test_weights_that_do_not_fit_in_float32_keep_their_type_and_sizes_are_stated(
    stored: str, flags: tuple[str, ...], capability: tuple[int, int] | None, slow: str
) -> None:
    small = Processor(capability, flags, free=(20 << 30) - 1)
    choice = choose(stored, 10 << 30, small)
    assert choice.dtype == stored
    assert choice.warning == (
        f"dtype auto keeps {stored}: in float32 the weights take 20.0 GiB, and 20.0 GiB of memory are free{slow}"
    )
    assert choose(stored, 10 << 30, Processor(free=20 << 30)).dtype == "float32"


def test_a_gguf_file_is_unpacked_and_that_is_the_reason_of_its_type(smollm2_file: Path) -> None:
    model = ModelConfig(path=str(smollm2_file.parent), gguf_file=smollm2_file.name)
    choice = choose_model(model, 1 << 30, NEW_CPU)
    assert (choice.dtype, choice.reason) == ("float32", "unpacked from GGUF")


@pytest.mark.parametrize(
    ("system", "cpu_flags", "dtype"),
    [
        ("x86-64", "fpu sse2 avx2 avx512f avx512_bf16", "bfloat16"),
        ("x86-64", "fpu sse2 avx2 amx_tile amx_bf16", "bfloat16"),
        ("x86-64", "fpu sse2 avx2 avx512f avx512_vnni", "float32"),
        ("Arm, which lists bf16", "fp asimd fphp asimdhp bf16 svebf16", "float32"),
        ("no flags, as macOS", "", "float32"),
    ],
)
def test_flags_alone_decide_whether_auto_takes_bfloat16(
    monkeypatch: pytest.MonkeyPatch, system: str, cpu_flags: str, dtype: str
) -> None:
    monkeypatch.setenv(FLAGS_VARIABLE, cpu_flags)
    processor = processor_here()
    assert (choose("bfloat16", 0, processor).dtype, choose_training(processor).dtype) == (dtype, dtype), system
    assert bool(check_explicit("model.dtype", "bfloat16", processor)) == (dtype == "float32")


def test_a_slow_stated_type_is_named_and_one_that_a_gpu_lacks_is_refused() -> None:
    end = "; leave dtype out, which takes the fastest type without loss, or set dtype: float32"
    assert check_explicit("model.dtype", "bfloat16", OLD_CPU) == (
        f"warning: model.dtype is bfloat16, and {NOT_NATIVE}{end}"
    )
    assert check_explicit("model.dtype", "float16", NEW_CPU) == (
        f"warning: model.dtype is float16, and {SLOW.format('float16')}{end}"
    )
    assert not check_explicit("model.dtype", "bfloat16", NEW_CPU)
    assert not check_explicit("model.dtype", "float32", OLD_CPU)
    assert not check_explicit("model.dtype", "float64", OLD_CPU)
    assert not check_explicit("model.dtype", "float16", OLD_GPU)
    with pytest.raises(UserError, match=r"model\.dtype: bfloat16 needs a GPU of compute capability 8\.0 .* has 7\.5"):
        check_explicit("model.dtype", "bfloat16", OLD_GPU)


def _saved_as(folder: Path, source: Path, dtype: torch.dtype) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(source).to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def half_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in bfloat16, as most checkpoints are."""
    return _saved_as(tmp_path_factory.mktemp("half"), tiny_model_folder, torch.bfloat16)


def _with_config(folder: Path, target: Path, **settings: object) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    config = {key: value for key, value in {**config, **settings}.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_the_type_of_a_checkpoint_is_read_from_its_files_and_an_unknown_one_refused(
    half_model: Path, tmp_path: Path
) -> None:
    assert weight_dtypes.stored_type(ModelConfig(path=str(half_model))) == "bfloat16"
    unnamed = _with_config(half_model, tmp_path / "unnamed", dtype=None, torch_dtype=None)
    assert weight_dtypes.stored_type(ModelConfig(path=str(unnamed))) == "bfloat16"
    float8 = _with_config(half_model, tmp_path / "float8", quantization_config={"quant_method": "fp8"})
    assert "8-bit floats, which cannot be opened here" in user_error(
        weight_dtypes.stored_type, ModelConfig(path=str(float8))
    )
    strange = _with_config(half_model, tmp_path / "strange", dtype="int7", torch_dtype=None)
    with pytest.raises(UserError, match=r"of type int7, and dtype auto knows float64.*set dtype: float32"):
        weight_dtypes.stored_type(ModelConfig(path=str(strange)))


def test_a_model_that_is_opened_by_itself_has_the_type_of_the_machine(
    half_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {}
    for flags in ("", "avx2 avx512f", "avx2 avx512_bf16", "amx_bf16"):
        monkeypatch.setenv(FLAGS_VARIABLE, flags)
        model = open_model(ModelConfig(path=str(half_model))).model
        types[flags] = next(model.parameters()).dtype
    assert [*types.values()] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


def test_every_model_and_training_of_an_audit_is_decided(half_model: Path, tmp_path: Path) -> None:
    files = {role: {"path": f"{role}.jsonl"} for role in ("audit", "unseen")}
    model = {"path": str(half_model)}
    settings = {"reference_model": model, "paraphraser": {**model, "dtype": "float32"}}
    settings |= {"detectors": ["reference", {"fsd": {"base": "loss", "adapter": "low"}}]}
    settings |= {"fsd": {"adapters": {"low": {"rank": 4, "dtype": "auto"}}}}
    config = build_config({"run": str(tmp_path), "model": model, "corpus": files, **settings})
    decided = decide_types(config, None, lambda: WorkerFacts(OLD_CPU, 1), lambda line: None)
    typed = with_types(config, decided.types)
    assert {key: one.dtype for key, one in decided.types.items()} == dict.fromkeys(
        ("model", "reference_model", "fsd"), "float32"
    )
    assert typed.model.dtype == typed.fsd.dtype == typed.fsd.adapter("low").dtype == "float32"
    assert FinetuneConfig().dtype == "auto"


def test_a_run_keeps_its_types_on_whatever_machine_it_is_resumed(
    half_model: Path,
    make_audit: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = make_audit(model={"path": str(half_model)}, selections=[])
    monkeypatch.setenv(FLAGS_VARIABLE, "avx2")
    assert ended("run", str(path)) == 0
    store = Store(str(path.parent / "run"))
    assert "float32, chosen for this CPU" in capsys.readouterr().out
    lost = next(name for name in store.names("receipts/score", ".json"))
    scores = store.read(json.loads(store.read(f"receipts/score/{lost}"))["data"])
    store.remove(f"receipts/score/{lost}")
    monkeypatch.setenv(FLAGS_VARIABLE, "avx512_bf16")
    assert ended("run", str(path)) == 0
    manifest, _ = read_run(store)
    assert manifest.model.dtype == manifest.fingerprint["dtype"] == "float32"
    assert manifest.model.chosen == "chosen for this CPU"
    assert store.read(json.loads(store.read(f"receipts/score/{lost}"))["data"]) == scores
    decided = read_arithmetic(store)
    assert decided.flags == ["avx2"]
    assert "warning: this machine: its CPU has other flags" in capsys.readouterr().out
    assert ended("plan", str(path), "--set", "model.dtype=float16") == 0
    printed = capsys.readouterr().out
    assert "float16" in printed
    assert "chosen for" not in printed, "a stated type is no choice"


def test_weights_of_64_bits_keep_their_type(
    tiny_model_folder: Path, tmp_path: Path, make_audit: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    double = _saved_as(tmp_path / "double", tiny_model_folder, torch.float64)
    path = make_audit(model={"path": str(double)}, selections=[])
    for _ in range(2):
        assert ended("run", str(path)) == 0
        assert "damaged" not in capsys.readouterr().out
    manifest, _ = read_run(Store(str(path.parent / "run")))
    assert (manifest.model.dtype, manifest.model.chosen) == ("float64", "the checkpoint's own")
