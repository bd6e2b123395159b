"""Recovering a checkpoint that is pruned already, by this tool or another (LaCo after pruning)."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ckpt_prune._version import __version__
from ckpt_prune.architectures.family import Family
from ckpt_prune.architectures.fitting import fitting_family
from ckpt_prune.architectures.skeleton import parse_config
from ckpt_prune.calibration.blocks import BlockFactory
from ckpt_prune.calibration.images import load_processor
from ckpt_prune.calibration.measure import block_names, reader_fingerprint
from ckpt_prune.calibration.samples import Samples
from ckpt_prune.calibration.states import Allocate, in_memory
from ckpt_prune.calibration.streams import HiddenStream
from ckpt_prune.calibration.text import load_tokenizer, token_stream
from ckpt_prune.checkpoint.jsonfile import read_object
from ckpt_prune.checkpoint.reading import Checkpoint
from ckpt_prune.checkpoint.staging import refuse_overlap
from ckpt_prune.checkpoint.writing import CheckpointWriter
from ckpt_prune.containers.checking import check_source, check_stored
from ckpt_prune.containers.container import Container, stored_container
from ckpt_prune.errors import UserError
from ckpt_prune.filenames import ELSEWHERE, REPORT, ROTATIONS
from ckpt_prune.planning.accounting import cost_of
from ckpt_prune.planning.mask_recipe import RotationKind
from ckpt_prune.planning.recovery_recipe import RecoverySettings
from ckpt_prune.progress import meter
from ckpt_prune.recovery.record import recovery_record
from ckpt_prune.recovery.recoverer import RecoveredLayer, Recoverer
from ckpt_prune.recovery.training import Split
from ckpt_prune.reporting.reading import read_document
from ckpt_prune.rotations.learning import RotationSizes, WrittenRotations
from ckpt_prune.rotations.rotated import RotatedCheckpoint
from ckpt_prune.transform.checks import check_trainable
from ckpt_prune.transform.engine import fill_biases
from ckpt_prune.transform.layout import source_shapes
from ckpt_prune.transform.publish import publish
from ckpt_prune.versions import versions

_REST = "rest"


@dataclass(frozen=True)
class RecoveryJob:
    """One pruned checkpoint and the dense one it was made from.

    Args:
        pruned: what is recovered.
        dense: whose hidden states are the target.
        settings: of training.
        samples: what to train on.
        seed: of the order of samples.
        compute_dtype: in which blocks run; masters are float32 in any case.
        device: where.
        allocate: makes the tensors that hold hidden states.
        after: numbers of blocks k, for the perplexity of the model of which the first k blocks are recovered.
    """

    pruned: Checkpoint
    dense: Checkpoint
    settings: RecoverySettings
    samples: Samples
    seed: int = 0
    compute_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    allocate: Allocate = in_memory
    after: frozenset[int] = frozenset()

    @cached_property
    def family(self) -> Family:
        """The pruned checkpoint's family."""
        return fitting_family(self.pruned)

    @cached_property
    def container(self) -> Container:
        """What the pruned checkpoint is stored as."""
        return stored_container(self.pruned)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.family.dimension(parse_config(self.pruned.config), "layers")

    @cached_property
    def report(self) -> dict[str, Any]:
        """What the pruned checkpoint says of itself; nothing where another tool made it."""
        path = self.pruned.path / REPORT
        return read_object(path) if path.is_file() else {}

    @property
    def doubt(self) -> str | None:
        """A line where the two models look like a slip: the same, or not the one the pruned one says it is from."""
        if self.pruned.fingerprint == self.dense.fingerprint:
            return f"{self.pruned.path} and {self.dense.path} are the same model: there is nothing to recover"
        source = self.report.get("source")
        if not isinstance(source, dict) or source.get("fingerprint") == self.dense.fingerprint:
            return None
        return (
            f"{self.pruned.path} says it was made from another model ({source.get('name')}) than {self.dense.path}: "
            "right where it was pruned more than once, else give the dense model it was made from"
        )

    @cached_property
    def reference(self) -> "Checkpoint | RotatedCheckpoint":
        """The dense checkpoint in the basis of the pruned one's hidden states."""
        rotation = self.report.get("rotation")
        kind = rotation.get("kind") if isinstance(rotation, dict) else None
        if kind is None or kind == "values":
            return self.dense
        if kind not in get_args(RotationKind):
            raise UserError(f"{self.pruned.path / REPORT} names an unknown rotation {kind!r}: prune again")
        family, config = fitting_family(self.dense), parse_config(self.dense.config)
        rotations = WrittenRotations.of_output(self.pruned.path, RotationSizes.of(kind, family, config))
        return RotatedCheckpoint(self.dense, family, config, kind, rotations, self.device)

    def check(self) -> None:
        """Check everything there is to check before hidden states are made.

        Raises:
            UserError: the two models do not belong together, or the settings do not suit them.
        """
        if (self.pruned.path / REPORT).is_file():
            # It is added to when all is done: damaged, it would cost all the training.
            read_document(self.pruned.path)
        check_models(self.pruned, self.dense)
        check_trainable(len(self.samples))
        self.settings.blocks(self.blocks)
        _ = self.reference

    def recoverer(self) -> Recoverer:
        """At the first block."""
        split = Split.of(len(self.samples), self.settings.held_out)
        skeleton: Any = self.container.skeleton()
        own = BlockFactory(
            self.family, skeleton.config, device=self.device, dtype=self.compute_dtype, skeleton=skeleton
        )
        pruned = HiddenStream(
            own,
            self.pruned.tensors,
            self.pruned.read,
            self.samples,
            sizes=split.sizes(self.settings),
            allocate=self.allocate,
        )
        reference = self.reference
        family = fitting_family(self.dense)
        if isinstance(reference, RotatedCheckpoint):
            # Masks leave shapes alone: under rotations the dense model is built as the pruned one is.
            built: Any = self.container.skeleton()
            config, names = built.config, reference.names()
        else:
            built, config, names = None, parse_config(self.dense.config), list(reference.tensors)
        factory = BlockFactory(family, config, device=self.device, dtype=self.compute_dtype, skeleton=built)
        dense = HiddenStream(factory, names, reference.read, self.samples, allocate=self.allocate)
        return Recoverer(dense, pruned, split, self.settings, self.seed, self.after, self.allocate)

    def dense_block(self, block: int) -> dict[str, Tensor]:
        """A block of the dense model, in the pruned one's basis."""
        family = fitting_family(self.dense)
        names = block_names(self.dense, family, block)
        reference = self.reference
        if not isinstance(reference, RotatedCheckpoint):
            return reference.read(names)
        tensors = reference.block(block, names)
        # Built as the pruned model's blocks are, which may have slots that nothing is folded into.
        biases = {m for m in family.linears if family.tensor(block, m, "bias") in self.pruned.tensors}
        fill_biases(family, block, biases, tensors)
        return tensors

    @cached_property
    def digest(self) -> str:
        """sha256 of all that the output depends on."""
        parts = [
            __version__,
            "recover",
            self.pruned.fingerprint,
            self.dense.fingerprint,
            self.settings.model_dump(mode="json"),
            self.samples.fingerprint,
            self.seed,
            str(self.compute_dtype),
            self.device.type,
            sorted(self.after),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_models(pruned: Checkpoint, dense: Checkpoint) -> None:
    """Refuse two checkpoints of which one cannot have been made from the other.

    Raises:
        UserError: with what differs.
    """
    ours, theirs = fitting_family(pruned), fitting_family(dense)
    check_stored(pruned, stored_container(pruned).skeleton())
    check_source(dense, theirs)
    related = ours.model_type == theirs.model_type or ours.model_type in theirs.stand_ins
    if not related:
        raise UserError(
            f"{pruned.path} is of type {ours.model_type} and {dense.path} of type {theirs.model_type}: "
            "a model is recovered against the dense one it was made from"
        )
    configs = parse_config(pruned.config), parse_config(dense.config)
    for name, what in (("layers", "blocks"), ("hidden", "hidden dimensions")):
        own, other = ours.dimension(configs[0], name), theirs.dimension(configs[1], name)
        if own != other:
            raise UserError(
                f"{pruned.path} has {own} {what} and {dense.path} has {other}: "
                "a model is recovered against the dense one it was made from, block by block"
            )
    sizes = [getattr(config, "vocab_size", None) for config in configs]
    if sizes[0] != sizes[1]:
        raise UserError(f"{pruned.path} and {dense.path} have vocabularies of {sizes[0]} and {sizes[1]} tokens")


def check_same_reader(pruned: Checkpoint, dense: Checkpoint, family: Family, text: str, *, trust: bool = False) -> None:
    """Refuse two checkpoints that read the same data differently, where the pruned one says how it reads.

    Args:
        pruned: what is recovered.
        dense: whose tokenizer or image processor is used.
        family: of the dense one.
        text: what a language model is recovered on.
        trust: run an image processor's own code.

    Raises:
        UserError: they do.
    """
    ours, theirs = (reader_fingerprint(checkpoint, family) for checkpoint in (pruned, dense))
    if ours is None or ours == theirs:
        return
    if family.modality == "image":
        settings = [load_processor(each.path, trust_remote_code=trust).to_json_string() for each in (pruned, dense)]
        if settings[0] != settings[1]:
            raise UserError(f"{pruned.path} and {dense.path} have different image processors")
        return
    # The files may differ in what does not matter, such as the version that wrote them.
    streams = [token_stream(load_tokenizer(each.path), text) for each in (pruned, dense)]
    if not torch.equal(*streams):
        raise UserError(f"{pruned.path} and {dense.path} have different tokenizers: they read the text differently")


def recover(
    job: RecoveryJob,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    announce: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Train what a pruned checkpoint has left, block by block, into a copy of it (LaCo, Algorithm 1).

    Shapes, dtypes, names, zeros and all that is outside the blocks' linear modules stay as they are. The output is
    written to `OUT.partial` and renamed at the end.

    Args:
        job: what to do.
        out: the folder to write.
        resume: continue an interrupted run of the same job, with the same result.
        overwrite: replace an existing output, or start an interrupted one afresh.
        announce: told, once everything is checked, what is doubtful about the models and what is about to be done.

    Returns:
        The report, as in the output's ckpt_prune.json.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    for source in (job.pruned, job.dense):
        refuse_overlap(source.path, out)
    job.check()
    shapes = source_shapes(job.pruned)
    layout = {
        file: {name: shapes[name] for name, info in job.pruned.tensors.items() if info.file == file}
        for file in job.pruned.files
    }
    writer = CheckpointWriter(
        out, layout, job=job.digest, sharded=job.pruned.sharded, resume=resume, overwrite=overwrite
    )
    if not writer.done:
        job.pruned.check_finite()
        job.dense.check_finite()
    with writer:
        recoverer = job.recoverer()
        for line in filter(None, [job.doubt, recoverer.summary]):
            announce(line)
        layers = _write_blocks(job, recoverer, writer)
        _write_rest(job, writer)
        report = _base(job) | versions()
        earlier = {key: report.get(key) for key in ("recovery", "layers")} if report.get("recovery") else None
        report |= recovery_record(recoverer, job.dense, layers, on_the_fly=False)
        report["recovery"]["earlier"] = earlier
        asides = [ROTATIONS] if (job.pruned.path / ROTATIONS).is_file() else []
        for name in asides:
            writer.copy(job.pruned.path / name)
        return publish(writer, report, job.container, job.pruned, [*layout, *asides])


def _write_blocks(job: RecoveryJob, recoverer: Recoverer, writer: CheckpointWriter) -> list[RecoveredLayer]:
    layers = []
    with meter(recoverer.epochs, "recovering", unit="epoch") as epochs:
        for block in range(job.blocks):
            unit = f"block {block}"
            dense = job.dense_block(block)
            pruned = job.pruned.read(block_names(job.pruned, job.family, block))
            if unit in writer.done:
                layer = RecoveredLayer.model_validate(writer.notes[unit])
                recoverer.skip(block, dense, pruned, writer.read(pruned))
                epochs.to(recoverer.done(block))
            else:
                tensors, layer = recoverer.block(block, dense, pruned, epochs)
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
                writer.commit(unit, note=layer.model_dump())
            layers.append(layer)
    return layers


def _write_rest(job: RecoveryJob, writer: CheckpointWriter) -> None:
    if _REST in writer.done:
        return
    inside = {name for block in range(job.blocks) for name in block_names(job.pruned, job.family, block)}
    for name in job.pruned.tensors:
        if name not in inside:
            writer.write(name, job.pruned.read([name])[name])
    writer.commit(_REST)


def _base(job: RecoveryJob) -> dict[str, Any]:
    """The report to add to: the pruned checkpoint's own, or what is known of one that another tool made."""
    config = parse_config(job.dense.config)
    known = {
        "version": 1,
        "source": {"name": job.dense.path.resolve().name, "fingerprint": job.dense.fingerprint},
        "recipe": {"name": ELSEWHERE},
        "recipe_digest": "",
        "calibration": {},
        "plan": None,
        "lambda_search": None,
        "container": {
            "model_type": job.container.model_type,
            "remote_code": job.container.remote_class is not None,
            "auto_class": job.family.auto_class,
            "padded": [],
            "note": None,
        },
        "before": cost_of(fitting_family(job.dense), config, source_shapes(job.dense)).model_dump(),
        "after": cost_of(job.family, parse_config(job.pruned.config), source_shapes(job.pruned)).model_dump(),
        "mask": None,
        "rotation": None,
        "sites": [],
        "linears": [],
    }
    return known | job.report
