"""Errors of file systems and services, in the words of the libraries that raise them, and what only looks like one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.agent.workers.errors import read_error_file
from holdfast.diagnostics.detectors.error_class import ErrorClass, class_of
from holdfast.diagnostics.detectors.exit_cause import Cause, cause_of
from holdfast.domain.signals import WorkerError, WorkerExited
from holdfast.train import error_file

USER = "/home/user/project/train.py:88 main"
SITE = "/opt/venv/lib/python3.11/site-packages/"
STDLIB = "/usr/lib/python3.11/"

# Type, message, frames. Of a client's own type the frames do not matter.
STORAGE = [
    ("OSError", "[Errno 37] No locks available", USER),
    ("OSError", "Unable to open file (unable to lock file, errno = 37, error message = 'No locks available')", USER),
    ("BlockingIOError", "[Errno 37] No locks available: '/lustre/run/index.lock'", USER),
    ("RuntimeError", "disk quota exceeded", USER),
    ("tensorflow.python.framework.errors_impl.ResourceExhaustedError", "/gpfs/out/ckpt; Disk quota exceeded", USER),
    ("OSError", "[Errno 19] No such device: '/mnt/fuse/data.bin'", USER),
    ("OSError", "[Errno 6] No such device or address: '/nvme0/cache'", USER),
    ("OSError", "[Errno 67] Link has been severed: '/afs/cell/run'", USER),
    ("OSError", "[Errno 71] Protocol error: '/mnt/cifs/run'", USER),
    ("OSError", "[Errno 74] Bad message: '/scratch/a.npy'", USER),
    ("OSError", "[Errno 117] Structure needs cleaning: '/scratch'", USER),
    ("OSError", "[Errno 112] Host is down: '/mnt/nfs/data'", USER),
    ("OSError", "[Errno 121] Remote I/O error: '/mnt/nfs/data/0001.tar'", USER),
    ("OSError", "[Errno 126] Required key not available: '/home/user/out'", USER),
    ("OSError", "[Errno 127] Key has expired", USER),
    ("TimeoutError", "[Errno 110] Connection timed out: '/weka/data/shard-0001.tar'", USER),
    ("OSError", "[Errno 113] No route to host: '/mnt/nfs/data'", USER),
    ("RuntimeError", "Stale NFS file handle", USER),
    ("RuntimeError", "basic_ios::clear: iostream error", USER),
    ("safetensors_rust.SafetensorError", "I/O error: No space left on device (os error 28)", USER),
    (
        "safetensors_rust.SafetensorError",
        'Error while serializing: IoError(Os { code: 122, kind: FilesystemQuotaExceeded, message: "Disk quota exceeded" })',
        USER,
    ),
    ("Exception", "Input/output error (os error 5)", USER),
    ("h5py.Error", "Can't write data (file write failed: time = Sun, errno = 5)", USER),
    (
        "OSError",
        'Caught OSError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n  File "/home/user/d.py"'
        ", line 3, in __getitem__\nOSError: [Errno 116] Stale file handle",
        SITE + "torch/_utils.py:733 reraise",
    ),
]

SERVICE = [
    # trackers, which raise what they like
    (
        "ValueError",
        'b\'{"msg":"unexpected error","code":500,"data":null}\'',
        SITE + "comet_ml/connection.py:140 get_run_id",
    ),
    ("comet_ml.exceptions.CometRestApiException", "POST https://www.comet.com/api failed with status code 503: ", USER),
    ("wandb.errors.CommError", "Error communicating with wandb backend", USER),
    ("wandb.errors.errors.CommError", "HTTP 500: Internal Server Error (<Response [500]>)", USER),
    (
        "Exception",
        "The wandb backend process has shutdown: Broken pipe",
        SITE + "wandb/sdk/interface/router.py:20 join",
    ),
    (
        "mlflow.exceptions.MlflowException",
        "API request to endpoint /api/2.0/mlflow/runs/log-batch failed with error code 503 != 200. Response body: 'upstream'",
        USER,
    ),
    ("mlflow.exceptions.RestException", "TEMPORARILY_UNAVAILABLE: The service is at capacity", USER),
    ("mlflow.exceptions.RestException", "INTERNAL_ERROR: The server encountered an internal error", USER),
    ("bravado.exception.HTTPServiceUnavailable", "503 Service Unavailable", USER),
    ("neptune.exceptions.NeptuneConnectionLostException", "The connection to the Neptune server was lost.", USER),
    # object stores
    (
        "google.api_core.exceptions.ServiceUnavailable",
        "503 POST https://storage.googleapis.com/upload: try again",
        USER,
    ),
    (
        "google.api_core.exceptions.InternalServerError",
        "500 GET https://storage.googleapis.com/b/x: backendError",
        USER,
    ),
    (
        "google.api_core.exceptions.TooManyRequests",
        "429 GET https://storage.googleapis.com/b/x: rateLimitExceeded",
        USER,
    ),
    ("google.api_core.exceptions.RetryError", "Timeout of 120.0s exceeded, last exception: HTTPSConnectionPool", USER),
    ("google.api_core.exceptions.DeadlineExceeded", "504 Deadline Exceeded", USER),
    ("google.api_core.exceptions.Aborted", "409 The operation was aborted", USER),
    (
        "google.auth.exceptions.TransportError",
        "Failed to retrieve http://metadata.google.internal/computeMetadata",
        USER,
    ),
    ("gcsfs.retry.HttpError", "We encountered an internal error. Please try again., 503", USER),
    ("gcsfs.retry.ChecksumError", "Downloaded data does not match checksum", USER),
    ("OSError", "[Errno 16] Please reduce your request rate.", SITE + "s3fs/core.py:140 _error_wrapper"),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (503) when calling the PutObject operation: Slow Down",
        USER,
    ),
    ("botocore.exceptions.ClientError", "An error occurred (SlowDown) when calling the PutObject operation: ", USER),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (InternalError) when calling the GetObject operation: We",
        USER,
    ),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (ThrottlingException) when calling the X operation: Rate",
        USER,
    ),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (ExpiredToken) when calling the PutObject operation: The",
        USER,
    ),
    ("botocore.exceptions.ReadTimeoutError", 'Read timeout on endpoint URL: "https://s3.amazonaws.com/b/k"', USER),
    ("botocore.exceptions.ConnectionClosedError", "Connection was closed before we received a valid response", USER),
    ("botocore.exceptions.ResponseStreamingError", "An error occurred while reading from response stream", USER),
    ("botocore.exceptions.IncompleteReadError", "1 read, but total bytes expected is 8388608.", USER),
    (
        "boto3.exceptions.S3UploadFailedError",
        "Failed to upload a to b/k: An error occurred (SlowDown) when calling",
        USER,
    ),
    (
        "azure.core.exceptions.ServiceRequestError",
        "<urllib3.connection.HTTPSConnection object>: Failed to establish",
        USER,
    ),
    ("azure.core.exceptions.HttpResponseError", "The server is busy.\nErrorCode:ServerBusy", USER),
    ("s3torchconnectorclient._mountpoint_s3_client.S3Exception", "Client error: Request timeout", USER),
    ("fsspec.exceptions.FSTimeoutError", "", USER),
    # hubs
    ("huggingface_hub.errors.HfHubHTTPError", "500 Server Error: Internal Server Error for url: https://hf.co/x", USER),
    ("huggingface_hub.errors.HfHubHTTPError", "429 Client Error: Too Many Requests for url: https://hf.co/x", USER),
    (
        "huggingface_hub.errors.LocalEntryNotFoundError",
        "An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local "
        "cache. Please check your connection and try again or make sure your Internet connection is on.",
        USER,
    ),
    (
        "RuntimeError",
        "Data processing error: CAS service error : Reqwest Error: HTTP status server error (502 Bad Gateway)",
        SITE + "huggingface_hub/file_download.py:626 xet_get",
    ),
    ("urllib.error.HTTPError", "HTTP Error 503: Service Unavailable", USER),
    ("urllib.error.HTTPError", "HTTP Error 403: rate limit exceeded", USER),
    # HTTP
    ("httpx.ConnectError", "[Errno 101] Network is unreachable", USER),
    ("httpx.RemoteProtocolError", "peer closed connection without sending complete message body", USER),
    ("httpx.ReadError", "", USER),
    ("httpx.HTTPStatusError", "Server error '503 Service Unavailable' for url 'https://tracking/api'", USER),
    ("aiohttp.client_exceptions.ClientConnectorError", "Cannot connect to host s3.amazonaws.com:443 ssl:default", USER),
    ("aiohttp.client_exceptions.ServerDisconnectedError", "Server disconnected", USER),
    ("aiohttp.client_exceptions.ClientPayloadError", "Response payload is not completed", USER),
    ("aiohttp.client_exceptions.ClientResponseError", "503, message='Service Unavailable', url='https://s3/b'", USER),
    ("aiohttp.client_exceptions.ClientOSError", "[Errno 104] Connection reset by peer", USER),
    ("http.client.RemoteDisconnected", "Remote end closed connection without response", USER),
    ("http.client.BadStatusLine", "''", USER),
    ("urllib3.exceptions.NameResolutionError", "Failed to resolve 'api.wandb.ai' ([Errno -3] Temporary failure)", USER),
    ("ssl.SSLEOFError", "EOF occurred in violation of protocol (_ssl.c:1006)", USER),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", STDLIB + "ssl.py:1166 read"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", SITE + "urllib3/response.py:700 _error_catcher"),
    ("TimeoutError", "", SITE + "aiohttp/helpers.py:735 __exit__"),
    # RPC, data bases
    (
        "grpc.aio._call.AioRpcError",
        '<AioRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "failed to connect">',
        USER,
    ),
    ("redis.exceptions.ConnectionError", "Error 111 connecting to cache:6379. Connection refused.", USER),
    ("psycopg2.OperationalError", "server closed the connection unexpectedly", USER),
    ("pymongo.errors.ServerSelectionTimeoutError", "mongo:27017: timed out", USER),
]

SCRIPT = [
    ("KeyError", "'503'", SITE + "wandb/sdk/wandb_run.py:10 log"),
    ("TypeError", "Object of type Tensor is not JSON serializable", SITE + "comet_ml/experiment.py:9 log"),
    ("ValueError", "Image must have 500 columns, got (512)", SITE + "wandb/sdk/data_types/image.py:30 _init"),
    ("ValueError", "parameter values must be finite: code 7", SITE + "comet_ml/experiment.py:9 log"),
    ("ValueError", "expected 500 or 503 classes", USER),
    ("ValueError", "code 500 is no token", USER),
    (
        "RuntimeError",
        "mat1 and mat2 shapes cannot be multiplied (500x503 and 11x52)",
        SITE + "torch/nn/modules/linear.py:1 f",
    ),
    ("AssertionError", "503", USER),
    ("RuntimeError", "step 37 of 122: loss diverged", USER),
    ("RuntimeError", "errno is no argument of step 5", USER),
    ("OSError", "[Errno 22] Invalid argument", USER),
    ("OSError", "[Errno 36] File name too long: 'a'", USER),
    ("wandb.errors.UsageError", "api_key not configured (no-tty). call wandb.login(key=[your_api_key])", USER),
    (
        "wandb.errors.CommError",
        "It appears that you do not have permission to access the requested resource (403)",
        USER,
    ),
    ("mlflow.exceptions.MlflowException", "INVALID_PARAMETER_VALUE: Changing param values is not allowed", USER),
    ("mlflow.exceptions.RestException", "RESOURCE_DOES_NOT_EXIST: No Experiment with id=500 exists", USER),
    ("google.api_core.exceptions.NotFound", "404 GET https://storage.googleapis.com/b/x: No such object", USER),
    ("google.api_core.exceptions.Forbidden", "403 POST https://storage.googleapis.com/b/x: does not have access", USER),
    ("google.api_core.exceptions.InvalidArgument", "400 Bad value 503", USER),
    ("google.protobuf.message.DecodeError", "Error parsing message", USER),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (404) when calling the HeadObject operation: Not Found",
        USER,
    ),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (AccessDenied) when calling the PutObject operation: ",
        USER,
    ),
    (
        "botocore.exceptions.ClientError",
        "An error occurred (NoSuchBucket) when calling the GetObject operation: ",
        USER,
    ),
    ("botocore.exceptions.NoCredentialsError", "Unable to locate credentials", USER),
    ("botocore.exceptions.ParamValidationError", "Parameter validation failed: Invalid bucket name 500", USER),
    ("requests.exceptions.InvalidURL", "Invalid URL 'https://': No host supplied", USER),
    ("requests.exceptions.MissingSchema", "Invalid URL 'x': No scheme supplied", USER),
    ("requests.exceptions.HTTPError", "404 Client Error: Not Found for url: https://h/500", USER),
    ("httpx.HTTPStatusError", "Client error '401 Unauthorized' for url 'https://tracking/503'", USER),
    (
        "huggingface_hub.errors.RepositoryNotFoundError",
        "401 Client Error. Repository Not Found for url: https://hf.co",
        USER,
    ),
    ("huggingface_hub.errors.GatedRepoError", "403 Client Error. Access to model x is restricted", USER),
    ("huggingface_hub.errors.HFValidationError", "Repo id must be in the form 'repo_name'", USER),
    ("datasets.exceptions.DatasetNotFoundError", "Dataset 'x' doesn't exist on the Hub or cannot be accessed.", USER),
    ("grpc._channel._InactiveRpcError", "<_InactiveRpcError: status = StatusCode.INVALID_ARGUMENT details = 503", USER),
    ("NotImplementedError", "503", SITE + "fsspec/spec.py:1 f"),
    ("ValueError", "code 500 of the vocabulary", "/home/user/requests/train.py:3 main"),
]


def said(what: tuple[str, str, str]) -> WorkerError:
    kind, message, frame = what
    return WorkerError(kind, message, (USER, frame))


@pytest.mark.parametrize("what", STORAGE, ids=str)
def test_a_file_system_that_fails(what: tuple[str, str, str]) -> None:
    assert class_of(said(what)) is ErrorClass.STORAGE


@pytest.mark.parametrize("what", SERVICE, ids=str)
def test_a_service_that_fails_and_no_peer(what: tuple[str, str, str]) -> None:
    assert class_of(said(what)) is ErrorClass.SERVICE
    exit_ = WorkerExited("n", 1.0, "gpt", 1, 0, 1, 1, None, 3, False, said(what))
    assert cause_of(exit_) is Cause.OWN


@pytest.mark.parametrize("what", SCRIPT, ids=str)
def test_what_only_looks_like_it(what: tuple[str, str, str]) -> None:
    assert class_of(said(what)) is ErrorClass.SCRIPT


@pytest.mark.parametrize(
    "number",
    [errno.EIO, errno.ENOSPC, errno.ENOLCK, errno.ESTALE, errno.EDQUOT, errno.EREMOTEIO, errno.ENODEV, errno.EHOSTDOWN],
)
def test_an_error_number_is_enough_as_the_worker_s_error_file_has_it(tmp_path: Path, number: int) -> None:
    path = tmp_path / "error.json"
    error_file.write(str(path), OSError(number, os.strerror(number), "/lustre/run/a"))
    assert class_of(read_error_file(path)) is ErrorClass.STORAGE


def clients() -> list[tuple[Exception, ErrorClass]]:
    """As the clients that are installed here raise them."""
    from google.api_core import exceptions as google
    from httpx import HTTPStatusError, Request, Response
    from requests import HTTPError
    from requests import Response as Answer

    found: list[tuple[Exception, ErrorClass]] = []
    for kind in vars(google).values():
        if isinstance(kind, type) and issubclass(kind, google.GoogleAPICallError) and kind.code is not None:
            passes = kind.code in (408, 429, 499, 500, 502, 503, 504) or kind is google.Aborted
            if kind is not google.Conflict or not passes:
                found.append((kind("what it says"), ErrorClass.SERVICE if passes else ErrorClass.SCRIPT))
    for status, expected in ((503, ErrorClass.SERVICE), (429, ErrorClass.SERVICE), (404, ErrorClass.SCRIPT)):
        answer = Answer()
        answer.status_code, answer.reason, answer.url = status, "reason", "https://h/x"
        try:
            answer.raise_for_status()
        except HTTPError as error:
            found.append((error, expected))
        request = Request("GET", "https://h/x")
        try:
            Response(status, request=request).raise_for_status()
        except HTTPStatusError as error:
            found.append((error, expected))
    return found


@pytest.mark.parametrize(("error", "expected"), clients(), ids=lambda each: repr(each)[:60])
def test_clients_as_they_are_installed(tmp_path: Path, error: Exception, expected: ErrorClass) -> None:
    path = tmp_path / "error.json"
    error_file.write(str(path), error)
    assert class_of(read_error_file(path)) is expected
