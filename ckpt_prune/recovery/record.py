"""What an output's report says of recovery."""

from collections.abc import Sequence
from typing import Any

from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.recovery.recoverer import RecoveredLayer, Recoverer


def recovery_record(
    recoverer: Recoverer, dense: Checkpoint, layers: Sequence[RecoveredLayer], *, on_the_fly: bool
) -> dict[str, Any]:
    """Keys `recovery` and `layers` of an output's report.

    Args:
        recoverer: past the last block.
        dense: the model whose hidden states were the target.
        layers: what was done, block by block.
        on_the_fly: whether each block was recovered right after it was pruned.
    """
    settings, samples = recoverer.settings, recoverer.pruned.samples
    chosen = settings.model_dump(mode="json", exclude={"samples", "seed"}) | {
        "lr": recoverer.rate,
        "seed": recoverer.seed,
    }
    return {
        "recovery": {
            "dense": {"name": dense.path.resolve().name, "fingerprint": dense.fingerprint},
            "on_the_fly": on_the_fly,
            "settings": chosen,
            "data": {
                "modality": recoverer.pruned.factory.family.modality,
                "data": samples.fingerprint,
                "samples": len(samples),
                "held_out": len(recoverer.split.held_out),
                "window": samples.tokens,
                "tokens": len(samples) * samples.tokens,
            },
            "perplexity_after": recoverer.perplexities(),
        },
        "layers": [layer.model_dump() for layer in layers],
    }
