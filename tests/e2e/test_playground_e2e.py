"""The playground in a browser, as a person uses it: real front door, frontend and worker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import clean_page, running_browser
from e2e_stack import Worker, running_stack, wait_for
from front_door_process import Door
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Worker, Door]]:
    with running_stack(tmp_path_factory.mktemp("playground"), tiny_model) as stack:
        stack.start_frontend()
        worker = stack.start_worker("--device", "cpu", "--dtype", "float32")
        yield worker, Door(stack, "--playground")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


@pytest.fixture
def page(served: tuple[Worker, Door], browser: Browser) -> Iterator[Page]:
    with clean_page(browser, f"{served[1].url}/playground") as found:
        expect(found.get_by_label("Model")).to_have_value("tiny")
        found.get_by_label("max_tokens").fill("8")
        yield found


def add(page: Page, name: str) -> Locator:
    """The card of a processor, picked from the list."""
    page.get_by_label("Add a logits processor").select_option(name)
    return page.locator(".card").last


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def answer(page: Page, place: int = -1) -> Locator:
    """An answer, once it is complete."""
    found = page.locator("article.answer").nth(place)
    expect(found.locator(".facts")).to_contain_text("token")
    return found


def bias(page: Page, token_id: str, value: str) -> Locator:
    card = add(page, "logit_bias")
    card.get_by_label("key of bias").fill(token_id)
    card.get_by_label("value of bias").fill(value)
    return card


def test_a_conversation_of_two_turns(page: Page) -> None:
    say(page, "Hello")
    first = answer(page).locator(".text").text_content()
    expect(answer(page).locator(".token")).to_have_count(8)
    expect(answer(page).locator(".facts")).to_contain_text("finish reason length · 8 tokens")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "And then?")
    assert asked.value.post_data_json["messages"] == [  # type: ignore[index]
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And then?"},
    ]
    answer(page, 1)
    page.get_by_role("button", name="Again").click()
    answer(page, 1)
    expect(page.locator("article")).to_have_count(4)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("heading", name="Try the model")).to_be_visible()


def test_a_processor_by_its_form_colours_the_answer(page: Page) -> None:
    bias(page, "40", "100")
    add(page, "banned_tokens").get_by_label("token_ids").fill("41, 42")
    say(page, "Hello")
    text = answer(page).locator(".text")
    expect(text).to_have_text("DDDDDDDD")
    assert [token.get_attribute("data-did") for token in text.locator(".token").all()] == ["masked"] * 8
    legend = answer(page).locator(".legend button")
    expect(legend).to_have_text(["logit_bias biased 8", "banned_tokens masked 8"])

    details = page.locator("#details")
    text.locator(".token").nth(2).hover()
    expect(details).to_contain_text("token 3")
    expect(details).to_contain_text("logit_bias changed logits")
    expect(details).to_contain_text("banned_tokens forbade other tokens")
    expect(details).to_contain_text("100.0 % in what it was sampled from, after all of them")
    expect(details).to_contain_text(re.compile(r"[\d.]+ % in the model, before any control"))
    text.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    expect(details).to_contain_text("token 2")

    page.locator(".card").nth(1).get_by_label("Use banned_tokens").uncheck()
    page.get_by_role("button", name="Again").click()
    expect(answer(page).locator(".legend button")).to_have_text(["logit_bias biased 8"])
    answer(page).locator(".receipt summary").click()
    expect(answer(page).locator(".receipt pre")).to_contain_text('"processor": "logit_bias"')
    assert_is_inside(answer(page).locator(".receipt"), answer(page))


def assert_is_inside(inner: Locator, outer: Locator) -> None:
    """Neither is wider than the other, nor than the page."""
    one, other = inner.bounding_box(), outer.bounding_box()
    assert one is not None
    assert other is not None
    assert other["x"] <= one["x"]
    assert one["x"] + one["width"] <= other["x"] + other["width"]
    assert outer.evaluate("element => element.scrollWidth <= element.clientWidth")
    assert outer.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def test_a_refused_value_shows_its_field(page: Page) -> None:
    card = bias(page, "40", "1000")
    say(page, "Hello")
    value = card.get_by_label("value of bias")
    expect(value).to_have_attribute("aria-invalid", "true")
    expect(value).to_be_focused()
    expect(page.get_by_role("alert")).to_contain_text(
        "logits_processors[0].args.bias.40: must be at most 100, got 1000"
    )
    value.fill("5")
    expect(value).not_to_have_attribute("aria-invalid", "true")

    # What the page lets pass, and the worker refuses.
    card.get_by_label("key of bias").fill("999999")
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("logits_processors.processors[0].args.bias: expected token ids")
    expect(card.locator(".error:visible")).to_contain_text("expected token ids between 0 and")
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_label("Message")).to_have_value("Hello")

    # And the front door.
    page.get_by_label("Remove logit_bias").click()
    card = add(page, "forced_sequence")
    say(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("logits_processors.processors[0].args")
    expect(card.locator(".error:visible")).not_to_have_count(0)


def test_forms_of_nested_values(page: Page) -> None:
    card = add(page, "tool_calls")
    card.get_by_label("format", exact=True).select_option("hermes")
    card.get_by_label("name", exact=True).fill("weather of")
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    expect(card.get_by_label("name", exact=True)).to_have_attribute("aria-invalid", "true")
    card.get_by_label("name", exact=True).fill("weather")
    card.get_by_label("parameters").fill('{"type": "object"')
    page.get_by_role("button", name="Send").click()
    expect(card.get_by_label("parameters")).to_have_attribute("aria-invalid", "true")
    card.get_by_label("parameters").fill('{"type": "object"}')
    card.get_by_label("answer", exact=True).select_option("regex")
    card.get_by_label("pattern").fill("[ab]")
    card.get_by_label("parallel").uncheck()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Send").click()
    assert asked.value.post_data_json["logits_processors"]["processors"] == [  # type: ignore[index]
        {
            "name": "tool_calls",
            "args": {
                "format": "hermes",
                "tools": [{"name": "weather", "parameters": {"type": "object"}}],
                "parallel": False,
                "answer": {"type": "regex", "pattern": "[ab]"},
            },
        }
    ]


def test_a_models_text_is_no_markup(page: Page) -> None:
    text = "<img src=x onerror=alert(1)>\u202e</p>"
    add(page, "forced_sequence").get_by_label("text", exact=True).fill(text)
    page.get_by_label("max_tokens").fill("200")
    say(page, "Hello")
    expect(answer(page).locator(".text")).to_contain_text(text)
    assert answer(page).locator("img, p p").count() == 0
    expect(answer(page).locator(".token").last).to_have_text("end")


def test_the_commands_to_copy_work(page: Page, served: tuple[Worker, Door]) -> None:
    bias(page, "40", "100")
    page.get_by_label("System prompt").fill("It's a test")
    say(page, "Hello")
    answer(page)
    page.get_by_role("button", name="Copy request").click()
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash", "-c", f"{command} -sf"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "DDDDDDDD"
    page.get_by_role("tab", name="Python").click()
    program = page.locator("#code").text_content()
    assert program is not None
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("DDDDDDDD\n")
    assert "'logit_bias'" in done.stdout
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()


def test_stop_ends_the_request_at_the_worker(page: Page, served: tuple[Worker, Door]) -> None:
    worker, _ = served
    cancelled = worker.metric("dlw_requests_total", outcome="cancelled")
    bias(page, "40", "100")
    page.get_by_label("max_tokens").fill("1800")
    page.get_by_label("ignore_eos").check()
    say(page, "Hello")
    expect(page.locator("article .token").nth(3)).to_be_attached()
    page.get_by_role("button", name="Stop", exact=True).press("Enter")  # it need not stand still for that
    expect(answer(page).locator(".note")).to_have_text("Stopped.")
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "slot freed", 10)
    wait_for(lambda: worker.metric("dlw_requests_total", outcome="cancelled") == cancelled + 1, "counted", 10)
    expect(page.locator("article .token").first).to_have_attribute("data-did", "biased")  # from the counts on the way


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen(served: tuple[Worker, Door], browser: Browser, scheme: str) -> None:
    screen = {"width": 360, "height": 740}
    with clean_page(browser, f"{served[1].url}/playground", viewport=screen, color_scheme=scheme) as page:
        expect(page.get_by_label("Model")).to_have_value("tiny")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name="Settings", exact=True).press("Enter")
        add(page, "dry")
        assert page.evaluate("document.querySelector('#settings').scrollWidth") <= 360
        page.get_by_label("max_tokens").fill("4")
        page.get_by_label("Close the settings").click()
        say(page, "Hello")
        answer(page).locator(".receipt summary").click()
        assert_is_inside(answer(page).locator(".receipt pre"), answer(page))
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_front_door_with_keys(tmp_path: Path, browser: Browser, served: tuple[Worker, Door]) -> None:
    (tmp_path / "keys").write_text("secret\n")
    _, before = served
    with running_stack(tmp_path / "keyed", tmp_path) as stack:
        door = Door(stack, "--playground", "--api-key-file", str(tmp_path / "keys"), upstream=before.url)
        with clean_page(browser, f"{door.url}/playground") as page:
            expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
            page.get_by_label("API key").fill("secret")
            page.get_by_label("API key").press("Tab")
            expect(page.get_by_label("Model")).to_have_value("tiny")
            page.get_by_label("max_tokens").fill("2")
            say(page, "Hello")
            answer(page)
            page.get_by_role("button", name="Copy request").click()
            expect(page.locator("#code")).to_contain_text('-H "Authorization: Bearer $API_KEY"')
            expect(page.locator("#code")).not_to_contain_text("secret")
