"""A real API server takes the kinds of Kubernetes' own that the manifests and the chart have, and
its controllers and scheduler act on them: pods are made and find a node, with the probes and grace
periods of the manifests, and an autoscaler follows ``dlw_waiting_requests``.

It is Kubernetes 1.20, the last one whose whole source Debian has. There is no kubelet, so no pod
ever runs: `test_k8s_processes.py` runs them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_k8s_chart
import yaml
from e2e_stack import wait_for
from external_metrics import api_service, external_metrics
from helm_chart import Rendered
from kube_api import KubeApi, collection, definition, fields, kube_api
from manifest_files import FOLDER
from test_k8s_chart import resources

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

rendered = test_k8s_chart.rendered  # its fixture

OLDER = {
    "HorizontalPodAutoscaler": ("autoscaling/v2", "autoscaling/v2beta2"),
    "PodDisruptionBudget": ("policy/v1", "policy/v1beta1"),
}
"""Versions of the manifests, and those of 1.20, whose fields are the same."""

PLURALS = {"NetworkPolicy": "networkpolicies"}
OF_OTHERS = {"DynamoGraphDeployment", "ScaledObject", "PodMonitor", "PrometheusRule", "InferencePool", "HTTPRoute"}
CASES = ("cpu", "hpa", "operated disagg", "vllm")
CORES = 16
START_S = 300.0


def served(resource: dict[str, Any]) -> dict[str, Any]:
    """The resource in the version that the server has."""
    if resource["kind"] not in OLDER:
        return resource
    newer, older = OLDER[resource["kind"]]
    assert resource["apiVersion"] == newer
    return {**resource, "apiVersion": older}


def plural(resource: dict[str, Any]) -> str:
    return PLURALS.get(resource["kind"], f"{resource['kind'].lower()}s")


def path_of(resource: dict[str, Any]) -> str:
    return f"{collection(resource['apiVersion'], plural(resource))}/{resource['metadata']['name']}"


@cache
def manifests() -> dict[str, list[dict[str, Any]]]:
    """Resources of Kubernetes' own kinds, by where they are."""
    kubectl = Path(sys.executable).with_name("kubectl")
    built = subprocess.run([kubectl, "kustomize", FOLDER / "nats"], capture_output=True, text=True, check=True)
    texts = {"nats": built.stdout, "models": (FOLDER / "models.yaml").read_text()}
    texts |= {path.stem: path.read_text() for path in (FOLDER / "operations").glob("[dn]*.yaml")}
    return {
        name: [served(each) for each in yaml.safe_load_all(text) if each["kind"] not in OF_OTHERS]
        for name, text in texts.items()
    }


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    """With a namespace, a node and volumes."""
    with kube_api(tmp_path_factory.mktemp("kube-api"), "--core") as api:
        made(api, "/api/v1/namespaces", {"metadata": {"name": "dlw"}})
        made(api, "/api/v1/nodes", {"metadata": {"name": "here", "labels": {"kubernetes.io/hostname": "here"}}})
        room = {"cpu": str(CORES), "memory": "64Gi", "pods": "50"}
        status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
        assert api.patch("/api/v1/nodes/here/status", {"status": status}).status_code == 200
        for name, mode in (("models", "ReadWriteMany"), ("data", "ReadWriteOnce")):
            spec = {"capacity": {"storage": "20Gi"}, "accessModes": [mode], "hostPath": {"path": "/nowhere"}}
            made(api, "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})
        path = f"{collection('v1', 'serviceaccounts')}/default"
        wait_for(lambda: api.get(path).status_code == 200, "the controllers", START_S)
        yield api


def made(api: KubeApi, path: str, resource: dict[str, Any]) -> None:
    answer = api.post(path, resource)
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize("name", sorted(manifests()))
def test_the_server_takes_what_is_its_own(api: KubeApi, name: str) -> None:
    assert manifests()[name]
    for each in manifests()[name]:
        answer = api.apply(yaml.safe_dump(each), plural(each))
        assert answer.status_code in (200, 201), answer.text


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_what_the_chart_makes(api: KubeApi, rendered: dict[str, Rendered], case: str) -> None:
    for each in resources(rendered, case):
        if each["kind"] not in OF_OTHERS:
            answer = api.apply(yaml.safe_dump(served(each)), plural(each))
            assert answer.status_code in (200, 201), answer.text


BROKEN = {
    "a misspelt field": ("dlw-worker", "Deployment", "enableServiceLinks:", "enableServiceLink:", "field not declared"),
    "a misspelt probe": ("dlw-worker", "Deployment", "failureThreshold:", "failureTreshold:", "field not declared"),
    "a grace period in words": (
        *("dlw-worker", "Deployment", "terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: a minute"),
        "terminationGracePeriodSeconds: expected numeric",
    ),
    "a probe that never runs": ("dlw-worker", "Deployment", "periodSeconds: 10", "periodSeconds: -1", "periodSeconds"),
    "a probe of no port": ("dlw-worker", "Deployment", "port: metrics", "port: 70000", "httpGet.port"),
    "another policy": ("dlw-worker", "Deployment", "IfNotPresent", "Sometimes", 'Unsupported value: "Sometimes"'),
    "no amount": ("dlw-worker", "Deployment", "memory: 16Gi", "memory: 16Gib", "quantities must match"),
    "less than it asks for": ("dlw-worker", "Deployment", "memory: 16Gi", "memory: 1Gi", "must be less than or equal"),
    "a selector of others": (
        *("dlw-worker", "Deployment", "matchLabels:\n      app.kubernetes.io/name: dlw-worker"),
        *("matchLabels:\n      app.kubernetes.io/name: other", "does not match template"),
    ),
    "a port of no number": ("dlw-nats", "Service", "port: 4222", "port: 0", "must be between 1 and 65535"),
    "another protocol": ("dlw-nats", "Service", "protocol: TCP", "protocol: HTTP", 'Unsupported value: "HTTP"'),
    "a policy of a word": ("dlw-worker", "NetworkPolicy", "- Ingress", "- Inbound", 'Unsupported value: "Inbound"'),
    "a budget below nothing": (
        *("dlw-worker", "PodDisruptionBudget", "maxUnavailable: 1", "maxUnavailable: -1"),
        "greater than or equal to 0",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_server_says_what_is_wrong(api: KubeApi, case: str) -> None:
    name, kind, old, new, said = BROKEN[case]
    (found,) = (each for each in manifests()["nats"] if (each["metadata"]["name"], each["kind"]) == (name, kind))
    text = yaml.safe_dump(found)
    assert old in text, text
    answer = api.apply(text.replace(old, new, 1), plural(found))
    assert answer.status_code >= 400
    assert said in answer.text.replace('\\"', '"'), answer.text


def pods(api: KubeApi) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get(collection("v1", "pods")).json()["items"]
    return found


def test_pods_are_scheduled_with_their_probes_and_grace_periods(api: KubeApi) -> None:
    """And one more than the node has cores for waits, since requests are heeded."""
    applied = [*manifests()["models"], *manifests()["nats"]]
    for each in applied:
        answer = api.apply(yaml.safe_dump(each), plural(each), dry_run=False)
        assert answer.status_code in (200, 201), answer.text
    templates = {
        each["metadata"]["name"]: each["spec"]["template"] for each in applied if "template" in each.get("spec", {})
    }
    assert len(templates) == 4

    def scheduled() -> list[dict[str, Any]] | None:
        found = pods(api)
        return found if len(found) == len(templates) and all("nodeName" in each["spec"] for each in found) else None

    for pod in wait_for(scheduled, "that all pods have a node", START_S):
        assert pod["spec"]["nodeName"] == "here"
        (name,) = (name for name in templates if pod["metadata"]["name"].startswith(f"{name}-"))
        given = templates[name]["spec"]
        assert pod["spec"]["terminationGracePeriodSeconds"] == given.get("terminationGracePeriodSeconds", 30)
        for container, wanted in zip(pod["spec"]["containers"], given["containers"], strict=True):
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert (probe in container) == (probe in wanted)
                if probe in wanted:
                    defaults = {"successThreshold": 1, "httpGet": {"scheme": "HTTP", **wanted[probe]["httpGet"]}}
                    assert container[probe] == {**wanted[probe], **defaults}
    workers = next(
        each for each in applied if each["metadata"]["name"] == "dlw-worker" and each["kind"] == "Deployment"
    )
    asked = int(templates["dlw-worker"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
    path = f"{path_of(workers)}/scale"
    assert api.patch(path, {"spec": {"replicas": CORES // asked}}).status_code == 200  # the batch worker has its own

    def waits() -> bool:
        reasons = [
            one for each in pods(api) for one in each["status"].get("conditions", []) if one["status"] == "False"
        ]
        return any("Insufficient cpu" in one.get("message", "") for one in reasons)

    wait_for(waits, "that a pod waits for cores", START_S)


def adapter() -> dict[str, Any]:
    """The definition of what scales a component of a graph: Dynamo's operator has it."""
    made = definition("nvidia.com", "v1beta1", "DynamoGraphDeploymentScalingAdapter", fields({"replicas": "integer"}))
    (version,) = made["spec"]["versions"]
    status = fields({"replicas": "integer", "selector": "string"})
    version["schema"]["openAPIV3Schema"]["properties"]["status"] = status
    scale = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    version["subresources"] = {"status": {}, "scale": {**scale, "labelSelectorPath": ".status.selector"}}
    return made


def test_an_autoscaler_follows_the_waiting_requests(api: KubeApi, rendered: dict[str, Rendered]) -> None:
    (scaler,) = (each for each in resources(rendered, "hpa") if each["kind"] == "HorizontalPodAutoscaler")
    api.define(adapter())
    adapters = collection("nvidia.com/v1beta1", "dynamographdeploymentscalingadapters")
    target = dict(scaler["spec"]["scaleTargetRef"])
    name = target.pop("name")
    scaled = {**target, "metadata": {"name": name}, "spec": {"replicas": 1}}
    answer = api.apply(yaml.safe_dump(scaled), plural(scaled), dry_run=False)
    assert answer.status_code == 201, answer.text
    path = f"{adapters}/{name}"
    status = {"replicas": 1, "selector": "nvidia.com/dynamo-component-type=worker"}
    assert api.patch(f"{path}/status", {"status": status}).status_code == 200
    with external_metrics(api.directory / "server.crt", api.directory / "server.key") as metrics:
        metrics.value = 2 * int(scaler["spec"]["metrics"][0]["external"]["target"]["averageValue"]) + 1
        for where, each in api_service(metrics.server_port):
            made(api, where, each)
        answer = api.apply(yaml.safe_dump(served(scaler)), plural(scaler), dry_run=False)
        assert answer.status_code == 201, answer.text

        def replicas() -> int:
            return int(api.get(path).json()["spec"]["replicas"])

        try:
            wait_for(lambda: replicas() == 3, "that a worker for every 16 waiting requests is asked for", START_S)
        except AssertionError as error:
            raise AssertionError(api.get(path_of(served(scaler))).text) from error
        selector = scaler["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]
        ((label, value),) = selector.items()
        assert set(metrics.asked) == {("dlw_waiting_requests", f"{label}={value}")}
