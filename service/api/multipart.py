"""Parsing `multipart/form-data` (RFC 7578) within limits, in memory: nothing is written to disk."""

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from model_store.errors import InvalidInput
from model_store.types import Pause
from service.errors import TooLarge

STEP_BYTES = 1 << 20  # of a form that are parsed at once


@dataclass
class Part:
    """A part of a form: its name and content."""

    name: str = ""
    content: bytearray = field(default_factory=bytearray)


class Form:
    """What the parser's callbacks gather."""

    def __init__(self, max_parts: int) -> None:
        self.max_parts = max_parts
        self.parts: list[Part] = []
        self.ended = False
        self._header = bytearray()
        self._value = bytearray()

    def on_part_begin(self) -> None:
        """Begin a part."""
        if len(self.parts) == self.max_parts:
            raise TooLarge(f"body: expected a form of at most {self.max_parts} parts, got more")
        self.parts.append(Part())

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a part's content."""
        self.parts[-1].content += data[start:end]

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a header's name."""
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """Take a piece of a header's value."""
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """Take the part's name from its Content-Disposition, and nothing from other headers."""
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def on_end(self) -> None:
        """Note that the form is whole."""
        self.ended = True


def parse_form(
    body: bytes | bytearray, content_type: str, max_parts: int, pause: Pause
) -> list[Part]:
    """Return the parts of a form in order.

    Raises:
        InvalidInput: if it is not a whole form, or a part has no name.
        TooLarge: if it has more parts than `max_parts`.
    """
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if not options.get(b"boundary"):
        raise InvalidInput("Content-Type", "multipart/form-data with a boundary", "one without")
    form = Form(max_parts)
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        for start in range(0, len(body), STEP_BYTES):
            parser.write(bytes(body[start : start + STEP_BYTES]))
            pause()
        parser.finalize()
    except FormParserError:
        raise InvalidInput(
            "body", "multipart/form-data with the boundary of its Content-Type", "another"
        ) from None
    if not form.ended:
        raise InvalidInput("body", "a whole form", "one without its end")
    if not all(part.name for part in form.parts):
        raise InvalidInput("body", "parts with a name each", "one without")
    return form.parts
