"""Process groups: training's is NCCL's on GPUs, which sends objects by way of their memory, and waits for the dead."""

import pytest

from tests.strategies.places import S3


@pytest.mark.parametrize(
    ("strategy", "kind", "is_async"),
    [
        ("fsdp", "sharded", False),
        ("model_parallel", "sharded", False),
        ("model_parallel", "sharded", True),
        ("model_parallel", "full", False),
        ("ddp", "full", False),
    ],
)
def test_ranks_send_no_plans_metadata_or_paths_through_the_process_group_of_training(
    strategy: str, kind: str, is_async: bool, s3: S3
) -> None:
    job = {"task": "talk", "kind": kind, "strategy": strategy, "async": is_async, "path": s3.new({}), "value": 2.0}
    for outcome in s3.run(job, 2):
        assert outcome["found"] == [2.0]
        assert outcome["names"] == []
