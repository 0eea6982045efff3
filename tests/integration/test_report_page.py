"""The page of a run in a real browser, at two widths, light, dark and in print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from roll.report.command import report
from tests.report.runs import sample, write_run
from tests.report.test_page import HOSTILE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

CHECKS = (Path(__file__).parents[1] / "report" / "page_checks.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        yield started.chromium.launch(executable_path=BROWSER, args=FLAGS)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with hostile texts and samples of two steps."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        sample(number // 4, float(number % 2), number % 2 - 0.5, [number, 3], prompt_id=HOSTILE) for number in range(16)
    ]
    write_run(folder, config={"exp_name": HOSTILE}, samples=rows, events=[{"component": "x", "message": HOSTILE}])
    return report([folder])


class Opened:
    """A page in the browser with what it said and asked for."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, **options: Any) -> None:
        self.said: list[str] = []
        self.requested: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("[data-ready]", timeout=20_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_is_silent_and_can_be_read(
    browser: Any, page_file: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    opened = Opened(browser, page_file, width, color_scheme=scheme)
    page = opened.page
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    assert opened.said == [] and opened.requested == [page_file.as_uri()]
    found = page.evaluate(CHECKS)
    assert found["width"] == width and found["pale"] == []
    assert len(found["ink"]) >= 12 and min(found["ink"]) > 50
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_texts_of_the_run_are_text(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file).page
    assert "roll report" in page.title()
    assert page.evaluate("document.querySelectorAll('.group b').length") == 0
    assert HOSTILE[:20] in page.inner_text("#samples")


def test_numbers_of_the_page_are_those_of_the_files(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file).page
    figures = page.inner_text(".kpis")
    assert "0.2 → 0.7" in figures and "1.00 s" in figures and "480" in figures  # 8 prompts a step, 60 steps
    card = page.locator(".card", has_text="Validation score").first
    assert card.locator("em").inner_text() == "0.70"
    canvas = card.locator(".u-over").bounding_box()
    page.mouse.move(canvas["x"] + canvas["width"] / 2, canvas["y"] + 20)
    assert card.locator("em").inner_text() == "30: 0.45"


def test_buttons_change_language_tint_and_list_of_metrics(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file, locale="zh-CN").page
    assert "验证得分" in page.inner_text(".kpis") and "Validation" not in page.inner_text(".kpis")
    page.click("#language")
    assert "Validation score" in page.inner_text(".kpis")
    colour = "getComputedStyle(document.querySelector('.tok span')).backgroundColor"
    before = page.evaluate(colour)
    page.click("[data-tint=lr]")
    assert page.evaluate(colour) != before
    page.click("#all summary")
    page.fill("#filter", "ledger/sub")
    page.wait_for_function("document.querySelectorAll('#all .card').length === 1")
    for _ in range(40):  # every control can be reached by Tab
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") != "BODY"


def test_several_runs_are_laid_over_each_other(browser: Any, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, config={"exp_name": name}) for name in ("one", "two")]
    page = Opened(browser, report(folders)).page
    assert page.locator(".card", has_text="Validation score").first.locator("em span").count() == 2
    assert page.inner_text(".bar:visible b") == "one"
    page.click(".chip >> text=two")
    assert page.inner_text(".bar:visible b") == "two"
