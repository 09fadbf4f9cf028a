"""What the Helm chart can be told, as a model from which its ``values.schema.json`` is made.

``config`` is the tree that ``flexfloor serve`` reads, under the same names. Kubernetes' own
objects (tolerations, affinities, selectors) pass through as they are.

    python -m deploy.chart_values > helm/flexfloor/values.schema.json
"""

import json
import sys
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from actors.settings import Settings
from deploy.config import FlexFloorConfig

Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""Of CPU or memory, quoted: "4", "500m", "16Gi"."""
GroupName = Annotated[str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$")]
Labels = dict[str, str]
Objects = list[dict[str, Any]]


class Image(Settings):
    """The image of every container: see ``deploy/Dockerfile``."""

    repository: str = Field(min_length=1)
    tag: str = ""
    """The chart's ``appVersion`` if empty."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Wins over the tag."""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"


class Model(Settings):
    """Where ``config.model.path`` comes from."""

    claimName: str = ""
    """A PersistentVolumeClaim that every pod mounts read-only; empty if the image has the model."""
    mountPath: str = Field(default="/models", pattern=r"^/.+")


class JournalVolume(Settings):
    """What ``config.coordinator.journal_dir`` is on."""

    claimName: str = ""
    """A PersistentVolumeClaim that the head mounts: rollouts outlive its pod if the directory is in
    it. Empty: no volume."""
    mountPath: str = Field(default="/journal", pattern=r"^/.+")


class Placement(Settings):
    """Where pods may run."""

    nodeSelector: Labels = Field(default_factory=dict)
    tolerations: Objects = Field(default_factory=list)
    affinity: dict[str, Any] = Field(default_factory=dict)
    priorityClassName: str = ""
    env: Objects = Field(default_factory=list)
    """More environment variables."""


class Head(Placement):
    """The pod of Ray's control plane, coordinator, store and HTTP replica. Requests are limits."""

    cpu: Quantity
    memory: Quantity


class WorkerGroup(Placement):
    """Pods with GPUs. A pod goes back to the cluster once none of its GPUs is leased."""

    minReplicas: int = Field(default=0, ge=0)
    maxReplicas: int = Field(ge=1)
    gpusPerPod: int = Field(default=1, ge=1)
    gpuResource: str = "nvidia.com/gpu"
    cpu: Quantity
    memory: Quantity
    idleTimeoutSeconds: int = Field(default=60, ge=1)
    """How long a pod without leases stays."""
    scalingPriority: int = 0
    """Ray's autoscaler prefers groups with a higher one."""
    runtimeClassName: str = ""
    terminationGracePeriodSeconds: int = Field(default=60, ge=1)


class Autoscaling(Settings):
    """Ray's autoscaler, a container beside the head."""

    enabled: bool
    upscalingMode: Literal["Default", "Aggressive", "Conservative"]
    cpu: Quantity
    memory: Quantity


class SecretKey(Settings):
    name: str = ""
    key: str = "password"


class GcsFaultTolerance(Settings):
    """Ray's control plane kept in Redis, so that it survives its pod."""

    enabled: bool
    redisAddress: str = ""
    passwordSecret: SecretKey = SecretKey()


class Upgrade(Settings):
    """A changed configuration or pod makes a new Ray cluster, with its own GPUs meanwhile."""

    oldClusterDelaySeconds: int = Field(ge=0)
    """How long the old cluster stays after requests go to the new one. Its open rollouts end
    with it."""


class Auth(Settings):
    """The token without which nobody joins or drives the Ray cluster."""

    existingSecret: str = ""
    """Holds it under ``auth_token``; the chart makes a random one if empty."""


class Service(Settings):
    """The Service of the HTTP port, which asks nobody who they are."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    annotations: Labels = Field(default_factory=dict)


class NetworkPolicy(Settings):
    """Who may talk to the pods: each other, and whom these lists name."""

    enabled: bool
    clients: Objects
    """Peers that may use the HTTP port. Empty: nobody."""
    operator: Objects
    """Peers that may use the dashboard's and the HTTP port: KubeRay's operator."""
    prometheus: Objects
    """Peers that may scrape."""
    kubernetesApiPorts: list[int]
    """The autoscaler's way to the API server, whatever its address."""
    extraEgress: Objects
    """More rules for outgoing connections of all pods."""


class ServiceAccounts(Settings):
    create: bool
    annotations: Labels = Field(default_factory=dict)


class PodMonitors(Settings):
    enabled: bool
    labels: Labels
    """By which a Prometheus selects its monitors."""
    interval: str = Field(pattern=r"^[0-9]+(ms|s|m)$")


class PrometheusRule(Settings):
    enabled: bool
    labels: Labels


class Dashboard(Settings):
    enabled: bool
    labels: Labels
    """By which Grafana's sidecar finds ConfigMaps."""
    annotations: Labels = Field(default_factory=dict)


class RayDashboard(Settings):
    """Where Ray's own dashboard finds its charts; empty: it has none."""

    prometheusHost: str = ""
    grafanaHost: str = ""
    grafanaIframeHost: str = ""


class Monitoring(Settings):
    podMonitors: PodMonitors
    rules: PrometheusRule
    dashboard: Dashboard
    rayDashboard: RayDashboard = RayDashboard()


class ChartValues(Settings):
    """Values of the FlexFloor chart."""

    nameOverride: str = Field(default="", pattern=r"^([a-z]([-a-z0-9]{0,45}[a-z0-9])?)?$")
    rayVersion: str = Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")
    """Ray in the image."""
    image: Image
    imagePullSecrets: Objects = Field(default_factory=list)
    config: FlexFloorConfig
    model: Model
    journal: JournalVolume = JournalVolume()
    head: Head
    workerGroups: dict[GroupName, WorkerGroup] = Field(
        min_length=1,
        json_schema_extra={"additionalProperties": False},  # other names are no groups
    )
    autoscaling: Autoscaling
    gcsFaultTolerance: GcsFaultTolerance
    upgrade: Upgrade
    suspend: bool
    """Whether the service is to have no pods at all."""
    queueName: str = ""
    """The Kueue queue that admits the service."""
    auth: Auth
    service: Service
    networkPolicy: NetworkPolicy
    serviceAccounts: ServiceAccounts
    monitoring: Monitoring
    global_: dict[str, Any] = Field(default_factory=dict, alias="global")
    """Helm's, for charts that contain this one; not read."""


def values_schema() -> str:
    """The text of ``values.schema.json``."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= ChartValues.model_json_schema(by_alias=True)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(values_schema())
