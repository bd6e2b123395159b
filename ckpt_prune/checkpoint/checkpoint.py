"""A checkpoint folder as published on the Hub. Headers are read at once, tensors when they are asked for."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_prune.checkpoint.adapters import attach_adapter, base_of_adapter, check_added_tokens
from ckpt_prune.checkpoint.digests import checkpoint_fingerprint
from ckpt_prune.checkpoint.files import Stamp, find_changed, open_input, stamps_of
from ckpt_prune.checkpoint.fp8 import attach_scales
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import canonical_json, check_side_files, read_json_object
from ckpt_prune.checkpoint.model_folder import (
    ADAPTER_CONFIG,
    is_adapter,
    model_name,
    refuse_adapter,
    resolve_model,
    way_to_source,
)
from ckpt_prune.checkpoint.mxfp4 import attach_fp4
from ckpt_prune.checkpoint.packed import attach_groups, shape_infos
from ckpt_prune.checkpoint.quantised import (
    QUANTISATION_KEY,
    class_name,
    drop_quantisation,
    is_mxfp4,
    is_packed,
    is_plain_fp8,
    refuse_quantised,
)
from ckpt_prune.checkpoint.shard import (
    CODES,
    Header,
    Stack,
    TensorInfo,
    add_adapter,
    apply_scales,
    as_bytes,
    read_flat_chunks,
    read_header,
    read_tensor,
)
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.finite import all_finite
from ckpt_prune.common.progress import track

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_MOST_LAYERS = 1000
"""Building a model takes time and memory per layer, tensors or not. The deepest published ones have about 130."""
_CONVERT = (
    'convert them where they are trusted: python -c "from transformers import {auto} as M; '
    "M.from_pretrained('{path}').save_pretrained('NEW')\", or use https://huggingface.co/spaces/safetensors/convert"
)
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


@dataclass(frozen=True, eq=False)
class PartOf:
    """The place of a checkpoint that is one part of another.

    Attributes:
        part: name of the part.
        key: of its config in the config of the whole.
        names: name of a tensor of the part → its name on disk.
        other_prefixes: first parts of the names of other parts' tensors, if one config key states a width of all parts
            (T5, swin).
        goes_on: whether that part is pruned next, in the same call: until then its width is another.
    """

    whole: "Checkpoint"
    part: str
    key: str
    names: Mapping[str, str]
    other_prefixes: tuple[str, ...] = ()
    goes_on: bool = False

    @property
    def rest(self) -> dict[str, TensorInfo]:
        """The tensors of the whole that are not in the part."""
        inside = set(self.names.values())
        return {name: info for name, info in self.whole.tensors.items() if name not in inside}

    def on_disk(self, name: str) -> str:
        """Return the name on disk of a tensor of the part, or of a bias that is added to a weight of it."""
        if name in self.names:
            return self.names[name]
        return self.names[f"{name.removesuffix('bias')}weight"].removesuffix("weight") + "bias"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint folder, or a view of one with other names or without some tensors.

    Attributes:
        config: config.json, parsed.
        tensors: every tensor by its on-disk name, shard by shard.
        files: names of the safetensors files, sorted.
        metadata: free-text `__metadata__` of each file.
        stamps: of the folder's files when it was opened, by name below it; of an adapter's by place.
        within: its place if it is a part of another checkpoint; names and config are then those of a model of its own.
        stacks: tensor of a file → the parts that `tensors` has in its place.
        aliases: tensor → its name on disk, if transformers uses another one.
        replaced: tensors that are read from elsewhere, by name, with the absolute path of their file.
        ignored: tensors of the files that the model's class does not load. They are neither read nor written.
        shadowed: tied tensors that are left out because another of `tensors` has their bytes.
        copies: tensor that no file has under this name → the one on disk whose bytes it has.
        stated: values of config.json that `config` replaces; None for absent keys.
        adapter: folder of the adapter that is merged into tensors as they are read.
        rewritten: side files that outputs have with another content, by name; None of those that they lack.
        quantisation: settings in config.json of weights that are read as plain ones; `config` lacks them.
        by_class: False if the description of its family says what its tensors must be: for answers before any work,
            as transformers' class takes seconds to import. What writes asks the class.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[str, ...]
    sharded: bool
    metadata: dict[str, dict[str, str]]
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    within: PartOf | None = None
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, TensorInfo] = field(default_factory=dict)
    ignored: Mapping[str, TensorInfo] = field(default_factory=dict)
    shadowed: Mapping[str, TensorInfo] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    adapter: Path | None = None
    rewritten: Mapping[str, bytes | None] = field(default_factory=dict)
    quantisation: Mapping[str, Any] | None = None
    by_class: bool = True

    @classmethod
    def open(cls, model: str | Path, *, packed: bool = False) -> "Checkpoint":
        """Open a folder or Hub id, reading config, index and headers only.

        A folder with an adapter is its base model, whose tensors have the adapter merged as they are read.

        Args:
            packed: read weights that `quantize` has packed as plain ones, in place of refusing them.

        Raises:
            UserError: the model is not found, or a file is missing, damaged, not supported or contradicts the index.
        """
        path = resolve_model(str(model))
        return cls._open_adapter(path) if is_adapter(path) else cls._open_plain(path, packed=packed)

    @classmethod
    def _open_plain(cls, path: Path, *, packed: bool = False) -> "Checkpoint":
        """Open a folder of weights, whether an adapter lies beside them or not."""
        # First, so that whatever changes while the rest is read has another stamp.
        stamps = stamps_of(path)
        config = _read_config(path, packed=packed)
        check_side_files(path)
        # The order of transformers: the single file wins if both are there.
        sharded = not (path / SINGLE).exists()
        _refuse_other_weights(path, config, INDEX if sharded else SINGLE)
        headers = _read_shards(path) if sharded else {SINGLE: read_header(path / SINGLE)}
        tensors = {name: info for header in headers.values() for name, info in header.tensors.items()}
        quantisation = config.get(QUANTISATION_KEY)
        if is_plain_fp8(config):
            tensors, config = attach_scales(path, tensors, config), drop_quantisation(config)
        elif is_mxfp4(config):
            tensors, config = attach_fp4(path, tensors), drop_quantisation(config)
        elif is_packed(config):
            shapes = read_tensors(path, shape_infos(tensors))
            tensors, config = attach_groups(path, tensors, config, shapes), drop_quantisation(config)
        # A file of nothing but scales has nothing that is read for itself.
        used = {info.file for info in tensors.values()}
        files = tuple(file for file in headers if file in used or not headers[file].tensors)
        return cls(
            path=path,
            config=config,
            tensors=tensors,
            files=files,
            sharded=sharded,
            metadata={file: headers[file].metadata for file in files},
            stamps=stamps,
            quantisation=quantisation,
        )

    @classmethod
    def _open_adapter(cls, folder: Path) -> "Checkpoint":
        name, holds_model = base_of_adapter(folder), (folder / CONFIG).is_file()
        # transformers puts an adapter on the weights beside it, whatever it was trained on.
        base = cls._open_plain(folder) if holds_model else cls._open_base(folder, name)
        check_side_files(folder)
        check_added_tokens(folder, base.path, base.config)
        stamps = {str(folder.absolute() / file): stamp for file, stamp in stamps_of(folder).items()}
        return replace(
            base,
            tensors=attach_adapter(folder, base.path, base.tensors),
            stamps={**base.stamps, **stamps},
            adapter=folder,
        )

    @classmethod
    def _open_base(cls, folder: Path, name: str) -> "Checkpoint":
        try:
            path = resolve_model(name)
            if is_adapter(path):
                raise UserError("it is an adapter itself: merge that first with `convert`")
            return cls._open_plain(path)
        except UserError as error:
            raise UserError(
                f"{folder} is an adapter of {name}, which cannot be opened: {error}. base_model_name_or_path in "
                f"{folder / ADAPTER_CONFIG} is where it is looked for"
            ) from error

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors to CPU in the order asked, with on-disk shape and dtype, in memory of their own."""
        names = list(names)
        for name in names:
            if name not in self.tensors:
                raise UserError(f"{self.path} has no tensor {name!r}")
        return read_tensors(self.path, [self.replaced.get(name, self.tensors[name]) for name in names])

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same shape and values, in whatever types. Reads both, piece by piece."""
        infos = self.tensors[one], self.tensors[other]
        return _equal(self.path, *infos, *(info.stamp for info in infos))

    def check_unchanged(self, names: Iterable[str] | None = None) -> None:
        """Refuse to continue with files that changed since the folder was opened: these, or all that are read."""
        names = [CONFIG, *self._weight_stamps] if names is None else names
        if (name := find_changed(self.path, self.stamps, names)) is not None:
            raise UserError(f"{self.path / name} changed since it was opened; run again")

    def stamp_name(self, path: Path) -> str:
        """Return the name under which a file's stamp is kept: below the folder, or its place if it is an adapter's."""
        below = path.is_relative_to(self.path)
        return path.relative_to(self.path).as_posix() if below else str(path.absolute())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(info.stored_bytes for info in self.tensors.values())

    @property
    def _weight_stamps(self) -> dict[str, Stamp]:
        """Stamps of the files that tensors are read from, with their index and an adapter's files."""
        read = {part.file for info in self.tensors.values() for part in info.parts} | {INDEX}
        read |= set() if self.adapter is None else {str(self.adapter.absolute() / ADAPTER_CONFIG)}
        return {name: stamp for name, stamp in self.stamps.items() if name in read}

    def identify(self) -> dict[str, Any]:
        """Return what tells the tensors from any others, as JSON: a digest of all their bytes, and stamps of the files.

        Refuses NaN and Inf.
        """
        return {"content": self._scanned, "stamps": {name: list(own) for name, own in self._weight_stamps.items()}}

    def is_identified(self, identity: Mapping[str, Any]) -> bool:
        """Whether the tensors are those that were identified. They are read if the files were copied or touched."""
        stamps = {name: list(own) for name, own in self._weight_stamps.items()}
        return identity["stamps"] == stamps or bool(identity["content"] == self._scanned)

    def transpose(self, names: Iterable[str]) -> "Checkpoint":
        """Return the same checkpoint with some matrices read as their transposes."""
        transposed = {name: self.tensors[name].transpose() for name in names if name in self.tensors}
        return replace(self, tensors=self.tensors | transposed) if transposed else self

    def ignore(self, names: Iterable[str]) -> "Checkpoint":
        """Return the same checkpoint without some tensors, and without files that hold no other."""
        ignored = {name: self.tensors[name] for name in names}
        return replace(self._drop(ignored), ignored={**self.ignored, **ignored}) if ignored else self

    def with_ties(self, names: Iterable[str], copies: Mapping[str, str]) -> "Checkpoint":
        """Return the same checkpoint with tied tensors under other names.

        Args:
            names: tensors to leave out, because another has their bytes.
            copies: new name → the tensor whose bytes it has.
        """
        shadowed = {name: self.tensors[name] for name in names}
        added = {name: replace(self.tensors[disk], name=name) for name, disk in copies.items()}
        view = replace(self, tensors=self.tensors | added)._drop(shadowed)
        return replace(view, shadowed={**self.shadowed, **shadowed}, copies={**self.copies, **copies})

    def _drop(self, names: Container[str]) -> "Checkpoint":
        tensors = {name: info for name, info in self.tensors.items() if name not in names}
        emptied = {info.file for info in self.tensors.values()} - {info.file for info in tensors.values()}
        return replace(self, tensors=tensors, files=tuple(file for file in self.files if file not in emptied))

    def rename(self, aliases: Mapping[str, str]) -> "Checkpoint":
        """Return the same checkpoint with some tensors under new names (new name → name on disk).

        Files that are written from it have the names on disk.
        """
        names = {disk: name for name, disk in aliases.items() if disk in self.tensors}
        if not names:
            return self
        tensors = {names.get(n, n): replace(info, name=names.get(n, n)) for n, info in self.tensors.items()}
        return replace(self, tensors=tensors, aliases={**self.aliases, **{name: n for n, name in names.items()}})

    def split(self, stacks: Mapping[str, Stack]) -> "Checkpoint":
        """Return the same checkpoint with some tensors replaced by their parts (tensor → parts)."""
        present: dict[str, Stack] = {}
        for name, stack in stacks.items():
            if name in self.tensors:
                # One that was pruned may hold fewer.
                present[name] = replace(stack, parts=stack.parts[: self.tensors[name].shape[0] * stack.each])
        tensors: dict[str, TensorInfo] = {}
        for name, info in self.tensors.items():
            if name in present:
                stack = present[name]
                tensors |= {part: info.part(index, part, stack.each) for index, part in enumerate(stack.parts)}
            else:
                tensors[name] = info
        return replace(self, tensors=tensors, stacks={**self.stacks, **present}) if present else self

    def select(self, names: Mapping[str, str], config: dict[str, Any]) -> "Checkpoint":
        """Return a checkpoint of some of the tensors under new names.

        Args:
            names: of a tensor, or of one that holds a stack of them → its new name.
            config: of the model that these tensors make.
        """
        tensors = {names[n]: replace(info, name=names[n]) for n, info in self.tensors.items() if n in names}
        stacks = {
            names[n]: replace(stack, parts=tuple(names[part] for part in stack.parts))
            for n, stack in self.stacks.items()
            if n in names
        }
        aliases = {names[n]: names[disk] for n, disk in self.aliases.items() if n in names}
        used = {info.file for info in tensors.values()}
        files = tuple(file for file in self.files if file in used)
        return replace(self, config=config, tensors=tensors, files=files, stacks=stacks, aliases=aliases)

    @property
    def stored(self) -> dict[str, TensorInfo]:
        """The tensors under the names and with the stacks of the files, but transposed as they are read."""
        parts = {part for stack in self.stacks.values() for part in stack.parts}
        disk = {name: self.aliases.get(name, name) for name in self.tensors if name not in parts}
        infos = {
            on_disk: self.tensors[name] if name == on_disk else replace(self.tensors[name], name=on_disk)
            for name, on_disk in disk.items()
        }
        for name, stack in self.stacks.items():
            infos[name] = self.tensors[stack.parts[0]].stack(len(stack.parts), stack, name)
        return infos

    @property
    def transposed(self) -> frozenset[str]:
        """Matrices that are read as the transposes of what the files hold."""
        return frozenset(name for name, info in self.tensors.items() if info.transposed)

    @property
    def name(self) -> str:
        """Name of the model: its folder, or its Hub id if the folder is a snapshot of one."""
        return model_name(self.adapter or self.path)

    @property
    def whole(self) -> Path:
        """The folder, for loading the WHOLE model; UserError if an adapter is merged only as tensors are read."""
        if self.adapter is not None:
            refuse_adapter(self.adapter)
        return self.path

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes."""
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            sizes[info.dtype] += info.nbytes
        return sizes.most_common(1)[0][0]

    def check_finite(self) -> None:
        """Refuse NaN and Inf. Reads every floating-point tensor once, in chunks of 64 MiB."""
        _ = self._scanned

    @cached_property
    def _scanned(self) -> str:
        """Hex SHA-256 of the bytes of all tensors by name, none of which is NaN or Inf."""
        # Cached only when it passes: a job that measures before it writes asks twice, and 13 GB are read once.
        stored = [part for name in sorted(self.tensors) for part in self.tensors[name].parts]
        digest = hashlib.sha256()
        for info in track(stored, "checking for NaN and Inf", unit="tensor"):
            digest.update(canonical_json([info.name, info.shape, CODES[info.dtype]]).encode())
            # Old transformers saved what they masked logits with: -1e9, which float16 does not hold.
            checked = info.dtype.is_floating_point and not info.name.endswith(".masked_bias")
            bad = 0
            with open_input(self.path / info.file) as handle:
                for chunk in read_flat_chunks(handle, info):
                    digest.update(as_bytes(chunk))
                    bad += _count_not_finite(chunk) if checked else 0
            if bad:
                raise UserError(
                    f"{self.path / info.file}: tensor {info.name!r} has {bad} NaN or Inf among {info.numel} elements; "
                    "download it again or repair it"
                )
        return digest.hexdigest()

    @property
    def stored_config(self) -> dict[str, Any]:
        """The values of config.json before a view changed any (`stated`)."""
        absent = {key for key, value in self.stated.items() if value is None}
        return {key: value for key, value in {**self.config, **self.stated}.items() if key not in absent}

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the files, whatever the view: config, names, shapes and a sample of the bytes.

        See `digests.checkpoint_fingerprint`.
        """
        tensors = [info for name, info in self.stored.items() if name not in self.copies]
        other_parts = () if self.within is None else self.within.rest.values()
        left_out = (*self.ignored.values(), *self.shadowed.values())
        return checkpoint_fingerprint(self.path, self.stored_config, [*tensors, *left_out, *other_parts])


def read_tensors(folder: Path, infos: Iterable[TensorInfo]) -> dict[str, Tensor]:
    """Read tensors of a folder, in the order given. Each file is opened once and read front to back."""
    infos = list(infos)
    by_file = defaultdict(list)
    for part in (part for info in infos for part in info.parts):
        by_file[part.file].append(part)
    stored: dict[tuple[str, int], Tensor] = {}  # scales of several parts of a tensor have one name
    for file, wanted in by_file.items():
        try:
            with open_input(folder / file) as handle:
                for info in sorted(wanted, key=lambda info: info.offset):
                    stored[info.name, info.offset] = read_tensor(handle, info)
        except OSError as error:
            raise UserError(f"cannot read {folder / file} ({error.strerror}); restore the file") from error
    made: dict[str, Tensor] = {}
    for info in infos:
        tensor, *others = (stored[part.name, part.offset] for part in info.parts)
        if info.scaled is not None:
            tensor = apply_scales(info, tensor, others.pop(0))
        made[info.name] = tensor if info.adapter is None else add_adapter(info, tensor, *others)
    return made


@lru_cache(maxsize=16)
def _equal(folder: Path, one: TensorInfo, other: TensorInfo, *_stamps: Stamp | None) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype or len((*one.parts, *other.parts)) > 2:
        return torch.equal(
            *(tensor.double() for info in (one, other) for tensor in read_tensors(folder, [info]).values())
        )
    with open_input(folder / one.file) as left, open_input(folder / other.file) as right:
        pieces = zip(read_flat_chunks(left, one), read_flat_chunks(right, other), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pieces)


def _read_config(path: Path, *, packed: bool = False) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        refuse_unfinished(path)
        raise UserError(f"{path} has no {CONFIG}; give a checkpoint folder as published on the Hub")
    config = check_config(path / CONFIG, read_json_object(path / CONFIG))
    if not (packed and is_packed(config)):
        refuse_quantised(path, config)
    return config


def _refuse_other_weights(path: Path, config: dict[str, Any], file: str) -> None:
    """Refuse to read `file` if config.json makes transformers read its weights from another one."""
    named = config.get("transformers_weights", file)
    # Outputs that carry code of their own hold a sentence in that key, which keeps other classes from reading them.
    if named != file and (str(named).endswith((".safetensors", ".json")) or "auto_map" not in config):
        raise UserError(
            f"{path / CONFIG}: transformers reads weights from {named!r} (transformers_weights), and they are read "
            f"from {file} here; rename the file, or take the key out where {file} is the right one"
        )


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of config.json for the number of tokens that a model reads at once."""


def check_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json's values, once its class names are names and its model is not too deep to build."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{path}: architectures is {names!r}, not a list of class names; download it again")
    for key, value in _integers(config):
        if "layer" in key and not key.startswith("vocab_size") and value > _MOST_LAYERS:
            raise UserError(f"{path}: {key} is {value}, and {_MOST_LAYERS} layers are the most that are built")
        if key in _POSITIONS and value < 1:
            raise UserError(f"{path}: {key} is {value}, where a model reads one token at least; download it again")
    return config


def _integers(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    # Configs inside a config count.
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _integers(value)
        elif isinstance(value, int):
            yield key, value


def _read_shards(path: Path) -> dict[str, Header]:
    """Read the headers of all shards by sorted file name, and check that their tensors are those of the index."""
    expected = _read_index(path)
    headers: dict[str, Header] = {}
    for file in sorted(expected):
        if not (path / file).is_file():
            raise UserError(f"{path} lacks the shard {file} that {INDEX} names; download it again")
        headers[file] = read_header(path / file)
        present = set(headers[file].tensors)
        if lacking := sorted(expected[file] - present):
            raise UserError(f"{path / file} lacks {_name(lacking)}, which {INDEX} puts there; download both again")
        if unlisted := sorted(present - expected[file]):
            raise UserError(
                f"{path / file} holds {_name(unlisted)}, which {INDEX} does not put there; download both again"
            )
    return headers


def _read_index(path: Path) -> dict[str, set[str]]:
    """Return the names of the tensors that the index puts into each file."""
    index = path / INDEX
    if not index.is_file():
        pickles = sorted(file.name for file in path.iterdir() if file.suffix.lower() in PICKLE_SUFFIXES)
        graph = next(iter(sorted(path.glob("*.onnx"))), None)
        if graph is not None:
            model = f"give the model it was exported from{way_to_source(path)}"
            raise UserError(f"{path} holds a graph ({graph.name}) and no weights: {model}")
        others = sorted(path.glob("*.safetensors"))
        if others:
            raise UserError(f"{path} {_no_index(others)}")
        convert = _CONVERT.format(path=path, auto=class_name(_read_config(path)))
        if pickles:
            raise UserError(f"{path} has only pickled weights ({pickles[0]}), which are never unpickled; {convert}")
        raise UserError(f"{path} has neither {SINGLE} nor {INDEX}; if it was published as .bin pickles, {convert}")
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    if "weight_map" not in content:
        raise UserError(f"{index} has no weight_map; download it again")
    if not isinstance(weight_map, dict) or not weight_map:
        fault = f"a {type(weight_map).__name__} as its weight_map, not a map from tensor names to files"
        raise UserError(f"{index} has {fault if weight_map != {} else 'an empty weight_map'}; download it again")
    if not isinstance(content.get("metadata"), dict):
        raise UserError(
            f'{index} has no "metadata", without which transformers loads no shards; download it again, or put '
            '"metadata": {} into it'
        )
    expected: dict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        # The name decides, not where it leads: the Hub cache is all links to ../../blobs.
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise UserError(
                f"{index} puts {name!r} in {file!r}, which is not a safetensors file of that folder; download it again"
            )
        expected[file].add(name)
    return dict(expected)


def _no_index(files: list[Path]) -> str:
    """Say what is missing in a folder with safetensors files that nothing names."""
    shards = [file for file in files if re.fullmatch(r".+-\d{5}-of-\d{5}\.safetensors", file.name)]
    if not shards:
        return (
            f"has {files[0].name}, and neither {SINGLE} nor {INDEX}, which transformers looks for; rename it to "
            f"{SINGLE} if it holds the whole model"
        )
    more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
    total = int(shards[0].stem.rpartition("-")[2])
    missing = f"; {total - len(shards)} of its {total} shards are missing, too" if total > len(shards) else ""
    lacking = f"no {INDEX}, which says what each holds; download that as well{missing}"
    return f"has shards ({shards[0].name}{more}) and {lacking}"


def check_index(path: Path) -> None:
    """Refuse a folder whose index is missing or damaged, with the messages of `Checkpoint.open`; reads no header."""
    if not (path / SINGLE).exists():
        _read_index(path)


def _name(tensors: list[str]) -> str:
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"tensor {tensors[0]!r}{more}"


def _count_not_finite(chunk: Tensor) -> int:
    if all_finite(chunk):
        return 0
    if chunk.dtype.itemsize == 1:
        chunk = chunk.to(torch.float32)  # float8 has no isfinite
    return int(chunk.numel() - torch.isfinite(chunk).sum().item())
