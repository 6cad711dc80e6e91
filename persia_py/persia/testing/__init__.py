"""Checks a model step by step, with embeddings in memory: in the user's tests, or from a shell.

In pytest::

    import persia.testing

    def test_my_model():
        assert persia.testing.check(MyModel, "persia.yml")

From a shell: ``python -m persia.testing persia.yml``. Neither data nor servers are needed. Ids, dense inputs and labels
are generated, with the shapes of the features.

* :func:`check`: each method of a model: build, forward, loss, backward, eval, state_dict
* :func:`check_alone`: the model with torch alone
* :class:`Report`: the result
"""

from persia.testing.checks import check, check_alone
from persia.testing.report import Report, Step

__all__ = ["Report", "Step", "check", "check_alone"]
