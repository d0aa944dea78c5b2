"""The chart, rendered by Helm's own library, gives the manifests of `k8s/graphs`, the overlays and
`k8s/operations`; values that it does not know are refused.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_chart import CHART, Rendered, by_name, render, resources_of
from manifest_files import FOLDER, GPU_ENGINES, GRAPHS, Component, load_graph, load_schema

from worker.arguments import OPTIONS, parse_arguments
from worker.frontdoor.options import parse_options

KUBERNETES = "1.32"

OPERATED = {
    "operations": {"enabled": True},
    "monitoring": {"enabled": True},
    "image": {"registry": "registry.example.com/team"},
}


def values_of(graph: str) -> dict[str, Any]:
    """Values that make the graph of that name."""
    engine = graph.rpartition("-")[2]
    values: dict[str, Any] = {"disaggregated": "disagg" in graph, "router": "router" in graph}
    if engine in GPU_ENGINES:
        values |= {"engine": engine, "model": {"path": "/models/Qwen3-0.6B"}}
    if "router" in graph:
        values["workers"] = {"replicas": 2}
    return values


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{graph: (f"dlw-{graph.replace('_', '-')}", values_of(graph)) for graph in GRAPHS},
    "cpu": (
        "dlw-agg",
        {
            **OPERATED,
            "workers": {"replicas": 2},
            "autoscaling": {"enabled": True, "minReplicas": 1},
            "gateway": {"enabled": True},
        },
    ),
    **{engine: ("dlw-agg", {**values_of(f"agg-{engine}"), **OPERATED}) for engine in GPU_ENGINES},
    "hpa": ("other", {"autoscaling": {"enabled": True, "kind": "hpa", "waitingRequests": 16}}),
    "scaling of vLLM": ("dlw-agg", {**values_of("agg-vllm"), "autoscaling": {"enabled": True}}),
    "added": (
        "dlw-agg",
        {
            "workers": {"args": ["--max-num-seqs", "8"], "env": [{"name": "A", "value": "b"}], "kvBlocks": 0},
            "frontend": {"args": ["--busy-threshold", "0.9"]},
            "frontDoor": {"env": [{"name": "C", "value": "d"}]},
        },
    ),
    "a door's own options": (
        "dlw-agg",
        {"frontDoor": {"args": ["--body-limit-mib", "8", "--drain-timeout-s=40"]}},
    ),
    "a door's long drain": (
        "dlw-agg",
        {
            "frontDoor": {
                "args": ["--host", "::", "--", "--drain-timeout-s", "300"],  # the last one is a worker's
                "env": [
                    {"name": "FRONT_DOOR_DRAIN_TIMEOUT_S", "value": "90.5"},
                    {"name": "FRONT_DOOR_BODY_LIMIT_MIB", "value": "30"},
                    {"name": "HOME", "value": "/tmp/door"},
                ],
            }
        },
    ),
    "a frontend's own limit": ("dlw-agg", {"frontend": {"env": [{"name": "DYN_HTTP_BODY_LIMIT_MB", "value": "9"}]}}),
    "underscores": (
        "pair",
        {"engine": "vllm", "disaggregated": True, "workers": {"args": ["--kv_transfer_devices=all"]}},
    ),
    "a long drain": ("pair", {"disaggregated": True, "workers": {"drainTimeoutSeconds": 300}}),
    "a late drain": (
        "pair",
        {
            "disaggregated": True,
            "workers": {"env": [{"name": "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "value": "90"}]},
        },
    ),
    "names that YAML would read as something else": (
        "null",
        {
            **OPERATED,
            "model": {"claim": "on"},
            "operations": {"enabled": True, "prometheusNamespace": "1e3"},
            "gateway": {"enabled": True, "name": "0x1", "endpointPicker": {"name": "no"}},
            "autoscaling": {"enabled": True, "kind": "hpa"},
        },
    ),
    "a release with a dot": ("my.release", {}),
    "a release with a digit": ("3-models", {}),
    "a long release": ("a" * 47, {}),
    "a long namespace": (f"{'a' * 23}@{'b' * 40}", {}),
    "the longest names": (f"{'a' * 46}@{'b' * 16}", {"disaggregated": True}),
    "a release with a dot and a name": ("my.release", {"name": "my-release"}),
    "operated disagg": ("pair", {"disaggregated": True, "operations": {"enabled": True, "prometheusNamespace": "obs"}}),
}

REPLACED = {
    "--packed-copy": "off",
    "--device": "auto",
    "--kv-blocks": "4096",
    "--kv-cache-memory": "8GiB",
    "--kv-transfer-devices": "all",
    "--enable-kv-routing": "true",
}
"""Options of workers that values give in place of the chart's own, or of one that contradicts
them.
"""

OF_VALUES = {
    "--engine": ("constant", "engine"),
    "--model-path": ("/models/other", "model.path"),
    "--disaggregation-mode": ("decode", "disaggregated"),
    "--drain-timeout-s": ("90", "workers.drainTimeoutSeconds"),
}
"""Those that have values of their own, which more than the command line follows: a text, and the
name of the value.
"""


def variable(flag: str) -> str:
    (option,) = (one for one in OPTIONS if one.flag == flag)
    return option.env


PAIR: dict[str, Any] = {"disaggregated": True}
for _flag, _text in REPLACED.items():
    CASES[f"{_flag} as an argument"] = ("pair", PAIR | {"workers": {"args": [f"{_flag}={_text}"]}})
    CASES[f"{_flag} as a variable"] = (
        "pair",
        PAIR | {"workers": {"env": [{"name": variable(_flag), "value": _text}]}},
    )

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{flag} as an argument": ({"workers": {"args": [flag, text]}}, f"{flag} is given by the value {value} alone")
        for flag, (text, value) in OF_VALUES.items()
    },
    **{
        f"{flag} as a variable": (
            {"workers": {"env": [{"name": variable(flag), "value": text}]}},
            f"{flag} is given by the value {value} alone",
        )
        for flag, (text, value) in OF_VALUES.items()
    },
    "another port of a door": ({"frontDoor": {"args": ["--port", "9000"]}}, "--port is the chart's own"),
    "another drain with underscores": (
        {"engine": "vllm", "workers": {"args": ["--drain_timeout_s", "90"]}},
        "--drain-timeout-s is given by the value workers.drainTimeoutSeconds alone",
    ),
    "another port of a frontend": ({"frontend": {"args": ["--http-port=9000"]}}, "--http-port is the chart's own"),
    "a frontend that is reached past its front door": (
        {"frontend": {"args": ["--http-host", "0.0.0.0"]}},
        "frontend: --http-host is the chart's own",
    ),
    "another system port": (
        {"workers": {"env": [{"name": "DYN_SYSTEM_PORT", "value": "8081"}]}},
        "DYN_SYSTEM_PORT is the chart's own",
    ),
    "a misspelt name": ({"wokers": {}}, "wokers"),
    "a misspelt name inside": ({"workers": {"replica": 2}}, "replica"),
    "another engine": ({"engine": "sglang"}, "engine"),
    "a number for a text": ({"image": {"tag": 1.4}}, "tag"),
    "a fraction of a worker": ({"workers": {"replicas": 1.5}}, "replicas"),
    "a path elsewhere": ({"model": {"path": "tiny"}}, "path"),
    "a long name": ({"name": "a" * 47}, "name"),
    "a name with a digit": ({"name": "3-models"}, "name"),
    "scaling of a pair": ({"disaggregated": True, "autoscaling": {"enabled": True}}, "autoscaling.enabled"),
    "fewer workers at most than at least": (
        {"autoscaling": {"enabled": True, "minReplicas": 5}},
        "autoscaling.minReplicas: must be at most autoscaling.maxReplicas, 4, got 5",
    ),
    "scaling of TensorRT-LLM": ({"engine": "trtllm", "autoscaling": {"enabled": True}}, "autoscaling.enabled"),
}


@pytest.fixture(scope="module")
def rendered(helm: Path) -> dict[str, Rendered]:
    """Files by case, or the reason of a refusal."""
    asked = [*CASES.values(), *(("dlw-agg", values) for values, _ in REFUSED.values())]
    return dict(zip([*CASES, *REFUSED], render(helm, asked), strict=True))


def resources(rendered: dict[str, Rendered], case: str) -> list[dict[str, Any]]:
    return resources_of(rendered[case])


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_is_its_manifest(rendered: dict[str, Rendered], graph: str) -> None:
    assert resources(rendered, graph) == [load_graph(graph)]


@pytest.mark.parametrize("overlay", ["gateway", *GPU_ENGINES])
def test_an_overlay_is_what_the_chart_gives(rendered: dict[str, Rendered], overlay: str) -> None:
    kubectl = Path(sys.executable).with_name("kubectl")
    built = subprocess.run(
        [kubectl, "kustomize", FOLDER / "overlays" / overlay], capture_output=True, text=True, check=True
    )
    expected = by_name(list(yaml.safe_load_all(built.stdout)))
    given = by_name(resources(rendered, "cpu" if overlay == "gateway" else overlay))
    if overlay == "gateway":  # the overlay begins with two workers, the chart with the least number
        expected["DynamoGraphDeployment", "dlw-agg"]["spec"]["components"][1]["replicas"] = 1
        # and it knows its namespace
        prometheus = expected["ScaledObject", "dlw-agg-worker"]["spec"]["triggers"][0]["metadata"]
        prometheus["query"] = prometheus["query"].replace("{", '{namespace="dlw",')
    board = expected.pop(("ConfigMap", "dlw-dashboard"))
    board["metadata"]["name"] = "dlw-agg-dashboard"  # a release has its own
    expected["ConfigMap", "dlw-agg-dashboard"] = board
    assert given == expected


def test_an_autoscaler_of_kubernetes(rendered: dict[str, Rendered]) -> None:
    found = by_name(resources(rendered, "hpa"))
    scaler = found["HorizontalPodAutoscaler", "other-worker"]
    kubernetes_validate.validate(scaler, KUBERNETES, strict=True)
    assert scaler["spec"]["metrics"][0]["external"]["target"]["averageValue"] == "16"
    assert scaler["spec"]["scaleTargetRef"]["name"] == "other-worker"


def test_arguments_and_variables_are_added(rendered: dict[str, Rendered]) -> None:
    (graph,) = resources(rendered, "added")
    (plain,) = resources(rendered, "agg")
    assert list(jsonschema.Draft202012Validator(load_schema()).iter_errors(graph)) == []
    containers, plain_ones = (
        [each for part in one["spec"]["components"] for each in part["podTemplate"]["spec"]["containers"]]
        for one in (graph, plain)
    )
    frontend, door, worker = containers
    assert frontend["args"] == [*plain_ones[0]["args"], "--busy-threshold", "0.9"]
    assert door["env"] == [*plain_ones[1]["env"], {"name": "C", "value": "d"}]
    assert worker["env"] == [*plain_ones[2]["env"], {"name": "A", "value": "b"}]
    without = [each for each in plain_ones[2]["args"] if each not in ("--kv-blocks", "2048")]
    assert worker["args"] == [*without, "--max-num-seqs", "8"]


def test_a_front_door_has_its_options_once(rendered: dict[str, Rendered]) -> None:
    """It takes none that is given twice."""
    (graph,) = resources(rendered, "a door's own options")
    (door,) = [
        each
        for part in graph["spec"]["components"]
        for each in part["podTemplate"]["spec"]["containers"]
        if each["name"] == "front-door"
    ]
    options = parse_options(door["args"], {})
    assert (options.body_limit_mib, options.drain_timeout_s, options.port) == (8, 40.0, 8000)


def test_a_frontend_goes_with_its_front_door(rendered: dict[str, Rendered]) -> None:
    """Its limit of bodies, and the pod's time, are those that the values give the front door."""
    expected = {
        "a door's own options": ("9", 60, 40.0, "0.0.0.0"),
        "a door's long drain": ("31", 101, 90.5, "::"),
        "a frontend's own limit": ("9", 60, 50.0, "0.0.0.0"),
    }
    for case, (limit, grace_s, drain_s, host) in expected.items():
        (graph,) = resources(rendered, case)
        frontend = Component("agg", graph["spec"]["components"][0], graph["spec"]["env"])
        environ = {each["name"]: each["value"] for each in frontend.door["env"]}
        assert len(environ) == len(frontend.door["env"])
        options = parse_options(frontend.door["args"], environ)
        assert frontend.main["env"] == [{"name": "DYN_HTTP_BODY_LIMIT_MB", "value": limit}]
        assert frontend.pod["terminationGracePeriodSeconds"] == grace_s
        assert (options.drain_timeout_s, options.host) == (drain_s, host)
        assert options.body_limit_mib < int(limit)


@pytest.mark.parametrize("flag", REPLACED)
@pytest.mark.parametrize("way", ["argument", "variable"])
def test_what_values_give_a_worker_counts(rendered: dict[str, Rendered], flag: str, way: str) -> None:
    """The worker refuses an option that is given twice, and two sizes of its KV cache."""
    (graph,) = resources(rendered, f"{flag} as {'an' if way == 'argument' else 'a'} {way}")
    (option,) = (one for one in OPTIONS if one.flag == flag)
    for fields in graph["spec"]["components"][1:]:
        worker = Component("disagg", fields, graph["spec"]["env"])
        arguments = parse_arguments(worker.main["args"], worker.environ)
        assert getattr(arguments, option.name) == option.read(REPLACED[flag], flag)


def test_a_flag_with_underscores_is_given_once(rendered: dict[str, Rendered]) -> None:
    """The worker takes vLLM's spelling, too."""
    (graph,) = resources(rendered, "underscores")
    for fields in graph["spec"]["components"][1:]:
        worker = Component("disagg-vllm", fields, graph["spec"]["env"])
        assert parse_arguments(worker.main["args"], worker.environ).kv_transfer_devices == "all"


def test_without_packed_copies_a_volume_is_only_read(
    rendered: dict[str, Rendered],
) -> None:
    """Some volumes can only be read."""
    (graph,) = resources(rendered, "--packed-copy as an argument")
    for fields in graph["spec"]["components"]:
        pod = fields["podTemplate"]["spec"]
        (claim,) = (each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each)
        assert claim == {"claimName": "models", "readOnly": True}
        assert "/packed" not in {mount["mountPath"] for each in pod["containers"] for mount in each["volumeMounts"]}


def test_every_option_of_a_worker_is_replaced_or_refused(rendered: dict[str, Rendered]) -> None:
    (graph,) = resources(rendered, "a long drain")
    for fields in graph["spec"]["components"][1:]:
        given = {word for word in fields["podTemplate"]["spec"]["containers"][0]["args"] if word.startswith("--")}
        assert given <= {*REPLACED, *OF_VALUES}


def test_a_pod_has_the_time_of_its_drain(rendered: dict[str, Rendered]) -> None:
    """And as much beyond it as with the drain of the manifests, which is 30 s."""
    (longer,), (plain,) = resources(rendered, "a long drain"), resources(rendered, "disagg")
    for one, other in zip(longer["spec"]["components"], plain["spec"]["components"], strict=True):
        pod, usual = (each["podTemplate"]["spec"] for each in (one, other))
        is_worker = one["type"] in ("prefill", "decode")
        assert pod["terminationGracePeriodSeconds"] - usual["terminationGracePeriodSeconds"] == (270 * is_worker)
        (given,), (known,) = (
            [each["args"] for each in one["containers"] if each["name"] == "main"] for one in (pod, usual)
        )
        assert given == [*known, *(["--drain-timeout-s", "300"] if is_worker else [])]


def test_a_pod_has_the_time_before_its_drain(rendered: dict[str, Rendered]) -> None:
    """In which the runtime still takes requests: 5 s, unless values say another time."""
    (late,), (plain,) = resources(rendered, "a late drain"), resources(rendered, "disagg")
    for one, other in zip(late["spec"]["components"], plain["spec"]["components"], strict=True):
        longer, usual = (each["podTemplate"]["spec"]["terminationGracePeriodSeconds"] for each in (one, other))
        assert longer - usual == (85 if one["type"] in ("prefill", "decode") else 0)


def test_a_pair_is_operated_by_its_kinds(rendered: dict[str, Rendered]) -> None:
    found = by_name(resources(rendered, "operated disagg"))
    budgets = {name for kind, name in found if kind == "PodDisruptionBudget"}
    assert budgets == {"pair-frontend", "pair-prefill", "pair-decode"}
    for (kind, _), each in found.items():
        if kind in ("NetworkPolicy", "PodDisruptionBudget"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    ingress = found["NetworkPolicy", "pair"]["spec"]["ingress"]
    assert ingress[1]["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "obs"}


def test_names_stay_texts(rendered: dict[str, Rendered]) -> None:
    found = resources(rendered, "names that YAML would read as something else")
    assert len(found) > 10
    for each in found:
        if each["apiVersion"] in ("v1", "policy/v1", "networking.k8s.io/v1", "autoscaling/v2"):
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    graph = by_name(found)["DynamoGraphDeployment", "null"]
    assert list(jsonschema.Draft202012Validator(load_schema()).iter_errors(graph)) == []
    volumes = graph["spec"]["components"][0]["podTemplate"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"]["claimName"] == "on"
    pool, route = (one for one in found if one["kind"] in ("InferencePool", "HTTPRoute"))
    assert pool["spec"]["endpointPickerRef"]["name"] == "no"
    assert route["spec"]["parentRefs"][0]["name"] == "0x1"


def test_releases_of_one_namespace_share_no_name(rendered: dict[str, Rendered]) -> None:
    named = "names that YAML would read as something else"
    assert not set(by_name(resources(rendered, "cpu"))) & set(by_name(resources(rendered, named)))


def test_an_autoscaler_selects_by_a_label_that_is_scraped(rendered: dict[str, Rendered]) -> None:
    found = by_name(resources(rendered, "names that YAML would read as something else"))
    metric = found["HorizontalPodAutoscaler", "null-worker"]["spec"]["metrics"][0]["external"]["metric"]
    scraped = found["PodMonitor", "null"]["spec"]["podTargetLabels"]
    assert list(metric["selector"]["matchLabels"]) == [re.sub(r"[^a-z]", "_", label) for label in scraped]


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_mean_nothing_are_refused(rendered: dict[str, Rendered], case: str) -> None:
    reason = rendered[case]
    assert isinstance(reason, str), "it was rendered"
    assert REFUSED[case][1] in reason


def test_a_name_is_one_of_a_service(rendered: dict[str, Rendered]) -> None:
    """Helm takes releases with dots, and the operator names Services after the graph."""
    assert "name: must have no dots" in str(rendered["a release with a dot"])
    (graph,) = resources(rendered, "a release with a dot and a name")
    assert graph["metadata"]["name"] == "my-release"


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("a release with a digit", "name: must begin with a letter"),
        ("a long release", "name: must have at most 46 characters"),
        ("a long namespace", "name: must have at most 62 characters with the namespace"),
    ],
)
def test_a_name_fits_what_is_named_after_it(rendered: dict[str, Rendered], release: str, reason: str) -> None:
    """The operator makes names and labels of it; Helm takes releases of 53 characters."""
    assert reason in str(rendered[release])


def test_labels_of_the_longest_names_are_labels(rendered: dict[str, Rendered]) -> None:
    """Those that the operator gives the pods; the workers' have a hash."""
    (graph,) = resources(rendered, "the longest names")
    name, namespace = graph["metadata"]["name"], "b" * 16
    for part in graph["spec"]["components"]:
        selector = f"{name}-{part['name'].lower()}" + ("-1a2b3c4d" if part["type"] != "frontend" else "")
        assert len(selector) <= 63
    assert len(f"{namespace}-{name}") == 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", f"{name}-frontend")  # a Service


def test_every_value_has_its_default() -> None:
    """And its type: the defaults are valid, and name all that the schema names."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft7Validator(schema).validate(values)

    def names(part: dict[str, Any], known: dict[str, Any], path: str = "") -> None:
        properties = known.get("properties")
        if properties is not None and known.get("additionalProperties") is False:
            assert set(part) == set(properties) - {"global"}, path
            for name, value in part.items():
                if isinstance(value, dict):
                    names(value, properties[name], f"{path}.{name}")

    names(values, schema)


def test_the_chart_has_the_images_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert yaml.safe_load((CHART / "values.yaml").read_text())["image"]["tag"] == chart["appVersion"]
