import pickle
import re
from collections.abc import Iterator

import pytest

from placement import errors
from placement.errors import FlexFloorError


def tree(root: type[FlexFloorError] = FlexFloorError) -> Iterator[type[FlexFloorError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


@pytest.mark.parametrize("kind", list(tree()), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("field", [None, "group.max_workers"])
def test_every_error_survives_pickling_with_its_message_and_field(
    kind: type[FlexFloorError], field: str | None
) -> None:
    error = kind("is 9; at most 4 slots are there", field=field)
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is kind
    assert (arrived.message, arrived.field) == (error.message, error.field)
    assert str(arrived) == str(error)


def test_an_error_with_a_field_names_it_first() -> None:
    assert str(FlexFloorError("is 0", field="n")) == "n: is 0"
    assert str(FlexFloorError("is 0")) == "is 0"


def test_the_tree_drawn_at_the_top_of_the_file_is_the_tree() -> None:
    own = [kind for kind in tree() if kind.__module__ == errors.__name__]
    drawn = re.findall(r"^[ │├└─]*(\w+Error)\b", errors.__doc__ or "", flags=re.MULTILINE)
    assert drawn == [kind.__name__ for kind in own]
