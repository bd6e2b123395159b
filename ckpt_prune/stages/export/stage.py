"""The work of the stage `export`."""

from ckpt_prune.gguf import require_gguf
from ckpt_prune.job.afterwork import Afterwork
from ckpt_prune.job.job import Job
from ckpt_prune.job.prepared import Prepared
from ckpt_prune.job.stage import Stage
from ckpt_prune.model.model import Model
from ckpt_prune.stages.export.keys import Export


class ExportStage(Stage[Export]):
    """Exports the output, once it is whole, to an ONNX graph or a GGUF file.

        version: 1
        name: for-llama-cpp
        ratio: 0.2
        spaces: {mlp: {score: rcpu, compensation: {method: ridge}}}
        export: {format: gguf, dtype: q8_0}

    It decides nothing. `after_publish` exports what `publish` has written, before the folder takes its place.
    """

    of = Export

    def check_source(self, model: Model) -> None:
        """Refuse nothing yet: whether the output can be exported is checked once it is known."""

    def plan_lines(self, prepared: Prepared) -> list[str]:
        types = ", ".join(self.keys.dtype) or "in the checkpoint's type"
        return [f"to be exported: {self.keys.format}, {types}"]

    def after_publish(self, job: Job) -> Afterwork:
        if self.keys.format == "gguf":
            require_gguf()
            from ckpt_prune.stages.export.gguf_file import GgufExport

            return GgufExport.of(self.keys, job)
        from ckpt_prune.stages.export.graphs import Graphs

        return Graphs.of(self.keys, job)
