"""Which reply subjects a worker on NATS answers to."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client

from worker.arguments import parse_arguments
from worker.errors import ConfigurationError
from worker.runtimes.nats.replies import OWN_INBOX, ReplyGuard


@pytest.mark.parametrize(
    "prefixes", ["", "_INBOX", "$JS.", "_INBOX.,$", "dlw.M.", "a.*.", "dlw-batch.", ">.", "a..", ".", "_INBOX. b."]
)
def test_prefixes_that_are_refused(prefixes: str) -> None:
    with pytest.raises(ConfigurationError, match="--nats-reply-prefixes"):
        parse_arguments(["--runtime", "nats", "--model-path", "m", "--nats-reply-prefixes", prefixes], {})


@given(
    st.text(max_size=40) | st.from_regex(r"(_GR_\.[a-z.]{0,8})?(_INBOX|_inbox|\$JS|dlw)[.a*>_ ]{0,9}", fullmatch=True)
)
@settings(max_examples=examples(500))
def test_what_is_allowed_is_below_a_prefix(reply: str) -> None:
    guard = ReplyGuard(Client(), "_INBOX., _INBOX_app.")
    if guard.allows(reply):
        below = reply.split(".", 3)[3] if reply.startswith("_GR_.") else reply
        assert below.startswith(("_INBOX.", "_INBOX_app."))
        assert not below.startswith(f"{OWN_INBOX}.")
        assert all(below.split("."))
        assert not set(below) & set("*> \t\r\n")
