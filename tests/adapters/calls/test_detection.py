"""The format of calls is found from a chat template, as a model's own calls are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from chat_templates import FORMS

from adapters.calls import FORMATS
from adapters.calls.detection import ToolSupport, tool_support
from adapters.calls.template import ChatTemplate, TemplateFailed

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WHOLE = ("tools", "calls", "several", "results", "system")


def support(source: str, *added: str) -> ToolSupport:
    return tool_support(ChatTemplate({"default": source}, TOKENS), added)


@pytest.mark.parametrize(
    ("name", "format_", "knows"),
    [
        ("chatml", "neutral", ("system",)),
        ("zephyr", "neutral", ("system",)),
        ("gemma_2", "neutral", ()),
        ("phi_4_mini", "neutral", ("system",)),
        ("qwen_2_5", "hermes", WHOLE),
        ("qwen_3_coder", "qwen3_coder", WHOLE),
        ("glm_4_5", "glm45", WHOLE),
        ("glm_4_7", "glm47", WHOLE),
        ("llama_3_1", "llama3_json", ("tools", "calls", "results", "system")),
        ("llama_python_tag", "llama3_json", ("tools", "calls", "results", "system")),
        ("pythonic", "pythonic", WHOLE),
        ("mistral_7b", "mistral", ("tools", "calls", "several", "results", "short_ids")),
        ("devstral", "mistral_args", WHOLE),
        ("mistral_small_3_2", "mistral_args", WHOLE),
        ("deepseek_v3", "deepseek_v3", WHOLE),
        ("deepseek_v3_1", "deepseek_v3_1", WHOLE),
        ("gpt_oss", "harmony", ("tools", "calls", "results", "system")),
        ("phi_4_functools", "phi4", WHOLE),
        ("functionary_3_1", "functionary_v3_1", WHOLE),
        ("functionary_3_2", "functionary_v3_2", WHOLE),
        ("nemotron_super", "nemotron_deci", WHOLE),
        ("granite", "granite", WHOLE),
        ("granite_3_1", "granite_3_1", WHOLE),
        ("phi_4_mini_calls", "phi4_mini", WHOLE),
        ("phi_4_mini_told", "phi4_mini", ("tools", "system")),
        ("command_r", "command_r", WHOLE),
        ("command_r_told", "command_r", ("tools",)),
        ("kimi_k2", "kimi_k2", (*WHOLE, "named_ids")),
        ("exaone_4", "exaone4", WHOLE),
        ("smollm_3", "hermes", ("tools", "system")),
        ("hunyuan_a13b", "jamba", WHOLE),
        ("olmo_3", "olmo3", WHOLE),
        ("command_r7b", "cohere2", WHOLE),
        ("tools_without_calls", "hermes", ("tools", "system")),
    ],
)
def test_the_format_of_a_template(name: str, format_: str, knows: tuple[str, ...]) -> None:
    found = support(FORMS[name])
    assert found.format == format_
    assert {each for each in (*WHOLE, "short_ids", "named_ids") if getattr(found, each)} == set(knows)
    assert found.is_whole is (set(WHOLE) - {"system"} <= set(knows) and not {"short_ids", "named_ids"} & set(knows))


def test_a_call_that_is_written_wins_over_what_is_said_of_calls() -> None:
    source = FORMS["qwen_2_5"].replace("# Tools", "Do not write [TOOL_CALLS] or functools[ or <function=f>.")
    assert support(source).format == "hermes"
    assert "writes a call" in support(source).evidence
    assert "describes calls" in support(FORMS["tools_without_calls"]).evidence


def test_a_token_tells_two_formats_of_one_template_apart() -> None:
    source = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    assert support(source).format == "mistral"
    assert support(source, "[ARGS]", "[TOOL_CALLS]").format == "mistral_args"


def test_a_format_that_is_named_is_not_looked_for() -> None:
    """What the template writes counts nevertheless."""
    kimi = ChatTemplate({"default": FORMS["kimi_k2"]}, TOKENS)
    assert tool_support(kimi, (), "hermes").tools
    assert not tool_support(kimi, (), "neutral").tools
    plain = tool_support(ChatTemplate({"default": FORMS["chatml"]}, TOKENS), (), "hermes")
    assert (plain.format, plain.tools, plain.calls) == ("hermes", False, False)


def test_the_template_for_tools_is_used_with_tools() -> None:
    template = ChatTemplate({"default": FORMS["chatml"], "tool_use": FORMS["qwen_2_5"]}, TOKENS)
    assert tool_support(template).format == "hermes"
    assert "# Tools" not in template.render([{"role": "user", "content": "Hello"}])
    assert tool_support(None).format == "neutral"


def test_a_template_is_rendered_in_a_sandbox() -> None:
    user = [{"role": "user", "content": "<&>"}]
    assert (
        ChatTemplate({"default": "{{ messages | tojson }}"}, {}).render(user) == '[{"role": "user", "content": "<&>"}]'
    )
    assert (
        ChatTemplate({"default": "{% generation %}a{{ bos_token }}{% endgeneration %}"}, TOKENS).render(user) == "a<s>"
    )
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"):
        with pytest.raises(TemplateFailed):
            ChatTemplate({"default": source}, {}).render(user)
    with pytest.raises(TemplateFailed, match="cannot be read"):
        ChatTemplate({"default": "{% if %}"}, {})


def test_every_form_is_in_the_table() -> None:
    (mark,) = test_the_format_of_a_template.pytestmark  # type: ignore[attr-defined]
    assert {name for name, *_ in mark.args[1]} == set(FORMS)


def test_the_readme_counts_the_formats() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"chat template, (\d+)\s+are enforced", text) == [str(len(FORMATS))]
