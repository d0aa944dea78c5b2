"""mini-swe-agent: a coding agent's loop of commands and what they print, through litellm."""

from __future__ import annotations

import json
import sys
from typing import Any

from checks import run
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel

COMMAND = "test -f done && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo $((6*7)) || touch done"


def agent(url: str, made: type[Any], name: str, **fields: Any) -> DefaultAgent:
    settings = {"api_base": url, "api_key": "none", "temperature": 0, **fields}
    model = made(model_name=name, model_kwargs=settings, cost_tracking="ignore_errors")
    return DefaultAgent(
        model,
        LocalEnvironment(),
        system_template="You solve a task with bash commands.",
        instance_template="{{task}}",
        step_limit=3,
    )


def forced() -> dict[str, Any]:
    """The command of each step: the first makes a file, the second finds it and submits."""
    call = json.dumps({"command": COMMAND}, separators=(",", ":"))
    text = f'<tool_call>{{"name": "bash", "arguments": {call}}}</tool_call>'
    return {"logits_processors": [{"name": "forced_prefix", "args": {"text": text}}]}


def check_required(url: str, model: str) -> None:
    """Commands that the model writes by itself."""
    asked = agent(
        url, LitellmModel, f"hosted_vllm/{model}", tool_choice="required", parallel_tool_calls=False, max_tokens=200
    )
    asked.config.step_limit = 1
    asked.run("Print the name of the current directory.")
    assert any(message.get("tool_calls") for message in asked.messages)


def check_round_trip(url: str, model: str) -> None:
    """A whole task, by chat completions."""
    made = agent(
        url, LitellmModel, f"hosted_vllm/{model}", extra_body=forced(), parallel_tool_calls=False, max_tokens=200
    )
    done = made.run("Submit the answer.")
    assert (done["exit_status"], done["submission"].strip()) == ("Submitted", "42")


def check_responses_round_trip(url: str, model: str) -> None:
    """The same by the Responses API."""
    made = agent(
        url,
        LitellmResponseModel,
        f"openai/{model}",
        extra_body=forced(),
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    done = made.run("Submit the answer.")
    assert (done["exit_status"], done["submission"].strip()) == ("Submitted", "42")


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
