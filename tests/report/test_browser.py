"""The page in headless Chromium: no error, no request, filters, sorting, advice and copying work, nothing overflows.

Uses the system's chromium (or one that playwright installed); skipped where there is none.
"""

import html
import re
import shutil

import pytest

pytest.importorskip("plotly")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -c constraints.txt -e '.[dev]'")

from harness.report.advice import GOALS, LIMITS, advise, views  # noqa: E402
from harness.report.page import HERE, page  # noqa: E402
from harness.report.rows import load  # noqa: E402

SYSTEM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        try:
            # no sandbox: a container's root user has none
            started = playwright.chromium.launch(executable_path=SYSTEM, args=["--no-sandbox"])
        except sync_api.Error as err:
            pytest.skip(f"no Chromium starts here: {str(err).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def loaded(stress_folder):
    return load([stress_folder])


@pytest.fixture(scope="module")
def address(loaded, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(loaded))
    return path.as_uri()


class Tab:
    """One open page, and everything that went wrong in it."""

    def __init__(self, browser, address, **options):
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.faults, self.requests = [], []
        self.page.on(
            "console", lambda message: self.faults.append(message.text) if message.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def shown(self) -> int:
        return self.page.locator("tbody tr:visible").count()


@pytest.fixture(scope="module")
def tab(browser, address):
    opened = Tab(browser, address, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()


@pytest.fixture(autouse=True)
def clean(request):
    """Whatever a test does, the page complains of nothing and asks nobody."""
    yield
    if "tab" in request.fixturenames:
        tab = request.getfixturevalue("tab")
        assert tab.faults == []
        assert [url for url in tab.requests if not url.startswith("file:")] == [] and len(tab.requests) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
        {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
        {"viewport": {"width": 1280, "height": 900}, "offline": True},
    ],
    ids=["dark", "phone", "offline"],
)
def test_opens_everywhere(browser, address, options):
    opened = Tab(browser, address, **options)
    opened.page.locator("#chart-kept .plot svg").first.wait_for()
    width, window, title = opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth, document.title]")
    assert width <= window, "the page scrolls sideways"
    assert title.startswith("KVGauge: "), "a model's name has acted"
    ink = opened.page.evaluate("getComputedStyle(document.body).color")
    drawn = opened.page.evaluate("getComputedStyle(document.querySelector('#chart-kept .xtick text')).fill")
    assert drawn == ink, "charts follow the theme"
    assert opened.faults == [] and len(opened.requests) == 1
    opened.context.close()


def test_every_chart_is_drawn(tab):
    for box in tab.page.locator("figure").all():
        plot = box.locator(".plot")
        assert plot.is_hidden() or plot.locator("svg").count() > 0
    assert tab.page.locator("figure .plot:visible").count() >= 8


def test_every_label_is_drawn_in_every_view(tab):
    num_views = tab.page.locator("#view option").count()
    for place in [*range(0, num_views, 3), 0]:
        tab.page.select_option("#view", str(place))
        for name in ("kept", "sparsity"):
            wanted = tab.page.evaluate(
                f"(data.views[{place}].charts.{name}?.data ?? []).flatMap((trace) => trace.text ?? []).filter(Boolean)"
            )
            drawn = tab.page.locator(f"#chart-{name} .textpoint text").all_text_contents()
            decoded = [html.unescape(text) for text in wanted]
            assert sorted(text for text in drawn if text) == sorted(decoded)


def test_filters_and_search(tab, loaded):
    rows = [entry.row for entry in loaded.entries]
    assert tab.shown() == len(rows)
    tab.page.select_option("[data-filter=method]", "h2o")
    h2o = [row for row in rows if row.method == "h2o"]
    assert tab.shown() == len(h2o)
    tab.page.select_option("[data-filter=status]", "oom_decode")
    assert tab.shown() == 1
    assert tab.page.locator("#count").inner_text() == f"1 of {len(rows)} rows"
    tab.page.click("#clear")
    tab.page.select_option("[data-filter=flag]", "not_interleaved")
    assert tab.shown() == sum("not_interleaved" in row.flags for row in rows)
    tab.page.click("#clear")
    tab.page.fill("#search", "WINDOW hidden")
    assert tab.shown() == sum(row.method == "window" and row.question == "hidden" for row in rows)
    tab.page.click("#clear")
    assert tab.shown() == len(rows)


def test_sorting_by_keyboard(tab):
    button = tab.page.locator("thead button", has_text="TTFT")
    place = int(button.get_attribute("data-sort"))
    for direction in ("ascending", "descending"):
        button.focus()
        tab.page.keyboard.press("Enter")
        assert tab.page.locator(f"th[aria-sort={direction}]").count() == 1
        values = tab.page.evaluate(f"[...document.querySelectorAll('tbody tr')].map((row) => row.children[{place}].dataset.v)")
        known = [float(value) for value in values if value]
        assert known == sorted(known, reverse=direction == "descending")
        assert values[-6:] == [""] * 6, "unknown values stay at the end"


def test_advice_is_the_one_of_python(tab, loaded):
    found = views(loaded.entries)
    for place in (0, len(found) - 1):
        tab.page.select_option("#view", str(place))
        for goal in GOALS:
            tab.page.select_option("#goal", goal)
            for limit in (None, LIMITS[-1]):
                tab.page.select_option("#limit", "none" if limit is None else f"{limit:g}")
                for loss in (1, 60):
                    tab.page.fill("#loss", str(loss))
                    expected = advise(found[place], loss, goal, limit)
                    assert tab.page.locator("#advice .verdict").inner_text() == expected.headline
                    commands = tab.page.locator("#advice code").all_inner_texts()
                    assert commands == ([expected.command] if expected.command else [])
                    assert tab.page.locator("#advice > ul > li").all_inner_texts() == list(expected.reasons)
    tab.page.select_option("#view", "0")


def test_copies_the_command(tab, loaded):
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button = tab.page.locator("tbody .copy").first
    button.click()
    tab.page.get_by_text("copied").wait_for()
    assert tab.page.evaluate("navigator.clipboard.readText()") == button.get_attribute("data-copy")


def test_every_control_has_a_name_and_takes_focus(tab):
    names = tab.page.evaluate(
        """[...document.querySelectorAll("select, input, button")].map((node) => [
            (node.labels?.[0]?.textContent ?? "") + node.textContent + (node.ariaLabel ?? ""), node.tabIndex])"""
    )
    assert len(names) > 20
    assert [node for node in names if not node[0].strip() or node[1] < 0] == []


def test_prints_on_white(tab):
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    ink = tab.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()")
    assert ink == "#ffffff"
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")


def test_contrast_of_text_and_methods():
    """What carries text stands out from its paper by 4.5 to 1, methods (symbols and small labels) by 4.4, bars by 2."""
    css = (HERE / "page.css").read_text()
    light, dark = re.findall(r":root(?::not\(\[data-theme=\"light\"\]\))? \{(.*?)\}", css, re.S)

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for theme in (light, dark):
        colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", theme))
        needed = dict.fromkeys(("ink", "soft", "good", "bad", "link"), 4.5)
        needed |= {name: 4.4 if name[0] == "m" else 2 for name in colours if re.fullmatch("[mk][0-9]", name)}
        assert len(needed) == 18
        for name, least in needed.items():
            low, high = sorted((luminance(colours[name]), luminance(colours["paper"])))
            assert (high + 0.05) / (low + 0.05) >= least, f"--{name}: {colours[name]}"
