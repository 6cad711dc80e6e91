"""A gradient's memory is freed by a thread that holds the GIL, never by a thread of the engine."""

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
import torch
from conftest import Configure
from test_training import make

from persia.data import DataLoader, IterableDataset
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch


class DLTensor(ctypes.Structure):
    """The tensor structure of DLPack 0.8. Type and device are in memory order."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """The managed structure of DLPack 0.8."""


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
DLManagedTensor._fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))
FLOAT32 = 2 | 32 << 8 | 1 << 16
NAME = b"dltensor"


class Noted:
    """A gradient that records the thread that frees its memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.freed: list[threading.Thread] = []
        self.shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        self.deleter = Deleter(lambda _: self.freed.append(threading.current_thread()))
        data, none = values.ctypes.data, ctypes.POINTER(ctypes.c_int64)()
        tensor = DLTensor(data, (1, 0), values.ndim, FLOAT32, self.shape, none, 0)
        self.managed = DLManagedTensor(tensor, None, self.deleter)
        self.destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self._end)

    def _end(self, capsule: int) -> None:
        """Free an unused capsule, as the protocol requires of its producer."""
        valid = ctypes.pythonapi.PyCapsule_IsValid
        valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        if valid(capsule, NAME):
            self.deleter(ctypes.pointer(self.managed))

    def __dlpack__(self) -> object:
        """Return the capsule."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), NAME, ctypes.cast(self.destructor, ctypes.c_void_p))


class OneBatch(IterableDataset):
    """A batch of 64 ids."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        """Yield it."""
        ids = np.arange(64, dtype=np.uint64)
        features = [IDTypeFeatureWithSingleID(name, ids) for name in "ab"]
        yield PersiaBatch(features, labels=[Label(np.zeros((64, 1), np.float32))])


def test_gradients_are_given_back_by_a_thread_that_has_the_gil(configure: Configure) -> None:
    """PyTorch's deleter waits for the GIL, and aborts if an engine thread calls it at the end of the interpreter."""
    configure("a: {dim: 4}\nb: {dim: 4}")
    gradients = [Noted(np.full((64, 4), value, np.float32)) for value in (1, 2)]
    with make() as ctx:
        for batch in DataLoader(OneBatch()):
            batch.push(gradients, 1.0)
        ctx.engine.drain()
        assert ctx.engine.stats()["pushes"]["rows_applied"] == 128
        for gradient in gradients:
            (thread,) = gradient.freed
            # For a thread of the engine, Python has only a dummy object.
            assert not isinstance(thread, threading._DummyThread), thread
    assert torch.equal(torch.from_numpy(gradients[0].values), torch.ones(64, 4))
