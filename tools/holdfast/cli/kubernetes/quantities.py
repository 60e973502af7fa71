"""Parses Kubernetes' quantities for the sizes of a job's pods: 8Gi, 500m, 1.5."""

from __future__ import annotations

import re
from decimal import Decimal
from types import MappingProxyType

from holdfast.domain.errors import InvalidSpec

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?")
_CPU = re.compile(r"([0-9]+)m|[0-9]+(?:\.[0-9]+)?")
_UNITS = MappingProxyType(
    {
        **{None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15},
        **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50},
    }
)


def bytes_of(option: str, text: str) -> int:
    """Return the bytes of a size. Raises `InvalidSpec` that names the option."""
    found = _QUANTITY.fullmatch(text)
    size = int(Decimal(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        raise InvalidSpec(option, text, "a size in Kubernetes' notation, such as 64Gi or 500M")
    return size


def cpu(option: str, text: str) -> str:
    """Check a number of processors and return it unchanged. Raises `InvalidSpec` that names the option."""
    if _CPU.fullmatch(text) is None or not float(text.rstrip("m")):
        raise InvalidSpec(option, text, "a number of processors in Kubernetes' notation, such as 16 or 500m")
    return text
