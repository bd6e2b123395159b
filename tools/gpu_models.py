"""Steps of `tools/gpu.py` on whole models: every command on one device, then what both devices made of it.

Each function is called in a process of its own kind (`tools/gpu_running.py`) and gives what is recorded. `subject` is
what `prepare` made of a model: its folder, and the data it is measured and tested on.
"""

import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ckpt_prune as cp
from tools.gpu_running import SkippedError

ROOT = Path(__file__).resolve().parents[1]
TINY = 1e-30
MARK = "pytest.mark.cuda"


@dataclass(frozen=True)
class Subject:
    """A model with its data.

    Attributes:
        name: said in the table.
        model: path of the checkpoint.
        data: options of `calibrate`, `prune` and `recover`.
        held_out: options of `evaluate`.
        proof: options of `export`.
    """

    name: str
    model: str
    data: dict[str, Any]
    held_out: dict[str, Any]
    proof: dict[str, Any]


def of_text(name: str, model: Path, calibration: Path, held_out: Path, samples: int, window: int) -> Subject:
    """A language model."""
    measured = {"text": str(held_out), "window": window, "samples": samples}
    data = {"text": str(calibration), "window": window, "samples": samples}
    return Subject(name, str(model), data, measured, {**measured, "samples": 4})


def of_images(name: str, model: Path, images: Path, labels: Path, samples: int) -> Subject:
    """A vision model."""
    data = {"images": str(images), "labels": str(labels), "samples": samples}
    return Subject(name, str(model), data, {**data, "samples": 8 * samples}, {"images": str(images), "samples": 4})


def environment() -> dict[str, Any]:
    """Return versions of packages, and the GPU."""
    import onnxruntime
    import torch
    import transformers

    there = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "onnxruntime": onnxruntime.__version__,
        "ckpt_prune": cp.__version__,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if there else None,
        "gpu": torch.cuda.get_device_name(0) if there else None,
        "gpu_bytes": torch.cuda.get_device_properties(0).total_memory if there else None,
        "providers": onnxruntime.get_available_providers(),
    }


def demo_texts(folder: str, characters: int) -> dict[str, Any]:
    """Write the texts of the packaged model's demo, shortened: `calibration.txt` and `held_out.txt`."""
    from ckpt_prune.datasets import standard_library

    for held_out, name in ((False, "calibration.txt"), (True, "held_out.txt")):
        (Path(folder) / name).write_text(standard_library.read_corpus(held_out=held_out)[:characters], encoding="utf-8")
    return {}


def suite(seconds: float) -> dict[str, Any]:
    """The tests of the suite that are marked `cuda`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # The other files need not be collected. Versions that are not the suite's own warn of other things.
        files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in file.read_text("utf-8")]
        command = ["-m", "pytest", *files, "-m", "cuda", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        done = subprocess.run(
            [sys.executable, *command, f"--junitxml={report}", f"--basetemp={folder}/tests"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if not report.is_file():
            raise SkippedError(f"pytest cannot run here: {(done.stderr or done.stdout).strip().splitlines()[-1][:200]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "error": [], "skipped": []}
    for case in cases:
        problem = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        outcomes["failed" if problem == "failure" else problem].append(f"{case.get('classname')}.{case.get('name')}")
    bad = outcomes["failed"] + outcomes["error"]
    if bad:
        raise AssertionError(f"{len(bad)} of {len(cases)} tests fail: {', '.join(bad)}\n{done.stdout[-6000:]}")
    return {"passed": len(outcomes["passed"]), "skipped": outcomes["skipped"]}


def calibrate(subject: Subject, device: str, out: str) -> dict[str, Any]:
    """Everything that a recipe can use."""
    cp.calibrate(
        subject.model,
        **subject.data,
        folds=4,
        output=out,
        device=device,
        overwrite=True,
        progress=False,
    )
    return {}


def prune(
    subject: Subject,
    device: str,
    out: str,
    recipe: str,
    *,
    statistics: str | None = None,
    ratio: float | None = None,
    overrides: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Prune by a recipe, by statistics or by the samples themselves."""
    source: dict[str, Any] = {"statistics": statistics} if statistics else subject.data
    result = cp.prune(
        subject.model,
        **source,
        recipe=recipe,
        ratio=ratio,
        evaluate_samples=0,
        overrides=overrides or {},
        output=out,
        device=device,
        overwrite=True,
        progress=False,
    )
    assert result.report is not None
    return {"stages": {stage.name: stage.seconds for stage in result.report.stages}}


def recover(subject: Subject, device: str, out: str, pruned: str, epochs: int) -> dict[str, Any]:
    """Recover a pruned model, which is the same one on both devices."""
    cp.recover(
        pruned,
        dense=subject.model,
        **subject.data,
        epochs=epochs,
        output=out,
        device=device,
        overwrite=True,
        progress=False,
    )
    return {}


def export(subject: Subject, device: str, out: str, model: str) -> dict[str, Any]:
    """Export a pruned model, proved in onnxruntime on this device."""
    import onnxruntime

    if device == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise SkippedError("this onnxruntime has no CUDA provider")
    exported = cp.export(model, **subject.proof, output=out, provider=device, overwrite=True, progress=False)
    assert exported.validation is not None
    proofs = exported.validation.graphs
    for proof in proofs:
        if proof.provider != device:
            raise SkippedError(proof.note or f"it ran on {proof.provider}")
    if not exported.passed:
        failed = [check.detail for proof in proofs for check in proof.checks if check.passed is False]
        raise AssertionError(f"the graph differs: {failed}")
    differences = [case.max_abs for proof in proofs for case in proof.cases if case.max_abs is not None]
    return {"largest_difference": max(differences, default=None), "tolerance": proofs[0].tolerance}


def evaluate(subject: Subject, device: str) -> dict[str, Any]:
    """Measure the dense model on this device, in the dtype that `evaluate` takes there."""
    return _measure(subject, subject.model, device)


def compare(subject: Subject, cpu: str, cuda: str | None, *, measured: bool = True) -> dict[str, Any]:
    """Compare the outputs of two devices: perplexity or accuracy of both, and how far their tensors are apart.

    Args:
        subject: what they were made from.
        cpu: folder that the CPU made.
        cuda: folder that the GPU made; None without one.
        measured: whether they are models, which are measured, both on the CPU.
    """
    folders = {"cpu": cpu} if cuda is None else {"cpu": cpu, "cuda": cuda}
    comparison: dict[str, Any] = {}
    if measured:
        comparison["measured"] = {device: _measure(subject, folder, "cpu") for device, folder in folders.items()}
    if cuda is not None:
        comparison["difference"] = differences(Path(cpu), Path(cuda))
        kept = [_read_kept(Path(folder)) for folder in folders.values()] if measured else []
        if any(kept):  # a mask drops none
            comparison["same_units"] = kept[0] == kept[1]
    return comparison


def differences(a: Path, b: Path) -> dict[str, Any]:
    """How far the tensors of two folders are apart.

    Returns:
        relative: max |x − y| / max |x|, the largest of all tensors, None where none can be compared; `of`: that tensor;
        `other_shape`, `only_in_one`: names of those that cannot be compared; zeros: share of entries that are zero on
        one side alone.
    """
    ours, theirs = _tensors(a), _tensors(b)
    relative, of, apart, entries = None, None, 0, 0
    strange = []
    for name in sorted(ours.keys() & theirs.keys()):
        x, y = ours[name].double(), theirs[name].double()
        if x.shape != y.shape:
            strange.append(name)
        elif x.numel():
            far = float((x - y).abs().max()) / max(float(x.abs().max()), TINY)
            apart, entries = apart + int(((x == 0) != (y == 0)).sum()), entries + x.numel()
            # A NaN is farther than anything.
            if relative is None or not far <= relative:
                relative, of = far, name
    return {
        "relative": relative,
        "of": of,
        "zeros": apart / entries if entries else None,
        "other_shape": strange,
        "only_in_one": sorted(ours.keys() ^ theirs.keys()),
    }


def _measure(subject: Subject, model: str, device: str) -> dict[str, Any]:
    figures = cp.evaluate(model, **subject.held_out, device=device, progress=False).data()
    return {key: figures[key] for key in ("perplexity", "top1") if key in figures}


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        f"{file.stem}:{name}" if (folder / "statistics.json").exists() else name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _read_kept(folder: Path) -> list[Any]:
    report = json.loads((folder / "ckpt_prune.json").read_text(encoding="utf-8"))
    return [(site["block"], site["space"], site["kept"]) for site in report["sites"]]
