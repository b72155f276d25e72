"""What `kubectl kustomize` makes of a folder, for the constructs that cluster/kuberay uses; any other is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "patches",
    "configMapGenerator",
    "generatorOptions",
    "images",
    "replacements",
}
CLUSTER_WIDE = {"Namespace"}
LOCAL = "config.kubernetes.io/local-config"
Object = dict[str, Any]


def read_all(path: Path) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization, in no order that means anything."""
    (plan,) = read_all(folder / "kustomization.yaml")
    assert set(plan) <= KNOWN, f"{folder}: {sorted(set(plan) - KNOWN)} is not rendered here"
    assert plan["kind"] == "Kustomization"
    objects: list[Object] = []
    for entry in plan["resources"]:
        place = folder / entry
        objects += render(place) if place.is_dir() else read_all(place)
    objects += [_config_map(folder, entry, plan) for entry in plan.get("configMapGenerator", [])]
    for patch in plan.get("patches", []):
        assert set(patch) in ({"target", "patch"}, {"target", "path"}), patch
        text = patch.get("patch") or (folder / patch["path"]).read_text(encoding="utf-8")
        _patch(objects, patch["target"], yaml.safe_load(text))
    for one in objects:
        if "namespace" in plan and one["kind"] not in CLUSTER_WIDE:
            one["metadata"]["namespace"] = plan["namespace"]
        for image in plan.get("images", []):
            _rename(one, image)
    for replacement in plan.get("replacements", []):
        _replace(objects, replacement)
    return [one for one in objects if LOCAL not in one["metadata"].get("annotations", {})]


def _config_map(folder: Path, entry: Object, plan: Object) -> Object:
    assert set(entry) == {"name", "files"}
    assert plan["generatorOptions"] == {"disableNameSuffixHash": True}
    data = {name: (folder / name).read_text(encoding="utf-8") for name in entry["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": entry["name"]}, "data": data}


def _chosen(objects: list[Object], target: Object) -> Object:
    assert set(target) == {"kind", "name"}
    (one,) = (x for x in objects if x["kind"] == target["kind"] and x["metadata"]["name"] == target["name"])
    return one


def _patch(objects: list[Object], target: Object, operations: Any) -> None:
    assert isinstance(operations, list), "only JSON 6902 patches are rendered here"
    assert all(operation["op"] in ("add", "replace", "remove") for operation in operations)
    one = _chosen(objects, target)
    one.update(jsonpatch.apply_patch(one, operations))


def _replace(objects: list[Object], replacement: Object) -> None:
    assert set(replacement) == {"source", "targets"}
    source = dict(replacement["source"])
    assert source.pop("fieldPath") == "spec"
    for target in replacement["targets"]:
        assert set(target) == {"select", "fieldPaths"}
        assert target["fieldPaths"] == ["spec.jobTemplate"]
        _chosen(objects, target["select"])["spec"]["jobTemplate"] = copy.deepcopy(_chosen(objects, source)["spec"])


def _rename(node: Any, image: Object) -> None:
    for holder in containers(node):
        if holder["image"] == image["name"]:
            holder["image"] = f"{image['newName']}:{image['newTag']}"


def containers(node: Any) -> Iterator[Object]:
    """Every container below a node, of whatever kind."""
    if isinstance(node, list):
        for each in node:
            yield from containers(each)
    elif isinstance(node, dict):
        for key, each in node.items():
            if key in ("containers", "initContainers"):
                yield from each
            else:
                yield from containers(each)
