"""A real API server, and definitions of the custom resources that the manifests use."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import yaml
from manifest_files import REPOSITORY, load_schema

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_BUILD_S = 3600.0
_START_S = 120.0


class KubeApi:
    """Asks the server whose files are in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        context = ssl.create_default_context(cafile=str(directory / "ca.crt"))
        context.load_cert_chain(directory / "admin.crt", directory / "admin.key")
        self._client = httpx.Client(base_url=(directory / "url").read_text().strip(), verify=context, timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def define(self, definition: dict[str, Any]) -> None:
        """Makes a kind of custom resources, and waits until it is served."""
        answer = self._client.post(DEFINITIONS, json=definition)
        assert answer.status_code in (201, 409), answer.text
        spec = definition["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/namespaces/dlw/{spec['names']['plural']}"
        end = time.monotonic() + _START_S
        while (answer := self._client.get(path)).status_code != 200:
            assert time.monotonic() < end, answer.text
            time.sleep(0.1)

    def apply(self, text: str, plural: str, dry_run: bool = True) -> httpx.Response:
        """The answer to a server-side apply of the one resource in `text`, validated strictly."""
        resource = next(each for each in yaml.compose_all(text) if each is not None)
        named = yaml.safe_load(yaml.serialize(resource))
        path = f"{collection(named['apiVersion'], plural)}/{named['metadata']['name']}"
        options = {"fieldManager": "tests", "force": "true", "fieldValidation": "Strict"}
        return self._client.patch(
            path,
            params=options | ({"dryRun": "All"} if dry_run else {}),
            content=text.encode(),
            headers={"content-type": "application/apply-patch+yaml"},
        )

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET."""
        return self._client.get(path)

    def post(self, path: str, resource: dict[str, Any]) -> httpx.Response:
        """The answer to a POST, which makes a resource."""
        return self._client.post(path, json=resource)

    def patch(self, path: str, changed: dict[str, Any]) -> httpx.Response:
        """The answer to a PATCH that merges these fields."""
        return self._client.patch(path, json=changed, headers={"content-type": "application/merge-patch+json"})


def collection(version: str, plural: str) -> str:
    """The path of a kind's resources in the namespace of the tests."""
    root = "/api" if "/" not in version else "/apis"
    return f"{root}/{version}/namespaces/dlw/{plural}"


@contextmanager
def kube_api(directory: Path, *options: str) -> Iterator[KubeApi]:
    """A server of its own, which ends with the block; `options` are of ``scripts/kube-api``."""
    script = REPOSITORY / "scripts" / "kube-api"
    subprocess.run([script, "build", *options], check=True, timeout=_BUILD_S)
    process = subprocess.Popen([script, "serve", *options, directory])
    try:
        end = time.monotonic() + _START_S
        while not (directory / "url").exists():
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server did not answer"
            time.sleep(0.1)
        with KubeApi(directory) as api:
            yield api
    finally:
        process.terminate()
        assert process.wait(30) == 0


def definition(group: str, version: str, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A CustomResourceDefinition of a kind whose ``spec`` has this structural schema."""
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {"type": "object", "properties": {"spec": schema}, "required": ["spec"]}
                    },
                }
            ],
        },
    }


def graph_definition() -> dict[str, Any]:
    """The definition of DynamoGraphDeployment with the fields in `k8s/schema.json`, which were
    listed from the operator's documentation.
    """
    schema = load_schema()
    return definition(
        "nvidia.com", "v1beta1", "DynamoGraphDeployment", structural(schema["properties"]["spec"], schema["$defs"])
    )


_KEPT = (
    *("type", "description", "enum", "pattern", "minimum", "maximum", "minItems", "maxItems", "minLength"),
    *("minProperties", "maxProperties", "required"),
)


def structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """`schema` as Kubernetes takes it: without references, and with a type everywhere. Unknown
    fields need no ``additionalProperties: false``: strict validation refuses them.
    """
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]] | {k: v for k, v in schema.items() if k != "$ref"}
    found = {key: schema[key] for key in _KEPT if key in schema}
    if "const" in schema:
        found["enum"] = [schema["const"]]
    for value in found.get("enum", ())[:1]:
        found["type"] = {str: "string", bool: "boolean", list: "array"}[type(value)]
    if found.get("type") == "array":
        found["items"] = structural(schema.get("items", {"type": "string"}), definitions)
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    elif found.get("type") == "object":
        found["properties"] = {
            name: structural(each, definitions) for name, each in schema.get("properties", {}).items()
        }
        if not found["properties"]:
            del found["properties"]
    return found


def fields(spec: Any) -> dict[str, Any]:
    """The structural schema of a short notation: a name of a type, ``[items]``, ``{name: ...}``
    with ``!`` behind the name of a required field and ``*`` for any name, ``(value, ...)`` for an
    enumeration.
    """
    match spec:
        case str():
            return {"type": spec}
        case list():
            return {"type": "array", "items": fields(spec[0])}
        case tuple():
            return {"type": "string", "enum": list(spec)}
        case {"*": values}:
            return {"type": "object", "additionalProperties": fields(values)}
        case dict():
            properties = {name.rstrip("!"): fields(each) for name, each in spec.items()}
            required = [name.rstrip("!") for name in spec if name.endswith("!")]
            return {"type": "object", "properties": properties} | ({"required": required} if required else {})
    raise TypeError(spec)


_LABELS = {"*": "string"}
_SELECTOR = {
    "matchLabels": _LABELS,
    "matchExpressions": [{"key!": "string", "operator!": "string", "values": ["string"]}],
}

OTHERS: dict[str, tuple[str, str, Any]] = {
    "ScaledObject": (
        "keda.sh",
        "v1alpha1",
        {
            "scaleTargetRef!": {"apiVersion": "string", "kind": "string", "name!": "string"},
            "minReplicaCount": "integer",
            "maxReplicaCount": "integer",
            "pollingInterval": "integer",
            "cooldownPeriod": "integer",
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": {"stabilizationWindowSeconds": "integer"},
                        "scaleDown": {
                            "stabilizationWindowSeconds": "integer",
                            "policies": [{"type!": "string", "value!": "integer", "periodSeconds!": "integer"}],
                        },
                    }
                }
            },
            "triggers!": [
                {
                    "type!": "string",
                    "metricType": ("AverageValue", "Value", "Utilization"),
                    "metadata!": {"*": "string"},
                }
            ],
        },
    ),
    "PodMonitor": (
        "monitoring.coreos.com",
        "v1",
        {
            "selector!": _SELECTOR,
            "podTargetLabels": ["string"],
            "podMetricsEndpoints": [
                {
                    "port": "string",
                    "portNumber": "integer",
                    "path": "string",
                    "interval": "string",
                    "authorization": {"type": "string", "credentials": {"key!": "string", "name": "string"}},
                }
            ],
        },
    ),
    "PrometheusRule": (
        "monitoring.coreos.com",
        "v1",
        {
            "groups": [
                {
                    "name!": "string",
                    "interval": "string",
                    "rules": [
                        {
                            "alert": "string",
                            "expr!": "string",
                            "for": "string",
                            "labels": _LABELS,
                            "annotations": _LABELS,
                        }
                    ],
                }
            ]
        },
    ),
    "InferencePool": (
        "inference.networking.k8s.io",
        "v1",
        {
            "selector!": {"matchLabels!": _LABELS},
            "targetPorts!": [{"number!": "integer"}],
            "endpointPickerRef!": {
                "group": "string",
                "kind": "string",
                "name!": "string",
                "port": {"number!": "integer"},
                "failureMode": ("FailOpen", "FailClose"),
            },
        },
    ),
    "HTTPRoute": (
        "gateway.networking.k8s.io",
        "v1",
        {
            "parentRefs": [{"name!": "string", "namespace": "string", "sectionName": "string"}],
            "hostnames": ["string"],
            "rules": [
                {
                    "matches": [{"path": {"type": ("Exact", "PathPrefix", "RegularExpression"), "value": "string"}}],
                    "backendRefs": [{"group": "string", "kind": "string", "name!": "string", "port": "integer"}],
                    "timeouts": {"request": "string", "backendRequest": "string"},
                }
            ],
        },
    ),
}
"""Group, version and fields of the other kinds, as their documentation lists those used here."""


def other_definitions() -> Iterator[dict[str, Any]]:
    """Definitions of `OTHERS`; those in Kubernetes' own groups say that nobody approved them."""
    for kind, (group, version, spec) in OTHERS.items():
        made = definition(group, version, kind, fields(spec))
        if group.endswith(".k8s.io"):
            made["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, a test's"}
        yield made
