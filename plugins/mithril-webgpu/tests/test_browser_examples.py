"""The examples for browsers train, write their sites, and work in Chromium on both devices."""

import json
import os

import pytest
from browsers import in_chromium, needs_chromium, needs_zig

pytestmark = pytest.mark.no_device
SMALL = {"progress": False, "webassembly": "MITHRIL_TEST_BROWSER" in os.environ}  # zig takes most of the time


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    return tmp_path_factory.mktemp("sites")


def test_digits(sites):
    pytest.importorskip("sklearn")
    from digits_in_browser import write

    assert write(sites / "digits", 2, **SMALL) > 0.5


def test_search(sites, monkeypatch):
    import search_in_browser
    from search_in_browser import World, tokens, write

    monkeypatch.setattr(search_in_browser, "LAYERS", 1)
    share, _ = write(sites / "search", 60, queries=25, **SMALL)
    assert share > 0.2  # one in 20 by chance
    assert json.loads((sites / "search/texts.json").read_text())["words"][tokens("unheard LAPTOP,")[1]] == "laptop"
    meaning = World(seed=5).meaning(held_out=True)
    assert len({World(seed).express(meaning) for seed in range(20)}) > 5


def test_stories(sites, monkeypatch):
    import stories_in_browser
    from stories_in_browser import STORIES, is_right, write

    monkeypatch.setattr(stories_in_browser, "LAYERS", 1)
    write(sites / "stories", 20, stories=1, **SMALL)
    assert all(map(is_right, STORIES[:100]))
    assert not is_right("Mia has a red kite. Mia takes the blue kite home.\n")
    assert not is_right(STORIES[0].replace(".", " tand.", 1))


# The page of each site, and the name of the report that it writes at the end.
PAGES = {
    "digits": ("draw.html", "ready"),
    "search": ("search.html?query=a+kitten", "first"),
    "stories": ("stories.html?write", "story"),
}
FRAME = """<iframe id="frame"></iframe><script type="module">
const frame = document.getElementById('frame'), reports = {};
const data = async (address, name) => {
  frame.src = address;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    const { contentWindow: page, contentDocument: shown } = frame, found = shown?.documentElement.dataset[name];
    if (page.location.href.endsWith(address) && found) return found;
  }
};
for (const [site, [page, name]] of Object.entries(PAGES)) {
  reports[site] = [JSON.parse(await data(`${site}/index.html`, 'results')), await data(`${site}/${page}`, name)];
}
fetch('/found?' + encodeURIComponent(JSON.stringify(reports)));
</script>"""


@needs_zig
@needs_chromium
def test_the_pages_work_in_chromium(sites, tmp_path):
    pages = {name: page for name, page in PAGES.items() if (sites / name).exists()}
    reports = in_chromium(FRAME.replace("PAGES", json.dumps(pages)), sites, tmp_path, limit=400)
    assert {"search", "stories"} <= {*reports}
    for name, (checks, _) in reports.items():
        assert [row["device"] for row in checks] == ["webgpu", "wasm"], name
        assert all(row["good"] is True for row in checks), (name, checks)
    assert reports["search"][1] in json.loads((sites / "search/texts.json").read_text())["sentences"]
    assert reports["stories"][1].startswith("Mia has a ") and len(reports["stories"][1]) > 10
