"""Advice about a store that cannot be reached, or refuses: a package to install, a variable to set."""

import difflib

from fsspec import available_protocols
from fsspec.utils import get_protocol

#: Protocols of the same client, by the name of the extra that brings it.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
_PACKAGES = {
    "s3": "the extra `s3`, or: pip install s3fs obstore",
    "gcs": "the extra `gcs`, or: pip install gcsfs obstore",
    "azure": "the extra `azure`, or: pip install adlfs obstore",
    "sftp": "it with: pip install paramiko",
    "ssh": "it with: pip install paramiko",
    "hdfs": "it with: pip install pyarrow. It needs Java and Hadoop's libhdfs, too",
}
_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or the storage options `key` and `secret`",
    "gcs": (
        "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the file of a service"
        " account, or the storage option `token`"
    ),
    "azure": (
        "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or"
        " AZURE_STORAGE_SAS_TOKEN, or the storage options `connection_string`, or `account_name` and `account_key`"
    ),
    "webhdfs": "Put the user into the URL, webhdfs://USER@HOST:PORT/, or set the storage option `kerberos`",
}
#: The permissions for each action on an object. AWS grants the listing of a bucket, and of prefixes in it.
_PERMISSIONS = {
    "s3": {
        "write": "the permission `s3:PutObject`",
        "read": "the permission `s3:GetObject`",
        "look at": "the permission `s3:ListBucket` on the bucket for this prefix",
        "remove": "the permission `s3:DeleteObject`",
        "abort": "the permission `s3:AbortMultipartUpload`",
    },
    "gcs": {
        "write": "the permission `storage.objects.create`, and `storage.objects.delete` to replace what is there",
        "read": "the permission `storage.objects.get`",
        "look at": "the permission `storage.objects.list`",
        "remove": "the permission `storage.objects.delete`",
        "abort": "the permission `storage.multipartUploads.abort`",
    },
    "azure": {
        "write": "the role `Storage Blob Data Contributor`, or the SAS its permissions create and write",
        "read": "the role `Storage Blob Data Reader`, or the SAS its permission read",
        "look at": "the role `Storage Blob Data Reader`, or the SAS its permission list",
        "remove": "the role `Storage Blob Data Contributor`, or the SAS its permission delete",
    },
}
_ENDPOINTS = {
    "s3": "AWS_ENDPOINT_URL and the storage option `endpoint_url`, as in http://127.0.0.1:9000",
    "gcs": "STORAGE_EMULATOR_HOST and the storage option `endpoint_url`",
    "azure": "the name of the account, or the connection string",
}


def about_protocol(protocol: str) -> str:
    """Returns the protocols that may be meant by an unknown one, as a sentence without a full stop."""
    near = difflib.get_close_matches(protocol, available_protocols(), 3)
    hint = f": do you mean {' or '.join(map(repr, near))}?" if near else ": use that of a URL, such as 's3' or 'gs'"
    return f"fsspec knows no protocol {protocol!r}{hint}"


def about_package(url: str) -> str:
    """Returns what to install for ``url``, as a sentence; empty where it is not known."""
    package = _PACKAGES.get(_store(url), "")
    return f" Install {package}" if package else ""


def about_credentials(url: str) -> str:
    """Returns how to set the credentials for ``url``, as a sentence; empty where that is not known."""
    credentials = _CREDENTIALS.get(_store(url), "")
    return f" {credentials}." if credentials else ""


def about_permission(url: str, action: str, is_unexplained: bool) -> str:
    """Returns what to do about an action that a store refuses, as sentences; empty where that is not known.

    Args:
        url: A URL.
        action: ``"write"``, ``"read"``, ``"look at"``, ``"remove"`` or ``"abort"``.
        is_unexplained: The store has answered with nothing but a status.
    """
    permission = _PERMISSIONS.get(_store(url), {}).get(action, "")
    if not permission:
        return ""
    if is_unexplained:
        return (
            f" The store does not say why: the credentials may be wrong, or lack {permission}.{about_credentials(url)}"
        )
    return f" The credentials are valid. Grant them {permission}."


def about_expiry(url: str, place: str) -> str:
    """Returns what to do about credentials for ``url`` that are no longer valid, as sentences.

    Args:
        url: A URL.
        place: The origin of the credentials; empty where that is not known.
    """
    if not place:
        return f" The credentials have expired, or are not valid.{about_credentials(url)}"
    return f" The credentials have expired, or are not valid. They were looked for in {place}: renew them there."


def about_endpoint(url: str) -> str:
    """Returns the settings that determine the server of ``url``, as sentences."""
    return f" Is the server the right one? See {_ENDPOINTS.get(_store(url), 'the host and the port in the URL')}."


def about_bucket(url: str) -> str:
    """Returns what to do about a bucket that is missing, without a full stop."""
    what = "container" if _store(url) == "azure" else "bucket"
    name = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    return f"There is no {what} {name!r}: make it, or correct the URL or the endpoint"


def _store(url: str) -> str:
    protocol = str(get_protocol(url))
    return _EXTRAS.get(protocol, protocol)
