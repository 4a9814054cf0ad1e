"""The report as a reader meets it: offline, in Chromium, with mouse, keyboard and both themes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Request
from playwright.sync_api import Page as Tab

from harness.builders import kernel_record, serving_record
from prefixbench.report.build import Selected, build, write
from prefixbench.report.view import Page
from report.synthetic import kernels, sweep

pytestmark = pytest.mark.browser

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
HOSTILE = '</script><img src=x onerror="window.hacked=1">{{7*7}}<b>&amp;\u2028'


@pytest.fixture(scope="module")
def page() -> Page:
    records = sweep(prefixes=(128, 8192), concurrencies=(8, 32), launches=2) + kernels(batches=(16, 256), groups=(1, 4))
    records += [kernel_record("flashinfer-decode", launch, l2="cold", layout="shared-slots") for launch in range(2)]
    return build("browser", Selected("latest", tuple(records)))


@pytest.fixture(scope="module")
def file(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(page, tmp_path_factory.mktemp("report"))


class Trouble:
    """What must not happen: console messages, uncaught errors, requests for anything but the file itself."""

    def __init__(self, tab: Tab) -> None:
        self.seen: list[str] = []
        tab.on("console", self._console)
        tab.on("pageerror", lambda error: self.seen.append(f"error: {error}"))
        tab.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.seen.append(f"console {message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith(("file:", "blob:", "data:")):
            self.seen.append(f"request: {request.url}")


def open_tab(browser: Browser, file: Path, **settings: object) -> tuple[Tab, Trouble]:
    """The report in a context of its own, without a network."""
    context = browser.new_context(offline=True, **({"viewport": DESKTOP, "color_scheme": "light"} | settings))
    context.set_default_timeout(120_000)
    tab = context.new_page()
    trouble = Trouble(tab)
    tab.goto(file.as_uri())
    tab.wait_for_selector(".plot .main-svg")
    return tab, trouble


@pytest.fixture(scope="module")
def shared(chromium: Browser, file: Path) -> Iterator[tuple[Tab, Trouble]]:
    tab, trouble = open_tab(chromium, file)
    yield tab, trouble
    tab.context.close()


@pytest.fixture
def tab(shared: tuple[Tab, Trouble]) -> Iterator[Tab]:
    """One tab for the tests that each keep to a part of the page."""
    tab, trouble = shared
    yield tab
    assert trouble.seen == []


@pytest.fixture
def fresh(chromium: Browser, file: Path, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A tab for a test that changes the whole page; parametrize indirectly for another screen."""
    tab, trouble = open_tab(chromium, file, **getattr(request, "param", {}))
    yield tab
    assert trouble.seen == []
    tab.context.close()


def test_it_opens_offline_and_every_visible_chart_is_drawn(tab: Tab, file: Path) -> None:
    assert file.stat().st_size < 5_000_000
    drawn = tab.evaluate(
        """[...document.querySelectorAll('.plot')].filter(p => p.offsetParent)
           .map(p => [p.dataset.figure ?? 'amdahl', p.querySelectorAll('.main-svg').length, p.clientWidth])"""
    )
    assert len(drawn) > 8
    assert all(layers > 0 and width > 200 for _, layers, width in drawn)


def test_every_name_in_the_page_is_used_once(tab: Tab) -> None:
    names = tab.evaluate("[...document.querySelectorAll('[id]')].filter(e => !e.closest('svg')).map(e => e.id)")
    assert sorted(names) == sorted(set(names))


def test_every_colour_of_a_figure_has_a_role_in_both_themes(tab: Tab, page: Page) -> None:
    figures = json.dumps([chart.figure for chart in page.charts()])
    roles = sorted(set(re.findall(r'"\$([a-z-]+)"', figures)))
    assert "peer" in roles
    known = tab.evaluate(
        "roles => roles.filter(r => getComputedStyle(document.documentElement).getPropertyValue('--' + r))", roles
    )
    assert known == roles


def test_the_headline_and_tables_say_what_the_page_says(tab: Tab, page: Page) -> None:
    assert tab.inner_text("#headline-figure") == page.headline.figure
    assert tab.inner_text(".headline .sentence") == page.headline.sentence
    for table in page.tables():
        shown = tab.evaluate(
            """id => [...document.getElementById(id).tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent))""",
            table.id,
        )
        assert len(shown) == len(table.rows)
        for row, cells in zip(shown, table.rows, strict=True):
            for text, cell in zip(row, cells, strict=True):
                assert ("missing" in text) if cell.missing else text.strip() == cell.text.strip()


def test_embedded_figures_are_those_of_the_page(tab: Tab, page: Page) -> None:
    embedded = json.loads(tab.evaluate("document.getElementById('payload').textContent"))
    assert set(embedded["figures"]) == {chart.id for chart in page.charts()}
    for chart in page.charts():
        ours = [trace.get("y") for trace in chart.figure["data"]]
        assert [trace.get("y") for trace in embedded["figures"][chart.id]["data"]] == ours


def test_the_sliders_predict_by_amdahl(tab: Tab, page: Page) -> None:
    widget = next(widget for widget in page.widgets() if widget.name == "amdahl")
    speedup = tab.locator("#amdahl [data-out=speedup]")
    f, s = widget.data["f"], widget.data["s"]
    assert float(speedup.inner_text().rstrip("×")) == pytest.approx(1 / (1 - f + f / s), rel=0.02)
    tab.fill("#amdahl-curve-f", "0.6")
    tab.fill("#amdahl-curve-s", "15.6")
    assert speedup.inner_text() == "2.28×"
    assert "at most 2.50×" in tab.inner_text("#amdahl [data-out=limit]")
    assert tab.evaluate("document.querySelector('#amdahl .plot').data[0].name") == "predicted at f = 60.0%"
    tab.click("#amdahl [data-go=reset]")
    assert float(tab.input_value("#amdahl-curve-f")) == pytest.approx(f, abs=0.005)


def test_the_slider_moves_by_keyboard(tab: Tab) -> None:
    before = tab.inner_text("#amdahl [data-out=f]")
    tab.focus("#amdahl-curve-f")
    tab.keyboard.press("ArrowLeft")
    assert tab.inner_text("#amdahl [data-out=f]") != before


def test_placement_steps_through_the_events_of_the_trace(tab: Tab, page: Page) -> None:
    events = next(widget for widget in page.widgets() if widget.id == "flow-0").data["events"]
    readout = tab.locator("#flow-0 .readout")
    assert events[0]["title"] in readout.inner_text()
    tab.click("#flow-0 [data-go=next]")
    assert f"2 of {len(events)}" in readout.inner_text()
    assert events[1]["detail"] in readout.inner_text()
    assert tab.evaluate("document.querySelector('#flow-0 .flow .on').dataset.step") == "contiguous"
    tab.click("#flow-0 [data-go=last]")
    assert events[-1]["title"] in readout.inner_text()
    assert tab.is_disabled("#flow-0 [data-go=next]")
    alive = tab.evaluate("[...document.querySelectorAll('#flow-0 .nodes li')].map(n => n.textContent)")
    assert "node 1 · 4,096" in alive, "the split left half of it"
    assert not any(text.startswith("node 2 ") for text in alive), "evicted"
    tab.click("#flow-0 [data-go=back]")
    assert tab.is_enabled("#flow-0 [data-go=next]")


def test_the_pool_tells_what_lies_under_the_pointer(tab: Tab) -> None:
    readout = tab.locator("#pool-0 .readout")
    tab.hover("#pool-0 [data-when=after] rect.prefix-run >> nth=2")
    assert readout.inner_text() == "Contiguous prefix: node 1, 8,192 tokens, slots 1 to 8,192, 32 users (after)"
    assert tab.locator("#pool-0 [data-when=after] rect.on").count() > 1, "every row of the run is marked"
    tab.hover("#pool-0 [data-when=after] rect.pages >> nth=0")
    assert readout.inner_text().startswith("Pages: node 2, 33 tokens")


def test_the_pool_is_read_by_keyboard(tab: Tab) -> None:
    tab.focus("#pool-0 [data-when=after]")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#pool-0 .readout").startswith("Contiguous prefix: node 1")


def test_another_launch_is_picked_in_both_sections_at_once(tab: Tab, page: Page) -> None:
    other = next(widget for widget in page.widgets() if widget.id == "pool-3")
    tab.select_option("#pool-launch", "pool-3")
    assert tab.is_hidden("#pool-0")
    assert other.caption in tab.inner_text("#pool-3")
    assert tab.locator("#pool-3 [data-when=after] rect").count() > 3, "drawn when it is first seen"
    assert tab.is_visible("#flow-3")
    assert tab.input_value("#flow-launch") == "flow-3"
    tab.click("#flow-3 [data-go=next]")
    assert "2 of " in tab.inner_text("#flow-3 .readout")
    tab.select_option("#flow-launch", "flow-0")
    assert tab.is_visible("#pool-0")


def test_the_dispatcher_map_answers_a_pointer(tab: Tab) -> None:
    tab.locator("#map-0").scroll_into_view_if_needed()
    box = tab.locator("#map-0 .points path >> nth=0").bounding_box()
    assert box
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.wait_for_selector("#map-0 .hoverlayer .hovertext")
    assert "M_eff" in (tab.text_content("#map-0 .hoverlayer") or "")


def test_the_yardstick_switch_changes_chart_and_shares(tab: Tab, page: Page) -> None:
    option = "[data-option=attribution-{}]"
    assert tab.is_visible(option.format("throughput"))
    tab.locator("[data-switch=yardstick] label", has_text="Time per token").click()
    assert tab.is_hidden(option.format("throughput"))
    assert tab.is_visible(option.format("time-per-token"))
    chart = next(chart for chart in page.charts() if chart.id == "attribution-time-per-token")
    ticks = tab.evaluate(
        "[...document.querySelectorAll('#attribution-time-per-token .xtick text')].map(t => t.textContent)"
    )
    assert chart.table.rows[0][2].text in "".join(ticks)


def test_switches_of_one_family_move_together(tab: Tab) -> None:
    tab.locator("[data-switch=throughput] label", has_text="32 in flight").click()
    assert tab.is_visible("#throughput-1 .main-svg >> nth=0")
    assert tab.is_visible("#speedup-1 .main-svg >> nth=0")
    assert tab.is_checked("[data-switch=tpot] input[value=tpot-1]")


def test_the_theme_follows_the_system_until_the_button_is_pressed(fresh: Tab) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    bar = "document.querySelector('#path-shares .plot').data[2].marker.color"
    light, before = fresh.evaluate(colour), fresh.evaluate(bar)
    fresh.emulate_media(color_scheme="dark")
    fresh.wait_for_selector("html[data-theme=dark]")
    assert fresh.evaluate(colour) != light
    assert fresh.evaluate(bar) != before, "charts take the colours of the theme"
    fresh.click("#theme")
    assert fresh.evaluate(colour) == light
    assert fresh.evaluate(bar) == before
    fresh.emulate_media(color_scheme="light")
    fresh.emulate_media(color_scheme="dark")
    fresh.wait_for_timeout(50)
    assert fresh.evaluate(colour) == light, "a choice stays"


def test_downloads_are_inside_the_file(tab: Tab, file: Path) -> None:
    with tab.expect_download() as download:
        tab.click("[data-download='report.json']")
    assert json.loads(Path(download.value.path()).read_text()) == json.loads((file.parent / "report.json").read_text())
    with tab.expect_download() as download:
        tab.click("[data-download='launches.csv']")
    assert Path(download.value.path()).read_text().startswith("record_id,")


@pytest.mark.parametrize("fresh", [{"color_scheme": "dark"}], indirect=True)
def test_printing_opens_every_table_and_uses_the_light_theme(fresh: Tab) -> None:
    fresh.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert fresh.evaluate("document.documentElement.dataset.theme") == "light"
    assert fresh.locator("details:not([open])").count() == 0
    widths = fresh.evaluate("[...document.querySelectorAll('.plot .main-svg')].map(svg => svg.clientWidth)")
    assert max(widths) <= 700, "charts fit the paper"
    fresh.evaluate("dispatchEvent(new Event('afterprint'))")
    assert fresh.locator("details[open]").count() == 0
    assert fresh.evaluate("document.documentElement.dataset.theme") == "dark"
    assert len(fresh.pdf()) > 100_000


def test_a_long_table_is_printed_in_part_and_says_so(fresh: Tab) -> None:
    fresh.evaluate("dispatchEvent(new Event('beforeprint'))")
    fresh.emulate_media(media="print")
    rows = "[...document.querySelectorAll('table')].map(t => [...t.tBodies[0].rows].map(row => row.offsetHeight > 0))"
    printed = [table for table in fresh.evaluate(rows) if any(table)]
    assert all(table == [index < 40 for index in range(len(table))] for table in printed)
    assert fresh.locator(".printed-only:visible").all_inner_texts() == [
        f"Printed: the first 40 of {len(table)} rows. All are in the page on a screen, and in report.json."
        for table in printed
        if len(table) > 40
    ]
    assert max(map(len, printed)) > 40, "no table here is long enough to be cut"


@pytest.mark.parametrize(
    "fresh",
    [
        {"viewport": DESKTOP, "color_scheme": "light"},
        {"viewport": PHONE, "color_scheme": "dark"},
    ],
    indirect=True,
    ids=["desktop-light", "phone-dark"],
)
def test_axe_finds_nothing_serious(fresh: Tab) -> None:
    fresh.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    fresh.evaluate(AXE.read_text())
    found = fresh.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        f"{violation['id']}: {violation['help']}: {[node['html'][:120] for node in violation['nodes'][:3]]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []


@pytest.mark.parametrize("fresh", [{"viewport": PHONE}], indirect=True)
def test_a_phone_never_scrolls_sideways(fresh: Tab) -> None:
    assert fresh.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_charts_follow_the_width_of_the_window_and_keep_their_height(fresh: Tab) -> None:
    sizes = """[...document.querySelectorAll('.plot')].filter(p => p.offsetParent).map(
        p => [p.clientWidth, p.querySelector('.main-svg').clientWidth, p.querySelector('.main-svg').clientHeight])"""
    before = fresh.evaluate(sizes)
    fresh.set_viewport_size(PHONE)
    fresh.wait_for_function(
        """width => [...document.querySelectorAll('.plot')].filter(p => p.offsetParent).every(
            p => p.clientWidth <= width && p.querySelector('.main-svg').clientWidth === p.clientWidth)""",
        arg=PHONE["width"],
    )
    after = fresh.evaluate(sizes)
    assert all(drawn == box <= PHONE["width"] for box, drawn, _ in after)
    assert all(new >= old > 150 for (_, _, old), (_, _, new) in zip(before, after, strict=True))


def test_without_javascript_the_numbers_are_there(chromium: Browser, file: Path, page: Page) -> None:
    context = chromium.new_context(java_script_enabled=False, offline=True)
    tab = context.new_page()
    tab.goto(file.as_uri())
    assert tab.inner_text("#headline-figure") == page.headline.figure
    assert "Every number they show is in the table" in tab.content()
    assert tab.locator("#throughput-0-data tbody tr").count() == 10
    context.close()


def test_hostile_strings_in_records_stay_inert(chromium: Browser, tmp_path: Path) -> None:
    records = [
        serving_record(
            path, model=HOSTILE, workload=HOSTILE, labels=(HOSTILE,), flags=(HOSTILE,), cache_state=HOSTILE,
            counter_changes={"reasons": {HOSTILE: 3}}, model_settings={HOSTILE: HOSTILE},
        )
        for path in ("stock", "cascade")
    ]  # fmt: skip
    page = build("<i>name</i>", Selected(HOSTILE, tuple(records)))
    file = write(page, tmp_path)
    tab = chromium.new_page()
    trouble = Trouble(tab)
    tab.goto(file.as_uri())
    tab.wait_for_selector(".plot .main-svg")
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img").count() == 0
    assert tab.locator("script").count() == 3
    assert HOSTILE.replace("\u2028", " ") in tab.inner_text("body").replace("\u2028", " ")
    assert trouble.seen == []
    tab.close()
