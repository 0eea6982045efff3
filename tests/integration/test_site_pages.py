"""The site in a real browser: its sections, the next and previous page, the other language, and its search."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import expect

from scripts import build_site
from scripts.build_site import LANGUAGES, config, pages
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.integration


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *values: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(browser: Any) -> Iterator[str]:
    """The address of the site, built and served in a folder below that of the server, as project pages are."""
    assert build_site.main() == 0
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(build_site.SITE.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{build_site.SITE.name}/"
        server.shutdown()


@pytest.fixture
def page(browser: Any, site: str) -> Iterator[Any]:
    """A tab without an error in its console, whose requests all go to the site and succeed."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(1000 * PATIENCE_S)
    tab = context.new_page()
    tab.on("console", lambda message: message.type != "error" or wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: request.url.startswith(site) or wrong.append(request.url))
    tab.on("response", lambda response: response.status < 400 or wrong.append(response.url))
    yield tab
    context.close()
    assert wrong == []


def home(site: str, language: str) -> str:
    return site if language == "en" else f"{site}{language}/"


def title(language: str, name: str) -> str:
    """What the browser shows as the title of a page of docs/."""
    lines = (build_site.SOURCE / language / name).read_text(encoding="utf-8").splitlines()
    heading = next(line for line in lines if line.startswith("# "))
    return f"{heading[2:].replace('`', '')} - roll"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_section_leads_to_its_pages(page: Any, site: str, language: str) -> None:
    page.goto(home(site, language))
    for section in config(language)["nav"]:
        [(name, items)] = section.items()
        first, *_, last = pages(items)
        page.locator(".md-tabs__link", has_text=name).click()
        expect(page).to_have_title(title(language, first))
        page.locator(".md-sidebar--primary a.md-nav__link:visible").last.click()
        expect(page).to_have_title(title(language, last))


def test_the_foot_of_a_page_leads_on_and_its_head_to_the_other_language(page: Any, site: str) -> None:
    page.goto(f"{site}algorithms/advantages/")
    expect(page.locator("td math").nth(20)).to_be_attached()
    assert page.locator("td math").first.bounding_box()["height"] > 10
    page.click(".md-footer__link--next")
    expect(page).to_have_title(title("en", "algorithms/policy_loss.md"))
    page.click(".md-footer__link--prev")
    for language in ("zh", "en"):
        page.hover(".md-header .md-select")
        page.click(f".md-select__link[hreflang={language}]")
        expect(page).to_have_url(f"{home(site, language)}algorithms/advantages/")
        expect(page).to_have_title(title(language, "algorithms/advantages.md"))


@pytest.mark.parametrize(
    ("language", "query", "name"),
    [
        ("en", "async_generation_ratio", "configuration/asynchronous"),
        ("en", "weight update", "weight_updates"),
        ("zh", "async_generation_ratio", "configuration/asynchronous"),
        ("zh", "权重更新", "weight_updates"),
        ("zh", "检查点", "design/checkpoints"),
    ],
)
def test_search_finds_the_page(page: Any, site: str, language: str, query: str, name: str) -> None:
    page.goto(home(site, language))
    page.click(".md-search__button")
    page.locator("[role=combobox]").fill(query)
    page.locator(f"a[href^='{home(site, language)}{name}/?h=']").first.click()
    page.wait_for_url(f"{home(site, language)}{name}/?h=*")
    expect(page).to_have_title(title(language, f"{name}.md"))
    expect(page.locator("article mark").first).to_be_attached()
    assert query in page.inner_text("article").lower()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "row", ["configuration/run/#weight_update", "configuration/actor_train/#actor_train.pg_variant"]
)
def test_search_for_a_key_shows_its_row_first(page: Any, site: str, language: str, row: str) -> None:
    key = re.findall(r"\w+$", row)[0]
    page.goto(home(site, language))
    page.click(".md-search__button")
    page.locator("[role=combobox]").fill(key)
    first = page.locator("a[href*='?h=']").first
    expect(first).to_have_attribute("href", home(site, language) + row.replace("#", f"?h={key}#"), timeout=20_000)
    first.click()
    expect(page.locator("tr:target")).to_be_in_viewport()


@pytest.mark.parametrize("place", ["", "zh/algorithms/policy_loss/", "configuration/actor_train/", "zh/design/step/"])
def test_a_page_fits_a_phone(page: Any, site: str, place: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(site + place)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
