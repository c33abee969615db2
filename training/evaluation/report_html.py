"""An evaluation report as one HTML page that needs nothing beside it: no script, no address, its
plots within."""

import base64
import re
from collections.abc import Mapping
from html import escape

from training.evaluation.report_text import Block, Plot, Table

# what a browser lets the page load
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .6rem; }
h2 { border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
.table { overflow-x: auto; margin-bottom: 1em; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .7rem; text-align: left; white-space: nowrap; }
th { background: #f4f4f4; }
tr:hover td { background: #fafafa; }
figure { margin: 1.5rem 0; }
figcaption { color: #666; }
img { max-width: 100%; height: auto; }
code { background: #f2f2f2; padding: 0 .2rem; }
"""


def page(title: str, parts: list[Block], files: Mapping[str, bytes]) -> str:
    """Return the page; `files` has the plots as PNG."""
    body = "\n".join(_block(part, files) for part in parts)
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Evidence: {escape(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        *head,
        "</head>",
        "<body>",
        body,
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _block(part: Block, files: Mapping[str, bytes]) -> str:
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Plot):
        data = base64.b64encode(files[part.file]).decode()
        name = escape(part.name)
        return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"><figcaption>{name}</figcaption></figure>'
    heading = re.match(r"(#{1,4}) ", part)
    if heading:
        level = len(heading[1])
        return f"<h{level}>{_inline(part[level + 1 :])}</h{level}>"
    return f"<p>{_inline(part)}</p>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _inline(text: str) -> str:
    """Return text with what is between backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
