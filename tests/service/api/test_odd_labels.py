"""Whatever comes as labels, or in Label Studio's requests, is answered or refused, and no error
repeats it."""

import orjson
import pytest

from tests.support.odd_values import CANARY, ODD

ROW = b"[" + b",".join([b"0"] * 64) + b"]"
CONFIG = orjson.dumps(
    '<View><Image name="i" value="$a"/><Choices name="c" toName="i">'
    + "".join(f'<Choice value="{digit}"/>' for digit in range(10))
    + "</Choices></View>"
)
MADE = b'{"id":1,"result":[{"from_name":"c","value":{"choices":["3"]}}]}'
HOOK = b'{"action":"ANNOTATION_CREATED","annotation":%s,"task":%s,"project":%s}'
TASK, PROJECT = (
    b'{"id":1,"data":{"dubito_input":' + ROW + b"}}",
    b'{"id":2,"label_config":' + CONFIG + b"}",
)
PREDICT = "/label-studio/digits/predict"
WEBHOOK = "/label-studio/digits/webhook"
# Where an odd value stands, by path.
TEMPLATES = [
    ("/labels", b"%s"),
    ("/labels", b'{"labels":%s}'),
    ("/labels", b'{"labels":[%s]}'),
    ("/labels", b'{"model":%s,"labels":[{"id":"a","label":"3","input":' + ROW + b"}]}"),
    ("/labels", b'{"labels":[{"id":%s,"label":"3","input":' + ROW + b"}]}"),
    ("/labels", b'{"labels":[{"id":"a","label":%s,"input":' + ROW + b"}]}"),
    ("/labels", b'{"labels":[{"id":"a","target":%s,"input":' + ROW + b"}]}"),
    ("/labels", b'{"labels":[{"id":"b","label":"3","input":%s}]}'),
    ("/labels", b'{"replace":%s,"labels":[{"id":"a","label":"3","input":' + ROW + b"}]}"),
    ("/label-studio/digits/setup", b'{"schema":%s}'),
    (PREDICT, b'{"tasks":%s,"label_config":' + CONFIG + b"}"),
    (PREDICT, b'{"tasks":[%s],"label_config":' + CONFIG + b"}"),
    (PREDICT, b'{"tasks":[{"data":%s}],"label_config":' + CONFIG + b"}"),
    (PREDICT, b'{"tasks":[{"data":{"a":%s}}],"label_config":' + CONFIG + b"}"),
    (PREDICT, b'{"tasks":[{"data":{"dubito_input":%s}}],"label_config":' + CONFIG + b"}"),
    (WEBHOOK, b'{"action":%s}'),
    (WEBHOOK, HOOK % (b"%s", TASK, PROJECT)),
    (WEBHOOK, HOOK % (b'{"result":%s}', TASK, PROJECT)),
    (WEBHOOK, HOOK % (b'{"result":[%s]}', TASK, PROJECT)),
    (WEBHOOK, HOOK % (b'{"result":[{"from_name":"c","value":%s}]}', TASK, PROJECT)),
    (WEBHOOK, HOOK % (b'{"result":[{"from_name":"c","value":{"choices":%s}}]}', TASK, PROJECT)),
    (WEBHOOK, HOOK % (MADE, b"%s", PROJECT)),
    (WEBHOOK, HOOK % (MADE, b'{"id":%s,"data":{"dubito_input":' + ROW + b"}}", PROJECT)),
    (
        WEBHOOK,
        HOOK % (MADE, b'{"id":1,"data":{"dubito_id":%s,"dubito_input":' + ROW + b"}}", PROJECT),
    ),
    (WEBHOOK, HOOK % (MADE, TASK, b"%s")),
    (WEBHOOK, HOOK % (MADE, TASK, b'{"id":%s,"label_config":' + CONFIG + b"}")),
]


@pytest.fixture(scope="module")
def service(digits_store, tmp_path_factory):
    from tests.support.serving import client_of

    state = str(tmp_path_factory.mktemp("odd") / "state")
    with client_of(digits_store, DUBITO_STATE=state) as client:
        yield client


@pytest.mark.parametrize(("path", "template"), TEMPLATES, ids=range(len(TEMPLATES)))
def test_odd_values_are_answered_or_refused(service, path, template):
    for odd in ODD:
        body = template.replace(b"%s", odd)
        answer = service.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 201, 404, 409, 413, 422), (body[:200], answer.text)
        if answer.status_code >= 400:
            assert CANARY not in answer.text, body[:200]
            assert answer.json()["detail"]
    assert service.get("/models/digits/labels").status_code == 200
