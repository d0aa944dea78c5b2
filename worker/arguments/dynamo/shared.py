"""Options that all of Dynamo's workers have.

Those of this worker's own names and variables (``--namespace``, ``--endpoint``, discovery, planes,
parsers, templates) have no row: see `worker.arguments.table`.
"""

from __future__ import annotations

from worker.arguments.dynamo.row import ByVariable, Only, Row, ToOption, off, refused, rows

NO_ENCODERS = "this worker caches and sends no output of an encoder"
_CALLS = "the front door holds calls to their tools (docs/front-door.md)"
_ROUTER = "routing is the frontend's: give it to dynamo.frontend"
_PASSES = "for the planner there is --publish-forward-pass-metrics (docs/metrics.md)"
_TAG = "--dyn-structural-tag"


def _router_flags() -> tuple[Row, ...]:
    """Options with which a worker advertises how the frontend routes to it. Their variables are the
    frontend's too, so they are left alone.
    """
    values = (
        *("--router-mode", "--router-session-affinity-ttl-secs", "--router-session-affinity-mode"),
        *("--active-decode-blocks-threshold", "--active-prefill-tokens-threshold"),
        *("--active-prefill-tokens-threshold-frac", "--router-kv-overlap-score-credit"),
        *("--router-kv-overlap-score-credit-decay", "--router-prefill-load-scale"),
        *("--router-decode-active-request-weight", "--router-host-cache-hit-weight", "--router-disk-cache-hit-weight"),
        *("--router-temperature", "--router-tracking-hash", "--router-tracking-key-file", "--router-tracking-key-id"),
        *("--router-prefill-load-model", "--router-ttl-secs", "--router-approximate-cache-policy"),
        *("--router-queue-threshold", "--router-policy-config", "--router-conditional-disagg-config"),
        *("--router-prefill-policy", "--router-decode-policy", "--router-event-threads", "--router-queue-policy"),
        *("--shared-cache-multiplier", "--shared-cache-type", "--router-predicted-ttl-secs"),
    )
    switches = (
        *("--load-aware", "--router-replica-sync", "--router-track-prefill-tokens", "--router-conditional-disagg"),
        *("--use-remote-indexer", "--enable-session-prefix-index"),
    )
    renamed = ("kv-events", "track-active-blocks", "track-output-blocks", "assume-kv-reuse")
    meaning = Only((), _ROUTER)
    return (
        *(Row((flag,), (), meaning) for flag in values),
        Row(("--router-kv-overlap-score-weight", "--kv-overlap-score-weight"), (), meaning),
        *(Row((flag,), (), meaning, "switch") for flag in switches),
        *(Row((f"--router-{name}", f"--{name}"), (), meaning, "switch") for name in renamed),
    )


SHARED: tuple[Row, ...] = (
    Row(("--endpoint-types", "--dyn-endpoint-types"), ("DYN_ENDPOINT_TYPES",), ToOption("endpoint_types")),
    *rows(
        "DYN_",
        {
            "--connector": Only(
                ("none", "null"),
                "no KV connector of Dynamo's is driven here: a prefill and a decode worker transfer KV themselves "
                "(docs/disaggregation.md)",
            ),
            "--output-modalities": Only(("text",), NO_ENCODERS),
        },
        "values",
    ),
    *off("DYN_", f"no traces are written; {_PASSES}", "--fpm-trace"),
    Row((), ("DYN_FORWARDPASS_METRIC_PORT",), Only((), _PASSES)),
    *off(
        "DYN_",
        "the front door sends tool_choice none where it parses calls itself, and their tools stay in the prompt",
        "--exclude-tools-when-tool-choice-none",
    ),
    Row(("--dyn-enable-structural-tag",), ("DYN_ENABLE_STRUCTURAL_TAG",), Only(("false",), _CALLS), "switch"),
    Row((_TAG,), ("DYN_STRUCTURAL_TAG",), Only(("false", "0", "no", "off"), _CALLS)),
    *(
        Row((f"{_TAG}-{part}",), (f"DYN_STRUCTURAL_TAG_{part.upper()}",), Only((), _CALLS))
        for part in ("scope", "schema")
    ),
    *refused("DYN_", "KV events belong to the endpoint that serves", "--kv-state-endpoint"),
    *refused("DYN_", "this worker writes no such file; its options are in docs/configuration.md", "--dump-config-to"),
    *rows("DYN_", {"--health-check-payload": ByVariable()}),
    *rows("DYN_", {"--multimodal-embedding-cache-capacity-gb": Only(("0", "0.0"), NO_ENCODERS)}),
    *off("DYN_", NO_ENCODERS, "--multimodal-embedding-cache-publisher"),
    *refused("DYN_", "this worker answers with text", "--media-output-fs-url", "--media-output-http-url"),
    *rows(
        "DYN_",
        dict.fromkeys(
            (
                *("--engine-request-limit", "--tcp-tls-cert-path", "--tcp-tls-key-path", "--tcp-tls-ca-cert-path"),
                *("--tcp-tls-server-name", "--tcp-tls-client-cert-path", "--tcp-tls-client-key-path"),
                "--tcp-tls-client-ca-cert-path",
            ),
            ByVariable(),
        ),
    ),
    Row(("--tcp-tls-handshake-timeout",), ("DYN_TCP_TLS_HANDSHAKE_TIMEOUT_SECS",), ByVariable()),
    *rows("DYN_", {"--tcp-tls-insecure": ByVariable()}, "switch"),
    *rows(
        "",
        dict.fromkeys(
            ("--nats-tls-ca-cert-path", "--nats-tls-client-cert-path", "--nats-tls-client-key-path"), ByVariable()
        ),
    ),
    *rows("", {"--nats-tls-insecure": ByVariable()}, "switch"),
    *_router_flags(),
)
"""Rows of the options of all workers."""
