"""A hang verdict as one self-contained HTML page, light and dark: no scripts, nothing fetched."""

from collections.abc import Iterator, Sequence
from html import escape

from everstep.domain.diagnosis import HangVerdict
from everstep.policy.wording import few_ranks
from everstep.views.diagnosis_picture import ROWS_MAX, rank_map, waiting_picture

_CALM = frozenset(("healthy", "slow"))
_STYLE = """
:root{color-scheme:light dark;--text:#1c2330;--soft:#4d5668;--page:#fff;--panel:#f3f5f8;--line:#5b6579;--tag:#b3261e;
--calm:#2e7d32;--culprit:#b3261e;--suspect:#e8a33d;--direct:#2f5fa7;--through:#a9c3ea;--quiet:#d7dbe2;--box:#e8f0fe;
--edge:#4a6fb5;--cause:#fde7e5}
@media(prefers-color-scheme:dark){:root{--text:#e6e9ef;--soft:#aab3c2;--page:#14171c;--panel:#20252d;--line:#98a2b3;
--culprit:#ff6f61;--suspect:#f0b75e;--direct:#5b8fe0;--through:#2f4a78;--quiet:#3a414d;--box:#1d2a42;--edge:#6f95d8;
--cause:#4a1f1b}}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1040px;padding:0 1rem;color:var(--text);
background:var(--page)}
h1{font-size:1.3rem;margin:0 0 .5rem}h2{font-size:1rem;margin:1.6rem 0 .4rem}
pre{background:var(--panel);padding:.8rem;overflow:auto}p,li,td{overflow-wrap:anywhere}
.tag{background:var(--tag);color:#fff;border-radius:4px;padding:.1rem .5rem;font-size:.9rem}
.calm{background:var(--calm)}
.soft{color:var(--soft)}table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid var(--quiet)}
svg{width:100%;height:auto;display:block}svg.map{width:auto;max-width:100%}
text{font:13px system-ui,sans-serif;fill:var(--text)}.small{font-size:11px;fill:var(--soft)}
.box{fill:var(--box);stroke:var(--edge)}.guilty{fill:var(--cause);stroke:var(--culprit);stroke-width:2}
.link{stroke:var(--line);fill:none;marker-end:url(#head)}#head path{fill:var(--line)}
.culprit{fill:var(--culprit);stroke:var(--text);stroke-width:1.5}.suspect{fill:var(--suspect)}.direct{fill:var(--direct)}
.through{fill:var(--through)}.quiet{fill:var(--quiet)}.silent{fill:none;stroke:var(--soft);stroke-width:1}
"""


def diagnosis_html(verdict: HangVerdict) -> str:
    """The whole document."""
    calm = " calm" if verdict.trouble.value in _CALM else ""
    tag = escape(verdict.trouble.value.upper().replace("_", " "))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>{tag}: {escape(_who(verdict))}</title><style>{_STYLE}</style><main>",
        f'<h1><span class="tag{calm}">{tag}</span> {escape(_who(verdict))}</h1>',
        f"<p>{escape(verdict.reason)}</p>",
        *_list("Evidence", verdict.evidence),
    ]
    if verdict.stack:
        whose = "Where it stands" if verdict.stack_is_now else "Where it was last recorded"
        parts.append(f"<h2>{whose}</h2><pre>{escape(chr(10).join(verdict.stack))}</pre>")
    if not calm:
        parts += [*_map(verdict), *_waits(verdict)]
    if verdict.last_agreed:
        parts.append(f"<h2>Last agreed</h2><p>{escape(verdict.last_agreed)}</p>")
    parts += _list("Other explanations", [f"{o.trouble.value.upper()}: {o.reason}" for o in verdict.alternatives])
    parts += _list("Missing", verdict.missing)
    return "\n".join(parts) + "\n</main></html>\n"


def _who(verdict: HangVerdict) -> str:
    if verdict.ranks:
        return f"{'rank' if len(verdict.ranks) == 1 else 'ranks'} {few_ranks(verdict.ranks)} of {verdict.rank_count}"
    if verdict.suspects and len(verdict.suspects) < verdict.rank_count:
        return f"one of ranks {few_ranks(verdict.suspects)} of {verdict.rank_count}"
    return f"{verdict.rank_count} ranks"


def _list(title: str, texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    return [f"<h2>{escape(title)}</h2><ul>", *(f"<li>{escape(text)}</li>" for text in texts), "</ul>"]


def _map(verdict: HangVerdict) -> Iterator[str]:
    if picture := "".join(rank_map(verdict)):
        yield f"<h2>All ranks</h2>{picture}"


def _waits(verdict: HangVerdict) -> Iterator[str]:
    if not verdict.waits:
        return
    yield f"<h2>Who waits for whom, the cause first</h2>{''.join(waiting_picture(verdict))}"
    rest = max(0, len(verdict.waits) - ROWS_MAX)
    more = f"; the table has {rest} more" if rest else ""
    beyond = f", and {verdict.waits_left_out} more kinds follow from these" if verdict.waits_left_out else ""
    if more or beyond:
        yield f'<p class="soft">{len(verdict.waits) - rest} kinds of waits are drawn{more}{beyond}.</p>'
    yield "<details><summary>The same as a table</summary><table><tr><th scope=col>ranks that wait<th scope=col>in"
    yield "<th scope=col>for<th scope=col>because</tr>"
    for arrow in verdict.waits:
        missing = few_ranks(arrow.missing, 40) if arrow.missing else "each other"
        yield f"<tr><td>{few_ranks(arrow.waiting, 40)}<td>{escape(arrow.operation)}<td>{missing}"
        yield f"<td>{escape(arrow.why)}</tr>"
    yield "</table></details>"
