"""Kubernetes' Pod Security Standard `restricted`: every control of its table, for a pod template.

https://kubernetes.io/docs/concepts/security/pod-security-standards. It contains the controls of `baseline`. Its
admission came with Kubernetes 1.23, and the API server of the tests is older, so this module reads what is rendered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]

VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)
SYSCTLS = frozenset(
    {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
     "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
     "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
     "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"}
)  # fmt: skip
SELINUX = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
SECCOMP = frozenset({"RuntimeDefault", "Localhost"})
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def violations(pod: Manifest) -> list[str]:
    """Return what the standard `restricted` forbids about a pod template; empty if the standard admits it."""
    return [*_of_pod(pod), *(f"{each['name']}: {what}" for each in _all(pod) for what in _of_container(pod, each))]


def _all(pod: Manifest) -> list[Manifest]:
    return [
        each for kind in ("initContainers", "containers", "ephemeralContainers") for each in pod["spec"].get(kind, [])
    ]


def _of_pod(pod: Manifest) -> Iterator[str]:
    spec = pod["spec"]
    yield from (f"spec.{name}" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    context = spec.get("securityContext", {})
    for volume in spec.get("volumes", []):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volume {volume['name']} of type {', '.join(volume.keys() - {'name'})}"
    yield from (f"sysctl {each['name']}" for each in context.get("sysctls", []) if each["name"] not in SYSCTLS)
    yield from _of_context(context)
    for name in pod.get("metadata", {}).get("annotations", {}):
        if name.startswith("container.apparmor.security.beta.kubernetes.io/"):
            yield f"annotation {name}"


def _of_context(context: Manifest) -> Iterator[str]:
    """What a pod and a container may set."""
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "appArmorProfile"
    if context.get("seccompProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "seccompProfile"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in SELINUX or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"


def _of_container(pod: Manifest, container: Manifest) -> Iterator[str]:
    general = pod["spec"].get("securityContext", {})
    own = container.get("securityContext", {})
    yield from _of_context(own)
    if own.get("privileged"):
        yield "privileged"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if not own.get("runAsNonRoot", general.get("runAsNonRoot")):
        yield "runAsNonRoot is not true"
    if "seccompProfile" not in own and "seccompProfile" not in general:
        yield "no seccompProfile"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    yield from (f"hostPort {port['hostPort']}" for port in container.get("ports", []) if port.get("hostPort"))
    handlers = [container[name] for name in PROBES if name in container] + [*container.get("lifecycle", {}).values()]
    for handler in handlers:
        yield from (f"{kind}.host" for kind in ("httpGet", "tcpSocket") if handler.get(kind, {}).get("host"))
