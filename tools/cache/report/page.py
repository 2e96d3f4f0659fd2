# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page that needs nothing else: no script, no font, no picture outside."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.cache.report.chart import Chart, Table
from tools.cache.report.coverage_picture import CoverageMap, draw_coverage
from tools.cache.report.sequences import Detokenize, Entry
from tools.cache.report.sequences import Sequence as Tokens

_TABLE_POSITIONS = 48


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page; *body* is HTML."""

    name: str
    title: str
    body: str


def page(title: str, lead: str, sections: Iterable[Section], numbers: str) -> str:
    """Return the page.

    Args:
        title: Its title.
        lead: A sentence under it.
        sections: Its parts.
        numbers: JSON of what it shows, for scripts.
    """
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    parts = "".join(
        f'<section id="{part.name}-section"><h2>{escape(part.title)}</h2>{part.body}</section>\n'
        for part in sections
    )
    # A script of this type is data, and < must not end it.
    data = numbers.replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<header><h1>{escape(title)}</h1>"
        f"<p>{escape(lead)}</p></header>\n<main>\n{parts}</main>\n"
        f'<script type="application/json" id="numbers">{data}</script>\n</body>\n</html>\n'
    )


def tiles(values: Iterable[tuple[str, str]]) -> str:
    """Return the few numbers that matter most, each with its name."""
    body = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in values
    )
    return f'<ul class="tiles">{body}</ul>'


def columns(parts: Iterable[str]) -> str:
    """Return parts side by side where there is room."""
    return f'<div class="columns">{"".join(parts)}</div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a table."""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="facts"><tbody>{body}</tbody></table>'


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def words(name: str, command: str) -> str:
    """Return a command."""
    return f'<p class="note">{escape(name)} <code>{escape(command)}</code></p>'


def table(content: Table, caption: str, kind: str = "") -> str:
    """Return a table whose first column names the rows."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.head)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in content.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def charts(content: Sequence[Chart | None]) -> str:
    """Return charts side by side where there is room."""
    return f'<div class="charts">{"".join(_figure(chart) for chart in content if chart)}</div>'


def _figure(chart: Chart) -> str:
    legend = "".join(
        f'<li><i class="s{series}"></i>{escape(name)}</li>' for series, name in chart.legend
    )
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    numbers = ""
    if chart.table is not None:
        name = f"Numbers: {chart.title}"
        numbers = f"<details><summary>Numbers</summary>{table(chart.table, name)}</details>"
    return (
        f"<figure><h3>{escape(chart.title)}</h3>{legend}{chart.plot.svg()}"
        f"<figcaption>{paragraph(chart.text)}</figcaption>{numbers}</figure>"
    )


def coverage(found: CoverageMap) -> str:
    """Return the picture of the coverage with its legend."""
    legend = "".join(
        f'<li><i class="{state.name.lower()}"></i>{escape(state.words)}</li>'
        for state in found.found
    )
    return f'<figure><ul class="legend">{legend}</ul>{draw_coverage(found)}</figure>'


def sequence(tokens: Tokens, text_of: Detokenize) -> str:
    """Return a sequence as its first entries, shaded by probability, with a table of the others."""
    chips = "".join(
        _chip(position, entries, text_of) for position, entries in enumerate(tokens.positions, 1)
    )
    ranks = max(map(len, tokens.positions), default=0)
    rows = [
        (
            str(position),
            *(f"{_shown(text_of(entry.token))}  {entry.probability:.3f}" for entry in entries),
            *[""] * (ranks - len(entries)),
            f"{kept:.3f}",
        )
        for position, (entries, kept) in enumerate(
            itertools.islice(zip(tokens.positions, tokens.kept, strict=True), _TABLE_POSITIONS), 1
        )
    ]
    head = ("position", *(f"entry {rank}" for rank in range(1, ranks + 1)), "kept mass")
    name = f"First entries of the leading positions of sample {tokens.sample}"
    return (
        f'<figure><h3>Sample {tokens.sample}</h3><p class="tokens">{chips}</p><details>'
        f"<summary>First entries by position</summary>"
        f"{table(Table(head=head, rows=rows), name, 'entries')}</details></figure>"
    )


def _chip(position: int, entries: list[Entry], text_of: Detokenize) -> str:
    if not entries:
        return "<span>∅</span>"
    tip = f"position {position}\n" + "\n".join(
        f"{entry.probability:.3f}  {_shown(text_of(entry.token))}" for entry in entries
    )
    return (
        f'<span style="--p:{entries[0].probability:.3f}" title="{escape(tip)}">'
        f"{escape(_shown(text_of(entries[0].token)))}</span>"
    )


def _shown(text: str) -> str:
    """Return the text of a token with those blanks made visible that are no space."""
    return text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍") or "∅"
