"""Writes a description of a class from what its twin shows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt, prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ckpt_prune.common.errors import UserError
from ckpt_prune.model.context import patches
from ckpt_prune.model.descriptions import count_stages
from ckpt_prune.model.discovery.experts import chooses_others, find_experts, packed_modules
from ckpt_prune.model.discovery.layouts import factors_of, find_incidences
from ckpt_prune.model.discovery.switches import WidthSwitchError, find_switch
from ckpt_prune.model.discovery.trace import (
    MOST_COLUMNS,
    BlockRun,
    Trace,
    find_blocks,
    find_stage,
    is_linear,
    is_shared,
    join_units,
    lines_of_units,
    mixes_tokens,
    reads_of_others,
    trace_block,
)
from ckpt_prune.model.discovery.twin import IMAGE, IMAGES, KEYS, RATIO, Twin
from ckpt_prune.model.family import QUOTIENTS
from ckpt_prune.model.image_inputs import are_images
from ckpt_prune.model.nested_keys import flat_keys, read_key, with_keys
from ckpt_prune.model.skeleton import EXPERT, Names, RefusedConfigError, build_skeleton, parse_config
from ckpt_prune.model.spaces import OUTSIDE

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "experts_per_token", "moe_k")
_GROUPS = ("n_group", "topk_group")
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_USUAL_IMAGE = (448, 448)
"""Height and width that costs of towers are stated for which take any size, and name none."""
_BARE = "is a tensor by itself, and no weight of a linear module"
_LINEAR_HEADS = rf"{_KEY_HEADS}|mamba\w*_heads|linear_num_heads"


@dataclass
class Draft:
    """A description that is being made, and what stays whole, with the reason.

    Attributes:
        counted: numbers of modules of attention (paths in a block) that may count its heads → how much of it is one's;
            None if own code has no fewer heads either: of parts, and of heads that some blocks lack or other tensors
            have a part for.
    """

    description: dict[str, Any]
    whole: dict[str, str] = field(default_factory=dict)
    counted: dict[str, list[str | int]] | None = None


class Describer:
    """Describes the class of a twin.

    Args:
        auto: the Auto class that loads it.
        usual: the config that the twin was made small from.
        stack: of several stacks of blocks, the one that is described: `encoder`, `decoder`, or `stage1` and so on.
    """

    def __init__(self, twin: Twin, auto: str, usual: Mapping[str, Any], stack: str | None = None) -> None:
        self.twin, self.auto, self.usual, self.stack = twin, auto, usual, stack
        self.names = Names(build_skeleton(parse_config(twin.config), twin.architecture))
        self.stage = int(stack.removeprefix("stage")) - 1 if stack and stack.startswith("stage") else None
        if self.stage is None:
            self.layers, self.runs = find_blocks(twin, stack)
        else:
            self.layers, self.runs = find_stage(twin, self.stage, count_stages(usual))
        self.prefix = self._find_prefix()
        self.values = flat_keys(twin.config, stack or self._nested_config)
        self.dimensions: dict[str, list[str]] = {}
        self.sizes: dict[str, int] = {}
        self.derived: dict[str, list[str | int]] = {}
        self.times_in_config: dict[str, int] = {}
        self.multiples: dict[str, dict[str, Any]] = {}
        self.whole: dict[str, str] = {}
        self.counted: dict[str, list[str | int]] | None = None
        self.spaces: dict[str, dict[str, Any]] = {}
        self.norm_offset = 0.0

    @property
    def _nested_config(self) -> str:
        """The key of the config inside the config that the blocks are made of; "" if that is the config itself."""
        around = [self.layers[: dot.start()] for dot in re.finditer(r"\.", self.layers)]
        models: list[Any] = [self.twin.model.get_submodule(path) for path in reversed(around)]
        kind = next((type(each.config) for each in models if isinstance(each, PreTrainedModel)), None)
        return next((key for key, own in vars(self.twin.parsed).items() if type(own) is kind), "")

    # ---- names ---------------------------------------------------------------------------------------------------

    def _find_prefix(self) -> str:
        own, others = (dict(self.runs[index].block.named_parameters()) for index in (0, 1))
        parameter = next((name for name in own if name in others), None)
        if parameter is None:
            raise UserError(f"the first two blocks of {self.twin.architecture} have no tensor in common")
        first, second = (self.names.saved_as(f"{self.layers}.{index}.{parameter}") for index in (0, 1))
        for match in re.finditer(r"\.0(?=\.)", first):
            prefix = f"{first[: match.start()]}.{{block}}."
            if second == prefix.format(block=1) + first[match.end() + 1 :]:
                return prefix
        raise UserError(
            f"{self.twin.architecture} stores tensors of its blocks, such as {first}, apart from the others"
        )

    def on_disk(self, run: BlockRun, path: str, kind: str = "weight") -> str:
        """Return a linear module or tensor of a block as its files name it."""
        index = run.path.rpartition(".")[2]
        parameter = f"{run.path}.{path}.{kind}" if kind else f"{run.path}.{path}"
        name = self.names.saved_as(parameter).removeprefix(self.prefix.format(block=index))
        return name.removesuffix(f".{kind}") if kind else name

    def _is_bare(self, module: Any) -> bool:
        """Return whether what a trace takes for a linear module is a tensor by itself on disk."""
        prefixes = [self.prefix.format(block=run.path.rpartition(".")[2]) for run in self.runs]
        return any(f"{prefix}{module}" in self.names.shapes for prefix in prefixes)

    # ---- dimensions ----------------------------------------------------------------------------------------------

    @cached_property
    def whole_numbers(self) -> dict[str, int]:
        """Config keys whose values are whole numbers."""
        numbers: dict[str, int] = {}
        for key, value in self.values.items():
            is_listed = isinstance(value, list) and len(value) == len(self.runs) and len({*map(str, value)}) == 1
            one = value[0] if is_listed and re.fullmatch(KEYS["mlp"], key) else value
            if isinstance(one, int) and not isinstance(one, bool):
                numbers[key] = one
        return numbers

    def key_of(self, size: int, pattern: str = r".*") -> str | None:
        """Return the config key that states a size: of several, the one whose name fits."""
        keys = [
            key
            for key, value in self.whole_numbers.items()
            if value == size
            and not key.endswith("_token_id")
            and isinstance(read_key(self.twin.parsed, key), int | list)
        ]
        fitting = [key for key in keys if re.search(pattern, key)]
        sides = ("decoder", "encoder")  # of two stacks, that of the blocks
        side, other = sides if "decoder" in self.layers else reversed(sides)
        return min(fitting, key=lambda key: (other in key) - (side in key), default=None)

    def add_dimension(self, name: str, size: int, keys: Sequence[str]) -> None:
        self.dimensions[name], self.sizes[name] = [*keys], size

    @property
    def _first_is_needed(self) -> bool:
        """Whether other blocks are passed what only running the first tells: results, or hidden states of a shape."""
        return any(run.passed_on for run in self.runs) or len({run.states.shape for run in self.runs}) > 1

    def _stage_sizes(self) -> str | None:
        """Add the hidden size of a stage, and return the key that lists how many blocks each stage has."""
        assert self.stage is not None
        hidden = self.runs[-1].states.shape[-1]  # the first block may be what widens it
        lists = {key: value[self.stage] for key, value in self.twin.config.items() if self._is_listed(value)}
        base = self.key_of(hidden // 2**self.stage, "embed_dim")  # beside it a list may be of what stages end in
        key = next((key for key, size in lists.items() if size == hidden), None) if base is None else None
        self.add_dimension("hidden", hidden, _keys(key))
        if base is not None:
            self.derived["hidden"] = [2**self.stage, base]
            self.add_dimension(base, self.twin.config[base], [base])
        why = "heads of a stage are together as wide as it, and no config key states their width"
        self.whole |= dict.fromkeys(("queries", "heads"), why)
        return next((key for key in lists if key in ("depths", "depth")), None)

    def _is_listed(self, value: Any) -> bool:
        """Return whether a value of the config lists something for each stage of blocks."""
        return self.stage is not None and isinstance(value, list) and len(value) == count_stages(self.usual)

    def named_sizes(self, first: Mapping[str, int]) -> dict[str, int]:
        """Return dimensions that a layout may be said with: those of the space, then config keys by themselves."""
        keys = {
            key: value
            for key, value in self.whole_numbers.items()
            if value > 4 and re.search(r"head_dim|d_head|_rank|(?<!chunk)_size$|d_state|groups", key)
        }
        return {**first, **{k: v for k, v in keys.items() if k not in first and v not in first.values()}}

    # ---- the description -----------------------------------------------------------------------------------------

    def describe(self) -> Draft:
        """Return a description of what every block has."""
        traces = [(run, trace_block(run, packed_modules(run.block, self.twin.sizes.experts))) for run in self._kinds]
        hidden = self.runs[0].states.shape[-1]
        if self.stage is not None:
            depth = self._stage_sizes()
        else:
            if self.key_of(hidden) is None:  # several streams side by side
                hidden = self.twin.sizes.hidden
            self.add_dimension("hidden", hidden, _keys(self.key_of(hidden, "hidden|d_model|embd|dim")))
            depth = self.key_of(len(self.runs), "layer|depth|block")
        if depth is None and getattr(self.twin.parsed, "num_hidden_layers", None) == len(self.runs):
            depth = "num_hidden_layers"
        self.add_dimension("layers", len(self.runs), _keys(depth))
        if not (self.dimensions["hidden"] or self.derived) or not self.dimensions["layers"]:
            raise UserError("no config key states its hidden size or number of blocks")
        attention = self._attention(traces) if self.stage is None else self._unknown_attention(traces)
        shares_keys = any(map(reads_of_others, self.runs))
        for name in ("queries", "heads") if shares_keys else ():
            self.spaces.pop(name, None)
            self.whole[name] = "other blocks read the keys and values of its heads"
        experts = self._experts()
        self._columns(traces)
        if are_images(self.twin.batch) and self.stage is None:
            self._add_pooling()
        if any(map(self._is_bare, attention.values())):
            attention = self._unknown_attention(traces)
        for name, space in list(self.spaces.items()):
            for module in filter(self._is_bare, modules_of([space])):
                self.spaces.pop(name, None)
                self.whole[name] = f"{module} {_BARE}"
        if not self.spaces and self.stage is not None:
            raise UserError(
                f"no space of {self.twin.architecture} was found: what linear modules of its blocks read is mixed "
                "among tokens"
            )
        if not self.spaces and self.stack is not None:
            raise UserError(
                f"no space of the {self.stack} of {self.twin.architecture} was found: {said(self.whole)}{self._beside}"
            )
        model: Any = self.twin.model
        around = self._images() if are_images(self.twin.batch) else self._texts()
        used = {key for space in self.spaces.values() for key in _dimensions_of(space)}
        for key in used - self.dimensions.keys() - QUOTIENTS.keys():
            self.add_dimension(key, self.values[key], [key])
        order = ("queries", "heads", "cross_heads", "linear_heads", "mlp", "dense", "shared", "pooling", "experts")
        description: dict[str, Any] = {
            "model_type": self.twin.parsed.model_type,
            "base": model.base_model_prefix,
            **around,
            **({"passes_on": True} if self._first_is_needed else {}),
            **({"shares_keys": True} if shares_keys else {}),
            **({"several_streams": True} if self.runs[0].states.dim() > 3 else {}),
            "layers": self.layers,
            "block": self.prefix,
            "lookups": self._lookups,
            "dimensions": self.dimensions,
            "derived": self.derived,
            "times_in_config": self.times_in_config,
            "multiples": self.multiples,
            "attention": attention,
            "transposed": self._transposed(),
            "spaces": {name: self.spaces[name] for name in order if name in self.spaces},
            "absent": {name: why for name, why in self.whole.items() if name in order},
            "rope": any(key.rpartition(".")[2] == "rope_parameters" and value for key, value in self.values.items()),
            "bias_slots": {},
            **({"norm_offset": self.norm_offset} if self.norm_offset else {}),
            "residual": None,
            "unrotatable": "its description was found on a random model, which does not say what its norms feed",
            "no_rotary": "its description was found on a random model, which does not say how pairs lie",
        }
        if experts is not None:
            description["experts"] = experts
        alike = ("heads", "cross_heads", "mlp", "dense", "shared", "pooling")
        units = [space["units"] for name, space in self.spaces.items() if name in alike]
        description["together"] = [each for each in dict.fromkeys(units) if units.count(each) > 1]
        lacking = [space for space in self.spaces.values() if "unless" in space]
        named = modules_of(self.spaces.values())
        description["spaceless"] = self._spaceless() + sorted(modules_of(lacking))
        outside = {module for module in named if f"{module.removeprefix(OUTSIDE)}.bias" in self.names.shapes}
        description["bias_slots"] = self._bias_slots(named) | dict.fromkeys(sorted(outside), True)
        description["heads_divide_hidden"] = self._heads_divide_hidden()
        if description["heads_divide_hidden"]:
            description["config_if_blocks_differ"] = {"allow_global_per_layer_attribute_access": True}
        return Draft(description, self.whole, self.counted)

    def _texts(self) -> dict[str, Any]:
        """Return what a description says of a model of texts outside its blocks."""
        model: Any = self.twin.model
        embedding = self._stored_path(model.get_input_embeddings())
        head = self._stored_path(model.get_output_embeddings())
        # Two stacks may read one table, each in a module of its own, or tables of their own, of which one is the head.
        ties = self.names.ties
        tied = ties.get(f"{head}.weight") or ties.get(f"{embedding}.weight")
        stored = embedding and self.names.saved_as(tied or f"{embedding}.weight")
        embedding = stored.removesuffix(".weight") if stored and stored.endswith(".weight") else embedding
        head = head and self.names.saved_as(f"{head}.weight").removesuffix(".weight")
        return {
            "architectures": {self.twin.architecture: {"auto": self.auto} | ({"head": head} if head else {})},
            **({} if self.stack is None else {"modality": "pairs"}),
            "embedding": embedding,
        }

    def _images(self) -> dict[str, Any]:
        """Return what a description says of a model of images outside its blocks: linear modules that see no tokens."""
        rows = {path: own for path, own in self._rows_of_images().items() if not path.startswith(self.layers)}
        modules = dict[str, nn.Module](self.twin.model.named_modules())
        linears = {path for path, each in modules.items() if is_linear(each)}
        pooled = [path for path in rows if path in linears and rows[path] == 1]
        of_class: dict[str, Any] = {"auto": self.auto, "pooled": pooled}
        stated: dict[str, Any] = {"architectures": {self.twin.architecture: of_class}, "modality": "image"}
        if self.stage is None:
            tokens, config = prod(self.runs[0].places) // IMAGES, self.twin.parsed
            # Where another encoder stands before the blocks, no key of the config says how many patches they read.
            side = None if hasattr(config, "patch_size") else isqrt(tokens)
            cut = patches(config, (IMAGE, IMAGE)) if side is None else side**2
            is_sized = hasattr(config, "image_size")  # then a convolution that cuts patches is known by its shape
            convolutions = nn.Conv3d if is_sized else nn.Conv2d | nn.Conv3d
            counted = {path for path, each in modules.items() if isinstance(each, convolutions)}
            plain = {path for path in linears - {*pooled} if path in rows and rows[path] != tokens}
            others = {
                path: own / (tokens if side is None else cut) for path, own in rows.items() if path in plain | counted
            }
            return stated | {
                "special_tokens": tokens - cut,
                **({} if side is None else {"stride": IMAGE / side}),
                **({} if is_sized else {"cost_image_size": _USUAL_IMAGE}),
                **({"multiplied_per_token": others} if others else {}),
            }
        places = self.runs[-1].places[1]
        side = isqrt(places)  # a class token may stand before them
        return stated | {"stage": self.stage, "stride": IMAGE / side, "special_tokens": places - side**2}

    def _rows_of_images(self) -> dict[str, int]:
        """Return linear module or convolution → rows, or places, that it makes of an image."""
        rows: dict[str, int] = {}

        def see(path: str) -> Any:
            def note(module: nn.Module, _arguments: Any, output: torch.Tensor) -> None:
                width = output.shape[1] if isinstance(module, nn.Conv2d | nn.Conv3d) else output.shape[-1]
                rows[path] = output.numel() // width // IMAGES

            return note

        seen = [
            each
            for each in self.twin.model.named_modules()
            if is_linear(each[1]) or isinstance(each[1], nn.Conv2d | nn.Conv3d)
        ]
        hooks = [module.register_forward_hook(see(path)) for path, module in seen]
        self.twin.outputs()
        for hook in hooks:
            hook.remove()
        return rows

    def _stored_path(self, wanted: nn.Module | None) -> str | None:
        """Return a module's path: of several, that under which its weight is saved."""
        modules = self.twin.model.named_modules(remove_duplicate=False)
        paths = [path for path, module in modules if wanted is not None and module is wanted]
        stored = (path for path in paths if self.names.shapes.keys() & {f"{path}.weight"})
        return next(stored, next(iter(paths), None))

    @property
    def _lookups(self) -> list[str]:
        """Modules of which rows are looked up, as files name them."""
        paths = [path for path, each in self.twin.model.named_modules() if isinstance(each, nn.Embedding)]
        names = {path: f"{path}.weight" for path in paths}
        stored = {parameter: disk for disk in self.names.shapes for parameter in self.names.parameters(disk)[:1]}
        return [
            path if name in self.names.shapes else stored.get(name, name).removesuffix(".weight")
            for path, name in names.items()
        ]

    @property
    def _beside(self) -> str:
        return f"; --part {'decoder' if self.stack == 'encoder' else 'encoder'} names its other stack"

    @cached_property
    def _kinds(self) -> list[BlockRun]:
        """The first block of every kind, told apart by names and shapes."""
        kinds: dict[Any, BlockRun] = {}
        for run in self.runs:
            shapes = tuple((name, each.shape) for name, each in run.block.named_parameters())
            kinds.setdefault(shapes, run)
        return list(kinds.values())

    def _transposed(self) -> list[str]:
        found = [
            self.on_disk(run, path)
            for run in self._kinds
            for path, each in run.block.named_modules()
            if is_linear(each) and not isinstance(each, nn.Linear)
        ]
        return list(dict.fromkeys(found))

    def _spaceless(self) -> list[str]:
        """Return what else blocks hold of two axes or more, with `{expert}` for the number of any expert.

        A linear module of a space is one where blocks have it without the space: each of two attentions has queries.
        """
        found: dict[str, None] = {}
        matrices = [name for name, shape in self.names.shapes.items() if len(shape) >= 2]
        for run in self._kinds:
            prefix = self.prefix.format(block=run.path.rpartition(".")[2])
            modules = [
                name.removeprefix(prefix).removesuffix(".weight") for name in matrices if name.startswith(prefix)
            ]
            generic = [re.sub(r"\.\d+\.", ".{expert}.", module) for module in modules]
            named_as = [{module, each, f"{module}.{{expert}}"} for module, each in zip(modules, generic, strict=True)]
            held = set[str]().union(*named_as)
            named = modules_of([space for space in self.spaces.values() if held >= modules_of([space])])
            found |= dict.fromkeys(each for each, names in zip(generic, named_as, strict=True) if not names & named)
        return list(found)

    # ---- attention -----------------------------------------------------------------------------------------------

    def _attention(self, traces: Sequence[tuple[BlockRun, Sequence[Trace]]]) -> dict[str, Any]:
        """Return the linear modules of attention, and add the spaces of its heads.

        Of several ways to mix tokens, that whose heads can be described; the others stay whole.
        """
        mixing = [(run, each) for run, own in traces for each in own if each.mixes]
        mixing.sort(key=lambda found: len(found[1].used))  # attention has no tensors of its own beside linear modules
        found = {(each.consumer, each.producers): (run, each) for run, each in mixing}
        ways = {key: way for key, way in found.items() if not way[1].elsewhere}
        heads = self.key_of(self.twin.sizes.heads, "head|^n_head") or self.key_of(self.twin.sizes.heads)
        if not ways or heads is None:
            unknown = "no linear module that runs once in a block reads what mixes tokens"
            unknown = "no config key counts its heads" if ways else unknown
            self.whole |= dict.fromkeys(("queries", "heads"), unknown)
            return self._unknown_attention(traces)
        self.add_dimension("query_heads", self.twin.sizes.heads, [heads])
        attention: dict[str, Any] = {}
        chosen: Trace | None = None
        reasons: dict[str, str] = {}
        for run, trace in ways.values():
            own, why = self._heads(run, trace, heads)
            if why is None or not attention:
                attention, chosen = own, trace
            if why is not None:
                reasons[trace.consumer] = why
            elif "heads" in self.spaces:
                break
        if "heads" not in self.spaces:
            self.whole |= dict.fromkeys(("queries", "heads"), next(iter(reasons.values())))
        for run, trace in found.values():
            if trace is not chosen:
                why = self._add_cross_heads(run, trace) if trace.elsewhere else self._add_linear_heads(run, trace)
                if why is not None:
                    self.whole[trace.consumer] = reasons.get(trace.consumer, why)
        return attention

    def _unknown_attention(self, traces: Sequence[tuple[BlockRun, Sequence[Trace]]]) -> dict[str, Any]:
        """Return what stands for attention if no linear module of it was found: a tensor without columns."""
        self.dimensions |= {name: [] for name in ("query_heads", "kv_heads", "head_dim", "logits")}
        self.derived |= {"query_heads": [1], "kv_heads": [1], "head_dim": ["hidden"], "logits": ["hidden"]}
        ends = {trace.consumer for _, own in traces for trace in own if not trace.mixes}
        makers = {path for _, own in traces for trace in own if not trace.mixes for path in trace.producers}
        for run, _ in traces:
            for name, tensor in run.block.named_parameters():
                path, _, kind = name.rpartition(".")
                if tensor.dim() > 1 and path not in ends | makers:
                    place = self.on_disk(run, path) if kind == "weight" else self.on_disk(run, name, "")
                    return dict.fromkeys(("query", "key", "value", "output", "latent"), place)
        run, own = traces[0]
        if not makers or not mixes_tokens(run):
            raise UserError(f"{self.twin.architecture} has MLPs alone as blocks: its attention stands outside them")
        # Tokens mix without weights (FNet): what makes the columns of an MLP stands for what mixes them.
        place = self.on_disk(run, own[0].producers[0])
        return dict.fromkeys(("query", "key", "value", "output", "latent"), place)

    def _heads(self, run: BlockRun, trace: Trace, heads: str) -> tuple[dict[str, Any], str | None]:
        """Return the modules of one way to mix tokens; add its heads, or say why there are none."""
        roles = _roles(trace)
        attention: dict[str, Any] = {role: self.on_disk(run, path) for role, path in roles.items()}
        attention["output"] = self.on_disk(run, trace.consumer)
        unit = join_units(trace)
        count = int(unit.max()) + 1
        self.dimensions.setdefault("kv_heads", [heads])
        self.dimensions.setdefault("head_dim", ["head_dim"])
        shared = [path for path, depends in trace.rows.items() if is_shared(depends)]
        if any(bool(trace.across[path].any()) for path in shared) and roles["query"] not in shared:
            attention["latent"] = self.on_disk(run, shared[0])
            self.add_dimension("logits", 0, ["qk_head_dim", "qk_nope_head_dim", "head_dim"])
        elif shared:
            return (
                attention,
                "one norm covers all of its heads: with fewer of them it scales those that stay differently",
            )
        if count in (1, len(unit)) and self._add_sharing_heads(run, trace, heads):
            return attention, None
        if count in (1, len(unit)) or len(unit) % count or not 1 < count <= self.twin.sizes.heads:
            return attention, "its heads depend on one another"
        return attention, self._add_heads(run, trace, unit, count, heads, is_latent="latent" in attention)

    def _add_sharing_heads(self, run: BlockRun, trace: Trace, heads: str) -> bool:
        """Add query heads that all read one head of keys and values (multi-query attention); False if none do."""
        queries = {path: ~trace.across[path] for path in trace.producers}
        unit, count = join_units(trace, queries), self.twin.sizes.heads
        if int(unit.max()) + 1 != count or len(unit) % count:
            return False
        sizes = {"head_dim": len(unit) // count, "query_heads": count}
        places = self._places(run, trace, unit, count, self._named_heads(sizes), queries)
        if places is None:
            return False
        self.dimensions |= {"kv_heads": [], "head_dim": []}
        self.derived["kv_heads"] = [1]
        self.spaces["heads"] = {"units": "query_heads", **places, "config": {heads: []}, **self._effect(run, trace)}
        self._count_heads(run, trace, count, sizes)
        return True

    def _add_heads(
        self, run: BlockRun, trace: Trace, unit: torch.Tensor, count: int, heads: str, *, is_latent: bool
    ) -> str | None:
        queries = {path: ~trace.across[path] for path in trace.producers}
        inner = join_units(trace, queries)
        group = (int(inner.max()) + 1) // count
        width = len(unit) // count // group
        kv_key = self.key_of(count, "kv|key_value|group") if group > 1 else heads
        if kv_key is None or count * group != self.twin.sizes.heads:
            return "no config key counts its groups of keys and values"
        self.add_dimension("kv_heads", count, list(dict.fromkeys([kv_key, heads])))
        key = self.key_of(width, "head_dim|kv_channels|d_head|dim_head|head_size|d_kv")
        own = "head_dim" if hasattr(type(self.twin.parsed), "head_dim") else None  # of several widths, that of most
        self.add_dimension("head_dim", width, _keys(key or own))
        sizes = {"head_dim": width, "group": group, "kv_heads": count, "query_heads": self.twin.sizes.heads}
        named = self._named_heads(sizes)
        places = self._places(run, trace, unit, count, named)
        if places is None:
            return "its heads lie in an order that a description cannot say"
        elsewhere = [*trace.twice]
        if is_latent:
            inputs = {path: run.block.get_parameter(f"{path}.weight").shape[-1] for path in trace.producers}
            elsewhere = elsewhere or [path for path, width in inputs.items() if width != run.states.shape[-1]]
        self.spaces["heads"] = {
            "units": "kv_heads",
            **places,
            "config": {heads: ["group"], kv_key: []} if group > 1 else self._counted_alike(heads),
            **({"same_units": True} if self._has_table_for_all(run, trace, unit, count) else {}),
            **({"elsewhere": [self.on_disk(run, path) for path in elsewhere]} if elsewhere else {}),
            **self._effect(run, trace),
        }
        self.spaces["heads"] |= self._attributes(run, trace, self.spaces["heads"], sizes)
        self._count_heads(run, trace, count, sizes)
        within = self._places(run, trace, inner, count * group, named, queries) if group > 1 else None
        if within is not None:
            self.spaces["queries"] = {"units": "group", **within, "config": {heads: ["kv_heads"]}}
            self.spaces["queries"] |= self._attributes(run, trace, self.spaces["queries"], sizes)
        return None

    def _counted_alike(self, heads: str) -> dict[str, list[str]]:
        """Return the config keys that count heads of which each has keys and values of its own."""
        numbers, count = self.whole_numbers.items(), self.whole_numbers[heads]
        alike = [key for key, value in numbers if value == count and re.fullmatch(KEYS["groups"], key)]
        return {key: [] for key in (heads, *alike)}

    def _count_heads(self, run: BlockRun, trace: Trace, count: int, sizes: Mapping[str, int]) -> None:
        """Note which numbers of attention's modules may count heads, of which own code has fewer."""
        everywhere = all(trace.consumer in dict(each.block.named_modules()) for each in self.runs)
        if "tables" in self.spaces["heads"] or self.stack or are_images(self.twin.batch) or not everywhere:
            return
        self.counted, factors = {}, {name: size for name, size in sizes.items() if name in ("head_dim", "group")}
        for owner in dict.fromkeys(path.rpartition(".")[0] for path in (trace.consumer, *trace.producers)):
            for key, value in vars(run.block.get_submodule(owner)).items():
                if type(value) is int and value % count == 0 and value:
                    of_one = [] if value == count else factors_of(value // count, factors)
                    self.counted[f"{owner}.{key}"] = of_one

    def _named_heads(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return dimensions that a layout of heads may be said with; groups of a single head are none."""
        return {name: size for name, size in self.named_sizes(sizes).items() if (name, size) != ("group", 1)}

    def _add_cross_heads(self, run: BlockRun, trace: Trace) -> str | None:
        """Add the heads of cross-attention, which the config counts by the keys of self-attention's, or say why not."""
        own = self.spaces.get("heads")
        if own is None:
            return "one config key counts these heads and those of self-attention, which stay whole"
        unit, count = join_units(trace), self.sizes["kv_heads"]
        if int(unit.max()) + 1 != count or len(unit) % count:
            return "its heads depend on one another"
        several = self.sizes["query_heads"] // count
        sizes = {name: self.sizes[name] for name in ("head_dim", "kv_heads", "query_heads")} | {"group": several}
        places = self._places(run, trace, unit, count, self._named_heads(sizes))
        if places is None:
            return "its heads lie in an order that a description cannot say"
        elsewhere = [self.on_disk(run, path) for path in trace.elsewhere]
        places["rows"].sort(key=lambda rows: rows["module"] in elsewhere)  # queries first, which are observed
        space = {"units": "kv_heads", **places, "config": own["config"], "elsewhere": elsewhere}
        self.spaces["cross_heads"] = space | self._effect(run, trace) | self._attributes(run, trace, space, sizes)
        if self.spaces.pop("queries", None):
            self.whole["queries"] = "one config key counts the query heads of self-attention and of cross-attention"
        return None

    def _attributes(
        self, run: BlockRun, trace: Trace, space: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return numbers of a stack's attention that are others with fewer units: blocks are copied from the whole."""
        if self.stack is None or self.stage is not None:
            return {}
        owner, count = trace.consumer.rpartition(".")[0], sizes[space["units"]]
        for kept in range(count - 1, 0, -1):
            values = {key: kept * prod(sizes[each] for each in factors) for key, factors in space["config"].items()}
            width = dict.fromkeys(self.dimensions["head_dim"], sizes["head_dim"])
            try:
                model: Any = build_skeleton(
                    parse_config(with_keys(self.twin.config, values | width)), self.twin.architecture
                )
            except RefusedConfigError:  # of some numbers, such as those that do not divide the hidden size
                continue
            before = vars(run.block.get_submodule(owner))
            after = vars(model.get_submodule(f"{run.path}.{owner}"))
            counted = {
                f"{owner}.{key}": factors_of(value // count, sizes)
                for key, value in before.items()
                if type(value) is int and value * kept == after[key] * count != value * count
            }
            return {"attributes": counted} if counted else {}
        return {}

    def _has_table_for_all(self, run: BlockRun, trace: Trace, unit: torch.Tensor, count: int) -> bool:
        """Return whether a tensor with a part for each unit stands in this block alone, and others are passed it."""
        alike = [each.block for each in self.runs if trace.consumer in dict(each.block.named_modules())]
        return any(
            self._has_parts(depends, unit, count) and any(name not in dict(each.named_parameters()) for each in alike)
            for name, depends in trace.tables.items()
        )

    def _add_linear_heads(self, run: BlockRun, trace: Trace) -> str | None:
        """Add the heads of linear attention, each with the value heads that read its keys, or say why they stay."""
        if "linear_heads" in self.spaces:
            return "its tokens mix in a third way"
        none = "no config key counts its heads, or they depend on one another"
        if not any(re.search(_LINEAR_HEADS, key) for key in self.whole_numbers):
            return none  # before derivatives of every column are taken, which a state space makes slow
        unit = join_units(trace)
        count = int(unit.max()) + 1
        key = self.key_of(count, _LINEAR_HEADS)
        if count < 2 or key is None or len(unit) % count:
            return none
        sizes, of_all = {"linear_heads": count}, dict[str, list[str]]()
        if key == _KEY_HEADS:
            values = self.twin.config[_VALUE_HEADS]
            self.add_dimension("linear_value_heads", values, [_VALUE_HEADS])
            sizes["linear_group"], of_all[_VALUE_HEADS] = values // count, ["linear_group"]
        if (width := self.key_of(len(unit), "d_ssm")) is not None:
            of_all[width] = ["mamba_d_head"]
        self.add_dimension("linear_heads", count, [key])
        own = key.partition("_")[0]  # runs of several sizes add up in many ways, if any dimension counts
        named = {name: size for name, size in self.named_sizes(sizes).items() if name.startswith(("linear", own))}
        places = self._places(run, trace, unit, count, named)
        if places is None:
            return "its heads lie in an order that a description cannot say"
        mixer = run.block.get_submodule(trace.consumer.rpartition(".")[0])
        self.spaces["linear_heads"] = {
            "units": "linear_heads",
            **places,
            "config": {key: [], **of_all},
            **({"uniform": True} if [*mixer.buffers()] else {}),
            **self._effect(run, trace),
        }
        return None

    def _places(
        self,
        run: BlockRun,
        trace: Trace,
        unit: torch.Tensor,
        count: int,
        named: Mapping[str, int],
        only: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any] | None:
        """Return the rows, columns and tables that units lie on; None if they lie in an order that cannot be said.

        Args:
            only: producer → rows that count; by default all.
        """
        rows = self._rows(run, trace, unit, count, named, only)
        columns = find_incidences(self.on_disk(run, trace.consumer), unit, count, named)
        tables = self._tables(run, trace, unit, count, named)
        if rows is None or columns is None or len(columns) != 1 or tables is None:
            return None
        return {"rows": rows, "columns": columns[0]} | ({"tables": tables} if tables else {})

    def _rows(
        self,
        run: BlockRun,
        trace: Trace,
        unit: torch.Tensor,
        count: int,
        named: Mapping[str, int],
        only: Mapping[str, torch.Tensor] | None,
    ) -> list[dict[str, Any]] | None:
        owners: dict[str, torch.Tensor] = {}
        for path, depends in trace.rows.items():
            counted = depends if only is None else depends & only[path]
            if not bool(counted.any()):
                continue
            owner = lines_of_units(counted, unit)
            if owner is None:
                return None
            if bool((owner < 0).all()):  # what all units read
                continue
            parameter = f"{run.path}.{path}.weight"
            if apart := self._apart(run, parameter, owner):
                owners |= {name.removesuffix(".weight"): part for name, part in apart.items()}
                continue
            before, rows = self._rows_on_disk(parameter, len(owner))
            if not rows:
                return None
            place = owners.setdefault(self.on_disk(run, path), torch.full((rows,), -1))
            place[before : before + len(owner)] = owner
        found = [find_incidences(module, owner, count, named) for module, owner in owners.items()]
        return None if None in found else [incidence for each in found for incidence in each or []]

    def _rows_on_disk(self, parameter: str, count: int) -> tuple[int, int]:
        """Return the first of a parameter's rows in the tensor that files have for it, and how many that has.

        None are counted where parts differ in rows: in a pruned tensor no one knows where one part ends.
        """
        parts = self.names.parameters(self.names.saved_as(parameter))
        if len(parts) == 1:
            return 0, count
        sizes = [len(self.names.model.get_parameter(part)) for part in parts]
        return sum(sizes[: parts.index(parameter)]), sum(sizes) if len(set(sizes)) == 1 else 0

    def _apart(self, run: BlockRun, parameter: str, owner: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return tensor of a block's files → the unit of each of its rows; empty if one holds the whole parameter."""
        parts, prefix = self.names.parts(parameter), self.prefix.format(block=run.path.rpartition(".")[2])
        owners = torch.split(owner, [*parts.values()]) if parts else ()
        return {disk.removeprefix(prefix): part for disk, part in zip(parts, owners, strict=True)}

    def _tables(
        self, run: BlockRun, trace: Trace, unit: torch.Tensor, count: int, named: Mapping[str, int]
    ) -> list[dict[str, Any]] | None:
        """Return tensors of which each unit has its own part; None if one has it in a way that cannot be said."""
        tables: list[dict[str, Any]] = []
        for name, depends in trace.tables.items():
            if not self._has_parts(depends, unit, count):
                continue
            axis, owner = self._axis(depends, unit)
            if owner is None:
                return None
            parameter, shape = f"{run.path}.{name}", run.block.get_parameter(name).shape
            apart = self._apart(run, parameter, owner) if axis == 0 else {}
            if not apart and self.names.shapes[self.names.saved_as(parameter)] != shape:
                return None
            for place, part in (apart or {self.on_disk(run, name, ""): owner}).items():
                found = find_incidences(place, part, count, named)
                if found is None:
                    return None
                tables += [each | ({"axis": axis} if axis < len(shape) - 1 else {}) for each in found]
        return tables

    @staticmethod
    def _axis(depends: torch.Tensor, unit: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """Return the first axis of a tensor that units lie on, and the unit of each of its lines; None if on none.

        A convolution of every channel by itself has a row of its weight for each, and a state space of its decay.
        """
        for axis in range(depends.dim() - 1):
            owner = lines_of_units(depends.unsqueeze(-1).movedim(1 + axis, 1).flatten(2).any(2), unit)
            if owner is not None and bool((owner >= 0).any()):
                return axis, owner
        return 0, None

    def _has_parts(self, depends: torch.Tensor, unit: torch.Tensor, count: int) -> bool:
        """Return whether units read parts of a tensor, and not each of them all of it."""
        flat = depends.flatten(1)
        return not all(bool(flat[unit == each].any(0).all()) for each in range(count))

    def _effect(self, run: BlockRun, trace: Trace) -> dict[str, Any]:
        """Return what a consumer's output passes before it is added to the stream, as far as it is known."""
        if trace.effect == "multiplied":
            keys = [
                k for k, v in self.twin.config.items() if isinstance(v, float) and abs(v - trace.factor) < 1e-4 * abs(v)
            ]
            key = next((key for key in keys if "multiplier" in key or "scale" in key), None)
            return {} if key is None else {"multiplier": key}
        if trace.effect == "changed":
            norm = self._norm_behind(run, trace.consumer)
            return {} if norm is None else {"norm": self.on_disk(run, norm)}
        if trace.effect == "gated":
            owner = trace.consumer.rpartition(".")[0].rpartition(".")[0]
            for path, module in run.block.named_modules():
                if path.startswith(owner) and isinstance(module, nn.Linear) and module.out_features == 1:
                    return {"gate": self.on_disk(run, path)}
        return {}

    @torch.no_grad()
    def _norm_behind(self, run: BlockRun, consumer: str) -> str | None:
        """Return the RMSNorm that a consumer's output passes; notes what norms add to their weights."""
        passed: dict[str, tuple[tuple[Any, ...], Any]] = {}

        def see(path: str) -> Any:
            return lambda _module, arguments, output: passed.setdefault(path, (arguments, output)) and None

        hooks = [module.register_forward_hook(see(path)) for path, module in run.block.named_modules() if path]
        run.block(run.states, *run.arguments, **run.options)
        for hook in hooks:
            hook.remove()
        output = passed[consumer][1]
        for path, (arguments, normed) in passed.items():
            weight: Any = getattr(run.block.get_submodule(path), "weight", None)
            if arguments and arguments[0] is output and weight is not None and weight.dim() == 1:
                plain = output * output.pow(2).mean(-1, keepdim=True).rsqrt()
                for offset in (0.0, 1.0):
                    if bool(((weight + offset) * plain - normed).abs().max() <= 1e-3 * normed.abs().max()):
                        self.norm_offset = offset
                        return path
        return None

    # ---- columns and experts -------------------------------------------------------------------------------------

    def _columns(self, traces: Sequence[tuple[BlockRun, Sequence[Trace]]]) -> None:
        for run, own in traces:
            name = "mlp"
            if self._has_experts:
                name = "shared" if packed_modules(run.block, self.twin.sizes.experts) else "dense"
            # The widest is the MLP. In stages a convolution may stand between its modules; attention reads several.
            for trace in sorted(own, key=lambda each: (each.mixes and self.stage is None, -each.columns)):
                is_of_mlp = not trace.mixes or (self.stage is not None and len(trace.producers) == 1)
                is_of_columns = is_of_mlp or self._is_of_channels(trace)
                narrower = self._narrower(run, trace)
                if narrower is not None:
                    self._add_wider(narrower, run, trace)
                elif is_of_columns and self.on_disk(run, trace.consumer) not in self.consumers():
                    why = self._add_columns(name, run, trace)
                    if why is not None and self._add_unless(name, run, trace):
                        why = f"blocks with a number under {self.spaces[name]['unless']}: {why}"
                    if why is not None:
                        self.whole.setdefault(trace.consumer, why)

    def _narrower(self, run: BlockRun, trace: Trace) -> str | None:
        """Return the space of columns, in other blocks, of which this consumer has several times as many."""
        here = {"module": self.on_disk(run, trace.consumer)}
        ending = {name: space for name, space in self.spaces.items() if space.get("columns") == here}
        found = next((name for name, space in ending.items() if space["units"] == name), None)
        if found is None or len(ending) > 1 or trace.columns % self.sizes[found] or trace.columns == self.sizes[found]:
            return None
        return found

    def _add_wider(self, narrower: str, run: BlockRun, trace: Trace) -> None:
        """Add the columns of MLPs that are several times as wide as others' (Gemma 4 E2B), whose width is stated.

        They are runs side by side, each as wide as the others' MLPs, which keep as many columns.
        """
        other, unit, name = self.spaces[narrower], join_units(trace), "dense"
        if name in self.spaces and "shared" not in self.spaces:  # a further consumer of the blocks before
            self.spaces["shared"] = self.spaces.pop(name)
        count = int(unit.max()) + 1
        places = self._places(run, trace, unit, count, {}) if count == trace.columns else None
        if name in self.spaces or places is None:
            self.whole.setdefault(trace.consumer, f"columns of the wider {trace.consumer} depend on one another")
            return
        runs = f"{name}_runs"
        self.dimensions[runs], self.derived[runs] = [], [count // self.sizes[narrower]]
        kept = {"units": narrower, "for_each": runs, "wider_than": narrower, "config": other["config"]}
        self.spaces[name] = kept | places | self._effect(run, trace)

    def _add_unless(self, name: str, run: BlockRun, trace: Trace) -> bool:
        """Add columns that are apart in other blocks, as many there, which the config lists with zero for it.

        Gemma 3n's first blocks keep the largest of their columns.
        """
        place = self.runs.index(run)
        for key, values in self.twin.config.items():
            if not (isinstance(values, list) and len(values) == len(self.runs) and isinstance(values[place], float)):
                continue
            other = next((r for r, v in zip(self.runs, values, strict=True) if not v and values[place]), None)
            ends = trace_block(other) if other else ()
            same = next((e for e in ends if (e.consumer, e.columns) == (trace.consumer, trace.columns)), None)
            if other and same and self._add_columns(name, other, same) is None:
                self.spaces[name]["unless"] = key
                return True
        return False

    def _is_of_channels(self, trace: Trace) -> bool:
        """Return whether tokens mix in each column by itself, in a state space of no heads (Mamba)."""
        return (
            not self.dimensions["query_heads"]
            and len(trace.used) > 1
            and int(join_units(trace).max()) == trace.columns - 1
        )

    @property
    def _has_experts(self) -> bool:
        return "experts" in self.spaces.get("mlp", {})

    def consumers(self) -> set[str]:
        return {space["columns"]["module"] for space in self.spaces.values() if "columns" in space}

    def _add_columns(self, name: str, run: BlockRun, trace: Trace) -> str | None:
        beside = self.spaces.get(name)
        free = next((each for each in ("dense", "shared") if each not in self.spaces), None)
        if beside is not None and free is None:
            return f"{trace.consumer} is a further one beside {beside['columns']['module']}"
        name = name if beside is None else free or name
        unit = join_units(trace)
        count = len(unit)
        if int(unit.max()) + 1 != count:
            return f"columns of {trace.consumer} depend on one another"
        each: list[str] = []
        expert = self.sizes["mlp"] if self._has_experts else self.twin.sizes.expert_mlp
        units, key = name, self.key_of(count, "intermediate|ffn|ff|inner|mlp|expert") or self.key_of(count)
        alike = next((space for space in self.spaces.values() if key in space["config"]), None)
        if alike is not None and "columns" in alike:
            units = alike["units"]
        elif name == "shared" and (key is None or count == expert):
            several = self.key_of(count // expert, "shared") if count > expert else None
            key = self.key_of(expert, "intermediate|ffn")
            if count != expert:
                if several is None or count % expert:
                    return f"no config key states the columns of {trace.consumer}"
                each = [several]
                unit, count = unit // self.twin.config[several], expert
            units = "mlp"
        hidden, fixed = self.sizes["hidden"], None
        multiple = self._multiple(count) if key is None else None
        if key is None and multiple is None:
            key = self.key_of(2 * count, "intermediate|ffn|ff|inner|mlp")
            if key is None and count % hidden:
                module: Any = run.block.get_submodule(trace.consumer)
                axis = 1 if isinstance(module, nn.Linear) else 0
                switch = find_switch(self.twin, f"{run.path}.{trace.consumer}.weight", axis)
                if switch:
                    raise WidthSwitchError(switch)
                return f"no config key states the columns of {trace.consumer}"
        if multiple is not None:
            self.multiples[units] = multiple
        elif key is not None and self.values[key] == 2 * count:
            self.times_in_config[units] = 2
        elif key is None:
            fixed = f"the {name} of {{model_type}} is always {count // hidden} times as wide as the hidden size"
            self.derived[units] = [count // hidden, "hidden"]
        elif "rank" in key:
            return f"{trace.consumer} is of low rank by itself"
        elif self.usual.get(key, 0) is None:
            self._derive(units, key, run, trace)
        self.add_dimension(units, count, _keys(key))
        named = {units: count, **({each[0]: self.twin.config[each[0]]} if each else {})}
        if all(is_shared(depends) for depends in trace.rows.values()):
            return (
                f"one norm covers all columns of {trace.consumer}: with fewer of them it scales those that stay "
                "differently"
            )
        places = self._places(run, trace, unit, count, named)
        also = self._also_reads(run, trace, unit) if trace.mixes else []
        if places is None or also is None:
            return f"the columns of {trace.consumer} lie in an order that a description cannot say"
        if also:
            places["tables"] = [*places.get("tables", []), *also]
        self.spaces[name] = {
            **({"unit": "column for each shared expert"} if each else {}),
            "units": units,
            **places,
            "config": {key or "intermediate_size": [2] if units in self.times_in_config else []},
            **({"fixed": fixed} if fixed else {}),
            **self._effect(run, trace),
        }
        return None

    def _add_pooling(self) -> None:
        """Add the columns of an MLP behind the blocks, which a config key states: SigLIP 2's pools, GLM-4V's merges."""
        for run in self._behind():
            for trace in trace_block(run):
                unit, count = join_units(trace), trace.columns
                key = self.key_of(count, "intermediate|ffn|mlp")
                places = self._places(run, trace, unit, count, {}) if int(unit.max()) + 1 == count and key else None
                if places is None or "tables" in places or trace.mixes or "pooling" in self.spaces:
                    continue
                alike = next((space for space in self.spaces.values() if key in space["config"]), None)
                if alike is None:
                    self.add_dimension("pooling", count, _keys(key))
                for incidence in (*places["rows"], places["columns"]):
                    incidence["module"] = f"{OUTSIDE}{incidence['module']}"
                units = "pooling" if alike is None else alike["units"]
                self.spaces["pooling"] = {"units": units, **places, "config": {key: []}}

    def _behind(self) -> list[BlockRun]:
        """Return modules with few linear modules of their own that run once behind the blocks, with what they read."""
        called: dict[str, list[Any]] = {}
        passed: list[bool] = []

        def see(path: str) -> Any:
            return lambda _module, arguments: called.setdefault(path, []).append(arguments) if passed else None

        hooks = [self.runs[-1].block.register_forward_hook(lambda *_: passed.append(True))]
        for path, module in self.twin.model.named_modules():
            linears = [each for each in module.children() if is_linear(each)]
            few = len(linears) > 1 and all(max(each.weight.shape) <= MOST_COLUMNS for each in linears)
            if path and few and not re.search(r"\.\d+(\.|$)", path):  # of no block, of this list or another
                hooks.append(module.register_forward_pre_hook(see(path)))
        self.twin.outputs()
        for hook in hooks:
            hook.remove()
        runs = []
        for path, calls in called.items():
            tensors = [each for each in calls[0] if isinstance(each, torch.Tensor)]
            if len(calls) == len(calls[0]) == len(tensors) == 1:
                rows = tensors[0][..., 0].numel()
                places = (IMAGES, rows // IMAGES)
                runs.append(BlockRun(path, self.twin.model.get_submodule(path), tensors[0].clone(), places, (), {}))
        return runs

    def _also_reads(self, run: BlockRun, trace: Trace, unit: torch.Tensor) -> list[dict[str, Any]] | None:
        """Return the weights of other linear modules whose columns are units, too; None if these lie in another order.

        A state space makes its steps and what it writes and reads of all channels (x_proj of Mamba).
        """
        owners = {path: lines_of_units(rows, unit) for path, rows in trace.rows.items()}
        found: list[dict[str, Any]] = []
        for inner in trace_block(run, inner=True):
            seen = torch.full((inner.columns,), -1)
            for path, depends in inner.rows.items():
                owner = owners.get(path)
                if owner is None:
                    continue
                for column, rows in enumerate(depends):
                    of = {*owner[rows].tolist()} - {-1}
                    if len(of) > 1:
                        return None
                    seen[column] = of.pop() if of else seen[column]
            if bool((seen >= 0).any()):
                if not torch.equal(seen, unit):
                    return None
                found.append({"module": f"{self.on_disk(run, inner.consumer)}.weight"})
        return found

    def _multiple(self, count: int) -> dict[str, Any] | None:
        """Return by which key the config states columns as a multiple of the hidden size; None if by none."""
        for key, stated in self.twin.config.items():
            listed = self._is_listed(stated)
            value = stated[self.stage or 0] if listed else stated
            if re.fullmatch(RATIO, key) and value and int(self.sizes["hidden"] * value) == count:
                flags = {"fraction": isinstance(value, float), "listed": listed}
                return {"key": key} | {flag: True for flag, is_so in flags.items() if is_so}
        return None

    def _derive(self, units: str, key: str, run: BlockRun, trace: Trace) -> None:
        """Say what a dimension is where the config has none under its key."""
        parsed = parse_config(self.twin.config | {key: None})
        shapes = dict(build_skeleton(parsed, self.twin.architecture).named_parameters())
        module: Any = run.block.get_submodule(trace.consumer)
        axis = 1 if isinstance(module, nn.Linear) else 0
        columns, hidden = int(shapes[f"{run.path}.{trace.consumer}.weight"].shape[axis]), self.sizes["hidden"]
        if columns % hidden == 0:
            self.derived[units] = [columns // hidden, "hidden"]

    def _experts(self) -> dict[str, Any] | None:
        run = next((run for run in self.runs if packed_modules(run.block, self.twin.sizes.experts)), None)
        if run is None:
            return None
        packed = packed_modules(run.block, self.twin.sizes.experts)
        prefix = self.prefix.format(block=run.path.rpartition(".")[2])
        found = find_experts(run.block, packed[0], self.names, prefix, run.path, self.twin.sizes.experts)
        if not isinstance(found, str) and not found.alone and chooses_others(run, packed[0], self.twin.sizes.experts):
            found = "its router chooses among more than its experts"
        if not isinstance(found, str) and self._is_bare(found.router):
            found = f"{found.router} {_BARE}"
        if isinstance(found, str):
            self.whole["experts"] = self.whole["mlp"] = found
            return None
        key, count_key = self.key_of(found.columns, "intermediate|ffn"), self.key_of(self.twin.sizes.experts, "expert")
        chosen = next((each for each in _CHOSEN if isinstance(getattr(self.twin.parsed, each, None), int)), None)
        if key is None or count_key is None or chosen is None:
            self.whole["experts"] = self.whole["mlp"] = (
                "no config key states how many experts there are, or their columns"
            )
            return None
        self.add_dimension("mlp", found.columns, [key])
        self.add_dimension("experts", self.twin.sizes.experts, [count_key])
        rows: list[dict[str, Any]] = [{"module": found.gate}, {"module": found.up}]
        if found.gate == found.up:
            rows = [
                {"module": found.gate} | ({"lines_per_unit": [2]} if found.interleaved else {"copies": 1 + found.gated})
            ]
        columns = {"module": found.down}
        self.spaces["mlp"] = {"units": "mlp", "experts": True, "rows": rows, "columns": columns, "config": {key: []}}
        if found.alone:
            self.spaces["experts"] = {
                "units": "experts",
                "rows": [{"module": found.router}],
                **({"tables": [{"module": each} for each in found.tables]} if found.tables else {}),
                "config": {count_key: []},
            }
        else:
            self.whole["experts"] = "its router has rows for others than these experts"
        groups = [each for each in _GROUPS if isinstance(getattr(self.twin.parsed, each, None), int)]
        return {
            "count": "experts",
            "router": found.router,
            "gate": found.gate,
            "up": found.up,
            "down": found.down,
            "module": found.path,
            "chosen": chosen,
            **found.flags,
            **({"groups": groups} if len(groups) == 2 else {}),
        }

    # ---- what keys of the config change --------------------------------------------------------------------------

    def _bias_slots(self, modules: set[str]) -> dict[str, str | bool]:
        """Return linear module → the config key that gives it a bias, or true: keys are turned on and off.

        A key that is off, and gives one to a linear module of no space, too, is none: outputs have none to put there.
        """
        config = self.twin.config
        keys = [key for key, value in self.values.items() if "bias" in key and isinstance(value, bool)]

        def with_bias(opened: Sequence[str]) -> set[str]:
            try:
                parsed = parse_config(with_keys(config, {key: key in opened for key in keys}))
                names = Names(build_skeleton(parsed, self.twin.architecture)).shapes
            except RefusedConfigError:
                return set()
            prefixes = [self.prefix.format(block=block) for block in range(len(self.runs))]
            inside = (name.removeprefix(prefix) for prefix in prefixes for name in names if name.startswith(prefix))
            return {EXPERT.sub(".{expert}.", each).removesuffix(".bias") for each in inside if each.endswith(".bias")}

        always = with_bias(())
        slots: dict[str, str | bool] = dict.fromkeys(sorted(always & modules), True)
        for key in keys:
            opened = with_bias([key]) - always
            slots |= dict.fromkeys(sorted(opened & modules), key) if self.values[key] or opened <= modules else {}
        return slots

    def _heads_divide_hidden(self) -> bool:
        """Return whether the config class refuses a number of heads that does not divide the hidden size."""
        hidden = self.sizes["hidden"]
        odd = next(count for count in range(3, hidden + 2) if hidden % count)
        keys = {*self.dimensions["query_heads"], *self.dimensions["kv_heads"]}
        try:
            parse_config(with_keys(self.twin.config, dict.fromkeys(keys, odd)))
        except UserError:
            return True
        return False


def said(whole: Mapping[str, str]) -> str:
    """Return why spaces stay whole, by the space, in one sentence."""
    names: dict[str, list[str]] = {}
    for name, why in whole.items():
        names.setdefault(why, []).append(name)
    reasons = "; ".join(f"{' and '.join(own)}: {why}" for why, own in names.items())
    return reasons or "nothing ends in a linear module"


def drop_space(draft: Draft, name: str, why: str) -> None:
    """Take a space out of a description, and those within it; say why it stays whole."""
    description = draft.description
    spaces = description["spaces"]
    before = set(modules_of(spaces.values()))
    of_attention = ("heads", "queries", "cross_heads")  # one config key counts those of both attentions
    beside = {"heads": of_attention, "cross_heads": of_attention}.get(name, ())
    gone = [name, *(each for each in beside if each != name and each in spaces)]
    if name == "mlp" and description.pop("experts", None) and "experts" in spaces:
        gone.append("experts")
    for each in gone:
        spaces.pop(each)
    why = why.replace("{model_type}", description["model_type"])
    draft.whole[name] = why
    left = set(modules_of(spaces.values()))
    experts = description.get("experts") or {}
    routed = {experts.get("router")}
    description["spaceless"] += sorted(before - left - routed)
    description["bias_slots"] = {module: slot for module, slot in description["bias_slots"].items() if module in left}
    description["absent"] |= dict.fromkeys(gone, why)
    units = [space["units"] for space in spaces.values()]
    description["together"] = [each for each in description["together"] if units.count(each) > 1]


def _keys(key: str | None) -> list[str]:
    return [] if key is None else [key]


def _roles(trace: Trace) -> dict[str, str]:
    """Return which producers make queries, keys and values.

    A token's own queries are read by it alone; a column reads one row of the values, and several of the keys.
    """
    across = [path for path in trace.producers if bool(trace.across[path].any())]
    own = [path for path in trace.producers if bool((~trace.across[path]).any())]
    rows_of = {path: int(trace.rows[path].sum(1).float().mean()) for path in trace.producers}
    key = max(across, key=lambda path: rows_of[path])
    value = min(across, key=lambda path: (rows_of[path], path == key))
    query = max(own, key=lambda path: rows_of[path]) if own else key
    return {"query": query, "key": key, "value": value}


def _dimensions_of(space: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                walk(each)
        elif isinstance(value, str):
            found.add(value)

    for incidence in [*space["rows"], *space.get("tables", []), space.get("columns", {})]:
        for key in ("lines_per_unit", "after", "stride"):
            walk(incidence.get(key, []))
    return found


def modules_of(spaces: Any) -> set[str]:
    """Return the linear modules of spaces of a description."""
    rows = [incidence["module"] for space in spaces for incidence in space["rows"]]
    ends = [space["columns"]["module"] for space in spaces if "columns" in space]
    return {*rows, *ends, *(space["gate"] for space in spaces if "gate" in space)}
