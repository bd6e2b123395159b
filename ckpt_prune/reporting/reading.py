"""What a page is made from: the report inside an output, or a plan file.

Only what is shown is read and checked; every other key may come and go without a change here.
"""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ckpt_prune.checkpoint.jsonfile import parse_object
from ckpt_prune.errors import UserError
from ckpt_prune.filenames import ELSEWHERE, REPORT

Count = Annotated[int, Field(ge=0, le=2**63)]
Block = Annotated[int, Field(ge=0, le=10**6)]
_HUGE = 1e300
_MODULES = {
    "q": ("self_attn.q_proj", "attention.attention.query", "attention.self.query"),
    "k": ("self_attn.k_proj", "attention.attention.key", "attention.self.key"),
    "v": ("self_attn.v_proj", "attention.attention.value", "attention.self.value"),
    "o": ("self_attn.o_proj", "self_attn.out_proj", "attention.output.dense"),
    "gate": ("mlp.gate_proj",),
    # A gated MLP that stores gate and up as one weight has that one here.
    "up": ("mlp.up_proj", "fc1", "mlp.fc1", "intermediate.dense", "mlp.weights_in"),
    "down": ("mlp.down_proj", "fc2", "mlp.fc2", "output.dense", "mlp.weights_out"),
}
_KIND_OF = {module: kind for kind, modules in _MODULES.items() for module in modules}
_WANTED = "give a folder that `ckpt-prune prune` wrote, or a plan file"


class Record(BaseModel):
    """Some known keys, and figures under any others."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def figure(self, key: str) -> float | None:
        """The number under `key`; None where it is absent, null, no number or not a finite one."""
        value = (self.model_extra or {}).get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE:
            return None
        return float(value)


class Layer(Record):
    """One block as a whole, and what became of it in recovery; errors and CKA are figures."""

    block: Block
    epochs: Count
    best_epoch: Count
    diverged: bool
    recovered: bool


class Head(Record):
    """One head of a site whose figures are per head."""

    head: Count


class Site(Record):
    """One space of one block."""

    block: Block
    space: str
    units: Annotated[int, Field(ge=1, le=2**63)]
    kept: list[int]
    method: str
    heads: list[Head] | None = None

    @property
    def pruned(self) -> bool:
        """Whether any unit is dropped."""
        return len(self.kept) < self.units

    @property
    def floor(self) -> float | None:
        """The least error any weights and bias can reach, relative as the errors are."""
        floor, start, error = self.figure("floor"), self.figure("j0"), self.figure("error_uncompensated")
        if floor is None or start is None or error is None:
            return None
        # Where nothing is lost there is nothing to be relative to.
        return floor / start * error if start > 0 else 0.0 if floor == 0 else None

    @property
    def width(self) -> float | None:
        """Inputs of the consumer. Units of an MLP are its inputs; a head is several, which the report may count."""
        width = self.figure("width") or (self.units if self.space == "mlp" else None)
        return width if width is None or width > 0 else None


class Linear(Record):
    """What a mask did to one linear of one block; its error, damping and dead inputs are figures."""

    block: Block
    weight: str
    rows: Annotated[int, Field(ge=1, le=2**31)]
    columns: Annotated[int, Field(ge=1, le=2**31)]
    zeros: Count

    @model_validator(mode="after")
    def _within(self) -> "Linear":
        if self.zeros > self.size:
            raise ValueError("more zeros than weights")
        return self

    @property
    def size(self) -> int:
        """Its weights."""
        return self.rows * self.columns

    @property
    def kind(self) -> str:
        """q, k, v, o, gate, up or down, whatever its family calls it; where that is not known, its own name."""
        name = self.weight.removesuffix(".weight")
        module = name.partition(f".{self.block}.")[2] or name
        return _KIND_OF.get(module, module)


class Learned(Record):
    """A rotation of one block, or of all (block None); entropies before and after and steps are figures."""

    block: Block | None


class Perplexity(Record):
    """The perplexity, a figure, of a model of which only the first blocks are recovered (LaCo, Figure 3)."""

    blocks: Block


class Mask(BaseModel):
    """Which weights were zeroed: by whose score, in which pattern."""

    method: str
    pattern: str


class Rotation(BaseModel):
    """What was turned before the mask, and whose importance of weights that was to concentrate."""

    kind: str
    importance: str | None = None
    learned: list[Learned]


class Cost(BaseModel):
    """Size of a model, as `planning.accounting` counts it."""

    parameters: Annotated[int, Field(ge=1, le=2**63)]
    bytes: Annotated[int, Field(ge=1, le=2**63)]
    flops: Annotated[int, Field(ge=1, le=2**100)]
    tokens: Count | None = None


class _Recipe(BaseModel):
    name: str
    summary: str = ""
    source: str = ""
    mask: Record | None = None


class _Source(BaseModel):
    name: str
    fingerprint: str


class Recovery(BaseModel):
    """How blocks were recovered after they were pruned: towards which model, with which settings, on which data."""

    dense: _Source
    on_the_fly: bool
    settings: Record
    data: Record
    perplexity_after: list[Perplexity] | None = None


class _Container(BaseModel):
    model_type: str
    remote_code: bool = False
    note: str | None = None


class _Common(BaseModel):
    recipe: _Recipe
    recipe_digest: str = ""
    before: Cost
    after: Cost
    sites: list[Site]
    layers: list[Layer] = []
    mask: Mask | None = None
    rotation: Rotation | None = None
    linears: list[Linear] = []
    recovery: Recovery | None = None


class _Output(_Common):
    source: _Source
    calibration: dict[str, Any]
    container: _Container
    ckpt_prune: str
    torch: str = "?"
    transformers: str = "?"


class _Statistics(BaseModel):
    path: str
    digest: str


class _Plan(_Common):
    model: str
    model_path: str
    statistics: _Statistics | None = None
    container: str
    container_note: str | None = None


class Document(BaseModel):
    """What the page says.

    Attributes:
        title: its heading.
        recipe: name, summary and source of the method.
        facts: label and text of what else there is to know, in order.
        before, after: cost of the source and of the output.
        sites: by block, then in the order of the report.
        layers: by block; empty where the report has none.
        mask: which weights were zeroed; None where units were dropped.
        asked_damp: damping of Hessians that the recipe asked for, as a share of their mean diagonal.
        rotation: what was turned before the mask.
        linears: what the mask did, by block, then in the order of the report.
        recovery: how blocks were recovered; None where they were not.
        perplexities: with only some blocks recovered, ascending.
    """

    title: str
    recipe: _Recipe
    facts: list[tuple[str, str]]
    before: Cost
    after: Cost
    sites: list[Site]
    layers: list[Layer]
    mask: Mask | None
    asked_damp: float | None
    rotation: Rotation | None
    linears: list[Linear]
    recovery: Recovery | None
    perplexities: list[Perplexity]


def read_document(path: Path) -> Document:
    """Read the report of an output folder, or a plan.

    Args:
        path: the folder, the report inside it, or the plan file.

    Raises:
        UserError: not there, not written by this tool, or damaged.
    """
    file = _file(path)
    is_report = file.name == REPORT
    try:
        values = parse_object(file.read_bytes())
        if "model_path" in values and not is_report:
            return _of_plan(_Plan.model_validate(values))
        return _of_output(_Output.model_validate(values))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): {_WANTED}") from error
    except ValueError as error:  # pydantic's are ValueErrors as well
        if is_report:
            raise UserError(f"{file} is damaged ({_reason(error)}): prune again") from error
        raise UserError(f"{file} is no plan ({_reason(error)}): {_WANTED}") from error


def _file(path: Path) -> Path:
    try:
        is_folder = path.is_dir()
    except OSError:  # a name that no file can have
        is_folder = False
    if is_folder and not (path / REPORT).is_file():
        raise UserError(f"{path} has no {REPORT}: {_WANTED}")
    return path / REPORT if is_folder else path


def _reason(error: ValueError) -> str:
    """In one line: the place of the first thing that does not fit, or what the JSON parser says."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return " ".join(str(error).split())


def _of_output(report: _Output) -> Document:
    container = report.container
    stored = "remote code" if container.remote_code else container.model_type
    facts = [
        ("Source", report.source.name),
        ("Fingerprint", report.source.fingerprint),
        *_recipe_facts(report),
        ("Calibration", _in_words(report.calibration)),
        *_recovery_facts(report),
        ("Stored as", _with_note(stored, container.note)),
        ("Written by", f"ckpt_prune {report.ckpt_prune}, torch {report.torch}, transformers {report.transformers}"),
    ]
    name = report.recipe.name
    title = f"{report.source.name}, {name if name == ELSEWHERE else f'pruned by {name}'}"
    return _document(f"{title} and recovered" if report.recovery else title, facts, report)


def _of_plan(plan: _Plan) -> Document:
    statistics = plan.statistics
    stored = "remote code" if plan.container == "remote" else plan.container
    facts = [
        ("Source", plan.model_path),
        ("Fingerprint", plan.model),
        *_recipe_facts(plan),
        ("Calibration", f"{statistics.path}, digest {statistics.digest}" if statistics else "none"),
        ("To be stored as", _with_note(stored, plan.container_note)),
    ]
    return _document(f"Plan for {Path(plan.model_path).name}, by {plan.recipe.name}", facts, plan)


def _document(title: str, facts: list[tuple[str, str]], found: _Common) -> Document:
    perplexities = (found.recovery.perplexity_after or []) if found.recovery else []
    return Document(
        title=title,
        recipe=found.recipe,
        facts=[(label, text) for label, text in facts if text],
        before=found.before,
        after=found.after,
        sites=sorted(found.sites, key=lambda site: site.block),
        layers=sorted(found.layers, key=lambda layer: layer.block),
        mask=found.mask,
        asked_damp=None if found.recipe.mask is None else found.recipe.mask.figure("damp"),
        rotation=found.rotation,
        linears=sorted(found.linears, key=lambda linear: linear.block),
        recovery=found.recovery,
        perplexities=sorted(perplexities, key=lambda perplexity: perplexity.blocks),
    )


def _recipe_facts(found: _Common) -> list[tuple[str, str]]:
    mask, rotation = found.mask, found.rotation
    return [
        ("Method", found.recipe.source),
        ("Mask", f"{mask.method}, {mask.pattern}" if mask else ""),
        ("Rotation", rotation.kind if rotation else ""),
        ("Recipe digest", found.recipe_digest),
    ]


def _recovery_facts(found: _Common) -> list[tuple[str, str]]:
    recovery, layers = found.recovery, found.layers
    if recovery is None:
        return []
    count = f", {sum(layer.recovered for layer in layers)} of {len(layers)} blocks" if layers else ""
    when = "each block right after it was pruned" if recovery.on_the_fly else "after pruning"
    return [
        ("Recovery", f"LaCo{count}, {when}"),
        ("Recovered against", f"{recovery.dense.name}, fingerprint {recovery.dense.fingerprint}"),
        ("Recovery data", _in_words(recovery.data.model_extra or {})),
        ("Recovery settings", _in_words(recovery.settings.model_extra or {})),
    ]


def _with_note(container: str, note: str | None) -> str:
    return f"{container}: {note}" if note else container


def _in_words(provenance: dict[str, Any]) -> str:
    """Every entry in words, whatever the modality has: `target dense, 128 samples, window 2048, ...`."""
    counted = {"samples", "tokens", "folds", "epochs"}
    parts = []
    for key, value in provenance.items():
        if value is None or isinstance(value, dict | list) or (isinstance(value, float) and not math.isfinite(value)):
            continue
        words = key.replace("_", " ")
        if key in counted and isinstance(value, int):
            parts.append(f"{value:,} {words.removesuffix('s') if value == 1 else words}")
        else:
            parts.append(f"{words} {value}")
    return ", ".join(parts)
