"""Buckets and objects of JetStream: made where they are missing, and read as they were written."""

from __future__ import annotations

import asyncio

from nats.js import JetStreamContext
from nats.js.api import ObjectMeta, ObjectMetaOptions
from nats.js.errors import BucketNotFoundError, DigestMismatchError, NotFoundError, ObjectNotFoundError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from worker.runtimes.nats.batch import layout

CHUNK_BYTES = 128 * 2**10
"""Size of a chunk of an object at most; less where the server's messages are small."""

OBJECT_S = 60.0
"""Seconds for an object to arrive."""


async def ensure_bucket(js: JetStreamContext, bucket: str) -> KeyValue:
    """A bucket of keys and values that exists."""
    try:
        return await js.key_value(bucket)
    except BucketNotFoundError:
        return await js.create_key_value(bucket=bucket)


async def ensure_bodies(js: JetStreamContext) -> ObjectStore:
    """The object store of large bodies and results."""
    try:
        return await js.object_store(layout.BODIES)
    except NotFoundError:
        return await js.create_object_store(layout.BODIES)


async def put_object(js: JetStreamContext, data: bytes) -> str:
    """Store ``data`` once; returns its digest, which is its name."""
    name = layout.digest(data)
    store = await ensure_bodies(js)
    try:
        await store.get_info(name)
    except ObjectNotFoundError:
        size = max(1, min(CHUNK_BYTES, layout.large_bytes(js._nc.max_payload)))
        await store.put(name, data, ObjectMeta(options=ObjectMetaOptions(max_chunk_size=size)))
    return name


async def get_object(js: JetStreamContext, name: str) -> bytes:
    """The bytes that `put_object` stored.

    Raises:
        NotFoundError: there is no such object.
        DigestMismatchError: it is not what was stored.
        BadObjectMetaError: the same.
        TimeoutError: a part of it is not there.
    """
    store = await js.object_store(layout.BODIES)
    async with asyncio.timeout(OBJECT_S):  # it would wait for ever for what was removed
        data = (await store.get(name)).data or b""
    if layout.digest(bytes(data)) != name:
        raise DigestMismatchError
    return bytes(data)
