"""Export of a trained model to a bundle, which is refused unless its scores are those of evaluation.

* :mod:`persia.trainer.exporting.export`: the export, step by step
* :mod:`persia.trainer.exporting.held_out`: the rows that both are compared on
* :mod:`persia.trainer.exporting.compare`: the comparison
* :mod:`persia.trainer.exporting.dense`: the dense model as a file
* :mod:`persia.trainer.exporting.staging`: a folder appears when it is complete
"""
