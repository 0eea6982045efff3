"""The page of a run in a real browser, at two widths, light, dark and in print."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from roll.report.command import report
from roll.report.watch import WatchServer
from roll.trackers.files import replace_summary
from tests.processes import PATIENCE_S
from tests.report.runs import append, group_line, row, sample, spans_of, write_run
from tests.report.test_page import HOSTILE

pytestmark = pytest.mark.integration

CHECKS = (Path(__file__).parents[1] / "report" / "page_checks.js").read_text()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with hostile texts and samples of two steps."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        sample(number // 4, float(number % 2), number % 2 - 0.5, [number, 3], prompt_id=HOSTILE) for number in range(16)
    ]
    groups = [group_line(step, step) for step in range(1, 61)]
    groups += [group_line(99, 60, dropped=HOSTILE, failure=HOSTILE, name=HOSTILE)]
    write_run(
        folder,
        spoil=lambda row, _: row.update({f"reward/{HOSTILE}": 1.0}),
        config={"exp_name": HOSTILE},
        samples=rows,
        events=[{"component": "x", "message": HOSTILE, "time": 1030.0}],
        spans=spans_of(60),
        groups=groups,
    )
    return report([folder])


class Opened:
    """A page in the browser with what it said and asked for."""

    def __init__(self, browser: Any, page: Path | str, width: int = 1280, **options: Any) -> None:
        self.said: list[str] = []
        self.requested: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.set_default_timeout(1000 * PATIENCE_S)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(page if isinstance(page, str) else page.as_uri())
        self.page.wait_for_selector("[data-ready]")


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
    page.click("#all summary")
    page.fill("#filter", "reward/")
    page.locator("#all .card", has_text=f"reward/{HOSTILE[:20]}").wait_for()
    assert page.locator(".card b").count() == 0 and "roll report" in page.title()


def test_numbers_of_the_page_are_those_of_the_files(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file).page
    figures = page.inner_text(".kpis")
    assert "0.2 → 0.7" in figures and "1.00 s" in figures and "480" in figures  # 8 prompts a step, 60 steps
    card = page.locator(".card", has_text="Validation score").first
    assert card.locator("em").inner_text() == "0.70"
    canvas = card.locator(".u-over").bounding_box()
    page.mouse.move(canvas["x"] + canvas["width"] / 2, canvas["y"] + 20)
    expect(card.locator("em")).to_have_text("30: 0.45")


def test_buttons_change_language_tint_and_list_of_metrics(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file, locale="zh-CN").page
    assert "验证得分" in page.inner_text(".kpis") and "Validation" not in page.inner_text(".kpis")
    page.click("#language")
    expect(page.locator(".kpis")).to_contain_text("Validation score", use_inner_text=True)
    colour = "getComputedStyle(document.querySelector('.tok span')).backgroundColor"
    before = page.evaluate(colour)
    page.click("[data-tint=lr]")
    page.wait_for_function(f"{colour} !== '{before}'")
    page.click("#all summary")
    page.fill("#filter", "ledger/sub")
    expect(page.locator("#all .card")).to_have_count(1)


def test_tab_reaches_every_control(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file).page
    page.click("#all summary")
    seen = "a[href], button, input, summary, select"
    page.evaluate(f"controls = [...document.querySelectorAll('{seen}')].filter(each => each.offsetParent)")
    for _ in range(page.evaluate("controls.length") + 40):  # parts that scroll are stops too
        page.keyboard.press("Tab")
        page.evaluate("controls = controls.filter(each => each !== document.activeElement)")
    assert page.evaluate("controls.map(each => each.outerHTML)") == []


def test_lanes_show_a_window_of_steps_and_can_be_saved(browser: Any, page_file: Path) -> None:
    page = Opened(browser, page_file).page
    rects = "document.querySelectorAll('.lanes rect:not(.mark)').length"
    five = page.evaluate(rects)
    page.click("[data-width='1']")
    page.wait_for_function(f"0 < {rects} && {rects} < {five}")
    page.click(".strip", position={"x": 80, "y": 16})
    expect(page.locator(".lanes svg:not(.strip) text:not([x='0'])").first).to_have_text("1")
    expect(page.locator(".lanes input")).to_have_value("0")
    page.click("[data-width='0']")
    page.wait_for_function(f"{rects} === 6 * 60")
    assert page.evaluate("document.querySelectorAll('.mark').length") == 1
    page.locator(".lanes rect").nth(100).hover(force=True)
    expect(page.locator("#tip")).to_have_text(re.compile("^(wait_prev_gen|train|weight_update|reward|generate) "))
    with page.expect_download() as saved:
        page.click(".save")
    events = json.loads(Path(saved.value.path()).read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 6 * 60


def test_several_runs_are_laid_over_each_other(browser: Any, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, config={"exp_name": name}) for name in ("one", "two")]
    page = Opened(browser, report(folders)).page
    assert page.locator(".card", has_text="Validation score").first.locator("em span").count() == 2
    assert page.inner_text(".bar:visible b") == "one"
    page.click(".chip >> text=two")
    expect(page.locator(".bar:visible b")).to_have_text("two")


def test_an_open_page_follows_its_run_and_says_what_became_of_it(browser: Any, tmp_path: Path) -> None:
    rows = [sample(0, 1.0, 1.0, [1, 2])]
    folder = write_run(tmp_path / "run", status=None, samples=rows)
    (newest,) = (folder / "samples").iterdir()
    for step in range(50, 60):
        shutil.copy(newest, newest.with_stem(f"step-{step:06d}"))
    with WatchServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = Opened(browser, server.url)
        page, top = opened.page, "document.querySelector('#all').getBoundingClientRect().top"
        page.locator("[data-state=live_running]").wait_for()
        page.click("#all summary")
        page.fill("#filter", "val/score")
        expect(page.locator("#all .card")).to_have_count(1)
        page.locator("#samples .group").wait_for()
        page.evaluate("scrollTo(0, 500)")
        before = page.evaluate(top)

        shutil.copy(newest, newest.with_stem("step-000061"))
        tags = {f"rollout/reward_mean/{tag}": 0.5 for tag in ("plus", "minus")}
        append(folder, row(61) | {"val/score": 0.9, f"reward/{HOSTILE}": 1.0} | tags)
        page.locator(".bar", has_text="61 steps").wait_for()
        assert [each.inner_text() for each in page.locator(".card:has-text('val/score') em").all()] == ["0.90"] * 2
        assert page.locator(".card:has-text('Reward by tag') em span:visible").count() == 2
        assert page.input_value("#filter") == "val/score" and abs(page.evaluate(top) - before) < 2
        assert page.input_value("#samples select") == "60"  # which the new buttons do not have
        page.click("[data-step='61']")
        expect(page.locator("#samples select")).to_have_value("")
        page.locator("#samples .group").wait_for()
        with page.expect_response("**/samples/52"):
            page.select_option("#samples select", "52")
        page.locator("#samples .group").wait_for()

        replace_summary(folder, {"status": "finished"})
        page.locator("[data-state=live_ended]").wait_for()
        other = write_run(tmp_path / "other", steps=5, status=None)
        for name in ("metrics.jsonl", "run.json"):
            (other / name).replace(folder / name)
        page.click("[data-state=live_replaced] button")
        page.locator(".bar", has_text="5 steps").wait_for()
        shutil.rmtree(folder)
        page.locator("[data-state=live_gone]").wait_for()
        assert opened.said == [] and {*map(own_name, opened.requested)} == {"127.0.0.1"}
        server.shutdown()
    page.locator("[data-state=live_lost]").wait_for()


def own_name(url: str) -> str | None:
    return urlsplit(url).hostname


def test_a_page_that_was_open_before_its_run_began_shows_it(browser: Any, tmp_path: Path) -> None:
    with WatchServer(tmp_path / "later") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = Opened(browser, server.url).page
        page.locator("[data-state=live_waiting]").wait_for()
        write_run(tmp_path / "later", steps=1, status=None)
        page.locator(".bar", has_text="1 steps").wait_for()
        server.shutdown()
