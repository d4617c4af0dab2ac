"""Trains on an embedded S3 server, stops, resumes, and compares the outcome bit for bit. Run it with ``make demo``."""

import os
import signal
import sys
from types import FrameType


def _quit(number: int, frame: FrameType | None) -> None:
    os.write(2, b"Stopped before anything was started.\n")
    os._exit(128 + number)


# At once: until the workplace takes over there is nothing to clean up, but an interrupt would show a traceback.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, _quit)

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from workplace import Failed, Stopped, Workplace  # noqa: E402

BUCKET = "bucket"
SINGLE = f"s3://{BUCKET}/checkpoints/"
FSDP = f"s3://{BUCKET}/fsdp"
STOP_AFTER, EPOCHS = 2, 4
MB = 10**6


def main() -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="make demo",
        description="Starts an S3 server on this machine, trains on it with one process and with FSDP in two, stops and"
        " resumes the latter from there, and fails unless the resumed run ends exactly as one without a stop."
        " Needs no GPU, no account and no network, and touches no AWS configuration of yours.",
    )
    parser.add_argument("--full-report", action="store_true", help="print every row of the profiler report")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        with Workplace() as place:
            demo(place, options.full_report)
        print(f"\nDone in {time.monotonic() - started:.0f} s. Nothing of it is left on this machine.")
        return 0
    except Failed as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except Stopped as stop:
        print(f"\nStopped by {stop}: all that the demo had started is gone.", file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def demo(place: Workplace, full_report: bool) -> None:
    step(1, "Start an S3 server (moto) on this machine")
    endpoint = place.start_server("s3_server.py", BUCKET)
    place.environment["AWS_ENDPOINT_URL"] = endpoint
    say(f'AWS_ENDPOINT_URL={endpoint}, with one empty bucket called "{BUCKET}"')

    step(2, f'Train one process with ModelCheckpoint(dirpath="{SINGLE}")')
    say("The data loader's workers take a second to start: look for it in the report below.")
    place.run("train_single.py", SINGLE, place.folder / "single.json", *(["--full-report"] if full_report else []))
    single = json.loads((place.folder / "single.json").read_text())

    step(3, f"Train two processes with FSDP, sharded checkpoints below {FSDP}/")
    outcomes = {
        "uninterrupted": train_fsdp(place, "uninterrupted", EPOCHS),
        "stopped": train_fsdp(place, "resumed", STOP_AFTER),
    }

    step(4, f"Resume in two new processes from {FSDP}/resumed/epoch={STOP_AFTER - 1}.ckpt")
    outcomes["resumed"] = train_fsdp(place, "resumed", EPOCHS, f"{FSDP}/resumed/epoch={STOP_AFTER - 1}.ckpt")
    compare(outcomes)

    step(5, "What is in the bucket now, and how fast it got there")
    sizes = list_bucket(place)
    show_rates(sizes, single, outcomes["uninterrupted"])
    for folder in (place.folder, Path.cwd()):
        if strays := [path for path in folder.rglob("*") if path.name == "s3:"]:
            raise Failed(f"a URL was taken for a local path: {strays[0]} exists")
    say('No local folder called "s3:" was made.')


def step(number: int, text: str) -> None:
    print(f"\n[{number}/5] {text}", flush=True)


def say(text: str) -> None:
    print(f"      {text}", flush=True)


def train_fsdp(place: Workplace, name: str, epochs: int, resume: str | None = None) -> list[dict[str, Any]]:
    """Trains up to ``epochs`` and returns what each rank had in the end."""
    what = "Resumed" if resume else "Uninterrupted" if name == "uninterrupted" else "To be stopped"
    say(f"{what}: up to epoch {epochs - 1}")
    outcome = place.folder / f"{what}-{epochs}"
    outcome.mkdir()
    place.run("train_fsdp.py", f"{FSDP}/{name}", outcome, str(epochs), *([resume] if resume else []))
    return [json.loads((outcome / f"rank-{rank}.json").read_text()) for rank in range(2)]


def compare(outcomes: dict[str, list[dict[str, Any]]]) -> None:
    """Raises unless the resumed run is where the uninterrupted one is, and got there from where the other stopped."""
    batches = {name: ranks[0]["batches"] for name, ranks in outcomes.items()}
    say(f"Batches trained by each rank: {', '.join(f'{name} {number}' for name, number in batches.items())}.")
    if batches["stopped"] + batches["resumed"] != batches["uninterrupted"]:
        raise Failed("the resumed run did not go on where the other had stopped")
    differences = []
    for rank, (expected, found) in enumerate(zip(outcomes["uninterrupted"], outcomes["resumed"], strict=True)):
        if outcomes["stopped"][rank]["parameters"] == expected["parameters"]:
            raise Failed("training changed nothing, so this comparison would prove nothing")
        for kind in ("parameters", "optimizer", "hyperparameters", "schedulers", "loops", "counters"):
            if found[kind] != expected[kind]:
                differences.append(f"{kind} of rank {rank}")
    if differences:
        raise Failed(
            f"VERDICT: DIFFERENT. The resumed run and the uninterrupted one differ in {', '.join(differences)}"
        )
    tensors = sum(len(rank[kind]) for rank in outcomes["resumed"] for kind in ("parameters", "optimizer"))
    say(f"VERDICT: IDENTICAL. On both ranks, the resumed run ended as the uninterrupted one: {tensors} tensors of")
    say("parameters and optimizer state bit for bit, the learning rate scheduler, and all loop counters.")


def list_bucket(place: Workplace) -> dict[str, int]:
    """Prints and returns the size of every object, by its key."""
    listing = place.folder / "bucket.json"
    place.run("list_bucket.py", BUCKET, listing)
    sizes: dict[str, int] = json.loads(listing.read_text())
    for key, size in sizes.items():
        say(f"{size:>12,}  {key}")
    say(f"{sum(sizes.values()):>12,}  bytes in {len(sizes)} objects")
    return sizes


def show_rates(sizes: dict[str, int], single: dict[str, Any], fsdp: list[dict[str, Any]]) -> None:
    """Prints how fast checkpoints were saved."""
    file = single["best"].removeprefix(f"s3://{BUCKET}/")
    folder = f"fsdp/uninterrupted/epoch={EPOCHS - 1}.ckpt/"
    saves = {
        "One file, one process": (sizes[file], single["saves"]),
        "Shards, two processes": (sum(size for key, size in sizes.items() if key.startswith(folder)), fsdp[0]["saves"]),
    }
    for name, (size, seconds) in saves.items():
        median = statistics.median(seconds)
        rate = f"{size / MB / median:.0f} MB/s (median of {len(seconds)} saves)"
        say(f"{name}: {size / MB:.1f} MB in {median:.2f} s = {rate}")
    say("That is client and server together on this machine's cores: a sign of life, not a benchmark.")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
