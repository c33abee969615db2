"""SeaweedFS and rclone servers for tests. Requires `make test-real`."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.environment import ROOT
from tests.support.ports import free_port
from tests.support.serving import wait_until

PROGRAMS = {name: ROOT / ".venv-buckets" / "bin" / name for name in ("weed", "rclone")}
BUCKET, KEY, SECRET = "models", "a-key-of-tests", "a-secret-of-tests-0123456789"


def credentials(url: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


class SeaweedFS:
    """A SeaweedFS server with one bucket, which can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {part: free_port() for part in ("master", "filer", "volume", "s3")}
        self.url = f"http://127.0.0.1:{self.ports['s3']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it accepts objects."""
        folder = self.folder / "data"
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            str(PROGRAMS["weed"]),
            "mini",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={folder}",
        ]
        command += [f"-{part}.port={port}" for part, port in self.ports.items()]
        command += [f"-{part}.port.grpc={free_port()}" for part in self.ports]
        command += ["-webdav=false", "-admin.ui=false", "-master.telemetry=false"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "AWS_ACCESS_KEY_ID": KEY,
                    "AWS_SECRET_ACCESS_KEY": SECRET,
                    "S3_BUCKET": BUCKET,
                },
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        wait_until(self._takes_objects, 60)

    def _takes_objects(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        options = {
            "endpoint": self.url,
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "region": "us-east-1",
        }
        once = {"max_retries": 0}
        store = S3Store(BUCKET, **options, client_options={"allow_http": True}, retry_config=once)
        try:
            store.put("started", b"yes")
            store.delete("started")
        except BaseError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def rclone(folder: Path) -> Iterator[str]:
    """Start an rclone server, which ignores conditional requests. Yields its URL."""
    (folder / BUCKET).mkdir(parents=True)
    port = free_port()
    command = [str(PROGRAMS["rclone"]), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [*command, "--auth-key", f"{KEY},{SECRET}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _listens(port), 30)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
