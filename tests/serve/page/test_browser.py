"""The page in a browser: a chat by keyboard alone, on a phone's width, from a file, and the same text twice."""

import pytest
from browser import BROWSER, DRIVER, chromium

from specbuild.serve.page.routes import PAGE

pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER), reason="no chromium and chromedriver")


@pytest.fixture(scope="module")
def browser():
    with chromium() as window:
        yield window


def until(browser, script):
    """What a script returns once that is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(f"return {script}"))


def keys(browser, *typed):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*typed).perform()


def loaded(browser, address, width=1200):
    browser.set_window_size(width, 800)
    browser.get(address)
    until(browser, "models.length > 0")
    browser.execute_script("at('max_tokens').value = 48")


def answers(browser):
    return list(
        browser.execute_script("return [...document.querySelectorAll('.assistant .text')].map(e => e.textContent)")
    )


@pytest.mark.slow
def test_a_chat_by_keyboard_shows_what_was_drafted_and_the_same_text_without(browser, server):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    loaded(browser, server.url)
    keys(browser, "def main(argv):")
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    keys(browser, "    import os", Keys.ENTER)
    until(browser, "last && !running")
    spans = browser.execute_script("return [...document.querySelectorAll('.assistant span')].map(e => e.className)")
    assert set(spans) == {"draft", "own"}
    assert browser.find_element("css selector", "article.user").text == "def main(argv):\n    import os"
    assert int(browser.find_element("id", "rate").text) > 0
    assert float(browser.find_element("id", "length").text) > 1
    assert browser.find_elements("css selector", "#depths progress")[0].get_attribute("value") > "0"
    browser.execute_script("at('again').focus()")
    keys(browser, Keys.ENTER)
    until(browser, "at('verdict').textContent")
    assert browser.find_element("id", "verdict").text.startswith("The same text, ")
    first, second = answers(browser)
    assert first == second
    plain = browser.execute_script(
        "return [...document.querySelectorAll('.assistant')].at(-1).querySelectorAll('.draft').length"
    )
    assert plain == 0
    told = [each for each in browser.get_log("browser") if each["level"] != "DEBUG"]
    assert told == [], "no error, nothing that the policy forbids"


@pytest.mark.slow
def test_every_control_is_reached_by_the_keyboard(browser, server):
    from selenium.webdriver.common.keys import Keys

    loaded(browser, server.url)
    browser.execute_script("document.querySelector('details').open = true; document.activeElement.blur()")
    seen = set()
    for _ in range(24):
        keys(browser, Keys.TAB)
        seen.add(browser.execute_script("return document.activeElement.id || document.activeElement.tagName"))
    wanted = {"model", "speculation", "log", "line", "send", "SUMMARY", "temperature", "max_tokens", "seed", "server"}
    assert wanted <= seen


@pytest.mark.slow
def test_escape_stops_an_answer_that_stays(browser, server):
    from selenium.webdriver.common.keys import Keys

    loaded(browser, server.url)
    browser.execute_script("at('max_tokens').value = 900; at('speculation').checked = false; at('line').focus()")
    # So slow a network that the answer has not arrived before somebody could press a key.
    browser.set_network_conditions(latency=0, download_throughput=4096, upload_throughput=1 << 20)
    try:
        keys(browser, "import os", Keys.ENTER)
        until(browser, "running && document.querySelectorAll('.assistant span').length > 2")
        keys(browser, Keys.ESCAPE)
        until(browser, "!running")
    finally:
        browser.delete_network_conditions()
    assert browser.execute_script("return session.said.length") == 2
    assert browser.execute_script("return session.said[1].content") == answers(browser)[-1]
    assert not browser.find_elements("css selector", ".error")


@pytest.mark.slow
def test_what_is_wrong_is_said_on_the_page(browser, server):
    from selenium.webdriver.common.keys import Keys

    loaded(browser, server.url)
    keys(browser, "/dance", Keys.ENTER)
    until(browser, "document.querySelector('.error')")
    assert "there is no /dance" in browser.find_element("css selector", ".error").text
    keys(browser, "/help", Keys.ENTER)
    until(browser, "document.querySelector('.info')")
    assert "/reset" in browser.find_element("css selector", ".info").text
    browser.get_log("browser")


def test_a_phone_shows_everything_without_scrolling_sideways(browser, server):
    loaded(browser, server.url, width=360)
    wide = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]
    for name in ("line", "send", "model", "speculation", "rate"):
        assert browser.find_element("id", name).is_displayed()


@pytest.mark.slow
def test_from_a_file_it_asks_the_server_that_it_is_told(browser, server):
    from selenium.webdriver.common.keys import Keys

    browser.get(PAGE.as_uri())
    until(browser, "document.querySelector('.error')")  # nobody listens at the address that it begins with
    browser.execute_script(f"at('server').value = '{server.url}'; connect()")
    until(browser, "models.length > 0")
    browser.execute_script("at('max_tokens').value = 8; at('line').focus()")
    keys(browser, "x = 1", Keys.ENTER)
    until(browser, "last && !running")
    assert answers(browser)[-1]
    browser.get_log("browser")
