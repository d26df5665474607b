"""A hang verdict as one self-contained HTML file with the waits-for picture as SVG: no scripts, nothing fetched."""

from collections.abc import Iterator
from html import escape

from everstep.domain.diagnosis import HangVerdict, Waiting
from everstep.views.diagnosis_text import short_ranks

_ROW_PX, _WIDTH_PX, _BOX_PX, _TOP_PX = 64, 1000, 300, 20
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1040px;padding:0 1rem;color:#1c2330;background:#fff}
h1{font-size:1.3rem;margin:0 0 .5rem}h2{font-size:1rem;margin:1.6rem 0 .4rem}
pre{background:#f3f5f8;padding:.8rem;overflow:auto}
.tag{background:#b3261e;color:#fff;border-radius:4px;padding:.1rem .5rem;font-size:.9rem}.calm{background:#2e7d32}
svg{width:100%;height:auto}text{font:13px system-ui,sans-serif;fill:#1c2330}.small{font-size:11px;fill:#556}
.waits{fill:#e8f0fe;stroke:#4a6fb5}.cause{fill:#fde7e5;stroke:#b3261e}.link{stroke:#556;fill:none;marker-end:url(#head)}
"""


def diagnosis_html(verdict: HangVerdict) -> str:
    """The whole document."""
    calm = " calm" if verdict.trouble.value in {"healthy", "slow"} else ""
    tag = escape(verdict.trouble.value.upper().replace("_", " "))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>everstep diagnose</title>",
        f"<style>{_STYLE}</style>",
        f'<h1><span class="tag{calm}">{tag}</span> {escape(_who(verdict))}</h1>',
        f"<p>{escape(verdict.reason)}</p>",
        *_list("Evidence", verdict.evidence),
    ]
    if verdict.stack:
        parts.append(f"<h2>Stack</h2><pre>{escape(chr(10).join(verdict.stack))}</pre>")
    if verdict.waits:
        parts.append(f"<h2>Who waits for whom</h2>{''.join(_picture(verdict))}")
    if verdict.last_agreed:
        parts.append(f"<h2>Last agreed</h2><p>{escape(verdict.last_agreed)}</p>")
    parts += _list("Other explanations", [f"{o.trouble.value.upper()}: {o.reason}" for o in verdict.alternatives])
    parts += _list("Missing", verdict.missing)
    return "\n".join(parts) + "\n"


def _who(verdict: HangVerdict) -> str:
    if verdict.ranks:
        return f"{'rank' if len(verdict.ranks) == 1 else 'ranks'} {short_ranks(verdict.ranks)} of {verdict.rank_count}"
    return f"{verdict.rank_count} ranks"


def _list(title: str, texts: tuple[str, ...] | list[str]) -> list[str]:
    if not texts:
        return []
    return [f"<h2>{escape(title)}</h2><ul>", *(f"<li>{escape(text)}</li>" for text in texts), "</ul>"]


def _picture(verdict: HangVerdict) -> Iterator[str]:
    height = _TOP_PX * 2 + _ROW_PX * len(verdict.waits)
    yield f'<svg viewBox="0 0 {_WIDTH_PX} {height}" role="img" aria-label="who waits for whom">'
    yield (
        '<defs><marker id="head" markerWidth="9" markerHeight="7" refX="9" refY="3.5" orient="auto">'
        '<path d="M0,0 L9,3.5 L0,7 z" fill="#556"/></marker></defs>'
    )
    culprits = set(verdict.ranks)
    for row, arrow in enumerate(verdict.waits):
        yield from _row(arrow, _TOP_PX + row * _ROW_PX, guilty=bool(culprits.intersection(arrow.missing)))
    yield "</svg>"


def _row(arrow: Waiting, top: int, *, guilty: bool) -> Iterator[str]:
    middle, right = top + 22, _WIDTH_PX - _BOX_PX - 2
    yield from _box(2, top, "waits", f"{short_ranks(arrow.waiting)}")
    yield f'<text x="{_WIDTH_PX // 2}" y="{middle - 6}" text-anchor="middle">{escape(arrow.operation)}</text>'
    yield f'<text class="small" x="{_WIDTH_PX // 2}" y="{middle + 15}" text-anchor="middle">{escape(arrow.why)}</text>'
    yield f'<path class="link" d="M{_BOX_PX + 6},{middle} L{right - 4},{middle}"/>'
    yield from _box(
        right, top, "cause" if guilty else "waits", short_ranks(arrow.missing) if arrow.missing else "all are inside"
    )


def _box(left: int, top: int, kind: str, text: str) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{left}" y="{top}" width="{_BOX_PX}" height="44" rx="6"/>'
    shown = text if len(text) <= 42 else f"{text[:41]}…"
    yield f'<text x="{left + 10}" y="{top + 27}">{escape(shown)}<title>{escape(text)}</title></text>'
