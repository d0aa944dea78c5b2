"""A request moves from one worker with vLLM to another, and its chain goes on where it was."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from e2e_stack import MODEL, wait_for
from vllm_stack import vllm_workers

from adapters.client import processor, selection

pytestmark = pytest.mark.real_model

TEXT = "".join(f"line {number} of a text that one grammar allows\n" for number in range(12))


async def test_a_forced_text_goes_on_in_another_worker(tmp_path: Path) -> None:
    migration = ["--migration", "on", "--boundary-store", f"file:{tmp_path / 'boundaries'}", "--drain-timeout-s", "0"]
    with vllm_workers(tmp_path / "stack", 2, *migration, frontend=["--migration-limit", "3"]) as (stack, workers):
        async with stack.async_client() as client:
            stream = await client.completions.create(
                model=MODEL,
                prompt="Once",
                max_tokens=400,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={
                    "nvext": {
                        "annotations": [
                            "logits_processors:" + selection(processor("choice", choices=[TEXT]), receipt=True)
                        ],
                        "extra_fields": ["engine_data"],
                    }
                },
            )
            text, mode, finish_reason, left = "", "", None, None
            async for chunk in stream:
                text += "".join(choice.text or "" for choice in chunk.choices)
                finish_reason = next((one.finish_reason for one in chunk.choices if one.finish_reason), finish_reason)
                data = (getattr(chunk, "nvext", None) or {}).get("engine_data")
                mode = data["logits_processors"]["mode"] if data else mode
                if left is None and len(text) > 20:
                    busy = [each for each in workers if each.metric("dlw_in_flight_requests") == 1]
                    left = busy[0]
                    left.signal(signal.SIGTERM)
        assert left is not None
        assert (text, finish_reason) == (TEXT, "stop")
        assert mode.startswith("migrated at ")
        assert await asyncio.to_thread(left.wait) == 0
        wait_for(lambda: "drained: 0 finished, 1 migrated" in left.log, "the line of the drain")
