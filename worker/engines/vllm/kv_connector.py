"""vLLM's ``NixlConnector``: whether it can be used here, its settings and its environment."""

from __future__ import annotations

import fcntl
import importlib
import math
import socket
import struct
from collections.abc import MutableMapping
from typing import Any

from worker.engines.vllm.package import Package
from worker.engines.vllm.settings import VllmConfig
from worker.errors import StartupError, one_line

CONNECTOR = "NixlConnector"

_HOST, _PORT, _DEVICES = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "UCX_NET_DEVICES"


def transfer_config(package: Package, config: VllmConfig, environ: MutableMapping[str, str]) -> Any:
    """The ``KVTransferConfig`` of a prefill or decode worker; vLLM's variables are set.

    Raises:
        StartupError: vLLM cannot transfer KV here.
    """
    check_connector(config.role)
    set_environment(config.kv_devices, environ)
    return package.kv_transfer_config(
        kv_connector=CONNECTOR,
        kv_role="kv_producer" if config.role == "prefill" else "kv_consumer",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"kv_lease_duration": math.ceil(config.kv_lease_s)},
        **({"kv_buffer_device": "cpu"} if package.is_cpu else {}),
    )


def check_connector(role: str) -> None:
    """Check that vLLM can transfer KV here.

    Raises:
        StartupError: NIXL cannot be imported, or vLLM has no connector for it on this device.
    """
    flag = f"--disaggregation-mode {role}"
    try:
        importlib.import_module("nixl._api")
    except ImportError as error:
        raise StartupError(f"{flag}: NIXL cannot be imported here: {one_line(error)}") from error
    try:
        utils = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils")
        device = importlib.import_module("vllm.platforms").current_platform.device_type
        supported = utils._NIXL_SUPPORTED_DEVICE
    except (ImportError, AttributeError) as error:
        raise StartupError(f"{flag}: vLLM has no {CONNECTOR} here: {one_line(error)}") from error
    if device not in supported:
        raise StartupError(f"{flag}: vLLM's {CONNECTOR} is for {', '.join(sorted(supported))}, and this is {device}")


def set_environment(devices: str, environ: MutableMapping[str, str]) -> None:
    """Say in vLLM's and UCX's variables, where they are not set, where the engine is connected to.

    Args:
        devices: Network devices, as in ``UCX_NET_DEVICES``.
        environ: The environment that vLLM's processes get.

    Raises:
        StartupError: the first device has no address of its own, so the operator must give one.
    """
    environ[_DEVICES] = devices
    if not environ.get(_HOST):
        environ[_HOST] = _address_of(devices)
    if not environ.get(_PORT):
        with socket.socket() as probe:
            probe.bind((environ[_HOST], 0))
            environ[_PORT] = str(probe.getsockname()[1])


def _address_of(devices: str) -> str:
    """The IPv4 address of the first of some network devices."""
    name = devices.partition(",")[0]
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket.fileno(), 0x8915, request)  # SIOCGIFADDR
    except OSError:
        problem = f"set {_HOST} to the address that decode workers connect to: {name} is no network interface with one"
        raise StartupError(f"--kv-transfer-devices {devices}: {problem}") from None
    return socket.inet_ntoa(found[20:24])
