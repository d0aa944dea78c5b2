"""A KV router that starts anew learns from the workers what they have cached by then."""

from __future__ import annotations

from e2e_stack import Stack, wait_for
from kv_router_checks import num_cached, num_stored, prompt_of

ENGINE = ("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "8", "--enable-kv-routing", "true")
LENGTH = 96


def test_a_router_that_starts_anew_finds_every_prefix(stack: Stack) -> None:
    stack.start_frontend("--router-mode", "kv")
    workers = [stack.start_worker(*ENGINE, wait=False) for _ in range(2)]
    for worker in workers:
        stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=1)[0] == 200, "an answer")
    prefixes = [prompt_of(number, LENGTH) for number in range(8)]
    for prefix in prefixes:
        before = num_stored(stack)
        assert num_cached(stack, [*prefix, 301]) == 0
        wait_for(lambda before=before: num_stored(stack) > before, "that the router hears of the prefix")
    stack.frontend.end()
    stack.start_frontend("--router-mode", "kv")
    for worker in workers:
        stack.wait_registered(worker)
    wait_for(lambda: num_stored(stack) > 0, "that the router knows what is cached", 20)
    for number, prefix in enumerate(prefixes):
        assert num_cached(stack, [*prefix, *prompt_of(100 + number, 5)]) == LENGTH
