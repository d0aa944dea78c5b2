"""Which reply subjects a worker on NATS answers to."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client

from worker.arguments import parse_arguments
from worker.errors import ConfigurationError
from worker.migration.nats_store import INBOX
from worker.runtimes.nats.replies import ReplyGuard


@pytest.mark.parametrize(
    "prefixes", ["", "_INBOX", "$JS.", "_INBOX.,$", "dlw.M.", "a.*.", "dlw-batch.", ">.", "a..", ".", "_INBOX. b."]
)
def test_prefixes_that_are_refused(prefixes: str) -> None:
    with pytest.raises(ConfigurationError, match="--nats-reply-prefixes"):
        parse_arguments(["--runtime", "nats", "--model-path", "m", "--nats-reply-prefixes", prefixes], {})


@given(st.text(max_size=40) | st.from_regex(r"(_INBOX|_inbox|\$JS|dlw)[.a*>_ ]{0,9}", fullmatch=True))
@settings(max_examples=examples(500))
def test_what_is_allowed_is_below_a_prefix(reply: str) -> None:
    guard = ReplyGuard(Client(), "_INBOX., _INBOX_app.")
    if guard.allows(reply):
        assert reply.startswith(("_INBOX.", "_INBOX_app."))
        assert not reply.startswith(f"{INBOX}.")
        assert all(reply.split("."))
        assert not set(reply) & set("*> \t\r\n")
