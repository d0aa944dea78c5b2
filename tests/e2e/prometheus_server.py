"""A real Prometheus that scrapes workers and evaluates the alerts of `k8s/monitoring`, with their
durations shortened from minutes to seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from e2e_stack import REPOSITORY, Process, Worker, http, wait_for
from ports import free_port

SECONDS = {"5m": "20s", "10m": "60s", "30m": "60s"}
"""Windows and waiting times of the rules, and theirs in the tests."""

PATIENCE_S = 180.0


def shortened() -> dict[str, Any]:
    """The rules of the manifest, with the durations of the tests."""
    manifest = yaml.safe_load((REPOSITORY / "k8s/monitoring/alerts.yaml").read_text())
    groups = manifest["spec"]["groups"]
    for group in groups:
        for rule in group["rules"]:
            rule["expr"] = re.sub(r"(\[|offset )(\d+m)", lambda found: found[1] + SECONDS[found[2]], rule["expr"])
            if "for" in rule:
                assert rule["for"] in SECONDS
                rule["for"] = "2s"
    return {"groups": groups}


@cache
def program() -> str:
    """Path of Prometheus: installed, or unpacked from Debian's package."""
    found = shutil.which("prometheus")
    if found is not None:
        return found
    folder = Path.home() / ".cache" / "dynamo-logits-worker" / "prometheus"
    if not (folder / "usr/bin/prometheus").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "-qq", "download", "prometheus"], cwd=folder, check=True)
        (package,) = folder.glob("prometheus_*.deb")
        subprocess.run(["dpkg", "-x", package, folder], check=True)
        package.unlink()
    return str(folder / "usr/bin/prometheus")


def check_firing(directory: Path, series: dict[str, str], expected: dict[str, set[str]]) -> None:
    """Fails unless the alerts fire as expected, with the manifest's durations, by promtool's clock.

    Args:
        directory: Folder for files.
        series: Values of series, in promtool's notation, one each 15 s.
        expected: Names of the alerts that fire, by the time since the first values.
    """
    firing = 'count by (alertname) (ALERTS{alertstate="firing",alertname!="DlwNoWorker"})'
    checks = [
        {
            "expr": firing,
            "eval_time": at,
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
        }
        for at, names in expected.items()
    ]
    check_samples(directory, series, checks)


def check_samples(directory: Path, series: dict[str, str], checks: list[dict[str, Any]]) -> None:
    """Fails unless expressions have the expected samples, by promtool's clock.

    Args:
        directory: Folder for files.
        series: Series and their values, as `check_firing` takes them.
        checks: Expressions, times and samples, as promtool reads them.
    """
    manifest = yaml.safe_load((REPOSITORY / "k8s/monitoring/alerts.yaml").read_text())
    (directory / "rules.yml").write_text(yaml.safe_dump({"groups": manifest["spec"]["groups"]}))
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    one = {"interval": "15s", "input_series": inputs, "promql_expr_test": checks}
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [one]}
    (directory / "test.yml").write_text(yaml.safe_dump(test))
    command = [str(Path(program()).with_name("promtool")), "test", "rules", "test.yml"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A server that was started in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._targets = directory / "targets.json"
        self.scrape()
        (directory / "rules.yml").write_text(yaml.safe_dump(shortened()))
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {
                    "job_name": "workers",
                    "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
                    "relabel_configs": [{"source_labels": ["__address__"], "target_label": "pod"}],
                }
            ],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        command = [program(), "--config.file", str(directory / "prometheus.yml")]
        command += ["--storage.tsdb.path", str(directory / "data"), "--web.listen-address", address]
        self.process = Process(command, {}, directory / "prometheus.log")
        wait_for(lambda: http(f"{self._url}/-/ready")[0] == 200, "Prometheus")

    def scrape(self, *workers: Worker) -> None:
        """Scrape these workers, and no others."""
        targets = [{"targets": [f"127.0.0.1:{worker.port}" for worker in workers]}]
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps(targets))
        new.rename(self._targets)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        _, text = http(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        found: list[dict[str, Any]] = json.loads(text)["data"]["result"]
        return found

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def wait_fires(self, *names: str) -> None:
        """Until each of these has fired, together or one after the other."""
        seen: set[str] = set()

        def all_did() -> bool:
            seen.update(self.firing())
            return seen >= set(names)

        try:
            wait_for(all_did, "alerts", PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"{sorted(set(names) - seen)} did not fire, {sorted(seen)} did") from None

    def wait_clears(self, *names: str) -> None:
        """Until none of these fires."""
        wait_for(lambda: not self.firing() & set(names), f"the end of {names}", PATIENCE_S)


@contextmanager
def running_prometheus(directory: Path) -> Iterator[Prometheus]:
    """A server that is killed at the end."""
    directory.mkdir()
    server = Prometheus(directory)
    try:
        yield server
    finally:
        server.process.end()
