"""``list_bucket.py BUCKET FILE`` writes the size of every object in the bucket, by its key."""

import json
import sys
from pathlib import Path

from child import follow_parent

follow_parent()

import s3fs  # noqa: E402

bucket, file = sys.argv[1:]
entries = s3fs.S3FileSystem().find(bucket, detail=True)
sizes = {name.removeprefix(f"{bucket}/"): info["size"] for name, info in sorted(entries.items())}
Path(file).write_text(json.dumps(sizes))
