from typing import Final

from . import backward as backward
from . import checkpoint as checkpoint
from . import config as config
from . import data as data
from . import discovery as discovery
from . import engine as engine
from . import errors as errors
from . import features as features
from . import forward as forward
from . import optim as optim
from . import serving as serving
from . import trace as trace

__version__: Final[str]
FEATURES: Final[list[str]]
BUILD_INFO: Final[dict[str, str]]
