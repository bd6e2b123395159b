"""An encoder-decoder as two graphs, and as PyTorch has it: both are called with sources and tokens of their targets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.utils.generic import ModelOutput

from ckpt_prune.common.formatting import plural
from ckpt_prune.measure.samples.pairs import PairWindows
from ckpt_prune.modeling_pruned import cache_argument
from ckpt_prune.onnx.comparison import NOISE, cut
from ckpt_prune.onnx.records import Padding
from ckpt_prune.onnx.reference import GraphReference
from ckpt_prune.onnx.session import OnnxModel, Provider, Session
from ckpt_prune.onnx.stacks import BRANCH, name_kept

BATCHES = (1, 2, 5)
MOST_NOISE = 24
"""Tokens of a source, or a target, of noise."""
TARGET = "decoder_input_ids"


class OnnxPair:
    """Graphs of an encoder and a decoder, called like the model that they came from.

    Args:
        folder: of both, with config.json.
        files: of the encoder and the decoder.
        described: the folder with config.json, if that is another one.

    Attributes:
        graphs: both, the encoder first.
    """

    device = torch.device("cpu")

    def __init__(
        self, folder: Path, files: Sequence[str], *, provider: Provider = "cpu", described: Path | None = None
    ) -> None:
        self.graphs = [OnnxModel(folder, file, provider=provider, described=described) for file in files]
        self.config, self.dtype = self.graphs[0].config, self.graphs[0].dtype

    @property
    def session(self) -> Session:
        return self.graphs[1].session

    def eval(self) -> "OnnxPair":
        return self

    def close(self) -> None:
        """Free the graphs' memory; they can be run no more."""
        for graph in self.graphs:
            graph.close()

    def read(
        self, feed: dict[str, Tensor], states: Tensor | None = None, cache: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return `last_hidden_state` of the sources, and the decoder's outputs.

        Args:
            feed: what the encoder reads, and `decoder_input_ids`, int64 (B, T): those in the cache apart.
            states: what the encoder returned for these sources before.
            cache: what the decoder returned for earlier tokens; None: there are none.
        """
        encoder, decoder = self.graphs
        ids = feed[TARGET]
        if states is None:
            states = encoder.run(feed)["last_hidden_state"]
        inputs = {"input_ids": ids, "encoder_hidden_states": states, BRANCH: torch.tensor([cache is not None])}
        if "attention_mask" in feed:
            inputs["encoder_attention_mask"] = feed["attention_mask"]
        outputs = decoder.run(inputs | (decoder.empty_cache(len(ids)) if cache is None else cache))
        return {"last_hidden_state": states} | outputs

    def __call__(self, **inputs: Any) -> ModelOutput:
        """Run on whole sources and targets."""
        feed = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        return ModelOutput(logits=self.read(feed)["logits"])


class PairReference(GraphReference):
    """An encoder-decoder in PyTorch that is run on what its graphs are run on."""

    def _prepare(self, inputs: set[str]) -> None:
        self.needs, self._past = [], cache_argument(self.module.forward)

    def run(self, feed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoder's states and the logits of whole targets."""
        return self._outputs(self._call(feed, {"use_cache": False}))

    def run_with_cache(self, feed: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return these, and keys and values of every layer, of the target and of the source."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())  # of every token, also where attention is windowed
        output = self._call(feed, {"use_cache": True, self._past: cache})
        return self._outputs(output), name_kept(cache)

    @torch.inference_mode()
    def _call(self, feed: dict[str, Tensor], options: dict[str, Any]) -> Any:
        return self.run_module(lambda module: module(**feed, **options), feed)

    def _outputs(self, output: Any) -> dict[str, Tensor]:
        return {"last_hidden_state": output.encoder_last_hidden_state, "logits": output.logits}


@dataclass(frozen=True)
class PairCase:
    """A batch of sources with their targets.

    Attributes:
        feed: what the model is called with.
        sources: tokens of sources that are no padding, bool (B, S); None of sounds.
        targets: the same of targets, bool (B, T).
        chunks: how many tokens of the targets go through the cache at a time; empty: all in one pass.
    """

    feed: dict[str, Tensor]
    sources: Tensor | None
    targets: Tensor
    chunks: tuple[int, ...] = ()

    @property
    def padding(self) -> Padding:
        return "none" if bool(self.targets.all()) and (self.sources is None or bool(self.sources.all())) else "right"


def make_pair_cases(pairs: PairWindows) -> list[PairCase]:
    """Batches of several sizes, each as long as its longest source and target, in one pass and in pieces."""
    batches = [make_pair_case(pairs, size) for size in sorted({min(size, len(pairs)) for size in BATCHES})]
    several = [replace(each, chunks=cut(each.targets.shape[1], (2, 1))) for each in batches[:2]]
    return batches + [each for each in several if len(each.chunks) > 1]


def make_pair_case(pairs: PairWindows, *rows_of: int) -> PairCase:
    """Return the first pairs, so many, or those from one on to another."""
    rows = slice(*rows_of)
    feed, targets = pairs.batch(rows), pairs.counted(rows)
    long = int(targets.sum(1).max())
    feed[TARGET], targets = feed[TARGET][:, :long], targets[:, :long]
    sources = None
    if "attention_mask" in feed:
        read = int(feed["attention_mask"].sum(1).max())
        feed |= {name: feed[name][:, :read] for name in ("input_ids", "attention_mask")}
        sources = feed["attention_mask"].bool()
    return PairCase(feed, sources, targets)


def make_noise_pairs(config: Any, context: int | None, seed: int) -> PairWindows:
    """Return sources of random tokens, of which every second is padded, or of noise, with targets of random tokens."""
    draw, text = torch.Generator().manual_seed(seed), config.get_text_config(decoder=True)
    long = MOST_NOISE if context is None else min(MOST_NOISE, context)
    pad = getattr(text, "pad_token_id", None) or 0

    def write() -> Tensor:
        ids = torch.randint(int(text.vocab_size), (NOISE, long), generator=draw)
        return torch.where(ids.eq(pad), (ids + 1) % int(text.vocab_size), ids)  # positions of some depend on padding

    named = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos"))
    start = next((each for each in named if isinstance(each, int) and each < int(text.vocab_size)), 0)
    windows, scored = write(), torch.ones(NOISE, long, dtype=torch.bool)
    windows[:, 0], scored[:, 0] = start, False
    if hasattr(config, "num_mel_bins"):
        shape = NOISE, config.num_mel_bins, 2 * config.max_source_positions
        sources = {"input_features": torch.randn(*shape, generator=draw)}
    else:
        ids, mask = write(), torch.ones(NOISE, long, dtype=torch.int64)
        mask[1::2, long // 2 :] = 0
        sources = {"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask}
    return PairWindows(windows, plural(NOISE, "pair") + " of noise", scored, sources)
