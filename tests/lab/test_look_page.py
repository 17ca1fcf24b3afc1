"""The page of ``visionattn look``: what stands in it, and that it fetches and runs nothing."""

import re
from html import unescape

from visionattn.lab.report.look import look_page

FIGURE = {"title": "Winning patches", "lines": ["What <b>patches</b> add."], "file": "1-a.png"}
FIGURE |= {"source": "data:image/jpeg;base64,AAAA", "details": ["data:image/jpeg;base64,BBBB"]}


def test_each_figure_leads_to_its_file_and_names_are_texts():
    odd = "<script>alert(1)</script>&.png"
    parts = [{"title": odd, "lines": ["a line"], "figures": [FIGURE, FIGURE | {"details": []}]}]
    page = look_page("Evidence: m", parts)
    assert "<script" not in page and odd in unescape(page)
    assert "&lt;b&gt;patches&lt;/b&gt;" in page
    assert re.findall(r'href="(1[^"]*)"', page) == ["1-a.png"] * 2
    assert page.count("base64,AAAA") == 2 and page.count("base64,BBBB") == 1
    assert "default-src 'none'" in page and "http:" not in page and "https:" not in page


def test_a_page_without_images_is_one():
    assert "<h1>nothing</h1>" in look_page("nothing", [])
