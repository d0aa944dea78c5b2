"""Runs a container of the manifests as a process, as kubelet would: its startup probe before the
others, its limits, and its grace period.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e_stack import Process, http

SPEED = 10
"""How many times as often as in a pod probes ask, so that tests take less time."""

CGROUPS = Path("/sys/fs/cgroup")
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def num_bytes(amount: str) -> int:
    """Bytes of an amount as manifests write it, such as ``4Gi``."""
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", amount)
    assert found, amount
    return int(found[1]) * _UNITS[found[2]]


class Limits:
    """Holds a process to a container's limits by a control group of version 2.

    Where this process may make none, nothing does; `RunningContainer.end` compares its memory then.

    Args:
        limits: ``resources.limits`` of the container.
        pid: The process.
        root: Where control groups are.

    Attributes:
        group: The control group; None where none may be made.
    """

    def __init__(self, limits: Mapping[str, str], pid: int, root: Path = CGROUPS) -> None:
        self.group: Path | None = None
        control = root / "cgroup.subtree_control"
        if not (control.is_file() and "memory" in control.read_text().split() and os.access(root, os.W_OK)):
            return
        self.group = root / f"dlw-test-{uuid.uuid4().hex}"
        self.group.mkdir()
        if "memory" in limits:
            (self.group / "memory.max").write_text(str(num_bytes(limits["memory"])))
        if "cpu" in limits:
            (self.group / "cpu.max").write_text(f"{round(float(limits['cpu']) * 100_000)} 100000")
        (self.group / "cgroup.procs").write_text(str(pid))

    def end(self) -> None:
        """Remove the group of a process that has ended."""
        if self.group is not None:
            self.group.rmdir()


class RunningContainer:
    """A process with the command, probes, limits and grace period of a container.

    Args:
        container: The container.
        command: The container's command line, with this machine's paths and ports.
        environ: The whole environment.
        ports: Port of this machine by that of the manifest.
        grace_s: ``terminationGracePeriodSeconds`` of the pod.
        log: Where it writes.

    Attributes:
        process: The process.
        has_started: Set once the startup probe has succeeded.
        is_ready: Set while the readiness probe succeeds.
        verdict: Why kubelet would have killed it; empty if it would not.
    """

    def __init__(
        self,
        container: dict[str, Any],
        command: list[str],
        environ: Mapping[str, str],
        ports: Mapping[str, str],
        grace_s: float,
        log: Path,
    ) -> None:
        self._container, self._ports, self._grace_s = container, ports, grace_s
        self.process = Process(command, environ, log)
        self._limits = Limits(self._resources, self.process.child.pid)
        self.has_started, self.is_ready = threading.Event(), threading.Event()
        self._ends = threading.Event()
        self.verdict = ""
        self._threads = [threading.Thread(target=self._watch, daemon=True)]
        self._threads[0].start()

    @property
    def _resources(self) -> dict[str, str]:
        limits: dict[str, str] = self._container["resources"]["limits"]
        return limits

    def _watch(self) -> None:
        """The startup probe until it succeeds, then the others."""
        if self._ask("startupProbe", until_success=True):
            self.has_started.set()
            for name in ("livenessProbe", "readinessProbe"):
                self._threads.append(threading.Thread(target=self._ask, args=(name,), daemon=True))
                self._threads[-1].start()

    def _ask(self, name: str, *, until_success: bool = False) -> bool:
        """Ask until the end, until it would be killed, or until an answer."""
        probe, failures = self._container[name], 0
        port = self._ports[str(probe["httpGet"]["port"])]
        url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
        while not self._ends.wait(probe["periodSeconds"] / SPEED):
            succeeded = 200 <= http(url, timeout_s=probe["timeoutSeconds"])[0] < 400
            failures = 0 if succeeded else failures + 1
            if succeeded and until_success:
                return True
            if name == "readinessProbe":
                (self.is_ready.set if succeeded else self.is_ready.clear)()
            elif failures >= probe["failureThreshold"] * SPEED and not self._ends.is_set():
                self.verdict = f"{name} of {url} failed {failures} times"
                return False
        return False

    def await_ready(self, timeout_s: float) -> None:
        """Wait until both probes have succeeded. Raises `AssertionError` with the log if not."""
        if not (self.has_started.wait(timeout_s) and self.is_ready.wait(timeout_s)):
            raise AssertionError(f"{self.verdict or 'not ready in time'}\n{self.process.log}")
        assert self.process.running, self.process.log

    def end(self) -> int:
        """End it as kubelet does, after its hook; its exit status, that of SIGKILL after the grace
        period.

        Raises:
            AssertionError: it would have been killed before, by a probe or for its memory.
        """
        assert self.process.running, self.process.log
        peak = _peak_bytes(self.process.child.pid)
        assert peak <= num_bytes(self._resources["memory"]), f"{peak} bytes, with limits {self._resources}"
        self._stop_probes()
        assert not self.verdict
        deadline_s = time.monotonic() + self._grace_s
        hook = self._container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            subprocess.run(hook["exec"]["command"], timeout=self._grace_s, check=True)
        self.process.signal(signal.SIGTERM)
        try:
            return self.process.wait(deadline_s - time.monotonic())
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            self.close()

    def close(self) -> None:
        """Kill it if it runs, and leave nothing behind."""
        self._stop_probes()
        self.process.end()
        self._limits.end()
        self._limits.group = None

    def _stop_probes(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()


def _peak_bytes(pid: int) -> int:
    """Largest resident memory of a process so far."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024
