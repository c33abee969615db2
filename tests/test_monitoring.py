"""What watches the service: its rules and its dashboard ask for metrics that exist, and the guide
knows each alert.

`tests/real/test_monitoring.py` runs them in Prometheus itself.
"""

import json
import math
import re
from itertools import combinations

import pytest
import yaml
from scipy.stats import betabinom

from model_store.conformal.drift import ALARM_AT, EDGES, FLAG_RATE_AT
from service.app import create_app
from service.settings import Settings
from service.telemetry.metrics import SECONDS
from tests.support.environment import ROOT

FOLDER = ROOT / "docker" / "monitoring"
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDS = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "dubito.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
NAME = re.compile(r"\b(?:dubito|process)[_:][\w:]+")
UNITS = {"short", "none", "reqps", "rowsps", "cps", "percentunit", "s", "bytes"}  # of Grafana
GUIDE = (ROOT / "docs" / "monitoring.md").read_text()


def asked_for():
    """All expressions of rules and dashboard, by where they are."""
    found = {rule.get("record") or rule["alert"]: rule["expr"] for rule in RULES}
    found |= {
        f"{panel['title']} {t['refId']}": t["expr"] for panel in PANELS for t in panel["targets"]
    }
    found |= {
        f"variable {name}": v["query"]["query"]
        for name, v in VARIABLES.items()
        if v["type"] == "query"
    }
    return found | {
        f"annotation {a['name']}": a["expr"]
        for a in DASHBOARD["annotations"]["list"]
        if "expr" in a
    }


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """The names of all samples that the service gives."""
    app = create_app(
        Settings(store=tmp_path_factory.mktemp("store"), state=tmp_path_factory.mktemp("state"))
    )
    page = app.state.context.metrics_page().decode()
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", page, re.M)
    return {name + ending for name, kind in kinds for ending in endings.get(kind, ("",))}


def test_every_metric_that_is_asked_for_exists(samples):
    assert len(asked_for()) > 80
    for place, expression in asked_for().items():
        names = set(NAME.findall(expression))
        assert names or "ALERTS" in expression or "up{" in expression, place
        assert {name for name in names if ":" not in name} <= samples, place
        assert {name for name in names if ":" in name} <= RECORDS.keys(), place


def test_ends_of_buckets_that_are_asked_for_are_the_histograms(samples):
    ends = {"dubito_request_seconds_bucket": SECONDS, "dubito_flag_p_value_bucket": EDGES.tolist()}
    asked = [
        (name, float(end))
        for expression in asked_for().values()
        for name, of_le in re.findall(r'(\w+_bucket)\{[^}]*\ble=~?"([^"]+)"', expression)
        for end in of_le.split("|")
    ]
    assert {name for name, _ in asked} == ends.keys()
    assert all(end in ends[name] for name, end in asked)
    assert f'le="{FLAG_RATE_AT}"' in RECORDS["dubito:flag_rate:1h"]


def test_rules_are_about_the_job_that_is_scraped():
    (scraped,) = PROMETHEUS["scrape_configs"]
    jobs = {job for rule in RULES for job in re.findall(r'\bjob="(\w+)"', rule["expr"])}
    assert jobs == {scraped["job_name"]}
    assert all((FOLDER / "prometheus" / name).exists() for name in PROMETHEUS["rule_files"])


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_it_is_and_is_in_the_guide_and_tested(name):
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    (line,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{name}` |")]
    assert page == "docs/monitoring.md" and f'<a id="{anchor}"></a>' in line
    assert alert["labels"]["severity"] in line
    assert name in (FOLDER / "prometheus" / "rules_test.yml").read_text()


def test_the_guide_knows_no_other_alerts():
    assert re.findall(r"^\| `(Dubito\w+)` \|", GUIDE, re.M) == list(ALERTS)


@pytest.mark.parametrize("calibration", [19, 59, 199, 999, 9999])
@pytest.mark.parametrize("rows", [100, 500, 5000])
def test_a_flag_rate_is_seldom_beyond_its_band_while_nothing_drifts(calibration, rows):
    """Exactly, by the beta-binomial distribution of flags among rows like those of the
    calibration."""
    gaps = calibration + 1
    known = {
        "dubito:watched_rows:increase1h": rows,
        "dubito:flag_rate:gaps": gaps,
        "dubito:flag_rate:expected": math.floor(FLAG_RATE_AT * gaps + 1e-9) / gaps,
    }
    for record in (
        "dubito:flag_rate:std1h",
        "dubito:flag_rate:upper1h",
        "dubito:flag_rate:lower1h",
    ):
        known[record] = value_of(RECORDS[record], known)
    flags = betabinom(
        rows,
        known["dubito:flag_rate:expected"] * gaps,
        (1 - known["dubito:flag_rate:expected"]) * gaps,
    )
    assert flags.sf(math.floor(rows * known["dubito:flag_rate:upper1h"])) <= 5e-5
    assert flags.cdf(math.ceil(rows * known["dubito:flag_rate:lower1h"]) - 1) <= 5e-5
    assert (
        flags.mean() < rows * known["dubito:flag_rate:upper1h"] < rows
    )  # it is no band of everything


def value_of(expression, known):
    """The value of a rule's expression, given those of the records that it is of."""
    text = re.sub(r"dubito:[\w:]+", lambda name: repr(float(known[name[0]])), expression)
    text = re.sub(r"\(([\d.]+) > 0\)", r"\1", text)
    assert re.fullmatch(r"(?:sqrt|[\d.\s()+*/-])+", text), text
    return eval(f"({text})", {"__builtins__": {}, "sqrt": math.sqrt})


def test_the_dashboard_s_line_of_drift_is_the_alarm_s():
    (panel,) = [panel for panel in PANELS if panel["title"] == "Drift: evidence"]
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == pytest.approx(
        ALARM_AT, abs=1e-3
    )


def test_panels_have_ids_and_places_of_their_own():
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in every:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0
    for one, other in combinations([panel["gridPos"] for panel in every], 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above, (one, other)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_asks_the_chosen_prometheus_and_shows_a_unit(panel):
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["datasource"]["query"] == "prometheus"
    assert all(
        source == chosen
        for source in (panel["datasource"], *(t["datasource"] for t in panel["targets"]))
    )
    letters = [target["refId"] for target in panel["targets"]]
    assert letters and len({*letters}) == len(letters)
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    asked = {name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])}
    assert asked <= VARIABLES.keys() | {"__rate_interval"}
    assert panel["title"] and panel["description"]


def test_the_dashboard_is_of_a_grafana_of_today():
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["uid"] == "dubito" and DASHBOARD["id"] is None  # Grafana gives it its own


def test_grafana_finds_the_dashboard_and_prometheus():
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    mounts = {
        target: source
        for source, target, _ in (volume.split(":") for volume in service["volumes"][:2])
    }
    provisioning = FOLDER / "grafana" / "provisioning"
    assert mounts["/etc/grafana/provisioning"] == f"./{provisioning.relative_to(ROOT)}"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dubito.yml").read_text())[
        "providers"
    ]
    assert (ROOT / mounts[provider["options"]["path"]] / "dubito.json").exists()
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
