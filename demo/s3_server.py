"""An S3 server with an empty bucket: ``s3_server.py BUCKET`` prints its URL and serves until it is ended."""

import logging
import sys
import threading

from child import follow_parent

follow_parent()

import boto3  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f"http://{host}:{port}"
boto3.client("s3", endpoint_url=url).create_bucket(Bucket=sys.argv[1])
print(url, flush=True)
threading.Event().wait()
