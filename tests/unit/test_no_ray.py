import pytest
import ray


def test_a_unit_test_cannot_start_ray() -> None:
    with pytest.raises(AssertionError, match="tests/cluster"):
        ray.init(address="local")


def test_the_refusal_covers_the_cluster_that_ray_would_start_by_itself() -> None:
    with pytest.raises(AssertionError, match="tests/cluster"):
        ray.remote(lambda: None).remote()
