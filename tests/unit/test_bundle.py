"""Refusals: damaged bundles, wrong rows, and wrong exports. An incomplete folder is never taken for a bundle."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from bundle_files import bundle_of, copied, logits, table_of, write_run
from trainer_files import write_clicks, write_config

import persia
from persia.cli.main import main
from persia.runtime.errors import CheckpointError, DataError, StorageError, UsageError
from persia.serving import Bundle, dense, parity
from persia.serving.manifest import MANIFEST, Model
from persia.trainer import Trainer
from persia.trainer.exporting import export as exporting
from persia.trainer.exporting import held_out, staging
from persia.trainer.exporting.source import of_checkpoint

Verb = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, and its bundle ``whole``."""
    folder = tmp_path_factory.mktemp("bundle")
    bundle_of(write_run(folder, rows=600), folder / "whole", rows="f16")
    return folder


@pytest.fixture
def whole(folder: Path) -> Path:
    return folder / "whole"


@pytest.fixture
def verb(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run a verb in the folder."""
    monkeypatch.chdir(folder)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["persia", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == code, captured.err
        return captured.out, captured.err

    return run


# --- damage


def flip(path: Path, seed: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
    path.write_bytes(content)


def test_one_changed_byte_is_refused_by_the_name_of_its_file(whole: Path, tmp_path: Path) -> None:
    names = sorted(each.name for each in whole.iterdir())
    assert {"manifest.json", "model.pt2", "parity.parquet", "transform.json", "table-000.rows"} <= {*names}
    for seed in range(8 * len(names)):
        name = names[seed % len(names)]
        damaged = copied(whole, tmp_path / str(seed))
        flip(damaged / name, seed)
        with pytest.raises(CheckpointError, match=rf"{damaged / name}: has changed since it was written") as refused:
            Bundle.open(damaged)
        assert "persia export" in refused.value.hint


@pytest.mark.parametrize("what", ["cut", "longer", "missing", "empty"])
def test_a_file_of_another_size_is_refused_without_reading_it(whole: Path, tmp_path: Path, what: str) -> None:
    changes: dict[str, Callable[[Path], object]] = {
        "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
        "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        "missing": lambda file: file.unlink(),
        "empty": lambda file: file.write_bytes(b""),
    }
    for file in whole.iterdir():
        damaged = copied(whole, tmp_path / file.name)
        changes[what](damaged / file.name)
        with pytest.raises(CheckpointError, match=file.name):
            Bundle.open(damaged, verify=False)


def test_files_of_another_bundle_are_refused(folder: Path, whole: Path, tmp_path: Path) -> None:
    other = bundle_of(folder / "runs" / "one", tmp_path / "other", rows="int8")
    for name in ("table-000.rows", "manifest.json"):
        mixed = copied(whole, tmp_path / name)
        shutil.copy(other / name, mixed / name)
        with pytest.raises(CheckpointError, match="table-000.rows: has"):
            Bundle.open(mixed)


def test_scores_that_differ_from_those_of_the_export_are_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bundle.outputs_of

    def wrong(self: Bundle, *arguments: Any, **more: Any) -> Any:
        found = right(self, *arguments, **more)
        found.values[3] += 1e-3
        return found

    monkeypatch.setattr(Bundle, "outputs_of", wrong)
    with pytest.raises(CheckpointError, match="the model's outputs for held-out rows differ") as refused:
        Bundle.open(whole)
    assert "a machine like the one that wrote the bundle" in refused.value.hint  # the version of torch is the same


@pytest.mark.parametrize(
    ("kind", "file"), [("torch.export", "model.pt2"), ("torchscript", "model.pt"), ("onnx", MANIFEST)]
)
def test_a_model_that_cannot_be_read_has_the_path_of_its_file(tmp_path: Path, kind: str, file: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / file}: "):
        dense.load(tmp_path, Model(file, kind, (), 1), b"not a model")


def test_a_folder_without_a_bundle(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, what in (
        (tmp_path / "none", "no such folder"),
        (tmp_path, "no bundle, or one that was not completely written: manifest.json is missing"),
        (tmp_path / "file", "file"),
    ):
        with pytest.raises(CheckpointError, match=what) as refused:
            Bundle.open(place)
        assert "persia export" in refused.value.hint


# --- files that a bundle does not need


def test_a_bundle_is_served_without_what_training_needs(whole: Path) -> None:
    code = (
        "import sys; from persia.serving import Bundle; bundle = Bundle.open(sys.argv[1]); "
        "print(bundle.score([{}], strict=False).shape); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(whole)], capture_output=True, text=True, check=True)
    shape, modules = done.stdout.splitlines()
    unwanted = {f"persia.{name}" for name in ("trainer", "ctx", "config", "launch", "discovery", "distributed", "feed")}
    unwanted |= {"grpc", "pynats", "obstore", "pyarrow.dataset", "typer", "pydantic", "torchmetrics", "matplotlib"}
    assert shape == "(1, 2)"
    assert not unwanted & {*modules.split()}


# --- wrong rows


def test_wrong_rows_are_named(whole: Path) -> None:
    with Bundle.open(whole) as bundle:
        good = table_of(4, 3).select([each.name for each in bundle.inputs])
        columns = good.to_pydict()
        for rows, named in (
            (good.drop_columns(["item"]), "there is no column `item`"),
            (good.rename_columns({"user": "usre"}), "`user`, did you mean `usre`"),
            (good.set_column(0, "user", pa.array(["a", "b", "c", "d"])), "column `user` is"),
            ({**columns, "colour": [1, 2, 3, 4]}, "no input 'colour'; the inputs are user, site"),
            ({**columns, "user": 3}, "input 'user': found int, expected a list or an array with a value for each row"),
            ({**columns, "item": [1, "x", 2, 3]}, "input 'item': expected one value for each row"),
            ({**columns, "item": [1, 2, 3]}, "the inputs have different numbers of rows: 'user' 4, .*'item' 3"),
            ([{**good.to_pylist()[0], "user": "u1"}], "user"),
            ([{"user": 1}, {"usr": 1}], "no input 'usr'; the inputs are user, site"),
            ('[{"user": 1}, {"usr": 1}]', "no input 'usr'; the inputs are user, site"),
            ("no json", "JSON"),
            (7, "a table"),
        ):
            with pytest.raises(DataError, match=named):
                bundle.score(rows)
        assert bundle.score([{"user": 1}]).shape == bundle.score([{"usr": 1}], strict=False).shape == (1, 2)
        wrong = [{**good.to_pylist()[0], "user": "u1"}]
        samples = bundle.transform(wrong, strict=False)
        assert samples.report.counts["user"] == {"wrong_type": 1} and bundle.score(samples).shape == (1, 2)


def test_a_bundle_describes_itself(whole: Path) -> None:
    with Bundle.open(whole) as bundle:
        inputs = {each.name: (each.type, each.datatype, each.is_list, each.features) for each in bundle.inputs}
        assert [(each.name, each.kind) for each in bundle.outputs] == [("clicked", "probability"), ("spent", "number")]
        manifest = bundle.manifest
    assert inputs["user"] == ("int64", "INT64", False, ("user",))
    assert inputs["site"] == ("string", "BYTES", False, ("site",))
    assert inputs["shares"][1:3] == ("FP32", True) and inputs["price"][1] == "FP64" and inputs["at"][1] == "BYTES"
    assert (manifest.source.run, manifest.source.checkpoint) == ("one", "checkpoints/step-5")
    assert manifest.source.step == 5 and manifest.source.generation > 0
    assert bundle.identity.startswith("one-5-") and len(bundle.identity) == len("one-5-") + 12
    assert manifest.versions["torch"] == torch.__version__


# --- commits


def limited(folder: Path, calls: int) -> int:
    """Write a folder in another process, which is killed at its n-th system call. Return its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = [calls]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return call(*arguments, **more)

        return run

    for owner, name in ((os, "fsync"), (os, "open"), (Path, "open"), (Path, "mkdir"), (Path, "rename")):
        setattr(owner, name, counted(getattr(owner, name)))
    with staging.Staging(folder) as stage:
        stage.write("one", b"1" * 100_000)
        stage.write("two", b"2")
        stage.publish("manifest.json", b"{}")
    os._exit(0)


def test_a_process_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    target, calls, status = tmp_path / "bundle", 0, 1
    while status:
        status = limited(target, calls)
        calls += 1
        assert calls < 50
        if target.exists():
            assert sorted(each.name for each in target.iterdir()) == ["manifest.json", "one", "two"]
            assert (target / "one").stat().st_size == 100_000
            shutil.rmtree(target)
        assert {each.name for each in tmp_path.iterdir()} <= {".bundle.partial"}
    assert calls > 10
    assert not any(tmp_path.iterdir()), "the last one has removed what the others left"


def test_a_full_disk_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 500, 20_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(StorageError, match="bundle"):
                bundle_of(folder / "runs" / "one", tmp_path / "bundle")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(StorageError, match="cannot lock"), staging.Staging(tmp_path / "bundle"):
        pass
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert not any(tmp_path.iterdir())


def test_two_exports_to_one_folder(tmp_path: Path) -> None:
    with staging.Staging(tmp_path / "bundle") as first:
        first.write("one", b"1")
        with pytest.raises(UsageError, match="another process"), staging.Staging(tmp_path / "bundle"):
            pass
        (tmp_path / "bundle").mkdir()
        with pytest.raises(UsageError, match="already exists"):
            first.publish("manifest.json", b"{}")
    assert [each.name for each in tmp_path.iterdir()] == ["bundle"]


# --- refusals of an export


def test_export_says_what_it_wrote_and_refuses_what_exists(verb: Verb, folder: Path) -> None:
    out, _ = verb("export", "runs/LATEST", "-o", "said", "--rows", "int8", "--held-out", "train.parquet")
    assert "table item: " in out and " rows, dim 4, int8\n" in out and "wrote said: " in out
    assert "scores of 600 rows of the given files, and of one row without values, agree with those of evaluation" in out
    for arguments, named in (
        (("runs/one", "-o", "said"), "said already exists"),
        (("runs/one", "-o", "none/new"), "mkdir -p none"),
        (("runs/none", "-o", "new"), "runs/none: no run"),
        (("runs/one", "-o", "new", "--rows", "f8"), "expected f32, f16, int8"),
        (("runs/one", "-o", "new", "--checkpoint", "runs/one/checkpoints/step-5"), "expected the persia.yml that"),
        (("persia.yml", "-o", "new", "--transform", "t.json"), "--transform is only allowed with --checkpoint"),
        (("runs/one", "-o", "new", "--held-out", "none.parquet"), "none.parquet"),
    ):
        _, errors = verb("export", *arguments, code=2)
        assert named in errors
    assert not (folder / "new").exists()


def test_a_run_without_a_checkpoint_is_refused(verb: Verb, folder: Path) -> None:
    shutil.copytree(folder / "runs" / "one", folder / "runs" / "none-saved")
    shutil.rmtree(folder / "runs" / "none-saved" / "checkpoints")
    _, errors = verb("export", "runs/none-saved", "-o", "new", code=2)
    assert "the run has no checkpoint" in errors and "persia train" in errors
    shutil.rmtree(folder / "runs" / "none-saved")


def test_a_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    shutil.copytree(folder / "runs" / "one", run)
    flip(next((run / "checkpoints").glob("step-*/shard-*.arrow")), 3)
    with pytest.raises(CheckpointError, match="shard-"), Trainer(persia.load_config(run / "persia.yml")) as trainer:
        trainer.resume(run).export(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


class Centred(torch.nn.Module):
    """A model whose output depends on the other rows of a batch."""

    def __init__(self, embedding_dims: list[int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(sum(embedding_dims), 1)

    def forward(self, dense: list[torch.Tensor], vectors: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat(vectors, 1)
        output: torch.Tensor = self.layer(whole - whole.mean(0)) + 100 * dense[0][:, :1].mean()
        return output


class Branching(torch.nn.Module):
    """A model whose forward pass depends on values, which only TorchScript can express."""

    def __init__(self, embedding_dims: list[int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(sum(embedding_dims), 1)

    def forward(self, dense: list[torch.Tensor], vectors: list[torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layer(torch.cat(vectors, 1))
        if dense[0].isnan().any():
            return torch.zeros_like(output)
        return output


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with clicks and a ``persia.yml``, for models of a script."""
    folder = tmp_path_factory.mktemp("scripts")
    write_clicks(folder / "clicks.parquet", 500)
    write_config(folder)
    return folder


@pytest.fixture
def trained(scripts: Path) -> Iterator[Callable[[torch.nn.Module], Trainer]]:
    """Train a model of a script, and return its closed run in a new trainer."""
    opened: list[Trainer] = []

    def train(model: torch.nn.Module) -> Trainer:
        name = type(model).__name__
        config = persia.load_config(scripts / "persia.yml", [f"run.name={name}"])
        if not (scripts / "runs" / name).exists():
            with Trainer(config, model) as trainer:
                for _ in trainer.fit():
                    pass
        opened.append(Trainer(config, model).resume())
        return opened[-1]

    yield train
    for each in opened:
        each.close()


def test_a_model_that_depends_on_the_rows_of_a_batch_is_refused(trained: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="of evaluation: the held-out row with index .* in batches of 1") as refused:
        trained(Centred([4, 4, 4])).export(tmp_path / "bundle")
    assert "depends on the other rows" in refused.value.hint
    assert not any(tmp_path.iterdir())


def test_a_model_that_torch_cannot_export_is_refused_and_torchscript_is_offered(trained: Any, tmp_path: Path) -> None:
    trainer = trained(Branching([4, 4, 4]))
    with pytest.raises(UsageError, match="Branching cannot be exported by torch.export") as refused:
        trainer.export(tmp_path / "bundle")
    assert "--torchscript" in refused.value.hint and not any(tmp_path.iterdir())
    done = trainer.export(tmp_path / "bundle", torchscript=True)
    assert done.manifest.model.kind == "torchscript"
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert bundle.score([{}], strict=False).shape == (1,)


def test_a_model_of_a_script_needs_the_script(trained: Any, verb: Verb, scripts: Path) -> None:
    trained(Branching([4, 4, 4]))
    _, errors = verb("export", str(scripts / "runs" / "Branching"), "-o", "new", code=2)
    assert "passed by a script" in errors


def test_rounded_rows_beyond_their_bound_are_refused(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parity, "BOUNDS", {**parity.BOUNDS, "int8": 1e-7})
    with pytest.raises(UsageError, match="the limit for int8 rows is 1e-07") as refused:
        bundle_of(folder / "runs" / "one", tmp_path / "bundle", rows="int8")
    assert "--rows f16" in refused.value.hint and not any(tmp_path.iterdir())


def test_a_checkpoint_that_is_in_no_run(folder: Path, whole: Path, tmp_path: Path, verb: Verb) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder / "runs" / "one" / "checkpoints" / "step-5", moved)
    rows = table_of(50, 5, unseen=True)
    verb("export", "persia.yml", "-o", str(tmp_path / "fitted"), "--checkpoint", str(moved), "--rows", "f16")
    transform = str(folder / "runs" / "one" / "transform.json")
    arguments = ("--checkpoint", str(moved), "--rows", "f16", "--transform", transform)
    verb("export", "persia.yml", "-o", str(tmp_path / "given"), *arguments)
    with Bundle.open(whole) as wanted:
        for name in ("fitted", "given"):
            with Bundle.open(tmp_path / name) as bundle:
                assert logits(bundle, rows, 10).tobytes() == logits(wanted, rows, 10).tobytes()


def test_a_checkpoint_of_another_transform_is_refused(folder: Path, tmp_path: Path) -> None:
    config = persia.load_config(folder / "persia.yml", ["features.age.quantiles=5"])
    checkpoint = folder / "runs" / "one" / "checkpoints" / "step-5"
    with pytest.raises(CheckpointError, match="was trained with the transform"), of_checkpoint(config, checkpoint):
        pass


def test_a_trainer_exports_after_it_is_closed(scripts: Path, tmp_path: Path) -> None:
    config = persia.load_config(scripts / "persia.yml", ["run.name=open"])
    with Trainer(config) as trainer:
        for _ in trainer.fit():
            pass
        with pytest.raises(UsageError, match="Trainer.export: this trainer is still open") as refused:
            trainer.export(tmp_path / "bundle")
    assert "close the trainer" in refused.value.hint and "runs/open').export" in refused.value.hint
    with Trainer(config) as other:
        assert other.resume(scripts / "runs" / "open").export(tmp_path / "bundle").manifest.source.run == "open"


def test_rows_are_read_from_the_test_part(folder: Path) -> None:
    config = persia.load_config(folder / "persia.yml")
    found = held_out.read(config, None, {})
    assert found.part == "test" and 20 < len(found.rows) < 200
    assert all(found.rows[name][len(found.rows) - 1].as_py() is None for name in found.rows.schema.names)
    assert len(exporting._kept(5000)) == exporting.KEPT and exporting._kept(3) == [2, 0, 1]
