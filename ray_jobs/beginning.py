"""What a run begins side by side: checks of the documents, the model, a cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from pipeline.audit.before_scoring import check_before_scoring
from pipeline.audit.checking import check_apart
from pipeline.audit.machine import LocalMachine, local_machine, runs_locally
from pipeline.audit.places import actor_shape
from pipeline.audit.plan import Plan, pending
from pipeline.audit.precheck import check_documents
from pipeline.config.models import ModelConfig
from pipeline.detectors.registry import adapters_of, parse_detectors
from pipeline.models.load import open_model
from pipeline.models.sharing import SharedModels
from pipeline.stages.score import STAGE
from pipeline.store.files import Store
from ray_jobs.actors import check_cluster, cluster_is_named, connect
from ray_jobs.nodes import cluster_nodes, nodes_ahead
from ray_jobs.progress import Reporter


def check_meanwhile(
    plan: Plan, store: Store, reporter: Reporter, machine: LocalMachine | None, early: SharedModels | None
) -> None:
    """Check the documents, and start the cluster meanwhile where there is work for it.

    Raises:
        UserError: as `check_before_scoring` and `connect`, or an actor is larger than any node.
    """
    if machine is not None or not pending(plan, STAGE, store):
        check_before_scoring(plan, store, reporter.say, check_documents if early is None else check_apart)
        return
    lines: list[str] = []  # said afterwards: while a cluster starts, nobody sees what is written to standard error
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(check_before_scoring, plan, store, lines.append)
        connect()
        actor_shape(plan.config.resources, cluster_nodes())
        checking.result()
    for line in lines:
        reporter.say(line)


def begin_model(plan: Plan, store: Store, machine: LocalMachine | None) -> SharedModels | None:
    """Open the audited model while the documents are checked, where nothing but scoring in this process needs it."""
    if machine is None or machine.workers == 1 or not isinstance(plan.config.model, ModelConfig):
        return None
    # A training beside it would compute in the dtype that torch has by default while a model is built.
    training = adapters_of(parse_detectors(plan.config.detectors))
    if training or plan.config.paraphraser is not None or not pending(plan, STAGE, store):
        return None
    models = SharedModels()
    models.begin(open_model, plan.config.model, machine.gpus)
    return models


def machine_of(plan: Plan) -> LocalMachine | None:
    """What this process may use of its machine; None where a cluster does the work.

    Raises:
        UserError: as `runs_locally` and `local_machine`, or no cluster answers.
    """
    gpus = torch.cuda.device_count()
    if not runs_locally(plan, cluster_is_named(), gpus):
        check_cluster()
        return None
    return local_machine(plan.config.resources, gpus)


def check_actors(plan: Plan) -> None:
    """Check before a run that what does its work holds one actor; nothing where the cluster cannot be asked.

    Raises:
        UserError: an actor is larger than any node, or than this machine.
    """
    gpus = torch.cuda.device_count()
    if runs_locally(plan, cluster_is_named(), gpus):
        local_machine(plan.config.resources, gpus)
    elif nodes := nodes_ahead(gpus):
        actor_shape(plan.config.resources, nodes)
