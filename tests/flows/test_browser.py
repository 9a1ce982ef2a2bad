"""What a person does in Prefect's UI: start a run from its form with a changed parameter, watch it, cancel it, start it
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from urllib.parse import urlsplit

import psutil
import pytest

from tests.common import stage_processes

CHROME = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not (CHROME and shutil.which("chromedriver")), reason="needs chromium and chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1500,1600"
)
# The first input after a leaf element with the wanted text: how a person finds a field by its label.
FIELD = """
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT);
let node, seen = false;
while (node = walker.nextNode()) {
  if (!node.children.length && node.textContent.trim().replace(/ \\(Optional\\)$/, '') === arguments[0]) seen = true;
  if (seen && (node.tagName === 'INPUT' || node.tagName === 'TEXTAREA')) return node;
}
return null;"""


@pytest.fixture(scope="module")
def page():
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.binary_location = CHROME
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    # a socket of chromium lies in its temporary directory, and a socket's address holds 108 bytes
    short = None if len(tempfile.gettempdir()) < 50 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="chromium-", dir=short, ignore_cleanup_errors=True) as scratch:
        service = webdriver.ChromeService(shutil.which("chromedriver"), env={**os.environ, "TMPDIR": scratch})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()


def named(page, selector: str, text: str):
    """A visible element of this text, None when there is none."""
    from selenium.common.exceptions import StaleElementReferenceException

    with contextlib.suppress(StaleElementReferenceException):  # drawn anew meanwhile
        return next(
            (
                one
                for one in page.find_elements("css selector", selector)
                if one.text.strip() == text and one.is_displayed()
            ),
            None,
        )


def submit(servers, page, deployment: str, values: dict[str, object]) -> str:
    """Fill the form of a deployment as a person does and submit it; the new flow run's id."""
    key = servers.deployment(deployment)["id"]
    runs = lambda: {run["id"] for run in servers.api("/flow_runs/filter", {"deployments": {"id": {"any_": [key]}}})}
    before = runs()
    page.get(f"{servers.urls['prefect']}/v2/deployments/deployment/{key}/run")
    for label, value in values.items():
        field = servers.wait(lambda: page.execute_script(FIELD, label))
        field.click()
        field.send_keys("\ue009a\ue000\ue017" + str(value))  # control-A, delete, the value
        assert field.get_attribute("value") == str(value)
    return until(
        page, lambda: runs() - before, lambda: servers.wait(lambda: named(page, "button", "Submit")).click()
    ).pop()


def until(page, done, act, seconds: float = 15):
    """Do what a person does, again where nothing comes of it, since the UI does not repeat a call for which SQLite was
    locked, and where the page was drawn anew between finding something there and clicking on it; what ``done()`` is
    then."""
    from selenium.common.exceptions import StaleElementReferenceException

    for _ in range(5):
        try:
            act()
        except StaleElementReferenceException:
            continue
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := done():
                page.get("about:blank")  # the page of a run draws it all the while it runs
                return found
            time.sleep(0.5)
    raise AssertionError(page.find_element("css selector", "body").text)


def menu(servers, page, run: str, item: str) -> None:
    """Choose an item of a flow run's menu."""
    page.get(f"{servers.urls['prefect']}/v2/runs/flow-run/{run}")
    servers.wait(lambda: named(page, "button[aria-haspopup='menu']", "Open menu")).click()
    servers.wait(lambda: named(page, "[role=menuitem]", item)).click()


def cancel(servers, page, run: str) -> None:
    def act():
        menu(servers, page, run, "Cancel")
        servers.wait(lambda: named(page, "[role=dialog] button, [role=alertdialog] button", "Cancel Flow Run")).click()

    until(page, lambda: servers.state(run) in ("Cancelling", "Cancelled"), act, seconds=60)


def test_the_uis_ask_this_machine_only(servers, page):
    for path in ("/v2/deployments", "/runs"):
        page.get(servers.urls["prefect"] + path)
        servers.wait(lambda: page.find_elements("css selector", "a[href*=deployments]"))
    page.get(servers.urls["mlflow"])
    servers.wait(lambda: "Experiments" in page.find_element("css selector", "body").text)
    asked = {
        urlsplit(json.loads(entry["message"])["message"]["params"]["request"]["url"])
        for entry in page.get_log("performance")
        if json.loads(entry["message"])["message"]["method"] == "Network.requestWillBeSent"
    }
    assert len(asked) > 20 and {url.hostname for url in asked if url.scheme in ("http", "https")} == {"127.0.0.1"}


def test_a_run_is_started_changed_cancelled_and_continued_in_the_browser(servers, slow_recipe, page):
    slots = lambda: servers.api("/v2/concurrency_limits/gpu")["active_slots"]
    ours = lambda: stage_processes(servers.home)
    first = submit(servers, page, slow_recipe, {"Seed": 7, "Seconds": 601})
    assert servers.api(f"/flow_runs/{first}")["parameters"]["config"] == {
        "seed": 7,
        "slow": {"seconds": 601, "fail": False},
    }
    processes = servers.wait(ours)
    servers.wait(lambda: slots() == 1)
    cancel(servers, page, first)
    assert servers.finished(first) == "Cancelled"
    servers.wait(
        lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    )
    servers.wait(lambda: slots() == 0, limit=90)

    again = submit(servers, page, slow_recipe, {"Seed": 7, "Seconds": 601})  # the same run: it goes on in its record
    servers.wait(ours)
    record = servers.json("show", again)
    assert (
        record["run_id"] == servers.json("show", first)["run_id"]
        and record["flow_runs"] == [first, again]
        and record["attempts"] == 2
    )
    cancel(servers, page, again)
    assert servers.finished(again) == "Cancelled"


def test_a_stage_is_run_again_from_its_form_with_a_changed_parameter(servers, page):
    run = submit(servers, page, "stage-world/stage-world", {"Wrong Share": 0.5})
    assert '"wrong_share": 0.5' in json.dumps(servers.api(f"/flow_runs/{run}")["parameters"])
    assert servers.finished(run) == "Completed" and servers.tasks(run) == {"world · world": "Completed"}
