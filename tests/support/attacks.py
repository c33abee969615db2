"""Malicious clients, which run in threads."""

import functools
import io
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress

import numpy as np
import pyarrow as pa
from PIL import Image

from tests.support.files import CSV, NPZ, PARQUET, npy_header, npz_bytes, parquet_bytes, zip_bytes
from tests.support.raw import Connection, Ended, request

ROW = b"[" + b",".join([b"8"] * 64) + b"]"
NPY = "application/x-npy"
LARGE = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-npy\r\nContent-Length: 60000000\r\n\r\n"
MANY_NUMBERS = (
    b'{"inputs": [' + b",".join([ROW] * 300) + b'], "num_samples": 100, "return_samples": true}'
)
MOST_NUMBERS = (
    b'{"inputs": [' + b",".join([ROW] * 4096) + b'], "num_samples": 120, "return_samples": true}'
)
WIDE = "wide"  # the model of very many classes, `tests.support.models.publish_wide`
SCANS = 10_000


def pipeline_unread(port, ending):
    """Pipeline requests and read no answer."""
    with Connection(port, 5.0, receive_bytes=4096) as connection:
        while not ending.is_set():
            connection.send(request("GET", "/") * 500)


def unfinished_body(port, ending):
    with Connection(port, 5.0) as connection:
        connection.send(LARGE)
        for _ in range(50):
            connection.send(bytes(1 << 20))
        ending.wait(5.0)


def unread_answer(port, ending, body=MANY_NUMBERS):
    """Request a large response and read it slowly."""
    with Connection(port, 20.0, receive_bytes=4096) as connection:
        connection.send(request("POST", "/predict", body))
        while not ending.wait(1.0) and connection.socket.recv(8192):
            pass


def empty_parts(port, ending):
    """Send JSON that needs much more memory than its size."""
    part = random.choice((b"[],", b"{},", b'{"a":1},', b"1,", b'"ab",'))
    with Connection(port, 20.0) as connection:
        body = b'{"inputs":[' + part * ((15 << 20) // len(part)) + b"0]}"
        while not ending.is_set():
            connection.ask(request("POST", "/predict", body))


def large_pool(port, ending):
    """Send the largest JSON pool."""
    with Connection(port, 60.0) as connection:
        body = b'{"pool":[' + b",".join([ROW] * 100_000) + b'],"num_samples":10}'
        while not ending.is_set():
            connection.ask(request("POST", "/acquire", body))


def unread_large_answer(port, ending):
    """Request a response of 100 MB and read it slowly."""
    unread_answer(port, ending, MOST_NUMBERS)


def many_classes(port, ending):
    """Send the maximum number of rows with one draw to a model with many classes."""
    rows = io.BytesIO()
    np.save(rows, np.zeros((4096, 256), dtype=np.uint8))
    path = f"/predict?model={WIDE}&num_samples=1"
    with Connection(port, 60.0) as connection:
        while not ending.is_set():
            connection.ask(request("POST", path, rows.getvalue(), content_type=NPY))


def many_scans(port, ending):
    body = jpeg_of_scans(SCANS)
    path = f"/predict?model={WIDE}&num_samples=1"
    with Connection(port, 60.0) as connection:
        while not ending.is_set():
            connection.ask(request("POST", path, *get_form(body)))


def jpeg_of_scans(scans):
    created = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(created, "JPEG", progressive=True)
    content = created.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * scans + content[-2:]


def get_form(file):
    """Create a multipart form. Return the body, headers and media type."""
    head = b'--x\r\nContent-Disposition: form-data; name="inputs"; filename="a.jpg"\r\n\r\n'
    return head + file + b"\r\n--x--\r\n", (), "multipart/form-data; boundary=x"


def slow_head(port, ending):
    connections = [Connection(port, 5.0) for _ in range(50)]
    try:
        while not ending.wait(0.5):
            for connection in connections:
                connection.send(b"a")
    finally:
        for connection in connections:
            connection.close()


def smuggle(port, ending):
    """Hide requests in bodies."""
    headers = [("Connection", "Upgrade"), ("Upgrade", "foo")]
    with Connection(port, 5.0) as connection:
        while not ending.wait(0.02):
            connection.ask(request("POST", "/predict", request("POST", "/admin/refresh"), headers))


@functools.cache
def bombs():
    """Create small requests that expand to large inputs."""
    header = npz_bytes(x=npy_header((10**9, 64)))
    zeros = parquet_bytes({"x": pa.array([[0.0] * 10**7], pa.list_(pa.float32()))})
    ids = pa.DictionaryArray.from_arrays(pa.array([0] * 5000), pa.array(["a" * 10**6]))
    rows = pa.array([[0.0] * 64] * 5000, pa.list_(pa.float32()))
    texts = npz_bytes(x=np.zeros((3, 64)), ids=np.array(["a" * 10**6, "b", "c"]))
    image = io.BytesIO()
    Image.new("L", (16_000, 16_000)).save(image, "WEBP", lossless=True, method=0)
    file, form_headers, form = get_form(image.getvalue())
    of_digits = "?model=digits"
    return [
        request("POST", f"/acquire/jobs{of_digits}", header, content_type=NPZ),
        request("POST", f"/acquire{of_digits}", header, content_type=NPZ),
        request("POST", f"/acquire{of_digits}", zeros, content_type=PARQUET),
        request(
            "POST",
            f"/acquire{of_digits}",
            parquet_bytes({"id": ids, "x": rows}, compression="zstd"),
            content_type=PARQUET,
        ),
        request("POST", f"/acquire{of_digits}", texts, content_type=NPZ),
        request("POST", f"/acquire{of_digits}", b"," * (16 << 20), content_type=CSV),
        request(
            "POST",
            f"/acquire{of_digits}",
            zip_bytes({str(i): b"" for i in range(100_000)}),
            content_type=NPZ,
        ),
        request("POST", "/labels", b'{"model":"digits","labels":[' + b"0," * (2 << 20) + b"0]}"),
        request("POST", "/predict", b"{" + b",".join(b'"%d":0' % i for i in range(10**6)) + b"}"),
        request("POST", "/invocations", b'{"inputs":[' + b"NaN," * (4 << 20) + b"0]}"),
        request("POST", f"/predict?model={WIDE}&num_samples=1", file, form_headers, form),
        request("GET", "/models/digits/labels"),
    ]


def small_bombs(port, ending):
    """Send `bombs` in random order, and count the statuses in `bomb_statuses`."""
    for bomb in random.sample(bombs(), len(bombs())):
        if not ending.is_set():
            with Connection(port, 60.0) as connection, suppress(OSError, Ended):
                bomb_statuses[connection.ask(bomb).status] += 1


bomb_statuses: Counter[int] = Counter()

ATTACKS = {
    small_bombs: 6,
    pipeline_unread: 20,
    unfinished_body: 12,
    unread_answer: 12,
    unread_large_answer: 6,
    many_classes: 2,
    many_scans: 2,
    empty_parts: 3,
    large_pool: 2,
    slow_head: 4,
    smuggle: 2,
}


@contextmanager
def attacking(port, attacks=ATTACKS):
    """Run each attack in several threads during a block."""
    bombs()  # made before
    ending = threading.Event()

    def again(attack):
        while not ending.is_set():
            with suppress(OSError, Ended, AssertionError):
                attack(port, ending)
            time.sleep(0.05)

    threads = [
        threading.Thread(target=again, args=(attack,))
        for attack, count in attacks.items()
        for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()
