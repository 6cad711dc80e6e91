"""StreamingDataset in the embedded mode: the data script runs in a thread of this process."""

import io
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, Batches, Configure, ReplayWarnings
from test_loops import persia_threads, threads_before  # noqa: F401  # the second is a fixture
from test_training import SLOTS, everything, leave_loops, loss_fn, make, train
from waiting import wait_until

from persia.checkpoint.run_state import RunState
from persia.ctx import Checkpoints, DataCtx, eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.errors import ConfigError, DataError, UsageError
from persia.feed.protocol import Stopped
from persia.loop.autosave import Autosave
from persia.runtime.settings import SERVED

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configure: Configure) -> Script:
    """Write a data script and make it the entry. ``COUNT`` and similar names are in its scope."""
    configure(SLOTS)

    def write(body: str) -> Path:
        path = tmp_path / "script with space.py"
        head = (
            "import sys\n"
            "from conftest import Batches\n"
            "from test_loops import Numbered\n"
            "from persia.ctx import DataCtx\n"
        )
        path.write_text(head + textwrap.dedent(body))
        monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(path))
        return path

    return write


def wait_for_threads() -> None:
    """Wait until no thread of the test is left. The kernel lists a thread for a short time after it was joined."""
    wait_until("threads to end", lambda: not persia_threads(), 30, evidence=lambda: str(persia_threads()))


SENDS = """
with DataCtx() as ctx:
    assert (ctx.world_size, ctx.generation) == (1, 1)
    for batch in Batches(30):
        ctx.send_data(batch)
"""


def test_a_streamed_run_equals_an_iterated_one(script: Script) -> None:
    script(SENDS)
    with make() as ctx:
        streamed = train(ctx, DataLoader(StreamingDataset(), reproducible=True))
        assert len(streamed) == 30
        rows = everything(ctx)
    with make() as ctx:
        assert train(ctx, DataLoader(Batches(30), reproducible=True)) == streamed
        assert everything(ctx) == rows
    wait_for_threads()


def test_batches_wait_in_the_script_while_training_is_behind(script: Script, tmp_path: Path) -> None:
    log = tmp_path / "sent"
    log.touch()
    script(f"""
    with DataCtx() as ctx:
        for number, batch in enumerate(Batches(200)):
            ctx.send_data(batch)
            with open({str(log)!r}, "a") as file:
                file.write(f"{{number}}\\n")
    """)
    with make() as ctx:
        loader = DataLoader(StreamingDataset(buffer_size=3), embedding_staleness=2)
        for taken, batch in enumerate(loader):
            output, labels = ctx.forward(batch)
            ctx.backward(loss_fn(output, labels[0]))
            sent = len(log.read_text().splitlines())
            # The limit of 20 covers the buffers of the data set and the pipeline, and the batches looked up in advance.
            assert sent <= taken + 20
            if taken == 40:
                break
        assert len(log.read_text().splitlines()) < 70
    wait_for_threads()


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_loop_left_early_resumes_after_the_last_trained_batch(script: Script, reproducible: bool) -> None:
    script("""
    with DataCtx() as ctx:
        for batch in Numbered(9):
            ctx.send_data(batch)
    """)
    with make() as ctx:
        loader = DataLoader(StreamingDataset(), reproducible=reproducible)
        assert leave_loops(ctx, loader) == list(range(9))
        assert train(ctx, loader) == []  # a stream that has ended cannot be restarted


def test_a_reading_thread_that_is_left_running_does_not_end_the_next_loop(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_running(thread: threading.Thread) -> bool:
        thread.join()
        return False

    script(SENDS)
    monkeypatch.setattr("persia.loop.feeder._join", left_running)
    with make() as ctx:
        loader = DataLoader(StreamingDataset())
        assert len(train(ctx, loader, 10)) == 10
        assert len(train(ctx, loader)) == 20


def test_a_resumed_run_equals_one_that_was_not_interrupted(script: Script, tmp_path: Path) -> None:
    script(SENDS)
    with make() as ctx:
        whole = train(ctx, DataLoader(StreamingDataset(), reproducible=True))
        rows = everything(ctx)
    with make() as ctx:
        first = train(ctx, DataLoader(StreamingDataset(), reproducible=True), 11)
        ctx.dump_checkpoint(tmp_path / "checkpoint")
    with make(seed=5) as ctx:
        ctx.load_checkpoint(tmp_path / "checkpoint")
        data = StreamingDataset()
        rest = train(ctx, DataLoader(data, reproducible=True))
        assert first + rest == whole
        assert everything(ctx) == rows
        with pytest.raises(UsageError, match="the stream cannot go back"):
            ctx.load_checkpoint(tmp_path / "checkpoint")
            train(ctx, DataLoader(data, reproducible=True))


@pytest.mark.parametrize(
    ("changed", "old", "warnings"), [(None, False, 0), (4, False, 1), (4, True, 0), (20, False, 0)]
)
def test_a_resumed_run_whose_script_sends_other_batches_gives_a_warning(
    script: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replay_warnings: ReplayWarnings,
    changed: int | None,
    old: bool,
    warnings: int,
) -> None:
    """The run also resumes from an ``old`` checkpoint, which has no digests of batches."""

    def sends(changed: int | None) -> None:
        script(f"""
        with DataCtx() as ctx:
            for number, batch in enumerate(Batches(30)):
                ctx.send_data(Batches(1, seed=9).batch(0) if number == {changed} else batch)
        """)

    sends(None)
    with make() as ctx:
        train(ctx, DataLoader(StreamingDataset()), 11)
        with monkeypatch.context() as patch:
            if old:
                state = ctx._run_state.rank_state()
                del state["passed"]
                patch.setattr(RunState, "rank_state", lambda _: state)
            ctx.dump_checkpoint(tmp_path / "checkpoint")
    for again in (1, 2):  # the second checkpoint was written directly after a load
        sends(changed)
        with make(seed=5) as ctx:
            ctx.load_checkpoint(tmp_path / "checkpoint")
            ctx.dump_checkpoint(tmp_path / "checkpoint")
            assert len(train(ctx, DataLoader(StreamingDataset()))) == 19
        assert len(replay_warnings()) == warnings * again
        assert all(
            message.startswith("the data script: the skipped batches (10) differ from those that rank 0 has received")
            for message in replay_warnings()
        )


def test_every_rank_gets_what_its_own_data_was(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 gets its data position from rank 0, which has loaded a checkpoint."""
    script(SENDS)
    given = {}
    with make() as ctx:
        train(ctx, DataLoader(StreamingDataset()), 7)
        mine, other = ctx._run_state.rank_state(), ctx._run_state.rank_state()
        other["passed"] = {**mine["passed"], "digests": [5]}
        monkeypatch.setattr(ctx.common_context, "gather", lambda state: [state, other])
        Autosave(Checkpoints(tmp_path / "run"), ctx._run_state).save(ctx.step)
    with make() as ctx:
        ctx.load_checkpoint(tmp_path / "run" / "step-7")
        assert ctx._run_state.rank_state()["passed"] == mine["passed"]
        monkeypatch.setattr(ctx.common_context, "broadcast", lambda state: given.update(state()))
        train(ctx, DataLoader(StreamingDataset()), 1)
    monkeypatch.setattr("persia.runtime.settings.Settings.rank", 1)
    with make() as ctx:
        monkeypatch.setattr(ctx.common_context, "broadcast", lambda state: given)
        ctx._run_state.share_loaded()
        assert ctx._run_state.rank_state()["passed"] == other["passed"]


def test_a_script_with_fewer_batches_than_were_received_is_an_error(script: Script, tmp_path: Path) -> None:
    script(SENDS)
    with make() as ctx:
        train(ctx, DataLoader(StreamingDataset()), 11)
        ctx.dump_checkpoint(tmp_path / "checkpoint")
    script(SENDS.replace("30", "4"))
    with make() as ctx:
        ctx.load_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(DataError, match="^the data script ended; batches for this rank: 4, received: 10; "):
            train(ctx, DataLoader(StreamingDataset()))


def test_a_checkpoint_of_other_ranks_is_refused(script: Script) -> None:
    data = StreamingDataset()
    with pytest.raises(DataError, match="WORLD_SIZE=1: .* was split over WORLD_SIZE=2 ranks; start the same"):
        data.load_state_dict({"taken": [3], "world_size": 2})


def test_an_error_of_the_script_reaches_the_loop_in_its_place(script: Script) -> None:
    script("""
    with DataCtx() as ctx:
        for batch in Batches(2):
            ctx.send_data(batch)
        raise ZeroDivisionError("row 17 of part-3")
    """)
    with make() as ctx:
        seen = 0
        with pytest.raises(ZeroDivisionError, match="row 17 of part-3"):
            for batch in DataLoader(StreamingDataset()):
                output, _ = ctx.forward(batch)
                ctx.backward(output.sum())
                seen += 1
        assert seen == 2
    wait_for_threads()


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("sys.exit('no data today')", UsageError, r"ended with sys\.exit\('no data today'\)"),
        ("x = 1", UsageError, "ended without a `with DataCtx"),
        ("import no_such_module", ModuleNotFoundError, "no_such_module"),
        ("def f(:", SyntaxError, "script with space.py"),
    ],
)
def test_a_script_that_sends_nothing_is_an_error(script: Script, body: str, error: type[Exception], text: str) -> None:
    script(body)
    with make(), pytest.raises(error, match=text):
        next(iter(DataLoader(StreamingDataset())))


@pytest.mark.parametrize("code", ["0", "'no more data'"])
def test_a_script_that_exits_within_its_context_ends_its_data(script: Script, code: str) -> None:
    script(f"""
    with DataCtx() as ctx:
        for batch in Batches(3):
            ctx.send_data(batch)
        sys.exit({code})
    """)
    with make() as ctx:
        if code == "0":
            assert len(train(ctx, DataLoader(StreamingDataset()))) == 3
        else:
            with pytest.raises(UsageError, match=r"the data script ended with sys\.exit\('no more data'\)"):
                train(ctx, DataLoader(StreamingDataset()))


def test_a_generator_around_a_data_context_that_is_closed_ends_its_data(script: Script) -> None:
    script("""
    def sent():
        with DataCtx() as ctx:
            for batch in Batches(9):
                ctx.send_data(batch)
                yield

    generator = sent()
    for _ in range(3):
        next(generator)
    generator.close()
    """)
    with make() as ctx:
        assert len(train(ctx, DataLoader(StreamingDataset()))) == 3


class Sender:
    """A sender of a ``DataCtx`` whose trainers accept no more batches."""

    rank_0 = ""
    closed = False

    def __init__(self, *args: object, **options: object) -> None: ...

    def end(self) -> None:
        raise Stopped("training is over")

    def close(self) -> None:
        Sender.closed = True


@pytest.mark.parametrize("kept", [SystemExit(0), GeneratorExit()])
def test_an_exit_stays_one_where_the_trainers_want_no_more(
    monkeypatch: pytest.MonkeyPatch, kept: BaseException
) -> None:
    monkeypatch.setattr("persia.feed.embedded.running", lambda: None)
    monkeypatch.setattr("persia.feed.embedded.ScriptSender", Sender)
    with pytest.raises(type(kept)), DataCtx():
        raise kept
    with DataCtx():
        raise Stopped("training is over")


def test_a_sender_whose_note_cannot_be_written_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = SimpleNamespace(announce=lambda *_: io.BytesIO(), close=lambda: None)
    monkeypatch.setattr("persia.discovery.services.connect", lambda: found)
    monkeypatch.setattr("persia.feed.sender.Sender", Sender)
    monkeypatch.setattr(Sender, "closed", False)
    for name, value in {"PERSIA_NATS_URL": "nats://h:1", "PERSIA_JOB": "j", SERVED: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(IsADirectoryError), DataCtx():
        pass
    assert Sender.closed


def test_a_missing_script_is_an_error(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(tmp_path / "gone.py"))
    with make(), pytest.raises(ConfigError, match=r"PERSIA_DATALOADER_ENTRY=.*gone\.py: no such file"):
        next(iter(DataLoader(StreamingDataset())))
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", "data.py 'x")
    with make(), pytest.raises(ConfigError, match="cannot be split into a script path.*a quote is not closed"):
        next(iter(DataLoader(StreamingDataset())))
    monkeypatch.delenv("PERSIA_DATALOADER_ENTRY")
    with (
        make(),
        pytest.raises(ConfigError, match=r"no data script: PERSIA_DATALOADER_ENTRY is not set.*data_loader.py or"),
    ):
        next(iter(DataLoader(StreamingDataset())))


def test_a_data_context_of_its_own_needs_a_training_script(script: Script) -> None:
    with pytest.raises(UsageError, match="no training script has started this data script"), DataCtx():
        pass
    with pytest.raises(UsageError, match="outside its `with` block"):
        DataCtx().send_data(Batches(1).batch(0))


def test_a_script_has_its_own_arguments(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script("""
    count, = sys.argv[1:]
    with DataCtx() as ctx:
        for batch in Batches(int(count)):
            ctx.send_data(batch)
    """)
    plain = path.rename(path.with_name("plain.py"))
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", f"{plain} 4")
    before = sys.argv
    with make() as ctx:
        assert len(train(ctx, DataLoader(StreamingDataset()))) == 4
    assert sys.argv is before


def test_a_script_that_does_not_end_is_left_running(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("persia.feed.embedded._LEAVE_S", 0.1)
    release = threading.Event()
    monkeypatch.setattr(sys, "release_for_test", release, raising=False)
    script("""
    with DataCtx() as ctx:
        for batch in Batches(1000):
            ctx.send_data(batch)
    sys.release_for_test.wait()
    """)
    monkeypatch.setattr(logging.getLogger("persia"), "propagate", True)
    with make() as ctx:
        train(ctx, DataLoader(StreamingDataset()), 2)
    assert "is still running 0.1 s after training ended" in caplog.text
    release.set()


PAIR = ROOT / "tests" / "persiaml_style"


def test_a_pair_of_scripts_of_persiaml_runs_in_one_process(tmp_path: Path) -> None:
    """A test in tests/integration runs the same scripts on a stack."""
    env = {name: value for name, value in os.environ.items() if name in {"PATH", "PYTHONPATH"}}
    done = subprocess.run(
        [sys.executable, str(PAIR / "train.py")],
        env={**env, "HOME": str(tmp_path), "REPRODUCIBLE": "1", "EMBEDDING_STALENESS": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("test auc: ")[1].split()[0]) > 0.8


def test_an_evaluation_over_a_stream_that_is_left_early_loses_nothing(script: Script) -> None:
    script("""
    with DataCtx() as ctx:
        for batch in Numbered(9):
            ctx.send_data(batch)
    """)
    seen = []
    with make(), eval_ctx() as ctx:
        loader = DataLoader(StreamingDataset())
        for _ in range(3):
            for taken, batch in enumerate(loader):
                seen.append(int(ctx.prepare_features(batch)[2][0][0]))
                if taken == 3:
                    break
    assert seen == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]  # the batch at which the loop was left is yielded again
