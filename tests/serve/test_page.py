"""The demo page in a browser: typed, dropped and spoken inputs, bars, chart, errors, colour schemes and widths."""

import os
import re
import shutil
from importlib import resources

import numpy as np
import pytest
import soundfile

from .conftest import serving
from .models import RATE, save

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "word.wav"
    noise = np.random.default_rng(2).integers(-9000, 9000, 4000).astype(np.int16)
    soundfile.write(path, noise, RATE, subtype="PCM_16")
    return path


@pytest.fixture(scope="module")
def browser(recording):
    if CHROMIUM is None:
        pytest.skip("no Chromium: install one, or name it in $CHROMIUM")
    from playwright.sync_api import sync_playwright

    microphone = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", *microphone, f"--use-file-for-fake-audio-capture={recording}"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Open the page of a server; an error of its script, or a violation of its policy, fails the test."""
    pages, errors = [], []

    def open_page(server, address="", **options):
        page = browser.new_context(permissions=["microphone"], **options).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.append(request.url) if server.url not in request.url else None)
        page.on("console", lambda line: errors.append(line.text) if "Content Security Policy" in line.text else None)
        page.goto(server.url + address)
        page.wait_for_selector("#input:not([hidden])")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert [error for error in errors if not error.startswith(("data:", "blob:"))] == []


def wait_until_shown(page, *shown):
    for name in shown:
        page.wait_for_selector(f"#{name}:not([hidden])", timeout=30_000)
    page.wait_for_selector("body:not([aria-busy])", timeout=30_000)


def bars(page):
    names, values = (page.locator(f"#bars .{part}").all_inner_texts() for part in ("name", "value"))
    return {name: float(value.removesuffix(" %")) for name, value in zip(names, values, strict=True)}


def fits(page):
    """Return whether the page needs no horizontal scrolling."""
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_typed_text_is_predicted_with_bars_and_a_chart_over_time(text_server, opened):
    page = opened(text_server)
    page.fill("#text", "a fine film, was it not?")
    page.keyboard.press("Control+Enter")
    wait_until_shown(page, "result", "running")
    shown = bars(page)
    assert set(shown) == {"negative", "positive"}
    assert sum(shown.values()) == pytest.approx(100, abs=0.2)
    assert page.inner_text("#label") == max(shown, key=shown.get)
    width = page.locator("#bars .fill").first.evaluate("e => e.style.width")
    assert float(width.removesuffix("%")) == pytest.approx(max(shown.values()), abs=0.1)
    lines = page.locator("#chart .series")
    assert lines.count() == 2
    assert len(lines.first.get_attribute("points").split()) == 25  # each character, and the end
    last = page.locator("#chart").get_attribute("aria-label")
    assert last.startswith("After 25: ")
    page.locator("#chart").hover()
    assert page.locator("#chart .cursor").count() == 1
    assert page.locator("#chart text").all_text_contents()[-1] in ("12", "13")  # the middle
    page.mouse.move(0, 0)
    assert page.locator("#chart .cursor").count() == 0
    assert all(f"{name} {value:.1f} %" in last for name, value in shown.items())


def test_the_page_sends_the_token_of_its_address(tmp_path, browser, opened):
    token = "0123456789abcdef"
    with serving(save("text", tmp_path), "--token", token) as server:
        page = opened(server, f"/#token={token}")
        page.fill("#text", "a fine film")
        page.click("#go")
        wait_until_shown(page, "result", "running")
        page = browser.new_page()
        page.goto(server.url)
        wait_until_shown(page, "error")
        assert "the server requires a token: add #token=..." in page.inner_text("[role=alert]")
        page.close()


def test_a_prediction_disappears_when_its_text_is_changed(text_server, opened):
    page = opened(text_server)
    page.fill("#text", "a fine film")
    page.click("#go")
    wait_until_shown(page, "result", "running")
    page.locator("#text").press("End")
    page.keyboard.type("?")
    assert not page.is_visible("#result")
    assert not page.is_visible("#running")
    page.click("#go")
    wait_until_shown(page, "result", "running")
    assert page.locator("#chart").get_attribute("aria-label").startswith("After 13: ")


def test_an_error_is_shown_until_the_next_prediction(tmp_path, opened):
    with serving(save("listops", tmp_path)) as server:
        page = opened(server)
        assert "[MAX" in page.inner_text("#hint")
        page.fill("#text", "[MAX 2 x ]")
        page.click("#go")
        wait_until_shown(page, "error")
        assert "unknown symbol 'x' at position 2" in page.inner_text("[role=alert]")
        assert not page.is_visible("#result")
        page.fill("#text", "[MAX 2 9 ]")
        page.click("#go")
        wait_until_shown(page, "result", "running")
        assert not page.is_visible("#error")
        assert len(bars(page)) == 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_recording_is_predicted(audio_server, opened, recording, scheme):
    page = opened(audio_server, color_scheme=scheme, viewport={"width": 320, "height": 700})
    page.set_input_files("#file", recording)
    wait_until_shown(page, "result", "running")
    assert set(bars(page)) == {"bed", "cat", "happy"}
    assert "0.10 s of 0.50 s were used" in page.inner_text("#notes")
    assert page.locator("#chart .wave").count() == 1
    assert fits(page)
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (brightness[0] > brightness[1]) == (scheme == "dark")


def test_a_spoken_word_is_predicted(audio_server, opened):
    page = opened(audio_server)
    page.click("#speak")
    wait_until_shown(page, "result", "running")
    assert set(bars(page)) == {"bed", "cat", "happy"}
    assert page.is_enabled("#speak")


def test_a_file_that_is_not_a_recording_is_rejected(audio_server, opened, tmp_path):
    (tmp_path / "x.wav").write_text("nothing")
    page = opened(audio_server)
    page.set_input_files("#file", tmp_path / "x.wav")
    wait_until_shown(page, "error")
    assert "the browser cannot decode this recording" in page.inner_text("[role=alert]")


@pytest.mark.slow
def test_images_pairs_and_numbers(tmp_path, opened):
    from PIL import Image

    Image.new("RGB", (8, 8), (200, 10, 10)).save(tmp_path / "red.png")
    with serving(save("image", tmp_path / "image")) as server:
        page = opened(server)
        page.set_input_files("#file", tmp_path / "red.png")
        wait_until_shown(page, "result", "running")
        last = page.locator("#chart").get_attribute("aria-label")
        assert f"{page.inner_text('#label')} {page.inner_text('#probability')}" in last
    with serving(save("pair", tmp_path / "pair")) as server:
        page = opened(server)
        page.fill("#text", "one")
        page.fill("#text2", "another")
        page.click("#go")
        wait_until_shown(page, "result")
        assert set(bars(page)) == {"no", "yes"}
        assert not page.is_visible("#running")
    with serving(save("values", tmp_path / "values")) as server:
        page = opened(server)
        page.fill("#text", "1, 2\n3 4\n")
        page.click("#go")
        wait_until_shown(page, "result", "running")
        assert set(bars(page)) == {"a", "b", "c"}


def test_a_language_model_generates_text_and_stops(tmp_path, opened):
    with serving(save("language", tmp_path)) as server:
        page = opened(server)
        page.fill("#text", "abc")
        page.click("#go")
        wait_until_shown(page, "generated")
        assert page.inner_text("#output").startswith("abc")
        assert len(page.locator("#output").text_content()) == 503
        assert not page.is_visible("#error")


def test_the_page_loads_nothing_from_other_hosts():
    files = [resources.files("mrconv.serve") / f"page.{kind}" for kind in ("html", "css", "js")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {
        "http://www.w3.org/1999/xhtml"
    }  # a namespace, not an address
