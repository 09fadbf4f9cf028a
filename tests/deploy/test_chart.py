"""What the chart renders: valid for the API server and KubeRay, and consistent in itself.

Nothing here has seen an operator. CEL rules of the CRDs are not evaluated.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.serve.schema import ServeDeploySchema

from deploy.application import DEPLOYMENT_NAME, build
from deploy.chart_values import WorkerGroup
from deploy.cli import RAY_ENVIRONMENT
from deploy.config import check_tree
from tests.deploy.conftest import Objects, Render

KUBERNETES = "1.28"
PODS = ("head", "gpu")
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule"}


def one(objects: Objects, kind: str, suffix: str = "") -> dict[str, Any]:
    (found,) = (
        item
        for item in objects
        if item["kind"] == kind and item["metadata"]["name"] == f"rl-flexfloor{suffix}"
    )
    return found


def cluster_of(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = one(objects, "RayService")["spec"]["rayClusterConfig"]
    return spec


def templates_of(objects: Objects) -> dict[str, dict[str, Any]]:
    """Pod templates by group; the head's is "head"."""
    cluster = cluster_of(objects)
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return groups | {"head": cluster["headGroupSpec"]["template"]}


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    return dict(container)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


@pytest.fixture(scope="module")
def plain(render: Render) -> Objects:
    return render()


def test_core_objects_are_valid(plain: Objects, everything: Objects) -> None:
    kinds = set()
    for item in [*plain, *everything]:
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
            kinds.add(item["kind"])
    assert kinds == {"ConfigMap", "NetworkPolicy", "Secret", "ServiceAccount"}


def test_custom_resources_are_valid_down_to_the_last_field(
    plain: Objects, everything: Objects, custom_schemas: dict[str, dict[str, Any]]
) -> None:
    kinds = set()
    for item in [*plain, *everything]:
        if item["kind"] in CUSTOM:
            jsonschema.validate(item, custom_schemas[item["kind"]])
            kinds.add(item["kind"])
    assert kinds == CUSTOM


def test_the_schemas_refuse_a_field_that_nobody_knows(
    plain: Objects, custom_schemas: dict[str, dict[str, Any]]
) -> None:
    service = json.loads(json.dumps(one(plain, "RayService")))
    container_of(service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"])["ports"][0][
        "porrt"
    ] = 1
    with pytest.raises(jsonschema.ValidationError, match="porrt"):
        jsonschema.validate(service, custom_schemas["RayService"])


def test_pod_templates_are_valid_pods(everything: Objects) -> None:
    for template in templates_of(everything).values():
        pod = {"apiVersion": "v1", "kind": "Pod"} | template
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_ray_takes_the_serve_configuration(plain: Objects) -> None:
    text = one(plain, "RayService")["spec"]["serveConfigV2"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (application,) = config.applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert application.route_prefix == "/"
    assert config.proxy_location == "HeadOnly"
    ports = {port["name"]: port["containerPort"] for port in head_ports(plain)}
    assert config.http_options.port == ports["serve"]


def head_ports(objects: Objects) -> list[dict[str, Any]]:
    ports: list[dict[str, Any]] = container_of(templates_of(objects)["head"])["ports"]
    return ports


def test_the_builder_takes_the_arguments(plain: Objects) -> None:
    text = one(plain, "RayService")["spec"]["serveConfigV2"]
    (application,) = yaml.safe_load(text)["applications"]
    config, errors = check_tree(application["args"])
    assert config is not None
    assert errors == []
    assert config.service.host == "0.0.0.0"
    bound = build(application["args"])._bound_deployment
    assert (bound.name, bound.num_replicas) == (DEPLOYMENT_NAME, 1)


def test_rays_autoscaler_reads_the_groups(everything: Objects) -> None:
    cluster = {"metadata": {"name": "c", "namespace": "n"}, "spec": cluster_of(everything)}
    nodes = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    assert set(nodes) == {"headgroup", "gpu", "spot"}
    head = nodes["headgroup"]["resources"]
    assert (head["CPU"], head["flexfloor_control"]) == (0, 1)
    assert "GPU" not in head
    assert nodes["gpu"]["resources"]["GPU"] == 1
    assert nodes["spot"]["resources"]["GPU"] == 4
    assert (nodes["gpu"]["min_workers"], nodes["gpu"]["max_workers"]) == (0, 8)
    assert nodes["gpu"]["idle_timeout_s"] == 60
    # Only the head can hold what keeps coordinator, store and replica in place.
    assert [name for name, node in nodes.items() if "flexfloor_control" in node["resources"]] == [
        "headgroup"
    ]


def test_what_a_worker_group_leaves_out_is_as_the_model_says(everything: Objects) -> None:
    spot = WorkerGroup(maxReplicas=2, gpusPerPod=4, cpu="16", memory="128Gi")
    (group,) = (g for g in cluster_of(everything)["workerGroupSpecs"] if g["groupName"] == "spot")
    assert group["minReplicas"] == group["replicas"] == spot.minReplicas
    assert group["maxReplicas"] == spot.maxReplicas
    assert group["idleTimeoutSeconds"] == spot.idleTimeoutSeconds
    assert group["priority"] == spot.scalingPriority
    pod = group["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == spot.terminationGracePeriodSeconds
    limits = container_of(group["template"])["resources"]["limits"]
    assert limits == {"cpu": spot.cpu, "memory": spot.memory, spot.gpuResource: spot.gpusPerPod}
    small = WorkerGroup(maxReplicas=1, cpu="1", memory="1Gi")
    assert small.gpusPerPod == 1  # the other default, used by the group of values.yaml


def test_the_head_has_guaranteed_resources_and_no_gpu(plain: Objects) -> None:
    resources = container_of(templates_of(plain)["head"])["resources"]
    assert resources["requests"] == resources["limits"]
    assert set(resources["limits"]) == {"cpu", "memory"}


def test_the_ray_cluster_asks_for_a_token_that_the_chart_makes(
    plain: Objects, render: Render
) -> None:
    auth = cluster_of(plain)["authOptions"]
    assert auth == {"mode": "token", "secretName": "rl-flexfloor-token"}
    assert set(one(plain, "Secret", "-token")["data"]) == {"auth_token"}
    given = render({"auth": {"existingSecret": "mine"}})
    assert cluster_of(given)["authOptions"]["secretName"] == "mine"
    assert [item for item in given if item["kind"] == "Secret"] == []


def test_nobody_outside_may_use_the_http_port_unless_told(plain: Objects) -> None:
    assert one(plain, "RayService")["spec"]["serveService"]["spec"]["type"] == "ClusterIP"
    serve = next(port["containerPort"] for port in head_ports(plain) if port["name"] == "serve")
    for policy in (item for item in plain if item["kind"] == "NetworkPolicy"):
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        for rule in policy["spec"]["ingress"]:
            assert rule["from"]  # an empty list would be everybody
            if serve in [port["port"] for port in rule.get("ports", [])]:
                (peer,) = rule["from"]
                name = peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
                assert name in ("kuberay-operator", "prometheus")


def test_clients_that_are_named_may_use_the_http_port_of_the_head_only(
    everything: Objects,
) -> None:
    client = {"podSelector": {"matchLabels": {"app": "trainer"}}}
    rules = [
        (policy["metadata"]["name"], rule["ports"])
        for policy in everything
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"]["ingress"]
        if client in rule["from"]
    ]
    assert rules == [("rl-flexfloor-head", [{"protocol": "TCP", "port": 8000}])]


def test_selectors_match_the_pods_that_they_mean(everything: Objects) -> None:
    labels = {name: t["metadata"]["labels"] for name, t in templates_of(everything).items()}
    # KubeRay sets it on all its pods and finds them by it.
    assert all("app.kubernetes.io/name" not in of_pod for of_pod in labels.values())
    heads, pods = {"head"}, set(labels)
    meant = {
        ("NetworkPolicy", ""): pods,
        ("NetworkPolicy", "-head"): heads,
        ("PodMonitor", "-head"): heads,
        ("PodMonitor", "-worker"): pods - heads,
    }
    for (kind, suffix), expected in meant.items():
        spec = one(everything, kind, suffix)["spec"]
        selector = spec["podSelector" if kind == "NetworkPolicy" else "selector"]
        assert {name for name in labels if selects(selector, labels[name])} == expected
    within = one(everything, "NetworkPolicy")["spec"]["ingress"][0]["from"][0]["podSelector"]
    assert all(selects(within, of_pod) for of_pod in labels.values())


def test_monitors_scrape_ports_that_exist_and_none_twice(everything: Objects) -> None:
    for component, group in (("head", "head"), ("worker", "gpu")):
        named = {port["name"] for port in container_of(templates_of(everything)[group])["ports"]}
        endpoints = one(everything, "PodMonitor", f"-{component}")["spec"]["podMetricsEndpoints"]
        scraped = [endpoint["port"] for endpoint in endpoints]
        assert set(scraped) <= named
        assert len(set(scraped)) == len(scraped)
    assert "serve" not in scraped  # only the head's proxy answers


def test_prometheus_may_reach_every_port_that_it_scrapes(everything: Objects) -> None:
    reachable = {
        port["port"]
        for suffix in ("", "-head")
        for rule in one(everything, "NetworkPolicy", suffix)["spec"]["ingress"]
        if "prometheus" in json.dumps(rule["from"])
        for port in rule["ports"]
    }
    scraped = {
        endpoint["port"]
        for endpoint in one(everything, "PodMonitor", "-head")["spec"]["podMetricsEndpoints"]
    }
    assert {p["containerPort"] for p in head_ports(everything) if p["name"] in scraped} == reachable


def test_every_account_and_secret_that_pods_name_is_there(everything: Objects) -> None:
    accounts = {i["metadata"]["name"] for i in everything if i["kind"] == "ServiceAccount"}
    named = {t["spec"]["serviceAccountName"] for t in templates_of(everything).values()}
    assert named == accounts
    secrets = {i["metadata"]["name"] for i in everything if i["kind"] == "Secret"}
    assert cluster_of(everything)["authOptions"]["secretName"] in secrets


def test_only_the_head_and_only_for_its_autoscaler_has_a_token_of_the_api_server(
    plain: Objects, render: Render
) -> None:
    def mounted(objects: Objects) -> dict[str, bool]:
        return {
            name: template["spec"]["automountServiceAccountToken"]
            for name, template in templates_of(objects).items()
        }

    assert mounted(plain) == {"head": True, "gpu": False}
    without = render({"autoscaling": {"enabled": False}})
    assert mounted(without) == {"head": False, "gpu": False}
    egress = one(without, "NetworkPolicy", "-head")["spec"].get("egress")
    assert not egress


def test_pods_run_without_privileges(everything: Objects) -> None:
    for template in templates_of(everything).values():
        pod, container = template["spec"]["securityContext"], container_of(template)
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pods_have_the_environment_of_the_command(plain: Objects) -> None:
    for template in templates_of(plain).values():
        for variable in container_of(template)["env"]:
            assert RAY_ENVIRONMENT[variable["name"]] == variable["value"]


def test_readiness_of_gpu_pods_is_left_to_kuberay(everything: Objects) -> None:
    # It asks for an HTTP proxy, which they do not run: that keeps them out of the Service.
    for template in templates_of(everything).values():
        assert "readinessProbe" not in container_of(template)


def test_another_configuration_makes_another_cluster(plain: Objects, render: Render) -> None:
    def checksum(objects: Objects) -> str:
        text: str = templates_of(objects)["head"]["metadata"]["annotations"]["checksum/config"]
        return text

    assert checksum(plain) == checksum(render())
    changed = render({"config": {"group": {"max_samples_per_worker": 7}}})
    assert checksum(changed) != checksum(plain)
    assert one(plain, "RayService")["spec"]["upgradeStrategy"] == {"type": "NewCluster"}


def test_the_redis_password_is_only_referred_to(everything: Objects) -> None:
    options = cluster_of(everything)["gcsFaultToleranceOptions"]
    assert options["redisPassword"] == {
        "valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}
    }
    assert "redis" not in json.dumps(cluster_of(everything)["headGroupSpec"]["rayStartParams"])
    egress = one(everything, "NetworkPolicy", "-head")["spec"]["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 6380}]} in egress


def test_a_digest_wins_over_the_tag(plain: Objects, everything: Objects) -> None:
    assert container_of(templates_of(plain)["head"])["image"] == "flexfloor:0.1.0"
    image = container_of(templates_of(everything)["head"])["image"]
    assert re.fullmatch(r"flexfloor@sha256:0{64}", image)


def test_the_notes_say_what_is_missing(render_files: Callable[..., dict[str, str]]) -> None:
    notes = render_files()["NOTES.txt"]
    assert "service/rl-flexfloor-serve-svc" in notes
    assert "asks for no token" in notes
    assert "lets no client in" in notes
    assert "must have the model" in notes
    opened = render_files({"networkPolicy": {"enabled": False}})["NOTES.txt"]
    assert "every pod of the cluster may use it" in opened
