"""The chart's values: one schema made from the model, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.chart_values import ChartValues, values_schema
from tests.deploy.conftest import CHART, Render

GPU_GROUP = {"maxReplicas": 1, "cpu": "1", "memory": "1Gi"}


def test_the_schema_is_the_model_s() -> None:
    """After a change: ``python -m deploy.chart_values > helm/flexfloor/values.schema.json``."""
    assert (CHART / "values.schema.json").read_text() == values_schema()


def test_the_default_values_are_right() -> None:
    ChartValues.model_validate(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_every_value_that_there_is_has_its_default_written_down() -> None:
    written = yaml.safe_load((CHART / "values.yaml").read_text())
    names = {field.alias or name for name, field in ChartValues.model_fields.items()}
    assert set(written) == names - {"global"}
    for name in ("image", "head", "autoscaling", "networkPolicy", "monitoring"):
        model = ChartValues.model_fields[name].annotation
        assert model is not None
        assert set(written[name]) == set(model.model_fields), name


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hed": {}}, "hed"),
        ({"config": {"group": {"max_wokers": 4}}}, "max_wokers"),
        ({"config": {"group": {"max_workers": "many"}}}, "max_workers"),
        ({"workerGroups": {"GPU": GPU_GROUP}}, "GPU"),
        ({"workerGroups": {"gpu": {"memory": "lots"}}}, "lots"),
        ({"image": {"digest": "sha256:0"}}, "digest"),
        ({"service": {"type": "Nodeport"}}, "type"),
        ({"workerGroups": {"gpu": {"minReplicas": 9}}}, "above maxReplicas = 8"),
        ({"config": {"group": {"max_workers": 9}}}, "the worker groups have at most 8"),
        ({"config": {"coordinator": {"resources": {"CPU": 1}}}}, "resources.CPU"),
        ({"gcsFaultTolerance": {"enabled": True}}, "redisAddress is empty"),
        ({"nameOverride": "x" * 48}, "nameOverride"),
    ],
)
def test_wrong_values_are_refused_by_name(
    render: Render, values: dict[str, Any], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        render(values)


@pytest.mark.parametrize(
    ("release", "told"), [("r" * 40, "has 50 characters"), ("1st", "begin with a letter")]
)
def test_a_name_that_kuberay_cannot_carry_is_refused(
    render: Render, release: str, told: str
) -> None:
    with pytest.raises(Exception, match=told):
        render(name=release)


def test_several_pods_of_several_gpus_hold_the_workers(render: Render) -> None:
    assert render({"workerGroups": {"gpu": {"maxReplicas": 1, "gpusPerPod": 8}}})
    with pytest.raises(Exception, match="needs 8 GPUs"):
        render({"workerGroups": {"gpu": {"maxReplicas": 1, "gpusPerPod": 4}}})


def test_a_volume_for_the_journal_is_mounted_where_the_journal_is_or_refused(
    render: Render,
) -> None:
    volume = {"claimName": "kept"}
    on_it = {"coordinator": {"journal_dir": "/journal/rollouts"}}
    (service,) = (
        o for o in render({"journal": volume, "config": on_it}) if o["kind"] == "RayService"
    )
    cluster = service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert {"name": "journal", "mountPath": "/journal"} in head["containers"][0]["volumeMounts"]
    (claimed,) = (v for v in head["volumes"] if v["name"] == "journal")
    assert claimed["persistentVolumeClaim"] == {"claimName": "kept"}
    for group in cluster["workerGroupSpecs"]:
        assert "kept" not in str(group), "only the coordinator writes it"
    with pytest.raises(Exception, match=r"which is not on journal\.claimName"):
        render(
            {"journal": volume, "config": {"coordinator": {"journal_dir": "/elsewhere/rollouts"}}}
        )


def test_the_chart_may_be_part_of_another(render: Render) -> None:
    assert render({"global": {"anything": 1}})


def test_helm_finds_nothing_to_complain_about(helm: Any) -> None:
    report = helm.lint(CHART, {}, strict=True)
    assert report["errors"] == []
    worth_telling = [m["error"] for m in report["messages"] if m["severity"] > 1]
    assert worth_telling == []


def test_the_packaged_chart_holds_what_the_folder_only_links_to(helm: Any, tmp_path: Path) -> None:
    packaged = Path(helm.package(CHART, destination=tmp_path))
    everything = {"monitoring": {"rules": {"enabled": True}, "dashboard": {"enabled": True}}}
    from_folder = helm.Chart.load(CHART).render(everything, name="rl")
    from_package = helm.Chart.load(packaged).render(everything, name="rl")
    for template in ("dashboard.yaml", "prometheusrule.yaml"):
        path = f"flexfloor/templates/{template}"
        assert from_folder[path].strip()
        assert from_package[path] == from_folder[path]
