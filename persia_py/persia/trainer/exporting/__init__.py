"""Exports a trained model to a bundle, which is refused unless its scores equal those of evaluation.

* :mod:`persia.trainer.exporting.export`: the export, step by step
* :mod:`persia.trainer.exporting.held_out`: the rows on which bundle and evaluation are compared
* :mod:`persia.trainer.exporting.compare`: the comparison
* :mod:`persia.trainer.exporting.dense`: the dense model as a file
* :mod:`persia.trainer.exporting.staging`: a folder that appears when it is complete
"""
