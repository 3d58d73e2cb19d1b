"""Studies and a browser for the tests of reports."""

import shutil

import pytest
from report_studies import Session, read_one, store_session


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """A finished session of 120 trials, with finals."""
    path = tmp_path_factory.mktemp("report") / "session.db"
    store_session(path, Session(trials=120))
    return path


@pytest.fixture(scope="session")
def hostile_database(tmp_path_factory):
    """A session whose names, values and messages are HTML, formulas and templates."""
    path = tmp_path_factory.mktemp("report") / "hostile.db"
    store_session(path, Session(trials=60, hostile=True))
    return path


@pytest.fixture(scope="session")
def study(database):
    return read_one(database)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium of the system, driven by Selenium."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromium-driver are not installed (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_page_load_timeout(180)
    started.set_script_timeout(120)
    yield started
    started.quit()
