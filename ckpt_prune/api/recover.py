"""`ckpt_prune.recover`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_prune.api.function import takes
from ckpt_prune.checkpoint.staging import check_output, refuse_overlap
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.progress import Notices
from ckpt_prune.measure.samples.text_files import check_texts
from ckpt_prune.model.supported import check_supported
from ckpt_prune.options.commands import RecoverOptions
from ckpt_prune.options.data import has_data
from ckpt_prune.options.option import flags_of, select_options
from ckpt_prune.options.training import LoraSettings, RecoverySettings
from ckpt_prune.parallel.group import process_group
from ckpt_prune.runner.resuming import resumable
from ckpt_prune.stages.recovery.keys import recover_recipe

if TYPE_CHECKING:
    from ckpt_prune.stages.report import Report


@dataclass(frozen=True)
class Recovered:
    """The output of `recover`, the report in its ckpt_prune.json, and the notices of the run."""

    path: Path
    report: "Report"
    notices: tuple[str, ...] = field(default=(), repr=False)

    def data(self) -> dict[str, Any]:
        return self.report.data()


@takes(RecoverOptions)
def recover(options: RecoverOptions) -> Recovered:
    """Train what PRUNED has left until each of its blocks does what the dense MODEL's does, and write it as OUT.

    PRUNED is an output of this tool of any kind, or a model that another tool pruned, of the same depth and hidden size
    as MODEL. Shapes and dtypes stay, zeros stay zeros, and everything but the linear modules of the blocks stays as it
    is. No labels are used, and one dense and one pruned block are in memory at a time (LaCo: Layer-wise
    Compensation for Pruned Large Language Models).

    A share of the samples is not trained on. It decides, block by block, which epoch's weights are kept: the old ones
    if none is better.

    With --method scales every linear module of the blocks gets a factor for each input and each output, fitted to what
    the dense model predicts (not to its hidden states), and multiplied into the weights. These are few numbers: 32
    windows and one epoch, in steps of one sample, are enough. One block is in memory at a time.

    With --method lora adapters are trained on the linear modules of all blocks at once, by peft, on the next token (or
    on the images' classes), and merged; the whole model is in memory. Zeros are zero again after merging, and the
    weights of the epoch that is best on held-out samples are kept as they are stored, if any is better. With
    --keep-adapter that epoch's adapter is also kept as it is, for PRUNED in peft.

    The output appears only when it is complete. An interrupted run leaves OUT.partial, which --resume continues with
    the next block, or with the scales or adapters that are fitted; what was half fitted is fitted again.
    """
    settings, lora = select_options(options, RecoverySettings), select_options(options, LoraSettings)
    out = options.output
    # Refuse what can be refused before torch is imported.
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
    if not has_data(options):
        raise UserError("recover needs --text FILE, --images DIR for a vision model, or --audio DIR")
    for each in filter(None, (options.pruned, options.dense)):
        check_supported(each, options.family, options.part)
    check_texts(options.text)

    from ckpt_prune.runner.read_recovery import read_recovery
    from ckpt_prune.runner.run_job import run_job

    say = Notices()
    job = read_recovery(options, recover_recipe(settings, lora, options.seed), say)
    with resumable(out, say):
        done = run_job(job, out, resume=options.resume, overwrite=options.overwrite, announce=say)
    return Recovered(out, done.report, tuple(say.lines))


def _check_whole(options: RecoverOptions, settings: RecoverySettings) -> None:
    """Refuse what only LaCo can do."""
    lora = settings.method == "lora"
    why = "lora trains the pruned model by itself, in one go"
    if not lora:
        why = "scales are of linear modules, fitted to all blocks at once"
    for given, flag in (
        (lora and options.dense, "--dense"),
        (lora and options.part, "--part"),
        (options.perplexity_after, "--perplexity-after"),
        (settings.norms, "--norms"),
        (settings.teacher != "dense", f"--teacher {settings.teacher}"),
    ):
        if given:
            raise UserError(f"{flag} is for --method laco: {why}")


def _refuse_adapters(given: LoraSettings) -> None:
    for name, own in LoraSettings.model_fields.items():
        if getattr(given, name) != own.default:
            raise UserError(f"{flags_of(name, own)[-1]} is for --method lora")
