import os

import httpx

from tests.support.serving import WITH_PREFLIGHTS, predict_blank

# Python runs this at startup, in the service and in the preflight process.
WITHOUT_LINUX = """
import ctypes, os, pathlib, socket, types

del os.sched_getaffinity, socket.TCP_NOTSENT_LOWAT
load, read, write = ctypes.CDLL, pathlib.Path.read_text, pathlib.Path.write_text

def library(name=None, *rest, **options):
    if name is not None:
        return load(name, *rest, **options)
    return types.SimpleNamespace()  # neither mallopt nor malloc_trim nor prctl

def elsewhere(call):
    def called(path, *rest, **options):
        if str(path).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(str(path))
        return call(path, *rest, **options)
    return called

ctypes.CDLL = library
pathlib.Path.read_text, pathlib.Path.write_text = elsewhere(read), elsewhere(write)
pathlib.Path(__file__).with_name(f"{os.getpid()}.used").touch()
"""


def test_service_runs_preflights_and_predicts_without_linux_calls(serve, writable_store, tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT_LINUX)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        serve(writable_store.root, PYTHONPATH=path, **WITH_PREFLIGHTS) as (url, _),
        httpx.Client(base_url=url) as client,
    ):
        response = predict_blank(client)
        assert response.status_code == 200, response.text
    assert len([*folder.glob("*.used")]) == 2
