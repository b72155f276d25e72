"""What `kubectl kustomize` makes of a folder, for the constructs that cluster/kuberay uses; any other is refused."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches", "configMapGenerator", "generatorOptions", "images"}
KNOWN |= {"replacements"}
LOCAL = "config.kubernetes.io/local-config"
Object = dict[str, Any]


def read_all(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization, in no order that means anything."""
    (plan,) = read_all(folder / "kustomization.yaml")
    assert set(plan) <= KNOWN, f"{folder}: {sorted(set(plan) - KNOWN)} is not rendered here"
    objects: list[Object] = []
    for entry in plan["resources"]:
        objects += render(folder / entry) if (folder / entry).is_dir() else read_all(folder / entry)
    for entry in plan.get("configMapGenerator", []):
        data = {name: (folder / name).read_text(encoding="utf-8") for name in entry["files"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": entry["name"]}, "data": data})
    for patch in plan.get("patches", []):
        text = patch.get("patch") or (folder / patch["path"]).read_text(encoding="utf-8")
        one = _chosen(objects, patch["target"])
        one.update(jsonpatch.apply_patch(one, yaml.safe_load(text)))
    for one in objects:
        if "namespace" in plan and one["kind"] != "Namespace":
            one["metadata"]["namespace"] = plan["namespace"]
    for holder in containers(objects):
        for image in plan.get("images", []):
            if holder["image"] == image["name"]:
                holder["image"] = f"{image['newName']}:{image['newTag']}"
    for replacement in plan.get("replacements", []):  # of the template of a job by the whole of another
        for target in replacement["targets"]:
            assert (replacement["source"]["fieldPath"], target["fieldPaths"]) == ("spec", ["spec.jobTemplate"])
            job = copy.deepcopy(_chosen(objects, replacement["source"])["spec"])
            _chosen(objects, target["select"])["spec"]["jobTemplate"] = job
    return [one for one in objects if LOCAL not in one["metadata"].get("annotations", {})]


def _chosen(objects: list[Object], target: Object) -> Object:
    (one,) = (x for x in objects if x["kind"] == target["kind"] and x["metadata"]["name"] == target["name"])
    return one


def containers(node: Any) -> Iterator[Object]:
    if isinstance(node, list):
        for each in node:
            yield from containers(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            if key in ("containers", "initContainers"):
                yield from each
            else:
                yield from containers(each)
