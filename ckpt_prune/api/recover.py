"""`ckpt_prune.recover`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_prune.api.resuming import resumable
from ckpt_prune.api.types import AnyModel, AnyPath, Bos, Choose, ComputeDtype, Texts
from ckpt_prune.checkpoint.staging import check_output, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices, show_progress
from ckpt_prune.job.names import Part
from ckpt_prune.job.training_settings import LoraSettings, Method, RecoverySettings, Teacher
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options import PartName, RecoverOptions, checked, has_data
from ckpt_prune.parallel.group import process_group
from ckpt_prune.stages.recovery.stage import recover_recipe

if TYPE_CHECKING:
    from ckpt_prune.job.report import Report


@dataclass(frozen=True)
class Recovered:
    """What became of a recovery.

    Attributes:
        path: the output.
        report: as in the output's ckpt_prune.json.
        notices: lines that were said while it ran.
    """

    path: Path
    report: "Report"
    notices: tuple[str, ...] = field(default=(), repr=False)

    def data(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return self.report.data()


def recover(
    pruned: AnyModel,
    *,
    dense: AnyModel | None = None,
    output: AnyPath,
    text: Texts = (),
    images: AnyPath | None = None,
    labels: AnyPath | None = None,
    max_corrupt: float = 0.05,
    audio: AnyPath | None = None,
    samples: int | None = None,
    window: int | None = None,
    seed: int = 0,
    choose: Choose = "random",
    bos: Bos = "auto",
    compute_dtype: ComputeDtype = "auto",
    epochs: int | None = None,
    lr: float | None = None,
    batch: int | None = None,
    accumulate: int = 1,
    schedule: Literal["cosine", "constant"] = "cosine",
    only: Part | None = None,
    layers: str | None = None,
    norms: bool = False,
    teacher: Teacher = "dense",
    held_out: float | None = None,
    patience: int = 3,
    method: Method = "laco",
    rank: int = 8,
    alpha: float = 16.0,
    seconds: float | None = None,
    state_memory: float = 8.0,
    perplexity_after: str | Sequence[int] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    family: AnyPath | None = None,
    part: PartName | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> Recovered:
    """Train what a pruned model has left, block by block, as `ckpt-prune recover` does (LaCo).

    Args:
        pruned: an output of this tool, or a model that another tool pruned: a folder, a Hub id or a result.
        dense: the model it was made from; lora needs none.
        output: the folder to write; it appears only when it is complete.
        text: files to recover a language model on.
        images: folder of images to recover a vision model on.
        labels: CSV with a column file and perhaps split (calib).
        max_corrupt: share of the images that may fail to decode.
        audio: folder of audio to run an encoder of speech on.
        samples: windows, or images; None for 2048, of scales for 32, or all there are.
        window: tokens per window; None for the model's context, at most 2048.
        seed: of the choice and the order of samples.
        choose: random samples, or the first ones.
        bos: begin-of-sequence token before the text.
        compute_dtype: in which blocks run; float32 (as is auto, but of scales) or bfloat16.
        epochs: passes over the samples, of laco for each block, at most; None for 10, of scales 1.
        lr: learning rate of Adam; None for the paper's, scaled by the hidden size.
        batch: samples per optimiser step; None for 4, of scales 1.
        accumulate: parts, at most, that a batch goes through the block in.
        schedule: of the learning rate over a block's steps.
        only: train these linear modules alone.
        layers: recover blocks A to B - 1 only, as "A:B".
        norms: train what blocks have beside linear modules, too.
        teacher: the stream that the dense block is given: the dense model's or the pruned one's.
        held_out: share of the samples that decides which epoch's weights are kept, if any; 0 keeps the last epoch's;
            None for 0.1, of scales 0.
        patience: epochs without less error on them before a block is left.
        method: laco: block by block towards the dense model's hidden states; scales: of linear modules, towards its
            predictions; lora: adapters on the whole model, merged.
        rank: of lora's adapters.
        alpha: what they are multiplied by, times rank.
        seconds: of lora: end training after so many seconds.
        state_memory: GiB of hidden states that are kept in memory; more of them are memory-mapped beside the output.
        perplexity_after: numbers of blocks, or "all": perplexities with only the first so many blocks recovered.
        resume: continue an interrupted run of the same job.
        overwrite: replace an existing output.
        family: file of a description of the model's family, where this version has none.
        part: which part of models that are made of several: text, vision or encoder.
        trust_remote_code: accept a model that asks for code of its own.
        device: auto, cpu, cuda or cuda:i.
        progress: show bars and notices on stderr.

    Raises:
        UserError: bad input, or two models that do not belong together; nothing is left behind.
    """
    given = locals()
    options, settings, lora = (
        checked(RecoverOptions, given),
        checked(RecoverySettings, given),
        checked(LoraSettings, given),
    )
    out = options.output
    # Before torch is imported, what can be told without it.
    if settings.method != "laco":
        if process_group().size > 1:
            raise UserError(f"--method {settings.method} trains in one process: start it without torchrun")
        _check_whole(options, settings)
    if settings.method != "lora":
        _refuse_adapters(lora)
    if settings.method != "lora" and options.dense is None:
        raise UserError("recover needs --dense MODEL, the model that PRUNED was made from (--method lora does not)")
    if options.dense is not None and Path(options.dense).is_dir():
        refuse_overlap(Path(options.dense), out)
    if Path(options.pruned).is_dir():
        pruned_folder = Path(options.pruned)
        process_group().on_first(
            lambda: check_output(pruned_folder, out, resume=options.resume, overwrite=options.overwrite)
        )
    if not has_data(options, options):
        raise UserError("recover needs --text FILE, --images DIR for a vision model, or --audio DIR")
    for each in filter(None, (options.pruned, options.dense)):
        check_supported(each, options.family, options.part)
    check_texts(options.text)

    from ckpt_prune.runner.read_recovery import read_recovery
    from ckpt_prune.runner.run_job import run_job

    with show_progress(progress):
        say = Notices()
        job = read_recovery(options, recover_recipe(settings, lora, options.seed), say)
        with resumable(out, say):
            done = run_job(job, out, resume=options.resume, overwrite=options.overwrite, announce=say)
        return Recovered(out, done.report, tuple(say.lines))


def _check_whole(options: RecoverOptions, settings: RecoverySettings) -> None:
    """What LaCo alone can do."""
    lora = settings.method == "lora"
    for given, said in (
        (lora and options.dense, "--dense"),
        (lora and options.part, "--part"),
        (options.perplexity_after, "--perplexity-after"),
        (settings.norms, "--norms"),
        (settings.teacher != "dense", f"--teacher {settings.teacher}"),
    ):
        if given:
            if not lora:
                raise UserError(
                    f"{said} is for --method laco: scales are of linear modules, fitted to all blocks at once"
                )
            raise UserError(f"{said} is for --method laco: lora trains the pruned model by itself, in one go")


def _refuse_adapters(given: LoraSettings) -> None:
    """What LoRA alone can do."""
    for name in ("rank", "alpha", "seconds"):
        if getattr(given, name) != LoraSettings.model_fields[name].default:
            raise UserError(f"--{name} is for --method lora")
