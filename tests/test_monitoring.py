import json
import math
import re

import pytest
import yaml
from scipy.stats import betabinom

from model_store.conformal.drift import ALARM_EVIDENCE, EDGES, FLAG_RATE_FPR
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
OTHER_NAMES = ("ALERTS", "up{", "probe_ssl_earliest_cert_expiry{")
GUIDE = (ROOT / "docs" / "monitoring.md").read_text()


def collect_expressions():
    expressions = {rule.get("record") or rule["alert"]: rule["expr"] for rule in RULES}
    for panel in PANELS:
        expressions |= {f"{panel['title']} {t['refId']}": t["expr"] for t in panel["targets"]}
    for name, variable in VARIABLES.items():
        if variable["type"] == "query":
            expressions[f"variable {name}"] = variable["query"]["query"]
    for annotation in DASHBOARD["annotations"]["list"]:
        if "expr" in annotation:
            expressions[f"annotation {annotation['name']}"] = annotation["expr"]
    return expressions


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Return the names of all samples that the service exports."""
    app = create_app(
        Settings(store=tmp_path_factory.mktemp("store"), state=tmp_path_factory.mktemp("state"))
    )
    page = app.state.context.metrics_page().decode()
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    kinds = re.findall(r"^# TYPE (\w+) (\w+)$", page, re.M)
    return {name + ending for name, kind in kinds for ending in endings.get(kind, ("",))}


def test_every_metric_in_expressions_exists(samples):
    for place, expression in collect_expressions().items():
        names = set(NAME.findall(expression))
        assert names or any(name in expression for name in OTHER_NAMES), place
        assert {name for name in names if ":" not in name} <= samples, place
        assert {name for name in names if ":" in name} <= RECORDS.keys(), place


def test_bucket_bounds_in_expressions_match_histograms(samples):
    ends = {"dubito_request_seconds_bucket": SECONDS, "dubito_flag_p_value_bucket": EDGES.tolist()}
    bounds = [
        (name, float(end))
        for expression in collect_expressions().values()
        for name, values in re.findall(r'(\w+_bucket)\{[^}]*\ble=~?"([^"]+)"', expression)
        for end in values.split("|")
    ]
    assert {name for name, _ in bounds} == ends.keys()
    assert all(end in ends[name] for name, end in bounds)
    assert f'le="{FLAG_RATE_FPR}"' in RECORDS["dubito:flag_rate:1h"]


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_documented_and_tested(name):
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    (line,) = [line for line in GUIDE.splitlines() if line.startswith(f"| `{name}` |")]
    assert page == "docs/monitoring.md" and f'<a id="{anchor}"></a>' in line
    assert alert["labels"]["severity"] in line
    assert name in (FOLDER / "prometheus" / "rules_test.yml").read_text()


def test_guide_lists_exactly_the_alerts():
    assert re.findall(r"^\| `(Dubito\w+)` \|", GUIDE, re.M) == list(ALERTS)


@pytest.mark.parametrize("calibration", [19, 59, 199, 999, 9999])
@pytest.mark.parametrize("rows", [100, 500, 5000])
def test_flag_rate_rarely_leaves_band_without_drift(calibration, rows):
    gaps = calibration + 1
    reference = {
        "dubito:watched_rows:increase1h": rows,
        "dubito:flag_rate:gaps": gaps,
        "dubito:flag_rate:expected": math.floor(FLAG_RATE_FPR * gaps + 1e-9) / gaps,
    }
    for record in (
        "dubito:flag_rate:std1h",
        "dubito:flag_rate:upper1h",
        "dubito:flag_rate:lower1h",
    ):
        reference[record] = get_value(RECORDS[record], reference)
    flags = betabinom(
        rows,
        reference["dubito:flag_rate:expected"] * gaps,
        (1 - reference["dubito:flag_rate:expected"]) * gaps,
    )
    assert flags.sf(math.floor(rows * reference["dubito:flag_rate:upper1h"])) <= 5e-5
    assert flags.cdf(math.ceil(rows * reference["dubito:flag_rate:lower1h"]) - 1) <= 5e-5
    assert flags.mean() < rows * reference["dubito:flag_rate:upper1h"] < rows


def get_value(expression, values):
    """Evaluate a rule's expression with the given record values."""
    text = re.sub(r"dubito:[\w:]+", lambda name: repr(float(values[name[0]])), expression)
    text = re.sub(r"\(([\d.]+) > 0\)", r"\1", text)
    assert re.fullmatch(r"(?:sqrt|[\d.\s()+*/-])+", text), text
    return eval(f"({text})", {"__builtins__": {}, "sqrt": math.sqrt})


def test_dashboard_shows_drift_alarm_threshold():
    (panel,) = [panel for panel in PANELS if panel["title"] == "Drift: evidence"]
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == pytest.approx(
        ALARM_EVIDENCE, abs=1e-3
    )
