"""The text of a Kubernetes Job whose pods are workers.

Source: the reference of batch/v1 Job and v1 Pod; "Handling retriable and non-retriable pod failures with Pod failure
policy"; "Pod Security Standards", level restricted; Kueue's "Run a Kubernetes Job". `backoffLimitPerIndex` is on from
Kubernetes 1.29.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from nimble_jobs.clusters.values import absolute, image, label, place, subdomain, whole
from nimble_jobs.clusters.workers import SHARED_CACHE, BurstWorkers
from nimble_jobs.errors import UsageError
from nimble_jobs.spec.units import format_duration

DATABASE, PASSWORD = "NIMBLE_JOBS_DB", "PGPASSWORD"  # keys in the ConfigMap and the Secret, and variables
NO_CACHE = "off"  # each pod builds the schedules that it needs
_STATE = "/state"
_MEMORY = "/dev/shm"  # noqa: S108  # where Linux has shared memory
_OWN_MOUNTS = (_STATE, "/tmp", "/dev")  # noqa: S108  # a volume of the pod's own
_CONTAINER = "worker"
_CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
_TRIES = 3  # of one worker, where its failure was not a disruption
_HOST_LETTERS = 63
_KEPT_S = 86400  # how long Kubernetes keeps a finished Job
_HEADER = """\
# A Kubernetes Job whose pods are workers of nimble-jobs. Create it with: kubectl create -f FILE
# A worker that is asked to stop puts its jobs back into the queue and exits with 0, which completes its index.
"""


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """One worker a pod. Raises UsageError naming the option that cannot be used."""

    workers: BurstWorkers
    image: str
    name: str
    namespace: str | None = None
    claim: str  # PersistentVolumeClaim with inputs and outputs, which all workers share
    mount: str  # where its folder is, in the pods and for those who submit
    config_map: str  # holds the database's address
    secret: str  # holds the database's password
    shared_cache: str | None = None  # where workers share the files of schedules; None: in the shared folder
    queue: str | None = None  # of Kueue
    user: int  # numeric id of the user and group that own what workers write

    def __post_init__(self) -> None:
        image("--image", self.image)
        label("--name", self.name)
        if len(f"{self.name}-{self.workers.count - 1}") > _HOST_LETTERS:  # the name of the last pod's host
            raise UsageError(f"--name: found {self.name}; expected a shorter name, because pods add their index")
        for option, name in (("--namespace", self.namespace), ("--queue", self.queue)):
            if name is not None:
                label(option, name)
        subdomain("--claim", self.claim)
        subdomain("--config-map", self.config_map)
        subdomain("--secret", self.secret)
        whole("--user-id", self.user, 1, 2**31 - 1)
        absolute("--mount", self.mount)
        if self.mount == "/" or ":" in self.mount or any(_within(self.mount, own) for own in _OWN_MOUNTS):
            taken = ", ".join(_OWN_MOUNTS)
            raise UsageError(f"--mount: found {self.mount}; expected another folder than /, {taken}, without a colon")
        if self.shared_cache not in (None, NO_CACHE):
            place("--shared-cache", str(self.shared_cache))

    def text(self) -> str:
        """The manifest, in YAML."""
        return _HEADER + yaml.dump(self.manifest(), Dumper=_Quoting, sort_keys=False, width=float("inf"))

    def manifest(self) -> dict[str, Any]:
        """The manifest as plain values."""
        workers = self.workers
        labels = {"app.kubernetes.io/name": "nimble-jobs"}
        queued = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue else {}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": self.name,
                **({"namespace": self.namespace} if self.namespace else {}),
                "labels": labels | queued,
            },
            "spec": {
                **({"suspend": True} if self.queue else {}),  # Kueue starts it
                "completionMode": "Indexed",
                "completions": workers.count,
                "parallelism": workers.count,
                "backoffLimitPerIndex": _TRIES,
                "podFailurePolicy": {
                    "rules": [
                        # Drained nodes, preemption, eviction: a new pod takes the place, and no try is counted.
                        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                        # Bad usage or a bad configuration: trying again would not help.
                        {
                            "action": "FailIndex",
                            "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [2]},
                        },
                    ]
                },
                "ttlSecondsAfterFinished": _KEPT_S,
                "template": {"metadata": {"labels": labels}, "spec": self._pod()},
            },
        }

    def _pod(self) -> dict[str, Any]:
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.workers.stop_s,
            "automountServiceAccountToken": False,
            # Variables of a Service called nimble-jobs would look like settings with wrong names.
            "enableServiceLinks": False,
            # What a killed job leaves behind is then collected by the pod's first process.
            "shareProcessNamespace": True,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": self.user,
                "runAsGroup": self.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **self._made_first(),
            "containers": [self._container()],
            "volumes": [
                {"name": "state", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
                # NCCL and processes that read or decode need more than the 64 MB that a container has.
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{self.workers.memory_mib // 2}Mi"}},
                {"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}},
            ],
        }

    def _container(self) -> dict[str, Any]:
        workers = self.workers
        memory = f"{workers.memory_mib}Mi"
        gpus = {"nvidia.com/gpu": workers.gpus} if workers.gpus else {}
        return {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["nimble-jobs", *workers.command(workers.time_s)],
            "env": [
                {"name": "HOME", "value": _STATE},
                {"name": "USER", "value": "worker"},  # the id need not be in the image's list of users
                {"name": "NIMBLE_JOBS_HOME", "value": f"{_STATE}/nimble-jobs"},
                {"name": "NIMBLE_JOBS_LIMITS_GRACE", "value": format_duration(workers.grace_s)},
                {"name": DATABASE, "valueFrom": {"configMapKeyRef": {"name": self.config_map, "key": DATABASE}}},
                {"name": PASSWORD, "valueFrom": {"secretKeyRef": {"name": self.secret, "key": PASSWORD}}},
                *self._cache(),
            ],
            "resources": {
                "requests": {"cpu": workers.cpus, "memory": memory, **gpus},
                "limits": {"memory": memory, **gpus},
            },
            "securityContext": _CONFINED,
            "volumeMounts": [
                {"name": "state", "mountPath": _STATE},
                {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # a volume of the pod's own
                {"name": "shm", "mountPath": _MEMORY},
                {"name": "shared", "mountPath": self.mount},
            ],
        }

    def _cache(self) -> list[dict[str, str]]:
        shared = self._place()
        return [] if shared is None else [{"name": SHARED_CACHE, "value": shared}]

    def _place(self) -> str | None:
        """Where schedules are shared; Kubernetes reads $(NAME) in values and arguments."""
        if self.shared_cache == NO_CACHE:
            return None
        return (self.shared_cache or f"{self.mount}/nimble-jobs-schedules").replace("$", "$$")

    def _made_first(self) -> dict[str, Any]:
        """The folder of schedules, if it is on the mount: workers write into one that is there, and make none."""
        shared = self._place()
        if shared is None or not _within(shared, self.mount.replace("$", "$$")):
            return {}
        made = {
            "name": "schedules",
            "image": self.image,
            "command": ["mkdir", "-p", shared],
            "securityContext": _CONFINED,
            "resources": {"requests": {"cpu": 1, "memory": "64Mi"}, "limits": {"memory": "64Mi"}},
            "volumeMounts": [{"name": "shared", "mountPath": self.mount}],
        }
        return {"initContainers": [made]}


def _within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


class _Quoting(yaml.SafeDumper):
    """Quotes every text that any reader of YAML could take for something else, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_PLAIN = re.compile(r"[A-Za-z][A-Za-z./-]{2,}")
_NO_TEXT = {"true", "false", "null", "yes", "off"}


def _text(dumper: _Quoting, text: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Quoting.add_representer(str, _text)
