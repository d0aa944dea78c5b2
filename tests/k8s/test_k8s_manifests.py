"""The manifests fit the worker as it is: command lines, ports, grace periods,
images.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo.frontend.main import parse_args as parse_frontend_arguments
from image_files import PROJECT
from kubernetes_fields import problems
from manifest_files import (
    FOLDER,
    GRAPHS,
    REPOSITORY,
    SECRETS,
    WORKERS,
    Component,
    claims_named_twice,
    components,
    load_graph,
)

from worker.arguments import Arguments, parse_arguments
from worker.disaggregation.seal import SECRET, take_seal
from worker.frontdoor.options import Options, parse_options
from worker.frontdoor.routes import ROUTES
from worker.frontdoor.server import LAST_S
from worker.frontdoor.upstreams import Upstream
from worker.installation import SHUTDOWN_LIMIT, allow_drain

RUNTIME_GRACE_PERIOD_S = 5  # of ai-dynamo, where DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS is not set
HIGHEST_SYSTEM_PORT = 32767  # of ai-dynamo 1.4.2

each_component = pytest.mark.parametrize("component", components("frontend", *WORKERS), ids=str)
each_worker = pytest.mark.parametrize("component", components(*WORKERS), ids=str)
each_frontend = pytest.mark.parametrize("component", components("frontend"), ids=str)


def worker_arguments(component: Component) -> Arguments:
    assert component.main["command"] == ["python3", "-m", "worker"]
    return parse_arguments(component.main["args"], component.environ)


@each_worker
def test_the_worker_reads_its_command_line(component: Component) -> None:
    arguments = worker_arguments(component)
    assert arguments.engine == component.engine
    roles = {"worker": "aggregated", "prefill": "prefill", "decode": "decode"}
    assert arguments.disaggregation_mode == roles[component.type]
    assert arguments.discovery_backend == "kubernetes"
    assert arguments.namespace == "default-dlw-1a2b3c4d"
    assert arguments.component == component.type
    if arguments.disaggregation_mode != "aggregated" and arguments.engine != "trtllm":
        assert arguments.kv_transfer_devices == "eth0"  # two pods: loopback leads nowhere


@each_frontend
def test_the_frontend_reads_its_command_line(component: Component, monkeypatch: pytest.MonkeyPatch) -> None:
    assert component.main["command"] == ["python3", "-m", "dynamo.frontend"]
    monkeypatch.setattr("sys.argv", ["frontend", *component.main["args"]])
    config, _, _ = parse_frontend_arguments()
    assert config.http_host == "127.0.0.1"
    assert door_options(component).upstream == (Upstream("127.0.0.1", config.http_port),)


def door_options(component: Component) -> Options:
    assert component.door["command"] == ["python3", "-m", "worker.frontdoor"]
    return parse_options(component.door["args"], {entry["name"]: entry["value"] for entry in component.door["env"]})


@each_frontend
def test_the_front_door_is_what_others_reach(component: Component) -> None:
    """The operator's Service leads to port 8000; no probe could reach the frontend's own."""
    options = door_options(component)
    assert (options.host, options.port) == ("0.0.0.0", 8000)
    hooks = [part["lifecycle"]["preStop"]["exec"]["command"] for part in (component.main, component.door)]
    assert hooks == [["sleep", "5"]] * 2  # neither takes requests after its signal
    assert int(hooks[0][1]) + options.drain_timeout_s + LAST_S < component.pod["terminationGracePeriodSeconds"]
    assert component.door["image"] == component.main["image"]
    probes = [part[name] for part in (component.main, component.door) for name in part if name.endswith("Probe")]
    assert len(probes) == 6
    assert {probe["httpGet"]["port"] for probe in probes} == {options.port}
    assert {probe["httpGet"]["path"] for probe in probes} <= {route.path for route in ROUTES if not route.needs_key}


@each_frontend
def test_the_frontend_refuses_large_bodies(component: Component) -> None:
    """The limit is the launch scripts'; `test_k8s_processes.py` sees a body refused."""
    launched = re.search(r"DYN_HTTP_BODY_LIMIT_MB:-(\d+)", (REPOSITORY / "launch/lib.sh").read_text())
    assert launched is not None
    assert door_options(component).body_limit_mib == int(launched[1])
    assert component.environ["DYN_HTTP_BODY_LIMIT_MB"] == str(int(launched[1]) + 1)


@each_worker
def test_probes_ask_the_system_port(component: Component) -> None:
    port = int(component.environ["DYN_SYSTEM_PORT"])
    assert port <= HIGHEST_SYSTEM_PORT
    probes = {name: component.main[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert probes == {
        "startup": {"path": "/live", "port": port},
        "liveness": {"path": "/live", "port": port},
        "readiness": {"path": "/health", "port": port},
    }
    assert "DYN_SYSTEM_HOST" not in component.environ  # the frontend fetches the tokenizer from there


@each_worker
def test_the_grace_period_covers_the_drain(component: Component) -> None:
    """The pod must live until the runtime itself would end the process by force."""
    environ = component.environ
    allow_drain(parse_drain_timeout(component), environ)
    needed_s = int(environ[SHUTDOWN_LIMIT])
    needed_s += int(environ.get("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", RUNTIME_GRACE_PERIOD_S))
    if component.type == "prefill":
        needed_s += int(environ["DYN_PREFILL_DRAIN_TIMEOUT_S"])
    assert component.pod["terminationGracePeriodSeconds"] > needed_s


def parse_drain_timeout(component: Component) -> float:
    """The drain's timeout on the command line; the role has no part in it."""
    args = component.main["args"]
    if "--disaggregation-mode" in args:
        at = args.index("--disaggregation-mode")
        args = args[:at] + args[at + 2 :]
    return parse_arguments(args, component.environ).drain_timeout_s


@each_component
def test_the_pod_is_one_to_kubernetes(component: Component) -> None:
    assert list(problems(component.fields["podTemplate"], "V1PodTemplateSpec")) == []


@each_component
def test_replicas_are_spread_over_nodes(component: Component) -> None:
    (spread,) = component.pod["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("kubernetes.io/hostname", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"] == {
        "nvidia.com/dynamo-graph-deployment-name": load_graph(component.graph)["metadata"]["name"],
        "nvidia.com/dynamo-component-type": component.type,
    }


@each_component
def test_what_is_mounted_is_there(component: Component) -> None:
    mounted = [mounts(container) for container in component.pod["containers"]]
    names = {mount["name"] for each in mounted for mount in each.values()}
    assert names == {volume["name"] for volume in component.pod["volumes"]}
    assert component.environ["HOME"] == "/tmp"
    assert {each["/tmp"]["name"] for each in mounted} == {"tmp"}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By where they are."""
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


@each_worker
def test_a_converted_checkpoint_has_a_place(component: Component) -> None:
    """One that is written, and whose size is limited: the claim's, or the volume's own."""
    mount = mounts(component.main)[component.environ["XDG_CACHE_HOME"]]
    assert not mount.get("readOnly")
    (volume,) = (each for each in component.pod["volumes"] if each["name"] == mount["name"])
    if component.engine == "embedded":
        assert mount["subPath"].startswith(".")
        assert volume["persistentVolumeClaim"] == {"claimName": models()[0]["metadata"]["name"]}
    else:
        assert "sizeLimit" in volume["emptyDir"]


@each_component
def test_a_pod_has_a_claim_in_one_volume(component: Component) -> None:
    """Kubelet mounts a claim once for each pod: one that has it in two volumes never starts."""
    assert claims_named_twice(component.pod) == set()


@each_worker
def test_the_worker_and_the_front_door_read_the_same_model(component: Component) -> None:
    """The front door finds the format of tool calls in the model's chat template."""
    (frontend,) = (each for each in components("frontend") if each.graph == component.graph)
    model = door_options(frontend).model_path
    assert model == worker_arguments(component).model_path
    for part, container in ((component, component.main), (frontend, frontend.door)):
        mount = mounts(container)[str(Path(str(model)).parent)]
        assert mount["name"] == "models"
        assert mount["readOnly"] is True
        (claim,) = (one["persistentVolumeClaim"] for one in part.pod["volumes"] if one["name"] == "models")
        assert claim["claimName"] == models()[0]["metadata"]["name"]
    assert mounts(component.main)["/models"] == mounts(frontend.door)["/models"]


@each_component
def test_gpus_are_asked_for_by_the_engines_that_need_them(component: Component) -> None:
    engine = component.engine if component.type in WORKERS else "embedded"
    needs_gpu = engine != "embedded"
    limits, requests = component.main["resources"]["limits"], component.main["resources"]["requests"]
    assert limits.get("nvidia.com/gpu") == requests.get("nvidia.com/gpu") == ("1" if needs_gpu else None)
    name = f"dynamo-logits-worker-{engine}:" if needs_gpu else "dynamo-logits-worker:"
    assert component.main["image"].startswith(name)


@each_component
def test_the_image_tag_is_the_version_of_dynamo(component: Component) -> None:
    """The operator takes the tag for it, and 1.4's admission refuses a tag that is none."""
    pins = (REPOSITORY / "constraints.txt").read_text()
    pinned = re.search(r"^ai-dynamo==(.+)$", pins, re.MULTILINE)
    assert pinned is not None
    assert component.main["image"].endswith(f":{pinned[1]}")


def test_every_topology_is_what_its_name_says() -> None:
    types = {name: [part["type"] for part in load_graph(name)["spec"]["components"]] for name in GRAPHS}
    aggregated, disaggregated = ["frontend", "worker"], ["frontend", "prefill", "decode"]
    assert types == {
        "agg": aggregated,
        "agg_router": aggregated,
        "agg-trtllm": aggregated,
        "agg-vllm": aggregated,
        "disagg": disaggregated,
        "disagg_router": disaggregated,
        "disagg-trtllm": disaggregated,
        "disagg-vllm": disaggregated,
    }
    names = {f"dlw-{name.replace('_', '-')}" for name in GRAPHS}
    assert {load_graph(name)["metadata"]["name"] for name in GRAPHS} == names


@pytest.mark.parametrize("base", ["agg", "disagg"])
def test_router_graphs_only_add_workers_that_publish_blocks(base: str) -> None:
    plain, routed = load_graph(base), load_graph(f"{base}_router")
    assert routed["metadata"].pop("name") == f"{plain['metadata'].pop('name')}-router"
    for part in (*plain["spec"]["components"], *routed["spec"]["components"]):
        del part["podTemplate"]["spec"]["topologySpreadConstraints"]  # they have the graph's name
    frontend, *workers = (Component(base, fields, routed["spec"]["env"]) for fields in routed["spec"]["components"])
    mode = frontend.main["args"].index("--router-mode")
    assert frontend.main["args"][mode : mode + 2] == ["--router-mode", "kv"]
    del frontend.main["args"][mode : mode + 2]
    for worker in workers:
        arguments = worker_arguments(worker)
        assert arguments.publishes_kv_events == (worker.type != "decode")
        assert worker.environ["DYN_EVENT_PLANE"] == "zmq"
        assert worker.fields["replicas"] == 2
        worker.fields["replicas"] = 1
        at = worker.main["args"].index("--enable-kv-routing") + 1
        worker.main["args"][at] = "false"
    assert routed == plain


def test_component_names_are_unique() -> None:
    for name in GRAPHS:
        names = [part["name"].lower() for part in load_graph(name)["spec"]["components"]]
        assert len(names) == len(set(names))


def models() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "models.yaml").read_text()))


def test_models_is_a_claim_and_a_job_to_kubernetes() -> None:
    claim, job = models()
    assert list(problems(claim, "V1PersistentVolumeClaim")) == []
    assert list(problems(job, "V1Job")) == []


def test_the_job_writes_the_model_that_the_manifests_serve(tmp_path: Path) -> None:
    from worker.tiny_model import main

    claim, job = models()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["python3", "-m", "worker.tiny_model"]
    written = Path(container["args"][0])
    assert main([str(tmp_path / written.name)]) == 0
    assert (tmp_path / written.name / "config.json").is_file()
    for component in (c for c in components(*WORKERS) if c.engine == "embedded"):
        assert component.main["args"][component.main["args"].index("--model-path") + 1] == str(written)
        claims = [v["persistentVolumeClaim"] for v in component.pod["volumes"] if "persistentVolumeClaim" in v]
        assert {c["claimName"] for c in claims} == {claim["metadata"]["name"]}
        arguments = worker_arguments(component)
        mounts = {mount["mountPath"]: mount for mount in component.main["volumeMounts"]}
        assert mounts["/models"]["readOnly"] is True  # so that copies lie elsewhere
        assert "readOnly" not in mounts[arguments.packed_copy]


def test_kubernetes_would_refuse_a_broken_pod() -> None:
    """The check above is worth something: a misspelt field, a wrong type and a missing name are
    found.
    """
    pod = load_graph("agg")["spec"]["components"][1]["podTemplate"]
    (main,) = pod["spec"]["containers"]
    main["livenessprobe"] = main.pop("livenessProbe")
    main["args"][0] = 1
    del main["name"]
    pod["spec"]["terminationGracePeriodSeconds"] = "75"
    found = " | ".join(problems(pod, "V1PodTemplateSpec"))
    for place in (
        "$.spec.containers[0].livenessprobe: V1Container has no such field",
        "$.spec.containers[0].args[0]: not a str",
        "$.spec.containers[0]: Invalid value for `name`",
        "$.spec.terminationGracePeriodSeconds: not a int",
    ):
        assert place in found


def test_the_dockerfile_copies_what_exists_and_what_is_sent() -> None:
    sent = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().split() if line.startswith("!")}
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    copied = {name for names in copies if not names[0].startswith("--from=") for name in names}
    assert copied == sent
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied  # the build of the wheel reads them
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []


@each_worker
def test_prefill_and_decode_share_a_secret_not_in_any_manifest(component: Component) -> None:
    given = [entry for entry in component.main.get("env", []) if entry["name"] == SECRET]
    if component.type == "worker":
        assert given == []
        return
    assert [set(entry) for entry in given] == [{"name", "valueFrom"}]
    assert take_seal(worker_arguments(component).disaggregation_mode, component.environ) is not None


def test_the_readme_makes_the_secret_of_the_manifests() -> None:
    """It is made where nobody else sees it: not on a command line, and not in a file that stays."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    ((name, key),) = SECRETS
    (made,) = (line for line in lines if f"create secret generic {name} " in line)
    assert made.endswith(f"--from-file={key}=/dev/stdin")
    source = lines[lines.index(made) - 1].strip().removesuffix("|")
    done = subprocess.run(["bash", "-c", source], capture_output=True, check=True)
    assert re.fullmatch(rb"[0-9a-f]{64}", done.stdout)
