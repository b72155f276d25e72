"""Judge the measurements of nodes: lines that are good, a note, or red with a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cluster.inspection import Answer
from pipeline.audit.machine import ActorShape, Node, places_on
from pipeline.models.arithmetic import Processor
from pipeline.models.devices import nominal_memory
from pipeline.passes.budget import Card, Shape
from pipeline.stages.base import least_budget
from ray_jobs.cluster import NO_ANSWER, version_differences

State = Literal["good", "note", "red"]
GIB = 2**30
RED_SKEW, NOTED_SKEW = 60.0, 2.0
"""Maximum difference of two clocks, in seconds: object stores refuse requests with a larger one, and logs mismatch."""

LEAST_SHARED = 1 << 30
SLOW_STORAGE = 10e6
"""Bytes a second."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one node."""

    node: str
    check: str
    state: State
    value: str  # the measurement, or why there is none
    remedy: str = ""  # the remedy; empty where none is needed


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The facts about a node."""

    name: str
    cpus: float = 0.0
    gpus: float = 0.0  # GPUs that Ray assigns there
    object_store: float = 0.0  # size of Ray's object store, in bytes
    answers: Mapping[str, Answer] = field(default_factory=dict)  # by check


@dataclass(frozen=True, slots=True)
class Expectation:
    """The requirements on the nodes."""

    driver: Mapping[str, Answer]  # measurements of this machine: versions, plugins, model, input
    shape: ActorShape  # resources of an actor
    actors: int  # maximum number of actors
    shapes: Sequence[Shape]  # shapes of an actor's models
    length: int  # maximum tokens of a document
    trainers: int = 1  # training workers per adapter
    flags: tuple[str, ...] = ()  # CPU flags of most nodes
    holders: Sequence[str] = ()  # marks of the nodes that created the file that only one can create


Verdict = tuple[State, str] | tuple[State, str, str]  # state, value, and a remedy other than the default

HUNG = "see what hangs there (a file system, a driver, no resources for a process), or give it more time with --timeout"


def judge_nodes(nodes: Sequence[NodeReport], expected: Expectation) -> list[Finding]:
    """The lines of all nodes, in the order of the nodes and the checks."""
    flags = Counter(tuple(_facts(node.answers, "processor").get("flags", ())) for node in nodes)
    common = max(flags, key=lambda each: (flags[each], each), default=())
    shared = [_facts(node.answers, "run directory") for node in nodes]
    holders = [str(facts["holder"]) for facts in shared if facts.get("won")]
    expected = replace(expected, flags=common, holders=holders)
    return [_line(node, check, answer, expected) for node in nodes for check, answer in node.answers.items()]


def _facts(answers: Mapping[str, Answer], check: str) -> Mapping[str, Any]:
    answer = answers.get(check, "")
    return {} if isinstance(answer, str) else answer


def _line(node: NodeReport, check: str, answer: Answer, expected: Expectation) -> Finding:
    judge, remedy = _CHECKS[check]
    if isinstance(answer, str):
        return Finding(node.name, check, "red", answer, HUNG if answer.startswith(NO_ANSWER) else remedy)
    state, value, *other = judge(answer, node, expected)
    return Finding(node.name, check, state, value, "" if state == "good" else "".join(other) or remedy)


def _processor(facts: Mapping[str, Any], _: NodeReport, expected: Expectation) -> Verdict:
    native = Processor(flags=tuple(facts["flags"])).native
    types = "bfloat16 is native" if native else "bfloat16 is emulated, dtype auto takes float32"
    value = f"{' '.join(facts['flags']) or 'no known flags'}: {types}"
    if tuple(facts["flags"]) != expected.flags:
        value = f"{value}; most nodes have {' '.join(expected.flags) or 'none of these flags'}"
        return "note", value
    return "good", value


def _versions(facts: Mapping[str, Any], _: NodeReport, expected: Expectation) -> Verdict:
    here = _facts(expected.driver, "versions")
    if others := version_differences(here, facts):
        return "red", ", ".join(others)
    names = ("seenset", "python", "ray", "torch", "transformers")
    return "good", ", ".join(f"{name} {facts[name]}" for name in names if name in facts)


def _plugins(facts: Mapping[str, Any], _: NodeReport, expected: Expectation) -> Verdict:
    here = _facts(expected.driver, "plugins").get("digests", {})
    names = sorted(name for name in {*here, *facts["digests"]} if here.get(name) != facts["digests"].get(name))
    if names:
        return "red", f"another content than here: {', '.join(names)}"
    return "good", ", ".join(sorted(facts["digests"]) or ["none"])


def _gpus(facts: Mapping[str, Any], node: NodeReport, expected: Expectation) -> Verdict:
    cards, sight = facts["cards"], facts["torch"]
    value = _cards(cards, facts["cuda"])
    if node.gpus > len(cards):
        more = f"Ray gives out {node.gpus:g} GPUs, the driver has {len(cards)}"
        return "red", more, "start Ray there with the number of GPUs that nvidia-smi lists"
    if not (expected.shape.gpus and node.gpus):
        return "good", value if cards else "none"
    if sight < len(cards):
        remedy = f"install a torch of the driver's CUDA there (it has CUDA {facts['cuda']}), or a newer driver"
        return "red", f"{value}; torch sees {sight} of {len(cards)}", remedy
    if expected.shapes and not fits(expected, cards):
        size = sum(shape.weights for shape in expected.shapes) / GIB
        remedy = "raise resources.gpus_per_actor, quantise the model, or leave the node out"
        return "red", f"{value}: {size:.1f} GiB of weights leave no memory for a batch", remedy
    if short := _taken(expected, cards):
        return "red", f"{value}; {short}", "stop other programs on these GPUs"
    return "good", f"{value}, {min(card['free'] for card in cards) / GIB:.0f} GiB free"


def _cards(cards: Sequence[Mapping[str, Any]], cuda: str) -> str:
    kinds = Counter(f"{card['name']} {card['total'] / GIB:.0f} GiB" for card in cards)
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{listed}, driver {cards[0]['driver']}, CUDA {cuda}" if cards else listed


def fits(expected: Expectation, cards: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the weights of an actor's models leave memory for a batch on these cards, as computed by a run."""
    card = Card(min(nominal_memory(card["total"]) for card in cards), expected.shape.gpus)
    return least_budget(expected.shapes, card, expected.length).forward > 0


def _taken(expected: Expectation, cards: Sequence[Mapping[str, Any]]) -> str:
    """The memory used by other programs, if the models do not fit into the rest; else empty."""
    need = sum(shape.weights for shape in expected.shapes) / max(1.0, expected.shape.gpus)
    on_card = int(1 / expected.shape.gpus) if expected.shape.gpus < 1 else 1
    least = min(card["free"] for card in cards)
    if least >= need * on_card:
        return ""
    return f"{least / GIB:.1f} GiB free on one of them, {need * on_card / GIB:.1f} GiB of weights to be loaded"


def _memory(facts: Mapping[str, Any], node: NodeReport, expected: Expectation) -> Verdict:
    value = f"{facts['free'] / GIB:.1f} of {facts['total'] / GIB:.1f} GiB free"
    count = min(places_on(Node(node.cpus, node.gpus), expected.shape), expected.actors)
    weights = sum(shape.weights for shape in expected.shapes)
    need = weights if expected.shape.gpus and count else weights * count  # a loader has one model in memory at a time
    if need > facts["free"]:
        what = "weights pass through it" if expected.shape.gpus else f"weights of {count} actors"
        remedy = "set resources.actors lower or cpus_per_actor higher, or take a larger machine"
        return "red", f"{value}, {need / GIB:.1f} GiB of {what}", remedy
    return "good", value


def _shared_memory(facts: Mapping[str, Any], node: NodeReport, expected: Expectation) -> Verdict:
    value = f"{facts['total'] / GIB:.2g} GiB"
    together = expected.trainers > 1 or expected.shape.gpus > 1
    if together and facts["free"] < LEAST_SHARED:
        return "red", f"{value}; workers that compute together need 1 GiB"
    if facts["total"] < node.object_store:
        return "note", f"{value}, less than Ray's object store of {node.object_store / GIB:.2g} GiB, which goes to disk"
    return "good", value


def _model(facts: Mapping[str, Any], _: NodeReport, expected: Expectation) -> Verdict:
    here = _facts(expected.driver, "model").get("models", {})
    problems, missing, total = [], [], 0
    for name, files in facts["models"].items():
        mine = here.get(name, {})
        weights = [file for file in mine if file.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth"))]
        if weights and not set(weights) & set(files):
            missing.append(name)  # from the hub: a folder without weights is refused earlier
            continue
        differing = sorted(file for file in {*mine, *files} if mine.get(file) != files.get(file) and mine)
        problems += [f"{file} of {name} is {_how(mine.get(file), files.get(file))}" for file in differing]
        total += sum(size for size, _ in files.values())
    if problems:
        return "red", "; ".join(problems[:3])
    if missing:
        return "note", f"{', '.join(missing)}: the hub will send the weights at the start", "fetch it there before"
    return "good", f"{total / GIB:.2f} GiB, as here" if facts["models"] else "behind an endpoint"


def _how(mine: Any, other: Any) -> str:
    if mine is None or other is None:
        return "missing here" if mine is None else "missing there"
    return "of another size" if mine[0] != other[0] else "of another content"


def _input(facts: Mapping[str, Any], _: NodeReport, expected: Expectation) -> Verdict:
    here = _facts(expected.driver, "input").get("marks", {})
    broken = [f"{name}: {mark}" for name, mark in facts["marks"].items() if isinstance(mark, str)]
    broken += [
        f"{name} is another file there"
        for name, mark in facts["marks"].items()
        if isinstance(mark, list) and isinstance(here.get(name), list) and here[name] != mark
    ]
    if broken:
        return "red", "; ".join(broken[:3])
    return "good", f"{len(facts['marks'])} of {facts['of']} read"


def _run_directory(facts: Mapping[str, Any], _: NodeReport, expected: Expectation) -> Verdict:
    if not facts["seen"]:
        return "red", "it does not see what this machine writes there: a folder of the node alone"
    if facts["second"] or facts["winners"] != 1:
        value = f"{facts['winners']} of 8 attempts created one name" + ("; and one more later" * facts["second"])
        remedy = "take a store with conditional writes: a shared file system, S3, GCS, or MinIO"
        return "red", f"{value}: two workers could file one shard twice", remedy
    if (winners := len(expected.holders)) > 1:
        separate = facts["won"] and len(set(expected.holders)) > 1
        reason = ", each its own: this is a folder of each node alone" if separate else ", of which only one may"
        return "red", f"{winners} nodes created one file{reason}"
    return "good", "one of 8 attempts created a name"


def _storage(facts: Mapping[str, Any], _: NodeReport, __: Expectation) -> Verdict:
    value = f"write {facts['write'] / 1e6:,.0f} MB/s, read {facts['read'] / 1e6:,.0f} MB/s"
    if not facts["same"]:
        return "red", f"{value}; what was read is not what was written", "leave this store"
    if min(facts["write"], facts["read"]) < SLOW_STORAGE:
        return "note", value, "choose a store that is nearer to the nodes"
    return "good", value


def _clock(facts: Mapping[str, Any], _: NodeReport, __: Expectation) -> Verdict:
    offset, within = facts["offset"], facts["within"]
    value = f"{offset:+.1f} s (within {within:.1f} s)"
    if abs(offset) - within > RED_SKEW:
        return "red", value, "set the clock by NTP there (chrony, timedatectl set-ntp true)"
    if abs(offset) - within > NOTED_SKEW:
        return "note", value, "let NTP set the clock there"
    return "good", value


def _first_batch(facts: Mapping[str, Any], _: NodeReport, __: Expectation) -> Verdict:
    if "like" in facts:
        return "good", f"as on {facts['like']}"
    speed = facts["tokens"] / max(facts["batch"], 1e-9)
    peak = f", {facts['peak'] / GIB:.1f} GiB at most" if facts["peak"] else ""
    what = f"{facts['documents']} documents in {facts['batch']:.1f} s, {speed:,.0f} tokens/s{peak}"
    return "good", f"loaded in {facts['load']:.1f} s, {what}"


_CHECKS: dict[str, tuple[Callable[[Mapping[str, Any], NodeReport, Expectation], Verdict], str]] = {
    "versions": (_versions, "start Ray there from the same environment or image as here"),
    "processor": (
        _processor,
        "take nodes of one kind where scores must agree in the last digits and bfloat16 must be fast",
    ),
    "plugins": (_plugins, "install the plugin there, as it is here"),
    "gpus": (_gpus, "install the driver and the torch of its CUDA there"),
    "memory": (_memory, "see the reason"),
    "/dev/shm": (_shared_memory, "mount /dev/shm there (docker --shm-size, or an emptyDir with medium Memory)"),
    "model": (_model, "copy the model to the same path there, or put it on a file system that all nodes share"),
    "input": (_input, "give paths or URLs that every node can read"),
    "run directory": (
        _run_directory,
        "give a folder that all nodes share and may write to, or s3:// or gs://, with credentials there",
    ),
    "storage": (_storage, "see that the node reaches the run directory"),
    "clock": (_clock, "install the same Seenset there: its checks do not start"),
    "first batch": (_first_batch, "correct the lines above, or try the node alone"),
}
"""By check: the function that judges its facts, and the default remedy where it is red or could not be made."""

REMEDIES = {check: remedy for check, (_, remedy) in _CHECKS.items()}
