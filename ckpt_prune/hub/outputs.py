"""An output's way to the Hub: what it may replace there, and the card it gets."""

from typing import Any

from ckpt_prune.checkpoint.files import MOST_BYTES, read_input
from ckpt_prune.checkpoint.folder_kinds import EXPORT_KIND, OUTPUT_KIND, FolderKind
from ckpt_prune.checkpoint.hub_files import fetch_hub_file
from ckpt_prune.checkpoint.json_files import parse_json_object
from ckpt_prune.common.errors import UserError
from ckpt_prune.common.filenames import GRAPH_FOLDER, GRAPH_RECORD
from ckpt_prune.compressing.card import QUANTISED_FROM, quantised_metadata
from ckpt_prune.compressing.record import QUANTISATION_KIND, read_quantised
from ckpt_prune.hub.hub_repo import Place
from ckpt_prune.hub.measured import read_measured
from ckpt_prune.hub.outputs import shared_card
from ckpt_prune.options import PushOptions
from ckpt_prune.report.metadata import PRUNED, metadata
from ckpt_prune.report.reading import report_of
from ckpt_prune.report.source_card import CARD


def find_removed(place: Place, own: OutputFiles, *, overwrite: bool) -> tuple[str, ...]:
    """Files of a repository that go with a push, which are some that this tool pushed before.

    Raises:
        UserError: the repository is not empty, and it was not said that it may be replaced; or what is there is not
            this tool's.
    """
    if place.empty:
        return ()
    if not overwrite:
        raise UserError(f"{place.repo} is on the Hub and not empty: choose another name or say --overwrite")
    kind = next((kind for kind in (OUTPUT_KIND, QUANTISATION_KIND) if kind.record in place.files), None)
    if kind is None:
        raise UserError(
            f"{place.repo} holds what this tool did not push (it has no {own.kind.record}), so it is never replaced; "
            "choose another name"
        )
    theirs = set(_pushed(place, kind, kind.record))
    graph = f"{GRAPH_FOLDER}/{GRAPH_RECORD}"
    if graph in place.files:
        theirs |= {f"{GRAPH_FOLDER}/{name}" for name in _pushed(place, EXPORT_KIND, graph)}
    lost = sorted((place.files & set(own.files)) - theirs)
    if lost:
        raise UserError(
            f"{lost[0]} in {place.repo} was not pushed with the output that is there, and the new one needs its name; "
            "move it away or choose another name"
        )
    return tuple(sorted((place.files & theirs) - set(own.files)))


def _pushed(place: Place, kind: FolderKind, record: str) -> frozenset[str]:
    """What a record in a repository says that this tool wrote beside it."""
    file = fetch_hub_file(place.repo, record, place.commit, most=MOST_BYTES)
    try:
        return kind.names(parse_json_object(read_input(file)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} of {place.repo} is damaged, so it is not replaced; choose another name") from error


def _metadata(own: OutputFiles) -> dict[str, Any]:
    """What the card of such an output tells the Hub."""
    if own.kind is QUANTISATION_KIND:
        return quantised_metadata(read_quantised(own.folder))
    report = report_of(own.folder)
    assert report is not None
    return metadata(report)


def _relation(own: OutputFiles) -> str:
    return QUANTISED_FROM if own.kind is QUANTISATION_KIND else PRUNED


def make_card(own: OutputFiles, repo: str, options: PushOptions) -> bytes:
    """README.md for the Hub.

    Raises:
        UserError: it cannot be read, or the figures for it cannot.
    """
    name = own.folder.resolve().name
    figures = [each for given in options.evaluation for each in read_measured(given, name)]
    path = own.folder / CARD
    try:
        text = read_input(path).decode("utf-8") if CARD in own.files else ""
        return shared_card(
            text,
            _metadata(own),
            repo,
            _relation(own),
            base_model=options.base_model,
            license_id=options.license,
            figures=figures,
        ).encode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no model card ({' '.join(str(error).split())}); mend or remove it") from error
