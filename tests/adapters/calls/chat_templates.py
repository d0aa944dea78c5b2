"""Chat templates in the essential form of those of well-known models, written for these tests."""

from __future__ import annotations

from pathlib import Path


def form(name: str) -> str:
    """Source of a template of ``templates/``."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


FORMS = {path.stem: form(path.stem) for path in (Path(__file__).parent / "templates").glob("*.jinja")}
FORMS["llama_python_tag"] = FORMS["llama_3_1"].replace('\\n\\n{"name": "', '\\n\\n<|python_tag|>{"name": "')
FORMS["glm_4_7"] = FORMS["glm_4_5"].replace("name + '\\n'", "name").replace(">\\n<arg_value>", "><arg_value>")
FORMS["glm_4_7"] = FORMS["glm_4_7"].replace("'</arg_value>\\n'", "'</arg_value>'")
FORMS["mistral_small_3_2"] = FORMS["devstral"].replace("'[ARGS]'", "'[CALL_ID]' + call.id + '[ARGS]'")
FORMS["granite_3_1"] = FORMS["granite"].replace("<|tool_call|>", "<tool_call>")
FORMS["phi_4_mini_calls"] = FORMS["granite"].replace("]{% endif %}", "]<|/tool_call|>{% endif %}")
FORMS["phi_4_mini_told"] = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<|tool_call|>[]<|/tool_call|>"
FORMS["command_r_told"] = """{{ tools }}Write 'Action:' and a list:
```json
[
    {
        "tool_name": title of the tool,
        "parameters": a dict
    }
]```"""
