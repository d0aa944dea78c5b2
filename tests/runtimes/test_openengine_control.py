"""The calls about the worker itself, the standard gRPC services, TLS and tokens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from lora_adapters import write_adapter
from openengine_workers import OpenEngineClient, connected, engine_error_of, make_worker, running, serving

from worker.errors import StartupError
from worker.runtimes.openengine import wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
BAD = grpc.StatusCode.INVALID_ARGUMENT


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_model: Path) -> AsyncIterator[OpenEngineClient]:
    async with serving(tiny_model) as found:
        yield found


async def refused(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that is refused."""
    try:
        answered = [event async for event in call] if hasattr(call, "__aiter__") else await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"answered: {answered}")


async def test_the_server_says_what_it_is(client: OpenEngineClient) -> None:
    info = await client.call("Control.GetServerInfo", wire.GetServerInfoRequest())
    assert info.engine_name == "dynamo-logits-worker"
    assert info.engine_role == wire.ENGINE_ROLE_AGGREGATED
    assert list(info.supported_models) == ["tiny"]
    assert (info.schema_revision, info.minimum_client_revision, len(info.schema_release)) == (1, 1, 40)
    assert (info.capacity.kv_block_size, info.capacity.total_kv_blocks) == (BLOCK, 512)
    assert info.capacity.max_running_requests == 16
    assert not info.capacity.HasField("max_loras")
    assert info.kv_connector == wire.KvConnectorInfo(enabled=False)
    assert info.extra["engine"] == "embedded"
    assert len(info.extra["model_digest"]) == len(info.extra["tokens_digest"]) == 32
    again = await client.call("Control.GetServerInfo", wire.GetServerInfoRequest())
    assert info.instance_id == again.instance_id != ""


async def test_the_model_says_what_can_be_asked(client: OpenEngineClient) -> None:
    info = await client.call("Control.GetModelInfo", wire.GetModelInfoRequest(model="tiny"))
    assert (info.served_model_name, info.max_context_length) == ("tiny", 2048)
    assert info.generation.max_num_sequences == 128
    assert not info.generation.supports_priority
    assert info.supports_text_input
    assert info.supports_lora
    assert "regex" in list(info.extra["logits_processors"])
    modes = wire.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N
    scores = wire.LogprobCapabilities(supported=True, candidate_selection_modes=[modes], max_top_n=100)
    assert info.generation.prompt_logprobs == info.generation.output_logprobs == scores
    assert len(info.generation.guided_decoding.modes) == 6
    most = {"output_candidates": {"top_n": scores.max_top_n}}
    assert len((await client.answer(response=most)).infos()[0].candidates) == 100
    error = await refused(client.call("Control.GetModelInfo", wire.GetModelInfoRequest(model="other")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert engine_error_of(error).code == wire.ERROR_CODE_MODEL_NOT_FOUND


async def test_health_probes_the_real_path(client: OpenEngineClient) -> None:
    ask = client.call("Control.Health", wire.HealthRequest())
    assert (await ask).state == wire.HEALTH_STATE_READY
    probed = await client.call("Control.Health", wire.HealthRequest(include_inference_probe=True))
    assert [(one.name, one.state) for one in probed.checks] == [
        ("model", wire.HEALTH_STATE_READY),
        ("inference_probe", wire.HEALTH_STATE_READY),
    ]
    other = await client.call("Control.Health", wire.HealthRequest(role=wire.ENGINE_ROLE_DECODE))
    assert other.state == wire.HEALTH_STATE_NOT_READY
    assert [one.name for one in other.checks] == ["model", "role"]


async def test_load_counts_requests_and_blocks(client: OpenEngineClient) -> None:
    stream = client.generate(stopping={"max_tokens": 1500, "ignore_eos": True})
    await anext(aiter(stream))
    load = await client.call("Control.GetLoad", wire.GetLoadRequest(include_per_rank=True))
    assert (load.running_requests, load.queued_requests, load.active_kv_sessions) == (1, 0, 0)
    assert 0 < load.used_kv_blocks < load.total_kv_blocks == 512
    assert load.timestamp_unix_nanos > 1.7e18
    (rank,) = load.ranks
    assert (rank.data_parallel_rank, rank.running_requests) == (0, 1)
    stream.cancel()
    assert not (await client.call("Control.GetLoad", wire.GetLoadRequest())).ranks


async def test_adapters_are_loaded_chosen_and_unloaded(
    client: OpenEngineClient, tiny_model: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", tiny_model, size=1.0)
    adapter = wire.LoraAdapter(lora_id=7, lora_name="a", source_path=str(path))
    loaded = await client.call("Control.LoadLora", wire.LoadLoraRequest(adapter=adapter))
    assert (loaded.adapter, loaded.already_loaded) == (adapter, False)
    assert (await client.call("Control.LoadLora", wire.LoadLoraRequest(adapter=adapter))).already_loaded
    assert list((await client.call("Control.ListLoras", wire.ListLorasRequest())).adapters) == [adapter]
    texts = [(await client.answer(lora_name=name)).text() for name in ("", "a", "")]
    assert texts[0] == texts[2] != texts[1]
    unloaded = await client.call("Control.UnloadLora", wire.UnloadLoraRequest(lora_name="a"))
    assert unloaded.adapter == adapter
    assert not (await client.call("Control.ListLoras", wire.ListLorasRequest())).adapters
    for name, request, status in (
        ("UnloadLora", wire.UnloadLoraRequest(lora_name="a"), grpc.StatusCode.NOT_FOUND),
        ("LoadLora", wire.LoadLoraRequest(adapter=wire.LoraAdapter(lora_name="tiny", source_path="/x")), BAD),
        ("LoadLora", wire.LoadLoraRequest(adapter=wire.LoraAdapter(lora_name="b", source_path="x")), BAD),
        ("LoadLora", wire.LoadLoraRequest(adapter=wire.LoraAdapter(lora_name="b", source_path="/nowhere")), BAD),
    ):
        assert (await refused(client.call(f"Control.{name}", request))).code() == status


async def test_the_standard_health_service_and_reflection(client: OpenEngineClient) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "openengine.v1.Inference", "openengine.v1.Control"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol="openengine.v1.Inference")
    (answer,) = [one async for one in reflection.ServerReflectionInfo(iter([question]))]
    assert wire.DESCRIPTOR.serialized_pb in answer.file_descriptor_response.file_descriptor_proto
    listed = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = [one async for one in reflection.ServerReflectionInfo(iter([listed]))]
    assert {one.name for one in answer.list_services_response.service} >= {
        "openengine.v1.Inference",
        "openengine.v1.Control",
        "grpc.health.v1.Health",
    }


async def test_kv_events_tell_of_the_cached_blocks(tiny_model: Path) -> None:
    async with serving(tiny_model, "--kv-blocks", "140", "--context-length", "1024") as client:
        (source,) = (await client.call("Control.GetKvEventSources", wire.GetKvEventSourcesRequest())).sources
        assert (source.transport, source.encoding, source.endpoint_addr.host) == ("grpc", "protobuf", "127.0.0.1")
        ids = list(range(10, 10 + 3 * BLOCK))
        live = client.call("Control.SubscribeKvEvents", wire.SubscribeKvEventsRequest())
        await live.initial_metadata()
        await client.answer(token_ids={"ids": ids})
        stored = (await anext(aiter(live))).batch
        (event,) = stored.events
        assert stored.sequence_number == 1
        assert list(event.block_stored.token_ids[: 3 * BLOCK]) == ids
        assert event.block_stored.block_size == BLOCK
        for start in range(40):  # until the first blocks are evicted
            await client.answer(token_ids={"ids": [200 + start] * (6 * BLOCK)})
        seen = [stored]
        while not any(event.HasField("block_removed") for event in seen[-1].events):
            seen.append((await anext(aiter(live))).batch)
        assert [batch.sequence_number for batch in seen] == list(range(1, len(seen) + 1))
        live.cancel()
        known: dict[bytes, bytes] = {}
        for batch in seen:
            for event in batch.events:
                for each in event.block_removed.block_hashes:
                    del known[each.value]
                before = event.block_stored.parent_block_hash.value
                for each in event.block_stored.block_hashes:
                    known[each.value], before = before, each.value
        again = client.call("Control.SubscribeKvEvents", wire.SubscribeKvEventsRequest(start_sequence_number=2))
        assert (await anext(aiter(again))).batch == seen[1]
        again.cancel()
        whole = client.call("Control.SubscribeKvEvents", wire.SubscribeKvEventsRequest(include_snapshot=True))
        first = (await anext(aiter(whole))).batch
        assert first.events[0].HasField("all_blocks_cleared")
        assert first.sequence_number >= len(seen)
        whole.cancel()
        ahead = client.call("Control.SubscribeKvEvents", wire.SubscribeKvEventsRequest(start_sequence_number=10**6))
        assert (await refused(ahead)).code() == grpc.StatusCode.OUT_OF_RANGE
        both = wire.SubscribeKvEventsRequest(start_sequence_number=1, include_snapshot=True)
        assert (
            await refused(client.call("Control.SubscribeKvEvents", both))
        ).code() == grpc.StatusCode.INVALID_ARGUMENT
        rank = wire.SubscribeKvEventsRequest(data_parallel_ranks=[1])
        assert (
            await refused(client.call("Control.SubscribeKvEvents", rank))
        ).code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_kv_events_can_be_off(tiny_model: Path) -> None:
    async with serving(tiny_model, "--enable-kv-routing", "false") as client:
        assert not (await client.call("Control.GetKvEventSources", wire.GetKvEventSourcesRequest())).sources
        error = await refused(client.call("Control.SubscribeKvEvents", wire.SubscribeKvEventsRequest()))
        assert engine_error_of(error).code == wire.ERROR_CODE_UNSUPPORTED_FEATURE


async def test_a_token_is_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# clients\nfirst\nsecond\n")
    async with serving(tiny_model, "--grpc-token-file", str(path)) as client:
        for metadata in ([], [("authorization", "Bearer third")], [("authorization", "first")]):
            error = await refused(client.call("Control.GetServerInfo", wire.GetServerInfoRequest(), metadata))
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert (await client.refusal(metadata)).code() == grpc.StatusCode.UNAUTHENTICATED
        answer = await client.answer([("authorization", "Bearer second")])
        assert answer.kinds[-1] == "finished"
        health = health_pb2_grpc.HealthStub(client.channel)  # probes of Kubernetes have none
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING


async def test_nothing_is_read_of_a_call_without_a_token(tiny_model: Path, tmp_path: Path) -> None:
    """A message may have 64 MiB, of which each call would keep as much as has come."""
    path = tmp_path / "tokens"
    path.write_text("first\n")
    async with serving(tiny_model, "--grpc-token-file", str(path)) as client:
        call = client.channel.stream_unary("/openengine.v1.Control/GetServerInfo")()  # of which nothing comes
        async with asyncio.timeout(10):
            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED


def write_certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate that ``localhost`` signed for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = (
        builder.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    )
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    paths = directory / "cert.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    return paths


async def test_tls(tiny_model: Path, tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    async with running(tiny_model, "--grpc-tls-cert", str(certificate), "--grpc-tls-key", str(key)) as worker:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{worker.port}", credentials) as channel:
            assert (await OpenEngineClient(channel).answer()).kinds[-1] == "finished"
        async with connected(worker.port) as plain:
            error = await plain.refusal()
            assert error.code() == grpc.StatusCode.UNAVAILABLE


async def test_what_keeps_it_from_starting(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(StartupError, match=f"--grpc-port: cannot listen on 127.0.0.1:{port}"):
            await make_worker(tiny_model, "--grpc-port", port).run()
    missing = str(tmp_path / "missing")
    with pytest.raises(StartupError, match=f"--grpc-tls-key {missing}: No such file"):
        await make_worker(tiny_model, "--grpc-tls-cert", missing, "--grpc-tls-key", missing).run()
    with pytest.raises(StartupError, match=f"--grpc-token-file {missing}"):
        await make_worker(tiny_model, "--grpc-token-file", missing).run()
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(StartupError, match="--grpc-tls-cert"):
        await make_worker(tiny_model, "--grpc-tls-cert", str(broken), "--grpc-tls-key", str(broken)).run()


async def test_it_listens_while_the_model_is_loaded(tiny_model: Path) -> None:
    worker = make_worker(tiny_model)
    serve = asyncio.create_task(worker.run())
    while not worker.port:
        await asyncio.sleep(0.01)
    async with connected(worker.port) as client:
        health = await client.call("Control.Health", wire.HealthRequest())
        assert health.state == wire.HEALTH_STATE_STARTING
        assert not worker.ready.is_set()
        for call in (client.generate(), client.call("Control.GetModelInfo", wire.GetModelInfoRequest())):
            error = await refused(call)
            assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "this worker is not serving yet")
        await worker.ready.wait()
        assert (await client.answer()).kinds[-1] == "finished"
    worker.shut_down()
    await serve
