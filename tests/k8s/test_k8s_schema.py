"""The schema takes our manifests and refuses what the operator, Kubernetes or the worker would
stumble over.
"""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from manifest_files import GRAPHS, load_graph, load_schema

SCHEMA = jsonschema.Draft202012Validator(load_schema())


def test_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(load_schema())


@pytest.mark.parametrize("name", GRAPHS)
def test_takes_the_manifest(name: str) -> None:
    assert [error.message for error in SCHEMA.iter_errors(load_graph(name))] == []


WORKER = ("spec", "components", 1)
POD = (*WORKER, "podTemplate", "spec")
MAIN = (*POD, "containers", 0)
MISSING = ...  # what a manifest cannot have
PLACES = {"MAIN": "POD.containers[0]", "POD": "WORKER.podTemplate.spec", "WORKER": "$.spec.components[1]"}

# where, what is put there, and the place that the error names
BROKEN: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("apiVersion",), "nvidia.com/v1alpha1", "$.apiVersion"),
    (("kind",), "Deployment", "$.kind"),
    (("metadata", "name"), "Dlw_Agg", "$.metadata.name"),
    (("spec", "services"), {}, "$.spec"),
    (("spec", "components"), {}, "$.spec.components"),
    ((*WORKER, "componentType"), "worker", "WORKER"),
    ((*WORKER, "type"), "main", "WORKER.type"),
    ((*WORKER, "name"), "a worker", "WORKER.name"),
    ((*WORKER, "replicas"), "1", "WORKER.replicas"),
    ((*WORKER, "replicas"), -1, "WORKER.replicas"),
    ((*WORKER, "podTemplate"), MISSING, "WORKER"),
    ((*WORKER, "extraPodSpec"), {}, "WORKER"),
    ((*WORKER, "runtimeVersionOverride"), "1.4", "WORKER.runtimeVersionOverride"),
    ((*POD, "terminationGracePeriodSeconds"), "75", "POD.terminationGracePeriodSeconds"),
    ((*POD, "terminationGracePeriodSeconds"), MISSING, "POD"),
    ((*POD, "enableServiceLinks"), True, "POD.enableServiceLinks"),
    ((*POD, "securityContext", "runAsNonRoot"), False, "POD.securityContext.runAsNonRoot"),
    ((*POD, "securityContext", "privileged"), True, "POD.securityContext"),
    ((*POD, "volumes", 0, "emptyDir"), {}, "POD.volumes[0]"),
    ((*MAIN, "name"), "engine", "POD.containers"),
    ((*MAIN, "image"), "dynamo-logits-worker", "MAIN.image"),
    ((*MAIN, "image"), MISSING, "MAIN"),
    ((*MAIN, "command"), "python3 -m worker", "MAIN.command"),
    ((*MAIN, "args", 1), 2048, "MAIN.args[1]"),
    ((*MAIN, "env", 0, "value"), 9090, "MAIN.env[0].value"),
    ((*MAIN, "env", 0, "value"), MISSING, "MAIN.env[0]"),
    ((*MAIN, "env", 0, "valueFrom"), {"fieldRef": {"fieldPath": "a"}}, "MAIN.env[0]"),
    ((*MAIN, "livenessProbe"), MISSING, "MAIN"),
    ((*MAIN, "livenessProbe", "exec"), {}, "MAIN.livenessProbe"),
    ((*MAIN, "livenessProbe", "httpGet", "port"), "9090", "MAIN.livenessProbe.httpGet.port"),
    ((*MAIN, "startupProbe", "failureThreshold"), 0, "MAIN.startupProbe.failureThreshold"),
    ((*MAIN, "resources", "limits", "memory"), "16 GiB", "MAIN.resources.limits.memory"),
    ((*MAIN, "resources", "limits", "memory"), MISSING, "MAIN.resources.limits"),
    ((*MAIN, "resources", "limits", "gpu"), "1", "MAIN.resources.limits"),
    ((*MAIN, "securityContext", "readOnlyRootFilesystem"), False, "MAIN.securityContext.readOnlyRootFilesystem"),
    ((*MAIN, "securityContext", "capabilities", "drop"), [], "MAIN.securityContext.capabilities.drop"),
]


def broken(where: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    graph = copy.deepcopy(load_graph("agg"))
    place: Any = graph
    for step in where[:-1]:
        place = place[step]
    if value is MISSING:
        del place[where[-1]]
    else:
        place[where[-1]] = value
    return graph


@pytest.mark.parametrize(("where", "value", "named"), BROKEN, ids=lambda part: str(part)[-60:])
def test_refuses(where: tuple[str | int, ...], value: Any, named: str) -> None:
    for short, long in PLACES.items():
        named = named.replace(short, long)
    assert named in [error.json_path for error in SCHEMA.iter_errors(broken(where, value))]


def test_refuses_a_graph_without_a_frontend() -> None:
    graph = load_graph("agg")
    del graph["spec"]["components"][0]
    assert not SCHEMA.is_valid(graph)


def test_refuses_an_unknown_field_wherever_one_could_be() -> None:
    """Every object of the manifest but the maps of names, one at a time."""
    graph = load_graph("disagg-trtllm")
    places = list(objects(graph))
    assert len(places) > 70
    for place in places:
        place["misspelt"] = "x"
        assert not SCHEMA.is_valid(graph), place
        del place["misspelt"]
    assert SCHEMA.is_valid(graph)


def objects(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(place for part in value.values() for place in objects(part))]
    if isinstance(value, list):
        return [place for part in value for place in objects(part)]
    return []
