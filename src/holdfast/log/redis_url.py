"""What a `HOLDFAST_REDIS_URL` can say beyond redis-py's URLs: files that are read again for each connection.

`password_file=PATH` names the file of the password, so that a new one needs no restart. The files of the options `ssl_…` are
read again, too; redis-py reads them once for each connection object, which it uses as long as the process lives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redis import SSLConnection, exceptions
from redis import asyncio as aioredis
from redis.credentials import CredentialProvider

from holdfast.domain.errors import InvalidSpec
from holdfast.log.durability import URL_FORMS, without_password
from holdfast.log.refusals import BadPasswordFile

PASSWORD_FILE = "password_file"


class _PasswordFile(CredentialProvider):
    def __init__(self, user: str | None, path: Path) -> None:
        self._user, self._path = user, path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = self._path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadPasswordFile(f"its password cannot be read ({error})") from error
        return (self._user, password) if self._user else (password,)


class _RereadFiles(aioredis.SSLConnection):
    def _connection_arguments(self) -> Any:
        self.ssl_context.context = None
        try:
            return super()._connection_arguments()
        except OSError as error:  # says neither which file nor why it is read
            named = ", ".join(filter(None, (self.ca_certs, self.certfile, self.keyfile)))
            raise exceptions.ConnectionError(f"[SSL] cannot use {named}: {error}") from error


def opened(kind: type[Any], setting: str, url: str, **options: Any) -> Any:
    """A client of `kind` for `url`, not connected. Raises `InvalidSpec` that names `setting`, without the password."""
    try:
        client = kind.from_url(url, **options)
        pool = client.connection_pool
        arguments = pool.connection_kwargs
        if (path := arguments.pop(PASSWORD_FILE, None)) is not None:
            if arguments.pop("password", None) or not path:
                raise ValueError("two passwords, or none")
            arguments["credential_provider"] = _PasswordFile(arguments.pop("username", None), Path(path))
        if pool.connection_class is aioredis.SSLConnection:
            pool.connection_class = _RereadFiles
        pool.make_connection()  # not opened; raises TypeError for an option that is not known
    except (ValueError, TypeError) as error:
        raise InvalidSpec(setting, without_password(url), URL_FORMS) from error
    return client


def is_encrypted(client: Any) -> bool:
    """Whether the URL is of the form rediss://."""
    return issubclass(client.connection_pool.connection_class, (aioredis.SSLConnection, SSLConnection))


def password_file_of(client: Any) -> str:
    """The path of the password file; empty = the password is in the URL."""
    provider = client.connection_pool.connection_kwargs.get("credential_provider")
    return str(provider._path) if isinstance(provider, _PasswordFile) else ""
