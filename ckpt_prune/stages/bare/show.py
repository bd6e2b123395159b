"""Sections of the stage `bare`."""

from ckpt_prune.show.section import Section, make_tables, number_under
from ckpt_prune.stages.bare.records import BareBlock, BareRecord
from ckpt_prune.stages.report import Report


def sections(report: Report) -> list[Section]:
    """Show the blocks without attention, the columns that their MLPs keep, and the error before and after training."""
    bare = report.bare
    return [] if bare is None else [_show_blocks(bare)]


def _show_blocks(bare: BareRecord) -> Section:
    gone = {each.block for each in bare.replaced}
    signs = "".join("." if block in gone else "#" for block in range(bare.blocks))
    target, saved = bare.flops
    sentence = f"{saved:,} FLOPs are saved, {saved - target:,} more than asked for; {bare.trained} blocks were trained."

    def alone(each: BareBlock) -> str | None:
        return None if not bare.tried else f"{bare.tried[each.block]:.4g}"

    tables = make_tables(
        "",
        bare.replaced,
        {
            "replaced, in order": lambda each: f"block {each.block}",
            "columns": lambda each: str(len(each.columns)),
            "KL alone": alone,
            "error before": number_under("error_before"),
            "after": number_under("error_after"),
        },
    )
    return Section(
        "Blocks without attention",
        [sentence],
        ["Errors are mean squares of what the head reads, on images that were not trained on."],
        drawing=f"attention of blocks {signs} {bare.blocks - len(gone)} of {bare.blocks} stay (. is gone)",
        tables=tables,
    )
