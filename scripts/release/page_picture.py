"""Make the README's picture, the page of `serve --ui`, in headless Chromium: an answer, then the same drafted.

python scripts/release/page_picture.py BUNDLE [--out docs/pictures/page.png] [--message TEXT]

The bundle has a chat template.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from browser import chromium
from serving import Server

MESSAGE = """Rename the variable x to total, and answer with the code alone:
def average(values):
    x = 0
    for value in values:
        x += value
    return x / len(values)"""


def show_page(bundle: Path, message: str, out: Path) -> None:
    """Chat by the page: an answer without speculation, then the same one with it."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    with Server(str(bundle), "--port", "0", "--ui") as server, chromium(1180, 800) as window:
        wait = WebDriverWait(window, 300)
        window.get(server.url)
        wait.until(lambda driver: driver.execute_script("return models.length > 0"))
        window.execute_script("at('max_tokens').value = 160; at('temperature').value = 0")
        window.execute_script("at('speculation').checked = false; at('line').value = arguments[0]", message)
        window.find_element(By.ID, "line").send_keys(Keys.ENTER)
        wait.until(lambda driver: driver.execute_script("return last && !running"))
        window.find_element(By.ID, "again").click()
        wait.until(lambda driver: driver.execute_script("return at('verdict').textContent"))
        window.save_screenshot(str(out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/page.png"))
    parser.add_argument("--message", default=MESSAGE)
    options = parser.parse_args()
    show_page(options.bundle, options.message, options.out)
