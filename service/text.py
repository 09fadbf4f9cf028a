"""The text of one response as its tokens arrive, cut at the first stop string.

Invariant: what is released, put together, is the text of the tokens that count, whatever the
portions in which they came. So text waits while later tokens can change it: an incomplete
character, or the beginning of a stop string.
"""

from collections.abc import Sequence

from service.checks import Tokenizer

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of bytes that are no character (yet)


class TextReader:
    """Args:
    stop: the response ends with the token that completes the first of these.
    include_stop: whether the stop string stays in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # tokens of the last portion: context for those behind
        self._released_chars = 0  # of the window's text
        self._waiting = ""
        self.stopped_by: str | None = None

    def read(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """(how many of the tokens belong to the response, the text that is new)."""
        if not self._stop:
            return len(token_ids), self._decode(token_ids)
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self._waiting += self._decode((token_id,))
            text += self._release()
            if self.stopped_by is not None:
                return count, text
        return len(token_ids), text

    def end(self) -> str:
        """What still waited; no more tokens come."""
        if self.stopped_by is not None:
            return ""
        return self._waiting + self._text()[self._released_chars :]

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: Sequence[int]) -> str:
        before = len(self._window)
        self._window += token_ids
        text = self._text()
        complete = text.rstrip(_INCOMPLETE)
        new = complete[self._released_chars :]
        if len(complete) == len(text):
            del self._window[:before]
            self._released_chars = len(self._text()) if before else len(text)
        else:
            self._released_chars = max(self._released_chars, len(complete))
        return new

    def _release(self) -> str:
        """The head of the waiting text, as far as it can be in no stop string."""
        found = [(at, stop) for stop in self._stop if (at := self._waiting.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            return self._waiting[: at + len(self.stopped_by) * self._include_stop]
        longest = max(len(stop) for stop in self._stop)
        for at in range(max(0, len(self._waiting) - longest + 1), len(self._waiting)):
            if any(stop.startswith(self._waiting[at:]) for stop in self._stop):
                released, self._waiting = self._waiting[:at], self._waiting[at:]
                return released
        released, self._waiting = self._waiting, ""
        return released
