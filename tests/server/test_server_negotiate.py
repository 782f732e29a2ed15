from __future__ import annotations

import pytest
from rapid_server.negotiate import choose

OFFERED = ("application/json", "image/png", "application/zip")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "application/json"),
        ("  ", "application/json"),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        ("image/png", "image/png"),
        ("IMAGE/PNG", "image/png"),
        ("image/png;version=1", "image/png"),
        ("image/*", "image/png"),
        ("application/zip, application/json", "application/json"),  # equal: the earlier offered
        ("application/zip, */*", "application/zip"),  # equal: the one that was named
        ("image/*, */*", "image/png"),
        ("application/json;q=0.5, image/png;q=0.6", "image/png"),
        ("application/json; q=0.5 , image/png ; q=0.4", "application/json"),
        ("application/json;q=0, */*", "image/png"),  # the most specific range decides
        ("image/webp, */*;q=0.1", "application/json"),
        ("text/html", None),
        ("application/json;q=0", None),
        ("*/*;q=0", None),
        ("png", None),
        ("image/png;q=much", None),
        ("image/png;q=7", None),
        ("image/png;q=nan", None),
        (",,;", None),
    ],
)
def test_choose(accept: str, chosen: str | None) -> None:
    assert choose(accept, OFFERED) == chosen
