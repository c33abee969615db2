"""The end of the service: said before it comes, so that no request is lost on the way.

From SIGTERM on the service says that it is not ready, and closes each connection with its answer,
so that proxies and clients go elsewhere; it still listens and answers. When the notice is over the
server stops listening and answers what it has accepted.
"""

import asyncio
import signal
import threading
from types import FrameType

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def end_with_notice(ending: threading.Event, notice_s: float) -> None:
    """From now on have SIGTERM set `ending`, and do what it does now only after `notice_s`; a
    second one at once.

    Call it in the event loop, in the main thread; elsewhere, as in a test's client, signals stay as
    they are.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    stop = signal.getsignal(signal.SIGTERM)
    loop = asyncio.get_running_loop()

    def told(number: int, _: FrameType | None) -> None:
        wait_s = 0.0 if ending.is_set() else notice_s
        ending.set()
        if callable(stop):
            loop.call_soon_threadsafe(loop.call_later, wait_s, stop, number, None)

    signal.signal(signal.SIGTERM, told)


class CloseConnections:
    """Middleware that closes connections with the next answer once the service is about to end."""

    def __init__(self, app: ASGIApp, ending: threading.Event) -> None:
        self.app = app
        self.ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and self.ending.is_set():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive, sending)
