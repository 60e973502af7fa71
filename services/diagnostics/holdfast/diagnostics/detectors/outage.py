"""Recognises exceptions because of a failed file system or service, which no script causes and no other code avoids. Pure.

A failed file system is recognised by its error number, in the notation of each library, and by the C library's messages.

A failed service is recognised only in exceptions of its client: by the module of the exception's type, or by the package that
raised it (a tracker raises a `ValueError`, an object store's file system an `OSError`). The first rule that applies decides:

1. a message about too many requests or expired credentials: an outage, whatever the status;
2. an HTTP status, or a code of the store or RPC: an outage if the server failed (5xx, 408, 425, 429 …), otherwise a refusal;
3. a message of a refusal (no permission, no such key);
4. the name of the type, or a message about connections and time-outs: an outage.

Any other exception is an outage only if its message is unambiguous. A refusal is a problem of the script or its environment.
"""

from __future__ import annotations

import re

from holdfast.domain.signals import WorkerError

# Linux error numbers, with their messages if these are unambiguous.
_STORAGE_ERRNOS: dict[int, str] = {
    5: "input/output error",  # EIO
    6: "",  # ENXIO: the device no longer exists
    19: "",  # ENODEV
    28: "no space left",  # ENOSPC
    30: "read-only file system",  # EROFS
    37: "no locks available",  # ENOLCK: a lock manager that does not answer
    62: "",  # ETIME
    67: "link has been severed",  # ENOLINK
    70: "communication error on send",  # ECOMM
    71: "",  # EPROTO
    74: "",  # EBADMSG: a checksum on the disk does not match
    107: "transport endpoint is not connected",  # ENOTCONN: a FUSE daemon, or a Lustre client, was cut off
    108: "cannot send after transport endpoint",  # ESHUTDOWN: a Lustre client was evicted
    112: "host is down",  # EHOSTDOWN: NFS, CIFS
    116: "stale file handle",  # ESTALE
    117: "structure needs cleaning",  # EUCLEAN
    121: "remote i/o error",  # EREMOTEIO
    122: "disk quota exceeded",  # EDQUOT
    123: "no medium found",  # ENOMEDIUM
    126: "required key not available",  # ENOKEY: Kerberos, encrypted directories
    127: "key has expired",  # EKEYEXPIRED
}
# The notations of error numbers in Python, in HDF5 and C++ libraries, and in Rust (two).
_ERRNO = re.compile(r"errno[ =:]*(\d+)|\(os error (\d+)\)|Os \{ code: (\d+)", re.IGNORECASE)
_STORAGE = re.compile(
    "|".join(re.escape(words) for words in _STORAGE_ERRNOS.values() if words)
    + r"|stale nfs file handle|PytorchStreamWriter failed|unexpected pos \d+ vs|iostream error|file write failed",
    re.IGNORECASE,
)
# A network file system that has failed raises the error number of a socket together with the name of the file.
_NETWORK_ERRNO_OF_A_FILE = re.compile(r"\[Errno (?:100|101|103|110|113)\] [^:]*: '/")


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# Packages and modules whose errors are about a remote service: outermost names, the standard library included.
_CLIENTS = _names(
    # HTTP and sockets
    "requests urllib urllib3 http httpx httpcore aiohttp socket ssl ftplib smtplib",
    # object stores
    "boto3 botocore aiobotocore s3fs s3transfer s3torchconnector s3torchconnectorclient awscrt minio google gcsfs azure adlfs",
    "oss2 ossfs obstore fsspec pyarrowfs smart_open cloudpathlib webdataset streaming",
    # hubs
    "huggingface_hub hf_xet hf_transfer modelscope",
    # trackers
    "wandb mlflow neptune neptune_scale neptune_fetcher bravado comet_ml clearml swanlab aim dvclive sagemaker",
    # RPC and data bases
    "grpc redis pymongo psycopg2 psycopg pymysql sqlalchemy kafka paramiko msal",
)
# Modules that only re-raise exceptions: the next outer frame decides.
_PASSING = _names("asyncio concurrent contextlib functools threading tenacity backoff retrying retry")

_TRANSIENT_NAME = re.compile(
    r"Timeout|TimedOut|timeout$|Connect|Unavailable|Throttl|RateLimit|TooMany|Retr(?:y|ies)|Network|Transport|SSL|Gateway"
    r"|ServerError|ServerBusy|InternalError|Protocol|Disconnected|IncompleteRead|Payload|ChunkedEncoding|ChunkLength"
    r"|DeadlineExceeded|SlowDown|gaierror|URLError|CommError|Aborted|Cancelled|BadStatusLine|NameResolution|Unreachable"
    r"|MetadataRetrieval|HTTPClientError|ResponseStreaming|Service(?:Re|Start|Poll)|Checksum|AutoReconnect"
    r"|^(?:Read|Write|Close|ClientOS)Error$|^LocalEntryNotFoundError$|^DataLoss$|^Unknown$"
)
# Type names that are unambiguous in any module.
_SERVICE_TYPES = _names(
    "ConnectionError ConnectTimeout ReadTimeout Timeout TimeoutError ConnectTimeoutError ReadTimeoutError MaxRetryError",
    "NewConnectionError ProtocolError ChunkedEncodingError IncompleteRead RemoteDisconnected SSLError EndpointConnectionError",
    "CommError URLError gaierror timeout ServiceUnavailable UnavailableError DeadlineExceeded DeadlineExceededError",
    "GatewayTimeout BadGateway TooManyRequests InternalServerError",
)
_REFUSING_NAME = re.compile(
    r"NotFound|Forbidden|Unauthor|Unauthenticated|Authenti|Permission|BadRequest|Invalid|Missing|Validation|AlreadyExists"
    r"|Conflict|Gated|Disabled|Usage|NoCredentials|NoSuch|NotImplemented|Precondition|OutOfRange|OfflineMode"
)
_LIMITED = re.compile(
    r"rate.?limit|too many requests|reduce your request rate|\bslow ?down\b|throttl|request.?limit.?exceeded"
    r"|expired.?token|token (?:included in the request )?(?:is|has) expired|credentials (?:have |were )?expired",
    re.IGNORECASE,
)
# An unambiguous status, in the message of any exception …
_STATUS = re.compile(
    r"\b(\d{3}) (?:Server|Client) Error|(?:Server|Client) error '(\d{3})\b"
    r"|\bHTTP(?:/[\d.]+)?[ :]+(?:(?:Error|status|code)[ :]+)*(\d{3})\b|\bstatus[ _]?code\W{1,4}(\d{3})\b",
    re.IGNORECASE,
)
# … and in the message of a client: at its beginning, as a code, or at its end.
_CLIENTS_STATUS = re.compile(
    r"\A\W{0,3}(\d{3})\b|\((\d{3})\) when|Response \[(\d{3})\]"
    r"|\b(?:code|status|error|response|returned)[\"']?(?: code)?[ :=]{1,3}(\d{3})\b"
    r"|, (\d{3})\Z",
    re.IGNORECASE,
)
_OF_THE_SERVER = frozenset(
    {408, 425, 429, 499, 500, 502, 503, 504, 507, 508, 509, *range(520, 528), 529, 530, 598, 599}
)
_PERMANENT = frozenset({501, 505})
_CODE = re.compile(r"\(([A-Z]\w+)\) when calling|ErrorCode: ?(\w+)|StatusCode\.([A-Z_]+)|\A([A-Z]+(?:_[A-Z]+)+):")
_CODES_OF_AN_OUTAGE = _names(
    "ServiceUnavailable InternalError InternalServerError RequestTimeout RequestThrottled RequestThrottledException ServerBusy",
    "BandwidthLimitExceeded ProvisionedThroughputExceededException PriorRequestNotComplete OperationTimedOut OperationAborted",
    "UNAVAILABLE DEADLINE_EXCEEDED RESOURCE_EXHAUSTED ABORTED INTERNAL UNKNOWN CANCELLED DATA_LOSS INTERNAL_ERROR",
    "TEMPORARILY_UNAVAILABLE",
)
_REFUSED = re.compile(r"\b4(?:0[0-79]|1\d|22) (?:Client )?Error|\b(?:401|403|404)\b", re.IGNORECASE)  # not 408 and 429
_REFUSING = re.compile(
    r"do(?:es)? not have (?:permission|access)|access denied|not authori[sz]ed|unauthori[sz]ed|forbidden|api.?key"
    r"|invalid credentials|does not exist|not found|has been disabled",
    re.IGNORECASE,
)
_SERVICE = re.compile(
    r"name resolution|name or service not known|could(?: not|n.t) resolve host|Max retries exceeded|couldn.t connect to"
    r"|Couldn.t reach|Connection error|could not connect to|Failed to establish a new connection|timed out"
    r"|\b(?:429|500|502|503|504) (?:Server|Client) Error|Service (?:Temporarily )?Unavailable|Gateway Time-?out|Bad Gateway"
    r"|Too Many Requests|HTTP/?\S* 50[0234]|CAS service error|reqwest\w* error|error sending request for url",
    re.IGNORECASE,
)
_CONNECTION = re.compile(
    r"cannot connect|unable to connect|connection (?:was )?(?:reset|aborted|closed|refused|lost)|connection (?:timeout|broken)"
    r"|closed the connection|remote end closed|time.?out|unreachable|no route to host|temporarily unavailable"
    r"|internal (?:server )?error|network (?:error|is down)|broken pipe|EOF occurred|try again|\bunavailable\b",
    re.IGNORECASE,
)
_WORKERS_FILE = re.compile(r'File "([^"]+)", line')


def is_storage(message: str) -> bool:
    """Whether a file system failed: it is full, over a quota, cut off or broken."""
    numbers = (next(filter(None, found.groups())) for found in _ERRNO.finditer(message))
    return (
        any(int(number) in _STORAGE_ERRNOS for number in numbers if len(number) < 4)
        or _STORAGE.search(message) is not None
        or _NETWORK_ERRNO_OF_A_FILE.search(message) is not None
    )


def is_service(error: WorkerError) -> bool:
    """Whether a remote service did not answer or failed. A service that refuses a request has not failed."""
    module, _, name = error.type.rpartition(".")
    message = error.message
    if of_a_client(error):
        return _failed_for(name, message)
    status = _status(_STATUS, message)
    if status is not None:
        return _is_of_the_server(status)
    if _REFUSED.search(message):
        return False
    return (bool(module) and name in _SERVICE_TYPES) or _SERVICE.search(message) is not None


def of_a_client(error: WorkerError) -> bool:
    """Whether the client of a remote service raised the exception, and neither the script nor the communication of ranks."""
    if (error.type.partition(".")[0] in _CLIENTS and "." in error.type) or "ConnectionPool(host=" in error.message:
        return True
    return _raised_in(error) in _CLIENTS


def _failed_for(name: str, message: str) -> bool:
    """Whether an exception with this type name means that the service failed."""
    if _LIMITED.search(message):
        return True
    for code in (found for match in _CODE.finditer(message) for found in match.groups() if found):
        return code in _CODES_OF_AN_OUTAGE
    status = _status(_STATUS, message) or _status(_CLIENTS_STATUS, message)
    if status is not None and not name.startswith(("Aborted", "Cancelled")):  # 409 and 499, which come with a race
        return _is_of_the_server(status)
    if _TRANSIENT_NAME.search(name) and not _REFUSING.search(message):
        return True
    if _REFUSING_NAME.search(name) or _REFUSING.search(message) or _REFUSED.search(message):
        return False
    return _SERVICE.search(message) is not None or _CONNECTION.search(message) is not None


def _status(pattern: re.Pattern[str], message: str) -> int | None:
    """The first number that is an HTTP error status."""
    for match in pattern.finditer(message):
        number = int(next(filter(None, match.groups())))
        if 400 <= number <= 451 or number in _PERMANENT or number in _OF_THE_SERVER:
            return number
    return None


def _is_of_the_server(status: int) -> bool:
    return status in _OF_THE_SERVER


def _raised_in(error: WorkerError) -> str:
    """The package that raised the exception, in a data loader's worker if it was raised there. Empty without frames."""
    files = [frame.rpartition(":")[0] for frame in error.frames]
    if files and files[-1].endswith("torch/_utils.py"):
        files = _WORKERS_FILE.findall(error.message)
    for file in reversed(files):
        package = _package(file)
        if package not in _PASSING:
            return package
    return ""


def _package(file: str) -> str:
    """The outermost package of an installed source file, or the standard library's module; empty for other files."""
    for root in ("site-packages/", "dist-packages/"):
        if root in file:
            return _first(file.rpartition(root)[2])
    if (library := re.search(r"/lib/python3[.\d]*/(.+)", file)) is not None:
        return _first(library[1])
    return "" if file.startswith("/") else _first(file)


def _first(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py")
