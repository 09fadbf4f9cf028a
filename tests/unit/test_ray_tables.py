"""What a node's row says, from rows as Ray 2.60 gives them."""

from dataclasses import replace

import pytest

from actors.ray_tables import GroupRow, NodeRow

GROUP = GroupRow("ns.lease.1.a", "c0ffee", {"GPU": 1.0}, "CREATED", "FINISHED", "n1", 0.01)
BUSY = {"GPU": 4.0, "CPU": 8.0}
WITH_BUNDLE = BUSY | {"GPU_group_c0ffee": 1.0, "bundle_group_c0ffee": 1000.0}


def node(total: dict[str, float], labels: dict[str, str] | None = None) -> NodeRow:
    return NodeRow("n1", labels or {}, total, {})


def test_a_granted_bundle_is_held_before_its_node_shows_it() -> None:
    assert node(BUSY).held_by(GROUP, "GPU") == 1.0
    assert node(WITH_BUNDLE).held_by(GROUP, "GPU") == 1.0
    assert node(BUSY).held_by(replace(GROUP, node_id="n2"), "GPU") == 0.0


def test_a_removed_bundle_is_held_until_its_node_no_longer_shows_it() -> None:
    removed = replace(GROUP, state="REMOVED")
    assert node(WITH_BUNDLE).held_by(removed, "GPU") == 1.0
    assert node(WITH_BUNDLE).shows(removed)
    assert node(BUSY).held_by(removed, "GPU") == 0.0
    assert not node(BUSY).shows(removed)


def test_a_bundle_that_waits_holds_nothing() -> None:
    assert node(BUSY).held_by(replace(GROUP, state="PENDING", node_id=""), "GPU") == 0.0


def test_logical_gpus_are_no_accelerators() -> None:
    assert not node(BUSY).has_accelerator
    assert node(BUSY | {"accelerator_type:H200": 1.0}).has_accelerator


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ("H200", True),
        ("H100", False),
        ("!H100", True),
        ("!H200", False),
        ("in(H100, H200)", True),
        ("!in(H100,H200)", False),
    ],
)
def test_label_selectors_mean_what_they_mean_to_ray(wanted: str, matches: bool) -> None:
    labelled = node(BUSY, {"gpu": "H200"})
    assert labelled.matches({"gpu": wanted}) is matches


def test_a_missing_label_matches_only_what_excludes_values() -> None:
    assert not node(BUSY).matches({"gpu": "H200"})
    assert node(BUSY).matches({"gpu": "!H200"})
    assert node(BUSY).matches({})
