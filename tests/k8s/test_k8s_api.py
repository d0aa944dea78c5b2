"""A real API server takes every custom resource of the manifests, overlays and the chart's golden
forms, with strict validation, and says by path what is wrong with a broken one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kube_api import OTHERS, KubeApi, graph_definition, kube_api, other_definitions
from manifest_files import FOLDER, GRAPHS

pytestmark = pytest.mark.campaign

GRAPH = "dynamographdeployments"
KINDS = {"DynamoGraphDeployment", *OTHERS}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    with kube_api(tmp_path_factory.mktemp("kube-api")) as api:
        for each in (graph_definition(), *other_definitions()):
            api.define(each)
        yield api


@cache
def built(folder: str) -> list[dict[str, Any]]:
    """The custom resources that kustomize makes of a folder."""
    kubectl = Path(sys.executable).with_name("kubectl")
    ran = subprocess.run([kubectl, "kustomize", FOLDER / folder], capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(ran.stdout) if each["kind"] in KINDS]


def text_of(graph: str) -> str:
    return (FOLDER / "graphs" / f"{graph}.yaml").read_text()


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_server_takes_the_graph(api: KubeApi, graph: str) -> None:
    answer = api.apply(text_of(graph), GRAPH)
    assert answer.status_code in (200, 201), answer.text


@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/trtllm", "overlays/vllm", "overlays/gateway", "nats"])
def test_the_server_takes_all_of_a_folder(api: KubeApi, folder: str) -> None:
    found = built(folder)
    assert found
    for each in found:
        answer = api.apply(yaml.safe_dump(each), f"{each['kind'].lower()}s")
        assert answer.status_code in (200, 201), answer.text


BROKEN = {
    "a misspelt field": ("replicas: 1", "replica: 1", "spec.components[0].replica"),
    "a misspelt field deep inside": ("failureThreshold: 30", "failureTreshold: 30", "startupProbe.failureTreshold"),
    "a field twice": ("      replicas: 1\n", "      replicas: 1\n      replicas: 2\n", "already set"),
    "a word for a number": ("replicas: 1", "replicas: one", "spec.components[0].replicas: expected numeric"),
    "a number for a text": ('cpu: "1", memory: 1Gi', "cpu: 1, memory: 1Gi", "requests.cpu: expected string"),
    "a text for a list": (
        "command: [python3, -m, dynamo.frontend]",
        "command: python3",
        "containers[0].command: expected list",
    ),
    "another type": ("type: frontend", "type: front", 'Unsupported value: "front"'),
    "another policy": ("imagePullPolicy: IfNotPresent", "imagePullPolicy: Sometimes", "imagePullPolicy"),
    "a negative number": ("replicas: 1", "replicas: -1", "should be greater than or equal to 0"),
    "another version": ("nvidia.com/v1beta1", "nvidia.com/v1beta9", "404"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_server_says_what_is_wrong(api: KubeApi, case: str) -> None:
    old, new, said = BROKEN[case]
    text = text_of("agg")
    assert old in text
    answer = api.apply(text.replace(old, new, 1), GRAPH)
    assert answer.status_code >= 400
    assert said in f"{answer.status_code} {answer.text}".replace('\\"', '"'), answer.text


def test_an_applied_graph_is_read_again(api: KubeApi) -> None:
    answer = api.apply(text_of("agg"), GRAPH, dry_run=False)
    assert answer.status_code == 201, answer.text
    stored = api.get(f"/apis/nvidia.com/v1beta1/namespaces/dlw/{GRAPH}/dlw-agg").json()
    assert stored["spec"] == yaml.safe_load(text_of("agg"))["spec"]
    scaled = text_of("agg").replace("replicas: 1", "replicas: 3", 1)
    assert api.apply(scaled, GRAPH, dry_run=False).status_code == 200
    stored = api.get(f"/apis/nvidia.com/v1beta1/namespaces/dlw/{GRAPH}/dlw-agg").json()
    assert [each["replicas"] for each in stored["spec"]["components"]] == [3, 1]
    assert stored["metadata"]["generation"] == 2
