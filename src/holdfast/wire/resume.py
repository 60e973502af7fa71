"""`checkpoint.resume` of a job file: selects a checkpoint of a job in an object store.

gs://bucket/prefix/llm                      the newest complete checkpoint of the job llm
gs://bucket/prefix/llm@1200                 that of step 1200
gs://bucket/prefix/llm@1758000003/1200      that of an attempt and a step, as shown by `holdfast checkpoints list`
"""

from __future__ import annotations

import re

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.job import ResumeSpec
from holdfast.stores.opening import parse_url

EXPECTED = (
    "the store's URL, a slash and a job's name, such as gs://bucket/prefix/llm or file:///directory/llm, and after an @ "
    "a step (llm@1200) or an attempt and a step (llm@1758000003/1200)"
)

_RESUME = re.compile(
    r"(?P<store>[^@]+)/(?P<job>[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)(?:@(?:(?P<attempt>\d{1,18})/)?(?P<step>\d{1,18}))?",
    re.ASCII,
)


def parse(text: str) -> ResumeSpec:
    """Parse the text, without reading the store. Raises `InvalidSpec`."""
    found = _RESUME.fullmatch(text)
    if found is None or (found["step"] is not None and int(found["step"]) == 0):
        raise InvalidSpec("checkpoint.resume", text, EXPECTED)
    try:
        store = str(parse_url(found["store"]))
    except InvalidSpec as error:
        raise InvalidSpec("checkpoint.resume", text, EXPECTED) from error
    attempt, step = found["attempt"], found["step"]
    return ResumeSpec(
        store, found["job"], None if attempt is None else int(attempt), None if step is None else int(step)
    )
