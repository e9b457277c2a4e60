"""JSON of any size, read value by value in bounded memory: the header of a chrome trace, and its events.

Note [Bounded reading]
A trace comes from elsewhere, and may be packed: a few megabytes of gzip can hold a string of gigabytes. So text is
unpacked piece by piece. A single value (an event, or the value of a key of the header) is given up if it is longer than
``MOST``, or nested more deeply than Python's decoder goes. All values before it are kept, and the reader is told why
they end there. Whole numbers have no bounds: profilers write unsigned ids of 64 bits.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

CHUNK = 1 << 18  # bytes that are read at once, at least
MOST = 1 << 24  # characters of one value
EVENTS = "traceEvents"

_BLANKS = re.compile(r"[ \t\r\n]*")
_LONGEST_TAIL = 8  # characters by which a number may continue after the part that was read
_FAULTS = (OSError, EOFError, gzip.BadGzipFile, zlib.error)  # of a file that is packed


class Damaged(ValueError):
    """Text that cannot be read further; the message says why."""


class NoTrace(ValueError):
    """Good JSON that is no chrome trace; the message says what it lacks."""


class _Scanner:
    """JSON whose values are taken one by one; ``read`` gives at most so many bytes, and none at the end."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._strictly = json.JSONDecoder(strict=False)
        self._with_long_numbers = json.JSONDecoder(strict=False, parse_int=_number)
        self._text, self._place = "", 0
        self._ended = False
        self._fault: Exception | None = None  # why the file ended

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._place)
            assert blanks is not None
            self._place = blanks.end()
            if self._place < len(self._text):
                return self._text[self._place]
            if not self._fill():
                return ""

    def takes(self, character: str) -> bool:
        """Whether this is the next character; if so, take it."""
        found = self.peek() == character
        self._place += found
        return found

    def demand(self, character: str) -> None:
        """Take this character."""
        if not self.takes(character):
            raise self.unexpected(repr(character))

    def unexpected(self, wanted: str) -> Damaged:
        """The error if something else stands here."""
        found = self.peek()
        return Damaged(f"{found!r} stands where {wanted} is expected" if found else self._why("it ends too early"))

    def value(self) -> Any:
        """The value that begins here."""
        self.peek()
        while True:
            try:
                value, end = self._decoded()
            except RecursionError:
                raise Damaged("its values are nested too deeply") from None
            except json.JSONDecodeError as error:
                if len(self._text) - self._place > MOST:
                    raise Damaged(f"one of its values is longer than {MOST >> 20} Mi characters") from None
                if not self._fill():
                    raise Damaged(self._why(error.msg)) from None
                continue
            if isinstance(value, str | dict | list) or end + _LONGEST_TAIL < len(self._text) or self._ended:
                self._place = end
                return value
            self._fill()  # a number may go on

    def _decoded(self) -> tuple[Any, int]:
        try:
            return self._strictly.raw_decode(self._text, self._place)
        except json.JSONDecodeError:
            raise
        except ValueError:  # a whole number of more digits than Python converts
            return self._with_long_numbers.raw_decode(self._text, self._place)

    def _why(self, otherwise: str) -> str:
        """Why nothing can be read here."""
        return (str(self._fault) or type(self._fault).__name__) if self._fault else otherwise

    def _fill(self) -> bool:
        """Read as much again as is unread; return whether anything came."""
        if self._ended:
            return False
        rest = self._text[self._place :]
        wanted, pieces = max(CHUNK, len(rest)), []
        try:
            while wanted > 0 and (data := self._read(wanted)):
                pieces.append(data)
                wanted -= len(data)
        except _FAULTS as error:
            self._fault = error
        self._ended = wanted > 0
        self._text, self._place = rest + self._decode(b"".join(pieces), self._ended), 0
        return len(self._text) > len(rest)


def _number(text: str) -> int | float:
    return int(text) if len(text) < 400 else float(text)


class ChromeDocument:
    """A chrome trace, an object or a list; Damaged: it is no JSON; NoTrace: it is JSON without events."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._scanner = _Scanner(read)
        self.header: dict[str, Any] = {}  # keys after the events are added when these have been read
        self.is_list = self._scanner.takes("[")
        if self.is_list:
            return
        if not self._scanner.takes("{"):
            self._scanner.value()
        elif self._reads_up_to_events():
            return
        raise NoTrace(f"it has no {EVENTS!r}")

    def _reads_up_to_events(self) -> bool:
        scanner = self._scanner
        while not scanner.takes("}"):
            key = scanner.value()
            scanner.demand(":")
            if key == EVENTS and scanner.peek() == "[":
                scanner.demand("[")
                return True
            if isinstance(key, str):
                self.header[key] = scanner.value()
            if not scanner.takes(","):
                scanner.demand("}")
                return False
        return False

    def events(self) -> Iterator[Any]:
        """All events, once; Damaged: the text cannot be read further."""
        scanner = self._scanner
        while not scanner.takes("]"):
            yield scanner.value()
            if not scanner.takes(",") and scanner.peek() != "]":
                raise scanner.unexpected("',' or ']'")
        if not self.is_list and scanner.takes(","):
            self._reads_up_to_events()
