"""Models some of whose blocks have no attention, which remote code alone can hold."""

from collections.abc import Sequence
from dataclasses import replace
from posixpath import commonpath
from typing import TYPE_CHECKING, Any

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.containers.choosing import REMOTE, choose_container
from ckpt_prune.model.containers.container import Widths
from ckpt_prune.model.containers.remote import REMOTE_MODULE
from ckpt_prune.model.family import Family
from ckpt_prune.model.model import Model
from ckpt_prune.model.runtimes import DECILM, DECILM_FAMILIES
from ckpt_prune.model.skeleton import parse_config, stock_names

if TYPE_CHECKING:
    from ckpt_prune.modeling_pruned import Absent

ABSENT_KEY = "ckpt_prune_absent"
"""Config key of the blocks that have no attention."""


def without_attention(model: Model, blocks: Sequence[int], widths: Widths | None = None) -> Model:
    """Return a model under the config of remote code in which some blocks have no attention. No tensor is read.

    What remains computes what the model computes with zeros in the last projection of these attentions.

    Args:
        blocks: that lose it, ascending.
        widths: units that each block keeps of spaces that are pruned; none by default. The tensors are not cut.

    UserError if no remote code can do without the attention of this family.
    """
    absent = absent_modules(model, blocks)
    dense: Widths = [{} for _ in range(model.blocks)]
    container = choose_container(model, widths or dense, model.biased, requested=REMOTE, per_layer=True)
    config = _named_for_vllm(model, {**container.config, ABSENT_KEY: absent})
    names = _parameters_on_disk(model, [absent["attention"], *filter(None, [absent["norm"]])], blocks)
    kept = {name: name for name in (*model.checkpoint.tensors, *model.checkpoint.stacks) if name not in names}
    return replace(model, checkpoint=model.checkpoint.select(kept, config), config=parse_config(config))


def absent_modules(model: Model, blocks: Sequence[int]) -> "Absent":
    """Return where in a block attention is, and the norm that nothing else reads, by the names of transformers.

    UserError if attention is no module of its own that adds to the stream alone, or the family's description does not
    say what reads the stream.
    """
    from ckpt_prune.modeling_pruned import Absent

    family, paths = model.family, module_paths(model.family)
    modules = [family.attention.query, family.attention.key, family.attention.value, family.attention.output]
    if family.residual is None or not set(modules) <= paths.keys():
        raise _refuse(family)
    owner = commonpath([paths[module][0].replace(".", "/") for module in modules]).replace("/", ".")
    block: Any = stock_names(model.checkpoint.config, family.architecture).model.get_submodule(family.layers)
    inside = {path for path, _ in block[0].named_modules() if path.startswith(f"{owner}.")}
    norms = {path for path in inside if "norm" in path.lower() and not path.endswith(("q_norm", "k_norm"))}
    if not owner or norms:
        raise _refuse(family)
    readers = {norm: set(read) for norm, read in family.residual.reads.items()}
    norm = next((norm for norm, read in readers.items() if read and read <= set(modules)), None)
    return Absent(attention=owner, norm=norm, blocks=sorted(blocks))


def _named_for_vllm(model: Model, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that also names vLLM's own class for such blocks, DeciLM, where that computes the same.

    vLLM takes the first class that it knows, and asks the config class of the remote code for `block_configs`. In its
    first block attention begins the residual stream.
    """
    own_blocks = config.keys() & {"per_layer_config", "ckpt_prune_biases"} or 0 in config[ABSENT_KEY]["blocks"]
    if config["model_type"] not in DECILM_FAMILIES or own_blocks or not model.family.causal:
        return config
    if model.config.hidden_act != "silu" or model.uses_sliding_window:
        return config
    config_class = f"{REMOTE_MODULE}.{DECILM_FAMILIES[config['model_type']]}"
    return {
        **config,
        **({"qkv_bias": True} if config["model_type"] == "qwen2" else {}),
        "architectures": [*config["architectures"], DECILM],
        "auto_map": {"AutoConfig": config_class, **config["auto_map"]},
    }


def _refuse(family: Family) -> UserError:
    return UserError(
        f"remote code cannot leave out the attention of a {family.model_type}: leave out --container remote for zeros "
        "in its place"
    )


def _parameters_on_disk(model: Model, paths: Sequence[str], blocks: Sequence[int]) -> set[str]:
    """Return the on-disk names of the tensors of some modules of some blocks.

    Args:
        paths: of the modules in a block, by the names of transformers.
    """
    names, layers = stock_names(model.checkpoint.config, model.family.architecture), model.family.layers
    prefixes = tuple(f"{layers}.{block}.{path}." for block in blocks for path in paths)
    return {
        disk
        for disk in model.checkpoint.tensors
        if any(parameter.startswith(prefixes) for parameter in names.parameters(disk))
    }
