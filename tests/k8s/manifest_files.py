"""The manifests in `k8s/`, and what each of their containers would run with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "k8s"
GRAPHS = ("agg", "agg_router", "disagg", "disagg_router", "agg-trtllm", "disagg-trtllm", "agg-vllm", "disagg-vllm")
WORKERS = ("worker", "prefill", "decode")
GPU_ENGINES = ("trtllm", "vllm")
"""Engines whose graphs end with their names; every other graph has the embedded engine."""

# What the operator sets in every worker, unless the manifest does (its v1beta1 defaults).
OPERATOR_ENVIRON = {
    "DYN_NAMESPACE": "default-dlw",
    "DYN_DISCOVERY_BACKEND": "kubernetes",
    "DYN_SYSTEM_ENABLED": "true",
    "DYN_SYSTEM_PORT": "9090",
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    "DYN_HEALTH_CHECK_ENABLED": "false",
    "DYN_NAMESPACE_WORKER_SUFFIX": "1a2b3c4d",
}

SECRETS = {("dlw-pool", "secret"): "7" * 64}
"""Contents of the Secrets that k8s/README.md has one make, by name and key."""


def load_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((FOLDER / "schema.json").read_text())
    return schema


def load_graph(name: str) -> dict[str, Any]:
    graph: dict[str, Any] = yaml.safe_load((FOLDER / "graphs" / f"{name}.yaml").read_text())
    return graph


@dataclass(frozen=True)
class Component:
    """One component of one graph."""

    graph: str
    fields: dict[str, Any]
    graph_env: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.graph}-{self.fields['name']}"

    @property
    def engine(self) -> str:
        """Engine of the graph's workers."""
        name = self.graph.rpartition("-")[2]
        return name if name in GPU_ENGINES else "embedded"

    @property
    def type(self) -> str:
        return str(self.fields["type"])

    @property
    def pod(self) -> dict[str, Any]:
        pod: dict[str, Any] = self.fields["podTemplate"]["spec"]
        return pod

    @property
    def main(self) -> dict[str, Any]:
        (main,) = (container for container in self.pod["containers"] if container["name"] == "main")
        return main  # type: ignore[no-any-return]

    @property
    def door(self) -> dict[str, Any]:
        """The container of the front door, in a frontend's pod."""
        (door,) = (container for container in self.pod["containers"] if container["name"] == "front-door")
        return door  # type: ignore[no-any-return]

    @property
    def environ(self) -> dict[str, str]:
        """The operator's variables, then the graph's, then the container's."""
        given = {**OPERATOR_ENVIRON, "DYN_COMPONENT": self.type}
        return given | {entry["name"]: self._value(entry) for entry in [*self.graph_env, *self.main.get("env", [])]}

    def _value(self, entry: dict[str, Any]) -> str:
        if "value" in entry:
            return str(entry["value"])
        if "secretKeyRef" in entry["valueFrom"]:
            secret = entry["valueFrom"]["secretKeyRef"]
            return SECRETS[secret["name"], secret["key"]]
        kind, name = entry["valueFrom"]["resourceFieldRef"]["resource"].split(".")
        return str(math.ceil(float(self.main["resources"][kind][name])))


def components(*types: str) -> list[Component]:
    """The components of the given types, of all graphs."""
    found = []
    for name in GRAPHS:
        spec = load_graph(name)["spec"]
        found += [Component(name, fields, spec["env"]) for fields in spec["components"] if fields["type"] in types]
    return found


def claims_named_twice(pod: dict[str, Any]) -> set[str]:
    """Names of the claims that more than one volume of a pod has."""
    given = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    return {name for name in given if given.count(name) > 1}
