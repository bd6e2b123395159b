"""Finds the description of a stock class that this package does not know, proves it, and keeps it."""

import hashlib
import inspect
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import signature
from itertools import combinations, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ValidationError

from ckpt_prune._version import __version__
from ckpt_prune.checkpoint.staging import write_atomically
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.similar_names import NEAR, did_you_mean
from ckpt_prune.common.user_cache import user_cache
from ckpt_prune.model.blocks import module_paths
from ckpt_prune.model.description_checks import check_description
from ckpt_prune.model.descriptions import known_families, parse_family
from ckpt_prune.model.discovery.describe import Describer, Draft, drop_space, modules_of, said
from ckpt_prune.model.discovery.parts import find_class, refuse_nested
from ckpt_prune.model.discovery.proofs import Prover, StatedElsewhereError
from ckpt_prune.model.discovery.switches import WidthSwitchError
from ckpt_prune.model.discovery.twin import CHUNK, FIRST, OTHER, Twin, build_twin, small_configs
from ckpt_prune.model.family import Family
from ckpt_prune.model.family_keys import SpaceProof
from ckpt_prune.model.short_forms import shorten_description
from ckpt_prune.model.skeleton import parse_config, quiet_transformers, stock_class
from ckpt_prune.model.spaces import OUTSIDE

_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
    "AutoModelForTextEncoding",
)
_IDLE = re.compile(
    r"architectures|_name_or_path|dtype|initializer_\w+|(\w+_)?token_id|"
    r"num_nextn_predict_layers|num_mtp_layers|mtp_num_hidden_layers"
)
"""Config keys that change nothing of the blocks that a class makes: models that differ in them are described once."""
_FIXED = "the heads of {model_type} are always as wide together as the hidden size, or its class counts them otherwise"
_NARROWED = {"config": {"num_kept_heads": []}, "fixed": _FIXED}
_MOST_SUBSETS = 16
"""Most sets of numbers that are tried as those that count the heads."""


class Stack(NamedTuple):
    """One of several stacks of blocks: the whole's stock class, its Auto class, and the part's name."""

    architecture: str
    auto: str
    name: str


class Discovery(BaseModel):
    """A description that was found.

    Attributes:
        description: as in a file for `--family`.
        seconds: of processor time that finding it took.
        kept: whether it was in the user's cache.
    """

    description: dict[str, Any]
    seconds: float
    kept: bool = False

    def line(self, part: str | None = None) -> str:
        """Say in one line what was found, of a model or a part, and how long that took if it was not kept earlier."""
        name, spaces = self.description["model_type"], ", ".join(self.description["spaces"])
        name += "" if part is None else f" ({part})"
        architecture = next(iter(self.description["architectures"]))
        if not spaces:
            return f"no space of {name} is proven on a small random model of {architecture}, so that none can be pruned"
        took = "" if self.kept else f" ({self.seconds:.1f} s of processor time, once)"
        model = f"a small random model of its class, {architecture}"
        return f"spaces of {name} are found and proven on {model}{took}: {spaces}"

    def check_spaces(self) -> None:
        """Refuse a class of which no space is proven, in one line."""
        if not self.description["spaces"]:
            architecture = next(iter(self.description["architectures"]))
            raise UserError(f"no space of {architecture} is proven: {said(self.description['found']['whole'])}")


def discover(config: Mapping[str, Any], stack: Stack | None = None, *, spaceless: bool = False) -> Discovery:
    """Return the description of a config.json's class, found on small random models of it, or from the user's cache.

    For an encoder-decoder it describes one stack of blocks.
    UserError in one line if transformers has no such class, it cannot be made small, or, but for `spaceless`, no space
    of it is proven.
    """
    found = _discover(config, stack)
    if not spaceless:
        found.check_spaces()
    return found


def _discover(config: Mapping[str, Any], stack: Stack | None) -> Discovery:
    architecture, auto = _architecture(config) if stack is None else (stack.architecture, stack.auto)
    within = None if stack is None else stack.name
    plain = {key: value for key, value in config.items() if not _IDLE.fullmatch(key)}
    if "pad_token_id" in config:
        plain["pad_token_id"] = 0  # some classes compare tokens with it and have no default (ESM)
    place = _place(plain, architecture, within)
    with suppress(OSError, ValidationError, UserError):
        found = Discovery.model_validate_json(place.read_bytes())
        parse_family(json.dumps(found.description))
        return found.model_copy(update={"kept": True})
    with _silent(), _one_thread(), _short_chunks(architecture, parse_config(plain)):
        found = _find(plain, architecture, auto, within)
    with suppress(OSError, UserError):  # it is found again next time
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, found.model_dump_json(indent=2) + "\n")
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Hold back what transformers logs of configs that are only tried."""
    from transformers.utils import logging

    with quiet_transformers():
        verbosity = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run a twin's small products on one thread: further ones would take processor time to wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _short_chunks(architecture: str, config: Any) -> Iterator[None]:
    """Let functions of a class's module take few tokens at a time where they take 64 unless told: twins have few.

    Those of linear attention pad a text to whole chunks, and go through every token of one in Python.
    """
    module: Any = import_module(stock_class(architecture, config).__module__)
    functions = [inspect.unwrap(each) for each in vars(module).values() if inspect.isfunction(each)]
    before = {each: each.__defaults__ or () for each in functions if "chunk_size" in signature(each).parameters}
    for function, values in before.items():
        parameters = [name for name, each in signature(function).parameters.items() if each.default is not each.empty]
        defaults = dict(zip(parameters, values, strict=False))
        function.__defaults__ = tuple(CHUNK if name == "chunk_size" else value for name, value in defaults.items())
    try:
        yield
    finally:
        for function, values in before.items():
            function.__defaults__ = values or None


def _architecture(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the stock class of a config.json, and the Auto class that loads it."""
    import transformers
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        hint = did_you_mean(model_type, known_families(), most=3, likeness=NEAR).rstrip()
        raise UserError(
            f"model_type {model_type!r} is known neither here nor to transformers {transformers.__version__}"
            f"{f' ({hint})' if hint else ''}; a newer transformers may have it"
        )
    declared = [name.removeprefix("Pruned") for name in config.get("architectures") or []]
    refuse_nested(config)
    auto, stock = find_class(model_type, _AUTO, declared)
    return stock, auto


def _place(plain: dict[str, Any], architecture: str, stack: str | None) -> Path:
    """Return the file in the user's cache: by the class's code, and by the config without its sizes."""
    import transformers
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    parsed = parse_config(plain)
    module: Any = import_module(stock_class(architecture, parsed).__module__)
    small, _ = next(small_configs(plain, FIRST))
    small.pop("transformers_version", None)
    own = sorted(Path(__file__).parent.glob("*.py"))  # of two checkouts of one version each finds what it can
    converted = get_checkpoint_conversion_mapping(str(plain["model_type"])) is not None  # perhaps as in the whole alone
    named = [__version__, transformers.__version__, architecture, stack, small, converted]
    text = json.dumps(named, sort_keys=True, default=str)
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in (*own, Path(module.__file__))) + text.encode()
    ).hexdigest()
    return user_cache("families") / f"{digest[:32]}.json"


def _find(plain: dict[str, Any], architecture: str, auto: str, stack: str | None) -> Discovery:
    import transformers

    start = time.process_time()
    try:
        draft, other = _draft(plain, architecture, auto, stack)
        proofs = _prove(draft, other)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, StopIteration) as error:
        raise UserError(f"the blocks of {architecture} cannot be run by themselves: {one_line(error)}") from error
    proven = {name: proof.model_dump() for name, proof in proofs.items()}
    found = {"proofs": proven, "whole": draft.whole, "transformers": transformers.__version__}
    draft.description["found"] = found
    try:
        if stack is not None and stack.startswith("stage"):  # a config of few blocks would be of few stages
            raise ValueError(stack)
        module_paths(parse_family(json.dumps(draft.description)))
    except Exception:  # published configs state what its class has no default for, or each block its own
        draft.description["found"] = found | {"config": other.config}
    description = shorten_description(draft.description)
    return Discovery(description=description, seconds=round(time.process_time() - start, 2))


def _draft(plain: dict[str, Any], architecture: str, auto: str, stack: str | None) -> tuple[Draft, Twin]:
    """Return a description of what the first twin shows, and the twin on which it is to be proven."""
    first, other = (build_twin(plain, architecture, sizes) for sizes in (FIRST, OTHER))
    try:
        return Describer(first, auto, plain, stack).describe(), other
    except WidthSwitchError as switch:
        draft, other = _draft(plain | switch.values, architecture, auto, stack)
        draft.description["width_switches"] = {**switch.values, **draft.description.get("width_switches", {})}
        return draft, other


def _prove(draft: Draft, twin: Twin) -> dict[str, SpaceProof]:
    """Prove the spaces of a draft on a twin of other sizes; those that are not proven are taken out of it."""
    family, prover = _settle(draft, twin), None
    proofs: dict[str, SpaceProof] = {}
    for name in list(draft.description["spaces"]):
        if name not in draft.description["spaces"]:
            continue  # it stood within another that was not proven
        proof, why = None, ""
        try:
            prover = prover or Prover(family, twin)
            proof = prover.prove(name)
        except Exception as error:  # whatever the class runs into with fewer units
            why = one_line(error)[:120]
            if not isinstance(error, StatedElsewhereError):
                why = f"the class does not load with fewer units: {why}"
            if "heads" in name and "modality" in draft.description and not draft.description["dimensions"]["head_dim"]:
                why = "its class makes them as wide together as the hidden size, however many there are"
        if name == "heads" and not (proof and proof.holds):
            proof = _prove_narrowed(draft, prover) or proof
        if proof is None:
            drop_space(draft, name, why)
            continue
        if proof.holds:
            proofs[name] = proof
            continue
        why = "another order of its units changes the outputs"
        if proof.together:
            why = "a tensor of it is idle" if not proof.alone else "its class computes something else with fewer units"
        drop_space(draft, name, f"not proven, {why}")
    if draft.description["spaces"]:
        _settle(draft, twin)
    return {name: proof for name, proof in proofs.items() if name in draft.description["spaces"]}


def _prove_narrowed(draft: Draft, prover: Prover | None) -> SpaceProof | None:
    """Prove heads of which an output's own code has fewer; their description says then which numbers count them.

    As many numbers as there are; None if there is no proof.
    """
    if prover is None or draft.counted is None:
        return None
    family, heads = prover.family, draft.description["spaces"]["heads"]
    subsets = (own for size in range(len(draft.counted), -1, -1) for own in combinations(draft.counted.items(), size))
    for attributes in islice(subsets, _MOST_SUBSETS):
        draft.description["spaces"]["heads"] = heads | _NARROWED | {"attributes": dict(attributes)}
        prover.family = parse_family(json.dumps(draft.description)).with_config(prover.twin.parsed)
        with suppress(Exception):  # whatever the class runs into
            proof = prover.prove("heads")
            if proof.holds:
                return proof
    prover.family, draft.description["spaces"]["heads"] = family, heads
    return None


def _settle(draft: Draft, twin: Twin) -> Family:
    """Return the family of a draft once shapes agree with it; spaces that they contradict are taken out."""
    while draft.description["spaces"]:
        family = parse_family(json.dumps(draft.description))
        try:
            check_description(family, twin.config)
        except UserError as error:
            reason, fixed = str(error), _FIXED
            named = reason.removeprefix("spaces.").partition(":")[0].split(".")[0]
            if reason.startswith("spaces: "):  # of a module that a space lies on
                lacking = re.search(r"\((\S+)\); its blocks have", reason)
                module = lacking[1] if lacking else reason.split()[1].removesuffix(".weight")
                fixed = f"some of its blocks have no {module}" if lacking else _FIXED
                spaces = draft.description["spaces"].items()
                named = next((name for name, own in spaces if module in modules_of([own])), "")
            if reason.startswith("attention.") and not draft.description["attention"].get("latent"):
                attention = draft.description["attention"]
                attention["latent"] = attention["key"]  # its sizes are not those of heads
                draft.description["dimensions"]["logits"] = []
                draft.description["derived"]["logits"] = ["head_dim"]
                if "heads" in draft.description["spaces"]:
                    why = f"by its config the heads of {{model_type}} are together not as wide as {reason.split()[1]}"
                    drop_space(draft, "heads", why)  # without the twin's sizes
                continue
            if named not in draft.description["spaces"]:
                raise
            heads = draft.description["spaces"].get("heads", {})
            if named == "heads" and "fixed" not in heads and draft.counted is not None:
                draft.description["spaces"]["heads"] = heads | _NARROWED
                continue
            outside = re.search(rf" units {OUTSIDE}(\S+) has shape", reason)
            of_twin = f"shapes of a small random model of its class contradict it: {reason}"
            if outside is not None:
                of_twin = f"its config key also states a width of {outside[1]}, outside the blocks"
            drop_space(draft, named, fixed if named in ("heads", "queries") else of_twin)
            continue
        return family
    return parse_family(json.dumps(draft.description))
