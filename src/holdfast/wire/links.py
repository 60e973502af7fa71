"""Network tests between two replicators ↔ `holdfast/v1/replicator.proto`."""

from __future__ import annotations

from holdfast.domain.links import LinkMeasured, MeasureLink, OpenLink
from holdfast.v1 import replicator_pb2 as pb
from holdfast.wire.checks import LINK_MEASURED
from holdfast.wire.derived import Codec

_OPEN = Codec(OpenLink, pb.OpenLinkRequest, "open_link", named=["token"], times=["for_s"])
_MEASURE = Codec(MeasureLink, pb.MeasureLinkRequest, "measure_link", named=["node", "endpoint", "token"])

encode_open, decode_open = _OPEN.encode, _OPEN.decode
encode_measure, decode_measure = _MEASURE.encode, _MEASURE.decode


def encode_measured(measured: LinkMeasured) -> pb.MeasureLinkResponse:
    return pb.MeasureLinkResponse(measured=LINK_MEASURED.encode(measured))


def decode_measured(message: pb.MeasureLinkResponse) -> LinkMeasured:
    return LINK_MEASURED.decode(message.measured)
