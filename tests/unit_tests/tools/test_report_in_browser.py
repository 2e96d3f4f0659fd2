# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: nothing is complained of, and the pictures show the numbers."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.distillation.payload import LOGPROB_SENTINEL
from tests.browser import MISSING, Page, browser_page, find_browser
from tests.unit_tests.tools.report_caches import write_teacher_shard
from tools import logits_cache
from tools.cache.report.statistics import P_GRID

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)

POINTS = """
(() => {
  const svg = document.getElementById(%(chart)s);
  const seen = element => {
    const box = element.getBoundingClientRect();
    return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  };
  const ticks = axis => [...svg.querySelectorAll(`text.tick.${axis}`)]
    .map(text => [text.textContent, ...seen(text)]).filter(tick => tick[0]);
  const path = svg.querySelector(%(path)s);
  const points = path.getAttribute('d').match(/-?[\\d.]+ -?[\\d.]+/g).map(pair => {
    const [x, y] = pair.split(' ').map(Number);
    const at = new DOMPoint(x, y).matrixTransform(path.getScreenCTM());
    return [at.x, at.y];
  });
  return {points, x: ticks('x'), y: ticks('y')};
})()
"""
"""Where a line goes on the screen, and where the words of the axes stand beside it."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


class Drawn:
    """A report of a cache, and the probabilities of all entries that were written, ``(T, K)``."""

    def __init__(self, directory: Path, *, p: float | None = None) -> None:
        self.cache = directory / "cache"
        written = [
            rows
            for start in range(0, 48, 8)
            for rows in write_teacher_shard(self.cache, start, start + 8, dp=2, p=p)
        ]
        values = torch.cat([rows.values.double().flatten(0, 1) for rows in written])
        self.p = torch.where(values == LOGPROB_SENTINEL, 0.0, values.exp())
        self.page = directory / "page.html"

    def make(self) -> str:
        """Make the page; return its URL."""
        words = ["report", str(self.cache), "--out", str(self.page), "--jobs", "1"]
        assert logits_cache.main(words) == 0
        return self.page.as_uri()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    drawn = Drawn(tmp_path_factory.mktemp("whole"))
    drawn.make()
    return drawn


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """With top-P, a missing shard, a cut one and one that overlaps two others."""
    drawn = Drawn(tmp_path_factory.mktemp("damaged"), p=0.9)
    (drawn.cache / "dp0__8-16.tar").unlink()
    cut = drawn.cache / "dp1__24-32.tar"
    cut.write_bytes(cut.read_bytes()[:700])
    other = drawn.cache.with_name("other")
    write_teacher_shard(other, 36, 44, dp=2, p=0.9)
    shutil.copy(other / "dp0__36-44.tar", drawn.cache)
    drawn.make()
    return drawn


def read_points(page: Page, chart: str, path: str) -> list[tuple[float, float]]:
    """Return the points of a line as the words beside the axes tell them.

    Along K the axis is logarithmic. That of P is none: there x stays where it is on the screen.
    """
    found = page.evaluate(POINTS % {"chart": json.dumps(chart), "path": json.dumps(path)})

    def scale(ticks: list[Any], place: int, is_log: bool) -> Any:
        first, *_, last = ticks
        low, high = (math.log(float(t[0])) if is_log else float(t[0]) for t in (first, last))
        for tick in ticks:  # all ticks are where their words say
            value = math.log(float(tick[0])) if is_log else float(tick[0])
            share = (value - low) / (high - low)
            expected = first[place] + share * (last[place] - first[place])
            assert tick[place] == pytest.approx(expected, abs=1.0)

        def value_at(pixel: float) -> float:
            share = (pixel - first[place]) / (last[place] - first[place])
            value = low + share * (high - low)
            return math.exp(value) if is_log else value

        return value_at

    y = scale(found["y"], 2, False)
    if chart != "kept-mass":
        return [(left, y(top)) for left, top in found["points"]]
    x = scale(found["x"], 1, True)
    return [(x(left), y(top)) for left, top in found["points"]]


# ---- the browser tells of what is wrong --------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("<script>missing.call()</script>", "exception: ReferenceError"),
        ("<script>console.error('bad', 7)</script>", "console.error: bad 7"),
        ("<script>Promise.reject(Error('late'))</script>", "late"),
        ("<img src='nowhere.png'>", "request failed: net::ERR_FILE_NOT_FOUND"),
        ("<link rel='stylesheet' href='nowhere.css'>", "ERR_FILE_NOT_FOUND"),
        ("<script src='nowhere.js'></script>", "ERR_FILE_NOT_FOUND"),
    ],
)
def test_a_broken_page_is_found_out(browser, tmp_path, body, complaint):
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><link rel='icon' href='data:,'><p>text</p>{body}")
    assert any(complaint in said for said in browser.open(page.as_uri()))
    page.write_text("<!doctype html><link rel='icon' href='data:,'><p>text</p>")
    assert browser.open(page.as_uri()) == []


# ---- the page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["whole", "damaged"])
def test_nothing_is_complained_of_and_nothing_else_loaded(browser, request, tmp_path, name, dark):
    url = request.getfixturevalue(name).page.as_uri()
    browser.show(dark=dark)
    assert browser.open(url) == []
    assert browser.requests() == [url]
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert browser.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("width", [360, 800, 1280, 2000])
def test_it_fits_into_any_window(browser, damaged, width):
    browser.show(width=width)
    browser.open(damaged.page.as_uri())
    browser.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.show()


CONTRASTS = """
(() => {
  const probe = document.createElement('canvas').getContext('2d');
  const light = colour => {
    probe.fillStyle = colour;
    const linear = [1, 3, 5].map(at => parseInt(probe.fillStyle.slice(at, at + 2), 16) / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const style = (name, what) => getComputedStyle(document.querySelector(name))[what];
  const panel = style('figure', 'backgroundColor');
  const texts = ['h1', 'header p', '.facts th', '.facts td', 'summary', 'thead th', 'td']
    .map(name => [name, contrast(style(name, 'color'), style('body', 'backgroundColor'))]);
  const inPictures = ['text.tick', 'text.title', 'text.word']
    .map(name => [name, contrast(style(name, 'fill'), panel)]);
  const lines = ['.line.s1', '.line.s2', '.line.s3', '.line.s4']
    .map(name => [name, contrast(style(name, 'stroke'), panel)]);
  return {texts: [...texts, ...inPictures], lines};
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_and_lines_stand_out(browser, whole, dark):
    """By the contrast ratios that WCAG asks for: 4.5 of text, 3 of graphics."""
    browser.show(dark=dark)
    browser.open(whole.page.as_uri())
    found = browser.evaluate(CONTRASTS)
    browser.show()
    assert len(found["texts"]) == 10
    assert [name for name, ratio in found["texts"] if ratio < 4.5] == []
    assert [name for name, ratio in found["lines"] if ratio < 3] == []


def test_pictures_and_tables_are_told_to_those_who_cannot_see(browser, damaged):
    browser.open(damaged.page.as_uri())
    pictures = "[...document.querySelectorAll('svg')]"
    labels = browser.evaluate(f"{pictures}.map(svg => svg.getAttribute('aria-label'))")
    assert len(labels) == len(set(labels)) >= 13
    assert browser.evaluate(f"{pictures}.every(svg => svg.getAttribute('role') == 'img')")
    heads = "[...document.querySelectorAll('th')]"
    assert browser.evaluate(f"{heads}.length") > 50
    assert browser.evaluate(f"{heads}.every(th => ['row', 'col'].includes(th.scope))")


# ---- pictures show the numbers -----------------------------------------------------------------


def test_the_curves_of_kept_mass_are_those_of_the_entries(browser, whole):
    def quantile(kept: torch.Tensor, q: float) -> float:
        return kept.sort().values[math.ceil(q * len(kept)) - 1].item()

    browser.open(whole.page.as_uri())
    for series, expected in (
        ("mean", lambda kept: kept.mean().item()),
        ("p5", lambda kept: quantile(kept, 0.05)),
        ("p50", lambda kept: quantile(kept, 0.5)),
        ("p95", lambda kept: quantile(kept, 0.95)),
    ):
        points = read_points(browser, "kept-mass", f'path[data-series="{series}"]')
        assert [round(x) for x, _ in points] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
        for x, y in points:
            k = round(x)
            assert x == pytest.approx(k, rel=0.01)
            # A pixel is a 250th, and quantiles are within their bins.
            assert y == pytest.approx(expected(whole.p[:, :k].sum(dim=1)), abs=0.008)


def test_the_curve_of_entries_under_top_p_is_that_of_the_entries(browser, whole):
    browser.open(whole.page.as_uri())
    points = read_points(browser, "top-p", 'path[data-series="mean"]')
    before = whole.p.cumsum(dim=1) - whole.p
    expected = [(before < p).sum(dim=1).double().mean().item() for p in P_GRID]
    assert [y for _, y in points] == pytest.approx(expected, abs=0.08)


def test_bars_are_as_high_as_there_are_tokens(browser, tmp_path):
    drawn = Drawn(tmp_path, p=0.9)
    browser.open(drawn.make())
    found = browser.evaluate("""
    (() => {
      const svg = document.getElementById('entries');
      const ticks = [...svg.querySelectorAll('text.tick.y')].map(text => {
        const box = text.getBoundingClientRect();
        return [Number(text.textContent), (box.top + box.bottom) / 2];
      });
      const bars = [...svg.querySelectorAll('rect.bar')].map(bar => {
        const box = bar.getBoundingClientRect();
        return [bar.querySelector('title').textContent, box.top, box.bottom];
      });
      return {ticks, bars};
    })()
    """)
    (low, bottom), *_, (high, top) = found["ticks"]
    shares = torch.bincount((drawn.p > 0).sum(dim=1), minlength=13)[1:] / len(drawn.p)
    assert len(found["bars"]) == 12
    for share, (title, begin, end) in zip(shares.tolist(), found["bars"], strict=True):
        value = low + (bottom - begin) / (bottom - top) * (high - low)
        assert value == pytest.approx(share, abs=0.006)
        assert end == pytest.approx(bottom, abs=2)
        assert f"{share:.2%} of tokens" in title


def test_cells_of_the_coverage_are_where_the_damage_is(browser, damaged):
    browser.open(damaged.page.as_uri())
    found = browser.evaluate("""
    (() => {
      const svg = document.getElementById('coverage');
      const middle = element => {
        const box = element.getBoundingClientRect();
        return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
      };
      const ticks = [...svg.querySelectorAll('text.tick')]
        .map(text => [Number(text.textContent), ...middle(text), text.classList.contains('x')]);
      const cells = [...svg.querySelectorAll('rect.cell')].map(cell => {
        const box = cell.getBoundingClientRect();
        return [box.left, box.right, middle(cell)[1], getComputedStyle(cell).fill];
      });
      const legend = [...svg.parentElement.querySelectorAll('.legend li')]
        .map(item => [getComputedStyle(item.querySelector('i')).backgroundColor,
                      item.textContent]);
      return {ticks, cells, legend};
    })()
    """)
    samples = [(value, x) for value, x, _, is_sample in found["ticks"] if is_sample]
    ranks = {value: y for value, _, y, is_sample in found["ticks"] if not is_sample}
    (first, left), *_, (last, right) = samples
    meaning = dict(found["legend"])
    assert len(meaning) == len(found["legend"]) == 4
    shown = []
    for begin, end, y, colour in found["cells"]:
        span = [round(first + (x - left) / (right - left) * (last - first)) for x in (begin, end)]
        rank = min(ranks, key=lambda rank: abs(ranks[rank] - y))
        if meaning[colour] != "complete":
            shown.append((rank, *span, meaning[colour]))
    assert shown == [
        (0, 8, 16, "missing"),
        (0, 36, 44, "in two shards of one rank"),
        (1, 24, 32, "damaged shard"),
    ]
