"""The page when something is wrong: fields, tokens, servers that refuse, stop or break off."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Route, expect
from rapid_server.auth import hash_token, new_token
from tests_browser import Visit, done, generate, saved, wait_until

from rapid.methods import open_model
from rapid.pictures import encode_png


def test_a_wrong_field_is_told_beside_the_form(visit: Visit, url: str) -> None:
    alert = "#form [role=alert]"
    with visit(url) as page:
        for field, value, words in (
            ("count", "301", "Images: enter a whole number from 1 to 300."),
            ("count", "0", "Images: enter a whole number from 1 to 300."),
            ("count", "1.5", "Images: enter a whole number from 1 to 300."),
            ("seed", "-1", f"Seed: enter a whole number from 0 to {2**63 - 1}, or leave it empty."),
            ("seed", f"{2**63}", f"Seed: enter a whole number from 0 to {2**63 - 1}, or leave it empty."),
            ("seed", f"{2**63 - 1}0", f"Seed: enter a whole number from 0 to {2**63 - 1}, or leave it empty."),
            ("steps", "201", "Steps: enter a whole number from 1 to 200."),
        ):
            fields = {"count": "1", "seed": "", "steps": "", field: value}
            generate(page, **fields)
            expect(page.locator(alert)).to_have_text(words)
            expect(page.locator(f"#{field}")).to_be_focused()
            expect(page.locator(f"#{field}")).to_have_attribute("aria-invalid", "true")
        page.get_by_label("Selected, in turn").check()
        generate(page, 1, steps="")
        expect(page.locator(alert)).to_have_text("Classes: select at least one.")
        page.get_by_role("checkbox", name="3").check()
        generate(page, 1)
        done(page, "^1 image, seed")
        expect(page.locator(alert)).to_be_hidden()


def test_what_the_server_refuses_is_told_in_its_words(visit: Visit, application: Any, serving: Any) -> None:
    def more(route: Route) -> None:
        info = route.fetch().json()
        route.fulfill(json=info | {"models": [model | {"max_count": 9999} for model in info["models"]]})

    app = application(max_count=300, max_client=300, batch=1)
    with (
        serving(app) as client,
        visit(str(client.base_url), errors=("status of 422", "status of 429")) as page,
    ):
        page.route("**/info", more)  # as if the limit had become lower since the page was loaded
        page.reload()
        generate(page, 2)
        done(page, "^2 images")
        generate(page, 301)
        expect(page.locator("#error")).to_have_text("The server says: count: should be at most 300.")
        with client.stream("POST", "/generate", json={"count": 300}, headers={"Accept": "application/x-ndjson"}):
            generate(page, 250)
            words = "images are waiting.*later[.] Try again in about [0-9]+ (s|min)[.]$"
            expect(page.locator("#error")).to_have_text(re.compile(words))
        expect(page.locator(".cell")).to_have_count(2)  # those before are still there
        done(page, "^2 images")
        wait_until(lambda: app.state.engine.idle)  # the other client is gone
        generate(page, 1)
        done(page, "^1 image,")


def test_a_server_that_stops(visit: Visit, application: Any, serving: Any) -> None:
    app = application(batch=8)
    with serving(app) as client, visit(str(client.base_url), errors=("status of 503", "ERR_FAILED")) as page:
        generate(page, 5000)
        page.locator(".cell").first.wait_for()
        app.state.engine.stop()
        arrived = "[0-9]+ images? of 5,000 arrived, and (is|are) kept[.]"
        words = f"^The server ended the response: the server is stopping[.] {arrived}$"
        expect(page.locator("#error")).to_have_text(re.compile(words))
        assert page.locator(".cell").count() > 0
        expect(page.locator("#zip")).to_be_visible()
        page.click("#generate")
        expect(page.locator("#error")).to_have_text("The server says: the server is stopping.")
        page.route("**/generate", lambda route: route.abort())
        page.click("#generate")
        expect(page.locator("#error")).to_have_text("The server cannot be reached. Is it still running?")
        assert page.locator(".cell").count() > 0


def test_a_page_that_found_no_server_tries_again(visit: Visit, url: str) -> None:
    with visit(url, errors=("ERR_FAILED",)) as page:
        page.route("**/info", lambda route: route.abort())
        page.reload()
        expect(page.locator("#error")).to_have_text("The server cannot be reached. Is it still running?")
        page.unroute("**/info")
        page.get_by_role("button", name="Try again").click()
        generate(page, 1)
        done(page, "^1 image,")


def test_a_stream_that_breaks_off_and_an_image_without_a_neighbour(visit: Visit, url: str) -> None:
    png = base64.b64encode(encode_png(np.zeros((32, 32), np.uint8))).decode()
    image = {"type": "image", "index": 2, "label": "<b>&", "entry": None, "done": 1, "count": 3, "image": png}
    lines = [json.dumps(line) for line in ({"type": "start"}, image)]
    with visit(url) as page:
        page.route(
            "**/generate",
            lambda route: route.fulfill(
                body="\n".join([*lines, '{"typ']), headers={"X-Rapid-Seed": "5", "Content-Type": "application/x-ndjson"}
            ),
        )
        generate(page, 3)
        expect(page.locator("#error")).to_have_text("The connection was lost. 1 image of 3 arrived, and is kept.")
        expect(page.locator("#said")).to_have_text("1 image, seed 5. Click one to enlarge it.")
        expect(page.locator(".cell")).to_have_count(1)
        expect(page.locator(".hole")).to_have_count(0)
        page.locator(".cell").click()
        expect(page.locator("#large-title")).to_have_text("Image 2, class <b>&")
        expect(page.locator("#origin")).to_have_text(re.compile("^It started from noise alone"))
        expect(page.locator("#neighbour")).to_be_hidden()


def test_another_answer_or_another_model_is_told(visit: Visit, url: str) -> None:
    """The images before stay, and the page takes the new model's statement."""
    with visit(url) as page:
        generate(page, 2, seed="1")
        done(page, "^2 images, seed 1")
        page.route("**/generate", lambda route: route.fulfill(body="<html>", headers={"Content-Type": "text/html"}))
        generate(page, 1)
        expect(page.locator("#error")).to_contain_text("The response is not one of rapid serve.")
        page.unroute("**/generate")
        headers = {"X-Rapid-Seed": "5", "Content-Type": "application/x-ndjson", "X-Rapid-Sha256": "0" * 64}
        page.route("**/generate", lambda route: route.fulfill(body='{"type": "start"}\n', headers=headers))
        with page.expect_response("**/info"):
            generate(page, 1)
        expect(page.locator("#error")).to_contain_text("another model of this name now")
        done(page, "^2 images, seed 1")
        expect(page.locator(".cell")).to_have_count(2)


def test_a_server_of_classifiers_says_so(visit: Visit, application: Any, serving: Any, classifier_bundle: Path) -> None:
    classifier = open_model(classifier_bundle, "cpu")
    with serving(application({"which": classifier})) as client, visit(str(client.base_url)) as page:
        expect(page.locator("#error")).to_contain_text("This server only classifies images")
        expect(page.locator("#name")).to_have_text("which")
        expect(page.locator("#statement th", has_text="Epsilon").first).to_be_visible()
        expect(page.locator("#retry")).to_be_hidden()
        page.goto(f"{client.base_url}/docs")
        examples = page.locator("pre")
        expect(examples.filter(has_text="predict").filter(has_text="--data-binary @image.png")).to_have_count(1)
        expect(examples.filter(has_text="predict").filter(has_text='{"images"')).to_have_count(1)
        expect(examples.filter(has_text="v1/models/MODEL")).to_have_count(1)


def test_a_token_is_asked_for_where_the_server_wants_one(visit: Visit, application: Any, serving: Any) -> None:
    token = new_token()
    app = application(tokens=[f"alice:{hash_token(token)}"])
    with serving(app) as client, visit(str(client.base_url), errors=("status of 401",)) as page:
        asked = page.get_by_role("dialog")
        expect(asked).to_be_visible()
        expect(page.get_by_label("Token", exact=True)).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#error")).to_have_text("The server requires a token.")
        page.get_by_role("button", name="Try again").click()
        page.get_by_label("Token", exact=True).fill("two words")
        page.get_by_role("button", name="Use token").click()
        expect(asked.get_by_role("alert")).to_have_text("A token has letters, digits and punctuation, and no spaces.")
        page.get_by_label("Token", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(asked.get_by_role("alert")).to_have_text("The server does not know this token.")
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        expect(asked).to_be_hidden()
        generate(page, 2)
        done(page, "^2 images")
        page.locator(".cell").first.click()
        expect(page.locator("#neighbour")).to_be_visible()
        page.keyboard.press("Escape")
        name, content = saved(page, "#details")
        assert (name, json.loads(content)["max_steps"]) == ("info.json", 200)
        page.reload()  # it is kept in this tab
        generate(page, 1)
        done(page, "^1 image,")
        assert token not in page.content()
        page.get_by_role("button", name="forget the token").click()
        expect(asked).to_be_visible()
        assert page.evaluate("sessionStorage.length + localStorage.length") == 0


def test_no_token_is_asked_for_where_none_is_wanted(visit: Visit, url: str) -> None:
    with visit(url) as page:
        generate(page, 1)
        done(page, "^1 image,")
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page.locator("#forget")).to_be_hidden()
