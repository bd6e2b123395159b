"""Time of every shipped recipe as a multiple of `ridge`: the `time` that recipes state.

    PYTHONPATH=. OMP_NUM_THREADS=1 python tools/time_recipes.py [--samples 128] [--recipes NAME ...]

The time is that of the processor in one process, import excluded, after one run to warm up: other work on the machine
does not count. The model is the smallest llama of ../shared/data; recipes that prune q and k run on the ViT there
beside `ridge` on the same images.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from ckpt_prune import prune
from ckpt_prune.common.errors import UserError
from ckpt_prune.recipe.shipped import shipped_recipes
from ckpt_prune.stages.recipe_files import load_recipe

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LLAMA = {"model": str(DATA / "llama-stories260k"), "text": DATA / "text-tinystories" / "calib_bos.txt"}
VIT = {"model": str(DATA / "vit-tiny-imagenet"), "images": DATA / "imagenet-1per-class" / "images"}
BESIDE = "ridge"


def seconds(recipe: str, where: dict[str, Any], samples: int) -> float:
    """Processor time of one prune."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        output = Path(folder) / "out"
        prune(recipe=recipe, samples=samples, output=output, device="cpu", evaluate_samples=0, progress=False, **where)
        return time.process_time() - start


def main() -> None:
    """Time them all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--recipes", nargs="+", default=list(shipped_recipes()))
    given = parser.parse_args()
    on_images = [name for name in given.recipes if "qk" in load_recipe(name).spaces]
    for names, where in (([n for n in given.recipes if n not in on_images], LLAMA), (on_images, VIT)):
        if not names:
            continue
        seconds(BESIDE, where, given.samples)
        one = seconds(BESIDE, where, given.samples)
        print(f"{BESIDE} on {Path(str(where['model'])).name}: {one:.2f} s", flush=True)
        for name in names:
            try:
                taken = seconds(name, where, given.samples)
            except UserError as error:  # 4:8 does not divide the widths of the smallest llama
                print(f"{name:<40} {error}", flush=True)
                continue
            print(f"{name:<40} {taken:8.2f} s {taken / one:8.2f}", flush=True)


if __name__ == "__main__":
    main()
