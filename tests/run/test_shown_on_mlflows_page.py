"""What a person sees of `tracking.show` on MLflow's own page of a run, in Chromium."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import server, window
from tests.running import TINY, Store, pipeline

CARD = "[data-testid=experiment-view-compare-runs-card]"
SECONDS = 60
# Opens the section of a prefix, and brings it into sight, where its cards are drawn.
SCROLL = """
const titles = [...document.querySelectorAll('div,span')];
const title = titles.find(e => e.innerText === arguments[0] && !e.children.length);
if (title) title.scrollIntoView({block: 'start'});
return Boolean(title)"""
# The pictures that have been loaded: the address of each, and its width.
PICTURES = """
const pictures = [...document.querySelectorAll('img')];
const loaded = pictures.filter(each => each.complete && each.naturalWidth);
return loaded.map(each => each.src)"""


def shown_steps(chrome: WebDriver) -> dict[str, int]:
    """Return the step of the picture that the page shows of each key."""
    steps = {}
    for address in chrome.execute_script(PICTURES):
        query = parse_qs(urlsplit(address).query)
        if "path" in query:
            key, _, step, *_ = query["path"][0].split("+")
            steps[key.removeprefix("images/").replace("~", "/")] = int(step)
    return steps


def test_the_page_of_a_run_shows_the_pictures_and_steps_through_updates(
    tmp_path, chromium
):
    command = ("train", *TINY, "training.epochs=2", "tracking.show={examples: 4}")
    pipeline(*command, cwd=tmp_path)
    run = Store(tmp_path).run()
    place = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    keys = {"shown/confusion", "shown/fixed", "shown/reliability", "shown/worst"}
    store_uri = f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    with server(store_uri, seconds=300) as address, window(chromium) as chrome:
        wait = WebDriverWait(chrome, SECONDS)
        chrome.get(f"{address}/#/{place}/model-metrics")
        wait.until(lambda _: chrome.execute_script(SCROLL, "shown"))

        def cards():
            found = {}
            for card in chrome.find_elements(By.CSS_SELECTOR, CARD):
                title = card.text.partition("\n")[0]
                if card.find_elements(By.CSS_SELECTOR, "[role=slider]"):
                    found[title] = card
            return found if found.keys() >= keys else None

        # One card a key, each with a slider from the first evaluation to the last.
        card_by_key = wait.until(lambda _: cards())
        assert card_by_key.keys() == keys
        sliders = {}
        for key, card in card_by_key.items():
            slider = card.find_element(By.CSS_SELECTOR, "[role=slider]")
            ends = [slider.get_attribute(f"aria-value{end}") for end in ("min", "max")]
            assert ends == ["12", "24"]
            sliders[key] = slider
            slider.send_keys(Keys.ARROW_RIGHT)  # from step 0
        wait.until(lambda _: shown_steps(chrome) == dict.fromkeys(keys, 12))
        sliders["shown/fixed"].send_keys(Keys.ARROW_RIGHT)
        # The picture is absent while it is exchanged.
        wait.until(lambda _: shown_steps(chrome).get("shown/fixed") == 24)
        wait.until(lambda _: shown_steps(chrome).get("shown/worst") == 12)

        # A table is shown as one, and not as text.
        name = "shown/examples_000000024.csv"
        chrome.get(f"{address}/#/{place}/artifacts/{name}")
        wait.until(
            lambda _: "Previewing the first 8 rows" in chrome.page_source, SECONDS
        )
        assert "prediction" in chrome.page_source
