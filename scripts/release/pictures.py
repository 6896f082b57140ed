"""Make the README's two pictures: the page of `serve --ui`, and `bench --html`, in headless Chromium.

python scripts/release/pictures.py CHATTING BENCHED [--out docs/pictures] [--message TEXT]

CHATTING is a bundle with a chat template, BENCHED one with a draft.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from browser import chromium
from serving import Server

MESSAGE = "Write this sentence five times: The quick brown fox jumps over the lazy dog near the river bank."
TREES = "chain:2,chain:4,chain:8,best:5,best:12"


def show_page(bundle: Path, message: str, out: Path) -> None:
    """A chat by the page: an answer, then the same one without speculation."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    with Server(str(bundle), "--port", "0", "--ui") as server, chromium(1180, 760) as window:
        wait = WebDriverWait(window, 120)
        window.get(server.url)
        wait.until(lambda driver: driver.execute_script("return models.length > 0"))
        window.execute_script("at('max_tokens').value = 160; at('seed').value = 1")
        window.find_element(By.ID, "line").send_keys(message, Keys.ENTER)
        wait.until(lambda driver: driver.execute_script("return last && !running"))
        window.find_element(By.ID, "again").click()
        wait.until(lambda driver: driver.execute_script("return at('verdict').textContent"))
        window.save_screenshot(str(out))


def show_report(report: Path, out: Path) -> None:
    """The top of a benchmark's report."""
    with chromium(1180, 900) as window:
        window.get(report.resolve().as_uri())
        window.save_screenshot(str(out))


def main() -> int:
    """Make both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chatting", type=Path)
    parser.add_argument("benched", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--message", default=MESSAGE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    show_page(options.chatting, options.message, options.out / "page.png")
    with tempfile.TemporaryDirectory() as folder:
        name = options.benched.name
        (Path(folder) / name).symlink_to(options.benched.resolve())
        command = [
            str(Path(sys.executable).parent / "specbuild"),
            "bench",
            name,
            "--html",
            "report.html",
            "--trees",
            TREES,
        ]
        subprocess.run([*command, "--num-prompts", "12", "--max-new-tokens", "96"], check=True, cwd=folder)
        show_report(Path(folder) / "report.html", options.out / "bench.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
