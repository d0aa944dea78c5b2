"""The kustomize overlays and what operates the graph: built by kubectl, checked against Kubernetes'
own schemas, the worker's parser, and the metrics that a scrape has.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dynamo.prometheus_names import frontend_service, name_prefix
from manifest_files import FOLDER, GPU_ENGINES, REPOSITORY, WORKERS, Component, load_graph, load_schema

from worker.arguments import parse_arguments
from worker.frontdoor.options import parse_options
from worker.metrics import OUTCOMES

OVERLAYS = {
    "cpu": ("embedded", "cpu"),
    "trtllm": ("trtllm", "auto"),
    "vllm": ("vllm", "auto"),
}
KUBERNETES = "1.32"
BUILT_IN = {"NetworkPolicy", "PodDisruptionBudget", "ConfigMap"}
GRAPH, TYPE = "nvidia.com/dynamo-graph-deployment-name", "nvidia.com/dynamo-component-type"

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@cache
def built(overlay: str) -> str:
    kubectl = Path(sys.executable).with_name("kubectl")
    command = [kubectl, "kustomize", FOLDER / "overlays" / overlay]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # type: ignore[arg-type]


def resources(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(built(overlay)))


def of_kind(overlay: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in resources(overlay) if each["kind"] == kind]


def components(overlay: str) -> list[Component]:
    (graph,) = of_kind(overlay, "DynamoGraphDeployment")
    name = f"agg-{overlay}" if overlay in GPU_ENGINES else "agg"
    return [Component(name, fields, graph["spec"]["env"]) for fields in graph["spec"]["components"]]


@each_overlay
def test_an_overlay_is_a_graph_with_all_that_operates_it(overlay: str) -> None:
    kinds = sorted(each["kind"] for each in resources(overlay))
    assert kinds == sorted(
        [
            *("ConfigMap", "DynamoGraphDeployment", "NetworkPolicy", "NetworkPolicy", "PodDisruptionBudget"),
            *("PodDisruptionBudget", "PodMonitor", "PodMonitor", "PrometheusRule"),
            *([] if overlay in GPU_ENGINES else ["ScaledObject"]),
        ]
    )
    (graph,) = of_kind(overlay, "DynamoGraphDeployment")
    assert [error.message for error in jsonschema.Draft202012Validator(load_schema()).iter_errors(graph)] == []


@each_overlay
def test_kubernetes_takes_what_is_its_own(overlay: str) -> None:
    found = [each for each in resources(overlay) if each["kind"] in BUILT_IN]
    assert {each["kind"] for each in found} == BUILT_IN
    for each in found:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["models.yaml"])
def test_kubernetes_takes_the_volume_and_the_job(name: str) -> None:
    for each in yaml.safe_load_all((FOLDER / name).read_text()):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_kubernetes_refuses_a_misspelt_field() -> None:
    budget = of_kind("cpu", "PodDisruptionBudget")[0]
    budget["spec"]["maxUnavailabel"] = budget["spec"].pop("maxUnavailable")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(budget, KUBERNETES, strict=True)


@each_overlay
def test_the_worker_reads_its_command_line(overlay: str) -> None:
    frontend, worker = components(overlay)
    arguments = parse_arguments(worker.main["args"], worker.environ)
    assert parse_options(frontend.door["args"], {}).model_path == arguments.model_path
    assert (arguments.engine, arguments.device) == OVERLAYS[overlay]
    assert worker.main["resources"]["limits"].get("nvidia.com/gpu") == (None if overlay == "cpu" else "1")
    assert ("scalingAdapter" in worker.fields) == (overlay not in GPU_ENGINES)


@each_overlay
def test_every_image_comes_from_the_registry(overlay: str) -> None:
    images = [part["image"] for each in components(overlay) for part in each.pod["containers"]]
    assert {image.rpartition("/")[0] for image in images} == {"registry.example.com/team"}
    names = {image.rpartition("/")[2] for image in images}
    engines = {f"dynamo-logits-worker-{overlay}:1.4.2"} if overlay in GPU_ENGINES else set()
    assert names == {"dynamo-logits-worker:1.4.2"} | engines


@pytest.mark.parametrize("engine", GPU_ENGINES)
def test_an_engine_s_overlay_is_its_manifest(engine: str) -> None:
    _, overlaid = components(engine)
    _, plain = load_graph(f"agg-{engine}")["spec"]["components"]
    (main,) = plain["podTemplate"]["spec"]["containers"]
    assert overlaid.main == {**main, "image": f"registry.example.com/team/{main['image']}"}
    assert overlaid.pod["volumes"] == plain["podTemplate"]["spec"]["volumes"]


@each_overlay
def test_everything_selects_the_pods_of_the_graph(overlay: str) -> None:
    (graph,) = of_kind(overlay, "DynamoGraphDeployment")
    types = {part["type"] for part in graph["spec"]["components"]}
    for kind in ("NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
        for each in of_kind(overlay, kind):
            selector = each["spec"].get("podSelector") or each["spec"]["selector"]
            assert selector["matchLabels"][GRAPH] == graph["metadata"]["name"]
            assert selector["matchLabels"].get(TYPE, "worker") in types
    for each in of_kind(overlay, "ScaledObject"):
        names = {f"{graph['metadata']['name']}-{part['name']}" for part in graph["spec"]["components"]}
        assert each["spec"]["scaleTargetRef"]["name"] in names


@each_overlay
def test_ports_are_those_of_the_pods(overlay: str) -> None:
    frontend, worker = components(overlay)
    system = int(worker.environ["DYN_SYSTEM_PORT"])
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(overlay, "NetworkPolicy")}
    assert [one["port"] for one in policies["dlw-agg"]["ingress"][1]["ports"]] == [system]
    served = int(frontend.door["args"][frontend.door["args"].index("--port") + 1])
    assert [one["port"] for one in policies["dlw-agg-frontend"]["ingress"][0]["ports"]] == [served]
    monitors = {each["metadata"]["name"]: each["spec"] for each in of_kind(overlay, "PodMonitor")}
    assert [one["portNumber"] for one in monitors["dlw-agg"]["podMetricsEndpoints"]] == [system]
    assert set(monitors["dlw-agg"]["selector"]["matchExpressions"][0]["values"]) == set(WORKERS)
    assert [one["portNumber"] for one in monitors["dlw-agg-frontend"]["podMetricsEndpoints"]] == [served]


@each_overlay
def test_names_are_resolved_and_the_api_server_is_reached(overlay: str) -> None:
    """In clusters whose DNS lies elsewhere, too, and whose API server listens on another port."""
    (policy,) = [each["spec"] for each in of_kind(overlay, "NetworkPolicy") if "Egress" in each["spec"]["policyTypes"]]
    _, dns, server = policy["egress"]
    (names,) = dns["to"][0]["namespaceSelector"]["matchExpressions"]
    assert (names["operator"], set(names["values"])) == ("In", {"kube-system", "openshift-dns"})
    assert dns["to"][1] == {"ipBlock": {"cidr": "169.254.20.10/32"}}
    assert {(one["protocol"], one["port"]) for one in dns["ports"]} == {*product(("UDP", "TCP"), (53, 5353))}
    assert {one["port"] for one in server["ports"]} == {443, 6443, 8443, 16443}


# Metrics: docs/metrics.md is compared with a scrape in tests/worker/test_metrics_document.py.


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of every metric."""
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(dlw_\w+)` \| (\w+) \| (.*?) \|", text, flags=re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


OF_GRAPH = re.sub(r"[^a-z]", "_", GRAPH)
"""Label of the graph, as Prometheus has it."""
OF_FRONTEND = {f"{name_prefix.FRONTEND}_{frontend_service.MODEL_MIGRATION_TOTAL}"}
"""Metrics of Dynamo's frontend; `test_worker_drain.py` sees them counted."""
SCRAPED = {"pod", "namespace", "instance", OF_GRAPH}
"""Labels that Prometheus adds."""


def expressions() -> list[str]:
    rules = [rule["expr"] for rule in alerts()]
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    (scaled,) = of_kind("cpu", "ScaledObject")
    variables = [one["query"]["query"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    return [*rules, *panels, *variables, *(one["metadata"]["query"] for one in scaled["spec"]["triggers"])]


def alerts() -> list[dict[str, Any]]:
    (rules,) = of_kind("cpu", "PrometheusRule")
    return [rule for group in rules["spec"]["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    (config,) = of_kind("cpu", "ConfigMap")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    found: dict[str, Any] = json.loads(config["data"]["dashboard.json"])
    return found


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_of_a_query_is_scraped(expression: str) -> None:
    known = documented()
    used = re.findall(r"(dlw_\w+)(?:\{([^}]*)\})?", expression)
    if not used:
        assert re.fullmatch(r"sum\((\w+)\)", expression)[1] in OF_FRONTEND  # type: ignore[index]
        return
    for name, matchers in used:
        counted = re.sub(r"_created$", "_total", name)
        base = re.sub(r"_(bucket|sum|count)$", "", counted)
        kind, labels = known[counted] if counted in known else known[base]
        assert (kind == "histogram") == (counted != base)
        matched = re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', matchers)
        assert {label for label, _ in matched} <= labels | SCRAPED
        if counted == "dlw_requests_total":
            assert {value for label, text in matched if label == "outcome" for value in text.split("|")} <= {*OUTCOMES}
        if kind == "counter" and name == counted:
            assert re.search(rf"(rate|increase)\({name}|{name}\S* offset ", expression)
    grouped = {label for found in re.findall(r" by \(([^)]*)\)", expression) for label in found.split(", ")}
    assert grouped <= SCRAPED | {"le"}.union(*(known.get(name, ("", set()))[1] for name, _ in used))
    assert ("_bucket" in expression) == ("histogram_quantile" in expression)


def test_a_scaler_counts_no_other_graphs_requests() -> None:
    """The name of one graph may begin with that of another."""
    (monitor,) = [one for one in of_kind("cpu", "PodMonitor") if one["metadata"]["name"] == "dlw-agg"]
    assert monitor["spec"]["podTargetLabels"] == [GRAPH]
    (scaler,) = of_kind("cpu", "ScaledObject")
    query = scaler["spec"]["triggers"][0]["metadata"]["query"]
    matchers = re.findall(r'(\w+)(=~|=)"([^"]*)"', query)
    counted = {
        graph
        for graph in ("dlw-agg", "dlw-agg-router", "dlw-agg-vllm", "dlw-disagg")
        if all(
            re.fullmatch(
                text if sign == "=~" else re.escape(text), {OF_GRAPH: graph, "pod": f"{graph}-worker-1"}[label]
            )
            for label, sign, text in matchers
        )
    }
    assert counted == {"dlw-agg"}


def test_every_alert_says_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) > 10
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "runbook"}
        for document in re.findall(r"docs/[\w-]+\.md", rule["annotations"]["runbook"]):
            assert (REPOSITORY / document).is_file()
        for option in re.findall(r"--[a-z-]+", rule["annotations"]["runbook"]):
            assert f"`{option}`" in (REPOSITORY / "docs" / "configuration.md").read_text()


def test_the_panels_of_the_dashboard_have_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken = {
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    }
    assert len(taken) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)
    assert max(x for x, _ in taken) < 24
    for panel in panels:
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]
