"""One HTML page without scripts and without network: text, tables, pictures."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fedjax_hk.report.plots import INK

_FLAG = re.compile(r"(?<![\w-])(--[a-z_]+(?:=[\w.+-]+)?)")

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --paper: #fff; --soft: #f1f4f7;
  --line: #d3dae1; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --paper: #12181f; --soft: #1c252e; --line: #35414d; --accent: #6cbcec; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 46rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 2rem 0 .3rem; }
a { color: var(--accent); }
.answer { background: var(--soft); border-left: 4px solid var(--accent); padding: .6rem 1rem;
  margin: 1rem 0; }
.answer p { margin: .4rem 0; }
.wide { overflow-x: auto; margin: .6rem 0; }
.wide:focus { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: normal; }
td.text { min-width: 9rem; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; }
th { vertical-align: bottom; }
td.number, td.short, td code { white-space: nowrap; }
details { margin: .8rem 0; }
figure { margin: .5rem 0 1.5rem; max-width: 36rem; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figcaption { font-size: .9rem; margin-top: .4rem; }
code { font-size: .9em; }
.note { border-left: 4px solid #d55e00; padding-left: 1rem; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole document; `parts` are HTML already."""
    # The empty icon keeps browsers from asking for one.
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: Any) -> str:
    """Text that cannot become markup."""
    return html.escape(str(text), quote=True)


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraphs(texts: Iterable[str], kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return "\n".join(f"<p{mark}>{escape(text)}</p>" for text in texts if text)


def bullets(texts: Iterable[str]) -> str:
    """A list; words that begin with two dashes are flags and set as code."""
    items = "\n".join(f"<li>{text}</li>" for text in map(_marked, texts))
    return f"<ul>\n{items}\n</ul>" if items else ""


def table(rows: Sequence[Sequence[Any]], header: Sequence[str], label: str) -> str:
    """A table that scrolls sideways in its own box where it is too wide.

    A column is right-aligned if all its cells are numbers.
    """
    if not rows:
        return ""
    mark = [f'class="{_kind(column)}"' for column in zip(*rows, strict=True)]
    head = "".join(
        f'<th scope="col" {m}>{escape(name)}</th>' for m, name in zip(mark, header, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(f"<td {m}>{_marked(c)}</td>" for m, c in zip(mark, row, strict=True))
        + "</tr>"
        for row in rows
    )  # fmt: skip
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def details(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{inside}\n</details>"


def figure(svg: str, title: str, caption: str, alt: str) -> str:
    """A picture in the page's own ink.

    Args:
      svg: from `plots.to_svg`.
      alt: what it shows, for those who cannot see it.
    """
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    root, rest = svg.split(">", 1)
    root = re.sub(r' (width|height)="[^"]*"', "", root)
    return (
        f'<h3>{escape(title)}</h3>\n<figure>\n{root} role="img" aria-label="{escape(alt)}">{rest}\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>"
    )


def _marked(text: Any) -> str:
    """Escaped, and flags set as code."""
    return _FLAG.sub(r"<code>\g<1></code>", escape(text))


def _kind(column: Sequence[Any]) -> str:
    if all(map(_is_number, column)):
        return "number"
    return "text" if max(len(str(cell)) for cell in column) > 14 else "short"


def _is_number(cell: Any) -> bool:
    text = str(cell).removesuffix(" %").replace(",", "")
    try:
        float(text)
    except ValueError:
        return text in ("", "-")
    return True
