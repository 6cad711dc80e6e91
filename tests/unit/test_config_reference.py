"""``docs/configuration.md`` is current, and the blocks agree with the classes that they configure."""

import inspect

import torch
from test_tools import load

from persia.config import values
from persia.config.models import MODELS, REFUSED, arguments_of
from persia.config.optimizers import OF_MODEL, OF_ROWS
from persia.embedding import optim
from persia.nn import default_optimizer

ROW_CLASSES = {"adagrad": optim.Adagrad, "adam": optim.Adam, "sgd": optim.SGD}
MODEL_CLASSES = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "sgd": "SGD"}


def test_the_reference_is_current() -> None:
    tool = load("config_reference")
    assert tool.FILE.read_text(encoding="utf-8") == tool.reference(), "run: python tools/config_reference.py"


def test_arguments_of_row_optimizers_are_those_of_their_classes() -> None:
    assert OF_ROWS.keys() == ROW_CLASSES.keys()
    for name, block in OF_ROWS.items():
        parameters = inspect.signature(ROW_CLASSES[name]).parameters
        assert block.model_fields.keys() == parameters.keys()
        if name == "adagrad":
            continue
        for key, field in block.model_fields.items():
            assert field.is_required() == (parameters[key].default is inspect.Parameter.empty)
            assert field.is_required() or field.default == parameters[key].default, (name, key)
    ours, theirs = OF_ROWS["adagrad"](), default_optimizer()
    for key in ("lr", "weight_decay", "g_square_momentum", "eps", "vectorwise_shared"):
        assert getattr(ours, key) == getattr(theirs, key), key


def test_arguments_of_model_optimizers_are_those_of_torch() -> None:
    assert OF_MODEL.keys() == MODEL_CLASSES.keys()
    for name, block in OF_MODEL.items():
        parameters = inspect.signature(getattr(torch.optim, MODEL_CLASSES[name])).parameters
        for key, field in block.model_fields.items():
            assert field.default == parameters[key].default, (name, key)


def test_arguments_of_models_are_those_of_their_classes() -> None:
    import persia.models

    classes = {MODELS[name].partition(":")[2]: arguments_of(name) for name in MODELS}
    assert sorted(classes) == sorted(persia.models.__all__)
    for name, arguments in classes.items():
        parameters = inspect.signature(getattr(persia.models, name)).parameters
        assert [*arguments] == [key for key in parameters if key not in REFUSED]
        for key, argument in arguments.items():
            default = parameters[key].default
            if default is inspect.Parameter.empty:
                assert argument.default is values.COMPUTED
            else:
                assert argument.default == ([*default] if isinstance(default, tuple) else default)
