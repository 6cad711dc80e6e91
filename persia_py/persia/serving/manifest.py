"""The manifest of a bundle: its content, its source, and the hashes of its files."""

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from persia.embedding.listed import listed
from persia.runtime.errors import CheckpointError
from persia_core.serving import MappedFile, blake3

FORMAT = 1
"""The format version of bundles. It is increased when an older reader could misread a bundle."""
MANIFEST = "manifest.json"
"""The file that makes a folder a bundle. It is written last."""
CHUNK = 16 << 20
"""The number of bytes that each hash covers. Several threads verify chunks."""
REPAIR = "copy the bundle again, or write it again: persia export RUN -o FOLDER"
"""The next step for a damaged bundle."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HASH_KEY, _END = ',\n "blake3": "', '"\n}\n'

_DATATYPES = {
    "bool": "BOOL",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    "halffloat": "FP16",
    "float": "FP32",
    "double": "FP64",
}
"""The datatypes of the Open Inference Protocol by Arrow type; values of other types become ``BYTES``, their text."""
_LIST = re.compile(r"(?:large_|fixed_size_)?list(?:_view)?<(?:item|element)?:? ?(.+?)(?: not null)?>(?:\[\d+\])?")


@dataclass(frozen=True)
class Input:
    """A column of the rows that a bundle scores.

    Attributes:
        name: The name of the column.
        type: The Arrow type in the training data, such as ``int64``, ``string``, ``double``, ``list<int64>``.
        features: The features that read it.
    """

    name: str
    type: str
    features: tuple[str, ...]

    @property
    def is_list(self) -> bool:
        """Whether each row has a list of values."""
        return _LIST.fullmatch(self.type) is not None

    @property
    def datatype(self) -> str:
        """The datatype of a value in the Open Inference Protocol; for a list, that of its items."""
        item = _LIST.fullmatch(self.type)
        value = self.type if item is None else item[1]
        return "FP64" if value.startswith("decimal") else _DATATYPES.get(value, "BYTES")


@dataclass(frozen=True)
class Output:
    """A column of scores.

    Attributes:
        name: The name of the label that it predicts.
        kind: ``probability``, the sigmoid of the model's output, or ``number``, the output itself.
    """

    name: str
    kind: str


@dataclass(frozen=True)
class Source:
    """The source of a bundle.

    Attributes:
        run: The name of the run.
        checkpoint: The checkpoint: folder and name.
        generation: The generation of the run to which the rows belong.
        step: The last trained step.
        transform: The digest of the transform.
    """

    run: str
    checkpoint: str
    generation: int
    step: int
    transform: str


@dataclass(frozen=True)
class Model:
    """The dense model.

    Attributes:
        file: The file of the model.
        kind: ``torch.export`` or ``torchscript``.
        slots: The id features whose vectors the model receives, in order.
        threads: The number of threads in its evaluation, on which the last bits of scores depend.
    """

    file: str
    kind: str
    slots: tuple[str, ...]
    threads: int


@dataclass(frozen=True)
class Table:
    """The rows of an embedding table.

    Attributes:
        name: The name of the table.
        dim: The number of weights of a row.
        rows: The number of rows.
        ids: The file with the ids.
        weights: The file with the weights.
    """

    name: str
    dim: int
    rows: int
    ids: str
    weights: str


@dataclass(frozen=True)
class Parity:
    """The comparison with evaluation that was made when the bundle was written.

    Attributes:
        file: The file with held-out rows and the outputs of evaluation and of the bundle.
        rows: The number of rows in the file.
        compared: The number of held-out rows that were compared.
        bound: The maximum difference allowed: ``|difference| <= bound * max(1, |output|)``.
        largest: The largest ``|difference| / max(1, |output|)`` that was found, over all batch sizes.
    """

    file: str
    rows: int
    compared: int
    bound: float
    largest: float


@dataclass(frozen=True)
class File:
    """A file of a bundle.

    Attributes:
        name: The name of the file.
        bytes: The size in bytes.
        chunks: The blake3 hash of each chunk of :data:`CHUNK` bytes, in hexadecimal.
    """

    name: str
    bytes: int
    chunks: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, threads: int) -> "File":
        """Return the entry for a file that has been written.

        Raises:
            StorageError: The file cannot be read.
        """
        mapped = MappedFile(path)
        return cls(path.name, len(mapped), tuple(mapped.hashes(CHUNK, threads)))

    def open(self, folder: Path, threads: int, *, verify: bool = True) -> MappedFile:
        """Map the file and check its size; with ``verify`` also check its hashes.

        Raises:
            CheckpointError: The file is missing or damaged; the message names it.
        """
        path = folder / self.name
        if not path.is_file():
            raise damaged(path, "is missing, but listed in the manifest")
        mapped = MappedFile(path)
        if len(mapped) != self.bytes:
            raise damaged(path, f"has {len(mapped):,} bytes, the manifest says {self.bytes:,}")
        if verify and (found := tuple(mapped.hashes(CHUNK, threads))) != self.chunks:
            first = next(at for at, pair in enumerate(zip(found, self.chunks, strict=True)) if pair[0] != pair[1])
            start, end = first * CHUNK, min((first + 1) * CHUNK, self.bytes)
            raise damaged(path, f"has changed since it was written, between byte {start:,} and byte {end:,}")
        return mapped


@dataclass(frozen=True)
class Manifest:
    """The content of a bundle.

    Attributes:
        created_at: The time at which it was written, in ISO 8601, UTC.
        versions: The versions of ``persia``, ``persia_core`` and ``torch`` that wrote it.
        source: The source of the bundle.
        inputs: The columns of rows.
        outputs: The columns of scores.
        transform: The file of the transform.
        model: The dense model.
        rows: The data type of embedding rows: ``f32``, ``f16`` or ``int8``.
        tables: The tables, in the order of the transform's configuration.
        parity: The comparison with evaluation.
        files: All files except the manifest.
    """

    created_at: str
    versions: dict[str, str]
    source: Source
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    transform: str
    model: Model
    rows: str
    tables: tuple[Table, ...]
    parity: Parity
    files: tuple[File, ...]

    @property
    def identity(self) -> str:
        """The unique name of this bundle: run, step, and the beginning of the hash of the manifest."""
        return f"{self.source.run}-{self.source.step}-{blake3(self._body().encode())[:12]}"

    def to_text(self) -> str:
        """Return the text of the file. Its last entry is the hash of the text before it."""
        body = self._body()
        return f"{body}{_HASH_KEY}{blake3(body.encode())}{_END}"

    def _body(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, ensure_ascii=False)[:-2]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of the bundle in a folder.

        Raises:
            CheckpointError: The folder has no bundle, the manifest is damaged, or a newer version wrote it.
        """
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _missing(folder) from error
        except OSError as error:
            hint = f"check the file and its permissions: ls -l {shlex.quote(str(path))}"
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
        head, key, tail = text.rpartition(_HASH_KEY.encode())
        if not key or tail != blake3(head).encode() + _END.encode():
            raise damaged(path, "has changed since it was written, or is incomplete: its own hash does not match")
        try:
            content = json.loads(text)
            written = content.pop("format")
            if written > FORMAT:
                raise CheckpointError(
                    f"{path}: has format {written}, this version reads formats up to {FORMAT}",
                    hint="install a newer persia, or write the bundle again with this one: persia export",
                )
            del content["blake3"]
            manifest = cls._of(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, f"is not a bundle manifest: {error}") from error
        if wrong := [each.name for each in manifest.files if _NAME.fullmatch(each.name) is None]:
            raise damaged(path, f"lists names that a file of a bundle cannot have: {listed([*map(repr, wrong)])}")
        return manifest

    @classmethod
    def _of(cls, content: dict[str, Any]) -> "Manifest":
        def each(kind: Any, items: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
            return tuple(one(kind, item) for item in items)

        def one(kind: Any, item: dict[str, Any]) -> Any:
            return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in item.items()})

        lists = {"inputs": Input, "outputs": Output, "tables": Table, "files": File}
        parts = {"source": Source, "model": Model, "parity": Parity}
        found: dict[str, Any] = {name: each(kind, content.pop(name)) for name, kind in lists.items()}
        found |= {name: one(kind, content.pop(name)) for name, kind in parts.items()}
        return cls(**found, **content)


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file of a bundle that is not as it was written."""
    return CheckpointError(f"{path}: {what}", hint=REPAIR)


def new_folder(path: Path) -> Path:
    """Return a path to which an export can write a bundle: ``path``, or a new path next to it if ``path`` exists."""
    found, number = path, 1
    while os.path.lexists(found):
        number += 1
        found = path.absolute().parent / f"{path.absolute().name}-{number}"
    return found


def _missing(folder: Path) -> CheckpointError:
    if not folder.exists():
        what = "no such folder"
    elif not folder.is_dir():
        what = "expected the folder of a bundle, found a file"
    else:
        what = f"no bundle, or one that was not completely written: {MANIFEST} is missing"
    hint = f"write a bundle: persia export runs/LATEST -o {shlex.quote(str(new_folder(folder)))}"
    return CheckpointError(f"{folder}: {what}", hint=hint)
