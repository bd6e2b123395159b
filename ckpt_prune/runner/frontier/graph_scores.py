"""Measures graphs of a frontier: how predictions in onnxruntime differ from the dense model's, and their speed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from ckpt_prune.benchmarking.latency_table import time_fastest
from ckpt_prune.benchmarking.runners import GraphTimer
from ckpt_prune.benchmarking.workload import Workload
from ckpt_prune.common.errors import UserError
from ckpt_prune.evaluation.fewer_tokens import TextCosts, TokenParts, score_of, write_with
from ckpt_prune.evaluation.file_score import FileScore
from ckpt_prune.evaluation.perplexity import LanguageModel, compare
from ckpt_prune.evaluation.streamed import StreamedModel
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.onnx.export import count_graph_bytes
from ckpt_prune.onnx.metrics import Allowance, measure_image_metric, measure_text_metric
from ckpt_prune.onnx.pairs import OnnxPair, make_pair_case
from ckpt_prune.onnx.reference import GraphReference, HeldModel
from ckpt_prune.onnx.samples import ProofSamples
from ckpt_prune.onnx.session import OnnxModel, complete_inputs
from ckpt_prune.onnx.tasks import GraphTask

BATCH, PAIRS = 8, 4
"""Images, and pairs, that are timed."""


def load_in_float(folder: Path, *, trust: bool, unpack: bool = False) -> Any:
    """Load a WHOLE model in float32."""
    how: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "whole": True}
    return load_model(folder, trust_remote_code=trust, unpack=unpack, **how)


@dataclass(eq=False)
class GraphScores:
    """Runs graphs of a model, whole or pruned, and compares them with the dense model on held-out data.

    Attributes:
        folder: of the dense model.
        trust: whether its code may run.
        task: of the graphs.
        samples: held-out data.
        workload: that graphs are timed on; None: they are not.
        dense: perplexity of the dense model, once something is measured.
    """

    folder: Path
    trust: bool
    task: GraphTask
    samples: ProofSamples
    workload: Workload | None = None
    dense: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._held = HeldModel(lambda: load_in_float(self.folder, trust=self.trust))

    def let_go(self) -> None:
        """Free the memory of the dense model."""
        self._held.let_go()

    def score(self, place: Path, files: Sequence[str], described: Path, parts: TokenParts | None) -> FileScore:
        """Run a graph, or both of an encoder-decoder, and compare it with the dense model.

        Args:
            place: folder of the graphs.
            files: of the graph, or of the encoder's and the decoder's.
            described: folder with its config.json.
            parts: how a graph with fewer tokens writes a token; None: it has all.
        """
        graph: OnnxModel | OnnxPair
        if len(files) == 1:
            graph = OnnxModel(place, files[0], described=described)
        else:
            graph = OnnxPair(place, files, described=described)
        try:
            score = self._compare(graph, described, parts)
            ms = None
            if self.workload is not None and isinstance(graph, OnnxModel):
                ms = time_fastest([GraphTimer(graph)], self.workload, "timing the graph")[0] / 1e6
            size, speeds = sum(count_graph_bytes(place, file) for file in files), (self._time(graph, parts),)
        finally:
            graph.close()
        return replace(score, bytes=size, speeds=speeds, ms=ms)

    def _compare(self, graph: OnnxModel | OnnxPair, described: Path, parts: TokenParts | None) -> FileScore:
        """Return a score without size and times."""
        task, samples = self.task, self.samples
        if isinstance(graph, OnnxPair):
            assert samples.pairs is not None
            targets = compare(cast(Any, graph), self._held.get(), samples.pairs)
            self.dense = targets.reference_score.perplexity
            return FileScore(0, targets.kl, targets.score.perplexity, (), top1=targets.top1_agreement)
        if task.name == "text-generation":
            assert samples.windows is not None
            if parts is not None:
                self.dense = math.exp(self._costs.nll)
                return self._costs.score(cast(Any, graph), parts)
            both = compare(cast(Any, graph), self.language_model, samples.windows)
            self.dense = both.reference_score.perplexity
            return score_of(both, samples.windows, samples.texts)
        reference, any_loss = GraphReference(self._held, task, set()), Allowance(0.0, math.inf)
        if samples.images is not None:
            metric = measure_image_metric(graph, reference, task.name, samples.images, any_loss)
        else:
            assert samples.windows is not None
            metric = measure_text_metric(graph, reference, task.name, samples.windows, described, any_loss)
        if isinstance(metric, str):
            raise UserError(f"what a graph of {described.name} loses is not measured: {metric}")
        if metric.kl is None:  # of vectors of one length, the energy that is lost is twice what the cosine loses
            assert metric.onnxruntime is not None
            return FileScore(0, 2 * (1 - metric.onnxruntime), None, (), top1=metric.onnxruntime)
        if task.name == "fill-mask":
            self.dense = metric.pytorch
            return FileScore(0, metric.kl, metric.onnxruntime, (), top1=metric.same)
        return FileScore(0, metric.kl, None, (), top1=metric.same)

    @cached_property
    def _costs(self) -> TextCosts:
        assert self.samples.windows is not None
        return TextCosts(self.samples.windows, self.samples.texts, lambda: self.language_model)

    @property
    def language_model(self) -> LanguageModel:
        """The dense model, to be run block by block if it can be: its states are then made once for all graphs."""
        return open_streamed(self.folder) or self._held.get()

    def _time(self, graph: OnnxModel | OnnxPair, parts: TokenParts | None) -> float:
        """Return the tokens, of targets, or images that a graph reads a second."""
        samples = self.samples
        if isinstance(graph, OnnxPair):
            assert samples.pairs is not None
            case = make_pair_case(samples.pairs, min(PAIRS, len(samples.pairs)))
            return _time_run(lambda: graph.read(case.feed), int(case.targets.sum()))
        if samples.images is not None:
            feed = {"pixel_values": samples.images.batch(slice(0, BATCH))["pixel_values"]}
            items = len(feed["pixel_values"])
        else:
            assert samples.windows is not None
            ids = samples.windows[:1] if parts is None else write_with(samples.windows[:1], parts).windows
            feed = complete_inputs({"input_ids": ids}) | graph.empty_cache(1)
            items = ids.shape[1]
        return _time_run(lambda: graph.run(feed), items)


def _time_run(run: Callable[[], Any], items: int) -> float:
    """Return the items a second of the second run."""
    run()
    start = perf_counter()
    run()
    return items / (perf_counter() - start)


def open_streamed(folder: Path) -> StreamedModel | None:
    """Return a model in float32, to be run block by block; None if it has to be loaded whole."""
    return StreamedModel.open(folder, torch.device("cpu"), torch.float32)
