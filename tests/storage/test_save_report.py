"""What is recorded of a save, and the line that it logs."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning.fabric.storage import save_report
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.save_report import SaveReport, reported, reporting, stage, stages
from lightning.fabric.storage.strategies.checkpoint_save import save_sharded
from lightning.fabric.storage.transport import retry
from lightning.fabric.storage.transport.open import open_writer


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.reports: list[SaveReport] = []

    def begin(self, report: SaveReport, name: str) -> None:
        self.events.append(("begin", name))

    def end(self, report: SaveReport, name: str) -> None:
        self.events.append(("end", name))

    def finished(self, report: SaveReport) -> AbstractContextManager[None]:
        self.reports.append(report)
        return nullcontext()


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    stop = save_report.listen(listener)
    yield listener
    stop()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("lightning.fabric"), "propagate", True)
    caplog.set_level(logging.INFO, "lightning.fabric.storage.save_report")
    monkeypatch.setattr(save_report, "_LONG_S", 0.0)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == save_report.__name__]

    return lines


def test_a_file_that_is_saved_has_its_stages_its_size_and_one_line(
    tmp_path: Path, heard: Heard, logged: Callable[[], list[str]]
) -> None:
    path = tmp_path / "x.ckpt"
    save_file({"x": torch.ones(2**18)}, path)
    (report,) = heard.reports
    assert report.size == path.stat().st_size
    assert report.stages.keys() == {"upload", "commit"}
    assert report.background == {}
    assert report.stalled == pytest.approx(sum(report.stages.values()))
    assert heard.events == [("begin", "upload"), ("end", "upload"), ("begin", "commit"), ("end", "commit")]
    (line,) = logged()
    assert line.startswith(f"Saved {path}: {path.stat().st_size / 2**20:.1f} MiB, training stalled for ")
    assert line.endswith(" MiB/s")
    assert "background" not in line


def test_a_save_that_fails_ends_its_stages_and_is_not_reported(
    tmp_path: Path, heard: Heard, logged: Callable[[], list[str]]
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        save_file({}, tmp_path / "folder")
    assert heard.events[-1] == ("end", "commit")
    assert heard.reports == []
    assert logged() == []
    assert save_report.in_flight() == []


def test_the_line_of_a_background_save_has_what_it_stalled_and_what_it_did_beside_training() -> None:
    report = SaveReport(
        locate("s3://bucket/x.ckpt"), 300 * 2**20, {"wait": 0.5, "stage": 0.25}, {"upload": 2.0, "commit": 1.0}, 3
    )
    assert report.line() == (
        "Saved s3://bucket/x.ckpt: 300.0 MiB, training stalled for 0.75 s, 3.00 s in the background, 100 MiB/s,"
        " 3 retries"
    )


def test_the_line_does_not_claim_to_know_what_a_client_keeps_to_itself() -> None:
    report = SaveReport(locate("s3://bucket/x.ckpt"), retries=2, retries_unknown=True)
    assert report.line().endswith(", at least 2 retries")


@pytest.mark.parametrize("untold", [False, True])
def test_the_line_says_nothing_of_what_there_was_none_of(untold: bool) -> None:
    report = SaveReport(locate("s3://bucket/x.ckpt"), 2**20, {"upload": 2.0}, retries_unknown=untold)
    assert report.line() == "Saved s3://bucket/x.ckpt: 1.0 MiB, training stalled for 2.00 s, 0 MiB/s"


@pytest.mark.parametrize(("stalled", "beside", "level"), [
    (1.0, 0.0, logging.INFO), (0.0, 1.0, logging.INFO), (0.9, 0.0, logging.DEBUG), (0.1, 0.8, logging.DEBUG)
])  # fmt: skip
def test_a_save_that_took_less_than_a_second_in_all_is_logged_for_who_debugs_only(
    stalled: float, beside: float, level: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.fabric"), "propagate", True)
    caplog.set_level(logging.DEBUG, save_report.__name__)
    save_report.finished(SaveReport(locate("s3://bucket/x.ckpt"), 1, {"upload": stalled}, {"upload": beside}))
    assert [record.levelno for record in caplog.records if record.name == save_report.__name__] == [level]


def test_the_line_shows_no_credentials() -> None:
    line = SaveReport(locate("ftp://me:secret@host/x.ckpt?token=hidden")).line()
    assert "secret" not in line
    assert "hidden" not in line


def test_only_rank_zero_logs(tmp_path: Path, logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_report.rank_zero_only, "rank", 1)
    save_file({}, tmp_path / "x.ckpt")
    assert logged() == []


def test_a_stage_within_another_is_counted_once(tmp_path: Path) -> None:
    report = SaveReport(locate(tmp_path))
    started = time.monotonic()
    with reporting(report), stage("upload"), stage("commit"):
        time.sleep(0.1)
    took = time.monotonic() - started
    assert report.stages["commit"] >= 0.1
    assert report.stalled <= took


def test_stages_in_a_row_end_as_the_next_one_begins(tmp_path: Path, heard: Heard) -> None:
    with reporting(SaveReport(locate(tmp_path))), stages("stage") as enter:
        enter("upload")
        enter("commit")
    assert heard.events == [(what, name) for name in ("stage", "upload", "commit") for what in ("begin", "end")]


def test_without_a_report_nothing_is_recorded(heard: Heard) -> None:
    with stage("upload"):
        save_report.count_retry()
        save_report.count_bytes(1)
    assert heard.events == []


def test_a_background_thread_records_apart_and_listeners_do_not_hear_of_it(tmp_path: Path, heard: Heard) -> None:
    report = SaveReport(locate(tmp_path))

    def work() -> None:
        with reporting(report, background=True):
            save_file({"x": torch.ones(8)}, tmp_path / "x.ckpt")

    with reporting(report), stage("wait"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert report.background.keys() == {"upload", "commit"}
    assert report.stages.keys() == {"wait"}
    assert report.size == (tmp_path / "x.ckpt").stat().st_size
    assert heard.events == [("begin", "wait"), ("end", "wait")]
    assert heard.reports == []  # whoever started the thread says when


def test_a_save_within_a_save_belongs_to_it(tmp_path: Path, heard: Heard) -> None:
    with reported(locate(tmp_path / "outer")):
        save_file({}, tmp_path / "x.ckpt")
    (report,) = heard.reports
    assert report.place == locate(tmp_path / "outer")
    assert report.size == (tmp_path / "x.ckpt").stat().st_size


def test_retries_count_for_the_save_whose_requests_they_are(
    heard: Heard, logged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    memory = type(fsspec.filesystem("memory"))
    write, failures = memory.pipe_file, [ConnectionError("reset"), ConnectionError("reset")]

    def pipe_file(self: Any, *arguments: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        write(self, *arguments, **options)

    monkeypatch.setattr(memory, "pipe_file", pipe_file)
    save_file({}, "memory://stats/x.ckpt")
    assert heard.reports[0].retries == 2
    assert logged()[0].endswith("at least 2 retries")


def test_a_sharded_save_reports_its_planning_and_counts_all_of_its_files(tmp_path: Path, heard: Heard) -> None:
    save_sharded({"x": torch.ones(8), "y": torch.ones(2)}, {"epoch": 1}, tmp_path / "x.ckpt")
    (report,) = heard.reports
    assert list(report.stages) == ["plan", "upload", "commit"]
    assert report.size == sum(file.stat().st_size for file in (tmp_path / "x.ckpt").iterdir())
    begun = [name for what, name in heard.events if what == "begin"]
    assert begun[:3] == ["plan", "upload", "commit"]


def test_progress_is_of_the_bytes_that_were_announced(tmp_path: Path) -> None:
    report = SaveReport(locate(tmp_path))
    with reporting(report):
        with open_writer(locate(tmp_path / "x")) as file:
            file.expect(100)
            file.write(b"x" * 40)
            assert report.progress() == (40, 100)
            file.write(b"x" * 80)
            assert report.progress() == (120, 120)
        assert report.progress() == (120, 120)
        with open_writer(locate(tmp_path / "y")) as file:
            file.write(b"y")
            assert report.progress() == (121, 121)
    assert report.size == 121
