"""Makes docs/playground-animation.png: the playground at work in a browser, on a real run.

It starts ``launch/agg.sh`` with the default model, uses the page in headless Chromium as a person
would, and keeps screenshots as frames of an animated PNG. It needs Chromium and Pillow, which is no
part of the environment:

    .venv/bin/python -m pip install --target /tmp/pillow pillow
    PYTHONPATH=/tmp/pillow .venv/bin/python scripts/animate_playground.py
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / "tests" / each) for each in ("", "launch", "e2e"))]

from chromium import clean_page, running_browser  # noqa: E402  # the tests' own
from launched_script import launched  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import Page, expect  # noqa: E402

from worker.models import model_cache, prepare_default_model  # noqa: E402

TARGET = REPOSITORY / "docs" / "playground-animation.png"
SIZE = {"width": 1080, "height": 640}
PALETTE = 128
"""Colours of the picture: the page has few."""

MAX_BYTES = 1_500_000
MAX_FRAMES = 60
"""Frames of one answer."""

QUESTION = "Why do cats purr?"


@dataclass
class Film:
    """Screenshots of a page, each with the time for which it is shown.

    Attributes:
        page: The page that is filmed.
        frames: Pictures in PNG, and milliseconds.
    """

    page: Page
    frames: list[tuple[bytes, int]] = field(default_factory=list)

    def take(self, shown_ms: int) -> None:
        """Keep what the page shows now; longer, if it has not changed."""
        picture = self.page.screenshot(animations="disabled", caret="hide")
        if self.frames and self.frames[-1][0] == picture:
            self.frames[-1] = (picture, self.frames[-1][1] + shown_ms)
        else:
            self.frames.append((picture, shown_ms))

    def write(self, path: Path) -> None:
        """Write the frames as an animated PNG that begins anew at its end."""
        pictures = [Image.open(io.BytesIO(picture)).convert("RGB") for picture, _ in self.frames]
        height = sum(each.height for each in pictures)
        all_of_them = Image.new("RGB", (pictures[0].width, height))
        for index, each in enumerate(pictures):
            all_of_them.paste(each, (0, index * each.height))
        palette = all_of_them.quantize(PALETTE, dither=Image.Dither.NONE)
        first, *others = (each.quantize(palette=palette, dither=Image.Dither.NONE) for each in pictures)
        durations = [shown_ms for _, shown_ms in self.frames]
        first.save(path, save_all=True, append_images=others, duration=durations, loop=0, optimize=True)


def add(film: Film, name: str, value: str) -> None:
    """Add a processor and type its first argument."""
    film.page.get_by_label("Add a logits processor").select_option(name)
    card = film.page.locator(".card").last
    card.scroll_into_view_if_needed()
    film.take(500)
    typed = card.locator("input[type=text], textarea").first
    for end in range(1, len(value) + 1, 3):
        typed.fill(value[:end])
        film.take(90)
    typed.fill(value)
    film.take(400)


def ask(film: Film, number: int) -> None:
    """Send the question and film the answer until it is complete."""
    page = film.page
    page.get_by_label("Message").fill(QUESTION)
    film.take(700)
    page.keyboard.press("Enter")
    facts = page.locator("article.answer").nth(number).locator(".facts")
    for _ in range(MAX_FRAMES):
        film.take(120)
        if facts.count() and "token" in (facts.text_content() or ""):
            break
    expect(facts).to_contain_text("token")
    film.take(1200)


def play(page: Page) -> Film:
    """A question, two processors, the answer under them, and what they did to a token."""
    expect(page.get_by_label("Model")).to_have_value("SmolLM2-135M-Instruct")
    film = Film(page)
    page.get_by_label("max_tokens").fill("40")
    page.locator("#settings").evaluate("element => element.scrollTo(0, 0)")
    ask(film, 0)
    add(film, "forced_prefix", "Ahoy!")
    add(film, "phrase_ban", "purr")
    page.get_by_role("button", name="New chat").click()
    film.take(400)
    ask(film, 0)
    for place in (1, 6, 12):
        page.locator("article.answer .token").nth(place).hover()
        page.wait_for_timeout(100)
        film.take(1600)
    page.mouse.move(5, 300)
    film.take(1500)
    return film


def main() -> int:
    """The exit status."""
    model = prepare_default_model(model_cache(os.environ), lambda line: None)
    variables = {"MODEL_PATH": str(model), "WORKER_DTYPE": "float32"}
    with (
        tempfile.TemporaryDirectory() as directory,
        launched(Path(directory), "--device", "cpu", "--context-length", "2048", variables=variables) as served,
    ):
        served.wait_until_ready()
        with (
            running_browser() as browser,
            clean_page(browser, f"{served.url.removesuffix('/v1')}/playground", viewport=SIZE) as page,
        ):
            film = play(page)
    film.write(TARGET)
    size = TARGET.stat().st_size
    print(f"{TARGET}: {len(film.frames)} frames, {size / 1000:.0f} kB")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
