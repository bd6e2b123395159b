"""Reports made by hand, and pages read back."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Json = dict[str, Any]
VOID = {"meta", "br", "hr", "link", "img", "input"}


def site(block: int, space: str = "mlp", **changes: Any) -> Json:
    return {
        "block": block,
        "space": space,
        "consumer": f"blocks.{block}.{space}",
        "units": 8,
        "kept": [0, 1, 2, 3],
        "method": "affine",
        "strength": 0.01,
        "error_uncompensated": 0.5,
        "error_compensated": 0.25,
        "error_held_out": 0.3,
        "j0": 4.0,
        "floor": 1.0,
        "rho2": 0.75,
        "effective_rank": 2.0,
        "k95": 4,
        "active": 0.5,
        "heads": None,
    } | changes


def report(sites: list[Json], **changes: Any) -> Json:
    return {
        "version": 1,
        "ckpt_prune": "0.1.0",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "source": {"name": "tiny", "fingerprint": "f00d"},
        "recipe": {"version": 1, "name": "corp", "summary": "Affine.", "source": "CORP, eq. 7", "ratio": 0.5},
        "recipe_digest": "beef",
        "calibration": {
            "target": "dense",
            "statistics": "cafe",
            "samples": 128,
            "window": 16,
            "tokens": 2048,
            "folds": 1,
        },
        "plan": None,
        "lambda_search": None,
        "container": {"model_type": "vit", "remote_code": False, "note": None},
        "before": {"parameters": 2_000_000, "bytes": 8_388_608, "flops": 4_000_000_000, "tokens": 1024},
        "after": {"parameters": 1_500_000, "bytes": 6_291_456, "flops": 3_000_000_000, "tokens": 1024},
        "sites": sites,
    } | changes


KINDS = {f"self_attn.{kind}_proj": kind for kind in "qkvo"}
KINDS |= {f"mlp.{kind}_proj": kind for kind in ("gate", "up", "down")}
"""What the report calls the linears of a llama."""


def linear(block: int, module: str = "self_attn.q_proj", **changes: Any) -> Json:
    """Return the record of a mask on one linear of a llama."""
    return {
        "block": block,
        "weight": f"model.layers.{block}.{module}.weight",
        "kind": KINDS.get(module, module),
        "rows": 8,
        "columns": 4,
        "zeros": 16,
        "error": 0.25,
        "damp": 0.01,
        "dead": 0,
    } | changes


def make_learned_rotation(block: int | None, before: float = 40.0, after: float = 30.0, steps: int = 20) -> Json:
    return {"block": block, "entropy_before": before, "entropy_after": after, "steps": steps}


def make_mask_report(
    linears: list[Json], *rotations: Json, kind: str = "per-layer", turns: bool | None = None, **changes: Any
) -> Json:
    """The report of a mask, with rotations before it where some are given."""
    recipe = {
        "version": 1,
        "name": "sparse",
        "summary": "Half to zero.",
        "source": "SparseGPT, Algorithm 1",
        "ratio": 0.5,
        "spaces": {},
        "mask": {"method": "sparsegpt", "pattern": "2:4", "compare": None, "block": 128, "damp": 0.01},
    }
    rotation = {
        "kind": kind,
        "importance": "wanda",
        "turns": kind == "per-layer" if turns is None else turns,
        "learned": list(rotations),
    }
    return report(
        [],
        **{
            "recipe": recipe,
            "mask": {"method": "sparsegpt", "pattern": "2:4", "ratio": 0.5},
            "rotation": rotation if rotations else None,
            "linears": linears,
        }
        | changes,
    )


def layer(block: int, **changes: Any) -> Json:
    """Return the record of recovery on one block."""
    return {
        "block": block,
        "mse_before": 0.5,
        "mse_start": 0.4,
        "mse_after": 0.25,
        "cka_before": 0.75,
        "cka_after": 0.875,
        "epochs": 10,
        "best_epoch": 9,
        "diverged": False,
        "recovered": True,
    } | changes


def make_kept_layer(block: int, **changes: Any) -> Json:
    """A block that recovery left as it was."""
    return layer(block, best_epoch=0, recovered=False, **changes)


def recovery(**changes: Any) -> Json:
    settings = {"epochs": 10, "lr": 0.001, "batch": 8, "accumulate": 1, "schedule": "cosine", "only": None}
    settings |= {"layers": None, "held_out": 0.1, "patience": 3, "seed": 0}
    data = {"modality": "text", "data": "da7a", "samples": 128, "held_out": 13, "window": 256, "tokens": 32768}
    return {
        "dense": {"name": "dense", "fingerprint": "fade"},
        "on_the_fly": False,
        "settings": settings,
        "data": data,
        "perplexity_after": None,
    } | changes


def elsewhere(layers: list[Json], **changes: Any) -> Json:
    """The report of a recovered model that another tool pruned; its cost is known only as it is."""
    json_report = report(
        [], recipe={"name": "pruned elsewhere", "summary": "By another tool."}, linears=[], calibration={}
    )
    return json_report | {"before": json_report["after"], "layers": layers, "recovery": recovery()} | changes


def plan(sites: list[Json], **changes: Any) -> Json:
    json_report = report(sites)
    kept = ("version", "recipe", "recipe_digest", "before", "after", "sites")
    return (
        {
            "model": "f00d",
            "model_path": "models/tiny",
            "statistics": {"path": "/stats", "digest": "cafe"},
            "container": "vit",
            "container_note": None,
        }
        | {key: json_report[key] for key in kept}
        | changes
    )


def write(path: str | Path, value: Any) -> Path:
    """A file of JSON, its folder made first."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


class _Page(HTMLParser):
    """A tree of a page whose tags must close in the order they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.root = ElementTree.Element("page")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} is given twice"
        element = ElementTree.SubElement(self.open[-1], tag, {k: v or "" for k, v in attrs})
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        ElementTree.SubElement(self.open[-1], tag, {k: v or "" for k, v in attrs})

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        element = self.open[-1]
        if len(element):
            element[-1].tail = (element[-1].tail or "") + data
        else:
            element.text = (element.text or "") + data


def parse(html: str) -> ElementTree.Element:
    """A page as a tree; every SVG in it must be well-formed XML as well."""
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)
    page = _Page()
    page.feed(html)
    page.close()
    assert [element.tag for element in page.open] == ["page"]
    return page.root


def words(element: ElementTree.Element | None) -> str:
    """All text in an element, runs of space as one."""
    assert element is not None
    return " ".join("".join(element.itertext()).split())


def details(html: str) -> dict[str, list[list[str]]]:
    """Title of a table that is folded away → its rows."""
    return {
        words(element.find("summary")): [[words(cell) for cell in row] for row in element.iter("tr")]
        for element in parse(html).iter("details")
    }


def numbers(text: str | None) -> list[float]:
    return [float(digits) for digits in re.findall(r"-?\d+(?:\.\d+)?", text or "")]


class Drawn:
    """A plot as a reader sees it: values by the tick labels beside them, blocks by those beneath."""

    def __init__(self, svg: ElementTree.Element) -> None:
        self.svg = svg
        self.x = self._scale("x")
        self.y = self._scale("y")

    def _scale(self, axis: str) -> list[tuple[float, float]]:
        """Pixel and value of every tick: the line's place, the label's number."""
        lines = [path for path in self.svg.iter("path") if path.get("class") == axis]
        labels = [text for text in self.svg.iter("text") if text.get("class") == axis]
        assert len(lines) == len(labels)
        pixels = [numbers(line.get("d"))[0 if axis == "x" else 1] for line in lines]
        return list(zip(pixels, [value(label.text or "") for label in labels], strict=True))

    @property
    def labels(self) -> tuple[list[str], list[str]]:
        """Tick labels of both axes."""
        texts = [[t.text or "" for t in self.svg.iter("text") if t.get("class") == axis] for axis in "xy"]
        return texts[0], texts[1]

    @property
    def unit(self) -> str:
        return next(t.text or "" for t in self.svg.iter("text") if t.get("class") == "unit")

    def marks(self, name: str) -> list[tuple[float, float, str]]:
        """Pixels and class of a series' marks."""
        points = []
        for group in self.svg.iter("g"):
            if group.get("class") == name:
                for path in group:
                    x, y, *_ = numbers(path.get("transform"))
                    points.append((x, y, path.get("class") or ""))
        return points

    def path(self, kind: str, name: str) -> list[list[tuple[float, float]]]:
        """The corners of a series' line or band, stroke by stroke."""
        for path in self.svg.iter("path"):
            if path.get("class") == f"{kind} {name}":
                strokes = (path.get("d") or "").split("M")[1:]
                return [list(zip(n[::2], n[1::2], strict=True)) for n in map(numbers, strokes)]
        return []

    def tooltips(self) -> list[str]:
        return [title.text or "" for title in self.svg.iter("title")]


def value(label: str) -> float:
    """The number a tick label means: 0.5, 10⁻⁵ or 2·10⁻⁵."""
    plain = label.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    if plain == label:
        return float(label)
    mantissa, _, power = plain.rpartition("·")
    return float(mantissa or 1) * 10.0 ** int(power.removeprefix("10"))
