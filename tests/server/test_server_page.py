"""The page in a real browser, against a real server."""

from __future__ import annotations

import base64
import json
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from methods.tiny import TINY
from PIL import Image
from playwright.sync_api import expect
from tests_browser import Visit, done, generate, pixels, saved, wait_until
from tests_support import assert_same_images

from rapid.data.private import PrivateImages
from rapid.methods import apply_overrides, open_generator
from rapid.sampling.generate import generate as make_samples
from rapid.sampling.generator import Generator
from rapid.stages.private import train_private_bundle

PHONE = {"width": 360, "height": 740}


def test_images_are_made_and_can_be_kept(visit: Visit, url: str, generator: Generator) -> None:
    with visit(url) as page:
        expect(page.locator("#models")).to_be_hidden()
        generate(page, 23, seed="9223372036854775807")
        # all digits of the seed, which is beyond what a number in JavaScript can hold
        done(page, "^23 images, seed 9223372036854775807")
        cells = page.get_by_role("button", name=re.compile("^Synthetic image [0-9]+, class"))
        expect(cells).to_have_count(23)
        expect(cells.nth(12)).to_have_accessible_name("Synthetic image 12, class 2")
        name, content = saved(page, "#zip")
    assert name == f"{generator.bundle.path.name}-9223372036854775807.zip"
    expected = make_samples(generator, 23, seed=2**63 - 1).images
    with zipfile.ZipFile(BytesIO(content)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert len(names) == 23
        assert names[12].endswith("-00012-2.png")
        for name, image in zip(names, expected, strict=True):
            assert_same_images(pixels(archive.read(name)), image)
        with Image.open(BytesIO(archive.read(names[0]))) as image:
            assert json.loads(image.text["rapid"])["synthetic"] is True  # type: ignore[attr-defined]


def test_a_fresh_seed_is_shown_and_can_be_used_again(visit: Visit, url: str) -> None:
    with visit(url) as page:
        generate(page, 4)
        done(page, "^4 images")
        first = saved(page, "#zip")[1]
        seed = re.findall("seed ([0-9]+)", page.inner_text("#said"))[0]
        page.click("#again")
        expect(page.locator("#seed")).to_have_value(seed)
        expect(page.locator("#seed")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#progress")).to_be_hidden()
        done(page, f"^4 images, seed {seed}[.]")
        assert saved(page, "#zip")[1] == first


def test_chosen_classes_and_steps(visit: Visit, url: str, generator: Generator) -> None:
    sent = []
    with visit(url) as page:
        page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
        expect(page.locator("#steps")).to_have_attribute("placeholder", re.compile(f"^{generator.steps} "))
        page.get_by_label("Selected, in turn").check()
        for name in ("3", "8"):
            page.get_by_role("checkbox", name=name).check()
        generate(page, 5, steps="2", seed="1")
        done(page, "^5 images, seed 1")
        assert page.locator(".cell span").all_inner_texts() == ["3", "8", "3", "8", "3"]
        body = json.loads(sent[0].post_data or "")
    assert body == {"model": generator.bundle.path.name, "count": 5, "labels": [3, 8, 3, 8, 3], "seed": 1, "steps": 2}


def test_images_appear_before_the_end_and_cancel_keeps_them(visit: Visit, application: Any, serving: Any) -> None:
    app: FastAPI = application(batch=8)
    with serving(app) as client, visit(str(client.base_url)) as page:
        generate(page, 5000)
        page.locator(".cell").nth(5).wait_for()
        expect(page.locator("#pace")).to_have_text(
            re.compile("^[0-9,]+ of 5,000 images, [0-9.,]+ a second, about .* left$")
        )
        expect(page.locator("#zip")).to_be_hidden()
        assert not app.state.engine.idle
        page.focus("#cancel")
        page.keyboard.press("Enter")
        done(page, "^Cancelled: [0-9]+ of 5,000 images[.] Seed [0-9]+[.]$")
        wait_until(lambda: app.state.engine.idle)
        expect(page.locator("#generate")).to_be_focused()
        kept = int(re.findall("[0-9]+", page.inner_text("#said"))[0])
        expect(page.locator(".cell")).to_have_count(min(kept, 240))
        expect(page.locator(".hole")).to_have_count(0)
        with zipfile.ZipFile(BytesIO(saved(page, "#zip")[1])) as archive:
            assert len(archive.namelist()) == kept
        generate(page, 3)  # and it is usable
        done(page, "^3 images")


def test_many_images_are_shown_a_page_at_a_time(visit: Visit, url: str) -> None:
    with visit(url) as page:
        generate(page, 300)
        done(page, "^300 images")
        expect(page.locator("#range")).to_have_text("1 to 240 of 300")
        expect(page.locator(".cell")).to_have_count(240)
        page.click("#after")
        expect(page.locator("#range")).to_have_text("241 to 300 of 300")
        expect(page.locator(".cell")).to_have_count(60)
        expect(page.locator("#before")).to_be_focused()
        # the large view goes on over the end of a page
        page.locator(".cell").first.click()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#large-title")).to_have_text("Image 239, class 9")
        page.keyboard.press("Escape")
        expect(page.locator("#range")).to_have_text("1 to 240 of 300")
        expect(page.get_by_role("button", name="Synthetic image 239, class 9")).to_be_focused()


def test_the_large_view(visit: Visit, url: str, client: httpx.Client) -> None:
    answer = client.post("/generate", json={"count": 12, "seed": 6}).json()
    with visit(url) as page:
        generate(page, 12, seed="6")
        done(page, "^12 images")
        # by keyboard alone: one stop for all images, arrows between them
        page.focus("#zip")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Synthetic image 0, class 0")).to_be_focused()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        view = page.get_by_role("dialog")
        expect(view.get_by_role("heading")).to_have_text("Image 1, class 1")
        expect(page.locator("#facts")).to_have_text(re.compile("Class.*1.*Index.*1 of 0 to 11.*Seed.*6"))
        expect(page.locator("#origin")).to_have_text(re.compile("^The public image that it started from"))
        expect(page.locator("#neighbour")).to_be_visible()
        assert page.evaluate("getComputedStyle(large).imageRendering") == "pixelated"
        width = page.evaluate("large.clientWidth")
        assert width >= 256
        assert width % 32 == 0
        name, content = saved(page, "#view-save")
        assert_same_images(pixels(content), pixels(base64.b64decode(answer["images"][1])))
        assert name.endswith("-6-00001-1.png")
        shown = page.evaluate(DRAWN)
        public = pixels(client.get(f"/entries/{answer['entries'][1]}").content)
        np.testing.assert_array_equal(np.array(shown).reshape(32, 32), public)
        page.keyboard.press("ArrowLeft")
        expect(view.get_by_role("heading")).to_have_text("Image 0, class 0")
        expect(page.locator("#view-before")).to_be_disabled()
        page.keyboard.press("ArrowLeft")
        page.locator("#view-after").click()
        page.keyboard.press("ArrowRight")
        expect(view.get_by_role("heading")).to_have_text("Image 2, class 2")
        # neither a click between its parts closes it, nor a selection that ends beside it
        box = view.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + 4, box["y"] + 4)
        page.mouse.move(box["x"] + 8, box["y"] + 8)
        page.mouse.down()
        page.mouse.move(box["x"] - 8, box["y"] + 8)
        page.mouse.up()
        expect(view).to_be_visible()
        page.keyboard.press("Escape")
        expect(view).to_be_hidden()
        expect(page.get_by_role("button", name="Synthetic image 2, class 2")).to_be_focused()
        page.keyboard.press("Enter")
        page.mouse.click(box["x"] - 8, box["y"] + 8)
        expect(view).to_be_hidden()


DRAWN = """async () => {
    await neighbour.decode();
    const canvas = Object.assign(document.createElement("canvas"), {width: 32, height: 32});
    const context = canvas.getContext("2d");
    context.drawImage(neighbour, 0, 0);
    return [...context.getImageData(0, 0, 32, 32).data].filter((_, place) => place % 4 === 0);
}"""


def test_a_public_model_with_private_ones_behind_it(
    visit: Visit, application: Any, serving: Any, built_on_synthetic: Generator
) -> None:
    with serving(application({"base": built_on_synthetic})) as client, visit(str(client.base_url)) as page:
        expect(page.locator("#statement")).to_contain_text("made by the private model 'private' (rapid, epsilon 10")
        expect(page.locator("#meaning-list")).to_contain_text("Private images were used by other models only,")


def test_a_model_without_public_images_claims_none(
    visit: Visit, application: Any, serving: Any, digits: Path, tmp_path: Path
) -> None:
    """And one that makes an image in one call has no steps to choose."""
    settings = apply_overrides(TINY["dp-gan"]["settings"] | {"method": "dp-gan"}, [])
    train_private_bundle(
        None, PrivateImages(digits), tmp_path / "gan", settings, epsilon=10.0, delta=None, device=torch.device("cpu"),
        resume=False,
    )  # fmt: skip
    gan = open_generator(tmp_path / "gan", "cpu")
    with serving(application({"gan": gan})) as client, visit(str(client.base_url)) as page:
        expect(page.locator("#meaning-list")).to_contain_text("The guarantee.")
        expect(page.locator("#meaning-list")).not_to_contain_text("public images")
        expect(page.locator("#steps")).to_be_hidden()
        generate(page, 3, seed="1")
        done(page, "^3 images, seed 1")


def test_the_files_of_the_page_are_asked_for_anew(client: httpx.Client) -> None:
    """After an update none is mixed with older ones; unchanged ones are not sent again."""
    for path in ("/", "/docs", "/static/page.js", "/static/style.css"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["Cache-Control"]) == (200, "no-cache")
    again = client.get("/static/page.js", headers={"If-None-Match": client.get("/static/page.js").headers["ETag"]})
    assert (again.status_code, again.headers["Cache-Control"]) == (304, "no-cache")


def test_a_choice_of_models(
    visit: Visit, application: Any, serving: Any, generator: Generator, public_bundle: Path
) -> None:
    public = open_generator(public_bundle, "cpu")
    with serving(application({"private": generator, "public": public})) as client, visit(str(client.base_url)) as page:
        assert generator.bundle.privacy is not None
        expect(page.locator("#statement p")).to_have_text(re.compile("differentially private"))
        for words in ("Epsilon", "Delta", "Adjacency", "Unit", "Accountant"):
            expect(page.locator("#statement th", has_text=words).first).to_be_visible()
        expect(page.locator("#statement table").first).to_contain_text(generator.bundle.privacy["accountant"])
        expect(page.locator("#meaning-list")).to_contain_text("The guarantee.")
        page.get_by_label("Model").select_option("public")
        expect(page.locator("#name")).to_have_text("public")
        expect(page.locator("#statement")).to_contain_text("public images alone")
        expect(page.locator("#statement table")).to_have_count(0)
        expect(page.locator("#meaning-list")).to_contain_text("No private image was used,")
        page.get_by_label("Selected, in turn").check()
        assert page.locator("#boxes label").all_inner_texts() == list(public.classes)
        page.get_by_label("All in turn").check()
        generate(page, 3, seed="1")
        done(page, "^3 images")
        assert page.locator(".cell span").all_inner_texts() == list(public.classes[:3])
        page.get_by_label("Model").select_option("private")  # the images stay those of the other
        page.locator(".cell").first.click()
        expect(page.locator("#facts")).to_contain_text("public")
        expect(page.locator("#neighbour")).to_be_visible()
        assert np.array_equal(np.array(page.evaluate(DRAWN)).reshape(32, 32), pixels(neighbour(client, "public", 1)))


def neighbour(client: httpx.Client, model: str, seed: int) -> bytes:
    """The public image that the first image of a seed started from."""
    entry = client.post("/generate", json={"count": 3, "seed": seed, "model": model}).json()["entries"][0]
    return client.get(f"/entries/{entry}", params={"model": model}).content


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(visit: Visit, url: str, scheme: str) -> None:
    def fits() -> bool:
        return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth && scrollX === 0"))

    with visit(url, viewport=PHONE, color_scheme=scheme, has_touch=True, reduced_motion="reduce") as page:
        expect(page.locator("#statement table").first).to_be_visible()
        assert fits()
        generate(page, 30)
        done(page, "^30 images")
        assert fits()
        page.locator("#statement summary").click()
        assert fits()
        page.locator(".cell").nth(20).tap()
        expect(page.locator("#neighbour")).to_be_visible()
        assert fits()
        box = page.locator("#view").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE["width"]
        page.goto(f"{url}/docs")
        page.get_by_role("heading", name="/entries/{entry}").wait_for()
        assert fits()


def test_the_description_for_programs(visit: Visit, url: str) -> None:
    with visit(f"{url}/docs") as page:
        entries = page.locator("section", has=page.get_by_role("heading", name="/entries/{entry}"))
        expect(entries).to_contain_text("in the path")
        expect(entries).to_contain_text(f"curl {url}/entries/0 -o images.png")
        asked = page.locator("section", has=page.get_by_role("heading", name="/generate", exact=False)).first
        for words in ("steps", "integer from 1 to 200", "Accept: application/x-ndjson", "429"):
            expect(asked).to_contain_text(words)
        expect(page.locator("main")).not_to_contain_text("anything")


def test_a_zip_of_more_files_than_its_plain_form_can_count(visit: Visit, url: str) -> None:
    with visit(url) as page, page.expect_download() as download:
        page.evaluate("""async () => {
            const [{ zip }, { save }] = await Promise.all([import("/static/zip.js"), import("/static/element.js")]);
            const file = (_, n) => ({ name: `${n}.png`, bytes: Uint8Array.of(n % 256) });
            const files = Array.from({ length: 70_000 }, file);
            save(zip(files), "many.zip");
        }""")
        content = Path(download.value.path()).read_bytes()
    with zipfile.ZipFile(BytesIO(content)) as archive:
        assert len(archive.namelist()) == 70_000
        assert archive.read("69999.png") == bytes([69_999 % 256])
