import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.load import Load, arrival_times, closed_loop, open_loop, post

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REQUEST = post("/predict", b'{"inputs": [[1]]}')


@contextmanager
def run_server(respond: Callable[[int], bytes | None]) -> Iterator[int]:
    count, lock = iter(range(10**6)), threading.Lock()

    def handle(connection: socket.socket) -> None:
        with connection:
            buffer = b""
            while data := connection.recv(1 << 16):
                buffer += data
                while len(buffer) >= len(REQUEST):
                    assert buffer.startswith(REQUEST)
                    buffer = buffer[len(REQUEST) :]
                    with lock:
                        number = next(count)
                    response = respond(number)
                    if response is None:
                        return
                    connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        threads = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=handle, args=(connection,)))
                threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def test_poisson_arrivals_are_sorted_and_match_rate():
    times = arrival_times(1000, 10, poisson=True)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < 10
    assert abs(len(times) - 10_000) < 5.5 * 100  # Poisson, standard deviation 100


def test_percentiles_are_observed_latencies_of_one_status():
    latencies = np.arange(1, 101) / 1000
    load = Load(["200"] * 100 + ["429"] * 3, np.append(latencies, [9.0] * 3), rate=100.0)
    assert load.percentile(50) == 0.050
    assert load.percentile(99) == 0.099
    assert load.percentile(100) == 0.100
    assert load.percentile(50, "429") == 9.0
    assert np.isnan(load.percentile(50, "503"))
    assert load.counts == {"200": 100, "429": 3}


def test_open_loop_charges_stall_to_all_requests_due_meanwhile():
    stall, rate = 0.5, 100

    def respond(number: int) -> bytes:
        if number == 0:
            time.sleep(stall)
        return OK

    with run_server(respond) as port:
        load = open_loop(port, [REQUEST], rate, 1.0, warm_up_s=0.0, connections=1, poisson=False)
    assert load.counts == {"200": 100}
    min_latencies_s = stall - np.arange(100) / rate
    assert (load.latencies_s >= min_latencies_s).all()


def test_statuses_and_disconnects_are_counted_and_connection_reopens():
    rejection = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    responses = [OK, rejection, None, chunked]
    with run_server(lambda number: responses[number % 4]) as port:
        load = open_loop(port, [REQUEST], 400, 0.25, warm_up_s=0.0, connections=1, poisson=False)
    assert load.counts == {"200": 50, "429": 25, "closed": 25}


def test_closed_loop_keeps_one_request_in_flight_per_connection():
    in_flight, max_in_flight, lock, first_four = 0, 0, threading.Lock(), threading.Barrier(4)

    def respond(number: int) -> bytes:
        nonlocal in_flight, max_in_flight
        with lock:
            in_flight += 1
            max_in_flight = max(max_in_flight, in_flight)
        if number < 4:
            first_four.wait()
        time.sleep(0.02)
        with lock:
            in_flight -= 1
        return OK

    with run_server(respond) as port:
        load = closed_loop(port, [REQUEST], 4, 0.5, warm_up_s=0.1)
    assert max_in_flight == 4
    assert load.counts.keys() == {"200"}
    assert load.rate <= 4 * (0.5 / 0.02 + 1) / 0.5  # upper bound for this delay
    assert (load.latencies_s >= 0.02).all()


@pytest.mark.parametrize("options", [["--rate", "50"], []])
def test_command_prints_summary(tmp_path, options):
    body = tmp_path / "body.json"
    body.write_text('{"inputs": [[1]]}')
    with run_server(lambda _: OK) as port:
        command = [
            sys.executable,
            "-m",
            "benchmarks.load",
            str(port),
            "/predict",
            str(body),
            "--seconds",
            "0.2",
        ]
        completed = subprocess.run(
            [*command, "--warm-up", "0", *options], capture_output=True, text=True, check=True
        )
    assert json.loads(completed.stdout)["counts"].keys() == {"200"}
