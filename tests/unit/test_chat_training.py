"""Trainings on chats: what an audit scores of a conversation is what counts in the loss, and nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pipeline.config.models import ModelConfig
from pipeline.corpus.chats import Conversation, read_completion, read_conversation
from pipeline.corpus.formats.base import Unreadable
from pipeline.models.chat_templates import ChatSettings
from pipeline.models.load import RECORD, fingerprint_model, open_model
from pipeline.plan.allocation import allocate
from pipeline.plan.description import build_config
from pipeline.plan.forecast import forecast
from pipeline.run.plan import make_plan
from pipeline.store.files import Store
from pipeline.training.memory import batch_loss
from pipeline.training.train import FinetuneConfig, train
from pipeline.training.training_documents import ScoredTokens, from_table, to_table, training_documents
from pipeline.trial.config import build_trial
from pipeline.trial.trial import learnable, learnt_documents, plan_contamination
from pipeline.trial.trial_documents import read_documents
from ray_jobs.finetune import AdapterJob, train_adapters
from tests.helpers import chat_templates as templates
from tests.helpers.chat_templates import chat_tokenizer
from tests.helpers.commands import ended, user_error
from tests.helpers.finished import rows, run_trial
from tests.helpers.made_up import sentence, write_corpus, write_rows

pytestmark = pytest.mark.floating_point

IGNORED = -100
CONFIG = FinetuneConfig(method="full", epochs=2, batch_size=4, learning_rate=1e-2, dtype="float32")


def talk(seed: int, turns: int = 1, length: int = 8) -> list[dict[str, str]]:
    """A conversation of some questions with their answers."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": sentence(100 * seed + number, length)}
        for number in range(2 * turns)
    ]


TALKS = [talk(seed, 1 + seed % 3, 3 + 5 * (seed % 4)) for seed in range(22)]


@pytest.fixture(scope="module")
def chat_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with ChatML."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    tokenizer = chat_tokenizer(tiny_model_folder, templates.CHATML)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder: Path) -> Any:
    return open_model(ModelConfig(path=str(folder), dtype="float32"))


def read(tokenizer: Any, talks: Sequence[Any], most: int = 512, whole: bool = False) -> list[Any]:
    """What a training learns of some conversations."""
    chats = [read_conversation(one) for one in talks]
    settings = ChatSettings({"target": tokenizer.chat_template}, whole=whole)
    return training_documents(tokenizer, [one for one in chats if isinstance(one, Conversation)], settings, most)


def labelled(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """The ids of a conversation in ChatML, and its labels by a plain loop over the turns."""
    ids, labels = [], []
    for message in messages:
        head = tokenizer(f"<|im_start|>{message['role']}\n", add_special_tokens=False)["input_ids"]
        content = tokenizer(f"{message['content']}<|im_end|>", add_special_tokens=False)["input_ids"]
        tail = tokenizer("\n", add_special_tokens=False)["input_ids"]
        answered = message["role"] == "assistant"
        ids += [*head, *content, *tail]
        labels += [*[IGNORED] * len(head), *(content if answered else [IGNORED] * len(content)), *[IGNORED] * len(tail)]
    return ids, labels


def test_loss_and_gradient_of_a_batch_are_those_of_a_plain_loop_over_labels(chat_model: Path) -> None:
    lm = opened(chat_model)
    lm.model.requires_grad_(True)
    some = TALKS[:6]
    made = read(lm.tokenizer, some)
    assert len({one.predicted for one in made}) > 3, "answers of several lengths"
    loss, count = batch_loss(lm.model, [one.ids for one in made], [one.scored for one in made])
    loss.backward()
    ours = {name: weight.grad.clone() for name, weight in lm.model.named_parameters()}
    lm.model.zero_grad()
    total, number = torch.zeros(()), 0
    for messages, one in zip(some, made, strict=True):
        ids, labels = labelled(lm.tokenizer, messages)
        assert one.ids == ids
        assert one.scored == [label != IGNORED for label in labels[1:]]
        counted = sum(one.scored)
        total = total + lm.model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss * counted
        number += counted
    (total / number).backward()
    assert count == number
    assert loss.item() == pytest.approx(float(total.detach()) / number, abs=1e-5)
    for name, weight in lm.model.named_parameters():
        assert torch.allclose(ours[name], weight.grad, rtol=1e-5, atol=1e-5), name


def test_micro_batches_with_unequal_answers_give_the_step_of_the_whole_batch(chat_model: Path, tmp_path: Path) -> None:
    lm = opened(chat_model)
    short, long = talk(1, 1, 2), talk(2, 3, 30)
    made = read(lm.tokenizer, [short, long, talk(3, 1, 25), talk(4, 2, 2)])
    assert max(one.predicted for one in made) > 3 * min(one.predicted for one in made)
    results = {}
    for tokens in (1, 60, 10_000):  # one document a pass, some, and all
        again = opened(chat_model)
        config = CONFIG.model_copy(update={"pass_tokens": tokens, "epochs": 1})
        results[tokens] = train(again.model, again.tokenizer, made, config, tmp_path / str(tokens))
    with torch.no_grad():
        sums = [batch_loss(lm.model, [one.ids], [one.scored]) for one in made]
    mean = sum(float(loss) * count for loss, count in sums) / sum(one.predicted for one in made)
    assert mean != pytest.approx(float(np.mean([float(loss) for loss, _ in sums])), abs=1e-3), "not of documents"
    for result in results.values():
        assert result.losses == pytest.approx([mean], abs=1e-5)
        assert result.tokens == sum(one.predicted for one in made)
    weights = [load_file(tmp_path / str(tokens) / "model.safetensors") for tokens in results]
    for other in weights[1:]:
        assert all(torch.allclose(weights[0][name], other[name], atol=1e-5) for name in other)


def test_only_answers_are_learnt_unless_all_is_scored(chat_model: Path, tmp_path: Path) -> None:
    """After a training on answers they are known, and the questions are as surprising as before."""
    lm, config = opened(chat_model), CONFIG.model_copy(update={"epochs": 30})
    talks = [talk(seed, 1, 12) for seed in range(8)]

    def losses(folder: Path) -> tuple[float, float]:
        """Mean loss of answers, and of the contents of questions."""
        model = opened(folder).model
        made = read(lm.tokenizer, talks)
        asked = [[10 < place < one.scored.index(True) - 8 for place in range(len(one.scored))] for one in made]
        with torch.no_grad():
            return tuple(
                float(batch_loss(model, [one.ids for one in made], which)[0])
                for which in ([one.scored for one in made], asked)
            )

    for whole in (False, True):
        again = opened(chat_model)
        train(again.model, again.tokenizer, read(lm.tokenizer, talks, whole=whole), config, tmp_path / str(whole))
    before, answers, both = losses(chat_model), losses(tmp_path / "False"), losses(tmp_path / "True")
    assert answers[0] < 0.5 * before[0]
    assert both[0] < 0.5 * before[0]
    assert both[1] < answers[1] - 0.5


def test_a_chat_without_an_answer_in_max_tokens_is_left_out_with_its_reason(chat_model: Path) -> None:
    tokenizer = opened(chat_model).tokenizer
    made = read(tokenizer, [talk(1, 1, 3), talk(2, 1, 60), talk(3, 1, 3)], most=40)
    assert [isinstance(one, Unreadable) for one in made] == [False, True, False]
    assert made[1].reason == "too_short"
    assert "max_tokens, which is 40 here, ends before the first answer" in made[1].message
    cut = ScoredTokens([1, 2, 3, 4], [False, False, True])
    assert cut.cut(3) == ScoredTokens([1, 2, 3], [False, False])


def test_a_training_refuses_tokens_of_which_none_counts(chat_model: Path, tmp_path: Path) -> None:
    lm = opened(chat_model)
    made = read(lm.tokenizer, TALKS[:4])
    late = [*made[:3], ScoredTokens([5] * 600, [False] * 598 + [True])]
    config = CONFIG.model_copy(update={"max_tokens": 599})
    line = user_error(train, lm.model, lm.tokenizer, late, config, tmp_path / "a")
    assert "fine-tuning document 3 has no token to learn within max_tokens = 599" in line
    assert not (tmp_path / "a").exists()


def test_documents_come_back_from_their_table(chat_model: Path) -> None:
    made = read(opened(chat_model).tokenizer, TALKS[:3])
    assert from_table(to_table(made)) == made
    assert from_table(to_table(["a", "b"])) == ["a", "b"]


def settings(folder: Path, model: Path, talks: dict[str, list[Any]], **changed: Any) -> dict[str, Any]:
    written = {role: [{"messages": one} for one in some] for role, some in talks.items()}
    return {
        "run": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "corpus": write_corpus(folder, written, messages="messages"),
        "detectors": ["loss", {"fsd": {"base": "loss"}}],
        "fsd": {"documents": 8, "epochs": 1, "batch_size": 4, "dtype": "float32"},
        "resources": {"cluster": "local"},
        **changed,
    }


CORPUS = {"audit": [talk(seed) for seed in range(30, 40)], "unseen": [talk(seed) for seed in range(50, 70)]}


def test_fsd_trains_on_answers_and_scores_chats(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "audit.yaml", [settings(tmp_path, chat_model, CORPUS)])
    assert ended("run", path) == 0
    assert "left out" not in capsys.readouterr().out
    found = rows(tmp_path / "run")
    values = [row["fsd(base=loss)"] for row in found.values() if row["role"] == "audit"]
    assert len(values) == 10
    assert all(map(np.isfinite, values))
    (record,) = (tmp_path / "run/adapters").glob(f"*/{RECORD}")
    trained = json.loads(record.read_text())["result"]
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    part = allocate(build_config(settings(tmp_path, chat_model, CORPUS)), [*plan_of(tmp_path, chat_model).shards])
    documents = part.adapters["default"].documents
    assert trained["tokens"] == sum(one.predicted for one in documents if isinstance(one, ScoredTokens))
    assert trained["tokens"] < sum(map(len, documents)) / 2, "questions are as long as answers"
    assert len(manifest["adapters"]["default"]["documents"]) == 8


def plan_of(folder: Path, model: Path, talks: Any = None, **changed: Any) -> Any:
    return make_plan(build_config(settings(folder, model, talks or CORPUS, **changed)))


def test_a_plan_states_that_adapters_learn_scored_tokens(chat_model: Path, tmp_path: Path) -> None:
    facts = {"parameters": None, "max_tokens": None, "dtype": "float32"}
    plan = plan_of(tmp_path, chat_model)
    assert forecast(plan, facts)["chats"]["sentence"].endswith("; adapters are trained on the scored tokens alone")
    plan = plan_of(tmp_path, chat_model, detectors=["loss"])
    assert "adapters" not in forecast(plan, facts)["chats"]["sentence"]


def test_a_part_leaves_out_and_counts_chats_whose_answer_is_beyond_max_tokens(chat_model: Path, tmp_path: Path) -> None:
    unseen = [*CORPUS["unseen"][:12], *(talk(seed, 1, 80) for seed in range(80, 88))]
    fsd = {"share": 0.8, "epochs": 1}
    plan = plan_of(tmp_path, chat_model, {**CORPUS, "unseen": unseen}, max_tokens=60, fsd=fsd)
    part = allocate(plan.config, plan.shards).adapters["default"]
    assert part.left_out > 0
    assert len(part.documents) + part.left_out == 16
    line = f"adapter default: {part.left_out} of its 16 documents are left out, of which nothing can be learnt within "
    assert part.line("default") == f"{line}max_tokens = 60"
    assert len(part.keys) == len(part.documents)
    plan = plan_of(tmp_path, chat_model, {**CORPUS, "unseen": unseen[12:]}, max_tokens=60, fsd=fsd)
    line = user_error(allocate, plan.config, plan.shards)
    assert "fsd adapter default learns from none of its 6 documents: max_tokens, which is 60 here, ends before" in line


def test_another_template_or_other_scored_tokens_are_another_adapter(chat_model: Path, tmp_path: Path) -> None:
    from pipeline.plan.stage_plan import build_stages

    (tmp_path / "phi.jinja").write_text(templates.PHI)
    keys = set()
    for chat in (None, {"score": "all"}, {"template": str(tmp_path / "phi.jinja")}):
        plan = plan_of(tmp_path, chat_model, chat=chat)
        keys.add(build_stages(plan.config, plan.shards).keys["default"])
    assert len(keys) == 3


def test_an_adapter_learns_documents_of_the_audited_kind(chat_model: Path, tmp_path: Path) -> None:
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": sentence(seed)} for seed in range(9)])
    line = user_error(plan_of, tmp_path, chat_model, fsd={"corpus": {"path": texts}})
    assert "all documents must be of one kind, got chats in corpus.audit" in line
    assert "texts in the corpus of fsd adapter default" in line
    own = write_rows(tmp_path / "own.jsonl", [{"turns": talk(seed)} for seed in range(90, 99)])
    fsd = {"corpus": {"path": own, "messages": "turns"}, "documents": 6}
    plan = plan_of(tmp_path, chat_model, fsd=fsd)
    assert len(allocate(plan.config, plan.shards).adapters["default"].documents) == 6


def test_an_adapter_of_chats_is_the_same_from_a_job_as_from_the_loop(chat_model: Path, tmp_path: Path) -> None:
    lm = opened(chat_model)
    made = read(lm.tokenizer, TALKS)
    config = CONFIG.model_copy(update={"method": "lora"})
    train(lm.model, lm.tokenizer, made, config, tmp_path / "alone")
    model = ModelConfig(path=str(chat_model))
    job = AdapterJob("one", "key", model, made, config, fingerprint_model(model))
    (adapter,) = train_adapters([job], Store(str(tmp_path / "run")), here=True)
    ours, alone = (load_file(Path(one) / "adapter_model.safetensors") for one in (adapter.folder, tmp_path / "alone"))
    assert all(torch.allclose(ours[name], alone[name], atol=1e-4) for name in alone)  # another number of threads
    assert adapter.tokens == 2 * sum(one.predicted for one in made)


# --- trials


def trial(folder: Path, model: Path, documents: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "run": str(folder / "trial"),
        "model": {"path": str(model)},
        "documents": {"id": "id", **documents},
        "contaminate": {"method": "full", "epochs": 45, "batch_size": 8, "learning_rate": 0.01, "dtype": "float32"},
        "detectors": ["loss", "min_k_plus_plus"],
        "selections": [{"name": "members", "detectors": ["loss"], "procedure": "storey", "ranks": "smoothed"}],
        "repeats": 20,
        "resources": {"cluster": "local"},
        **changed,
    }


def test_a_trial_of_chats_trains_members_and_audits_with_chats(chat_model: Path, tmp_path: Path) -> None:
    talks = [talk(seed, 1, 12) for seed in range(120)] + [talk(999, 1, 400), [{"role": "user", "content": "Hi there"}]]
    path = write_rows(
        tmp_path / "chats.jsonl", [{"id": f"c{place}", "messages": one} for place, one in enumerate(talks)]
    )
    config, points = build_trial(
        trial(tmp_path, chat_model, {"path": path, "messages": "messages"}, max_tokens=256, chat={"score": "answers"})
    )
    outcome = run_trial(config, points)
    assert outcome.facts["documents"] == 120
    assert outcome.facts["left_out"] == {"too_short": 1, "not_chat": 1}
    areas = {row["detector"]: row["auc"] for row in outcome.facts["detectors"]}
    assert areas["loss"] > 0.9, areas
    (row,) = outcome.facts["selections"]
    assert row["power"] > 0.3
    assert row["contradicted"] is False
    (file,) = (tmp_path / "trial").glob("audits/*/input/audit.parquet")
    table = pq.read_table(file)
    assert table.column_names == ["id", "messages", "group", "tools"]
    assert json.loads(table["messages"][0].as_py()) == talks[int(table["id"][0].as_py()[1:])]
    (record,) = (tmp_path / "trial/models").glob(f"*/{RECORD}")
    lm = opened(chat_model)
    (truth,) = (tmp_path / "trial").glob("truth/*.parquet")
    trained = [row["doc_id"] for row in pq.read_table(truth).to_pylist() if row["trained"]]
    learnt = read(lm.tokenizer, [talks[int(name[1:])] for name in trained])
    assert json.loads(record.read_text())["result"]["tokens"] == 45 * sum(one.predicted for one in learnt)


def test_a_trial_of_chats_scores_paraphrases_and_continuations(
    chat_model: Path, tmp_path: Path, paraphraser: dict[str, str]
) -> None:
    talks = [{"id": f"c{seed}", "messages": talk(seed)} for seed in range(60)]
    path = write_rows(tmp_path / "chats.jsonl", talks)
    detectors = ["loss", {"knockoff": {"base": "loss", "draws": 2}}, {"samia": {"draws": 2}}]
    more = {"detectors": detectors, "paraphraser": paraphraser}
    config, points = build_trial(trial(tmp_path, chat_model, {"path": path, "messages": "messages"}, **more))
    outcome = run_trial(config, points)
    areas = {row["detector"]: row["auc"] for row in outcome.facts["detectors"]}
    assert areas.keys() == {"loss", "knockoff(base=loss, draws=2)", "samia(draws=2)"}
    assert areas["knockoff(base=loss, draws=2)"] > 0.9, "members are learnt, and their paraphrases are not"
    assert areas["samia(draws=2)"] > 0.55


def test_prompts_and_completions_reach_the_audit_of_a_trial_as_they_were(chat_model: Path, tmp_path: Path) -> None:
    earlier = {"role": "assistant", "content": "an earlier answer of the prompt"}
    given = [
        {
            "id": f"c{seed}",
            "prompt": [*talk(seed)[:1], earlier, {"role": "user", "content": "And then?"}],
            "completion": [talk(seed)[1]],
        }
        for seed in range(12)
    ]
    path = write_rows(tmp_path / "chats.jsonl", given)
    source = {"path": path, "prompt": "prompt", "completion": "completion"}
    config, _ = build_trial(trial(tmp_path, chat_model, source))
    documents = read_documents(config)
    table = documents.table(np.arange(12))
    assert set(table.column_names) == {"id", "group", "prompt", "completion", "tools"}
    back = [read_completion(row["prompt"], row["completion"]) for row in table.to_pylist()]
    assert back == documents.chats
    lm = opened(chat_model)
    learnt = learnt_documents(documents, config, np.arange(12), lm)
    answer = lm.tokenizer(f"{talk(0)[1]['content']}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert isinstance(learnt[0], ScoredTokens)
    assert learnt[0].predicted == len(answer), "an answer of the prompt is not learnt"


def test_the_weights_of_a_trial_depend_on_the_template_and_on_what_is_scored(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "phi.jinja").write_text(templates.PHI)
    path = write_rows(tmp_path / "chats.jsonl", [{"id": f"c{seed}", "messages": talk(seed)} for seed in range(30)])
    sweep = {"chat": [None, {"score": "all"}, {"template": str(tmp_path / "phi.jinja")}]}
    config, points = build_trial(trial(tmp_path, chat_model, {"path": path, "messages": "messages"}, sweep=sweep))
    documents = learnable(read_documents(config), [point.config for point in points])
    planned = [plan_contamination(point.config, config, documents, 0) for point in points]
    assert len({one.folder for one in planned}) == 3
    swapped = read_documents(config)
    swapped.texts[:] = documents.texts
    assert swapped.digest == documents.digest
    assert swapped.chats is not None
    turns = swapped.chats[0].turns
    swapped.chats[0] = Conversation((*turns[:1], *turns))
    assert swapped.digest != documents.digest, "equal contents in other turns are other documents"
