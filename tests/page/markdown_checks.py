"""What a model writes is shown as Markdown, and can do nothing: no script, no request, no form.

Its links lead to web and mail addresses only.
"""

from __future__ import annotations

from tests.page.chats import ChatPage

_MARKDOWN = """# Heading

Text with **bold**, *emphasis*, `code`, ~~old~~, 2 &lt; 3 and a [link](https://example.org/a?b=c "title").

## Lists

1. one
2. two
   - inner

- [x] done

| Name | Number |
|:-----|-------:|
| a    | 1 |
| b    | 2 |

```python
print("<b>")
```

> quoted

---

The end, [by name][n].

[n]: https://example.org/n"""
_LOOSE = "slowly\n\n- one\n\n  more of it\n\n- two\n\n  ```\n  a\n\n  b\n  ```\n\na line\n===\n\n| a |\n|---|\n| b |"
_ELEMENTS = (
    "h4",
    "h5",
    "strong",
    "em",
    "del",
    "ol > li > ul",
    ".task",
    "th",
    "td.to-right",
    "pre > code",
    "blockquote",
    "hr",
)
ATTACKS = (
    "<img src=x onerror=window.pwned=1>",
    "<script>window.pwned=1</script>",
    "<svg onload=window.pwned=1><script>window.pwned=1</script></svg>",
    "<svg><animate onbegin=window.pwned=1 attributeName=x dur=1s>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1>",
    "<form action=https://evil.example><input name=a><button>x</button></form>",
    "<a href=javascript:window.pwned=1>x</a>",
    "<style>*{background:url(https://evil.example/s)}</style>",
    "<link rel=stylesheet href=https://evil.example/s.css>",
    "<base href=https://evil.example/><meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<details open ontoggle=window.pwned=1>x</details>",
    "<video><source onerror=window.pwned=1></video>",
    "[x](javascript:window.pwned=1)",
    "[x](JaVaScRiPt:window.pwned=1)",
    "[x](&#106;avascript:window.pwned=1)",
    "[x](java\tscript:window.pwned=1)",
    "[x](data:text/html,<script>window.pwned=1</script>)",
    "[x](vbscript:window.pwned=1)",
    "[x](blob:https://evil.example/1)",
    "[x](//evil.example/a)",
    "[x](admin/drain)",
    "[x][y]\n\n[y]: javascript:window.pwned=1",
    "<javascript:window.pwned=1>",
    "![x](https://evil.example/pixel.png)",
    "![x](data:image/svg+xml,<svg onload=window.pwned=1>)",
    "![x](javascript:window.pwned=1)",
    '[x](https://evil.example/"onmouseover="window.pwned=1)',
    '```"><img src=x onerror=window.pwned=1>\n</code></pre><img src=x onerror=window.pwned=1>\n```',
    "`</code><img src=x onerror=window.pwned=1>`",
    "| <img src=x onerror=window.pwned=1> |\n|---|\n| <script>window.pwned=1</script> |",
    "# <img src=x onerror=window.pwned=1>",
    "- <iframe src=https://evil.example></iframe>",
    "&lt;img src=x onerror=window.pwned=1&gt; &#60;script&#62;window.pwned=1&#60;/script&#62;",
    "<think></think><img src=x onerror=window.pwned=1>",
    "<" * 2000,
    ">" * 3000 + "<img src=x onerror=window.pwned=1>",
)
_ALLOWED = {
    "A", "ARTICLE", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DETAILS", "DIV", "EM", "H3", "H4", "H5", "H6", "HR",
    "LI", "OL", "P", "PRE", "SPAN", "STRONG", "SUMMARY", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL",
}  # fmt: skip
_ATTRIBUTES = {"class", "href", "rel", "target", "tabindex", "role", "aria-label", "type", "start"}
_SURVEY = """
const all = [...document.querySelectorAll('#log .message, #log .message *')];
return {
  tags: [...new Set(all.map(e => e.tagName))], attributes: [...new Set(all.flatMap(e => e.getAttributeNames()))],
  links: [...document.querySelectorAll('#log a')].map(e => [e.protocol, e.rel, e.target]),
  pwned: Boolean(window.pwned), place: location.href,
  loaded: performance.getEntriesByType('resource').map(e => e.name).filter(e => !e.startsWith(location.origin)),
};
"""
_TRY_SINKS = """
setTimeout(() => { // a script of WebDriver itself may call eval
let made = '';
for (const [name, sink] of [
  ['innerHTML', () => { document.createElement('div').innerHTML = '<b>x</b>'; }],
  ['insertAdjacentHTML', () => document.createElement('div').insertAdjacentHTML('beforeend', '<b>x</b>')],
  ['eval', () => (0, eval)('1')],
  ['script.src', () => { document.createElement('script').src = '/x.js'; }],
]) {
  try { sink(); made += name + ' '; } catch { /* as it has to be */ }
}
window.made = made || 'nothing';
}, 0);
"""
_NUM_LONG_BLOCKS = 150


def check_markdown(page: ChatPage) -> None:
    """Each kind of block is one, and an answer looks the same streamed, and whole after a reload."""
    for text in (_MARKDOWN.rpartition("\n\n")[0], _LOOSE, _MARKDOWN):
        page.ask(text)
        streamed = page.last_html()
        page.open()
        assert page.last_html() == streamed, text
    for selector in _ELEMENTS:
        assert page.in_last(f"return last.querySelector({selector!r}) !== null"), selector
    assert "2 < 3" in page.last_text()
    links = page.in_last("return [...last.querySelectorAll('a')].map(e => [e.href, e.rel, e.target])")
    attributes = ["noopener noreferrer", "_blank"]
    assert links == [["https://example.org/a?b=c", *attributes], ["https://example.org/n", *attributes]], links
    assert page.in_last("return last.querySelector('pre').textContent") == 'print("<b>")'


def check_attacks(page: ChatPage) -> None:
    """Nothing that a model may write becomes more than the elements of Markdown. In questions neither."""
    for attack in ATTACKS:
        page.ask(attack)
    survey = page.browser.run(_SURVEY)
    assert set(survey["tags"]) <= _ALLOWED, set(survey["tags"]) - _ALLOWED
    assert set(survey["attributes"]) <= _ATTRIBUTES, set(survey["attributes"]) - _ATTRIBUTES
    assert all(protocol in ("https:", "http:", "mailto:") for protocol, _, _ in survey["links"]), survey["links"]
    assert all(rest == ["noopener noreferrer", "_blank"] for _, *rest in survey["links"]), survey["links"]
    assert (survey["pwned"], survey["loaded"]) == (False, []), survey
    assert survey["place"].startswith(page.url)
    page.browser.run(_TRY_SINKS)
    made = page.browser.wait("the tries", "return window.made")
    assert made == "nothing", f"the content policy lets text become markup or code: {made}"


def check_long_answer(page: ChatPage) -> None:
    """Blocks that are complete are not made again: their elements stay the same ones to the end."""
    text = "\n\n".join(f"Paragraph {number} of **many**, with `code`." for number in range(_NUM_LONG_BLOCKS))
    page.send(text)
    page.wait_for_text(200)
    page.in_last("window.firstBlock = last.querySelector('.text > p')")
    page.wait_for_end()
    number, is_same = page.in_last(
        "return [last.querySelectorAll('.text > p').length, last.querySelector('.text > p') === window.firstBlock]"
    )
    assert (number, is_same) == (_NUM_LONG_BLOCKS, True)
