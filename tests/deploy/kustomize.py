"""Resolves a kustomization as `kubectl kustomize` does, as far as the overlays of this repository go.

Knows resources, namespace, images, secretGenerator of files, and JSON patches by kind and name. Any other field is an
error, so that nothing is silently left out.
"""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import yaml

_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "resources",
    "images",
    "secretGenerator",
    "generatorOptions",
    "patches",
}
_OF_CLUSTER = ("Namespace",)


def resolve(folder: Path, keys: Path) -> list[dict[str, Any]]:
    """The objects that an overlay makes. `keys` stands in for its folder `keys`, which is in no repository."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(content) <= _KNOWN, set(content) - _KNOWN
    assert content.get("generatorOptions", {}) in ({}, {"disableNameSuffixHash": True})
    found: list[dict[str, Any]] = []
    for name in content["resources"]:
        path = folder / name
        found += resolve(path, keys) if path.is_dir() else [*yaml.safe_load_all(path.read_text())]
    found = copy.deepcopy(found)  # anchors are one object in memory, and not in the text
    found += [_secret(each, keys) for each in content.get("secretGenerator", [])]
    for patch in content.get("patches", []):
        targets = [each for each in found if _is_target(each, patch["target"])]
        assert targets, f"{folder.name}: nothing to patch: {patch['target']}"
        for target in targets:
            for operation in yaml.safe_load(patch["patch"]):
                _patch(target, **operation)
    for image in content.get("images", []):
        for container in containers_of(found):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for each in found:
        if "namespace" in content and each["kind"] not in _OF_CLUSTER:
            each["metadata"]["namespace"] = content["namespace"]
    return found


def containers_of(objects: Any) -> list[dict[str, Any]]:
    """Every container in them, wherever it is."""
    if isinstance(objects, dict):
        return [*objects.get("containers", []), *containers_of(list(objects.values()))]
    return [container for each in objects for container in containers_of(each)] if isinstance(objects, list) else []


def _secret(generator: dict[str, Any], keys: Path) -> dict[str, Any]:
    assert set(generator) == {"name", "files"}
    files = [keys / Path(file).relative_to("keys") for file in generator["files"]]
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in files}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": generator["name"]}, "data": data}


def _is_target(each: dict[str, Any], target: dict[str, str]) -> bool:
    assert set(target) == {"kind", "name"}
    return (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])


def _patch(target: Any, op: str, path: str, value: Any = None) -> None:
    """One operation of RFC 6902."""
    *way, last = (step.replace("~1", "/") for step in path.split("/")[1:])
    for step in way:
        target = target[int(step) if isinstance(target, list) else step]
    if isinstance(target, list):
        place = len(target) if last == "-" else int(last)
        if op == "add":
            target.insert(place, value)
        elif op == "replace":
            target[place] = value
        else:
            assert op == "remove"
            del target[place]
        return
    assert op == "add" or last in target, f"{path} is not there"
    if op == "remove":
        del target[last]
    else:
        target[last] = value
