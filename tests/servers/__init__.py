"""Servers for the tests. Each binds to a free port of the loopback interface; none needs an account."""

from tests.servers.credentials import SECRET, USER
from tests.servers.ftp import ftp_server
from tests.servers.proxy import Fault, Refusal, Rule
from tests.servers.s3 import Bucket, Server, demand_equal_parts, s3_server

__all__ = [
    "SECRET",
    "USER",
    "Bucket",
    "Fault",
    "Refusal",
    "Rule",
    "Server",
    "demand_equal_parts",
    "ftp_server",
    "s3_server",
]
