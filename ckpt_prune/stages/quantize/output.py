"""The output of the stage `quantize`: which weights are stored in few bits, and what stands in for them."""

from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from typing import Any

from torch import nn

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.checkpoint.quantised import QUANTISATION_KEY
from ckpt_prune.common.errors import UserError
from ckpt_prune.job.layout import Layout, Output, count_bytes
from ckpt_prune.model.containers.container import Container
from ckpt_prune.model.model import Model, TensorSpec
from ckpt_prune.sparsity.zeros import weights_by_module
from ckpt_prune.stages.quantize.keys import Quantize
from ckpt_prune.stages.quantize.packing import packed_shapes, packed_skeleton, packing_config, require_library
from ckpt_prune.stages.quantize.scheme import DENSE, PackingScheme, Schemes, choose_schemes

_WEIGHT = ".weight"


def check_model(model: Model) -> None:
    """Refuse a missing library, and a model whose linear modules transformers does not quantise."""
    require_library()
    checkpoint, family = model.checkpoint, model.family
    if model.has_remote_code:
        raise _own_code(checkpoint)
    if checkpoint.stacks or family.experts is not None:
        raise UserError(f"{checkpoint.path}: experts are no linear modules in transformers, so they are not quantised")
    if checkpoint.transposed:
        raise UserError(
            f"{checkpoint.path} is a {family.model_type}, whose Conv1D modules transformers does not quantise"
        )


def pack_output(stage: Quantize, model: Model, output: Output) -> Output:
    """Return an output with packed tensors in place of the linear weights of its blocks.

    Refused are groups that do not divide a weight, and a model whose linear modules transformers would not find under
    the names in its files.
    """
    checkpoint, family, container = model.checkpoint, model.family, output.container
    if container.remote_class is not None:
        raise _own_code(checkpoint)
    specs = {name: spec for tensors in output.layout.values() for name, spec in tensors.items()}
    linears = weights_by_module(specs, family.block, family.linears)
    chosen = {name for names in linears.values() for name in names}
    linear = {name: spec for name, spec in specs.items() if name in chosen and all(spec[1])}
    _, schemes = schemes_of(stage, linear)
    if stage.types:
        _check_joined(model, schemes)
    weights = {name: spec for name, spec in linear.items() if name in schemes}
    ignored = _check_names(weights, container, checkpoint)
    _check_loads(container.skeleton(), schemes, ignored, checkpoint)
    layout: Layout = {file: {} for file in output.layout}
    for file, tensors in output.layout.items():
        for name, (dtype, shape) in tensors.items():
            if name in weights:
                rows, columns = shape
                layout[file] |= packed_shapes(name.removesuffix(_WEIGHT), (rows, columns), schemes[name], dtype)
            else:
                layout[file][name] = (dtype, shape)
    packing = packing_config(schemes, ignored).model_dump(mode="json", exclude_none=True)
    return replace(
        output,
        container=replace(container, config=container.config | {QUANTISATION_KEY: packing}),
        layout=layout,
        cost=output.cost.model_copy(update={"bytes": count_bytes(layout)}),
        packed=weights,
    )


def schemes_of(stage: Quantize, weights: dict[str, TensorSpec]) -> tuple[PackingScheme, Schemes]:
    """Return the scheme of most weights, and that of each which is rounded."""
    columns = {name: shape[1] for name, (_, shape) in weights.items()}
    return choose_schemes(stage.format, stage.group_size, stage.types, columns, stage.option)


def _check_joined(model: Model, schemes: Schemes) -> None:
    """Refuse weights that read one input and are stored in several ways: vLLM joins them, such as q, k and v."""
    for block in range(model.blocks):
        for modules in model.inputs(block).values():
            names = [model.tensor(block, module) for module in modules]
            ways = {name: schemes[name].name if name in schemes else DENSE for name in names}
            if len(set(ways.values())) > 1:
                words = ", ".join(f"{name} {way}" for name, way in ways.items())
                raise UserError(
                    f"quantize.types: vLLM joins weights that read one input, so store them alike ({words})"
                )


def _own_code(checkpoint: Checkpoint) -> UserError:
    return UserError(
        f"{checkpoint.path} needs code of its own, which runtimes of quantised weights do not run: prune "
        "into a stock class (widths: uniform and container: auto, as recipe best-uniform)"
    )


def _check_loads(model: Any, schemes: Schemes, ignored: list[str], checkpoint: Checkpoint) -> None:
    """Refuse a class that reads weights while it is loaded, if it has only packed ones: on the meta device."""
    try:
        with redirect_stderr(StringIO()):
            packed_skeleton(model, schemes, ignored)
            for module in model.modules():
                model._init_weights(module)
    except AttributeError as error:
        raise UserError(
            f"{checkpoint.path}: transformers' {type(model).__name__} cannot be loaded with packed weights ({error})"
        ) from error


def _check_names(weights: dict[str, TensorSpec], container: Container, checkpoint: Checkpoint) -> list[str]:
    """Refuse weights that transformers would not find: it looks for the linear modules of its own model by name.

    Return the names of its other linear modules, which stay as they are.
    """
    names = container.names()
    modules = dict(names.model.named_modules())
    rounded = {name.removesuffix(_WEIGHT) for name in weights}
    for name in weights:
        if names.parameters(name) != (name,) or type(modules.get(name.removesuffix(_WEIGHT))) is not nn.Linear:
            raise UserError(
                f"{checkpoint.path}: transformers holds {name} under another name, or not as a linear module, and "
                "would not find it quantised"
            )
    if not weights:
        raise UserError(f"{checkpoint.path} has no linear weights in its blocks that could be quantised")
    return [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in rounded]
