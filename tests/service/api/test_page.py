import gzip
import re
from hashlib import sha256

from service.api.page import FOLDER
from service.app import create_app
from service.settings import Settings

FILES = {
    path.relative_to(FOLDER).as_posix(): path
    for path in FOLDER.rglob("*")
    if path.suffix in (".html", ".css", ".js", ".svg")
}


def test_all_files_referenced_by_the_page_exist(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    references = re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text)
    assert len(references) >= 5
    for path in references:
        assert client.get(f"/{path}").status_code == 200, path
    for path in FILES:
        if path.endswith(".js") and not path.startswith("vendor/"):
            folder = path.rpartition("/")[0]
            for module in re.findall(
                r'(?:from|import)\(? ?"(\.[^"]+)"', (FOLDER / path).read_text()
            ):
                assert (FOLDER / folder / module).resolve().relative_to(
                    FOLDER
                ).as_posix() in FILES, path


def test_content_security_policy_allows_only_files_of_the_page(client):
    for path in ["/", *(f"/page/{file}" for file in FILES)]:
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self' 'sha256-")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    page = client.get("/").text
    assert re.findall(r"<script(?![^>]* src=)", page) == []
    assert re.findall(r"<style|style=|\son\w+=", page) == []
    for path, file in FILES.items():
        if path.endswith(".js") and not path.startswith("vendor/"):
            assert (
                re.findall(
                    rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b",
                    file.read_bytes(),
                )
                == []
            )


def test_files_are_compressed_and_cached(client):
    answer = client.get("/page/main.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in answer.headers
    assert answer.content == (FOLDER / "main.js").read_bytes()
    with client.stream("GET", "/page/main.js", headers={"Accept-Encoding": "gzip"}) as stream:
        assert stream.headers["content-encoding"] == "gzip"
        assert gzip.decompress(b"".join(stream.iter_raw())) == answer.content
    revalidation = client.get("/page/main.js", headers={"If-None-Match": answer.headers["etag"]})
    assert (revalidation.status_code, revalidation.content) == (304, b"")
    assert answer.headers["cache-control"] == "no-cache"
    assert "immutable" in client.get("/page/vendor/d3-7.9.0.min.js").headers["cache-control"]


def test_files_outside_the_page_are_not_served(client):
    for path in (
        "../routes/page.py",
        "..%2froutes%2fpage.py",
        "nothing.js",
        "",
        "vendor",
    ):
        assert client.get(f"/page/{path}").status_code == 404, path


def test_vendored_files_are_unchanged():
    content = (FOLDER / "vendor" / "README.md").read_text()
    items = re.findall(r"^\| `(\S+)` .* `([0-9a-f]{64})` \|$", content, re.MULTILINE)
    assert {name for name, _ in items} == {
        path.relative_to(FOLDER / "vendor").as_posix() for path in (FOLDER / "vendor").rglob("*.js")
    }
    for name, digest in items:
        assert sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest


def test_page_can_be_disabled(digits_store):
    app = create_app(Settings(store=digits_store, page=False))
    assert "/predict" in {route.path for route in app.state.routes}
    assert "/" not in {route.path for route in app.state.routes}
    assert "/page" not in {getattr(route, "path", None) for route in app.routes}
