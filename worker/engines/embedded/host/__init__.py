"""The host: memory, threads, and the watchdog of hung steps."""

from worker.engines.embedded.host.fair_lock import FairLock
from worker.engines.embedded.host.own_thread import in_own_thread
from worker.engines.embedded.host.threads import limit_threads
from worker.engines.embedded.host.watchdog import Watchdog

__all__ = ["FairLock", "Watchdog", "in_own_thread", "limit_threads"]
