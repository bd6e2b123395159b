"""The work of the stage `export`."""

from ckpt_prune.job.stage import Stage
from ckpt_prune.stages.export.keys import Export


class ExportStage(Stage[Export]):
    """Exports the output, once it is whole, to an ONNX graph or a GGUF file."""

    of = Export
