"""Each alert fires in a real Prometheus when its cause is there, and what `docs/runbook.md` says
ends it.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_stack import MODEL, REPOSITORY, Stack, asking, http, wait_for
from endpoints import Endpoint, tokens
from ports import free_port
from processor_requests import PATIENT, of, with_third_parties
from prometheus_server import Prometheus, check_firing, check_samples, running_prometheus

from adapters.client import processor

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

CPU = ("--device", "cpu", "--dtype", "float32")
FIRED = {
    "DlwNoWorker",
    "DlwEngineBroken",
    "DlwOverloaded",
    "DlwQueueLong",
    "DlwFirstTokenSlow",
    "DlwTokensSlow",
    "DlwPreemptions",
    "DlwProcessorFails",
    "DlwProcessorBreakerOpen",
    "DlwGrammarSandboxRestarts",
    "DlwLocalPrefills",
    "DlwDrainLong",
}
"""The alerts of this file's tests."""


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    with running_prometheus(tmp_path / "prometheus") as server:
        yield server


def load(stack: Stack, clients: int, **body: Any) -> AbstractContextManager[None]:
    """Clients that each ask again as soon as they have an answer, or an error."""
    asked = request(**body)
    return asking(clients, lambda: http(f"{stack.url}/v1/chat/completions", asked, timeout_s=120), pause_s=0.05)


def request(words: int = 1, **body: Any) -> dict[str, Any]:
    """A chat of that many words."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hello " * words}], "max_tokens": 8}
    return asked | {"ignore_eos": True} | body


def test_no_worker(stack: Stack, prometheus: Prometheus) -> None:
    prometheus.wait_fires("DlwNoWorker")
    stack.start_frontend()
    prometheus.scrape(stack.start_worker(*CPU))
    prometheus.wait_clears("DlwNoWorker")


def test_an_engine_that_fails_requests(stack: Stack, prometheus: Prometheus) -> None:
    """The first failure since a start counts, although its counter was never seen before."""
    stack.start_frontend()
    worker = stack.start_worker(scripted=True)
    prometheus.scrape(worker)
    wait_for(lambda: prometheus.query("dlw_engine_info"), "a scrape")
    stack.post("completions", prompt="u", max_tokens=8)
    prometheus.wait_fires("DlwEngineBroken")
    worker.end()  # its pod is deleted, another one takes its place
    prometheus.scrape(stack.start_worker(*CPU))
    prometheus.wait_clears("DlwEngineBroken")


BROKEN = 'dlw_requests_total{instance="1:9090",outcome="engine_broken",pod="a"%s}'
BEGUN = 'dlw_requests_created{instance="%s",outcome="stop",pod="a"%s}'


@pytest.mark.parametrize("label", ["same", "own"], ids="{}_worker_id".format)
def test_a_worker_that_breaks_between_two_scrapes(label: str, tmp_path: Path) -> None:
    """Its last counts are never seen: it leaves within seconds. With some kinds of discovery the
    next one has labels of its own.
    """
    before, after = ',worker_id="1"', ',worker_id="2"'
    if label == "same":
        series = {BROKEN % before: "0x100", BEGUN % ("1:9090", before): "1000x20 1305x80"}
    else:
        series = {
            BROKEN % before: "0x20 stale",
            BROKEN % after: "_x21 0x80",
            BEGUN % ("1:9090", before): "1000x20 stale",
            BEGUN % ("1:9090", after): "_x21 1305x80",
        }
    check_firing(tmp_path, series, {"5m": set(), "6m": {"DlwEngineBroken"}, "14m": {"DlwEngineBroken"}, "17m": set()})


def test_a_worker_that_is_replaced_is_not_broken(tmp_path: Path) -> None:
    """A pod of a name that there was before, and one of another name."""
    series = {BEGUN % ("1:9090", ""): "1000x20 stale", BEGUN % ("2:9090", ""): "_x21 1305x80"}
    series['dlw_requests_created{instance="3:9090",outcome="stop",pod="b"}'] = "_x21 1310x80"
    check_firing(tmp_path, series, {"5m": set(), "6m": set(), "10m": set()})


def test_a_processor_fails_while_pods_are_replaced(tmp_path: Path) -> None:
    """The counts of a pod that goes away do not stand for those of the next one."""
    failed = 'dlw_processor_errors_total{pod="%s",processor="acme/p",reason="raised"}'
    series = {failed % "a": "1000x60 stale", failed % "b": "_x62 1+1x60"}
    check_firing(tmp_path, series, {"15m": set(), "18m": {"DlwProcessorFails"}, "29m": {"DlwProcessorFails"}})
    check_firing(tmp_path, {failed % "a": "_x21 6x80"}, {"5m": set(), "6m": {"DlwProcessorFails"}, "17m": set()})
    restarted = {failed % "a": "1000x60 0+1x60"}
    check_firing(tmp_path, restarted, {"15m": set(), "18m": {"DlwProcessorFails"}, "29m": {"DlwProcessorFails"}})


def test_a_slow_processor_on_a_full_worker(stack: Stack, prometheus: Prometheus) -> None:
    alerts = ("DlwTokensSlow", "DlwQueueLong", "DlwFirstTokenSlow", "DlwOverloaded")
    stack.start_frontend()
    options = with_third_parties(stack, "acme/sleeps=third_party_e2e:Sleeps")
    prometheus.scrape(stack.start_worker(*CPU, *PATIENT, *options, "--max-num-seqs", "1", "--max-queue", "2"))
    with load(stack, 6, **of(processor("acme/sleeps"))):
        prometheus.wait_fires(*alerts)
    with load(stack, 2):  # clients that do not name it
        prometheus.wait_clears(*alerts)


def test_preemptions(stack: Stack, prometheus: Prometheus) -> None:
    stack.start_frontend()
    port = str(free_port())
    few = stack.start_worker(*CPU, "--context-length", "512", "--kv-blocks", "48", DYN_SYSTEM_PORT=port)
    prometheus.scrape(few)
    with load(stack, 6, words=60, max_tokens=250):
        prometheus.wait_fires("DlwPreemptions")
        few.end()
        stack.start_worker(*CPU, "--kv-blocks", "1024", DYN_SYSTEM_PORT=port)
        prometheus.wait_clears("DlwPreemptions")


def test_a_processor_that_fails(stack: Stack, prometheus: Prometheus) -> None:
    alerts = ("DlwProcessorFails", "DlwProcessorBreakerOpen")
    stack.start_frontend()
    options = with_third_parties(stack, "acme/raises=third_party_e2e:Raises")
    port = str(free_port())
    worker = stack.start_worker(*CPU, *PATIENT, *options, DYN_SYSTEM_PORT=port)
    prometheus.scrape(worker)
    with load(stack, 2, **of(processor("acme/raises"))):
        prometheus.wait_fires(*alerts)
    worker.end()
    stack.start_worker(*CPU, DYN_SYSTEM_PORT=port)  # without it
    prometheus.wait_clears(*alerts)


def test_a_sandbox_that_dies(stack: Stack, prometheus: Prometheus) -> None:
    stack.start_frontend()
    worker = stack.start_worker(*CPU)
    prometheus.scrape(worker)

    def ask(number: int) -> int:
        body = request(ignore_eos=False, **of(processor("regex", pattern=f"a{{{number}}}b")))
        return http(f"{stack.url}/v1/chat/completions", body)[0]

    assert ask(1) == 200
    wait_for(
        lambda: prometheus.query("dlw_grammar_sandbox_restarts_total"), "a sample"
    )  # what comes before is no increase
    for number in range(2, 8):
        (sandbox,) = wait_for(lambda: worker.children("sandbox"), "the sandbox")
        sandbox.kill()
        wait_for(lambda number=number: ask(number) == 200, "a grammar")
    prometheus.wait_fires("DlwGrammarSandboxRestarts")
    assert ask(9) == 200
    prometheus.wait_clears("DlwGrammarSandboxRestarts")


def test_prompts_that_come_without_their_kv(stack: Stack, prometheus: Prometheus) -> None:
    """As from a frontend that knows no prefill worker."""
    stack.start_frontend()
    prefill = stack.start_worker(*CPU, "--disaggregation-mode", "prefill", wait=False)
    stack.wait_endpoint(prefill)
    prometheus.scrape(stack.start_worker(*CPU, "--disaggregation-mode", "decode"))
    decode = Endpoint(stack, "dynamo.backend")
    fired = threading.Event()

    def ask() -> None:
        while not fired.is_set():
            assert len(tokens(decode.ask([5, 6, 7], 4))) == 4

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            prometheus.wait_fires("DlwLocalPrefills")
        finally:
            fired.set()
        asking.result()
    decode.end()
    with load(stack, 2, words=40):
        prometheus.wait_clears("DlwLocalPrefills")


def test_a_drain_that_does_not_end(stack: Stack, prometheus: Prometheus) -> None:
    stack.start_frontend()
    options = with_third_parties(stack, "acme/sleeps=third_party_e2e:Sleeps")
    worker = stack.start_worker(*CPU, *PATIENT, *options, "--drain-timeout-s", "600")
    prometheus.scrape(worker)
    with load(stack, 1, max_tokens=400, **of(processor("acme/sleeps"))):
        wait_for(lambda: worker.metric("dlw_in_flight_requests") == 1, "a request")
        worker.signal(signal.SIGTERM)
        prometheus.wait_fires("DlwDrainLong")
        worker.end()
        prometheus.scrape(stack.start_worker(*CPU))
        prometheus.wait_clears("DlwDrainLong")


def test_the_ratios_of_the_document_are_numbers(tmp_path: Path) -> None:
    """Series of different labels have no ratio unless it says which of them to leave out."""
    text = (REPOSITORY / "docs/metrics.md").read_text()
    ratios = re.findall(r"`([^`]* / [^`]*)`", text[text.index("Useful ratios:") :].partition("\n\n")[0])
    labels = 'instance="1:9090",pod="a"'
    rates = {"cached": 15, "prompt": 60}
    series = {f'dlw_tokens_total{{kind="{kind}",{labels}}}': f"0+{rate}x40" for kind, rate in rates.items()}
    series |= {f"dlw_kv_{kind}_blocks{{{labels}}}": f"{n}x40" for kind, n in (("used", 50), ("total", 100))}
    checks = [
        {"expr": ratio, "eval_time": "8m", "exp_samples": [{"labels": f"{{{labels}}}", "value": value}]}
        for ratio, value in zip(ratios, (0.25, 0.5), strict=True)
    ]
    check_samples(tmp_path, series, checks)


def test_every_alert_is_here_and_in_the_runbook() -> None:
    manifest = yaml.safe_load((REPOSITORY / "k8s/monitoring/alerts.yaml").read_text())
    alerts = [rule["alert"] for group in manifest["spec"]["groups"] for rule in group["rules"]]
    assert set(alerts) == FIRED
    assert re.findall(r"^## (Dlw\w+)$", (REPOSITORY / "docs/runbook.md").read_text(), re.MULTILINE) == alerts
