"""Text that arrives in portions, whatever they are."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.text import TextReader
from tests.unit.service_client import FakeTokenizer

TOKENIZER = FakeTokenizer()
CUTS = st.lists(st.integers(0, 40), max_size=6)
BYTES = st.lists(st.integers(0, 260), max_size=40)
TEXT = st.text("aé✓ \n\ufffd", max_size=20)


def portions(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


def read_all(reader: TextReader, parts: list[list[int]]) -> tuple[int, str]:
    total, text = 0, ""
    for part in parts:
        count, new = reader.read(part)
        total, text = total + count, text + new
        if reader.stopped_by is not None:
            break
    return total, text + reader.end()


@given(tokens=BYTES, cuts=CUTS)
def test_portions_put_together_are_the_text_of_all_tokens(
    tokens: list[int], cuts: list[int]
) -> None:
    count, text = read_all(TextReader(TOKENIZER), portions(tokens, cuts))
    assert count == len(tokens)
    assert text == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(tokens=BYTES, cuts=CUTS, stop=st.lists(st.text("ab\x00\n", min_size=1), max_size=3))
def test_a_stop_string_cuts_at_the_same_token_however_the_tokens_arrive(
    tokens: list[int], cuts: list[int], stop: list[str]
) -> None:
    at_once, in_parts = (TextReader(TOKENIZER, tuple(stop)) for _ in range(2))
    assert read_all(at_once, [tokens]) == read_all(in_parts, portions(tokens, cuts))
    assert at_once.stopped_by == in_parts.stopped_by


@given(before=TEXT, stop=st.sampled_from(["END", "✓✓", "\n\n"]), after=TEXT)
def test_the_text_ends_before_the_first_stop_string_and_the_tokens_with_it(
    before: str, stop: str, after: str
) -> None:
    whole = before + stop + after
    first = whole.index(stop)
    count, text = read_all(TextReader(TOKENIZER, (stop,)), [list(whole.encode())])
    assert text == whole[:first]
    assert count == len((whole[:first] + stop).encode())
    kept, shown = read_all(
        TextReader(TOKENIZER, (stop,), include_stop=True), [list(whole.encode())]
    )
    assert (kept, shown) == (count, whole[:first] + stop)


def test_what_may_become_a_stop_string_waits_and_is_released_when_it_does_not() -> None:
    reader = TextReader(TOKENIZER, ("<end>",))
    assert reader.read(list(b"one <en")) == (7, "one ")
    assert reader.read(list(b"try> ")) == (5, "<entry> ")
    assert reader.read(list(b"<end")) == (4, "")
    assert reader.end() == "<end"


def test_an_incomplete_character_waits() -> None:
    reader = TextReader(TOKENIZER)
    euro = list("€".encode())
    assert reader.read([65, *euro[:2]]) == (3, "A")
    assert reader.read(euro[2:]) == (1, "€")
    assert reader.read(euro[:1]) == (1, "")
    assert reader.end() == "\ufffd"


@pytest.mark.parametrize(("skip", "text"), [(True, "hi"), (False, "hi<256>")])
def test_special_tokens_are_shown_only_if_asked_for(skip: bool, text: str) -> None:
    reader = TextReader(TOKENIZER, skip_special_tokens=skip)
    assert read_all(reader, [[104, 105, 256]])[1] == text
