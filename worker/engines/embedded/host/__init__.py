"""The host: memory, threads, device-to-host copies, and the watchdog of hung steps."""

from worker.engines.embedded.host.device_copy import HostCopy
from worker.engines.embedded.host.fair_lock import FairLock
from worker.engines.embedded.host.own_thread import in_own_thread
from worker.engines.embedded.host.threads import limit_threads
from worker.engines.embedded.host.watchdog import Watchdog

__all__ = ["FairLock", "HostCopy", "Watchdog", "in_own_thread", "limit_threads"]
