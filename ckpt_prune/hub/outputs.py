"""Outputs on their way to the Hub: their files, the files that they replace there, and the model card."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_prune.checkpoint.files import MOST_BYTES, Stamp, find_changed, read_input, stamp_of
from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND, OUTPUT_KIND, FolderKind, find_foreign
from ckpt_prune.checkpoint.hub_files import fetch_hub_file
from ckpt_prune.checkpoint.journal import refuse_unfinished
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.checkpoint.model_folder import check_output_folder
from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD, REPORT
from ckpt_prune.hub.figures import figures_table, read_figures, to_model_index
from ckpt_prune.hub.repository import Repository
from ckpt_prune.options.commands import PushOptions
from ckpt_prune.show.model_card import CARD, PRUNED, front_matter, metadata, split_card
from ckpt_prune.stages.quantize.records import QUANTISATION_KIND, QUANTISED_FROM, card_metadata, read_record
from ckpt_prune.stages.report import find_report

_PATH = '"PATH"'
"""Stands in a card for the folder; on the Hub it becomes the repository."""


@dataclass(frozen=True)
class OutputFiles:
    """Files of an output that this tool wrote.

    Attributes:
        files: names below the folder and in the repository, with slashes, sorted.
        left_out: other paths in the folder.
        stamps: of the files, by name, when they were listed.
    """

    folder: Path
    kind: FolderKind
    files: tuple[str, ...]
    left_out: tuple[str, ...]
    stamps: Mapping[str, Stamp]

    def bytes(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def check_unchanged(self) -> None:
        """Refuse to push files that changed since they were listed."""
        if (name := find_changed(self.folder, self.stamps, self.stamps)) is not None:
            raise UserError(f"{self.folder / name} changed while it was verified: push again")


def find_output_files(folder: Path) -> OutputFiles:
    """List the files of an output, with those of its graph; refuse links, and folders that are no finished outputs."""
    refuse_unfinished(check_output_folder(folder))
    kind = next((kind for kind in (OUTPUT_KIND, QUANTISATION_KIND) if (folder / kind.record).is_file()), None)
    if kind is None:
        raise UserError(f"{folder} has no {REPORT}; give a folder that `prune`, `recover` or `quantize` wrote")
    written = kind.list_written(folder)
    if (folder / GRAPH_FOLDER / GRAPH_RECORD).is_file():
        written |= {f"{GRAPH_FOLDER}/{name}" for name in EXPORT_KIND.list_written(folder / GRAPH_FOLDER)}
    files = sorted(name for name in written if (folder / name).is_file())
    for name in files:
        path = folder / name
        if any((folder / each).is_symlink() for each in (Path(name), *Path(name).parents[:-1])):
            raise UserError(f"{path} is a link, and what it leads to would be shared; put the file there")
    stamps = {name: stamp_of(folder / name) for name in files}
    return OutputFiles(folder, kind, tuple(files), tuple(find_foreign(folder, written)), stamps)


def find_removed(place: Repository, output: OutputFiles, *, overwrite: bool) -> tuple[str, ...]:
    """Return the files of a repository that a push removes, all of them pushed by this tool before.

    Raises:
        UserError: the repository is not empty and `overwrite` is not given, or it holds files that are not this tool's.
    """
    if place.empty:
        return ()
    if not overwrite:
        raise UserError(f"{place.repo} is on the Hub and not empty: choose another name or say --overwrite")
    kind = next((kind for kind in (OUTPUT_KIND, QUANTISATION_KIND) if kind.record in place.files), None)
    if kind is None:
        raise UserError(
            f"{place.repo} holds what this tool did not push (it has no {output.kind.record}), so it is never "
            "replaced; choose another name"
        )
    pushed = set(_read_pushed(place, kind, kind.record))
    graph = f"{GRAPH_FOLDER}/{GRAPH_RECORD}"
    if graph in place.files:
        pushed |= {f"{GRAPH_FOLDER}/{name}" for name in _read_pushed(place, EXPORT_KIND, graph)}
    lost = sorted((place.files & set(output.files)) - pushed)
    if lost:
        raise UserError(
            f"{lost[0]} in {place.repo} was not pushed with the output that is there, and the new one needs its name; "
            "move it away or choose another name"
        )
    return tuple(sorted((place.files & pushed) - set(output.files)))


def _read_pushed(place: Repository, kind: FolderKind, record: str) -> frozenset[str]:
    """Return the names of files that a record in a repository lists as this tool's."""
    file = fetch_hub_file(place.repo, record, place.commit, most=MOST_BYTES)
    try:
        return kind.names(parse_json_object(read_input(file)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} of {place.repo} is damaged, so it is not replaced; choose another name") from error


def make_card(output: OutputFiles, repo: str, options: PushOptions) -> bytes:
    """Make README.md for the Hub from that of the output, which its user may have changed: its text stays.

    Args:
        output: that is pushed.
        repo: that the card's code loads the model from.
        options: base model, licence and figures, which replace those of the card.
    """
    name = output.folder.resolve().name
    figures = [figure for file in options.evaluation for figure in read_figures(file, name)]
    path = output.folder / CARD
    try:
        values, body = split_card(read_input(path).decode("utf-8") if CARD in output.files else "")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no model card ({one_line(error)}); mend or remove it") from error
    described, relation = _metadata(output)
    values = described | values
    if options.base_model is not None:
        values |= {"base_model": options.base_model, "base_model_relation": relation}
    if options.license is not None:
        values["license"] = options.license
    if figures:
        values["model-index"] = to_model_index(repo.rpartition("/")[2], values.get("pipeline_tag"), figures)
        body = "\n".join([body.rstrip("\n"), "", *figures_table(figures), ""])
    values["tags"] = values.pop("tags")  # tags stand last in the cards of this tool
    return (front_matter(values) + body.replace(_PATH, f'"{repo}"')).encode()


def _metadata(output: OutputFiles) -> tuple[dict[str, Any], str]:
    """Return the metadata that an output's card has by itself, and its relation to the base model."""
    if output.kind is QUANTISATION_KIND:
        return card_metadata(read_record(output.folder)), QUANTISED_FROM
    report = find_report(output.folder)
    assert report is not None
    return metadata(report), PRUNED
