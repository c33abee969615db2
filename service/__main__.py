"""Serve: `python -m service`."""

import signal
import sys

import uvicorn

from model_store.errors import DubitoError
from service.app import create_app
from service.logs import configure
from service.settings import read_settings


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0 stopped, 2 a wrong setting."""
    try:
        settings = read_settings()
        configure(settings)
        app = create_app(settings)
    except DubitoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has stopped in good order
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=settings.drain_s,
        timeout_keep_alive=75,  # longer than proxies keep idle connections, so that they close them and not we
        access_log=False,
        server_header=False,
        log_config=None,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
