"""Requests made from the OpenAPI document, right ones and wrong ones: none breaks the service, and
every answer is as the document says."""

import warnings
from collections import Counter
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.app import create_app
from tests.unit.fake_coordinator import FakeCoordinator
from tests.unit.service_client import SETTINGS, FakeTokenizer

FEW, MANY = 10, 220
"""Examples per operation, of right requests and of wrong ones each."""
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
MEANT = {501, 503}
"""A part of a dialect that is not served, and a service that cannot do it now. Anything else from
500 on is a fault."""


@cache
def operations() -> dict[str, Any]:
    """By method and path; all of one service with a fake coordinator."""
    app = create_app(FakeCoordinator(), SETTINGS, FakeTokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its client for ASGI
        schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    found = (result.ok() for result in schema.get_all_operations())
    return {operation.label: operation for operation in found}


def check_operation(operation: Any, max_examples: int) -> int:
    """Returns how many requests were made."""
    made: Counter[str] = Counter()

    def check(case: Case) -> None:
        made[operation.label] += 1
        response = case.call()
        assert response.status_code < 500 or response.status_code in MEANT, response.text
        case.validate_response(response, checks=CHECKS)

    for mode in GenerationMode:
        run = settings(
            max_examples=max_examples, suppress_health_check=list(HealthCheck), deadline=None
        )(given(case=operation.as_strategy(generation_mode=mode))(check))
        try:
            run()
        except Unsatisfiable:
            # Whoever takes no input, or any text at all, cannot be asked wrongly.
            assert mode is GenerationMode.NEGATIVE
    return made[operation.label]


@pytest.mark.parametrize("label", operations())
def test_every_answer_is_as_documented(label: str) -> None:
    assert check_operation(operations()[label], FEW)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_ten_thousand_requests_are_answered_as_documented() -> None:
    made = sum(check_operation(operation, MANY) for operation in operations().values())
    assert made >= 10_000
