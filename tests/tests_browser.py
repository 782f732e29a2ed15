"""What tests of the page share: to fill it, to wait for it, and to keep what it gives."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Page, expect

NAMES = ("chromium", "chromium-browser", "google-chrome")

Visit = Callable[..., AbstractContextManager[Page]]


def works(path: str) -> bool:
    """Whether it can be run: the package of Ubuntu is a stub for a snap."""
    return subprocess.run([path, "--version"], capture_output=True, check=False, timeout=60).returncode == 0


def generate(page: Page, count: int | str, **fields: str) -> None:
    """Fill the form and send it."""
    expect(page.locator("#statement p").first).not_to_have_text("…")
    page.fill("#count", str(count))
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#generate")


def done(page: Page, words: str) -> None:
    expect(page.locator("#said")).to_have_text(re.compile(words), timeout=60_000)
    expect(page.locator("#progress")).to_be_hidden()


def wait_until(true: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < 20
        time.sleep(0.02)


def saved(page: Page, button: str) -> tuple[str, bytes]:
    """The name and content of the file that a button gives."""
    with page.expect_download() as download:
        page.click(button)
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def pixels(png: bytes) -> Any:
    with Image.open(BytesIO(png)) as image:
        return np.asarray(image).astype(int)
