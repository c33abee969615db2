from html.parser import HTMLParser

import pytest

from model_store.artifacts.report import evaluation_report
from model_store.artifacts.store import ModelStore
from training.evaluation.evaluate import report_page

HOSTILE = """<script>alert(1)</script> "a"|b`c`</td>&amp;<img src=x onerror='y'>"""
VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


@pytest.fixture(scope="module")
def evaluation(evaluated_store):
    return evaluation_report(ModelStore(evaluated_store), "digits", "1")


def test_page_contains_all_tables_and_loads_no_external_resources(evaluation):
    text = evaluation.read("report.html").decode()
    reader = Reader(text)
    assert {tag for tag, _ in reader.elements} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "h1",
            "h2",
            "h3",
            "p",
            "code",
            "div",
            "table",
            "thead",
        ),
        *("tbody", "tr", "th", "td"),
    }
    for _, attributes in reader.elements:
        assert set(attributes) <= {
            "lang",
            "charset",
            "http-equiv",
            "content",
            "name",
            "class",
            "alt",
            "src",
        }
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    cells = {data for tag, data in reader.texts if tag == "td"}
    assert {*evaluation.report["outliers"]} <= cells


def test_page_escapes_hostile_class_names(evaluation, evaluated_store):
    content = {name: value for name, value in evaluation.report.items() if name != "files"}
    content["test"] = {
        **content["test"],
        "classes": [HOSTILE for _ in content["test"]["classes"]],
    }
    manifest = ModelStore(evaluated_store).manifest("digits", "1")
    reader = Reader(report_page(content, manifest))
    assert ("td", HOSTILE) in reader.texts
    tags = [tag for tag, _ in reader.elements]
    assert not {"script", "img"} & {*tags}
    assert not any("onerror" in attributes for _, attributes in reader.elements)
