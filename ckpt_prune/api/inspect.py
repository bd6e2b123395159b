"""`ckpt_prune.inspect`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_prune.api.function import takes
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.ratios import parse_ratio, suggest_percentage
from ckpt_prune.model.descriptions import has_description
from ckpt_prune.model.supported import check_model_type, check_supported
from ckpt_prune.options.commands import InspectOptions
from ckpt_prune.recipe.places import check_recipe

if TYPE_CHECKING:
    from ckpt_prune.inspection.answer import Description


@takes(InspectOptions)
def inspect(options: InspectOptions) -> "Description":
    """Print what MODEL is: family, spaces and their widths, sizes, and the containers that a pruned copy would fit.

    Only the config and the headers of the weights are read, unless --sparsity is given. For counting, a folder with
    nothing but a config.json is enough. If MODEL's family has no description, the output says which family it is like,
    what differs, and which description to start from.
    """
    ratios = _numbers(options.ratios)
    if options.recipe is not None:
        check_recipe(options.recipe)
    check_supported(options.model, options.family, options.part, unknown=True)

    from ckpt_prune.inspection.describe import describe, describe_unknown
    from ckpt_prune.model.composites import extract_part
    from ckpt_prune.model.config_only import checkpoint_of_config, config_of_folder, is_config_only
    from ckpt_prune.model.containers.opening import Opening, apply_description, open_checkpoint

    folder = Path(options.model)
    config_only = folder.is_dir() and is_config_only(folder)
    if config_only and options.sparsity:
        raise UserError(f"{folder} has a config.json and no weights: --sparsity counts zeros in weights; leave it out")
    if config_only:
        config = apply_description(config_of_folder(folder), options.family)
        if options.part is None and not has_description(config):
            check_model_type(config)
            return describe_unknown(folder, config)
        checkpoint = checkpoint_of_config(folder, config)
        if options.part is not None:
            checkpoint = extract_part(checkpoint, options.part)
    else:
        checkpoint = open_checkpoint(
            options.model, Opening(trust=True, family=options.family, part=options.part, by_class=False)
        )
        if not has_description(checkpoint.config):
            check_model_type(checkpoint.config)
            return describe_unknown(checkpoint.path, checkpoint.config)
    return describe(
        checkpoint, weights=not config_only, recipe=options.recipe, ratios=ratios, sparsity=options.sparsity
    )


def _numbers(text: str | None) -> list[float]:
    ratios = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        try:
            value = float(parse_ratio(part))
        except ValueError:
            raise UserError(f"--ratio {part}: expected numbers, for example 0.1,0.2,0.3") from None
        if not 0 <= value < 1:
            raise UserError(f"--ratio {part}: a ratio is in [0, 1){suggest_percentage(value)}")
        ratios.append(value)
    return ratios
