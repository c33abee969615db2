import re

import pytest
from pydantic import BaseModel

from docs.reference import PROBLEMS, REFERENCE, TABLES, problem_table, with_table, with_tables
from model_store.acquisition.choice import ACQUISITIONS
from model_store.artifacts.manifest import Manifest
from service.app import create_app
from service.settings import Settings
from tests.support.environment import ROOT
from training.data import EXPECTED, KINDS
from training.methods import METHODS
from training.recipe import BETTER, DENSITY_NAMES, DETECTOR_NAMES, Recipe
from training.sections import Section

PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    if path.is_file()
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def get_text(path):
    """Return a page without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def find_anchors(path):
    """Return the anchors of a page's headings, in the format of code hosts."""
    headings = re.findall(r"^#+ (.+)$", get_text(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_target(page):
    for link in LINK.findall(get_text(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in find_anchors(target), link


def test_home_page_lists_every_guide():
    links = {link.partition("#")[0] for link in LINK.findall(read_guide("index"))}
    assert {page.name for page in GUIDES[1:]} - links == {"index.md"}


def test_every_guide_is_in_site_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in GUIDES[1:] if f"- {page.name}" not in text] == []


def test_every_make_target_is_in_contributing_guide():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in targets if f"`make {name}`" not in text] == []


def read_guide(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def list_keys(section, prefix=""):
    for name, field in section.model_fields.items():
        kinds = [
            kind
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if kind is not Section
        ]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if inner:
            yield from list_keys(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_recipe_key_is_documented():
    pages = read_guide("recipes") + read_guide("networks")
    rows = "\n".join(line for line in pages.splitlines() if line.startswith("| `"))
    expected = [key for key in list_keys(Recipe) if not key.startswith("network.")]
    assert len(expected) > 30
    missing = [
        key
        for key in expected
        if f"`{key}`" not in rows and f"`{key.rpartition('.')[2]}`" not in rows
    ]
    assert missing == []


@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_its_keys_are_in_guide(method):
    rows = [
        line
        for line in read_guide("methods").splitlines()
        if line.startswith("| ") and f"`{method}`" in line.split(" | ")[0]
    ]
    assert len(rows) == 1
    for key in METHODS[method].model_fields:
        assert f"`{key}`" in read_guide("methods"), key
    assert list((ROOT / "recipes").glob(f"*-{method}.toml")), "expected an example recipe"


def test_every_detector_is_documented():
    table = read_guide("detectors").partition("\n## ")[0]
    assert [name for name in DETECTOR_NAMES if f"`{name}`" not in table] == []
    assert set(DENSITY_NAMES) < set(DETECTOR_NAMES)


def test_every_data_source_is_documented():
    table = read_guide("data").partition("## Data sources")[2].partition("\n## ")[0]
    for kind in KINDS:
        assert f"`{kind}:" in table
        assert f"`{kind}:" in EXPECTED


def test_every_gate_metric_is_in_guide():
    table = read_guide("training").partition("## Gate")[2].partition("\n## ")[0]
    assert [name for name in BETTER if f"`{name}`" not in table] == []


def test_every_acquisition_is_documented():
    reference = read_guide("api").partition("## POST /acquire")[2].partition("\n## ")[0]
    expected = {name for names in ACQUISITIONS.values() for name in names}
    assert {name for name in expected if f"`{name}`" not in reference} == set()


def list_fields(schema, prefix=""):
    for name, field in schema.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            yield f"{prefix}{name}"
        for kind in inner:
            yield from list_fields(kind, f"{prefix}{name}.")


def test_every_manifest_field_is_documented():
    content = (ROOT / "model_store" / "README.md").read_text()
    expected = {
        field
        for field in list_fields(Manifest)
        if not field.startswith(("input.image.", "abstention.", "files."))
    }
    assert len(expected) > 30
    assert {field for field in expected if f"`{field}`" not in content} == set()


def test_every_request_and_response_field_is_in_reference():
    reference = read_guide("api") + read_guide("problems")
    schemas = create_app(Settings()).openapi()["components"]["schemas"]
    # The manifest and Label Studio's protocol are documented elsewhere.
    ends = ("Answer", "Request", "Row", "Label", "Entry", "Deletion", "Problem")
    documented = [
        schema
        for name, schema in schemas.items()
        if name.endswith(ends) and not name.startswith("Studio")
    ]
    fields = {name for schema in documented for name in schema.get("properties", {})}
    assert len(fields) > 30
    assert {name for name in fields if not re.search(rf"[`.\"]{name}[`\"]", reference)} == set()


def test_field_tables_match_declared_fields():
    text = REFERENCE.read_text()
    assert with_tables(text) == text, "python -m docs.reference"
    assert all(f"<!-- fields: {name} -->" in text for name in TABLES)
    problems = PROBLEMS.read_text()
    assert with_table(problems, "problems", problem_table()) == problems
