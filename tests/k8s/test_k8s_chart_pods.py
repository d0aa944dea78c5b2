"""What the chart's values give pods beyond the manifests: where they run, API keys, volumes, the
cache of converted checkpoints, times and names.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helm_chart import CHART, Rendered, by_name, render, resources_of
from kubernetes_fields import problems
from manifest_files import FOLDER, WORKERS, load_schema

from worker.arguments.key_file import keys_in
from worker.frontdoor.options import parse_options

PLACED: dict[str, Any] = {
    "nodeSelector": {"pool": "on"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1000000}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["1"]}]}]
            }
        }
    },
    "priorityClassName": "high",
    "serviceAccountName": "dlw",
}
"""Values that are fields of a pod, under their names."""

MARKED = {"podAnnotations": {"example.com/a": "true"}, "podLabels": {"team": "1e3"}}
VOLUMES = [
    {"name": "policy", "configMap": {"name": "policy"}},
    {"name": "records", "persistentVolumeClaim": {"claimName": "records"}},
]
MOUNTS = [{"name": "policy", "mountPath": "/policy", "readOnly": True}]
SPREAD = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
SELECTOR = {"matchLabels": {"team": "nlp"}}
PAIR = {"disaggregated": True}
KEYS = {"frontDoor": {"apiKeys": {"secret": "dlw-api-keys"}}}
OPERATED = {"operations": {"enabled": True}, "monitoring": {"enabled": True}}
CLAIM = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}

CASES: dict[str, dict[str, Any]] = {
    "plain": PAIR,
    "workers": {**PAIR, "workers": {**PLACED, **MARKED, "volumes": VOLUMES, "volumeMounts": MOUNTS}},
    "frontend": {
        **PAIR,
        "frontend": {**PLACED, **MARKED, "volumes": VOLUMES, "volumeMounts": MOUNTS},
        "frontDoor": {"volumeMounts": MOUNTS},
    },
    "spread": {
        "frontend": {"topologySpreadConstraints": [SPREAD, {**SPREAD, "labelSelector": SELECTOR}]},
        "workers": {"topologySpreadConstraints": [SPREAD]},
    },
    "pulled": {**PAIR, "image": {"pullSecrets": ["registry", "other"], "dynamoVersion": "1.4.2", "tag": "build-7"}},
    "keys": {**KEYS, **OPERATED, "image": {"registry": "registry.example.com/team"}},
    "other keys": {**OPERATED, "frontDoor": {"apiKeys": {"secret": "on", "key": "a.txt", "metricsKey": "b"}}},
    "labels": {
        "operations": {"enabled": True, "podMonitorLabels": {"release": "prometheus"}},
        "monitoring": {"enabled": True, "ruleLabels": {"release": "rules"}},
    },
    "cached in the pod": {"workers": {"cacheSize": "40Gi"}},
    "cached without packed copies": {"workers": {"args": ["--packed-copy", "off"]}},
    "cached by vLLM": {"engine": "vllm", "workers": {"cacheSize": "1Ti"}},
    "a long start": {**PAIR, "workers": {"startupSeconds": 3601}},
    "no limit of cores": {
        "workers": {"resources": {"requests": {"cpu": "8", "memory": "8Gi"}, "limits": {"memory": "16Gi"}}}
    },
    "no cores": {"workers": {"resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "16Gi"}}}},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys twice": (
        {"frontDoor": {"apiKeys": {"secret": "a"}, "args": ["--api-key-file", "/b"]}},
        "frontDoor: --api-key-file is given by the value frontDoor.apiKeys.secret alone",
    ),
    "keys twice by a variable": (
        {"frontDoor": {"apiKeys": {"secret": "a"}, "env": [{"name": "FRONT_DOOR_API_KEY_FILE", "value": "/b"}]}},
        "frontDoor: --api-key-file is given by the value frontDoor.apiKeys.secret alone",
    ),
    "a volume's name": (
        {"workers": {"volumes": [{"name": "cache", "emptyDir": {}}]}},
        "workers.volumes: the name cache is the chart's own",
    ),
    "a frontend's volume's name": (
        {"frontend": {"volumes": [{"name": "api-keys", "emptyDir": {}}]}},
        "frontend.volumes: the name api-keys is the chart's own",
    ),
    "the models' claim twice": (
        {"frontend": {"volumes": [{"name": "batches", "persistentVolumeClaim": {"claimName": "models"}}]}},
        "frontend.volumes: the claim models is that of the chart's volume models",
    ),
    "a named claim of models twice": (
        {
            "model": {"claim": "large"},
            "workers": {"volumes": [{"name": "more", "persistentVolumeClaim": {"claimName": "large"}}]},
        },
        "workers.volumes: the claim large is that of the chart's volume models",
    ),
    "a place": (
        {"workers": {"volumes": VOLUMES, "volumeMounts": [{"name": "policy", "mountPath": "/models/"}]}},
        "workers.volumeMounts: the place /models/ is the chart's own",
    ),
    "a volume that is not there": (
        {"workers": {"volumeMounts": MOUNTS}},
        "workers.volumeMounts: policy is no volume of workers.volumes",
    ),
    "a door's volume that is not there": (
        {"frontDoor": {"volumeMounts": MOUNTS}},
        "frontDoor.volumeMounts: policy is no volume of frontend.volumes",
    ),
    "a label of the operator's": (
        {"workers": {"podLabels": {"nvidia.com/dynamo-component-type": "x"}}},
        "workers.podLabels: nvidia.com/dynamo-component-type is the operator's own",
    ),
    "a frontend's label of the operator's": (
        {"frontend": {"podLabels": {"nvidia.com/dynamo-graph-deployment-name": "x"}}},
        "frontend.podLabels: nvidia.com/dynamo-graph-deployment-name is the operator's own",
    ),
}

OF_PODS: dict[str, list[Any]] = {
    "podAnnotations": [{"a": True}, []],
    "podLabels": [{"a": 1}, {"a": "two words"}, "a"],
    "nodeSelector": [{"gpu": True}, ["gpu"]],
    "tolerations": [[{"kee": "a"}], [{"operator": "exists"}], [{"effect": "Never"}], {}],
    "affinity": [{"nodeAfinity": {}}, {"podAffinity": {"required": []}}, []],
    "topologySpreadConstraints": [[{"maxSkew": 1}], [{**SPREAD, "maxSkew": 0}], [{**SPREAD, "key": "a"}], {}],
    "priorityClassName": [1, "High", ["high"]],
    "serviceAccountName": [1, "a b"],
    "volumes": [[{"name": "a"}], [{"name": "a", "configmap": {}}], [{"name": "A", "secret": {}}], {}],
    "volumeMounts": [[{"name": "a"}], [{"name": "a", "mountPath": "b"}], [{"name": "a", "path": "/b"}], {}],
}
"""Values of wrong types that frontend and workers have."""

MISTYPED: dict[str, list[Any]] = {
    **{f"{part}.{name}": values for part in ("frontend", "workers") for name, values in OF_PODS.items()},
    "frontDoor.volumeMounts": [[{"name": "a"}], {}],
    "frontDoor.apiKeys": [{"secrets": "a"}, "a"],
    "frontDoor.apiKeys.secret": [1, "A"],
    "frontDoor.apiKeys.key": ["", "a/b", 1],
    "frontDoor.apiKeys.metricsKey": ["", "a b", 1],
    "image.pullSecrets": ["a", [{"name": "a"}], [1]],
    "image.dynamoVersion": [1.4, "1.4", "v1.4.2", "01.4.2"],
    "workers.cacheSize": ["16 GiB", 16, "0", "-1Gi"],
    "workers.startupSeconds": [-1, 1.5, "600"],
    "workers.resources.limits.memory": ["16Gib", "-1", 1],
    "operations.podMonitorLabels": [{"a": 1}, "a"],
    "monitoring.ruleLabels": [{"a": 1}, "a"],
}
"""Values of wrong types, each by the place of the value that is refused."""


def placed(path: str, value: Any) -> dict[str, Any]:
    """Values with this one at a path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rendered(helm: Path) -> dict[str, Rendered]:
    """Files by case, or the reason of a refusal."""
    refused = {name: values for name, (values, _) in REFUSED.items()}
    mistyped = {f"{path} {i}": placed(path, value) for path, found in MISTYPED.items() for i, value in enumerate(found)}
    asked = CASES | refused | mistyped
    return dict(zip(asked, render(helm, [("dlw-agg", values) for values in asked.values()]), strict=True))


def graph_of(rendered: dict[str, Rendered], case: str) -> dict[str, Any]:
    return by_name(resources_of(rendered[case]))["DynamoGraphDeployment", "dlw-agg"]


def parts(rendered: dict[str, Rendered], case: str) -> dict[str, dict[str, Any]]:
    """Components by their types; Kubernetes takes their pods."""
    found = {part["type"]: part for part in graph_of(rendered, case)["spec"]["components"]}
    for part in found.values():
        assert list(problems(part["podTemplate"], "V1PodTemplateSpec")) == []
    return found


def container(part: dict[str, Any], name: str = "main") -> dict[str, Any]:
    (found,) = (each for each in part["podTemplate"]["spec"]["containers"] if each["name"] == name)
    return found  # type: ignore[no-any-return]


def volumes_of(part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in part["podTemplate"]["spec"]["volumes"]}


def mounts_of(part: dict[str, Any], name: str = "main") -> dict[str, dict[str, Any]]:
    return {each["mountPath"]: each for each in container(part, name)["volumeMounts"]}


@pytest.mark.parametrize("case", ["workers", "frontend"])
def test_pods_of_a_kind_have_what_is_given_them(rendered: dict[str, Rendered], case: str) -> None:
    """And nothing else changes, in pods of no kind."""
    expected = copy.deepcopy(parts(rendered, "plain"))
    for kind, part in expected.items():
        if (kind in WORKERS) != (case == "workers"):
            continue
        template = part["podTemplate"]
        template["metadata"] = {"annotations": MARKED["podAnnotations"], "labels": MARKED["podLabels"]}
        template["spec"] |= PLACED
        template["spec"]["volumes"] += VOLUMES
        for each in template["spec"]["containers"]:
            each["volumeMounts"] += MOUNTS
    assert parts(rendered, case) == expected


def test_pods_are_spread_as_values_say(rendered: dict[str, Rendered]) -> None:
    """Over pods of their kind, unless a constraint names others."""
    for kind, part in parts(rendered, "spread").items():
        labels = {"nvidia.com/dynamo-graph-deployment-name": "dlw-agg", "nvidia.com/dynamo-component-type": kind}
        own = {**SPREAD, "labelSelector": {"matchLabels": labels}}
        given = [own, {**SPREAD, "labelSelector": SELECTOR}] if kind == "frontend" else [own]
        assert part["podTemplate"]["spec"]["topologySpreadConstraints"] == given


def test_images_are_pulled_with_secrets(rendered: dict[str, Rendered]) -> None:
    """And a tag need not be Dynamo's version: the operator is told it."""
    for part in parts(rendered, "pulled").values():
        assert part["podTemplate"]["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "other"}]
        assert part["runtimeVersionOverride"] == "1.4.2"
        assert container(part)["image"] == "dynamo-logits-worker:build-7"
    graph = graph_of(rendered, "pulled")
    assert list(jsonschema.Draft202012Validator(load_schema()).iter_errors(graph)) == []


def test_the_front_door_gets_its_keys(rendered: dict[str, Rendered]) -> None:
    """As a file of the Secret's one entry, which no other container has."""
    frontend, worker = parts(rendered, "other keys").values()
    door = container(frontend, "front-door")
    path = parse_options(door["args"], {}).api_key_file
    assert path is not None
    mount = mounts_of(frontend, "front-door")[str(Path(path).parent)]
    assert mount["readOnly"] is True
    volume = volumes_of(frontend)[mount["name"]]["secret"]
    assert volume == {"secretName": "on", "items": [{"key": "a.txt", "path": Path(path).name}]}
    for part, name in ((frontend, "main"), (worker, "main")):
        assert mount["name"] not in {each["name"] for each in mounts_of(part, name).values()}
    monitors = by_name(resources_of(rendered["other keys"]))
    (scraped,) = monitors["PodMonitor", "dlw-agg-frontend"]["spec"]["podMetricsEndpoints"]
    assert scraped["authorization"] == {"credentials": {"name": "on", "key": "b"}}
    (scraped,) = monitors["PodMonitor", "dlw-agg"]["spec"]["podMetricsEndpoints"]
    assert "authorization" not in scraped


def test_the_component_of_keys_is_what_the_chart_gives(rendered: dict[str, Rendered], tmp_path: Path) -> None:
    names = {"resources": "overlays/cpu", "components": "api-keys"}
    kustomization = {key: [os.path.relpath(FOLDER / name, tmp_path.resolve())] for key, name in names.items()}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    kubectl = Path(sys.executable).with_name("kubectl")
    ran = subprocess.run([kubectl, "kustomize", tmp_path], capture_output=True, text=True, check=True)
    built, given = by_name(yaml.safe_load_all(ran.stdout)), by_name(resources_of(rendered["keys"]))
    (graph,) = (each for (kind, _), each in built.items() if kind == "DynamoGraphDeployment")
    assert list(jsonschema.Draft202012Validator(load_schema()).iter_errors(graph)) == []
    assert graph["spec"]["components"][0] == given["DynamoGraphDeployment", "dlw-agg"]["spec"]["components"][0]
    for name in ("dlw-agg", "dlw-agg-frontend"):
        assert built["PodMonitor", name] == given["PodMonitor", name]


STAND_IN = """#!/bin/sh
echo "$@" >> "$OUT/arguments"
for each in "$@"; do
    case $each in --from-file=*) cp "${each##*=}" "$OUT/$(echo "$each" | cut -d= -f2)" ;; esac
done
"""
"""Instead of kubectl: keeps its arguments, and the files that they name."""


def test_the_readme_makes_the_secret_of_keys(tmp_path: Path) -> None:
    """In no command line: a file of keys, of which Prometheus has one."""
    text = (FOLDER / "README.md").read_text()
    (script,) = re.findall(
        r"^```sh\n((?:(?!```).)*create secret generic dlw-api-keys.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "kubectl").write_text(STAND_IN)
    (tmp_path / "kubectl").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path), "NAMESPACE": "dlw", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environ, check=True)
    keys = keys_in(str(tmp_path / "keys"), "--api-key-file")
    metrics = (tmp_path / "metrics").read_text()
    assert metrics in keys  # to the byte: Prometheus sends what the entry has
    assert len(set(keys)) == len(keys) > 1
    assert all(re.fullmatch(r"[0-9a-f]{64}", key) for key in keys)
    assert not any(key in (tmp_path / "arguments").read_text() for key in keys)
    assert {path.name for path in tmp_path.iterdir()} == {"kubectl", "arguments", "keys", "metrics"}


def test_monitors_and_rules_have_labels(rendered: dict[str, Rendered]) -> None:
    found = by_name(resources_of(rendered["labels"]))
    for name in ("dlw-agg", "dlw-agg-frontend"):
        assert found["PodMonitor", name]["metadata"]["labels"] == {"release": "prometheus"}
    assert found["PrometheusRule", "dlw-agg"]["metadata"]["labels"] == {"release": "rules"}


def test_a_converted_checkpoint_is_kept(rendered: dict[str, Rendered]) -> None:
    """In a place of its own with a size: on the models' volume, or in the pod."""
    expected = {
        "plain": (CLAIM, "/cache", None),
        "cached in the pod": (CLAIM, None, "40Gi"),
        "cached without packed copies": (None, None, "16Gi"),
        "cached by vLLM": (None, None, "1Ti"),
    }
    for case, (claim, folder, size) in expected.items():
        for kind, part in parts(rendered, case).items():
            if kind == "frontend":
                assert "/cache" not in mounts_of(part)
                continue
            environ = {each["name"]: each.get("value") for each in container(part)["env"]}
            mount = mounts_of(part)[str(environ["XDG_CACHE_HOME"])]
            assert "readOnly" not in mount
            volume = volumes_of(part)[mount["name"]]
            assert volume == (CLAIM if folder else {"name": "cache", "emptyDir": {"sizeLimit": size}})
            assert mount.get("subPath") == (".cache" if folder else None)
            read_only = claim is None
            assert volumes_of(part)["models"]["persistentVolumeClaim"].get("readOnly", False) is read_only


def test_a_start_may_take_what_values_say(rendered: dict[str, Rendered]) -> None:
    """Whole periods of the probe, at least as long as that."""
    for kind, part in parts(rendered, "a long start").items():
        probe = container(part)["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == (3610 if kind in WORKERS else 300)


@pytest.mark.parametrize(
    ("case", "counted"),
    [("plain", "limits.cpu"), ("no limit of cores", "requests.cpu"), ("no cores", "limits.cpu")],
)
def test_threads_are_the_cores_of_the_pod(rendered: dict[str, Rendered], case: str, counted: str) -> None:
    """A limit that is not given would be all cores of the node."""
    (_, worker, *_) = parts(rendered, case).values()
    (threads,) = (each for each in container(worker)["env"] if each["name"] == "OMP_NUM_THREADS")
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == counted


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_chart_has_itself_is_refused(rendered: dict[str, Rendered], case: str) -> None:
    assert REFUSED[case][1] in str(rendered[case])


@pytest.mark.parametrize("path", MISTYPED)
def test_a_value_of_another_type_is_refused(rendered: dict[str, Rendered], path: str) -> None:
    for i in range(len(MISTYPED[path])):
        reason = rendered[f"{path} {i}"]
        assert isinstance(reason, str), f"{MISTYPED[path][i]} was rendered"
        assert f"/{path.replace('.', '/')}" in reason, reason


def without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """The values without those that are empty, and without groups that have then none."""
    kept = {name: without_empty(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in kept.items() if value is False or value}


def test_an_upgrade_takes_the_values_of_an_older_chart(
    helm: Path, rendered: dict[str, Rendered], tmp_path: Path
) -> None:
    """With ``helm upgrade --reuse-values`` none of the newer defaults is there."""
    older = tmp_path / "chart"
    shutil.copytree(CHART, older)
    values = without_empty(yaml.safe_load((CHART / "values.yaml").read_text()))
    for name in ("key", "metricsKey"):
        values["frontDoor"].get("apiKeys", {}).pop(name)
    assert values["frontDoor"].pop("apiKeys") == {}
    (older / "values.yaml").write_text(yaml.safe_dump(values))
    cases = ("plain", "keys", "labels", "frontend", "workers", "spread")
    found = render(helm, [("dlw-agg", CASES[case]) for case in cases], older)
    for case, files in zip(cases, found, strict=True):
        assert by_name(resources_of(files)) == by_name(resources_of(rendered[case])), case


LOOKUP = 'lookup "nvidia.com/v1beta1" "DynamoGraphDeployment" .root.Release.Namespace (include "dlw.name" .root)'


@pytest.mark.parametrize(("scaled", "kept"), [({"replicas": 3}, 3), ({}, 1)])
def test_an_upgrade_keeps_the_number_that_runs(helm: Path, tmp_path: Path, scaled: dict[str, int], kept: int) -> None:
    """The operator refuses another one, where an autoscaler has the number; one that is not given
    is 1.
    """
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    helpers = chart / "templates" / "_helpers.tpl"
    live = {"spec": {"components": [{"name": "Frontend", "replicas": 7}, {"name": "worker", **scaled}]}}
    text = helpers.read_text()
    assert LOOKUP in text
    helpers.write_text(text.replace(LOOKUP, f"fromJson {json.dumps(json.dumps(live))}"))  # what a cluster answers
    given = [{"autoscaling": {"enabled": True, "minReplicas": 2}}, {"workers": {"replicas": 2}}]
    counts = [
        [
            part["replicas"]
            for part in by_name(resources_of(files))["DynamoGraphDeployment", "dlw-agg"]["spec"]["components"]
        ]
        for files in render(helm, [("dlw-agg", values) for values in given], chart)
    ]
    assert counts == [[1, kept], [1, 2]]


def test_every_empty_value_is_tried() -> None:
    """Each value that is empty by default is given in some case here or mistyped here, or is an
    older one.
    """
    older = {"name", "image.registry", "frontend.args", "frontend.env", "frontDoor.args", "frontDoor.env"}
    older |= {"workers.args", "workers.env", "workers.resources"}

    def empty(values: dict[str, Any], path: str = "") -> set[str]:
        found = set()
        for name, value in values.items():
            if isinstance(value, dict) and value:
                found |= empty(value, f"{path}{name}.")
            elif not value and value is not False:
                found.add(f"{path}{name}")
        return found

    assert empty(yaml.safe_load((CHART / "values.yaml").read_text())) - older <= {*MISTYPED}
