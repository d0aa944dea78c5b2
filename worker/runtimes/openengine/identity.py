"""The engine and the schema that workers name to their clients."""

from __future__ import annotations

ENGINE_NAME = "dynamo-logits-worker"
"""Name of the engine: a client that has asked it knows what the keys of ``extra`` do."""

SCHEMA_REVISION = 1
"""Revision of the schema that is served, and of the oldest clients that are."""

SCHEMA_RELEASE = "4def7c50b05e0674a0c3b26917399155535966e4"
"""Commit of the public schema that `openengine.proto` is equal to: it has no releases yet."""
