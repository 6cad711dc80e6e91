"""The base class of the blocks of ``persia.yml``."""

from pydantic import BaseModel, ConfigDict


class Block(BaseModel):
    """A block of keys. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
