"""CORP on the ViT and the OPT model of shared/data: accuracy and perplexity over ratios and data sizes, and speed.

    PYTHONPATH=. python tools/bench_corp.py WHAT [--data ../shared/data]      # WHAT: see TABLES, or --help

Prints markdown. Every cell of a table comes from one run on the same machine, the same images and the same statistics.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_prune.checkpoint.checkpoint import Checkpoint
from ckpt_prune.evaluation.perplexity import perplexity
from ckpt_prune.evaluation.whole_model import load_model
from ckpt_prune.job.job import Job, LiveSamples
from ckpt_prune.measure.samples.image_files import ImageFiles, choose_images, find_images
from ckpt_prune.measure.samples.image_processor import load_processor
from ckpt_prune.measure.samples.images import ImageSamples
from ckpt_prune.measure.samples.samples import Samples, TokenWindows
from ckpt_prune.measure.samples.text import (
    cut_windows,
    load_tokenizer,
    mix_windows,
    read_text,
    tokenise_text,
)
from ckpt_prune.measure.statistics.folder import Statistics
from ckpt_prune.measure.statistics.measurement import list_collected_by_default, measure_statistics
from ckpt_prune.model.model import Model
from ckpt_prune.runner.plan import prepare_plan
from ckpt_prune.stages import FullRecipe
from ckpt_prune.stages.recipe_files import load_recipe
from tests.families import prune

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
TARGETS = {"MLP": ("mlp",), "Q/K": ("qk",), "joint": ("qk", "mlp")}


class Pixels:
    """Images decoded once and kept: many models are run on the same ones."""

    def __init__(self, samples: ImageSamples) -> None:
        self.tokens, self.fingerprint = samples.tokens, samples.fingerprint
        self.values = samples.batch(slice(0, len(samples)))["pixel_values"]
        self.labels = samples.labels

    def __len__(self) -> int:
        """Number of images."""
        return len(self.values)

    def batch(self, rows: slice) -> dict[str, torch.Tensor]:
        """`pixel_values` of these images."""
        return {"pixel_values": self.values[rows]}


def images(folder: Path, files: ImageFiles) -> Pixels:
    return Pixels(ImageSamples(files, load_processor(folder), tokens=Model.open(folder).image_tokens))


@torch.inference_mode()
def logits(folder: Path, pixels: Pixels, batch: int = 32) -> torch.Tensor:
    model = load_model(folder, device="cpu")
    parts = [model(**pixels.batch(slice(i, i + batch))).logits for i in range(0, len(pixels), batch)]
    return torch.cat(parts).float()


def compare(pruned: torch.Tensor, dense: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """Top-1, agreement with the dense model, and KL(dense || pruned)."""
    top = (pruned.argmax(1) == labels).double().mean().item()
    same = (pruned.argmax(1) == dense.argmax(1)).double().mean().item()
    p, q = dense.double().log_softmax(1), pruned.double().log_softmax(1)
    return top, same, (p.exp() * (p - q)).sum(1).mean().item()


def make_recipe(target: str, ratio: float, *, compensate: bool, container: str = "any") -> FullRecipe:
    settings = load_recipe("corp", (f"container={container}",), ratio).model_dump(by_alias=True)
    settings["spaces"] = {space: settings["spaces"][space] for space in TARGETS[target]}
    if not compensate:
        for space in settings["spaces"].values():
            space["compensation"] = {"method": "none"}
    return FullRecipe.model_validate(settings)


@contextmanager
def open_output(folder: Path, recipe: FullRecipe, statistics: Statistics) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        prune(prepare_plan(Job(Model.open(folder), recipe, statistics)), out)
        yield out


@contextmanager
def open_statistics(folder: Path, samples: Samples, folds: int = 1) -> Iterator[Statistics]:
    model = Model.open(folder)
    with tempfile.TemporaryDirectory() as scratch:
        yield measure_statistics(
            model,
            samples,
            Path(scratch) / "statistics",
            seed=0,
            folds=folds,
            collect=list_collected_by_default(model),
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
        )


def splits(data: Path) -> tuple[Path, Pixels, Pixels]:
    folder, place = data / "vit-tiny-imagenet", data / "imagenet-1per-class"
    names = {int(k): v for k, v in Checkpoint.open(folder).config["id2label"].items()}
    return (
        folder,
        images(folder, find_images(place, split="calib", id2label=names)),
        images(folder, find_images(place, split="eval", id2label=names)),
    )


def print_accuracy(data: Path) -> None:
    folder, calib, held_out = splits(data)
    assert held_out.labels is not None
    dense = logits(folder, held_out)
    top, _, _ = compare(dense, dense, held_out.labels)
    print(f"vit-tiny-imagenet: calibrated on {len(calib)} images, measured on {len(held_out)} others: dense {top:.1%}")
    print()
    print("| pruned | ratio | top-1 bare | top-1 CORP | agreement bare | agreement CORP | KL bare | KL CORP |")
    print("|---|---|---|---|---|---|---|---|")
    with open_statistics(folder, calib) as statistics:
        for target in TARGETS:
            for ratio in RATIOS:
                cells = []
                for compensate in (False, True):
                    with open_output(folder, make_recipe(target, ratio, compensate=compensate), statistics) as out:
                        cells.append(compare(logits(out, held_out), dense, held_out.labels))
                (t0, a0, k0), (t1, a1, k1) = cells
                print(
                    f"| {target} | {ratio:.0%} | {t0:.1%} | {t1:.1%} | {a0:.1%} | {a1:.1%} | {k0:.2f} | {k1:.2f} |",
                    flush=True,
                )


def print_sequential(data: Path) -> None:
    """Joint pruning with statistics of the dense model, CORP's way, and measured on the pruned prefix site by site."""
    folder, calib, held_out = splits(data)
    assert held_out.labels is not None
    dense = logits(folder, held_out)
    print("| joint ratio | top-1 dense statistics | top-1 sequential | KL dense statistics | KL sequential |")
    print("|---|---|---|---|---|")
    with open_statistics(folder, calib) as statistics, tempfile.TemporaryDirectory() as scratch:
        for ratio in RATIOS:
            cells = []
            for live in (None, LiveSamples(calib, 1, torch.float32)):
                recipe = make_recipe("joint", ratio, compensate=True)
                if live is not None:
                    recipe = recipe.model_copy(update={"target": "sequential"})
                out = Path(scratch) / f"{ratio}-{live is not None}"
                prune(prepare_plan(Job(Model.open(folder), recipe, None if live else statistics, live)), out)
                cells.append(compare(logits(out, held_out), dense, held_out.labels))
            (t0, _, k0), (t1, _, k1) = cells
            print(f"| {ratio:.0%} | {t0:.1%} | {t1:.1%} | {k0:.2f} | {k1:.2f} |", flush=True)


def print_calibration(data: Path) -> None:
    folder, _, _ = splits(data)
    place = data / "imagenet-1per-class"
    names = {int(k): v for k, v in Checkpoint.open(folder).config["id2label"].items()}
    calib = find_images(place, split="calib", id2label=names)
    eval_files = find_images(place, split="eval", id2label=names)
    paths, labels = eval_files.paths, eval_files.labels
    assert labels is not None
    # 244 of the evaluation images join the calibration ones, so that the curve reaches 500; the other 500 are measured.
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    calib_rows, held_out_rows = sorted(order[:244]), sorted(order[244:])
    held_out = images(
        folder, ImageFiles(tuple(paths[i] for i in held_out_rows), tuple(labels[i] for i in held_out_rows))
    )
    assert held_out.labels is not None
    pool = ImageFiles(calib.paths + tuple(paths[i] for i in calib_rows), None)
    dense = logits(folder, held_out)
    top, _, _ = compare(dense, dense, held_out.labels)
    print(f"top-1 on {len(held_out)} images never calibrated on; dense {top:.1%}\n")
    print("| calibration images | MLP 30 % | MLP 50 % | Q/K 30 % | Q/K 50 % | joint 30 % | joint 50 % |")
    print("|---|---|---|---|---|---|---|")
    for count in (5, 20, 50, 100, 256, 500):
        pixels = images(folder, choose_images(pool, samples=count, seed=1))
        cells = []
        with open_statistics(folder, pixels) as statistics:
            for target in TARGETS:
                for ratio in (0.3, 0.5):
                    with open_output(folder, make_recipe(target, ratio, compensate=True), statistics) as out:
                        cells.append(f"{compare(logits(out, held_out), dense, held_out.labels)[0]:.1%}")
        print(f"| {count} | {' | '.join(cells)} |", flush=True)


def print_reference(data: Path) -> None:
    """The reference points of shared/data/README.md: 500 images to calibrate on, the other 500 to measure."""
    folder, place = data / "vit-tiny-imagenet", data / "imagenet-1per-class"
    names = {int(k): v for k, v in Checkpoint.open(folder).config["id2label"].items()}
    both = [find_images(place, split=split, id2label=names) for split in ("calib", "eval")]
    paths = both[0].paths + both[1].paths
    labels = (both[0].labels or ()) + (both[1].labels or ())
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    calib, held_out = (
        images(folder, ImageFiles(tuple(paths[i] for i in rows), tuple(labels[i] for i in rows)))
        for rows in (order[:500], order[500:])
    )
    assert held_out.labels is not None
    dense = logits(folder, held_out)
    print(f"dense {compare(dense, dense, held_out.labels)[0]:.1%}")
    with open_statistics(folder, calib) as statistics:
        for target in ("MLP", "Q/K"):
            for ratio in (0.3, 0.5):
                for compensate in (False, True):
                    with open_output(folder, make_recipe(target, ratio, compensate=compensate), statistics) as out:
                        top = compare(logits(out, held_out), dense, held_out.labels)[0]
                    print(target, ratio, "compensated" if compensate else "bare", f"{top:.1%}", flush=True)


def print_opt(data: Path) -> None:
    folder, text = data / "opt-shakespeare-char-0.8m", data / "text-tinyshakespeare"
    tokenizer = load_tokenizer(folder)
    calib = tokenise_text(tokenizer, read_text([text / "calib_first90.txt"]))
    held_out = cut_windows(tokenise_text(tokenizer, read_text([text / "eval_last10.txt"])), window=64, limit=512)
    windows = mix_windows([calib], samples=512, window=64, seed=0)[0]
    score = perplexity(load_model(folder, device="cpu"), held_out).perplexity
    print(f"opt-shakespeare-char-0.8m: 512 calibration and 512 evaluation windows of 64 tokens: dense {score:.3f}\n")
    print("| pruned | ratio | bare | compensated |")
    print("|---|---|---|---|")
    with open_statistics(folder, TokenWindows(windows)) as statistics:
        for target in (*TARGETS, "heads"):
            for ratio in RATIOS if target != "heads" else (0.25, 0.5, 0.75):
                cells = []
                for compensate in (False, True):
                    if target == "heads":
                        recipe = load_recipe("corp-heads", (), ratio).model_dump(by_alias=True)
                        recipe["spaces"].pop("mlp")
                        if not compensate:
                            recipe["spaces"]["heads"]["compensation"] = {"method": "none"}
                        chosen = FullRecipe.model_validate(recipe)
                    else:
                        chosen = make_recipe(target, ratio, compensate=compensate)
                    with open_output(folder, chosen, statistics) as out:
                        cells.append(f"{perplexity(load_model(out, device='cpu'), held_out).perplexity:.3f}")
                print(f"| {target} | {ratio:.0%} | {cells[0]} | {cells[1]} |", flush=True)


@torch.inference_mode()
def print_speed(data: Path) -> None:
    """Dense and pruned models take turns, so that a busy moment of the machine hits all of them."""
    folder = data / "vit-tiny-imagenet"
    few = images(folder, choose_images(find_images(data / "imagenet-1per-class", split="calib"), samples=16, seed=0))
    models, flops = {"dense": load_model(folder, device="cpu")}, {}
    with open_statistics(folder, few) as statistics:
        for target, ratio in (("MLP", 0.5), ("Q/K", 0.5), ("joint", 0.3), ("joint", 0.5)):
            recipe = make_recipe(target, ratio, compensate=True)
            job = prepare_plan(Job(Model.open(folder), recipe, statistics))
            flops["dense"], flops[f"{target} {ratio:.0%}"] = job.before.flops, job.output.cost.flops
            with open_output(folder, recipe, statistics) as out:
                models[f"{target} {ratio:.0%}"] = load_model(out, device="cpu")
    print("| model | FLOP ratio | batch 1, ms (p50) | images/s | speed-up | batch 16, images/s | speed-up |")
    print("|---|---|---|---|---|---|---|")
    times: dict[tuple[str, int], list[float]] = {(name, batch): [] for name in models for batch in (1, 16)}
    for batch, rounds in ((1, 60), (16, 15)):
        pixels = few.values[:batch]
        for round_ in range(rounds + 3):
            for name, model in models.items():
                start = time.perf_counter()
                model(pixel_values=pixels)
                if round_ >= 3:
                    times[name, batch].append(time.perf_counter() - start)
    middle = {key: torch.tensor(values).median().item() for key, values in times.items()}
    for name in models:
        one, many = middle[name, 1], middle[name, 16]
        print(
            f"| {name} | {flops[name] / flops['dense']:.3f} | {one * 1e3:.1f} | {1 / one:.1f} | "
            f"{middle['dense', 1] / one:.2f} | {16 / many:.1f} | {middle['dense', 16] / many:.2f} |"
        )


def print_seconds(data: Path) -> None:
    """Print the seconds of calibration, ranking and compensation (CORP's Table 6): the phases of whole runs."""
    vit, opt_folder = data / "vit-tiny-imagenet", data / "opt-shakespeare-char-0.8m"
    stream = tokenise_text(load_tokenizer(opt_folder), read_text([data / "text-tinyshakespeare" / "calib_first90.txt"]))
    model = Model.open(vit)
    files = find_images(data / "imagenet-1per-class", split="calib")
    cases: list[tuple[Path, Samples, tuple[str, ...]]] = [
        (vit, ImageSamples(files, load_processor(vit), tokens=model.image_tokens), tuple(TARGETS)),
        (opt_folder, TokenWindows(mix_windows([stream], samples=512, window=64, seed=0)[0]), ("MLP", "joint")),
    ]
    print("| model | samples | pruned | calibration | ranking | compensation | whole run |")
    print("|---|---|---|---|---|---|---|")
    for folder, samples, targets in cases:
        for target in targets:
            recipe = make_recipe(target, 0.5, compensate=True)
            with tempfile.TemporaryDirectory() as scratch:
                live = LiveSamples(samples, 1, torch.float32)
                stages = prune(prepare_plan(Job(Model.open(folder), recipe, None, live)), Path(scratch) / "out")[
                    "stages"
                ]
            taken = [sum(s["phases"].get(p, 0) for s in stages) for p in ("calibration", "ranking", "compensation")]
            total = sum(stage["seconds"] for stage in stages)
            cells = " | ".join(f"{value:.3f}" for value in (*taken, total))
            print(f"| {folder.name} | {len(samples)} | {target} | {cells} |", flush=True)


TABLES = {
    "accuracy": print_accuracy,
    "sequential": print_sequential,
    "calibration": print_calibration,
    "opt": print_opt,
    "speed": print_speed,
    "seconds": print_seconds,
    "reference": print_reference,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=list(TABLES))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    TABLES[arguments.what](arguments.data)


if __name__ == "__main__":
    main()
